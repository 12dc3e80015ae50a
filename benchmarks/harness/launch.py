"""The host's cost of one forward and backward, on sizes where the device has nothing to do."""

from __future__ import annotations

import functools
from collections.abc import Callable

from harness.benchmark import Benchmark, Options
from harness.failure import Outcome
from harness.model import Case, Implementation, Problem
from harness.report import print_table
from harness.step import Step
from harness.timing import wall_us

ITERATIONS = {False: 500, True: 200}


def run_launch(benchmark: Benchmark, device: str, options: Options) -> dict[str, object]:
    """Wall-clock microseconds a call, ours beside theirs, and whether ours is no slower."""
    case = benchmark.launch_case(device)
    problem = benchmark.problem(case)
    found = {one.name: one for one in benchmark.implementations(case, options) if isinstance(one, Implementation)}
    print(f"\n{benchmark.op} {case.label}: wall-clock time of a forward and backward call")
    comparisons = []
    for ours, theirs, kind in benchmark.launch_pairs:
        if ours not in found or theirs not in found:
            print(f"  not run: {ours} beside {theirs}: not available")
            continue
        calls = [(name, _call(problem, found[name], kind)) for name in (ours, theirs)]
        outcome = Outcome(functools.partial(wall_us, calls, device, ITERATIONS[options.quick]))
        if outcome.failure:
            print(f"  failed: {ours} beside {theirs}: {outcome.failure}")
            continue
        times = outcome.value
        comparisons.append(
            {
                "ours": ours,
                "theirs": theirs,
                "input": kind,
                "ours_us": times[ours],
                "theirs_us": times[theirs],
                "passed": times[ours] <= times[theirs],
            }
        )
    _print(comparisons)
    return {"case": case.label, "comparisons": comparisons}


def _call(problem: Problem, implementation: Implementation, kind: str) -> Callable[[], object]:
    """A call on a leaf; or on the output of another op, which adds that op's cost to both sides."""
    if kind == "non-leaf":
        return Step(problem, implementation).run
    activation = problem.activation.detach().requires_grad_()
    weight = None if problem.weight is None else problem.weight.detach().requires_grad_()
    others = problem.others(weight)
    step = Step(problem, implementation)

    def call() -> None:
        activation.grad = None
        if weight is not None:
            weight.grad = None
        loss = implementation.loss(activation, *others)
        loss.backward(step.upstream(loss))

    return call


def _print(comparisons: list[dict[str, object]]) -> None:
    rows = []
    for one in comparisons:
        verdict = "pass" if one["passed"] else "MISS"
        ours_us, theirs_us = f"{one['ours_us']:.1f}", f"{one['theirs_us']:.1f}"
        rows.append([str(one["ours"]), ours_us, str(one["theirs"]), theirs_us, str(one["input"]), verdict])
    if rows:
        print_table(("ours", "us", "theirs", "us", "input", "no slower"), rows)


def launch_case(op: str, sizes: tuple[tuple[str, int], ...], device: str) -> Case:
    return Case(op, sizes, "bfloat16" if device == "cuda" else "float32", device)
