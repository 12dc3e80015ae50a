"""Why a function cannot be traced, and where."""

from __future__ import annotations

import linecache
import os
import traceback
from types import TracebackType

import torch

__all__ = ["Refused", "TraceError", "located"]


class TraceError(ValueError):
    """A score_mod or mask_mod that cannot be traced. The message names the line of the user's function and what to
    write instead."""


class Refused(Exception):
    """Something that a traced function must not do; becomes a TraceError where its line is known."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}; {instead}")


_OURS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(os.path.abspath(__file__)), torch.__file__))


def _users_line(trace: TracebackType | None) -> tuple[str, int, str] | None:
    """File, line and source of the innermost frame that is neither PyTorch's nor the tracer's."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if not os.path.abspath(frame.f_code.co_filename).startswith(_OURS)
        and not frame.f_code.co_filename.startswith("<frozen")
    ]
    if not frames:
        return None
    file, line = frames[-1]
    return file, line, linecache.getline(file, line).strip()


def located(error: BaseException, name: str) -> TraceError:
    """The error for the user of what went wrong in the function `name`."""
    message = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    found = _users_line(error.__traceback__)
    if found is None:
        return TraceError(f"{name}: {message}")
    file, line, source = found
    return TraceError(f'{name}: {message}\n  File "{file}", line {line}\n    {source}')
