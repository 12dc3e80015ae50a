"""score_mods and mask_mods from the field, in the words of JAX: those of score_mods.py, for every test of fusegrad.jax
that goes over them all.

Each case makes, for the sizes of a call (B, H, M queries, N keys), the captured arrays that get gradients, and a
function of these that makes a score_mod or None and a mask_mod or None. Arrays of floats are of the dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["CASES", "OWN_DERIVATIVES", "Case", "Draw", "over_all_pairs"]

Mods = tuple[Callable | None, Callable | None]
Made = tuple[list[jax.Array], Callable[..., Mods]]


@dataclass
class Draw:
    """The sizes of a call, and arrays for it."""

    B: int
    H: int
    M: int
    N: int
    dtype: Any
    generator: np.random.Generator

    @property
    def S(self) -> int:
        return max(self.M, self.N)

    def floats(self, *sizes: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * self.generator.standard_normal(sizes), self.dtype)

    def integers(self, high: int, *sizes: int) -> jax.Array:
        return jnp.asarray(self.generator.integers(high, size=sizes), jnp.int32)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[[Draw], Made]

    def make(self, B: int, H: int, M: int, N: int, dtype: Any, seed: int = 0) -> Made:
        """The captured arrays, and mods(*arrays) -> (score_mod, mask_mod)."""
        return self.function(Draw(B, H, M, N, dtype, np.random.default_rng(seed)))


def over_all_pairs(mod: Callable, sizes: tuple[int, int, int, int], score: jax.Array | None = None) -> jax.Array:
    """What JAX itself makes of a mod for [B, H, M, N]."""
    pairs = [x.reshape(-1) for x in jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in sizes), indexing="ij")]
    # For each pair by itself: vmap over one index at a time would compute once what does not depend on it.
    return jax.vmap(mod)(*(() if score is None else (score.reshape(-1),)), *pairs).reshape(sizes)


CASES: list[Case] = []


def case(function: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    CASES.append(Case(function.__name__, function))
    return function


def with_mask(name: str, make: Callable[[Draw], Callable]) -> None:
    def function(d: Draw) -> Made:
        mask = make(d)
        return [], lambda: (None, mask)

    CASES.append(Case(name, function))


def with_score(name: str, make: Callable[[Draw], Callable], mask: Callable | None = None) -> None:
    def function(d: Draw) -> Made:
        score_mod = make(d)
        return [], lambda: (score_mod, mask)

    CASES.append(Case(name, function))


def with_floats(
    name: str, sizes: Callable[[Draw], tuple[int, ...]], make: Callable[[jax.Array, Draw], Callable]
) -> None:
    def function(d: Draw) -> Made:
        return [d.floats(*sizes(d))], lambda t: (make(t, d), None)

    CASES.append(Case(name, function))


# --- masks ----------------------------------------------------------------------------------------------------


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def and_masks(*masks: Callable) -> Callable:
    return lambda b, h, q, kv: functools.reduce(lambda x, y: x & y, (mask(b, h, q, kv) for mask in masks))


def or_masks(*masks: Callable) -> Callable:
    return lambda b, h, q, kv: functools.reduce(lambda x, y: x | y, (mask(b, h, q, kv) for mask in masks))


def sliding_window(window: int) -> Callable:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= window)


with_mask("causal mask", lambda d: causal_mask)
with_mask("no mask", lambda d: lambda b, h, q, kv: jnp.ones((), bool))
with_mask("sliding window", lambda d: sliding_window(3))
with_mask("symmetric window", lambda d: lambda b, h, q, kv: jnp.abs(q - kv) <= 2)
with_mask("sinks", lambda d: or_masks(lambda b, h, q, kv: kv < 2, sliding_window(3)))


@case
def dilated_window(d: Draw) -> Made:
    def mask(b, h, q_idx, kv_idx):
        distance = jnp.abs(q_idx - kv_idx)
        return (distance <= 8) & (distance % 2 == 0)

    return [], lambda: (None, mask)


@case
def prefix_lm(d: Draw) -> Made:
    prefix_length = d.integers(d.N, d.B)
    return [], lambda: (None, or_masks(lambda b, h, q, kv: kv < prefix_length[b], causal_mask))


@case
def document_mask(d: Draw) -> Made:
    document = jnp.sort(d.integers(3, d.S))
    return [], lambda: (None, and_masks(lambda b, h, q, kv: document[q] == document[kv], causal_mask))


@case
def document_mask_by_offsets(d: Draw) -> Made:
    lengths = [d.S // 2, d.S - d.S // 2]
    offsets = jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
    document = jnp.asarray(np.repeat(np.arange(2), lengths), jnp.int32)
    inner = sliding_window(2)

    def mask(b, h, q_idx, kv_idx):
        q, kv = q_idx - offsets[document[q_idx]], kv_idx - offsets[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & inner(b, h, q, kv)

    return [], lambda: (None, mask)


@case
def natten_mask(d: Draw) -> Made:
    width, kernel_size = 4, 3

    def mask(b, h, q_idx, kv_idx):
        half = kernel_size // 2
        x = jnp.clip(q_idx // width, half, width - 1 - half)
        y = jnp.clip(q_idx % width, half, width - 1 - half)
        return (jnp.abs(x - kv_idx // width) <= half) & (jnp.abs(y - kv_idx % width) <= half)

    return [], lambda: (None, mask)


@case
def mask_of_a_head(d: Draw) -> Made:
    window_of_head = jnp.arange(1, d.H + 1)
    return [], lambda: (None, lambda b, h, q, kv: jnp.where(h % 2 == 0, q >= kv, q - kv <= window_of_head[h]))


@case
def captured_mask(d: Draw) -> Made:
    allowed = jnp.asarray(d.generator.random((d.B, d.M, d.N)) < 0.7)
    return [], lambda: (None, lambda b, h, q, kv: allowed[b, q, kv])


@case
def padding_mask(d: Draw) -> Made:
    length = d.integers(d.N + 1, d.B)
    return [], lambda: (None, lambda b, h, q, kv: jnp.logical_and(kv < length[b], ~(q >= length[b])))


@case
def causal_with_offset(d: Draw) -> Made:
    offset = jnp.asarray(d.N - d.M, jnp.int32)
    return [], lambda: (None, lambda b, h, q, kv: q + offset >= kv)


@case
def shared_question_mask(d: Draw) -> Made:
    groups = d.integers(3, d.S)
    return [], lambda: (None, lambda b, h, q, kv: ((groups[kv] == 0) | (groups[q] == groups[kv])) & (kv <= q))


# --- scores without parameters --------------------------------------------------------------------------------

with_score("identity", lambda d: lambda s, b, h, q, kv: s)
with_score("causal", lambda d: lambda s, b, h, q, kv: jnp.where(q >= kv, s, -jnp.inf))
with_score("inverse causal", lambda d: lambda s, b, h, q, kv: jnp.where(q <= kv, s, -jnp.inf))
with_score("times two", lambda d: lambda s, b, h, q, kv: s * 2)
with_score("squared", lambda d: lambda s, b, h, q, kv: s * s - 0.5 * s**2)
with_score("relative bias", lambda d: lambda s, b, h, q, kv: s + (q - kv))
with_score("head offset", lambda d: lambda s, b, h, q, kv: s + 2 * h)
with_score("softcap", lambda d: lambda s, b, h, q, kv: 20 * jnp.tanh(s / 20), causal_mask)
with_score("alibi", lambda d: lambda s, b, h, q, kv: s + (kv - q) * jnp.exp2(-((h + 1) * 8.0 / d.H)), causal_mask)


@case
def checkerboard(d: Draw) -> Made:
    def score_mod(score, b, h, q_idx, kv_idx):
        score = jnp.where(jnp.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
        return lax.cond(jnp.abs(kv_idx - q_idx) % 2 == 0, lambda x: x * 2.0, lambda x: x, score)

    return [], lambda: (score_mod, None)


@case
def activations(d: Draw) -> Made:
    def score_mod(s, b, h, q, kv):
        n = jax.nn
        s = n.gelu(s, approximate=False) + jnp.tanh(n.silu(s)) + n.softplus(s) + n.leaky_relu(s, 0.1) + n.elu(s)
        s = s + n.log_sigmoid(s) + n.hard_swish(s) + n.sigmoid(s) + n.gelu(s) + n.relu(s) + n.celu(s) + n.selu(s)
        s = s + lax.erf(s) + n.mish(s) + jnp.clip(s, -3, 3) + n.hard_tanh(s) + n.soft_sign(s) + n.relu6(s)
        return (
            s
            + n.squareplus(s)
            + n.hard_sigmoid(s)
            + jnp.logaddexp(s, 0.3)
            + lax.clamp(jnp.full_like(s, -1.0), s, jnp.full_like(s, 1.5))
        )

    return [], lambda: (score_mod, None)


@case
def functions(d: Draw) -> Made:
    def score_mod(s, b, h, q, kv):
        p = jnp.abs(s) + 0.5
        s = s + jnp.log(p) + jnp.log2(p) + jnp.log10(p) + jnp.log1p(p) + jnp.sqrt(p) + lax.rsqrt(p) + 1 / p + p**1.5
        x = jnp.sin(s)  # within 1: near a pole, or of a large power, one rounding of s would be many of the gradient
        s = s + x + jnp.cos(s) + jnp.tan(x) + jnp.exp(-p) + jnp.exp2(-p) + jnp.expm1(-p) + jnp.cbrt(p)
        s = s + jnp.arctan2(s, p) + jnp.hypot(s, p) + jnp.arcsinh(s) + jnp.sinh(-p) + p**-2 + x**3
        return s + jnp.fmod(s, 1.7) + s % 1.3 + jnp.round(s) * 0.1 + jnp.floor(s) + jnp.ceil(s) + jnp.trunc(s) + 2 - p

    return [], lambda: (score_mod, None)


@case
def integers_and_bools(d: Draw) -> Made:
    def score_mod(s, b, h, q, kv):
        near = jnp.abs(q - kv) < 3
        steps = lax.div(q - kv, jnp.int32(3)) + (q - kv) // 3 + lax.rem(q - kv, jnp.int32(3)) + (q - kv) % 3
        bits = ((q ^ kv) & 3) + (q << 1) - (kv >> 1) + (q | 1) + ~q
        return s + near + (near | (q == 0)).astype(s.dtype) + steps / 4 + bits * 0.1 + jnp.sign(q - kv) + near * s

    return [], lambda: (score_mod, None)


# --- biases ---------------------------------------------------------------------------------------------------

with_floats("bias of a head", lambda d: (d.H,), lambda t, d: lambda s, b, h, q, kv: s + t[h])
with_floats("scale of a head", lambda d: (d.H,), lambda t, d: lambda s, b, h, q, kv: s * t[h])
with_floats("bias of a key", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + t[kv])
with_floats("bias of a query", lambda d: (d.M,), lambda t, d: lambda s, b, h, q, kv: s + t[q])
with_floats("bias of a pair", lambda d: (d.M, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[q, kv])
with_floats("full bias", lambda d: (d.B, d.H, d.M, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[b, h, q, kv])
with_floats("indexed one by one", lambda d: (d.B, d.H, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[b][h][kv])
with_floats("transposed", lambda d: (d.N, d.H), lambda t, d: lambda s, b, h, q, kv: s + t.T[h, kv])
with_floats("relative", lambda d: (2 * d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[q - kv + d.S])
with_floats("relative of a head", lambda d: (d.H, 2 * d.S), lambda t, d: lambda s, b, h, q, kv: s + t[h, q - kv + d.S])
with_floats("negative indices", lambda d: (2 * d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[kv - q])
with_floats("learned softcap", lambda d: (), lambda t, d: lambda s, b, h, q, kv: t * jnp.tanh(s / t))
with_floats("without the score", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: t[kv] * 2)
with_floats("read twice", lambda d: (d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[q] * t[kv])
with_floats(
    "read twice at one place", lambda d: (d.S,), lambda t, d: lambda s, b, h, q, kv: (s + t[q]) * jax.nn.sigmoid(t[q])
)
with_floats("last element", lambda d: (3,), lambda t, d: lambda s, b, h, q, kv: s * t[-1] + t[0])
with_floats("made before", lambda d: (d.N,), lambda t, d: (lambda u: lambda s, b, h, q, kv: s + u[kv])(jnp.exp(t) * 2))
with_floats("made within", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + (jnp.exp(t) * 2)[kv])
with_floats(
    "expanded", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + jnp.broadcast_to(t, (d.H, d.N))[h, kv]
)
with_floats("take", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + jnp.take(t, kv) * t.take(kv, mode="clip"))
with_floats(
    "gather",
    lambda d: (d.H, d.N),
    lambda t, d: lambda s, b, h, q, kv: s + jnp.take_along_axis(t[h], kv[None], 0)[0] * jnp.take(t, h, axis=0)[0],
)
with_floats("reshaped", lambda d: (d.H, d.N), lambda t, d: lambda s, b, h, q, kv: s + t.reshape(-1)[h * d.N + kv])
with_floats("clipped reads", lambda d: (4,), lambda t, d: lambda s, b, h, q, kv: s + t[q + 2] * t[q - kv])
with_floats(
    "filled reads",
    lambda d: (4,),
    lambda t, d: lambda s, b, h, q, kv: s + t.at[q - kv].get(mode="fill", fill_value=0.5) * t.at[kv].get(mode="clip"),
)
with_floats(
    "promised reads",
    lambda d: (d.M,),
    lambda t, d: lambda s, b, h, q, kv: s + t.at[q].get(mode="promise_in_bounds"),
)
with_floats(
    "clamped distance",
    lambda d: (d.H, 9),
    lambda t, d: lambda s, b, h, q, kv: s + t[h, jnp.clip(q - kv, -4, 4) + 4],
)


@case
def product_of_vectors(d: Draw) -> Made:
    return [d.floats(d.H, 3), d.floats(d.N, 3)], lambda a, w: (lambda s, b, h, q, kv: s + (a[h] * w[kv]).sum(), None)


@case
def dot_products(d: Draw) -> Made:
    def mods(a, w, m):
        def score_mod(s, b, h, q, kv):
            return s + a[q] @ w[kv] + jnp.dot(a[q], m @ w[kv]) - jnp.einsum("i,i->", a[q], w[kv]) / 3

        return score_mod, None

    return [d.floats(d.M, 3), d.floats(d.N, 3), d.floats(3, 3)], mods


@case
def stacked(d: Draw) -> Made:
    def mods(w):
        def score_mod(s, b, h, q, kv):
            features = jnp.stack([s, (q - kv) / 4, jnp.ones_like(s)])
            total = (features * w).sum() + jnp.concatenate([features, w]).max() + jax.nn.softmax(features * w)[0]
            return total + jnp.cumsum(features)[1] + jnp.sort(features * w)[2] + jnp.argmax(features) + w.mean()

        return score_mod, None

    return [d.floats(3)], mods


@case
def small_network(d: Draw) -> Made:
    """A continuous position bias: a network of the distance."""

    def mods(w1, b1, w2):
        def score_mod(s, b, h, q, kv):
            x = jnp.stack([(q - kv) / 8, (h + 1) / 2]).astype(w1.dtype)
            return s + (jax.nn.relu(jnp.tanh(x @ w1 + b1)) @ w2)[0] + (jax.nn.softplus(x @ w1) @ w2)[0]

        return score_mod, None

    return [d.floats(2, 4), d.floats(4), d.floats(4, 1)], mods


@case
def vector_times_matrix(d: Draw) -> Made:
    def mods(a, m):
        def score_mod(s, b, h, q, kv):
            return s + (a[h] @ m)[0] + (jnp.stack([s, s * 2, s - 1]) @ m).sum() + (m.T @ a[h])[1] * s

        return score_mod, None

    return [d.floats(d.H, 3), d.floats(3, 2)], mods


@case
def bias_and_scale(d: Draw) -> Made:
    def mods(bias, scale, shift):
        return lambda s, b, h, q, kv: s * scale[b, h] + bias[h, kv] * shift, causal_mask

    return [d.floats(d.H, d.N), d.floats(d.B, d.H), d.floats()], mods


@case
def learned_alibi(d: Draw) -> Made:
    return [d.floats(d.H)], lambda t: (lambda s, b, h, q, kv: s + (kv - q) * jnp.exp(t)[h], causal_mask)


@case
def bias_by_offset(d: Draw) -> Made:
    offset = d.integers(d.N, d.M)
    return [d.floats(d.N)], lambda bias: (lambda s, b, h, q, kv: s + bias[offset[q]], None)


@case
def gather_of_a_gather(d: Draw) -> Made:
    first, second = d.integers(5, d.B, d.M), d.integers(7, 5)

    def mods(bias):
        return lambda s, b, h, q, kv: s + bias[second[first[b, q]]] * bias[second[first[b, q]] - 1], None

    return [d.floats(7)], mods


@case
def index_from_the_score(d: Draw) -> Made:
    def mods(bias):
        return lambda s, b, h, q, kv: s + bias[jnp.clip((s * 2).astype(jnp.int32), -4, 4) + 4], None

    return [d.floats(9)], mods


def t5_bucket(relative_position: jax.Array, num_buckets: int, max_distance: int) -> jax.Array:
    n = jnp.maximum(relative_position, 0)
    max_exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(n, 1).astype(jnp.float32) / max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (ratio * (num_buckets - max_exact)).astype(jnp.int32)
    return jnp.where(n < max_exact, n, jnp.minimum(large, num_buckets - 1))


@case
def t5(d: Draw) -> Made:
    return [d.floats(8, d.H)], lambda t: (lambda s, b, h, q, kv: s + t[t5_bucket(q - kv, 8, 16), h], causal_mask)


@case
def t5_by_a_table(d: Draw) -> Made:
    buckets = t5_bucket(jnp.arange(-d.S, d.S), 8, 16)
    return [d.floats(8, d.H)], lambda t: (lambda s, b, h, q, kv: s + t[buckets[q - kv + d.S], h], None)


@case
def swin(d: Draw) -> Made:
    """A relative bias in two dimensions."""
    width = 4
    rows = (d.S + width - 1) // width

    def mods(table):
        def score_mod(score, b, h, q_idx, kv_idx):
            dx = q_idx // width - kv_idx // width + rows
            dy = q_idx % width - kv_idx % width + width
            return score + table[dx, dy, h]

        return score_mod, None

    return [d.floats(2 * rows, 2 * width, d.H)], mods


@case
def graphormer(d: Draw) -> Made:
    """Biases of the distance between two nodes, and of the mean of the edges on a path between them."""
    distance, path = d.integers(5, d.B, d.M, d.N), d.integers(4, d.B, d.M, d.N, 2)

    def mods(spatial, edge):
        def score_mod(score, b, h, q_idx, kv_idx):
            edges = edge[path[b, q_idx, kv_idx], h].mean()
            return score + spatial[distance[b, q_idx, kv_idx], h] + edges

        return score_mod, None

    return [d.floats(5, d.H), d.floats(4, d.H)], mods


@case
def pair_bias(d: Draw) -> Made:
    """AlphaFold 3's: a projection of the pair representation, made by the layer, and its mask."""
    mask = jnp.asarray(d.generator.random((d.B, d.N)) < 0.9)

    def mods(pair, weight):
        bias = jnp.einsum("bqkc,ch->bhqk", pair, weight)

        def score_mod(s, b, h, q, kv):
            return jnp.where(mask[b, kv], s + bias[b, h, q, kv], -1e9)

        return score_mod, None

    return [d.floats(d.B, d.M, d.N, 3), d.floats(3, d.H)], mods


