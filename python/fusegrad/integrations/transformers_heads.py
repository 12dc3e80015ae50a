"""Heads of transformers' models: which are linear layers that can be lazy, and by which operands."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .lazy_logits import lazy_linear

__all__ = ["LazyHead", "head_of", "lazy_class", "operands", "why_not"]


class LazyHead:
    """Mixed into the class of a model's head: lazy while the model's forward runs.

    Attributes:
        call: what the model's forward that runs wants of its head; None while none runs.
    """

    call: HeadCall | None = None
    bare: Any

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self.call
        if call is not None:
            reason: Any = "it is called with more than its input" if args or kwargs else None
            made = reason or operands(self, input)
            if not isinstance(made, str):
                call.reached = True
                return lazy_linear(*made, **call.options)
            call.reason = made
        return super().forward(input, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The mixed class has no name that a file could hold: a copy is a plain head, until its model runs.
        return _plain, (self.bare,), super().__reduce_ex__(protocol)[2]


class HeadCall:
    """One forward of a model: the options for its head, and what became of them.

    Attributes:
        options: of :func:`~fusegrad.integrations.lazy_logits.lazy_linear`.
        reached: the head was asked, and is lazy.
        reason: why it is not.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.reached = False
        self.reason: str | None = None


def _plain(bare: Any) -> Any:
    return bare.__new__(bare)


@functools.cache
def lazy_class(bare: Any) -> Any:
    return type(
        bare.__name__,
        (LazyHead, bare),
        {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "bare": bare},
    )


def is_lora(head: Any) -> bool:
    return any(c.__name__ == "Linear" and c.__module__ == "peft.tuners.lora.layer" for c in type(head).__mro__)


def _not_linear(linear: Any) -> str | None:
    """Why a module is not a plain linear layer, if it is not."""
    if "forward" in vars(linear):
        return "its forward was replaced"
    if type(linear).forward is not nn.Linear.forward and not isinstance(linear, LazyHead):
        return "its class computes something of its own"
    if type(linear.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(linear.weight).__name__}"
    if hasattr(linear.weight, "ds_id"):
        return "DeepSpeed has partitioned its weight"
    if any(c.__name__ == "FSDPModule" for c in type(linear).__mro__):
        return "it is sharded on its own: leave it in the root's group"
    return None


def operands(head: Any, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | str:
    """Input, weight and bias whose linear layer the head is, or why there are none."""
    if not is_lora(head):
        return _not_linear(head) or (input, head.weight, head.bias)
    base = head.get_base_layer()
    reason = _not_linear(base)
    if reason is not None:
        return f"of its base layer {reason}"
    if head.disable_adapters and head.merged:
        return "its adapters are merged and disabled"
    if head.disable_adapters or head.merged:
        return input, base.weight, base.bias
    inputs, weights, bias = [input], [base.weight], base.bias
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        if name in head.lora_variant:
            return f"adapter {name!r} is a variant of LoRA ({type(head.lora_variant[name]).__name__})"
        down, up = head.lora_A[name], head.lora_B[name]
        # z = x W' + s (dropout(x) A') B' + b = [x, s dropout(x) A'] [W, B]' + b, exactly, dropout and all.
        narrow = down(head.lora_dropout[name](input.to(down.weight.dtype))) * head.scaling[name]
        inputs.append(narrow.to(input.dtype))
        weights.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            extra = up.bias * head.scaling[name]
            bias = extra if bias is None else bias + extra
    return torch.cat(inputs, -1), torch.cat(weights, 1), bias


def head_of(model: Any) -> Any:
    """The module that makes the logits, of PEFT's ``modules_to_save`` the active one."""
    head = model.get_output_embeddings()
    if head is not None and hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        active = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[active[0]] if active else head.original_module
    return head


def why_not(head: Any) -> str | None:
    """Why a model's head cannot be lazy, as far as can be said before it is called."""
    if is_lora(head):
        return None
    if isinstance(head, nn.Linear):
        return _not_linear(head)
    kind = type(head)
    if kind.__module__.startswith("peft."):
        return f"its adapter is none of LoRA ({kind.__module__.removeprefix('peft.')}.{kind.__name__})"
    return "it is none"
