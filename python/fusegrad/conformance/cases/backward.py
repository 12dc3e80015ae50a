"""Rules 6 to 10: any number of backwards, any upstream gradient, any set of inputs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..adapter import LOSSES
from ..case import EVERY, case
from ..problem import Loss, Problem, Tensors, plain
from ..verdict import Wrong, check

LINEAR = ("linear_cross_entropy", "linear_jsd")


@case(6, "three backwards of a kept graph, upstream 0.37: the same bits", EVERY)
def kept_graph(problem: Problem) -> None:
    """Each result is kept while the next is computed, which must not write over it."""
    t = problem.leaves()
    names = problem.leaf_names
    value = problem.ours(problem.activations(t))
    upstream = torch.full_like(value, 0.37)
    runs, copies = [], []
    for turn in range(3):
        found = torch.autograd.grad(value, [t[n] for n in names], upstream, retain_graph=turn < 2)
        runs.append(found)
        copies.append([g.clone() for g in found])
    for found, copied in zip(runs, copies, strict=True):
        problem.compare_with(plain, None, dict(zip(names, copied, strict=True)))
        if any(not torch.equal(a, b) for a, b in zip(found, copied, strict=True)):
            raise Wrong("a later backward wrote over an earlier one's result")
    if problem.op == "flex_attention" and problem.device == "cuda":
        return  # sums in any order unless they are asked to be deterministic
    if any(not torch.equal(a, b) for copied in copies[1:] for a, b in zip(copies[0], copied, strict=True)):
        raise Wrong("the bits differ")


@case(6, "two backwards of a kept graph into .grad", EVERY)
def kept_graph_accumulates(problem: Problem) -> None:
    t = problem.leaves()
    value = problem.ours(problem.activations(t)) * 0.185
    value.sum().backward(retain_graph=True)
    value.sum().backward()
    problem.compare_with(plain, None, {n: t[n].grad for n in problem.leaf_names})


@case(6, "microbatches that add up in .grad", EVERY)
def accumulation(problem: Problem) -> None:
    t = problem.leaves()
    for part in (0.1, 0.2, 0.07):
        (part * problem.ours(problem.activations(t))).sum().backward()
    problem.compare_with(plain, None, {n: t[n].grad for n in problem.leaf_names})


@case(6, "the loss times 3", EVERY)
def scaled(problem: Problem) -> None:
    problem.compare(lambda loss, t: 3 * loss(t))


@case(8, "a second derivative is right, or refused", EVERY, may_raise=True)
def double_backward(problem: Problem) -> None:
    def second(loss: Loss, t: Tensors) -> Any:
        value = loss(t)
        (g,) = torch.autograd.grad(value, t[problem.first], create_graph=True)
        return g.square().sum()

    problem.compare(second)


@case(8, "create_graph alone, for the first derivative", EVERY)
def create_graph(problem: Problem) -> None:
    t = problem.leaves()
    value = problem.ours(problem.activations(t)) * 0.37
    found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], create_graph=True)
    problem.compare_with(plain, None, dict(zip(problem.leaf_names, found, strict=True)))


@case(9, "the first input is frozen", (*LINEAR, "flex_attention"))
def frozen_input(problem: Problem) -> None:
    problem.compare(plain, frozen=(problem.first,))


@case(9, "all but the first are frozen", (*LINEAR, "flex_attention"))
def frozen_rest(problem: Problem) -> None:
    problem.compare(plain, frozen=problem.leaf_names[1:])


@case(9, "the weight is a part of a larger one", LINEAR)
def part_of_a_weight(problem: Problem) -> None:
    name = problem.leaf_names[1]

    def program(loss: Loss, t: Tensors) -> Any:
        large = torch.cat([t[name], t[name] * 0.5])
        given = {**t, name: large[: t[name].size(0)]}
        return loss(given) + large.square().mean()

    problem.compare(program)


@case(9, "the gradient of a bias", LINEAR)
def bias(problem: Problem) -> None:
    name = "bias" if problem.op == "linear_cross_entropy" else "student_bias"
    problem.tensors[name] = problem.normal(128)
    problem.leaf_names = (*problem.leaf_names, name)
    problem.compare(plain)


@case(9, "the gradient of a bias alone", LINEAR)
def bias_alone(problem: Problem) -> None:
    name = "bias" if problem.op == "linear_cross_entropy" else "student_bias"
    problem.tensors[name] = problem.normal(128)
    problem.leaf_names = (*problem.leaf_names, name)
    problem.compare(plain, frozen=problem.leaf_names[:2])


@case(9, "a teacher that requires grad gets its gradient, or is refused", ("jsd", "linear_jsd"), may_raise=True)
def teacher(problem: Problem) -> None:
    names = ("teacher",) if problem.op == "jsd" else ("teacher_input", "teacher_weight")
    problem.leaf_names = (*problem.leaf_names, *names)
    problem.compare(plain)


@case(9, "a weight that is tied to the input's", LINEAR)
def tied(problem: Problem) -> None:
    """An embedding whose weight is the head's too."""
    name = problem.leaf_names[1]

    def program(loss: Loss, t: Tensors) -> Any:
        rows = t[problem.first].size(0)
        return loss({**t, problem.first: t[name][:rows] * 0.5 + t[problem.first]})

    problem.compare(program)


