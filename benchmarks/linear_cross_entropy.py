"""Linear cross entropy: eager, torch.compile, Liger, quack, CCE and fusegrad beside the op's three products.

The floor is the three matrix products alone (logits, gradient of the input, gradient of the weight), back to
back on the op's own data, all rows at once. Memory is above the inputs and counts both gradients.

    python benchmarks/linear_cross_entropy.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
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

OP = "linear_cross_entropy"
MIB = 2**20
SMALL_ROWS = {False: (1, 2, 4, 8, 16, 32, 64), True: (1, 8, 64)}


@dataclass(frozen=True)
class Target:
    """At most `ratio` times the floor within `mib`, by mode: 'float32', 'lean' or 'recompute'."""

    mode: str
    ratio: float
    mib: int


TARGETS = {
    (8192, 4096, 128256): (
        Target("float32", 1.03, 3070),
        Target("lean", 1.03, 2068),
        Target("lean", 1.06, 1317),
        Target("recompute", 1.40, 1317),
    ),
    (4096, 4096, 128256): (Target("float32", 1.02, 2068),),
    (8192, 2304, 256000): (
        Target("float32", 1.06, 4400),
        Target("lean", 1.07, 2162),
        Target("lean", 1.15, 1412),
    ),
    (16384, 4096, 32000): (Target("float32", 1.02, 1200), Target("lean", 1.03, 504)),
    (16384, 5120, 151936): (Target("lean", 1.03, 4018), Target("lean", 1.06, 2238)),
}
# Liger's modes by the memory that they take beside the gradients: as much as the chunks of our lean mode.
LIGER_EQUALS = {
    (8192, 4096, 128256): {2068: 16, 1317: 4},
    (8192, 2304, 256000): {2162: 16, 1412: 4},
    (16384, 5120, 151936): {4018: 16, 2238: 4},
}
# The default may never take more memory than what a user has without us.
DEFAULT_GOAL = Goal("default: no more memory than compile", ("fusegrad",), than="compile", max_memory_share=1)
CPU_GOAL = Goal(
    "no slower than eager at <= 1/4 of its memory",
    ("fusegrad",),
    than="eager",
    min_speedup=1,
    max_memory_share=0.25,
)
SMALL_GOAL = Goal("no slower than eager", ("fusegrad",), than="eager", min_speedup=1)


def problem(case: Case) -> Problem:
    rows, hidden, vocabulary = case["N"], case["H"], case["V"]
    activation = torch.randn(rows, hidden, dtype=case.torch_dtype, device=case.device)
    weight = torch.randn(vocabulary, hidden, dtype=case.torch_dtype, device=case.device) * hidden**-0.5
    target = torch.randint(0, vocabulary, (rows,), device=case.device)
    return Problem(activation, target, torch.rand(rows, device=case.device), weight)


def floor(problem: Problem) -> Floor:
    hidden, weight = problem.activation.clone(), problem.weight
    assert weight is not None
    grad_logits = _grad_logits(hidden, weight, problem.target)
    logits = torch.empty_like(grad_logits)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(grad_logits, weight, out=grad_hidden)
        torch.mm(grad_logits.T, hidden, out=grad_weight)

    return Floor("three products", products)


def _grad_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[N, V]: products run a few percent faster on real gradients than on random numbers."""
    grad = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, len(hidden), 512):
        part = slice(start, start + 512)
        probabilities = (hidden[part] @ weight.T).float().softmax(-1)
        probabilities.scatter_add_(1, target[part, None], -torch.ones_like(probabilities[:, :1]))
        grad[part] = probabilities / len(hidden)
    return grad


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    return [
        *peers.torch_linear(case),
        *peers.liger_linear(case),
        *peers.liger_sm90_linear(case),
        *peers.quack_linear(case, options.autotune),
        *peers.cce_linear(case),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: ours(fusegrad, case)),
    ]


