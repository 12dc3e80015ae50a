"""The charts of README and docs, from benchmarks/results/*.json: docs/charts/*-light.svg and *-dark.svg.

`charts` gives what each one shows, `draw` renders it with matplotlib. A chart's metadata has its data and a digest of
this file, so that tools/performance.py can tell a stale chart without drawing: rendered bytes differ between machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Data = dict[str, Any]

THEMES = {
    "light": {
        "ink": "#1f2328",
        "quiet": "#59636e",
        "ours": "#b3261e",
        "peers": ("#33608c", "#7da0c4", "#a0a7af", "#c9ced4"),
    },
    "dark": {
        "ink": "#e6edf3",
        "quiet": "#9198a1",
        "ours": "#ff6b5e",
        "peers": ("#6ea8dc", "#44709c", "#7d858e", "#565d66"),
    },
}
WIDTH = 4.8  # inches: legible on a phone


def case_of(document: Document, **sizes: int) -> Data:
    """The first case of these sizes."""
    for case in document["cases"]:
        if all(case["sizes"].get(letter) == size for letter, size in sizes.items()):
            return case
    raise KeyError(sizes)


def measured(case: Data) -> dict[str, Data]:
    """Results of the implementations that have times in a case, by name."""
    return {one["name"]: one for one in case["results"] if "ms" in one}


def results(document: Document, **sizes: int) -> dict[str, Data]:
    """measured() of the first case of these sizes."""
    return measured(case_of(document, **sizes))


def is_run(found: str, name: str) -> bool:
    """Lean runs of linear_cross_entropy have their memory in their name."""
    return found == name or (name == "fusegrad lean" and found.startswith(name))


def teraflops(sizes: dict[str, int], work: str, kind: str, ms: float) -> float:
    """Two products forward and five backward, two operations a pair and column, half of the pairs where causal."""
    operations = 4 * sizes["B"] * sizes["H"] * sizes["S"] ** 2 * sizes["D"]
    return operations * (2.5 if work == "backward" else 1) / (1 if kind == "plain" else 2) / ms / 1e9


def dates(document: Document, shown: Iterable[Data]) -> set[str]:
    """The dates of what is shown of a document: a case of another run has its own."""
    return {one.get("date", document["date"]) for one in shown}


def days(found: set[str]) -> str:
    """The first and the last day."""
    first, last = min(found)[:10], max(found)[:10]
    return first if first == last else f"{first} to {last}"


PEERS_OF_ATTENTION = {
    "fusegrad": "fusegrad",
    "fa4": "FlashAttention 4",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "compile": "compiled flex_attention",
}
CLASSES = {
    "A scale[h]": "scale[h]",
    "B bias[kv]": "bias[kv]",
    "C scale[q]": "scale[q]",
    "D rel[h, q - kv]": "rel[h, q - kv]",
    "E bias[h, q, kv]": "bias[h, q, kv]",
    "F table[kind[q, kv]]": "table[kind[q, kv]], small",
    "G table[place[q, kv]]": "table[place[q, kv]], large",
}
# For each op the size, and the implementations in their order with the names that readers know.
LOSSES: dict[str, tuple[str, dict[str, int], dict[str, str]]] = {
    "cross_entropy": (
        "cross entropy",
        {"N": 8192, "V": 128256},
        {"fusegrad": "fusegrad", "quack": "quack", "compile": "torch.compile", "eager": "PyTorch"},
    ),
    "linear_cross_entropy": (
        "linear cross entropy",
        {"N": 8192, "H": 4096, "V": 128256},
        {
            "fusegrad lean <=2068 MiB": "fusegrad, lean",
            "liger chunk_mem=16": "Liger",
            "compile": "torch.compile",
            "eager": "PyTorch",
        },
    ),
    "jsd": (
        "JSD",
        {"N": 8192, "V": 128256},
        {"fusegrad": "fusegrad", "liger": "Liger", "compile": "torch.compile", "eager": "PyTorch"},
    ),
    "linear_jsd": (
        "linear JSD",
        {"N": 8192, "V": 128256},
        {"fusegrad lean": "fusegrad, lean", "liger": "Liger", "compile": "torch.compile", "eager": "PyTorch"},
    ),
}
HEADS = {
    "fusegrad lean": "fusegrad, lean",
    "fusegrad": "fusegrad",
    "compile": "torch.compile",
    "eager": "PyTorch",
}


# --- what is shown --------------------------------------------------------------------------------------------------


def losses(documents: dict[str, Document]) -> Data:
    rows, when = {}, set[str]()
    for op, (label, sizes, names) in LOSSES.items():
        found = results(documents[op], **sizes)
        when |= dates(documents[op], [case_of(documents[op], **sizes)])
        rows[label] = {shown: [found[name]["ms"], found[name]["peak_mib"] / 1024] for name, shown in names.items()}
    return {
        "title": "Forward and backward, 8192 tokens, 128256 classes",
        "note": f"bfloat16, one H200, {days(when)}; lean: bfloat16 accumulation",
        "rows": rows,
    }


def attention(documents: dict[str, Document]) -> Data:
    """TFLOP/s by head size, forward and backward."""
    flex, rows = documents["flex_attention"], {}
    cases = [case_of(flex, D=head_size, S=4096) for head_size in (64, 128, 256)]
    for work in ("forward", "backward"):
        for case in cases:
            found = measured(case)
            rows[f"{work}\nhead size {case['sizes']['D']}"] = {
                shown: teraflops(case["sizes"], work, "causal", found[f"{name} causal {work}"]["ms"])
                for name, shown in PEERS_OF_ATTENTION.items()
            }
    return {
        "title": "Causal attention, TFLOP/s: higher is faster",
        "note": f"4096 tokens, bfloat16, one H200, {days(dates(flex, cases))}",
        "rows": rows,
    }


def biases(documents: dict[str, Document]) -> Data:
    """The backward with a captured tensor's gradient, over the same backward without that gradient."""
    flex = documents["flex_attention"]
    found, when = results(flex, D=128, S=4096), dates(flex, [case_of(flex, D=128, S=4096)])
    rows = {
        label: found[f"fusegrad {name} backward"]["ms"] / found[f"fusegrad {name} frozen backward"]["ms"]
        for name, label in CLASSES.items()
    }
    return {
        "title": "The backward's time with the gradient of a bias",
        "note": f"head size 128, one H200, {days(when)}",
        "rows": rows,
    }