@case(10, "reduction 'sum'")
def sum_of_rows(problem: Problem) -> None:
    problem.compare(lambda loss, t: loss(t, reduction="sum"))


@case(10, "reduction 'none', an upstream gradient for each row")
def none(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        rows = loss(t, reduction="none")
        return (rows * torch.linspace(-1, 2, rows.numel(), device=rows.device, dtype=rows.dtype)).sum()

    problem.compare(program)


@case(10, "reduction 'none', an expanded upstream gradient")
def none_expanded(problem: Problem) -> None:
    problem.compare(lambda loss, t: loss(t, reduction="none").sum())


@case(10, "reduction 'none', an upstream gradient with strides")
def none_strided(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        rows = loss(t, reduction="none")
        return Strided.apply(rows)

    problem.compare(program)


class Strided(torch.autograd.Function):
    """A weighted sum whose gradient is every second element of a tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.like = rows.detach()
        return (rows * Strided.weights(rows)).sum()

    @staticmethod
    def weights(rows: Tensor) -> Tensor:
        return torch.linspace(-1, 2, 2 * rows.numel(), device=rows.device, dtype=rows.dtype)[::2].view(rows.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        weights = torch.empty(2 * ctx.like.numel(), device=ctx.like.device, dtype=ctx.like.dtype)[::2]
        return weights.copy_(grad * Strided.weights(ctx.like)).view(ctx.like.shape)


@case(10, "an upstream gradient of 0", EVERY)
def zero_upstream(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        other = t[problem.first].sum()
        return other + 0 * loss(t)

    problem.compare(program)


@case(10, "a loss that nothing uses leaves other gradients alone", EVERY)
def unused(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        y = t[problem.first] * 1
        loss({**t, problem.first: y})
        return t[problem.first].square().sum() * 0.5

    problem.compare(program)


@case(10, "another value of the loss than the gradient's", LOSSES, may_raise=True)
def overwritten_loss(problem: Problem) -> None:
    """The loss is scaled in place, as gradient accumulation does; the gradient must be scaled too."""

    def program(loss: Loss, t: Tensors) -> Any:
        value = loss(t)
        value /= 4
        return value

    problem.compare(program)


@case(6, "a backward in another thread", EVERY)
def other_thread(problem: Problem) -> None:
    t = problem.leaves()
    value = problem.ours(problem.activations(t)).sum() * 0.37
    failures: list[BaseException] = []

    def work() -> None:
        try:
            value.backward()
        except BaseException as error:  # handed to the other thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    problem.compare_with(plain, None, {n: t[n].grad for n in problem.leaf_names})
    check("loss", value, problem.truth(problem.exact()).sum() * 0.37, problem.dtype)
