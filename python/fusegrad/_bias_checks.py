"""What attention with biases checks of its tensors, in the words of the function that was called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import described
from ._sharding import is_dtensor

__all__ = [
    "check_bias",
    "check_broadcasts",
    "check_floats",
    "check_lengths",
    "check_plain",
    "check_query",
    "shape_of",
]


def shape_of(t: Tensor | tuple[int, ...] | torch.Size) -> str:
    return str(list(t.shape if isinstance(t, Tensor) else t))


def check_plain(op: str, name: str, t: Tensor) -> None:
    if t.is_nested or is_dtensor(t):
        raise TypeError(f"{op}: {name} must be a plain tensor, but got a {'nested one' if t.is_nested else 'DTensor'}")


def check_query(op: str, names: tuple[str, str, str], query: Tensor, key: Tensor, value: Tensor) -> None:
    """That key and value fit the query: all ``[*, H, S, D]``."""
    for name, t in zip(names, (query, key, value), strict=True):
        check_plain(op, name, t)
    shape, dtype, device = query.shape, query.dtype, query.device
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: {names[0]} must be float32, bfloat16, float16 or float64, but got {dtype}")
    alike = key.dtype == dtype == value.dtype and key.device == device == value.device
    if alike and key.shape == shape == value.shape and len(shape) >= 3:
        return
    for name, t in zip(names, (query, key, value), strict=True):
        if t.dim() < 3:
            raise ValueError(f"{op}: {name} must have at least 3 dimensions, [*, H, S, D], but got {shape_of(t)}")
        if t.dtype != dtype and not torch.is_autocast_enabled(device.type):
            raise TypeError(f"{op}: {name} must have the dtype of {names[0]}, {dtype}, but got {t.dtype}")
        if t.device != device:
            raise ValueError(f"{op}: {name} must be on the device of {names[0]}, {device}, but got {t.device}")
    heads, keys, shared = shape[-3], key.shape[-2], key.shape[-3]
    for name, t, wanted in (
        (names[1], key, (*shape[:-2], keys, shape[-1])),
        (names[2], value, (*shape[:-2], keys, value.shape[-1])),
    ):
        fits = t.dim() <= len(shape) and t.shape[-2:] == wanted[-2:] and t.shape[-3] == shared
        fits = fits and (shared == heads or (shared > 0 and heads % shared == 0))
        if not fits or not _broadcasts(t.shape[:-3], shape[:-3]):
            raise ValueError(
                f"{op}: {name} must have a shape that fits {names[0]}, {shape_of(wanted)}, but got {shape_of(t)}"
            )


def _broadcasts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    if shape == sizes:
        return True
    if len(shape) > len(sizes):
        return False
    return all(n in (1, size) for n, size in zip(reversed(shape), reversed(sizes), strict=False))


def check_broadcasts(op: str, name: str, t: Tensor, sizes: tuple[int, ...]) -> None:
    if not _broadcasts(t.shape, sizes):
        raise ValueError(f"{op}: {name} must have a shape that broadcasts to {shape_of(sizes)}, but got {shape_of(t)}")


def check_bias(op: str, name: str, bias: Any, sizes: tuple[int, ...]) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, but got {described(bias)}")
    check_floats(op, name, bias)
    check_plain(op, name, bias)
    check_broadcasts(op, name, bias, sizes)


def check_floats(op: str, name: str, bias: Tensor) -> None:
    if not bias.dtype.is_floating_point:
        more = ": what takes part is a mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"{op}: {name} must be floating-point, but got {bias.dtype}{more}")


def check_lengths(op: str, kv_lengths: Tensor) -> None:
    if kv_lengths.dtype.is_floating_point or kv_lengths.dtype == torch.bool or kv_lengths.is_complex():
        raise TypeError(f"{op}: kv_lengths must be of a dtype of whole numbers, but got {kv_lengths.dtype}")
