"""Flex attention: attention whose scores a small function shapes, with gradients for all that it captures.

Letters: B batch, H query heads, M queries, N keys, D and E the head sizes of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask

from . import _attention_transforms as transforms
from . import _sharding
from ._arguments import checked
from ._known import known
from ._load import direct
from ._sharding import ContextParallel, is_dtensor
from ._tracing.cache import trace
from ._tracing.thread_state import tracing_state
from ._transforms import is_transformed
from .nested import Packed
from .score_mod import ScoreMod, check_kernel_size, split_scalars

__all__ = ["flex_attention"]

# The block size of PyTorch's stand-in for no mask, whose one block covers any lengths.
_ANY_LENGTH = 1 << 30

# PyTorch's stand-in for the mask_mod of a sliced mask.
_SLICED = getattr(torch.nn.attention.flex_attention, "_sliced_mask_mod_error", None)

_Mod = tuple[str, list[Tensor], list[float], list[int]]
_Mask = tuple[_Mod, list[Tensor], list[int]]
NO_MASK: _Mask = (("", [], [], []), [], [])

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Those that PyTorch's function has not."""

        inplace: bool
        deterministic: bool | None
        dropout_p: float
        batch_invariant: bool
        context_parallel: ContextParallel | None


def _arguments(mod: Callable[..., Any] | ScoreMod | None, kind: str, device: torch.device) -> _Mod:
    """What the op takes of a function or of a traced one."""
    if mod is None:
        return "", [], [], []
    text: str
    buffers: Sequence[Tensor]
    scalars: Sequence[int | float | bool]
    if isinstance(mod, ScoreMod):  # goes straight through, also where torch.compile traces this
        if mod.kind != kind:
            raise TypeError(f"trace_{kind}: the ScoreMod must be a {kind}, but got a {mod.kind}")
        text, buffers, scalars = mod.text, mod.buffers, mod.scalars
    elif torch.compiler.is_compiling():
        from ._tracing.compiled import trace_within

        text, buffers, scalars = trace_within(mod, kind, device)
    else:
        text, buffers, scalars = trace(mod, kind, device)
    # One line: TorchInductor writes the arguments of GPU programs into comments that end with the line.
    return text.replace("\n", ";"), list(buffers), *split_scalars(scalars)


def _lengths(query: Tensor, key: Tensor) -> tuple[int, int]:
    if torch.jit.is_tracing():  # there a size is a tensor, and a comparison a part of the program
        with tracing_state(None):
            return query.size(2), key.size(2)
    return query.size(2), key.size(2)


def _mask_arguments(block_mask: BlockMask | None, query: Tensor, key: Tensor) -> _Mask:
    """What the op takes of a block mask: its mask_mod, the lists by query block, the block size. PyTorch's lists by
    key block (q_num_blocks, ...) are not read."""
    if block_mask is None:
        return NO_MASK
    if block_mask.mask_mod is _SLICED:
        raise ValueError(
            "flex_attention: block_mask must have a mask_mod, but got a slice of another block mask, which has none: "
            "set one for the indices of the slice, such as part.mask_mod = lambda b, h, q, kv: whole.mask_mod(b, h, "
            "q + first * block, kv), and part.seq_lengths = (query.size(2), key.size(2))"
        )
    block_size = block_mask.BLOCK_SIZE
    size = (block_size, block_size) if isinstance(block_size, int) else (block_size[0], block_size[1])
    if size != (_ANY_LENGTH, _ANY_LENGTH) and query.dim() == key.dim() == 4:
        lengths = (block_mask.seq_lengths[0], block_mask.seq_lengths[1])
        M, N = _lengths(query, key)
        if lengths != (M, N):
            raise ValueError(
                f"flex_attention: block_mask must be made for {M} queries and {N} keys, but got "
                f"one for {lengths[0]} and {lengths[1]}: make it anew (fusegrad.create_block_mask compiles nothing for "
                f"other lengths), or set block_mask.seq_lengths = ({M}, {N}) where its lists and its mask_mod are "
                f"right for them, also after block_mask._adjust({M}, {N}), which alone leaves lengths of whole blocks"
            )

    def lists(*tensors: Tensor | None) -> list[Tensor]:
        """num_blocks and indices of the partial blocks, then those of the full ones, as far as they are there."""
        return [t for t in tensors if t is not None]

    m = block_mask
    kv_blocks = lists(m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices)
    mask_mod = None if m.mask_mod is noop_mask else m.mask_mod
    return _arguments(mask_mod, "mask_mod", query.device), kv_blocks, list(size)


def _check_kernel(score: _Mod, query: Tensor, key: Tensor, value: Tensor) -> None:
    """On a GPU: TraceError where the kernels of the score_mod would be too large."""
    if score[0] and query.is_cuda:
        wants = tuple([b.requires_grad for b in score[1]])
        training = torch.is_grad_enabled() and (any(wants) or any(t.requires_grad for t in (query, key, value)))
        check_kernel_size(score[0], wants if training else None)


