"""fusegrad.jax: values and gradients against float64 formulas, aliases, memory, transforms, devices, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from coverings import rows_of

# Before JAX makes its devices: four of the CPU, programs that compile fast.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)
jax = pytest.importorskip("jax")
export = pytest.importorskip("jax.export")

import fusegrad  # noqa: E402
import fusegrad.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from fusegrad import reference  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402
from support import (  # noqa: E402
    COMMON,
    DISTILLATION,
    DISTILLATION_LOGITS,
    LINEAR,
    Distillation,
    Sample,
    assert_as_good_as_eager,
    gradients,
    rmse,
)
from torch import Tensor  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if fj.build_has_cuda and jax.default_backend() == "gpu" else [])]
everywhere = pytest.mark.parametrize("device", DEVICES)
OPS = ["cross_entropy", "linear_cross_entropy", "jsd"]
each = pytest.mark.parametrize("op", OPS)


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """As PyTorch's: a GPU's TF32 is a choice of the caller."""
    with jax.default_matmul_precision("highest"):
        yield


def on(device: str) -> Any:
    return jax.devices("cpu" if device == "cpu" else "gpu")[0]


def to_jax(x: Tensor, device: str = "cpu") -> jax.Array:
    """Keeps the dtype; int64 becomes int32."""
    if x.dtype == torch.bfloat16:
        return jax.device_put(jnp.asarray(x.detach().float().cpu().numpy(), jnp.bfloat16), on(device))
    return jax.device_put(jnp.asarray(x.detach().cpu().numpy()), on(device))


def to_torch(x: jax.Array) -> Tensor:
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(x))


def compare(
    ours: Callable[..., Any],
    plain: Callable[..., Tensor],
    inputs: list[Tensor],
    what: str,
    device: str = "cpu",
    single: float = 2**-22,
) -> None:
    """Rule 12 for the loss and for each gradient, for an upstream gradient of 0.5; `plain` takes the options' dtype
    from its first argument's. In float32 an error of 3e-6 of the gradient is always allowed: XLA's own products on
    the CPU add up in one chain, and the kernels' accuracy is what the tests of the PyTorch ops measure. So is half a
    step of 16-bit numbers where the roundings of a few rows' logits are luck."""
    arrays = [to_jax(x, device) for x in inputs]

    @jax.jit
    def run(*arrays: jax.Array) -> Any:
        loss, pullback = jax.vjp(ours, *arrays)
        return loss, pullback(jnp.full_like(loss, 0.5))

    loss, grads = run(*arrays)
    assert loss.devices() == {on(device)}
    where = inputs[0].device if device == "cpu" or not torch.cuda.is_available() else torch.device("cuda")
    truth, truth_grads = gradients(plain, [x.to(where).double() for x in inputs])
    eager, eager_grads = gradients(plain, [x.to(where) for x in inputs])
    assert_as_good_as_eager(to_torch(loss), eager.cpu(), truth.cpu(), f"{what}: loss", single)
    for i, (ours_grad, x, eager_grad, right) in enumerate(zip(grads, inputs, eager_grads, truth_grads, strict=True)):
        grad = to_torch(ours_grad)
        assert grad.dtype == x.dtype
        few = grad.dtype != torch.float32 and inputs[0].numel() <= 64
        allowed = 3e-6 if grad.dtype == torch.float32 else torch.finfo(grad.dtype).eps / 2 if few else 0.0
        if rmse(grad, right.cpu()) <= allowed * right.square().mean().sqrt().item():
            continue
        assert_as_good_as_eager(grad, eager_grad.cpu(), right.cpu(), f"{what}: gradient {i}")


