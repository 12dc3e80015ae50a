"""The losses of the training steps: next tokens, and distillation from a teacher's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness import peers
from harness.benchmark import Options
from harness.divergence import Divergence
from harness.llama import compiled, hidden_states, plain, with_apply
from harness.model import Case, Implementation, Unavailable
from harness.training import Found, Method, Training

LEAN_MIB = 512
REFERENCE_ROWS = 512


def next_tokens(tokens: Tensor) -> Tensor:
    """[B * S] the labels of all hidden states, as transformers shifts them: the last one's is ignored."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()


def with_head(head: Implementation) -> Method:
    """An op's implementation, `loss(hidden, weight, target)`, as the head of the model."""

    def loss(training: Training) -> Tensor:
        hidden = hidden_states(training.model, training.tokens)
        return head.loss(hidden, training.model.lm_head.weight, next_tokens(training.tokens))

    return Method(head.name, loss, essential=head.essential)


def our_losses(case: Case) -> list[Method]:
    lean: dict[str, Any] = {"accumulate_dtype": case.torch_dtype, "workspace_mib": LEAN_MIB}
    return [
        with_apply("fusegrad"),
        with_apply("fusegrad inplace", inplace=True),
        with_apply("fusegrad lean", **lean),
        with_apply("fusegrad lean inplace", inplace=True, **lean),
        with_apply("fusegrad lean 256 MiB", essential=False, **{**lean, "workspace_mib": 256}),
        with_apply("fusegrad with attention", attention="fusegrad"),
        with_apply("fusegrad lean inplace with attention", attention="fusegrad", inplace=True, **lean),
        with_apply("fusegrad compile model", essential=False, loss=compiled()),
    ]


def losses(case: Case, options: Options) -> Found:
    heads = [
        *peers.torch_linear(case),
        *peers.liger_linear(case),
        *peers.liger_sm90_linear(case),
        *peers.quack_linear(case, options.autotune),
        *peers.cce_linear(case),
    ]
    return [
        Method("transformers", plain),
        Method("compile model", compiled(), essential=False),
        *(one if isinstance(one, Unavailable) else with_head(one) for one in heads),
        *peers.optional("fusegrad", "fusegrad", lambda _: our_losses(case)),
    ]


def exact_loss(training: Training) -> Tensor:
    """In float64 from the hidden states on, some rows at a time."""
    hidden, target = hidden_states(training.model, training.tokens), next_tokens(training.tokens)
    weight = training.model.lm_head.weight.double()

    def part(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden.double() @ weight.T, target, reduction="sum")

    return in_parts(part, hidden, target, weight) / (target >= 0).sum()


def in_parts(part: Callable[..., Tensor], hidden: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
    pieces = zip(hidden.split(REFERENCE_ROWS), rows.split(REFERENCE_ROWS), strict=True)
    return torch.stack([checkpoint(part, *piece, *others, use_reentrant=False) for piece in pieces]).sum()


def both_hidden_states(training: Training) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = hidden_states(training.teacher, training.tokens)
    return hidden_states(training.model, training.tokens), teacher


def with_divergence(name: str, essential: bool, divergence: Callable[..., Tensor], ours: bool = False) -> Method:
    """`divergence(hidden, weight, labels, teacher_hidden, teacher_weight)` of the two models."""

    def loss(training: Training) -> Tensor:
        student, teacher = both_hidden_states(training)
        weights = training.model.lm_head.weight, training.teacher.lm_head.weight
        return divergence(student, weights[0], training.tokens.flatten(), teacher, weights[1])

    return Method(name, loss, ours, essential)


def our_divergences(fusegrad: Any, case: Case) -> list[Method]:
    def made(name: str, **options: Any) -> Method:
        def divergence(student: Tensor, weight: Tensor, _: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
            return fusegrad.linear_jsd(student, weight, teacher, teacher_weight, **options)

        return with_divergence(name, True, divergence, ours=True)

    lean: dict[str, Any] = {"accumulate_dtype": case.torch_dtype, "workspace_mib": LEAN_MIB}
    return [
        made("fusegrad"),
        made("fusegrad inplace", inplace=True),
        made("fusegrad lean", **lean),
        made("fusegrad lean inplace", inplace=True, **lean),
    ]


def divergences(case: Case) -> Found:
    heads = [*peers.torch_linear_jsd(case), *peers.liger_linear_jsd(case)]
    chosen = [one for one in heads if isinstance(one, Unavailable) or one.variant == Divergence()]
    return [
        *(
            one if isinstance(one, Unavailable) else with_divergence(one.name, one.essential, one.loss)
            for one in chosen
        ),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: our_divergences(fusegrad, case)),
    ]


def exact_divergence(training: Training) -> Tensor:
    student, teacher = both_hidden_states(training)
    weights = training.model.lm_head.weight.double(), training.teacher.lm_head.weight.double()

    def part(student: Tensor, teacher: Tensor, weight: Tensor, teacher_weight: Tensor) -> Tensor:
        logits, expected = student.double() @ weight.T, teacher.double() @ teacher_weight.T
        return Divergence().rows(logits, training.tokens, expected).sum()

    return in_parts(part, student, teacher, *weights) / len(student)
