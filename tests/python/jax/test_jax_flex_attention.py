"""fusegrad.jax.flex_attention: values and all gradients against float64 formulas, transforms, devices, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from coverings import rows_of

# Before JAX makes its devices: four of the CPU, programs that compile fast, no more memory of a GPU than is asked for.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax = pytest.importorskip("jax")

import fusegrad.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import AuxRequest, create_block_mask, flex_attention, varlen_mask  # noqa: E402
from jax_score_mods import CASES, OWN_DERIVATIVES, Case, over_all_pairs  # noqa: E402

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
) -> None:
    """out, lse and max_scores, and the gradients by all float inputs of a sum of all three, `upstream` its weights."""
    places = tuple(i for i, x in enumerate(inputs) if is_float(x))

    def run(f: Callable[..., Any], inputs: list[Any]) -> tuple[Any, Any]:
        def loss(*floats: Any) -> Any:
            given = list(inputs)
            for place, x in zip(places, floats, strict=True):
                given[place] = x
            results = f(*given)
            parts = [(r.astype(jnp.float64) * w).sum() for r, w in zip(results, upstream, strict=False)]
            return sum(jnp.where(jnp.isfinite(p), p, 0) for p in parts), results

        grad = jax.jit(jax.grad(loss, tuple(range(len(places))), has_aux=True))
        gradients, results = grad(*[inputs[i] for i in places])
        return results, gradients

    wide = [x.astype(jnp.float64) if is_float(x) else x for x in inputs]
    found, gradients = run(ours, inputs)
    on_cpu = [jax.device_put(x, on("cpu")) for x in wide]
    truth, right = run(formula, on_cpu)
    exact = all(x.dtype == jnp.float64 for x in inputs if is_float(x))
    eager, eager_gradients = (truth, right) if exact else run(formula, inputs)
    names = ("out", "lse", "max_scores")
    for x, e, t, name in zip(found, eager, truth, names, strict=False):
        known = np.isfinite(np.asarray(t, np.float64))
        np.testing.assert_array_equal(np.asarray(x, np.float64)[~known], np.asarray(t, np.float64)[~known])
        assert_good(*(jnp.where(known, np.asarray(y), 0) for y in (x, e, t)), f"{what}: {name}")
    for place, x, e, t in zip(places, gradients, eager_gradients, right, strict=True):
        assert x.dtype == inputs[place].dtype
        assert_good(x, e, t, f"{what}: gradient {place}")


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


# --- values and gradients ---------------------------------------------------------------------------------------------


@everywhere
@rows_of(
    "which, dtype",
    [(f, d) for f in MODS for d in ("float64", "float32", "bfloat16")] + [(nonlinear, "float16")],
    tests=4,
)
def test_mods(device: str, which: Any, dtype: str) -> None:
    usable(device, dtype)
    n, make = Sizes(), Maker(device, dtype)
    captured, mod = which(make, n)

    def with_mod(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, *captured: f(q, k, v, mod(*captured))

    compare(with_mod(attend), with_mod(plain), [*tensors(make, n), *captured], upstream_of(make, n))


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


@pytest.mark.parametrize(
    "device, dtype", [(d, t) for d in DEVICES for t in (["float64"] if d == "cpu" else ["float32", "bfloat16"])]
)
@rows_of("one", [*CASES], tests=8)
def test_the_field(device: str, one: Case, dtype: str) -> None:
    if one.name == "t5" and dtype == "float64":
        dtype = "float32"  # its buckets end where a logarithm of float32 is whole, which one of float64 just is not
    ours, formula, inputs, make = of_case(one, dtype, device)
    compare(ours, formula, inputs, upstream_of(make, FIELD), one.name)


@rows_of("one", [*CASES], tests=8)
def test_the_field_under_vmap(one: Case) -> None:
    """One call over queries, and all captured arrays, of two elements as two calls."""
    ours, _, inputs, make = of_case(one, "float64", "cpu")
    weights = make(FIELD.B, FIELD.H, FIELD.M, FIELD.E)
    moving = [0, *range(3, len(inputs))]
    full = {i: jnp.stack([inputs[i], inputs[i] * 0.5]) for i in moving}

    def gradient(*moved: Any) -> Any:
        def loss(*moved: Any) -> Any:
            given = list(inputs)
            for i, x in zip(moving, moved, strict=True):
                given[i] = x
            return (ours(*given)[0] * weights).sum()

        return jax.value_and_grad(loss, tuple(range(len(moved))))(*moved)

    found = jax.jit(jax.vmap(gradient))(*full.values())
    alone = jax.jit(gradient)
    for e in range(2):
        right = alone(*(x[e] for x in full.values()))
        close("cpu", jax.tree.map(lambda x, e=e: x[e], found), right)


@everywhere
@rows_of("one", [*OWN_DERIVATIVES])
def test_own_derivatives(device: str, one: Case) -> None:
    dtype = tolerance(device)[0]
    ours, formula, inputs, make = of_case(one, dtype, device)
    compare(ours, formula, inputs, upstream_of(make, FIELD), one.name)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@everywhere
def test_block_masks(device: str, dtype: str) -> None:
    """Lists with full, partial and empty blocks, of heads; rows without a key are 0."""
    usable(device, dtype)
    n, make = Sizes(M=150, N=130, D=32, E=32), Maker(device, dtype)
    captured, mod = triangle(make, n)
    start = make.integers(3, n.H)
    masks = {
        "causal": lambda b, h, i, j: i >= j,
        "of heads": lambda b, h, i, j: (i + 40 * start[h] >= j) & (i >= 20),
    }
    for name, allowed in masks.items():
        mask = create_block_mask(allowed, None, n.H, n.M, n.N, (64, 32))

        def ours(q: Any, k: Any, v: Any, *captured: Any, mask: Any = mask) -> Any:
            return attend(q, k, v, mod(*captured), block_mask=mask)

        def formula(q: Any, k: Any, v: Any, *captured: Any, allowed: Any = allowed) -> Any:
            return plain(q, k, v, mod(*captured), allowed)

        compare(ours, formula, [*tensors(make, n), *captured], upstream_of(make, n), name)


@everywhere
def test_packed_sequences(device: str) -> None:
    dtype = tolerance(device)[0]
    n, make = Sizes(B=1, key_batch=1, M=90, N=90), Maker(device, dtype)
    ends = jnp.asarray([0, 20, 21, 70, 90], jnp.int32)
    mask = varlen_mask(ends, causal=True, block_size=16)
    of = jnp.searchsorted(ends[1:], jnp.arange(90), side="right")
    allowed = lambda b, h, i, j: (of[i] == of[j]) & (i >= j)  # noqa: E731
    inputs = tensors(make, n)
    ours = lambda q, k, v: attend(q, k, v, block_mask=mask)  # noqa: E731
    formula = lambda q, k, v: plain(q, k, v, None, allowed)  # noqa: E731
    compare(ours, formula, inputs, upstream_of(make, n))


def test_a_block_mask_is_a_pytree() -> None:
    """It crosses jit as an argument; vmap may be over it."""
    n, make = Sizes(M=40, N=40), Maker()
    q, k, v = tensors(make, n)
    limits = jnp.asarray([[5, 20], [30, 1]], jnp.int32)

    def mask_of(limit: Any) -> Any:
        return create_block_mask(lambda b, h, i, j: j <= i + limit[b], n.B, None, n.M, n.N, 16)

    masks = jax.vmap(mask_of)(limits)
    found = jax.jit(jax.vmap(lambda mask: flex_attention(q, k, v, None, mask)))(masks)
    for e in range(2):
        right = plain(q, k, v, None, lambda b, h, i, j, e=e: j <= i + limits[e, b])[0]
        close("cpu", found[e], right)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(M=1, N=300),
        Sizes(M=129, N=64, D=64, E=64),
        Sizes(key_heads=2),
        Sizes(key_heads=1, key_batch=1),
        Sizes(B=1, key_batch=1, H=1, key_heads=1, D=1, E=1),
        Sizes(D=40, E=8),
        Sizes(D=128, E=128),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@everywhere
def test_shapes(device: str, sizes: Sizes, dtype: str) -> None:
    n, make = sizes, Maker(device, dtype)
    captured, mod = triangle(make, n)
    compare(
        lambda q, k, v, *captured: attend(q, k, v, mod(*captured), enable_gqa=n.key_heads != n.H),
        lambda q, k, v, *captured: plain(q, k, v, mod(*captured)),
        [*tensors(make, n), *captured],
        upstream_of(make, n),
    )


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@everywhere
def test_layout(device: str, dtype: str) -> None:
    """BSHD, of which no copy is made."""
    usable(device, dtype)
    n, make = Sizes(key_heads=2), Maker(device, dtype)
    captured, mod = bias(make, n)
    swap = partial(jnp.swapaxes, axis1=1, axis2=2)

    def ours(q: Any, k: Any, v: Any, *captured: Any) -> Any:
        out, *aux = attend(swap(q), swap(k), swap(v), mod(*captured), layout="BSHD", enable_gqa=True)
        return swap(out), *aux

    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))  # noqa: E731
    compare(ours, formula, [*tensors(make, n), *captured], upstream_of(make, n))
    q, k, v = (swap(x) for x in tensors(make, n))
    step = jax.jit(jax.grad(lambda q: flex_attention(q, k, v, layout="BSHD", enable_gqa=True).sum()))
    assert "transpose" not in step.lower(q).as_text()


@everywhere
def test_scale(device: str) -> None:
    n, make = Sizes(), Maker(device, "float32")
    q, k, v = tensors(make, n)
    out = flex_attention(q, k, v, scale=-0.7)
    truth = plain(q.astype(jnp.float64) * (-0.7 * n.D**0.5), k.astype(jnp.float64), v.astype(jnp.float64))[0]
    np.testing.assert_allclose(out, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (3,), (1, 4), (2, 3)], ids=str)
@everywhere
def test_some_gradients(device: str, wanted: tuple[int, ...]) -> None:
    """A gradient does not depend on which others are wanted."""
    n, make = Sizes(), Maker(device, "float32")
    captured, mod = triangle(make, n)
    inputs = [*tensors(make, n), *captured]
    weights = make(n.B, n.H, n.M, n.E)
    loss = lambda q, k, v, *captured: (flex_attention(q, k, v, mod(*captured)) * weights).sum()  # noqa: E731
    full = jax.grad(loss, tuple(range(5)))(*inputs)
    for place, found in zip(wanted, jax.grad(loss, wanted)(*inputs), strict=True):
        np.testing.assert_allclose(found, full[place], rtol=1e-4, atol=1e-5)


@everywhere
def test_aux_alone(device: str) -> None:
    """Gradients of lse, and of the largest scores, without one of the output."""
    n, make = Sizes(), Maker(device, "float32")
    inputs = tensors(make, n)
    out = jax.eval_shape(flex_attention, *inputs)
    assert isinstance(out, jax.ShapeDtypeStruct)
    for place in (1, 2):
        weights = make(n.B, n.H, n.M)
        grad = jax.grad(lambda *x, place=place, w=weights: (attend(*x)[place] * w).sum(), (0, 1, 2))(*inputs)
        wide = [x.astype(jnp.float64) for x in inputs]
        right = jax.grad(lambda *x, place=place, w=weights: (plain(*x)[place] * w).sum(), (0, 1, 2))(*wide)
        for x, t in zip(grad, right, strict=True):
            np.testing.assert_allclose(x, t, rtol=1e-4, atol=1e-5)
    lse = flex_attention(*inputs, return_aux=AuxRequest(lse=True))[1]
    assert lse.max_scores is None and lse.lse.shape == (n.B, n.H, n.M)


def test_x64_off() -> None:
    with jax.enable_x64(False):
        n, make = Sizes(), Maker("cpu", "float32")
        q, k, v = tensors(make, n)
        index = make.integers(n.N, n.N)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.01 * index[j])
        assert out.dtype == jnp.float32
    truth = plain(*(x.astype(jnp.float64) for x in (q, k, v)), lambda s, b, h, i, j: s + 0.01 * index[j])[0]
    np.testing.assert_allclose(out, truth, rtol=1e-4, atol=1e-5)


@everywhere
def test_nothing(device: str) -> None:
    """No queries, no keys, no batch: what formulas give, and gradients of zero."""
    make = Maker(device, "float32")
    for sizes in ((0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        B, H, M, N = sizes
        q, k, v = make(B, H, M, 8), make(B, H, N, 8), make(B, H, N, 5)
        out, lse, top = attend(q, k, v)
        assert out.shape == (B, H, M, 5) and not np.asarray(out).any()
        assert np.isneginf(np.asarray(lse)).all() and np.isneginf(np.asarray(top)).all()
        gradients = jax.grad(lambda *x: flex_attention(*x).sum(), (0, 1, 2))(q, k, v)
        for g, x in zip(gradients, (q, k, v), strict=True):
            assert g.shape == x.shape and not np.asarray(g).any()


# --- transforms -------------------------------------------------------------------------------------------------------


def case(device: str = "cpu", dtype: Any = "float64", sizes: Sizes | None = None) -> tuple[Any, Any, list[Any], Any]:
    """The op and the formula as functions of five arrays, these, and weights of the output."""
    n, make = sizes or Sizes(M=33, N=40), Maker(device, dtype)
    captured, mod = triangle(make, n)
    ours = lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured))  # noqa: E731
    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))[0]  # noqa: E731
    return ours, formula, [*tensors(make, n), *captured], make(n.B, n.H, n.M, n.E)


def tolerance(device: str) -> tuple[str, float]:
    return ("float64", 1e-12) if device == "cpu" else ("float32", 2e-4)


def close(device: str, found: Any, right: Any) -> None:
    limit = tolerance(device)[1]
    for x, t in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, t, rtol=limit, atol=limit * max(1.0, float(jnp.abs(t).max())))


@everywhere
def test_any_number_of_vjps_are_bitwise_equal(device: str) -> None:
    _, _, inputs, weights = case(device, "float32")
    deterministic = partial(flex_attention, deterministic=True)

    def run(q: Any, k: Any, v: Any, pair: Any, of_key: Any) -> Any:
        return deterministic(q, k, v, lambda s, b, h, i, j: s + pair[h, i, j] + of_key[b, j])

    _, pullback = jax.vjp(run, *inputs)
    runs = [[np.asarray(g) for g in pullback(0.37 * weights)] for _ in range(3)]
    runs.append([np.asarray(g) for g in jax.vjp(run, *inputs)[1](0.37 * weights)])
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


@everywhere
def test_forward_mode(device: str) -> None:
    ours, formula, inputs, _ = case(device, tolerance(device)[0])
    moving = [x[::-1] for x in inputs]
    close(device, jax.jvp(ours, inputs, moving), jax.jvp(formula, inputs, moving))
    close(device, jax.linearize(ours, *inputs)[1](*moving), jax.jvp(formula, inputs, moving)[1])
    one = lambda f: jax.jvp(lambda b: f(*inputs[:3], b, inputs[4]), (inputs[3],), (moving[3],))  # noqa: E731
    close(device, one(ours), one(formula))
    lse = lambda f: jax.jvp(lambda q: f(q, *inputs[1:3])[1], inputs[:1], moving[:1])  # noqa: E731
    only = lambda *x: (None, flex_attention(*x, return_aux=AuxRequest(lse=True))[1].lse)  # noqa: E731
    close(device, lse(only), lse(plain))


AXES = [
    (0, 0, 0, 0, 0),
    (0, None, None, None, None),
    (None, None, None, 0, None),
    (None, 0, 0, None, 0),
    (1, 2, 0, None, None),
    (None, None, None, None, 1),
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@everywhere
def test_vmap(device: str, axes: tuple[Any, ...]) -> None:
    ours, formula, inputs, weights = case(device, tolerance(device)[0])
    full = [x if a is None else jnp.stack([x, x[::-1], 0.5 * x], a) for x, a in zip(inputs, axes, strict=True)]
    every = tuple(range(5))
    loss = lambda f: lambda *x: (f(*x) * weights).sum()  # noqa: E731
    of_each = lambda f: jax.jit(jax.vmap(jax.value_and_grad(loss(f), every), axes))(*full)  # noqa: E731
    close(device, of_each(ours), of_each(formula))
    of_all = lambda f: jax.grad(lambda *x: jax.vmap(loss(f), axes)(*x).sum(), every)(*full)  # noqa: E731
    close(device, of_all(ours), of_all(formula))
    moving = [0.3 * x for x in inputs]
    forward = lambda f: jax.vmap(lambda *x: jax.jvp(f, x, tuple(moving))[1], axes)(*full)  # noqa: E731
    close(device, forward(ours), forward(formula))


@everywhere
def test_vmap_of_keys_that_all_of_a_batch_share(device: str) -> None:
    """Whose gradients are sums over the batch in each element."""
    dtype = tolerance(device)[0]
    n, make = Sizes(key_batch=1), Maker(device, dtype)
    inputs = tensors(make, n)
    full = [jnp.stack([x, 0.5 * x]) for x in inputs]
    weights = make(n.B, n.H, n.M, n.E)

    def gradient(f: Callable[..., Any]) -> Any:
        return jax.vmap(jax.grad(lambda q, k, v: (f(q, k, v)[0] * weights).sum(), (0, 1, 2)))(*full)

    close(device, gradient(attend), gradient(plain))


def test_vmap_is_one_call() -> None:
    ours, _, inputs, _ = case()
    full = [jnp.stack([x, x]) for x in inputs]
    text = jax.jit(jax.vmap(jax.grad(lambda *x: ours(*x).sum(), (0, 3)))).lower(*full).as_text()
    for name in ("forward", "backward"):
        assert text.count(f"@fusegrad_flex_{name}(") == 1
    assert "while" not in text


def test_nested_vmap() -> None:
    ours, formula, inputs, _ = case()
    full = [jnp.stack([x, 2 * x, 3 * x]) for x in inputs]
    nested = lambda f: jax.vmap(lambda q: jax.vmap(f, (None, 0, 0, 0, None))(q, *full[1:4], inputs[4]))  # noqa: E731
    close("cpu", nested(ours)(full[0]), nested(formula)(full[0]))


def test_jacobian() -> None:
    ours, formula, inputs, _ = case()
    for transform in (jax.jacrev, jax.jacfwd):
        part = lambda f: jax.jit(transform(lambda b: f(*inputs[:3], inputs[3], b)[0, 0, 0, :3]))(inputs[4])  # noqa: E731
        close("cpu", part(ours), part(formula))


POLICIES = [None, "everything_saveable", "dots_saveable", "nothing_saveable"]


@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_checkpoint_and_scan(device: str, policy: str | None) -> None:
    ours, formula, inputs, weights = case(device, tolerance(device)[0], Sizes(M=40, N=40, D=24))
    how = None if policy is None else getattr(jax.checkpoint_policies, policy)

    def loss(f: Callable[..., Any]) -> Callable[..., Any]:
        def layers(q: Any, *rest: Any) -> Any:
            step = jax.checkpoint(lambda q, _: (f(q, *rest) + q, None), policy=how)
            return (jax.lax.scan(step, q, None, length=3)[0] * weights).sum()

        return jax.jit(jax.grad(layers, tuple(range(5))))

    close(device, loss(ours)(*inputs), loss(formula)(*inputs))


def test_a_saved_output_is_not_computed_again() -> None:
    ours, _, inputs, _ = case()
    for policy, forwards in (("everything_saveable", 1), ("nothing_saveable", 2)):
        f = jax.checkpoint(ours, policy=getattr(jax.checkpoint_policies, policy))
        text = str(jax.make_jaxpr(jax.grad(lambda q, f=f: f(q, *inputs[1:]).sum()))(inputs[0]))
        assert text.count("fusegrad_flex_attention[") == forwards, policy


def test_export() -> None:
    export = pytest.importorskip("jax.export")
    ours, _, inputs, _ = case("cpu", "float32")
    run = jax.jit(jax.grad(lambda *x: ours(*x).sum(), (0, 3)))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in fj.TARGETS]
    found = export.export(run, platforms=["cpu"], disabled_checks=checks)(*inputs).call(*inputs)
    for x, t in zip(found, run(*inputs), strict=True):
        np.testing.assert_array_equal(x, t)
    shape = export.symbolic_shape("a, 2, 8, 8")
    with pytest.raises(NotImplementedError, match=f"{OP}: query must have a shape of numbers"):
        export.export(jax.jit(lambda q: flex_attention(q, q, q)))(jax.ShapeDtypeStruct(shape, jnp.float32))


def test_a_second_derivative_is_refused() -> None:
    ours, _, inputs, _ = case()
    of = lambda q: ours(q, *inputs[1:]).sum()  # noqa: E731
    for second in (jax.grad(lambda q: jax.grad(of)(q).sum()), jax.hessian(of)):
        with pytest.raises(NotImplementedError, match=f"{OP}: .*second"):
            second(inputs[0])


def test_constants_have_no_gradient() -> None:
    """Integers get float0, masks' arrays zeros."""
    n, make = Sizes(), Maker()
    captured, mod = nonlinear(make, n)
    q, k, v = tensors(make, n)
    grad = jax.grad(lambda kind: flex_attention(q, k, v, mod(*captured[:3], kind)).sum(), allow_int=True)(captured[3])
    assert grad.dtype == jax.dtypes.float0


