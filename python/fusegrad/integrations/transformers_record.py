"""What :func:`fusegrad.integrations.transformers.apply` leaves in a model or a class of models."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._words import warn
from .transformers_heads import head_of

__all__ = ["RECORD", "ModelRecord", "applied", "record_of", "record_of_twin"]

# The record's name there.
RECORD = "_fusegrad"
applied: weakref.WeakSet[Any] = weakref.WeakSet()


class ModelRecord:
    """What apply did to a model or a class.

    Attributes:
        options: what apply was given.
        forward: what stood in its own __dict__.
        heads: those whose class was changed.
        reached: in the forward that runs, something else than the head has served its loss.
        running: the model's forward by apply runs, which knows by itself whether it reached the head.
        pending: the backbone has run in training outside of it, and nothing has served a loss since.
        said: the user has been told that all logits are computed.
        of_trainer: a trainer's apply made it.
        without_gradients: the logits are lazy in forwards without gradients and labels too, as a teacher's.
    """

    def __init__(self, options: dict[str, Any], forward: Callable[..., Any] | None) -> None:
        self.options = options
        self.forward = forward
        self.heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.running = self.reached = self.pending = self.said = self.of_trainer = self.without_gradients = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRecord:
        # The copy's own forward is bound to the copy.
        return ModelRecord(self.options, copy.deepcopy(self.forward, memo))

    def __reduce__(self) -> Any:
        return type(None), ()  # the model in a file is the plain one: pickle finds its forward by name, in its class

    def for_training(self, training: bool) -> dict[str, Any]:
        """The options: what is added to the loss is for training alone."""
        return self.options if training else {**self.options, "z_loss": 0.0, "label_smoothing": 0.0}

    def served(self) -> None:
        """Something else than the head has computed the loss of a forward."""
        self.reached, self.pending = True, False

    def not_fused(self, model: Any, reason: str, may_raise: bool = True) -> None:
        """Says once that the logits of a model are computed, unless an option is lost by that.

        Raises:
            ValueError: z_loss or label_smoothing would not count.
        """
        what = f"linear_cross_entropy steps aside for {type(model).__name__}, all logits are computed: {reason}"
        lost = [name for name in ("z_loss", "label_smoothing") if self.options[name] != 0.0]
        if lost and may_raise:
            raise ValueError(
                f"apply: {lost[0]} must be 0 where it cannot count, but got {self.options[lost[0]]}: {what}"
            )
        if not (self.said or torch.compiler.is_compiling()):
            self.said = True
            warn(what)


def record_of(model: Any) -> ModelRecord | None:
    """What apply did to a model or to its class; None where it did nothing."""
    return getattr(model, RECORD, None)


def record_of_twin(model: Any) -> ModelRecord | None:
    """What apply did to a model whose head is of the shape and dtype of this one's, as a reference's is."""
    weight = None if model is None else head_of(model).weight
    for other in list(applied):
        head = head_of(other).weight if record_of(other) is not None else None
        if head is not None and weight is not None and (head.shape, head.dtype) == (weight.shape, weight.dtype):
            return record_of(other)
    return None
