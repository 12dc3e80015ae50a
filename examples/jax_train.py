"""Trains a small language model in JAX with fusegrad's flex attention and linear cross entropy, on one device or
several.

    python examples/jax_train.py [--steps 200] [--devices 2]

The text is the source of Python's standard library, byte by byte. Where a byte stands is told by a table of each layer,
[buckets of distances, heads], as T5 has it (Raffel et al. 2020, arXiv:1910.10683): the score_mod reads it, so that no
bias of all pairs is made, and it gets its gradient. With several devices the batch is split over them by
shard_map, each has all parameters, and the loss is divided by the number of tokens of all of them. (On a CPU:
XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two devices of it.) At the end the program checks the last
gradients against plain JAX.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("FUSEGRAD_TORCH", "0")  # this process needs no torch: importing it takes seconds

import fusegrad.jax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

BYTES, HIDDEN, LENGTH, BATCH, LAYERS, HEADS, BUCKETS = 256, 128, 64, 16, 2, 4, 16
Parameters = dict[str, Any]


def initialise(key: jax.Array) -> Parameters:
    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, one = jax.random.split(key)
        return jax.random.normal(one, shape) * 0.02

    layer = lambda: {  # noqa: E731
        "near": normal(BUCKETS, HEADS),
        "qkv": normal(3, HEADS, HIDDEN // HEADS, HIDDEN),
        "out": normal(HIDDEN, HIDDEN),
        "up": normal(4 * HIDDEN, HIDDEN),
        "down": normal(HIDDEN, 4 * HIDDEN),
    }
    return {
        "tokens": normal(BYTES, HIDDEN),
        "layers": [layer() for _ in range(LAYERS)],
        "head": normal(BYTES, HIDDEN),
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def bucket(distance: Any) -> Any:
    """The bucket of how far back a byte lies: its own of the next 8, then one for each half of an octave."""
    far = 8 + (2 * jnp.log2(jnp.maximum(distance, 8) / 8)).astype(jnp.int32)
    return jnp.where(distance < 8, distance, jnp.minimum(far, BUCKETS - 1))


def fused_attention(qkv: jax.Array, near: jax.Array) -> jax.Array:
    """[3, batch, length, heads, D] and a table [BUCKETS, HEADS] to [batch, length, heads, D]."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + near[bucket(jnp.maximum(q_idx - kv_idx, 0)), h]

    query, key, value = qkv
    mask = fusegrad.jax.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, LENGTH, LENGTH)
    return fusegrad.jax.flex_attention(query, key, value, score_mod, mask, layout="BSHD")


def plain_attention(qkv: jax.Array, near: jax.Array) -> jax.Array:
    query, key, value = qkv
    place = jnp.arange(LENGTH)
    back = place[:, None] - place
    scores = jnp.einsum("bikd,bjkd->bkij", query, key) * (HIDDEN // HEADS) ** -0.5
    scores = scores + near[bucket(jnp.maximum(back, 0))].transpose(2, 0, 1)
    return jnp.einsum("bkij,bjkd->bikd", jax.nn.softmax(jnp.where(back >= 0, scores, -jnp.inf)), value)


def hidden_states(parameters: Parameters, tokens: jax.Array, attention: Any) -> jax.Array:
    """[batch, length] tokens to [batch, length, HIDDEN]."""
    x = parameters["tokens"][tokens]
    for layer in parameters["layers"]:
        qkv = jnp.einsum("bsh,ckdh->cbskd", norm(x), layer["qkv"])
        x = x + attention(qkv, layer["near"]).reshape(x.shape) @ layer["out"].T
        x = x + jax.nn.gelu(norm(x) @ layer["up"].T) @ layer["down"].T
    return norm(x)


def fused_loss(parameters: Parameters, tokens: jax.Array, target: jax.Array, normalizer: Any = None) -> jax.Array:
    x = hidden_states(parameters, tokens, fused_attention)
    return fusegrad.jax.linear_cross_entropy(x, parameters["head"], target, normalizer=normalizer)


def plain_loss(parameters: Parameters, tokens: jax.Array, target: jax.Array) -> jax.Array:
    logits = hidden_states(parameters, tokens, plain_attention) @ parameters["head"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1).mean()


def over_devices(devices: int) -> Any:
    """The same loss with the batch split over devices. The parameters' gradients add up over them."""
    if devices == 1:
        return fused_loss
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def part(parameters: Parameters, tokens: jax.Array, target: jax.Array) -> jax.Array:
        count = jax.lax.psum(jnp.float32(target.size), "data")
        return jax.lax.psum(fused_loss(parameters, tokens, target, count), "data")

    return jax.shard_map(part, mesh=mesh, in_specs=(whole, split, split), out_specs=whole)


def read_text() -> np.ndarray:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)


def train(steps: int, devices: int = 1) -> list[float]:
    """The loss of each step."""
    if devices > len(jax.devices()):
        raise ValueError(f"jax_train: --devices must be at most {len(jax.devices())}, but got {devices}")
    gradient = jax.value_and_grad(over_devices(devices))

    @jax.jit
    def step(state: Any, i: jax.Array, tokens: jax.Array, target: jax.Array) -> Any:
        """Adam."""
        parameters, first, second = state
        loss, grads = gradient(parameters, tokens, target)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
        rate = 2e-3 * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
        update = lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8)  # noqa: E731
        return (jax.tree.map(update, parameters, first, second), first, second), loss, grads

    text, random = read_text(), np.random.default_rng(0)
    parameters = initialise(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state, losses = (parameters, zeros, zeros), []
    for i in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, (BATCH, 1))
        batch = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
        tokens, target = batch[:, :-1], batch[:, 1:]
        parameters = state[0]
        state, loss, grads = step(state, jnp.float32(i), tokens, target)
        losses.append(float(loss))
        if i % 20 == 0 or i == steps - 1:
            print(f"step {i:4}  loss {losses[-1]:.3f}", flush=True)
    for ours, plain in zip(
        jax.tree.leaves(grads), jax.tree.leaves(jax.jit(jax.grad(plain_loss))(parameters, tokens, target)), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-2, atol=1e-4)
    print("The last gradients are plain JAX's.")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in JAX with fusegrad's attention and loss.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.devices)


if __name__ == "__main__":
    main()
