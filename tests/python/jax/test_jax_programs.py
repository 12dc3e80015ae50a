"""Programs with fusegrad.jax.flex_attention: compilations, memory, devices, and bad input at trace time."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from typing import Any

import pytest
from coverings import rows_of
from jax_attention_support import (
    OP,
    case,
    close,
    everywhere,
    on,
    tolerance,
)
from jax_attention_support import exact as _exact  # noqa: F401  of every test

jax = pytest.importorskip("jax")

import fusegrad.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fusegrad.jax import create_block_mask, flex_attention  # noqa: E402


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


def _sizes_of(text: str) -> list[int]:
    """Elements of all arrays that a compiled program names."""
    return [math.prod(map(int, x.split(","))) for x in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", text)]


@pytest.mark.parametrize("policy", [None, "nothing_saveable"])
@pytest.mark.parametrize("kind", ["table", "causal", "traced documents"])
def test_memory_is_linear(kind: str, policy: str | None) -> None:
    """For a training step at 16384 queries and keys: no array of all pairs, nor of a mask that the program makes."""
    S, H, D = 16384, 2, 32
    make = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(on("cpu")))
    x, table, of = make((1, H, S, D), jnp.bfloat16), make((H, 65), jnp.float32), make((S,), jnp.int32)

    def attend(q: Any, k: Any, v: Any, table: Any, of: Any) -> Any:
        mod = lambda s, b, h, i, j: s + table[h, jnp.clip(i - j, -32, 32) + 32]  # noqa: E731
        mask = {"table": None, "causal": lambda b, h, i, j: i >= j,
                "traced documents": lambda b, h, i, j: (of[i] == of[j]) & (i >= j)}[kind]  # fmt: skip
        mask = mask and create_block_mask(mask, None, None, S, S)
        return flex_attention(q, k, v, None if kind == "causal" else mod, mask)

    how = jax.checkpoint(attend, policy=policy and getattr(jax.checkpoint_policies, policy))
    loss = lambda *x: how(*x).astype(jnp.float32).sum()  # noqa: E731
    step = jax.jit(jax.grad(loss, (0, 1, 2, 3)), donate_argnums=(0, 1, 2))
    compiled = step.lower(x, x, x, table, of).compile()
    memory = compiled.memory_analysis()
    sizes = _sizes_of(compiled.as_text())
    pairs_at_a_time = 1 << 22 if kind == "traced documents" else 0  # of which the program asks the mask
    assert max(sizes) <= max(H * S * D, pairs_at_a_time) < S * S
    assert memory.temp_size_in_bytes < 16 * H * S * D * 2 + 4 * pairs_at_a_time
    # The gradients of query, key and value are written over what was donated.
    assert memory.alias_size_in_bytes >= 3 * H * S * D * 2


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
    lowered = jax.jit(lambda x: flex_attention(x, x, x)).trace(inputs[0].astype(jnp.float64))
    with pytest.raises(NotImplementedError, match=f"{OP}: query must be .* on CUDA, but got float64"):
        lowered.lower(lowering_platforms=("cuda",))


@pytest.mark.skipif(fj.build_has_cuda, reason="of a build without CUDA")
def test_a_build_without_cuda_says_so() -> None:
    x = jnp.ones((1, 1, 8, 8), jnp.float32)
    with pytest.raises(NotImplementedError, match=f"{OP}: fusegrad must be built with CUDA"):
        jax.jit(lambda x: flex_attention(x, x, x)).trace(x).lower(lowering_platforms=("cuda",))
    with pytest.raises(NotImplementedError, match="compile_flex: fusegrad must be built with CUDA"):
        fj.compile_flex(x, x, x)


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


@rows_of("change, error, message", BAD)
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
    jax.config.update("jax_default_matmul_precision", "highest")
    # Kernels of a GPU take no float64; the formulas do.
    cpu = jax.default_backend() == "cpu"
    dtype, bound = (np.float64, 1e-11) if cpu else (np.float32, 2e-5)

    def same(found, right, message="", times=1):
        assert found.dtype == dtype, found.dtype
        scale = np.abs(right).max()
        np.testing.assert_allclose(
            found, right, rtol=times * bound, atol=times * bound * max(scale, 1), err_msg=message)

    B, H, KEY_HEADS, S, D = 4, 4, 2, 24, 8
    make = lambda *s, r=np.random.default_rng(0): jnp.asarray(r.standard_normal(s).astype(dtype))
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

    def formula(*x, whole=True):
        q, k, v, pair, of_key, slope = (each.astype(np.float64) for each in x)
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
                        same(x, t, f"{axis} {kind} {whole} {n}")
                text = jax.jit(ours).lower(*put).compile().as_text()
                assert "all-gather" not in text and "all-to-all" not in text, (axis, kind)
        moving = tuple(x * 0.3 for x in put)
        right_tangent = jax.jvp(formula, arrays, tuple(x * 0.3 for x in arrays))[1]
        same(jax.jit(lambda *x: jax.jvp(ours, x, moving)[1])(*put), right_tangent)
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
        same(x, t)

    # Second derivatives, of parts as of the whole.
    along = tuple(x * 0.3 for x in arrays)
    product = lambda f: jax.jit(lambda *x: jax.jvp(jax.grad(lambda *x: (f(*x) ** 2).sum(), every), x, along)[1])
    for x, t in zip(product(ours)(*put, *arrays[3:]), product(formula)(*arrays), strict=True):
        same(x, t, times=10)
    mapped = jax.shard_map(within, mesh=mesh, in_specs=(P("data"),) * 3 + (P(), P("data"), P()), out_specs=P("data"))
    for x, t in zip(product(mapped)(*arrays), product(lambda *x: formula(*x, whole=False))(*arrays), strict=True):
        same(x, t, times=10)

    # Dropout: parts drop other pairs than each other, the backward those of the forward.
    dropping = lambda *x: flex_attention(*x, enable_gqa=True, dropout_p=0.5, dropout_key=jax.random.key(0))
    identity = jax.device_put(jnp.broadcast_to(jnp.eye(S, dtype=dtype), (B, KEY_HEADS, S, S)), split)
    keep = np.asarray(jax.jit(dropping)(*put[:2], identity)) != 0
    assert len({keep[b, h].tobytes() for b in range(B) for h in range(H)}) == B * H

    def dropped(q, k, v):
        k, v = (jnp.repeat(x, H // KEY_HEADS, 1) for x in (k, v))
        p = jax.nn.softmax(jnp.einsum("bhmd,bhnd->bhmn", q, k) * D**-0.5, -1)
        return jnp.einsum("bhmn,bhne->bhme", p * keep / 0.5, v)

    grad = lambda f, x: jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)))(*x)
    for x, t in zip(grad(dropping, put), grad(dropped, (q, k, v)), strict=True):
        same(x, t, times=100)

    try:
        product(lambda *x: dropping(*x[:3]))(*put, *arrays[3:])
        raise SystemExit("a second derivative with dropout must be refused")
    except NotImplementedError as error:
        assert "fusegrad.jax.flex_attention: arrays must not be split over devices by jit where a second" in str(error)

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


@everywhere
def test_sharded_over_two_devices(device: str) -> None:
    """Batch or heads over two devices, by shard_map, by jit itself and by explicit axes: replicated arrays get the sum
    of the devices' gradients, nothing is gathered, mods see numbers of the whole (shard_map's own part)."""
    if device == "cuda" and len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    environment = {**os.environ, "JAX_PLATFORMS": device, "FUSEGRAD_TORCH": "0"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and run.stdout.strip() == "right", run.stderr
