"""The charts of README and docs, from benchmarks/results/*.json: docs/charts/*.svg, each legible at 400 pixels.

Called by tools/performance.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

Document = dict[str, Any]

WIDTH = 400
OURS, PEERS = "#b3261e", ("#33608c", "#7da0c4", "#a9a9a9", "#cfcfcf")
INK, QUIET, PAPER = "#1f1f1f", "#666666", "#ffffff"


class Drawing:
    """SVG elements, from the top down; `y` is where the next one goes."""

    def __init__(self, title: str, notes: Sequence[str]) -> None:
        self.parts: list[str] = []
        self.y = 22.0
        self.text(10, title, 15, weight="bold")
        for note in notes:
            self.y += 16
            self.text(10, note, 12, QUIET)
        self.y += 12
        self.title = title

    def text(self, x: float, text: str, size: int = 12, color: str = INK, anchor: str = "start", **more: str) -> None:
        weight = f' font-weight="{more["weight"]}"' if "weight" in more else ""
        place = f'x="{x:.1f}" y="{self.y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
        self.parts.append(f"<text {place}>{escape(text)}</text>")

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        box = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 1):.1f}"'
        self.parts.append(f'<rect {box} fill="{color}"/>')

    def legend(self, names: Sequence[str], colors: Sequence[str]) -> None:
        x = 10.0
        self.y += 8
        for name, color in zip(names, colors, strict=True):
            if x + 20 + 6.6 * len(name) > WIDTH:
                x, self.y = 10.0, self.y + 17
            self.bar(x, self.y - 9, 10, 10, color)
            self.text(x + 14, name)
            x += 26 + 6.4 * len(name)
        self.y += 8

    def svg(self) -> str:
        height = round(self.y + 8)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        head += f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">'
        paper = f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", paper, *self.parts, "</svg>"]) + "\n"


def results(document: Document, **sizes: int) -> dict[str, dict[str, Any]]:
    """What each implementation reached at the first case of these sizes."""
    for case in document["cases"]:
        if all(case["sizes"].get(letter) == size for letter, size in sizes.items()):
            return {one["name"]: one for one in case["results"] if "ms" in one}
    raise KeyError(sizes)


def teraflops(sizes: dict[str, int], work: str, kind: str, ms: float) -> float:
    """Two products forward and five backward, two operations a pair and column, half of the pairs where causal."""
    operations = 4 * sizes["B"] * sizes["H"] * sizes["S"] ** 2 * sizes["D"]
    return operations * (2.5 if work == "backward" else 1) / (1 if kind == "plain" else 2) / ms / 1e9


PEERS_OF_ATTENTION = {
    "fusegrad": "fusegrad",
    "fa4": "FlashAttention 4",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "compile": "compiled flex_attention",
}


def attention(flex: Document) -> str:
    """Columns of TFLOP/s by head size, forward above backward."""
    drawing = Drawing("Attention, TFLOP/s by head size", ["causal, 4096 tokens, bfloat16, one H200; higher is faster"])
    drawing.legend(list(PEERS_OF_ATTENTION.values()), [OURS, *PEERS])
    column, height, top = 20.0, 120.0, 800.0
    for work in ("forward", "backward"):
        drawing.y += 20
        drawing.text(10, work, 13, weight="bold")
        base = drawing.y + height + 14
        for place, head_size in enumerate((64, 128, 256)):
            case = next(c for c in flex["cases"] if c["sizes"]["D"] == head_size and c["sizes"]["S"] == 4096)
            found = {one["name"]: one for one in case["results"]}
            left = 16 + place * 128
            for i, name in enumerate(PEERS_OF_ATTENTION):
                reached = teraflops(case["sizes"], work, "causal", found[f"{name} causal {work}"]["ms"])
                tall = height * reached / top
                drawing.bar(left + i * column, base - tall, column - 3, tall, [OURS, *PEERS][i])
                drawing.y = base - tall - 4
                drawing.text(left + i * column + (column - 3) / 2, f"{reached:.0f}", 10, INK if i else OURS, "middle")
            drawing.y = base + 15
            drawing.text(left + 2.5 * column, f"head size {head_size}", 12, anchor="middle")
    return drawing.svg()


CLASSES = {
    "A scale[h]": "scale[h]",
    "B bias[kv]": "bias[kv]",
    "C scale[q]": "scale[q]",
    "D rel[h, q - kv]": "rel[h, q - kv]",
    "E bias[h, q, kv]": "bias[h, q, kv]",
    "F table[kind[q, kv]]": "table[kind[q, kv]], small",
    "G table[place[q, kv]]": "table[place[q, kv]], large",
}


def biases(flex: Document) -> str:
    """The backward with a captured tensor's gradient, over the same backward without that gradient."""
    notes = [
        "time of the backward, in multiples of the same backward",
        "with that tensor frozen; head size 128, one H200",
    ]
    drawing = Drawing("What a learned bias costs", notes)
    found = results(flex, D=128, S=4096)
    for name, label in CLASSES.items():
        ratio = found[f"fusegrad {name} backward"]["ms"] / found[f"fusegrad {name} frozen backward"]["ms"]
        drawing.y += 24
        drawing.text(10, label)
        drawing.bar(170, drawing.y - 12, 100, 15, PEERS[0])
        drawing.bar(270, drawing.y - 12, 100 * (ratio - 1), 15, OURS)
        drawing.text(276 + 100 * (ratio - 1), f"{ratio:.2f}")
    drawing.y += 18
    drawing.legend(["without its gradient", "the gradient"], [PEERS[0], OURS])
    return drawing.svg()


