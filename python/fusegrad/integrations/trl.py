"""TRL: the log-probabilities of SFTTrainer's own head by linear cross entropy. See docs/transformers.md.

SFTTrainer multiplies hidden states by the head's weight itself, and takes log-probabilities, entropies and whether a
token is the most probable one of it; the model's loss is not asked. Importing this module puts fusegrad's in that place
for the heads of models that :func:`fusegrad.integrations.transformers.apply` has changed; others stay TRL's.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer import utils

import fusegrad

from .transformers import options_of_head

__all__: list[str] = []

_chunked: Any = getattr(utils, "_ChunkedLogProbFunction", None)
# The values that TRL may ask for and linear_cross_entropy gives.
_SERVED = {"log_probs", "entropy", "is_top1"}


def _step_aside(reason: str) -> None:
    warnings.warn(f"fusegrad: linear_cross_entropy steps aside, TRL's own head is used: {reason}", stacklevel=3)


class _NoGradient(torch.autograd.Function):
    """TRL's entropy has a gradient; where one is asked for, this raises an error."""

    @staticmethod
    def forward(ctx: Any, entropy: Tensor, log_probs: Tensor) -> Tensor:
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError("linear_cross_entropy: entropy must not be differentiated, but a backward reached it")


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
    targets, entropy, two that are not served, and whether the target is the most probable; None where not asked for.

    With a cap c, a scale s and a temperature t the logits are ``c * tanh(s * z / c) / t``.
    """
    given = options_of_head(weight)
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
    entropy = None if aux.entropy is None else _NoGradient.apply(aux.entropy, loss)
    return -loss, entropy, None, None, top1


class _LogProbs:
    """In the place of TRL's Function, of which ``apply`` is called."""

    apply = staticmethod(_log_probs)


if _chunked is None:
    _step_aside(f"trl must be 1.16, but got {trl.__version__}, which computes log-probabilities elsewhere")
else:
    utils._ChunkedLogProbFunction = _LogProbs
