"""A softmax over a few columns of each row where the vocabulary is sharded: each process has the logits of those
columns that lie in its part, and the sum of all parts is the same [N, K] everywhere. The rest is the unsharded op's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .gradients import Head, acc_of, chunks, refuse_double_backward
from .rows import LSE, PREDICTED
from .shards import VocabParallel

if TYPE_CHECKING:
    from .losses import LinearOptions

_ops = torch.ops.fusegrad


class _Sum(torch.autograd.Function):
    """The sum over the processes, each of which then does the same with it: its gradient is each summand's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shards: VocabParallel) -> Tensor:
        return _summed(values.clone(), shards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(values: Tensor, shards: VocabParallel) -> Tensor:
    work = shards.start_sum(values)
    if work is not None:
        work.wait()
    return values


class _LinearLogits(torch.autograd.Function):
    """The logits of a head at `columns` [N, K] of its part, -1 for those of other parts, summed over the processes."""

    @staticmethod
    def forward(
        ctx: Any, linear: LinearOptions, columns: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.linear = linear
        ctx.save_for_backward(columns, input, weight, bias)
        count, _ = linear.plan(input, False, 1)
        head = Head(weight, bias, 1.0, min(count, input.shape[0]), linear.dtype)
        out = torch.zeros(columns.shape, dtype=acc_of(linear.dtype), device=input.device)
        if weight.shape[0] != 0:
            for part in chunks(input.shape[0], count):
                z = head.logits(input[part].to(linear.dtype))
                there = columns[part]
                out[part] = torch.where(there >= 0, z.gather(1, there.clamp(min=0)).to(out.dtype), 0)
        return _summed(out, linear.shards)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None, None, None
        columns, input, weight, bias = ctx.saved_tensors
        linear = ctx.linear
        needs_grad = ctx.needs_input_grad[2:]
        with torch.no_grad():
            count, accumulator = linear.plan(input, needs_grad[1], 1)
            head = Head(weight, bias, 1.0, 0, linear.dtype)
            gradients = linear.gradients(head, input, weight, bias, needs_grad, accumulator)
            size = weight.shape[0]
            # What lies in another part goes to a column behind the last.
            columns = torch.where(columns < 0, size, columns)
            align = 16 // linear.dtype.itemsize
            padded = -(-(size + 1) // align) * align
            buffer = input.new_empty(min(count, input.shape[0]), padded, dtype=linear.dtype)
            for part in chunks(input.shape[0], count):
                x = input[part].to(linear.dtype)
                z = buffer[: x.shape[0]].zero_()
                z.scatter_(1, columns[part], gradient[part].to(linear.dtype))
                gradients.add(x, z[:, :size], part)
            made = gradients.finish()
        return None, None, *refuse_double_backward("linear_cross_entropy", made, (input, weight, bias))


def _columns(support: Tensor, shards: VocabParallel) -> Tensor:
    """Where the ids stand in this part; -1 for those of other parts."""
    return torch.where((support >= shards.start) & (support < shards.stop), support - shards.start, -1)


def logits_of(logits: Tensor, support: Tensor, shards: VocabParallel) -> Tensor:
    """Of this part's logits [N, stop - start], at `support` [N, K] of the whole vocabulary."""
    acc = acc_of(logits.dtype)
    columns = _columns(support, shards)
    if shards.size == 0:
        return _Sum.apply(torch.zeros(support.shape, dtype=acc, device=logits.device) + logits.sum(), shards)
    found = logits.gather(1, columns.clamp(min=0)).to(acc)
    return _Sum.apply(torch.where(columns >= 0, found, 0), shards)


def linear_logits(
    linear: LinearOptions,
    support: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
) -> Tensor:
    """Of this part of a head, with the factors of its logits."""
    z = _LinearLogits.apply(linear, _columns(support, linear.shards), input, weight, bias)
    if linear.logit_scale != 1.0:
        z = z * linear.logit_scale
    return z if row_scale is None else z * row_scale.unsqueeze(1)


def loss_of(
    op: str,
    logits: Tensor,
    support: Tensor,
    target: Tensor,
    shards: VocabParallel,
    row_shape: torch.Size,
    given: dict[str, Any],
    options: dict[str, Any],
    different: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of the support's logits [N, K], before the softcap; `given` has the tensors of a row and of a call,
    `different` is what check() returned."""
    z = logits if different is None else torch.where(different, torch.nan, logits)
    aux, ignore_index = options["aux"], -100 if options["ignore_index"] is None else options["ignore_index"]
    if options["softcap"] is not None:
        # The softcap's slope at NaN, times an ignored row's gradient of 0, would be NaN.
        if not aux & LSE:
            z = z.masked_fill((target == ignore_index).unsqueeze(1), 0)
        z = (z / options["softcap"]).tanh() * options["softcap"]
    z = z.masked_fill(support < 0, -torch.inf)
    position = _ops.support_positions(target, support, shards.vocab, ignore_index)
    token_weight = given["token_weight"]
    loss, values = _ops.cross_entropy(
        z,
        position,
        None,
        None if token_weight is None else token_weight.reshape(-1),
        given["normalizer"],
        None,
        options["reduction"],
        0.0,
        options["z_loss"],
        None,
        aux,
    )
    made = []
    for bit, value in zip((b for b in (1 << i for i in range(6)) if aux & b), values, strict=True):
        if bit == PREDICTED:
            token = support.gather(1, value.clamp(min=0).unsqueeze(1)).squeeze(1)
            value = torch.where(value < 0, -1, token)
        made.append(value.reshape(row_shape))
    return loss.reshape(row_shape) if options["reduction"] == "none" else loss, made
