"""The cases: functions of a problem, each with the rule of the contract that it is about."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .adapter import LOSSES, OPS, NotOffered
from .problem import Problem
from .verdict import Verdict, Wrong

__all__ = ["CASES", "Case", "Result", "case", "out_of_question", "run"]


@dataclass(frozen=True)
class Case:
    """`function(problem)` returns where all is right, raises Wrong where it is not; any other exception is an error of
    the implementation, which `may_raise` allows."""

    name: str
    title: str
    rule: int
    function: Callable[[Problem], None]
    op: str
    may_raise: bool = False
    devices: Sequence[str] = ("cpu", "cuda")
    heavy: bool = False  # of memory: few at a time
    problem: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.op}.{self.name}"


CASES: dict[str, Case] = {}


def case(
    rule: int,
    title: str,
    ops: Sequence[str] = LOSSES,
    may_raise: bool = False,
    devices: Sequence[str] = ("cpu", "cuda"),
    heavy: bool = False,
    **problem: Any,
) -> Callable[[Callable[[Problem], None]], Callable[[Problem], None]]:
    """Registers a case for each of the ops; `problem` are sizes."""

    def register(function: Callable[[Problem], None]) -> Callable[[Problem], None]:
        for op in ops:
            made = Case(function.__name__, title, rule, function, op, may_raise, devices, heavy, problem)
            assert made.key not in CASES, made.key
            CASES[made.key] = made
        return function

    return register


EVERY = OPS


@dataclass
class Result:
    """What came of a case: `error` by how much it is wrong, `allowed` that an error is as right as a result."""

    implementation: str
    key: str
    verdict: Verdict
    detail: str = ""
    error: float | None = None
    allowed: bool = False
    seconds: float = 0.0


def out_of_question(adapter: Any, case: Case, device: str) -> str:
    """Why an implementation cannot have a case, as far as its adapter says so; or ''."""
    if device not in case.devices:
        return f"not on {device}"
    if device not in getattr(adapter, "devices", ("cpu", "cuda")):
        return f"the implementation is not for {device}"
    return case.op if getattr(adapter, case.op, None) is None else ""


def run(adapter: Any, case: Case, device: str) -> Result:
    """Runs a case here; only what ends the process is not caught."""
    started = time.monotonic()

    def result(verdict: Verdict, detail: str = "", error: float | None = None) -> Result:
        taken = time.monotonic() - started
        return Result(adapter.name, case.key, verdict, detail[:600], error, case.may_raise, taken)

    reason = out_of_question(adapter, case, device)
    if reason:
        return result(Verdict.NOT_OFFERED, reason)
    torch.manual_seed(0)
    try:
        case.function(Problem(adapter, case.op, device, **case.problem))
        found = result(Verdict.RIGHT)
    except NotOffered as reason:
        return result(Verdict.NOT_OFFERED, str(reason))
    except Wrong as wrong:
        found = result(Verdict.WRONG, str(wrong), wrong.error)
    except Exception as error:
        found = result(Verdict.RAISES, f"{type(error).__name__}: {error}")
    if device == "cuda":
        try:
            torch.zeros(1, device=device).add_(1).item()
        except Exception as error:
            return result(Verdict.CRASHES, f"the CUDA context is lost: {error}")
    return found
