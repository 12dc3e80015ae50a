"""Flex attention under forward mode, ``torch.func``, vmap, and where its backward is itself differentiated.

The front end of the Functions in _attention_functions.py, and the ops that C++ calls back for them. See
docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ._attention_composite import LOW, Call, Mod, Scoring, Tensors
from ._attention_functions import (
    BETWEEN,
    UPSTREAM,
    Computed,
    FlexAttention,
    FlexGradients,
    FlexTangents,
    gradients,
    places_of,
)
from ._eager import eager_only
from ._transforms import as_autocast_wants, outside_transforms, unwrapped

__all__ = ["attend"]

_NUMBERS = 2**63 - 1


# --- the ops that call back -------------------------------------------------------------------------------------


class _Unpacked(NamedTuple):
    """What the ops below the front end take: the call, its tensors, and the arguments `between` value and what
    shapes the scores, and `behind` that."""

    call: Call
    tensors: tuple[Tensor, ...]
    between: Sequence[Any]
    behind: Sequence[Any]

    @staticmethod
    def of(arguments: Sequence[Any], between: int) -> _Unpacked:
        """Unpacks an op's arguments in its schema's order; so many are between."""
        first, last = 3 + between, 3 + between + len(Scoring._fields)
        scoring = Scoring(*arguments[first:last])
        tensors = (*arguments[:3], *scoring.of_tensors(scoring))
        return _Unpacked(scoring.call(), tensors, arguments[3:first], arguments[last:])

    @staticmethod
    def of_each(values: Sequence[Any], arguments: Sequence[Any], between: int) -> tuple[Any, ...]:
        """Takes what goes with each of an op's arguments, gives what goes with the call's tensors."""
        at = slice(3 + between, 3 + between + len(Scoring._fields))
        return (*values[:3], *Scoring(*arguments[at]).of_tensors(Scoring(*values[at])))

    @staticmethod
    def of_backward(arguments: Sequence[Any]) -> tuple[_Unpacked, tuple[bool, ...]]:
        """Unpacks flex_attention_backward's, with which of the tensors' gradients are wanted. Between are upstream
        gradients and what the forward returned."""
        unpacked = _Unpacked.of(arguments, BETWEEN)
        deterministic, needs_grad = unpacked.behind
        wanted = (*needs_grad, *(False,) * (len(unpacked.tensors) - len(needs_grad)))
        return unpacked._replace(call=replace(unpacked.call, deterministic=deterministic)), wanted


def _returned(call: Call, found: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    query, key, value, *rest = (like.new_empty(0) if g is None else g for g in found)
    return query, key, value, rest[: call.counts[0]]


def _gradient_graph(*arguments: Any) -> Any:
    """flex_attention_backward as a graph."""
    (call, tensors, between, _), wanted = _Unpacked.of_backward(arguments)
    return _returned(call, gradients(call, wanted, tensors, between[UPSTREAM:], between[:UPSTREAM]), tensors[0])


def _batched_gradients(size: int, dims: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """flex_attention_backward of `size` calls; `dims`: the batched dimension of each tensor, None for none. The results
    of those that are wanted, with the batch first, and which these are. A graph where one is recorded."""
    (call, tensors, between, _), wanted = _Unpacked.of_backward(arguments)
    upstream, outputs = between[:UPSTREAM], between[UPSTREAM:]
    dims_of_upstream, dims_of_outputs = dims[3 : 3 + UPSTREAM], dims[3 + UPSTREAM : 3 + BETWEEN]
    having = tuple(g is not None for g in upstream)
    given = [(g, d) for g, d in zip(upstream, dims_of_upstream, strict=True) if g is not None]
    result: list[Tensor | None] = [None] * len(tensors)
    if any(wanted) and given:
        dims_of_tensors = _Unpacked.of_each(dims, arguments, BETWEEN)
        in_dims = (None, None, None, *dims_of_tensors, *(d for _, d in given), *dims_of_outputs)
        found, _ = FlexGradients.of_each(
            size,
            in_dims,
            call,
            wanted,
            having,
            *tensors,
            *(g for g, _ in given),
            *outputs,
            autograd=torch.is_grad_enabled(),
        )
        for i, g in zip(places_of(wanted), found, strict=True):
            result[i] = g
    return _returned(call, result, tensors[0]), [0 if g is not None else None for g in result]


def _gradients_of_each(*arguments: Any) -> Any:
    """The same for several upstream gradients at once, their first dimension, which is the results' too."""
    upstream = arguments[3:6]
    size = next(g.size(0) for g in upstream if g is not None)
    dims: list[Any] = [None] * len(arguments)
    dims[3:6] = [None if g is None else 0 for g in upstream]
    return _batched_gradients(size, dims, arguments)[0]


