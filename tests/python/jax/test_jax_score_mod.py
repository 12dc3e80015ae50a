"""JAX's score_mods and mask_mods in the language: values and derivatives against JAX's own of the functions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from coverings import rows_of

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad._tracing.names import words  # noqa: E402
from fusegrad.jax._score_mod import Mod, trace_mask_mod, trace_score_mod  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax_mods_support import check_mask_mod, check_score_mod, evaluated, is_float  # noqa: E402
from jax_score_mods import CASES, OWN_DERIVATIVES, Case, over_all_pairs  # noqa: E402

# For as many pairs: JAX compiles an op for each number of elements.
SIZES = [(2, 3, 5, 6), (1, 6, 6, 5)]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@rows_of("case, sizes", list(zip([*CASES, *OWN_DERIVATIVES], itertools.cycle(SIZES))), tests=8)
def test_mods_of_the_field(case: Case, sizes: tuple[int, int, int, int]) -> None:
    """Where the indices may be anything, as without sizes, reads are clamped as JAX clamps them."""
    params, mods = case.make(*sizes, jnp.float64)
    score_mod, mask_mod = mods(*params)
    if mask_mod is not None:
        check_mask_mod(mask_mod, sizes)
    if score_mod is not None:
        check_score_mod(lambda *params: mods(*params)[0], params, sizes, told=(True, False))


PLAIN = words(
    """
    bias_of_a_head bias_of_a_pair full_bias indexed_one_by_one transposed relative relative_of_a_head negative_indices
    made_within expanded reshaped clamped_distance swin pair_bias dot_products slice_of_a_bias
    """
)


@rows_of("case", [c for c in CASES if c.name.replace(" ", "_") in PLAIN])
def test_reads_in_range_are_plain(case: Case) -> None:
    """What the sizes say is in range is neither clamped nor normalized: planners know something of such indices."""
    params, mods = case.make(2, 3, 8, 8, jnp.float32)
    text = trace_score_mod(mods(*params)[0], sizes=(2, 3, 8, 8)).text
    lines = [line for line in text.splitlines() if " = " in line]
    indices = {word for line in lines if "= load" in line for word in line.split()[4:]}
    indices -= {line.split()[0] for line in lines if case.name == "clamped distance"}
    assert not [line for line in lines if line.split()[0] in indices and line.split()[2] in ("where", "max", "min")], (
        text
    )


def test_texts() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return jnp.where(q >= kv, s + table.T[q // 2, h % 3] * jnp.exp(scale), -jnp.inf)

    table, scale = jnp.zeros((3, 8)), jnp.zeros(())
    found = trace_score_mod(mod, sizes=(1, 6, 16, 16))
    assert found.text == (
        "score_mod 1\nbuffer @0 f 2\nbuffer @1 f 0\n%0 = le kv_idx q_idx\n%1 = mod h 3\n%2 = floor_div q_idx 2\n"
        "%3 = load @0 %1 %2\n%4 = load @1\n%5 = mul %3 %4\n%6 = add score %5\n%7 = where %0 %6 -inf\nreturn %7\n"
    )
    assert found.buffers[0] is table and found.scalars == ()
    assert trace_score_mod(None) == trace_mask_mod(None) == Mod("", (), ())
    assert trace_score_mod(found) is found


# --- ways to be called ----------------------------------------------------------------------------------------


def test_within_transforms() -> None:
    """The text is that of eager mode within jit, grad, vmap, checkpoint and scan, where what it reads is computed."""
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6)))
    texts = []

    def read(weight: jax.Array) -> jax.Array:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + jnp.sin(weight)[h, kv] * weight[h, 0]

        found = trace_score_mod(mod, score_dtype=jnp.float64, sizes=(1, 3, 6, 6))
        texts.append(found.text)
        return sum(x.sum() for x in found.buffers)

    def scanned(weight: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c, read(x * weight)), 0.0, jnp.ones(2))[1][0]

    expected = read(weight)
    for transformed in (jax.jit(read), jax.checkpoint(read), jax.jit(jax.checkpoint(read)), scanned):
        np.testing.assert_allclose(transformed(weight), expected)
        np.testing.assert_allclose(jax.grad(transformed)(weight), jnp.cos(weight) + 1)
    np.testing.assert_allclose(jax.vmap(read)(jnp.stack([weight, weight])), [expected] * 2)
    np.testing.assert_allclose(jax.jvp(read, (weight,), (weight,))[1], ((jnp.cos(weight) + 1) * weight).sum())
    assert len(set(texts)) == 1


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_within_shard_map(compiled: bool) -> None:
    """Where captured arrays vary over a mesh's axes, numbers of the function stay numbers of the text."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    weight = jnp.arange(8.0).reshape(2, 4)
    texts = []

    def read(weight: jax.Array) -> jax.Array:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            scaled = jnp.where(q > kv, jnp.sin(weight)[0, kv], 0.5) * jax.lax.axis_index("x")
            return s + scaled + jnp.arange(4)[q] * jax.lax.psum(weight, "x")[0, h]

        found = trace_score_mod(mod, sizes=(1, 3, 4, 4))
        texts.append(found.text)
        return sum(x.sum() for x in found.buffers).reshape(1)

    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(read, mesh=mesh, in_specs=spec, out_specs=spec)
    found = (jax.jit(mapped) if compiled else mapped)(weight)
    np.testing.assert_allclose(found, np.sin(weight).sum(1) + np.arange(2) + np.asarray(weight).sum(), rtol=1e-6)
    assert "0.5" in texts[0] and "to_float q_idx" in texts[0]


