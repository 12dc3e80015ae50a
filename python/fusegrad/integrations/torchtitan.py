"""torchtitan's chunked loss, by linear cross entropy: the head and the loss in one op; its flex attention, also over
sequences that processes share, and the masks of its packed batches. See docs/integrations.md.

Needs no torchtitan: the loss has the interface of its ``ChunkedCELoss``, the attention that of its
``FlexAttentionWrapper``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask

import fusegrad
from fusegrad._arguments import checked

from .lazy_logits import check_options

__all__ = ["FlexAttention", "FlexContextParallel", "LinearCrossEntropyLoss", "create_attention_mask"]


class FlexContextParallel(ParallelStyle):
    """What ``parallelize_module`` makes of modules that are called as torchtitan's ``FlexAttentionWrapper``:
    ``module(q, k, v, *, block_mask, score_mod, scale, return_lse)`` with this process's parts ``[B, H, S, D]``. They
    become :func:`fusegrad.flex_attention` with ``context_parallel``; the block mask is the whole sequence's.

    Args:
        placement, way, sum_captured: as of :class:`fusegrad.ContextParallel`. FSDP over the same processes sums up the
            gradients of what a score_mod captures, so False is the default here.
        length: as there.
    """

    @checked
    def __init__(
        self,
        placement: str = "zigzag",
        *,
        length: int | None = None,
        way: str = "auto",
        sum_captured: bool = False,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.options: dict[str, Any] = {"length": length, "way": way, "sum_captured": sum_captured}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        context = fusegrad.ContextParallel(device_mesh, self.placement, **self.options)
        module.forward = functools.partial(_attention, context)
        return module


def _attention(
    context: fusegrad.ContextParallel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: Any = None,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    return fusegrad.flex_attention(
        q,
        k,
        v,
        score_mod,
        block_mask,
        scale,
        enable_gqa or q.shape[1] != k.shape[1],
        return_lse=return_lse,
        context_parallel=context,
    )


def create_attention_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """torchtitan's function of that name, by :func:`fusegrad.create_block_mask`: other documents at each step compile
    nothing and need no memory of all pairs. It keeps no masks: what a mask_mod captures may have changed."""
    return fusegrad.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device, block_size=BLOCK_SIZE)


class FlexAttention(nn.Module):
    """In place of torchtitan's ``FlexAttentionWrapper``: :func:`fusegrad.flex_attention` of query ``[B, H, S, D]``, key
    and value ``[B, Hkv, S, D]``."""

    forward = staticmethod(functools.partial(_attention, None))


class LinearCrossEntropyLoss:
    """A replacement for torchtitan's ``ChunkedCELoss``: ``loss(hidden_states, labels, global_valid_tokens)``.

    The chunks, and the gradients of the hidden states and of the head, are :func:`fusegrad.linear_cross_entropy`'s; the
    loss is differentiable as any other, so gradient accumulation, ``retain_graph`` and pipeline schedules need nothing.
    The head is called as a module: FSDP gathers its weight once, frees it after the loss and reduces its gradient.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, inplace, accumulate_dtype, workspace_mib: as in
            :func:`fusegrad.linear_cross_entropy`.

    Raises:
        ValueError, TypeError: one of them is wrong.
    """

    @checked
    def __init__(
        self,
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        workspace_mib: int | None = None,
    ) -> None:
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "inplace": inplace,
            "accumulate_dtype": accumulate_dtype,
            "workspace_mib": workspace_mib,
        }
        check_options(self.options)
        self.lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """The head: a linear layer, to be called with hidden states ``[..., H]``."""
        if not isinstance(lm_head, nn.Linear):
            raise TypeError(
                f"LinearCrossEntropyLoss: lm_head must be a torch.nn.Linear, but got {type(lm_head).__name__}"
            )
        self.lm_head = lm_head

    def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: float | Tensor | None = None) -> Tensor:
        """The sum of the tokens' losses, divided by ``global_valid_tokens`` if given.

        Args:
            pred: hidden states ``[..., H]``, of the model without its head.
            labels: ``[...]``, int64 or int32, as long as the hidden states; -100 is ignored.
            global_valid_tokens: a number, or a 0-d tensor on the device.

        Returns:
            0-d, float32 (float64 for float64).

        Raises:
            RuntimeError: no head was set.
            NotImplementedError: the head's weight is a DTensor in its forward (tensor parallel).
        """
        head = self.lm_head
        if head is None:
            raise RuntimeError("LinearCrossEntropyLoss: a head must be set, but got none: call set_lm_head first")
        if "forward" in vars(head):
            raise RuntimeError(
                "LinearCrossEntropyLoss: the head must be a plain one, but got one whose forward is replaced"
            )
        head.forward = functools.partial(_loss, head, labels, global_valid_tokens, self.options)
        try:
            return head(pred)
        finally:
            del head.forward


def _loss(head: Any, labels: Tensor, count: float | Tensor | None, options: dict[str, Any], input: Tensor) -> Tensor:
    if type(head.weight) not in (Tensor, nn.Parameter):
        raise NotImplementedError(
            "LinearCrossEntropyLoss: the head's weight must be whole in its forward, "
            f"but got a {type(head.weight).__name__}"
        )
    return fusegrad.linear_cross_entropy(
        input,
        head.weight,
        labels,
        linear_bias=head.bias,
        **({"reduction": "sum"} if count is None else {"reduction": "mean", "normalizer": count}),
        **options,
    )
