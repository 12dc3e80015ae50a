"""Megatron-LM: a head's gradient is added to the parameter's ``main_grad``. See docs/losses.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusegrad

__all__ = ["linear_cross_entropy", "linear_log_prob"]


class _Accumulated(torch.autograd.Function):
    """The weight itself. Its backward, which runs when the gradient has been added to ``main_grad``, says so to
    Megatron's hooks, and gives them the gradient that they wait for: zeros, so that adding them is no error."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor:
        assert gradient is None
        if hasattr(ctx.weight, "grad_added_to_main_grad"):
            ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.weight)


def _head(op: str, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """The weight for the call, to whose options its buffer is added."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(f"{op}: linear_weight must have main_grad, Megatron's gradient buffer, but got none")
    if getattr(weight, "overwrite_main_grad", False):
        raise ValueError(
            f"{op}: linear_weight.overwrite_main_grad must not be set, since the gradient is added to main_grad, "
            "but it is"
        )
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return weight
    options["grad_weight_into"] = main_grad
    return _Accumulated.apply(weight)


def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
    """:func:`fusegrad.linear_cross_entropy` whose weight's gradient is added to ``linear_weight.main_grad``.

    As Megatron's own layers with gradient accumulation fusion: ``grad_added_to_main_grad`` becomes True where the
    parameter has it, and ``grad`` gets zeros, which hooks may wait for and must not add a second time.

    Args:
        linear_weight: the parameter itself, with ``main_grad``, ``[V, H]`` float32.
        input, target, options: as the function's.

    Raises:
        ValueError: there is no ``main_grad``, or ``overwrite_main_grad`` is set. The rest as the function.
    """
    weight = _head("linear_cross_entropy", linear_weight, options)
    return fusegrad.linear_cross_entropy(input, weight, target, **options)


def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> fusegrad.LogProb:
    """:func:`fusegrad.linear_log_prob`, in the same way.

    Args:
        input, linear_weight, target, options: as above.

    Raises:
        ValueError: as above.
    """
    weight = _head("linear_log_prob", linear_weight, options)
    return fusegrad.linear_log_prob(input, weight, target, **options)
