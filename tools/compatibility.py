"""Every op under every transform: which cells give eager's gradients, and which raise an error that names the op.

    python tools/compatibility.py [--device cuda] [--match regex] [--output docs/tables/compatibility.md]

A wrong gradient without an error makes the program fail, as does an error that does not name the op. `--output` writes
the table into that page, between the comments that mark its place for the device. The ops and transforms are those of
tests/python/support/compat_ops.py and compat_transforms.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python" / "support"))

from compat_ops import OPS, Case
from compat_transforms import TRANSFORMS, SilentDifference, Transform, outcome


def main() -> int:
    """Prints the table; 1 where a cell is neither right nor an error that names the op."""
    parser = argparse.ArgumentParser(description="The compatibility table.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--match", default="", help="only transforms whose name has this regular expression")
    parser.add_argument("--output", type=Path, help="the page to write the table into")
    arguments = parser.parse_args()
    transforms = [t for t in TRANSFORMS if re.search(arguments.match, t.name)]
    if arguments.output and arguments.match:
        parser.error("--output needs the whole table, without --match")
    started = time.monotonic()
    failures: list[str] = []
    notes: list[str] = []
    rows = [[_transform_cell(t), *_row(t, arguments.device, notes, failures)] for t in transforms]
    table = _markdown(rows, notes)
    print(f"\n{table}\n\n{arguments.device}, torch {torch.__version__}, {time.monotonic() - started:.0f} s")
    for failure in failures:
        print(f"\nFAILED {failure}", file=sys.stderr)
    if arguments.output and not failures:
        _write(arguments.output, arguments.device, table)
    return int(bool(failures))


def _transform_cell(transform: Transform) -> str:
    return transform.name + (" (forward)" if transform.forward_only else "")


def _row(transform: Transform, device: str, notes: list[str], failures: list[str]) -> list[str]:
    """One cell an op: one sign for both modes where they agree, else the functional and the in-place one."""
    cells = []
    for op in OPS:
        found = [_cell(Case(op, inplace, device), transform, notes, failures) for inplace in (False, True)]
        cells.append(found[0] if found[0] == found[1] else " / ".join(found))
    print(f"{transform.name}: {'; '.join(cells)}", flush=True)
    return cells


def _cell(case: Case, transform: Transform, notes: list[str], failures: list[str]) -> str:
    """PASS, or the number of the note that has the error."""
    try:
        result = outcome(case, transform)
    except SilentDifference as difference:
        failures.append(f"{case} under {transform}: wrong without an error: {difference}")
        return "WRONG"
    except Exception:
        failures.append(f"{case} under {transform}: an error that does not name the op\n{traceback.format_exc()}")
        return "FAILED"
    if not result.startswith("error: "):
        return result
    # The same reason for several ops is one note.
    reason = result.removeprefix("error: ").replace(f"{case.op.name}_:", "<op>:").replace(f"{case.op.name}:", "<op>:")
    if reason not in notes:
        notes.append(reason)
    return f"error {notes.index(reason) + 1}"


def _markdown(rows: list[list[str]], notes: list[str]) -> str:
    head = ["", *(f"`{op.name}`" for op in OPS)]
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]
    errors = [f"{i}. `{note}`" for i, note in enumerate(notes, 1)]
    return "\n".join([*lines, *(["", "Errors:", "", *errors] if errors else [])])


def _write(page: Path, device: str, table: str) -> None:
    begin, end = f"<!-- {device}: written by tools/compatibility.py -->", f"<!-- {device}: end -->"
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"--output: {page} must have the lines {begin!r} and {end!r}, but does not")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    version = torch.__version__.split("+")[0]
    page.write_text(f"{before}{begin}\nPyTorch {version}, {device.upper()}:\n\n{table}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
