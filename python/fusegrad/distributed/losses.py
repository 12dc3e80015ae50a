"""The losses over a sharded vocabulary: what DTensors say of the parts, before the ops of csrc/pytorch/ops/shards.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._sharding import is_dtensor
from .shards import VocabParallel, local_part, part_of, whole

__all__ = ["loss"]

_ops = torch.ops.fusegrad
_LOSSES = ("cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd")
_NAMES = {op: tuple(a.name for a in getattr(_ops, op).default._schema.arguments) for op in _LOSSES}
# Out of place and in place.
_SHARDED = {op: (getattr(_ops, f"{op}_sharded").default, getattr(_ops, f"{op}_sharded_").default) for op in _LOSSES}


def _parts(op: str, given: dict[str, Any]) -> dict[str, int]:
    """The arguments that are parts of the vocabulary, and along which dimension; the first one decides."""
    if op.startswith("linear"):
        parts = dict.fromkeys(("linear_weight", "student_weight", "teacher_weight"), 0)
        parts |= dict.fromkeys(("linear_bias", "student_bias", "teacher_bias", "grad_weight_into"), 0)
    elif op == "cross_entropy":
        parts = {"input": 0 if given["input"].dim() <= 1 else 1}
    else:
        last = given["student"].dim() - 1
        parts = dict.fromkeys(("student", "teacher") if given["teacher_indices"] is None else ("student",), last)
    target = given.get("target")
    if target is not None and target.is_floating_point():
        parts["target"] = parts.get("input", -1)
    return {name: dim for name, dim in parts.items() if name in given}


def loss(
    op: str, arguments: tuple[Any, ...], inplace: bool, shards: VocabParallel | None
) -> tuple[Tensor, list[Tensor]]:
    given = dict(zip(_NAMES[op], arguments, strict=True))
    parts = _parts(op, given)
    first = next(iter(parts))
    if is_dtensor(*given.values()):
        # A head's weight and the logits say who has what; another argument alone does not.
        for name in (first, "teacher_weight"):
            if is_dtensor(given.get(name)):
                shards = part_of(op, name, given[name], parts[name], shards)
        given = {
            name: local_part(value) if name in parts else whole(value) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
    if shards is None:
        raise ValueError(
            f"{op}: {first} must be a DTensor where another argument is, or vocab_parallel be given, but got a plain "
            "tensor"
        )
    return _SHARDED[op][int(inplace)](*given.values(), *shards.told())