def head(documents: dict[str, Document]) -> Data:
    """Peak memory of the fused head by vocabulary."""
    document, rows = documents["linear_cross_entropy"], {}
    cases = [case for case in document["cases"] if case["sizes"]["N"] >= 8192]
    for case in sorted(cases, key=lambda one: one["sizes"]["V"]):
        sizes = case["sizes"]
        found = {}
        for name, shown in HEADS.items():
            those = [one for one in measured(case).values() if is_run(one["name"], name)]
            found[shown] = min(one["peak_mib"] for one in those) / 1024
        rows[f"{sizes['V']:,} classes\n{sizes['N']:,} tokens"] = found
    return {
        "title": "The head's peak memory above its inputs, GiB",
        "note": f"forward and backward, bfloat16, one H200, {days(dates(document, cases))}",
        "rows": rows,
    }


def score_mod(documents: dict[str, Document]) -> Data:
    """The life of a score_mod."""
    flex = documents["flex_attention"]
    extra = list(flex["extra"].values())
    first, disk, *_ = (f"{one['value']:,.0f} {one['unit']}" for one in extra)
    rows = {
        "your function": "score + bias[h, q_idx - kv_idx]",
        "trace, once": "runs on symbols and becomes a graph;\nlater calls compare what it captured",
        "derivative": "a second graph: the score's gradient,\nand what each pair adds to bias.grad",
        "plan": "kernels, tiles, scratch memory,\nand how the pairs' additions are summed",
        "compile": f"CPU: at once. CUDA: {first} for both passes,\n{disk} from the disk in later processes",
        "run": "out; then gradients of query, key,\nvalue and bias",
    }
    return {
        "title": "From a Python function to its gradient",
        "note": f"times: one H200, {days(dates(flex, extra))}",
        "rows": rows,
    }


CHARTS = {
    "losses": losses,
    "attention": attention,
    "learned_biases": biases,
    "head_memory": head,
    "score_mod": score_mod,
}


# --- how ------------------------------------------------------------------------------------------------------------


def _figure(theme: Data, height: float, **layout: Any) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "fusegrad",
            "font.size": 9.5,
            "font.family": "DejaVu Sans",
            "text.color": theme["ink"],
            "axes.facecolor": "none",
        }
        | {f"{part}.color": theme["quiet"] for part in ("xtick", "ytick")}
        | {"axes.edgecolor": theme["quiet"], "axes.labelcolor": theme["ink"], "axes.spines.top": False}
        | {"axes.spines.right": False}
    )
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, height), layout="constrained", **layout)


def _titles(figure: Any, theme: Data, one: Data) -> None:
    figure.suptitle(one["title"], fontsize=10.5, fontweight="bold", x=0.01, ha="left", color=theme["ink"])
    figure.supxlabel(one["note"], fontsize=8, x=0.99, ha="right", color=theme["quiet"])


