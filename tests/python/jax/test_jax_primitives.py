"""Each primitive of JAX that a score_mod may have, by a function that has it, and those that it may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from coverings import rows_of

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad._tracing.names import words  # noqa: E402
from fusegrad.jax._score_mod import TraceError, trace_mask_mod, trace_score_mod  # noqa: E402
from fusegrad.jax._tracing.interpret import SUPPORTED  # noqa: E402
from jax import lax  # noqa: E402
from jax.ad_checkpoint import checkpoint_name  # noqa: E402
from jax_mods_support import check_score_mod  # noqa: E402

SIZES = (2, 3, 5, 6)
# For other versions of JAX, and those that only stand in programs for meshes.
ELSEWHERE = {
    *("pjit", "core_call", "core_closed_call", "closed_call", "checkpoint", "custom_vjp_call_jaxpr", "copy_p"),
    *("pvary", "pcast", "sharding_constraint", "mesh_cast", "reshard", "device_put", "expand_dims", "hypot", "tile"),
    *("scatter_add", "scatter_mul", "scatter_sub", "scatter_min", "scatter_max", "broadcast_to", "add_any", "copy"),
    *("real", "eq_to", "ne_to", "lt_to", "le_to", "gt_to", "ge_to", "remat2", "remat"),
}
KEEP = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)))
ROW = jnp.asarray(np.random.default_rng(1).standard_normal(5))

SORTED = jnp.sort(ROW)

Mod = Callable[..., Any]
EXAMPLES: dict[str, Mod] = {}


def example(name: str, mod: Mod) -> None:
    EXAMPLES[name] = mod


def of_number(name: str, function: Callable[[Any], Any], inner: Callable[[Any], Any] = lambda s: s) -> None:
    example(name, lambda s, b, h, q, kv: function(inner(s)) * 0.5 + s)


def of_vector(name: str, function: Callable[..., Any]) -> None:
    """A function of [s, 2 s, sin s, a captured number] that gives an array or a number."""

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        found = function(jnp.stack([s, 2 * s, jnp.sin(s), ROW[0] * s]), q)
        return jnp.sum(jnp.asarray(found, s.dtype) * jnp.arange(1, 1 + np.size(found)).reshape(np.shape(found)))

    example(name, mod)


for _name in words("abs neg sign exp exp2 expm1 tanh sin cos tan atan sinh cosh asinh erf erfc floor ceil square"):
    of_number(_name, getattr(lax, _name), lambda s: s * 0.7 + 0.1)
for _name in ["sqrt", "rsqrt", "log", "log1p", "cbrt"]:
    of_number(_name, getattr(lax, _name), lambda s: abs(s) + 0.3)
for _name in ["asin", "acos", "atanh"]:
    of_number(_name, getattr(lax, _name), lambda s: 0.9 * jnp.tanh(s))
of_number("acosh", lax.acosh, lambda s: 1.5 + abs(s))
of_number("log2", jnp.log2, lambda s: abs(s) + 0.3)
of_number("logistic", lax.logistic)
of_number("is_finite", lax.is_finite)
of_number("integer_pow", lambda s: lax.integer_pow(s, 3) + lax.integer_pow(abs(s) + 1, -2))
of_number("round", lambda s: lax.round(s * 3) + lax.round(s * 3, lax.RoundingMethod.TO_NEAREST_EVEN))
of_number("stop_gradient", lambda s: lax.stop_gradient(s) * s)
of_number("convert_element_type", lambda s: (s * 3).astype(jnp.int32) + (s * 2).astype(bool))
of_number("custom_jvp_call", jax.nn.relu)
of_number("jit", jax.jit(lambda s: s * jnp.sin(s)))
of_number("name", lambda s: checkpoint_name(s * s, "kept"))
of_number("optimization_barrier", lambda s: sum(lax.optimization_barrier((s, s * s))))
of_number("cond", lambda s: lax.cond(s > 0, jnp.sin, lambda x: x * x, s))
of_number("polynomial", lambda s: lax.polynomial(s, [jnp.asarray(0.5), ROW[1], s]) if hasattr(lax, "polynomial") else s)
of_number("one_minus_square", lambda s: 1 / jnp.cosh(s) + jax.grad(jnp.tanh)(s))
of_number("scan", lambda s: lax.scan(lambda c, x: (c * 0.5 + x, c * x), s, ROW[:3])[1].sum())
example("add", lambda s, b, h, q, kv: s + q)
example("sub", lambda s, b, h, q, kv: s - q)
example("mul", lambda s, b, h, q, kv: s * q * (q * kv))
example("max", lambda s, b, h, q, kv: jnp.maximum(s, 0.3) + jnp.maximum(q, kv))
example("min", lambda s, b, h, q, kv: jnp.minimum(s, 0.3) + jnp.minimum(q, kv))
example("pow", lambda s, b, h, q, kv: (abs(s) + 0.5) ** (0.3 * q + s))
example("atan2", lambda s, b, h, q, kv: jnp.arctan2(s, 0.5 * s + q + 1))
example("clamp", lambda s, b, h, q, kv: lax.clamp(s * 0 - 1, s, s * 0 + 1) + lax.clamp(jnp.int32(1), q, jnp.int32(3)))
example("div", lambda s, b, h, q, kv: s / (1 + q) + lax.div(kv - q, jnp.int32(2)) + lax.div(kv, q))
example("rem", lambda s, b, h, q, kv: lax.rem(s, 0.7) + lax.rem(kv - q, jnp.int32(2)) + lax.rem(kv, q))


def _compared(f: Callable[..., Any]) -> Mod:
    return lambda s, b, h, q, kv: s * f(q, kv) + f(s, 0.1)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    example(_name, _compared(getattr(lax, _name)))
for _name, _f in (("and", jnp.bitwise_and), ("or", jnp.bitwise_or), ("xor", jnp.bitwise_xor)):
    example(_name, lambda s, b, h, q, kv, f=_f: s + f(q, kv - 3) + f(q > kv, s > 0))
example("not", lambda s, b, h, q, kv: s + ~q + ~(q > kv) + (~q.astype(jnp.uint32)).astype(jnp.float32))
example("shift_left", lambda s, b, h, q, kv: s + (q << kv) + (q << (28 + kv)) + lax.shift_left(q, kv * 8))
example("shift_right_arithmetic", lambda s, b, h, q, kv: s + ((q - 3) >> kv) + ((q - 3) >> (kv * 9)))
example(
    "shift_right_logical",
    lambda s, b, h, q, kv: s + lax.shift_right_logical(q - 3, kv * 9) + (q.astype(jnp.uint32) << 30 >> 29),
)
example("select_n", lambda s, b, h, q, kv: lax.select_n(q % 3, s, 2 * s, s * s) + jnp.where(q > kv, s, 0.5))
example(
    "iota", lambda s, b, h, q, kv: (lax.iota(jnp.int32, 7) * s)[q] + lax.broadcasted_iota(jnp.int32, (3, 9), 1)[1, q]
)
example(
    "while", lambda s, b, h, q, kv: s * lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * kv), (0, q))[1]
)
example("custom_vjp_call", lambda s, b, h, q, kv: stepped(s, q))
example(
    "call_hi_primitive",
    lambda s, b, h, q, kv: s * jnp.searchsorted(SORTED, s) + jnp.interp(s, SORTED, SORTED**2),
)
example("custom_vmap_call", lambda s, b, h, q, kv: own_vmap(s))
example("dynamic_slice", lambda s, b, h, q, kv: s * lax.dynamic_slice(KEEP, (q, kv - 3), (2, 2)).sum() + KEEP[q, kv])
example(
    "gather",
    lambda s, b, h, q, kv: s * (ROW[jnp.stack([q, kv % 5, q - kv % 5])].sum() + KEEP[q % 4, jnp.array([0, 2])].sum()),
)
of_vector("stack", lambda v, q: v)
of_vector("unstack", lambda v, q: jnp.unstack(v)[2] if hasattr(jnp, "unstack") else v[2])
of_vector("broadcast_in_dim", lambda v, q: v[:, None] * jnp.ones((4, 3)))
of_vector("transpose", lambda v, q: (v.reshape(2, 2) * KEEP[:2, :2]).T)
of_vector("squeeze", lambda v, q: v[None].squeeze(0))
of_vector("reshape", lambda v, q: (v * jnp.ones((3, 1))).reshape(2, 3, 2).reshape(6, 2))
of_vector("slice", lambda v, q: v[1:4:2])
of_vector("rev", lambda v, q: v[::-1])
of_vector("concatenate", lambda v, q: jnp.concatenate([v, ROW, v[:1]])[q])
of_vector("pad", lambda v, q: lax.pad(v, 0.5, [(2, -1, 1)]))
of_vector("split", lambda v, q: jnp.split(v, [1, 3])[1])
of_vector("dynamic_update_slice", lambda v, q: lax.dynamic_update_slice(v, v[:2] * 3, (q,)))
of_vector("reduce_sum", lambda v, q: v.sum())
of_vector("reduce_prod", lambda v, q: (v + 2).prod())
of_vector("reduce_max", lambda v, q: v.max() + jnp.arange(3).max() * q + (v.astype(jnp.int32) * q).max())
of_vector("reduce_min", lambda v, q: v.min())
of_vector("reduce_and", lambda v, q: (v > -1).all())
of_vector("reduce_or", lambda v, q: (v > 1).any())
of_vector("argmax", lambda v, q: v.argmax())
of_vector("argmin", lambda v, q: v.argmin())
of_vector("cumsum", lambda v, q: jnp.cumsum(v)[q] + lax.cumsum(v, reverse=True)[1])
of_vector("cumprod", lambda v, q: jnp.cumprod(v + 1.5)[q])
of_vector("cummax", lambda v, q: lax.cummax(v)[q] + lax.cummax(jnp.array([1, 5, 2]) * q)[q])
of_vector("cummin", lambda v, q: lax.cummin(v, reverse=True)[q])
of_vector("cumlogsumexp", lambda v, q: lax.cumlogsumexp(v)[q])
of_vector("sort", lambda v, q: jnp.sort(v) + jnp.argsort(v) + lax.sort([v.astype(jnp.int32), v], num_keys=2)[1])
of_vector("top_k", lambda v, q: lax.top_k(v, 2)[0] + lax.top_k(v, 2)[1])
of_vector("dot_general", lambda v, q: v @ KEEP @ ROW + jnp.einsum("i,ij,j->i", v, KEEP, ROW))
of_vector("scatter", lambda v, q: v.at[q].set(0.5))
of_vector("scatter-add", lambda v, q: v.at[jnp.array([0, 2, 0])].add(v[:3] * 2))
of_vector("scatter-mul", lambda v, q: v.at[q].multiply(3.0))
of_vector("scatter-min", lambda v, q: v.at[q].min(0.1))
of_vector("scatter-max", lambda v, q: v.at[q].max(0.1))
of_vector("scatter-sub", lambda v, q: v.at[q].subtract(v[1]) if hasattr(v.at[q], "subtract") else v)


@jax.custom_vjp
def stepped(x: Any, n: Any) -> Any:
    return jnp.floor(x) * n


stepped.defvjp(lambda x, n: (stepped(x, n), n), lambda n, d: (d * n * 0.5, None))


@jax.custom_batching.custom_vmap
def own_vmap(x: Any) -> Any:
    return x * x


@own_vmap.def_vmap
def _(axis_size: int, batched: Any, x: Any) -> Any:
    return x * x, batched[0]


def names_of(jaxpr: Any) -> set[str]:
    found = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.add(equation.primitive.name)
        for param in equation.params.values():
            for inner in param if isinstance(param, (tuple, list)) else (param,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    found |= names_of(inner)
    return found


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@rows_of("name", sorted(EXAMPLES), tests=4)
def test_supported(name: str) -> None:
    mod = EXAMPLES[name]
    arguments = [jax.ShapeDtypeStruct((), jnp.float64), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    if name not in names_of(jax.make_jaxpr(mod)(*arguments)):
        pytest.skip(f"this version of JAX makes no {name} of it")
    check_score_mod(lambda: mod, [], SIZES, told=(True, False))


BORDERS: dict[str, Callable[[Any], Any]] = {
    "abs": jnp.abs,
    "sqrt": lambda s: jnp.sqrt(jnp.abs(s)) + jnp.cbrt(s),
    "powers": lambda s: s**2 + s**1.5 + 2.0**s,
    "extrema": lambda s: jnp.maximum(s, 1.0) + jnp.minimum(s, -1.0) + jnp.clip(s, -2, 0.5),
    "clamp": lambda s: lax.clamp(-1.0, s, 1.0),
    "rounding": lambda s: jnp.round(s) + lax.round(s) * 3 + jnp.floor(s) * 5 + jnp.ceil(s) * 7 + jnp.trunc(s) * 11,
    "remainders": lambda s: jnp.fmod(s, 1.5) + 3 * (s % 1.5) + 5 * (s % -1.5) + 7 * (s // 1.5),
    "activations": lambda s: jax.nn.relu(s) + jax.nn.relu6(s) + jax.nn.elu(s) + jax.nn.leaky_relu(s) + jax.nn.selu(s),
    "smooth": lambda s: jax.nn.softplus(s) + jax.nn.log_sigmoid(s) + jax.nn.silu(s) + jax.nn.gelu(s) + jax.nn.mish(s),
    "hard": lambda s: jax.nn.hard_tanh(s) + jax.nn.hard_sigmoid(s) + jax.nn.hard_swish(s) + jax.nn.squareplus(s),
    "vectors": lambda s: jax.nn.logsumexp(jnp.stack([s, s, -s])) + jax.nn.softmax(jnp.stack([s, 2 * s, 0 * s]))[0],
    "ties": lambda s: jnp.stack([s, s, -s]).max() + 3 * jnp.stack([s, 1.0, s * s, 0.0, -s]).min(),
    "choice": lambda s: jnp.where(s > 0, s, 0.0)
    + lax.cond(s < 1, jnp.sin, jnp.cos, s)
    + jnp.argmax(jnp.stack([s, -s])),
    "scipy": lambda s: jax.scipy.special.xlogy(s * s, s * s) + jax.scipy.special.expit(s) + jnp.nan_to_num(s),
}


@rows_of("name", [*BORDERS])
def test_values_at_borders(name: str) -> None:
    """Zeros of both signs, bounds, ties, halves, and far values: JAX's value and JAX's gradient."""
    score = jnp.asarray(
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0, 2.5, 3.0, -3.0, 6.0, 30.0, -30.0, 90.0, -90.0]
    )
    check_score_mod(lambda: lambda s, b, h, q, kv: BORDERS[name](s), [], (1, 1, 3, 6), score=score.reshape(1, 1, 3, 6))


def test_every_supported_primitive_has_an_example() -> None:
    assert set(EXAMPLES) | ELSEWHERE >= SUPPORTED


# --- what has no meaning --------------------------------------------------------------------------------------

LARGE = jnp.zeros((70, 70))

REFUSED: dict[str, tuple[Mod, str]] = {
    "no counterpart": (lambda s, b, h, q, kv: lax.lgamma(s), "the primitive lgamma, which score_mods do not have"),
    "within jit": (lambda s, b, h, q, kv: jax.jit(lax.digamma)(s), "the primitive digamma, which"),
    "random": (lambda s, b, h, q, kv: s + jax.random.uniform(jax.random.key(q)), "draw random numbers outside"),
    "printing": (lambda s, b, h, q, kv: s + (jax.debug.print("{}", s) or 0), "the primitive debug_[a-z]*, which"),
    "complex": (lambda s, b, h, q, kv: lax.complex(s, s).real, "numbers of type complex64"),
    "steps": (lambda s, b, h, q, kv: lax.fori_loop(0, 100, lambda i, x: x * 0.9, s), "which has 100 steps"),
    "a loop until": (
        lambda s, b, h, q, kv: lax.while_loop(lambda x: x < 3, lambda x: x + 1, s),
        "which runs until a value says so",
    ),
    "too many elements": (lambda s, b, h, q, kv: s + (LARGE * s).sum(), None),
    "a custom rule of a large array": (lambda s, b, h, q, kv: s + scaled(LARGE[0] * s).sum(), "single elements"),
    "a vector": (lambda s, b, h, q, kv: LARGE[q], "must return one number for a score, but got float32.70."),
    "two results": (lambda s, b, h, q, kv: (s, s), "must return one number for a score, but got float32"),
    "a branch": (lambda s, b, h, q, kv: s if q > kv else -s, "use jnp.where"),
    "a number of Python": (lambda s, b, h, q, kv: s * float(s), "use jnp.where"),
}


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return x * x.sum()


scaled.defvjp(lambda x: (scaled(x), None), lambda _, d: (d * d.sum(),))


@rows_of("name", [*REFUSED])
def test_refused(name: str) -> None:
    mod, message = REFUSED[name]
    with jax.enable_x64(False):
        if message is None:
            trace_score_mod(mod)
            return
        with pytest.raises(TraceError, match=message) as caught:
            trace_score_mod(mod)
    text = str(caught.value)
    assert text.startswith("fusegrad.jax.flex_attention: score_mod")
    if name not in ("a vector", "two results"):
        assert f'{__file__}", line' in text and "lambda s" in text, text


def test_refused_masks() -> None:
    with pytest.raises(TraceError, match="mask_mod must return bool, but got int32"):
        trace_mask_mod(lambda b, h, q, kv: q - kv)
    with pytest.raises(TypeError, match="mask_mod must be a function, but got int"):
        trace_mask_mod(3)
    with pytest.raises(ValueError, match="sizes must be at most"):
        trace_mask_mod(lambda b, h, q, kv: q > kv, sizes=(1, 1, 1 << 40, 1))


def test_users_own_errors_say_where() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        trace_score_mod(mod)
    assert caught.value.__notes__[-1] == "fusegrad.jax.flex_attention: while the score_mod was traced"
