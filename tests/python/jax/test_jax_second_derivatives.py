"""Second derivatives of fusegrad.jax.flex_attention against those of float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from coverings import rows_of
from jax_attention_support import (
    OP,
    Maker,
    Sizes,
    bias,
    case,
    close,
    is_float,
    no_mod,
    nonlinear,
    of_case,
    plain,
    relative,
    rmse,
    tensors,
    triangle,
    vectors,
)
from jax_attention_support import exact as _exact  # noqa: F401  of every test

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import _attention_formulas, create_block_mask, flex_attention  # noqa: E402
from jax_score_mods import CASES, Case  # noqa: E402

Function = Callable[..., Any]


def of_floats(function: Function, inputs: list[Any]) -> tuple[Function, list[Any]]:
    """The function of the floats among its inputs, and these."""
    places = [i for i, x in enumerate(inputs) if is_float(x)]

    def of(*floats: Any) -> Any:
        given = list(inputs)
        for place, x in zip(places, floats, strict=True):
            given[place] = x
        return function(*given)

    return of, [inputs[i] for i in places]


def gradient(loss: Function, inputs: list[Any]) -> Function:
    return jax.grad(loss, tuple(range(len(inputs))))


def gradient_along(loss: Function, inputs: list[Any], along: list[Any]) -> Any:
    """Reverse over reverse: the gradient of <gradient, along>."""

    def product(*x: Any) -> Any:
        return sum((g * v).sum() for g, v in zip(gradient(loss, inputs)(*x), along, strict=True))

    return gradient(product, inputs)(*inputs)


def hessian_vector(loss: Function, inputs: list[Any], along: list[Any]) -> Any:
    """Forward over reverse."""
    return jax.jvp(gradient(loss, inputs), inputs, along)[1]


def gradient_of_tangent(loss: Function, inputs: list[Any], along: list[Any]) -> Any:
    """Reverse over forward."""
    return gradient(lambda *x: jax.jvp(loss, x, tuple(along))[1], inputs)(*inputs)


def tangent_of_tangent(loss: Function, inputs: list[Any], along: list[Any]) -> Any:
    """Forward over forward."""
    return jax.jvp(lambda *x: jax.jvp(loss, x, tuple(along))[1], inputs, along)[1]


NESTINGS = [gradient_along, hessian_vector, gradient_of_tangent, tangent_of_tangent]


def compare(ours: Function, formula: Function, inputs: list[Any], how: Function, seed: int = 5) -> None:
    """A second derivative of a loss that is not linear in its results. Those that are not finite count for nothing."""
    make = Maker("cpu", seed=seed)

    def run(f: Function) -> Any:
        of, floats = of_floats(f, inputs)
        shapes = jax.eval_shape(of, *floats)
        weights = [make(*x.shape) for x in jax.tree.leaves(shapes)]

        def loss(*x: Any) -> Any:
            results = [jnp.where(jnp.isfinite(r), r, 0) for r in jax.tree.leaves(of(*x))]
            return sum((w * r + jnp.sin(r)).sum() for w, r in zip(weights, results, strict=True))

        along = [make(*x.shape, dtype=x.dtype) for x in floats]
        return jax.jit(lambda *x: how(loss, list(x), along))(*floats)

    make = Maker("cpu", seed=seed)
    found = run(ours)
    make = Maker("cpu", seed=seed)
    right = run(formula)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(right))
    for x, t in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert x.dtype == t.dtype
        limit = 1e-11 if t.dtype == jnp.float64 else 2e-2
        t64 = np.asarray(t, np.float64)
        np.testing.assert_allclose(np.asarray(x, np.float64), t64, rtol=limit, atol=limit * max(1.0, np.abs(t64).max()))


@pytest.mark.parametrize(
    "which, how",
    [
        *((nonlinear, how) for how in NESTINGS),
        (triangle, NESTINGS[2]),
        (vectors, NESTINGS[1]),
        *(
            pytest.param(m, how, marks=pytest.mark.large)
            for m, how in zip((no_mod, bias, relative), NESTINGS, strict=False)
        ),
    ],
    ids=lambda f: f.__name__,
)
def test_nestings(which: Any, how: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks of rows, the last of which is smaller."""
    monkeypatch.setattr(_attention_formulas, "_CHUNK", 1)
    n, make = Sizes(M=37, N=20, D=6, E=5), Maker()
    captured, mod = which(make, n)
    compare(
        lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured)),
        lambda q, k, v, *captured: plain(q, k, v, mod(*captured))[0],
        [*tensors(make, n), *captured],
        how,
    )