def in_dtype_of(x: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(x.device, x.dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()}


# --- values and gradients -----------------------------------------------------------------------------------------

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@both
@pytest.mark.parametrize(
    "batch, sequence, vocab, hidden",
    [(1, 4, 32, 16), (2, 96, 1111, 64), pytest.param(4, 2048, 50304, 1024, marks=pytest.mark.large)],
)
@everywhere
def test_grid(device: str, batch: int, sequence: int, vocab: int, hidden: int, dtype: torch.dtype, bias: bool) -> None:
    """linear_cross_entropy in one chunk and in several."""
    x = torch.randn(batch, sequence, hidden).to(dtype)
    w = (torch.randn(vocab, hidden) * hidden**-0.5).to(dtype)
    target = torch.randint(0, vocab, (batch, sequence))
    target[0, 1] = -100
    inputs = [x, w, *([torch.randn(vocab).to(dtype)] if bias else [])]

    def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return reference.linear_cross_entropy(x, w, target.to(x.device), linear_bias=b)[0]

    single = max(2**-22, torch.finfo(dtype).eps / 8)
    for workspace in (None, 0) if batch * sequence > 64 else (None,):

        def ours(x: Any, w: Any, b: Any = None, workspace: int | None = workspace) -> Any:
            t = to_jax(target, device)
            return fj.linear_cross_entropy(x, w, t, linear_bias=b, workspace_mib=workspace)

        compare(ours, plain, inputs, f"workspace {workspace}", device, single)


def in_turn(samples: list[Any], *dtypes: torch.dtype) -> list[Any]:
    """Each sample in one of the dtypes: how the kernels do in each is what the tests of the PyTorch ops ask."""
    return [(s, dtypes[i % len(dtypes)]) for i, s in enumerate(samples)]


@everywhere
@rows_of("sample, dtype", in_turn(COMMON, torch.bfloat16, torch.float16, torch.float32))
def test_cross_entropy(device: str, sample: Sample, dtype: torch.dtype) -> None:
    rows, vocab = 7, 333
    target = sample.target((rows,), vocab, "cpu", dtype)
    tensors = sample.tensors((rows,), vocab, "cpu", torch.float32)
    arrays = {name: to_jax(t, device) for name, t in tensors.items()}

    def ours(x: Any) -> Any:
        return fj.cross_entropy(x, to_jax(target, device), **arrays, **sample.options)

    def plain(x: Tensor) -> Tensor:
        t = target.to(x.device, x.dtype) if sample.probabilities else target.to(x.device).long()
        return reference.cross_entropy(x, t, **in_dtype_of(x, tensors), **sample.options)[0]

    compare(ours, plain, [(3 * torch.randn(rows, vocab)).to(dtype)], str(sample), device)


OF_LINEAR = [s for s in LINEAR if s not in COMMON]
OF_LINEAR += [s for s in COMMON if s.name in ("z_loss, weight, token_weight", "probabilities, weight, smoothing")]


@everywhere
@rows_of("sample, dtype", in_turn(OF_LINEAR, torch.bfloat16, torch.float16, torch.float32))
def test_linear_cross_entropy(device: str, sample: Sample, dtype: torch.dtype) -> None:
    """Three chunks on the CPU: 1 + 2 * 64 rows."""
    rows, hidden, vocab = 129, 8, 41
    options = {"workspace_mib": 0, **sample.options}
    plain_options = {k: v for k, v in sample.options.items() if k != "workspace_mib"}
    target = sample.target((rows,), vocab, "cpu", dtype)
    tensors = sample.tensors((rows,), vocab, "cpu", torch.float32)
    arrays = {name: to_jax(t, device) for name, t in tensors.items()}

    def ours(x: Any, w: Any, b: Any = None) -> Any:
        return fj.linear_cross_entropy(x, w, to_jax(target, device), linear_bias=b, **arrays, **options)

    def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        t = target.to(x.device, x.dtype) if sample.probabilities else target.to(x.device).long()
        return reference.linear_cross_entropy(x, w, t, linear_bias=b, **in_dtype_of(x, tensors), **plain_options)[0]

    inputs = [torch.randn(rows, hidden), torch.randn(vocab, hidden), *([torch.randn(vocab)] if sample.bias else [])]
    single = max(2**-22, torch.finfo(dtype).eps / 8)
    compare(ours, plain, [x.to(dtype) for x in inputs], str(sample), device, single)


DENSE = [s for s in (*DISTILLATION, *DISTILLATION_LOGITS) if s.top_k == 0]


@everywhere
@rows_of("sample, dtype", in_turn(DENSE, torch.bfloat16, torch.float16, torch.float32))
def test_jsd(device: str, sample: Distillation, dtype: torch.dtype) -> None:
    rows, vocab = 9, 201
    tensors = sample.tensors((rows,), vocab, "cpu", torch.float32)
    arrays = {name: to_jax(t, device) for name, t in tensors.items()}

    def ours(q: Any, p: Any) -> Any:
        return fj.jsd(q, p, **arrays, **sample.options)

    def plain(q: Tensor, p: Tensor) -> Tensor:
        return reference.jsd(q, p, **in_dtype_of(q, tensors), **sample.options)[0]

    student = 2 * torch.randn(rows, vocab)
    inputs = [student, student + torch.randn(rows, vocab)]
    if sample.options.get("log_probs", False):
        inputs = [x.log_softmax(-1) for x in inputs]
    compare(ours, plain, [x.to(dtype) for x in inputs], str(sample), device, single=2**-20)


@everywhere
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_no_divergence_is_negative(device: str, beta: float) -> None:
    student = to_jax(3 * torch.randn(400, 97), device)
    assert bool((fj.jsd(student, student, beta=beta, reduction="none") == 0).all())
    logs = jax.nn.log_softmax(student)
    assert bool((fj.jsd(logs, logs + 1e-7, beta=beta, reduction="none", log_probs=True) >= 0).all())
    assert bool(jnp.isnan(fj.jsd(student.at[0, 0].set(jnp.nan), student, beta=beta)))


def test_float64_on_the_cpu() -> None:
    with jax.enable_x64(True):
        x, w, target = torch.randn(9, 5).double(), torch.randn(31, 5).double(), torch.randint(0, 31, (9,))
        t = to_jax(target)
        assert t.dtype == jnp.int64
        linear = lambda x, w: fj.linear_cross_entropy(x, w, t, z_loss=1e-2, softcap=3.0)  # noqa: E731
        plain = lambda x, w: reference.linear_cross_entropy(x, w, target, z_loss=1e-2, softcap=3.0)[0]  # noqa: E731
        compare(linear, plain, [x, w], "linear")
        compare(fj.jsd, lambda q, p: reference.jsd(q, p)[0], [w, w.flip(0)], "jsd")


def call(op: str, device: str = "cpu", rows: int = 8) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A loss of its first arguments, the others fixed."""
    keys = jax.random.split(jax.random.key(0), 4)
    target = jax.random.randint(keys[0], (rows,), 0, 24)
    x, w, y = (jax.random.normal(k, s) for k, s in zip(keys[1:], [(rows, 24), (24, 24), (rows, 24)], strict=True))
    arrays = [jax.device_put(a, on(device)) for a in (x, w, y, target)]
    x, w, y, target = arrays
    if op == "cross_entropy":
        return lambda x, **o: fj.cross_entropy(x, target, **o), [x]
    if op == "jsd":
        return lambda x, y, **o: fj.jsd(x, y, labels=target, **o), [x, y]
    return lambda x, w, **o: fj.linear_cross_entropy(x, w, target, **o), [x, w]


@each
@everywhere
@rows_of("reduction", ["sum", "none"])
def test_any_number_of_vjps_are_bitwise_equal(device: str, op: str, reduction: str) -> None:
    loss, inputs = call(op, device)
    out, pullback = jax.vjp(lambda *a: loss(*a, reduction=reduction), *inputs)
    upstream = jnp.full_like(out, 0.37)
    runs = [[np.asarray(g).copy() for g in pullback(upstream)] for _ in range(3)]
    runs.append([np.asarray(g) for g in jax.vjp(lambda *a: loss(*a, reduction=reduction), *inputs)[1](upstream)])
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(one, other)
    twice = pullback(2 * upstream)
    for one, other in zip(runs[0], twice, strict=True):
        np.testing.assert_allclose(2 * one, other, rtol=1e-6)


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [(1,), (0, 2)], ids=str)
def test_frozen_arguments(device: str, reduction: str, wanted: tuple[int, ...]) -> None:
    """A gradient does not depend on which others are wanted."""
    _, (x, w) = call("linear_cross_entropy", device, rows=70)
    target = jnp.arange(70) % 24
    b = jnp.linspace(-1, 1, 24)

    def loss(x: Any, w: Any, b: Any) -> Any:
        return fj.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, workspace_mib=0).sum()

    full = jax.grad(loss, (0, 1, 2))(x, w, b)
    for argument, grad in zip(wanted, jax.grad(loss, wanted)(x, w, b), strict=True):
        np.testing.assert_allclose(grad, full[argument], rtol=1e-4, atol=1e-6)


def test_mixed_dtypes() -> None:
    """Each gradient in its own array's dtype; the weight's adds up in float32."""
    x, w = torch.randn(200, 16).bfloat16(), torch.randn(33, 16)
    target = torch.randint(0, 33, (200,))
    grads = jax.grad(lambda x, w: fj.linear_cross_entropy(x, w, to_jax(target), workspace_mib=0), (0, 1))(
        to_jax(x), to_jax(w)
    )
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    _, truth = gradients(lambda x, w: reference.linear_cross_entropy(x, w, target)[0], [x.double(), w.double()])
    for grad, half, bound in zip(grads, truth, (1e-2, 1e-5), strict=True):
        right = 2 * half  # of an upstream gradient of 0.5
        assert ((to_torch(grad).double() - right).norm() / right.norm()).item() < bound


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_and_none_kept(reduction: str) -> None:
    ignored = jnp.full((3,), -100)
    for rows, target in ((0, ignored[:0]), (3, ignored)):
        x, w = jnp.ones((rows, 4)), jnp.ones((5, 4))
        calls = [
            (lambda x, w, t=target: fj.linear_cross_entropy(x, w, t, reduction=reduction), (x, w)),
            (lambda x, t=target: fj.cross_entropy(x, t, reduction=reduction), (x,)),
        ]
        for loss, inputs in calls:
            out = loss(*inputs)
            expected = np.zeros(rows) if reduction == "none" else np.nan if reduction == "mean" else 0.0
            np.testing.assert_array_equal(out, expected)
            for grad in jax.grad(lambda *a, loss=loss: loss(*a).sum(), tuple(range(len(inputs))))(*inputs):
                np.testing.assert_array_equal(grad, 0)
        jsd = "batchmean" if reduction == "mean" else reduction
        assert not np.any(fj.jsd(x, x + 1, labels=target, reduction=jsd))


# --- XLA sees the writes ------------------------------------------------------------------------------------------


@each
@everywhere
def test_an_upstream_op_that_saved_what_is_overwritten(device: str, op: str) -> None:
    """softmax, exp and tanh keep their results for their own gradients: XLA copies what is still needed."""
    loss, inputs = call(op, device)
    for upstream in (jax.nn.softmax, jnp.exp, jnp.tanh):
        program = lambda *a, upstream=upstream: loss(*(upstream(x) for x in a)) + a[0].sum()  # noqa: E731
        plain = lambda *a, program=program: program(*a)  # noqa: E731
        ours = jax.jit(jax.grad(program, tuple(range(len(inputs)))))(*inputs)
        with jax.disable_jit():
            separate = jax.grad(plain, tuple(range(len(inputs))))(*inputs)
        ends = [torch.from_numpy(np.array(x)).double().requires_grad_() for x in inputs]
        torch_upstream = {jax.nn.softmax: lambda x: x.softmax(-1), jnp.exp: torch.exp, jnp.tanh: torch.tanh}[upstream]
        truth = torch.autograd.grad(plain_loss(op, *(torch_upstream(x) for x in ends)) + ends[0].sum(), ends)
        for a, b, right in zip(ours, separate, truth, strict=True):
            np.testing.assert_allclose(a, right, rtol=2e-4, atol=1e-6)
            np.testing.assert_allclose(b, right, rtol=2e-4, atol=1e-6)


def plain_loss(op: str, *tensors: Tensor) -> Tensor:
    """`call(op)` in PyTorch."""
    target = torch.from_numpy(np.array(jax.random.randint(jax.random.split(jax.random.key(0), 4)[0], (8,), 0, 24)))
    if op == "cross_entropy":
        return reference.cross_entropy(tensors[0], target.long())[0]
    if op == "jsd":
        return reference.jsd(*tensors, labels=target.long())[0]
    return reference.linear_cross_entropy(*tensors, target.long())[0]


@each
@everywhere
def test_the_aliases_are_declared(device: str, op: str) -> None:
    loss, inputs = call(op, device)
    wanted = tuple(range(len(inputs)))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, wanted))(*inputs))
    results = {"cross_entropy": "((0, 4),)", "linear_cross_entropy": "((0, 4),)", "jsd": "((0, 1), (1, 2))"}
    assert f"input_output_aliases={results[op]}" in jaxpr
    hlo = jax.jit(jax.grad(loss, wanted)).lower(*inputs).compile().as_text()
    assert "output_to_operand_aliasing={" in hlo
    late = str(jax.make_jaxpr(jax.grad(lambda *a: loss(*a, reduction="none").sum(), wanted))(*inputs))
    assert "input_output_aliases=((0, 0),)" in late or op != "linear_cross_entropy"


def temporary(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return jax.jit(function, **options).lower(*args).compile().memory_analysis()


def test_logits_that_nobody_needs_are_not_copied() -> None:
    """Made within the program, or donated to it: the gradient is where they were."""
    x, w = jnp.ones((256, 16)), jnp.ones((2048, 16))
    target = jnp.zeros(256, jnp.int32)
    logits = 256 * 2048 * 4
    made = temporary(jax.grad(lambda x, w: fj.cross_entropy(x @ w.T, target), (0, 1)), x, w)
    assert made.temp_size_in_bytes < 1.1 * logits
    z = jnp.ones((256, 2048))
    donated = temporary(jax.value_and_grad(lambda z: fj.cross_entropy(z, target)), z, donate_argnums=0)
    assert donated.alias_size_in_bytes == logits and donated.temp_size_in_bytes < 0.1 * logits
    step = jax.jit(jax.value_and_grad(lambda z: fj.cross_entropy(z, target)), donate_argnums=0)
    right = jax.grad(lambda z: fj.cross_entropy(z, target))(z)
    _, grad = step(z)
    np.testing.assert_array_equal(grad, right)
    assert z.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_memory_on_the_cpu(dtype: Any) -> None:
    """At most a tenth above what PyTorch's op holds at once: the chunk's logits, the gradients, and in bfloat16 the
    float32 copy of the weight and its accumulator."""
    n, vocab, hidden = 2048, 8192, 512
    size = jnp.dtype(dtype).itemsize
    x, w = jnp.ones((n, hidden), dtype), jnp.ones((vocab, hidden), dtype)
    target = jnp.zeros(n, jnp.int32)
    found = temporary(jax.value_and_grad(lambda x, w: fj.linear_cross_entropy(x, w, target), (0, 1)), x, w)
    held = 1024 * vocab * 4 + (n + vocab) * hidden * size + (2 * vocab * hidden * 4 if size == 2 else 0)
    assert found.temp_size_in_bytes + found.output_size_in_bytes <= 1.1 * held


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8192, 50304, 1024), (8192, 32000, 4096)], ids=str)
def test_memory_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, vocab, hidden = shape
    x = torch.randn(n, hidden, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, hidden, device="cuda", dtype=dtype, requires_grad=True)
    target = torch.randint(0, vocab, (n,), device="cuda")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(fusegrad.linear_cross_entropy(x, w, target), (x, w))
    peak = torch.cuda.max_memory_allocated() - base
    kind = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
    shapes = [jax.ShapeDtypeStruct(s, kind) for s in ((n, hidden), (vocab, hidden))]
    t = jax.ShapeDtypeStruct((n,), jnp.int32)
    found = temporary(jax.value_and_grad(fj.linear_cross_entropy, (0, 1)), *shapes, t)
    ours = found.temp_size_in_bytes + found.output_size_in_bytes
    print(f"{shape} {dtype}: {ours / 2**20:.0f} MiB, PyTorch's op {peak / 2**20:.0f} MiB")
    assert ours <= 1.1 * peak


# --- transforms and devices ---------------------------------------------------------------------------------------


@each
@everywhere
def test_vmap_is_a_loop(device: str, op: str) -> None:
    loss, inputs = call(op, device)
    batches = [jnp.stack([x, x[::-1], 2 * x]) for x in inputs]
    value = jax.value_and_grad(loss, tuple(range(len(inputs))))
    for function in (jax.vmap(value), jax.jit(jax.vmap(value))):
        losses, grads = function(*batches)
        for i in range(3):
            one, one_grads = value(*(b[i] for b in batches))
            np.testing.assert_allclose(losses[i], one, rtol=1e-5)
            for many, single in zip(grads, one_grads, strict=True):
                np.testing.assert_allclose(many[i], single, rtol=1e-4, atol=1e-6)


@each
def test_checkpoint_and_scan(op: str) -> None:
    loss, inputs = call(op)
    plain = jax.grad(lambda *a: 3 * loss(*a))(*inputs)
    checkpointed = jax.checkpoint(loss)
    accumulated = jax.grad(lambda *a: jax.lax.scan(lambda c, _: (c + checkpointed(*a), None), 0.0, length=3)[0])
    np.testing.assert_allclose(accumulated(*inputs), plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy", "jsd"])
@rows_of("devices", [2, 4])
def test_shard_map(op: str, devices: int) -> None:
    """Rows over devices, the weight on each of them: the loss and the gradients of one device."""
    inputs = [np.asarray(x) for x in call(op, rows=16)[1]]
    target = np.where(np.arange(16) < 3, -100, np.arange(16))  # unequal numbers of kept rows
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    over_rows = {"cross_entropy": (True,), "linear_cross_entropy": (True, False), "jsd": (True, True)}[op]
    function = getattr(fj, op)
    arguments = (
        (lambda a, t, **o: function(*a, labels=t, **o)) if op == "jsd" else lambda a, t, **o: function(*a, t, **o)
    )

    def sharded(target: Any, *inputs: Any) -> Any:
        kept = jax.lax.psum((target != -100).sum(), "data")
        return jax.lax.psum(arguments(inputs, target, normalizer=kept.astype(jnp.float32)), "data")

    specs = (rows, *(rows if over else whole for over in over_rows))
    places = tuple(range(1, len(inputs) + 1))
    outside = jax.value_and_grad(jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=whole), places)
    expected = jax.value_and_grad(lambda t, *a: arguments(a, t), places)(target, *inputs)
    inside = jax.shard_map(jax.value_and_grad(sharded, places), mesh=mesh, in_specs=specs, out_specs=(whole, specs[1:]))
    for program in (jax.jit(outside), jax.jit(inside)):
        for found, right in zip(jax.tree.leaves(program(target, *inputs)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-7)


@each
@pytest.mark.parametrize("compiled", [False, True], ids=["", "jit"])
@rows_of("reduction", ["mean", "none"])
def test_explicit_meshes(op: str, reduction: str, compiled: bool) -> None:
    """Arrays whose types say how they are split, over one or two axes of the mesh: values and gradients are those of
    whole arrays, split as the arguments are."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu")[:4])
    given = [np.arange(8, dtype=np.int32), *(np.asarray(x) for x in call(op)[1])]
    factors = np.arange(8, dtype=np.float32) if reduction == "none" else 1.0

    def losses(target: Any, *inputs: Any) -> jax.Array:
        labels = {"labels": target} if op == "jsd" else {"target": target}
        return getattr(fj, op)(*inputs, **labels, reduction=reduction)

    places = tuple(range(1, len(given)))
    derivatives = jax.value_and_grad(lambda *args: (losses(*args) * factors).sum(), places)
    expected = derivatives(*given)
    for split in [("data",), ("data", "model"), (None, "model"), (("data", "model"),), ()]:
        specs = [PartitionSpec(*split[: x.ndim]) for x in given]
        with jax.set_mesh(mesh):
            args = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(given, specs, strict=True)]
            found = (jax.jit(derivatives) if compiled else derivatives)(*args)
            rows = losses(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, expected)
        for gradient, i in zip(found[1], places, strict=True):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(args[i]).sharding.spec
        if reduction == "none":
            assert jax.typeof(rows).sharding.spec[0] == jax.typeof(args[1]).sharding.spec[0]


