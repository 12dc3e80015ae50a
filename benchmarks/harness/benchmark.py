"""What a benchmark script provides, and how one of its cases is run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.failure import Outcome
from harness.goals import Goal
from harness.memory import cpu_peak_mib, cuda_peak_mib
from harness.model import Case, CaseResult, Implementation, Measurement, Problem, Unavailable
from harness.reference import Expected, Reference, check
from harness.step import Step
from harness.timing import Floor, Timed, Times, alternate, median_ms


@dataclass(frozen=True)
class Options:
    """How much is run. `only`: a regular expression on the names of implementations."""

    rounds: int = 3
    reps: int = 5
    only: str = ""
    quick: bool = False
    autotune: bool = False
    accuracy: bool = True
    memory: bool = True


@dataclass(frozen=True)
class Plan:
    """A case, its goals, and which implementations it needs ('' for all)."""

    case: Case
    goals: tuple[Goal, ...] = ()
    only: str = ""
    accuracy: bool = True
    memory: bool = True


@dataclass(frozen=True)
class Benchmark:
    """One op's benchmark. `module` is the script's stem: processes that measure memory import it.

    launch_case: sizes so small that a call's time is the host's.
    launch_pairs: (ours, theirs, 'leaf' or 'non-leaf').
    reference: what the errors are against. extra: what else is measured and printed, for a device. work: what is timed.
    """

    op: str
    module: str
    problem: Callable[[Case], Problem]
    implementations: Callable[[Case, Options], list[Implementation | Unavailable]]
    floor: Callable[[Problem], Floor]
    plans: Callable[[str, bool], list[Plan]]
    letters: tuple[str, ...]
    launch_case: Callable[[str], Case]
    launch_pairs: tuple[tuple[str, str, str], ...] = field(default_factory=tuple)
    reference: Callable[[Problem], Expected] = Reference
    extra: Callable[[str], dict[str, object]] | None = None
    work: str = "forward and backward"

    def run(self, plan: Plan, options: Options) -> CaseResult:
        return run_case(self, plan, options)


def run_case(benchmark: Benchmark, plan: Plan, options: Options) -> CaseResult:
    """Measure one case: errors first, since they say whether a time means anything; then memory and time."""
    case = plan.case
    problem = benchmark.problem(case)
    implementations, unavailable = choose(benchmark.implementations(case, options), plan, options)
    measurements = {one.name: Measurement(one.name, one.ours) for one in implementations}
    if options.accuracy and plan.accuracy:
        _check_all(problem, benchmark.reference(problem), implementations, measurements)
    steps = _warm_steps(problem, implementations, measurements, case.device)
    if options.memory and plan.memory:
        _measure_memory(benchmark, case, options, steps, measurements)
    floor = benchmark.floor(problem)
    floor.run()
    timed: dict[str, Timed] = dict(steps)
    times, floor_times = alternate(timed, floor, case.device, options.rounds, options.reps)
    for one in implementations:
        if one.name in times:
            _record(measurements[one.name], times[one.name], one.floor_scale)
    floor_ms = sorted(floor_times)[len(floor_times) // 2] if floor_times else None
    return CaseResult(case, floor.name, floor_ms, list(measurements.values()), unavailable)


def choose(found: Sequence[Any], plan: Plan, options: Options) -> tuple[list[Any], list[Unavailable]]:
    """The implementations that the plan and the command line ask for, and those of them that cannot be had."""
    patterns = [pattern for pattern in (plan.only, options.only) if pattern]
    wanted = [one for one in found if all(re.search(pattern, one.name) for pattern in patterns)]
    unavailable = [one for one in wanted if isinstance(one, Unavailable)]
    implementations = [one for one in wanted if not isinstance(one, Unavailable)]
    return [one for one in implementations if one.essential or not options.quick], unavailable


def _check_all(
    problem: Problem,
    reference: Expected,
    implementations: list[Implementation],
    measurements: dict[str, Measurement],
) -> None:
    for one in implementations:
        outcome = Outcome(functools.partial(check, problem, reference, one))
        measurements[one.name].failure = outcome.failure
        if not outcome.failure:
            measurements[one.name].errors = outcome.value


def _warm_steps(
    problem: Problem,
    implementations: list[Implementation],
    measurements: dict[str, Measurement],
    device: str,
) -> dict[str, Step]:
    """The steps that run: whatever is compiled or tuned at the first call is done now."""
    steps = {}
    for one in implementations:
        if measurements[one.name].failure:
            continue
        step = Step(problem, one)
        outcome = Outcome(functools.partial(median_ms, step, device, 1))
        measurements[one.name].failure = outcome.failure
        if not outcome.failure:
            steps[one.name] = step
    return steps


def _measure_memory(
    benchmark: Benchmark,
    case: Case,
    options: Options,
    steps: dict[str, Step],
    measurements: dict[str, Measurement],
) -> None:
    for name, step in steps.items():
        step.prepare()
        if case.device == "cuda":
            measure = functools.partial(cuda_peak_mib, step.run)
        else:
            measure = functools.partial(cpu_peak_mib, benchmark.module, case, name, options)
        outcome = Outcome(measure)
        step.prepare()
        if outcome.failure:
            print(f"  no memory of {name}: {outcome.failure}", flush=True)
        else:
            measurements[name].peak_mib = outcome.value


def _record(measurement: Measurement, times: Times, floor_scale: float) -> None:
    measurement.failure = times.failure
    measurement.ms = times.ms
    measurement.round_ms = times.rounds
    measurement.floor_ms = None if times.floor_ms is None else times.floor_ms * floor_scale
    measurement.floor_ratio = times.ratio(floor_scale)


def release(device: str) -> None:
    """Between cases: compiled code specialised on the last case, and cached memory."""
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
