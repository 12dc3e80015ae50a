"""The losses as functions. Letters: N rows (tokens), V vocabulary, H hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload, runtime_checkable

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from . import _calls, _options
from ._arguments import checked
from ._known import known
from ._options import Reduction
from ._sharding import VocabParallel

__all__ = ["Aux", "AuxOutput", "LogProb", "cross_entropy", "linear_cross_entropy", "linear_log_prob"]

if TYPE_CHECKING:
    from typing_extensions import Unpack


@checked
@dataclass(frozen=True)
class Aux:
    """Per-row values that a loss can return beside itself (``return_aux=Aux(lse=True)``).

    They are one per row whatever the reduction, in the shape of a class-index target, float32 (float64 for float64
    inputs). At ignored rows ``predicted_tokens`` is -1, ``lse`` is the row's own and the others are 0.
    ``token_accuracy`` and ``token_log_prob`` need class indices.

    ``lse``, ``entropy`` and ``token_log_prob`` are differentiable, each by any upstream gradient, beside the loss and
    without it: the gradients are computed in the backward then, and ``inplace`` has no effect. A backward that reaches
    one of the other floats raises ``NotImplementedError``, so ``detach()`` what is logged.

    Attributes:
        lse: log(sum(exp(z))) of the row.
        z_loss: ``z_loss * lse**2``.
        token_accuracy: 1 where the largest logit is the target's, else 0.
        predicted_tokens: index of the largest logit (the first of equals), int64.
        entropy: of softmax(z), in nats.
        token_log_prob: ``z[target] - lse``.

    Raises:
        TypeError: a field is not True or False.
    """

    lse: bool = False
    z_loss: bool = False
    token_accuracy: bool = False
    predicted_tokens: bool = False
    entropy: bool = False
    token_log_prob: bool = False


@runtime_checkable
class LinearCrossEntropyOptions(Protocol):
    """What is read of a ``torch.nn.LinearCrossEntropyOptions``, which PyTorch has since 2.13."""

    @property
    def acc_dtype(self) -> torch.dtype | None: ...


class AuxOutput(NamedTuple):
    """The values that an :class:`Aux` asked for; the others are None."""

    lse: Tensor | None
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    entropy: Tensor | None
    token_log_prob: Tensor | None


class LogProb(NamedTuple):
    """What :func:`linear_log_prob` returns, one value a row each."""

    log_prob: Tensor
    entropy: Tensor | None


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    return_aux: None = None,
    **options: Unpack[_options.CrossEntropyFunction],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    return_aux: Aux,
    **options: Unpack[_options.CrossEntropyFunction],
) -> tuple[Tensor, AuxOutput]: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    return_aux: Aux | None,
    **options: Unpack[_options.CrossEntropyFunction],
) -> Tensor | tuple[Tensor, AuxOutput]: ...


@known()
@checked
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = None,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    support: Tensor | None = None,
    inplace: bool = False,
    vocab_parallel: VocabParallel | None = None,
    return_aux: Aux | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    r"""Cross entropy between logits and targets, a drop-in for :func:`torch.nn.functional.cross_entropy`.

    With logits z (after ``softcap``) and lse = log(sum(exp(z))), a row of target y costs ``lse - z[y]`` plus
    ``z_loss * lse**2``; class weights and smoothing as PyTorch defines them. Any number of backwards gives bitwise the
    same gradients. A second differentiation, forward mode, ``torch.func`` and ``torch.vmap``: see
    docs/design/transforms.md.

    Args:
        input: logits, ``[V]``, ``[N, V]`` or ``[N, V, d1, ...]``; float32, bfloat16, float16 (float64 on the CPU).
        target: class indices, int64, int32 or uint8, ``[]``, ``[N]`` or ``[N, d1, ...]``; or class probabilities of the
            input's shape, which get a gradient if they require it.
        weight: class weights ``[V]``, any floating dtype; gets no gradient.
        token_weight: scales each row's loss before the reduction, in the shape of a class-index target; gets no
            gradient.
        normalizer: replaces the divisor of reduction 'mean' (a number, or a 0-d tensor on the device): gradient
            accumulation and data parallelism divide by a count that one batch does not know.
        size_average, reduce: PyTorch's deprecated names of a reduction, with its warning: where one is given,
            ``reduction`` is what PyTorch makes of the two.
        ignore_index: rows with this class index count for nothing; None means -100. With class probabilities one that
            is at least 0 is an error, as it is PyTorch's.
        reduction: 'none', 'sum' or 'mean': the sum over kept rows / the sum of their class weights. The z-loss part is
            divided by the number of kept rows. No row kept: NaN, with gradients of zero.
        label_smoothing: in [0, 1].
        z_loss: coefficient of lse**2 (PaLM, arXiv:2204.02311, section 5).
        softcap: z = softcap * tanh(input / softcap) (Gemma 2, arXiv:2408.00118, section 2).
        support: the softmax is over these classes of each row alone, as over logits that are -inf elsewhere: int64 or
            int32, the shape of a class-index target and K. -1 pads. A row has a class at most once, and its target
            among them: otherwise an error on the CPU, and on the GPU, unless :func:`fusegrad.set_check_targets` asks
            for the check, NaN where the target is missing. Not with class probabilities, ``weight`` or
            ``label_smoothing``.
        inplace: permission to overwrite ``input`` with its gradient. Its version counter is raised, so PyTorch raises
            an error where another op has saved it for its own backward; a leaf, a view of one, an expanded or an
            overlapping tensor is refused before anything is written. Where versions cannot be checked (saved-tensor
            hooks, ``torch.compile``) or nothing is gained, the op works out of place.
        vocab_parallel: the logits are a part of the vocabulary's, and a group of processes has the others: see
            :class:`fusegrad.VocabParallel`. A DTensor that is sharded along its classes says so by itself.
        return_aux: also return these per-row values.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or one value a row for 'none'. With ``return_aux``,
        ``(loss, AuxOutput)``.

    Raises:
        ValueError, TypeError: ``cross_entropy: what must hold, but got <value>``.
        IndexError: a class index outside [0, V) on the CPU. On the GPU that row's loss and gradient are NaN, unless
            :func:`fusegrad.set_check_targets` asks for the check.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    loss, values = _calls.cross_entropy(
        input=input,
        target=target,
        weight=weight,
        token_weight=token_weight,
        normalizer=None if normalizer is None else _calls.normalizer_of("cross_entropy", normalizer, input),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        aux=0 if return_aux is None else _calls.aux_bits(return_aux, AuxOutput),
        support=support,
        inplace=inplace,
        shards=vocab_parallel,
    )
    return loss if return_aux is None else (loss, _calls.aux_of(values, return_aux, AuxOutput))


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: None = None,
    **arguments: Unpack[_options.LinearCrossEntropyFunction],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Aux,
    **arguments: Unpack[_options.LinearCrossEntropyFunction],
) -> tuple[Tensor, AuxOutput]: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_aux: Aux | None,
    **arguments: Unpack[_options.LinearCrossEntropyFunction],
) -> Tensor | tuple[Tensor, AuxOutput]: ...


