"""A benchmark whose rows have goals: its arguments, the loop over the rows, the JSON, and which goals were missed."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from harness.environment import environment, in_file_names
from harness.failure import Outcome
from harness.report import write_json

DEVICES = ("cuda", "cpu")
Result = dict[str, Any]


class Labelled(Protocol):
    @property
    def label(self) -> str: ...


R = TypeVar("R", bound=Labelled)


def argument_parser(description: str, reps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=DEVICES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="", help="regular expression on the rows' labels")
    parser.add_argument("--peers", help="comma-separated, or none; all of the device where not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, default=reps)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    return parser


def peers_asked_for(parser: argparse.ArgumentParser, asked: str | None, known: Collection[str]) -> list[str]:
    """Of --peers."""
    peers = [name for name in (known if asked is None else asked.split(",")) if name not in ("", "none")]
    if unknown := set(peers) - set(known):
        parser.error(f"--peers: must be of {', '.join(known)}, but got {', '.join(sorted(unknown))}")
    return peers


def run_rows(
    op: str,
    arguments: argparse.Namespace,
    rows: Sequence[R],
    measured: Callable[[R], Result],
    goals: Callable[[R, Result], list[tuple[str, bool]]],
    show: Callable[[R, Result], None],
) -> None:
    """Measures, judges and prints the rows that were asked for. `measured` gives a row's result, with "row", "rounds"
    and "failures" in it, `goals` what it reached and missed, `show` prints it. A row that raises is a result like any
    other. The JSON is written after each row."""
    device = arguments.device
    torch.set_default_device(device)
    started = time.monotonic()
    cases: list[Result] = []
    document: Result = {"op": op, **environment(device, arguments.commit), "cases": cases}
    print(f"{op.replace('_', ' ')} on {document['device']}, torch {torch.__version__}")
    for row in rows:
        if not re.search(arguments.rows, row.label):
            continue
        outcome = Outcome(lambda row=row: measured(row))
        if outcome.failure:
            print(f"\n{row.label}\n  failed: {outcome.failure}", flush=True)
            cases.append({"row": row.label, "failure": outcome.failure})
        else:
            result = outcome.value
            result["goals"] = [{"goal": text, "passed": passed} for text, passed in goals(row, result)]
            show(row, result)
            _show_verdicts(result)
            cases.append(result)
        if device == "cuda":
            torch.cuda.empty_cache()
        if arguments.output is not None:
            write_json(arguments.output / f"{op}-{in_file_names(document['device'])}.json", document)
    judged = [(case["row"], goal) for case in cases for goal in case.get("goals", [])]
    missed = [(label, goal["goal"]) for label, goal in judged if not goal["passed"]]
    print(f"\n{len(judged)} goals, {len(missed)} missed; {time.monotonic() - started:.0f} s in all")
    for label, text in missed:
        print(f"  MISS  {label}: {text}")


def _show_verdicts(result: Result) -> None:
    for name, failure in result["failures"].items():
        print(f"  not run: {name}: {failure}")
    for goal in result["goals"]:
        print(f"  {'pass' if goal['passed'] else 'MISS'}  {goal['goal']}", flush=True)


def over(result: Result, mine: str, theirs: str) -> float:
    """How many times as long mine takes, in the median round."""
    rounds = result["rounds"]
    return statistics.median(a / b for a, b in zip(rounds[mine], rounds[theirs], strict=True))
