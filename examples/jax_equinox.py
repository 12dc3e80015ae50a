"""Trains AlphaFold 3's pair-biased attention as a module of equinox: log P of molecules, from their bonds.

    python examples/jax_equinox.py [--molecules 1000] [--epochs 8] [--out demo]

A block is AttentionPairBias and a transition (Abramson et al. 2024, Nature 630, 493, algorithms 24 and 11): atoms
attend with a bias of each pair of them, a projection of the pair features. The module makes the bias; its score_mod
closes over it, a tracer then, and over the mask of what is padding. The same model runs with plain attention, with and
without biases, from the same numbers. The program checks the gradients and draws the errors.

Needs equinox and RDKit (`pip install equinox optax rdkit`), which brings the molecules, and torch, in which they are
loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import fusegrad.jax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from curves import draw_errors
from graph.data import BONDS, DISTANCES, ELEMENTS, Molecule, load_molecules

WIDTH, PAIR, HEADS, LAYERS, BATCH = 32, 8, 4, 3, 16
RUNS = ("fusegrad", "plain", "no biases")


def each(module: Any, x: jax.Array) -> jax.Array:
    """A module of equinox's, which is one of a vector, of [..., features]."""
    return jax.vmap(module)(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def fused_attention(query: Any, key: Any, value: Any, bias: Any, there: Any) -> jax.Array:
    """[B, n, H, D], a bias [B, n, n, H] or None, bool [B, n] -> [B, n, H, D]."""

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if bias is not None:
            score = score + bias[b, i, j, h]
        return jnp.where(there[b, j], score, -jnp.inf)

    return fusegrad.jax.flex_attention(query, key, value, score_mod, layout="BSHD")


def plain_attention(query: Any, key: Any, value: Any, bias: Any, there: Any) -> jax.Array:
    scores = jnp.einsum("bihd,bjhd->bijh", query, key) * query.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    weights = jax.nn.softmax(jnp.where(there[:, None, :, None], scores, -jnp.inf), 2)
    return jnp.einsum("bijh,bjhd->bihd", weights, value)


class AttentionPairBias(eqx.Module):
    norm: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    pair_norm: eqx.nn.LayerNorm
    pair_bias: eqx.nn.Linear
    gate: eqx.nn.Linear
    out: eqx.nn.Linear
    run: str = eqx.field(static=True)

    def __init__(self, run: str, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.norm, self.pair_norm = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(PAIR)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, use_bias=False, key=keys[0])
        self.pair_bias = eqx.nn.Linear(PAIR, HEADS, use_bias=False, key=keys[1])
        self.gate = eqx.nn.Linear(WIDTH, WIDTH, key=keys[2])
        self.out = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[3])
        self.run = run

    def __call__(self, atoms: jax.Array, pairs: jax.Array, there: jax.Array) -> jax.Array:
        """[B, n, WIDTH], [B, n, n, PAIR], bool [B, n] -> [B, n, WIDTH]."""
        x = each(self.norm, atoms)
        query, key, value = jnp.moveaxis(each(self.qkv, x).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        bias = None if self.run == "no biases" else each(self.pair_bias, each(self.pair_norm, pairs))
        attention = fused_attention if self.run == "fusegrad" else plain_attention
        mixed = attention(query, key, value, bias, there).reshape(x.shape)
        return each(self.out, jax.nn.sigmoid(each(self.gate, x)) * mixed)


class Transition(eqx.Module):
    norm: eqx.nn.LayerNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.gate, self.up = (eqx.nn.Linear(WIDTH, 2 * WIDTH, use_bias=False, key=k) for k in keys[:2])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, use_bias=False, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = each(self.norm, x)
        return each(self.down, jax.nn.silu(each(self.gate, x)) * each(self.up, x))


class Model(eqx.Module):
    elements: eqx.nn.Embedding
    bonds: eqx.nn.Embedding
    distances: eqx.nn.Embedding
    blocks: list[tuple[AttentionPairBias, Transition]]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, run: str, key: jax.Array) -> None:
        keys = jax.random.split(key, 4 + 2 * LAYERS)
        self.elements = eqx.nn.Embedding(ELEMENTS, WIDTH, key=keys[0])
        self.bonds = eqx.nn.Embedding(len(BONDS), PAIR, key=keys[1])
        self.distances = eqx.nn.Embedding(DISTANCES, PAIR, key=keys[2])
        self.blocks = [(AttentionPairBias(run, a), Transition(t)) for a, t in zip(keys[4::2], keys[5::2], strict=True)]
        self.norm, self.head = eqx.nn.LayerNorm(WIDTH), eqx.nn.Linear(WIDTH, 1, key=keys[3])

    def __call__(self, batch: Any) -> jax.Array:
        """A number for each molecule: the sum of what its atoms contribute."""
        elements, bonds, distances, there, _ = batch
        atoms = self.elements.weight[elements]
        pairs = self.bonds.weight[bonds] + self.distances.weight[distances]
        for attention, transition in self.blocks:
            atoms = atoms + attention(atoms, pairs, there)
            atoms = atoms + transition(atoms)
        return jnp.where(there, each(self.head, each(self.norm, atoms))[..., 0], 0).sum(1)


