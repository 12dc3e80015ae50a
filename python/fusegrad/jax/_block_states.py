"""Which blocks a mask_mod lists, by bounds over whole blocks.

csrc/score_mod/block_bounds.h says what they are. Pairs are asked only where bounds do not decide. Where what the
mask_mod captures has values all of it is done on the host; else the bounds are part of the program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._C import score_mod as language

from .._program import PLACES, program
from ._evaluate import Values, evaluate
from ._score_mod import Mod

__all__ = ["bounds_within", "states_by_bounds"]


def states_by_bounds(op: str, mod: Mod, sizes: tuple[int, ...], block: tuple[int, int]) -> np.ndarray | None:
    """[B, H, rows, columns], of each block 0, 1 or 2 where no pair, some or all take part; 1 batch or head of what the
    mask_mod does not ask. None: something captured has no value here, as within jit, or no elements."""
    if any(isinstance(x, jax.core.Tracer) or not x.is_fully_addressable or x.size == 0 for x in mod.buffers):
        return None
    captured = [np.asarray(jax.device_get(x), order="C") for x in mod.buffers]
    made, _, _ = language.block_bounds(mod.text, block, _given(captured))
    tables = [np.asarray(_made(np, captured, *one), order="C") for one in made]
    try:
        b, h, found = language.block_states(mod.text, block, sizes, _given(captured), _given(tables))
    except IndexError as error:
        raise IndexError(f"{op}: mask_mod: {error}") from None
    rows, columns = -(-sizes[2] // block[0]), -(-sizes[3] // block[1])
    return np.frombuffer(found, np.uint8).reshape(b, h, rows, columns)


def bounds_within(mod: Mod, sizes: tuple[int, ...], block: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """For each block, [B, H, rows, columns], whether a pair may take part, and whether it is known that all do."""
    of_blocks = (sizes[0], sizes[1], -(-sizes[2] // block[0]), -(-sizes[3] // block[1]))
    if any(x.size == 0 for x in mod.buffers):
        return jnp.ones(of_blocks, bool), jnp.zeros(of_blocks, bool)
    captured = [jax.lax.stop_gradient(x) for x in mod.buffers]
    made, texts, of_scalars = language.block_bounds(mod.text, block, [(0, (x.dtype.name, x.shape)) for x in captured])
    known = {"queries": sizes[2], "keys": sizes[3]}
    scalars = [captured[i].shape[d] if what == "size" else known[what] for what, i, d in of_scalars]
    with jax.enable_x64(True):
        tables = [_made(jnp, captured, *one) for one in made]
        dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in captured) else jnp.float32
        found = []
        for text in texts:
            places = {}
            for d, (name, size) in enumerate(zip(PLACES, of_blocks, strict=True)):
                places[name] = jnp.arange(size, dtype=jnp.int64).reshape([size if e == d else 1 for e in range(4)])
            values = Values(places, tables, (None,) * len(tables), scalars, dtype, of_blocks)
            found.append(jnp.broadcast_to(evaluate(program(text), values), of_blocks))
    return found[0], found[1]


def _given(arrays: list[np.ndarray]) -> list[Any]:
    return [(x.ctypes.data, (x.dtype.name, x.shape)) for x in arrays]


def _made(
    library: Any, arrays: Any, content: str, source: int, axes: list[str], parts: list[int], dimension: int
) -> Any:
    """A buffer of the bounds, by numpy or jax.numpy."""
    captured = arrays[source]
    if content == "values":
        return captured
    if content == "logarithms":  # exact: float64 has room for what the logarithm of an integer lacks to the next one
        count = -(-captured.shape[dimension] // parts[0])
        return library.asarray(np.floor(np.log2(np.arange(1.0, count + 1))).astype(np.int32))
    return _table(library, captured, axes, parts)


def _table(library: Any, captured: Any, axes: list[str], parts: list[int]) -> Any:
    """Minima and inverted maxima of parts, and of 2^k successive parts where an index has a range."""
    name = captured.dtype.name
    if "float" in name:
        dtype = name if name == "float64" else "float32"
    else:
        dtype = name if name in ("bool", "int64") else "int32"
    low = captured.astype(dtype)
    both = library.stack([low, -low if "float" in dtype else ~low])  # of which all are minima
    for d, (axis, part) in enumerate(zip(axes, parts, strict=True)):
        size = captured.shape[d]
        of_part = size if axis == "whole" else part
        if of_part > 1:
            more = -size % of_part
            ends = [(0, more if e == d + 1 else 0) for e in range(both.ndim)]
            both = library.pad(both, ends, mode="edge") if more else both
            split = (*both.shape[: d + 1], -1, of_part, *both.shape[d + 2 :])
            both = both.reshape(split).min(d + 2)
    levels_before = 0
    for d in reversed(range(captured.ndim)):  # the last one's levels stand before all others
        if axes[d] == "range":
            both = _levels(library, both, 1 + levels_before + d)
            levels_before += 1
    return both


def _levels(library: Any, both: Any, at: int) -> Any:
    """The minima of 2^k successive ones from each on, for every k; what would go beyond the end is never read."""
    levels, size = [both], both.shape[at]
    for k in range(1, size.bit_length()):
        step, last = 1 << (k - 1), levels[-1]
        later = library.take(last, np.minimum(np.arange(size) + step, size - 1), axis=at)
        levels.append(library.minimum(last, later))
    return library.stack(levels, axis=1)
