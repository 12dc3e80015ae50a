"""The results as lines, as JSON and as a table for documents."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from .adapter import described, find
from .case import CASES, Case, Result
from .verdict import Verdict

LETTERS = {
    "cross_entropy": "C",
    "linear_cross_entropy": "L",
    "jsd": "J",
    "linear_jsd": "K",
    "flex_attention": "A",
}


def amount(error: float | None) -> str:
    if error is None:
        return ""
    return f" {error:.2g}" if math.isfinite(error) else " (not finite)"


def line(result: Result) -> str:
    """`implementation  op.case  verdict: detail`."""
    what = result.verdict.value
    if result.verdict is Verdict.WRONG:
        what = f"SILENTLY WRONG{amount(result.error)}"
    elif result.verdict is Verdict.RAISES and result.allowed:
        what = "raises, as it may"
    elif result.verdict is Verdict.CRASHES:
        what = "CRASHES"
    detail = "" if result.verdict is Verdict.RIGHT else f": {' '.join(result.detail.split())[:160]}"
    return f"{result.implementation:16} {result.key:52} {what}{detail}"


def counts(results: list[Result], asked: Sequence[Case]) -> dict[str, Counter[str]]:
    """How often each verdict came, for each implementation; an allowed error has a name of its own, and what was asked
    without a verdict is missing."""
    found: dict[str, Counter[str]] = {}
    for r in results:
        what = "raises, as it may" if r.verdict is Verdict.RAISES and r.allowed else r.verdict.value
        found.setdefault(r.implementation, Counter())[what] += 1
    for counter in found.values():
        counter["missing"] = len(asked) - counter.total()
    return found


@dataclass
class Asked:
    """Where the questions were asked, and each implementation's settings, precision and version there."""

    torch: str
    device: str
    implementations: dict[str, str]


def asked_here(names: Sequence[str], device: str) -> Asked:
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return Asked(torch.__version__, where, {name: described(find(name), device) for name in names if ":" not in name})


def write_json(results: list[Result], asked: Asked, path: Path) -> None:
    """Writes a line a result, with the beginning of its detail and no machine's folders."""
    rows = [asdict(r) for r in results]
    for row in rows:
        row["verdict"] = row["verdict"].value
        row["detail"] = " ".join(re.sub(r"/\S*/site-packages/", "", row["detail"]).split())[:160]
        row["seconds"] = round(row["seconds"], 2)
        if row["error"] is not None and not math.isfinite(row["error"]):
            row["error"] = str(row["error"])
    head = json.dumps(asdict(asked), indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n')


def read_json(path: Path) -> tuple[list[Result], Asked]:
    """Results that were written before, and how they were asked. Results of cases that there are no more are left
    out."""
    names = {f.name for f in fields(Result)}
    found = []
    document = json.loads(path.read_text())
    for row in document["results"]:
        kept = {k: v for k, v in row.items() if k in names}
        error = row.get("error")
        kept |= {"verdict": Verdict(row["verdict"]), "error": None if error is None else float(error)}
        if row["key"] in CASES:
            found.append(Result(**kept))
    return found, Asked(**{f.name: document[f.name] for f in fields(Asked)})


def write_markdown(table: str, device: str, path: Path) -> None:
    """Writes the table to a file; in a page with the comments that mark the device's place, only between them."""
    begin, end = f"<!-- {device} -->\n", f"<!-- {device}: end -->"
    page = path.read_text() if path.exists() else ""
    if begin in page and end in page:
        before, _, rest = page.partition(begin)
        table = f"{before}{begin}{table}\n{end}{rest.partition(end)[2].rstrip()}"
    path.write_text(table + "\n")


SUMMARY = ("right", "raises, as it may", "raises", "silently wrong", "crashes", "not offered", "missing")


def markdown(results: list[Result], names: list[str], cases: Sequence[Case], asked: Asked) -> str:
    """A table of what the implementations are, one of counts, then one of all cases: a row a case, a column an
    implementation."""
    found = counts(results, cases)
    lines = ["| | as it is asked |", "|---|---|"]
    lines += [f"| {n} | {asked.implementations[n]} |" for n in names if n in asked.implementations]
    lines += ["", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for what in SUMMARY:
        lines.append(f"| {what} | " + " | ".join(str(found.get(n, Counter())[what]) for n in names) + " |")
    by_place: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        by_place.setdefault((CASES[r.key].name, r.implementation), []).append(r)
    lines += ["", "| rule | case | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    seen: set[str] = set()
    for case in sorted(CASES.values(), key=lambda c: c.rule):
        if case.name in seen or not any((case.name, n) in by_place for n in names):
            continue
        seen.add(case.name)
        cells = [_cell(by_place.get((case.name, n), [])) for n in names]
        if any(cell not in ("–", "") for cell in cells):
            lines.append(f"| {case.rule} | {case.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(results: list[Result]) -> str:
    """One word where all ops agree, else each with its letter. Nothing: no result is there."""
    if not results:
        return ""
    words: dict[str, list[str]] = {}
    for r in results:
        if r.verdict is Verdict.NOT_OFFERED:
            continue
        word = {
            Verdict.RIGHT: "✓",
            Verdict.RAISES: "raises" if r.allowed else "**raises**",
            Verdict.WRONG: "**wrong**",
            Verdict.CRASHES: "**crashes**",
        }[r.verdict]
        words.setdefault(word, []).append(LETTERS[r.key.split(".")[0]] + (amount(r.error) if r.error else ""))
    if not words:
        return "–"
    parts = []
    for word, ops in words.items():
        plain = len(words) == 1 and not any(" " in op for op in ops)
        parts.append(word if plain else f"{word} {', '.join(ops)}")
    return "; ".join(parts)
