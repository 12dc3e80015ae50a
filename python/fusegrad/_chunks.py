"""Functions of many rows, a chunk of rows at a time, that can be differentiated in any order and in both modes.

What a kernel has no derivative of is such a function, of PyTorch's ops: recomputed for each chunk, so that memory is
linear in the rows. See docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from ._transforms import primal_of

__all__ = ["Plan", "apply", "gradient_plan", "pulled", "pushed", "tangent_plan", "vmapped", "whole_blocks"]

_DROPOUT_ROWS = 16  # dropout's blocks of pairs begin at multiples of it

_Chunk = Callable[[int, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Plan:
    """A function of tensors, made of one of some rows. `function(first, tensors)` has the number of rows before, and
    pieces of those tensors that have a dimension of rows: `rows`, of each input and `results`; None: it has none. A
    result that has none is a sum over the chunks, of 16 bits in float32."""

    function: _Chunk
    rows: tuple[int | None, ...]
    results: tuple[int | None, ...]
    length: int
    step: int
    forward_mode: bool = False  # all that the function calls has one


class _Chunked(torch.autograd.Function):
    """Its derivatives, and itself under vmap, are such functions again."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        with torch.autocast(tensors[0].device.type, enabled=False):
            for first in range(0, max(plan.length, 1), plan.step):
                count = min(plan.step, plan.length - first)
                places = zip(tensors, plan.rows, strict=True)
                pieces = [t if d is None else t.narrow(d, first, count) for t, d in places]
                found = plan.function(first, pieces)
                if first == 0:
                    for piece, d in zip(found, plan.results, strict=True):
                        shape = list(piece.shape)
                        if d is not None:
                            shape[d] = plan.length
                        wide = d is None and piece.dtype in (torch.bfloat16, torch.float16)
                        results.append(piece.new_zeros(shape, dtype=torch.float32 if wide else piece.dtype))
                        dtypes.append(piece.dtype)
                for result, piece, d in zip(results, found, plan.results, strict=True):
                    if d is None:
                        result.add_(piece)
                    else:
                        result.narrow(d, first, count).copy_(piece)
        return tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [i for i, w in enumerate(ctx.needs_input_grad[1:]) if w]
        return (None, *pulled(ctx.plan, ctx.saved_tensors, wanted, upstream))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        return pushed(ctx.plan, [primal_of(t) for t in ctx.saved_tensors], tangents[1:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], plan: Plan, *tensors: Tensor) -> tuple[Any, Any]:
        return vmapped(info.batch_size, in_dims[1:], plan, tensors), (0,) * len(plan.results)


def vmapped(size: int, in_dims: Sequence[Any], plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The function of each element of the batches; the first dimension of the results."""
    dims = tuple(None if d is None else 0 for d in in_dims)
    moved = [t if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=True)]

    def function(first: int, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.vmap(lambda *t: plan.function(first, t), in_dims=dims)(*pieces)

    whole = Plan(
        function,
        tuple(r if r is None or d is None else r + 1 for r, d in zip(plan.rows, dims, strict=True)),
        tuple(None if r is None else r + 1 for r in plan.results),
        plan.length,
        whole_blocks(plan.step // size),
        plan.forward_mode,
    )
    return apply(whole, moved)


def whole_blocks(rows: int) -> int:
    return max(rows // _DROPOUT_ROWS, 1) * _DROPOUT_ROWS


def apply(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The function's results, differentiable in both modes and under vmap."""
    return _Chunked.apply(plan, *tensors)


def _of_some(function: _Chunk, first: int, tensors: Sequence[Tensor], places: Sequence[int]) -> Callable[..., Any]:
    """The function of the tensors at these places, the others as they are."""

    def of(*some: Tensor) -> tuple[Tensor, ...]:
        full = list(tensors)
        for i, t in zip(places, some, strict=True):
            full[i] = t
        return function(first, full)

    return of


def gradient_plan(plan: Plan, wanted: Sequence[int], having: Sequence[int]) -> Plan:
    """For the tensors and upstream gradients of the results `having`: the gradients of the inputs `wanted`."""
    count = len(plan.rows)

    def function(first: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        inputs = tensors[:count]

        def some(f: int, t: Sequence[Tensor]) -> tuple[Tensor, ...]:
            results = plan.function(f, t)
            return tuple(results[j] for j in having)

        _, pull = torch.func.vjp(_of_some(some, first, inputs, wanted), *(inputs[i] for i in wanted))
        return pull(tuple(tensors[count:]))

    return replace(
        plan,
        function=function,
        rows=(*plan.rows, *(plan.results[j] for j in having)),
        results=tuple(plan.rows[i] for i in wanted),
    )


def _forward_mode_nests() -> bool:
    """A level of forward_ad takes no other in it; those of torch.func do."""
    return forward_ad._current_level < 0 or eager_transforms.JVP_NESTING > 0


def tangent_plan(plan: Plan, moving: Sequence[int]) -> Plan:
    """For the tensors and tangents of the inputs `moving`: those of the results. By forward mode where the function has
    one, and otherwise by reverse mode, which nests in any other: the derivative by u of u's vector-Jacobian product."""
    count = len(plan.rows)

    def function(first: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        of = _of_some(plan.function, first, inputs, moving)
        if plan.forward_mode and _forward_mode_nests():
            return torch.func.jvp(of, tuple(inputs[i] for i in moving), tuple(tensors[count:]))[1]
        results, pull = torch.func.vjp(of, *(inputs[i] for i in moving))
        _, push = torch.func.vjp(lambda *u: pull(u), *(torch.zeros_like(r) for r in results))
        return push(tuple(tensors[count:]))

    return replace(plan, function=function, rows=(*plan.rows, *(plan.rows[i] for i in moving)))


def pulled(
    plan: Plan, tensors: Sequence[Tensor], wanted: Sequence[int], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The inputs' gradients, each where wanted."""
    result: list[Tensor | None] = [None] * len(tensors)
    having = [j for j, g in enumerate(upstream) if g is not None]
    if wanted and having:
        found = apply(gradient_plan(plan, wanted, having), [*tensors, *(g for g in upstream if g is not None)])
        for i, g in zip(wanted, found, strict=True):
            result[i] = g
    return result


def pushed(plan: Plan, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results' tangents."""
    moving = [i for i, t in enumerate(tangents) if t is not None and tensors[i].is_floating_point()]
    return apply(tangent_plan(plan, moving), [*tensors, *(tangents[i] for i in moving)])
