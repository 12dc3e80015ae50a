"""What transformers' Trainer does with lazy logits beside a model's own loss."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from .lazy_logits import LazyLogits, LazyLogitsTensor

__all__ = ["serve_label_smoothing"]

_smooth = LabelSmoother.__call__


@functools.wraps(_smooth)
def _smooth_lazily(
    self: LabelSmoother, model_output: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any
) -> Tensor:
    logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
    if not isinstance(logits, (LazyLogits, LazyLogitsTensor)):
        return _smooth(self, model_output, labels, shift_labels, **kwargs)
    if shift_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    items = kwargs.get("num_items_in_batch")
    loss = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=self.ignore_index,
        reduction="mean" if items is None else "sum",
        label_smoothing=self.epsilon,
    )
    return loss if items is None else loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def serve_label_smoothing() -> None:
    """The Trainer's label smoother takes lazy logits as they are; all others it takes as before."""
    LabelSmoother.__call__ = _smooth_lazily
