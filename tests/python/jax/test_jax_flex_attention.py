"""fusegrad.jax.flex_attention: values and all gradients against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from coverings import each_of, rows_of
from jax_attention_support import (
    DEVICES,
    FIELD,
    MODS,
    OP,
    Maker,
    Sizes,
    attend,
    bias,
    close,
    compare,
    everywhere,
    nonlinear,
    of_case,
    plain,
    tensors,
    tolerance,
    triangle,
    upstream_of,
    usable,
)
from jax_attention_support import exact as _exact  # noqa: F401  of every test

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import AuxRequest, create_block_mask, flex_attention, varlen_mask  # noqa: E402
from jax_score_mods import CASES, OWN_DERIVATIVES, Case  # noqa: E402


@everywhere
@rows_of(
    "which, dtype",
    [(nonlinear, d) for d in ("float64", "float32", "bfloat16", "float16")]
    + [(f, d) for f, d in zip(MODS, ("float64", "float32", "bfloat16") * 2, strict=True) if f is not nonlinear],
    tests=4,
)
def test_mods(device: str, which: Any, dtype: str) -> None:
    usable(device, dtype)
    n, make = Sizes(), Maker(device, dtype)
    captured, mod = which(make, n)

    def with_mod(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, *captured: f(q, k, v, mod(*captured))

    compare(with_mod(attend), with_mod(plain), [*tensors(make, n), *captured], upstream_of(make, n))


DTYPES_OF = {"cpu": ["float64"], "cuda": ["float32", "bfloat16"]}
everywhere_in_its_dtypes = pytest.mark.parametrize("device, dtype", [(d, t) for d in DEVICES for t in DTYPES_OF[d]])


@everywhere_in_its_dtypes
@rows_of("one", CASES[::2], tests=8)
def test_the_field(device: str, one: Case, dtype: str) -> None:
    check_case(device, one, dtype)


@pytest.mark.large
@everywhere_in_its_dtypes
@rows_of("one", CASES[1::2], tests=8)
def test_the_rest_of_the_field(device: str, one: Case, dtype: str) -> None:
    """Whose texts' values and gradients are in every run of test_jax_score_mod.py."""
    check_case(device, one, dtype)


def check_case(device: str, one: Case, dtype: str) -> None:
    if one.name == "t5" and dtype == "float64":
        dtype = "float32"  # its buckets end where a logarithm of float32 is whole, which one of float64 just is not
    ours, formula, inputs, make = of_case(one, dtype, device)
    gradient = compare(ours, formula, inputs, upstream_of(make, FIELD), one.name)
    if device != "cpu":
        return
    # One call over queries, and all captured arrays, of two elements as two calls.
    moving = [0 if i == 0 or i > 2 else None for i in range(len(inputs))]
    full = [x if way is None else jnp.stack([x, x * 0.5]) for x, way in zip(inputs, moving, strict=True)]
    found, (out, *_) = jax.jit(jax.vmap(gradient, moving))(*full)
    for e in range(2):
        right, (out_alone, *_) = gradient(*(x if way is None else x[e] for x, way in zip(full, moving, strict=True)))
        limit = 2e-4 if dtype == "float32" else None
        close(device, [x[e] for x in (*found, out)], [*right, out_alone], limit)


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
    start = jnp.asarray(np.asarray(make.integers(3, n.H)))  # of no device: the truth is computed on the CPU
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


WIDE = [Sizes(D=512, E=512), Sizes(D=576, E=512, key_heads=1, key_batch=1), Sizes(D=300, E=257)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", WIDE, ids=str)
@everywhere
def test_wide_heads(device: str, sizes: Sizes, dtype: str) -> None:
    """Heads of more than 256 columns, for which a GPU's kernels compute parts; forward mode too."""
    n, make = sizes, Maker(device, dtype)
    captured, mod = triangle(make, n)
    inputs = (*tensors(make, n), *captured)
    grouped = {"enable_gqa": n.key_heads != n.H}
    formula = lambda q, k, v, *captured: plain(q, k, v, mod(*captured))  # noqa: E731
    compare(lambda q, k, v, *c: attend(q, k, v, mod(*c), **grouped), formula, [*inputs], upstream_of(make, n))
    if dtype == "float32":
        moving = tuple(make(*x.shape) for x in inputs)
        ours = lambda q, k, v, *captured: flex_attention(q, k, v, mod(*captured), **grouped)  # noqa: E731
        right = jax.jvp(lambda *x: formula(*x)[0], inputs, moving)[1]
        close(device, jax.jvp(ours, inputs, moving)[1], right, 2e-4)


@pytest.mark.parametrize("device", [d for d in DEVICES if d == "cuda"])
def test_heads_that_are_too_wide_for_a_gpu(device: str) -> None:
    wide, narrow = (Maker(device, "float32")(1, 1, 16, size) for size in (577, 513))
    message = f"{OP}: %s must have a head size of at most %d on CUDA, but got %d"
    with pytest.raises(NotImplementedError, match=message % ("query", 576, 577)):
        flex_attention(wide, wide, narrow)
    with pytest.raises(NotImplementedError, match=message % ("value", 512, 513)):
        flex_attention(narrow, narrow, narrow)


@each_of(
    {
        "sizes": [
            Sizes(M=1, N=300),
            Sizes(M=129, N=64, D=64, E=64),
            Sizes(key_heads=2),
            Sizes(key_heads=1, key_batch=1),
            Sizes(B=1, key_batch=1, H=1, key_heads=1, D=1, E=1),
            Sizes(D=40, E=8),
            Sizes(D=128, E=128),
        ],
        "dtype": ["float32", "bfloat16"],
    }
)
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
