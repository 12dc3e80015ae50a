"""The losses as modules; their arguments are those of :mod:`fusegrad.functional`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import distillation, functional
from .distillation import JSDAux, JSDReduction, Tail
from .functional import Aux, Reduction

__all__ = ["CrossEntropyLoss", "JSDLoss", "LinearCrossEntropyLoss", "LinearJSDLoss"]


class _Options(nn.Module):
    """What the losses share: the options of the function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class _Loss(_Options):
    """The losses over classes have class weights too, as a buffer."""

    weight: Tensor | None

    def __init__(self, weight: Tensor | None, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("weight", weight)


class CrossEntropyLoss(_Loss):
    """:func:`fusegrad.cross_entropy` as a module, a drop-in for :class:`torch.nn.CrossEntropyLoss`.

    Args: as the function's. ``forward(input, target, *, token_weight=None, normalizer=None)``.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: bool = False,
        return_aux: Aux | None = None,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            inplace=inplace,
            return_aux=return_aux,
        )

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Any:
        return functional.cross_entropy(
            input, target, self.weight, token_weight=token_weight, normalizer=normalizer, **self.options
        )


class LinearCrossEntropyLoss(_Loss):
    """A linear head and its cross entropy, as :class:`torch.nn.LinearCrossEntropyLoss` of PyTorch >= 2.13.

    Owns ``linear.weight`` ``[num_classes, in_features]`` (and ``linear.bias``); ``forward`` also takes a tied weight
    instead. With ``num_classes=None`` it owns none, and ``forward`` must be given one.

    Args:
        in_features: H.
        num_classes: V, or None.
        bias, device, dtype: of the owned head.
        weight, ignore_index, ...: as :func:`fusegrad.linear_cross_entropy`.
    """

    linear: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        num_classes: int | None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        workspace_mib: int | None = None,
        return_aux: Aux | None = None,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            inplace=inplace,
            accumulate_dtype=accumulate_dtype,
            workspace_mib=workspace_mib,
            return_aux=return_aux,
        )
        self.linear = (
            None if num_classes is None else nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        )

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        linear_weight: Tensor | None = None,
        *,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Any:
        if linear_weight is None:
            if self.linear is None:
                raise ValueError(
                    "LinearCrossEntropyLoss: linear_weight must be given where num_classes is None, but got None"
                )
            linear_weight, linear_bias = self.linear.weight, self.linear.bias
        return functional.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            token_weight=token_weight,
            normalizer=normalizer,
            **self.options,
        )


class JSDLoss(_Options):
    """:func:`fusegrad.jsd` as a module.

    Args: as the function's. ``forward(student, teacher, *, labels=None, token_weight=None, normalizer=None)``.
    """

    def __init__(
        self,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        ignore_index: int | None = None,
        reduction: JSDReduction = "batchmean",
        log_probs: bool = False,
        tail: Tail = "bucket",
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        inplace: bool = False,
        return_aux: JSDAux | None = None,
    ) -> None:
        super().__init__(
            beta=beta,
            temperature=temperature,
            ignore_index=ignore_index,
            reduction=reduction,
            log_probs=log_probs,
            tail=tail,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            inplace=inplace,
            return_aux=return_aux,
        )

    def forward(
        self,
        student: Tensor,
        teacher: Tensor | tuple[Tensor, Tensor],
        *,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Any:
        return distillation.jsd(
            student, teacher, labels=labels, token_weight=token_weight, normalizer=normalizer, **self.options
        )


class LinearJSDLoss(_Options):
    """A student's linear head and its divergence from a teacher's: :func:`fusegrad.linear_jsd` as a module.

    Owns ``linear.weight`` ``[num_classes, in_features]`` (and ``linear.bias``) of the student; ``forward`` also takes a
    tied weight instead. With ``num_classes=None`` it owns none, and ``forward`` must be given one. The teacher's head
    is the teacher's: ``forward`` takes it, and it gets no gradient.

    Args:
        in_features: H of the student.
        num_classes: V, or None.
        bias, device, dtype: of the owned head.
        beta, ...: as :func:`fusegrad.linear_jsd`.
    """

    linear: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        num_classes: int | None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
        vocab_size: int | None = None,
        inplace: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        workspace_mib: int | None = None,
        return_aux: JSDAux | None = None,
    ) -> None:
        super().__init__(
            beta=beta,
            temperature=temperature,
            teacher_temperature=teacher_temperature,
            student_softcap=student_softcap,
            teacher_softcap=teacher_softcap,
            student_logit_scale=student_logit_scale,
            teacher_logit_scale=teacher_logit_scale,
            ignore_index=ignore_index,
            reduction=reduction,
            tail=tail,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            vocab_size=vocab_size,
            inplace=inplace,
            accumulate_dtype=accumulate_dtype,
            workspace_mib=workspace_mib,
            return_aux=return_aux,
        )
        self.linear = (
            None if num_classes is None else nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        )

    def forward(
        self,
        student_input: Tensor,
        teacher_input: Tensor | tuple[Tensor, Tensor],
        teacher_weight: Tensor | None = None,
        student_weight: Tensor | None = None,
        *,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Any:
        if student_weight is None:
            if self.linear is None:
                raise ValueError("LinearJSDLoss: student_weight must be given where num_classes is None, but got None")
            student_weight, student_bias = self.linear.weight, self.linear.bias
        return distillation.linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            labels=labels,
            token_weight=token_weight,
            normalizer=normalizer,
            **self.options,
        )
