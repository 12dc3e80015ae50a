"""Errors against float64, computed from the same rounded inputs.

Loss: every row. Gradient of the activation: sampled rows. Gradient of the weight: sampled vocabulary rows.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.model import Implementation, Problem
from harness.step import Step

SAMPLED_ROWS = 64
SAMPLED_VOCABULARY = 1024
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


class Expected(Protocol):
    """What the results of an op ought to be."""

    def errors(self, step: Step) -> dict[str, float]:
        """Relative root-mean-square error of each result of a step."""


class Reference:
    """Cross entropy of activation (@ weight.T), and its gradients for an upstream of 1 in each row."""

    def __init__(self, problem: Problem) -> None:
        activation, target = problem.activation, problem.target
        device = activation.device
        rows, width = activation.shape
        self._weight = None if problem.weight is None else problem.weight.double()
        # Kept, since an in-place step overwrites the activation before the errors are computed.
        self._hidden = None if problem.weight is None else activation.double()
        vocabulary = width if self._weight is None else len(self._weight)
        self._activation = activation
        self._target = target
        self.rows, self.columns = _samples(rows, vocabulary, device)
        self.row_losses, self._column_grads = self._losses_and_columns()
        sampled = self._logit_grads(self.rows)
        self._row_grads = sampled if self._weight is None else sampled @ self._weight

    def errors(self, step: Step) -> dict[str, float]:
        results = step.results()
        scale = step.row_scale()
        errors = {"loss": _loss_error(results["loss"], self.row_losses)}
        if "activation" in results:
            expected = self._row_grads * scale[self.rows, None]
            errors["activation"] = relative(results["activation"][self.rows], expected)
        if "weight" in results and self._hidden is not None:
            expected = (self._column_grads * scale[:, None]).T @ self._hidden
            errors["weight"] = relative(results["weight"][self.columns], expected)
        return errors

    def _logits(self, index: slice | Tensor) -> Tensor:
        if self._hidden is None or self._weight is None:
            return self._activation[index].double()
        return self._hidden[index] @ self._weight.T

    def _logit_grads(self, index: Tensor) -> Tensor:
        grads = self._logits(index).softmax(-1)
        grads[torch.arange(len(index), device=index.device), self._target[index]] -= 1
        return grads

    def _losses_and_columns(self) -> tuple[Tensor, Tensor]:
        """The loss of each row, and softmax minus one-hot at the sampled columns, [N, columns]."""
        rows = len(self._activation)
        width = self._activation.shape[1] if self._weight is None else len(self._weight)
        chunk = max(1, CHUNK_BYTES[self._activation.device.type] // (8 * width))
        losses, columns = [], []
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logits, target = self._logits(part), self._target[part]
            lse = logits.logsumexp(-1)
            losses.append(lse - logits.gather(1, target[:, None])[:, 0])
            if self._weight is not None:
                probabilities = (logits[:, self.columns] - lse[:, None]).exp()
                columns.append(probabilities - (self.columns == target[:, None]).double())
        return torch.cat(losses), torch.cat(columns) if columns else torch.empty(0)


class DivergenceReference:
    """The divergences between a student and a teacher, with autograd's gradients of the student.

    The problem is of logits, or of two linear heads: then its constants are the teacher's input and weight. Each
    implementation's variant is a Divergence, computed when it is first asked for.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._weights = None
        if problem.weight is not None:
            self._weights = problem.weight.double(), problem.constants[1].double()
        vocabulary = problem.activation.shape[1] if problem.weight is None else len(problem.weight)
        self._vocabulary = vocabulary
        self._rows, self._columns = _samples(len(problem.activation), vocabulary, problem.activation.device)
        self._found: dict[Any, tuple[Tensor, Tensor, Tensor | None]] = {}

    def errors(self, step: Step) -> dict[str, float]:
        # Before the step, which may overwrite the activation.
        row_losses, row_grads, column_grads = self._of(step.implementation.variant)
        hidden = None if column_grads is None else self._problem.activation.to(torch.float64, copy=True)
        results = step.results()
        scale = step.row_scale()
        errors = {"loss": _loss_error(results["loss"], row_losses)}
        if "activation" in results:
            expected = row_grads * scale[self._rows, None]
            errors["activation"] = relative(results["activation"][self._rows], expected)
        if "weight" in results and column_grads is not None and hidden is not None:
            expected = (column_grads * scale[:, None]).T @ hidden
            errors["weight"] = relative(results["weight"][self._columns], expected)
        return errors

    def _of(self, variant: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        if variant not in self._found:
            self._found[variant] = self._compute(variant)
        return self._found[variant]

    def _compute(self, variant: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss of each row, the activation's gradient in the sampled rows, the logits' in the sampled columns."""
        device = self._problem.activation.device.type
        chunk = max(1, CHUNK_BYTES[device] // (8 * self._vocabulary))
        losses, columns = [], []
        for start in range(0, len(self._problem.activation), chunk):
            loss, grad = self._logit_grads(variant, slice(start, start + chunk), self._weights is not None)
            losses.append(loss)
            if grad is not None:
                columns.append(grad[:, self._columns])
        _, sampled = self._logit_grads(variant, self._rows, True)
        assert sampled is not None
        if self._weights is None:
            return torch.cat(losses), sampled, None
        return torch.cat(losses), sampled @ self._weights[0], torch.cat(columns)

    def _logit_grads(self, variant: Any, index: slice | Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Losses of some rows, and where it is wanted the gradient of their logits."""
        student, labels, *constants = (
            one[index] for one in (self._problem.activation, self._problem.target, *self._constants())
        )
        student = student.double()
        constants = [one.double() if one.is_floating_point() else one for one in constants]
        if self._weights is not None:
            student, constants = student @ self._weights[0].T, [constants[0] @ self._weights[1].T]
        with torch.set_grad_enabled(wanted):
            losses = variant.rows(student.requires_grad_(wanted), labels, *constants)
        return losses.detach(), torch.autograd.grad(losses.sum(), student)[0] if wanted else None

    def _constants(self) -> tuple[Tensor, ...]:
        """Those that have a row for each of the student's."""
        return self._problem.constants if self._weights is None else self._problem.constants[:1]


def _samples(rows: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which rows and which columns are compared."""
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randperm(rows, generator=generator)[:SAMPLED_ROWS].to(device)
    return sampled, torch.randperm(vocabulary, generator=generator)[:SAMPLED_VOCABULARY].to(device)


def _loss_error(loss: Tensor, row_losses: Tensor) -> float:
    return relative(loss, row_losses if loss.dim() else row_losses.mean())


def relative(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected; never small where something is not a number."""
    error = ((value.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def check(problem: Problem, reference: Expected, implementation: Implementation) -> dict[str, float]:
    step = Step(problem, implementation)
    try:
        return reference.errors(step)
    finally:
        step.prepare()
