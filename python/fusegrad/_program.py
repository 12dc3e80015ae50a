"""A text of the score_mod language, as the front ends' evaluators walk over it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusegrad._C import score_mod as _language

__all__ = ["LEAVES", "PLACES", "Node", "Program", "program"]

PLACES = ("b", "h", "q_idx", "kv_idx")
LEAVES = ("constant", "input", "scalar", "upstream")


class Node(NamedTuple):
    """As the language's Graph gives it. `of`: its number, input, declaration, extent or key."""

    op: str
    type: int
    of: Any
    operands: list[int]


@dataclass(frozen=True)
class Program:
    """The graph of a text. `scalars`: their types; `axes`: the nodes that are axes; `upstream`: those that depend on
    the upstream gradient of a value with a derivative of its own."""

    nodes: tuple[Node, ...]
    buffers: int
    scalars: tuple[int, ...]
    result: int
    axes: tuple[int, ...]
    upstream: frozenset[int]
    most: int  # elements of one value for each pair of a query and a key


@functools.lru_cache(maxsize=512)
def program(text: str) -> Program:
    graph = _language.parse(text)
    nodes = tuple(Node(*x) for x in graph.nodes())
    places = range(len(nodes))
    return Program(
        nodes,
        buffers=len(graph.buffers()),
        scalars=tuple(graph.scalars()),
        result=graph.result(),
        axes=tuple(i for i in places if nodes[i].op == "axis"),
        upstream=frozenset(i for i in places if graph.on_upstream(i)),
        most=max(math.prod(nodes[axis].of for axis in graph.open_axes(i)) for i in places),
    )