@case
def learned_sinks(d: Draw) -> Made:
    return [d.floats(d.H)], lambda t: (lambda s, b, h, q, kv: jnp.where(kv == 0, t[h], s), causal_mask)


@case
def document_bias(d: Draw) -> Made:
    """One array of document ids read by the score_mod and the mask_mod."""
    document = d.integers(3, d.B, d.S)

    def mods(bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[document[b, q_idx], document[b, kv_idx]]

        return score_mod, lambda b, h, q, kv: (document[b, q] == document[b, kv]) | (q >= kv)

    return [d.floats(3, 3)], mods


@case
def float_buffer_in_both(d: Draw) -> Made:
    def mods(threshold):
        return (
            lambda s, b, h, q, kv: s * threshold[kv],
            lambda b, h, q, kv: (threshold[kv] > 0) | (q == kv),
        )

    return [d.floats(d.N)], mods


@case
def bf16_bias(d: Draw) -> Made:
    return [d.floats(d.H, d.N).astype(jnp.bfloat16)], lambda t: (lambda s, b, h, q, kv: s + t[h, kv], None)


@case
def frozen_bias(d: Draw) -> Made:
    bias = d.floats(d.N)
    return [d.floats(d.H)], lambda scale: (lambda s, b, h, q, kv: s * scale[h] + bias[kv], None)


@case
def stopped_bias(d: Draw) -> Made:
    def mods(t):
        return lambda s, b, h, q, kv: s * lax.stop_gradient(t[kv]) + t[kv] + lax.stop_gradient(t)[kv] * 2, None

    return [d.floats(d.N)], mods


@case
def slice_of_a_bias(d: Draw) -> Made:
    def mods(bias):
        return lambda s, b, h, q, kv: s + bias[1, :, 2:][h, kv] + bias[..., kv][1, h] + bias[::-1][0, h, kv + 1], None

    return [d.floats(3, d.H, d.N + 2)], mods


# --- ways to capture ------------------------------------------------------------------------------------------

GLOBAL_SCALE = 0.75


def helper(x):
    return x * GLOBAL_SCALE


with_score("a global number", lambda d: lambda s, b, h, q, kv: helper(s) + GLOBAL_SCALE)


@jax.tree_util.register_pytree_node_class
class Bias:
    """A module, as equinox's and flax's are: a pytree with methods."""

    def __init__(self, bias: jax.Array, window: int) -> None:
        self.bias, self.window, self.scale = bias, window, 0.5

    def tree_flatten(self):
        return (self.bias,), self.window

    @classmethod
    def tree_unflatten(cls, window, leaves):
        return cls(*leaves, window)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self.scale * score + self.row(h)[kv_idx]

    def row(self, h):
        return self.bias[h]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.window


@case
def module(d: Draw) -> Made:
    def mods(bias):
        made = Bias(bias, 4)
        return made, made.mask_mod

    return [d.floats(d.H, d.N)], mods


@case
def partial(d: Draw) -> Made:
    def score_mod(score, b, h, q_idx, kv_idx, bias, scale):
        return score * scale + bias[kv_idx]

    return [d.floats(d.N)], lambda bias: (functools.partial(score_mod, bias=bias, scale=0.3), None)


@case
def defaults_and_keywords(d: Draw) -> Made:
    def mods(bias):
        def score_mod(score, b, h, q_idx, kv_idx, bias=bias, *, scale=0.3):
            return score * scale + bias[kv_idx]

        return score_mod, None

    return [d.floats(d.N)], mods


@case
def nested_functions(d: Draw) -> Made:
    options = {"scale": 2.0, "limits": [3, 5]}

    def mods(bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            total = score * options["scale"] + bias[kv_idx]
            for limit in options["limits"]:
                total = jnp.where(kv_idx > limit, total * 0.5, total)
            return total

        return score_mod, None

    return [d.floats(d.N)], mods


@case
def tree_partial(d: Draw) -> Made:
    def score_mod(bias, score, b, h, q_idx, kv_idx):
        return score + bias["of_keys"][kv_idx] * bias["scale"]

    def mods(bias, scale):
        return jax.tree_util.Partial(score_mod, {"of_keys": bias, "scale": scale}), None

    return [d.floats(d.N), d.floats()], mods


@case
def jitted_and_checkpointed(d: Draw) -> Made:
    def mods(bias):
        inner = jax.jit(lambda s, kv: s * jnp.sin(bias[kv]))
        outer = jax.checkpoint(lambda s, kv: inner(s, kv) + jnp.cos(s))
        return lambda s, b, h, q, kv: outer(s, kv), None

    return [d.floats(d.N)], mods


@case
def several_score_mods(d: Draw) -> Made:
    """Composition, as people write it."""

    def mods(bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            for mod in (lambda s, b, h, q, kv: 5.0 * jnp.tanh(s / 5.0), lambda s, b, h, q, kv: s + bias[kv]):
                score = mod(score, b, h, q_idx, kv_idx)
            return score

        return score_mod, None

    return [d.floats(d.N)], mods


@case
def loops(d: Draw) -> Made:
    def mods(w):
        def score_mod(s, b, h, q, kv):
            total = lax.fori_loop(0, 3, lambda i, c: c * 0.5 + w[i] * jnp.sin(c), s)
            _, parts = lax.scan(lambda c, x: (c + x, c * x), s, w)
            return total + parts.sum() + lax.switch(h % 3, [lambda x: x, jnp.sin, lambda x: x * x], s)

        return score_mod, None

    return [d.floats(3)], mods


@case
def written_elements(d: Draw) -> Made:
    def mods(w):
        def score_mod(s, b, h, q, kv):
            v = w.at[1].set(s).at[h % 3].add(2 * s)
            u = lax.dynamic_update_slice(jnp.zeros(4, s.dtype), jnp.stack([s, s * 2]), (q % 4,))
            return v @ w + u[2] + jnp.pad(v, (1, 2), constant_values=0.5)[q % 6] + jnp.flip(v)[0]

        return score_mod, None

    return [d.floats(3)], mods


# --- with derivatives of their own ------------------------------------------------------------------------------

OWN_DERIVATIVES: list[Case] = []
"""custom_jvp and custom_vjp."""


def own_derivative(function: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    OWN_DERIVATIVES.append(Case(function.__name__, function))
    return function


@jax.custom_vjp
def rounded(x, step):
    return jnp.round(x / step) * step


rounded.defvjp(lambda x, step: (rounded(x, step), None), lambda _, d: (d, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x, bound):
    """Its backward is not linear."""
    return x


clipped_gradient.defvjp(lambda x, bound: (x, None), lambda bound, _, d: (jnp.clip(d, -bound, bound),))


@jax.custom_vjp
def gated(x, gate):
    return x * jax.nn.sigmoid(gate), x + gate


def _gated_backward(saved, d):
    x, gate, product = saved
    return d[0] * jax.nn.sigmoid(gate) + d[1] * 0.5, d[0] * (product - x * 0.25)


gated.defvjp(lambda x, gate: (gated(x, gate), (x, gate, gated(x, gate)[0])), _gated_backward)


@jax.custom_jvp
def approximate_tanh(x):
    return jnp.tanh(x)


@approximate_tanh.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.tanh(x), (1 - 0.9 * jnp.tanh(x) ** 2) * dx


@jax.custom_jvp
def normalized(v):
    return v / jnp.sqrt((v * v).sum() + 1.0)


@normalized.defjvp
def _(primals, tangents):
    (v,), (dv,) = primals, tangents
    return normalized(v), dv * 0.5 + v.sum() * dv[::-1]


@own_derivative
def straight_through(d: Draw) -> Made:
    def mods(bias):
        return lambda s, b, h, q, kv: s + rounded(bias[kv], 0.5) * jnp.sin(s), causal_mask

    return [d.floats(d.N)], mods


@own_derivative
def clipped(d: Draw) -> Made:
    def mods(bias):
        return lambda s, b, h, q, kv: clipped_gradient(s + clipped_gradient(bias[h, kv], 0.01), 0.02), None

    return [d.floats(d.H, d.N)], mods


@own_derivative
def gated_pair(d: Draw) -> Made:
    def mods(bias):
        def score_mod(s, b, h, q, kv):
            product, total = gated(s, bias[q])
            return jnp.where(q > kv, product, jnp.sin(product) + total)

        return score_mod, None

    return [d.floats(d.M)], mods


@own_derivative
def softcap_by_a_rule(d: Draw) -> Made:
    return [], lambda: (lambda s, b, h, q, kv: 20 * approximate_tanh(s / 20), causal_mask)


@own_derivative
def own_rule_of_a_vector(d: Draw) -> Made:
    def mods(a, w):
        def score_mod(s, b, h, q, kv):
            v = normalized(jnp.stack([s, a[h], s * 2]))
            return s + v @ w + approximate_tanh(w * s).sum()

        return score_mod, None

    return [d.floats(d.H), d.floats(3)], mods


@own_derivative
def own_rule_before(d: Draw) -> Made:
    """The rule of captured arrays alone: JAX's."""
    return [d.floats(d.N)], lambda t: (lambda s, b, h, q, kv: s * rounded(t, 0.5)[kv], None)
