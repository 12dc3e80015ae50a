"""What tracing changes in its thread, put back where an interrupt kept a context manager from it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from .._eager import eager_only

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]


class ThreadState:
    """PyTorch's state of this thread: torch functions, modes, grad mode, excluded dispatch keys (autocast).

    CPython may deliver an interrupt or a MemoryError between a context manager's ``__enter__`` and the block that
    would call its ``__exit__``, or as the block is left. What stays behind is silent: without torch functions no tensor
    subclass works any more in the whole process.
    """

    def __init__(self) -> None:
        self.torch_functions = torch._C._get_torch_function_state()
        self.function_modes = _get_current_function_mode_stack()
        self.dispatch_modes = _get_current_dispatch_mode_stack()
        self.grad = torch.is_grad_enabled()
        self.excluded_keys = torch._C._dispatch_tls_local_exclude_set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThreadState) and vars(self) == vars(other)

    @eager_only  # the compiler meets it after an error, and cannot trace what it calls
    def restore(self) -> None:
        # Without torch functions, so that no mode sees how the grad mode is set.
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ALL_DISABLED)
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_torch_function_state(self.torch_functions)
        if _get_current_function_mode_stack() != self.function_modes:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self.function_modes:
                torch._C._push_on_torch_function_stack(mode)
        if _get_current_dispatch_mode_stack() != self.dispatch_modes:
            for _ in _get_current_dispatch_mode_stack():
                _pop_mode()
            for mode in self.dispatch_modes:
                _push_mode(mode)
        for key in _AUTOCAST:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, self.excluded_keys.has(key))


def restoring(function: Callable[P, R]) -> Callable[P, R]:
    """The function, after whose errors the thread is as it was before the call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        state = ThreadState()
        try:
            return function(*args, **kwargs)
        except BaseException:
            state.restore()
            raise

    return call


@contextlib.contextmanager
def tracing_state(state: Any) -> Iterator[None]:
    """The state of torch.jit.trace for a while; None: nothing is recorded."""
    before = torch._C._get_tracing_state()
    torch._C._set_tracing_state(state)
    try:
        yield
    finally:
        torch._C._set_tracing_state(before)