def test_no_new_text_for_other_values() -> None:
    def text(value: float) -> str:
        weight, scale = jnp.full((4,), value), jnp.asarray(value)
        return trace_score_mod(lambda s, b, h, q, kv: s * scale + weight[h] * (weight * 2)[h]).text

    assert text(1.0) == text(2.5)


def test_one_array_is_one_buffer() -> None:
    weight = jnp.ones((4,))
    found = trace_score_mod(lambda s, b, h, q, kv: s + weight[h] * weight[b] + jax.jit(lambda i: weight[i])(h))
    assert len(found.buffers) == 1 and found.buffers[0] is weight


@rows_of("dtype", ["float64", "float16", "bfloat16", "int64", "int8", "uint8", "int16", "uint16", "uint32", "bool"])
def test_dtypes_of_captured_arrays(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0 if dtype[0] == "u" else -100, 100, 6)
    array = jnp.asarray(values, dtype)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + array[kv].astype(s.dtype) + (array[q] * 2 - array[kv]).astype(s.dtype) * 0.5

    check_score_mod(lambda: mod, [], (1, 2, 6, 6))


INTEGERS = sorted(words("int64 int32 int16 int8 uint8 uint16 uint32"))


@pytest.mark.parametrize("of", INTEGERS)
@rows_of("to", [*INTEGERS])
def test_casts_of_integers(of: str, to: str) -> None:
    """For captured ones and for computed ones, which wrap."""
    info = np.iinfo(of)
    values = np.array([info.min, info.min + 3, 0, 5, info.max - 3, info.max // 3], of)
    if of == "int32":  # which are taken to be so far within their limits
        values = np.array([-(1 << 31) + (1 << 21), -7, 0, 5, (1 << 31) - (1 << 21), 1 << 20], of)
    array = jnp.asarray(values)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        cast, computed = array[kv].astype(to), ((q - 3) * 1000).astype(of).astype(to)
        return s + cast.astype(s.dtype) * 1e-6 + computed.astype(s.dtype) + (cast >> 1).astype(s.dtype) * 1e-6

    check_score_mod(lambda: mod, [], (1, 2, 6, 6))


def test_unsigned_words() -> None:
    """Random numbers as hashes make them, of 32 bits that wrap."""

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = q.astype(jnp.uint32) * jnp.uint32(2654435761) + kv.astype(jnp.uint32) * jnp.uint32(40503)
        x ^= x >> 15
        x *= jnp.uint32(2246822519)
        x ^= (x << 13) | (x >> 19)
        return s + (x >> 8).astype(s.dtype) / (1 << 24)

    check_score_mod(lambda: mod, [], (2, 2, 6, 7))


def test_float32() -> None:
    """Without x64, as JAX is by default."""
    with jax.enable_x64(False):
        for case in CASES:
            params, mods = case.make(*SIZES[0], jnp.float32)
            if mods(*params)[0] is None:
                continue
            score = jnp.asarray(np.random.default_rng(1).standard_normal(SIZES[0]), jnp.float32)
            mod = trace_score_mod(mods(*params)[0], sizes=SIZES[0])
            expected = over_all_pairs(mods(*params)[0], SIZES[0], score)
            np.testing.assert_allclose(evaluated(mod, score), expected, rtol=2e-4, atol=2e-4, err_msg=case.name)
            assert all(x.dtype in (jnp.float32, jnp.bfloat16) for x in mod.buffers if is_float(x))


# --- random functions -----------------------------------------------------------------------------------------


@st.composite
def integers(draw: Any, depth: int) -> str:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(["b", "h", "q", "kv", "(q - kv)", str(draw(st.integers(-5, 9)))]))
    x, y = draw(integers(depth - 1)), draw(integers(depth - 1))
    forms = ["({0} + {1})", "({0} - {1})", "({0} * {1})", "jnp.minimum({0}, {1})", "jnp.maximum({0}, {1})", "abs({0})"]
    forms += ["({0} // 3)", "({0} % 5)", "({0} // ({1} | 1))", "({0} & {1})", "({0} ^ 3)", "(~{0})", "({0} << 2)"]
    forms += ["({0} >> 1)", "jnp.clip({0}, -4, 4)", "jnp.where({0} > {1}, {0}, 2)", "jnp.fmod({0}, 3)"]
    forms += ["jnp.asarray({0}).astype(jnp.uint8)", "(jnp.asarray({0}).astype(jnp.uint32) >> 3)"]
    forms += ["jnp.asarray({0} * 50).astype(jnp.int8)", "i0[{0} % 6].astype(jnp.uint32) % 9"]
    forms += ["i0[{0} % 6]", "i0[{0}]", "i1[{0} % 4, {1} % 3]", "i1[{0}, {1}]", "i0.at[{0}].get(mode='clip')"]
    return "jnp.int32(" + draw(st.sampled_from(forms)).format(x, y) + ")"


@st.composite
def vectors(draw: Any, depth: int) -> str:
    """A text of a vector of four elements."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return f"f1[{draw(integers(1))}]"
    v, w, x = draw(vectors(depth - 1)), draw(vectors(depth - 1)), draw(floats(depth - 1))
    forms = ["({0} + {1})", "({0} * {2})", "jnp.sin({0})", "jnp.stack([{2}, 0.5, {2} * 2, f2])", "jnp.flip({0})"]
    forms += [
        "jax.nn.softmax({0})",
        "jnp.cumsum({0})",
        "jnp.where({0} > {1}, {0}, {2})",
        "({0} @ m)",
        "jnp.roll({0}, 1)",
    ]
    forms += [
        "jnp.concatenate([{0}[2:], {1}[:2]])",
        "{0}.reshape(2, 2).T.reshape(4)",
        "jax.nn.relu({0})",
        "jnp.sort({0})",
    ]
    forms += ["jnp.outer({0}, {1}).sum(1)", "{0}.at[q % 4].set({2})", "jnp.tile({0}[:2], 2)", "jnp.pad({0}[1:3], 1)"]
    return draw(st.sampled_from(forms)).format(v, w, x)


@st.composite
def floats(draw: Any, depth: int) -> str:
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        i, j = draw(integers(1)), draw(integers(1))
        leaves = ["s", "f2", "f0[{0}]", "f0[{0} % 7]", "f1[{0}, {1}]", "f1[{0} % 5, 1]", "0.7", "s", "f1.T[{1}, {0}]"]
        leaves += ["f0.at[{0}].get(mode='fill', fill_value=0.3)", "(f0 * 2)[{0}]", "jnp.tanh(f1)[{0}, {1}]"]
        leaves += [
            "jnp.asarray({0}).astype(s.dtype)",
            "lax.dynamic_slice(f0, ({0},), (3,))[1]",
            "jnp.take(f0, {0}, mode='clip')",
        ]
        return draw(st.sampled_from(leaves)).format(i, j)
    x, y, i = draw(floats(depth - 1)), draw(floats(depth - 1)), draw(integers(1))
    v, w = draw(vectors(min(depth - 1, 1))), draw(vectors(min(depth - 1, 1)))
    forms = ["({0} + {1})", "({0} - {1})", "({0} * {1})", "jnp.tanh({0})", "jnp.sin({0})", "jax.nn.sigmoid({0})"]
    forms += ["({0} / (1.0 + {1} ** 2))", "jnp.where({2} > 1, {0}, {1})", "jnp.minimum({0}, {1})", "jax.nn.gelu({0})"]
    forms += [
        "lax.cond({2} % 2 == 0, jnp.cos, lambda x: x * 0.5, {0})",
        "lax.stop_gradient({0}) * {1}",
        "jnp.exp(-abs({0}))",
    ]
    forms += [
        "({3} @ {4})",
        "{3}.sum()",
        "{3}.max()",
        "{3}[{2} % 4]",
        "jax.nn.logsumexp({3})",
        "({3} @ m @ {4})",
        "{3}.mean()",
    ]
    forms += ["jax.nn.softplus({0})", "jnp.log1p({0} ** 2)", "jnp.var({3})", "jnp.einsum('i,ij,j->', {3}, m, {4})"]
    return draw(st.sampled_from(forms)).format(x, y, i, v, w)


@given(floats(3), st.integers(0, 1 << 30), st.booleans())
@settings(
    max_examples=int(os.environ.get("FUSEGRAD_SCORE_MOD_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_random_functions(source: str, seed: int, told: bool) -> None:
    generator = np.random.default_rng(seed)
    params = [jnp.asarray(generator.standard_normal(sizes)) for sizes in ((7,), (5, 4), (), (4, 4))]
    ints = {
        "i0": jnp.asarray(generator.integers(-9, 9, 6), jnp.int32),
        "i1": jnp.asarray(generator.integers(-3, 9, (4, 3)), jnp.int32),
    }
    scope = {"jnp": jnp, "jax": jax, "lax": jax.lax, **ints}

    def make(f0: jax.Array, f1: jax.Array, f2: jax.Array, m: jax.Array) -> Any:
        return eval(f"lambda s, b, h, q, kv: {source} + s * 0", {**scope, "f0": f0, "f1": f1, "f2": f2, "m": m})

    check_score_mod(make, params, (2, 2, 4, 5), seed, (told,))
