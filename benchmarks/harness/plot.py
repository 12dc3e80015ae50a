"""Bars of time, memory beside them, one panel a case; `python benchmarks/harness/plot.py file.json`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

OURS, PEERS = "#c1272d", "#7a93b8"
# Longer bars are cut, with their times written beside them: else the rest are too short to compare.
LONGEST_BAR = 8.0
COLUMNS = 2
BAR_INCHES = 0.26


def plot_document(document: dict[str, Any], path: Path) -> None:
    """Write the PNG, or say why there is none."""
    cases = [case for case in document["cases"] if _bars(case)]
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    if not cases:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = math.ceil(len(cases) / COLUMNS)
    bars = [len(_bars(case)) for case in cases]
    heights = [max(bars[i * COLUMNS : (i + 1) * COLUMNS]) * BAR_INCHES + 1.3 for i in range(lines)]
    size = 8 * COLUMNS, sum(heights)
    figure, axes = pyplot.subplots(lines, COLUMNS, figsize=size, height_ratios=heights, squeeze=False)
    for axis, case in zip(axes.flat, cases, strict=False):
        _panel(axis, case, "" if case["op"] == document["op"] else f"{case['op']}, ")
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    work = document.get("work", "forward and backward")
    figure.suptitle(f"{document['op']}, {work}, {document['device']}, {document['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The slowest first. Where memory was measured, forward and backward passes whose memory is known: a bare forward
    is other work."""
    measured = any("peak_mib" in one for one in case["results"])
    passes = [one for one in case["results"] if "ms" in one and ("peak_mib" in one or not measured)]
    return sorted((one for one in passes if "no-grad" not in one["name"]), key=lambda one: -one["ms"])


def _panel(axis: Any, case: dict[str, Any], kind: str) -> None:
    bars = _bars(case)
    limit = LONGEST_BAR * bars[-1]["ms"]
    for place, one in enumerate(bars):
        length = min(one["ms"], limit)
        axis.barh(place, length, color=OURS if one["ours"] else PEERS, height=0.72)
        axis.text(length + 0.01 * limit, place, _label(one), va="center", fontsize=7)
    axis.set_yticks(range(len(bars)), [one["name"] for one in bars], fontsize=7)
    floor = case["floor"]
    if floor["ms"] is not None:
        axis.axvline(floor["ms"], color="black", linestyle="--", linewidth=1)
        axis.set_xlabel(f"ms (dashed: {floor['name']}, {floor['ms']:.4g})", fontsize=8)
    axis.set_xlim(0, 1.4 * min(limit, bars[0]["ms"]))
    sizes = " ".join(f"{letter}={size}" for letter, size in case["sizes"].items())
    axis.set_title(f"{kind}{sizes} {case['dtype']}", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _label(one: dict[str, Any]) -> str:
    return f"{one['ms']:.4g} ms" + (f", {one['peak_mib']:,.0f} MiB" if "peak_mib" in one else "")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        plot_document(json.loads(Path(argument).read_text()), Path(argument).with_suffix(".png"))
