"""flex_attention with its sequence spread over processes: checks, the autograd Function, tensors of
torch.distributed.tensor. How parts are computed: sequence_steps.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from .. import _C
from .._eager import eager_only
from .._transforms import as_autocast_wants
from ..score_mod import ScoreMod, check_kernel_size, trace_mask_mod, trace_score_mod
from .gradients import acc_of, refuse_double_backward
from .sequence import ContextParallel
from .sequence_captured import captured
from .sequence_checks import OP, Options, check, check_own, is_own, takes_ring
from .sequence_columns import listed_columns
from .sequence_masks import MaskCuts
from .sequence_mods import MovedMod, Starts
from .sequence_ranges import sizes_of
from .sequence_rows import Results, Tensors
from .sequence_steps import Call
from .shards import agree

__all__ = ["Options", "Part", "attend"]


@dataclass
class Part:
    """What this process has of the whole.

    Attributes:
        groups: over which gradients of captured plain tensors are summed.
        roles: see captured().
        starts: where its batches and heads begin; `moved` says which of b and h do elsewhere in other processes.
        lengths: of the whole, where they are known.
    """

    context: ContextParallel
    groups: list[Any]
    roles: dict[tuple[int, ...], str]
    starts: Starts = field(default_factory=Starts)
    lengths: tuple[int, int] | None = None
    moved: tuple[str, ...] = ()


def _check_cuda(query: Tensor, value: Tensor) -> None:
    """Raises what the op would raise, before anything is sent."""
    if query.dtype == torch.float64:
        raise NotImplementedError(f"{OP}: query must be float32, bfloat16 or float16 on CUDA, but got {query.dtype}")
    for name, t, most in (("query", query, _C.FLEX_MOST_HEAD_ON_CUDA), ("value", value, _C.FLEX_MOST_VALUE_ON_CUDA)):
        if t.shape[3] > most:
            raise NotImplementedError(
                f"{OP}: {name} must have a head size of at most {most} on CUDA, but got {t.shape[3]}"
            )


class _Attention(torch.autograd.Function):
    """Saves this process's parts; keys and values of the others come again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        different: Tensor | None,
        seed: Tensor | None,
        mask_buffers: list[Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        t = Tensors(query, key, value, seed, list(buffers), mask_buffers)
        made = call.forward(t)
        if different is not None:
            made.lse.masked_fill_(different, torch.nan)
            _make_nan(made.out, different)
        ctx.pieces = tuple(made.lows)
        ctx.call, ctx.counts = call, (len(buffers), len(mask_buffers), len(call.lists()))
        # Lists and the mask_mod's tensors are saved for autograd to see a write to them.
        nothing = query.new_empty(0)
        ctx.save_for_backward(
            query,
            key,
            value,
            nothing if seed is None else seed,
            *made.tensors(),
            *buffers,
            *mask_buffers,
            *call.lists(),
            *made.lows.values(),
        )
        return (made.out, made.lse, made.max_scores) if call.max_scores else (made.out, made.lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        query, key, value, seed, *rest = ctx.saved_tensors
        lows = dict(zip(ctx.pieces, rest[len(rest) - len(ctx.pieces) :], strict=True))
        results, rest = Results(*rest[:6]), rest[6:]
        results.lows = lows
        buffers, mask_buffers = rest[: ctx.counts[0]], rest[ctx.counts[0] : sum(ctx.counts[:2])]
        nothing = (None,) * 4
        if all(g is None for g in grads):
            return (*nothing, None, None, None, *(None for _ in buffers))
        wanted = list(ctx.needs_input_grad[4:])
        upstream = [*grads, None, None][:3]
        t = Tensors(query, key, value, seed if call.dropout_p > 0 else None, list(buffers), list(mask_buffers))
        with torch.no_grad():
            made = call.backward(t, results, upstream, wanted)
        return (*nothing, *refuse_double_backward(OP, made, [query, key, value, *buffers]))


def _make_nan(out: Tensor, different: Tensor) -> None:
    """Where `different`, a bool of the GPU, is true. Where it is not, the kernel reads nothing of `out`."""
    rows = out.permute(*sorted(range(3), key=lambda d: -out.stride(d)), 3)
    factor = torch.where(different, torch.nan, 1.0).to(acc_of(out.dtype))
    if rows.is_contiguous() and out.numel():
        torch.ops.fusegrad.scale_gradient_(rows.view(-1, out.shape[3]), factor)
    else:
        out.mul_(factor)


@eager_only
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | ScoreMod | None,
    block_mask: BlockMask | None,
    options: Options,
    part: Part,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and, if asked for, max_scores of this process's queries, all of them plain tensors."""
    context = part.context
    error: Exception | None = None
    prepared: _Prepared | None = None
    try:
        prepared = _Prepared(query, key, value, score_mod, block_mask, options, part)
    except Exception as found:  # told to the others before it is raised
        error = found
    given = dict.fromkeys(_TOLD) if prepared is None else prepared.told
    different = None
    if context.world > 1:
        different = agree(OP, "of context_parallel", context.group, query.device, given, failed=prepared is None)
    if prepared is None:
        assert error is not None
        raise error
    p = prepared
    seed = None
    if options.dropout_p > 0:
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)
    # Not before the others are known to do the same: what is sharded otherwise is gathered here.
    buffers = [part(b) for part, b in zip(p.score_parts, p.call.score.buffers, strict=True)]
    mask_buffers = [part(b).detach() for part, b in zip(p.mask_parts, p.call.mask.buffers, strict=True)]
    made = _Attention.apply(p.call, different, seed, mask_buffers, p.query, p.key, p.value, *buffers)
    return made[0], made[1], made[2] if options.max_scores else None


_TOLD = (
    "the shapes of query, key and value",
    "dtype and device",
    "which tensors require grad",
    "score_mod",
    "what score_mod captures",
    "block_mask",
    "the other options",
    "placement",
)


class _Prepared:
    """A call's arguments, checked, and what is told to the other processes."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Any] | ScoreMod | None,
        block_mask: BlockMask | None,
        options: Options,
        part: Part,
    ) -> None:
        query, key, value = (as_autocast_wants(t) for t in (query, key, value))
        context = part.context
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != 4:
                raise ValueError(f"{OP}: {name} must have 4 dimensions, but got shape {list(t.shape)}")
        lengths = part.lengths or (context.whole(query.shape[2]), context.whole(key.shape[2]))
        queries, keys = context.ranges(lengths[0]), context.ranges(lengths[1])
        for name, t, ranges in (("query", query, queries), ("key", key, keys), ("value", value, keys)):
            own = sizes_of(ranges)[context.rank]
            if t.shape[2] != own:
                raise ValueError(
                    f"{OP}: {name} must have this process's {own} positions of {context!r}, but got {t.shape[2]}"
                )
        if query.is_cuda:
            _check_cuda(query, value)
        score = None if score_mod is None else trace_score_mod(score_mod, device=query.device)
        own_mask = block_mask is not None and is_own(block_mask, (query.shape[2], lengths[1]), lengths)
        mask = None
        if block_mask is not None and block_mask.mask_mod is not noop_mask:
            mask = trace_mask_mod(block_mask.mask_mod, device=query.device)
            if query.is_cuda and any(b.dtype == torch.float64 for b in mask.buffers):  # the checks see no device
                raise TypeError(
                    f"{OP}: mask_mod's captured tensors must not be float64 on CUDA, where it computes in float32, but "
                    "got one: capture integers, or differences from a common origin as float32"
                )
        check(query, key, value, score, mask, block_mask, options, lengths, own_mask)
        if score is not None and query.is_cuda:
            wants = tuple(b.requires_grad for b in score.buffers)
            trains = any(wants) or any(t.requires_grad for t in (query, key, value))
            check_kernel_size(score.text, wants if trains and torch.is_grad_enabled() else None)
        cuts = columns = None
        begins = part.starts.of["b"], part.starts.of["h"]
        if block_mask is not None:
            batches, heads = (range(first, first + n) for first, n in zip(begins, query.shape[:2], strict=True))
            cuts = MaskCuts(block_mask, own_mask, batches, heads)
            if own_mask:
                check_own(cuts.size[0], queries[context.rank])
            elif context.world > 1 and context.way != "ring":
                columns = listed_columns(block_mask, cuts, queries, keys, context.rank)
        ring = columns is None and takes_ring(context, query, key, value, lengths)
        moved = (*part.moved, "q_idx", "kv_idx") if ring or columns is not None else (*part.moved, "q_idx")
        places = (part.roles, queries, keys, context.rank)
        score_plan = captured(OP, "score_mod", score, *places)
        mask_plan = captured(OP, "mask_mod", mask, *places)
        moved_score, moved_mask = MovedMod(score, moved, score_plan.local), MovedMod(mask, moved)
        self.score_parts = [score_plan.parts[i] for i in moved_score.kept]
        self.mask_parts = [mask_plan.parts[i] for i in moved_mask.kept]
        deterministic = options.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        self.query, self.key, self.value = query, key, value
        self.call = Call(
            context,
            queries,
            keys,
            moved_score,
            moved_mask,
            block_mask,
            cuts,
            columns,
            part.starts,
            [score_plan.own[i] for i in moved_score.kept],
            part.groups,
            1 / math.sqrt(query.shape[3]) if options.scale is None else options.scale,
            options.dropout_p,
            options.max_scores,
            deterministic,
            ring,
        )
        whole = [
            (*t.shape[:2], length, t.shape[3])
            for t, length in ((query, lengths[0]), (key, lengths[1]), (value, lengths[1]))
        ]
        values = (
            whole,
            (query.dtype, query.device.type),
            [t.requires_grad for t in (query, key, value, *self.call.score.buffers)] + [torch.is_grad_enabled()],
            None if score is None else (score.text, score.scalars),
            None if score is None else [(b.dtype, b.dim()) for b in score.buffers],
            None
            if cuts is None
            else (
                None if mask is None else (mask.text, mask.scalars),
                cuts.size,
                len(cuts.lists),
                own_mask,
                None if columns is None else columns.needed,
            ),
            (options.scale, options.enable_gqa, options.max_scores, deterministic, options.dropout_p),
            (queries, keys, context.way, context.sum_captured),
        )
        self.told = dict(zip(_TOLD, values, strict=True))
