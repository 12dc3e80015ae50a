"""Why a function cannot be traced, and where."""

from __future__ import annotations

import linecache
import os
from typing import Any

import jax

__all__ = ["OneByOne", "Refused", "TraceError", "located", "of_jax"]


class TraceError(ValueError):
    """A score_mod or mask_mod that cannot be traced. The message names the line of the user's function and what to
    write instead."""


class Refused(Exception):
    """Something that a traced function must not do; becomes a TraceError where its line is known."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}; {instead}")
        self.equation: Any = None


class OneByOne(Exception):
    """Elements that are single terms are asked for at an index that depends on these axes."""

    def __init__(self, axes: frozenset[int]) -> None:
        super().__init__()
        self.axes = axes


_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def of_jax(jaxpr: Any, name: str | None = None) -> bool:
    """Whether a function of JAX's own was traced to it, by the place of its source; `name`: of this name."""
    source = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    function, _, place = source.partition(" at ")
    return place.startswith(_JAX) and name in (None, function)


def located(error: BaseException, op: str, name: str) -> TraceError:
    """The error for the user of what went wrong in the function `name`."""
    message = f"{op}: {name}: {error if isinstance(error, Refused) else f'{type(error).__name__}: {error}'}"
    found = _users_line(getattr(error, "equation", None))
    if found is None:
        return TraceError(message)
    file, line = found
    return TraceError(f'{message}\n  File "{file}", line {line}\n    {linecache.getline(file, line).strip()}')


def _users_line(equation: Any) -> tuple[str, int] | None:
    """The innermost frame that is neither JAX's nor ours."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    for frame in () if traceback is None else traceback.frames:
        file = os.path.abspath(frame.file_name)
        if not file.startswith((_JAX, _OURS)) and not frame.file_name.startswith("<frozen"):
            return frame.file_name, frame.line_num
    return None
