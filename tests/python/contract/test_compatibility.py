"""The compatibility table as tests, and what compilers must not do: break graphs, compile again, synchronise.

docs/tables/compatibility.md says what the cells mean; tools/compatibility.py prints them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import fusegrad
import pytest
import score_mods
import torch
from compat_ops import OPS, Case, widest
from compat_transforms import (
    ABSENT,
    PASS,
    TRANSFORMS,
    SilentDifference,
    Transform,
    check,
    compiled,
    compiled_backward,
    gradients,
    outcome,
)
from coverings import rows_of
from fusegrad import flex_attention
from support import DEVICES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

everywhere = pytest.mark.parametrize("device", DEVICES)
each_op = rows_of("op", OPS)
modes = pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- the table ----------------------------------------------------------------------------------------------------

# Inductor's compilations take seconds each: two cells here, all of them in the benchmark.
SLOW_CELLS = ("cross_entropy-inplace", "flex_attention")


@each_op
@modes
@everywhere
@rows_of("transform", [*TRANSFORMS], tests=4)
def test_cell(op, inplace: bool, device: str, transform: Transform) -> None:
    """Eager's gradients by rule 12, or an error that names the op, where docs/tables/compatibility.md says so."""
    case = Case(op, inplace, device)
    if transform.slow and str(case) not in SLOW_CELLS:
        pytest.skip("tools/compatibility.py has it")
    found = outcome(case, transform)
    if found == ABSENT:
        pytest.skip("needs CUDA")
    if transform.name.startswith("create_graph") and inplace and op.name != "flex_attention":
        assert "the gradient must not be differentiated a second time" in found  # there are no logits any more
    else:
        assert found == PASS


def test_a_wrong_gradient_is_found() -> None:
    """The table's own check: a gradient that is off by a part in 10^9 fails in float64, one of 10^3 in bfloat16."""
    for transform in TRANSFORMS:
        if transform.name not in ("eager", "autocast and GradScaler"):
            continue

        def off(case: Case, transform: Transform = transform) -> list[Tensor]:
            ours = case.op.ours.__name__ != "eager"
            factor = (1.05 if transform.low_precision else 1 + 1e-9) if ours else 1
            return [g * factor for g in transform.run(case)]

        for op in OPS:
            with pytest.raises(SilentDifference, match="gradient 0"):
                outcome(Case(op), replace(transform, run=off))


# --- an upstream op that saved what is overwritten ----------------------------------------------------------------


class SavesItsOutput(torch.autograd.Function):
    """exp, by hand."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": functools.partial(torch.softmax, dim=-1),
    "exp": torch.exp,
    "tanh": torch.tanh,
    "function": SavesItsOutput.apply,
}
COMPILERS = {
    "eager": lambda case: gradients(case, case.program),
    "aot_eager": compiled("aot_eager"),
    "inductor": compiled("inductor"),
    "compiled autograd": compiled_backward,
}


def raises_or_is_right(case: Case, compiler: str) -> None:
    try:
        results = COMPILERS[compiler](case)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        check(case, results)


@each_op
@everywhere
@pytest.mark.parametrize("compiler", [name for name in COMPILERS if name != "inductor"])
@rows_of("upstream", [*UPSTREAM], tests=4)
def test_an_upstream_op_that_saved_the_tensor(op, device: str, upstream: str, compiler: str) -> None:
    if compiler == "compiled autograd" and upstream in ("exp", "tanh"):
        pytest.skip("softmax and the function stand for them: each is a compilation")
    case = Case(op, True, device, widest(device), upstream=UPSTREAM[upstream])
    raises_or_is_right(case, compiler)


@everywhere
def test_nothing_is_written_in_a_trace(device: str) -> None:
    """What AOTAutograd gets wrong with ATen's in-place ops (below) must not reach the losses' own."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64, device=device)

    def loss(y: Tensor) -> Tensor:
        return fusegrad.cross_entropy(y, target, inplace=True)

    y = x.exp()
    before = y.detach().clone()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(y)
    assert torch.equal(y.detach(), before)
    loss(y)
    assert not torch.equal(y.detach(), before)


