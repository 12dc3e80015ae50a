"""Which blocks a mask_mod lists, where what it captures has values: by bounds over whole blocks, on the host.

csrc/score_mod/block_bounds.h says what they are. Pairs are asked only where bounds do not decide.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fusegrad._C import score_mod as language

from ._score_mod import Mod

__all__ = ["states_by_bounds"]


def states_by_bounds(op: str, mod: Mod, sizes: tuple[int, ...], block: tuple[int, int]) -> np.ndarray | None:
    """[B, H, rows, columns], of each block 0, 1 or 2 where no pair, some or all take part; 1 batch or head of what the
    mask_mod does not ask. None: something captured has no value here, as within jit, or no elements."""
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable or x.size == 0 for x in mod.buffers):
        return None
    captured = [np.asarray(jax.device_get(x), order="C") for x in mod.buffers]
    tables = [
        _made(content, captured[source], axes, parts, dimension)
        for content, source, axes, parts, dimension in language.block_bounds(mod.text, block, _given(captured))
    ]
    try:
        b, h, found = language.block_states(mod.text, block, sizes, _given(captured), _given(tables))
    except IndexError as error:
        raise IndexError(f"{op}: mask_mod: {error}") from None
    rows, columns = -(-sizes[2] // block[0]), -(-sizes[3] // block[1])
    return np.frombuffer(found, np.uint8).reshape(b, h, rows, columns)


def _given(arrays: list[np.ndarray]) -> list[Any]:
    return [(x.ctypes.data, (x.dtype.name, x.shape)) for x in arrays]


def _made(content: str, captured: np.ndarray, axes: list[str], parts: list[int], dimension: int) -> np.ndarray:
    if content == "values":
        return captured
    if content == "logarithms":  # exact: float64 has room for what the logarithm of an integer lacks to the next one
        count = -(-captured.shape[dimension] // parts[0])
        return np.floor(np.log2(np.arange(1.0, count + 1))).astype(np.int32)
    return _table(captured, axes, parts)


def _table(captured: np.ndarray, axes: list[str], parts: list[int]) -> np.ndarray:
    """Minima and inverted maxima of parts, and of 2^k successive parts where an index has a range."""
    kind = captured.dtype
    if kind.kind not in "biu":
        dtype = kind if kind == np.float64 else np.dtype(np.float32)
    else:
        dtype = kind if kind in (np.dtype(bool), np.dtype(np.int64)) else np.dtype(np.int32)
    low, high = captured.astype(dtype), captured.astype(dtype)
    for d, (axis, part) in enumerate(zip(axes, parts, strict=True)):
        size = captured.shape[d]
        starts = np.arange(0, size, size if axis == "whole" else part)
        if len(starts) < size:
            low, high = np.minimum.reduceat(low, starts, axis=d), np.maximum.reduceat(high, starts, axis=d)
    both = np.stack([low, -high if dtype.kind == "f" else ~high])
    levels_before = 0
    for d in reversed(range(captured.ndim)):  # the last one's levels stand before all others
        if axes[d] == "range":
            both = _levels(both, 1 + levels_before + d)
            levels_before += 1
    return np.asarray(both, order="C")


def _levels(both: np.ndarray, at: int) -> np.ndarray:
    """The minima of 2^k successive ones from each on, for every k; what would go beyond the end is never read."""
    levels, size = [both], both.shape[at]
    for k in range(1, size.bit_length()):
        step, last = 1 << (k - 1), levels[-1]
        later = np.take(last, np.minimum(np.arange(size) + step, size - 1), axis=at)
        levels.append(np.minimum(last, later))
    return np.stack(levels, axis=1)
