"""What a score_mod may be written as: Functions, custom ops, closures. Right, or an error; never another function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..case import case
from ..problem import Problem, Tensors, plain
from ..verdict import check
from .captured import compare, length

FLEX = ("flex_attention",)


def scores(problem: Problem, function: Callable[..., Any]) -> None:
    problem.score_mod = lambda t: function
    problem.compare(plain)


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is that of the identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.round(2 * x) / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return StraightThrough.apply(x), in_dims[0]


class ThreeTimes(torch.autograd.Function):
    """The identity, whose gradient is three times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@case(9, "a straight-through estimator, an autograd.Function, of the score", FLEX, may_raise=True)
def straight_through(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: StraightThrough.apply(s))


@case(9, "an autograd.Function that scales the gradient", FLEX, may_raise=True)
def scaled_gradient(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: ThreeTimes.apply(s))


@case(9, "an autograd.Function of a captured value", FLEX, may_raise=True)
def function_of_captured(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + StraightThrough.apply(t["bias"][kv]),
        bias=problem.normal(length(problem)),
    )


def _square(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * grad


def _exp_of_another_namespace() -> Callable[[Tensor], Tensor]:
    """An op named exp that squares."""
    name = "fusegrad_conformance::exp"
    library = torch.library.Library("fusegrad_conformance", "FRAGMENT")
    library.define("exp(Tensor self) -> Tensor")
    library.impl("exp", lambda x: x * x, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        name, _square, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]), lib=library
    )
    torch.library.register_fake(name, torch.empty_like, lib=library)
    torch.library.register_vmap(name, lambda info, in_dims, x: (x * x, in_dims[0]), lib=library)
    _LIBRARIES.append(library)
    return lambda x: torch.ops.fusegrad_conformance.exp(x)


_LIBRARIES: list[torch.library.Library] = []  # an op lives as long as its library


@case(9, "an op named exp of another namespace than ATen's", FLEX, may_raise=True)
def foreign_exp(problem: Problem) -> None:
    function = _exp_of_another_namespace()
    scores(problem, lambda s, b, h, q, kv: function(s))


@case(9, "a custom op with a registered backward", FLEX, may_raise=True)
def custom_op(problem: Problem) -> None:
    """An op whose backward is not the derivative of its forward: what is registered counts."""

    @torch.library.custom_op("fusegrad_conformance::squash", mutates_args=())
    def squash(x: Tensor) -> Tensor:
        return x / (1 + x.abs())

    squash.register_fake(lambda x: torch.empty_like(x))
    squash.register_vmap(lambda info, in_dims, x: (squash(x), in_dims[0]))
    squash.register_autograd(
        lambda ctx, grad: grad * 0.5,
        setup_context=lambda ctx, inputs, output: None,
    )
    scores(problem, lambda s, b, h, q, kv: squash(s))


@case(9, "a score_mod that asks torch.is_grad_enabled()", FLEX, may_raise=True)
def asks_for_grad_mode(problem: Problem) -> None:
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s * (2.0 if torch.is_grad_enabled() else 3.0)
    problem.compare(plain)
    with torch.no_grad():
        value, truth = problem.ours(problem.leaves()), problem.truth(problem.exact())
    check("value under no_grad", value, truth, problem.dtype)


@case(6, "a captured number that changes after the first call", FLEX)
def number_changes(problem: Problem) -> None:
    state = {"factor": 1.0}
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s * state["factor"]
    for factor in (1.0, 2.0, 0.5):
        state["factor"] = factor
        problem.compare(plain)


@case(6, "an attribute of a module that changes after the first call", FLEX)
def attribute_changes(problem: Problem) -> None:
    class Module(nn.Module):
        cap = 1.0

        def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return self.cap * torch.tanh(s / self.cap)

    module = Module()
    problem.score_mod = lambda t: module.score
    for cap in (1.0, 3.0):
        module.cap = cap
        problem.compare(plain)


@case(6, "a captured tensor that is written to after the first call", FLEX)
def tensor_changes(problem: Problem) -> None:
    bias = problem.normal(length(problem))
    made: dict[Any, Tensor] = {}

    def make(t: Tensors) -> Callable[..., Any]:
        place = t["query"].device, t["query"].dtype
        held = made.setdefault(place, bias.to(*place, copy=True))
        return lambda s, b, h, q, kv: s + held[kv]

    problem.score_mod = make
    problem.compare(plain)
    for held in made.values():
        held.neg_()
    problem.compare(plain)


@case(6, "another function of the same code", FLEX)
def other_closure(problem: Problem) -> None:
    def power(n: int) -> Callable[..., Any]:
        return lambda s, b, h, q, kv: s + s.tanh() ** n

    for n in (1, 2, 3):
        scores(problem, power(n))


@case(9, "a score changed in place", FLEX, may_raise=True)
def written_in_place(problem: Problem) -> None:
    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        s = s * 1
        s *= 0.5
        s += (q - kv) * 0.0625
        return s

    scores(problem, function)


@case(9, "softcap", FLEX)
def softcap_score(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: 2 * torch.tanh(s / 2))


@case(9, "ALiBi", FLEX)
def alibi(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 4.0)))


@case(9, "a causal score_mod by where", FLEX)
def causal_by_where(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: torch.where(q >= kv, s, -math.inf))


@case(9, "functions whose gradients have kinks: relu, clamp, abs, fmod, hardtanh", FLEX)
def kinks(problem: Problem) -> None:
    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        s = s + torch.relu(s) - s.clamp(-0.5, 0.5) * 0.3 + s.abs() * 0.2
        return s + torch.fmod(s, 0.75) + nn.functional.hardtanh(s) - nn.functional.relu6(3 * s)

    scores(problem, function)


@case(9, "integer arithmetic of indices with Python's signs", FLEX)
def integers(problem: Problem) -> None:
    scores(problem, lambda s, b, h, q, kv: s + ((q - kv) // 3 % 5) * 0.125 + ((q ^ kv) & 3) * 0.0625)


@case(9, "functions of the score: exp, log, sin, sigmoid, erf, power", FLEX)
def elementwise(problem: Problem) -> None:
    def function(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        p = s.abs() + 0.5
        return s.sin() + p.log() * 0.5 + torch.sigmoid(s) + torch.erf(s) + p**1.5 * 0.1 + torch.exp(-p)

    scores(problem, function)


@case(9, "the dot product of two captured vectors", FLEX, may_raise=True)
def dot_product(problem: Problem) -> None:
    n = length(problem)
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + (t["left"][h, q] * t["right"][h, kv]).sum(-1) * 0.3,
        left=problem.normal(2, n, 4),
        right=problem.normal(2, n, 4),
    )