@everywhere
def test_an_upstream_op_that_saved_the_tensor_under_inductor(device: str) -> None:
    raises_or_is_right(Case(OPS[0], True, device, widest(device), upstream=UPSTREAM["softmax"]), "inductor")


# --- what compilers get wrong, with ATen's own ops: these fail when it is mended ------------------------------------


def test_what_aot_autograd_gets_wrong() -> None:
    """A custom Function saves its output, an in-place op of ATen writes to it: eager raises, a compiled graph is
    silently wrong."""

    def loss(x: Tensor) -> Tensor:
        return SavesItsOutput.apply(x).mul_(3).sum()

    x = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss(x), x)
    (wrong,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), x)
    torch.testing.assert_close(wrong, 9 * x.detach().exp())  # 3 exp(x) is right


class OverwritesInBackward(torch.autograd.Function):
    """The sum of squares, whose backward writes the gradient over the input by an in-place op of ATen."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.detach().mul_(2 * grad)


def test_what_compiled_autograd_gets_wrong() -> None:
    """It unpacks all saved tensors, and checks their versions, before any node runs: a write by one node goes unseen
    by the next."""
    x = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        OverwritesInBackward.apply(x.exp()).backward()
    assert x.grad is None
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        OverwritesInBackward.apply(x.exp()).backward()
    torch.testing.assert_close(x.grad, 4 * x.detach().exp().square())  # twice that is too much: 2 exp(2 x) is right


# --- score_mods within compiled functions -------------------------------------------------------------------------

B, H, M, N, D = 2, 2, 6, 8, 4


def attention_inputs(device: str, lengths: tuple[int, int] = (M, N), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = widest(device)
    shapes = [(B, H, n, D) for n in (lengths[0], lengths[1], lengths[1])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def agree(one: Callable[..., Tensor], other: Callable[..., Tensor], inputs: list[Tensor], *parameters: Tensor) -> None:
    """The same output, and the same gradients of inputs and parameters."""
    out, expected = one(*inputs), other(*inputs)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    leaves = [*inputs, *parameters]
    # The other one first: a parameter that is no leaf has a graph that both share, and a compiled graph is not kept.
    wanted = torch.autograd.grad(expected, leaves, upstream, retain_graph=True, materialize_grads=True)
    for a, b in zip(torch.autograd.grad(out, leaves, upstream, materialize_grads=True), wanted, strict=True):
        torch.testing.assert_close(a, b)


@rows_of("case", score_mods.CASES[::2], tests=4)
def test_score_mods_from_the_field_without_a_graph_break(case: score_mods.Case) -> None:
    check_without_a_graph_break(case)


@pytest.mark.large
@rows_of("case", score_mods.CASES[1::2], tests=4)
def test_the_rest_of_the_field_without_a_graph_break(case: score_mods.Case) -> None:
    check_without_a_graph_break(case)


def check_without_a_graph_break(case: score_mods.Case) -> None:
    """Traced within a compiled function as outside of it."""
    score_mod, mask_mod, parameters = case.make(B, H, M, N, torch.float64, torch.Generator().manual_seed(0))
    # create_block_mask takes plain functions only.
    function = mask_mod if mask_mod is None else lambda b, h, q, kv: mask_mod(b, h, q, kv)
    block_mask = function and create_block_mask(function, B, H, M, N, device="cpu", BLOCK_SIZE=4)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, score_mod, block_mask)

    agree(torch.compile(attention, backend="eager", fullgraph=True), attention, attention_inputs("cpu"), *parameters)


class Attention(nn.Module):
    """A score_mod made in forward: attributes, a number, a length, tensors computed before it and within it; and a
    block mask made in forward."""

    def __init__(self, device: str) -> None:
        super().__init__()
        dtype = widest(device)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 64, dtype=dtype, device=device))
        self.distance = nn.Parameter(torch.linspace(1, -1, 129, dtype=dtype, device=device))
        self.cap = 20.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.size(2)
        table = self.distance.exp()

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            score = self.cap * torch.tanh(score / self.cap)
            return score + table[q_idx - kv_idx + length] * self.bias.sin()[kv_idx]

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx + length // 2 >= kv_idx

        mask = create_block_mask(mask_mod, None, None, length, key.size(2), device=query.device.type, BLOCK_SIZE=16)
        return flex_attention(query, key, value, score_mod, mask, scale=0.5)


@everywhere
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_no_compilation_for_a_new_length_or_new_values(device: str, dynamic: bool | None) -> None:
    """By default PyTorch takes the first length as a constant, and the second as a sign that lengths differ."""
    module = Attention(device)
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(module, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for seed, n in enumerate((24, 33, 40)):
        with torch.no_grad():
            module.bias.add_(0.25)
        agree(program, module, attention_inputs(device, (n, n), seed), module.bias, module.distance)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0 if dynamic else 1], counts
    explained = torch._dynamo.explain(module)(*attention_inputs(device, (24, 24)))
    assert explained.graph_break_count == 0 and explained.graph_count == 1


def test_no_compilation_for_other_captured_tensors() -> None:
    """Another block mask, another bias and another table of the same shapes are new inputs of the same program."""
    counter = CompileCounterWithBackend("aot_eager")

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(query, key, value, lambda s, b, h, q, kv: s * bias[kv], mask, scale=0.5)

    program = torch.compile(attention, backend=counter, fullgraph=True)
    counts = []
    for seed in range(3):
        documents = torch.arange(32) // (8 + seed)
        bias = torch.full((32,), 0.5 + seed, dtype=torch.float64, requires_grad=True)

        def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, documents: Tensor = documents) -> Tensor:
            return documents[q] == documents[kv]

        mask = create_block_mask(same_document, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
        inputs = attention_inputs("cpu", (32, 32), seed)
        bound = [functools.partial(f, bias=bias, mask=mask) for f in (program, attention)]
        agree(*bound, inputs, bias)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0], counts


def test_a_traced_score_mod_needs_no_tracing_within() -> None:
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True)
    traced = fusegrad.trace_score_mod(lambda s, b, h, q, kv: s + bias[kv].sin())

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, traced)

    agree(torch.compile(attention, backend="aot_eager", fullgraph=True), attention, attention_inputs("cpu"), bias)


def test_what_cannot_be_traced_says_so() -> None:
    """With fullgraph the compiler's error has the reason; without, the error is the one outside of compilers."""
    bias = torch.randn(N, dtype=torch.float64)

    def writes(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        bias.mul_(2)
        return score + bias[kv]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, writes)

    before = bias.clone()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a write into a captured tensor"):
        torch.compile(attention, backend="eager", fullgraph=True)(*attention_inputs("cpu"))
    with pytest.raises(fusegrad.TraceError, match=r"a write into a captured tensor[\s\S]*bias\.mul_\(2\)"):
        torch.compile(attention, backend="eager")(*attention_inputs("cpu"))
    assert torch.equal(bias, before)


def test_no_compilation_for_a_new_length_with_the_default_scale() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for n in (12, 20):
        program(*attention_inputs("cpu", (n, n)))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


# --- CUDA ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def synchronisation_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_op
@modes
@rows_of("compiler", ["eager", "aot_eager", "inductor"])
def test_no_synchronisation(op, inplace: bool, compiler: str) -> None:
    case = Case(op, inplace, "cuda", torch.float32)
    leaves, constants = case.draw()
    program = case.program if compiler == "eager" else torch.compile(case.program, backend=compiler, fullgraph=True)
    torch.autograd.grad(program(*leaves, *constants), leaves)  # compiles, and fills caches
    with synchronisation_raises():
        torch.autograd.grad(program(*leaves, *constants), leaves)
