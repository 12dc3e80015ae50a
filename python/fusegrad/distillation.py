"""The losses between a student and a teacher as functions. Letters: N rows (tokens), V vocabulary, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from . import _calls, _options
from ._arguments import checked
from ._known import known
from ._options import JSDReduction, Tail
from ._sharding import VocabParallel

__all__ = ["JSDAux", "JSDAuxOutput", "jsd", "kl_div", "linear_jsd"]

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked
@dataclass(frozen=True)
class JSDAux:
    """Per-row values that a divergence can return beside itself (``return_aux=JSDAux(soft_loss=True)``).

    They are one per row whatever the reduction, unweighted, float32 (float64 for float64 inputs), 0 at ignored rows and
    not differentiable: a backward that reaches one raises ``NotImplementedError``, so ``detach()`` what is logged.

    Attributes:
        soft_loss: the divergence.
        hard_loss: the cross entropy at the row's label; needs ``labels``.

    Raises:
        TypeError: a field is not True or False.
    """

    soft_loss: bool = False
    hard_loss: bool = False


class JSDAuxOutput(NamedTuple):
    """The values that a :class:`JSDAux` asked for; the others are None."""

    soft_loss: Tensor | None
    hard_loss: Tensor | None


@overload
def jsd(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    return_aux: None = None,
    **options: Unpack[_options.JSDFunction],
) -> Tensor: ...


@overload
def jsd(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    return_aux: JSDAux,
    **options: Unpack[_options.JSDFunction],
) -> tuple[Tensor, JSDAuxOutput]: ...


@overload
def jsd(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    return_aux: JSDAux | None,
    **options: Unpack[_options.JSDFunction],
) -> Tensor | tuple[Tensor, JSDAuxOutput]: ...


@known()
@checked
def jsd(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    reduction: JSDReduction = "batchmean",
    log_probs: bool = False,
    tail: Tail = "bucket",
    tail_log_prob: Tensor | None = None,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    inplace: bool = False,
    vocab_parallel: VocabParallel | None = None,
    return_aux: JSDAux | None = None,
) -> Tensor | tuple[Tensor, JSDAuxOutput]:
    r"""Generalised Jensen-Shannon divergence between rows of a student's and a teacher's logits.

    With q = softmax(student / temperature), p = softmax(teacher / temperature) and M = (1 - beta) q + beta p, a row
    costs ``(1 - beta) KL(q | M) + beta KL(p | M)``; at the ends KL(p | q) for beta 0 and KL(q | p) for beta 1. There is
    no factor ``temperature**2``. Terms with a probability of 0 are 0, so -inf in either or both leaves finite what is
    finite; equal rows cost exactly 0, with gradients of 0. The formulas stand in docs/design/divergences.md. Any number
    of backwards gives bitwise the same gradients. A second differentiation, forward mode, ``torch.func`` and
    ``torch.vmap``: see docs/design/transforms.md.

    Args:
        student: logits ``[..., V]``; float32, bfloat16, float16 (float64 on the CPU).
        teacher: logits of the student's shape, which get a gradient if they require it; where the dtypes differ, both
            are read in the narrowest that holds either, and each gradient has its own tensor's. Or a pair
            ``(log_probs, indices)`` of shape ``[..., K]``: the K largest log-probabilities of each row, a constant,
            taken as they are, in the dtype in which they were stored, and their columns, int64 or int32, distinct in a
            row. An index of -1 pads a row that has fewer: its log-probability may be anything.
        labels: ``[...]``, int64 or int32: which rows count (those that are not ``ignore_index``), and the classes of
            the hard loss.
        token_weight: scales each row's loss before the reduction, ``[...]``; gets no gradient.
        normalizer: replaces the number of kept rows in the divisor of 'mean' and 'batchmean' (a number, or a 0-d tensor
            on the device).
        beta: in [0, 1].
        temperature: divides the logits of both; of the student alone where the teacher is top-k.
        ignore_index: rows with this label count for nothing; None means -100.
        reduction: 'none', 'sum', 'batchmean': the sum / the number of kept rows, or 'mean': that / V. No row kept: 0.
        log_probs: student and teacher are log-probabilities, taken as they are, and so are the gradients.
        tail: what a top-k teacher's other columns are: 'bucket', one class that has the rest of its mass, or
            'renormalize', columns of probability 0, with the K probabilities scaled to a sum of 1.
        tail_log_prob: ``[...]``, the log of the rest of each row's mass, where it was stored with a top-k teacher; gets
            no gradient. Without it the rest is what is missing to 1, which is known to the rounding of the K
            log-probabilities only.
        soft_weight, hard_weight: a row's loss is ``soft_weight * divergence + hard_weight * hard``, where hard is the
            cross entropy of the student's logits (without temperature) at the row's label.
        inplace: permission to overwrite ``student`` with its gradient, under the checks of :func:`cross_entropy`.
        vocab_parallel: the logits of both are a part of the vocabulary's, and a group of processes has the others: see
            :class:`fusegrad.VocabParallel`. A student that is a DTensor sharded along its columns says so by itself.
        return_aux: also return these per-row values.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or one value a row for 'none'. With ``return_aux``,
        ``(loss, JSDAuxOutput)``.

    Raises:
        ValueError, TypeError: ``jsd: what must hold, but got <value>``.
        IndexError: a label or a teacher's index outside [0, V) on the CPU. On the GPU only where
            :func:`fusegrad.set_check_targets` asks for the check.
    """
    teacher, indices = (teacher, None) if isinstance(teacher, Tensor) else teacher
    loss, values = _calls.jsd(
        student=student,
        teacher=teacher,
        teacher_indices=indices,
        labels=labels,
        token_weight=token_weight,
        normalizer=None if normalizer is None else _calls.normalizer_of("jsd", normalizer, student),
        beta=beta,
        temperature=temperature,
        ignore_index=ignore_index,
        reduction=reduction,
        tail=tail,
        soft_weight=soft_weight,
        hard_weight=hard_weight,
        aux=0 if return_aux is None else _calls.aux_bits(return_aux, JSDAuxOutput),
        log_probs=log_probs,
        tail_log_prob=tail_log_prob,
        inplace=inplace,
        shards=vocab_parallel,
    )
    return loss if return_aux is None else (loss, _calls.aux_of(values, return_aux, JSDAuxOutput))


@checked
def kl_div(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    reverse: bool = False,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    reduction: JSDReduction = "batchmean",
    log_probs: bool = False,
    tail: Tail = "bucket",
    tail_log_prob: Tensor | None = None,
    inplace: bool = False,
    vocab_parallel: VocabParallel | None = None,
) -> Tensor:
    r"""Kullback-Leibler divergence between rows of a student's and a teacher's logits: :func:`jsd` at an end.

    It means what :func:`torch.nn.functional.kl_div` means, in the same order of its arguments, with the softmax inside:
    a row costs ``KL(p | q) = sum(p * (log(p) - log(q)))`` for q of the student and p of the teacher, so that

    ``fusegrad.kl_div(student, teacher) == F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1),
    reduction="batchmean", log_target=True)``

    and with ``log_probs=True`` both are ``F.kl_div``'s ``input`` and, as with its ``log_target=True``, ``target``.
    'sum', 'mean' and 'batchmean' are PyTorch's where no row is ignored and rows are all dimensions but the last (its
    'batchmean' divides by the first dimension alone); the default is 'batchmean', which PyTorch recommends, and 'none'
    gives a value a row, PyTorch's elements summed over the classes. There is no factor ``temperature**2``. Arguments
    that are not listed here are those of :func:`jsd`.

    Args:
        student: logits ``[..., V]``, or log-probabilities with ``log_probs=True``.
        teacher: the same, or a top-k teacher's log-probabilities and indices.
        reverse: ``KL(q | p)``, the student's own expectation (mode-seeking), in place of ``KL(p | q)``.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or one value a row for 'none'.

    Raises:
        ValueError, TypeError, IndexError: as :func:`jsd`, under this function's name.
    """
    try:
        return jsd(
            student,
            teacher,
            labels=labels,
            token_weight=token_weight,
            normalizer=normalizer,
            beta=1.0 if reverse else 0.0,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
            log_probs=log_probs,
            tail=tail,
            tail_log_prob=tail_log_prob,
            inplace=inplace,
            vocab_parallel=vocab_parallel,
        )
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        raise type(error)(str(error).replace("jsd:", "kl_div:", 1)) from error


@overload
def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor | tuple[Tensor, Tensor],
    teacher_weight: Tensor | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[_options.LinearJSDFunction],
) -> Tensor: ...


@overload
def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor | tuple[Tensor, Tensor],
    teacher_weight: Tensor | None = None,
    *,
    return_aux: JSDAux,
    **options: Unpack[_options.LinearJSDFunction],
) -> tuple[Tensor, JSDAuxOutput]: ...


@overload
def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor | tuple[Tensor, Tensor],
    teacher_weight: Tensor | None = None,
    *,
    return_aux: JSDAux | None,
    **options: Unpack[_options.LinearJSDFunction],
) -> Tensor | tuple[Tensor, JSDAuxOutput]: ...


@known()
@checked
def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor | tuple[Tensor, Tensor],
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    ignore_index: int | None = None,
    reduction: JSDReduction = "batchmean",
    tail: Tail = "bucket",
    tail_log_prob: Tensor | None = None,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    vocab_size: int | None = None,
    inplace: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    workspace_mib: int | None = None,
    vocab_parallel: VocabParallel | None = None,
    return_aux: JSDAux | None = None,
) -> Tensor | tuple[Tensor, JSDAuxOutput]:
    r""":func:`jsd` of two linear heads without keeping the logits of either.

    Each side's logits are z = softcap(logit_scale * (input @ weight.T + bias)). The student's gradients are computed in
    the forward, chunk by chunk, and scaled in the backward: any number of backwards gives bitwise the same. With
    reduction 'none' and with ``workspace_mib=0`` the backward computes both sides' logits again instead. The teacher is
    a constant: a part of it that requires grad is an error.

    Each side's products run in its input's dtype (autocast's under autocast), to which its weight and bias are rounded,
    and the teacher's logits are rounded to the dtype of the student's. The student's gradients have their own tensors'
    dtypes. On the CPU the products of bfloat16 and float16 run in float32.

    Args:
        student_input: hidden states ``[..., H]``; float32, bfloat16, float16 (float64 on the CPU).
        student_weight: ``[V, H]``, the same dtypes.
        teacher_input: hidden states ``[..., H']``; or a pair ``(log_probs, indices)`` as :func:`jsd` takes it.
        teacher_weight: ``[V, H']``; None with a top-k teacher.
        student_bias, teacher_bias: ``[V]``.
        labels, token_weight, normalizer, beta, ignore_index, reduction, tail, tail_log_prob, soft_weight, hard_weight:
            as in :func:`jsd`.
        temperature, teacher_temperature: divide the logits of the student and of the teacher; the teacher's is the
            student's where it is None. A top-k teacher has no temperature, softcap or logit scale: one is an error.
        student_softcap, teacher_softcap: z = softcap * tanh(z / softcap).
        student_logit_scale, teacher_logit_scale: factors of the logits, before the softcaps.
        vocab_size: only the first so many rows of the weights and biases count, for vocabularies that are padded
            differently; the gradients of the others are zero.
        inplace: permission to overwrite ``student_input`` with its gradient, under the checks of :func:`cross_entropy`.
        accumulate_dtype, workspace_mib: as in :func:`linear_cross_entropy`, for the student's weight.
        vocab_parallel: the rows of both weights and biases are a part of the vocabulary's, and a group of processes has
            the others: see :class:`fusegrad.VocabParallel`. Weights that are DTensors of Shard(0) say so by themselves.
        return_aux: also return these per-row values.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or one value a row for 'none'. With ``return_aux``,
        ``(loss, JSDAuxOutput)``.

    Raises:
        ValueError, TypeError, IndexError: as :func:`jsd`, under this op's name.
    """
    teacher_input, indices = (teacher_input, None) if isinstance(teacher_input, Tensor) else teacher_input
    loss, values = _calls.linear_jsd(
        student_input=student_input,
        student_weight=student_weight,
        teacher_input=teacher_input,
        teacher_weight=teacher_weight,
        teacher_indices=indices,
        student_bias=student_bias,
        teacher_bias=teacher_bias,
        labels=labels,
        token_weight=token_weight,
        normalizer=None if normalizer is None else _calls.normalizer_of("linear_jsd", normalizer, student_input),
        beta=beta,
        temperature=temperature,
        ignore_index=ignore_index,
        reduction=reduction,
        tail=tail,
        soft_weight=soft_weight,
        hard_weight=hard_weight,
        aux=0 if return_aux is None else _calls.aux_bits(return_aux, JSDAuxOutput),
        teacher_temperature=teacher_temperature,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        student_logit_scale=student_logit_scale,
        teacher_logit_scale=teacher_logit_scale,
        vocab_size=vocab_size,
        accumulate_dtype=accumulate_dtype,
        workspace_mib=workspace_mib,
        tail_log_prob=tail_log_prob,
        inplace=inplace,
        shards=vocab_parallel,
    )
    return loss if return_aux is None else (loss, _calls.aux_of(values, return_aux, JSDAuxOutput))
