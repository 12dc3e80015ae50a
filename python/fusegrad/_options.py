"""The options by keyword of the losses that do not decide the type of the result, for type checkers: what the overloads
of the functions and of the modules take. The functions' own signatures have the defaults and are what is checked at run
time; a test holds the two together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict

from ._arguments import Device

if TYPE_CHECKING:
    from ._sharding import VocabParallel
    from .functional import LinearCrossEntropyOptions

Reduction = Literal["none", "mean", "sum"]
JSDReduction = Literal["none", "mean", "sum", "batchmean"]
Tail = Literal["bucket", "renormalize"]


class OfACall(TypedDict, total=False):
    """What changes from call to call: modules take these in ``forward`` or not at all."""

    token_weight: Tensor | None
    normalizer: float | Tensor | None
    vocab_parallel: VocabParallel | None


class Head(TypedDict, total=False):
    """Arguments of the linear layer that a module owns."""

    bias: bool
    device: Device | None
    dtype: torch.dtype | None


class CrossEntropy(TypedDict, total=False):
    z_loss: float
    softcap: float | None
    inplace: bool


class LinearCrossEntropy(CrossEntropy, total=False):
    weight: Tensor | None
    ignore_index: int | None
    reduction: Reduction
    label_smoothing: float
    logit_scale: float | Tensor
    accumulate_dtype: torch.dtype | None
    workspace_mib: int | None
    batch_invariant: bool
    options: LinearCrossEntropyOptions | None


class Divergence(TypedDict, total=False):
    beta: float
    temperature: float
    ignore_index: int | None
    reduction: JSDReduction
    tail: Tail
    soft_weight: float
    hard_weight: float
    inplace: bool


class JSD(Divergence, total=False):
    log_probs: bool


class LinearJSD(Divergence, total=False):
    teacher_temperature: float | None
    student_softcap: float | None
    teacher_softcap: float | None
    student_logit_scale: float
    teacher_logit_scale: float
    vocab_size: int | None
    accumulate_dtype: torch.dtype | None
    workspace_mib: int | None


class DivergenceCall(OfACall, total=False):
    labels: Tensor | None
    tail_log_prob: Tensor | None


class CrossEntropyFunction(CrossEntropy, OfACall, total=False):
    support: Tensor | None


class LinearCrossEntropyFunction(LinearCrossEntropy, OfACall, total=False):
    linear_bias: Tensor | None
    support: Tensor | None
    grad_weight_into: Tensor | None


class JSDFunction(JSD, DivergenceCall, total=False):
    pass


class LinearJSDFunction(LinearJSD, DivergenceCall, total=False):
    student_bias: Tensor | None
    teacher_bias: Tensor | None


class LinearCrossEntropyModule(LinearCrossEntropy, Head, total=False):
    out_features: Sequence[int]


class LinearJSDModule(LinearJSD, Head, total=False):
    pass
