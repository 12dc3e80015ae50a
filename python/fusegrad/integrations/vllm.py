"""vLLM: a teacher's top-k log-probabilities as the divergences take them. See docs/losses.md. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["top_log_probs"]


def top_log_probs(
    positions: Sequence[Any], *, k: int | None = None, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """What vLLM returns as ``prompt_logprobs`` or ``logprobs``, as a top-k teacher of :func:`fusegrad.jsd` and
    :func:`fusegrad.linear_jsd`.

    Args:
        positions: one a token: a mapping from a token's id to its log-probability, a number or what has it as
            ``logprob``; or None, which vLLM gives for a prompt's first token. Or such a sequence for each of several
            completions, which may be of different lengths.
        k: how many are kept of each position, the most probable ones; None: all. vLLM adds the token that was sampled
            to its k where it is none of them.
        device: of the result.

    Returns:
        ``(log_probs, indices)``, float32 and int64, ``[S, K]``, or ``[B, S, K]`` of several; positions that have fewer,
        and those behind the end of a shorter completion, are filled up with indices of -1. A row with nothing but those
        must have the label -100. The log-probabilities stand in descending order.

    Raises:
        ValueError: there are no positions; k is below 1; a log-probability is above 0 or NaN, as a probability or a
            logit is.
    """
    if k is not None and k < 1:
        raise ValueError(f"top_log_probs: k must be at least 1, but got {k}")
    several = any(not (position is None or isinstance(position, Mapping)) for position in positions)
    completions = [list(c) for c in positions] if several else [list(positions)]
    rows = [[_sorted(position)[:k] for position in completion] for completion in completions]
    length = max((len(completion) for completion in rows), default=0)
    width = max((len(row) for completion in rows for row in completion), default=0)
    if width == 0:
        raise ValueError("top_log_probs: positions must have log-probabilities, but got none")
    filled = [[row + [(0.0, -1)] * (width - len(row)) for row in c + [[]] * (length - len(c))] for c in rows]
    log_probs = torch.tensor([[[p for p, _ in row] for row in c] for c in filled], dtype=torch.float32, device=device)
    indices = torch.tensor([[[i for _, i in row] for row in c] for c in filled], dtype=torch.int64, device=device)
    return (log_probs, indices) if several else (log_probs[0], indices[0])


def _sorted(position: Mapping[int, Any] | None) -> list[tuple[float, int]]:
    found = [] if position is None else [(float(getattr(p, "logprob", p)), int(i)) for i, p in position.items()]
    for value, token in found:
        if not value <= 1e-3:  # rounding
            raise ValueError(f"top_log_probs: log-probabilities must be at most 0, but got {value} for token {token}")
    return sorted(found, key=lambda pair: -pair[0])
