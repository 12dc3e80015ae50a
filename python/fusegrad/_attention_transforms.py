"""Flex attention under forward mode, ``torch.func``, vmap, and where its backward is itself differentiated.

Three autograd Functions, whose forwards are the kernels: attention, its first gradients, its tangents. The derivatives
of the latter two are those of the composition in _attention_composite.py. Under vmap each is one call over a larger
batch. Of a row with scores s, weights p = exp(s - lse) and tangents ds of its scores: d lse = sum p ds, and
d out = sum p (ds - d lse) v + sum p dv. See docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ._attention_composite import (
    LOW,
    Call,
    Mod,
    Scoring,
    Tensors,
    attention_plan,
)
from ._attention_fold import fold, fold_rows, moved, unfold
from ._attention_second import second_derivatives, takes
from ._chunks import Plan, gradient_plan, pulled, pushed, tangent_plan, vmapped
from ._eager import eager_only
from ._transforms import as_autocast_wants, outside_transforms, primal_of, unwrapped

__all__ = ["attend"]

_NUMBERS = 2**63 - 1
_FORWARD = 6  # what the forward returns: out, lse, max_scores, max_ties, out_low, lse_low
_UPSTREAM = 3  # of out, lse and max_scores
_BETWEEN = _UPSTREAM + _FORWARD  # what the backward takes between query, key and value and what shapes the scores


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


def _places(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


@dataclass
class _Computed:
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


def _call_in(given: Call | _Computed) -> Call:
    return given.call if isinstance(given, _Computed) else given


class _FlexAttention(torch.autograd.Function):
    """(query, key, value, ...) -> out, lse and four that are not differentiable."""

    @staticmethod
    def forward(given: Call | _Computed, *tensors: Tensor) -> tuple[Tensor, ...]:
        if isinstance(given, _Computed) and (outputs := given.take_outputs()) is not None:
            return outputs
        call = _call_in(given)
        t, _ = call.split(tensors)
        return tuple(torch.ops.fusegrad.flex_attention_forward(t.query, t.key, t.value, *call.scoring(t), LOW))

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
        tensors, outputs = saved[:-_FORWARD], saved[-_FORWARD:]
        wanted = tuple(bool(w) for w in ctx.needs_input_grad[1:])
        found = gradients(call, wanted, tensors, outputs, (*upstream[:2], None))
        return (None, *found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = [primal_of(t) for t in ctx.saved_tensors]
        moving = tuple(d is not None and t.is_floating_point() for t, d in zip(tensors, tangents[1:], strict=True))
        given = [d for d, m in zip(tangents[1:], moving, strict=True) if m]
        return (*_FlexTangents.apply(ctx.given, moving, *tensors, *given), *(None,) * (_FORWARD - 2))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor) -> tuple[Any, Any]:
        size = info.batch_size
        folded, t = fold(call, call.split(tensors)[0], call.split(in_dims[1:])[0], size)
        results = _FlexAttention.apply(folded, *t.flat())
        return tuple(unfold(r, size) for r in results), (0,) * _FORWARD


def gradients(
    call: Call,
    wanted: Sequence[bool],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Of the call's tensors, each where wanted, differentiable again. `outputs`: what the forward returned;
    `upstream`: of out, lse and max_scores."""
    result: list[Tensor | None] = [None] * len(tensors)
    having = tuple(g is not None for g in upstream)
    if not any(having) or not any(wanted):
        return result
    given = [g for g in upstream if g is not None]
    found = _FlexGradients.apply(call, tuple(wanted), having, *tensors, *given, *outputs)
    for i, g in zip(_places(wanted), found, strict=True):
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
        end = len(row) - _FORWARD
        begin = end - sum(having)
        return _Split(tuple(row[:begin]), tuple(row[begin:end]), tuple(row[end:]))

    def each_upstream(self, having: Sequence[bool]) -> list[Any]:
        """With None where there is none."""
        rest = iter(self.upstream)
        return [next(rest) if h else None for h in having]


