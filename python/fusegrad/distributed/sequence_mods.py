"""Mods that see positions of the whole problem from a part of it: their texts, moved by scalars.

Which process and which range of positions a call is about are numbers, so that all of them run the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from fusegrad._C import score_mod as _language

from .._program import PLACES
from ..score_mod import ScoreMod, split_scalars

__all__ = ["MovedMod"]


# Reads of buffer (first) at dimension (second) by exactly this input (third), to be made at an index of the part.
Local = tuple[int, int, str]


class MovedMod:
    """A mod whose inputs are those of a part.

    Args:
        mod: the traced one; None for none.
        moved: which of b, h, q_idx and kv_idx start somewhere else than at 0.
        local: reads of sharded buffers that are in this process: see Local. Only of b, h and q_idx.
    """

    def __init__(self, mod: ScoreMod | None, moved: tuple[str, ...], local: tuple[Local, ...] = ()) -> None:
        self.mod = mod
        self.text = ""
        self.buffers: list[Tensor] = []
        self.kept: tuple[int, ...] = ()  # which of the mod's buffers the text reads
        self._scalars: list[Any] = []
        if mod is None:
            return
        text, self.kept, self._order = _moved_text(mod.text, moved, local)
        self.text = text.replace("\n", ";")  # one line, as the ops want it
        self._moved = moved
        self._scalars = list(mod.scalars)
        self.buffers = [mod.buffers[i] for i in self.kept]

    def arguments(self, starts: Starts, buffers: list[Tensor]) -> tuple[str, list[Tensor], list[float], list[int]]:
        """What an op takes for a part that starts there: text, buffers, floats and whole numbers."""
        if self.mod is None:
            return "", [], [], []
        return self.text, buffers, *split_scalars(self._scalars_at(starts))

    def traced(self, starts: Starts) -> ScoreMod:
        """The same as a mod of its own."""
        return ScoreMod(self.text, self.buffers, self._scalars_at(starts))

    def _scalars_at(self, starts: Starts) -> list[Any]:
        scalars = [*self._scalars, *(starts.of[name] for name in self._moved), starts.row]
        return [scalars[i] for i in self._order]


@dataclass(frozen=True)
class Starts:
    """Where a part lies: of each input, the position of its first; and the first query among those of the process."""

    of: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    row: int = 0

    def at(self, query: int, key: int, row: int) -> Starts:
        return Starts({**self.of, "q_idx": query, "kv_idx": key}, row)


@lru_cache(maxsize=512)
def _moved_text(
    text: str, moved: tuple[str, ...], local: tuple[Local, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The text, and which buffers and scalars it declares: those of `text`, then a scalar for each of `moved`, then the
    first query's row among those of the process."""
    given = _language.parse(text)
    g = _language.graph(given.kind())
    for buffer in given.buffers():
        g.add_buffer(*buffer)
    for type_ in given.scalars():
        g.add_scalar(type_)

    def from_start(name: str) -> int:
        # An index has this bound, and so has what is added to it. Kernels know by it that a sum is not negative, which
        # would count from a tensor's end, and that it has 32 bits.
        start = g.apply("clamp", g.scalar(g.add_scalar(_language.INT)), g.constant(0), g.constant(_language.MAX_LENGTH))
        return g.apply("add", g.input(name), start)

    image_of = {name: from_start(name) for name in moved}
    row = from_start("q_idx")
    kept = {(buffer, dim): row if name == "q_idx" else g.input(name) for buffer, dim, name in local}
    made: list[int] = []
    for i, (op, _, of, operands) in enumerate(given.nodes()):
        images = [made[x] for x in operands]
        if op == "load":
            images = [kept.get((of, dim), image) for dim, image in enumerate(images)]
        made.append(image_of[of] if op == "input" and of in image_of else g.copy(given, i, images))
    compacted, buffers, scalars = g.compact(made[given.result()])
    return compacted, tuple(buffers), tuple(scalars)


def local_reads(text: str, buffer: int, dim: int) -> str | None:
    """The input by which every read of a buffer indexes its dimension, if it is one of them as it is."""
    nodes = _language.parse(text).nodes()
    found = {nodes[operands[dim]][:3:2] for op, _, of, operands in nodes if op == "load" and of == buffer}
    (index,) = found if len(found) == 1 else (("", ""),)
    return index[1] if index[0] == "input" else None