@each
def test_a_vjp_takes_a_number(op: str) -> None:
    function, args = call(op)
    _, pull = jax.vjp(lambda x: function(x, *args[1:]), args[0])
    np.testing.assert_array_equal(pull(0.37)[0], pull(jnp.float32(0.37))[0])


@each
def test_export(op: str) -> None:
    """With the names of the custom calls; shapes are numbers."""
    loss, (x, *others) = call(op)
    function, args = jax.value_and_grad(lambda x: loss(x, *others)), [x]
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        export.export(jax.jit(function))(*args)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in fj.TARGETS]
    exported = export.export(jax.jit(function), disabled_checks=checks)(*args)
    jax.tree.map(np.testing.assert_array_equal, exported.call(*args), function(*args))
    shape = export.symbolic_shape(f"n, {args[0].shape[1]}")
    symbolic = jax.ShapeDtypeStruct(shape, args[0].dtype)
    with pytest.raises(NotImplementedError, match=rf"^{op}: .* must have a shape of numbers, but got \[n, "):
        export.export(jax.jit(function), disabled_checks=checks)(symbolic)


@each
def test_a_second_derivative_is_refused(op: str) -> None:
    loss, inputs = call(op)
    with pytest.raises(NotImplementedError, match=f"^{op}: the gradient must not be differentiated a second time"):
        jax.grad(lambda x: jax.grad(loss)(x, *inputs[1:]).sum())(inputs[0])


