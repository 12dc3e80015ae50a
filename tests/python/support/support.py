"""What the tests share: samples of every option, and the rule by which a result passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = Path(__file__).resolve().parent

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# For flex attention's kernels: where the GPU has but one, it needs no name.
FLEX_FAMILIES = [
    family
    for family in ("", "portable", "hopper")
    if torch.cuda.is_available() and (family == "") == (torch.cuda.get_device_capability() != (9, 0))
]
AFTER_2_11 = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)


def dtypes(device: str) -> list[torch.dtype]:
    low = [torch.float32, torch.bfloat16, torch.float16]
    return [torch.float64, *low] if device == "cpu" else low


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


DEVICE_DTYPES = [(device, dtype) for device in DEVICES for dtype in dtypes(device)]


@contextmanager
def deterministic_algorithms(on: bool = True, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rmse(value: Tensor, truth: Tensor) -> float:
    return (value.detach().double() - truth.detach().double()).square().mean().sqrt().item()


def assert_as_good_as_eager(
    ours: Tensor, eager: Tensor, truth: Tensor, what: str, single: float = 2**-22, least: float = 0.0
) -> None:
    """Rule 12 of the contract: the RMSE is at most 1.5 times eager's in the same dtype, plus 1e-7 of the norm.

    Eager's error of a few numbers may be small by luck; there `single` times the numbers is always allowed: two
    roundings of float32, or what the caller knows about the numbers that went into them. `least`: so of any number.
    """
    assert ours.shape == truth.shape, what
    if truth.numel() == 0:
        return
    scale = truth.detach().double().square().mean().sqrt().item()
    bound = 1.5 * rmse(eager, truth) + 1e-7 * scale
    if truth.numel() < 8:
        bound = max(bound, single * scale)
    bound = max(bound, least * scale)
    if ours.dtype == torch.float64:
        bound = 1e-12 * scale + 1e-14
    assert rmse(ours, truth) <= bound, f"{what}: RMSE {rmse(ours, truth):.3g}, at most {bound:.3g}"


@dataclass
class Sample:
    """Options of a call, as functions of the sizes, so that each test draws its own tensors."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    probabilities: bool = False
    class_weight: bool = False
    token_weight: bool = False
    bias: bool = False
    index_dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        return self.name

    def target(self, rows: tuple[int, ...], vocab: int, device: str, dtype: torch.dtype) -> Tensor:
        if self.probabilities:
            return torch.randn(*rows, vocab, device=device).softmax(-1).to(dtype)
        target = torch.randint(0, vocab, rows, device=device, dtype=self.index_dtype)
        if target.numel() > 3:
            target.view(-1)[2] = self.options.get("ignore_index", -100)
        return target

    def tensors(self, rows: tuple[int, ...], vocab: int, device: str, acc: torch.dtype) -> dict[str, Tensor]:
        """The option tensors, of the accumulation dtype."""
        made = {}
        if self.class_weight:
            made["weight"] = torch.rand(vocab, device=device, dtype=acc) + 0.1
        if self.token_weight:
            made["token_weight"] = torch.rand(rows, device=device, dtype=acc)
        return made


COMMON = [
    Sample("plain"),
    Sample("int32", index_dtype=torch.int32),
    Sample("sum", {"reduction": "sum"}),
    Sample("none", {"reduction": "none"}),
    Sample("ignore", {"ignore_index": 1}),
    Sample("smoothing", {"label_smoothing": 0.1}),
    Sample("weight", class_weight=True),
    Sample("weight, smoothing", {"label_smoothing": 0.2}, class_weight=True),
    Sample("weight, sum", {"reduction": "sum"}, class_weight=True),
    Sample("z_loss", {"z_loss": 1e-2}),
    Sample("z_loss, weight, token_weight", {"z_loss": 1e-2}, class_weight=True, token_weight=True),
    Sample("softcap", {"softcap": 3.0}),
    Sample("softcap, smoothing, none", {"softcap": 3.0, "label_smoothing": 0.1, "reduction": "none"}),
    Sample("token_weight", token_weight=True),
    Sample("normalizer", {"normalizer": 37.0}),
    Sample("probabilities", probabilities=True),
    Sample("probabilities, weight, smoothing", {"label_smoothing": 0.1}, probabilities=True, class_weight=True),
    Sample("probabilities, none", {"reduction": "none"}, probabilities=True),
]

LINEAR = [
    *COMMON,
    Sample("bias", bias=True),
    Sample("bias, none", {"reduction": "none"}, bias=True),
    Sample("logit_scale", {"logit_scale": 0.5, "softcap": 4.0}),
    Sample("least workspace", {"workspace_mib": 0}, bias=True),
    Sample("small workspace", {"workspace_mib": 1}, bias=True),
    Sample("large workspace", {"workspace_mib": 1024}),
]


