"""What the tests of fusegrad.jax.flex_attention share: devices, arrays, mods, formulas, and the bounds of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import fusegrad.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import AuxRequest, create_block_mask, flex_attention  # noqa: E402
from jax_score_mods import Case, over_all_pairs  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if fj.build_has_cuda and jax.default_backend() == "gpu" else [])]
everywhere = pytest.mark.parametrize("device", DEVICES)
OP = "fusegrad.jax.flex_attention"


@pytest.fixture(autouse=True)
def exact(request: pytest.FixtureRequest) -> Any:
    """float64 for the formulas, products of float32 that are not TF32, and the test's device for what it does not
    place."""
    callspec = getattr(request.node, "callspec", None)
    device = "cpu" if callspec is None else callspec.params.get("device", "cpu")
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(on(device)):
        yield


def on(device: str) -> Any:
    return jax.devices("cpu" if device == "cpu" else "gpu")[0]


class Maker:
    """Arrays of normal numbers."""

    def __init__(self, device: str = "cpu", dtype: Any = jnp.float64, seed: int = 0) -> None:
        self.rng, self.device, self.dtype = np.random.default_rng(seed), device, jnp.dtype(dtype)

    def __call__(self, *shape: int, dtype: Any = None) -> Any:
        return jax.device_put(self.rng.standard_normal(shape).astype(dtype or self.dtype), on(self.device))

    def integers(self, most: int, *shape: int) -> Any:
        return jax.device_put(self.rng.integers(0, most, shape).astype(np.int32), on(self.device))


@dataclass(frozen=True)
class Sizes:
    B: int = 2
    H: int = 4
    M: int = 70
    N: int = 90
    D: int = 16
    E: int = 24
    key_heads: int = 4
    key_batch: int = 2


def plain(
    query: Any,
    key: Any,
    value: Any,
    mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    keep: Any = None,
) -> tuple[Any, Any, Any]:
    """out, lse and the largest scores by formulas in the arguments' dtype, as a model without a kernel has them:
    products are rounded to it. `keep`: weights of dropout."""
    B, H, M, D = query.shape
    N = key.shape[2]
    key, value = (jnp.broadcast_to(x, (B, *x.shape[1:])) for x in (key, value))
    key, value = (jnp.repeat(x, H // x.shape[1], 1) for x in (key, value))
    acc = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bhmd,bhnd->bhmn", query, key).astype(acc) * D**-0.5
    if mod is not None:
        scores = over_all_pairs(mod, (B, H, M, N), scores).astype(acc)
    if mask is not None:
        scores = jnp.where(over_all_pairs(mask, (B, H, M, N)), scores, -jnp.inf)
    # By its place: XLA computes scores again, rounded in another way, and max's own derivative then finds none equal.
    top = jnp.take_along_axis(scores, scores.argmax(-1)[..., None], -1)[..., 0]
    some = top > -jnp.inf
    weights = jnp.where(some[..., None], jnp.exp(scores - jnp.where(some, top, 0)[..., None]), 0)
    total = weights.sum(-1)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    weights = weights / jnp.where(some, total, 1)[..., None]
    if keep is not None:
        weights = weights * keep
    return jnp.einsum("bhmn,bhne->bhme", weights.astype(query.dtype), value), lse, top


# --- score_mods of several captured arrays ---------------------------------------------------------------------------


def no_mod(make: Maker, n: Sizes) -> Any:
    return (), lambda: None


def bias(make: Maker, n: Sizes) -> Any:
    return (make(n.H, n.M, n.N),), lambda bias: lambda s, b, h, i, j: s + bias[h, i, j]


def triangle(make: Maker, n: Sizes) -> Any:
    """A bias of all batches and one of each batch's keys."""

    def mod(pair: Any, of_key: Any) -> Any:
        return lambda s, b, h, i, j: s + pair[h, i, j] + of_key[b, j]

    return (make(n.H, n.M, n.N), make(n.B, n.N)), mod


def relative(make: Maker, n: Sizes) -> Any:
    """T5's: a table by the distance, whose gradient many pairs share."""

    def mod(table: Any) -> Any:
        return lambda s, b, h, i, j: s + table[jnp.clip(j - i, -8, 8) + 8, h]

    return (make(17, n.H),), mod