def test_a_gradient_by_a_constant_is_refused() -> None:
    x, target = jnp.ones((3, 5)), jnp.zeros(3, jnp.int32)
    calls: list[tuple[str, Callable[..., Any], Any]] = [
        ("cross_entropy: weight", lambda v: fj.cross_entropy(x, target, v), jnp.ones(5)),
        ("cross_entropy: token_weight", lambda v: fj.cross_entropy(x, target, token_weight=v), jnp.ones(3)),
        ("cross_entropy: normalizer", lambda v: fj.cross_entropy(x, target, normalizer=v), jnp.ones(())),
        ("cross_entropy: target", lambda v: fj.cross_entropy(x, v), jnp.ones((3, 5))),
        ("linear_cross_entropy: target", lambda v: fj.linear_cross_entropy(x, x, v), jnp.ones((3, 3))),
        ("jsd: token_weight", lambda v: fj.jsd(x, x, token_weight=v), jnp.ones(3)),
    ]
    for what, function, value in calls:
        with pytest.raises(TypeError, match=f"^{what}.* must be a constant, but a gradient by it is wanted"):
            jax.grad(function)(value)
        assert jnp.isfinite(jax.grad(lambda v, f=function: f(jax.lax.stop_gradient(v)))(value)).all()


# --- bad input ----------------------------------------------------------------------------------------------------

