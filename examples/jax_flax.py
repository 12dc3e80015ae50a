"""Trains a vision transformer of flax's modules on handwritten digits: an `attention_fn` for `nnx.MultiHeadAttention`.

    python examples/jax_flax.py [--images 1797] [--epochs 30] [--out demo]

Four pixels are a token. Where it stands is told by a table of each layer alone, [distance in rows, distance in
columns, heads], as in Swin (Liu et al. 2021, arXiv:2103.14030). The table is a parameter of the `attention_fn`, which
is a module of flax itself; the score_mod closes over it, so that no bias of all pairs is made. The same model runs with
flax's own attention, to which the bias is given, and without any. The program checks the gradients and draws the
errors.

Needs flax and scikit-learn (`pip install flax scikit-learn`), which brings the digits.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad.jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from curves import draw_errors
from flax import nnx

SIDE, PATCH, DIGITS = 4, 2, 10  # tokens of a side, pixels of a token's side
WIDTH, HEADS, LAYERS, BATCH = 32, 4, 2, 32


def flex_attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    *,
    score_mod: Callable[..., Any] | None = None,
    is_causal: bool = False,
    module: Any = None,
    dtype: Any = None,
    **of_products: Any,
) -> jax.Array:
    """:func:`flax.nnx.dot_product_attention` by fusegrad, and with a score_mod: [batch..., length, heads, D]. A query
    that sees no key gets 0, not the mean of the values. `of_products`, such as the precision, have no meaning here."""
    if module is not None:
        raise NotImplementedError("flex_attention_fn: weights are never made, but sow_weights asks for them")
    p = 0.0 if deterministic else dropout_rate
    if p > 0 and broadcast_dropout:
        raise NotImplementedError("flex_attention_fn: broadcast_dropout must be False with dropout, but is True")
    *lead, n_query, heads, _ = query.shape
    n_key = key.shape[-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]).astype(dtype or x.dtype) for x in (query, key, value))

    def read(x: jax.Array) -> Callable[..., Any]:
        """Of [batch..., heads, query length, key length], or 1 for any of these: an element for b, h, i and j."""
        x = jnp.asarray(x).reshape((1,) * (4 - x.ndim) + x.shape)
        if math.prod(x.shape[:-3]) > 1:
            x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
        x = x.reshape(-1, *x.shape[-3:])
        return lambda *places: x[tuple(place if n > 1 else 0 for place, n in zip(places, x.shape, strict=True))]

    def all_of_it(score: Any, *places: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, *places)
        if bias is not None:
            score = score + read(bias)(*places)
        return score if mask is None else jnp.where(read(mask)(*places), score, -jnp.inf)

    causal = None
    if is_causal:
        causal = fusegrad.jax.create_block_mask(lambda b, h, i, j: i >= j, None, None, n_query, n_key)
    out = fusegrad.jax.flex_attention(
        *(q, k, v, all_of_it, causal),
        layout="BSHD",
        enable_gqa=k.shape[2] != heads,
        dropout_p=p,
        dropout_key=None if p == 0 else dropout_rng,
    )
    return out.reshape(*lead, n_query, heads, value.shape[-1])


class Relative(nnx.Module):
    """An attention_fn with a table of distances between tokens."""

    def __init__(self, run: str, rngs: nnx.Rngs) -> None:
        self.run = run
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (2 * SIDE - 1, 2 * SIDE - 1, HEADS)))

    def bias(self, h: Any, i: Any, j: Any) -> Any:
        table = self.table[...]
        return table[i // SIDE - j // SIDE + SIDE - 1, i % SIDE - j % SIDE + SIDE - 1, h]

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        if self.run == "fusegrad":

            def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                return score + self.bias(h, i, j)

            return flex_attention_fn(query, key, value, score_mod=score_mod, **options)
        bias = self.bias(*jnp.ogrid[:HEADS, : SIDE**2, : SIDE**2]) if self.run == "flax" else None
        return nnx.dot_product_attention(query, key, value, bias=bias, **options)


RUNS = ("fusegrad", "flax", "no biases")


class Block(nnx.Module):
    def __init__(self, run: str, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=Relative(run, rngs), decode=False, deterministic=True, rngs=rngs
        )
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, run: str, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Linear(PATCH**2, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(run, rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """[batch, SIDE * SIDE, PATCH * PATCH] to logits [batch, DIGITS]."""
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss_of(model: Model, images: jax.Array, digits: jax.Array) -> jax.Array:
    return fusegrad.jax.cross_entropy(model(images), digits)


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, images: jax.Array, digits: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, images, digits)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def wrong(model: Model, images: jax.Array, digits: jax.Array) -> jax.Array:
    return (model(images).argmax(-1) != digits).mean()


def load_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """[count, SIDE * SIDE, PATCH * PATCH] grays, and what they show."""
    from sklearn.datasets import load_digits as load

    images, digits = load(return_X_y=True)
    patches = images[:count].reshape(-1, SIDE, PATCH, SIDE, PATCH).swapaxes(2, 3) / 16
    return patches.reshape(-1, SIDE**2, PATCH**2).astype(np.float32), digits[:count].astype(np.int32)


def train(run: str, images: np.ndarray, digits: np.ndarray, epochs: int) -> list[float]:
    """The share of wrong digits of the images held out, after each epoch."""
    held_out = len(images) // 4
    model = Model(run, nnx.Rngs(0))
    steps = epochs * ((len(images) - held_out) // BATCH)
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(5e-3, steps)), wrt=nnx.Param)
    random, errors = np.random.default_rng(0), []
    for _ in range(epochs):
        order = held_out + random.permutation(len(images) - held_out)
        for begin in range(0, len(order) - BATCH + 1, BATCH):
            some = order[begin : begin + BATCH]
            step(model, optimizer, images[some], digits[some])
        errors.append(float(wrong(model, images[:held_out], digits[:held_out])))
    print(f"{run:10s} wrong digits {errors[-1]:.2%}", flush=True)
    return errors


def check_gradients(images: np.ndarray, digits: np.ndarray) -> None:
    """Compares those of the first step with flax's own attention's."""
    ours, flax = (nnx.jit(nnx.grad(loss_of))(Model(run, nnx.Rngs(1)), images[:8], digits[:8]) for run in RUNS[:2])
    for x, t in zip(jax.tree.leaves(ours), jax.tree.leaves(flax), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-3, atol=1e-5)
    print("The gradients are those of flax's attention.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a vision transformer of flax's modules on digits.")
    parser.add_argument("--images", type=int, default=1797)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(arguments)
    images, digits = load_digits(options.images)
    check_gradients(images, digits)
    errors = {run: train(run, images, digits, options.epochs) for run in RUNS}
    percent = {run: [100 * x for x in of] for run, of in errors.items()}
    draw_errors(percent, options.out / "jax_flax.png", "Wrong digits of images held out", "% of images", "flax")
    return 0


if __name__ == "__main__":
    sys.exit(main())
