"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.goals import Verdict
from harness.model import CaseResult, Measurement

HEADINGS = ("implementation", "ms", "x floor", "tokens/s", "peak MiB", "error loss", "error activation", "error weight")


def print_case(result: CaseResult) -> None:
    floor = "" if result.floor_ms is None else f"; floor ({result.floor_name}) {result.floor_ms:.3f} ms"
    print(f"\n{result.case.op} {result.case.label} on {result.case.device}{floor}")
    rows = [_cells(one) for one in sorted(result.measurements, key=_order) if not one.failure]
    used = [i for i in range(len(HEADINGS)) if i == 0 or any(row[i] for row in rows)]
    print_table([HEADINGS[i] for i in used], [[row[i] for i in used] for row in rows])
    for failed in result.measurements:
        if failed.failure:
            print(f"  failed: {failed.name}: {failed.failure}")
    for one in result.unavailable:
        print(f"  not run: {one.name}: {one.reason}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    for row in (headings, *rows):
        first = row[0].ljust(widths[0])
        print("  " + "  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip())


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        print("  " + verdict.line(), flush=True)


def as_json(result: CaseResult, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "op": result.case.op,
        "sizes": dict(result.case.sizes),
        "dtype": result.case.dtype,
        "floor": {"name": result.floor_name, "ms": result.floor_ms},
        "results": [one.as_dict() for one in result.measurements],
        "not_run": {one.name: one.reason for one in result.unavailable},
        "goals": [one.as_dict() for one in verdicts],
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(document), indent=1) + "\n")


def _order(measurement: Measurement) -> tuple[bool, float]:
    return measurement.ours, measurement.ms or float("inf")


def _cells(one: Measurement) -> list[str]:
    errors = [_text(one.errors.get(name), ".2e") for name in ("loss", "activation", "weight")]
    return [
        one.name,
        _text(one.ms, ".3f"),
        _text(one.floor_ratio, ".3f"),
        _text(one.tokens_per_s, ",.0f"),
        _text(one.peak_mib, ".1f"),
        *errors,
    ]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