def _mods(
    score_mod: Callable[..., Any] | ScoreMod | None,
    block_mask: BlockMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Any, ...] | None:
    """What the op takes of a plain call's functions, see known()."""
    if block_mask is not None and type(block_mask) is not BlockMask:
        return None
    score = _arguments(score_mod, "score_mod", query.device)
    mask_mod, kv_blocks, block_size = _mask_arguments(block_mask, query, key)
    _check_kernel(score, query, key, value)
    return (*score, *mask_mod, kv_blocks, block_size)


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest,
    **options: Unpack[_Options],
) -> tuple[Tensor, AuxOutput]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: Mapping[str, Any] | None = None,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: Literal[True],
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool,
    kernel_options: Mapping[str, Any] | None = None,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@known(_mods)
@checked
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    inplace: bool = False,
    deterministic: bool | None = None,
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
    context_parallel: ContextParallel | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention with scores that a function changes and pairs that another one masks.

    ``s = score_mod(scale * query @ key.T)``, ``out = softmax(s) @ value`` over the keys that take part. A drop-in for
    ``torch.nn.attention.flex_attention.flex_attention`` that needs no ``torch.compile``, keeps its memory linear in the
    lengths, and gives gradients to everything that the score_mod captures. See docs/flex_attention.md.

    Args:
        query: ``[B, H, M, D]``, any strides; float32, bfloat16 or float16, on the CPU float64 too. On CUDA D is
            at most 576 and E at most 512.
        key: ``[B or 1, Hkv, N, D]``, of the query's dtype.
        value: ``[B or 1, Hkv, N, E]``. All three may be nested tensors ``[B, H, j, D]`` of layout ``torch.jagged``:
            then each sequence attends to itself alone, unless a block_mask for the packed sequences says otherwise
            (:func:`fusegrad.varlen_mask` of ``query.offsets()``), the score_mod sees the sequence's number as b and
            places within it, and the results are nested as the query is.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, or what :func:`fusegrad.trace_score_mod` made of it. It is
            traced once; tensors that it reads and that require grad get gradients.
        block_mask: PyTorch's ``BlockMask``; its ``mask_mod`` may be a :class:`fusegrad.ScoreMod` too. Its lists by key
            block (``q_num_blocks``, ...) may be there and are not read.
        scale: ``1 / sqrt(D)`` by default.
        enable_gqa: lets H be a multiple of Hkv.
        return_lse: also returns lse; what PyTorch had before ``return_aux``.
        kernel_options: for PyTorch's GPU kernels; without effect here.
        return_aux: ``AuxRequest(lse=True, max_scores=True)``: also returns lse, log(sum(exp(s))), and the largest s,
            each ``[B, H, M]``, float32 (float64 for float64), differentiable, -inf where no key takes part.
        inplace: permission for the backward to write the gradients of query, key and value over them, where all three
            get one and the graph is not kept.
        deterministic: on CUDA: whether gradients must be the same bits in every run, mostly at the price of another
            pass over the scores; None: as ``torch.use_deterministic_algorithms`` says. The CPU's always are.
        dropout_p: of each pair, the probability that its weight becomes 0; the other weights are divided by
            ``1 - dropout_p``. At least 0 and less than 1, taken to the nearest multiple of 2^-40 and to at most
            1 - 2^-15; lse and max_scores are those without. Pass 0 where a model does not train. A call draws one
            number of PyTorch's generator of the query's device, so that ``torch.manual_seed`` gives the same pairs
            again.
        batch_invariant: whether out and lse of a query must have the same bits whatever other queries, heads and
            batches the call has, and however many keys that take no part for the query: alone over a cache, in a chunk,
            in a batch. A key's place in ``key`` counts. See docs/flex_attention.md.
        context_parallel: the sequence is spread over processes: query, key and value are this one's part, mods see
            positions of the whole. See :class:`fusegrad.ContextParallel` and docs/distributed.md. DTensors say by
            themselves how they are sharded.

    Returns:
        ``[B, H, M, E]`` in the query's dtype, its dimensions in the order of the query's strides; 0 where no key takes
        part. With it lse, or an ``AuxOutput``.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``flex_attention: what must hold, but got <value>``.
        TraceError: where a function cannot be traced, with its line, or is too large for the language or, on a GPU, for
            a kernel, with its size and the limit.
        IndexError: where a captured tensor is read out of range by a pair that takes part, on the CPU. On CUDA the read
            is nan (0 of integers, false of bools), and so are the row and its gradients.
    """
    if return_lse and return_aux is not None:
        raise ValueError(
            "flex_attention: return_lse must not come together with return_aux, but got both: take "
            "return_aux=AuxRequest(lse=True)"
        )
    if query.is_nested or key.is_nested or value.is_nested:
        if context_parallel is not None:
            raise ValueError("flex_attention: context_parallel must come with dense tensors, but got nested ones")
        if batch_invariant:
            raise NotImplementedError(
                "flex_attention: batch_invariant must come with dense tensors, but got nested ones, of which a key's "
                "place in memory depends on the sequences before it: pad them to one length"
            )
        return _nested(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
            return_aux=return_aux, inplace=inplace, deterministic=deterministic, dropout_p=dropout_p,
        )  # fmt: skip
    if context_parallel is not None and not torch.compiler.is_compiling() and is_transformed((query, key, value)):
        raise NotImplementedError(
            "flex_attention: context_parallel must not come with forward mode and torch.func transforms, but does"
        )
    if context_parallel is not None or is_dtensor(query, key, value):
        if batch_invariant:
            raise NotImplementedError(
                "flex_attention: batch_invariant must come with plain tensors of one process, but got "
                + ("context_parallel" if context_parallel is not None else "DTensors")
            )
        out, lse, max_scores = _sharding.attend(
            query, key, value, score_mod, block_mask, context=context_parallel, scale=scale, enable_gqa=enable_gqa,
            max_scores=return_aux is not None and return_aux.max_scores, deterministic=deterministic,
            dropout_p=dropout_p,
        )  # fmt: skip
        return returned(out, lse, max_scores, return_lse, return_aux)
    score = _arguments(score_mod, "score_mod", query.device)
    mask_mod, kv_blocks, block_size = _mask_arguments(block_mask, query, key)
    maxima = return_aux is not None and return_aux.max_scores
    out, lse, max_scores = attend_traced(
        query, key, value, score, (mask_mod, kv_blocks, block_size), scale, enable_gqa, inplace=inplace,
        deterministic=deterministic, maxima=maxima, dropout_p=dropout_p, batch_invariant=batch_invariant,
    )  # fmt: skip
    return returned(out, lse, max_scores, return_lse, return_aux)


_OP_ARGUMENTS = [
    "query", "key", "value", "mods", "scale", "enable_gqa", "inplace", "deterministic", "aux", "dropout_p",
    "batch_invariant",
]  # fmt: skip
# Like known(), for calls that have the op's own arguments: score and mask functions are texts.
_attend_known = direct.bound("flex_attention of texts", _OP_ARGUMENTS, len(_OP_ARGUMENTS), None)


def attend_traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: _Mod,
    mask: _Mask = NO_MASK,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    inplace: bool = False,
    deterministic: bool | None = None,
    maxima: bool = False,
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The op with functions that are texts already, whichever way PyTorch's transforms and compiler want it: out, lse,
    and the maxima if asked for."""
    mask_mod, kv_blocks, block_size = mask
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check_kernel(score, query, key, value)
        mods = (*score, *mask_mod, kv_blocks, block_size)
        more = scale, enable_gqa, inplace, deterministic, int(maxima), dropout_p, batch_invariant
        if (found := _attend_known((query, key, value, mods, *more), {})) is not None:
            return found
    if is_dtensor(*score[1], *mask_mod[1]):
        raise TypeError(
            "flex_attention: a captured tensor must not be a DTensor where query is a plain tensor, but got one: give "
            "query, key and value as DTensors, or context_parallel, or capture to_local()"
        )
    attend = transforms.attend
    if compiling:
        from ._attention_compiled import attend_within, within_transforms

        attend, transformed = attend_within, within_transforms()
    else:
        transformed = is_transformed((query, key, value, *score[1], *mask_mod[1], *kv_blocks))
    if transformed:
        out, lse = attend(
            query, key, value, score, mask_mod, kv_blocks, block_size, scale, enable_gqa, deterministic, maxima,
            dropout_p, batch_invariant,
        )  # fmt: skip
        return out, lse, None
    out, lse, max_scores = torch.ops.fusegrad.flex_attention(
        query,
        key,
        value,
        *score,
        *mask_mod,
        kv_blocks,
        block_size,
        scale,
        enable_gqa,
        inplace,
        deterministic,
        int(maxima),
        dropout_p,
        batch_invariant,
    )
    return out, lse, max_scores


def returned(
    out: Tensor, lse: Tensor, max_scores: Tensor | None, return_lse: bool, return_aux: AuxRequest | None
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, max_scores if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None,
    block_mask: BlockMask | None,
    *arguments: Any,
    **options: Any,
) -> Any:
    packed = Packed(query, key, value, score_mod, block_mask)
    call: Any = flex_attention
    result = call(*packed.tensors, packed.score_mod, packed.mask, *arguments, **options)
    if isinstance(result, Tensor):
        return packed.nested(result)
    if isinstance(result[1], Tensor):
        return packed.nested(result[0]), packed.nested(result[1])
    return packed.nested(result[0]), AuxOutput(*(None if t is None else packed.nested(t) for t in result[1]))
