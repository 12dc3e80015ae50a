"""Transformations of fusegrad.jax.flex_attention against those of float64 formulas, and dropout under them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from jax_attention_support import (
    OP,
    Maker,
    Sizes,
    attend,
    bias,
    case,
    close,
    everywhere,
    nonlinear,
    plain,
    tensors,
    tolerance,
)
from jax_attention_support import exact as _exact  # noqa: F401  of every test

jax = pytest.importorskip("jax")

import fusegrad.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import AuxRequest, flex_attention  # noqa: E402


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


def test_constants_have_no_gradient() -> None:
    """Integers get float0, masks' arrays zeros."""
    n, make = Sizes(), Maker()
    captured, mod = nonlinear(make, n)
    q, k, v = tensors(make, n)
    grad = jax.grad(lambda kind: flex_attention(q, k, v, mod(*captured[:3], kind)).sum(), allow_int=True)(captured[3])
    assert grad.dtype == jax.dtypes.float0


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
