"""score_mods and mask_mods evaluated by PyTorch's own ops, which differentiate as often as wanted.

The kernels know a score_mod and its first derivative. What is differentiated further reads the same graph here: a
tensor for each node, of dimensions [B, H, M, N] and one more for each axis, of size 1 where nothing depends on them.
Derivatives are those of PyTorch's ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegrad._C import score_mod as _language

from ._program import LEAVES, PLACES, Node, Program, program

__all__ = ["Values", "adds_reads", "check_linear", "evaluate", "evaluate_reads"]

_REDUCTIONS = ("sum", "amax", "amin", "prod")
_SPATIAL = len(PLACES)


@functools.lru_cache(maxsize=512)
def check_linear(text: str) -> None:
    """Raises ValueError where a derivative of one's own is not linear in its upstream gradient: what is
    differentiated twice receives its gradient in parts."""
    try:
        _language.tangent(text, [type_ == _language.FLOAT for type_, _ in _language.parse(text).buffers()])
    except ValueError:
        raise ValueError(
            "flex_attention: a derivative of the score_mod's own must be linear in its upstream gradients where "
            "gradients are differentiated, but got one that is not"
        ) from None


@functools.lru_cache(maxsize=512)
def _tangent(text: str, moved: tuple[bool, ...]) -> Program:
    """The tangent of a score_mod along these of its buffers and `grad`, the tangent of the score."""
    return program(_language.tangent(text, moved))


@functools.lru_cache(maxsize=512)
def adds_reads(text: str, buffers: frozenset[int]) -> bool:
    """Whether a score_mod is the score and a linear function of these buffers, whose factors depend on neither: its
    derivative by the score is 1. (Where it is -inf there is no derivative.)"""
    given = _language.parse(text)
    count = len(given.buffers())
    for n in _tangent(text, tuple(i in buffers for i in range(count))).nodes:
        if (n.op, n.of) == ("input", "score") or (n.op == "load" and n.of in buffers):
            return False
    g = _language.graph(given.kind())  # the same without branches of -inf
    for type_, rank in given.buffers():
        g.add_buffer(type_, rank)
    for type_ in given.scalars():
        g.add_scalar(type_)
    made: list[int] = []
    for i, (op, _, _, operands) in enumerate(given.nodes()):
        images = [made[x] for x in operands]
        choices = [x for x in images[1:] if g.value(x) != -math.inf]
        made.append(choices[0] if op == "where" and len(choices) == 1 else g.copy(given, i, images))
    derivative = _language.parse(_language.derivative(g.text(made[given.result()]), [False] * count))
    return derivative.node(derivative.result())[::2] == ("input", "grad")


@dataclass
class Values:
    """What a text reads. Inputs broadcast to [B, H, M, N]; `taking_part`, a bool tensor of such a shape or None for
    all: where it is false nothing is read from a buffer but its first element."""

    inputs: dict[str, Tensor]
    buffers: Sequence[Tensor]
    floats: Sequence[float]
    ints: Sequence[int]
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]
    taking_part: Tensor | None = None
    starts: dict[str, int] | None = None  # where the inputs of places begin, each of which is a range in its dimension

    @property
    def device(self) -> torch.device:
        return self.inputs["q_idx"].device


def _floor_div(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.floor_divide(a, b)
    zero = b == 0
    return torch.where(zero, 0, torch.floor_divide(a, torch.where(zero, 1, b)))


def _mod(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.remainder(a, b)
    zero = b == 0
    return torch.where(zero, 0, torch.remainder(a, torch.where(zero, 1, b)))


def _pow(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.pow(a, b)
    sign = torch.where(b % 2 == 0, 1, a)
    to_negative = torch.where(a.abs() == 1, sign, 0)
    return torch.where(b < 0, to_negative, torch.pow(a, b.clamp_min(0)))


def _not(a: Tensor) -> Tensor:
    return torch.bitwise_not(a)


def _shifted(shift: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def shifted(a: Tensor, b: Tensor) -> Tensor:
        out = (b < 0) | (b >= 64)
        left = torch.zeros_like(a) if shift is torch.bitwise_left_shift else torch.bitwise_right_shift(a, 63)
        return torch.where(out, left, shift(a, torch.where(out, 0, b)))

    return shifted


def _to_int(a: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a.to(torch.int64)
    a = a.detach()
    least, most = -(2**63), 2**63 - 1
    inside = torch.where(a.isnan() | (a >= 2.0**63) | (a < -(2.0**63)), 0, a).to(torch.int64)
    return torch.where(a >= 2.0**63, most, torch.where(a < -(2.0**63), least, inside))


_TORCH: dict[str, Callable[..., Tensor]] = {
    "floor_div": _floor_div, "mod": _mod, "pow": _pow, "min": torch.minimum, "max": torch.maximum,
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "detach": torch.detach, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": _not, "shl": _shifted(torch.bitwise_left_shift), "shr": _shifted(torch.bitwise_right_shift),
    "within": lambda a, n: torch.where((a >= 0) & (a < n), a, n), "to_int": _to_int, "to_bool": lambda a: a != 0,
}  # fmt: skip


def _function(op: str) -> Callable[..., Tensor]:
    """The function of a primitive; most have PyTorch's name."""
    found = _TORCH.get(op)
    return found if found is not None else getattr(torch, op)


