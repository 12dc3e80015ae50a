"""The losses as plain differentiable PyTorch formulas, in any dtype: the truth that the tests compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["cross_entropy", "linear_cross_entropy"]


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.cross_entropy`, by PyTorch's own cross entropy a row.

    z = softcap * tanh(input / softcap); a row costs PyTorch's cross entropy of z plus z_loss * logsumexp(z)**2.
    """
    ignore = -100 if ignore_index is None else ignore_index
    dim = 0 if input.dim() == 1 else 1
    z = input if softcap is None else softcap * torch.tanh(input / softcap)
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
    aux = {"lse": lse, "z_loss": z_rows, "entropy": -(log_p.exp() * log_p).sum(dim) * kept}
    best = z.argmax(dim)
    aux["predicted_tokens"] = best.masked_fill(kept == 0, -1)
    if not target.is_floating_point():
        aux["token_accuracy"] = (best == safe).to(rows.dtype) * kept
        aux["token_log_prob"] = log_p.gather(dim, safe.unsqueeze(dim)).squeeze(dim) * kept
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
    logit_scale: float = 1.0,
    upcast: bool = False,
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and aux values of :func:`fusegrad.linear_cross_entropy`. ``upcast``: the loss of float32 logits, which is
    how a careful user writes it in low precision."""
    logits = F.linear(input, linear_weight, linear_bias) * logit_scale
    vocab = logits.shape[-1]
    rows = logits.reshape(-1, vocab)
    if upcast:
        rows = rows.float()
    flat = target.reshape(-1, vocab) if target.is_floating_point() else target.reshape(-1)
    token_weight = options.pop("token_weight", None)
    if isinstance(token_weight, Tensor):
        token_weight = token_weight.reshape(-1)
    loss, aux = cross_entropy(rows, flat, token_weight=token_weight, **options)  # type: ignore[arg-type]
    shape = input.shape[:-1]
    return (loss if loss.dim() == 0 else loss.reshape(shape)), {k: v.reshape(shape) for k, v in aux.items()}
