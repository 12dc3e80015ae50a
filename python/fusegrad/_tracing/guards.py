"""The check that a call's surroundings are those of a trace, as a function of Python that is written for the trace: it
walks known paths without a search, in microseconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._load import direct
from .._transforms import differentiated
from .code import Untrusted
from .lifted import Number
from .trust import MISSING, lookup

__all__ = ["Guard", "GuardSource"]

Guard = Callable[[Any], "tuple[list[Tensor], list[Number]] | None"]
"""For the function, which the source calls root: the captured tensors and numbers, None where it is not what it was."""

_MAX_NODES = 1000


def _facts(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.dtype, x.shape, x.stride(), x.requires_grad, x.device, differentiated(x)


class GuardSource:
    """It consists of what captures.py writes: names and values of the user's are constants."""

    def __init__(self) -> None:
        self._lines: list[tuple[bool, str]] = []  # whether it is a condition, and what it is
        self._scope: dict[str, Any] = {
            "lookup": lookup,
            "missing": MISSING,
            "same": direct.same_tensor,
            "facts": _facts,
        }
        self._variables = 0

    def constant(self, value: Any) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name

    def variable(self, expression: str) -> str:
        self._variables += 1
        if self._variables > _MAX_NODES:
            raise Untrusted(f"it can reach more than {_MAX_NODES} objects")
        self._lines.append((False, f"v{self._variables} = {expression}"))
        return f"v{self._variables}"

    def need(self, condition: str) -> None:
        self._lines.append((True, f"({condition})"))

    def need_keys(self, expression: str, keys: list[str]) -> None:
        """Keys that the value of `expression`, a dict or None, must have."""
        self.need(f"list({expression} or ()) == {self.constant(keys)}" if keys else f"not {expression}")

    def need_tensor(self, name: str, tensor: Tensor) -> None:
        """One call where it is a plain one, as nearly all are, which asks for no less than the other."""
        plain = self.constant(direct.tensor_facts(tensor))
        self.need(f"same({name}, {plain}) or facts({name}) == {self.constant(_facts(tensor))}")

    def compiled(self, more: Sequence[str], tensors: Sequence[str], numbers: Sequence[str]) -> Guard:
        """With more conditions, and what is returned."""
        source = "def guard(root):\n"
        lines = [*self._lines, *((True, condition) for condition in more)]
        for is_condition, group in itertools.groupby(lines, key=lambda line: line[0]):
            texts = [text for _, text in group]
            if is_condition:
                texts = [f"if not ({' and '.join(texts)}): return None"]
            source += "".join(f"    {text}\n" for text in texts)
        source += f"    return [{', '.join(tensors)}], [{', '.join(numbers)}]\n"
        scope = dict(self._scope)
        exec(source, scope)
        return scope.pop("guard")  # whose globals must not hold it: a cycle