class _Own(torch.autograd.Function):
    """Values whose derivatives are those of a `backward` of the text: (how it is evaluated, how many values and
    inputs, these, what else it reads) -> values."""

    generate_vmap_rule = True

    @staticmethod
    def forward(make: Any, counts: tuple[int, int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in tensors[: counts[0]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.make, ctx.counts, *tensors = inputs
        ctx.save_for_backward(*output, *tensors[sum(ctx.counts) :])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, _ = ctx.counts
        results, reads = ctx.saved_tensors[:values], ctx.saved_tensors[values:]
        return (None, None, *(None,) * values, *ctx.make(results, upstream, reads), *(None,) * len(reads))


class _Evaluation:
    """The values of one text's nodes, at one set of inputs."""

    def __init__(self, text: Program, values: Values, known: dict[int, Tensor] | None = None) -> None:
        self.text, self.values = text, values
        self.known = {} if known is None else known
        self.device = values.device

    def scalar(self, place: int) -> float:
        of_floats = [t == _language.FLOAT for t in self.text.scalars]
        index = of_floats[:place].count(of_floats[place])
        return self.values.floats[index] if of_floats[place] else self.values.ints[index]

    def dtype(self, type_: int) -> torch.dtype:
        return (torch.bool, torch.int64, self.values.dtype)[type_]

    def constant(self, value: float | bool, dtype: torch.dtype) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.device)

    def operand(self, i: int) -> Tensor:
        if i not in self.known:
            n = self.text.nodes[i]
            if n.op not in LEAVES:  # out of its order: a value that shares a backward with an earlier one
                self.run([i])
            elif n.op == "input":
                self.known[i] = self.values.inputs[n.of]
            else:
                number = self.scalar(n.of) if n.op == "scalar" else n.of if n.op == "constant" else 0
                self.known[i] = self.constant(number, self.dtype(n.type))
        return self.known[i]

    def run(self, places: Sequence[int]) -> None:
        for i in places:
            n = self.text.nodes[i]
            if n.op == "backward" or n.op in LEAVES:
                continue
            if n.op == "custom":
                if i not in self.known:
                    self.own(n.operands[1])
            else:
                self.known[i] = self.value(i, n)

    def dim(self, axis: int) -> int:
        return _SPATIAL + self.text.axes.index(axis)

    def value(self, i: int, n: Node) -> Tensor:
        if n.op == "axis":
            shape = [1] * (_SPATIAL + len(self.text.axes))
            shape[self.dim(i)] = n.of
            return torch.arange(n.of, device=self.device).reshape(shape)
        if n.op == "load":
            return self.load_of(n, self.values.buffers)
        operands = [self.operand(x) for x in n.operands]
        if n.op in _REDUCTIONS:
            axis, value = operands
            shape = torch.broadcast_shapes(axis.shape, value.shape)
            return getattr(torch, n.op)(value.expand(shape), self.dim(n.operands[0]), keepdim=True)
        if n.op == "to_float":
            return operands[0].to(self.values.dtype)
        return _function(n.op)(*operands)

    def load_of(self, n: Node, buffers: Sequence[Tensor] | dict[int, Tensor]) -> Tensor:
        buffer = buffers[n.of]
        part = self.part(buffer, n.operands)
        return self.load(buffer, [self.operand(x) for x in n.operands]) if part is None else part

    def part(self, buffer: Tensor, indices: Sequence[int]) -> Tensor | None:
        """A read at some of b, h, q_idx and kv_idx themselves: a part of the tensor, whose gradient is one as well."""
        starts, part = self.values.starts, self.values.taking_part
        names = [self.text.nodes[i].of for i in indices if self.text.nodes[i].op == "input"]
        if starts is None or not buffer.is_floating_point() or not indices or len(set(names)) < len(indices):
            return None
        sizes = {name: self.values.inputs[name].numel() for name in names}
        for dim, name in enumerate(names):
            if starts[name] + sizes[name] > buffer.size(dim):
                return None
            buffer = buffer.narrow(dim, starts[name], sizes[name])
        order = sorted(range(len(names)), key=lambda i: PLACES.index(names[i]))
        shape = [sizes.get(place, 1) for place in PLACES] + [1] * len(self.text.axes)
        found = buffer.permute(order).reshape(shape).to(self.values.dtype)
        if part is None:
            return found
        return torch.where(part.reshape(*part.shape, *[1] * len(self.text.axes)), found, 0)

    def load(self, buffer: Tensor, indices: list[Tensor]) -> Tensor:
        """nan (0, false) out of range: where that is an error, the forward has raised it."""
        kind = torch.bool if buffer.dtype == torch.bool else torch.int64
        if buffer.is_floating_point():
            kind = self.values.dtype
        if not indices:
            return buffer.to(kind)
        inside: Tensor | None = None
        places = []
        for index, size in zip(indices, buffer.shape, strict=True):
            index = torch.where(index < 0, index + size, index)
            within = (index >= 0) & (index < size)
            inside = within if inside is None else inside & within
            places.append(index)
        assert inside is not None
        nothing: float | bool = float("nan") if buffer.is_floating_point() else 0
        if kind == torch.bool:
            nothing = False
        if buffer.numel() == 0:
            return self.constant(nothing, kind).expand(inside.shape)
        reading, outside = inside, ~inside
        part = self.values.taking_part
        if part is not None:
            part = part.reshape(*part.shape, *[1] * len(self.text.axes))
            reading, outside = inside & part, ~inside & part
        found = buffer[tuple(torch.where(reading, p, 0) for p in places)]
        return torch.where(outside, nothing, found.to(kind))

    def own(self, backward: int) -> None:
        """All values that share a backward."""
        text = self.text
        nodes = text.nodes
        customs = [i for i, n in enumerate(nodes) if n.op == "custom" and n.operands[1] == backward]
        upstreams = {n.of: i for i, n in enumerate(nodes) if n.op == "upstream"}
        full = (*self.values.sizes, *[1] * len(text.axes))
        xs, wanted = nodes[backward].operands[::2], nodes[backward].operands[1::2]
        # What the backward reads of the forward, and its nodes in order. For its own values it reads the results, as an
        # autograd.Function that saves its outputs: their derivatives are its own again.
        values = [nodes[i].operands[0] for i in customs]
        sources = {value: j for j, value in enumerate(values) if value not in xs}
        within = set(text.upstream)
        for i, n in enumerate(nodes):
            if n.op in ("custom", "backward"):
                continue  # of another Function: it is read
            if any(x in sources or x in within for x in n.operands):
                within.add(i)
        needed: set[int] = set()
        reads: dict[int, Tensor] = {}
        pending = list(wanted)
        while pending:
            i = pending.pop()
            if i in sources:
                continue
            if i not in within:
                reads[i] = self.operand(i)
            elif i not in needed:
                needed.add(i)
                pending += nodes[i].operands
        names, order = list(reads), sorted(needed)
        given = self.values  # not self, which holds the values that the Function makes: a cycle through their graph

        def make(results: Sequence[Tensor], upstream: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
            known = dict(zip(names, tensors, strict=True))
            known.update({value: results[j] for value, j in sources.items()})
            for custom, gradient in zip(customs, upstream, strict=True):
                known[upstreams.get(nodes[custom].of, -1)] = gradient
            inner = _Evaluation(text, given, known)
            inner.run(order)
            return [inner.operand(x).expand(full) for x in wanted]

        inputs = [self.operand(x).expand(full) for x in xs]
        results = [self.operand(x).expand(full) for x in values]
        found = _Own.apply(make, (len(results), len(inputs)), *results, *inputs, *reads.values())
        self.known.update(zip(customs, found, strict=True))


def evaluate(text: Program, values: Values) -> Tensor:
    """The result, which broadcasts to [B, H, M, N]."""
    axes = len(text.axes)
    if axes:
        values.inputs = {k: t.reshape(*t.shape, *[1] * axes) for k, t in values.inputs.items()}
    run = _Evaluation(text, values)
    run.run([i for i in range(len(text.nodes)) if i not in text.upstream])
    found = run.operand(text.result)
    return found.reshape(found.shape[:_SPATIAL]) if axes and found.dim() > _SPATIAL else found


def evaluate_reads(text: str, values: Values, buffers: Sequence[Tensor | None]) -> Tensor:
    """What `buffers`, in place of those of adds_reads, add to the score, linear in them. None: nothing."""
    values.inputs = {**values.inputs, "grad": torch.zeros((1,) * _SPATIAL, dtype=values.dtype, device=values.device)}
    values.buffers = [*values.buffers, *(b for b in buffers if b is not None)]
    return evaluate(_tangent(text, tuple(b is not None for b in buffers)), values)
