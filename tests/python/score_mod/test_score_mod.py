"""The score_mod language: random graphs against float64 autograd of the same expression, and its texts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad._C import score_mod as language
from fusegrad._program import program
from fusegrad._score_mod_torch import Values, evaluate
from fusegrad.score_mod import split_scalars
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

EXAMPLES = int(os.environ.get("FUSEGRAD_SCORE_MOD_EXAMPLES", "300"))
KINDS = {"bool": torch.bool, "i64": torch.int64, "f": torch.float64}
# Larger values amplify rounding; values that lie so close to a jump may fall on either side of it.
LARGEST, MARGIN = 1e5, 1e-9
LARGEST_BUFFER = 10**6


# --- the same primitives in PyTorch ---------------------------------------------------------------------------


def integer_or(on_integers: Callable, on_floats: Callable) -> Callable:
    return lambda *x: on_floats(*x) if x[0].is_floating_point() else on_integers(*x)


def nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


def shifted(shift: Callable[[Tensor, Tensor], Tensor], left: bool) -> Callable:
    def function(a: Tensor, b: Tensor) -> Tensor:
        outside = (b < 0) | (b > 63)
        rest = torch.zeros_like(a) if left else a >> 63
        return torch.where(outside, rest, shift(a, b.clamp(0, 63)))

    return function


def clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """torch.clamp with docs/design/score_mod.md's subgradients: PyTorch's own at the bounds depend on its version."""
    to_low = (x < low) & (low < high)
    to_high = (x > high) | (low > high)
    to_x = (x >= low) & (x <= high)
    value = torch.clamp(*torch.broadcast_tensors(x, low, high)).detach()
    for chosen, operand in ((to_low, low), (to_high, high), (to_x, x)):
        if operand.requires_grad:
            value = torch.where(chosen, operand, value)
    return value


REFERENCE: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_div": integer_or(
        lambda a, b: torch.where(b == 0, 0, torch.div(a, nonzero(b), rounding_mode="floor")),
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
    ),
    "mod": integer_or(lambda a, b: torch.where(b == 0, 0, torch.remainder(a, nonzero(b))), torch.remainder),
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "square": torch.square,
    "min": torch.minimum,
    "max": torch.maximum,
    "clamp": clamp,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "erfc": torch.erfc,
    "atan": torch.atan,
    "asin": torch.asin,
    "acos": torch.acos,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "detach": torch.detach,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": shifted(torch.bitwise_left_shift, left=True),
    "shr": shifted(torch.bitwise_right_shift, left=False),
    "within": lambda a, n: torch.where((a >= 0) & (a < n), a, n),
    "where": torch.where,
    "to_float": lambda x: x.double(),
    "to_int": lambda x: torch.where(x.isnan(), 0, x).long(),
    "to_bool": lambda x: x.bool(),
}
JUMPS_AT_INTEGERS = {"floor", "ceil", "trunc", "to_int"}
JUMPS_AT_EQUALITY = {"eq", "ne", "lt", "le", "gt", "ge", "min", "max"}
JUMPS_AT_ZERO = {"sign", "abs", "relu", "to_bool"}
JUMPS = JUMPS_AT_INTEGERS | JUMPS_AT_EQUALITY | JUMPS_AT_ZERO | {"round", "clamp", "mod", "floor_div"}
RULES = ["numeric", "float", "compare", "bitwise", "integer", "where", "to_float", "to_int", "to_bool"]
TABLE = {name: (arity, RULES[rule]) for name, arity, rule in language.primitives()}


def promoted(rule: str, operands: list[Tensor]) -> list[Tensor]:
    """What the type rule makes of the operands: docs/design/score_mod.md."""
    order = [torch.bool, torch.int64, torch.float64]
    common = max((x.dtype for x in (operands[1:] if rule == "where" else operands)), key=order.index)
    if rule in ("numeric", "compare") and common == torch.bool:
        common = torch.int64
    if rule == "float":
        common = torch.float64
    if rule == "integer":
        common = torch.int64
    if rule.startswith("to_"):
        return operands
    converted = [x.to(common) for x in operands]
    return [operands[0], *converted[1:]] if rule == "where" else converted


def near(distance: Tensor) -> bool:
    """Whether something lies next to a jump, but not on it."""
    distance = distance.abs()
    return bool(((distance > 0) & (distance < MARGIN)).any())


def uncertain(name: str, x: list[Tensor]) -> bool:
    """Whether rounding may decide what the primitive does."""
    if name == "within":  # an error out of range
        return bool(((x[0] < 0) | (x[0] >= x[1])).any())
    if not x[-1].is_floating_point():
        return False
    if name in JUMPS_AT_INTEGERS:
        return near(x[0] - x[0].round())
    if name == "round":
        return near(x[0] - x[0].floor() - 0.5)
    if name in JUMPS_AT_EQUALITY:
        return near(x[0] - x[1])
    if name == "clamp":
        return near(x[0] - x[1]) or near(x[0] - x[2]) or near(x[1] - x[2])
    if name in JUMPS_AT_ZERO:
        return near(x[0])
    if name in ("mod", "floor_div"):
        quotient = x[0] / x[1]
        return near(quotient - quotient.round())
    return False


# --- random graphs --------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A text and its value in PyTorch, built side by side."""

    sizes: tuple[int, int, int, int]
    score: Tensor
    lines: list[str] = field(default_factory=list)
    values: list[tuple[str, Tensor]] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    scalars: list[float | int | bool] = field(default_factory=list)
    statements: int = 0

    def declarations(self) -> list[str]:
        kinds = {dtype: name for name, dtype in KINDS.items()}
        lines = [f"buffer @{i} {kinds[b.dtype]} {b.dim()}" for i, b in enumerate(self.buffers)]
        names = {bool: "bool", int: "i64", float: "f"}
        return lines + [f"scalar ${i} {names[type(s)]}" for i, s in enumerate(self.scalars)]

    def text(self, kind: str, result: str) -> str:
        return "\n".join([f"{kind} 1", *self.declarations(), *self.lines, f"return {result}", ""])

    def add(self, statement: str, value: Tensor) -> tuple[str, Tensor]:
        name = f"%{self.statements}"
        self.statements += 1
        self.lines.append(f"{name} = {statement}")
        assume(not value.is_floating_point() or not bool((value.detach().abs() > LARGEST).any()))
        self.values.append((name, value))
        return name, value

    def apply(self, name: str, *operands: tuple[str, Tensor]) -> tuple[str, Tensor]:
        x = promoted(TABLE[name][1], [value for _, value in operands])
        assume(not uncertain(name, x))
        return self.add(" ".join([name, *(n for n, _ in operands)]), REFERENCE[name](*x))

    def constant(self, value: float | int | bool) -> tuple[str, Tensor]:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        return text, torch.tensor(value, dtype=dtype)


INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")


@st.composite
def programs(draw: st.DrawFn, kind: str = "score_mod", dtype: torch.dtype = torch.float64) -> Program:
    """Hypothesis chooses (and shrinks) how many steps; a seed chooses evenly what each does. The scores are numbers of
    the dtype."""
    sizes = draw(st.sampled_from([(1, 1, 1, 1), (2, 2, 5, 7), (1, 2, 9, 4), (1, 1, 3, 300), (1, 1, 70, 5)]))
    generator = torch.Generator().manual_seed(seed := draw(st.integers(0, 2**32)))
    choose = Random(seed)

    def random(shape: tuple[int, ...]) -> Tensor:
        # Some numbers meet exactly, others do not.
        grid = torch.randint(-4, 5, shape, generator=generator).double() / 2
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, grid, noise)

    p = Program(sizes, random(sizes).to(dtype).double().requires_grad_())
    if kind == "score_mod":
        p.values.append(("score", p.score))
    axes = [
        (name, torch.arange(sizes[d]).reshape([-1 if i == d else 1 for i in range(4)]))
        for d, name in enumerate(INDEX_NAMES)
    ]
    p.values.extend(axes)

    open_axes: list[tuple[str, Tensor]] = []  # of the language: dimensions before the four

    def constant() -> tuple[str, Tensor]:
        floats = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 0.1, -1.7, 8.0, 3.0]
        return p.constant(choose.choice([choose.choice(floats), choose.randint(-5, 9), choose.random() < 0.5]))

    def operand(*kinds: str) -> tuple[str, Tensor]:
        """A value of one of the types: mostly a late one."""
        if choose.randint(0, 5) == 0:
            name, value = constant()
            if any(value.dtype == KINDS[k] for k in kinds):
                return name, value
        if "f" in kinds and choose.random() < 0.7:
            kinds = ("f",)  # where there is something to differentiate
        fitting = [v for v in p.values if any(v[1].dtype == KINDS[k] for k in kinds)]
        if not fitting:
            return p.constant(choose.random() < 0.5 if "bool" in kinds else 1)
        return fitting[-1 - min(choose.randint(0, 7), len(fitting) - 1)]

    def tamed(name: str, x: tuple[str, Tensor]) -> tuple[str, Tensor]:
        """Mostly within the domain."""
        if choose.randint(0, 9) == 0:
            return x
        if name in ("log", "log2", "sqrt", "rsqrt", "log1p"):
            return p.apply("add", p.apply("abs", x), p.constant(0.25))
        if name == "acosh":
            return p.apply("add", p.apply("abs", x), p.constant(1.25))
        if name in ("exp", "exp2", "expm1", "tan", "sinh", "cosh"):
            return p.apply("clamp", x, p.constant(-1.25), p.constant(1.25))
        if name in ("asin", "acos", "atanh"):  # the slopes grow without bound towards 1
            return p.apply("clamp", x, p.constant(-0.75), p.constant(0.75))
        return x

    def primitive() -> None:
        name = choose.choice(sorted(TABLE))
        arity, rule = TABLE[name]
        if rule == "where":
            p.apply(name, operand("bool"), operand("bool", "i64", "f"), operand("f", "i64", "bool"))
        elif rule == "bitwise":
            p.apply(name, *(operand("bool", "i64") for _ in range(arity)))
        elif rule == "integer":
            p.apply(name, operand("i64", "bool"), operand("i64"))
        elif name == "pow":
            a, b = operand("f", "i64"), operand("f", "i64")
            if not a[1].is_floating_point() and not b[1].is_floating_point():
                p.apply(name, a, p.apply("clamp", b, p.constant(0), p.constant(4)))
            else:
                a = p.apply("add", p.apply("abs", p.apply("to_float", a)), p.constant(0.25))
                p.apply(name, a, p.apply("clamp", b, p.constant(-2.0), p.constant(3.0)))
        elif name in ("div", "mod", "floor_div"):
            a, b = operand("f", "i64", "bool"), operand("f", "i64")
            if b[1].is_floating_point() and choose.randint(0, 9) > 0:
                b = p.apply("add", p.apply("abs", b), p.constant(0.5))
            p.apply(name, a, b)
        elif name == "clamp":
            x, low = operand("f", "i64"), operand("f", "i64")
            p.apply(name, x, low, operand("f", "i64"))
        elif name in ("atan2", "hypot"):  # off the origin, and off the cut
            p.apply(name, operand("f", "i64"), p.apply("add", p.apply("abs", operand("f", "i64")), p.constant(0.5)))
        elif rule == "float":
            p.apply(name, tamed(name, operand("f", "i64", "bool")))
        else:
            p.apply(name, *(operand("f", "i64", "f", "bool") for _ in range(arity)))

    def branch() -> None:
        # Both branches and the condition of the same few values, as people write them.
        condition = p.apply(choose.choice(["lt", "le", "eq", "gt"]), operand("f", "i64"), operand("f", "i64"))
        x = operand("f")
        name = choose.choice(["tanh", "square", "neg", "sin"])
        branches = [x, p.apply(name, x)]
        choose.shuffle(branches)
        p.apply("where", condition, *branches)

    def index(size_of_dimension: list[int]) -> tuple[str, Tensor]:
        """An index and, appended, the size of a dimension that it fits."""
        choice = choose.randint(0, 5)
        if open_axes and choose.random() < 0.5:
            size_of_dimension.append(len(open_axes[-1][1]))
            return open_axes[-1]
        if choice < 3:
            d = choose.randint(0, 3)
            size_of_dimension.append(sizes[d])
            return axes[d]
        size = choose.randint(1, 6)
        size_of_dimension.append(size)
        if choice == 3:
            return p.constant(choose.randint(-size, size - 1))
        if choice == 4:
            return p.apply("mod", operand("i64"), p.constant(size))
        return p.apply("clamp", operand("i64"), p.constant(-size), p.constant(size - 1))

    def load() -> None:
        if p.buffers and choose.random() < 0.5:
            # Another read of a buffer that is there.
            i = choose.randint(0, len(p.buffers) - 1)
            buffer = p.buffers[i]
            indices = [p.apply("mod", operand("i64"), p.constant(n)) for n in buffer.shape]
        else:
            rank = choose.choice([0, 1, 1, 2, 2, 3, 4])
            shape: list[int] = []
            indices = [index(shape) for _ in range(rank)]
            assume(math.prod(shape) <= LARGEST_BUFFER)
            kind = choose.choice(["f", "f", "f", "i64", "bool"])
            if kind == "f":
                buffer = random(tuple(shape)).requires_grad_()
            else:
                buffer = torch.randint(0, 2 if kind == "bool" else 6, shape, generator=generator).to(KINDS[kind])
            i = len(p.buffers)
            p.buffers.append(buffer)
        statement = " ".join([f"load @{i}", *(n for n, _ in indices)])
        p.add(statement, buffer[tuple(x for _, x in indices)])

    def scalar() -> None:
        value = choose.choice([choose.choice([0.5, -1.25, 2.0]), choose.randint(-4, 6), choose.random() < 0.5])
        p.scalars.append(value)
        p.values.append((f"${len(p.scalars) - 1}", p.constant(value)[1]))

    def reduction() -> None:
        outside = list(p.values)
        dims = 4 + len(open_axes)
        extent = choose.randint(1, 12)
        axis = p.add(f"axis {extent}", torch.arange(extent).reshape(-1, *[1] * dims))
        open_axes.append(axis)
        for _ in range(choose.randint(1, 5)):
            step = choose.randint(0, 5)
            if step == 2 and dims == 4:
                reduction()
            elif step < 3:
                load()
            else:
                primitive()
        name, value = operand("f", "i64", "bool")
        open_axes.pop()
        value = value.long() if value.dtype == torch.bool else value
        value = value.reshape([1] * (dims + 1 - value.dim()) + list(value.shape))
        value = value.expand(extent, *value.shape[1:])  # what does not depend on the axis counts as often
        assume(not value.is_floating_point() or not (near(value - value.amax(0)) or near(value - value.amin(0))))
        what = choose.choice(["sum", "amax", "amin"])
        p.values[:] = outside
        p.add(f"{what} {axis[0]} {name}", getattr(value, what)(0))

    if choose.random() < 0.5:
        # What depends on the difference alone is computed apart: it should be common.
        q, kv = axes[2:]
        p.apply("sub", *((q, kv) if choose.random() < 0.5 else (p.apply("add", kv, p.constant(2)), q)))
    for _ in range(draw(st.integers(1, 14))):
        step = choose.randint(0, 9)
        if step < 3:
            load()
        elif step == 3:
            scalar() if choose.random() < 0.5 else branch()
        elif step == 4:
            reduction()
        else:
            primitive()
    return p


