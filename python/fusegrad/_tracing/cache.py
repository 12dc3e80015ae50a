"""The cache of traces: keyed by the function's code, with a guard over everything that the function can reach."""

from __future__ import annotations

import logging
import os
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._eager import eager_only
from .captures import Captures
from .code import Untrusted
from .errors import TraceError, out_of_memory
from .lifted import NumberWanted
from .replay import Entry, Traced
from .run import Run, name_of, run, run_as_called
from .thread_state import restoring, tracing_state

__all__ = ["cache_info", "clear", "trace"]

log = logging.getLogger("fusegrad")

_MAX_FUNCTIONS, _MAX_ENTRIES = 256, 32


def _kind(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _with_lifted_numbers(
    function: Callable, kind: str, device: torch.device, captures: Captures, plain: Run
) -> tuple[Run, set[int]]:
    """Traced again with the numbers of its surroundings as scalars. That run counts only if it says the same as the
    plain one for the numbers as they are; otherwise they are part of the text."""
    lifted = set(captures.liftable) if captures.can_lift else set()
    while lifted:
        wanted: set[int] = set()
        try:
            result = run(function, kind, device, captures.copy(lifted, wanted))
        except NumberWanted:
            pass
        except (TraceError, Untrusted):
            if not wanted:
                break
        else:
            if not wanted:
                same = result.fixed_text == plain.text
                same = same and [_kind(b) for b in result.buffers] == [_kind(b) for b in plain.buffers]
                return (result, lifted) if same else (plain, set())
        if not wanted:
            break
        lifted -= wanted
    return plain, set()


class _Kept:
    """The facts and traces of one code object. It keeps the code alive, so that its id stays unique."""

    def __init__(self, code: Any) -> None:
        self.code = code
        self.entries: tuple[Entry, ...] = ()


_lock = threading.Lock()


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
_kept: OrderedDict[tuple, _Kept] = OrderedDict()
_counts = {"hits": 0, "misses": 0, "untrusted": 0}


def _code_of(function: Any) -> Any:
    while True:
        if isinstance(function, types.FunctionType):
            return function.__code__
        if isinstance(function, types.MethodType):
            function = function.__func__
        elif type(function).__name__ == "partial" and hasattr(function, "func"):
            function = function.func
        else:
            return type(function)


def _device_of(captures: Captures | None) -> torch.device:
    devices = [t.device for t in captures.tensors] if captures is not None else []
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def trace(function: Callable, kind: str, device: torch.device | None) -> Traced:
    """The function's trace, from the cache where it still holds.

    Within torch.jit.trace the function runs unseen by the recorder, whose graph would hold traced tensors as constants
    (they have no memory: it crashes where it reads one). Only the steps that the buffers need are done again before its
    eyes."""
    recorder = torch._C._get_tracing_state()
    if recorder is None:
        return _trace(function, kind, device, None)
    with tracing_state(None):
        return _trace(function, kind, device, recorder)


def _trace(function: Callable, kind: str, device: torch.device | None, recorder: Any) -> Traced:
    code = _code_of(function)
    key = (id(code), kind, device)
    kept = _kept.get(key)
    if kept is not None:
        for entry in kept.entries:
            found = entry.match(function, recorder)
            if found is not None:
                _counts["hits"] += 1
                return found
    try:
        return _trace_anew(function, kind, device, code, key, recorder)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(f"flex_attention: {kind} {name_of(function)}: {error}") from error


@eager_only  # the compiler meets it between two graphs, and cannot follow how it leaves transforms
@restoring
def _trace_anew(
    function: Callable, kind: str, device: torch.device | None, code: Any, key: tuple, recorder: Any
) -> Traced:
    _counts["misses"] += 1
    captures, untrusted = None, ""
    try:
        captures = Captures(function)  # first: what the function changes as it runs is another call's surroundings
    except Untrusted as reason:
        untrusted = str(reason)  # the exception itself would hold this frame, and this it: a cycle with all callers
    device = device or _device_of(captures)
    plain = run_as_called(function, kind, device)
    try:
        if kind == "score_mod" and not plain.differentiable:
            raise Untrusted("it is another function, or has no derivative, where gradients are not recorded")
        if captures is None:
            raise Untrusted(untrusted)
        result, lifted = _with_lifted_numbers(function, kind, device, captures, plain)
        entry = Entry(captures, result, lifted)
        traced: Traced | None = result.text, tuple(result.buffers), tuple(s.value for s in result.scalars)
        if recorder is not None:
            traced = entry.match(function, recorder)
        if traced is None:
            raise Untrusted("it gives something else each time it runs")
    except Untrusted as reason:
        if recorder is not None:
            raise TraceError(
                f"{kind} {name_of(function)}: it cannot be run again within torch.jit.trace ({reason}); hand in "
                f"fusegrad.trace_{kind}(function), made outside of it"
            ) from reason
        _counts["untrusted"] += 1
        log.debug("%s %s is traced at each call: %s", kind, name_of(function), reason)
        return plain.text, tuple(plain.buffers), ()
    with _lock:
        kept = _kept.setdefault(key, _Kept(code))
        kept.entries = (entry, *kept.entries[: _MAX_ENTRIES - 1])
        _kept.move_to_end(key)
        while len(_kept) > _MAX_FUNCTIONS:
            _kept.popitem(last=False)
    return traced


def cache_info() -> dict[str, int]:
    return {**_counts, "entries": sum(len(k.entries) for k in list(_kept.values()))}


def clear() -> None:
    with _lock:
        _kept.clear()
        for name in _counts:
            _counts[name] = 0