def test_new_values_compile_nothing() -> None:
    _, _, inputs, _ = case()
    traced = []

    @jax.jit
    def step(q: Any, k: Any, v: Any, pair: Any, scale: Any) -> Any:
        traced.append(1)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + scale * pair[h, i, j])

    for scale in (1.0, 2.0, 3.0):
        step(*inputs[:3], scale * inputs[3], scale)
    assert len(traced) == 1


@everywhere
def test_donated_buffers(device: str) -> None:
    ours, formula, inputs, _ = case(device, tolerance(device)[0])
    right = formula(*inputs)
    run = jax.jit(lambda q, *rest: ours(q, *rest) * 2, donate_argnums=(0, 1, 2))
    close(device, run(*(jnp.copy(x) for x in inputs)), 2 * right)


def test_memory_is_linear() -> None:
    """Of a training step with a table, no array of all pairs."""
    S = 16384
    x = jax.ShapeDtypeStruct((1, 2, S, 32), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((2, 65), jnp.float32)

    def loss(q: Any, k: Any, v: Any, table: Any) -> Any:
        mod = lambda s, b, h, i, j: s + table[h, jnp.clip(i - j, -32, 32) + 32]  # noqa: E731
        return flex_attention(q, k, v, mod).astype(jnp.float32).sum()

    device = on("cpu")
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(device)) for a in
            (x, x, x, table)]  # fmt: skip
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2 * S * 32 * 2


