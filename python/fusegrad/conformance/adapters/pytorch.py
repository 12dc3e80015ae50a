"""PyTorch's own: plain ops, the same compiled, its fused linear cross entropy, its attentions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from .. import formulas
from ..adapter import Adapter, NotOffered


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The mask that attentions without mask functions know by name."""
    return q_idx >= kv_idx


def block_mask(mask_mod: Callable[..., Tensor] | None, query: Tensor, key: Tensor) -> BlockMask | None:
    if mask_mod is None:
        return None
    batch, heads = query.shape[:2]
    return create_block_mask(mask_mod, batch, heads, query.size(2), key.size(2), device=query.device.type)


class Eager(Adapter):
    """The formulas in the inputs' dtype, an op of PyTorch for each step."""

    settings = "plain formulas of PyTorch's ops"

    def cross_entropy(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        return formulas.cross_entropy(input, target, **options)

    def linear_cross_entropy(self, input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        return formulas.linear_cross_entropy(input, weight, target, **options)

    def jsd(self, student: Tensor, teacher: Tensor, **options: Any) -> Any:
        return formulas.jsd(student, teacher, **options)

    def linear_jsd(self, *tensors: Tensor, **options: Any) -> Any:
        return formulas.linear_jsd(*tensors, **options)

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        score_mod: Any = None,
        mask_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        return formulas.attention(query, key, value, score_mod, mask_mod, scale, return_lse)


class Compiled(Adapter):
    """Eager's losses as torch.compile makes them."""

    settings = "eager's losses by torch.compile(dynamic=False), all of its defaults"

    def cross_entropy(self, input: Tensor, target: Tensor, **options: Any) -> Any:
        return _compiled(formulas.cross_entropy)(input, target, **options)

    def linear_cross_entropy(self, input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        return _compiled(formulas.linear_cross_entropy)(input, weight, target, **options)

    def jsd(self, student: Tensor, teacher: Tensor, **options: Any) -> Any:
        return _compiled(formulas.jsd)(student, teacher, **options)

    def linear_jsd(self, *tensors: Tensor, **options: Any) -> Any:
        return _compiled(formulas.linear_jsd)(*tensors, **options)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class Torch(Adapter):
    """What torch.nn.functional has by these names."""

    settings = "torch.nn.functional's, all defaults"

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        return F.cross_entropy(
            input,
            target,
            class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

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
    ) -> Any:
        function = getattr(F, "linear_cross_entropy", None)
        if function is None:
            raise NotOffered(f"linear_cross_entropy before PyTorch 2.13; this is {torch.__version__}")
        options = {
            "linear_bias": bias,
            "weight": class_weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
        }
        known = inspect.signature(function).parameters
        return function(input, weight, target, **{k: v for k, v in options.items() if k in known or v is not None})


class Flex(Adapter):
    """PyTorch's flex_attention, compiled."""

    settings = "torch.compile(flex_attention, dynamic=False), no kernel_options"

    def function(self) -> Callable[..., Any]:
        return torch.compile(flex_attention, dynamic=False)

    def dtype(self, op: str, device: str) -> torch.dtype:
        return torch.float32

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        score_mod: Any = None,
        mask_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        mask = block_mask(mask_mod, query, key)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not return_lse:
            return self.function()(query, key, value, score_mod, mask, **options)
        options["return_aux"] = AuxRequest(lse=True)
        out, aux = self.function()(query, key, value, score_mod, mask, **options)
        return out, aux.lse


class FlexEager(Flex):
    """The same without a compiler: PyTorch's own reference, with all scores in memory."""

    settings = "flex_attention without a compiler"

    def function(self) -> Callable[..., Any]:
        return flex_attention


class SDPA(Adapter):
    """scaled_dot_product_attention: masks, no functions of scores."""

    settings = "scaled_dot_product_attention, whichever backend it takes"

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "dropout_p": dropout_p}
        if mask_mod is causal and query.size(2) == key.size(2):
            options["is_causal"] = True
        elif mask_mod is not None:
            options["attn_mask"] = mask_mod(*formulas.indices(query, key)).expand(-1, -1, -1, key.size(2))
        return F.scaled_dot_product_attention(query, key, value, **options)
