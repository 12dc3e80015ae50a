"""The kernels of flex attention for every architecture, compiled without a GPU: what registers and spills they take.

Beside this, flex_kernels.txt says what each may take, and of which program that was measured: a kernel whose program,
with NVRTC and all headers, is still that one is not compiled again. Environment variables:
FUSEGRAD_FLEX_KERNELS=all    compiles the whole matrix, an hour's work; what the table does not have may take 255
                             registers and MOST_SPILLED bytes
FUSEGRAD_FLEX_KERNELS=write  writes the table anew: to be done with each change to the kernels, or the suite takes
                             minutes longer
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from coverings import rows_of
from fusegrad import _C, ScoreMod, trace_mask_mod, trace_score_mod
from needs import needs_flex_compiler

flex = getattr(_C, "flex", None)


def case(kernel: str, dtype: str, heads: tuple[int, int], **more: object) -> object:
    return flex.case({"kernel": kernel, "dtype": dtype, "head_size": heads[0], "value_size": heads[1], **more})


pytestmark = needs_flex_compiler

MODE = os.environ.get("FUSEGRAD_FLEX_KERNELS", "")
TABLE = Path(__file__).with_name("flex_kernels.txt")
ARCHITECTURES = ["80", "86", "89", "90a", "100", "120"]
# Another release of NVRTC may need a few more.
MORE_REGISTERS = 8
MOST_SPILLED = 1024


# --- what is compiled -----------------------------------------------------------------------------------------


def float_buffer(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, requires_grad=True)


@functools.lru_cache
def score_mod(name: str) -> ScoreMod | None:
    """One of each class of captured gradients, "H" a table of which a head reaches a column, "W" one of all batches,
    "P" a bias of pairs in 16 bits, "M" the same with a mask of keys, "T" T5's table by the bucket of a difference,
    and what captures nothing."""
    head, place, pair = float_buffer(16), float_buffer(4096), float_buffer(4096, 4096).detach()[:8, :8]
    relative, table, large = float_buffer(16, 8192), float_buffer(64), float_buffer(100_000)
    pair.requires_grad_()
    kinds, places = torch.zeros(8, 8, dtype=torch.int32), torch.zeros(16, 8, 8, dtype=torch.int32)
    columns, buckets = float_buffer(512, 16), torch.zeros(8192, dtype=torch.int64)
    half = torch.zeros(16, 8, 8, dtype=torch.bfloat16).requires_grad_()
    keeps = torch.ones(8, 8, dtype=torch.bool)
    made: dict[str, Callable | None] = {
        "none": None,
        "softcap": lambda s, b, h, q, kv: 30 * torch.tanh(s / 30),
        "alibi": lambda s, b, h, q, kv: s + torch.exp2(-(h + 1) / 2.0) * (kv - q),
        "A": lambda s, b, h, q, kv: s * head[h],
        "B": lambda s, b, h, q, kv: s + place[kv],
        "C": lambda s, b, h, q, kv: s * place[q],
        "D": lambda s, b, h, q, kv: s + relative[h, q - kv + 4096],
        "E": lambda s, b, h, q, kv: s + pair[q, kv],
        "F": lambda s, b, h, q, kv: s + table[kinds[q, kv]],
        "G": lambda s, b, h, q, kv: s + large[kinds[q, kv]],
        "H": lambda s, b, h, q, kv: s + columns[places[b, q, kv], h],
        "P": lambda s, b, h, q, kv: s + half[h, q, kv],
        "M": lambda s, b, h, q, kv: torch.where(keeps[b, kv], s + half[h, q, kv], -math.inf),
        "T": lambda s, b, h, q, kv: s + columns[buckets[kv - q + 4096], h],
        "W": lambda s, b, h, q, kv: s + columns[kinds[q, kv], h],
        "AD": lambda s, b, h, q, kv: s * head[h] + relative[h, q - kv + 4096],
    }
    function = made[name]
    return None if function is None else trace_score_mod(function)


@functools.lru_cache
def mask_mod(name: str) -> ScoreMod | None:
    document = torch.zeros(4096, dtype=torch.int32)
    if name in ("none", "lists"):
        return None
    if name == "document":
        return trace_mask_mod(lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv))
    return trace_mask_mod(lambda b, h, q, kv: q >= kv)


class Kernel(NamedTuple):
    # "ordered" is the backward whose sums are the same in every order, "turns" the one with dQ whose sums of buffers
    # come in any, "short" the one without tall tiles, "zeros" the one whose dQ is added to zeros, "whole" the one whose
    # CTAs have all keys of a head, "stays" the one of many batches of up to 64 queries and keys, "stays_ordered" the
    # deterministic one, "stays_sums" the one that sums up over them, "grad_buffers" the kernel that does nothing else;
    # behind a plus sign, "dropout". "few16" and "few32" are the forward of few queries in tiles of so many rows; of
    # "split_" ones keys are split over CTAs. "segments" is the forward with batch_invariant, "segments16" and
    # "segments64" the one whose rows are queries of several heads and whose CTAs have a segment each, which
    # "merge_segments" adds up.
    kernel: str
    dtype: str
    head_size: int
    value_size: int
    score_mod: str
    mask: str  # "small": tiles lie in several blocks; "lists": they do, and there is no mask_mod
    architecture: str

    def case(self) -> object:
        score, mask = score_mod(self.score_mod), mask_mod(self.mask)
        blocks = None if self.mask == "none" else (48, 48) if self.mask in ("small", "lists") else (128, 128)
        buffers = () if score is None else score.buffers

        def text_of(mod: ScoreMod | None) -> tuple[str, list[str]]:
            return ("", []) if mod is None else (mod.text, [str(b.dtype).removeprefix("torch.") for b in mod.buffers])

        kernel, _, dropout = self.kernel.partition("+")
        split, kernel = kernel.startswith("split_"), kernel.removeprefix("split_")
        rows = int(kernel.removeprefix("few")) if kernel.startswith("few") else 0
        kernel = "forward" if rows else kernel
        if kernel.startswith("segments"):
            rows = int(kernel.removeprefix("segments") or 0)
            split, kernel = rows > 0, "segments"
        results = kernel in ("forward", "segments", "merge_segments")
        stays = kernel.startswith("stays")
        return case(
            "backward" if stays or kernel in ("ordered", "turns", "short", "whole", "zeros") else kernel,
            self.dtype,
            (self.head_size, self.value_size),
            score_mod=text_of(score),
            mask_mod=text_of(mask),
            block_size=blocks,
            wants_grad=[] if results else [b.requires_grad for b in buffers],
            elements=[b.numel() for b in buffers],
            deterministic=kernel in ("ordered", "stays_ordered", "grad_query"),
            tall=kernel not in ("short", "whole"),
            stores_first=kernel != "zeros",
            ordered=kernel == "turns",
            whole=kernel == "whole",
            dropout=bool(dropout),
            few_rows=rows,
            key_splits=split,
            lengths=(64, 64) if stays else (0, 0),
            many_batches=stays,
            sums_batches=kernel == "stays_sums",
            sizes=[list(b.shape) for b in buffers] if stays else [],
        )

    def program(self) -> object:
        return flex.program(self.case(), self.architecture)

    def takes(self) -> Takes:
        (found,) = _C.jit.resources(self.program()).values()
        assert not found["products_wait"], self
        return Takes(found["registers"], max(found["spill_store_bytes"], found["stack_bytes"]), self.key())

    def key(self) -> str:
        return _C.jit.key(self.program())[:16]


class Takes(NamedTuple):
    """Registers of a thread, bytes that they spill or that arrays take which are not in registers, and the program's
    key."""

    registers: int
    spilled: int
    key: str


# Each for two architectures; together they meet all that test_the_selection_meets_everything names.
SELECTED = """
forward bfloat16 64 64 none none
forward bfloat16 64 64 alibi causal
forward bfloat16 128 128 none causal
forward bfloat16 128 128 softcap document
forward bfloat16 256 256 D small
forward float16 96 64 none small
forward float16 256 256 none none
forward float32 64 64 softcap causal
forward float32 128 128 none document
forward float32 256 256 D none
backward bfloat16 64 64 none none
backward bfloat16 64 64 F causal
backward bfloat16 128 128 none causal
backward bfloat16 128 128 A none
backward bfloat16 128 128 D document
backward bfloat16 256 256 B none
backward float16 64 64 C small
backward float16 128 64 E none
backward float16 256 256 softcap causal
backward float32 64 64 G none
backward float32 128 128 AD none
backward float32 256 256 none causal
ordered bfloat16 128 128 D causal
ordered float16 64 64 F none
ordered float32 64 64 G small
grad_query bfloat16 64 64 none none
grad_query bfloat16 128 128 D causal
grad_query float16 256 256 softcap none
grad_query float32 64 64 A document
grad_query float32 256 256 none none
ordered float32 128 128 B none
stays bfloat16 32 32 H none
stays float32 64 64 H none
stays_ordered bfloat16 32 32 H none
few16 bfloat16 128 128 none none
few32 float16 64 64 D small
few16 float32 128 128 A causal
split_forward bfloat16 64 64 none none
split_grad_query float32 64 64 none causal
tangents bfloat16 64 64 none none
tangents bfloat16 128 128 D causal
tangents float16 256 128 softcap document
tangents float32 64 64 A small
pair_tangents bfloat16 64 64 none none
pair_tangents float16 128 128 softcap causal
pair_tangents float32 64 64 alibi document
forward float16 96 64 none lists
backward float32 64 64 A lists
segments bfloat16 64 64 none none
segments bfloat16 128 128 none causal
segments float16 256 256 softcap causal
segments float32 64 64 A document
segments float32 256 256 none small
segments16 bfloat16 128 128 none none
segments16 float16 64 64 D small
segments16 float32 128 128 softcap causal
merge_segments bfloat16 128 128 none none
merge_segments float32 64 64 none none
stays_sums bfloat16 32 32 W none
"""
# For sm_90a alone, where kernels of 16-bit elements are of another family.
HOPPER = """
forward bfloat16 64 64 none none
forward bfloat16 64 64 none causal
forward bfloat16 64 64 softcap causal
forward bfloat16 64 128 D document
forward bfloat16 128 128 none none
forward bfloat16 128 128 none causal
forward bfloat16 128 128 alibi none
forward bfloat16 128 128 D none
forward bfloat16 128 128 E small
forward bfloat16 128 128 none lists
forward bfloat16 256 256 none none
forward bfloat16 256 256 softcap causal
forward float16 64 64 A small
forward float16 128 128 softcap document
forward float16 192 128 none causal
forward float16 256 256 D small
forward bfloat16 48 48 none none
forward bfloat16 80 80 none none
backward bfloat16 64 64 none none
backward bfloat16 64 64 alibi causal
backward bfloat16 64 64 D none
backward bfloat16 64 64 D document
backward bfloat16 64 64 F none
backward bfloat16 64 64 C none
backward bfloat16 128 128 none none
backward bfloat16 128 128 none causal
backward bfloat16 128 128 none document
backward bfloat16 128 128 alibi none
backward bfloat16 128 128 softcap causal
backward bfloat16 128 128 A none
backward bfloat16 128 128 B none
backward bfloat16 128 128 C none
backward bfloat16 128 128 D document
backward bfloat16 128 128 F none
backward bfloat16 128 128 AD small
backward bfloat16 128 128 none lists
backward float16 128 64 E none
backward bfloat16 80 80 none none
backward bfloat16 80 72 none causal
backward bfloat16 96 96 none none
backward float16 88 96 none causal
backward bfloat16 80 80 D causal
zeros bfloat16 64 64 none causal
short bfloat16 64 64 none none
short bfloat16 128 128 none none
short bfloat16 128 128 none causal
ordered bfloat16 64 64 B none
ordered bfloat16 128 128 A none
ordered bfloat16 128 128 D causal
ordered bfloat16 128 128 F none
grad_query bfloat16 64 64 none none
grad_query bfloat16 128 128 none causal
grad_query bfloat16 128 128 softcap document
grad_query bfloat16 128 128 D none
grad_query float16 128 64 A small
grad_query bfloat16 128 128 none lists
grad_query bfloat16 80 80 none none
backward bfloat16 256 256 none none
backward bfloat16 256 256 none causal
backward bfloat16 256 256 none document
backward bfloat16 256 256 alibi none
backward bfloat16 256 256 softcap causal
backward bfloat16 256 256 A none
backward bfloat16 256 256 D document
backward bfloat16 192 128 F none
backward bfloat16 192 128 none none
backward bfloat16 192 128 none causal
backward float16 160 96 none lists
ordered bfloat16 192 128 none causal
short bfloat16 48 48 none causal
backward float16 64 256 C small
ordered bfloat16 256 256 B none
ordered bfloat16 256 256 D causal
grad_query bfloat16 256 256 none causal
grad_query float16 256 256 D document
forward+dropout bfloat16 64 64 none none
forward+dropout bfloat16 128 128 none causal
forward+dropout bfloat16 256 256 none none
backward+dropout bfloat16 64 64 none none
backward+dropout bfloat16 128 128 none causal
backward+dropout bfloat16 256 256 none none
grad_query+dropout bfloat16 128 128 none none
few16 bfloat16 128 128 none causal
few32 bfloat16 128 128 E none
few16 bfloat16 256 256 none none
few16+dropout bfloat16 128 128 none none
split_forward bfloat16 64 64 none causal
split_forward bfloat16 128 128 none none
split_forward bfloat16 256 256 D none
split_grad_query bfloat16 128 128 none none
split_grad_query bfloat16 256 256 none causal
tangents bfloat16 64 64 none none
tangents bfloat16 64 64 softcap causal
tangents bfloat16 72 72 none none
tangents bfloat16 128 128 none none
tangents bfloat16 128 128 none causal
tangents bfloat16 128 128 E document
tangents bfloat16 64 64 D causal
tangents float16 128 64 D small
tangents bfloat16 64 64 none lists
tangents+dropout bfloat16 128 128 none causal
forward bfloat16 32 32 E none
forward bfloat16 64 64 D none
forward bfloat16 64 64 T none
forward bfloat16 128 128 T causal
backward bfloat16 64 64 T none
backward bfloat16 128 128 T causal
ordered bfloat16 64 64 T none
grad_query bfloat16 64 64 T none
backward bfloat16 64 64 E none
forward bfloat16 32 32 P none
forward bfloat16 64 64 P none
backward bfloat16 32 32 none none
backward bfloat16 32 32 P none
forward bfloat16 32 32 M none
forward bfloat16 64 64 M none
backward bfloat16 32 32 M none
backward bfloat16 64 64 P none
backward bfloat16 128 128 P none
turns bfloat16 32 32 P none
turns bfloat16 64 64 P none
whole bfloat16 32 32 P none
whole bfloat16 64 64 none none
whole bfloat16 64 64 none causal
whole bfloat16 80 80 none none
whole bfloat16 128 128 none none
whole bfloat16 128 128 none causal
whole bfloat16 128 128 none lists
whole bfloat16 128 128 A none
grad_buffers bfloat16 32 32 P none
grad_buffers bfloat16 32 32 M none
grad_buffers bfloat16 64 64 P none
segments bfloat16 64 64 none none
segments bfloat16 64 64 none causal
segments bfloat16 64 64 P none
segments bfloat16 128 128 none none
segments bfloat16 128 128 none causal
segments bfloat16 128 128 none lists
segments bfloat16 128 128 alibi none
segments bfloat16 128 128 D document
segments float16 192 128 none causal
segments float16 256 256 softcap causal
segments+dropout bfloat16 128 128 none causal
segments64 bfloat16 64 64 softcap causal
segments64 bfloat16 128 128 none none
segments64 bfloat16 128 128 D document
segments64 bfloat16 256 256 none none
segments64+dropout bfloat16 128 128 none none
"""


def rows(text: str) -> list[list]:
    split = [line.split() for line in text.split("\n")[1:-1]]
    return [[kernel, dtype, int(head), int(value), *mods] for kernel, dtype, head, value, *mods in split]


def selection() -> list[Kernel]:
    found = [Kernel(*row, "90a") for row in rows(HOPPER)]
    for i, row in enumerate(rows(SELECTED)):
        for architecture in (ARCHITECTURES[i % 6], ARCHITECTURES[(i * 5 + 3 + i // 6) % 6]):
            found.append(Kernel(*row, architecture))
    return list(dict.fromkeys(found))


def everything() -> list[Kernel]:
    found = itertools.product(
        ["forward", "backward", "ordered", "grad_query"],
        ["bfloat16", "float16", "float32"],
        [(64, 64), (128, 128), (192, 128), (256, 256)],
        ["none", "softcap", "alibi", *"ABCDEFG", "AD"],
        ["none", "causal", "document", "small", "lists"],
        ARCHITECTURES,
    )
    return [Kernel(kernel, dtype, *sizes, *rest) for kernel, dtype, sizes, *rest in found]


# --- tests ----------------------------------------------------------------------------------------------------


def table() -> dict[Kernel, Takes]:
    rows = [line.split() for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {
        Kernel(kernel, dtype, int(head), int(value), *rest): Takes(int(registers), int(spilled), key)
        for kernel, dtype, head, value, *rest, registers, spilled, key in rows
    }


def write(found: dict[Kernel, Takes]) -> None:
    lines = ["# kernel dtype head_size value_size score_mod mask architecture registers spilled_bytes program"]
    lines += [" ".join(str(x) for x in (*kernel, *takes)) for kernel, takes in found.items()]
    TABLE.write_text("\n".join(lines) + "\n")


def test_registers_and_spills() -> None:
    kernels = everything() if MODE == "all" else selection()
    limits = {} if MODE == "write" else table()
    if not MODE:
        kernels = [kernel for kernel in kernels if kernel not in limits or kernel.key() != limits[kernel].key]
    with ThreadPoolExecutor(os.cpu_count() if MODE else 2) as threads:
        found = dict(zip(kernels, threads.map(Kernel.takes, kernels), strict=True))
    if MODE == "write":
        write(found)
        return
    more = []
    for kernel, (registers, spilled, _) in found.items():
        most_registers, most_spilled, _ = limits.get(kernel, (255, MOST_SPILLED, ""))
        if registers > most_registers + MORE_REGISTERS or spilled > most_spilled:
            takes = f"{registers} registers and {spilled} bytes"
            more.append(f"{' '.join(map(str, kernel))}: {takes}, at most {most_registers} and {most_spilled}")
    assert not more, "\n" + "\n".join(more)


def disassembler() -> str | None:
    """nvdisasm of the CUDA toolkit, or of Triton, which PyTorch with CUDA comes with."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(f) / "backends/nvidia/bin" for f in (spec and spec.submodule_search_locations) or []]
    return shutil.which("nvdisasm", path=os.pathsep.join(map(str, [os.environ.get("PATH", ""), *folders])))


