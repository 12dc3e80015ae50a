"""Why a function cannot be traced, and where."""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterator
from types import CodeType, TracebackType

import torch

__all__ = ["Refused", "RefusedWrite", "TraceError", "located", "out_of_memory", "unknown", "within"]


class TraceError(ValueError):
    """A score_mod or mask_mod that cannot be traced. The message names the line of the user's function and what to
    write instead."""


class Refused(Exception):
    """Something that a traced function must not do; becomes a TraceError where its line is known."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what}; {instead}")
        self.what, self.instead = what, instead


class RefusedWrite(Refused):
    """A write, maybe not the function's own but one within PyTorch's operation that it called."""


def unknown(name: str) -> Refused:
    return Refused(
        f"the operation {name}, which score_mods do not have",
        "write it with the functions that docs/design/score_mod.md lists",
    )


@contextlib.contextmanager
def within(what: str) -> Iterator[None]:
    """Names in the error's message what was at work, the innermost."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "within", None):
            error.within = what  # type: ignore[attr-defined]
        raise


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


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: not the function's fault, so it is no TraceError but the error that handlers expect."""
    # PyTorch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _applied_function(trace: TracebackType | None) -> str | None:
    """The innermost autograd.Function whose forward was at work."""
    name = None
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "forward":
            name = next((f"the autograd.Function {c.__qualname__}" for c in _functions() if _is(c, frame.f_code)), name)
    return name


def _functions() -> Iterator[type]:
    """All Functions that are defined: PyTorch's apply does not have a frame of its own in every version."""
    found = [torch.autograd.Function]
    for function in found:
        found += function.__subclasses__()
        yield function


def _is(function: type, code: CodeType) -> bool:
    """Whether the code is of the Function's own forward."""
    forward = vars(function).get("forward")
    return getattr(getattr(forward, "__func__", forward), "__code__", None) is code


def located(error: BaseException, name: str) -> TraceError:
    """The error for the user of what went wrong in the function `name`."""
    message = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    inner = getattr(error, "within", None) or _applied_function(error.__traceback__)
    if inner:
        message = f"in {inner}: {message}"
    found = _users_line(error.__traceback__)
    if found is None:
        return TraceError(f"{name}: {message}")
    file, line, source = found
    return TraceError(f'{name}: {message}\n  File "{file}", line {line}\n    {source}')
