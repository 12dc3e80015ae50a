"""Why a function cannot be traced, and where."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["OneByOne", "Refused", "TraceError", "located", "of_jax", "refused"]


class TraceError(ValueError):
    """A score_mod or mask_mod that cannot be traced. The message names the line of the user's function and what to
    write instead."""


class Refused(Exception):
    """Something that a traced function must not do; becomes a TraceError where its line is known."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}; {instead}")
        self.equation: Any = None


def refused(equation: Any, what: str, instead: str) -> Refused:
    """The error of an equation, whose primitive `what`."""
    error = Refused(f"the primitive {equation.primitive.name}, which {what}", instead)
    error.equation = equation
    return error


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


def located(error: BaseException, op: str, name: str, message: str | None = None) -> TraceError:
    """The error for the user of what went wrong in the function `name`."""
    if message is None:
        message = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    message = f"{op}: {name}: {message}"
    found = _users_line(_frames(error))
    if found is None:
        return TraceError(message)
    file, line = found
    return TraceError(f'{message}\n  File "{file}", line {line}\n    {linecache.getline(file, line).strip()}')


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    """Files and lines, the innermost first: of the equation that was at work, or of the function itself."""
    equation = getattr(error, "equation", None)
    if equation is not None:
        traced = equation.source_info.traceback
        return ((frame.file_name, frame.line_num) for frame in (traced.frames if traced is not None else ()))
    return reversed([(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)])


def _users_line(frames: Iterator[tuple[str, int]]) -> tuple[str, int] | None:
    """The first that is neither JAX's nor ours."""
    for file, line in frames:
        if not os.path.abspath(file).startswith((_JAX, _OURS)) and not file.startswith("<frozen"):
            return file, line
    return None
