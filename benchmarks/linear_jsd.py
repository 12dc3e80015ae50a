"""Divergence of two linear heads: eager, torch.compile, Liger and fusegrad beside the op's four products.

The floor is the matrix products alone (the student's logits, the teacher's, the gradients of the student's input and
weight), back to back on the op's own data, all rows at once. Memory is above the inputs and counts both gradients.

    python benchmarks/linear_jsd.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import math
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

OP = "linear_jsd"
MIB = 2**20
SIZES = (("N", 8192), ("Hs", 2048), ("Ht", 4096), ("V", 128256))
CPU_SIZES = (("N", 1024), ("Hs", 256), ("Ht", 512), ("V", 32000))
DEFAULT_RATIO, DEFAULT_MIB = 1.10, 2600
LEAN_RATIO, LEAN_MIB = 1.15, 1660
CPU_GOAL = Goal(
    "no slower than eager at <= 1/4 of its memory",
    ("fusegrad",),
    than="eager",
    min_speedup=1,
    max_memory_share=0.25,
)


def problem(case: Case) -> Problem:
    rows, vocabulary = case["N"], case["V"]

    def head(hidden: int) -> tuple[Tensor, Tensor]:
        activation = torch.randn(rows, hidden, dtype=case.torch_dtype, device=case.device)
        weight = torch.randn(vocabulary, hidden, dtype=case.torch_dtype, device=case.device)
        return activation, weight.mul_(hidden**-0.5)

    activation, weight = head(case["Hs"])
    labels = torch.randint(0, vocabulary, (rows,), device=case.device)
    return Problem(activation, labels, torch.rand(rows, device=case.device), weight, constants=head(case["Ht"]))


def floor(problem: Problem) -> Floor:
    hidden, weight = problem.activation.clone(), problem.weight
    assert weight is not None
    teacher_hidden, teacher_weight = problem.constants
    grad_logits = _grad_logits(problem, weight)
    logits, teacher_logits = torch.empty_like(grad_logits), torch.empty_like(grad_logits)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(teacher_hidden, teacher_weight.T, out=teacher_logits)
        torch.mm(grad_logits, weight, out=grad_hidden)
        torch.mm(grad_logits.T, hidden, out=grad_weight)

    return Floor("four products", products)


def _grad_logits(problem: Problem, weight: Tensor) -> Tensor:
    """[N, V]: products run a few percent faster on real gradients than on random numbers."""
    hidden, (teacher_hidden, teacher_weight) = problem.activation, problem.constants
    grad = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, len(hidden), 512):
        part = slice(start, start + 512)
        logits = (hidden[part] @ weight.T).float().requires_grad_()
        teacher_logits = (teacher_hidden[part] @ teacher_weight.T).float()
        loss = Divergence().rows(logits, problem.target[part], teacher_logits).sum() / len(hidden)
        grad[part] = torch.autograd.grad(loss, logits)[0]
    return grad


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    return [
        *peers.torch_linear_jsd(case),
        *peers.liger_linear_jsd(case),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: ours(fusegrad, case)),
    ]


def ours(fusegrad: Any, case: Case) -> list[Implementation]:
    def make(name: str, variant: Divergence, options: dict[str, Any] | None = None, **how: Any) -> Implementation:
        given = dict(options or {}, beta=variant.beta, temperature=variant.temperature)

        def loss(
            hidden: Tensor, weight: Tensor, labels: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
        ) -> Tensor:
            return fusegrad.linear_jsd(hidden, weight, teacher_hidden, teacher_weight, **given)

        how.setdefault("essential", case.device == "cuda")
        return Implementation(name, loss, ours=True, variant=variant, **how)

    default, lean = VARIANTS[0], _lean(case)
    student, teacher = case["Hs"], case["Ht"]
    products = 3 * student + teacher
    return [
        make("fusegrad", default, essential=True),
        make("fusegrad inplace", default, {"inplace": True}, overwrites=True),
        *(make(f"fusegrad{variant.suffix}", variant) for variant in VARIANTS[1:]),
        make("fusegrad lean", default, lean),
        *(make(f"fusegrad lean{variant.suffix}", variant, lean, essential=False) for variant in VARIANTS[1:]),
        make("fusegrad upstream 0.37", default, upstream=0.37),
        make("fusegrad none", default, {"reduction": "none"}, upstream="rows"),
        make("fusegrad frozen", default, frozen_weight=True, floor_scale=(2 * student + teacher) / products),
        make("fusegrad no-grad", default, backward=False, floor_scale=(student + teacher) / products),
    ]


def _lean(case: Case) -> dict[str, Any]:
    """Within the goal's memory; for other sizes that of the gradients and a quarter of the student's logits."""
    element = case.torch_dtype.itemsize
    gradients = math.ceil((case["N"] + case["V"]) * case["Hs"] * element / MIB)
    logits = case["N"] * case["V"] * element / MIB
    workspace = LEAN_MIB - gradients if case.sizes == SIZES else math.ceil(logits / 4)
    return {"accumulate_dtype": case.torch_dtype, "workspace_mib": max(1, workspace)}


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cpu":
        # Eager's bfloat16 products take half a minute on CPUs that have no instructions for them.
        dtypes = ("float32",) if quick else ("float32", "bfloat16")
        return [Plan(Case(OP, CPU_SIZES, dtype, device), (CPU_GOAL, *error_goals(quick))) for dtype in dtypes]
    return [Plan(Case(OP, SIZES, "bfloat16", device), (*_gpu_goals(quick), *error_goals(quick)))]


def _gpu_goals(quick: bool) -> list[Goal]:
    goals = []
    modes = (("", DEFAULT_RATIO, DEFAULT_MIB, VARIANTS), (" lean", LEAN_RATIO, LEAN_MIB, VARIANTS[: 1 if quick else 6]))
    for mode, ratio, mib, variants in modes:
        for one in variants:
            text = f"{mode.strip() or 'default'} {one.label} <= {ratio} x floor at <= {mib} MiB"
            goals.append(Goal(text, (f"fusegrad{mode}{one.suffix}",), max_floor_ratio=ratio, max_mib=mib))
    return goals


BENCHMARK = Benchmark(
    op=OP,
    module="linear_jsd",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("N", "Hs", "Ht", "V"),
    launch_case=lambda device: launch_case(OP, (("N", 4), ("Hs", 32), ("Ht", 64), ("V", 64)), device),
    launch_pairs=(("fusegrad", "eager", "leaf"), ("fusegrad inplace", "eager", "non-leaf")),
    reference=DivergenceReference,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
