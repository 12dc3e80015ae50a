"""The graph of a trace, and its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusegrad._C import score_mod as language

from .errors import Refused

__all__ = ["BOOL", "FLOAT", "INT", "Graph", "Number", "type_of_number"]

Number = int | float | bool

BOOL, INT, FLOAT = 0, 1, 2
"""The language's types in the order of their promotion."""
NAMES = ("bool", "i64", "f")
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
        self._known: dict[tuple, int] = {}

    def _insert(self, node: tuple, type_: int) -> int:
        term = self._known.get(node)
        if term is None:
            term = self._known[node] = len(self._nodes)
            self._nodes.append(node)
            self._types.append(type_)
        return term

    def type(self, term: int) -> int:
        return self._types[term]

    def input(self, name: str) -> int:
        return self._insert(("input", name), FLOAT if name == "score" else INT)

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

    def load(self, buffer: int, type_: int, indices: Sequence[int]) -> int:
        return self._insert(("load", buffer, *indices), type_)

    def apply(self, primitive: str, *operands: int) -> int:
        return self._insert((primitive, *operands), _RESULT[primitive]([self._types[x] for x in operands]))

    def cast(self, term: int, type_: int) -> int:
        return term if self._types[term] == type_ else self.apply(_CASTS[type_], term)

    def value(self, term: int) -> Number | None:
        """The number, if the term is a constant."""
        node = self._nodes[term]
        return node[2] if node[0] == "constant" else None

    def _reachable(self, result: int) -> list[int]:
        seen = {result}
        pending = [result]
        while pending:
            for term in self._operands(pending.pop()):
                if term not in seen:
                    seen.add(term)
                    pending.append(term)
        return sorted(seen)

    def _operands(self, term: int) -> tuple:
        node = self._nodes[term]
        if node[0] == "load":
            return node[2:]
        return () if node[0] in ("input", "constant", "scalar") else node[1:]

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
            else:
                operation = f"load @{node[1]}" if node[0] == "load" else node[0]
                operands = [names[x] for x in self._operands(term)]
                names[term] = f"%{statements}"
                lines.append(" ".join([f"%{statements} =", operation, *operands]))
                statements += 1
        lines.append(f"return {names[result]}\n")
        return "\n".join(lines)