class _FlexGradients(torch.autograd.Function):
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
        end = len(row) - _FORWARD
        out, lse, _, _, *low = row[end:]
        kept = (*row[:end], out, lse, *low)  # the composition computes these again
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def plan(ctx: Any, tensors: Sequence[Tensor]) -> Plan:
        acc = _acc_of(tensors[0])
        inputs = tensors[: len(tensors) - sum(ctx.having)]
        base = attention_plan(ctx.call, inputs, ctx.having, acc)
        return gradient_plan(base, _places(ctx.wanted), range(sum(ctx.having)))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, outputs = saved[: -_FlexSecond.OUTPUTS], saved[-_FlexSecond.OUTPUTS :]
        acc = _acc_of(tensors[0])
        wanted = _places(ctx.needs_input_grad[3 : 3 + len(tensors)])
        having = [j for j, g in enumerate(upstream) if g is not None]
        moving = [_places(ctx.wanted)[j] for j in having]
        plan = _FlexGradients.plan(ctx, tensors)
        if wanted and having and takes(ctx.call, tensors, ctx.having, moving, wanted):
            found: list[Tensor | None] = [None] * len(tensors)
            given = [g for g in upstream if g is not None]
            how = _Second(ctx.call, ctx.having, tuple(moving), tuple(wanted), gradient_plan(plan, wanted, having))
            for i, g in zip(wanted, _FlexSecond.apply(how, *tensors, *given, *outputs), strict=True):
                found[i] = g
        else:
            composed = pulled(plan, _widened(ctx.call, tensors, acc), wanted, _in(acc, upstream))
            found = _as_inputs(composed, tensors)
        return (None, None, None, *found, *(None,) * _FORWARD)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = [primal_of(t) for t in ctx.saved_tensors]
        tensors, outputs = saved[: -_FlexSecond.OUTPUTS], saved[-_FlexSecond.OUTPUTS :]
        acc = _acc_of(tensors[0])
        plan = _FlexGradients.plan(ctx, tensors)
        given = tangents[3 : 3 + len(tensors)]
        moving = [i for i, d in enumerate(given) if d is not None and tensors[i].is_floating_point()]
        results = _places(ctx.wanted)
        if takes(ctx.call, tensors, ctx.having, moving, results):
            how = _Second(ctx.call, ctx.having, tuple(moving), tuple(results), tangent_plan(plan, moving))
            return _FlexSecond.apply(how, *tensors, *(given[i] for i in moving), *outputs)
        found = pushed(plan, _widened(ctx.call, tensors, acc), _in(acc, given))
        return tuple(_as_inputs(found, [tensors[i] for i in results]))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[bool, ...], having: tuple[bool, ...],
        *row: Tensor,
    ) -> tuple[Any, Any]:  # fmt: skip
        return _FlexGradients.of_each(info.batch_size, in_dims, call, wanted, having, *row)

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
        run = _FlexGradients.apply if autograd else _FlexGradients.forward
        found = run(folded, wanted, having, *tensors.flat(), *rest)
        batch = tensors.query.size(0) // size
        shared = [False] * 3
        for i, (x, dim) in enumerate(((t.key, d.key), (t.value, d.value))):
            shared[i + 1] = x.size(0 if dim != 0 else 1) < batch
        results = []
        for i, g in zip(_places(wanted), found, strict=True):
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
        acc = _acc_of(row[0])
        wanted = _places(ctx.needs_input_grad[1 : 1 + len(row)])
        found = pulled(ctx.how.plan, _widened(ctx.how.call, row, acc), wanted, _in(acc, upstream))
        return (None, *_as_inputs(found, row), *(None,) * _FlexSecond.OUTPUTS)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        row = [primal_of(t) for t in ctx.saved_tensors]
        acc = _acc_of(row[0])
        found = pushed(ctx.how.plan, _widened(ctx.how.call, row, acc), _in(acc, tangents[1 : 1 + len(row)]))
        return tuple(_as_inputs(found, [row[i] for i in ctx.how.results]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], how: _Second, *row: Tensor) -> tuple[Any, Any]:
        kept, dims = row[: -_FlexSecond.OUTPUTS], in_dims[1 : -_FlexSecond.OUTPUTS]
        found = vmapped(info.batch_size, dims, how.plan, _widened(how.call, kept, _acc_of(row[0])))
        return tuple(_as_inputs(found, [kept[i] for i in how.results])), (0,) * len(how.results)


class _FlexTangents(torch.autograd.Function):
    """(query, key, value, ..., the tangents of those that are moving) -> the tangents of out and lse."""

    @staticmethod
    def forward(given: Call | _Computed, moving: tuple[bool, ...], *row: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(given, _Computed) and (tangents := given.take_tangents()) is not None:
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
        return tangent_plan(base, _places(ctx.moving))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        row = ctx.saved_tensors
        acc = _acc_of(row[0])
        wanted = _places(ctx.needs_input_grad[2:])
        found = pulled(_FlexTangents.plan(ctx, row), _widened(ctx.call, row, acc), wanted, _in(acc, upstream))
        return (None, None, *_as_inputs(found, row))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        row = [primal_of(t) for t in ctx.saved_tensors]
        acc = _acc_of(row[0])
        out, lse = pushed(_FlexTangents.plan(ctx, row), _widened(ctx.call, row, acc), _in(acc, tangents[2:]))
        return out.to(row[0].dtype), lse

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, moving: tuple[bool, ...], *row: Tensor
    ) -> tuple[Any, Any]:
        return _FlexTangents.of_each(info.batch_size, in_dims, call, moving, *row)

    @staticmethod
    def of_each(
        size: int, in_dims: tuple[Any, ...], call: Call, moving: tuple[bool, ...], *row: Tensor, autograd: bool = True
    ) -> tuple[Any, Any]:
        """`autograd`: the results can be differentiated."""
        count = len(moving)
        t, d = call.split(row[:count])[0], call.split(in_dims[2 : 2 + count])[0]
        places = _places(moving)
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
        run = _FlexTangents.apply if autograd else _FlexTangents.forward
        out, lse = run(folded, moving, *tensors.flat(), *tangents)
        return (unfold(out, size), unfold(lse, size)), (0, 0)


