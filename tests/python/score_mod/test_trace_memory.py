"""What tracing leaves behind with the garbage collector off, as training loops run: nothing, whatever happens."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import TraceError, create_block_mask, explain, flex_attention, trace_mask_mod, trace_score_mod
from fusegrad._tracing import cache
from test_trace_table import MORE, VECTORS, function, section, takes_two
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap


def assert_leaves_nothing(call: Callable[[], object], everything: bool = True) -> None:
    """No object more after ten calls than before, but for what is kept once. Not `everything`: but for what PyTorch's
    transforms leave, functions and classes that hold no tensor."""
    call()
    gc.collect()
    gc.disable()
    try:
        call()
        counts()
        before = counts()
        for _ in range(10):
            call()
        more = counts() - before
    finally:
        gc.enable()
    if not everything:
        more = collections.Counter({kind: n for kind, n in more.items() if kind in OF_TRACES})
    assert max(more.values(), default=0) < 10, more.most_common(8)


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """What was there before is neither looked through nor counted: a process of many tests has millions of objects."""
    gc.collect()
    gc.freeze()


OF_TRACES = ("Tensor", "Parameter", "TracedTensor", "Trace", "Graph", "Steps", "Run", "Entry", "frame", "traceback")


ROWS = 1 << 18  # 4 MiB


def resident() -> int:
    """Bytes: what C++ holds without an object of Python is seen here alone."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts() -> collections.Counter[str]:
    return collections.Counter(type(x).__qualname__ for x in gc.get_objects())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Failing(Exp):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ZeroDivisionError