LOSSES = {
    "cross_entropy": (
        "cross entropy",
        {"N": 8192, "V": 128256},
        ("fusegrad inplace", "fusegrad", "liger", "compile", "eager"),
    ),
    "linear_cross_entropy": (
        "linear cross entropy",
        {"N": 8192, "H": 4096, "V": 128256},
        ("fusegrad lean <=2068 MiB", "fusegrad", "liger chunk_mem=16", "compile", "eager"),
    ),
    "jsd": ("JSD", {"N": 8192, "V": 128256}, ("fusegrad inplace", "fusegrad", "liger", "compile", "eager")),
    "linear_jsd": (
        "linear JSD",
        {"N": 8192, "V": 128256},
        ("fusegrad lean", "fusegrad", "liger", "compile", "eager"),
    ),
}
SHORT = {"liger chunk_mem=16": "liger", "fusegrad lean <=2068 MiB": "fusegrad lean"}


def losses(documents: dict[str, Document]) -> str:
    """A pair of bars a row: time and peak memory."""
    notes = ["forward and backward, 8192 tokens, 128256 classes,", "bfloat16, one H200; shorter is better"]
    drawing = Drawing("Losses: time and memory", notes)
    for op, (label, sizes, names) in LOSSES.items():
        found = results(documents[op], **sizes)
        drawing.y += 20
        drawing.text(10, label, 13, weight="bold")
        drawing.text(152, "ms", 12, QUIET)
        drawing.text(262, "GiB above the inputs", 12, QUIET)
        longest = max(found[name]["ms"] for name in names)
        largest = max(found[name]["peak_mib"] for name in names)
        for name in names:
            drawing.y += 17
            one, color = found[name], OURS if name.startswith("fusegrad") else PEERS[1]
            drawing.text(10, SHORT.get(name, name), 12, OURS if name.startswith("fusegrad") else INK)
            for left, share, value in (
                (116, one["ms"] / longest, f"{one['ms']:.3g}"),
                (262, one["peak_mib"] / largest, f"{one['peak_mib'] / 1024:.1f}"),
            ):
                drawing.bar(left, drawing.y - 10, 96 * share, 12, color)
                drawing.text(left + 96 * share + 4, value)
        drawing.y += 8
    return drawing.svg()


def charts(documents: dict[str, Document]) -> dict[str, str]:
    """File name and text of each chart."""
    flex = documents["flex_attention"]
    return {"attention.svg": attention(flex), "learned_biases.svg": biases(flex), "losses.svg": losses(documents)}