@known()
@checked
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    support: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    inplace: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    workspace_mib: int | None = None,
    grad_weight_into: Tensor | None = None,
    batch_invariant: bool = False,
    vocab_parallel: VocabParallel | None = None,
    return_aux: Aux | None = None,
    options: LinearCrossEntropyOptions | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    r"""Cross entropy of ``input @ linear_weight.T + linear_bias`` without keeping its logits for the backward.

    z = softcap(logit_scale * (input @ linear_weight.T + linear_bias)). The gradients are computed in the forward, chunk
    by chunk, and scaled in the backward: any number of backwards gives bitwise the same. With reduction 'none', with a
    differentiable aux value and with ``workspace_mib=0`` they are computed in the backward instead, from the logits.
    These are kept where ``workspace_mib`` holds all of them (N * V of the input's dtype), and without a budget, as
    PyTorch keeps them; otherwise, and for bfloat16 and float16 on the CPU, they are computed a second time. A backward
    that keeps the graph takes as much again for their gradient.

    The products run in the input's dtype (autocast's under autocast, as :func:`torch.nn.functional.linear`), to which
    ``linear_weight`` and ``linear_bias`` are rounded; each gradient has its own tensor's dtype, so a float32 weight
    gets a float32 gradient, accumulated in float32, from bfloat16 products. On the CPU the products of bfloat16 and
    float16 run in float32.

    Args:
        input: hidden states ``[..., H]``; float32, bfloat16, float16 (float64 on the CPU).
        linear_weight: ``[V, H]``, the same dtypes.
        target: class indices ``[...]`` (int64, int32, uint8), or class probabilities ``[..., V]``: without gradient.
        linear_bias: ``[V]``.
        weight, ignore_index, reduction, label_smoothing, z_loss, softcap, token_weight, normalizer: as in
            :func:`cross_entropy`.
        logit_scale: a factor of the logits, before the softcap: a number, a 0-d tensor, or a tensor of one a row in the
            shape of a class-index target (a temperature t of each row is ``1 / t``). A tensor gets a gradient where it
            requires one; it must not be 0 there, nor, without a support, come with a softcap.
        support: as in :func:`cross_entropy`, ``[..., K]``. The logits at these columns are kept, whatever the budget.
        inplace: permission to overwrite ``input`` with its gradient, under the checks of :func:`cross_entropy`.
        accumulate_dtype: dtype in which the weight's gradient adds up over chunks: float32 (the default), or the
            weight's own, which saves 4 * V * H bytes and is less accurate (measured in docs/guarantees.md).
        workspace_mib: budget for temporaries in MiB, above the gradients. The default stays below what the same call
            takes under torch.compile; 0 takes the least there is, at one more product. The smallest chunks may exceed
            it.
        grad_weight_into: ``[V, H]``, float32 (float64 for float64), contiguous, without requiring grad: each backward
            adds the weight's gradient to it, in float32, and ``linear_weight`` itself, which must require grad, gets
            none. A second backward of a kept graph adds once more; so does every micro-batch, and nothing is rounded
            between them. Its version counter is raised. The gradients are computed in the backward then. It must share
            no memory with another argument. Under ``torch.compile`` the call breaks the graph; ``fullgraph=True`` and
            ``torch.export`` raise.
        batch_invariant: a row's loss, aux values and gradient of ``input`` are bitwise the same whatever other rows are
            in the call, however many there are, however ``workspace_mib`` cuts them and whichever outputs are asked
            for, with any number of threads and, over ``vocab_parallel``, of processes, whose parts must then be 1, 2,
            4, 8 or 16 of the vocabulary's sixteenths. The gradients are computed in the backward: docs/losses.md has
            the price. The scale of reduction 'mean' and the weight's gradient are of all rows. Not with class
            probabilities.
        vocab_parallel: ``linear_weight`` and ``linear_bias`` (and the columns of class probabilities) are a part of
            the vocabulary's, and a group of processes has the others: see :class:`fusegrad.VocabParallel`. A weight
            that is a DTensor of Shard(0) says so by itself. ``input``, which may then be a DTensor too, gets its whole
            gradient in every process.
        return_aux: also return these per-row values.
        options: a ``torch.nn.LinearCrossEntropyOptions`` (PyTorch >= 2.13), so that a call of
            ``torch.nn.functional.linear_cross_entropy`` runs unchanged. ``allow_retain_graph`` always holds here; the
            hints ``batch_chunk_size``, ``chunking_method`` and ``acc_policy`` are left to this op's own plan, which is
            as accurate as their best; ``acc_dtype`` is ``accumulate_dtype``.

    Returns:
        The loss, float32 (float64 for float64): 0-d, or one value a row for 'none'. With ``return_aux``,
        ``(loss, AuxOutput)``.

    Raises:
        ValueError, TypeError, IndexError: as :func:`cross_entropy`, under this op's name.
    """
    if options is not None:
        if accumulate_dtype is not None:
            raise ValueError(
                "linear_cross_entropy: accumulate_dtype and options must not both be given, "
                f"but got accumulate_dtype={accumulate_dtype} and options={options}"
            )
        known = ("allow_retain_graph", "batch_chunk_size", "chunking_method", "acc_policy", "acc_dtype")
        if any(not hasattr(options, name) for name in known):
            raise TypeError(
                "linear_cross_entropy: options must be a torch.nn.LinearCrossEntropyOptions or None, "
                f"but got {type(options).__name__}"
            )
        accumulate_dtype = options.acc_dtype
    of_rows = isinstance(logit_scale, Tensor)
    loss, values = _calls.linear_cross_entropy(
        input=input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        weight=weight,
        token_weight=token_weight,
        normalizer=None if normalizer is None else _calls.normalizer_of("linear_cross_entropy", normalizer, input),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        aux=0 if return_aux is None else _calls.aux_bits(return_aux, AuxOutput),
        logit_scale=1.0 if of_rows else logit_scale,
        accumulate_dtype=accumulate_dtype,
        workspace_mib=workspace_mib,
        row_scale=logit_scale if of_rows else None,
        support=support,
        grad_weight_into=grad_weight_into,
        batch_invariant=batch_invariant,
        inplace=inplace,
        shards=vocab_parallel,
    )
    return loss if return_aux is None else (loss, _calls.aux_of(values, return_aux, AuxOutput))


