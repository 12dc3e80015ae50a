"""Manual axes: inside shard_map an array's type says over which mesh axes its values differ, and a custom call demands
that of all its arguments alike."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def varying(x: jax.Array) -> frozenset[Any]:
    """The mesh axes over which an array varies."""
    aval = jax.typeof(x)
    kind = getattr(aval, "mat", None)  # since JAX 0.11
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def _cast(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = tuple(sorted(axes - varying(x), key=str))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def alike(tree: Tree) -> Tree:
    """The arrays of a tree, all varying over the same axes. The gradient of one that did not is summed over them, as
    the transpose of the cast: what a replicated weight needs."""
    axes = frozenset[Any]().union(*(varying(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: _cast(x, axes), tree)


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return _cast(jnp.zeros(shape, dtype), varying(like))


def result(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a custom call's result that varies as `like` does."""
    return jax.eval_shape(lambda x: zeros(x, shape, dtype), like)
