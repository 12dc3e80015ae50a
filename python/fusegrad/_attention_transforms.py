"""Flex attention under forward mode and ``torch.func``: an autograd Function with a ``jvp``.

Of a row with scores s, weights p = exp(s - lse) and tangents ds of its scores: d lse = sum p ds, and
d out = sum p (ds - d lse) v + sum p dv. See docs/transforms.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ._transforms import as_autocast_wants, is_batched, primal_of

__all__ = ["attend", "check_vmap"]

_OUT_LOW = 2  # FlexAuxBit in csrc/pytorch/attention/flex_attention.h
_NUMBERS = 2**63 - 1
_NO_VMAP = "flex_attention: torch.vmap must not be applied, but it is; fold what it is over into the batch"


class Mod(NamedTuple):
    """A score_mod or mask_mod as ops take it."""

    text: str
    buffers: list[Tensor]
    floats: list[float]
    ints: list[int]


@dataclass
class _Call:
    """What no gradient or tangent flows into. The score_mod's buffers are arguments of the Function."""

    score: Mod
    mask: Mod
    kv_blocks: list[Tensor]
    block_size: list[int]
    scale: float | None
    enable_gqa: bool
    dropout_p: float
    dropout_seed: Tensor | None
    deterministic: bool | None

    def scoring(self, buffers: tuple[Tensor, ...]) -> tuple[Any, ...]:
        score = self.score._replace(buffers=list(buffers))
        return (*score, *self.mask, self.kv_blocks, self.block_size, self.scale, self.dropout_p, self.dropout_seed)


