"""Checks of JAX's score_mods and mask_mods: their texts' values and derivatives against JAX's own of the functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fusegrad  # noqa: F401  its ops
import jax
import jax.numpy as jnp
import numpy as np
import torch
from fusegrad.jax._score_mod import Mod, trace_mask_mod, trace_score_mod
from jax_score_mods import over_all_pairs

__all__ = ["check_mask_mod", "check_score_mod", "evaluated", "is_float", "to_torch"]


def to_torch(x: Any) -> torch.Tensor:
    x = jnp.asarray(x)
    return (
        torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
        if x.dtype == jnp.bfloat16
        else torch.tensor(np.array(x))
    )


def evaluated(mod: Mod, score: jax.Array) -> np.ndarray:
    assert mod.scalars == ()
    buffers = [to_torch(x) for x in mod.buffers]
    return torch.ops.fusegrad.evaluate_score_mod(mod.text, to_torch(score), buffers, [], []).numpy()


def is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def gradients(
    make: Callable[..., Callable], params: Sequence[jax.Array], score: jax.Array, upstream: jax.Array, sizes: Any
) -> list[np.ndarray]:
    """For the score and for the captured arrays, by the text's derivative and, before it, by JAX's of what is read."""
    made: list[Mod] = []

    def read(*params: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        made.append(trace_score_mod(make(*params), score_dtype=jnp.float64, sizes=sizes))
        buffers = made[-1].buffers
        return [x for x in buffers if is_float(x)], [x for x in buffers if not is_float(x)]

    floats, pull, others = jax.vjp(read, *params, has_aux=True)
    rest = iter(floats), iter(others)
    values = [next(rest[0] if is_float(x) else rest[1]) for x in made[-1].buffers]
    buffers = [to_torch(x).requires_grad_(is_float(x)) for x in values]
    with torch.no_grad():
        of_score, of_buffers = torch.ops.fusegrad.evaluate_score_mod_backward(
            to_torch(upstream), made[-1].text, to_torch(score), buffers, [], []
        )
    found = [jnp.asarray(g.double().numpy()) for g, x in zip(of_buffers, values, strict=True) if is_float(x)]
    pulled = pull([g.reshape(x.shape).astype(x.dtype) for g, x in zip(found, floats, strict=True)])
    return [of_score.numpy(), *(np.asarray(x.astype(jnp.float64)) for x in pulled)]


def check_score_mod(
    make: Callable[..., Callable],
    params: Sequence[jax.Array],
    sizes: Any,
    seed: int = 1,
    told: Sequence[bool] = (True,),
    score: jax.Array | None = None,
) -> None:
    """Values and all gradients against JAX's of the function for every pair; `told`: whether the text may know the
    sizes, a text each."""
    generator = np.random.default_rng(seed)
    drawn, upstream = (jnp.asarray(generator.standard_normal(sizes)) for _ in range(2))
    score = drawn if score is None else score

    def reference(score: jax.Array, *params: jax.Array) -> jax.Array:
        return over_all_pairs(make(*params), sizes, score).astype(jnp.float64)

    # Op by op: XLA of JAX 0.10 gets a gradient of one fused loop wrong on CPUs with AVX-512.
    expected, pull = jax.vjp(reference, score, *params)
    pulled = pull(upstream)
    for told_sizes in (sizes if known else None for known in told):
        mod = trace_score_mod(make(*params), score_dtype=jnp.float64, sizes=told_sizes)
        np.testing.assert_allclose(evaluated(mod, score), expected, rtol=1e-6, atol=1e-6)
        found = gradients(make, params, score, upstream, told_sizes)
        for got, wanted in zip(found, pulled, strict=True):
            tolerance = 1e-2 if wanted.dtype == jnp.bfloat16 else 1e-6
            np.testing.assert_allclose(got, np.asarray(wanted.astype(jnp.float64)), rtol=tolerance, atol=tolerance)


def check_mask_mod(mask_mod: Callable, sizes: Any) -> Mod:
    mod = trace_mask_mod(mask_mod, sizes=sizes)
    buffers = [to_torch(x) for x in mod.buffers]
    got = torch.ops.fusegrad.evaluate_mask_mod(mod.text, list(sizes), buffers, [], [])
    np.testing.assert_array_equal(got.numpy(), over_all_pairs(mask_mod, sizes))
    return mod