# --- the ops that call back -------------------------------------------------------------------------------------


class _Unpacked(NamedTuple):
    """Of what the ops below the front end take: the call, its tensors, and the arguments `between` value and what
    shapes the scores, and `behind` that."""

    call: Call
    tensors: tuple[Tensor, ...]
    between: Sequence[Any]
    behind: Sequence[Any]

    @staticmethod
    def of(arguments: Sequence[Any], between: int) -> _Unpacked:
        """Of an op's arguments in its schema's order; so many are between."""
        first, last = 3 + between, 3 + between + len(Scoring._fields)
        scoring = Scoring(*arguments[first:last])
        tensors = (*arguments[:3], *scoring.of_tensors(scoring))
        return _Unpacked(scoring.call(), tensors, arguments[3:first], arguments[last:])

    @staticmethod
    def of_each(values: Sequence[Any], arguments: Sequence[Any], between: int) -> tuple[Any, ...]:
        """Of what goes with each of an op's arguments, what goes with the call's tensors."""
        at = slice(3 + between, 3 + between + len(Scoring._fields))
        return (*values[:3], *Scoring(*arguments[at]).of_tensors(Scoring(*values[at])))

    @staticmethod
    def of_backward(arguments: Sequence[Any]) -> tuple[_Unpacked, tuple[bool, ...]]:
        """Of flex_attention_backward's, and which of the tensors' gradients are wanted. Between are upstream gradients
        and what the forward returned."""
        unpacked = _Unpacked.of(arguments, _BETWEEN)
        deterministic, needs_grad = unpacked.behind
        wanted = (*needs_grad, *(False,) * (len(unpacked.tensors) - len(needs_grad)))
        return unpacked._replace(call=replace(unpacked.call, deterministic=deterministic)), wanted


def _returned(call: Call, found: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    query, key, value, *rest = (like.new_empty(0) if g is None else g for g in found)
    return query, key, value, rest[: call.counts[0]]


def _gradient_graph(*arguments: Any) -> Any:
    """flex_attention_backward as a graph."""
    (call, tensors, between, _), wanted = _Unpacked.of_backward(arguments)
    return _returned(call, gradients(call, wanted, tensors, between[_UPSTREAM:], between[:_UPSTREAM]), tensors[0])


def _batched_gradients(size: int, dims: Sequence[Any], arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """flex_attention_backward of `size` calls; `dims`: the batched dimension of each tensor, None for none. The results
    of those that are wanted, with the batch first, and which these are. A graph where one is recorded."""
    (call, tensors, between, _), wanted = _Unpacked.of_backward(arguments)
    upstream, outputs = between[:_UPSTREAM], between[_UPSTREAM:]
    dims_of_upstream, dims_of_outputs = dims[3 : 3 + _UPSTREAM], dims[3 + _UPSTREAM : 3 + _BETWEEN]
    having = tuple(g is not None for g in upstream)
    given = [(g, d) for g, d in zip(upstream, dims_of_upstream, strict=True) if g is not None]
    result: list[Tensor | None] = [None] * len(tensors)
    if any(wanted) and given:
        dims_of_tensors = _Unpacked.of_each(dims, arguments, _BETWEEN)
        in_dims = (None, None, None, *dims_of_tensors, *(d for _, d in given), *dims_of_outputs)
        found, _ = _FlexGradients.of_each(
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
        for i, g in zip(_places(wanted), found, strict=True):
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
    found, _ = _FlexTangents.of_each(size, in_dims, call, moving, *tensors, *tangents, autograd=False)
    # The values, as they were.
    out, lse, _, _, *low = _FlexAttention.forward(call, *tensors)
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
    """Of the composition, the pairs that the kernels keep of one call over the elements: see fold."""
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


def _in_one_pass(call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | _Computed | None:
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
    # Of jacobian(vectorize=True) the tangents alone are batched, and the values are not to be.
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


def _computed(call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> _Computed:
    with torch.no_grad():
        out, lse, of_out, of_lse, *low = _with_tangents(call, primals, tangents, LOW)
        return _Computed(call, (out, lse, lse.new_empty(0), lse.new_empty(0), *low), (of_out, of_lse))


def _recorded(call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """out, lse and their tangents with the graph of both."""
    given = _computed(call, primals, tangents)
    out, lse, *_ = _FlexAttention.apply(given, *primals)
    moving = tuple(d is not None and t.is_floating_point() for t, d in zip(primals, tangents, strict=True))
    moved = [d for d, m in zip(tangents, moving, strict=True) if m]
    return out, lse, *_FlexTangents.apply(given, moving, *primals, *moved)


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
        (len(score[1]), len(mask[1]), len(kv_blocks)), deterministic,
    )  # fmt: skip
    t = Tensors(query, key, value, tuple(score[1]), tuple(mask[1]), tuple(kv_blocks), seed)
    found = _in_one_pass(call, t.flat())
    if isinstance(found, tuple):
        return found
    out, lse, *_ = _FlexAttention.apply(found or call, *t.flat())
    return out, lse