def ours(fusegrad: Any, case: Case) -> list[Implementation]:
    def make(name: str, options: dict[str, Any] | None = None, **how: Any) -> Implementation:
        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return fusegrad.linear_cross_entropy(hidden, weight, target, **(options or {}))

        how.setdefault("essential", case.device == "cuda")
        return Implementation(f"fusegrad{name}", loss, ours=True, **how)

    found = [
        make("", essential=True),
        make(" inplace", {"inplace": True}, overwrites=True, essential=True),
        make(" upstream 0.37", upstream=0.37),
        make(" none", {"reduction": "none"}, upstream="rows"),
        make(" no-grad", backward=False, floor_scale=1 / 3),
    ]
    return found + [make(name[len("fusegrad") :], options) for name, options in _bounded(case).items()]


def _bounded(case: Case) -> dict[str, dict[str, Any]]:
    """Options of the case's targets by name; for other sizes, at 1/2 and 1/8 of the logits' memory."""
    sizes = case["N"], case["H"], case["V"]
    element = case.torch_dtype.itemsize
    gradients = math.ceil((case["N"] + case["V"]) * case["H"] * element / MIB)
    logits = case["N"] * case["V"] * element / MIB
    half, eighth = gradients + math.ceil(logits / 2), gradients + math.ceil(logits / 8)
    fallback = (Target("lean", 0, half), Target("lean", 0, eighth), Target("recompute", 0, eighth))
    found = {}
    for target in TARGETS.get(sizes, fallback):
        options: dict[str, Any] = {"workspace_mib": max(1, target.mib - gradients)}
        if target.mode == "lean":
            options["accumulate_dtype"] = case.torch_dtype
        found[_bounded_name(target)] = options
    return found


def _bounded_name(target: Target) -> str:
    mode = "" if target.mode == "float32" else f" {target.mode}"
    return f"fusegrad{mode} <={target.mib} MiB"


def _goals(sizes: tuple[int, int, int], targets: tuple[Target, ...]) -> tuple[Goal, ...]:
    goals = []
    for target in targets:
        name = _bounded_name(target)
        subjects = ("fusegrad", name) if target.mode == "float32" else (name,)
        text = f"{target.mode} <= {target.ratio} x floor at <= {target.mib} MiB"
        goals.append(Goal(text, subjects, max_floor_ratio=target.ratio, max_mib=target.mib))
        constant = LIGER_EQUALS.get(sizes, {}).get(target.mib)
        if target.mode == "lean" and constant is not None:
            peer = f"liger chunk_mem={constant}"
            # A few numbers for each row are 0.1 MiB.
            goals.append(Goal(f"ahead of {peer}", (name,), than=peer, min_speedup=1, max_memory_share=1.001))
    return (*goals, DEFAULT_GOAL)


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cpu":
        sizes = (("N", 2048), ("H", 512), ("V", 32000))
        return [Plan(Case(OP, sizes, dtype, device), (CPU_GOAL,)) for dtype in ("float32", "bfloat16")]
    large = [
        Plan(Case(OP, (("N", n), ("H", h), ("V", v)), "bfloat16", device), _goals((n, h, v), targets))
        for (n, h, v), targets in TARGETS.items()
    ]
    small = [
        Plan(
            Case(OP, (("N", rows), ("H", 4096), ("V", 128256)), "bfloat16", device),
            (SMALL_GOAL,),
            only=r"^(eager|fusegrad)$",
            accuracy=False,
            memory=False,
        )
        for rows in SMALL_ROWS[quick]
    ]
    return large + small


BENCHMARK = Benchmark(
    op=OP,
    module="linear_cross_entropy",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("N", "H", "V"),
    launch_case=lambda device: launch_case(OP, (("N", 4), ("H", 32), ("V", 64)), device),
    launch_pairs=(("fusegrad", "eager", "leaf"), ("fusegrad inplace", "eager", "non-leaf")),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