class _Cuda:
    """A GPU's part of a lowering, without one: what is asked of the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, bool]] = []
        from fusegrad.jax import _attention_primitives, _compile

        for module in (_attention_primitives, _compile):
            monkeypatch.setattr(module, "build_has_cuda", True)
        monkeypatch.setattr(_attention_primitives, "flex_scratch", self.scratch)

    def scratch(self, direction: int, attributes: Any, arguments: Any, results: Any, *, wait: bool) -> int:
        self.calls.append((direction, wait))
        return 4096


def test_lowering_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch memory is a result of each call, the last; compile_flex waits for the kernels."""
    cuda = _Cuda(monkeypatch)
    ours, _, inputs, _ = case("cpu", "float32")
    step = jax.jit(jax.grad(lambda *x: ours(*x).sum(), (0, 3)))
    text = step.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("tensor<4096xui8>") >= 2
    assert cuda.calls == [(0, False), (1, False)]
    bias = jnp.ones((4, 33, 40), jnp.float32)
    fj.compile_flex(*inputs[:3], lambda s, b, h, i, j: s + bias[h, i, j])
    fj.compile_flex(*inputs[:3], requires_grad=False)
    assert cuda.calls[2:] == [(0, True), (1, True), (0, True)]
    wide = jnp.ones((1, 1, 8, 300), jnp.float32)
    for x, message in ((inputs[0].astype(jnp.float64), "float64"), (wide, "head size of at most 256")):
        lowered = jax.jit(lambda x: flex_attention(x, x, x)).trace(x)
        with pytest.raises(NotImplementedError, match=f"{OP}: .*{message}"):
            lowered.lower(lowering_platforms=("cuda",))


