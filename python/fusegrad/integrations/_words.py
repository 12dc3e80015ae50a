"""What the integrations say: warnings at the user's line, and functions of PyTorch under the names that users write."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

__all__ = ["name_of", "warn"]

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_OPERATORS = {
    **{"add": "+", "radd": "+", "iadd": "+=", "sub": "-", "rsub": "-", "isub": "-=", "mul": "*", "rmul": "*"},
    **{"imul": "*=", "truediv": "/", "rtruediv": "/", "itruediv": "/=", "pow": "**", "rpow": "**", "matmul": "@"},
    **{"rmatmul": "@", "neg": "-", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"getitem": "[...]", "setitem": "[...] =", "array": "numpy", "iter": "iteration", "bool": "a condition"},
}


def warn(message: str) -> None:
    """A UserWarning at the innermost line that is neither PyTorch's nor fusegrad's; nothing while compiling."""
    if torch.compiler.is_compiling():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"fusegrad: {message}", UserWarning, stacklevel=level)


def name_of(func: Any) -> str:
    """``log_softmax``, ``[...]``, ``.grad``: what stands in the line that called a function or read an attribute."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f".{getattr(func.__self__, '__name__', func.__self__)}"
    plain = name.strip("_") if name.startswith("__") else name
    return _OPERATORS.get(plain, plain) if plain != name else name
