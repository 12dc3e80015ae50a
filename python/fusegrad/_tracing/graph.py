"""The graph of a trace, and its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from fusegrad._C import score_mod as language

from .errors import Refused

__all__ = ["BOOL", "FLOAT", "INT", "Graph", "Number", "type_of_number"]

Number = int | float | bool

BOOL, INT, FLOAT = 0, 1, 2
"""The language's types in the order of their promotion."""
NAMES = ("bool", "i64", "f")
MAX_TERMS = 1 << 17
"""Of a trace, those that the result does not need included: without a bound it goes on for as long as a loop does."""
INT64 = (-(2**63), 2**63 - 1)

# The type of a primitive's result by its rule, csrc/score_mod/primitives.h; the order of `enum class Rule`.
_RULES: tuple[Callable[[list[int]], int], ...] = (
    lambda x: max(INT, *x),  # Numeric
    lambda x: FLOAT,  # Float
    lambda x: BOOL,  # Compare
    lambda x: max(x),  # Bitwise
    lambda x: INT,  # Integer
    lambda x: max(x[1], x[2]),  # Where
    lambda x: FLOAT,  # ToFloat
    lambda x: INT,  # ToInt
    lambda x: BOOL,  # ToBool
)
_RESULT = {name: _RULES[rule] for name, _, rule in language.primitives()}
_CASTS = ("to_bool", "to_int", "to_float")
_REDUCTIONS = ("sum", "amax", "amin", "prod")
_NONE: frozenset[int] = frozenset()
_OWN_OVER_AXES = (
    "a derivative of one's own (an autograd.Function or a custom op) over a vector of more than 2 elements",
    "apply it to single values",
)


def type_of_number(value: Number) -> int:
    """The language's type of a Python number."""
    return BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT


def _literal(value: Number) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


