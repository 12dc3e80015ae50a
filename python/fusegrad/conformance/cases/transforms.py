"""How PyTorch repeats, traces and hooks into a graph: rules 3, 5 and 8."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ..case import EVERY, case
from ..problem import Loss, Problem, Tensors, plain
from ..verdict import TOLERANCE, Wrong, distance


def doubled(problem: Problem, loss: Loss, t: Tensors) -> Any:
    return loss(problem.activations(t))


@case(3, "saved-tensor hooks (save_on_cpu)", EVERY)
def saved_on_cpu(problem: Problem) -> None:
    t = problem.leaves()
    with save_on_cpu():
        value = doubled(problem, problem.ours, t) * 0.37
    value.sum().backward()
    problem.compare_with(plain, None, {n: t[n].grad for n in problem.leaf_names})


@case(3, "softmax before it, under saved-tensor hooks", EVERY, may_raise=True)
def saved_on_cpu_softmax(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        with save_on_cpu():
            return loss({**t, problem.first: t[problem.first].softmax(-1)})

    problem.compare(program)


def _checkpointed(problem: Problem, reentrant: bool) -> None:
    """By `.backward()`, since autograd.grad does not go with reentrant checkpoints."""
    t = problem.leaves()
    names = list(t)

    def block(*tensors: Any) -> Any:
        given = dict(zip(names, tensors, strict=True))
        given = problem.activations(given)
        return problem.ours({**given, problem.first: given[problem.first].tanh()})

    value = checkpoint(block, *t.values(), use_reentrant=reentrant)
    value.backward(torch.full_like(value, 0.37))

    def program(loss: Loss, given: Tensors) -> Any:
        return loss({**given, problem.first: given[problem.first].tanh()})

    problem.compare_with(program, value, {n: t[n].grad for n in problem.leaf_names})


@case(3, "checkpoint, non-reentrant, tanh within", EVERY, may_raise=True)
def checkpoint_non_reentrant(problem: Problem) -> None:
    _checkpointed(problem, reentrant=False)


@case(3, "checkpoint, reentrant, tanh within", EVERY, may_raise=True)
def checkpoint_reentrant(problem: Problem) -> None:
    _checkpointed(problem, reentrant=True)


@case(3, "autocast to bfloat16, float32 tensors", EVERY, dtype=torch.float32)
def autocast(problem: Problem) -> None:
    """The gradients are float32 tensors, and right to the rounding of bfloat16."""
    t = problem.leaves()
    with torch.autocast(problem.device, torch.bfloat16):
        value = doubled(problem, problem.ours, t) * 0.37
    value.sum().backward()
    _, expected = problem.gradients(plain, problem.truth, problem.exact())
    for name, truth in expected.items():
        found = t[name].grad
        if found is None or found.dtype != torch.float32:
            raise Wrong(f"gradient of {name}: {None if found is None else found.dtype} instead of float32")
        error = distance(found, truth)
        if not error <= TOLERANCE[torch.bfloat16]:
            raise Wrong(f"gradient of {name}", error)


@case(6, "anomaly mode", EVERY)
def anomaly(problem: Problem) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        problem.compare(lambda loss, t: doubled(problem, loss, t))


def _compiled(problem: Problem, backend: str, function: Any) -> None:
    torch._dynamo.reset()
    problem.ours(problem.activations(problem.leaves()))  # what is not offered says so outside of the compiler
    names = list(problem.tensors)

    def program(*tensors: Any) -> Any:
        given = dict(zip(names, tensors, strict=True))
        given = problem.activations(given)
        return problem.ours({**given, problem.first: function(given[problem.first])})

    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=False)
    t = problem.leaves()
    value = compiled(*t.values())
    found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37))

    def same(loss: Loss, given: Tensors) -> Any:
        return loss({**given, problem.first: function(given[problem.first])})

    problem.compare_with(same, value, dict(zip(problem.leaf_names, found, strict=True)))


@case(5, "torch.compile, aot_eager, fullgraph", EVERY)
def compiled_aot(problem: Problem) -> None:
    _compiled(problem, "aot_eager", lambda x: x * 1)


@case(5, "torch.compile, aot_eager, softmax before it", EVERY, may_raise=True)
def compiled_softmax(problem: Problem) -> None:
    _compiled(problem, "aot_eager", lambda x: x.softmax(-1))


@case(5, "torch.compile, inductor, fullgraph", EVERY, devices=("cuda",))
def compiled_inductor(problem: Problem) -> None:
    _compiled(problem, "inductor", lambda x: x * 1)


@case(8, "torch.func.grad is right, or refused", EVERY, may_raise=True)
def func_grad(problem: Problem) -> None:
    t = problem.leaves(frozen=problem.leaf_names)
    found = torch.func.grad(lambda x: problem.ours({**t, problem.first: x * 1}) * 0.37)(t[problem.first])
    problem.compare_with(plain, None, {problem.first: found}, frozen=problem.leaf_names[1:])


@case(8, "vmap is right, or refused", EVERY, may_raise=True)
def vmapped(problem: Problem) -> None:
    t = problem.leaves(frozen=problem.leaf_names)
    x = t[problem.first]
    found = torch.func.vmap(lambda x: problem.ours({**t, problem.first: x}))(torch.stack([x, x * 0.5]))
    exact = problem.exact(frozen=problem.leaf_names)
    y = exact[problem.first]
    truth = torch.stack([problem.truth({**exact, problem.first: z}) for z in (y, y * 0.5)])
    error = distance(found, truth)
    if found.shape != truth.shape or not error <= TOLERANCE[problem.dtype]:
        raise Wrong("values under vmap", error)


@case(8, "forward-mode differentiation is right, or refused", EVERY, may_raise=True)
def jvp(problem: Problem) -> None:
    t = problem.leaves(frozen=problem.leaf_names)
    exact = problem.exact(frozen=problem.leaf_names)
    tangent = torch.cos(exact[problem.first] * 3)

    def directional(loss: Loss, given: Tensors) -> Any:
        direction = tangent.to(given[problem.first])
        # `* 1`: what is overwritten is no input of the transform.
        return torch.func.jvp(lambda x: loss({**given, problem.first: x * 1}), (given[problem.first],), (direction,))[1]

    error = distance(directional(problem.ours, t), directional(problem.truth, exact))
    if not error <= TOLERANCE[problem.dtype]:
        raise Wrong("the directional derivative", error)


@case(14, "deterministic mode: the same bits twice", EVERY, dtype=torch.bfloat16, rows=96)
def deterministic(problem: Problem) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            value, found = problem.gradients(lambda loss, t: doubled(problem, loss, t), problem.ours, problem.leaves())
            runs.append([value.detach(), *found.values()])
    finally:
        torch.use_deterministic_algorithms(before)
    if any(not torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True)):
        raise Wrong("the bits differ between two runs")
