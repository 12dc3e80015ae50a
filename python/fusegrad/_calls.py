"""Calls of the losses' ops by the names of their arguments, for what a DTensor or ``shards`` says is sharded too.

Here alone stands the order of the schemas (csrc/pytorch/ops/arguments.h), which a test compares: the dispatcher takes
half a microsecond for each argument that comes by its name, and Python nearly a whole one to make an object of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _sharding
from ._arguments import is_compiled_number
from ._eager import eager_only
from ._sharding import VocabParallel, is_dtensor

__all__ = ["aux_bits", "aux_of", "cross_entropy", "jsd", "linear_cross_entropy", "linear_jsd", "normalizer_of"]

Outputs = tuple[Tensor, list[Tensor]]
"""For an op: the loss, and the aux values that were asked for, in the order of their bits."""


def _overloads(op: str) -> tuple[Any, Any]:
    """The op and the one in place, found once: each name below torch.ops takes a tenth of a microsecond."""
    return getattr(torch.ops.fusegrad, op).default, getattr(torch.ops.fusegrad, f"{op}_").default


_CROSS_ENTROPY, _LINEAR_CROSS_ENTROPY = _overloads("cross_entropy"), _overloads("linear_cross_entropy")
_JSD, _LINEAR_JSD = _overloads("jsd"), _overloads("linear_jsd")


def cross_entropy(
    *,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    aux: int,
    support: Tensor | None,
    inplace: bool,
    shards: VocabParallel | None,
) -> Outputs:
    arguments = (
        input,
        target,
        weight,
        token_weight,
        normalizer,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        aux,
        support,
    )
    if shards is not None or is_dtensor(input):
        return _sharding.loss("cross_entropy", arguments, inplace, shards)
    return (_CROSS_ENTROPY[1] if inplace else _CROSS_ENTROPY[0])(*arguments)


def linear_cross_entropy(
    *,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    ignore_index: int | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    aux: int,
    logit_scale: float,
    accumulate_dtype: torch.dtype | None,
    workspace_mib: int | None,
    row_scale: Tensor | None,
    support: Tensor | None,
    grad_weight_into: Tensor | None,
    batch_invariant: bool,
    inplace: bool,
    shards: VocabParallel | None,
) -> Outputs:
    arguments = (
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        token_weight,
        normalizer,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        aux,
        logit_scale,
        accumulate_dtype,
        workspace_mib,
        row_scale,
        support,
        grad_weight_into,
        batch_invariant,
    )
    if shards is not None or is_dtensor(input, linear_weight):
        return _sharding.loss("linear_cross_entropy", arguments, inplace, shards)
    if grad_weight_into is not None:
        return _outside_graphs(_LINEAR_CROSS_ENTROPY[1] if inplace else _LINEAR_CROSS_ENTROPY[0], arguments)
    return (_LINEAR_CROSS_ENTROPY[1] if inplace else _LINEAR_CROSS_ENTROPY[0])(*arguments)


def jsd(
    *,
    student: Tensor,
    teacher: Tensor,
    teacher_indices: Tensor | None,
    labels: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    beta: float,
    temperature: float,
    ignore_index: int | None,
    reduction: str,
    tail: str,
    soft_weight: float,
    hard_weight: float,
    aux: int,
    log_probs: bool,
    tail_log_prob: Tensor | None,
    inplace: bool,
    shards: VocabParallel | None,
) -> Outputs:
    arguments = (
        student,
        teacher,
        teacher_indices,
        labels,
        token_weight,
        normalizer,
        beta,
        temperature,
        ignore_index,
        reduction,
        tail,
        soft_weight,
        hard_weight,
        aux,
        log_probs,
        tail_log_prob,
    )
    if shards is not None or is_dtensor(student, teacher):
        return _sharding.loss("jsd", arguments, inplace, shards)
    return (_JSD[1] if inplace else _JSD[0])(*arguments)


def linear_jsd(
    *,
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor | None,
    teacher_indices: Tensor | None,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    labels: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    beta: float,
    temperature: float,
    ignore_index: int | None,
    reduction: str,
    tail: str,
    soft_weight: float,
    hard_weight: float,
    aux: int,
    teacher_temperature: float | None,
    student_softcap: float | None,
    teacher_softcap: float | None,
    student_logit_scale: float,
    teacher_logit_scale: float,
    vocab_size: int | None,
    accumulate_dtype: torch.dtype | None,
    workspace_mib: int | None,
    tail_log_prob: Tensor | None,
    inplace: bool,
    shards: VocabParallel | None,
) -> Outputs:
    arguments = (
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        teacher_indices,
        student_bias,
        teacher_bias,
        labels,
        token_weight,
        normalizer,
        beta,
        temperature,
        ignore_index,
        reduction,
        tail,
        soft_weight,
        hard_weight,
        aux,
        teacher_temperature,
        student_softcap,
        teacher_softcap,
        student_logit_scale,
        teacher_logit_scale,
        vocab_size,
        accumulate_dtype,
        workspace_mib,
        tail_log_prob,
    )
    if shards is not None or is_dtensor(student_input, student_weight, teacher_input, teacher_weight):
        return _sharding.loss("linear_jsd", arguments, inplace, shards)
    return (_LINEAR_JSD[1] if inplace else _LINEAR_JSD[0])(*arguments)


@eager_only
def _outside_graphs(op: Any, arguments: tuple[Any, ...]) -> Outputs:
    """A call whose backward writes to one of its arguments, which a compiler's graph would not know."""
    return op(*arguments)


def normalizer_of(op: str, normalizer: float | Tensor, input: Tensor) -> Tensor:
    """A number becomes a 0-d tensor filled on the device: no copy from the host, which would synchronise."""
    if isinstance(normalizer, Tensor):
        return normalizer
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    if is_compiled_number(normalizer):
        return torch.as_tensor(normalizer, dtype=dtype, device=input.device)
    if not abs(normalizer) <= torch.finfo(dtype).max:
        raise ValueError(f"{op}: normalizer must be a finite number in {dtype}, but got {normalizer}")
    return torch.full((), float(normalizer), dtype=dtype, device=input.device)


def aux_bits(aux: Any, output: Any) -> int:
    """What an op is asked for beside its loss: of the fields of ``output``, those that ``aux`` wants."""
    return sum([getattr(aux, name) << i for i, name in enumerate(output._fields)])


def aux_of(values: list[Tensor], aux: Any, output: Any) -> Any:
    """The aux values that were asked for, as ``output``."""
    left = iter(values)
    return output(*[next(left) if getattr(aux, name) else None for name in output._fields])