@pytest.mark.skipif(fj.build_has_cuda, reason="of a build without CUDA")
def test_a_build_without_cuda_says_so() -> None:
    x = jnp.ones((1, 1, 8, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match=f"{OP}: fusegrad must be built with CUDA"):
        jax.jit(lambda x: flex_attention(x, x, x)).trace(x).lower(lowering_platforms=("cuda",))
    with pytest.raises(NotImplementedError, match="compile_flex: fusegrad must be built with CUDA"):
        fj.compile_flex(x, x, x)


# --- dropout ----------------------------------------------------------------------------------------------------------


@everywhere
def test_dropout(device: str) -> None:
    """The pairs that are dropped, read off the output, give the formula's output and gradients."""
    dtype, _ = tolerance(device)
    n, make = Sizes(M=64, N=48, E=48), Maker(device, dtype)
    q, k, _ = tensors(make, n)
    captured, mod = bias(make, n)
    options = {"dropout_p": 0.3, "dropout_key": jax.random.key(7)}
    identity = jnp.broadcast_to(jnp.eye(n.N, dtype=dtype), (n.B, n.H, n.N, n.N))
    dropped = flex_attention(q, k, identity, mod(*captured), **options)
    whole = flex_attention(q, k, identity, mod(*captured))
    keep = jnp.where(dropped == 0, 0.0, 1 / 0.7).astype(dtype)
    np.testing.assert_allclose(dropped, whole * keep, rtol=1e-3, atol=1e-6)
    assert abs(float((keep == 0).mean()) - 0.3) < 0.02
    v = make(n.B, n.H, n.N, n.E)
    weights = make(n.B, n.H, n.M, n.E)

    def run(f: Callable[..., Any]) -> Any:
        loss = lambda q, k, v, pair: (f(q, k, v, mod(pair)) * weights).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, *captured)

    found = run(lambda *x: flex_attention(*x, **options))
    right = run(lambda *x: plain(*x, keep=keep)[0])
    for x, t in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-4, atol=1e-4 * max(1.0, float(jnp.abs(t).max())))
    again = flex_attention(q, k, v, mod(*captured), **options)
    np.testing.assert_array_equal(again, flex_attention(q, k, v, mod(*captured), **options))
    other = flex_attention(q, k, v, mod(*captured), dropout_p=0.3, dropout_key=jax.random.key(8))
    assert not np.array_equal(again, other)
    raw = flex_attention(q, k, v, mod(*captured), dropout_p=0.3, dropout_key=jax.random.PRNGKey(7))
    np.testing.assert_array_equal(again, raw)
    np.testing.assert_array_equal(
        flex_attention(q, k, v), flex_attention(q, k, v, dropout_p=0.0, dropout_key=jax.random.key(1))
    )


