"""Divergence of a student's logits from a teacher's: eager, torch.compile, Liger and fusegrad beside a copy.

The floor is a copy of one of the two, one read and one write. Reading both once and writing the gradient once is 1.5
of it; with a top-k teacher it is 1. The inputs are log-probabilities, which are logits too, so that every
implementation has the same.

    python benchmarks/jsd.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import peers
from harness.benchmark import Benchmark, Options, Plan
from harness.cli import main
from harness.divergence import VARIANTS, Divergence, error_goals
from harness.goals import Goal
from harness.launch import launch_case
from harness.model import Case, Implementation, Problem, Unavailable
from harness.reference import DivergenceReference
from harness.timing import Floor
from torch import Tensor

OP = "jsd"
MIB = 2**20
TOP_K = 64
# A stored pair of log-probability and index, bfloat16 and int64.
PAIR_BYTES = 2 + 8
CPU_SPEEDUP = 3


def problem(case: Case) -> Problem:
    def log_probs() -> Tensor:
        logits = torch.randn(case["N"], case["V"], dtype=case.torch_dtype, device=case.device)
        return logits.log_softmax(-1)

    student, teacher = log_probs(), log_probs()
    labels = torch.randint(0, case["V"], (case["N"],), device=case.device)
    top = teacher.topk(min(TOP_K, case["V"]))
    upstream = torch.rand(case["N"], device=case.device)
    return Problem(student, labels, upstream, constants=(teacher, top.values, top.indices))


def floor(problem: Problem) -> Floor:
    destination = torch.empty_like(problem.activation)
    return Floor("copy of the logits", lambda: destination.copy_(problem.activation))


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    return [
        *peers.torch_jsd(case),
        *peers.liger_jsd(case),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: ours(fusegrad, case)),
    ]


def ours(fusegrad: Any, case: Case) -> list[Implementation]:
    def make(name: str, variant: Divergence, options: dict[str, Any] | None = None, **how: Any) -> Implementation:
        given = dict(options or {}, beta=variant.beta, temperature=variant.temperature, log_probs=variant.log_probs)
        if variant.hard_weight:
            given |= {"hard_weight": variant.hard_weight, "soft_weight": 1 - variant.hard_weight}

        def loss(student: Tensor, labels: Tensor, teacher: Tensor, top: Tensor, indices: Tensor) -> Tensor:
            return fusegrad.jsd(
                student,
                (top, indices) if variant.top_k else teacher,
                labels=labels if variant.hard_weight else None,
                **given,
            )

        how.setdefault("essential", case.device == "cuda")
        how.setdefault("floor_scale", 1.0 if variant.top_k else 1.5)
        return Implementation(name, loss, ours=True, variant=variant, **how)

    default, top_k, inplace = VARIANTS[0], Divergence(top_k=True), {"inplace": True}
    return [
        make("fusegrad", default, essential=True),
        make("fusegrad inplace", default, inplace, overwrites=True, essential=True),
        *(make(f"fusegrad{variant.suffix}", variant) for variant in VARIANTS[1:]),
        make("fusegrad upstream 0.37", default, upstream=0.37),
        make("fusegrad none", default, {"reduction": "none"}, upstream="rows"),
        make("fusegrad no-grad", default, backward=False, floor_scale=1.0),
        make("fusegrad log_probs", Divergence(log_probs=True), essential=True),
        make("fusegrad hard", Divergence(hard_weight=0.5)),
        make("fusegrad topk", top_k, essential=True),
        make("fusegrad topk inplace", top_k, inplace, overwrites=True),
    ]


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cpu":
        speed = Goal(f">= {CPU_SPEEDUP} x eager", ("fusegrad",), than="eager", min_speedup=CPU_SPEEDUP)
        sizes = (("N", 1024), ("V", 32000))
        return [Plan(Case(OP, sizes, dtype, device), (speed, *error_goals(quick))) for dtype in ("float32", "bfloat16")]
    large = Case(OP, (("N", 8192), ("V", 128256)), "bfloat16", device)
    found = [Plan(large, (*_gpu_goals(large), *error_goals(quick)))]
    if not quick:
        found.append(Plan(Case(OP, (("N", 8192), ("V", 32000)), "bfloat16", device)))
    return found


def _gpu_goals(case: Case) -> tuple[Goal, ...]:
    fast = tuple(
        Goal(f"{one.label} <= 1.18 x floor", (f"fusegrad{one.suffix}",), max_floor_ratio=1.18) for one in VARIANTS
    )
    teacher_mib = case["N"] * case["V"] * case.torch_dtype.itemsize / MIB
    stored_mib = case["N"] * TOP_K * PAIR_BYTES / MIB
    return (
        *fast,
        Goal("log_probs no slower than logits", ("fusegrad log_probs",), than="fusegrad", min_speedup=1),
        Goal("top-k no slower than dense", ("fusegrad topk",), than="fusegrad", min_speedup=1),
        Goal(
            "top-k teacher, and what its op takes: <= 1/100 of the dense teacher",
            ("fusegrad topk inplace",),
            max_mib=teacher_mib / 100 - stored_mib,
        ),
    )


BENCHMARK = Benchmark(
    op=OP,
    module="jsd",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("N", "V"),
    launch_case=lambda device: launch_case(OP, (("N", 4), ("V", 64)), device),
    launch_pairs=(("fusegrad", "eager", "leaf"), ("fusegrad inplace", "eager", "non-leaf")),
    reference=DivergenceReference,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
