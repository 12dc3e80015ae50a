"""TRL: the log-probabilities and divergences of its trainers' heads by fusegrad's losses. See docs/losses.md.

TRL's trainers (SFT, GRPO, DPO, KTO, RLOO, ...) multiply hidden states by the head's weight themselves, and take
log-probabilities, entropies and whether a token is the most probable one of it; the model's loss is not asked.
:func:`apply`, and :func:`fusegrad.integrations.transformers.apply` where TRL is loaded, puts fusegrad's in that place
for the heads of models that they have changed; others stay TRL's.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from . import transformers
from .transformers_record import record_of
from .trl_heads import check_known, serve

__all__ = ["apply", "remove", "serve"]

_Target = TypeVar("_Target")
_RECORD = "_fusegrad_trl"


def _models(trainer: Any) -> list[Any]:
    """The models of a trainer whose heads it multiplies by: its own, the reference's and the teacher's."""
    found = [getattr(trainer, name, None) for name in ("model", "ref_model", "teacher_model")]
    unwrap = trainer.accelerator.unwrap_model
    return [unwrap(model) for model in found if model is not None]


def _change(models: list[Any], teacher: Any, workspace_mib: int | None) -> list[Any]:
    """Applies to the models that nobody has applied to, all of them or none."""
    changed: list[Any] = []
    try:
        for model in models:
            record = record_of(model)
            if record is None:
                transformers.apply(model, workspace_mib=workspace_mib)
                changed.append(model)
                record = record_of(model)
                assert record is not None
                record.of_trainer, record.without_gradients = True, model is teacher
            elif workspace_mib not in (None, record.options["workspace_mib"]):
                raise ValueError(
                    f"apply: workspace_mib must be what the trainer's model was given before, "
                    f"{record.options['workspace_mib']}, but got {workspace_mib}"
                )
    except Exception:
        for model in changed:
            transformers.remove(model)
        raise
    return changed


def apply(target: _Target, *, workspace_mib: int | None = None) -> _Target:
    """Lets a TRL trainer take its log-probabilities, entropies and divergences from hidden states, without logits.

    Args:
        target: a trainer (SFT, GRPO, DPO, KTO, RLOO, Distillation, GKD), or a class of trainers: then all that are made
            of it later. Their models are changed as by :func:`fusegrad.integrations.transformers.apply`, before or
            after which this may be called.
        workspace_mib: as in :func:`fusegrad.linear_cross_entropy`.

    Returns:
        The target, changed.

    Raises:
        TypeError: the target is neither.
        RuntimeError: TRL is of a version whose trainers compute elsewhere.
        ValueError: it is changed already; its model was given another ``workspace_mib``. Nothing is changed then.
    """
    kind = target if isinstance(target, type) else type(target)
    if not hasattr(kind, "training_step"):
        raise TypeError(f"apply: the target must be a trainer of TRL or a class of them, but got {kind.__name__}")
    check_known()
    if _RECORD in vars(target):
        raise ValueError(
            f"apply: the target must not be changed already, but got such a {kind.__name__}: remove it first"
        )
    if not isinstance(target, type):
        teacher = getattr(target, "teacher_model", None)
        teacher = None if teacher is None else target.accelerator.unwrap_model(teacher)  # type: ignore[attr-defined]
        setattr(target, _RECORD, _change(_models(target), teacher, workspace_mib))
        return target
    made = target.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if _RECORD not in vars(self):  # as a class that this one derives from has already done
            apply(self, workspace_mib=workspace_mib)

    setattr(target, _RECORD, made)
    target.__init__ = init  # type: ignore[misc]
    return target


def remove(target: _Target) -> _Target:
    """Undoes :func:`apply` of the same target; trainers that a class has made since stay changed.

    Returns:
        The target, as it was.

    Raises:
        ValueError: apply has not changed it.
    """
    record = vars(target).get(_RECORD)
    if record is None:
        raise ValueError(f"remove: the target must be changed by apply, but got {target}")
    if isinstance(target, type):
        target.__init__ = record  # type: ignore[misc]
    else:
        for model in record:
            of_model = record_of(model)
            if of_model is not None and of_model.of_trainer:
                transformers.remove(model)
    delattr(target, _RECORD)
    return target
