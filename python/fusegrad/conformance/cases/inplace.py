"""Rules 1 to 5: what may be overwritten, and that autograd sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..adapter import NotOffered
from ..case import EVERY, case
from ..problem import Loss, Problem, Program, Tensors, plain
from ..verdict import Wrong, check


def after(function: Callable[[Tensor], Tensor]) -> Program:
    """The loss of what an op before it computes of the first tensor."""

    def program(loss: Loss, t: Tensors) -> Any:
        first = next(name for name in t if t[name].requires_grad)
        return loss({**t, first: function(t[first])})

    return program


class SavesItsOutput(torch.autograd.Function):
    """exp, as a user writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@case(2, "softmax before it, which saved what may be overwritten", EVERY, may_raise=True)
def softmax_upstream(problem: Problem) -> None:
    problem.compare(after(lambda x: 4 * x.softmax(-1) if problem.op == "flex_attention" else x.softmax(-1)))


@case(2, "exp before it", EVERY, may_raise=True)
def exp_upstream(problem: Problem) -> None:
    problem.compare(after(lambda x: x.clamp(-2, 2).exp()))


@case(2, "tanh before it", EVERY, may_raise=True)
def tanh_upstream(problem: Problem) -> None:
    problem.compare(after(torch.tanh))


@case(2, "a custom Function before it that saved its output", EVERY, may_raise=True)
def function_upstream(problem: Problem) -> None:
    problem.compare(after(lambda x: SavesItsOutput.apply(x.clamp(-2, 2))))


@case(2, "another op before it saved the same input", EVERY, may_raise=True)
def used_before(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        y = t[problem.first] * 0.5
        other = y.square().mean()
        return loss({**t, problem.first: y}) + other

    problem.compare(program)


@case(2, "another use of the input after the loss", EVERY, may_raise=True)
def used_again(problem: Problem) -> None:
    if getattr(problem.adapter, "inplace", False):
        raise NotOffered("overwriting the input was asked for")

    def program(loss: Loss, t: Tensors) -> Any:
        y = t[problem.first] * 0.5
        value = loss({**t, problem.first: y})
        return value + y.square().mean()

    problem.compare(program)


@case(2, "two losses of one input", EVERY, may_raise=True)
def two_losses(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        y = t[problem.first] * 0.5
        last = "target" if "target" in t else next(n for n in reversed(t) if n != "upstream" and n != problem.first)
        return loss({**t, problem.first: y}) + 2 * loss({**t, problem.first: y, last: t[last].flip(0)})

    problem.compare(program)


@case(2, "each input is as it was, or its version counter says that it is not", EVERY)
def unchanged(problem: Problem) -> None:
    t = problem.leaves()
    given = {name: x * 1 if x.requires_grad else x for name, x in t.items()}
    before = {name: (x.detach().clone(), x._version) for name, x in given.items()}
    problem.ours(given).backward()
    for name, (values, version) in before.items():
        if given[name]._version == version and not torch.equal(given[name].detach(), values):
            raise Wrong(f"{name} was overwritten, and its version counter not raised")


@case(1, "a leaf is refused, or left as it is, with the right gradient", EVERY, may_raise=True)
def leaf(problem: Problem) -> None:
    t = problem.leaves()
    before = t[problem.first].detach().clone()
    value = problem.ours(t)
    value.backward(torch.full_like(value, 0.37))
    if not torch.equal(t[problem.first].detach(), before):
        raise Wrong("the leaf was overwritten")
    problem.compare_with(plain, None, {n: t[n].grad for n in problem.leaf_names})


@case(1, "without gradients nothing is overwritten", EVERY)
def no_grad(problem: Problem) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        t = problem.leaves()
        before = t[problem.first].detach().clone()
        with mode():
            value = problem.ours(t)
        if not torch.equal(t[problem.first].detach(), before):
            raise Wrong(f"under {mode.__name__} the input was overwritten")
        check(f"value under {mode.__name__}", value, problem.truth(problem.exact()), problem.dtype)


@case(1, "columns of a wider tensor", may_raise=True)
def columns(problem: Problem) -> None:
    """The columns beside are other data, of which the loss knows nothing."""

    def program(loss: Loss, t: Tensors) -> Any:
        wide = torch.cat([t[problem.first] * 0.5, torch.ones_like(t[problem.first])], -1)
        part = wide[..., : t[problem.first].size(-1)]
        return loss({**t, problem.first: part}) + wide[..., -3:].sum() * 0.01

    problem.compare(program)


@case(1, "an expanded row", may_raise=True)
def expanded(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        x = t[problem.first]
        return loss({**t, problem.first: x[:1].expand_as(x)})

    problem.compare(program)


@case(1, "rows that overlap", may_raise=True)
def overlapping(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        x = t[problem.first]
        shifted = (x * 0.5).flatten().as_strided(x.shape, (x.size(1) // 2, 1))
        return loss({**t, problem.first: shifted})

    problem.compare(program)


@case(1, "an output of unbind", EVERY, may_raise=True)
def unbound(problem: Problem) -> None:
    problem.compare(after(lambda x: torch.stack([x * 0.5, x]).unbind()[0]))


@case(4, "hooks and retain_grad of the overwritten tensor", EVERY)
def hooks(problem: Problem) -> None:
    kept = {}

    def program(loss: Loss, t: Tensors) -> Any:
        y = t[problem.first] * 0.5
        y.retain_grad()
        y.register_hook(lambda g: 2 * g)
        kept["y"] = y
        return loss({**problem.activations(t), problem.first: y})

    value = program(problem.ours, (t := problem.leaves()))
    (value * 0.37).sum().backward()
    retained = kept["y"].grad
    problem.compare_with(program, None, {n: t[n].grad for n in problem.leaf_names})
    if not torch.allclose(retained.double() * 0.5, t[problem.first].grad.double(), rtol=1e-2):
        raise Wrong("retain_grad holds another gradient than the one that travelled on")
