"""Trains a pair-biased transformer in JAX on molecules: from bonds to distances, by triangle attention.

    python examples/jax_molecules.py [--molecules 1000] [--epochs 6] [--out demo]

Row i of the pair features attends within itself with a bias of the pair (j, k), made by the layer from these features
and shared by all rows (Jumper et al. 2021, Nature 596, 583, algorithms 13 and 14). The score_mod closes over that bias,
which is a tracer then: it gets its gradient, and no bias of all rows exists. The same model runs with plain attention,
with and without biases, from the same numbers. The program checks the gradients and draws the errors.

Needs RDKit (`pip install rdkit`), which brings the molecules, and torch, in which they are loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fusegrad.jax
import jax
import jax.numpy as jnp
import numpy as np
from curves import draw_errors
from graph.data import BONDS, DISTANCES, Molecule, load_molecules

NO_PAIR = -100
LAYERS, WIDTH, HEADS = 3, 32, 4
Parameters = dict[str, Any]
#: query, key, value [G * n, n, H, D], a bias [G, H, n, n] or None, sizes [G] -> [G * n, n, H, D].
Attention = Callable[..., jax.Array]


def fused_attention(query: Any, key: Any, value: Any, bias: Any, sizes: Any) -> jax.Array:
    n = query.shape[1]

    def score_mod(score: Any, row: Any, h: Any, j: Any, k: Any) -> Any:
        molecule = row // n
        if bias is not None:
            score = score + bias[molecule, h, j, k]
        return jnp.where(k < sizes[molecule], score, -jnp.inf)

    return fusegrad.jax.flex_attention(query, key, value, score_mod, layout="BSHD")


def plain_attention(query: Any, key: Any, value: Any, bias: Any, sizes: Any) -> jax.Array:
    n = query.shape[1]
    scores = jnp.einsum("rjhd,rkhd->rhjk", query, key) * query.shape[3] ** -0.5
    if bias is not None:
        scores = scores + jnp.repeat(bias, n, 0)
    there = jnp.repeat(jnp.arange(n) < sizes[:, None], n, 0)[:, None, None]
    return jnp.einsum("rhjk,rkhd->rjhd", jax.nn.softmax(jnp.where(there, scores, -jnp.inf)), value)


RUNS = {"fusegrad": (fused_attention, True), "plain": (plain_attention, True), "no biases": (plain_attention, False)}


def initialise(key: jax.Array) -> Parameters:
    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, one = jax.random.split(key)
        return jax.random.normal(one, shape) * shape[0] ** -0.5

    layer = lambda: {  # noqa: E731
        "qkv": normal(WIDTH, 3, HEADS, WIDTH // HEADS),
        "bias": normal(WIDTH, HEADS),
        "gate": normal(WIDTH, WIDTH),
        "out": normal(WIDTH, WIDTH) * 0.3,
        "up": normal(WIDTH, 2 * WIDTH),
        "down": normal(2 * WIDTH, WIDTH) * 0.3,
    }
    return {
        "bonds": normal(len(BONDS) + 1, WIDTH),  # the last: an atom and itself
        "layers": [layer() for _ in range(2 * LAYERS)],
        "head": normal(WIDTH, DISTANCES).T,
    }


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def pairs_of(parameters: Parameters, bonds: jax.Array, sizes: jax.Array, attention: Attention, biased: bool) -> Any:
    """[G, n, n] bonds to features [G, n, n, WIDTH]."""
    G, n, _ = bonds.shape
    x = parameters["bonds"][jnp.where(jnp.eye(n, dtype=bool), len(BONDS), bonds)]
    for i, layer in enumerate(parameters["layers"]):
        turned = x.swapaxes(1, 2) if i % 2 else x  # around the ending node
        y = norm(turned)
        qkv = jnp.einsum("gijc,cshd->sgijhd", y, layer["qkv"]).reshape(3, G * n, n, HEADS, WIDTH // HEADS)
        bias = jnp.einsum("gjkc,ch->ghjk", y, layer["bias"]) if biased else None
        mixed = attention(*qkv, bias, sizes).reshape(G, n, n, WIDTH)
        turned = turned + (jax.nn.sigmoid(y @ layer["gate"]) * mixed) @ layer["out"]
        x = turned.swapaxes(1, 2) if i % 2 else turned
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x)


def loss_of(parameters: Parameters, batch: Any, attention: Attention, biased: bool) -> jax.Array:
    bonds, distances, sizes = batch
    x = pairs_of(parameters, bonds, sizes, attention, biased)
    return fusegrad.jax.linear_cross_entropy(x, parameters["head"], distances, ignore_index=NO_PAIR)


@partial(jax.jit, static_argnames=("attention", "biased"))
def wrong(parameters: Parameters, batch: Any, attention: Attention, biased: bool) -> tuple[jax.Array, jax.Array]:
    """The number of pairs whose distance is not the most likely one, and that of all pairs."""
    bonds, distances, sizes = batch
    found = (pairs_of(parameters, bonds, sizes, attention, biased) @ parameters["head"].T).argmax(-1)
    there = distances != NO_PAIR
    return (there & (found != distances)).sum(), there.sum()


@partial(jax.jit, static_argnames=("attention", "biased"))
def step(state: Any, i: Any, rate: Any, batch: Any, attention: Attention, biased: bool) -> Any:
    """Adam."""
    parameters, first, second = state
    loss, grads = jax.value_and_grad(loss_of)(parameters, batch, attention, biased)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
    rate = rate * jnp.sqrt(1 - 0.99 ** (i + 1)) / (1 - 0.9 ** (i + 1))
    update = lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8)  # noqa: E731
    return (jax.tree.map(update, parameters, first, second), first, second), loss


def pad(molecules: list[Molecule], n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    bonds = np.zeros((len(molecules), n, n), np.int32)
    distances = np.full_like(bonds, NO_PAIR)
    for g, m in enumerate(molecules):
        size = len(m.elements)
        bonds[g, :size, :size] = m.bonds.numpy()
        distances[g, :size, :size] = np.where(np.eye(size, dtype=bool), NO_PAIR, m.distances.numpy().astype(np.int32))
    sizes = np.array([len(m.elements) for m in molecules], np.int32)
    return jnp.asarray(bonds), jnp.asarray(distances), jnp.asarray(sizes)


def batches(molecules: list[Molecule], size: int, n: int) -> Iterator[Any]:
    """Whole ones, of one shape: nothing is compiled twice."""
    for begin in range(0, len(molecules) - size + 1, size):
        yield pad(molecules[begin : begin + size], n)


def train(name: str, molecules: list[Molecule], held_out: list[Molecule], epochs: int, n: int) -> list[float]:
    """The share of wrong distances of the molecules held out, after each epoch. All runs see the same in the same
    order."""
    attention, biased = RUNS[name]
    parameters = initialise(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state, random, errors, i = (parameters, zeros, zeros), np.random.default_rng(0), [], 0
    steps = epochs * (len(molecules) // 16)
    for _ in range(epochs):
        for batch in batches([molecules[m] for m in random.permutation(len(molecules))], 16, n):
            rate = 4e-3 * min(1.0, 5 * i / steps, 1.2 * (1 - i / steps))
            state, _ = step(state, jnp.float32(i), jnp.float32(rate), batch, attention, biased)
            i += 1
        counts = np.array([wrong(state[0], batch, attention, biased) for batch in batches(held_out, 16, n)])
        errors.append(float(counts[:, 0].sum() / counts[:, 1].sum()))
    print(f"{name:10s} wrong distances {errors[-1]:.2%}", flush=True)
    return errors


def check_gradients(molecules: list[Molecule], n: int) -> None:
    """Compares those of the first step with plain attention's."""
    parameters, batch = initialise(jax.random.key(1)), pad(molecules[:4], n)
    ours, plain = (jax.jit(jax.grad(partial(loss_of, batch=batch, attention=a, biased=True)))(parameters)
                   for a in (fused_attention, plain_attention))  # fmt: skip
    for x, t in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-3, atol=1e-5)
    print("The gradients are those of plain attention.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a pair-biased transformer in JAX on molecules.")
    parser.add_argument("--molecules", type=int, default=1000)
    parser.add_argument("--atoms", type=int, default=12, help="the most that a molecule has")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(arguments)
    try:
        molecules = load_molecules(options.molecules, max_atoms=options.atoms)
    except ImportError as error:
        print(f"jax_molecules: needs RDKit ({error}); pip install rdkit", file=sys.stderr)
        return 2
    order = np.random.default_rng(0).permutation(len(molecules))
    shuffled, count = [molecules[i] for i in order], len(molecules) // 5
    check_gradients(shuffled, options.atoms)
    errors = {name: train(name, shuffled[count:], shuffled[:count], options.epochs, options.atoms) for name in RUNS}
    percent = {run: [100 * x for x in of] for run, of in errors.items()}
    title = "Wrong distances of molecules held out"
    draw_errors(percent, options.out / "jax_molecules.png", title, "% of pairs", "plain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
