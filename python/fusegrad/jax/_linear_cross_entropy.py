"""Cross entropy of a linear head, in chunks of rows: matrix products by XLA around the row kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _check, _rows
from ._cross_entropy import loss_and_rows, scales_of
from ._derivative import as_array, constants, once
from ._library import rows_at_a_time
from ._manual import alike, split_as, zeros


@dataclass(frozen=True)
class Options:
    loss: _rows.Loss
    accumulate_dtype: Any  # of the weight's gradient over chunks; None: acc
    workspace_mib: int | None

    @property
    def op(self) -> str:
        return self.loss.op


def linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Any = None,
    normalizer: Any = None,
    accumulate_dtype: Any = None,
    workspace_mib: int | None = None,
) -> jax.Array:
    r"""Cross entropy of ``input @ linear_weight.T + linear_bias`` without keeping its logits,
    :func:`fusegrad.linear_cross_entropy` for JAX.

    z = softcap(logit_scale * (input @ linear_weight.T + linear_bias)). Under differentiation the gradients are computed
    in the forward, chunk by chunk, and scaled in the backward; with reduction 'none' the backward computes the logits
    again instead. Any number of calls of a vjp gives bitwise the same gradients. A frozen input, weight or bias costs
    nothing.

    The products run in the input's dtype, to which ``linear_weight`` and ``linear_bias`` are rounded (on the CPU those
    of bfloat16 and float16 in float32), under ``jax.default_matmul_precision``. Each gradient has its own array's
    dtype; those of weight and bias add up in float32.

    Args:
        input: hidden states ``[..., H]``; float32, bfloat16, float16 (float64 on the CPU, where x64 is enabled).
        linear_weight: ``[V, H]``, the same dtypes.
        target: class indices ``[...]`` (int32, int64), or class probabilities ``[..., V]``.
        linear_bias: ``[V]``.
        weight, ignore_index, reduction, label_smoothing, z_loss, softcap, token_weight, normalizer: as in
            :func:`cross_entropy`.
        logit_scale: a factor of the logits, before the softcap.
        accumulate_dtype: dtype in which the weight's gradient adds up over chunks: float32 (the default), or the
            weight's own, which saves 4 * V * H bytes and is less accurate.
        workspace_mib: budget for temporaries in MiB, above the gradients. The smallest chunks may exceed it.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or ``[...]`` for 'none'.

    Raises:
        ValueError, TypeError, jax.errors.JaxRuntimeError: as :func:`cross_entropy`, under this op's name.
    """
    op = "linear_cross_entropy"
    x, w = _check.floating(op, "input", input), _check.floating(op, "linear_weight", linear_weight)
    _check.value(op, x.ndim >= 1, "input must have shape [..., H]", list(x.shape))
    hidden = x.shape[-1]
    _check.value(
        op, w.ndim == 2 and w.shape[1] == hidden, f"linear_weight must have shape [V, {hidden}]", list(w.shape)
    )
    vocab = w.shape[0]
    _check.value(op, vocab > 0 and hidden > 0, "linear_weight must have no empty dimension", list(w.shape))
    b = None if linear_bias is None else _check.floating(op, "linear_bias", linear_bias)
    if b is not None:
        _check.shape(op, "linear_bias", b, (vocab,))
    if workspace_mib is not None:
        budget = isinstance(workspace_mib, int) and not isinstance(workspace_mib, bool) and workspace_mib >= 0
        _check.value(op, budget, "workspace_mib must be an int of at least 0", repr(workspace_mib))
    acc = _check.acc_type(x.dtype)
    if accumulate_dtype is not None:
        accumulate_dtype = jnp.dtype(accumulate_dtype)
        _check.value(
            op,
            accumulate_dtype in (jnp.dtype(acc), w.dtype),
            f"accumulate_dtype must be {jnp.dtype(acc).name} or that of linear_weight, {w.dtype.name}",
            accumulate_dtype.name,
        )
    loss, rows = loss_and_rows(
        op,
        x.shape[:-1],
        vocab,
        x.dtype,
        target,
        weight,
        token_weight,
        normalizer,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
    )
    options = Options(loss, accumulate_dtype, workspace_mib)
    out = _linear_cross_entropy(options, *alike((x.reshape(-1, hidden), w, b, rows)))
    return split_as(out.reshape(x.shape[:-1]), input) if reduction == "none" else out


Gradients = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
# A kernel takes a chunk's logits and the arrays of its rows, and returns values of its rows and the logits' gradient.
RowKernel = Callable[[jax.Array, Any], tuple[Any, jax.Array | None]]


def _product_type(dtype: Any, cpu: bool) -> Any:
    """The dtype of the products. On the CPU low precision has no speed and would cost accuracy."""
    return jnp.float32 if cpu and jnp.dtype(dtype).itemsize < 4 else dtype


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: Any) -> jax.Array:
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=dtype)


def _plus_product(total: jax.Array | None, dz: jax.Array, x: jax.Array, dtype: Any, in_blocks: bool) -> jax.Array:
    """total + dz.T @ x, [V, H]. XLA's CPU products do not add to what is there, as those of cuBLAS do: in blocks of the
    vocabulary a product beside the total takes little memory."""
    if total is None or not in_blocks:
        product = _dot(dz, x, (0, 0), dtype)
        return product if total is None else total + product
    blocks = 16
    size, rest = divmod(dz.shape[1], blocks)

    def add_block(total: jax.Array, begin: Any, count: int) -> jax.Array:
        part = _dot(lax.dynamic_slice_in_dim(dz, begin, count, 1), x, (0, 0), dtype)
        block = lax.dynamic_slice_in_dim(total, begin, count) + part
        return lax.dynamic_update_slice_in_dim(total, block, begin, 0)

    if size:
        total = lax.fori_loop(0, blocks, lambda i, t: add_block(t, i * size, size), total)
    return add_block(total, blocks * size, rest) if rest else total


def _over_chunks(
    options: Options,
    cpu: bool,
    wanted: tuple[bool, bool, bool],
    head: tuple[jax.Array, jax.Array, jax.Array | None],
    per_row: Any,
    kernel: RowKernel,
) -> tuple[Any, Gradients]:
    """Runs `kernel` on the logits of one chunk of rows after the other. `per_row`: arrays of N rows that it reads.

    The first chunk, which may be shorter, comes before the loop: its weight gradient is the accumulator that the others
    add to. The input's gradient is written over the input, chunk by chunk: XLA copies the input first where it is
    needed again.
    """
    x, w, b = head
    n, hidden = x.shape
    vocab = w.shape[0]
    product, acc = _product_type(x.dtype, cpu), _check.acc_type(x.dtype)
    accumulate = options.accumulate_dtype or acc
    w_product = w.astype(product)
    size = rows_at_a_time(
        n,
        hidden,
        vocab,
        jnp.dtype(product).itemsize,
        cpu=cpu,
        weight_grad=wanted[1],
        low_precision_result=w.dtype != accumulate,
        workspace_mib=options.workspace_mib,
    )
    if size < n <= 2 * size:
        # XLA unrolls a loop of one turn and then begins its chunk before the first one's logits are done with.
        unit = 128 if n >= 1024 else 1
        size = -(-n // (3 * unit)) * unit
    # The bias is added before the logits are rounded. XLA fuses it into a GPU's product where that is large and its
    # rows are aligned; elsewhere float32 logits hold the sum.
    fused = b is None or (vocab % 8 == 0 and size * vocab > 2**24)
    summed = product if fused else acc
    loops = max(0, n - 1) // size
    first = n - loops * size
    if loops == 0:
        accumulate = w.dtype if w.dtype == product else acc

    def chunk(x_rows: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array, Any]:
        x_rows = x_rows.astype(product)
        z = _dot(x_rows, w_product, (1, 1), summed)
        if b is not None:
            z = (z + b.astype(product).astype(summed)).astype(product)
        values, dz = kernel(z, rows)
        return x_rows, dz, values

    def input_gradient(dz: jax.Array) -> jax.Array:
        return _dot(dz, w_product, (1, 0), product).astype(x.dtype)

    def add_to(totals: Any, dz: jax.Array, x_rows: jax.Array) -> Any:
        dw, db = totals
        if wanted[1]:
            dw = _plus_product(dw, dz, x_rows, accumulate, in_blocks=cpu)
        if wanted[2]:
            part = dz.sum(0, dtype=acc)
            db = part if db is None else db + part
        return dw, db

    def slice_of(tree: Any, start: Any, count: int) -> Any:
        return jax.tree.map(lambda v: lax.dynamic_slice_in_dim(v, start, count), tree)

    def put(tree: Any, start: Any, part: Any) -> Any:
        return jax.tree.map(lambda v, p: lax.dynamic_update_slice_in_dim(v, p, start, 0), tree, part)

    def body(carry: Any, i: jax.Array) -> tuple[Any, None]:
        xs, totals, values = carry
        start = first + i * size
        x_rows, dz, new = chunk(lax.dynamic_slice_in_dim(xs, start, size), slice_of(per_row, start, size))
        totals = add_to(totals, dz, x_rows)
        if wanted[0]:
            xs = put(xs, start, input_gradient(dz))
        return (xs, totals, put(values, start, new)), None

    x_rows, dz, values = chunk(x[:first], slice_of(per_row, 0, first))
    totals = add_to((None, None), dz, x_rows)
    xs = put(x, 0, input_gradient(dz)) if wanted[0] else x
    if loops:
        whole = jax.tree.map(lambda v: zeros(v, (n, *v.shape[1:]), v.dtype), values)
        carry = (xs, totals, put(whole, 0, values))
        (xs, totals, values), _ = lax.scan(body, carry, jnp.arange(loops, dtype=jnp.int32))
    dw, db = totals
    return values, (
        xs if wanted[0] else None,
        dw.astype(w.dtype) if wanted[1] else None,
        db.astype(b.dtype) if wanted[2] and b is not None else None,
    )


def _on_platform(function: Callable[..., Any], *args: Any) -> Any:
    """function(cpu, *args) for the platform that the program is compiled for."""
    return lax.platform_dependent(*args, cpu=partial(function, True), cuda=partial(function, False))


@once
def _forward_of(
    options: Options, wanted: tuple[bool, bool, bool], x: Any, w: Any, b: Any, rows: _rows.Rows
) -> tuple[jax.Array, Any, Gradients, Any]:
    """The loss, statistics of the rows where a backward recomputes, the gradients for an upstream gradient of 1 where
    it does not, and scales."""
    loss = options.loss
    late = loss.reduction == "none" and any(wanted)

    def run(cpu: bool, x: Any, w: Any, b: Any, rows: _rows.Rows) -> Any:
        scales = scales_of(loss, x, rows, w.shape[0])
        product = _product_type(x.dtype, cpu)
        now = any(wanted) and not late

        def kernel(z: jax.Array, part: Any) -> tuple[Any, jax.Array | None]:
            chunk_rows = _rows.Rows(_readable(part[0], product), rows.weight, part[1])
            row_loss, statistics, dz = _rows.forward(loss, z, chunk_rows, scales, gradient=now)
            kept = statistics if rows.dense(loss) else statistics[:2]
            return (row_loss, kept if late else ()), dz

        now_wanted = wanted if now else (False, False, False)
        (row_loss, statistics), gradients = _over_chunks(
            options, cpu, now_wanted, (x, w, b), (rows.target, rows.token_weight), kernel
        )
        out = row_loss if loss.reduction == "none" else _rows.reduce(row_loss, scales, nan_if_none=True)
        return out, statistics, gradients, scales

    return _on_platform(run, x, w, b, rows)


@once
def _backward_of(
    options: Options, wanted: tuple[bool, bool, bool], x: Any, w: Any, b: Any, rows: Any, statistics: Any, upstream: Any
) -> Gradients:
    """The gradients from statistics, for an upstream gradient of each row."""
    loss = options.loss

    def run(cpu: bool, x: Any, w: Any, b: Any, rows: _rows.Rows, statistics: Any, upstream: jax.Array) -> Gradients:
        product = _product_type(x.dtype, cpu)

        def kernel(z: jax.Array, part: Any) -> tuple[Any, jax.Array]:
            target, token_weight, chunk_statistics, chunk_upstream = part
            chunk_rows = _rows.Rows(_readable(target, product), rows.weight, token_weight)
            if not rows.dense(loss):
                chunk_statistics = (*chunk_statistics, chunk_upstream[:0])
            return (), _rows.gradient(loss, z, chunk_rows, None, chunk_statistics, chunk_upstream)

        per_row = (rows.target, rows.token_weight, statistics, upstream)
        return _over_chunks(options, cpu, wanted, (x, w, b), per_row, kernel)[1]

    return _on_platform(run, x, w, b, rows, statistics, upstream)


def _readable(target: jax.Array, product: Any) -> jax.Array:
    """The kernels read probabilities in the logits' dtype or in acc."""
    if target.ndim == 1 or target.dtype == product:
        return target
    return target.astype(_check.acc_type(product))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_cross_entropy(options: Options, x: jax.Array, w: jax.Array, b: Any, rows: _rows.Rows) -> jax.Array:
    return _forward_of(options, (False, False, False), x, w, b, rows)[0]


def _forward(options: Options, x: Any, w: Any, b: Any, rows: Any) -> tuple[jax.Array, Any]:
    wanted = (x.perturbed, w.perturbed, b is not None and b.perturbed)
    head = (x.value, w.value, None if b is None else b.value)
    rows = constants(options.op, rows)
    out, statistics, gradients, scales = _forward_of(options, wanted, *head, rows)
    if options.loss.reduction != "none":
        return out, (gradients, scales)
    # None among the gradients says which of them were not wanted.
    places = tuple(h[:0] if h is not None and want else None for h, want in zip(head, wanted, strict=True))
    return out, (places, head, rows, statistics)


def _backward(options: Options, residual: Any, upstream: Any) -> tuple[Any, Any, Any, None]:
    upstream = as_array(upstream)
    if options.loss.reduction != "none":
        gradients, scales = residual
        dx, dw, db = (None if g is None else _rows.scaled(g, upstream, scales) for g in gradients)
        return dx, dw, db, None
    places, head, rows, statistics = residual
    wanted = tuple(p is not None for p in places)
    if not any(wanted):
        return None, None, None, None
    dx, dw, db = _backward_of(options, wanted, *head, rows, statistics, upstream)
    return dx, dw, db, None


_linear_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