X, W, T = jnp.ones((3, 5)), jnp.ones((7, 5)), jnp.zeros(3, jnp.int32)
GOOD = {
    "cross_entropy": {"input": X, "target": T},
    "linear_cross_entropy": {"input": X, "linear_weight": W, "target": T},
    "jsd": {"student": X, "teacher": X},
}
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("cross_entropy", {"input": T}, TypeError, "input must be float32.* but got int32"),
    ("cross_entropy", {"input": "x"}, TypeError, "input must be an array, but got str"),
    ("cross_entropy", {"input": jnp.ones(())}, ValueError, r"input must have shape \[\.\.\., V\], but got \[\]"),
    ("cross_entropy", {"input": X[:, :0]}, ValueError, r"at least one class, but got \[3, 0\]"),
    ("cross_entropy", {"target": T[:2]}, ValueError, r"target must have shape \[3\], but got \[2\]"),
    ("cross_entropy", {"target": T.astype(jnp.int8)}, TypeError, "target must be int32 or int64, but got int8"),
    ("cross_entropy", {"target": X[:, :4]}, ValueError, r"target must have shape \[3, 5\], but got \[3, 4\]"),
    ("cross_entropy", {"weight": jnp.ones(4)}, ValueError, r"weight must have shape \[5\], but got \[4\]"),
    ("cross_entropy", {"weight": T}, TypeError, "weight must be float32.* but got int32"),
    ("cross_entropy", {"token_weight": jnp.ones(5)}, ValueError, r"token_weight must have shape \[3\], but got \[5\]"),
    ("cross_entropy", {"reduction": "avg"}, ValueError, "reduction must be one of none, mean, sum, but got 'avg'"),
    ("cross_entropy", {"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], but got 1.5"),
    ("cross_entropy", {"label_smoothing": jnp.ones(())}, TypeError, "label_smoothing must be a Python number"),
    ("cross_entropy", {"softcap": 0.0}, ValueError, "softcap must be positive and finite, but got 0.0"),
    ("cross_entropy", {"z_loss": -1.0}, ValueError, "z_loss must be at least 0 and finite, but got -1.0"),
    ("cross_entropy", {"ignore_index": None}, TypeError, "ignore_index must be an int, but got NoneType"),
    (
        "cross_entropy",
        {"target": X, "ignore_index": 3},
        ValueError,
        "an ignore_index >= 0 must come with class indices",
    ),
    ("cross_entropy", {"normalizer": 2.0, "reduction": "sum"}, ValueError, "normalizer must come with"),
    ("cross_entropy", {"normalizer": T}, ValueError, r"normalizer must have shape \[\], but got \[3\]"),
    ("linear_cross_entropy", {"linear_weight": W[:, :4]}, ValueError, r"shape \[V, 5\], but got \[7, 4\]"),
    ("linear_cross_entropy", {"linear_weight": W[:0]}, ValueError, r"no empty dimension, but got \[0, 5\]"),
    ("linear_cross_entropy", {"linear_bias": T}, TypeError, "linear_bias must be float32"),
    ("linear_cross_entropy", {"linear_bias": jnp.ones(3)}, ValueError, r"shape \[7\], but got \[3\]"),
    ("linear_cross_entropy", {"workspace_mib": -1}, ValueError, "must be an int of at least 0, but got -1"),
    ("linear_cross_entropy", {"accumulate_dtype": jnp.bfloat16}, ValueError, "float32.* but got bfloat16"),
    ("linear_cross_entropy", {"logit_scale": float("inf")}, ValueError, "logit_scale must be finite, but got inf"),
    ("jsd", {"teacher": X[:2]}, ValueError, r"teacher must have shape \[3, 5\], but got \[2, 5\]"),
    ("jsd", {"teacher": X.astype(jnp.bfloat16)}, TypeError, "the student's dtype, float32, but got bfloat16"),
    ("jsd", {"beta": 1.5}, ValueError, r"beta must be in \[0, 1\], but got 1.5"),
    ("jsd", {"temperature": 0.0}, ValueError, "temperature must be positive and finite, but got 0.0"),
    ("jsd", {"hard_weight": 1.0}, ValueError, "labels must be given with a hard_weight, but got None"),
    ("jsd", {"ignore_index": 3}, ValueError, "an ignore_index must come with labels, but got 3"),
    ("jsd", {"log_probs": True, "temperature": 2.0}, ValueError, "temperature must be 1 with log_probs, but got 2.0"),
    ("jsd", {"labels": T, "log_probs": True, "hard_weight": 1.0}, ValueError, "hard_weight must be 0 .* but got 1.0"),
    ("jsd", {"reduction": "avg"}, ValueError, "reduction must be one of none, sum, mean, batchmean, but got 'avg'"),
]


