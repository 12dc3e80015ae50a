"""Errors of the ready mods: what must hold, and what came."""

from __future__ import annotations

from torch import Tensor


def check_rank(mod: str, name: str, value: object, shape: str) -> Tensor:
    """ValueError or TypeError where a tensor has not the dimensions that ``shape``, such as "[H, S]", names."""
    if not isinstance(value, Tensor):
        raise TypeError(f"mods.{mod}: {name} must be a tensor {shape}, but got {type(value).__name__}")
    if value.dim() != shape.count(",") + 1:
        raise ValueError(f"mods.{mod}: {name} must have shape {shape}, but got {list(value.shape)}")
    return value


def check_integers(mod: str, name: str, value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        raise TypeError(f"mods.{mod}: {name} must have an integer dtype, but got {value.dtype}")


def check_at_least(mod: str, name: str, value: float, least: float, *, above: bool = False) -> None:
    if isinstance(value, Tensor) or not (value > least if above else value >= least):
        raise ValueError(f"mods.{mod}: {name} must be {'>' if above else '>='} {least}, but got {value}")
