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
    settings = "functional, all defaults"
    inplace = False

    def cross_entropy(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        loss: Any = fusegrad.cross_entropy(input, target, inplace=self.inplace, **_options(options))
        return _with_aux(loss, options.get("aux"))

    def linear_cross_entropy(self, input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        loss: Any = fusegrad.linear_cross_entropy(input, weight, target, inplace=self.inplace, **_options(options))
        return _with_aux(loss, options.get("aux"))

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
    settings = "inplace=True, else all defaults"
    inplace = True


_NAMES = {"class_weight": "weight", "bias": "linear_bias"}


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """A cross entropy's, by the names that they have here."""
    given = {_NAMES.get(name, name): value for name, value in options.items() if name != "aux"}
    aux = options.get("aux")
    return given if aux is None else given | {"return_aux": fusegrad.Aux(**{aux: True})}


def _with_aux(result: Any, aux: str | None) -> Any:
    return result if aux is None else (result[0], getattr(result[1], aux))