@checked
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    support: Tensor | None = None,
    workspace_mib: int | None = None,
    grad_weight_into: Tensor | None = None,
    batch_invariant: bool = False,
    vocab_parallel: VocabParallel | None = None,
    return_entropy: bool = True,
) -> LogProb:
    r"""Log-probabilities of tokens and the entropies of their distributions, from hidden states: both differentiable,
    in one pass.

    With z = softcap(logit_scale * (input @ linear_weight.T + linear_bias)) and p = softmax(z), a row has
    ``log p[target]`` and ``-sum(p * log(p))``, in nats. It is :func:`linear_cross_entropy` with reduction 'none' and
    those aux values; a policy divided by a temperature t has ``logit_scale=1 / t``. Arguments that are not listed
    here are those of :func:`linear_cross_entropy`.

    Args:
        input: hidden states ``[..., H]``.
        linear_weight: the head ``[V, H]``.
        target: class indices ``[...]``, int64, int32 or uint8.
        return_entropy: False: ``entropy`` is None and costs nothing.

    Returns:
        float32 (float64 for float64), one value a row; 0 at ignored rows.

    Raises:
        ValueError, TypeError, IndexError: as :func:`linear_cross_entropy`, under this function's name.
    """
    try:
        _, aux = linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            ignore_index=ignore_index,
            reduction="none",
            softcap=softcap,
            logit_scale=logit_scale,
            support=support,
            workspace_mib=workspace_mib,
            grad_weight_into=grad_weight_into,
            batch_invariant=batch_invariant,
            vocab_parallel=vocab_parallel,
            return_aux=Aux(token_log_prob=True, entropy=return_entropy),
        )
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not str(error).startswith("linear_cross_entropy"):
            raise
        raise type(error)(str(error).replace("linear_cross_entropy", "linear_log_prob", 1)) from error
    assert aux.token_log_prob is not None
    return LogProb(aux.token_log_prob, aux.entropy)
