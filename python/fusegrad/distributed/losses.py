"""cross_entropy and linear_cross_entropy over a sharded vocabulary; formulas in csrc/losses/row_kernels.h.

Each process reads its part of the logits, the processes tell each other a few numbers a row in one collective, and then
each has what the gradient of its part needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._sharding import is_dtensor
from .gradients import (
    ChunkGradients,
    Head,
    acc_of,
    check,
    chunks,
    of_kept_rows,
    product_type,
    refuse_double_backward,
    scale_saved,
)
from .rows import DIFFERENTIABLE, Rows, Upstream
from .shards import VocabParallel, local_part, part_of, whole
from .support import linear_logits, logits_of, loss_of

_ops = torch.ops.fusegrad


class CrossEntropy(torch.autograd.Function):
    """Keeps the logits and lse; the gradient is computed in the backward, or in the forward over the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, logits: Tensor, inplace: bool) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        everything = slice(0, rows.rows)
        rows.combine(rows.shards.gather(rows.statistics(logits, everything)), everything)
        if inplace:
            rows.gradient(logits, everything, Upstream(rows.unit()))
        ctx.inplace = inplace
        ctx.rows, kept = rows.pack()
        # Saved after the write, so that its version counter is the one that the write left.
        ctx.save_for_backward(logits, *kept)
        return rows.outputs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        upstream = Upstream(*grads)
        logits, *kept = ctx.saved_tensors
        rows: Rows = ctx.rows.unpack(kept)
        if all(gradient is None for gradient in upstream):
            return None, None, None
        if ctx.inplace:
            assert upstream.loss is not None
            each = of_kept_rows(upstream.loss, rows.kept)
            gradient = scale_saved(logits, each, rows.factor, hooks_were_active=False)
        else:
            with torch.no_grad():
                gradient = rows.gradient(logits, slice(0, rows.rows), upstream, inplace=False)
        return None, _ops.refuse_double_backward("cross_entropy", gradient, [logits]), None


class LinearOptions:
    def __init__(
        self,
        shards: VocabParallel,
        input: Tensor,
        weight: Tensor,
        logit_scale: float,
        accumulate_dtype: Any,
        mib: Any,
        grad_weight_into: Tensor | None = None,
    ) -> None:
        self.grad_weight_into = grad_weight_into
        self.shards, self.logit_scale, self.mib = shards, logit_scale, mib
        self.dtype = product_type(input)
        accumulate = accumulate_dtype or acc_of(self.dtype)
        self.lean = accumulate == self.dtype
        self.low_precision_result = grad_weight_into is None and weight.dtype != accumulate

    def plan(self, input: Tensor, weight_grad: bool, logits_per_row: int) -> tuple[int, bool]:
        """Rows of a chunk, the same in all processes; whether the weight's gradient needs an accumulator."""
        return _ops.plan_linear(
            input.shape[0],
            input.shape[1],
            self.shards.largest,
            self.dtype.itemsize,
            input.device.type == "cpu",
            weight_grad,
            self.low_precision_result,
            logits_per_row,
            self.mib,
        )

    def gradients(
        self,
        head: Head,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs_grad: tuple[bool, bool, bool],
        accumulator: bool,
        inplace: bool = False,
    ) -> ChunkGradients:
        given = input, weight, bias, needs_grad, accumulator
        return ChunkGradients(self.shards, head, *given, self.lean, inplace, self.grad_weight_into)


def run_linear(
    rows: Rows,
    linear: LinearOptions,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs_grad: tuple[bool, bool, bool],
    statistics: bool,
    upstream: Upstream | None = None,
    inplace: bool = False,
    row_scale: Tensor | None = None,
) -> list[Tensor | None]:
    """All chunks: the statistics of their logits where they are not known, then the gradients that are wanted."""
    count, accumulator = linear.plan(input, needs_grad[1], 1)
    head = Head(weight, bias, linear.logit_scale, min(count, input.shape[0]), linear.dtype)
    input, weight = input.detach(), weight.detach()
    gradients = linear.gradients(head, input, weight, bias, needs_grad, accumulator, inplace)
    for part in chunks(input.shape[0], count):
        x = input[part].to(linear.dtype)
        z = head.logits(x)
        if row_scale is not None:
            z.mul_(row_scale[part].unsqueeze(1))
        if statistics:
            rows.combine(linear.shards.gather(rows.statistics(z, part)), part)
        if any(needs_grad):
            assert upstream is not None
            rows.gradient(z, part, upstream, linear.logit_scale, row_scale=row_scale)
            gradients.add(x, z, part)
    return gradients.finish()


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients for an upstream gradient of 1 in the forward, chunk by chunk, and scales them in the
    backward. With `inplace` the input's gradient lies in the input."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Rows,
        linear: LinearOptions,
        needs_grad: tuple[bool, bool, bool],
        inplace: bool,
        row_scale: Tensor | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        made = run_linear(
            rows, linear, input, weight, bias, needs_grad, True, Upstream(rows.unit()), inplace, row_scale
        )
        save_linear(ctx, "linear_cross_entropy", rows.factor, inplace, (input, weight, bias), made)
        return rows.reduced()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, None, None, *scale_kept(ctx, grad_loss))


