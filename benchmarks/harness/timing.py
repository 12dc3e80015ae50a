"""Times in milliseconds, implementations alternating in rounds with the floor between them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from harness.failure import Outcome
from harness.turns import take_turn

# The GPU idles while the host enqueues the timed work: launch overhead, which is measured by itself, stays out of the
# time between the events. It idles twice as long as the host takes, for all implementations of a comparison as the
# slowest host takes: a GPU that has rested runs products at a higher clock, by which those that keep the host busy
# would look faster.
CYCLES_A_SECOND = 2_000_000_000
LEAST_SPACER_S, MOST_SPACER_S = 1e-3, 50e-3
# The floor is timed so often that two of its runs are enough each time.
FLOOR_REPS = 2


class Timed(Protocol):
    def prepare(self) -> None: ...

    def run(self) -> None: ...


@dataclass
class Repeated:
    """One work, again and again, which leaves its inputs as they were."""

    work: Callable[[], object]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.work()


@dataclass
class Floor:
    """A bare computation that nothing which does the same work can beat."""

    name: str
    work: Callable[[], object]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.work()


@dataclass
class Times:
    """Medians of each round, and the mean of the floor's medians before and after each."""

    rounds: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def ms(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def floor_ms(self) -> float | None:
        return statistics.median(self.floors) if self.floors else None

    def ratio(self, floor_scale: float) -> float | None:
        """Median over the rounds of time over floor: the floor of that moment, since a GPU's rate varies."""
        if not self.rounds or not self.floors:
            return None
        pairs = zip(self.rounds, self.floors, strict=True)
        return statistics.median(mine / (floor * floor_scale) for mine, floor in pairs)


def median_ms(timed: Timed, device: str, reps: int, host_s: float | None = None) -> float:
    """Median of `reps` runs after one that is not counted. What they overwrote is restored: others' data too.

    host_s: seconds that the host may take for a run, during which the GPU idles; None: what the first run took.
    """
    timed.prepare()
    first_s = _host_s(timed)
    if device == "cuda":
        median = _cuda_median(timed, reps, first_s if host_s is None else host_s)
    else:
        median = _cpu_median(timed, reps)
    timed.prepare()
    return median


def _host_s(timed: Timed) -> float:
    """Seconds that the host takes to enqueue a prepared run."""
    started = time.perf_counter()
    timed.run()
    return time.perf_counter() - started


def _host_s_alone(timed: Timed) -> float:
    """As _host_s, of a run that nothing is queued before: behind a full queue the host would wait for the GPU."""
    timed.prepare()
    torch.cuda.synchronize()
    host_s = _host_s(timed)
    torch.cuda.synchronize()
    timed.prepare()
    return host_s


def _cuda_median(timed: Timed, reps: int, host_s: float) -> float:
    spacer = int(CYCLES_A_SECOND * min(max(2 * host_s, LEAST_SPACER_S), MOST_SPACER_S))
    events = []
    for _ in range(reps):
        timed.prepare()
        torch.cuda._sleep(spacer)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        timed.run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _cpu_median(timed: Timed, reps: int) -> float:
    times = []
    for _ in range(reps):
        timed.prepare()
        start = time.perf_counter()
        timed.run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def alternate(
    steps: dict[str, Timed], floor: Floor | None, device: str, rounds: int, reps: int
) -> tuple[dict[str, Times], list[float]]:
    """Time every step in every round, each round starting with another; a step that raises is dropped.

    The floor is timed before each round and, on a GPU, whose rate varies with its power, after every step.
    Returns the times by name, and the floor's medians in the order in which they were taken.
    """
    take_turn(torch.cuda.empty_cache)
    times = {name: Times() for name in steps}
    floor_times: list[float] = []
    names = list(steps)
    host_s = 0.0
    if device == "cuda":
        for name, step in steps.items():
            outcome = Outcome(functools.partial(_host_s_alone, step))
            times[name].failure = outcome.failure
            host_s = max(host_s, 0.0 if outcome.failure else outcome.value)

    def take_floor() -> float:
        assert floor is not None
        floor_times.append(median_ms(floor, device, FLOOR_REPS, host_s))
        return floor_times[-1]

    for index in range(rounds):
        shift = index * len(names) // rounds
        before = take_floor() if floor else 0.0
        for name in names[shift:] + names[:shift]:
            if times[name].failure:
                continue
            outcome = Outcome(functools.partial(median_ms, steps[name], device, reps, host_s))
            if outcome.failure:
                times[name].failure = outcome.failure
                continue
            times[name].rounds.append(outcome.value)
            if floor:
                after = take_floor() if device == "cuda" else before
                times[name].floors.append((before + after) / 2)
                before = after
    return times, floor_times


def wall_us(steps: Sequence[tuple[str, Callable[[], object]]], device: str, iterations: int) -> dict[str, float]:
    """Wall-clock microseconds a call of many calls in a row, without synchronising between them.

    With inputs so small that the device waits for the host, this is the host's launch overhead.
    """
    samples: dict[str, list[float]] = {name: [] for name, _ in steps}
    for _ in range(5):
        for name, call in steps:
            for _ in range(iterations // 10):
                call()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(iterations):
                call()
            synchronize(device)
            samples[name].append((time.perf_counter() - start) / iterations * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
