"""What people write in score_mods with jax.numpy, jax.nn, jax.lax and JAX's transforms within."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from coverings import rows_of

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax_mods_support import check_score_mod  # noqa: E402

_generator = np.random.default_rng(0)
TABLE, ROW = _generator.standard_normal((6, 4)), _generator.standard_normal(4)
SORTED = np.sort(_generator.standard_normal(8))


def four(s: Any) -> Any:
    return jnp.stack([s, 2 * s, jnp.sin(s), s * s])


@jax.custom_gradient
def product(x: Any, y: Any) -> Any:
    return x * y, lambda d: (d * 0.5, d * y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x: Any, n: int) -> Any:
    return x**n


@power.defjvp
def _(n: int, primals: Any, tangents: Any) -> Any:
    return power(*primals, n), 7.0 * tangents[0]


@jax.custom_vjp
def of_a_tree(tree: Any) -> Any:
    return {"out": tree["a"] * tree["b"][0]}


of_a_tree.defvjp(
    lambda tree: (of_a_tree(tree), tree), lambda tree, d: ({"a": d["out"] * 3, "b": (d["out"] * tree["a"],)},)
)

# For s, q, kv, and the captured table t [6, 4], row w [4] and ascending x [8].
Function = Callable[[Any, Any, Any, Any, Any, Any], Any]
FUNCTIONS: dict[str, Function] = {
    "custom_gradient": lambda s, q, kv, t, w, x: product(s, t[q, 1]),
    "custom_jvp with a number": lambda s, q, kv, t, w, x: power(s, 3),
    "custom_vjp of a tree": lambda s, q, kv, t, w, x: of_a_tree({"a": s, "b": (t[q, 0],)})["out"],
    "grad within": lambda s, q, kv, t, w, x: jax.grad(lambda y: jnp.tanh(y) * y**3)(s),
    "jacfwd within": lambda s, q, kv, t, w, x: jnp.trace(jax.jacfwd(lambda y: jnp.sin(y) * y.sum())(four(s))),
    "vmap within": lambda s, q, kv, t, w, x: jax.vmap(lambda i: t[i, kv % 4] * s)(jnp.arange(3) + q % 2).sum(),
    "vmap of rows": lambda s, q, kv, t, w, x: jax.vmap(lambda r, i: r[i])(t[:4] * s, (jnp.arange(4) + q) % 4).sum(),
    "vmap of dot": lambda s, q, kv, t, w, x: jax.vmap(jnp.dot, (0, None))(t * s, w)[q],
    "interp": lambda s, q, kv, t, w, x: jnp.interp(s, x, x**2),
    "searchsorted": lambda s, q, kv, t, w, x: s + jnp.searchsorted(x, s),
    "searchsorted, all": lambda s, q, kv, t, w, x: s + jnp.searchsorted(x, s, side="right", method="compare_all"),
    "digitize": lambda s, q, kv, t, w, x: s + jnp.digitize(s, x),
    "polyval": lambda s, q, kv, t, w, x: jnp.polyval(w, s),
    "select": lambda s, q, kv, t, w, x: jnp.select([s > 1, s > 0], [s * 2, s * 3], s),
    "piecewise": lambda s, q, kv, t, w, x: jnp.piecewise(s, [s < 0, s > 1], [lambda y: -y, lambda y: y * y, jnp.sin]),
    "median": lambda s, q, kv, t, w, x: jnp.median(four(s)),
    "percentile": lambda s, q, kv, t, w, x: jnp.percentile(four(s), 30),
    "cross": lambda s, q, kv, t, w, x: jnp.cross(four(s)[:3], t[q, :3]).sum(),
    "kron": lambda s, q, kv, t, w, x: jnp.kron(four(s), w)[q],
    "diff": lambda s, q, kv, t, w, x: jnp.diff(four(s) * w)[q % 3],
    "trapezoid": lambda s, q, kv, t, w, x: jnp.trapezoid(four(s)),
    "lax.map": lambda s, q, kv, t, w, x: lax.map(lambda y: y * s, w).sum(),
    "associative_scan": lambda s, q, kv, t, w, x: lax.associative_scan(jnp.add, four(s))[2],
    "layer norm": lambda s, q, kv, t, w, x: (
        (t[q] * s - (t[q] * s).mean()) / jnp.sqrt((t[q] * s).var() + 1e-5) * w
    ).sum(),
    "standardize": lambda s, q, kv, t, w, x: jax.nn.standardize(t[q] * s)[1],
    "glu": lambda s, q, kv, t, w, x: jax.nn.glu(four(s)).sum(),
    "log_softmax": lambda s, q, kv, t, w, x: jax.nn.log_softmax(four(s))[kv % 4],
    "einsum": lambda s, q, kv, t, w, x: jnp.einsum("ij,kj,k->i", t, t * s, t[:, 1])[q],
    "matmul": lambda s, q, kv, t, w, x: (t @ jnp.outer(w, four(s)))[q, kv % 4],
    "roll": lambda s, q, kv, t, w, x: jnp.roll(four(s), q % 3)[1],
    "take_along_axis": lambda s, q, kv, t, w, x: jnp.take_along_axis(t * s, (jnp.arange(6)[:, None] * q) % 4, 1).sum(),
    "triu": lambda s, q, kv, t, w, x: jnp.triu(t[:4] * s).sum(),
    "isin": lambda s, q, kv, t, w, x: s * jnp.isin(q, jnp.array([1, 3])),
    "rotary": lambda s, q, kv, t, w, x: s + jnp.cos((q - kv) * 10000.0 ** (-jnp.arange(0, 8, 2) / 8)).sum(),
    "of one number": lambda s, q, kv, t, w, x: (
        jnp.hypot(s, w[0])
        + jnp.logaddexp2(s, 1.0)
        + jnp.sinc(s)
        + jnp.heaviside(s, 0.5)
        + jnp.copysign(s, -1.0)
        + jnp.float_power(jnp.abs(s) + 1, 2)
        + jnp.rad2deg(s)
        + jnp.exp2(s)
        + jnp.reciprocal(s + 5)
        + jnp.fabs(s)
    ),
    "of integers": lambda s, q, kv, t, w, x: (
        s + q // (kv + 1) + jnp.divmod(q - kv, 3)[1] + jnp.sign(q - kv) + jnp.power(q, 2) + jnp.left_shift(q, 1) + q**3
    ),
    "indices of all kinds": lambda s, q, kv, t, w, x: (
        t[jnp.array([q, kv]), :][0, 1] * s
        + t[q][None, :][0, 2]
        + t[..., 1][kv]
        + t[(q, 1)]
        + t[q, None, 3][0]
        + t[-1, 2]
    ),
    "sums of some": lambda s, q, kv, t, w, x: (
        jnp.sum(t[:, 0] * s, where=t[:, 1] > 0)
        + jnp.max(t[:, 0] * s, where=t[:, 1] > 0, initial=-1.0)
        + jnp.mean(four(s), where=four(s) > 0)
        + jnp.nanmean(four(s))
        + jnp.average(four(s), weights=jnp.abs(w))
    ),
    "segment_sum": lambda s, q, kv, t, w, x: jax.ops.segment_sum(four(s), jnp.array([0, 1, 0, 1]), 2)[q % 2],
    "argsort": lambda s, q, kv, t, w, x: (four(s)[jnp.argsort(four(s))] * w).sum() + jnp.ptp(four(s)),
    "det": lambda s, q, kv, t, w, x: jnp.linalg.det(jnp.eye(2) * s + t[:2, :2]),
    "casts": lambda s, q, kv, t, w, x: (s.astype(jnp.float32) * 2).astype(s.dtype),
    "randomness outside": lambda s, q, kv, t, w, x: s * jax.random.uniform(jax.random.key(0), (6,))[q],
    "numbers that are written down": lambda s, q, kv, t, w, x: (
        s + jnp.linspace(0, 1, 100)[q] + jnp.arange(7)[::-1][kv] + jnp.eye(6)[q, kv] + jnp.full((3, 3), 2.0)[1, q % 3]
    ),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@rows_of("name", [*FUNCTIONS][::2], tests=2)
def test_functions(name: str) -> None:
    check(name)


@pytest.mark.large
@rows_of("name", [*FUNCTIONS][1::2], tests=2)
def test_more_functions(name: str) -> None:
    check(name)


def check(name: str) -> None:
    function = FUNCTIONS[name]

    def make(table: jax.Array, row: jax.Array, ascending: jax.Array) -> Any:
        return lambda s, b, h, q, kv: function(s, q, kv, table, row, ascending)

    # What some arrays do not enter has no gradient for them; all are checked.
    check_score_mod(make, [jnp.asarray(x) for x in (TABLE, ROW, SORTED)], (2, 3, 6, 6))
