"""Rule 7, and streams: what a GPU program needs."""

from __future__ import annotations

from typing import Any

import torch

from ..case import EVERY, case
from ..problem import Loss, Problem, Tensors, plain
from ..verdict import check

CUDA = ("cuda",)


def _step(problem: Problem, t: Tensors) -> list[Any]:
    value = problem.ours(problem.activations(t))
    return list(torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37)))


@case(7, "nothing synchronises with the GPU", EVERY, devices=CUDA)
def no_synchronisation(problem: Problem) -> None:
    """Runs after a first call, which may compile. A synchronisation raises in this mode."""
    t = problem.leaves()
    _step(problem, t)
    _step(problem, t)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = _step(problem, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    problem.compare_with(plain, None, dict(zip(problem.leaf_names, found, strict=True)))


@case(7, "forward and backward captured in a CUDA graph, replayed with other values", EVERY, devices=CUDA)
def cuda_graph(problem: Problem) -> None:
    t = problem.leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            _step(problem, t)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(problem, t)
    with torch.no_grad():
        for name in problem.leaf_names:
            problem.tensors[name] = (problem.tensors[name] * -0.5).to(problem.dtype).double()
            t[name].copy_(problem.tensors[name])
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    problem.compare_with(plain, None, dict(zip(problem.leaf_names, found, strict=True)))


@case(7, "two streams", EVERY, devices=CUDA)
def two_streams(problem: Problem) -> None:
    """Inputs that another stream makes late, and a backward after a forward on a stream of its own."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    results = []
    for stream in (first, second):
        with torch.cuda.stream(stream):
            t = problem.leaves()
            torch.cuda._sleep(2_000_000)
            results.append((t, _step(problem, t)))
    torch.cuda.synchronize()
    for _, found in results:
        problem.compare_with(plain, None, dict(zip(problem.leaf_names, found, strict=True)))


@case(7, "a tensor that is freed while its stream still works", EVERY, devices=CUDA)
def freed_early(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        value = loss(t)
        if value.is_cuda:
            torch.empty_like(t[problem.first]).fill_(7)
        return value

    t = problem.leaves()
    value, found = problem.gradients(program, problem.ours, t)
    problem.compare_with(plain, None, found)
    check("loss", value, problem.truth(problem.exact()), problem.dtype)
