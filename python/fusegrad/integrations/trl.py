"""TRL: the log-probabilities and divergences of its trainers' heads by fusegrad's losses. See docs/post_training.md.

TRL's trainers (SFT, GRPO, DPO, KTO, RLOO, ...) multiply hidden states by the head's weight themselves, and take
log-probabilities, entropies and whether a token is the most probable one of it; the model's loss is not asked.
:func:`apply`, and :func:`fusegrad.integrations.transformers.apply` where TRL is loaded, puts fusegrad's in that place
for the heads of models that they have changed; others stay TRL's.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
import trl
from torch import Tensor
from trl.trainer import utils

import fusegrad

from . import transformers, trl_distillation
from ._words import warn
from .lazy_logits import default_workspace
from .transformers import record_of
from .trl_distillation import calling_model

__all__ = ["apply", "remove", "serve"]

_Target = TypeVar("_Target")
_RECORD = "_fusegrad_trl"

_chunked: Any = getattr(utils, "_ChunkedLogProbFunction", None)
# The values that TRL may ask for and linear_cross_entropy gives.
_SERVED = {"log_probs", "entropy", "mean_logits", "is_top1"}


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
) -> tuple[Tensor | None, ...]:
    """As TRL's function: of hidden states ``[N, H]`` and a head ``[V, H]``, ``[N]`` each: log-probabilities of the
    targets and entropy, differentiable both, one that is not served, the mean of the logits, and whether the target is
    the most probable; None where not asked for.

    With a cap c, a scale s and a temperature t the logits are ``c * tanh(s * z / c) / t``: those of a cap c / t and a
    scale s / t.
    """
    model = calling_model("self")
    record = record_of(model)
    if record is None and not torch.is_grad_enabled():
        # A reference: its log-probabilities are compared with those of a model that apply has changed.
        record = transformers.record_of_twin(model)
    reason = None
    if "mean_logits" in outputs and final_logit_softcapping is not None:
        reason = "it asks for mean_logits of a softcap"
    if not _SERVED.issuperset(outputs):
        reason = f"it asks for {', '.join(outputs)}"
    if record is not None:
        record.served()
    if record is not None and reason is not None:
        record.not_fused(model, f"TRL's own head is used, because {reason}")
    if record is None or reason is not None:
        return _chunked.apply(
            hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        )
    given = record.options
    for name in ("z_loss", "label_smoothing"):
        if given[name] != 0.0:
            raise ValueError(
                f"apply: {name} must be 0 where TRL takes log-probabilities of the head, but got {given[name]}: its "
                "loss is its own"
            )
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    workspace = given["workspace_mib"]
    loss, aux = fusegrad.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="none",
        softcap=None if final_logit_softcapping is None else final_logit_softcapping / temperature,
        logit_scale=logit_scale / temperature,
        return_aux=fusegrad.Aux(entropy="entropy" in outputs, predicted_tokens="is_top1" in outputs),
        accumulate_dtype=given["accumulate_dtype"],
        workspace_mib=default_workspace(targets.numel(), hidden.device) if workspace is None else workspace,
    )
    top1 = None if aux.predicted_tokens is None else aux.predicted_tokens == targets
    mean = None
    if "mean_logits" in outputs:
        with torch.no_grad():  # the mean of the products is a product with the mean
            mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
            mean = (mean if bias is None else mean + bias.float().mean()) * (logit_scale / temperature)
    return -loss, aux.entropy, None, mean, top1


class _LogProbs:
    """In the place of TRL's Function, of which ``apply`` is called."""

    apply = staticmethod(_log_probs)


@functools.cache
def _say_elsewhere() -> None:
    warn(f"TRL's own head is used: trl must be 1.16, but got {trl.__version__}, which computes elsewhere")


def serve() -> None:
    """Puts fusegrad's in the places of TRL's Functions, for models that apply has changed."""
    if _chunked is None:
        _say_elsewhere()
    else:
        utils._ChunkedLogProbFunction = _LogProbs
    trl_distillation.serve()


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
        ValueError: it is changed already; its model was given another ``workspace_mib``. Nothing is changed then.
    """
    kind = target if isinstance(target, type) else type(target)
    if not hasattr(kind, "training_step"):
        raise TypeError(f"apply: the target must be a trainer of TRL or a class of them, but got {kind.__name__}")
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
