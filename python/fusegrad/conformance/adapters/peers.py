"""Other libraries' losses and attention, where they are installed."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ..adapter import Adapter, NotOffered
from .pytorch import causal


class Liger(Adapter):
    """Liger-Kernel. Its divergences take log-probabilities and divide by the kept rows."""

    devices = ("cuda",)
    settings = "all defaults: weights' gradients add up in the inputs' dtype"
    packages = ("liger-kernel",)
    accumulate: torch.dtype | None = None

    def load(self) -> None:
        self.functional: Any = importlib.import_module("liger_kernel.transformers.functional")

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
        return _liger_aux(
            aux,
            self.functional.liger_cross_entropy,
            input,
            target,
            class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=z_loss,
            softcap=softcap,
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
        z_loss: float = 0.0,
        softcap: float | None = None,
        aux: str | None = None,
    ) -> Any:
        return _liger_aux(
            aux,
            self.functional.liger_fused_linear_cross_entropy,
            input,
            weight,
            target,
            bias,
            class_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            lse_square_scale=z_loss,
            softcap=softcap,
            accum_dtype=self.accumulate,
        )

    def jsd(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.5,
        temperature: float = 1.0,
        log_probs: bool = False,
    ) -> Any:
        if not log_probs:
            student, teacher = (student / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
        return self.functional.liger_jsd(student, teacher, labels, beta, ignore_index)

    def linear_jsd(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        *,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.5,
        temperature: float = 1.0,
    ) -> Any:
        tensors = (student_input, student_weight, teacher_input, teacher_weight, labels)
        return self.functional.liger_fused_linear_jsd(*tensors, beta, ignore_index, temperature, self.accumulate)


class LigerFloat32(Liger):
    """The linear losses with their float32 accumulation, which has to be asked for."""

    settings = "accum_dtype=torch.float32"
    accumulate = torch.float32
    cross_entropy = None  # type: ignore[assignment]
    jsd = None  # type: ignore[assignment]


def _liger_aux(aux: str | None, function: Any, *arguments: Any, **options: Any) -> Any:
    if aux is None:
        return function(*arguments, **options)
    if aux != "z_loss":
        raise NotOffered(f"{function.__name__} without {aux}")
    result = function(*arguments, return_z_loss=True, **options)
    return result.loss, result.z_loss


class Quack(Adapter):
    devices = ("cuda",)
    settings = "chunk_size=128 and tuned=False of the linear loss, inplace_backward=False of the other"
    packages = ("quack-kernels",)
    inplace = False

    def load(self) -> None:
        self.rows: Any = importlib.import_module("quack.cross_entropy")
        self.heads: Any = importlib.import_module("quack.linear_cross_entropy")

    def dtype(self, op: str, device: str) -> torch.dtype:
        return torch.bfloat16 if op == "linear_cross_entropy" else torch.float32

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        options = {"ignore_index": ignore_index, "reduction": reduction, "inplace_backward": self.inplace}
        return self.rows.cross_entropy(input, target, weight=class_weight, **options)

    def linear_cross_entropy(
        self, input: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
    ) -> Tensor:
        """Untuned: tuning takes minutes, and does not change what is computed."""
        if reduction == "none":
            raise NotOffered("chunked_linear_cross_entropy without reduction 'none'")
        options = {"chunk_size": 128, "ignore_index": ignore_index, "reduction": reduction, "tuned": False}
        return self.heads.chunked_linear_cross_entropy(input, weight, target, **options)


class QuackInplace(Quack):
    """Its in-place backward, which is an option of the logits' loss."""

    settings = "inplace_backward=True"
    inplace = True
    linear_cross_entropy = None  # type: ignore[assignment]


class CCE(Adapter):
    """Cut Cross Entropy, with its default filter of small gradients: blocks of logits whose gradients are all below it
    count as 0."""

    devices = ("cuda",)
    settings = 'filter_eps="auto", its default'
    packages = ("cut-cross-entropy",)
    filter_eps: str | None = "auto"

    def load(self) -> None:
        self.module: Any = importlib.import_module("cut_cross_entropy")

    def dtype(self, op: str, device: str) -> torch.dtype:
        return torch.bfloat16

    def linear_cross_entropy(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        softcap: float | None = None,
    ) -> Tensor:
        function = self.module.linear_cross_entropy
        options = {"ignore_index": ignore_index, "reduction": reduction, "softcap": softcap}
        if bias is not None and "bias" not in inspect.signature(function).parameters:
            raise NotOffered("linear_cross_entropy without bias")
        options |= {} if bias is None else {"bias": bias}
        return function(input, weight, target, filter_eps=self.filter_eps, **options)


class CCEUnfiltered(CCE):
    """The same with every gradient."""

    settings = "filter_eps=None"
    filter_eps = None


class FlashAttention4(Adapter):
    """Its own functions of scores are CuTe programs with hand-written derivatives: none here."""

    devices = ("cuda",)
    settings = "flash_attn.cute.flash_attn_func, all defaults"
    packages = ("flash-attn-4",)

    def load(self) -> None:
        self.module: Any = importlib.import_module("flash_attn.cute")

    def dtype(self, op: str, device: str) -> torch.dtype:
        return torch.bfloat16

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        if mask_mod not in (None, causal):
            raise NotOffered("flash_attn_func without mask_mod of Python")
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        options = {"softmax_scale": scale, "causal": mask_mod is causal, "return_lse": return_lse}
        found = self.module.flash_attn_func(query, key, value, **options)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)
