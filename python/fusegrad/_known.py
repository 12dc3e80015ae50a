"""Calls that go straight to the dispatcher: csrc/pytorch/bindings/direct.cpp says which.

torch.ops takes some microseconds to match arguments with a schema, and the public functions some to check them. A call
whose arguments have the plain types of their parameters, with nothing that watches what PyTorch does, needs neither.
Any other is the function's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ._load import direct

__all__ = ["known"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

is_compiling = torch.compiler.is_compiling


def known(mods: Callable[..., Any] | None = None) -> Callable[[_Function], _Function]:
    """For the public function of an op, whose arguments the function's parameters are by name.

    Args:
        mods: flex_attention's, of score_mod, block_mask, query, key and value: what the op takes of the first two where
            it is known, in the order of FlexMods (csrc/pytorch/ops/arguments.h), else None.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
        enter = direct.bound(function.__name__, list(parameters), positional, mods)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                found = enter(args, kwargs)
                if found is not None:
                    return found
            return function(*args, **kwargs)

        call.direct = enter  # type: ignore[attr-defined]  # for tests
        return call  # type: ignore[return-value]

    return decorate
