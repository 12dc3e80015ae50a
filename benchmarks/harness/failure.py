"""An implementation that fails is a result like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """What a call returned, or why it raised: `failure` is None where it returned."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.failure: str | None = None
        try:
            self._values = [call()]
        except Exception as error:  # peers raise whatever they like
            self.failure = _describe(error)

    @property
    def value(self) -> T:
        return self._values[0]


def _describe(error: BaseException) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:200]}"
