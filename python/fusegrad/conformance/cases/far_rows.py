"""Rule 12: rows whose scores all lie far from 0, as padding makes them. A log-sum-exp in one number has lost the
logarithm of the sum there, and a gradient made of exp(score - lse) is too large by the number of keys."""

from __future__ import annotations

import torch

from ..case import case
from ..problem import Problem
from .numbers import compare_with_eager

FLEX = ("flex_attention",)


@case(12, "rows whose scores are all -2^30, by their queries: at most 1.5 times eager's error", FLEX)
def far_queries(problem: Problem) -> None:
    """Askable of every attention. Where all is float64, -2^90."""
    size = problem.tensors["query"].size(3)
    far = -(2.0**90) if problem.dtype == torch.float64 else -(2.0**30)
    problem.tensors["query"][:, :, ::2] = 0
    problem.tensors["query"][:, :, ::2, 0] = far * size**0.5
    problem.tensors["key"][..., 0] = 1
    # Their keys' gradients are as large as the queries.
    compare_with_eager(problem, frozen=("key",))


def _set_to(problem: Problem, far: float) -> None:
    problem.score_mod = lambda t: lambda s, b, h, q_idx, kv_idx: torch.where(q_idx % 2 == 0, far, s)
    compare_with_eager(problem)


@case(12, "rows whose scores a score_mod sets to -1e4", FLEX, dtype=torch.float32)
def rows_at_1e4(problem: Problem) -> None:
    _set_to(problem, -1e4)


@case(12, "rows whose scores a score_mod sets to -1e5", FLEX, dtype=torch.float32)
def rows_at_1e5(problem: Problem) -> None:
    _set_to(problem, -1e5)


@case(12, "rows whose scores a score_mod sets to -1e9", FLEX, dtype=torch.float32)
def rows_at_1e9(problem: Problem) -> None:
    _set_to(problem, -1e9)


@case(12, "rows of padding, to whose scores a float mask adds -1e9", FLEX, dtype=torch.float32)
def padded_rows(problem: Problem) -> None:
    n = problem.tensors["query"].size(2)
    problem.tensors["pad"] = torch.where(torch.arange(n) < n // 3, -1e9, 0.0).double()
    problem.score_mod = lambda t: lambda s, b, h, q_idx, kv_idx: s + t["pad"][q_idx]
    compare_with_eager(problem)
