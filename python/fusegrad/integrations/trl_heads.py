"""TRL's heads: log-probabilities, entropies and the most probable tokens by :func:`fusegrad.linear_cross_entropy`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer import utils

import fusegrad

from . import trl_distillation
from ._words import warn
from .lazy_logits import default_workspace
from .transformers_record import record_of, record_of_twin
from .trl_distillation import calling_model

__all__ = ["check_known", "serve"]

_chunked: Any = getattr(utils, "_ChunkedLogProbFunction", None)
# What its forward takes, where its trainers are those that are served here.
_PARAMETERS = [
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
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
        record = record_of_twin(model)
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


def _unknown() -> str | None:
    """Why TRL's trainers are not served, if they are not."""
    known = _chunked is not None and list(inspect.signature(_chunked.forward).parameters)[1:] == _PARAMETERS
    return None if known else f"trl must be 1.16, but got {trl.__version__}, which computes elsewhere"


def check_known() -> None:
    """Raises:
    RuntimeError: TRL is of a version whose trainers compute elsewhere.
    """
    if (reason := _unknown()) is not None:
        raise RuntimeError(f"apply: {reason}")


@functools.cache
def _say(reason: str) -> None:
    warn(f"TRL's own head is used: {reason}")


def serve() -> None:
    """Puts fusegrad's in the places of TRL's Functions, for models that apply has changed."""
    if (reason := _unknown()) is not None:
        _say(reason)
    else:
        utils._ChunkedLogProbFunction = _LogProbs
    trl_distillation.serve()
