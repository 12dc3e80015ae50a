"""TRL's distillation: the divergence between two heads by :func:`fusegrad.linear_jsd`. See docs/losses.md."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

import fusegrad
from fusegrad._eager import eager_only

from ._words import warn
from .lazy_logits import LazyLogits, LazyLogitsTensor, default_workspace, lazy_of
from .transformers_record import record_of

__all__ = ["serve"]


@eager_only
def calling_model(name: str) -> Any:
    """The model that the innermost caller has under a name; None where none has one. TRL gives its Functions the head's
    weight alone, and that of a sharded head, or of an adapter, says nothing of its model."""
    frame = sys._getframe(1)
    for _ in range(12):
        model = frame.f_locals.get(name)
        if isinstance(model, torch.nn.Module) and hasattr(model, "get_output_embeddings"):
            return model
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _in_autocast(hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden


class _Divergence:
    """In the place of TRL's ``ChunkedDivergenceFunction``, of which ``apply`` is called."""

    theirs: Any = None
    gkd: Any = None

    @classmethod
    def apply(cls, *arguments: Any) -> tuple[Tensor, Tensor]:
        """The divergence of each row, and the student's entropy, which has no gradient."""
        record = record_of(calling_model("unwrapped_student"))
        if record is None:
            return cls.theirs.apply(*arguments)
        record.served()
        return _divergence(record.options, *arguments)


def _divergence(
    given: dict[str, Any],
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    student_hidden, teacher_hidden = _in_autocast(student_hidden), _in_autocast(teacher_hidden)
    workspace = given["workspace_mib"]
    workspace = default_workspace(student_hidden.shape[0], student_hidden.device) if workspace is None else workspace
    divergence = fusegrad.linear_jsd(
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight.detach(),
        student_bias=student_bias,
        teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
        beta=beta,
        temperature=temperature,
        student_logit_scale=student_logit_scale,
        teacher_logit_scale=teacher_logit_scale,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        reduction="none",
        accumulate_dtype=given["accumulate_dtype"],
        workspace_mib=workspace,
    )
    with torch.no_grad():
        any_class = torch.zeros(student_hidden.shape[0], dtype=torch.int64, device=student_hidden.device)
        _, aux = fusegrad.linear_cross_entropy(
            student_hidden,
            student_weight,
            any_class,
            linear_bias=student_bias,
            logit_scale=student_logit_scale / temperature,
            softcap=None if student_softcap is None else student_softcap / temperature,
            reduction="none",
            return_aux=fusegrad.Aux(entropy=True),
            workspace_mib=workspace,
        )
    return divergence, aux.entropy


def _lazy(logits: Any) -> LazyLogits | None:
    lazy = lazy_of(logits) if isinstance(logits, (LazyLogits, LazyLogitsTensor)) else None
    return None if lazy is None or lazy.decided() else lazy


def _generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """As GKD's function; of lazy logits by their heads."""
    student, teacher = _lazy(student_logits), _lazy(teacher_logits)
    if student is None or teacher is None or reduction == "none" or labels is None:
        return _Divergence.gkd(student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch)
    loss = student.divergence(
        teacher,
        labels=labels,
        beta=beta,
        temperature=temperature,
        reduction="sum" if num_items_in_batch is not None else reduction,
    )
    if num_items_in_batch is None:
        return loss
    items = num_items_in_batch
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def _takes(function: Any, parameters: int) -> bool:
    """Whether it is the one whose place is taken: of another version's the arguments are others."""
    known = callable(function) and len(inspect.signature(function).parameters) == parameters
    if not known:
        warn(f"TRL's own divergences are used: trl must be 1.16, but got {version('trl')}, which computes elsewhere")
    return known


def serve() -> None:
    """Puts fusegrad's in the places of TRL's, where they are loaded, for models that apply has changed."""
    distillation = sys.modules.get("trl.trainer.distillation_trainer")
    theirs = getattr(distillation, "ChunkedDivergenceFunction", None)
    if theirs is not None and theirs is not _Divergence and _takes(theirs.forward, 13):
        _Divergence.theirs = theirs
        distillation.ChunkedDivergenceFunction = _Divergence  # type: ignore[union-attr]
    gkd = getattr(sys.modules.get("trl.experimental.gkd.gkd_trainer"), "GKDTrainer", None)
    loss = getattr(gkd, "generalized_jsd_loss", None)
    if gkd is not None and loss is not _generalized_jsd_loss and _takes(loss, 7):
        _Divergence.gkd = loss
        gkd.generalized_jsd_loss = staticmethod(_generalized_jsd_loss)
