"""The divergences by their formulas: what eager and compiled peers run, and the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.goals import Goal


@dataclass(frozen=True)
class Divergence:
    """Which divergence an implementation computes; no input has a probability of 0.

    log_probs: both inputs are taken as log-probabilities. top_k: the teacher is its pair, with a bucket for the rest.
    hard_weight: of the labels' cross entropy; the divergence has the rest of the weight.
    """

    beta: float = 0.5
    temperature: float = 1.0
    log_probs: bool = False
    top_k: bool = False
    hard_weight: float = 0.0

    @property
    def suffix(self) -> str:
        """What beta and temperature add to an implementation's name: nothing where they are the defaults."""
        beta = "" if self.beta == 0.5 else f" beta={self.beta:g}"
        return beta + ("" if self.temperature == 1 else f" T={self.temperature:g}")

    @property
    def label(self) -> str:
        return f"beta={self.beta:g} T={self.temperature:g}"

    def rows(
        self,
        student: Tensor,
        labels: Tensor,
        teacher: Tensor,
        top_log_probs: Tensor | None = None,
        top_indices: Tensor | None = None,
    ) -> Tensor:
        """Each row's loss, [N], in the dtype of the inputs."""
        log_q = self._log_softmax(student)
        if self.top_k:
            assert top_log_probs is not None and top_indices is not None
            log_q, log_p = _buckets(log_q, top_log_probs, top_indices)
        else:
            log_p = self._log_softmax(teacher)
        soft = self._soft(log_q, log_p)
        if self.hard_weight == 0:
            return soft
        hard = student.logsumexp(-1) - student.gather(-1, labels[:, None])[:, 0]
        return (1 - self.hard_weight) * soft + self.hard_weight * hard

    def _log_softmax(self, logits: Tensor) -> Tensor:
        if self.log_probs:
            return logits
        return (logits if self.temperature == 1 else logits / self.temperature).log_softmax(-1)

    def _soft(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        if self.beta == 0:
            return _kl(log_p, log_q)
        if self.beta == 1:
            return _kl(log_q, log_p)
        log_m = torch.logaddexp(log_q + math.log(1 - self.beta), log_p + math.log(self.beta))
        return (1 - self.beta) * _kl(log_q, log_m) + self.beta * _kl(log_p, log_m)


def _kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    return (log_x.exp() * (log_x - log_y)).sum(-1)


def _buckets(log_q: Tensor, top_log_probs: Tensor, top_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Both over the K columns; where there are others, over one more class that has the rest of the mass."""
    top_log_q = log_q.gather(-1, top_indices)
    if top_indices.shape[-1] == log_q.shape[-1]:
        return top_log_q, top_log_probs
    log_q_rest = log_q.scatter(-1, top_indices, -math.inf).logsumexp(-1, keepdim=True)
    log_p_rest = (1 - top_log_probs.exp().sum(-1, keepdim=True)).log()
    return torch.cat((top_log_q, log_q_rest), -1), torch.cat((top_log_probs, log_p_rest), -1)


BETAS = (Divergence(), Divergence(beta=0.0), Divergence(beta=1.0))
VARIANTS = tuple(Divergence(one.beta, temperature) for one in BETAS for temperature in (1.0, 2.0))


def error_goals(quick: bool) -> tuple[Goal, ...]:
    """Ours beside eager's float32 arithmetic, where both are run."""
    return tuple(
        Goal(
            f"{one.label}: errors <= 1.5 x eager's",
            (f"fusegrad{one.suffix}",),
            than=f"eager{one.suffix}",
            max_error_share=1.5,
        )
        for one in (BETAS[:1] if quick else BETAS)
    )
