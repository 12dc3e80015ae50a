"""Checks of arguments, with the errors of the PyTorch half: ``op: what must hold, but got <value>``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ._manual import whole

FLOATING = ("float32", "bfloat16", "float16", "float64")


def value(op: str, holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{op}: {what}, but got {got}")


def array(op: str, name: str, given: Any, *, may_be_split: bool = False) -> jax.Array:
    """The array, whole on each device unless it `may_be_split` over explicit axes."""
    try:
        x = jnp.asarray(given)
    except TypeError as error:
        raise TypeError(f"{op}: {name} must be an array, but got {type(given).__name__}") from error
    if not all(isinstance(n, int) for n in x.shape):
        raise NotImplementedError(
            f"{op}: {name} must have a shape of numbers, but got {list(x.shape)}, which are symbolic: export a program "
            "for each shape"
        )
    return x if may_be_split else whole(x)


def floating(op: str, name: str, given: Any, *, may_be_split: bool = False) -> jax.Array:
    x = array(op, name, given, may_be_split=may_be_split)
    if x.dtype.name not in FLOATING:
        raise TypeError(f"{op}: {name} must be float32, bfloat16, float16 or float64, but got {x.dtype.name}")
    return x


def number(op: str, name: str, given: Any) -> float:
    """A Python number: it is part of the compiled program."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{op}: {name} must be a Python number, but got {type(given).__name__}")
    return float(given)


def shape(op: str, name: str, x: jax.Array, wanted: tuple[int, ...]) -> None:
    value(op, x.shape == wanted, f"{name} must have shape {list(wanted)}", list(x.shape))


def acc_type(dtype: Any) -> Any:
    """The dtype of losses and sums."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def class_indices(op: str, name: str, given: Any, rows: tuple[int, ...]) -> jax.Array:
    x = array(op, name, given)
    if x.dtype.name not in ("int32", "int64"):
        raise TypeError(f"{op}: {name} must be int32 or int64, but got {x.dtype.name}")
    shape(op, name, x, rows)
    return x.reshape(-1)


def option(op: str, name: str, given: Any, wanted: tuple[int, ...], acc: Any) -> jax.Array | None:
    """An optional floating array of a shape, as acc."""
    if given is None:
        return None
    x = floating(op, name, given)
    shape(op, name, x, wanted)
    return x.reshape(-1).astype(acc)


def normalizer(op: str, given: Any, averaged: bool, acc: Any) -> jax.Array | None:
    if given is None:
        return None
    value(op, averaged, "normalizer must come with a reduction that divides", "another")
    x = array(op, "normalizer", given).astype(acc)
    shape(op, "normalizer", x, ())
    return x.reshape(1)
