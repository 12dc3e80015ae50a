"""The ops as plain formulas: in float64 the truth, in the inputs' dtype the implementation called eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
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
    """PyTorch's, of ``softcap * tanh(input / softcap)``, plus ``z_loss * logsumexp(z)**2`` a row."""
    z = input if softcap is None else softcap * torch.tanh(input / softcap)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(z, target, class_weight, reduction=reduction, **options)
    if z_loss == 0 and aux is None:
        return loss
    log_p = z.log_softmax(-1)
    kept = target != ignore_index
    z_rows = z_loss * z.logsumexp(-1).square() * kept
    if reduction == "mean":
        loss = loss + z_rows.sum() / kept.sum()
    else:
        loss = loss + (z_rows.sum() if reduction == "sum" else z_rows)
    if aux is None:
        return loss
    if aux == "token_log_prob":
        value = log_p.gather(-1, target.masked_fill(~kept, 0).unsqueeze(-1)).squeeze(-1) * kept
    elif aux == "entropy":
        value = -(log_p.exp() * log_p).sum(-1) * kept
    else:
        value = z.logsumexp(-1) if aux == "lse" else _reduced(z_rows, kept, reduction)
    return loss, value


def _reduced(rows: Tensor, kept: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / kept.sum()


def linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Any:
    logits = F.linear(input, weight, bias).flatten(0, -2)
    result = cross_entropy(logits, target.flatten(), **options)
    if options.get("reduction") == "none" and not isinstance(result, tuple):
        return result.view(target.shape)
    return result


def jsd(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    beta: float = 0.5,
    temperature: float = 1.0,
    log_probs: bool = False,
    hard_weight: float = 0.0,
    indices: Tensor | None = None,
) -> Tensor:
    """(1 - beta) KL(q | m) + beta KL(p | m) a row, m = (1 - beta) q + beta p; KL(p | q) for beta 0, KL(q | p) for 1.
    With indices the teacher is the log-probabilities of these columns, and one class has the rest."""
    if reduction not in ("mean", "sum", "none") or not student.is_floating_point():
        raise ValueError(f"{reduction} of {student.dtype}")
    unchecked = torch.compiler.is_compiling()
    if log_probs and not unchecked and any((t.double().exp().sum(-1) > 1.05).any() for t in (student, teacher)):
        raise ValueError("logits, not log-probabilities")
    if indices is not None:
        log_q, log_p = _in_buckets((student / temperature).log_softmax(-1), teacher, indices)
    else:
        log_q, log_p = (t if log_probs else (t / temperature).log_softmax(-1) for t in (student, teacher))
    if beta in (0, 1):
        rows = _divergence(log_p, log_q) if beta == 0 else _divergence(log_q, log_p)
    else:
        mixture = (1 - beta) * log_q.exp() + beta * log_p.exp()
        log_m = mixture.masked_fill(mixture == 0, 1).log()
        rows = (1 - beta) * _divergence(log_q, log_m) + beta * _divergence(log_p, log_m)
    rows = rows + (rows.clamp_min(0) - rows).detach()  # of equal rows rounding leaves something below 0
    kept = torch.ones_like(rows, dtype=torch.bool) if labels is None else labels != ignore_index
    rows = rows.masked_fill(~kept, 0)
    if hard_weight and labels is not None:
        hard = F.cross_entropy(
            student.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="none"
        ).view_as(rows)
        rows = rows + hard_weight * hard
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / kept.sum().clamp_min(1)


def _in_buckets(log_q: Tensor, log_p: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's columns and one more. Its mass is what is missing to 1, but not less than the resolution with which
    the sum of probabilities is known whose logarithms were rounded."""
    p, roundoff = log_p.exp(), torch.finfo(log_p.dtype).eps / 2
    resolution = (p * (min(roundoff, 2**-24) - roundoff * log_p)).sum(-1, keepdim=True)
    missing = torch.maximum(1 - p.sum(-1, keepdim=True), resolution).log()
    rest = log_q.scatter(-1, indices, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_q.gather(-1, indices), rest], -1), torch.cat([log_p, missing], -1)


def _divergence(log_x: Tensor, log_y: Tensor) -> Tensor:
    """sum x (log x - log y), 0 where x is 0, in the gradients too."""
    none = log_x == -math.inf
    return (log_x.exp() * (log_x.masked_fill(none, 0) - log_y.masked_fill(none, 0))).masked_fill(none, 0).sum(-1)


def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    student = F.linear(student_input, student_weight, student_bias)
    return jsd(student, F.linear(teacher_input, teacher_weight), **options)


def indices(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, q_idx, kv_idx, each along its own dimension of [B, H, M, N]."""
    sizes = (query.size(0), query.size(1), query.size(2), key.size(2))
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    b, h, q_idx, kv_idx = (
        torch.arange(n, device=query.device).view(shape) for n, shape in zip(sizes, shapes, strict=True)
    )
    return b, h, q_idx, kv_idx


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """With all scores in memory. Rows without a key give 0, and an lse of -inf."""
    batch, heads, _, size = query.shape
    key, value = (t.expand(batch, -1, -1, -1).repeat_interleave(heads // t.size(1), 1) for t in (key, value))
    score = query @ key.mT * (size**-0.5 if scale is None else scale)
    where = indices(query, key)
    if score_mod is not None:
        score = score_mod(score, *where).expand_as(score)
    if mask_mod is not None:
        score = torch.where(mask_mod(*where), score, -math.inf)
    taken = score > -math.inf
    alive = taken.any(-1, keepdim=True)
    filled = torch.where(alive, score, 0.0)
    p = torch.where(taken, filled.softmax(-1), 0.0).to(value.dtype)
    out = p @ value
    lse = torch.where(alive.squeeze(-1), filled.logsumexp(-1), -math.inf)
    return (out, lse) if return_lse else out