def written_too_early(assembly: str) -> list[str]:
    """What writes a register that a product (wgmma) may still read: before the wait for the product's group.

    ptxas does not keep such registers by itself where the next operand is computed before the wait.
    """
    places: dict[str, int] = {}
    found: list[tuple[str, set[int], set[int]]] = []  # the text, operands, registers that it writes
    for line in assembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            places[label[1]] = len(found)
        elif text := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            operand = re.match(r"HGMMA\S+ R\d+, R(\d+), gdesc", text[1])
            into = re.match(r"(\S+)\s+(?:U?P\w+,\s*)?R(\d+)(?:\.\w+)?,", text[1])
            stores = text[1].startswith(("ST", "RED", "HGMMA", "ATOM"))
            count = 4 if into and ".128" in into[1] else 2 if into and re.search(r"\.64|WIDE", into[1]) else 1
            found.append(
                (
                    text[1],
                    set(range(int(operand[1]), int(operand[1]) + 4)) if operand else set(),
                    set(range(int(into[2]), int(into[2]) + count)) if into and not stores else set(),
                )
            )
    # The code as it lies there, and each loop twice.
    walks = [range(len(found))]
    for i, (text, _, _) in enumerate(found):
        target = re.search(r"BRA.*\((\.L_\w+)\)", text)
        if target and places.get(target[1], i) < i:
            body = range(places[target[1]], i + 1)
            walks += [body, body] if any(found[k][1] for k in body) else []
    early = set()
    groups: list[set[int]] = []
    group: set[int] = set()
    for n, walk in enumerate(walks):
        if n == 0 or walk != walks[n - 1]:
            groups, group = [], set()
        for i in walk:
            text, operands, writes = found[i]
            group |= operands
            if text.startswith("HGMMA") and "gsb0" in text:
                groups.append(group)
                group = set()
            elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", text):
                groups = groups[len(groups) - int(wait[1]) :] if int(wait[1]) else []
            elif any(writes & g for g in [*groups, group]):
                early.add(text)
    return sorted(early)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(
    "row",
    [
        "forward bfloat16 64 64 none causal",
        "forward bfloat16 128 128 none none",
        "forward bfloat16 128 128 D none",
        "forward bfloat16 256 256 softcap causal",
        "backward bfloat16 64 64 none none",
        "backward bfloat16 128 128 none none",
        "grad_query bfloat16 256 256 none causal",
        "tangents bfloat16 64 64 none none",
        "tangents bfloat16 128 128 D causal",
        "segments bfloat16 64 64 none none",
        "segments bfloat16 128 128 none causal",
        "segments64 bfloat16 128 128 none none",
        "segments64 bfloat16 256 256 none none",
    ],
)
def test_operands_keep_their_registers_until_products_have_read_them(row: str, tmp_path: Path) -> None:
    (fields,) = rows(f"\n{row}\n")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(_C.jit.compile(flex.program(Kernel(*fields, "90a").case(), "90a")))
    assembly = subprocess.run(
        [str(disassembler()), "-c", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    assert "HGMMA" in assembly
    assert written_too_early(assembly) == []


def test_the_table_is_of_the_selection() -> None:
    assert set(table()) == set(selection())


def test_the_selection_meets_everything() -> None:
    kernels = selection()
    for field, values in {
        "architecture": set(ARCHITECTURES),
        "dtype": {"bfloat16", "float16", "float32"},
        "mask": {"none", "causal", "document", "small", "lists"},
    }.items():
        for kernel in ("forward", "backward"):
            assert {getattr(k, field) for k in kernels if k.kernel == kernel} == values
    assert {(k.kernel, k.dtype) for k in kernels} >= {
        (kernel, dtype)
        for kernel in ("forward", "backward", "ordered", "grad_query")
        for dtype in ("bfloat16", "float16", "float32")
    }
    assert {(k.kernel, k.head_size) for k in kernels} >= {
        (kernel, size) for kernel in ("forward", "backward") for size in (64, 128, 256)
    }
    families = {
        (k.dtype, k.kernel.partition("+")[0], flex.kernel_plan(k.case(), k.architecture)["family"]) for k in kernels
    }
    assert {row[:2] for row in families if row[2] == "hopper"} == {
        *itertools.product(["bfloat16", "float16"], ["forward", "backward", "grad_query", "tangents"]),
        ("bfloat16", "grad_buffers"),
        ("bfloat16", "ordered"),
        ("bfloat16", "short"),
        ("bfloat16", "segments"),
        ("float16", "segments"),
        ("bfloat16", "segments64"),
        ("bfloat16", "split_forward"),
        ("bfloat16", "split_grad_query"),
        ("bfloat16", "turns"),
        ("bfloat16", "whole"),
        ("bfloat16", "zeros"),
    }
    schemes = {flex.kernel_plan(k.case(), k.architecture)["schemes"] for k in kernels if k.kernel == "backward"}
    assert set("".join(schemes)) == set("ABCDEFG")


@rows_of(
    "dtype, sizes, architecture, family",
    [
        ("bfloat16", (128, 128), "90a", "hopper"),
        ("float16", (64, 64), "90a", "hopper"),
        ("bfloat16", (256, 200), "90a", "hopper"),
        ("float16", (128, 50), "90a", "hopper"),
        ("float16", (64, 128), "90a", "hopper"),
        ("bfloat16", (128, 128), "90", "portable"),  # wgmma is of sm_90a alone
        ("bfloat16", (128, 128), "100", "portable"),
        ("bfloat16", (16, 16), "90a", "hopper"),
        ("bfloat16", (80, 72), "90a", "hopper"),
        ("bfloat16", (128, 0), "90a", "portable"),
        ("float32", (128, 128), "90a", "portable"),
    ],
)
def test_the_family(dtype: str, sizes: tuple[int, int], architecture: str, family: str) -> None:
    def plan(kernel: str) -> dict:
        return flex.kernel_plan(case(kernel, dtype, sizes), architecture)

    def families() -> list[str]:
        return [plan(kernel)["family"] for kernel in ("forward", "backward", "grad_query")]

    assert families() == [family] * 3
    # Those of forward mode have two outputs in registers.
    assert plan("tangents")["family"] == (family if max(sizes) <= 128 else "portable")
    try:
        flex.force_family("portable")
        assert families() == ["portable"] * 3
        # Forced, it is where there are kernels at all.
        flex.force_family("hopper")
        available = architecture == "90a" and dtype != "float32" and min(sizes) > 0
        assert families() == ["hopper" if available else "portable"] * 3
    finally:
        flex.force_family("")


@pytest.mark.parametrize(
    "size, lengths, family",
    [
        (48, (64, 64), "portable"),
        (64, (64, 64), "hopper"),
        (32, (64, 1000), "portable"),
        (48, (64, 1000), "hopper"),
        (32, (129, 129), "hopper"),
    ],
)
def test_the_family_of_short_sequences(size: int, lengths: tuple[int, int], family: str) -> None:
    for kernel in ("forward", "backward", "grad_query"):
        assert flex.kernel_plan(case(kernel, "bfloat16", (size, size), lengths=lengths), "90a")["family"] == family


@rows_of(
    "kernel, dtype, size, aligned, family",
    [
        ("forward", "bfloat16", 24, True, "hopper"),
        ("forward", "bfloat16", 24, False, "portable"),
        ("forward", "bfloat16", 64, False, "hopper"),
        ("backward", "bfloat16", 24, True, "hopper"),
        ("backward", "float32", 64, True, "hopper"),
        ("backward", "float32", 64, False, "portable"),
        ("backward", "bfloat16", 128, False, "hopper"),
    ],
)
def test_the_family_of_biases_of_pairs(kernel: str, dtype: str, size: int, aligned: bool, family: str) -> None:
    """Where rows begin at multiples of 16 bytes, the Hopper kernels have boxes; else small heads are portable."""
    bias = torch.zeros(4, 256, 256, dtype=getattr(torch, dtype))
    mod = trace_score_mod(lambda s, b, h, q, kv: s + bias[h, q, kv])
    wants = [] if kernel == "forward" else [True]
    text = (mod.text, [dtype])
    more = {"score_mod": text, "wants_grad": wants, "elements": [bias.numel()], "aligned_boxes": aligned}
    assert flex.kernel_plan(case(kernel, "bfloat16", (size, size), **more), "90a")["family"] == family


def test_a_family_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"force_family: must be .*, but got grace"):
        flex.force_family("grace")
