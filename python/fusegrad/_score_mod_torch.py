"""score_mods and mask_mods evaluated by PyTorch's own ops, which differentiate as often as wanted.

The kernels know a score_mod and its first derivative. What is differentiated further reads the same text here: a
tensor for each statement, of dimensions [B, H, M, N] and one more for each axis, of size 1 where nothing depends on
them. Derivatives are those of PyTorch's ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegrad._C import score_mod as _language

__all__ = ["Program", "Values", "adds_reads", "check_linear", "evaluate", "evaluate_reads", "program"]

_REDUCTIONS = ("sum", "amax", "amin", "prod")
_PLACES = ("b", "h", "q_idx", "kv_idx")
_SPATIAL = len(_PLACES)


@dataclass(frozen=True)
class _Statement:
    op: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A text in pieces. `axes`: the statements that are axes, each with its extent; `upstream`: those that depend on
    the upstream gradient of a value with a derivative of its own."""

    statements: tuple[_Statement, ...]
    scalars: tuple[str, ...]
    result: str
    axes: dict[int, int]
    upstream: frozenset[int]
    most: int  # elements of one value for each pair of a query and a key


@functools.lru_cache(maxsize=512)
def program(text: str) -> Program:
    """Of a text of the language."""
    statements, scalars, result = [], [], ""
    for line in _language.canonical(text).splitlines()[1:]:
        words = line.split()
        if words[0] == "scalar":
            scalars.append(words[2])
        elif words[0] == "return":
            result = words[1]
        elif words[0].startswith("%"):
            statements.append(_Statement(words[2], tuple(words[3:])))
    axes = {i: int(s.operands[0]) for i, s in enumerate(statements) if s.op == "axis"}
    upstream: set[int] = set()
    over: list[set[int]] = []
    most = 1
    for i, s in enumerate(statements):
        places = [int(w[1:]) for w in s.operands if w[0] == "%"]
        if s.op != "custom" and (any(w[0] == "^" for w in s.operands) or any(p in upstream for p in places)):
            upstream.add(i)
        mine = {i} if i in axes else set().union(*(over[p] for p in places))
        most = max(most, math.prod(axes[a] for a in mine))
        over.append(mine - {places[0]} if s.op in _REDUCTIONS else mine)
    return Program(tuple(statements), tuple(scalars), result, axes, frozenset(upstream), most)


@functools.lru_cache(maxsize=512)
def check_linear(text: str) -> None:
    """Raises ValueError where a derivative of one's own is not linear in its upstream gradient: what is
    differentiated twice receives its gradient in parts."""
    declared = [line.split() for line in text.replace(";", "\n").splitlines()]
    try:
        _language.tangent(text, [words[2] == "f" for words in declared if words[:1] == ["buffer"]])
    except ValueError:
        raise ValueError(
            "flex_attention: a derivative of the score_mod's own must be linear in its upstream gradients where "
            "gradients are differentiated, but got one that is not"
        ) from None


class _Linear(NamedTuple):
    """How a value depends on the score and on reads: the score's factor, 0 or 1, and whether it is linear in reads,
    with a factor that depends on neither."""

    score: int
    reads: bool


_CONSTANT, _MINUS_INFINITY = _Linear(0, False), _Linear(-1, False)


def _linear(op: str, given: Sequence[_Linear | None]) -> _Linear | None:
    """Of a statement that is not a load; None where it is otherwise."""
    if all(g == _CONSTANT for g in given):
        return None if op in ("custom", "backward") else _CONSTANT
    known = [g for g in given if g is not None]
    if len(known) < len(given):
        return None
    if op == "where" and known[0] == _CONSTANT:
        choices = [g for g in known[1:] if g != _MINUS_INFINITY]  # which has no derivative
        if len({g.score for g in choices}) == 1:
            return _Linear(choices[0].score, any(g.reads for g in choices))
    if _MINUS_INFINITY in known:
        return None
    score, reads = sum(g.score for g in known), [g.reads for g in known]
    if (op == "add" and score <= 1) or (op == "sub" and score <= 1 and known[1].score == 0):
        return _Linear(score, any(reads))
    if score == 0 and (
        op in ("neg", "to_float", "mul") or (op == "div" and not reads[1]) or (op == "sum" and not reads[0])
    ):
        return _Linear(0, True) if sum(reads) == 1 else None
    return None


