"""Tracing Python score_mods and mask_mods: against the functions themselves, run by PyTorch on each pair."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import pickle
import threading
import types
import weakref
from collections.abc import Callable

import fusegrad
import pytest
import score_mods
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import ScoreMod, TraceError, trace_mask_mod, trace_score_mod
from fusegrad._C import score_mod as language
from fusegrad._tracing import cache
from fusegrad.score_mod import split_scalars
from score_mods import Bias
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks, or_masks

B, H, M, N = 2, 2, 6, 8


@pytest.fixture(autouse=True)
def fresh():
    """No traces of other tests, and PyTorch's own arithmetic on integers in float64."""
    cache.clear()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(case: score_mods.Case, seed: int = 0) -> score_mods.Mods:
    return case.make(B, H, M, N, torch.float64, torch.Generator().manual_seed(seed))


def on_each_pair(mod: Callable, score: Tensor | None) -> Tensor:
    """The function itself, called with 0-d tensors for one pair after the other: nothing of ours takes part."""
    values = []
    for place in itertools.product(range(B), range(H), range(M), range(N)):
        indices = [torch.tensor(i) for i in place]
        values.append(mod(*indices) if score is None else mod(score[place].clone(), *indices))
    return torch.stack(values).reshape(B, H, M, N)


def agree(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, check_dtype=False)


def check_score_mod(mod: Callable, parameters: list[Tensor]) -> ScoreMod:
    generator = torch.Generator().manual_seed(1)
    score, grad = (torch.randn(B, H, M, N, generator=generator, dtype=torch.float64) for _ in range(2))
    score.requires_grad_()
    expected = on_each_pair(mod, score)
    traced = trace_score_mod(mod)
    inputs = [b.detach() for b in traced.buffers], *split_scalars(traced.scalars)
    agree(torch.ops.fusegrad.evaluate_score_mod(traced.text, score.detach(), *inputs), expected)

    expected_grads = torch.autograd.grad(
        expected, [score, *parameters], grad, materialize_grads=True, retain_graph=True
    )
    grad = torch.where(expected.isfinite(), grad, 0)
    grad_score, grad_buffers = torch.ops.fusegrad.evaluate_score_mod_backward(
        grad, traced.text, score.detach(), *inputs
    )
    agree(grad_score, expected_grads[0])
    outputs = [(b, g.to(b.dtype)) for b, g in zip(traced.buffers, grad_buffers, strict=True) if b.requires_grad]
    got = torch.autograd.grad([b for b, _ in outputs], parameters, [g for _, g in outputs]) if parameters else ()
    for g, e in zip(got, expected_grads[1:], strict=True):
        assert e.abs().max() > 0
        tolerance = {"rtol": 0.02, "atol": 0.02} if e.dtype == torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(g, e, **tolerance)
    return traced


def check_mask_mod(mod: Callable) -> ScoreMod:
    traced = trace_mask_mod(mod)
    captured = traced.buffers, *split_scalars(traced.scalars)
    got = torch.ops.fusegrad.evaluate_mask_mod(traced.text, [B, H, M, N], *captured)
    expected = on_each_pair(mod, None)
    assert torch.equal(got, expected)
    return traced


@rows_of("case", score_mods.CASES, tests=4)
def test_score_mods_from_the_field(case: score_mods.Case) -> None:
    score_mod, mask_mod, parameters = draw(case)
    if score_mod is not None:
        check_score_mod(score_mod, parameters)
    if mask_mod is not None:
        check_mask_mod(mask_mod)


@rows_of("case", score_mods.CASES, tests=4)
def test_another_call_with_new_values_is_not_traced(case: score_mods.Case) -> None:
    score_mod, mask_mod, parameters = draw(case)
    for mod, trace in ((score_mod, trace_score_mod), (mask_mod, trace_mask_mod)):
        if mod is not None:
            trace(mod)
    misses = cache.cache_info()["misses"]
    score_mod, mask_mod, parameters = draw(case, seed=5)
    if score_mod is not None:
        check_score_mod(score_mod, parameters)
    if mask_mod is not None:
        check_mask_mod(mask_mod)
    assert cache.cache_info()["misses"] == misses


# --- texts ----------------------------------------------------------------------------------------------------


def test_the_texts_are_those_that_cpp_builds() -> None:
    """tests/cpp/test_score_mod_expression.cpp expects the same."""
    bias, offset = torch.randn(8), torch.arange(8)
    mod = trace_score_mod(lambda s, b, h, q, kv: torch.where(q >= kv, s + bias[offset[q]], -math.inf))
    assert mod.text == (
        "score_mod 1\nbuffer @0 i64 1\nbuffer @1 f 1\n%0 = ge q_idx kv_idx\n%1 = load @0 q_idx\n%2 = load @1 %1\n"
        "%3 = add score %2\n%4 = where %0 %3 -inf\nreturn %4\n"
    )
    assert mod.buffers[0] is offset and mod.buffers[1] is bias and mod.scalars == () and mod.kind == "score_mod"

    cap, shift = 20.0, 3
    mod = trace_score_mod(lambda s, b, h, q, kv: 2.0 * torch.tanh(s / cap) * cap + (q + shift) * 0.5)
    assert mod.text == (
        "score_mod 1\nscalar $0 f\nscalar $1 i64\n%0 = div score $0\n%1 = tanh %0\n%2 = mul %1 2.0\n"
        "%3 = mul %2 $0\n%4 = add q_idx $1\n%5 = to_float %4\n%6 = mul %5 0.5\n%7 = add %3 %6\nreturn %7\n"
    )
    assert mod.scalars == (20.0, 3)

    prefix, on = torch.arange(2), torch.tensor(True)
    mod = trace_mask_mod(lambda b, h, q, kv: ((kv < prefix[b]) | (q >= kv)) & on)
    assert mod.text == (
        "mask_mod 1\nbuffer @0 i64 1\nbuffer @1 bool 0\n%0 = load @0 b\n%1 = lt kv_idx %0\n%2 = ge q_idx kv_idx\n"
        "%3 = or %1 %2\n%4 = load @1\n%5 = and %3 %4\nreturn %5\n"
    )
    assert mod.kind == "mask_mod"


