"""The generalised Jensen-Shannon divergence of logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _check, _rows
from ._derivative import as_array, constants, once
from ._manual import alike, result, split_as

REDUCTIONS = ("none", "sum", "mean", "batchmean")


@dataclass(frozen=True)
class Divergence:
    """The options of a divergence, hashable."""

    reduction: str
    ignore_index: int
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    log_probs: bool
    op: str = "jsd"


def jsd(
    student: Any,
    teacher: Any,
    *,
    labels: Any = None,
    token_weight: Any = None,
    normalizer: Any = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    log_probs: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
) -> jax.Array:
    r"""Generalised Jensen-Shannon divergence between rows of logits, :func:`fusegrad.jsd` for JAX.

    With q = softmax(student / temperature), p = softmax(teacher / temperature) and M = (1 - beta) q + beta p, a row
    costs ``(1 - beta) KL(q | M) + beta KL(p | M)``; at the ends KL(p | q) for beta 0 and KL(q | p) for beta 1. The
    formulas stand in docs/design/divergences.md. Under differentiation the gradients are written over the logits in the
    same pass; any number of calls of a vjp gives bitwise the same.

    Args:
        student: logits ``[..., V]``; float32, bfloat16, float16 (float64 on the CPU, where x64 is enabled).
        teacher: logits of the student's shape and dtype.
        labels: ``[...]``, int32 or int64: which rows count (those that are not ``ignore_index``), and the classes of
            the hard loss.
        token_weight: ``[...]``, scales each row's loss before the reduction.
        normalizer: replaces the number of kept rows in the divisor of 'mean' and 'batchmean': a number or a 0-d array.
        beta: in [0, 1].
        temperature: divides the logits of both.
        ignore_index: rows with this label count for nothing.
        reduction: 'none', 'sum', 'batchmean': the sum / the number of kept rows, or 'mean': that / V. No row kept: 0.
        log_probs: student and teacher are log-probabilities, taken as they are, and so are the gradients. Unlike
            :func:`fusegrad.jsd`, which refuses logits there, this does not look at their values.
        soft_weight, hard_weight: a row's loss is ``soft_weight * divergence + hard_weight * hard``, where hard is the
            cross entropy of the student's logits (without temperature) at the row's label.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or ``[...]`` for 'none'. ``student`` and ``teacher`` have
        gradients: differentiating by another argument raises.

    Raises:
        ValueError, TypeError: ``jsd: what must hold, but got <value>``.
        jax.errors.JaxRuntimeError: a label outside [0, V) on the CPU, when the program runs.
    """
    op = "jsd"
    q, p = _check.floating(op, "student", student), _check.floating(op, "teacher", teacher)
    _check.value(op, q.ndim >= 1 and q.shape[-1] > 0, "student must have shape [..., V], V > 0", list(q.shape))
    _check.shape(op, "teacher", p, q.shape)
    if p.dtype != q.dtype:
        raise TypeError(f"{op}: teacher must have the student's dtype, {q.dtype.name}, but got {p.dtype.name}")
    _check.value(op, reduction in REDUCTIONS, f"reduction must be one of {', '.join(REDUCTIONS)}", repr(reduction))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index must be an int, but got {type(ignore_index).__name__}")
    beta = _check.number(op, "beta", beta)
    _check.value(op, 0 <= beta <= 1, "beta must be in [0, 1]", beta)
    temperature = _check.number(op, "temperature", temperature)
    _check.value(op, 0 < temperature < float("inf"), "temperature must be positive and finite", temperature)
    soft, hard = _check.number(op, "soft_weight", soft_weight), _check.number(op, "hard_weight", hard_weight)
    finite = abs(soft) < float("inf") and abs(hard) < float("inf")
    _check.value(op, finite, "soft_weight and hard_weight must be finite", (soft, hard))
    _check.value(op, hard == 0 or labels is not None, "labels must be given with a hard_weight", "None")
    _check.value(op, ignore_index == -100 or labels is not None, "an ignore_index must come with labels", ignore_index)
    _check.value(op, not log_probs or temperature == 1, "temperature must be 1 with log_probs", temperature)
    _check.value(op, not log_probs or hard == 0, "hard_weight must be 0 with log_probs", hard)
    acc, vocab, row_shape = _check.acc_type(q.dtype), q.shape[-1], q.shape[:-1]
    rows = {
        "labels": None if labels is None else _check.class_indices(op, "labels", labels, row_shape),
        "token_weight": _check.option(op, "token_weight", token_weight, row_shape, acc),
        "normalizer": _check.normalizer(op, normalizer, reduction in ("mean", "batchmean"), acc),
    }
    options = Divergence(reduction, ignore_index, beta, temperature, soft, hard, bool(log_probs))
    out = _jsd(options, *alike((q.reshape(-1, vocab), p.reshape(-1, vocab), rows)))
    return split_as(out.reshape(row_shape), student) if reduction == "none" else out


@once
def _run(
    o: Divergence, wanted: tuple[bool, bool], student: jax.Array, teacher: jax.Array, rows: dict[str, Any]
) -> tuple[jax.Array, list[Any], jax.Array | None]:
    n, vocab = student.shape
    acc = _check.acc_type(student.dtype)
    scales = None
    if o.reduction in ("mean", "batchmean"):
        scales = _rows.mean_scales(
            o.op,
            student,
            rows["labels"],
            None,
            rows["normalizer"],
            rows=n,
            vocab=vocab,
            ignore_index=o.ignore_index,
            values_per_row=vocab if o.reduction == "mean" else 1.0,
        )
    outputs, aliases = [result(student, (n,), acc)], {}
    for argument, (want, logits) in enumerate(zip(wanted, (student, teacher), strict=True)):
        if want:
            aliases[argument] = len(outputs)
            outputs.append(result(logits, logits.shape, logits.dtype))
    row_loss, *gradients = jax.ffi.ffi_call(
        "fusegrad_jsd", outputs, input_output_aliases=aliases, vmap_method="sequential"
    )(
        student,
        teacher,
        _rows.or_empty(rows["labels"], student, jnp.int32),
        _rows.or_empty(rows["token_weight"], student, acc),
        _rows.or_empty(scales, student, acc),
        op=o.op,
        ignore_index=np.int64(o.ignore_index),
        beta=np.float64(o.beta),
        temperature=np.float64(o.temperature),
        soft_weight=np.float64(o.soft_weight),
        hard_weight=np.float64(o.hard_weight),
        log_probs=o.log_probs,
        grad_student=wanted[0],
        grad_teacher=wanted[1],
    )
    loss = row_loss if o.reduction == "none" else _rows.reduce(row_loss, scales, nan_if_none=False)
    left = iter(gradients)
    return loss, [next(left) if want else None for want in wanted], scales


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _jsd(o: Divergence, student: jax.Array, teacher: jax.Array, rows: dict[str, Any]) -> jax.Array:
    return _run(o, (False, False), student, teacher, rows)[0]


def _forward(o: Divergence, student: Any, teacher: Any, rows: Any) -> tuple[jax.Array, Any]:
    wanted = (student.perturbed, teacher.perturbed)
    loss, gradients, scales = _run(o, wanted, student.value, teacher.value, constants(o.op, rows))
    return loss, (gradients, scales)


def _backward(o: Divergence, residual: Any, upstream: Any) -> tuple[Any, Any, None]:
    gradients, scales = residual
    upstream = as_array(upstream)
    student, teacher = (None if g is None else _rows.scaled(g, upstream, scales) for g in gradients)
    return student, teacher, None


_jsd.defvjp(_forward, _backward, symbolic_zeros=True)
