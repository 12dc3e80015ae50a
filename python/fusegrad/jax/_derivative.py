"""Code that the ops' derivative rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def constants(op: str, tree: Any) -> Any:
    """The values of arguments that have no gradient, which a rule gets with a mark whether one is wanted."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_marked):
        if leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.floating):
            name = getattr(path[-1], "name", None) or path[-1].key
            raise TypeError(
                f"{op}: {name} must be a constant, but a gradient by it is wanted; jax.lax.stop_gradient makes it one"
            )
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_marked)


def _is_marked(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def as_array(cotangent: Any) -> jax.Array:
    """An upstream gradient, which may be a symbolic zero, or a number where a vjp is called with one."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.aval.shape, cotangent.aval.dtype)
    return jnp.asarray(cotangent)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles function(options, wanted, *arrays), where `options.op` is the op's name and both are static. It is for
    derivative rules: differentiating it in turn, a second derivative of the loss, raises."""
    refusing = jax.custom_jvp(function, nondiff_argnums=(0, 1))

    def refuse(options: Any, wanted: Any, primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{options.op}: the gradient must not be differentiated a second time, but a second derivative is wanted"
        )

    refusing.defjvp(refuse)
    return jax.jit(refusing, static_argnums=(0, 1))