def _check(call: _Call, query: Tensor, key: Tensor, value: Tensor, *buffers: Tensor) -> None:
    """Checks the call, and leaves its block mask and scale as the kernels take them."""
    score = call.score._replace(buffers=list(buffers))
    call.kv_blocks, call.scale = torch.ops.fusegrad.flex_attention_checked(
        query, key, value, *score, *call.mask, call.kv_blocks, call.block_size, call.scale, call.enable_gqa,
        dropout_p=call.dropout_p,
    )  # fmt: skip


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        call: _Call, query: Tensor, key: Tensor, value: Tensor, *buffers: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ops = torch.ops.fusegrad
        _check(call, query, key, value, *buffers)
        aux = _OUT_LOW if query.dtype in (torch.bfloat16, torch.float16) else 0
        out, lse, _, _, out_low = ops.flex_attention_forward(query, key, value, *call.scoring(buffers), aux)
        return out, lse, out_low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = ctx.saved_tensors
        buffers, (out, lse, out_low) = tuple(rest[:-3]), rest[-3:]
        wanted = list(ctx.needs_input_grad[1:])
        if upstream[0] is None and upstream[1] is None:
            return (None,) * (1 + len(wanted))
        nothing = lse.new_empty(0)
        ordered = ctx.call.deterministic
        if ordered is None:
            ordered = torch.are_deterministic_algorithms_enabled()
        *grads, of_buffers = torch.ops.fusegrad.flex_attention_backward(
            query, key, value, upstream[0], upstream[1], None, out, lse, nothing, nothing, out_low,
            *ctx.call.scoring(buffers), ordered, wanted,
        )  # fmt: skip
        return (None, *(g if want else None for g, want in zip([*grads, *of_buffers], wanted, strict=True)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> tuple[Any, Any]:
        """Of no input that is batched: where a vmap is over tangents alone, as torch.func.jacfwd has it."""
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(_NO_VMAP)
        return _FlexAttention.apply(call, *tensors), (None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = (primal_of(t) for t in ctx.saved_tensors)
        buffers = tuple(rest[:-3])
        _, of_query, of_key, of_value, *of_buffers = tangents
        having = [i for i, t in enumerate(of_buffers) if t is not None and buffers[i].is_floating_point()]
        _, _, out, lse = torch.ops.fusegrad.flex_attention_jvp(
            query, key, value, of_query, of_key, of_value, having, [of_buffers[i] for i in having],
            *ctx.call.scoring(buffers),
        )  # fmt: skip
        return out, lse, None


@functools.cache
def _register_batches_of_tangents() -> None:
    """Lets vmap go over the tangents of an op's call, as torch.func.jacfwd does: one call for each."""
    op = torch.ops.fusegrad.flex_attention_jvp

    def one(arguments: Any, dims: Any, i: int) -> Any:
        if isinstance(arguments, (list, tuple)) and dims is not None:
            return [one(a, d, i) for a, d in zip(arguments, dims, strict=True)]
        return arguments if dims is None else arguments.select(dims, i)

    def each(info: Any, dims: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = [op(*one(arguments, dims, i)) for i in range(info.batch_size)]
        stacked = tuple(torch.stack(of_each) for of_each in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    torch.library.register_vmap("fusegrad::flex_attention_jvp", each)


def check_vmap(tensors: Iterable[Tensor]) -> None:
    """Raises NotImplementedError where a ``torch.vmap`` is over one of them."""
    if is_batched(tensors):
        raise NotImplementedError(_NO_VMAP)


def _in_one_pass(call: _Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """out and lse with their tangents from one call of the op that computes both, or None where that is not all that
    is asked for: under other transforms than one jvp, and where a backward may follow, which wants of the output what
    that op does not give.
    """
    interpreters = retrieve_all_functorch_interpreters()
    if forward_ad._current_level < 0 or any(i.key() != TransformType.Jvp for i in interpreters):
        return None
    inner = [_functorch.get_unwrapped(t) if _functorch.is_functorch_wrapped_tensor(t) else t for t in tensors]
    if len(interpreters) > 1 or (torch.is_grad_enabled() and any(t.requires_grad for t in inner)):
        return None
    duals = [forward_ad.unpack_dual(t) for t in tensors]
    if all(dual.tangent is None for dual in duals):
        return None
    if not interpreters:
        results = _with_tangents(call, [dual.primal for dual in duals], [dual.tangent for dual in duals])
    else:
        # As for an autograd Function, but without its way through pytrees, which takes longer than a small kernel.
        level, unwrapped = interpreters[0].level(), _functorch._unwrap_for_grad
        primals = [unwrapped(dual.primal, level) for dual in duals]
        tangents = [None if dual.tangent is None else unwrapped(dual.tangent, level) for dual in duals]
        with interpreters[0].lower():
            found = _with_tangents(call, primals, tangents)
        results = tuple(_functorch._wrap_for_grad(t, level) for t in found)
    out, lse, of_out, of_lse = results
    return forward_ad.make_dual(out, of_out), forward_ad.make_dual(lse, of_lse)


def _with_tangents(call: _Call, primals: list[Tensor], tangents: list[Tensor | None]) -> tuple[Tensor, ...]:
    """out, lse and their tangents, of tensors that carry none."""
    buffers = tuple(primals[3:])
    _check(call, *primals[:3], *buffers)
    having = [i for i, t in enumerate(tangents[3:]) if t is not None]
    of_buffers = [t for t in tangents[3:] if t is not None]
    return torch.ops.fusegrad.flex_attention_jvp(
        *primals[:3], *tangents[:3], having, of_buffers, *call.scoring(buffers)
    )


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
) -> tuple[Tensor, Tensor]:
    """out and lse, with forward-mode tangents and under ``torch.func.jvp``, ``grad``, ``vjp`` and their nestings.

    Raises:
        NotImplementedError: under vmap, or where max_scores are asked for.
    """
    check_vmap([query, key, value, *score[1], *mask[1], *kv_blocks])
    if max_scores:
        raise NotImplementedError(
            "flex_attention: max_scores must not be asked for under forward mode and torch.func, but they are"
        )
    query, key, value = (as_autocast_wants(t) for t in (query, key, value))
    seed = None
    if 0 < dropout_p < 1:
        seed = torch.randint(_NUMBERS, (), dtype=torch.int64, device=query.device)
    _register_batches_of_tangents()
    call = _Call(
        Mod(score[0], [], score[2], score[3]), Mod(*mask), kv_blocks, block_size, scale, enable_gqa,
        dropout_p, seed, deterministic,
    )  # fmt: skip
    if (found := _in_one_pass(call, (query, key, value, *score[1]))) is not None:
        return found
    out, lse, _ = _FlexAttention.apply(call, query, key, value, *score[1])
    return out, lse
