"""The losses as plain differentiable PyTorch formulas, in any dtype: the truth that the tests compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy", "jsd", "linear_cross_entropy", "linear_jsd", "linear_log_prob"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    support: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.cross_entropy`, by PyTorch's own cross entropy a row.

    z = softcap * tanh(input / softcap), -inf outside a support (of [N, V] logits); a row costs PyTorch's cross entropy
    of z plus z_loss * logsumexp(z)**2. Derivatives by `weight` are not right: PyTorch's take it for a constant in the
    rows, but not in what a mean is divided by.
    """
    ignore = -100 if ignore_index is None else ignore_index
    dim = 0 if input.dim() == 1 else 1
    z = input if softcap is None else softcap * torch.tanh(input / softcap)
    if support is not None:
        inside = z.new_zeros(z.shape[0], z.shape[1] + 1, dtype=torch.bool)
        inside.scatter_(1, support.long().masked_fill(support < 0, z.shape[1]), True)
        z = z.masked_fill(~inside[:, :-1], -torch.inf)
    rows = F.cross_entropy(z, target, weight, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore)
    lse = z.logsumexp(dim)
    if target.is_floating_point():
        kept = torch.ones_like(rows)
        divisor = kept.sum()
    else:
        kept = (target != ignore).to(rows.dtype)
        safe = target.long().masked_fill(kept == 0, 0)
        divisor = kept.sum() if weight is None else (weight.to(rows.dtype)[safe] * kept).sum()
    z_rows = z_loss * lse.square() * kept
    log_p = z.log_softmax(dim)
    finite = log_p.masked_fill(z == -torch.inf, 0)
    aux = {"lse": lse, "z_loss": z_rows, "entropy": -(log_p.exp() * finite).sum(dim) * kept}
    best = z.argmax(dim)
    aux["predicted_tokens"] = best.masked_fill(kept == 0, -1)
    if not target.is_floating_point():
        aux["token_accuracy"] = (best == safe).to(rows.dtype) * kept
        aux["token_log_prob"] = log_p.gather(dim, safe.unsqueeze(dim)).squeeze(dim).masked_fill(kept == 0, 0)
    if token_weight is not None:
        rows, z_rows = rows * token_weight, z_rows * token_weight
    if reduction == "none":
        return rows + z_rows, aux
    if reduction == "sum":
        return (rows + z_rows).sum(), aux
    if normalizer is not None:
        return (rows.sum() + z_rows.sum()) / normalizer, aux
    return rows.sum() / divisor + z_rows.sum() / kept.sum(), aux


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    upcast: bool = False,
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.linear_cross_entropy`. ``upcast``: the loss of float32 logits, which is
    how a careful user writes it in low precision."""
    if isinstance(logit_scale, Tensor) and logit_scale.dim() > 0:
        logit_scale = logit_scale.unsqueeze(-1)
    logits = F.linear(input, linear_weight, linear_bias) * logit_scale
    vocab = logits.shape[-1]
    rows = logits.reshape(-1, vocab)
    if upcast:
        rows = rows.float()
    flat = target.reshape(-1, vocab) if target.is_floating_point() else target.reshape(-1)
    token_weight = options.pop("token_weight", None)
    if isinstance(token_weight, Tensor):
        token_weight = token_weight.reshape(-1)
    support = options.pop("support", None)
    if isinstance(support, Tensor):
        support = support.reshape(-1, support.shape[-1])
    loss, aux = cross_entropy(rows, flat, token_weight=token_weight, support=support, **options)  # type: ignore[arg-type]
    shape = input.shape[:-1]
    return (loss if loss.dim() == 0 else loss.reshape(shape)), {k: v.reshape(shape) for k, v in aux.items()}


def linear_log_prob(input: Tensor, linear_weight: Tensor, target: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of :func:`fusegrad.linear_log_prob`."""
    _, aux = linear_cross_entropy(input, linear_weight, target, reduction="none", **options)  # type: ignore[arg-type]
    return aux["token_log_prob"], aux["entropy"]


def _kl(log_x: Tensor, log_y: Tensor) -> Tensor:
    """sum x (log x - log y) over the last dimension, 0 where x is 0: also in the gradients, hence the fill before."""
    zero = log_x == -torch.inf
    return (log_x.exp() * (log_x.masked_fill(zero, 0) - log_y.masked_fill(zero, 0))).masked_fill(zero, 0).sum(-1)


def _divergence(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    mixture = (1 - beta) * log_q.exp() + beta * log_p.exp()
    log_m = mixture.masked_fill(mixture == 0, 1).log()
    return (1 - beta) * _kl(log_q, log_m) + beta * _kl(log_p, log_m)


def _in_buckets(
    log_q: Tensor, teacher: tuple[Tensor, Tensor], tail: str, tail_log_prob: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities over a top-k teacher's K columns and one more for all others, [N, K + 1] each."""
    log_probs, indices = teacher
    vocab = log_q.shape[-1]
    padding = indices == -1
    log_probs = log_probs.masked_fill(padding, -torch.inf)
    indices = indices.long().masked_fill(padding, vocab)  # a column of probability 0, for padding alone
    log_q = torch.cat([log_q, torch.full_like(log_q[..., :1], -torch.inf)], -1)
    outside = torch.ones_like(log_q, dtype=torch.bool).scatter_(-1, indices, False)
    rest = log_q.masked_fill(~outside, -torch.inf)
    # logsumexp of nothing is -inf, and its gradient NaN.
    empty = (rest == -torch.inf).all(-1, keepdim=True)
    rest = rest.masked_fill(empty, 0).logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
    if tail == "renormalize":
        log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True)
        log_missing = torch.full_like(log_probs[..., :1], -torch.inf)
    elif tail_log_prob is not None:
        log_missing = tail_log_prob.to(log_probs.dtype).unsqueeze(-1)
    else:
        p, roundoff = log_probs.exp(), torch.finfo(log_probs.dtype).eps / 2
        each = min(roundoff, 2**-24) - roundoff * log_probs
        resolution = (p * each).masked_fill(p == 0, 0).sum(-1, keepdim=True)
        log_missing = torch.maximum(1 - p.sum(-1, keepdim=True), resolution).log()
    whole = (~padding).sum(-1, keepdim=True) == vocab
    log_missing = log_missing.masked_fill(whole, -torch.inf)
    return torch.cat([log_q.gather(-1, indices), rest], -1), torch.cat([log_probs, log_missing], -1)


def jsd(
    student: Tensor,
    teacher: Tensor | tuple[Tensor, Tensor],
    *,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    ignore_index: int | None = None,
    reduction: str = "batchmean",
    log_probs: bool = False,
    tail: str = "bucket",
    tail_log_prob: Tensor | None = None,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.jsd`, by the definition of the divergence over whole distributions; a
    top-k teacher's are over its K columns and the sum of all others."""
    log_q = student if log_probs else (student / temperature).log_softmax(-1)
    if isinstance(teacher, Tensor):
        teacher_temperature = temperature if teacher_temperature is None else teacher_temperature
        log_p = teacher if log_probs else (teacher / teacher_temperature).log_softmax(-1)
    else:
        log_q, log_p = _in_buckets(log_q, teacher, tail, tail_log_prob)
    soft = _divergence(log_q, log_p, beta)
    ignore = -100 if ignore_index is None else ignore_index
    kept = torch.ones_like(soft, dtype=torch.bool) if labels is None else labels != ignore
    soft = soft.masked_fill(~kept, 0)
    hard = torch.zeros_like(soft)
    if labels is not None and not log_probs:
        safe = labels.long().masked_fill(~kept, 0)
        hard = -student.log_softmax(-1).gather(-1, safe.unsqueeze(-1)).squeeze(-1).masked_fill(~kept, 0)
    rows = soft_weight * soft + (hard_weight * hard if hard_weight != 0 else 0)
    if token_weight is not None:
        rows = rows * token_weight
    aux = {"soft_loss": soft, "hard_loss": hard}
    if reduction == "none":
        return rows, aux
    if reduction == "sum":
        return rows.sum(), aux
    divisor = kept.sum().clamp_min(1) if normalizer is None else normalizer
    if reduction == "mean":
        divisor = divisor * student.shape[-1]
    return rows.sum() / divisor, aux


def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor | tuple[Tensor, Tensor],
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    vocab_size: int | None = None,
    upcast: bool = False,
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.linear_jsd`. ``upcast``: the divergence of float32 logits."""

    def logits(x: Tensor, w: Tensor, b: Tensor | None, scale: float, softcap: float | None) -> Tensor:
        z = scale * F.linear(x, w[:vocab_size], None if b is None else b[:vocab_size])
        z = z.float() if upcast else z
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    student = logits(student_input, student_weight, student_bias, student_logit_scale, student_softcap)
    teacher = teacher_input
    if isinstance(teacher, Tensor):
        assert teacher_weight is not None
        teacher = logits(teacher, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    return jsd(student, teacher, **options)  # type: ignore[arg-type]