@rows_of("op, change, error, message", [*BAD])
def test_bad_input(op: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    getattr(fj, op)(**GOOD[op])
    with pytest.raises(error, match=rf"^{op}: .*{message}"):
        getattr(fj, op)(**GOOD[op] | change)


@each
@everywhere
def test_an_index_out_of_range(device: str, op: str) -> None:
    """On the CPU an error when the program runs; on the GPU NaN in its row alone."""
    x = jax.device_put(jnp.ones((3, 6)), on(device))
    bad = jax.device_put(jnp.array([1, 6, -100]), on(device))
    if op == "cross_entropy":
        function = lambda x: fj.cross_entropy(x, bad, reduction="none")  # noqa: E731
    elif op == "jsd":
        function = lambda x: fj.jsd(x, 2 * x, labels=bad, hard_weight=1.0, reduction="none")  # noqa: E731
    else:
        function = lambda x: fj.linear_cross_entropy(x, jnp.ones((6, 6)), bad, reduction="none")  # noqa: E731
    if device == "cpu":
        name = "labels" if op == "jsd" else "target"
        with pytest.raises(Exception, match=rf"{op}: {name} must be in \[0, 6\) or ignore_index \(-100\), but got 6"):
            jax.block_until_ready(jax.jit(function)(x))
    else:
        np.testing.assert_array_equal(np.isnan(function(x)), [False, True, False])
        grad = jax.grad(lambda x: function(x).sum())(x)
        np.testing.assert_array_equal(np.isnan(grad).all(1), [False, True, False])


# --- without torch ------------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("environment", [{"FUSEGRAD_TORCH": "0"}, {}], ids=["not wanted", "not installed"])
def test_a_process_without_torch(environment: dict[str, str]) -> None:
    out = run_python(
        """
        import os, sys
        if "FUSEGRAD_TORCH" not in os.environ:
            sys.modules["torch"] = None  # as if it were not installed
        import fusegrad.jax, jax, jax.numpy as jnp
        print(jax.grad(lambda x: fusegrad.jax.cross_entropy(x, jnp.array([1])))(jnp.zeros((1, 2))))
        assert sys.modules.get("torch") is None
        with open("/proc/self/maps") as maps:
            assert not any("libtorch" in line or "libc10" in line for line in maps)
        try:
            fusegrad.cross_entropy
        except AttributeError as error:
            print(error)
        """,
        JAX_PLATFORMS="cpu",
        **environment,
    )
    assert "[[ 0.5 -0.5]]" in out and "fusegrad.cross_entropy needs torch" in out


def test_a_build_without_jax_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import pathlib

    monkeypatch.setattr(pathlib.Path, "exists", lambda self: False)
    with pytest.raises(ImportError, match=r"fusegrad.jax: libfusegrad_jax.so must be in .*, but is not: .*without JAX"):
        importlib.reload(sys.modules["fusegrad.jax._library"])


# --- the example --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEGRAD_TORCH", "1")  # the program sets it where it is not: not for the tests after this one
    import jax_train

    losses = jax_train.train(6, devices=2)
    assert losses[-1] < losses[0] - 0.5
    assert "The last gradients are plain JAX's." in capsys.readouterr().out
