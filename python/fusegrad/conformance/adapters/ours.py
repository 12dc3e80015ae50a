"""fusegrad itself, functional and in place."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

import fusegrad

from ..adapter import Adapter, NotOffered
from .pytorch import block_mask

_AVERAGE = {"mean": "batchmean"}  # what the divergences call the mean over kept rows


class Fusegrad(Adapter):
    inplace = False

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        aux: str | None = None,
    ) -> Any:
        options = _options(
            weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            aux=aux,
        )
        return _with_aux(fusegrad.cross_entropy(input, target, inplace=self.inplace, **options), aux)

    def linear_cross_entropy(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        aux: str | None = None,
    ) -> Any:
        options = _options(
            weight=class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            aux=aux,
        )
        loss: Any = fusegrad.linear_cross_entropy(
            input, weight, target, linear_bias=bias, inplace=self.inplace, **options
        )
        return _with_aux(loss, aux)

    def jsd(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        reduction: str = "mean",
        indices: Tensor | None = None,
        **options: Any,
    ) -> Any:
        average: Any = _AVERAGE.get(reduction, reduction)
        given = teacher if indices is None else (teacher, indices)
        return fusegrad.jsd(student, given, reduction=average, inplace=self.inplace, **options)

    def linear_jsd(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        *,
        reduction: str = "mean",
        **options: Any,
    ) -> Any:
        average: Any = _AVERAGE.get(reduction, reduction)
        tensors = (student_input, student_weight, teacher_input, teacher_weight)
        return fusegrad.linear_jsd(*tensors, reduction=average, inplace=self.inplace, **options)

    def flex_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any = None, mask_mod: Any = None, **options: Any
    ) -> Any:
        if "dropout_p" in options and "dropout_p" not in inspect.signature(fusegrad.flex_attention).parameters:
            raise NotOffered("flex_attention without dropout_p")
        mask = block_mask(mask_mod, query, key)
        return fusegrad.flex_attention(query, key, value, score_mod, mask, inplace=self.inplace, **options)


class FusegradInplace(Fusegrad):
    inplace = True


def _options(aux: str | None, **options: Any) -> dict[str, Any]:
    """What both cross entropies take."""
    return options if aux is None else options | {"return_aux": fusegrad.Aux(**{aux: True})}


def _with_aux(result: Any, aux: str | None) -> Any:
    return result if aux is None else (result[0], getattr(result[1], aux))
