"""TRL: the log-probabilities of its trainers' heads by linear cross entropy. See docs/post_training.md.

TRL's trainers (SFT, GRPO, DPO, KTO, RLOO, ...) multiply hidden states by the head's weight themselves, and take
log-probabilities, entropies and whether a token is the most probable one of it; the model's loss is not asked.
Importing this module puts fusegrad's in that place for the heads of models that :func:`apply` or
:func:`fusegrad.integrations.transformers.apply` has changed; others stay TRL's.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, TypeVar

import torch
import trl
from torch import Tensor
from trl.trainer import utils

import fusegrad

from . import transformers
from .transformers import options_of_head

__all__ = ["apply", "remove"]

_Target = TypeVar("_Target")
_RECORD = "_fusegrad_trl"

_chunked: Any = getattr(utils, "_ChunkedLogProbFunction", None)
# The values that TRL may ask for and linear_cross_entropy gives.
_SERVED = {"log_probs", "entropy", "mean_logits", "is_top1"}


def _step_aside(reason: str) -> None:
    warnings.warn(f"fusegrad: linear_cross_entropy steps aside, TRL's own head is used: {reason}", stacklevel=3)


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

    With a cap c, a scale s and a temperature t the logits are ``c * tanh(s * z / c) / t``.
    """
    given = options_of_head(weight)
    if given is not None and "mean_logits" in outputs and final_logit_softcapping is not None:
        _step_aside("it asks for mean_logits of a softcap")
        given = None
    if given is not None and not _SERVED.issuperset(outputs):
        _step_aside(f"it asks for {', '.join(outputs)}")
        given = None
    if given is None:
        return _chunked.apply(
            hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        )
    for name in ("z_loss", "label_smoothing"):
        if given[name] != 0.0:
            raise ValueError(
                f"apply: {name} must be 0 where TRL takes log-probabilities of the head, but got {given[name]}: its "
                "loss is its own"
            )
    if final_logit_softcapping is not None and temperature != 1.0:
        raise ValueError(
            "apply: a softcap must come with a temperature of 1 where TRL takes log-probabilities of the head, but "
            f"got {temperature}"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    loss, aux = fusegrad.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="none",
        softcap=final_logit_softcapping,
        logit_scale=logit_scale / temperature,
        return_aux=fusegrad.Aux(entropy="entropy" in outputs, predicted_tokens="is_top1" in outputs),
        accumulate_dtype=given["accumulate_dtype"],
        workspace_mib=given["workspace_mib"],
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


if _chunked is None:
    _step_aside(f"trl must be 1.16, but got {trl.__version__}, which computes log-probabilities elsewhere")
else:
    utils._ChunkedLogProbFunction = _LogProbs


def _models(trainer: Any) -> list[Any]:
    """The models of a trainer whose heads it multiplies by: its own and the reference's."""
    found = [getattr(trainer, name, None) for name in ("model", "ref_model")]
    unwrap = trainer.accelerator.unwrap_model
    return [unwrap(model) for model in found if model is not None]


def apply(target: _Target, *, workspace_mib: int | None = None) -> _Target:
    """Lets a TRL trainer take its log-probabilities and entropies from hidden states, without logits.

    Args:
        target: a trainer (SFT, GRPO, DPO, KTO, RLOO), or a class of trainers: then all that are made of it later. Their
            models are changed as by :func:`fusegrad.integrations.transformers.apply`.
        workspace_mib: as in :func:`fusegrad.linear_cross_entropy`.

    Returns:
        The target, changed.

    Raises:
        TypeError: the target is neither.
        ValueError: it is changed already, or so is its model.
    """
    kind = target if isinstance(target, type) else type(target)
    if not hasattr(kind, "training_step"):
        raise TypeError(f"apply: the target must be a trainer of TRL or a class of them, but got {kind.__name__}")
    if _RECORD in vars(target):
        raise ValueError(
            f"apply: the target must not be changed already, but got such a {kind.__name__}: remove it first"
        )
    if not isinstance(target, type):
        models = _models(target)
        for model in models:
            transformers.apply(model, workspace_mib=workspace_mib)
        setattr(target, _RECORD, models)
        return target
    made = target.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
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
            transformers.remove(model)
    delattr(target, _RECORD)
    return target
