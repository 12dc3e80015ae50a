"""What an array's type says of a mesh's axes. Manual ones, inside shard_map: over which of them its values differ, and
a custom call demands that of all its arguments alike. Explicit ones: over which its dimensions are split, and a custom
call takes none that is."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, reshard

Tree = TypeVar("Tree")


def varying(x: jax.Array) -> frozenset[Any]:
    """The mesh axes over which an array varies."""
    aval = jax.typeof(x)
    kind = getattr(aval, "mat", None)  # since JAX 0.11
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def sharding_of(x: jax.Array) -> Any:
    """The sharding of an array whose dimensions are split over explicit axes, else None."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding if sharding is not None and any(axes is not None for axes in sharding.spec) else None


def whole(x: jax.Array) -> jax.Array:
    """The array on every device; its gradient is split as the array was."""
    sharding = sharding_of(x)
    return x if sharding is None else reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def split_as(rows: jax.Array, given: Any) -> jax.Array:
    """Values of rows [...], split as the array [..., V] that they were made of."""
    sharding = sharding_of(jnp.asarray(given))
    if sharding is None:
        return rows
    return reshard(rows, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: rows.ndim])))


def _cast(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = tuple(sorted(axes - varying(x), key=str))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, missing, to="varying")
    return jax.lax.pvary(x, missing)  # before JAX 0.8.1


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
