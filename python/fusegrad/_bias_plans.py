"""How biases, masks and lengths that broadcast to the scores become a score_mod's text and what it reads.

Leading dimensions ``[*]`` are the batch of the op, one after the other. A tensor that has some of them and not others,
as triangle attention's ``[B, 1, H, Q, K]``, is read by a part of the batch's index, ``b // N``: nothing is expanded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._bias_texts import Pattern, Read, text_of

__all__ = ["Plan", "plan"]

_ROLES = ("h", "q_idx", "kv_idx")


class Plan(NamedTuple):
    """Attributes:
    text: of a score_mod.
    shapes: how the text sees each tensor: as it is, or with leading dimensions in one.
    ints: its whole numbers.
    """

    text: str
    shapes: tuple[tuple[int, ...], ...]
    ints: tuple[int, ...]


def _plan(sizes: tuple[int, ...], tensors: tuple[tuple[str, tuple[int, ...]], ...], softcap: bool, masked: str) -> Plan:
    """For scores of shape `sizes`, ``[*, H, Q, K]``, and tensors of these kinds and shapes, which broadcast to it."""
    ints: dict[tuple[int, int], int] = {}  # which leading dimensions a scalar is the product of, and its value
    reads: list[Read] = []
    shapes: list[tuple[int, ...]] = []
    for kind, shape in tensors:
        read, seen = _read(sizes, kind, shape, ints)
        reads.append(read)
        shapes.append(seen)
    pattern = Pattern(tuple(reads), softcap, masked)
    if torch.compiler.is_compiling():
        from ._attention_compiled import bias_text_within

        text = bias_text_within(pattern.reads, softcap, masked)
    else:
        text = text_of(pattern)
    return Plan(text, tuple(shapes), tuple(ints.values()))


_kept_plan = functools.lru_cache(maxsize=1024)(_plan)


def plan(sizes: tuple[int, ...], tensors: tuple[tuple[str, tuple[int, ...]], ...], softcap: bool, masked: str) -> Plan:
    if torch.compiler.is_compiling():  # sizes may be symbols
        return _plan(sizes, tensors, softcap, masked)
    return _kept_plan(sizes, tensors, softcap, masked)


def _read(
    sizes: tuple[int, ...], kind: str, shape: tuple[int, ...], ints: dict[tuple[int, int], int]
) -> tuple[Read, tuple[int, ...]]:
    leading = len(sizes) - 3
    missing = len(sizes) - len(shape)
    there = [i for i in range(leading) if sizes[i] != 1]
    # Runs of leading dimensions that the tensor has; those of size 1 belong to any.
    runs: list[list[int]] = []
    for place, i in enumerate(there):
        if i < missing or shape[i - missing] == 1:
            continue
        if place and runs and runs[-1][-1] == there[place - 1]:
            runs[-1].append(i)
        else:
            runs.append([i])

    def number(first: int, last: int) -> int:
        """The scalar that is the size of these leading dimensions together."""
        if (first, last) not in ints:
            ints[first, last] = _product(sizes[first:last])
        return list(ints).index((first, last))

    def batch(run: list[int]) -> tuple[int, int]:
        after = [i for i in there if i > run[-1]]
        before = [i for i in there if i < run[0]]
        return number(after[0], leading) if after else -1, number(run[0], run[-1] + 1) if before else -1

    indices: list[str | tuple[int, int]] = []
    if all(len(run) == 1 for run in runs):
        # Read as it is: a view of it would be another node of autograd's graph.
        of_run = {run[0]: batch(run) for run in runs}
        for i, n in enumerate(shape, missing):
            indices.append("0" if n == 1 else of_run[i] if i < leading else _ROLES[i - leading])
        return Read(kind, tuple(indices)), tuple(shape)
    seen: list[int] = []
    for run in runs:
        indices.append(batch(run))
        seen.append(_product([sizes[i] for i in run]))
    for i, role in enumerate(_ROLES, leading):
        if i >= missing and shape[i - missing] != 1:
            indices.append(role)
            seen.append(shape[i - missing])
    return Read(kind, tuple(indices)), tuple(seen)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for n in sizes:
        product = product * n
    return product
