"""Tracing where torch.compile is at work. A module of its own: the decorator imports torch._dynamo, which is slow."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .cache import Traced, trace

__all__ = ["trace_apart"]


@torch.compiler.disable(
    reason="tracing a score_mod or mask_mod: with fullgraph=True make a ScoreMod outside of the compiled function, by "
    "fusegrad.trace_score_mod(function) or fusegrad.trace_mask_mod(function), and hand that in"
)
def trace_apart(function: Callable, kind: str, device: torch.device | None) -> Traced:
    """As :func:`trace`, between two graphs."""
    return trace(function, kind, device)