def test_dropout_under_vmap() -> None:
    """Each element as the call of it alone."""
    make, n = Maker(), Sizes(M=20, N=20)
    q, k, v = tensors(make, n)
    keys = jax.random.split(jax.random.key(3), 3)
    run = lambda q, key: jax.grad(  # noqa: E731
        lambda q: (flex_attention(q, k, v, dropout_p=0.5, dropout_key=key) ** 2).sum()
    )(q)
    full = jnp.stack([q, 2 * q, 3 * q])
    close("cpu", jax.vmap(run)(full, keys), jnp.stack([run(*x) for x in zip(full, keys, strict=True)]))
    same = jax.vmap(run, (0, None))(full, keys[0])
    close("cpu", same, jnp.stack([run(x, keys[0]) for x in full]))


# --- bad input --------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": np.ones((2, 4, 8))}, ValueError, "query must have four dimensions, but got [2, 4, 8]"),
    ({"query": np.ones((2, 4, 8, 16), np.int32)}, TypeError, "query must be float32, bfloat16, float16 or float64"),
    ({"key": np.ones((2, 4, 8, 16))}, TypeError, "key must have the query's dtype float32, but got float64"),
    ({"key": np.ones((2, 4, 8, 8), np.float32)}, ValueError, "key must have the query's head size 16, but got 8"),
    ({"value": np.ones((2, 4, 9, 16), np.float32)}, ValueError, "value must have the key's batch, heads and length"),
    ({"key": np.ones((2, 2, 8, 16), np.float32), "value": np.ones((2, 2, 8, 16), np.float32)}, ValueError,
     "key must have the query's heads 4 unless enable_gqa is set, but got 2"),
    ({"key": np.ones((2, 3, 8, 16), np.float32), "value": np.ones((2, 3, 8, 16), np.float32), "enable_gqa": True},
     ValueError, "query must have a multiple of the key's heads with enable_gqa, but got 4 and 3"),
    ({"key": np.ones((3, 4, 8, 16), np.float32), "value": np.ones((3, 4, 8, 16), np.float32)}, ValueError,
     "key must have the query's batch size 2 or 1, but got 3"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number, but got nan"),
    ({"scale": jnp.float32(1)}, TypeError, "scale must be a Python number"),
    ({"layout": "BHDS"}, ValueError, "layout must be 'BHSD' or 'BSHD', but got 'BHDS'"),
    ({"return_aux": True}, TypeError, "return_aux must be an AuxRequest, but got bool"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and less than 1, but got 1.0"),
    ({"dropout_p": 0.5}, ValueError, "dropout_key must be a key of jax.random.key where dropout_p is not 0"),
    ({"dropout_p": 0.5, "dropout_key": 3}, TypeError, "dropout_key must be a key of jax.random.key"),
    ({"deterministic": 1}, TypeError, "deterministic must be a bool, but got int"),
    ({"enable_gqa": None}, TypeError, "enable_gqa must be a bool, but got NoneType"),
    ({"score_mod": 3}, TypeError, "score_mod must be a function, but got int"),
    ({"block_mask": 3}, TypeError, "block_mask must be a BlockMask of fusegrad.jax, but got int"),
    ({"block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 9)}, ValueError,
     "block_mask must be made for 8 queries and 8 keys, but got one for (8, 9)"),
    ({"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 3, None, 8, 8)}, ValueError,
     "block_mask's lists must have the query's batch and heads [2, 4], or 1, and 1 rows of blocks, but got [3, 1, 1]"),
    ({"unknown": 3}, TypeError, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {name: np.ones((2, 4, 8, 16), np.float32) for name in ("query", "key", "value")}
    arguments.update(change)
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda: flex_attention(**arguments))
    assert message in str(caught.value)
    assert "flex_attention" in str(caught.value)


def test_a_captured_array_of_another_dtype() -> None:
    q = jnp.ones((1, 1, 4, 8), jnp.float32)
    for wrong, what in ((jnp.ones(4, jnp.complex64), "complex64"), (jnp.ones(4, jnp.float64), "float64")):
        with pytest.raises(Exception, match=f"{OP}: .*{what}"):
            flex_attention(q, q, q, lambda s, b, h, i, j, wrong=wrong: (s + wrong[j].real).astype(jnp.float32))


# --- devices ----------------------------------------------------------------------------------------------------------

SHARDED = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from fusegrad.jax import create_block_mask, flex_attention

    jax.config.update("jax_enable_x64", True)
    B, H, KEY_HEADS, S, D = 4, 4, 2, 24, 8
    make = lambda *s, r=np.random.default_rng(0): jnp.asarray(r.standard_normal(s))
    q, k, v = make(B, H, S, D), make(B, KEY_HEADS, S, D), make(B, KEY_HEADS, S, D)
    pair, of_key, slope, weights = make(H, S, S), make(B, S), make(), make(B, H, S, D)

    def mod(pair, of_key, slope):
        return lambda s, b, h, i, j: s + pair[h, i, j] + of_key[b, j] - slope * (h + 1) * jnp.abs(i - j) * (b + 2)

    allowed = lambda b, h, i, j: i + b + h >= j
    mask = create_block_mask(allowed, B, H, S, S, 8)

    def ours(q, k, v, *captured):
        return flex_attention(q, k, v, mod(*captured), mask, enable_gqa=True)

    def within(q, k, v, pair, of_key, slope):
        # shard_map: a device's batch and heads count from 0.
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + pair[h, i, j] + of_key[b, j] * slope, enable_gqa=True)

    def formula(q, k, v, pair, of_key, slope, whole=True):
        k, v = (jnp.repeat(x, H // KEY_HEADS, 1) for x in (k, v))
        s = jnp.einsum("bhmd,bhnd->bhmn", q, k) * D**-0.5 + pair
        b, h, i, j = jnp.ogrid[:B, :H, :S, :S]
        if whole:
            s = s + of_key[:, None, None] - slope * (h + 1) * jnp.abs(i - j) * (b + 2)
            s = jnp.where(i + b + h >= j, s, -jnp.inf)
        else:
            s = s + of_key[:, None, None] * slope
        return jnp.einsum("bhmn,bhne->bhme", jax.nn.softmax(s, -1), v)

    arrays = (q, k, v, pair, of_key, slope)
    every = tuple(range(6))
    right = {w: jax.grad(lambda *x: (formula(*x, whole=w) * weights).sum(), every)(*arrays) for w in (True, False)}
    cases = (
        ("data", (P("data"), P(), P("data"))),
        ("heads", (P(None, "heads"), P("heads"), P())),
        ("data", (P("data"), P(), P())),
    )
    for axis, (of_tensor, of_pair, of_key_) in cases:
        # Indexing split arrays of explicit axes is not implemented in JAX 0.8.
        for kind in (AxisType.Auto, AxisType.Explicit)[: 1 + (jax.__version_info__ >= (0, 11))]:
            mesh = jax.make_mesh((2,), (axis,), axis_types=(kind,))
            specs = (of_tensor,) * 3 + (of_pair, of_key_, P())
            with jax.set_mesh(mesh):
                put = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs)]
                mapped = jax.shard_map(within, mesh=mesh, in_specs=specs, out_specs=of_tensor)
                w = jax.device_put(weights, NamedSharding(mesh, of_tensor))
                for f, whole in ((mapped, False), (ours, True)):
                    if f is mapped and of_key_ == P() and axis == "data":
                        continue
                    grad = jax.jit(jax.grad(lambda *x: (f(*x) * w).sum(), every))
                    for n, (x, t) in enumerate(zip(grad(*put), right[whole], strict=True)):
                        np.testing.assert_allclose(x, t, rtol=1e-11, atol=1e-11, err_msg=f"{axis} {kind} {whole} {n}")
                text = jax.jit(ours).lower(*put).compile().as_text()
                assert "all-gather" not in text and "all-to-all" not in text, (axis, kind)
        moving = tuple(x * 0.3 for x in put)
        np.testing.assert_allclose(
            jax.jit(lambda *x: jax.jvp(ours, x, moving)[1])(*put),
            jax.jvp(formula, arrays, tuple(x * 0.3 for x in arrays))[1], rtol=1e-11, atol=1e-11)
    mesh = jax.make_mesh((2, 1), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P("data", "heads"))
    put = [jax.device_put(x, split) for x in arrays[:3]]

    # Axes that shard_map leaves to jit.
    some = jax.shard_map(lambda q, k, v, pair: flex_attention(
        q, k, v, lambda s, b, h, i, j: s + pair[h, i, j], enable_gqa=True), mesh=mesh, axis_names={"data"},
        in_specs=(P("data"),) * 3 + (P(),), out_specs=P("data"))
    alone = lambda *x: flex_attention(*x[:3], lambda s, b, h, i, j: s + x[3][h, i, j], enable_gqa=True)
    both = [jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2, 3))) for f in (some, alone)]
    for x, t in zip(both[0](*put, pair), both[1](q, k, v, pair), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-11, atol=1e-11)

    # Dropout: parts drop other pairs than each other, the backward those of the forward.
    dropping = lambda *x: flex_attention(*x, enable_gqa=True, dropout_p=0.5, dropout_key=jax.random.key(0))
    identity = jax.device_put(jnp.broadcast_to(jnp.eye(S), (B, KEY_HEADS, S, S)), split)
    keep = np.asarray(jax.jit(dropping)(*put[:2], identity)) != 0
    assert len({keep[b, h].tobytes() for b in range(B) for h in range(H)}) == B * H

    def dropped(q, k, v):
        k, v = (jnp.repeat(x, H // KEY_HEADS, 1) for x in (k, v))
        p = jax.nn.softmax(jnp.einsum("bhmd,bhnd->bhmn", q, k) * D**-0.5, -1)
        return jnp.einsum("bhmn,bhne->bhme", p * keep / 0.5, v)

    grad = lambda f, x: jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(*x)
    for x, t in zip(grad(dropping, put), grad(dropped, (q, k, v)), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-9, atol=1e-9)

    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        split = jax.device_put(q, NamedSharding(mesh, P(None, None, "s")))
        try:
            flex_attention(split, k, v, enable_gqa=True)
            raise SystemExit("a split sequence must be refused")
        except ValueError as error:
            assert "fusegrad.jax.flex_attention: query must be split over devices by batch and heads" in str(error)
    print("right")
"""


def test_sharded_over_two_devices() -> None:
    """Batch or heads over two devices of the CPU, by shard_map, by jit itself and by explicit axes: replicated arrays
    get the sum of the devices' gradients, nothing is gathered, mods see numbers of the whole (shard_map's own part)."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "FUSEGRAD_TORCH": "0"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and run.stdout.strip() == "right", run.stderr
