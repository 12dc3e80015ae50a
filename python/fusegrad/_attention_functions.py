"""The autograd Functions of flex attention: attention, its first gradients, its tangents. Forwards are the kernels.

The derivatives of the latter two are those of the composition in _attention_composite.py. Under vmap each is one call
over a larger batch. For a row with scores s, weights p = exp(s - lse) and tangents ds of its scores: d lse = sum p ds,
and d out = sum p (ds - d lse) v + sum p dv. See docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._attention_composite import INVARIANT, LOW, Call, attention_plan
from ._attention_fold import fold, fold_rows, moved, unfold
from ._attention_second import second_derivatives, takes
from ._chunks import Plan, gradient_plan, pulled, pushed, tangent_plan, vmapped
from ._transforms import primal_of

__all__ = [
    "BETWEEN", "FORWARD", "UPSTREAM", "Computed", "FlexAttention", "FlexGradients", "FlexTangents", "gradients",
    "places_of",
]  # fmt: skip

FORWARD = 6  # what the forward returns: out, lse, max_scores, max_ties, out_low, lse_low
UPSTREAM = 3  # of out, lse and max_scores
BETWEEN = UPSTREAM + FORWARD  # what the backward takes between query, key and value and what shapes the scores


def _acc_of(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _widened(call: Call, tensors: Sequence[Tensor | None], acc: torch.dtype) -> list[Any]:
    """Floats in acc, in which the composition computes and adds up; a mask_mod computes in the dtype of what it
    captures, whatever the scores have."""
    mask = call.mask_places
    return [
        t.to(acc) if t is not None and t.is_floating_point() and i not in mask else t for i, t in enumerate(tensors)
    ]


def _in(acc: torch.dtype, derivatives: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [t.to(acc) if t is not None and t.is_floating_point() else t for t in derivatives]


def _as_inputs(found: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if g is None else g.to(t.dtype) for g, t in zip(found, inputs, strict=True)]


def _pulled(
    call: Call, plan: Plan, tensors: Sequence[Tensor], wanted: Sequence[int], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    acc = _acc_of(tensors[0])
    return _as_inputs(pulled(plan, _widened(call, tensors, acc), wanted, _in(acc, upstream)), tensors)


def _pushed(call: Call, plan: Plan, tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
    acc = _acc_of(tensors[0])
    return pushed(plan, _widened(call, tensors, acc), _in(acc, tangents))


def places_of(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


@dataclass
class Computed:
    """A call of which one kernel has made the results of both Functions. Each takes its own once: kept longer, results
    that have a graph would keep that, and it them."""

    call: Call
    outputs: tuple[Tensor, ...] | None  # what the forward returns
    tangents: tuple[Tensor, Tensor] | None

    def take_outputs(self) -> tuple[Tensor, ...] | None:
        taken, self.outputs = self.outputs, None
        return taken

    def take_tangents(self) -> tuple[Tensor, Tensor] | None:
        taken, self.tangents = self.tangents, None
        return taken


def _call_in(given: Call | Computed) -> Call:
    return given.call if isinstance(given, Computed) else given


class FlexAttention(torch.autograd.Function):
    """(query, key, value, ...) -> out, lse and four that are not differentiable."""

    @staticmethod
    def forward(given: Call | Computed, *tensors: Tensor) -> tuple[Tensor, ...]:
        if isinstance(given, Computed) and (outputs := given.take_outputs()) is not None:
            return outputs
        call = _call_in(given)
        t, _ = call.split(tensors)
        aux = LOW | INVARIANT if call.batch_invariant else LOW
        return tuple(torch.ops.fusegrad.flex_attention_forward(t.query, t.key, t.value, *call.scoring(t), aux))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.given, *tensors = inputs
        ctx.call = _call_in(ctx.given)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        tensors, outputs = saved[:-FORWARD], saved[-FORWARD:]
        wanted = tuple(bool(w) for w in ctx.needs_input_grad[1:])
        found = gradients(call, wanted, tensors, outputs, (*upstream[:2], None))
        return (None, *found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = [primal_of(t) for t in ctx.saved_tensors]
        moving = tuple(d is not None and t.is_floating_point() for t, d in zip(tensors, tangents[1:], strict=True))
        given = [d for d, m in zip(tangents[1:], moving, strict=True) if m]
        return (*FlexTangents.apply(ctx.given, moving, *tensors, *given), *(None,) * (FORWARD - 2))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor) -> tuple[Any, Any]:
        size = info.batch_size
        folded, t = fold(call, call.split(tensors)[0], call.split(in_dims[1:])[0], size)
        results = FlexAttention.apply(folded, *t.flat())
        return tuple(unfold(r, size) for r in results), (0,) * FORWARD


def gradients(
    call: Call,
    wanted: Sequence[bool],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of the call's tensors, each where wanted, differentiable again. `outputs`: what the forward returned;
    `upstream`: of out, lse and max_scores."""
    result: list[Tensor | None] = [None] * len(tensors)
    having = tuple(g is not None for g in upstream)
    if not any(having) or not any(wanted):
        return result
    given = [g for g in upstream if g is not None]
    found = FlexGradients.apply(call, tuple(wanted), having, *tensors, *given, *outputs)
    for i, g in zip(places_of(wanted), found, strict=True):
        result[i] = g
    return result