def agree(got: Tensor, expected: Tensor, what: str) -> None:
    finite = expected[expected.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    torch.testing.assert_close(
        got, expected, rtol=1e-8, atol=1e-9 * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def copied(graph: Any) -> tuple[Any, int]:
    """The graph built anew from its nodes, and its result."""
    other = language.graph(graph.kind())
    for buffer in graph.buffers():
        other.add_buffer(*buffer)
    for type_ in graph.scalars():
        other.add_scalar(type_)
    made: list[int] = []
    for i, (_, _, _, operands) in enumerate(graph.nodes()):
        made.append(other.copy(graph, i, [made[x] for x in operands]))
    return other, made[graph.result()]


SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def by_pytorch(text: str, score: Tensor, p: Program, buffers: list[Tensor]) -> Tensor:
    """What second derivatives and vmap have in place of a kernel."""
    places = [torch.arange(n).reshape([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(p.sizes)]
    inputs = dict(zip(("b", "h", "q_idx", "kv_idx"), places, strict=True))
    values = Values({**inputs, "score": score}, buffers, *split_scalars(p.scalars), torch.float64, p.sizes)
    return evaluate(program(text), values).expand(p.sizes)


@SETTINGS
@given(programs(), st.booleans(), st.integers(0, 2**20))
def test_random_graphs(p: Program, masked: bool, seed: int) -> None:
    # All floats that nothing else uses are part of the result, so that little of the graph is dead.
    used = {word for line in p.lines for word in line.split("=")[1].split()}
    rest = [v for v in p.values if v[1].is_floating_point() and v[0] not in used] or [p.values[0]]
    result = rest[0]
    for other in rest[1:]:
        result = p.apply("add", result, other)
    text = p.text("score_mod", result[0])

    canonical = language.canonical(text)
    assert language.canonical(canonical) == canonical
    simple = language.simplify(text)
    assert language.simplify(simple) == simple
    derivative = language.derivative(text, [b.is_floating_point() for b in p.buffers])
    assert language.canonical(derivative) == derivative
    graph = language.parse(text)
    assert graph.text(graph.result()) == canonical and graph.text(graph.result(), simplified=True) == simple
    other, result_of_other = copied(graph)
    assert other.text(result_of_other) == canonical

    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(p.sizes, generator=generator) < 0.7 if masked else None
    grad = torch.randn(p.sizes, generator=generator, dtype=torch.float64)
    expected = result[1].expand(p.sizes)
    buffers = [b.detach() for b in p.buffers]
    score = p.score.detach()
    got = torch.ops.fusegrad.evaluate_score_mod(text, score, buffers, *split_scalars(p.scalars), mask)
    where_on = expected.detach() if mask is None else torch.where(mask, expected.detach(), -torch.inf)
    agree(got, where_on, "value")
    if mask is None:
        agree(by_pytorch(text, score, p, buffers), where_on, "value by PyTorch's functions")

    grad_on = grad if mask is None else torch.where(mask, grad, 0)
    grad_score, grad_buffers = torch.ops.fusegrad.evaluate_score_mod_backward(
        grad, text, score, buffers, *split_scalars(p.scalars), mask
    )
    leaves = [p.score, *(b for b in p.buffers if b.requires_grad)]
    if not expected.requires_grad:
        assert not grad_score.any() and not any(g.any() for g in grad_buffers)
        return
    wanted = torch.autograd.grad(expected, leaves, grad_on, allow_unused=True)
    wanted = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, wanted, strict=True)]
    # PyTorch's own where() makes NaN of 0 * inf; ours must not, but there is nothing to compare with.
    if not all(bool(g.isfinite().all()) for g in wanted):
        return
    agree(grad_score, wanted[0], "gradient of the score")
    floats = [i for i, b in enumerate(p.buffers) if b.requires_grad]
    for i, g in zip(floats, wanted[1:], strict=True):
        agree(grad_buffers[i], g, f"gradient of buffer {i}")


@rows_of("op", ["floor_div", "mod", "pow", "shl", "shr", "min", "max", "and", "or", "xor", "lt"])
def test_functions_of_integers(op: str) -> None:
    """For all pairs of some, zero and negative numbers among them."""
    integers = torch.tensor([-70, -3, -2, -1, 0, 1, 2, 3, 5, 63, 64])
    a, b, n = integers[:, None], integers, len(integers)
    if op in ("and", "or", "xor"):
        a, b = a > 0, b % 2 > 0
    kind = "bool" if a.dtype == torch.bool else "i64"
    text = f"score_mod 1\nbuffer @0 {kind} 2\nbuffer @1 {kind} 1\n%0 = load @0 q_idx 0\n%1 = load @1 kv_idx\n"
    text += f"%2 = {op} %0 %1\n%3 = to_float %2\n%4 = add score %3\nreturn %4\n"
    score = torch.zeros(1, 1, n, n, dtype=torch.float64)
    buffers = [a, b]
    found = torch.ops.fusegrad.evaluate_score_mod(text, score, buffers, [], [])
    if op == "pow":  # PyTorch's own has no negative exponents; larger powers wrap around
        a, b, some = a.double(), b.double(), (integers <= 5).expand(n, n)
        expected = torch.where((a == 0) & (b < 0), 0, (a**b).trunc())
    else:
        expected, some = REFERENCE[op](a, b), torch.ones(n, n, dtype=torch.bool)
    assert found[0, 0][some].equal(expected[some].double())
    values = Values(
        {"q_idx": torch.arange(n).view(1, 1, n, 1), "kv_idx": torch.arange(n).view(1, 1, 1, n), "score": score},
        *(buffers, [], [], torch.float64, (1, 1, n, n)),
    )
    assert evaluate(program(text), values)[0, 0][some].equal(expected[some].double())


@SETTINGS
@given(programs("mask_mod"))
def test_random_masks(p: Program) -> None:
    bools = [v for v in p.values if v[1].dtype == torch.bool and v[0].startswith("%")]
    if not bools:
        numbers = [v for v in p.values if v[1].dtype != torch.bool]
        bools = [p.apply("gt", numbers[-1], numbers[-2])]
    name, value = bools[-1]
    got = torch.ops.fusegrad.evaluate_mask_mod(
        p.text("mask_mod", name), p.sizes, [b.detach() for b in p.buffers], *split_scalars(p.scalars)
    )
    assert torch.equal(got, value.expand(p.sizes))


def test_every_primitive_has_a_reference() -> None:
    assert set(REFERENCE) == set(TABLE)


# --- texts ----------------------------------------------------------------------------------------------------

SEED_004 = """score_mod 1
buffer @0 i64 1
buffer @1 f 1
%0 = load @0 q_idx
%1 = load @1 %0
%2 = add score %1
return %2
"""


def test_gather_of_a_gather() -> None:
    torch.manual_seed(0)
    offset, bias = torch.randint(0, 6, (6,)), torch.randn(6, dtype=torch.float64, requires_grad=True)
    score = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    expected = score + bias[offset][:, None]
    got = torch.ops.fusegrad.evaluate_score_mod(SEED_004, score, [offset, bias.detach()], [], [])
    assert torch.equal(got, expected)
    grad = torch.randn_like(score)
    expected.backward(grad)
    _, grads = torch.ops.fusegrad.evaluate_score_mod_backward(grad, SEED_004, score, [offset, bias.detach()], [], [])
    torch.testing.assert_close(grads[1], bias.grad)
    assert "class C" in language.explain(SEED_004, [False, True])


def test_a_branch_not_taken_contributes_nothing() -> None:
    text = "score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = gt %0 0.0\n%2 = log %0\n%3 = where %1 %2 0.0\n"
    text += "%4 = sqrt %0\n%5 = where %1 %4 score\n%6 = add %3 %5\nreturn %6\n"
    bias = torch.tensor([0.0, 4.0, -1.0], dtype=torch.float64)
    score = torch.ones(1, 1, 1, 3, dtype=torch.float64)
    grad_score, (grad,) = torch.ops.fusegrad.evaluate_score_mod_backward(score, text, score, [bias], [], [])
    assert grad.tolist() == [0.0, 0.5, 0.0]
    assert grad_score.flatten().tolist() == [1.0, 0.0, 1.0]


def test_no_gradient_goes_missing() -> None:
    score = torch.zeros(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="must not require grad"):
        torch.ops.fusegrad.evaluate_score_mod("score_mod 1\nreturn score", score, [], [], [])
    with torch.no_grad():
        torch.ops.fusegrad.evaluate_score_mod("score_mod 1\nreturn score", score, [], [], [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_buffers(dtype: torch.dtype) -> None:
    bias = torch.cat([torch.randn(40), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-7, 6e-5, 6e4])]).to(dtype)
    text = "score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\nreturn %0\n"
    for acc in (torch.float32, torch.float64):
        score = torch.zeros(1, 1, 2, bias.numel(), dtype=acc)
        got = torch.ops.fusegrad.evaluate_score_mod(text, score, [bias], [], [])
        assert torch.equal(got, bias.to(acc).expand_as(score))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_dtypes_of_tables(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    table = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    text = "mask_mod 1\nbuffer @0 i64 1\nscalar $0 i64\n%0 = load @0 kv_idx\n%1 = eq %0 $0\nreturn %1\n"
    for value in table.tolist():
        got = torch.ops.fusegrad.evaluate_mask_mod(text, [1, 1, 1, 4], [table], [], [value])
        assert torch.equal(got.flatten(), table == value)


def test_numbers_of_all_types_keep_their_order_and_all_digits() -> None:
    """Floats travel in one list, integers and bools in another; no integer becomes a float on the way."""
    declared = ["i64", "f", "bool", "i64", "f"]
    text = "mask_mod 1\nbuffer @0 i64 1\nbuffer @1 f 1\n"
    text += "".join(f"scalar ${i} {t}\n" for i, t in enumerate(declared))
    text += "%0 = load @0 kv_idx\n%1 = eq %0 $0\n%2 = load @1 kv_idx\n%3 = eq %2 $1\n%4 = and %1 %3\n%5 = and %4 $2\n"
    text += "%6 = eq kv_idx $3\n%7 = and %5 %6\n%8 = eq $4 2.5\n%9 = and %7 %8\nreturn %9\n"
    large = (1 << 62) + 1
    buffers = [large + torch.tensor([1, 0, -1]), torch.full((3,), 0.1, dtype=torch.float64)]
    for scalars, expected in (
        ((large, 0.1, True, 1, 2.5), [False, True, False]),
        ((large, 0.1, False, 1, 2.5), [False] * 3),
        ((large - 1, 0.1, True, 2, 2.5), [False, False, True]),
        ((large, 2.5, True, 1, 0.1), [False] * 3),
    ):
        mod = fusegrad.ScoreMod(text, buffers, scalars)
        got = torch.ops.fusegrad.evaluate_mask_mod(mod.text, [1, 1, 1, 3], buffers, *split_scalars(mod.scalars))
        assert got.flatten().tolist() == expected
        mask = BlockMask.from_kv_blocks(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), BLOCK_SIZE=3)
        mask.mask_mod = mod
        query = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
        value = torch.eye(3, dtype=torch.float64)[None, None]
        out = fusegrad.flex_attention(query, query, value, block_mask=mask)
        assert torch.equal(out[0, 0], torch.tensor(expected).double().expand(3, 3))


def test_out_of_range() -> None:
    text = "score_mod 1\nbuffer @0 f 1\n%0 = sub q_idx kv_idx\n%1 = load @0 %0\nreturn %1\n"
    score = torch.zeros(1, 1, 4, 4)
    bias = torch.arange(2.0)
    with pytest.raises(
        IndexError, match="index 3 is out of range for dimension 0 of captured buffer 0, which has size 2"
    ):
        torch.ops.fusegrad.evaluate_score_mod(text, score, [bias], [], [])
    q, kv = torch.arange(4)[:, None], torch.arange(4)
    mask = (q >= kv) & (q - kv < 2)
    got = torch.ops.fusegrad.evaluate_score_mod(text, score, [bias], [], [], mask)
    assert torch.equal(got[0, 0], torch.where(mask, (q - kv).float(), -torch.inf))
    _, (grad,) = torch.ops.fusegrad.evaluate_score_mod_backward(score + 1, text, score, [bias], [], [], mask)
    assert grad.tolist() == [4.0, 3.0]
    with pytest.raises(IndexError):
        torch.ops.fusegrad.evaluate_score_mod_backward(score + 1, text, score, [bias], [], [])


# --- the language's graph -------------------------------------------------------------------------------------


def test_a_graph_is_built_and_read() -> None:
    g = language.graph("score_mod")
    bias, slope = g.add_buffer(language.FLOAT, 2, True), g.add_scalar(language.FLOAT)
    score, q = g.input("score"), g.input("q_idx")
    read = g.load(bias, [q, g.constant(3)])
    total = g.apply("add", g.apply("mul", g.scalar(slope), q), g.apply("add", score, read))
    assert g.text(total) == (
        "score_mod 1\nbuffer @0 f 2\nscalar $0 f\n%0 = to_float q_idx\n%1 = mul $0 %0\n%2 = load @0 q_idx 3\n"
        "%3 = add score %2\n%4 = add %1 %3\nreturn %4\n"
    )
    assert g.compact(total, [0.0])[1:] == ([0], []) and "scalar" not in g.compact(total, [2.0])[0]
    assert g.node(read) == ("load", language.FLOAT, bias, [q, g.constant(3)])
    assert (g.value(g.constant(-0.0)), g.value(g.constant(True)), g.value(read)) == (-0.0, True, None)
    assert g.active(read) and not g.on_score(read) and g.on_score(total) and not g.active(q)
    assert g.size(total) == 9


def test_what_replaces_an_axis_may_be_a_reduction_over_one_like_it() -> None:
    """A sum's own axis is of no value that is put into it: the element at i of x, where i is itself a sum over x."""
    g = language.graph("score_mod")
    x = g.add_buffer(language.FLOAT, 1)
    axis, place = g.axis(8, 0), g.axis(8, 1)
    element = g.load(x, [axis])
    inner = g.reduce("sum", axis, element)
    shifted = g.apply("add", inner, g.apply("mul", element, g.cast(place, language.FLOAT)))
    outer = g.reduce("sum", axis, shifted)  # of 8 times the sum, and of place times it
    at_sum = g.substitute(outer, {place: g.cast(inner, language.INT)})
    values = torch.arange(8.0).double()
    mod = fusegrad.ScoreMod(g.compact(at_sum)[0], [values])
    q = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    lse = fusegrad.flex_attention(q, q, q, score_mod=mod, return_lse=True)[1]
    assert lse.item() == 8 * 28.0 + 28.0 * 28.0
    assert g.open_axes(outer) == [place] and g.open_axes(at_sum) == []


def test_a_graph_refuses_what_breaks_a_rule() -> None:
    g = language.graph("mask_mod")
    q = g.input("q_idx")
    for wrong, message in [
        (lambda: g.input("score"), "'score' is not an input of a mask_mod"),
        (lambda: g.apply("add", q), "'add' expects 2 operands, but got 1"),
        (lambda: g.apply("foo", q), "expected a primitive or a reduction, but got 'foo'"),
        (lambda: g.load(0, [q]), "buffer @0 is not declared"),
        (lambda: g.constant(2**63), "an integer of more than 64 bits, 9223372036854775808; use a float"),
        (lambda: g.text(q), "a mask_mod must return bool, but returns i64"),
        (lambda: g.axis(0, 0), "the extent of an axis must be 1 to 65536, but got 0"),
        (lambda: language.graph("derivative"), "expected 'score_mod' or 'mask_mod', but got 'derivative'"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            wrong()
    with pytest.raises(IndexError, match="the graph has no node 9"):
        g.apply("neg", 9)
    with pytest.raises(TypeError, match=r"cannot create 'fusegrad\._C\.Graph' instances"):
        type(g)()
    with pytest.raises(TypeError):
        g.copy("text", 0, [])


@rows_of(
    "text, message",
    [
        ("", "1:1: expected 'score_mod 1'"),
        ("score_mod 1\n%0 = add score\nreturn %0", "2:6: 'add' expects 2 operands, but got 1"),
        ("score_mod 1\n\n  %0 = foo score", "3:8: expected a primitive, 'load', 'backward' or 'custom', but got 'foo'"),
        ("mask_mod 1\n%0 = gt score 0\nreturn %0", "2:9: 'score' is not an input of a mask_mod"),
        ("score_mod 1\nbuffer @0 f 1\n%0 = load @0\n", "3:11: buffer @0 expects 1 indices, but got 0"),
        ("score_mod 1\nreturn score", None),
    ],
)
def test_errors_have_a_position(text: str, message: str | None) -> None:
    if message is None:
        assert language.canonical(text) == text + "\n"
        return
    with pytest.raises(ValueError) as error:
        language.canonical(text)
    assert str(error.value).startswith(message)