@dataclass
class Distillation:
    """Options of a divergence; `top_k` makes the teacher a top-k one of so many columns."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    labels: bool = False
    token_weight: bool = False
    top_k: int = 0
    bias: bool = False

    def __str__(self) -> str:
        return self.name

    def tensors(self, rows: tuple[int, ...], vocab: int, device: str, acc: torch.dtype) -> dict[str, Tensor]:
        made = {}
        if self.labels:
            made["labels"] = torch.randint(0, vocab, rows, device=device)
            made["labels"].view(-1)[1] = self.options.get("ignore_index", -100)
        if self.token_weight:
            made["token_weight"] = torch.rand(rows, device=device, dtype=acc)
        return made

    def teacher(self, rows: tuple[int, ...], vocab: int, device: str) -> tuple[Tensor, Tensor] | None:
        """Log-probabilities and columns of a top-k teacher; None for a dense one."""
        if self.top_k == 0:
            return None
        log_probs = (2 * torch.randn(*rows, vocab, device=device)).log_softmax(-1)
        return tuple(log_probs.topk(min(self.top_k, vocab), -1))


# What both divergences take.
DISTILLATION = [
    Distillation("plain"),
    Distillation("forward KL", {"beta": 0.0}),
    Distillation("reverse KL", {"beta": 1.0}),
    Distillation("beta 0.1, sum", {"beta": 0.1, "reduction": "sum"}),
    Distillation("beta 0.9, none", {"beta": 0.9, "reduction": "none"}),
    Distillation("temperature", {"temperature": 2.0, "reduction": "none"}),
    Distillation("temperature, forward KL", {"temperature": 0.5, "beta": 0.0}),
    Distillation("temperature, reverse KL", {"temperature": 3.0, "beta": 1.0}),
    Distillation("labels, mean", {"reduction": "mean"}, labels=True),
    Distillation("ignore_index", {"ignore_index": 1}, labels=True),
    Distillation("token_weight", token_weight=True),
    Distillation("normalizer", {"normalizer": 37.0}, labels=True),
    Distillation("normalizer, mean", {"normalizer": 37.0, "reduction": "mean"}),
    Distillation("hard", {"hard_weight": 0.5}, labels=True, token_weight=True),
    Distillation("hard alone", {"hard_weight": 1.0, "soft_weight": 0.0}, labels=True),
    Distillation(
        "hard, forward KL, temperature", {"hard_weight": 0.3, "soft_weight": 0.7, "beta": 0.0, "temperature": 2.0}, True
    ),
    Distillation("hard, reverse KL, none", {"hard_weight": 2.0, "beta": 1.0, "reduction": "none"}, True),
    Distillation("top-k", top_k=5),
    Distillation("top-k, forward KL", {"beta": 0.0}, top_k=5),
    Distillation("top-k, reverse KL", {"beta": 1.0}, top_k=1),
    Distillation("top-k, renormalize", {"tail": "renormalize", "temperature": 2.0}, top_k=3),
    Distillation("top-k, renormalize, forward KL", {"tail": "renormalize", "beta": 0.0}, top_k=3),
    Distillation("top-k, hard", {"hard_weight": 0.5, "temperature": 1.5, "reduction": "none"}, True, top_k=4),
]

# Those of jsd alone.
DISTILLATION_LOGITS = [
    Distillation("log_probs", {"log_probs": True}),
    Distillation("log_probs, forward KL", {"log_probs": True, "beta": 0.0, "reduction": "none"}),
    Distillation("log_probs, reverse KL", {"log_probs": True, "beta": 1.0}, labels=True),
]

# Those of linear_jsd alone.
DISTILLATION_LINEAR = [
    Distillation("bias", bias=True),
    Distillation("bias, none", {"reduction": "none"}, labels=True, bias=True),
    Distillation("temperatures", {"temperature": 2.0, "teacher_temperature": 0.7}),
    Distillation(
        "softcaps and scales",
        {"student_softcap": 3.0, "teacher_softcap": 4.0, "student_logit_scale": 0.5, "teacher_logit_scale": 1.5},
    ),
    Distillation(
        "softcap, hard, none",
        {"student_softcap": 3.0, "student_logit_scale": -2.0, "hard_weight": 0.5, "reduction": "none"},
        labels=True,
        bias=True,
    ),
    Distillation("softcap, hard, top-k", {"student_softcap": 3.0, "hard_weight": 0.5}, labels=True, top_k=4),
    Distillation("vocab_size", {"vocab_size": 4, "hard_weight": 0.5}, labels=True),
    Distillation("least workspace", {"workspace_mib": 0}, bias=True),
    Distillation("small workspace", {"workspace_mib": 1}, token_weight=True, bias=True),
    Distillation("large workspace", {"workspace_mib": 1024}, top_k=3),
]


def gradients(
    call: Callable[..., Any], tensors: list[Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of fresh leaves, and the gradients of an upstream gradient (by default 0.5)."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    loss = call(*leaves)
    if upstream is None:
        upstream = torch.full_like(loss, 0.5)
    return loss, torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))


FROZEN = [(True, False), (False, True), (False, False)]


def check_frozen(call: Callable[..., Tensor], tensors: list[Tensor], trained: tuple[bool, ...]) -> None:
    """Those that are not trained get no gradient, and the others the one that they have where all are."""
    every = gradients(call, tensors)[1]
    leaves = [t.detach().clone().requires_grad_(is_trained) for t, is_trained in zip(tensors, trained, strict=True)]
    loss = call(*leaves)
    assert loss.requires_grad == any(trained)
    if loss.requires_grad:
        (loss * 0.5).backward()
    for leaf, gradient in zip(leaves, every, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, gradient)
        else:
            assert leaf.grad is None
