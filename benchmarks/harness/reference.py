"""Errors against float64, computed from the same rounded inputs.

Loss: every row. Gradient of the activation: sampled rows. Gradient of the weight: sampled vocabulary rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.model import Implementation, Problem
from harness.step import Step

SAMPLED_ROWS = 64
SAMPLED_VOCABULARY = 1024
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


class Reference:
    """Cross entropy of activation (@ weight.T), and its gradients for an upstream of 1 in each row."""

    def __init__(self, problem: Problem) -> None:
        activation, target = problem.activation, problem.target
        device = activation.device
        generator = torch.Generator().manual_seed(0)
        rows, width = activation.shape
        self._weight = None if problem.weight is None else problem.weight.double()
        # Kept, since an in-place step overwrites the activation before the errors are computed.
        self._hidden = None if problem.weight is None else activation.double()
        vocabulary = width if self._weight is None else len(self._weight)
        self._activation = activation
        self._target = target
        self.rows = torch.randperm(rows, generator=generator)[:SAMPLED_ROWS].to(device)
        self.columns = torch.randperm(vocabulary, generator=generator)[:SAMPLED_VOCABULARY].to(device)
        self.row_losses, self._column_grads = self._losses_and_columns()
        sampled = self._logit_grads(self.rows)
        self._row_grads = sampled if self._weight is None else sampled @ self._weight

    def errors(self, step: Step) -> dict[str, float]:
        """Relative root-mean-square error of each result of a step."""
        results = step.results()
        scale = step.row_scale()
        loss = results["loss"]
        errors = {"loss": relative(loss, self.row_losses if loss.dim() else self.row_losses.mean())}
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


def relative(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected; never small where something is not a number."""
    error = ((value.double() - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def check(problem: Problem, reference: Reference, implementation: Implementation) -> dict[str, float]:
    step = Step(problem, implementation)
    try:
        return reference.errors(step)
    finally:
        step.prepare()
