"""Functions that torch.compile must not trace: each call is a graph break."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def eager_only(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable`` where the compiler is loaded. Without it nothing can trace the function.

    Loading it takes seconds. After ``init_process_group`` it would also keep the process group's threads alive to the
    end of the process, since defaults of ``torch.distributed.nn.functional`` hold the group; and a gloo thread that
    lets go of a tensor while Python shuts down aborts the process.
    """

    disabled = _disable_dynamo(function)  # imports the compiler at its first call

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
