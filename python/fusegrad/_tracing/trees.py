"""The nested arguments and results of PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["contains", "mapped", "tensors_of"]


def contains(tree: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether there is an instance among what a call's arguments hold."""
    if isinstance(tree, kind):
        return True
    if isinstance(tree, (tuple, list)):
        return any(contains(x, kind) for x in tree)
    if isinstance(tree, dict):
        return any(contains(x, kind) for x in tree.values())
    if isinstance(tree, slice):
        return any(isinstance(x, kind) for x in (tree.start, tree.stop, tree.step))
    return False


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same with function(x) for each x in it that is no container."""
    if isinstance(tree, (tuple, list)):
        items = [mapped(x, function) for x in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: mapped(x, function) for key, x in tree.items()}
    if isinstance(tree, slice):
        return slice(*(function(x) for x in (tree.start, tree.stop, tree.step)))
    return function(tree)


def tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(tree, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return found