@torch.library.custom_op("fusegrad_memory::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


cube.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
net = nn.Linear(4, 1)
kept: list[Tensor] = []


def fails(s: Tensor) -> Tensor:
    raise ZeroDivisionError


def swallows(s: Tensor, x: Tensor) -> Tensor:
    try:
        return s if s > 0 else x
    except Exception:
        return s + x


def keeps(x: Tensor) -> Tensor:
    kept[:] = [x]
    return x


MODS: dict[str, Callable[[Tensor, float], Callable]] = {
    "a read and a number": lambda c, n: lambda s, b, h, i, j: s + c[i, j] * n,
    "a number as a constant": lambda c, n: lambda s, b, h, i, j: s + sum(c[i, j] * k for k in range(int(n))),
    "a view": lambda c, n: lambda s, b, h, i, j: s + c[i, j].unsqueeze(0).sum(),
    "a module": lambda c, n: lambda s, b, h, i, j: s + net(c[i])[0],
    "an element at a place": lambda c, n: lambda s, b, h, i, j: s + torch.stack([s, c[i, j]])[j % 2],
    "a Function": lambda c, n: lambda s, b, h, i, j: Product.apply(s, c[i, j]),
    "a Function of a view": lambda c, n: lambda s, b, h, i, j: Product.apply(s, c[i].sum().view(1)[0]),
    "a Function that saves its output": lambda c, n: lambda s, b, h, i, j: Exp.apply(s + c[i, j]),
    "Functions of Functions": lambda c, n: lambda s, b, h, i, j: Product.apply(Exp.apply(s), Exp.apply(c[i, j])),
    "an op": lambda c, n: lambda s, b, h, i, j: cube(s + c[i, j]),
    "steps": lambda c, n: lambda s, b, h, i, j: s + c.exp().t()[i, j] * n,
    "values of Python": lambda c, n: lambda s, b, h, i, j: s + c[0, 0].item(),
    "what cannot be trusted": lambda c, n: lambda s, b, h, i, j: getattr(s + c[i, j], "exp")(),  # noqa: B009
    "a value that is kept": lambda c, n: lambda s, b, h, i, j: keeps(Exp.apply(c[i, j]).view(1)) + s,
    "a branch": lambda c, n: lambda s, b, h, i, j: s if s > 0 else c[i, j],
    "an error that is swallowed": lambda c, n: lambda s, b, h, i, j: swallows(s, c[i, j]),
    "an error of its own": lambda c, n: lambda s, b, h, i, j: fails(s + c[i, j].view(1)),
    "an error after a Function": lambda c, n: lambda s, b, h, i, j: fails(Product.apply(s, c[i, j].unsqueeze(0))),
    "an error in a backward": lambda c, n: lambda s, b, h, i, j: Failing.apply(s * c[i, j]),
    "out of bounds": lambda c, n: lambda s, b, h, i, j: s + c[i, 9],
    "no tensor": lambda c, n: lambda s, b, h, i, j: "nothing",
    "a write": lambda c, n: lambda s, b, h, i, j: s + c.mul_(2)[i, j],
    "too large": lambda c, n: lambda s, b, h, i, j: (c[i] * s).repeat(300).exp().prod(),
}


@pytest.mark.parametrize("name", MODS)
@rows_of("anew", [True, False])
def test_traces(name: str, anew: bool) -> None:
    captured = torch.ones(ROWS, 4)

    def call() -> None:
        if anew:
            cache.clear()
        with contextlib.suppress(TraceError):
            trace_score_mod(MODS[name](captured.clone().requires_grad_(), 2.5))

    assert_leaves_nothing(call)
    before = resident()
    for _ in range(10):
        call()
    assert resident() - before < 5 * captured.nbytes


@rows_of("of", ["of one number", "of two numbers", "truth", "of integers", "of several numbers", "not in the language"])
def test_all_that_a_score_mod_may_call(of: str) -> None:
    def traced(name: str) -> None:
        cache.clear()
        c = torch.randn(4, 3, requires_grad=True)
        two = of == "of two numbers" or (of == "truth" and takes_two(name))

        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if of == "of several numbers":
                return s + VECTORS.get(name, lambda x: function(name)(x, 0))(c[i] * s)
            x = (s + c[i, 0]).view(1)[0]
            if of == "of integers":
                return s + function(name)(x.long(), *(() if "not" in name else (2,)))
            return s * function(name)(x, *MORE.get(name, (c[i, 1],) if two else ()))

        try:
            trace_score_mod(score_mod)
        except TraceError:
            assert of == "not in the language", name

    def call() -> None:
        for name in section(of):
            traced(name)

    assert_leaves_nothing(call)


QKV = [torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (3, 4, 4)]


def loss(c: Tensor) -> Tensor:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return Product.apply(s, c.exp()[i, j]) + net(c[i].float())[0] + c[i, j].unsqueeze(0).sum()

    return flex_attention(*QKV, score_mod).square().sum()


def differentiated_twice(c: Tensor) -> None:
    (first,) = torch.autograd.grad(loss(c), c, create_graph=True)
    first.square().sum().backward()


CALLS: dict[str, Callable[[Tensor], object]] = {
    "forward": loss,
    "backward": lambda c: loss(c).backward(),
    "without gradients": lambda c: loss(c.detach()),
    "backward twice": differentiated_twice,
    "grad": lambda c: grad(loss)(c.detach()),
    "jvp": lambda c: jvp(loss, (c.detach(),), (c.detach(),)),
    "vmap": lambda c: vmap(grad(loss))(torch.stack([c, c]).detach()),
    "hessian": lambda c: hessian(loss)(c.detach()),
    "a block mask": lambda c: create_block_mask(lambda b, h, i, j: c.exp()[i, j] > 1, 1, 1, 4, 4),
    "a mask_mod": lambda c: trace_mask_mod(lambda b, h, i, j: F.relu(c[i, j]).view(1)[0] > 1),
    "explain": lambda c: explain(lambda s, b, h, i, j: Product.apply(s, c[i, j])),
}


@rows_of("name", [*CALLS])
def test_calls(name: str) -> None:
    def call() -> None:
        cache.clear()
        CALLS[name](torch.randn(4, 4, dtype=torch.float64, requires_grad=True))

    assert_leaves_nothing(call, everything=False)