def body(mod: ScoreMod) -> list[str]:
    return [line for line in mod.text.splitlines() if line.startswith(("%", "return"))]


def test_numbers_that_the_function_writes_are_constants() -> None:
    def score_mod(s, b, h, q, kv):
        low, high = torch.tensor(-1.5), torch.finfo(torch.float32).max
        return torch.maximum(s, low) + torch.full((), 2) + s.new_tensor(0.25) + torch.tensor([1.0, 3.0])[1] * (high > 1)

    mod = trace_score_mod(score_mod)
    assert mod.buffers == () and mod.scalars == ()
    assert body(mod)[0] == "%0 = max score -1.5" and "add %0 2.0" in body(mod)[1]


def test_a_float_in_no_grad_is_detached() -> None:
    bias = torch.randn(8, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        with torch.no_grad():
            size = s.abs()
        return s / (1 + size) + bias[kv] * s.detach()

    text = check_score_mod(score_mod, [bias]).text
    assert text.count("detach") == 2
    cache.clear()
    with torch.no_grad():  # the caller's, not the function's
        assert trace_score_mod(score_mod).text == text


def test_a_tensor_made_of_values_is_a_copy_without_a_gradient() -> None:
    bias = torch.randn(8, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        return s * bias[kv] + s.new_tensor(bias[kv] * s) + torch.tensor([s, bias[q]])[1] + s.new_tensor([s, 2.0]).sum()

    check_score_mod(score_mod, [bias])


def test_integers_of_few_bits_wrap() -> None:
    table = torch.tensor([200, 100, 250, 3, 9, 90, 7, 255], dtype=torch.uint8)
    check_score_mod(lambda s, b, h, q, kv: s + (table[kv] + table[q]) * 0.1 + (kv * 40).to(torch.int8), [])


def test_a_choice_between_traced_values() -> None:
    check_score_mod(lambda s, b, h, q, kv: torch.stack([s, s * 2, s.square()])[(q + kv) % 3], [])
    check_score_mod(lambda s, b, h, q, kv: torch.stack([s, s * 2, s.square()])[(q - 1) % 3 - 2], [])


def test_shapes_within() -> None:
    table = torch.randn(4, 3, 5, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        rows = table[:, h]  # [4, 5]
        block = rows[1:, None, kv % 5].expand(3, 2)
        low, high = torch.stack([s, -s, s + 1]).max(), torch.stack([s, -s]).max(0).values
        flat = torch.cat([block.reshape(-1), rows.mean(1)]).flip(0).roll(2)
        return (
            flat[3]
            + rows.t()[2].prod()
            + rows.sum() * 0.1
            + low * high
            + (rows > 0).any()
            + table[..., kv % 5][q % 4, 1]
        )

    check_score_mod(score_mod, [table])


# --- ScoreMod ---------------------------------------------------------------------------------------------------


def test_score_mod_by_hand() -> None:
    bias = torch.randn(8)
    text = "score_mod 1\nbuffer @0 f 1\nscalar $0 f\n%0 = load @0 kv_idx # a comment\n%1 = mul %0 $0\nreturn %1"
    mod = ScoreMod(text, [bias], [2.0])
    assert mod.text.endswith("return %1\n") and "#" not in mod.text
    assert mod.buffers == (bias,) and mod.scalars == (2.0,) and mod.kind == "score_mod"
    assert trace_score_mod(mod) is mod
    assert "load @0 kv_idx" in repr(mod) and "float64 [8]" in repr(mod) and "$0: 2.0" in repr(mod)
    copy = pickle.loads(pickle.dumps(mod))
    assert copy.text == mod.text and torch.equal(copy.buffers[0], bias) and copy.scalars == (2.0,)
    with pytest.raises(AttributeError, match="cannot be changed"):
        mod.text = ""
    with pytest.raises(TypeError, match="must be a mask_mod, but got a score_mod"):
        trace_mask_mod(mod)
    with pytest.raises(TypeError, match="hand it to"):
        mod(1, 2, 3, 4, 5)


@rows_of(
    "arguments, message",
    [
        (("score_mod 1\nreturn nothing",), "2:8"),
        (("derivative 1\nreturn grad",), "of a score_mod or a mask_mod"),
        (("score_mod 1\nbuffer @0 f 1\n%0 = load @0 b\nreturn %0",), "as many as the text declares, 1, but got 0"),
        (("score_mod 1\nbuffer @0 f 0\n%0 = load @0\nreturn %0", [torch.ones(2)]), "f of rank 0, but got"),
        (("score_mod 1\nbuffer @0 i64 0\n%0 = load @0\nreturn %0", [torch.ones(())]), "i64 of rank 0, but got"),
        (("score_mod 1\nbuffer @0 f 0\n%0 = load @0\nreturn %0", [1.0]), "must be a tensor, but got float"),
        (("score_mod 1\nscalar $0 f\nreturn $0", [], [1]), r"\$0 must be f, but got 1"),
        (("score_mod 1\nscalar $0 f\nreturn $0", [], []), "scalars must be as many"),
    ],
)
def test_score_mod_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreMod(*arguments)


def test_explain() -> None:
    bias = torch.randn(8, requires_grad=True)
    text = fusegrad.explain(lambda s, b, h, q, kv: s + bias[kv])
    assert "load @0 kv_idx" in text and "scatter" in text and "class B: the index depends on kv_idx" in text


# --- the cache: what may change without a new trace, and what may not ----------------------------------------------


def misses() -> int:
    return cache.cache_info()["misses"]


def assert_follows(mod: Callable, parameters: list[Tensor] | None = None, hit: bool | None = None) -> None:
    """Whatever was cached, the trace says what the function does now; `hit`: and whether it was traced for it."""
    before = misses()
    trace_score_mod(mod)
    if hit is not None:
        assert (misses() == before) == hit
    check_score_mod(mod, parameters or [])


def test_new_closures_of_one_function_hit() -> None:
    def make(cap: float, window: int, size: int = 8):
        bias = torch.randn(size, requires_grad=True)

        def score_mod(s, b, h, q, kv):
            return torch.where(q - kv < window, cap * torch.tanh(s / cap) + bias[kv] * (1 / cap), s)

        return score_mod, bias

    mod, bias = make(3.0, 2)
    assert_follows(mod, [bias], hit=False)
    for cap, window in ((5.0, 2), (0.7, 100), (-1.5, -3)):
        mod, bias = make(cap, window)
        assert_follows(mod, [bias], hit=True)
    mod, bias = make(2.0, 2, size=9)
    assert_follows(mod, [bias], hit=False)
    mod, bias = make(2, 2)  # an int where a float was
    assert_follows(mod, [bias], hit=False)


def test_a_number_that_python_needs_is_part_of_the_guard() -> None:
    def make(n: int, cap: float, on: bool):
        def score_mod(s, b, h, q, kv):
            for i in range(n):
                s = s + i * cap
            if on:
                s = s * math.sqrt(cap)
            return s if n > 2 else -s

        return score_mod

    for n, cap, on in ((2, 2.0, False), (3, 2.0, False), (3, 2.0, True), (3, 4.0, True)):
        assert_follows(make(n, cap, on), hit=False)
    for n, cap, on in ((2, 2.0, False), (3, 4.0, True), (3, 5.0, False)):
        assert_follows(make(n, cap, on), hit=True)


# What Python makes of a number that the score_mod computes with as well.
USES: dict[str, Callable] = {
    "larger": lambda x: 1.0 if x > 2 else 0.0,
    "at most": lambda x: 1.0 if x <= 8 else 0.0,
    "equal": lambda x: 1.0 if x == 3 else 0.0,
    "unequal": lambda x: 1.0 if x != 3 else 0.0,
    "true": lambda x: 1.0 if x - 3 else 0.0,
    "not": lambda x: 1.0 if not (x - 3) else 0.0,
    "int": lambda x: int(x),
    "float": lambda x: float(x),
    "round": lambda x: round(x),
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sqrt": math.sqrt,
    "string": lambda x: len(str(x)),
    "format": lambda x: len(f"{x:.0f}"),
    "divmod": lambda x: divmod(x, 2)[0],
    "divided by": lambda x: divmod(20, x)[0],
    "among": lambda x: 1.0 if x in (3, 5) else 0.0,
    "key": lambda x: {3: 1.0}.get(x, 0.0),
    "largest": lambda x: max(x, 4),
    "range": lambda x: sum(range(int(x))),
    "a power of numbers": lambda x: pow(int(x), 2, 5),
    "complex": lambda x: complex(x).real,
    "a root": lambda x: abs((3 - x) ** 0.5),
}


@rows_of("name", [*USES])
def test_what_python_makes_of_a_number_is_part_of_the_guard(name: str) -> None:
    def make(use, x):
        return lambda s, b, h, q, kv: s * x + use(x)

    for x in (3.0, 1.0, 12.5, 3, 5):
        assert_follows(make(USES[name], x))


def test_arithmetic_on_numbers_is_pythons() -> None:
    def make(n, m):
        return lambda s, b, h, q, kv: s + 2**n + m // 3 + (m % 4) / 8 - (n << 2 if False else abs(-m)) + (m - n) * q

    for n, m, hit in ((3, 7, False), (2, -7, True), (-2, 5, False), (2, 2**40, True)):
        assert_follows(make(n, m), hit=hit)
    with pytest.raises(TraceError, match="too big"):
        trace_score_mod(make(2, 2**70))


def test_captured_numbers_become_what_type_tests_see() -> None:
    def make(scale):
        def score_mod(s, b, h, q, kv):
            return s * scale if isinstance(scale, float) else s - scale

        return score_mod

    for scale in (0.5, 2, 0.25, 0.0, 3):
        assert_follows(make(scale))


def test_type_tests_that_a_zero_hides() -> None:
    def make(n):
        return lambda s, b, h, q, kv: s * n + (n if isinstance(n, int) else 0)

    for n in (0, 5):
        assert_follows(make(n))


def test_numbers_that_stand_ins_would_promote() -> None:
    """A number leaves a uint8 tensor one, a tensor does not."""
    table = torch.full((N,), 250, dtype=torch.uint8)

    def make(n):
        return lambda s, b, h, q, kv: s + (table[kv] + n)

    for n in (10, 20):
        assert_follows(make(n))


def test_zeros_of_both_signs_from_a_number() -> None:
    scale = 2.0

    def score_mod(s, b, h, q, kv):
        return torch.where(q > kv, scale * 0.0, scale * -0.0).reciprocal()

    text = trace_score_mod(score_mod)
    got = torch.ops.fusegrad.evaluate_score_mod(text.text, torch.zeros(1, 1, 2, 2), [], *split_scalars(text.scalars))
    assert got[0, 0, 1, 0] == math.inf and got[0, 0, 0, 0] == -math.inf


def test_a_shape_that_a_number_decides() -> None:
    bias, n = torch.randn(6, N, requires_grad=True), 1

    def score_mod(s, b, h, q, kv):
        table = bias[n:]
        return s * table.shape[0] + table[h, kv]

    assert_follows(score_mod, [bias])
    n = 3
    assert_follows(score_mod, [bias])


def test_identity_of_numbers() -> None:
    def make(flag):
        return lambda s, b, h, q, kv: s * 2 if flag is True else s + flag

    for flag in (True, 1, 1.0, False, 0):
        assert_follows(make(flag))


def test_zero_and_nan() -> None:
    def make(x):
        return lambda s, b, h, q, kv: torch.where(s.isnan(), s, 1.0 if math.copysign(1, x) > 0 else s)

    for x in (0.0, -0.0, 0.0):
        assert_follows(make(x))


@pytest.mark.parametrize("attribute", ["scale", "window", "bias", "score_mod"])
def test_a_changed_attribute(attribute: str) -> None:
    module = Bias(torch.randn(H, N), 4)
    assert_follows(module.score_mod, [module.bias])
    if attribute == "score_mod":
        module.score_mod = types.MethodType(lambda self, s, b, h, q, kv: s - self.bias[h, kv], module)
    elif attribute == "bias":
        module.bias = nn.Parameter(torch.randn(H, N + 1))
    else:
        setattr(module, attribute, 0.125)
    assert_follows(module.score_mod, [module.bias])


SCALE = 2.0


def scaled(x):
    return x * SCALE


def uses_globals(s, b, h, q, kv):
    return scaled(s) + SCALE * q


def test_a_changed_global(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_follows(uses_globals, hit=False)
    monkeypatch.setitem(globals(), "SCALE", 3.5)
    assert_follows(uses_globals, hit=True)
    monkeypatch.setitem(globals(), "SCALE", 4)
    assert_follows(uses_globals, hit=False)
    monkeypatch.setitem(globals(), "scaled", lambda x: x - SCALE)
    assert_follows(uses_globals, hit=False)
    monkeypatch.setitem(globals(), "scaled", torch.sin)
    assert_follows(uses_globals, hit=False)
    monkeypatch.setattr(torch, "sin", torch.cos)
    monkeypatch.setitem(globals(), "scaled", lambda x: torch.sin(x))
    assert_follows(uses_globals, hit=False)


def uses_a_builtin(s, b, h, q, kv):
    return s * max(2, 3)


def test_a_builtin_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_follows(uses_a_builtin)
    monkeypatch.setitem(globals(), "max", min)
    assert_follows(uses_a_builtin)


def test_a_function_of_a_users_module_that_is_replaced() -> None:
    module = types.ModuleType("users_module")
    exec("def helper(x):\n    return x * 2\nWINDOW = 3\n", module.__dict__)

    def score_mod(s, b, h, q, kv):
        return torch.where(q - kv < module.WINDOW, module.helper(s), s)

    assert_follows(score_mod, hit=False)
    assert_follows(score_mod, hit=True)
    module.WINDOW = 1
    assert_follows(score_mod)
    module.helper = lambda x: x - 1
    assert_follows(score_mod)
    exec("def helper(x):\n    return x * 3\n", module.__dict__)
    assert_follows(score_mod)


def test_mutated_containers() -> None:
    options = {"scales": [1.0, 2.0], "name": "a"}
    table = [torch.randn(N, requires_grad=True)]

    def score_mod(s, b, h, q, kv):
        for scale in options["scales"]:
            s = s * scale
        for bias in table:
            s = s + bias[kv]
        return s if options["name"] == "a" else -s

    assert_follows(score_mod, table, hit=False)
    options["scales"][0] = 5.0
    assert_follows(score_mod, table, hit=True)
    options["scales"].append(0.5)
    assert_follows(score_mod, table, hit=False)
    table.append(torch.randn(N, requires_grad=True))
    assert_follows(score_mod, table, hit=False)
    options["name"] = "b"
    assert_follows(score_mod, table, hit=False)
    table[1] = torch.randn(N, requires_grad=True)
    assert_follows(score_mod, table, hit=True)


def test_two_names_of_one_tensor() -> None:
    def make(a: Tensor, c: Tensor):
        return lambda s, b, h, q, kv: s + a[kv] * 2 - c[q]

    x, y = torch.randn(N, requires_grad=True), torch.randn(N, requires_grad=True)
    assert_follows(make(x, x), [x])
    assert_follows(make(x, y), [x, y])
    assert_follows(make(y, y), [y])


def test_a_reassigned_cell_and_a_replaced_class() -> None:
    class Options:
        scale = 2.0

        @property
        def shift(self):
            return 1.0

        @staticmethod
        def curve(x):
            return x * 3

    options = Options()

    def score_mod(s, b, h, q, kv):
        return options.curve(s) * options.scale + options.shift

    assert_follows(score_mod, hit=False)
    assert_follows(score_mod, hit=True)
    Options.scale = 3.0
    assert_follows(score_mod)
    options.scale = 4.0
    assert_follows(score_mod)
    Options.shift = property(lambda self: 7.0)
    assert_follows(score_mod)
    Options.curve = staticmethod(lambda x: -x)
    assert_follows(score_mod)
    options = types.SimpleNamespace(scale=1.0, shift=0.0, curve=torch.sin)
    assert_follows(score_mod)


def test_a_module_that_is_called() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.power = nn.Parameter(torch.randn(2)), 2

        def forward(self, x):
            return (self.weight * x).sum() ** self.power

    net = Net()

    def score_mod(s, b, h, q, kv):
        return net(s)

    assert_follows(score_mod, [net.weight], hit=False)
    assert_follows(score_mod, [net.weight], hit=True)
    net.power = 3
    assert_follows(score_mod, [net.weight])
    Net.forward = lambda self, x: self.weight[0] * x + self.weight[1]
    assert_follows(score_mod, [net.weight])
    net.register_forward_hook(lambda module, args, out: out * 2)
    assert_follows(score_mod, [net.weight])


def test_values_of_captured_tensors_in_python() -> None:
    """What Python makes of them is in no guard: such functions are traced at each call."""
    length = torch.tensor([3])

    def by_item(s, b, h, q, kv):
        return s * length[0].item()

    def by_branch(s, b, h, q, kv):
        return s if length > 3 else -s

    def by_list(s, b, h, q, kv):
        return s + sum(length.tolist())

    def by_size(s, b, h, q, kv):
        return s + length.nonzero().shape[0]

    for mod in (by_item, by_branch, by_list, by_size):
        length.fill_(3)
        assert_follows(mod, hit=False)
        length.fill_(5)
        assert_follows(mod, hit=False)
        length.fill_(0)
        assert_follows(mod, hit=False)


def test_what_is_computed_from_captured_tensors_is_computed_again() -> None:
    bias, n = torch.randn(3, N, requires_grad=True), 1

    def score_mod(s, b, h, q, kv):
        table = (bias[n:] * 2).exp().t().contiguous()
        copy = bias.clone()
        copy[0] = 0
        copy += 1
        with torch.no_grad():
            frozen = bias.sum(0)
        return s + table[kv, 0] + copy[h, kv] + frozen[kv] * copy.shape[0]

    assert_follows(score_mod, [bias], hit=False)
    with torch.no_grad():
        bias.add_(1)
    assert_follows(score_mod, [bias], hit=True)
    bias = torch.randn(3, N, requires_grad=True)
    assert_follows(score_mod, [bias], hit=True)
    n = 2  # another shape of an intermediate
    assert_follows(score_mod, [bias])


def test_numbers_written_into_a_tensor_of_constants() -> None:
    bias = torch.randn(N, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        table = torch.zeros(3)
        view = table[1:]
        table[1] = 2.0
        table[2] = bias[0] * 3
        return s * table[h] + view[1]

    assert_follows(score_mod, [bias])
    bias = torch.randn(N, requires_grad=True)
    assert_follows(score_mod, [bias])


def test_a_read_before_a_write() -> None:
    bias = torch.randn(N)

    def score_mod(s, b, h, q, kv):
        table = bias.clone()
        before = table[kv]
        table += 1
        return s + before * table[q]

    with pytest.raises(TraceError, match="changed after it was read"):
        trace_score_mod(score_mod)


def test_a_default_device() -> None:
    bias = torch.randn(N)
    with torch.device("meta"):
        mod = trace_score_mod(lambda s, b, h, q, kv: s + torch.stack([bias[kv], s, bias[q] * 2])[1:].sum())
    assert mod.buffers == (bias,)


def test_single_numbers_on_the_cpu_join_the_device() -> None:
    bias, cap = torch.randn(N, device="meta"), torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        mod = trace_score_mod(lambda s, b, h, q, kv: s * cap + bias[kv])
        assert [b.device.type for b in mod.buffers] == ["meta", "meta"] and mod.buffers[0].requires_grad


def test_fake_tensors() -> None:
    """As in torch.export: tensors without values."""
    with FakeTensorMode():
        bias = torch.randn(N, requires_grad=True)
        for _ in range(2):
            mod = trace_score_mod(lambda s, b, h, q, kv: s + bias[kv] * 2 + torch.exp(bias)[q] + torch.tensor(0.5))
    assert mod.buffers[0] is bias and mod.buffers[1].shape == (N,) and "0.5" in mod.text


def test_autocast_does_not_matter() -> None:
    a, m = torch.randn(H, 3, dtype=torch.float32), torch.randn(3, 3, dtype=torch.float32)

    def score_mod(s, b, h, q, kv):
        return s + (a @ m)[h, 0] + (a[h] @ m).sum()

    plain = trace_score_mod(score_mod)
    cache.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            mod = trace_score_mod(score_mod)
            assert mod.text == plain.text
            for got, expected in zip(mod.buffers, plain.buffers, strict=True):
                assert got.dtype == torch.float32 and torch.equal(got, expected)
    assert misses() == 1


def test_a_gradient_of_ones_own() -> None:
    """An autograd.Function on a captured tensor must not be replayed without its backward."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 100

    bias = torch.randn(N, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        return s + Double.apply(bias)[kv]

    assert_follows(score_mod, [bias])
    assert_follows(score_mod, [bias])


def test_state_makes_a_function_untrusted() -> None:
    calls = []
    count = 0

    def by_append(s, b, h, q, kv):
        calls.append(1)
        return s * len(calls)

    def by_nonlocal(s, b, h, q, kv):
        nonlocal count
        count += 1
        return s * count

    def by_getattr(s, b, h, q, kv):
        return s * getattr(holder, "sca" + "le")

    holder = types.SimpleNamespace(scale=2.0)
    assert trace_score_mod(by_append).text != trace_score_mod(by_append).text
    assert trace_score_mod(by_nonlocal).text != trace_score_mod(by_nonlocal).text
    assert_follows(by_getattr)
    holder.scale = 3.0
    assert_follows(by_getattr)


def test_an_attribute_of_a_function() -> None:
    def score_mod(s, b, h, q, kv):
        return s * score_mod.scale

    score_mod.scale = 2.0
    assert_follows(score_mod)
    score_mod.scale = 3.0
    assert_follows(score_mod)


def test_an_attribute_that_a_function_is_given_later() -> None:
    def helper(x):
        return x * 2

    def score_mod(s, b, h, q, kv):
        try:
            return helper(s) + helper.shift
        except Exception:
            return helper(s)

    assert_follows(score_mod, hit=False)
    assert_follows(score_mod, hit=True)
    helper.shift = 3.0
    assert_follows(score_mod, hit=False)


def test_a_function_of_both_kinds_and_of_several_devices() -> None:
    def sees(*indices):
        return indices[-2] >= indices[-1]

    for _ in range(2):
        assert trace_score_mod(sees).text.startswith("score_mod")
        check_mask_mod(sees)

    def own_table(s, b, h, q, kv):
        return s + torch.arange(100, device=s.device)[kv]

    for device in ("cpu", "meta", "cpu"):
        (table,) = trace_score_mod(own_table, device=device).buffers
        assert table.device.type == device


def test_changed_defaults() -> None:
    def helper(x, factor=0.5, power=2.0, *, scale=2.0, shift=1.0):
        return x * scale + shift + (x * factor) * power

    def score_mod(s, b, h, q, kv):
        return helper(s)

    assert_follows(score_mod, hit=False)
    helper.__kwdefaults__ = {"scale": 0.5, "shift": 3.0}
    assert_follows(score_mod, hit=True)
    helper.__defaults__ = (0.5, 2.0, 4.0)[1:]
    assert_follows(score_mod, hit=True)
    helper.__defaults__ = (3.0, 2.0, 4.0)  # a default for x, too: those of the others are at other places
    assert_follows(score_mod, hit=False)
    helper.__kwdefaults__ = {"scale": 0.5}
    with pytest.raises(TraceError, match="missing 1 required keyword-only argument"):
        trace_score_mod(score_mod)


def test_a_class_is_followed_by_its_attributes() -> None:
    class Options:
        scale = 2.0

        @staticmethod
        def curve(x):
            return x * 3

    class Special(metaclass=type("Meta", (type,), {})):
        scale = 5.0

    def score_mod(s, b, h, q, kv):
        return Options.curve(s) * Options.scale

    assert_follows(score_mod, hit=False)
    assert_follows(score_mod, hit=True)
    Options.scale = 3.0
    assert_follows(score_mod)
    Options.curve = staticmethod(torch.sin)
    assert_follows(score_mod, hit=False)
    special = lambda s, b, h, q, kv: s * Special.scale  # noqa: E731
    for _ in range(2):  # a metaclass may say anything
        assert_follows(special, hit=False)


def test_a_class_that_makes_up_attributes() -> None:
    class Options:
        def __getattr__(self, name):
            return values[name]

    values, options = {"scale": 2.0}, Options()

    def score_mod(s, b, h, q, kv):
        return s * options.scale

    assert_follows(score_mod)
    values["scale"] = 3.0
    assert_follows(score_mod)


CURVE = 1.5


class Curve:
    def __init__(self):
        self.power = CURVE


def test_an_object_that_is_made_within(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_mod(s, b, h, q, kv):
        return s * Curve().power

    assert_follows(score_mod)
    monkeypatch.setitem(globals(), "CURVE", 2.5)
    assert_follows(score_mod)


def test_parameters_of_a_module() -> None:
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(N))

        def score_mod(self, s, b, h, q, kv):
            return s * len(list(self.parameters())) + self.bias[kv]

    module = Table()
    assert_follows(module.score_mod, [module.bias])
    module.other = nn.Parameter(torch.randn(N))
    assert_follows(module.score_mod, [module.bias])


def test_requires_grad_and_dtype_are_part_of_the_guard() -> None:
    bias = torch.randn(N)

    def score_mod(s, b, h, q, kv):
        return s + bias[kv] * 2

    assert_follows(score_mod, hit=False)
    bias.requires_grad_()
    assert_follows(score_mod, [bias], hit=False)
    bias = torch.arange(N)
    assert_follows(score_mod, hit=False)


def test_the_cache_keeps_no_tensor_alive() -> None:
    class Big:
        pass

    def make():
        bias = torch.randn(N)
        bias_of = Bias(torch.randn(H, N), 3)
        return [weakref.ref(bias), weakref.ref(bias_of)], lambda s, b, h, q, kv: s + bias.exp()[kv] + bias_of.bias[
            h, kv
        ]

    references, mod = make()
    trace_score_mod(mod)
    assert cache.cache_info()["entries"] == 1
    del mod
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_the_cache_is_bounded() -> None:
    for n in range(100):
        trace_score_mod(eval(f"lambda s, b, h, q, kv: s * {n}"))
    for size in range(1, 60):
        bias = torch.randn(size)
        trace_score_mod(lambda s, b, h, q, kv: s + bias[kv])
    assert cache.cache_info()["entries"] <= 100 + 32


def test_what_is_traced_again_stays_longest() -> None:
    def make(size: int) -> Callable[..., Tensor]:
        bias = torch.randn(size)
        return lambda s, b, h, q, kv: s + bias[kv]

    trace_score_mod(make(3))
    for n in range(cache._MAX_FUNCTIONS - 1):
        trace_score_mod(eval(f"lambda s, b, h, q, kv: s * {n} + 1"))
    again = make(4)
    trace_score_mod(again)
    trace_score_mod(eval("lambda s, b, h, q, kv: s - 7"))
    before = cache.cache_info()["misses"]
    trace_score_mod(again)
    assert cache.cache_info()["misses"] == before


def test_threads() -> None:
    errors = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(20):
            bias, scale = torch.randn(N, generator=generator), float(i + seed)
            mod = trace_score_mod(lambda s, b, h, q, kv: s * scale + bias[kv])
            if mod.buffers[0] is not bias or mod.scalars != (scale,):
                errors.append((seed, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_combined_masks_hit() -> None:
    def window(n):
        return lambda b, h, q, kv: q - kv < n

    for n, hit in ((3, False), (5, True)):
        before = misses()
        check_mask_mod(and_masks(window(n), or_masks(score_mods.causal_mask, window(-n))))
        assert (misses() == before) == hit
    check_mask_mod(and_masks(score_mods.causal_mask, window(2)))


# --- errors ---------------------------------------------------------------------------------------------------

TABLE = torch.randn(H, N)


def branch(s, b, h, q, kv):
    if s > 0:
        return s
    return -s


def item(s, b, h, q, kv):
    return s * q.item()


def to_int(s, b, h, q, kv):
    return s + TABLE[0][int(kv)]


def loop(s, b, h, q, kv):
    for _ in range(q):
        s = s * 2
    return s


def unknown(s, b, h, q, kv):
    return torch.special.i0(s)


def vector(s, b, h, q, kv):
    return s + TABLE[h]


def nothing(s, b, h, q, kv):
    pass


def write_captured(s, b, h, q, kv):
    TABLE[0, 0] = 1.0
    return s


def write_captured_in_place(s, b, h, q, kv):
    TABLE.mul_(s)
    return s


def write_traced(s, b, h, q, kv):
    row = TABLE[h].clone()
    row[q] = s
    return row[kv]


def write_under_a_view(s, b, h, q, kv):
    view = s.view(1)
    s += 1
    return s + view[0]


def random(s, b, h, q, kv):
    return s + torch.rand(())


def dropout(s, b, h, q, kv):
    return F.dropout(s)


def whole(s, b, h, q, kv):
    return s + torch.zeros(64, 64)[:, q].sum() + BIG.sum(0)[kv] * (BIG[kv][:, None] * BIG[kv]).sum()


def float_index(s, b, h, q, kv):
    return s + TABLE[h, kv / 2]


def too_many(s, b, h, q, kv):
    return s + TABLE[h, q, kv]


def out_of_range(s, b, h, q, kv):
    return s + TABLE[h, 99]


def complex_buffer(s, b, h, q, kv):
    return s + COMPLEX[kv].real


def devices(s, b, h, q, kv):
    return s + TABLE[h, kv] + META[kv]


def own_error(s, b, h, q, kv):
    raise KeyError("mine")


def as_numpy(s, b, h, q, kv):
    return s.numpy()


BIG, COMPLEX, META = torch.randn(3, 5000), torch.randn(N, dtype=torch.complex64), torch.randn(N, device="meta")


@rows_of(
    "function, line, message",
    [
        (branch, "if s > 0:", "torch.where"),
        (item, "return s * q.item()", "keep it a tensor"),
        (to_int, "return s + TABLE[0][int(kv)]", r"\.long\(\)"),
        (loop, "for _ in range(q):", "Python number"),
        (unknown, "return torch.special.i0(s)", r"operation (prims::)?bessel_i0|special_i0"),
        (vector, None, r"tensor of shape \[8\]; return a single value"),
        (nothing, None, "returned NoneType; return one tensor"),
        (write_captured, "TABLE[0, 0] = 1.0", "write into a captured tensor"),
        (write_captured_in_place, "TABLE.mul_(s)", "write into a captured tensor"),
        (write_traced, "row[q] = s", "torch.where or torch.stack"),
        (write_under_a_view, "s += 1", "has views"),
        (random, "return s + torch.rand(())", "random numbers"),
        (dropout, "return F.dropout(s)", "random numbers .bernoulli"),
        (whole, None, "at most 4194304 operations for a pair"),
        (float_index, "return s + TABLE[h, kv / 2]", r"float as an index.*\.long\(\)"),
        (too_many, "return s + TABLE[h, q, kv]", "too many indices"),
        (out_of_range, "return s + TABLE[h, 99]", "out of bounds"),
        (complex_buffer, "return s + COMPLEX[kv].real", "complex64"),
        (devices, None, r"several devices.*\.to\(device\)"),
        (own_error, 'raise KeyError("mine")', "KeyError.*mine"),
        (as_numpy, "return s.numpy()", "keep it a tensor"),
    ],
)
def test_errors_name_the_line(function: Callable, line: str | None, message: str) -> None:
    before = TABLE.clone()
    with pytest.raises(TraceError, match=message) as caught:
        trace_score_mod(function)
    text = str(caught.value)
    assert text.startswith(f"score_mod {function.__name__}: ")
    if line is not None:
        assert __file__ in text and line in text.splitlines()[-1]
    assert torch.equal(TABLE, before)


def test_errors_of_masks_and_arguments() -> None:
    with pytest.raises(TraceError, match=r"returned torch\.int64; return a bool"):
        trace_mask_mod(lambda b, h, q, kv: q - kv)
    with pytest.raises(TypeError, match=r"function must be a callable or a ScoreMod, but got torch\.Tensor"):
        trace_score_mod(torch.ones(3))
    with pytest.raises(TraceError, match="positional argument"):
        trace_score_mod(lambda b, h, q, kv: q >= kv)


def test_a_value_that_escaped() -> None:
    escaped = []

    def escape(s, b, h, q, kv):
        escaped.append(s)
        return s

    trace_score_mod(escape)
    with pytest.raises(TraceError, match="another score_mod"):
        trace_score_mod(lambda s, b, h, q, kv: s + escaped[0])
    with pytest.raises(Exception, match="outside of it"):
        escaped[0] + 1


def test_partial_of_a_method_and_deep_text() -> None:
    module = Bias(torch.randn(H, N), 4)
    assert_follows(functools.partial(module.score_mod), [module.bias])
    with pytest.raises(TraceError, match=r"nodes|deep|nested"):
        trace_score_mod(lambda s, b, h, q, kv: functools.reduce(lambda x, _: torch.sin(x), range(5000), s))


# --- torch.compile --------------------------------------------------------------------------------------------


@torch.library.custom_op("test_trace::evaluate", mutates_args=())
def evaluate_op(text: str, score: Tensor, buffers: list[Tensor], scalars: list[float]) -> Tensor:
    return torch.ops.fusegrad.evaluate_score_mod(text, score, buffers, *split_scalars(scalars))


@evaluate_op.register_fake
def _(text: str, score: Tensor, buffers: list[Tensor], scalars: list[float]) -> Tensor:
    return torch.empty_like(score)


def evaluate(score: Tensor, mod: Callable | ScoreMod) -> Tensor:
    traced = trace_score_mod(mod)
    return evaluate_op(traced.text, score * 2, list(traced.buffers), list(traced.scalars))


def test_a_score_mod_in_a_compiled_function() -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(evaluate, backend=backend, fullgraph=True)
    score = torch.randn(B, H, M, N)
    for _ in range(3):
        bias = torch.randn(N)
        mod = trace_score_mod(lambda s, b, h, q, kv: s + bias[kv])
        agree(compiled(score, mod), 2 * score + bias)
    assert len(graphs) == 1
    for _ in range(3):
        bias = torch.randn(N)
        agree(compiled(score, lambda s, b, h, q, kv, bias=bias: s * bias[kv]), 2 * score * bias)
    assert len(graphs) == 2
    with pytest.raises(Exception, match="made outside of the compiled function"):
        compiled(score, lambda s, b, h, q, kv: s + torch.rand(()))
    torch._dynamo.reset()


def test_every_text_is_canonical() -> None:
    for case in score_mods.CASES:
        for mod, trace in zip(draw(case)[:2], (trace_score_mod, trace_mask_mod), strict=True):
            if mod is not None:
                text = trace(mod).text
                assert language.compact(text)[0] == text