@functools.lru_cache(maxsize=512)
def adds_reads(text: str, buffers: frozenset[int]) -> bool:
    """Whether a score_mod is the score and a linear function of these buffers, whose factors depend on neither: its
    derivative by the score is 1. (Where it is -inf there is no derivative.)"""
    found: dict[str, _Linear | None] = {"score": _Linear(1, False), "-inf": _MINUS_INFINITY}
    parsed = program(text)
    for i, s in enumerate(parsed.statements):
        given = [found.get(w, _CONSTANT) for w in s.operands]
        if s.op == "load":
            fixed = all(g == _CONSTANT for g in given[1:])
            found[f"%{i}"] = _Linear(0, int(s.operands[0][1:]) in buffers) if fixed else None
        else:
            found[f"%{i}"] = _linear(s.op, given)
    result = found.get(parsed.result, _CONSTANT)
    return result is not None and result.score == 1


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
    """Of a primitive; most have PyTorch's name."""
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
    """Of one text, at one set of values."""

    def __init__(self, text: Program, values: Values, known: dict[str, Tensor] | None = None) -> None:
        self.text, self.values = text, values
        self.known: dict[str, Tensor] = dict(values.inputs) if known is None else known
        self.like = values.inputs["q_idx"]

    def scalar(self, place: int) -> Tensor:
        types = self.text.scalars
        if types[place] == "f":
            return self.constant(self.values.floats[sum(t == "f" for t in types[:place])], self.values.dtype)
        number = self.values.ints[sum(t != "f" for t in types[:place])]
        return self.constant(number, torch.bool if types[place] == "bool" else torch.int64)

    def constant(self, value: float | bool, dtype: torch.dtype) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.like.device)

    def operand(self, word: str) -> Tensor:
        found = self.known.get(word)
        if found is not None:
            return found
        if word[0] == "%":  # out of its order: a value that shares a backward with an earlier one
            self.run([int(word[1:])])
            return self.known[word]
        if word[0] == "$":
            found = self.scalar(int(word[1:]))
        elif word in ("true", "false"):
            found = self.constant(word == "true", torch.bool)
        elif word.lstrip("-").isdigit():
            found = self.constant(int(word), torch.int64)
        else:
            found = self.constant(float(word), self.values.dtype)
        self.known[word] = found
        return found

    def run(self, places: Sequence[int]) -> None:
        for i in places:
            s = self.text.statements[i]
            if s.op == "backward":
                continue
            if s.op == "custom":
                if f"%{i}" not in self.known:
                    self.own(s.operands[2])
            else:
                self.known[f"%{i}"] = self.value(i, s)

    def value(self, i: int, s: _Statement) -> Tensor:
        if s.op == "axis":
            extent = int(s.operands[0])
            shape = [1] * (_SPATIAL + len(self.text.axes))
            shape[_SPATIAL + list(self.text.axes).index(i)] = extent
            return torch.arange(extent, device=self.like.device).reshape(shape)
        if s.op == "load":
            return self.load_of(s, self.values.buffers)
        operands = [self.operand(w) for w in s.operands]
        if s.op in _REDUCTIONS and s.operands[0][0] == "%" and int(s.operands[0][1:]) in self.text.axes:
            axis, value = operands
            shape = torch.broadcast_shapes(axis.shape, value.shape)
            dim = _SPATIAL + list(self.text.axes).index(int(s.operands[0][1:]))
            return getattr(torch, s.op)(value.expand(shape), dim, keepdim=True)
        if s.op == "to_float":
            return operands[0].to(self.values.dtype)
        return _function(s.op)(*operands)

    def of_reads(self, s: _Statement, given: dict[int, Tensor]) -> Tensor:
        """Of a statement that is linear in these operands (adds_reads), what they give to it."""
        first = next(iter(given.values()))
        if s.op == "where":
            return torch.where(self.operand(s.operands[0]), given.get(1, 0), given.get(2, 0))
        if s.op == "sub":
            return given[0] - given[1] if len(given) == 2 else first if 0 in given else -first
        if s.op == "add":
            return sum(given.values(), torch.zeros((), device=first.device))
        if s.op == "mul":
            return first * self.operand(s.operands[0 if 1 in given else 1])
        if s.op == "div":
            return first / self.operand(s.operands[1])
        if s.op == "sum":
            axis = s.operands[0]
            shape = torch.broadcast_shapes(self.operand(axis).shape, first.shape)
            return first.expand(shape).sum(_SPATIAL + list(self.text.axes).index(int(axis[1:])), keepdim=True)
        return -first if s.op == "neg" else first

    def load_of(self, s: _Statement, buffers: Sequence[Tensor] | dict[int, Tensor]) -> Tensor:
        buffer = buffers[int(s.operands[0][1:])]
        part = self.part(buffer, s.operands[1:])
        return self.load(buffer, [self.operand(w) for w in s.operands[1:]]) if part is None else part

    def part(self, buffer: Tensor, words: Sequence[str]) -> Tensor | None:
        """A read at some of b, h, q_idx and kv_idx themselves: a part of the tensor, whose gradient is one as well."""
        starts, part = self.values.starts, self.values.taking_part
        if starts is None or not buffer.is_floating_point() or len(set(words)) < len(words) or not words:
            return None
        if not set(words) <= set(_PLACES):
            return None
        for dim, word in enumerate(words):
            first, size = starts[word], self.known[word].numel()
            if first + size > buffer.size(dim):
                return None
            buffer = buffer.narrow(dim, first, size)
        order = sorted(range(len(words)), key=lambda i: _PLACES.index(words[i]))
        shape = [1] * (_SPATIAL + len(self.text.axes))
        for word in words:
            shape[_PLACES.index(word)] = self.known[word].numel()
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

    def own(self, backward: str) -> None:
        """All values that share a backward."""
        text, place = self.text, int(backward[1:])
        customs = [
            (f"%{i}", s) for i, s in enumerate(text.statements) if s.op == "custom" and s.operands[2] == backward
        ]
        full = (*self.values.sizes, *[1] * len(text.axes))
        pairs = text.statements[place].operands
        wanted, xs = pairs[1::2], pairs[::2]
        # What the backward reads of the forward, and its statements in order. Of its own values it reads the results,
        # as an autograd.Function that saves its outputs: their derivatives are its own again.
        sources = {s.operands[1]: j for j, (_, s) in enumerate(customs) if s.operands[1] not in xs}
        within = set(text.upstream)
        for i, s in enumerate(text.statements):
            if s.op in ("custom", "backward"):
                continue  # of another Function: it is read
            if any(w in sources or (w[0] == "%" and int(w[1:]) in within) for w in s.operands):
                within.add(i)
        needed: set[int] = set()
        reads: dict[str, Tensor] = {}

        pending = list(wanted)
        while pending:
            word = pending.pop()
            i = int(word[1:]) if word[0] == "%" else -1
            if i in within and word not in sources:
                if i not in needed:
                    needed.add(i)
                    pending += [w for w in text.statements[i].operands if w[0] not in "^@"]
            elif word[0] != "^" and word not in sources:
                reads[word] = self.operand(word)
        names, order = list(reads), sorted(needed)
        given = self.values  # not self, which holds the values that the Function makes: a cycle through their graph

        def make(results: Sequence[Tensor], upstream: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
            known = dict(zip(names, tensors, strict=True))
            known.update({word: results[j] for word, j in sources.items()})
            known.update({s.operands[0]: g for (_, s), g in zip(customs, upstream, strict=True)})
            inner = _Evaluation(text, given, known)
            inner.run(order)
            return [inner.operand(word).expand(full) for word in wanted]

        values = [self.operand(s.operands[1]).expand(full) for _, s in customs]
        inputs = [self.operand(word).expand(full) for word in xs]
        found = _Own.apply(make, (len(values), len(inputs)), *values, *inputs, *reads.values())
        for (name, _), value in zip(customs, found, strict=True):
            self.known[name] = value


def evaluate(text: Program, values: Values) -> Tensor:
    """The result, which broadcasts to [B, H, M, N]."""
    axes = len(text.axes)
    if axes:
        values.inputs = {k: t.reshape(*t.shape, *[1] * axes) for k, t in values.inputs.items()}
    run = _Evaluation(text, values)
    run.run([i for i in range(len(text.statements)) if i not in text.upstream])
    found = run.operand(text.result)
    return found.reshape(found.shape[:_SPATIAL]) if axes and found.dim() > _SPATIAL else found


def evaluate_reads(text: Program, values: Values, buffers: Sequence[Tensor | None]) -> Tensor | None:
    """What `buffers`, in place of those of adds_reads, add to the score, linear in them. None: nothing, of one and of
    all."""
    axes = len(text.axes)
    if axes:
        values.inputs = {k: t.reshape(*t.shape, *[1] * axes) for k, t in values.inputs.items()}
    run = _Evaluation(text, values)
    parts: dict[str, Tensor] = {}
    for i, s in enumerate(text.statements):
        if s.op == "load":
            place = int(s.operands[0][1:])
            if (buffer := buffers[place]) is not None:
                parts[f"%{i}"] = run.load_of(s, {place: buffer})
        elif given := {j: parts[w] for j, w in enumerate(s.operands) if w in parts}:
            parts[f"%{i}"] = run.of_reads(s, given)
    found = parts.get(text.result)
    return found.reshape(found.shape[:_SPATIAL]) if found is not None and axes and found.dim() > _SPATIAL else found
