"""verl: its fused head by linear cross entropy, under verl's own signature. See docs/losses.md."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

import fusegrad

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies, as ``verl.utils.kernel.linear_cross_entropy``, differentiable.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``; with a process group this process's part, all of one size and in the order of the ranks.
        labels: class indices ``[...]``.
        temperature: the logits are divided by it: a number, or a tensor, 0-d or one a row.
        reduction: 'none', 'sum' or 'mean' of the log-probabilities; entropies are one a row.
        dist_process_group: the processes that share the vocabulary, or None.

    Returns:
        (log_probs, entropy), float32.

    Raises:
        ValueError, TypeError, IndexError: as :func:`fusegrad.linear_log_prob`, under its name; a reduction that is none
            of these.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'none', 'sum' or 'mean', but got {reduction!r}")
    shards = None
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        size, world = weight.shape[0], dist.get_world_size(dist_process_group)
        # Known without asking: a collective each call would be one too many.
        shards = fusegrad.VocabParallel._of(dist_process_group, [(r * size, (r + 1) * size) for r in range(world)])
    log_probs, entropy = fusegrad.linear_log_prob(
        hidden, weight, labels, logit_scale=1 / temperature, vocab_parallel=shards
    )
    assert entropy is not None
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, entropy