class Graph:
    """Operations on scalars, each once: a term is its index. Operands come before their users."""

    def __init__(self) -> None:
        self._nodes: list[tuple] = []
        self._types: list[int] = []
        self._active: list[bool] = []
        self._on_score: list[bool] = []
        self._on_upstream: list[bool] = []
        self._known: dict[tuple, int] = {}
        self._pairs: list[list[int]] = []  # of each backward
        self._stripped: dict[int, int] = {}
        self.upstreams = 0
        self._open: list[frozenset[int]] = []  # of each term the axes that it depends on
        self._bound = 0

    def _insert(self, node: tuple, type_: int, active: bool = False) -> int:
        term = self._known.get(node)
        if term is None:
            term = self._known[node] = len(self._nodes)
            if term == MAX_TERMS:
                raise Refused(f"more than {MAX_TERMS} operations", "a score_mod has at most 4096")
            self._nodes.append(node)
            self._types.append(type_)
            self._active.append(active)
            self._on_score.append(node[0] == "input" and node[1] == "score")
            if active:
                self._on_score[-1] = self._on_score[-1] or any(self._on_score[x] for x in self._operands(term))
            apart = node[0] in ("custom", "backward")
            on_upstream = node[0] == "upstream" or any(self._on_upstream[x] for x in self._operands(term))
            self._on_upstream.append(on_upstream and not apart)
            open_: frozenset[int] = frozenset([term]) if node[0] == "axis" else _NONE
            for x in self._operands(term):
                open_ = open_ | self._open[x] if self._open[x] else open_
            self._open.append(open_ - {node[1]} if node[0] in _REDUCTIONS else open_)
        return term

    def type(self, term: int) -> int:
        return self._types[term]

    def active(self, term: int) -> bool:
        """Whether a gradient flows through the term: from the score, or a tensor that requires grad."""
        return self._active[term]

    def on_score(self, term: int) -> bool:
        """Whether a gradient flows through the term to the score."""
        return self._on_score[term]

    def on_upstream(self, term: int) -> bool:
        """Whether it is computed from the gradient that a backward gets."""
        return self._on_upstream[term]

    def input(self, name: str) -> int:
        return self._insert(("input", name), FLOAT if name == "score" else INT, name == "score")

    def constant(self, value: Number) -> int:
        if isinstance(value, float):
            value = float(value)  # of a subclass, such as NumPy's
        elif not isinstance(value, bool):
            value = int(value)
            if not INT64[0] <= value <= INT64[1]:
                raise Refused(f"an integer of more than 64 bits, {value}", "use a float")
        # The literal tells 0.0 from -0.0 and True from 1, which are equal as keys.
        return self._insert(("constant", _literal(value), value), type_of_number(value))

    def scalar(self, index: int, value: Number) -> int:
        """A number that is known when the op is called; `value` is what it is now."""
        return self._insert(("scalar", index, _literal(value)), type_of_number(value))

    def load(self, buffer: int, type_: int, indices: Sequence[int], active: bool = False) -> int:
        return self._insert(("load", buffer, *indices), type_, active)

    def apply(self, primitive: str, *operands: int) -> int:
        type_ = _RESULT[primitive]([self._types[x] for x in operands])
        active = type_ == FLOAT and primitive != "detach" and any(self._active[x] for x in operands)
        return self._insert((primitive, *operands), type_, active)

    # --- values with a derivative of their own ---

    def upstream(self) -> int:
        """A new one: the gradient by the result of the custom that gets it."""
        self.upstreams += 1
        return self._insert(("upstream", self.upstreams - 1), FLOAT, True)

    def backward(self) -> int:
        """A new one, without pairs."""
        self._pairs.append([])
        return self._insert(("backward", len(self._pairs) - 1), FLOAT)

    def add_pair(self, backward: int, x: int, gradient: int) -> None:
        if self._open[x] or self._open[gradient]:
            raise Refused(*_OWN_OVER_AXES)
        self._pairs[self._nodes[backward][1]] += [x, self.cast(gradient, FLOAT)]

    def custom(self, upstream: int, value: int, backward: int) -> int:
        value = self.stripped(self.cast(value, FLOAT), self._stripped)
        return self._insert(("custom", self._nodes[upstream][1], value, backward), FLOAT, True)

    def value_of(self, custom: int) -> int:
        return self._nodes[custom][2]

    def stripped(self, term: int, images: dict[int, int]) -> int:
        """The value alone, without derivatives of its own and detachments, but for the terms that have an image; the
        others get theirs."""
        return self._rebuilt(term, images, True)

    def replaced(self, term: int, images: dict[int, int]) -> int:
        """The term with others in place of some."""
        return self._rebuilt(term, dict(images), False)

    def _rebuilt(self, term: int, images: dict[int, int], strip: bool) -> int:
        for x in [] if term in images else self._reachable(term, images):
            node = self._nodes[x]
            if strip and node[0] in ("custom", "detach"):
                images[x] = images[node[2 if node[0] == "custom" else 1]]
            elif node[0] == "load":
                indices = [images[i] for i in node[2:]]
                images[x] = self.load(node[1], self._types[x], indices, self._active[x])
            elif node[0] in _REDUCTIONS:
                images[x] = self._insert((node[0], node[1], images[node[2]]), self._types[x], self._active[x])
            elif node[0] in ("custom", "backward") or not self._operands(x):
                images[x] = x
            else:
                images[x] = self.apply(node[0], *(images[i] for i in node[1:]))
        return images[term]

    def axis(self, extent: int, place: int) -> int:
        """A variable from 0 to `extent`, without that; the same for the same place."""
        return self._insert(("axis", extent, place), INT)

    def reduce(self, reduction: str, axis: int, term: int) -> int:
        """The sum, amax, amin or prod of a term over all values of an axis, which becomes an axis of the reduction."""
        self._bound -= 1
        own = self.axis(self._nodes[axis][1], self._bound)
        term = self.cast(term, max(INT, self._types[term]))
        return self._insert((reduction, own, self.substitute(term, {axis: own})), self._types[term], self._active[term])

    def substitute(self, term: int, images: dict[int, int]) -> int:
        """The term with other terms in place of axes."""
        images = {axis: image for axis, image in images.items() if axis != image}
        if not self._open[term].intersection(images):
            return term
        done = dict(images)
        pending = [term]
        while pending:
            x = pending[-1]
            if x in done:
                pending.pop()
            elif not self._open[x].intersection(images):
                done[x] = x
            elif missing := [y for y in self._operands(x) if y not in done]:
                pending += missing
            else:
                node, new = self._nodes[x], tuple(done[y] for y in self._operands(x))
                if node[0] in ("custom", "backward"):
                    raise Refused(*_OWN_OVER_AXES)
                node = (*node[:2], *new) if node[0] == "load" else (node[0], *new)
                done[x] = self._insert(node, self._types[x], self._active[x])
        return done[term]

    def cast(self, term: int, type_: int) -> int:
        return term if self._types[term] == type_ else self.apply(_CASTS[type_], term)

    def node(self, term: int) -> tuple:
        """Its operation and what that is of, mostly terms."""
        return self._nodes[term]

    def value(self, term: int) -> Number | None:
        """The number, if the term is a constant."""
        node = self._nodes[term]
        return node[2] if node[0] == "constant" else None

    def read_of(self, term: int) -> tuple[int, tuple[int, ...]] | None:
        """The buffer and the indices, if the term is a read."""
        node = self._nodes[term]
        return (node[1], node[2:]) if node[0] == "load" else None

    def _reachable(self, result: int, known: Container[int] = ()) -> list[int]:
        """Operands first; nothing below what is `known`."""
        order: list[int] = []
        seen = {result}
        stack = [(result, iter(self._operands(result)))]
        while stack:
            term, operands = stack[-1]
            for x in operands:
                if x not in seen and x not in known:
                    seen.add(x)
                    stack.append((x, iter(self._operands(x))))
                    break
            else:
                order.append(term)
                stack.pop()
        return order

    def size(self, result: int) -> int:
        """How many operations, inputs and constants the result needs."""
        return len(self._reachable(result))

    def _operands(self, term: int) -> Sequence[int]:
        node = self._nodes[term]
        if node[0] in ("load", "custom"):
            return node[2:]
        if node[0] == "backward":
            return self._pairs[node[1]]
        return () if node[0] in ("input", "constant", "scalar", "upstream", "axis") else node[1:]

    def text(
        self, kind: str, result: int, buffers: Sequence[tuple[int, int]], scalars: Sequence[int], fixed: bool = False
    ) -> str:
        """The text, not yet canonical. `buffers` has the type and the rank of each, `scalars` the types. With `fixed`
        the scalars are written as the numbers that they are now, and not declared."""
        lines = [f"{kind} 1"]
        lines += [f"buffer @{i} {NAMES[type_]} {rank}" for i, (type_, rank) in enumerate(buffers)]
        if not fixed:
            lines += [f"scalar ${i} {NAMES[type_]}" for i, type_ in enumerate(scalars)]
        names: dict[int, str] = {}
        statements = 0
        for term in self._reachable(result):
            node = self._nodes[term]
            if node[0] in ("input", "constant"):
                names[term] = node[1]
            elif node[0] == "scalar":
                names[term] = node[2] if fixed else f"${node[1]}"
            elif node[0] == "upstream":
                names[term] = f"^{node[1]}"
            else:
                signs = {"load": f"load @{node[1]}", "custom": f"custom ^{node[1]}", "axis": f"axis {node[1]}"}
                operation = signs.get(node[0], node[0])
                operands = [names[x] for x in self._operands(term)]
                names[term] = f"%{statements}"
                lines.append(" ".join([f"%{statements} =", operation, *operands]))
                statements += 1
        lines.append(f"return {names[result]}\n")
        return "\n".join(lines)