def _legend(figure: Any, handles: list[Any], names: list[str]) -> None:
    """Two columns at the bottom, whose last line is empty: the note lies there."""
    from matplotlib.patches import Patch

    nothing = (Patch(alpha=0), "")
    entries, lines = list(zip(handles, names, strict=True)), -(-len(names) // 2)
    columns = [entries[:lines], entries[lines:]]
    padded = [one for column in columns for one in column + [nothing] * (lines + 1 - len(column))]
    figure.legend(*zip(*padded, strict=True), loc="outside lower left", ncols=2, fontsize=8.5, frameon=False)


SHADES = {
    "quack": 0,
    "Liger": 0,
    "FlashAttention 4": 0,
    "torch.compile": 1,
    "cuDNN": 1,
    "PyTorch": 2,
    "FlashAttention-2": 2,
}


def _color(theme: Data, name: str) -> Any:
    if name.startswith("fusegrad"):
        return (theme["ours"], 0.55 if name.endswith("lean") else 1.0)
    return theme["peers"][SHADES.get(name, 3)]


def draw_losses(theme: Data, one: Data) -> Any:
    """A row of bars an op: time on the left, memory on the right, each by the largest of its row."""
    figure, axes = _figure(theme, 5.0, nrows=len(one["rows"]), ncols=2, sharey="row")
    for line, (label, found) in zip(axes, one["rows"].items(), strict=True):
        names = list(found)[::-1]
        for axis, part, unit in zip(line, (0, 1), ("ms", "GiB"), strict=True):
            values = [found[name][part] for name in names]
            bars = axis.barh(names, values, color=[_color(theme, name) for name in names], height=0.75)
            axis.bar_label(bars, [f"{v:.3g}" for v in values], padding=3, fontsize=8.5)
            axis.set_xlim(0, max(values) * 1.22)
            axis.set_title(f"{label}, {unit}" if part == 0 else f"peak memory, {unit}", fontsize=8.5, loc="left")
            axis.set_xticks([])
            axis.spines["bottom"].set_visible(False)
            axis.tick_params(axis="y", length=0, labelcolor=theme["ink"])
    return figure


def _grouped(theme: Data, one: Data, height: float, columns: int, digits: str) -> Any:
    """Bars side by side, a panel a row of the data."""
    lines = -(-len(one["rows"]) // columns)
    figure, axes = _figure(theme, height, nrows=lines, ncols=columns, sharey="row", squeeze=False)
    for axis, (label, found) in zip(axes.flat, one["rows"].items(), strict=True):
        names, values = list(found), list(found.values())
        bars = axis.bar(names, values, color=[_color(theme, name) for name in names], width=0.85)
        axis.bar_label(bars, [format(v, digits) for v in values], padding=2, fontsize=8)
        axis.set_title(label, fontsize=8.5)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.margins(y=0.18)
    handles = [axes[0][0].patches[i] for i in range(len(names))]
    _legend(figure, handles, names)
    return figure


def draw_attention(theme: Data, one: Data) -> Any:
    return _grouped(theme, one, 4.4, 3, ".0f")


def draw_head_memory(theme: Data, one: Data) -> Any:
    return _grouped(theme, one, 2.7, len(one["rows"]), ".1f")


def draw_learned_biases(theme: Data, one: Data) -> Any:
    figure, axis = _figure(theme, 2.7)
    names, values = list(one["rows"])[::-1], list(one["rows"].values())[::-1]
    axis.barh(names, [1.0] * len(names), color=theme["peers"][1], height=0.7, label="bias frozen: 1")
    over = axis.barh(names, [v - 1 for v in values], left=1, color=theme["ours"], height=0.7, label="its gradient")
    axis.bar_label(over, [f"{v:.2f}" for v in values], padding=3, fontsize=8)
    axis.set_xlim(0, max(values) * 1.12)
    axis.set_xticks([0, 0.5, 1, 1.5])
    axis.tick_params(axis="y", length=0, labelcolor=theme["ink"])
    _legend(figure, *axis.get_legend_handles_labels())
    return figure


def draw_score_mod(theme: Data, one: Data) -> Any:
    """Boxes from the top down, each with what happens beside it."""
    figure, axis = _figure(theme, 3.6)
    count = len(one["rows"])
    for place, (name, text) in enumerate(one["rows"].items()):
        y = count - place
        color = theme["ours"] if place in (0, count - 1) else theme["peers"][0]
        box = {"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": color, "linewidth": 1.5}
        axis.text(0.14, y, name, ha="center", va="center", fontsize=9, bbox=box)
        axis.text(0.31, y, text, va="center", fontsize=8.5, family="monospace" if place == 0 else None)
        if place + 1 < count:
            arrow = {"arrowstyle": "->", "color": theme["quiet"]}
            axis.annotate("", (0.14, y - 0.7), (0.14, y - 0.3), arrowprops=arrow)
    axis.set_xlim(0, 1)
    axis.set_ylim(0.5, count + 0.5)
    axis.set_axis_off()
    return figure


DRAW = {
    "score_mod": draw_score_mod,
    "losses": draw_losses,
    "attention": draw_attention,
    "learned_biases": draw_learned_biases,
    "head_memory": draw_head_memory,
}


def stamp(one: Data) -> str:
    """What a chart's metadata must be."""
    return json.dumps({"data": one, "drawn by": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]})


def is_stale(path: Path, one: Data) -> bool:
    return not path.exists() or stamp(one) not in unescape(path.read_text())


def draw(name: str, one: Data, theme: str, path: Path) -> None:
    from matplotlib import pyplot

    figure = DRAW[name](THEMES[theme], one)
    _titles(figure, THEMES[theme], one)
    path.parent.mkdir(exist_ok=True)
    metadata = {"Date": None, "Creator": None, "Title": one["title"], "Description": stamp(one)}
    figure.savefig(path, transparent=True, metadata=metadata)
    pyplot.close(figure)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def charts(documents: dict[str, Document]) -> dict[str, Data]:
    """The data of each chart by its name."""
    return {name: make(documents) for name, make in CHARTS.items()}