def check_case(one: Case) -> None:
    """Checks the output, lse and the largest scores."""
    ours, formula, inputs, _ = of_case(one, "float64", "cpu")
    compare(ours, formula, inputs, gradient_along)


IN_EVERY_RUN = ("activations", "filled reads", "bf16_bias", "document_bias")


@rows_of("one", [c for c in CASES if c.name in IN_EVERY_RUN])
def test_some_of_the_field(one: Case) -> None:
    check_case(one)


@pytest.mark.large
@rows_of("one", [c for c in CASES if c.name not in (*IN_EVERY_RUN, "t5")], tests=8)
def test_the_rest_of_the_field(one: Case) -> None:
    """But for t5, whose buckets end where a logarithm of float32 is whole, which one of float64 just is not."""
    check_case(one)


def test_hessian() -> None:
    n, make = Sizes(B=1, H=1, key_heads=1, key_batch=1, M=3, N=4, D=2, E=2), Maker()
    captured, mod = triangle(make, n)
    inputs = [*tensors(make, n), *captured]
    every = tuple(range(5))
    of = lambda f: jax.jit(jax.hessian(lambda *x: jnp.sin(f(*x)).sum(), every))(*inputs)  # noqa: E731
    ours = lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured))  # noqa: E731
    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))[0]  # noqa: E731
    close("cpu", of(ours), of(formula))


def test_a_third_derivative_and_vmap() -> None:
    ours, formula, inputs, weights = case("cpu", "float64", Sizes(M=9, N=10, D=4, E=4))
    q, *rest = inputs

    def third(f: Function) -> Any:
        loss = lambda q: (f(q, *rest) ** 2 * weights).sum()  # noqa: E731
        along = lambda g: lambda x: jax.jvp(g, (x,), (q[::-1],))[1]  # noqa: E731
        return jax.jit(jax.vmap(along(along(jax.grad(loss)))))(jnp.stack([q, 0.5 * q]))

    close("cpu", third(ours), third(formula))


@pytest.mark.parametrize(
    "sizes, layout",
    [(Sizes(M=20, N=18, D=8, E=4, key_heads=2), "BSHD"), (Sizes(M=20, key_heads=1, key_batch=1), "BHSD")],
    ids=["BSHD", "shared keys"],
)
def test_shapes_and_block_masks(sizes: Sizes, layout: str) -> None:
    n, make = sizes, Maker()
    captured, mod = triangle(make, n)
    start = make.integers(3, n.H)
    allowed = lambda b, h, i, j: (i + 4 * start[h] >= j) & (i >= 2)  # noqa: E731
    mask = create_block_mask(allowed, None, n.H, n.M, n.N, (8, 16))
    swap = partial(jnp.swapaxes, axis1=1, axis2=2) if layout == "BSHD" else lambda x: x

    def ours(q: Any, k: Any, v: Any, *captured: Any) -> Any:
        return swap(flex_attention(*map(swap, (q, k, v)), mod(*captured), mask, enable_gqa=True, layout=layout))

    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured), allowed)[0]  # noqa: E731
    compare(ours, formula, [*tensors(make, n), *captured], gradient_along)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_and_x64_off(dtype: str) -> None:
    """Within rule 12 of the contract, of formulas in the dtype."""
    with jax.enable_x64(False):
        n, make = Sizes(M=37, N=20, D=8, E=8), Maker("cpu", dtype)
        captured, mod = nonlinear(make, n)
        inputs = [*tensors(make, n), *captured]
        weights = make(n.B, n.H, n.M, n.E)
        ours = lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured))  # noqa: E731
        formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))[0]  # noqa: E731

        def run(f: Function, inputs: list[Any], wide: Any) -> Any:
            of, floats = of_floats(f, inputs)
            loss = lambda *x: ((of(*x).astype(wide) ** 2) * weights.astype(wide)).sum()  # noqa: E731
            return jax.jit(lambda *x: hessian_vector(loss, list(x), [v[::-1] if v.ndim else v for v in x]))(*floats)

        found, eager = run(ours, inputs, jnp.float32), run(formula, inputs, jnp.float32)
    truth = run(formula, [x.astype(jnp.float64) if is_float(x) else x for x in inputs], jnp.float64)
    for x, e, t in zip(found, eager, truth, strict=True):
        assert x.dtype == e.dtype
        # For a single number the error of the formulas may be anything within a rounding.
        step = max(float(jnp.finfo(x.dtype).eps), 2e-5) if x.size == 1 else 1e-6
        assert rmse(x, t) <= 1.5 * rmse(e, t) + step * float(np.sqrt(np.mean(np.asarray(t) ** 2)))


