"""Cross entropy of logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import _check, _rows
from ._derivative import as_array, constants, once
from ._manual import alike, split_as

REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    *,
    token_weight: Any = None,
    normalizer: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> jax.Array:
    r"""Cross entropy between logits and targets, :func:`fusegrad.cross_entropy` for JAX.

    With logits z (after ``softcap``) and lse = log(sum(exp(z))), a row of target y costs ``lse - z[y]`` plus
    ``z_loss * lse**2``. Under differentiation the gradient is written over the logits in the same pass: where nothing
    else needs them, XLA copies nothing. Any number of calls of a vjp gives bitwise the same gradients.

    Args:
        input: logits ``[..., V]``: the classes are the last dimension, whatever the number of dimensions. float32,
            bfloat16, float16 (float64 on the CPU, where x64 is enabled).
        target: class indices ``[...]``, int32 or int64; or class probabilities ``[..., V]``.
        weight: class weights ``[V]``.
        token_weight: ``[...]``, scales each row's loss before the reduction.
        normalizer: replaces the divisor of reduction 'mean': a number or a 0-d array, as ``lax.psum`` of the number of
            kept rows over devices.
        ignore_index: rows with this class index count for nothing.
        reduction: 'none', 'sum' or 'mean': the sum over kept rows / the sum of their class weights. The z-loss part is
            divided by the number of kept rows. No row kept: NaN, with gradients of zero.
        label_smoothing: in [0, 1].
        z_loss: coefficient of lse**2 (PaLM, arXiv:2204.02311, section 5).
        softcap: z = softcap * tanh(input / softcap) (Gemma 2, arXiv:2408.00118, section 2).

    Returns:
        The loss, float32 (float64 for float64): 0-d, or ``[...]`` for 'none'. Only ``input`` has a gradient:
        differentiating by another argument raises.

    Raises:
        ValueError, TypeError: ``cross_entropy: what must hold, but got <value>``.
        jax.errors.JaxRuntimeError: a class index outside [0, V) on the CPU, when the program runs. On the GPU that
            row's loss and gradient are NaN.
    """
    op = "cross_entropy"
    x = _check.floating(op, "input", input)
    _check.value(op, x.ndim >= 1, "input must have shape [..., V]", list(x.shape))
    _check.value(op, x.shape[-1] > 0, "input must have at least one class", list(x.shape))
    loss, rows = loss_and_rows(
        op,
        x.shape[:-1],
        x.shape[-1],
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
    )
    out = _cross_entropy(loss, *alike((x.reshape(-1, x.shape[-1]), rows)))
    return split_as(out.reshape(x.shape[:-1]), input) if reduction == "none" else out


def loss_and_rows(
    op: str,
    row_shape: tuple[int, ...],
    vocab: int,
    dtype: Any,
    target: Any,
    weight: Any,
    token_weight: Any,
    normalizer: Any,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float = 1.0,
) -> tuple[_rows.Loss, _rows.Rows]:
    """The checked arguments of a cross entropy of logits of `dtype`, over N rows."""
    _check.value(op, reduction in REDUCTIONS, f"reduction must be one of {', '.join(REDUCTIONS)}", repr(reduction))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index must be an int, but got {type(ignore_index).__name__}")
    smoothing = _check.number(op, "label_smoothing", label_smoothing)
    _check.value(op, 0 <= smoothing <= 1, "label_smoothing must be in [0, 1]", smoothing)
    cap = _check.number(op, "softcap", 0.0 if softcap is None else softcap)
    _check.value(op, softcap is None or 0 < cap < float("inf"), "softcap must be positive and finite", softcap)
    z = _check.number(op, "z_loss", z_loss)
    _check.value(op, 0 <= z < float("inf"), "z_loss must be at least 0 and finite", z)
    scale = _check.number(op, "logit_scale", logit_scale)
    _check.value(op, abs(scale) < float("inf"), "logit_scale must be finite", scale)
    acc = _check.acc_type(dtype)
    kind = _check.array(op, "target", target)
    if jnp.issubdtype(kind.dtype, jnp.floating):
        probabilities = _check.floating(op, "target", target)
        _check.value(op, ignore_index < 0, "an ignore_index >= 0 must come with class indices", ignore_index)
        _check.shape(op, "target", probabilities, (*row_shape, vocab))
        # The kernels read them in the logits' dtype or in acc.
        rows_target = probabilities.reshape(-1, vocab).astype(dtype if kind.dtype == dtype else acc)
    else:
        rows_target = _check.class_indices(op, "target", kind, row_shape)
    rows = _rows.Rows(
        rows_target,
        _check.option(op, "weight", weight, (vocab,), acc),
        _check.option(op, "token_weight", token_weight, row_shape, acc),
        _check.normalizer(op, normalizer, reduction == "mean", acc),
    )
    return _rows.Loss(op, reduction, ignore_index, smoothing, z, cap, scale), rows


def scales_of(loss: _rows.Loss, like: jax.Array, rows: _rows.Rows, vocab: int) -> jax.Array | None:
    if loss.reduction != "mean":
        return None
    return _rows.mean_scales(
        loss.op,
        like,
        None if rows.probabilities else rows.target,
        rows.weight,
        rows.normalizer,
        rows=rows.target.shape[0],
        vocab=vocab,
        ignore_index=loss.ignore_index,
    )


@once
def _run(
    loss: _rows.Loss, gradient: bool, logits: jax.Array, rows: _rows.Rows
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    scales = scales_of(loss, logits, rows, logits.shape[1])
    row_loss, _, grad = _rows.forward(loss, logits, rows, scales, gradient=gradient)
    if loss.reduction != "none":
        row_loss = _rows.reduce(row_loss, scales, nan_if_none=True)
    return row_loss, grad, scales


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(loss: _rows.Loss, logits: jax.Array, rows: _rows.Rows) -> jax.Array:
    return _run(loss, False, logits, rows)[0]


def _forward(loss: _rows.Loss, logits: Any, rows: Any) -> tuple[jax.Array, Any]:
    out, grad, scales = _run(loss, logits.perturbed, logits.value, constants(loss.op, rows))
    return out, (grad, scales)


def _backward(loss: _rows.Loss, residual: Any, upstream: Any) -> tuple[Any, None]:
    grad, scales = residual
    if grad is None:
        return None, None
    return _rows.scaled(grad, as_array(upstream), scales), None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