def nonlinear(make: Maker, n: Sizes) -> Any:
    """Several float arrays and an array of integers, of several ranks."""

    def mod(slope: Any, gate: Any, cap: Any, kind: Any) -> Any:
        def of_pair(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            s = cap * jnp.tanh(s / cap) * jax.nn.sigmoid(gate[b, h, i])
            return jnp.where(kind[j] == 1, s - slope[h] * jnp.abs(i - j), s + 0.5 * slope[h] ** 2)

        return of_pair

    return (make(n.H), make(n.B, n.H, n.M), jnp.abs(make()) + 2, make.integers(3, n.N)), mod


def vectors(make: Maker, n: Sizes) -> Any:
    """A product of short vectors for each pair."""

    def mod(left: Any, right: Any) -> Any:
        return lambda s, b, h, i, j: s + left[b, h, i] @ right[h, j]

    return (make(n.B, n.H, n.M, 5), make(n.H, n.N, 5)), mod


MODS = [no_mod, bias, triangle, relative, nonlinear, vectors]


def rmse(x: Any, truth: Any) -> float:
    difference = np.asarray(x, np.float64) - np.asarray(truth, np.float64)
    return float(np.sqrt(np.mean(difference**2))) if difference.size else 0.0


def assert_good(ours: Any, eager: Any, truth: Any, what: str) -> None:
    """Rule 12 of the contract."""
    assert ours.shape == truth.shape and ours.dtype == eager.dtype, what
    assert np.isfinite(np.asarray(ours, np.float64)).all(), what
    size = float(np.sqrt(np.mean(np.asarray(truth, np.float64) ** 2))) if truth.size else 0.0
    # Formulas in float32 add up pairwise, in another order: a few of its steps are always allowed.
    step = {"float64": 2**-44, "float32": 2**-21}.get(ours.dtype.name, 0)
    allowed = 1.5 * rmse(eager, truth) + max(1e-7 if ours.dtype != jnp.float64 else 0, step) * size + 1e-30
    assert rmse(ours, truth) <= allowed, f"{what}: {rmse(ours, truth)} of {size}, allowed {allowed}"


def is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def compare(
    ours: Callable[..., Any], formula: Callable[..., Any], inputs: list[Any], upstream: Any, what: str = ""
) -> Callable[..., Any]:
    """out, lse and max_scores, and the gradients by all float inputs of a sum of all three, `upstream` its weights.
    Returns the compiled function of the inputs that gives the gradients and results of `ours`."""
    places = tuple(i for i, x in enumerate(inputs) if is_float(x))

    def run(f: Callable[..., Any], weights: Any) -> Callable[..., Any]:
        def loss(*given: Any) -> Any:
            results = f(*given)
            parts = [(r.astype(jnp.float64) * w).sum() for r, w in zip(results, weights, strict=False)]
            return sum(jnp.where(jnp.isfinite(p), p, 0) for p in parts), results

        return jax.grad(loss, places, has_aux=True)

    wide = [x.astype(jnp.float64) if is_float(x) else x for x in inputs]
    compiled = jax.jit(run(ours, upstream))
    gradients, found = compiled(*inputs)
    on_cpu, weights = jax.device_put((wide, upstream), on("cpu"))
    # Op by op: XLA of JAX 0.10 gets a gradient of one fused loop wrong on CPUs with AVX-512, and in a fused loop no XLA
    # rounds to 16 bits what the ops of a formula give.
    right, truth = run(formula, weights)(*on_cpu)
    exact = all(x.dtype == jnp.float64 for x in inputs if is_float(x))
    eager_gradients, eager = (right, truth) if exact else run(formula, upstream)(*inputs)
    names = ("out", "lse", "max_scores")
    for x, e, t, name in zip(found, eager, truth, names, strict=False):
        known = np.isfinite(np.asarray(t, np.float64))
        np.testing.assert_array_equal(np.asarray(x, np.float64)[~known], np.asarray(t, np.float64)[~known])
        assert_good(*(jnp.where(known, np.asarray(y), 0) for y in (x, e, t)), f"{what}: {name}")
    for place, x, e, t in zip(places, gradients, eager_gradients, right, strict=True):
        assert x.dtype == inputs[place].dtype
        assert_good(x, e, t, f"{what}: gradient {place}")
    return compiled


def tensors(make: Maker, n: Sizes) -> list[Any]:
    return [
        make(n.B, n.H, n.M, n.D),
        make(n.key_batch, n.key_heads, n.N, n.D),
        make(n.key_batch, n.key_heads, n.N, n.E),
    ]


def upstream_of(make: Maker, n: Sizes) -> tuple[Any, Any, Any]:
    wide = {"dtype": np.float64}
    return make(n.B, n.H, n.M, n.E, **wide), make(n.B, n.H, n.M, **wide), make(n.B, n.H, n.M, **wide)


def attend(query: Any, key: Any, value: Any, mod: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    out, aux = flex_attention(query, key, value, mod, return_aux=AuxRequest(lse=True, max_scores=True), **options)
    return out, aux.lse, aux.max_scores


def usable(device: str, dtype: str) -> None:
    if device == "cuda" and dtype == "float64":
        pytest.skip("float64 is the CPU's")


# --- calls for transforms ---------------------------------------------------------------------------------------------


FIELD = Sizes(M=33, N=33, D=8, E=8)


def of_case(case: Case, dtype: str, device: str) -> tuple[Any, Any, list[Any], Any]:
    """The op and the formula of (query, key, value, *captured), these, and the maker of more."""
    n, make = FIELD, Maker(device, dtype)
    captured, mods = case.make(n.B, n.H, n.M, n.N, jnp.dtype(dtype))

    def ours(q: Any, k: Any, v: Any, *captured: Any) -> tuple[Any, Any, Any]:
        score_mod, mask_mod = mods(*captured)
        mask = None if mask_mod is None else create_block_mask(mask_mod, n.B, n.H, n.M, n.N, 16)
        return attend(q, k, v, score_mod, block_mask=mask)

    formula = lambda q, k, v, *captured: plain(q, k, v, *mods(*captured))  # noqa: E731
    return ours, formula, [*tensors(make, n), *captured], make


def case(device: str = "cpu", dtype: Any = "float64", sizes: Sizes | None = None) -> tuple[Any, Any, list[Any], Any]:
    """The op and the formula as functions of five arrays, these, and weights of the output."""
    n, make = sizes or Sizes(M=33, N=40), Maker(device, dtype)
    captured, mod = triangle(make, n)
    ours = lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured))  # noqa: E731
    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))[0]  # noqa: E731
    return ours, formula, [*tensors(make, n), *captured], make(n.B, n.H, n.M, n.E)


def tolerance(device: str) -> tuple[str, float]:
    return ("float64", 1e-12) if device == "cpu" else ("float32", 2e-4)


def close(device: str, found: Any, right: Any, limit: float | None = None) -> None:
    limit = limit or tolerance(device)[1]
    for x, t in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, t, rtol=limit, atol=limit * max(1.0, float(jnp.abs(t).max())))
