"""Time against memory, one panel a case; also `python benchmarks/harness/plot.py results.json`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

OURS, PEERS = "#c1272d", "#4a6fa5"
# Slower than this many floors: left out of the panel and counted in its title, else the rest is one heap.
MOST_FLOORS = 6.0
COLUMNS = 2


def plot_document(document: dict[str, Any], path: Path) -> None:
    """Write the PNG, or say why there is none."""
    cases = [case for case in document["cases"] if _points(case)]
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
    figure, axes = pyplot.subplots(lines, COLUMNS, figsize=(7.5 * COLUMNS, 4.8 * lines), squeeze=False)
    for axis, case in zip(axes.flat, cases, strict=False):
        _panel(axis, case)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    title = f"{document['op']}, forward and backward, {document['device']}, {document['date'][:10]}"
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _points(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward and backward passes whose memory is known; bare forwards would compare different work."""
    return [
        one for one in case["results"] if "ms" in one and "peak_mib" in one and "no-grad" not in one["name"]
    ]


def _panel(axis: Any, case: dict[str, Any]) -> None:
    floor = case["floor"]["ms"]
    points = _points(case)
    shown = [
        one for one in points if floor is None or one["ms"] <= MOST_FLOORS * max(floor, _fastest(points))
    ]
    for one in shown:
        colour = OURS if one["ours"] else PEERS
        axis.scatter(one["ms"], one["peak_mib"], color=colour, s=28, zorder=3)
        place = (4, 3) if one["ours"] else (4, -8)
        axis.annotate(
            one["name"], (one["ms"], one["peak_mib"]), place, textcoords="offset points", fontsize=7
        )
    if floor is not None:
        axis.axvline(
            floor, color="black", linestyle="--", linewidth=1, label=f"floor: {case['floor']['name']}"
        )
        axis.legend(fontsize=7, loc="upper right")
    sizes = " ".join(f"{letter}={size}" for letter, size in case["sizes"].items())
    hidden = f"; {len(points) - len(shown)} slower not shown" if len(shown) < len(points) else ""
    axis.set_title(f"{sizes} {case['dtype']}{hidden}", fontsize=9)
    axis.set_xlabel("ms")
    axis.set_ylabel("peak MiB above the inputs")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=-0.03 * max((one["peak_mib"] for one in shown), default=1))
    axis.grid(alpha=0.3)


def _fastest(points: list[dict[str, Any]]) -> float:
    return min(one["ms"] for one in points)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        plot_document(json.loads(Path(argument).read_text()), Path(argument).with_suffix(".png"))
