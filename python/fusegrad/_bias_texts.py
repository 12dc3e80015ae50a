"""The texts of score_mods that add biases, mask and cut off."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fusegrad._C import score_mod as _language

__all__ = ["MASKED", "Pattern", "Read", "text_of"]

MASKED = "-1e+09"
"""The score of a masked pair where a row without keys gives the mean of the values."""

_KINDS = {"bias": "f", "mask": "bool", "lengths": "i64"}


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
    lines: list[str] = []
    known: dict[str, str] = {}

    def value(instruction: str) -> str:
        if instruction not in known:
            known[instruction] = f"%{len(known)}"
            lines.append(f"{known[instruction]} = {instruction}")
        return known[instruction]

    def index(of: str | tuple[int, int]) -> str:
        if isinstance(of, str):
            return of
        divisor, modulus = of
        batch = "b" if divisor < 0 else value(f"floor_div b ${divisor}")
        return batch if modulus < 0 else value(f"mod {batch} ${modulus}")

    numbers = [n for read in reads for i in read.indices if not isinstance(i, str) for n in i]
    whole = max(numbers, default=-1) + 1
    loads = [value(" ".join(["load", f"@{i}", *map(index, read.indices)])) for i, read in enumerate(reads)]
    score = "score"
    for read, load in zip(reads, loads, strict=True):
        if read.kind == "bias":
            score = value(f"add {score} {load}")
    if softcap:
        cap = f"${whole}"
        tanh = value(f"tanh {value(f'div {score} {cap}')}")
        score = value(f"mul {tanh} {cap}")
    for read, load in zip(reads, loads, strict=True):
        if read.kind != "bias":
            there = load if read.kind == "mask" else value(f"lt kv_idx {load}")
            score = value(f"where {there} {score} {masked}")
    declared = [f"buffer @{i} {_KINDS[read.kind]} {len(read.indices)}" for i, read in enumerate(reads)]
    declared += [f"scalar ${i} i64" for i in range(whole)]
    if softcap:
        declared.append(f"scalar ${whole} f")
    text = "\n".join(["score_mod 1", *declared, *lines, f"return {score}", ""])
    return _language.canonical(text).replace("\n", ";")
