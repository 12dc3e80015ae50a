"""``python -m fusegrad.conformance``: see docs/tables/conformance.md."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import cases  # noqa: F401, registers them
from .adapter import OPS, find
from .adapters import ADAPTERS
from .case import CASES, Case, Result
from .report import SUMMARY, asked_here, counts, line, markdown, read_json, write_json, write_markdown
from .runner import run_all
from .verdict import Verdict


def selected(rules: list[int], ops: list[str], pattern: str) -> list[Case]:
    return [
        case
        for case in CASES.values()
        if (not rules or case.rule in rules) and (not ops or case.op in ops) and re.search(pattern, case.key)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases; 1 where an implementation is silently wrong, crashes, or raises where it must not."""
    parser = argparse.ArgumentParser(prog="python -m fusegrad.conformance", description=__doc__)
    parser.add_argument(
        "--impl",
        default="eager,fusegrad,fusegrad-inplace",
        help=f"comma-separated: {', '.join(ADAPTERS)}, all, or package.module:Class",
    )
    parser.add_argument("--rule", default="", help="comma-separated numbers of rules")
    parser.add_argument("--op", default="", help=f"comma-separated: {', '.join(OPS)}")
    parser.add_argument("--case", default="", help="a regular expression for op.case")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=0, help="seconds for a case")
    parser.add_argument("--limit", type=float, help="seconds for all; what has no verdict then is missing")
    parser.add_argument("--complete", type=Path, help="ask only what is missing in this file of --json, and add to it")
    parser.add_argument("--together", type=int, default=0, help="cases in a process, while right; 1, on a GPU 12")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--markdown", nargs="?", const="-", help="print a table, or write it into this file or page")
    parser.add_argument("--read", nargs="+", type=Path, help="no run: the results that --json wrote into these files")
    parser.add_argument("--list", action="store_true", help="only say which cases there are")
    parser.add_argument("--quiet", action="store_true", help="only lines of what is not right")
    given = parser.parse_args(arguments)
    chosen = selected([int(r) for r in given.rule.split(",") if r], [o for o in given.op.split(",") if o], given.case)
    if given.list:
        for case in chosen:
            print(f"{case.rule:3} {case.key:52} {case.title}{' (or an error)' if case.may_raise else ''}")
        return 0
    names = list(ADAPTERS) if given.impl == "all" else [n for n in given.impl.split(",") if n]
    for name in names:
        if ":" not in name and name not in ADAPTERS:
            find(name)  # says which there are
    # Counting GPUs must not initialise CUDA here: processes are forked from this one.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch's deterministic mode asks for
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    timeout = given.timeout or (120 if device == "cuda" else 60)
    together = given.together or (12 if device == "cuda" else 1)
    limit = given.limit or float("inf")
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        expected = result.verdict is Verdict.RAISES and result.allowed
        if not given.quiet or not (expected or result.verdict in (Verdict.RIGHT, Verdict.NOT_OFFERED)):
            print(line(result), flush=True)

    started = time.monotonic()
    if given.read:
        read, origins = zip(*map(read_json, given.read), strict=True)
        results += [r for of_file in read for r in of_file]
        asked = origins[0]
        for other in origins[1:]:
            asked.implementations |= other.implementations
        names = list(dict.fromkeys(r.implementation for r in results))
    else:
        asked = asked_here(names, device)
        if given.complete is not None:
            given.json = given.json or given.complete
            keys = {case.key for case in chosen}
            before = read_json(given.complete)[0] if given.complete.exists() else []
            results += [r for r in before if r.implementation in names and r.key in keys]
        known = {(r.implementation, r.key) for r in results}
        run_all(names, chosen, device, given.jobs, timeout, limit, together, report, known)
        left = len(chosen) * len(names) - len(results)
        missing = f"; {left} results are missing: the limit was reached; --complete asks for them" if left else ""
        seconds = time.monotonic() - started
        print(f"\n{device}, torch {torch.__version__}, {len(chosen)} cases, {seconds:.0f} s{missing}")
    places = {key: i for i, key in enumerate(CASES)}
    results.sort(key=lambda r: (names.index(r.implementation), places[r.key]))
    for name, found in counts(results, chosen).items():
        print(f"{name:16} " + ", ".join(f"{found[what]} {what}" for what in SUMMARY if found[what]))
    if given.json:
        write_json(results, asked, given.json)
    if given.markdown:
        table = markdown(results, names, chosen, asked)
        if given.markdown == "-":
            print(f"\n{table}")
        else:
            write_markdown(table, device, Path(given.markdown))
    return int(any(r.verdict in (Verdict.WRONG, Verdict.CRASHES) for r in results))


if __name__ == "__main__":
    sys.exit(main())