def test_dropout() -> None:
    n, make = Sizes(M=40, N=70, E=70), Maker()
    q, k, v = tensors(make, n)
    captured, mod = bias(make, n)
    dropping = partial(flex_attention, dropout_p=0.3, dropout_key=jax.random.key(7))
    identity = jnp.broadcast_to(jnp.eye(n.N), (n.B, n.H, n.N, n.N))
    keep = jnp.where(dropping(q, k, identity) == 0, 0.0, 1 / 0.7)
    compare(
        lambda q, k, v, *captured: dropping(q, k, v, mod(*captured)),
        lambda q, k, v, *captured: plain(q, k, v, mod(*captured), keep=keep)[0],
        [q, k, v, *captured],
        gradient_along,
    )


@jax.custom_jvp
def stepped(x: Any) -> Any:
    return jnp.round(x)


stepped.defjvp(lambda x, dx: (stepped(*x), dx[0] * stepped(x[0])))


@pytest.mark.parametrize("how", NESTINGS, ids=lambda f: f.__name__)
def test_own_derivatives_are_refused(how: Function) -> None:
    """The text does not say what they depend on: the derivative of `stepped` would be 0, silently. JAX's own functions
    have rules too, which are derivatives of what they compute, and are in the field's `activations`."""
    x = jnp.ones((1, 1, 8, 8))
    of = lambda x: flex_attention(x, x, x, lambda s, b, h, i, j: stepped(s)).sum()  # noqa: E731
    jax.grad(of)(x)
    with pytest.raises(NotImplementedError, match=f"{OP}: a function with a derivative of its own .*custom_jvp"):
        how(of, [x], [x])


def test_memory_is_linear() -> None:
    """For a table, no array of all pairs; a bias of all pairs costs its own size and that of its gradient."""
    S, H = 8192, 2
    x, table, pair = (jnp.zeros(s, jnp.float32) for s in ((1, H, S, 16), (H, 65), (H, S, S)))
    of_table = lambda table: lambda s, b, h, i, j: s + table[h, jnp.clip(i - j, -32, 32) + 32]  # noqa: E731
    of_pair = lambda pair: lambda s, b, h, i, j: s + pair[h, i, j]  # noqa: E731
    for mod, captured, most in ((of_table, table, 0.6), (of_pair, pair, 2.6)):
        inputs = [x, x, x, captured]
        loss = lambda q, k, v, c, mod=mod: (flex_attention(q, k, v, mod(c)) ** 2).sum()  # noqa: E731
        compiled = jax.jit(lambda *x, loss=loss: gradient_along(loss, list(x), list(x))).lower(*inputs).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < most * H * S * S * 4
