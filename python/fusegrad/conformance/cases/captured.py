"""Gradients of what a score_mod reads: every class of index, every way to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..case import case
from ..problem import Problem, Tensors, attempt, plain
from ..verdict import Wrong

FLEX = ("flex_attention",)
Mod = Callable[[Tensors], Callable[..., Any]]


def compare(problem: Problem, make: Mod, **captured: Tensor) -> None:
    """With captured tensors, those of floats as leaves."""
    problem.tensors.update(captured)
    problem.leaf_names = (*problem.leaf_names, *(n for n, t in captured.items() if t.is_floating_point()))
    problem.score_mod = make
    problem.compare(plain)


def length(problem: Problem) -> int:
    return problem.tensors["query"].size(2)


@case(9, "A: scale[h], which neither query nor key index", FLEX)
def class_a(problem: Problem) -> None:
    compare(problem, lambda t: lambda s, b, h, q, kv: s * t["scale"][h], scale=problem.normal(2))


@case(9, "B: bias[kv]", FLEX)
def class_b(problem: Problem) -> None:
    compare(problem, lambda t: lambda s, b, h, q, kv: s + t["bias"][kv], bias=problem.normal(length(problem)))


@case(9, "C: scale[q]", FLEX)
def class_c(problem: Problem) -> None:
    compare(problem, lambda t: lambda s, b, h, q, kv: s * t["scale"][q], scale=problem.normal(length(problem)))


@case(9, "D: relative[h, q - kv]", FLEX)
def class_d(problem: Problem) -> None:
    n = length(problem)
    compare(problem, lambda t: lambda s, b, h, q, kv: s + t["rel"][h, q - kv + n], rel=problem.normal(2, 2 * n))


@case(9, "E: bias[b, h, q, kv]", FLEX)
def class_e(problem: Problem) -> None:
    n = length(problem)
    compare(problem, lambda t: lambda s, b, h, q, kv: s + t["bias"][b, h, q, kv], bias=problem.normal(2, 2, n, n))


@case(9, "F: a small table, by any index", FLEX)
def class_f(problem: Problem) -> None:
    n = length(problem)
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + t["table"][t["kind"][q, kv]],
        table=problem.normal(9),
        kind=problem.integers(9, n, n),
    )


@case(9, "G: a large table, by any index", FLEX)
def class_g(problem: Problem) -> None:
    n = length(problem)
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + t["table"][t["place"][q, kv]],
        table=problem.normal(9000),
        place=problem.integers(9000, n, n),
    )


@case(9, "one tensor read twice", FLEX)
def read_twice(problem: Problem) -> None:
    compare(
        problem, lambda t: lambda s, b, h, q, kv: s + t["bias"][q] * t["bias"][kv], bias=problem.normal(length(problem))
    )


@case(9, "two tensors", FLEX)
def two_tensors(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s * t["scale"][h] + t["bias"][kv],
        scale=problem.normal(2),
        bias=problem.normal(length(problem)),
    )


@case(9, "a scalar, of rank 0", FLEX)
def scalar(problem: Problem) -> None:
    compare(problem, lambda t: lambda s, b, h, q, kv: s * t["factor"], factor=problem.normal())


@case(9, "a learned softcap", FLEX)
def learned_softcap(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: t["cap"] * torch.tanh(s / t["cap"]),
        cap=torch.tensor(2.0, dtype=torch.float64),
    )


@case(9, "bias[offset[q]], multiplied", FLEX)
def gather(problem: Problem) -> None:
    n = length(problem)
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + t["bias"][t["offset"][q]] * kv / n,
        bias=problem.normal(n),
        offset=problem.integers(n, n),
    )


@case(9, "a gather of a gather", FLEX)
def gather_of_gather(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s + t["bias"][t["second"][t["first"][b, kv]]],
        bias=problem.normal(7),
        first=problem.integers(5, 2, length(problem)),
        second=problem.integers(7, 5),
    )


@case(9, "a captured tensor that is not a leaf", FLEX)
def not_a_leaf(problem: Problem) -> None:
    def make(t: Tensors) -> Callable[..., Any]:
        made = (t["bias"] * 0.5).exp()
        return lambda s, b, h, q, kv: s + made[kv]

    compare(problem, make, bias=problem.normal(length(problem)))


@case(9, "an expanded captured tensor", FLEX)
def expanded_capture(problem: Problem) -> None:
    def make(t: Tensors) -> Callable[..., Any]:
        made = t["bias"].expand(2, -1)
        return lambda s, b, h, q, kv: s + made[h, kv]

    compare(problem, make, bias=problem.normal(length(problem)))


@case(9, "a transposed captured tensor", FLEX)
def transposed_capture(problem: Problem) -> None:
    def make(t: Tensors) -> Callable[..., Any]:
        made = t["bias"].t()
        return lambda s, b, h, q, kv: s + made[h, kv]

    compare(problem, make, bias=problem.normal(length(problem), 2))


@case(9, "a captured tensor transformed within the score_mod", FLEX)
def made_within(problem: Problem) -> None:
    compare(
        problem, lambda t: lambda s, b, h, q, kv: s + (t["bias"].exp() * 2)[kv], bias=problem.normal(length(problem))
    )


@case(9, "a score_mod that does not use the score", FLEX)
def without_score(problem: Problem) -> None:
    """Query and key get gradients of zero, or none."""
    problem.tensors["bias"] = problem.normal(length(problem))
    problem.leaf_names = ("value", "bias")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: t["bias"][kv] * 2 + 0 * s
    problem.compare(plain)


@case(9, "a captured tensor that both functions read", FLEX)
def read_by_the_mask(problem: Problem) -> None:
    problem.mask_mod = lambda t: lambda b, h, q, kv: (t["bias"].detach()[kv] > -0.5) | (q == kv)
    compare(problem, lambda t: lambda s, b, h, q, kv: s + t["bias"][kv], bias=problem.normal(length(problem)))


@case(9, "detach within a score_mod", FLEX)
def detached(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s * t["bias"][kv].detach() + t["bias"][kv],
        bias=problem.normal(length(problem)),
    )


@case(9, "query, key and value frozen: the captured gradient alone", FLEX)
def captured_alone(problem: Problem) -> None:
    problem.tensors["bias"] = problem.normal(length(problem))
    problem.leaf_names = (*problem.leaf_names, "bias")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s + t["bias"][kv]
    problem.compare(plain, frozen=("query", "key", "value"))


@case(9, "grouped queries with scale[h]", FLEX)
def grouped_capture(problem: Problem) -> None:
    n, size = problem.tensors["query"].shape[2:]
    problem.tensors["query"], problem.tensors["upstream"] = problem.normal(2, 4, n, size), problem.normal(2, 4, n, size)
    problem.options["enable_gqa"] = True
    compare(problem, lambda t: lambda s, b, h, q, kv: s * t["scale"][h], scale=problem.normal(4))


@case(12, "a captured gradient of bfloat16: at most 1.5 times eager's error", FLEX, dtype=torch.bfloat16)
def captured_bfloat16(problem: Problem) -> None:
    """It is the sum of B H M contributions an element: in bfloat16 they would not add up."""
    from .numbers import compare_with_eager

    problem.tensors["bias"] = problem.normal(length(problem))
    problem.leaf_names = (*problem.leaf_names, "bias")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s + t["bias"][kv]
    compare_with_eager(problem)


@case(6, "a kept graph with a captured gradient", FLEX)
def captured_kept_graph(problem: Problem) -> None:
    problem.tensors["scale"] = problem.normal(length(problem))
    problem.leaf_names = (*problem.leaf_names, "scale")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s * t["scale"][q]
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    for turn in range(3):
        found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37), turn < 2)
        problem.compare_with(plain, None, dict(zip(problem.leaf_names, found, strict=True)))


@case(14, "deterministic mode: captured gradients of the same bits, or refused", FLEX, may_raise=True)
def captured_deterministic(problem: Problem) -> None:
    n = length(problem)
    problem.tensors |= {"table": problem.normal(5), "kind": problem.integers(5, n, n)}
    problem.leaf_names = (*problem.leaf_names, "table")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s * t["table"][t["kind"][q, kv]]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [problem.gradients(plain, problem.ours, problem.leaves())[1] for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(before)
    if any(not torch.equal(run[n], runs[0][n]) for run in runs for n in runs[0]):
        raise Wrong("the bits differ between two runs")


@case(15, "an index out of range: an error, or NaN on the GPU", FLEX)
def index_out_of_range(problem: Problem) -> None:
    n = length(problem)
    problem.tensors["bias"] = problem.normal(n - 4)
    problem.leaf_names = (*problem.leaf_names, "bias")
    problem.score_mod = lambda t: lambda s, b, h, q, kv: s + t["bias"][kv]
    t = problem.leaves()
    raised, value = attempt(lambda: problem.ours(problem.activations(t)).detach().cpu())
    if not raised and not value.isnan():
        raise Wrong("the read beyond the end gave a number")


@case(9, "the distance of captured points, which is 0 of a point to itself", FLEX)
def zero_distance(problem: Problem) -> None:
    n = length(problem)
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s - (t["point"][q] - t["point"][kv]).norm(dim=-1),
        point=problem.normal(n, 2),
    )


@case(9, "an embedding with a padding_idx, whose row has no gradient", FLEX)
def padding_row(problem: Problem) -> None:
    compare(
        problem,
        lambda t: lambda s, b, h, q, kv: s * F.embedding((q + kv) % 5, t["table"], padding_idx=2)[..., 0],
        table=problem.normal(5, 1),
    )


@case(9, "a mask of times in float64: exact, or refused", FLEX, may_raise=True)
def float64_times(problem: Problem) -> None:
    times = 1.7e9 + 7.3 * torch.arange(length(problem), dtype=torch.float64)

    def mask_mod(t: Tensors) -> Callable[..., Tensor]:
        there = times.to(t["query"].device)
        return lambda b, h, q, kv: there[q] >= there[kv]

    problem.mask_mod = mask_mod
    problem.compare(plain)


@case(9, "a mask of tenths: float32 decides, as in PyTorch", FLEX)
def tenths(problem: Problem) -> None:
    problem.mask_mod = lambda t: lambda b, h, q, kv: (q - kv).abs() * 0.1 <= 0.3
    problem.compare(plain)