@dataclass(frozen=True)
class _Split:
    """The tensors of a call for gradients: those of the call, upstream gradients, the forward's results."""

    inputs: tuple[Any, ...]
    upstream: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @staticmethod
    def of(having: Sequence[bool], row: Sequence[Any]) -> _Split:
        end = len(row) - FORWARD
        begin = end - sum(having)
        return _Split(tuple(row[:begin]), tuple(row[begin:end]), tuple(row[end:]))

    def each_upstream(self, having: Sequence[bool]) -> list[Any]:
        """With None where there is none."""
        rest = iter(self.upstream)
        return [next(rest) if h else None for h in having]


class FlexGradients(torch.autograd.Function):
    """(query, key, value, ..., upstream gradients, the forward's results) -> the gradients that are wanted."""

    @staticmethod
    def forward(call: Call, wanted: tuple[bool, ...], having: tuple[bool, ...], *row: Tensor) -> tuple[Tensor, ...]:
        given = _Split.of(having, row)
        t, _ = call.split(given.inputs)
        ordered = call.deterministic
        if ordered is None:
            ordered = torch.are_deterministic_algorithms_enabled()
        wanted = wanted[: 3 + len(t.buffers)]
        *grads, of_buffers = torch.ops.fusegrad.flex_attention_backward(
            t.query, t.key, t.value, *given.each_upstream(having), *given.outputs, *call.scoring(t), ordered,
            list(wanted),
        )  # fmt: skip
        return tuple(g for g, want in zip([*grads, *of_buffers], wanted, strict=True) if want)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, ctx.wanted, ctx.having, *row = inputs
        ctx.set_materialize_grads(False)
        end = len(row) - FORWARD
        out, lse, _, _, *low = row[end:]
        kept = (*row[:end], out, lse, *low)  # the composition computes these again
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def plan(ctx: Any, tensors: Sequence[Tensor]) -> Plan:
        acc = _acc_of(tensors[0])
        inputs = tensors[: len(tensors) - sum(ctx.having)]
        base = attention_plan(ctx.call, inputs, ctx.having, acc)
        return gradient_plan(base, places_of(ctx.wanted), range(sum(ctx.having)))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, outputs = saved[: -_FlexSecond.OUTPUTS], saved[-_FlexSecond.OUTPUTS :]
        wanted = places_of(ctx.needs_input_grad[3 : 3 + len(tensors)])
        having = [j for j, g in enumerate(upstream) if g is not None]
        moving = [places_of(ctx.wanted)[j] for j in having]
        plan = FlexGradients.plan(ctx, tensors)
        if wanted and having and takes(ctx.call, tensors, ctx.having, moving, wanted):
            found: list[Tensor | None] = [None] * len(tensors)
            given = [g for g in upstream if g is not None]
            how = _Second(ctx.call, ctx.having, tuple(moving), tuple(wanted), gradient_plan(plan, wanted, having))
            for i, g in zip(wanted, _FlexSecond.apply(how, *tensors, *given, *outputs), strict=True):
                found[i] = g
        else:
            found = _pulled(ctx.call, plan, tensors, wanted, upstream)
        return (None, None, None, *found, *(None,) * FORWARD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = [primal_of(t) for t in ctx.saved_tensors]
        tensors, outputs = saved[: -_FlexSecond.OUTPUTS], saved[-_FlexSecond.OUTPUTS :]
        plan = FlexGradients.plan(ctx, tensors)
        given = tangents[3 : 3 + len(tensors)]
        moving = [i for i, d in enumerate(given) if d is not None and tensors[i].is_floating_point()]
        results = places_of(ctx.wanted)
        if takes(ctx.call, tensors, ctx.having, moving, results):
            how = _Second(ctx.call, ctx.having, tuple(moving), tuple(results), tangent_plan(plan, moving))
            return _FlexSecond.apply(how, *tensors, *(given[i] for i in moving), *outputs)
        return tuple(_as_inputs(_pushed(ctx.call, plan, tensors, given), [tensors[i] for i in results]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[bool, ...], having: tuple[bool, ...],
        *row: Tensor,
    ) -> tuple[Any, Any]:  # fmt: skip
        return FlexGradients.of_each(info.batch_size, in_dims, call, wanted, having, *row)

    @staticmethod
    def of_each(
        size: int, in_dims: tuple[Any, ...], call: Call, wanted: tuple[bool, ...], having: tuple[bool, ...],
        *row: Tensor, autograd: bool = True,
    ) -> tuple[Any, Any]:  # fmt: skip
        """`autograd`: the results can be differentiated."""
        given, dims = _Split.of(having, row), _Split.of(having, in_dims[3:])
        t, d = call.split(given.inputs)[0], call.split(dims.inputs)[0]
        each = wanted[3 : 3 + len(t.buffers)]
        folded, tensors = fold(call, t, d, size, each, each_key=wanted[1] or wanted[2])
        rest = [
            fold_rows(x, dim, size)
            for x, dim in zip((*given.upstream, *given.outputs), (*dims.upstream, *dims.outputs), strict=True)
        ]
        run = FlexGradients.apply if autograd else FlexGradients.forward
        found = run(folded, wanted, having, *tensors.flat(), *rest)
        batch = tensors.query.size(0) // size
        shared = [False] * 3
        for i, (x, dim) in enumerate(((t.key, d.key), (t.value, d.value))):
            shared[i + 1] = x.size(0 if dim != 0 else 1) < batch
        results = []
        for i, g in zip(places_of(wanted), found, strict=True):
            if i < 3:
                g = unfold(g, size)
                g = g.sum(1, keepdim=True) if shared[i] else g
            results.append(g)
        return tuple(results), (0,) * len(results)


@dataclass(frozen=True)
class _Second:
    """Which second derivatives: takes' arguments, and the composition of the same."""

    call: Call
    asked: tuple[bool, ...]
    moving: tuple[int, ...]
    results: tuple[int, ...]
    plan: Plan


class _FlexSecond(torch.autograd.Function):
    """(query, key, value, ..., upstream gradients, tangents, what the forward returned) -> second derivatives."""

    OUTPUTS = 4  # out, lse, and what rounding took from each

    @staticmethod
    def forward(how: _Second, *row: Tensor) -> tuple[Tensor, ...]:
        end = len(row) - _FlexSecond.OUTPUTS
        count = end - len(how.moving)
        tangents = dict(zip(how.moving, row[count:end], strict=True))
        with torch.autocast("cuda", enabled=False):
            return second_derivatives(how.call, row[:count], how.asked, row[end:], tangents, how.results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.how, *row = inputs
        ctx.set_materialize_grads(False)
        kept = row[: -_FlexSecond.OUTPUTS]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        row = ctx.saved_tensors
        wanted = places_of(ctx.needs_input_grad[1 : 1 + len(row)])
        return (None, *_pulled(ctx.how.call, ctx.how.plan, row, wanted, upstream), *(None,) * _FlexSecond.OUTPUTS)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        row = [primal_of(t) for t in ctx.saved_tensors]
        found = _pushed(ctx.how.call, ctx.how.plan, row, tangents[1 : 1 + len(row)])
        return tuple(_as_inputs(found, [row[i] for i in ctx.how.results]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], how: _Second, *row: Tensor) -> tuple[Any, Any]:
        kept, dims = row[: -_FlexSecond.OUTPUTS], in_dims[1 : -_FlexSecond.OUTPUTS]
        found = vmapped(info.batch_size, dims, how.plan, _widened(how.call, kept, _acc_of(row[0])))
        return tuple(_as_inputs(found, [kept[i] for i in how.results])), (0,) * len(how.results)


class FlexTangents(torch.autograd.Function):
    """(query, key, value, ..., the tangents of those that are moving) -> the tangents of out and lse."""

    @staticmethod
    def forward(given: Call | Computed, moving: tuple[bool, ...], *row: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(given, Computed) and (tangents := given.take_tangents()) is not None:
            return tangents
        call = _call_in(given)
        count = len(moving)
        t, _ = call.split(row[:count])
        rest = iter(row[count:])
        of_query, of_key, of_value, *of_buffers = (next(rest) if m else None for m in moving[: 3 + len(t.buffers)])
        having = [i for i, d in enumerate(of_buffers) if d is not None]
        _, _, out, lse, *_ = torch.ops.fusegrad.flex_attention_jvp(
            t.query, t.key, t.value, of_query, of_key, of_value, having, [of_buffers[i] for i in having],
            *call.scoring(t), 0,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        given, ctx.moving, *row = inputs
        ctx.call = _call_in(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*row)
        ctx.save_for_forward(*row)

    @staticmethod
    def plan(ctx: Any, row: Sequence[Tensor]) -> Plan:
        base = attention_plan(ctx.call, row[: len(ctx.moving)], (True, True, False), _acc_of(row[0]))
        return tangent_plan(base, places_of(ctx.moving))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        row = ctx.saved_tensors
        wanted = places_of(ctx.needs_input_grad[2:])
        return (None, None, *_pulled(ctx.call, FlexTangents.plan(ctx, row), row, wanted, upstream))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        row = [primal_of(t) for t in ctx.saved_tensors]
        out, lse = _pushed(ctx.call, FlexTangents.plan(ctx, row), row, tangents[2:])
        return out.to(row[0].dtype), lse

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, moving: tuple[bool, ...], *row: Tensor
    ) -> tuple[Any, Any]:
        return FlexTangents.of_each(info.batch_size, in_dims, call, moving, *row)

    @staticmethod
    def of_each(
        size: int, in_dims: tuple[Any, ...], call: Call, moving: tuple[bool, ...], *row: Tensor, autograd: bool = True
    ) -> tuple[Any, Any]:
        """`autograd`: the results can be differentiated."""
        count = len(moving)
        t, d = call.split(row[:count])[0], call.split(in_dims[2 : 2 + count])[0]
        places = places_of(moving)
        given = dict(zip(places, zip(row[count:], in_dims[2 + count :], strict=True), strict=True))
        each = [i in given and given[i][1] is not None for i in range(3, 3 + len(t.buffers))]
        each_key = any(i in given and given[i][1] is not None for i in (1, 2))
        folded, tensors = fold(call, t, d, size, each, each_key)
        tangents = []
        for i, (x, dim) in given.items():
            of = tensors.flat()[i]
            if i == 0:
                x = fold_rows(x, dim, size)
            elif i < 3:
                if of.size(0) == tensors.query.size(0):
                    x = moved(x, dim, size).expand(size, of.size(0) // size, *of.shape[1:]).flatten(0, 1)
            elif of.dim() > x.dim() - (dim is not None):
                x = moved(x, dim, size)
            tangents.append(x)
        run = FlexTangents.apply if autograd else FlexTangents.forward
        out, lse = run(folded, moving, *tensors.flat(), *tangents)
        return (unfold(out, size), unfold(lse, size)), (0, 0)