def loss_of(model: Model, batch: Any) -> jax.Array:
    return jnp.square(model(batch) - batch[-1]).mean()


def pad(molecules: list[Molecule], n: int) -> tuple[jax.Array, ...]:
    """Elements [B, n], bonds and distances [B, n, n], which atoms there are [B, n], log P [B]."""
    elements = np.zeros((len(molecules), n), np.int32)
    bonds, distances = (np.zeros((len(molecules), n, n), np.int32) for _ in range(2))
    for g, m in enumerate(molecules):
        size = len(m.elements)
        elements[g, :size], bonds[g, :size, :size] = m.elements.numpy(), m.bonds.numpy()
        distances[g, :size, :size] = m.distances.numpy()
    there = np.arange(n) < np.array([[len(m.elements)] for m in molecules])
    return tuple(map(jnp.asarray, (elements, bonds, distances, there, np.array([m.label for m in molecules], "f4"))))


def batches(molecules: list[Molecule], n: int) -> Iterator[Any]:
    """Whole ones, of one shape: nothing is compiled twice."""
    for begin in range(0, len(molecules) - BATCH + 1, BATCH):
        yield pad(molecules[begin : begin + BATCH], n)


def train(run: str, molecules: list[Molecule], held_out: list[Molecule], epochs: int, n: int) -> list[float]:
    """The root mean square error of the molecules held out, after each epoch. All runs see the same in one order."""
    model = Model(run, jax.random.key(0))
    steps = epochs * (len(molecules) // BATCH)
    adam = optax.adam(optax.warmup_cosine_decay_schedule(0, 5e-3, steps // 5, steps))
    state = adam.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Model, state: Any, batch: Any) -> tuple[Model, Any]:
        updates, state = adam.update(eqx.filter_grad(loss_of)(model, batch), state)
        return eqx.apply_updates(model, updates), state

    loss, random, errors = eqx.filter_jit(loss_of), np.random.default_rng(0), []
    for _ in range(epochs):
        for batch in batches([molecules[m] for m in random.permutation(len(molecules))], n):
            model, state = step(model, state, batch)
        errors.append(float(np.sqrt(np.mean([loss(model, batch) for batch in batches(held_out, n)]))))
    print(f"{run:10s} error of log P {errors[-1]:.3f}", flush=True)
    return errors


def check_gradients(molecules: list[Molecule], n: int) -> None:
    """Compares those of the first step with plain attention's."""
    batch = pad(molecules[:4], n)
    gradient = eqx.filter_jit(eqx.filter_grad(loss_of))
    ours, plain = (jax.tree.leaves(gradient(Model(run, jax.random.key(1)), batch)) for run in RUNS[:2])
    for x, t in zip(ours, plain, strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-3, atol=1e-4 * max(1.0, float(jnp.abs(t).max())))
    print("The gradients are those of plain attention.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train AlphaFold 3's pair-biased attention in equinox on molecules.")
    parser.add_argument("--molecules", type=int, default=1000)
    parser.add_argument("--atoms", type=int, default=16, help="the most that a molecule has")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(arguments)
    molecules = load_molecules(options.molecules, max_atoms=options.atoms)
    order = np.random.default_rng(0).permutation(len(molecules))
    shuffled, count = [molecules[i] for i in order], len(molecules) // 5
    check_gradients(shuffled, options.atoms)
    errors = {run: train(run, shuffled[count:], shuffled[:count], options.epochs, options.atoms) for run in RUNS}
    draw_errors(errors, options.out / "jax_equinox.png", "Error of log P of molecules held out", "RMSE", "plain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
