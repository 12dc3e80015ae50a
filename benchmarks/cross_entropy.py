"""Cross entropy over logits: eager, torch.compile, Liger, quack and fusegrad beside a copy of the logits.

The floor is one read and one write of the logits, which is what a copy of them takes in the same run. Ours in
place has that floor; out of place the logits are read twice and the gradient written once: 1.5 of it.

    python benchmarks/cross_entropy.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import peers
from harness.benchmark import Benchmark, Options, Plan
from harness.cli import main
from harness.goals import Goal
from harness.launch import launch_case
from harness.model import Case, Implementation, Problem, Unavailable
from harness.timing import Floor
from torch import Tensor

OP = "cross_entropy"
SMALL_ROWS = {False: (1, 2, 4, 8, 16, 32, 64), True: (1, 8, 64)}

GPU_GOALS = (
    Goal("in place <= 1.12 x floor at <= 1 MiB", ("fusegrad inplace",), max_floor_ratio=1.12, max_mib=1),
    Goal("out of place <= 1.10 x floor", ("fusegrad",), max_floor_ratio=1.10),
    Goal("out of place: no more memory than compile", ("fusegrad",), than="compile", max_memory_share=1),
)
SMALL_GOALS = (
    Goal("no slower than eager", ("fusegrad",), than="eager", min_speedup=1),
    Goal("in place no slower than eager", ("fusegrad inplace",), than="eager", min_speedup=1),
)
CPU_SPEEDUPS = {"float32": 4, "bfloat16": 3}


def problem(case: Case) -> Problem:
    logits = torch.randn(case["N"], case["V"], dtype=case.torch_dtype, device=case.device)
    target = torch.randint(0, case["V"], (case["N"],), device=case.device)
    return Problem(logits, target, torch.rand(case["N"], device=case.device))


def floor(problem: Problem) -> Floor:
    destination = torch.empty_like(problem.activation)
    return Floor("copy of the logits", lambda: destination.copy_(problem.activation))


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    return [
        *peers.torch_cross_entropy(case),
        *peers.liger_cross_entropy(case),
        *peers.quack_cross_entropy(case),
        *peers.optional("fusegrad", "fusegrad", ours),
    ]


def ours(fusegrad: Any) -> list[Implementation]:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return fusegrad.cross_entropy(logits, target)

    def inplace(logits: Tensor, target: Tensor) -> Tensor:
        return fusegrad.cross_entropy(logits, target, inplace=True)

    def by_row(logits: Tensor, target: Tensor) -> Tensor:
        return fusegrad.cross_entropy(logits, target, reduction="none")

    def by_row_inplace(logits: Tensor, target: Tensor) -> Tensor:
        return fusegrad.cross_entropy(logits, target, reduction="none", inplace=True)

    def make(name: str, call: Any, **options: Any) -> Implementation:
        options.setdefault("floor_scale", 1.0 if options.get("overwrites") else 1.5)
        return Implementation(f"fusegrad{name}", call, ours=True, **options)

    return [
        make("", loss),
        make(" inplace", inplace, overwrites=True),
        make(" upstream 0.37", loss, upstream=0.37),
        make(" inplace upstream 0.37", inplace, overwrites=True, upstream=0.37),
        make(" none", by_row, upstream="rows"),
        make(" none inplace", by_row_inplace, upstream="rows", overwrites=True, essential=False),
        make(" no-grad", loss, backward=False, floor_scale=0.5),
    ]


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cpu":
        return [_cpu_plan(dtype, speedup) for dtype, speedup in CPU_SPEEDUPS.items()]
    small = [
        Plan(
            Case(OP, (("N", rows), ("V", 128256)), "bfloat16", device),
            SMALL_GOALS,
            only=r"^(eager|fusegrad|fusegrad inplace)$",
            accuracy=False,
            memory=False,
        )
        for rows in SMALL_ROWS[quick]
    ]
    large = [Plan(Case(OP, (("N", 8192), ("V", 128256)), "bfloat16", device), GPU_GOALS)]
    if not quick:
        large.append(Plan(Case(OP, (("N", 8192), ("V", 32000)), "bfloat16", device)))
    return large + small


def _cpu_plan(dtype: str, speedup: float) -> Plan:
    goals = (
        Goal(
            f"{dtype} out of place >= {speedup} x eager",
            ("fusegrad",),
            than="eager",
            min_speedup=speedup,
        ),
        Goal(f"{dtype} out of place >= 2 x compile", ("fusegrad",), than="compile", min_speedup=2),
        Goal(f"{dtype} in place >= 6 x eager", ("fusegrad inplace",), than="eager", min_speedup=6),
    )
    return Plan(Case(OP, (("N", 2048), ("V", 32000)), dtype, "cpu"), goals)


BENCHMARK = Benchmark(
    op=OP,
    module="cross_entropy",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("N", "V"),
    launch_case=lambda device: launch_case(OP, (("N", 4), ("V", 64)), device),
    launch_pairs=(("fusegrad", "eager", "leaf"), ("fusegrad inplace", "eager", "non-leaf")),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
