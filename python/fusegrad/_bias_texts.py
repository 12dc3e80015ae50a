"""The texts of score_mods that add biases, mask and cut off."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fusegrad._C import score_mod as _language

__all__ = ["MASKED", "Pattern", "Read", "text_of"]

MASKED = "-1e+09"
"""The score of a masked pair where a row without keys gives the mean of the values."""

_KINDS = {"bias": _language.FLOAT, "mask": _language.BOOL, "lengths": _language.INT}


class Read(NamedTuple):
    """One tensor's read.

    Attributes:
        kind: bias, mask or lengths.
        indices: ``h``, ``q_idx``, ``kv_idx``, ``0`` of a size of 1, or of the batch a pair: the numbers of the
            scalars that it is divided by and taken modulo of, -1 for neither.
    """

    kind: str
    indices: tuple[str | tuple[int, int], ...]


class Pattern(NamedTuple):
    """All that a text depends on."""

    reads: tuple[Read, ...]
    softcap: bool
    masked: str


@functools.lru_cache(maxsize=256)
def text_of(pattern: Pattern) -> str:
    """A score_mod that adds all biases to the score, in their order, caps the sum, and masks."""
    reads, softcap, masked = pattern
    g = _language.graph("score_mod")
    batch, key = g.input("b"), g.input("kv_idx")
    numbers = [n for read in reads for i in read.indices if not isinstance(i, str) for n in i]
    scalars = [g.add_scalar(_language.INT) for _ in range(max(numbers, default=-1) + 1)]

    def index(of: str | tuple[int, int]) -> int:
        if isinstance(of, str):
            return g.constant(0) if of == "0" else g.input(of)
        divisor, modulus = of
        part = batch if divisor < 0 else g.apply("floor_div", batch, g.scalar(scalars[divisor]))
        return part if modulus < 0 else g.apply("mod", part, g.scalar(scalars[modulus]))

    loads = []
    for read in reads:
        buffer = g.add_buffer(_KINDS[read.kind], len(read.indices))
        loads.append(g.load(buffer, [index(i) for i in read.indices]))
    score = g.input("score")
    for read, load in zip(reads, loads, strict=True):
        if read.kind == "bias":
            score = g.apply("add", score, load)
    if softcap:
        cap = g.scalar(g.add_scalar(_language.FLOAT))
        score = g.apply("mul", g.apply("tanh", g.apply("div", score, cap)), cap)
    for read, load in zip(reads, loads, strict=True):
        if read.kind != "bias":
            there = load if read.kind == "mask" else g.apply("lt", key, load)
            score = g.apply("where", there, score, g.constant(float(masked)))
    return g.text(score, True).replace("\n", ";")