class LinearCrossEntropyRecompute(torch.autograd.Function):
    """Keeps one lse a row and computes the logits a second time in the backward: reduction 'none', a differentiable
    aux value, and where memory must be least."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Rows,
        linear: LinearOptions,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        factor = None if row_scale is None else row_scale.detach()
        run_linear(rows, linear, input, weight, bias, (False, False, False), True, row_scale=factor)
        ctx.linear = linear
        ctx.rows, kept = rows.pack()
        ctx.save_for_backward(input, weight, bias, row_scale, *kept)
        return rows.outputs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        upstream = Upstream(*grads)
        input, weight, bias, row_scale, *kept = ctx.saved_tensors
        if all(gradient is None for gradient in upstream):
            return None, None, None, None, None, None
        needs_grad = ctx.needs_input_grad[2:5]
        with torch.no_grad():
            rows = ctx.rows.unpack(kept)
            made = [None, None, None]
            if any(needs_grad):
                made = run_linear(
                    rows, ctx.linear, input, weight, bias, needs_grad, False, upstream, row_scale=row_scale
                )
            made.append(rows.gradient_of_scale(upstream, row_scale) if ctx.needs_input_grad[5] else None)
        return None, None, *refuse_double_backward("linear_cross_entropy", made, (input, weight, bias, row_scale))


def save_linear(
    ctx: Any, op: str, factor: Tensor | None, inplace: bool, inputs: tuple[Any, ...], made: list[Tensor | None]
) -> None:
    """Keeps the gradients that a linear loss made for an upstream gradient of 1."""
    ctx.op, ctx.factor = op, factor
    ctx.hooks = _ops.saved_tensor_hooks_active()
    # The inputs are saved for their place in the graph: a second differentiation must find its way to the error.
    ctx.save_for_backward(*inputs, inputs[0] if inplace else made[0], *made[1:])


def scale_kept(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    """The gradients that a forward kept behind as many inputs, for this upstream gradient. In ctx: `op`, `factor`,
    `hooks`."""
    saved = ctx.saved_tensors
    count = len(saved) // 2
    if grad_loss is None:
        return [None] * count
    scaled = (
        scale_saved(gradient, grad_loss, ctx.factor, ctx.hooks) if gradient is not None and wanted else None
        for gradient, wanted in zip(saved[count:], ctx.needs_input_grad[-count:], strict=True)
    )
    return refuse_double_backward(ctx.op, scaled, saved[:count])


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    enabled = torch.is_grad_enabled()
    return tuple(enabled and t is not None and t.requires_grad for t in tensors)


def may_overwrite(inplace: bool, tensor: Tensor, others: list[Any]) -> bool:
    return inplace and _ops.may_overwrite(tensor, [other for other in others if isinstance(other, Tensor)])


def refuse_target_gradient(op: str, target: Tensor) -> None:
    if target.requires_grad:
        raise ValueError(
            f"{op}: target must not require grad with vocab_parallel, since it gets no gradient there, but got a "
            "tensor that does: detach it"
        )


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    support: Tensor | None = None,
    *,
    inplace: bool,
    shards: VocabParallel | None,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    op = "cross_entropy"
    class_dim = 0 if input.dim() <= 1 else 1
    if is_dtensor(input):
        shards = part_of(op, "input", input, class_dim, shards)
        input = local_part(input)
        target = local_part(target) if target.is_floating_point() else whole(target)
    assert shards is not None
    weight, token_weight, target, support = whole(weight), whole(token_weight), whole(target), whole(support)
    given = {
        "input": input,
        "target": target,
        "weight": weight,
        "token_weight": token_weight,
        "normalizer": normalizer,
        "support": support,
    }
    sharded = {"input": class_dim}
    if target.is_floating_point():
        sharded["target"] = class_dim
    different = check(op, shards, given, sharded, options)
    refuse_target_gradient(op, target)
    row_shape = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    overwrite = (
        input.dim() <= 2
        and support is None
        and not options["aux"] & DIFFERENTIABLE
        and may_overwrite(inplace, input, [target, weight, token_weight, normalizer])
    )
    logits = input
    if input.dim() == 1:
        logits = input.unsqueeze(0)
    elif input.dim() > 2:
        logits = input.movedim(1, -1).reshape(row_shape.numel(), shards.size)
    if support is not None:
        support = support.long().reshape(-1, support.shape[-1])
        z = logits_of(logits, support, shards)
        return loss_of(op, z, support, target.reshape(-1), shards, row_shape, given, options, different)
    if target.is_floating_point():
        target = target.movedim(class_dim, -1).reshape(row_shape.numel(), shards.size)
    else:
        target = target.reshape(-1)
    rows = Rows(
        op, shards, target, weight, token_weight, normalizer, options, input.dtype, input.dtype, overwrite, different
    )
    out = CrossEntropy.apply(rows, logits, overwrite)
    loss = out[0].reshape(row_shape) if rows.reduction == "none" else out[0]
    return loss, rows.values(loss, out, row_shape)


def autocast_input(input: Tensor) -> Tensor:
    """Under autocast only the input is cast here: the op itself rounds the weight, so that a float32 weight gets its
    gradient in float32."""
    if input.dtype == torch.float64 or not torch.is_autocast_enabled(input.device.type):
        return input
    return input.to(torch.get_autocast_dtype(input.device.type))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    row_scale: Tensor | None = None,
    support: Tensor | None = None,
    grad_weight_into: Tensor | None = None,
    *,
    inplace: bool,
    shards: VocabParallel | None,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    op = "linear_cross_entropy"
    if options["batch_invariant"]:
        raise ValueError(f"{op}: batch_invariant must be False over a sharded vocabulary, but got True")
    if is_dtensor(linear_weight):
        shards = part_of(op, "linear_weight", linear_weight, 0, shards)
    elif shards is None:
        raise ValueError(
            f"{op}: linear_weight must be a DTensor where another argument is, or vocab_parallel be given, "
            "but got a plain tensor"
        )
    linear_weight, linear_bias = local_part(linear_weight), local_part(linear_bias)
    grad_weight_into = local_part(grad_weight_into)
    target = local_part(target) if target.is_floating_point() else whole(target)
    input, weight, token_weight, support = whole(input), whole(weight), whole(token_weight), whole(support)
    given = {
        "input": input,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": weight,
        "token_weight": token_weight,
        "normalizer": normalizer,
        "row_scale": row_scale,
        "support": support,
        "grad_weight_into": grad_weight_into,
    }
    sharded = {"linear_weight": 0, "linear_bias": 0, "grad_weight_into": 0}
    if target.is_floating_point():
        sharded["target"] = target.dim() - 1

    def check_own() -> None:
        if grad_weight_into is None:
            return
        others = [value for value in given.values() if isinstance(value, Tensor) and value is not grad_weight_into]
        _ops.check_may_add_to(op, "grad_weight_into", grad_weight_into, others)
        if torch.is_grad_enabled() and not linear_weight.requires_grad:
            raise ValueError(f"{op}: linear_weight must require grad with grad_weight_into, but got one that does not")

    different = check(op, shards, given, sharded, options, check_own)
    refuse_target_gradient(op, target)
    if row_scale is not None:
        row_scale = row_scale.to(acc_of(input.dtype)).expand(input.shape[:-1]).reshape(-1)
    cast = autocast_input(input)
    linear = LinearOptions(
        shards,
        cast,
        linear_weight,
        options["logit_scale"],
        options["accumulate_dtype"],
        options["workspace_mib"],
        grad_weight_into,
    )
    scale_gradient = wanted_gradients(row_scale)[0]
    recompute = (
        options["reduction"] == "none"
        or scale_gradient
        or bool(options["aux"] & DIFFERENTIABLE)
        or linear.mib == 0
        or grad_weight_into is not None
    )
    overwrite = (
        cast is input
        and support is None
        and not recompute
        and may_overwrite(inplace, input, [linear_weight, linear_bias, target, weight, token_weight, normalizer])
    )
    row_shape = input.shape[:-1]
    matrix = cast.reshape(row_shape.numel(), input.shape[-1])
    target = target.reshape(row_shape.numel(), shards.size) if target.is_floating_point() else target.reshape(-1)
    if support is not None:
        support = support.long().reshape(-1, support.shape[-1])
        z = linear_logits(linear, support, matrix, linear_weight, linear_bias, row_scale)
        return loss_of(op, z, support, target, shards, row_shape, given, options, different)
    needs_grad = wanted_gradients(matrix, linear_weight, linear_bias)
    rows = Rows(
        op,
        shards,
        target,
        weight,
        token_weight,
        normalizer,
        options,
        cast.dtype,
        linear.dtype,
        any(needs_grad) and not recompute,
        different,
        scale_gradient,
    )
    if recompute:
        out = LinearCrossEntropyRecompute.apply(rows, linear, matrix, linear_weight, linear_bias, row_scale)
    else:
        out = (
            LinearCrossEntropy.apply(
                rows, linear, needs_grad, overwrite, row_scale, matrix, linear_weight, linear_bias
            ),
        )
    loss = out[0].reshape(row_shape) if rows.reduction == "none" else out[0]
    return loss, rows.values(loss, out, row_shape)