def _backward_under_vmap(info: Any, dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Where a torch.vmap is over a backward outside of it."""
    found, (query, key, value, *buffers) = _batched_gradients(info.batch_size, dims, arguments)
    return found, (query, key, value, buffers[: len(found[3])])


def _graph_under_vmap(*arguments: Any) -> Any:
    raise NotImplementedError(
        "flex_attention: create_graph=True must not come within a torch.vmap of a backward outside of it, but does; "
        "use torch.func.grad, or is_grads_batched=True"
    )


def _tangents_of_each(*arguments: Any) -> Any:
    """flex_attention_jvp for several tangents at once, their first dimension, which is the results' too."""
    call, tensors, (*of_qkv, having, of_buffers), (aux,) = _Unpacked.of(arguments, 5)
    moving = (*(t is not None for t in of_qkv), *(i in having for i in range(len(tensors) - 3)))
    tangents = [t for t in (*of_qkv, *of_buffers) if t is not None]
    in_dims = (None, None, *(None,) * len(tensors), *(0,) * len(tangents))
    size = tangents[0].size(0)
    found, _ = FlexTangents.of_each(size, in_dims, call, moving, *tensors, *tangents, autograd=False)
    # The values, as they were.
    out, lse, _, _, *low = FlexAttention.forward(call, *tensors)
    kept = low if aux else [t.new_empty(0) for t in low]
    of_out, of_lse, *of_low = (t.expand(size, *t.shape) for t in (out, lse, *kept))
    return of_out, of_lse, *found, *of_low


def _masks_under_vmap(info: Any, dims: Any, like: Tensor, text: str, buffers: Sequence[Tensor], *rest: Any) -> Any:
    """Block masks of captured tensors that a torch.vmap batches: one after the other."""
    each = []
    for i in range(info.batch_size):
        own = [b if dim is None else b.select(dim, i) for b, dim in zip(buffers, dims[2], strict=True)]
        each.append(torch.ops.fusegrad.create_block_mask(like, text, own, *rest))
    lists = [torch.stack(of_all) for of_all in zip(*each, strict=True)]
    return lists, [0] * len(lists)


def _dropout_under_vmap(
    info: Any, dims: Any, seed: Tensor, p: float, sizes: Sequence[int], first: int = 0
) -> tuple[Tensor, int]:
    """For the composition, the pairs that the kernels keep of one call over the elements: see fold."""
    batch, *rest = sizes
    kept = torch.ops.fusegrad.flex_attention_dropout_mask(
        seed.select(dims[0], 0), p, [info.batch_size * batch, *rest], first
    )
    return kept.unflatten(0, (info.batch_size, batch)), 0


_library = torch.library.Library("fusegrad", "IMPL")
_library.impl("flex_attention_backward_graph", _gradient_graph, "CompositeImplicitAutograd")
_library.impl("flex_attention_backward_graph", _graph_under_vmap, "FuncTorchBatched")
_library.impl("flex_attention_jvp_of_each", _tangents_of_each, "CompositeImplicitAutograd")
_library.impl("flex_attention_backward_of_each", _gradients_of_each, "CompositeImplicitAutograd")
torch.library.register_vmap("fusegrad::flex_attention_backward", _backward_under_vmap)
torch.library.register_vmap("fusegrad::create_block_mask", _masks_under_vmap)
torch.library.register_vmap("fusegrad::flex_attention_dropout_mask", _dropout_under_vmap)


# --- the front end ----------------------------------------------------------------------------------------------


def _blocks(lists: Sequence[Tensor], batch: int, heads: int, rows: int) -> list[Tensor]:
    """A block mask's lists as [B or 1, H or 1, rows of blocks, ...]; those of more than there are, cut."""
    result = []
    for i, t in enumerate(lists):
        while t.dim() < 3 + i % 2:
            t = t.unsqueeze(0)
        result.append(t[:batch, :heads, :rows])
    return result


def _in_one_pass(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | Computed | None:
    """Where one jvp, or a level of forward_ad, is all that is about, one kernel makes the values and the tangents: out
    and lse as they are returned, or what the Functions take where these record more than that. None under other
    transforms than torch.func.grad and vjp around the jvp.
    """
    interpreters = retrieve_all_functorch_interpreters()
    if forward_ad._current_level < 0:
        return None
    *outer, inner = interpreters or [None]
    if inner is not None and inner.key() != TransformType.Jvp:
        return None
    if any(i.key() != TransformType.Grad for i in outer):
        return None
    duals = [forward_ad.unpack_dual(t) for t in tensors]
    parts = [t for dual in duals for t in dual if t is not None]
    # For jacobian(vectorize=True) the tangents alone are batched, and the values are not to be.
    if all(dual.tangent is None for dual in duals) or any(_functorch.is_legacy_batchedtensor(t) for t in parts):
        return None
    trained = torch.is_grad_enabled() and any(unwrapped(t).requires_grad for t in parts)
    if outer or (trained and inner is None):
        # Each Function has to see the tensors as they are: gradients within a level of forward_ad have tangents, too.
        primals, tangents = ([None if t is None else unwrapped(t) for t in of] for of in zip(*duals, strict=True))
        with outside_transforms():
            return _computed(call, primals, tangents)
    compute = _recorded if trained else _with_tangents
    if inner is None:
        results = compute(call, [dual.primal for dual in duals], [dual.tangent for dual in duals])
    else:
        # As for an autograd Function, but without its way through pytrees, which takes longer than a small kernel.
        level, below = inner.level(), _functorch._unwrap_for_grad
        primals = [below(dual.primal, level) for dual in duals]
        tangents = [None if dual.tangent is None else below(dual.tangent, level) for dual in duals]
        with inner.lower():
            found = compute(call, primals, tangents)
        results = tuple(_functorch._wrap_for_grad(t, level) for t in found[:4])
    out, lse, of_out, of_lse, *_ = results
    return forward_ad.make_dual(out, of_out), forward_ad.make_dual(lse, of_lse)


def _computed(call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Computed:
    with torch.no_grad():
        out, lse, of_out, of_lse, *low = _with_tangents(call, primals, tangents, LOW)
        return Computed(call, (out, lse, lse.new_empty(0), lse.new_empty(0), *low), (of_out, of_lse))


def _recorded(call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """out, lse and their tangents with the graph of both."""
    given = _computed(call, primals, tangents)
    out, lse, *_ = FlexAttention.apply(given, *primals)
    moving = tuple(d is not None and t.is_floating_point() for t, d in zip(primals, tangents, strict=True))
    moved = [d for d, m in zip(tangents, moving, strict=True) if m]
    return out, lse, *FlexTangents.apply(given, moving, *primals, *moved)


def _with_tangents(
    call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None], aux: int = 0
) -> tuple[Tensor, ...]:
    """out, lse, their tangents, out_low and lse_low, of tensors that carry none."""
    t, _ = call.split(primals)
    of_buffers = tangents[3 : 3 + len(t.buffers)]
    having = [i for i, d in enumerate(of_buffers) if d is not None and t.buffers[i].is_floating_point()]
    return torch.ops.fusegrad.flex_attention_jvp(
        t.query, t.key, t.value, *tangents[:3], having, [of_buffers[i] for i in having], *call.scoring(t), aux
    )


@eager_only  # the compiler meets it between two graphs, and cannot follow how it leaves transforms
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: tuple[str, list[Tensor], list[float], list[int]],
    mask: tuple[str, list[Tensor], list[float], list[int]],
    kv_blocks: list[Tensor],
    block_size: list[int],
    scale: float | None,
    enable_gqa: bool,
    deterministic: bool | None,
    max_scores: bool,
    dropout_p: float,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and lse, with forward-mode tangents and under ``torch.func.jvp``, ``grad``, ``vjp``, ``vmap`` and their
    nestings.

    Raises:
        NotImplementedError: where max_scores are asked for, or dropout drops the same pairs under vmap.
    """
    if max_scores:
        raise NotImplementedError(
            "flex_attention: max_scores must not be asked for under forward mode and torch.func, but they are"
        )
    query, key, value = (as_autocast_wants(t) for t in (query, key, value))
    with outside_transforms(), torch.no_grad():

        def stand_in(t: Tensor) -> Tensor:
            """What the checks look at, without the tensor's values, tangents and levels."""
            return torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)

        _, scale = torch.ops.fusegrad.flex_attention_checked(
            *map(stand_in, (query, key, value)), score[0], [*map(stand_in, score[1])], *score[2:],
            mask[0], [*map(stand_in, mask[1])], *mask[2:], [*map(stand_in, kv_blocks)], block_size, scale, enable_gqa,
            dropout_p=dropout_p,
        )  # fmt: skip
    seed: tuple[Tensor, ...] = ()
    if dropout_p > 0:
        seed = (torch.randint(_NUMBERS, (), dtype=torch.int64, device=query.device),)
    if kv_blocks:
        kv_blocks = _blocks(kv_blocks, query.size(0), query.size(1), -(-query.size(2) // block_size[0]))
    call = Call(
        Mod(score[0], score[2], score[3]), Mod(mask[0], mask[2], mask[3]), block_size, scale, dropout_p,
        (len(score[1]), len(mask[1]), len(kv_blocks)), deterministic, batch_invariant,
    )  # fmt: skip
    t = Tensors(query, key, value, tuple(score[1]), tuple(mask[1]), tuple(kv_blocks), seed)
    # The kernel that makes values and tangents in one pass sums values in an order of its own.
    found = None if batch_invariant else _in_one_pass(call, t.flat())
    if isinstance(found, tuple):
        return found
    out, lse, *_ = FlexAttention.apply(found or call, *t.flat())
    return out, lse
