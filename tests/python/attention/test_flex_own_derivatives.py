"""Second derivatives of autograd.Functions in score_mods, whose backwards are no derivatives of their forwards, beside
PyTorch's own: whatever they save, and whatever they are applied to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_reference import dense, one_by_one
from coverings import rows_of
from fusegrad import flex_attention
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0]


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.cos()


# What a backward takes from its ctx: x and y, the arguments, out and t, an intermediate of the forward.
SAVED: dict[str, Callable[[Any], Tensor]] = {
    "argument": lambda ctx: ctx.saved_tensors[0],
    "output": lambda ctx: ctx.saved_tensors[2],
    "intermediate": lambda ctx: ctx.saved_tensors[3],
    "argument as an attribute": lambda ctx: ctx.x,
    "intermediate as an attribute": lambda ctx: ctx.t,
    "detached": lambda ctx: ctx.saved_tensors[0].detach() * ctx.saved_tensors[1],
    "detached output": lambda ctx: ctx.saved_tensors[2].detach().sin(),
    "computed without gradients": lambda ctx: without_gradients(ctx.saved_tensors[0]) * ctx.saved_tensors[1],
    "result of a Function": lambda ctx: Exp.apply(ctx.saved_tensors[0]) + Exp.apply(ctx.saved_tensors[1]).detach(),
}
ARGUMENTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "plain": lambda s, c: (s, c),
    "detached": lambda s, c: (s, (2 * s).detach()),
    "straight through": lambda s, c: (s + (s.round() - s).detach(), c),
    "result": lambda s, c: (s, Exp.apply(s)),
    "result of a captured value": lambda s, c: (Exp.apply(c), s * c),
    "detached result": lambda s, c: (Exp.apply(s).detach(), s * c),
}


def product_with(saved: Callable[[Any], Tensor]) -> type[Function]:
    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            out, t = x * y, x.tanh()
            ctx.save_for_backward(x, y, out, t)
            ctx.x, ctx.t = x, t
            return out

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            w = saved(ctx)
            return 1.5 * g * w, g * ctx.saved_tensors[0].sin() - g * w

    return Product


def first_and_second(attend: Callable, mod: Callable, leaves: list[Tensor]) -> list[Tensor]:
    q, k, v, c = leaves
    out = attend(q, k, v, lambda s, b, h, i, j: mod(s, c[h]))
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True, materialize_grads=True)
    of_first = sum(g.square().sum() + g.sin().sum() for g in first)
    return [*first, *torch.autograd.grad(of_first, leaves, materialize_grads=True)]


def plain(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable) -> Tensor:
    return dense(q, k, v, score_mod, evaluate=one_by_one).out


def assert_as_pytorch(mod: Callable) -> None:
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
    found, truth = (first_and_second(attend, mod, leaves) for attend in (flex_attention, plain))
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("saved", SAVED)
@rows_of("arguments", [*ARGUMENTS])
def test_second_derivatives_of_functions(saved: str, arguments: str) -> None:
    product = product_with(SAVED[saved])
    assert_as_pytorch(lambda s, c: product.apply(*ARGUMENTS[arguments](s, c)) + s)


class Both(Function):
    """Two outputs, both saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.sin() * 1, x.cos() * 1
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return 2 * g * b - h * a * 3 + g * a


class Applies(Function):
    """Its backward applies Functions to the gradient and to what was saved; these are true derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return Times.apply(g, x) + g * Times.apply(x, x.detach())


class Times(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x


class DetachesItsGradient(Times):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g.detach() * y + g * x.detach(), g * x


class AppliesItself(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * AppliesItself.apply(*ctx.saved_tensors)


@torch.library.custom_op("fusegrad_own_derivatives::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x * x * x


cube.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0] ** 2 + g * cube(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
MODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two outputs": lambda s, c: sum(Both.apply(s * c)),
    "Functions in a backward": lambda s, c: Applies.apply(s * c),
    "itself in a backward": lambda s, c: AppliesItself.apply(s * c),
    "a detached gradient": lambda s, c: DetachesItsGradient.apply(s, c),
    "an op": lambda s, c: cube(s * c),
    "a Function of an op of a Function": lambda s, c: Exp.apply(cube(Exp.apply(s)) * 0.1) * c,
}


@rows_of("name", [*MODS])
def test_functions_that_do_more(name: str) -> None:
    assert_as_pytorch(MODS[name])


def test_a_backward_that_is_once_differentiable_still_has_a_second_derivative() -> None:
    """For what it computes: PyTorch has none."""

    class Once(Times):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            return Times.backward(ctx, g)

    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
    found = first_and_second(flex_attention, lambda s, c: Once.apply(s, c), leaves)
    torch.testing.assert_close(found, first_and_second(plain, lambda s, c: s * c, leaves), rtol=1e-9, atol=1e-10)
