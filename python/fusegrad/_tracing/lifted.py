"""Python numbers of a function's surroundings, which may be others at the next call.

The language calls them scalars. What the function computes from them alone stays Python arithmetic: it is recorded and
done again, by Python, at each call. Where Python needs the number itself (a branch, a range, math.sqrt), its path is
noted as wanted: the trace is started again with the number as a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .names import words

__all__ = ["Expression", "Lifted", "Number", "NumberWanted", "evaluate"]

Number = int | float | bool

Expression = tuple
"""("path", k), ("number", repr, value) or (function, expression, …). Equal expressions are the same number: 0.0 and
-0.0 differ by their repr."""


class NumberWanted(BaseException):
    """No Exception: a function that catches those must not swallow it."""


def evaluate(expression: Expression, numbers: Sequence[Number]) -> Any:
    head = expression[0]
    if head == "path":
        return numbers[expression[1]]
    if head == "number":
        return expression[2]
    return head(*[evaluate(x, numbers) for x in expression[1:]])


class Lifted:
    """A number with what it was computed from. No subclass of int or float: C code would read those unseen."""

    __slots__ = ("expression", "value", "wanted")

    def __init__(self, value: Number, expression: Expression, wanted: set[int]) -> None:
        self.value, self.expression, self.wanted = value, expression, wanted

    def paths(self) -> set[int]:
        return _paths(self.expression)

    def give_up(self) -> NumberWanted:
        self.wanted |= self.paths()
        return NumberWanted()

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in args:
            if isinstance(x, Lifted):
                raise x.give_up()
        return NotImplemented


def _paths(expression: Expression) -> set[int]:
    if expression[0] == "path":
        return {expression[1]}
    if expression[0] == "number":
        return set()
    return set().union(*map(_paths, expression[1:]))


def _expression(x: Number | Lifted) -> Expression:
    return x.expression if isinstance(x, Lifted) else ("number", repr(x), x)


def _computed(function: Callable, *operands: Any) -> Any:
    if not all(isinstance(x, (int, float, Lifted)) for x in operands):
        return NotImplemented
    value = function(*(x.value if isinstance(x, Lifted) else x for x in operands))
    wanted = next(x.wanted for x in operands if isinstance(x, Lifted))
    if not isinstance(value, (int, float)):  # complex: a root of a negative number
        raise next(x for x in operands if isinstance(x, Lifted)).give_up()
    return Lifted(value, (function, *map(_expression, operands)), wanted)


def _forward(function: Callable) -> Callable:
    return lambda self, other: _computed(function, self, other)


def _backward(function: Callable) -> Callable:
    return lambda self, other: _computed(function, other, self)


def _unary(function: Callable) -> Callable:
    return lambda self: _computed(function, self)


def _compared(function: Callable) -> Callable:
    def compare(self: Lifted, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        raise self.give_up()

    return compare


def _wanting(self: Lifted, *args: Any, **kwargs: Any) -> Any:
    raise self.give_up()


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _dunder = _name.rstrip("_")
    setattr(Lifted, f"__{_dunder}__", _forward(getattr(operator, _name)))
    setattr(Lifted, f"__r{_dunder}__", _backward(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Lifted, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Lifted, f"__{_name}__", _compared(getattr(operator, _name)))
for _name in words(
    "bool int float index complex round trunc floor ceil hash str repr format divmod rdivmod getattr reduce_ex"
):
    setattr(Lifted, f"__{_name}__", _wanting)
