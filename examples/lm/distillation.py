"""Distillation: a student trained on the text's tokens (the hard part) and on a teacher's distribution (the soft)."""

import dataclasses
import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm import ExampleError
from lm.data import Corpus
from lm.model import GPT, fusegrad_for_loss
from lm.training import BatchLoss, Trainer, TrainingConfig, model_config, read_checkpoint


@dataclass(frozen=True)
class DistillationConfig(TrainingConfig):
    """A student's training; the loss is `soft_weight` * divergence + `hard_weight` * cross entropy."""

    hidden_size: int = 64
    beta: float = 0.5
    temperature: float = 1.0
    soft_weight: float = 0.5
    hard_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ExampleError(f"--beta must be in [0, 1], but got {self.beta}")
        if not 0 < self.temperature < math.inf:
            raise ExampleError(f"--temperature must be positive and finite, but got {self.temperature}")
        for name in ("soft_weight", "hard_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                option = "--" + name.replace("_", "-")
                raise ExampleError(f"{option} must be finite and not negative, but got {getattr(self, name)}")

    def describe(self) -> str:
        return (
            f"student: {super().describe()}; beta {self.beta:g}, temperature {self.temperature:g}, "
            f"{self.soft_weight:g} × soft + {self.hard_weight:g} × hard"
        )


class Losses(NamedTuple):
    """Means over a batch; `soft` and `hard` are unweighted and not differentiable."""

    total: Tensor
    soft: Tensor
    hard: Tensor


# (student hidden [B, S, H], weight [V, H], teacher hidden [B, S, H'], weight [V, H'], targets [B, S], config) -> losses
DistillationLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, DistillationConfig], Losses]


def distillation_loss(name: str) -> DistillationLoss:
    """The loss for one of `LOSSES`."""
    if name == "eager":
        return eager_distillation_loss
    fusegrad = fusegrad_for_loss(name)
    inplace = name == "fusegrad-inplace"

    def fused_loss(
        student: Tensor,
        student_weight: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        targets: Tensor,
        config: DistillationConfig,
    ) -> Losses:
        total, aux = fusegrad.linear_jsd(
            student,
            student_weight,
            teacher,
            teacher_weight,
            labels=targets,
            beta=config.beta,
            temperature=config.temperature,
            soft_weight=config.soft_weight,
            hard_weight=config.hard_weight,
            inplace=inplace,
            return_aux=fusegrad.JSDAux(soft_loss=True, hard_loss=True),
        )
        return Losses(total, aux.soft_loss.detach().mean(), aux.hard_loss.detach().mean())

    return fused_loss


def eager_distillation_loss(
    student: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor,
    targets: Tensor,
    config: DistillationConfig,
) -> Losses:
    """The same by PyTorch's own operations, which hold several tensors of [B * S, V] in memory."""
    student_logits = F.linear(student, student_weight).flatten(0, 1).float()
    teacher_logits = F.linear(teacher, teacher_weight).flatten(0, 1).float()
    log_q = F.log_softmax(student_logits / config.temperature, dim=-1)
    log_p = F.log_softmax(teacher_logits / config.temperature, dim=-1)
    soft = _divergence(log_q, log_p, config.beta)
    hard = F.cross_entropy(student_logits, targets.flatten())
    return Losses(config.soft_weight * soft + config.hard_weight * hard, soft.detach(), hard.detach())


def _divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """The mean over rows of the generalised Jensen-Shannon divergence, as docs/design/divergences.md defines it."""
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    log_mixture = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return (1 - beta) * _kl(log_q, log_mixture) + beta * _kl(log_p, log_mixture)


def _kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    """KL(x | y); PyTorch takes its arguments the other way round."""
    return F.kl_div(log_y, log_x, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class Teacher:
    """A trained model, frozen; `key` is a digest of its weights."""

    model: GPT
    key: str


def load_teacher(path: Path, corpus: Corpus, config: TrainingConfig) -> Teacher:
    """The model of a checkpoint that was trained on `corpus`, on `config`'s device."""
    content = _read_teacher(path)
    saved = content["config"]
    if saved["data"] != corpus.key:
        raise ExampleError(
            f"the teacher {path} was trained on another text or vocabulary; give the --data and --vocab-size "
            "that it was trained with"
        )
    if saved["seq_length"] < config.seq_length:
        raise ExampleError(
            f"--seq-length must be at most the teacher's, {saved['seq_length']}, but got {config.seq_length}"
        )
    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    # On its own device the teacher's configuration may be refused here.
    trained = TrainingConfig(
        **{name: value for name, value in saved.items() if name in names and name != "device"}, device=config.device
    )
    model = GPT(model_config(trained, corpus.vocab_size))
    model.load_state_dict(content["model"])
    return Teacher(model.to(config.device).eval().requires_grad_(False), _digest(content["model"]))


def teacher_hidden_size(path: Path) -> int:
    return _read_teacher(path)["config"]["hidden_size"]


def _read_teacher(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ExampleError(f"no teacher: {path} does not exist; give --teacher a checkpoint of train_lm")
    return read_checkpoint(path)


def _digest(weights: dict[str, Tensor]) -> str:
    written = io.BytesIO()
    torch.save(weights, written)
    return hashlib.sha256(written.getbuffer()).hexdigest()[:24]


class DistillationTrainer(Trainer):
    """Trains a student; the teacher sees the same batches, without dropout."""

    config: DistillationConfig

    def __init__(self, config: DistillationConfig, corpus: Corpus, teacher: Teacher) -> None:
        self.teacher = teacher
        super().__init__(config, corpus)

    def held_out_parts(self) -> dict[str, float]:
        def compute(inputs: Tensor, targets: Tensor) -> Tensor:
            with self._autocast():
                losses = self._losses(inputs, targets)
            return torch.stack([losses.soft, losses.hard])

        soft, hard = self._held_out_mean(compute).tolist()
        return {"soft": soft, "hard": hard}

    def _make_loss(self) -> BatchLoss:
        function = distillation_loss(self.config.loss)

        def losses(inputs: Tensor, targets: Tensor) -> Losses:
            with torch.no_grad():
                teacher = self.teacher.model(inputs)
            student = self.model(inputs)
            return function(
                student,
                self.model.head_weight,
                teacher,
                self.teacher.model.head_weight,
                targets,
                self.config,
            )

        self._losses = losses
        return lambda inputs, targets: losses(inputs, targets).total

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "teacher": self.teacher.key}
