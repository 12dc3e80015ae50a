"""What the measurements must reach, and whether they do."""

from __future__ import annotations

from dataclasses import dataclass

from harness.model import CaseResult, Measurement

# Memory limits are peers' figures rounded to MiB.
MEMORY_TOLERANCE = 1.001
# Errors below this are a float32 sum's luck, not a matter of who is more exact.
ERROR_NOISE = 1e-6


@dataclass(frozen=True)
class Goal:
    """Conditions that one of `subjects` has to meet, all at once.

    max_floor_ratio: time over the floor. max_mib: peak memory. than: another implementation, which the
    subject beats in time by min_speedup, and whose memory times max_memory_share and errors times
    max_error_share it does not exceed.
    """

    text: str
    subjects: tuple[str, ...]
    max_floor_ratio: float | None = None
    max_mib: float | None = None
    than: str = ""
    min_speedup: float | None = None
    max_memory_share: float | None = None
    max_error_share: float | None = None


@dataclass(frozen=True)
class Condition:
    """Met where value <= limit; a speedup's value is the inverse, so that this holds for all."""

    text: str
    value: float
    limit: float

    @property
    def excess(self) -> float:
        return self.value / self.limit - 1 if self.limit else self.value


@dataclass(frozen=True)
class Verdict:
    """passed is None where something that the goal needs was not measured."""

    goal: Goal
    case: str
    subject: str
    passed: bool | None
    conditions: tuple[Condition, ...] = ()
    reason: str = ""

    def line(self) -> str:
        word = {True: "pass", False: "MISS", None: "none"}[self.passed]
        details = "; ".join(
            f"{one.text} ({'margin' if one.excess <= 0 else 'over by'} {abs(one.excess):.1%})"
            for one in self.conditions
        )
        return f"{word}  {self.case}: {self.goal.text}  [{self.subject}]  {details or self.reason}"

    def as_dict(self) -> dict[str, object]:
        return {
            "goal": self.goal.text,
            "subject": self.subject,
            "passed": self.passed,
            "conditions": [one.text for one in self.conditions],
            "worst_excess": max((one.excess for one in self.conditions), default=None),
            **({"reason": self.reason} if self.reason else {}),
        }


def judge(goal: Goal, result: CaseResult) -> Verdict:
    """The verdict on the subject that meets the goal best."""
    verdicts = [_judge_one(goal, name, result) for name in goal.subjects]
    judged = [one for one in verdicts if one.passed is not None]
    if not judged:
        return verdicts[0]
    return min(judged, key=lambda one: max(condition.excess for condition in one.conditions))


def _judge_one(goal: Goal, name: str, result: CaseResult) -> Verdict:
    try:
        mine = _measured(result, name)
        other = _measured(result, goal.than) if goal.than else None
        conditions = tuple(_conditions(goal, mine, other))
    except LookupError as error:
        return Verdict(goal, result.case.label, name, None, reason=str(error.args[0]))
    return Verdict(goal, result.case.label, name, all(one.value <= one.limit for one in conditions), conditions)


def _conditions(goal: Goal, mine: Measurement, other: Measurement | None) -> list[Condition]:
    conditions = []
    if goal.max_floor_ratio is not None:
        ratio = _known(mine.floor_ratio, f"floor ratio of {mine.name}")
        text = f"{ratio:.3f} x floor, limit {goal.max_floor_ratio}"
        conditions.append(Condition(text, ratio, goal.max_floor_ratio))
    if goal.max_mib is not None:
        mib = _known(mine.peak_mib, f"memory of {mine.name}")
        text = f"{mib:.1f} MiB, limit {goal.max_mib:g}"
        conditions.append(Condition(text, mib, goal.max_mib * MEMORY_TOLERANCE))
    if other is not None and goal.min_speedup is not None:
        speedup = _known(other.ms, f"time of {other.name}") / _known(mine.ms, f"time of {mine.name}")
        text = f"{speedup:.2f} x as fast as {other.name}, at least {goal.min_speedup:g}"
        conditions.append(Condition(text, 1 / speedup, 1 / goal.min_speedup))
    if other is not None and goal.max_memory_share is not None:
        theirs = _known(other.peak_mib, f"memory of {other.name}")
        share = _known(mine.peak_mib, f"memory of {mine.name}") / theirs
        text = f"{share:.3f} of the memory of {other.name}, limit {goal.max_memory_share:g}"
        conditions.append(Condition(text, share, goal.max_memory_share * MEMORY_TOLERANCE))
    if other is not None and goal.max_error_share is not None:
        if not other.errors:
            raise LookupError(f"no errors of {other.name}")
        for name in other.errors:
            error = _known(mine.errors.get(name), f"error of {mine.name}'s {name}")
            limit = max(goal.max_error_share * other.errors[name], ERROR_NOISE)
            conditions.append(Condition(f"{name}'s error {error:.2e}, limit {limit:.2e}", error, limit))
    return conditions


def _measured(result: CaseResult, name: str) -> Measurement:
    found = result.get(name)
    if found is None:
        raise LookupError(f"{name} was not run")
    if found.failure:
        raise LookupError(f"{name} failed: {found.failure}")
    return found


def _known(value: float | None, what: str) -> float:
    if value is None:
        raise LookupError(f"no {what}")
    return value
