"""jsd and linear_jsd over a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._sharding import is_dtensor
from .divergence_rows import Divergence, TopK, roundoff
from .gradients import Head, acc_of, check, chunks, of_kept_rows, product_type, refuse_double_backward
from .losses import (
    LinearOptions,
    autocast_input,
    may_overwrite,
    save_linear,
    scale_kept,
    wanted_gradients,
)
from .shards import VocabParallel, local_part, part_of, whole

_ops = torch.ops.fusegrad
_MIB = 1 << 20


class Jsd(torch.autograd.Function):
    """Computes the gradients for an upstream gradient of 1 in the forward and scales them in the backward. With
    `inplace` the student's lies in the student."""

    @staticmethod
    def forward(
        ctx: Any, loss: Divergence, needs_grad: tuple[bool, bool], inplace: bool, student: Tensor, teacher: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        x, y = student.detach(), teacher.detach()
        grads: list[Tensor | None] = [
            (x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)) if needs_grad[0] else None,
            torch.empty_like(y, memory_format=torch.contiguous_format) if needs_grad[1] else None,
        ]
        # Some ten tensors of a chunk's logits are held at a time.
        row_bytes = 10 * max(loss.shards.largest, 1) * loss.acc.itemsize
        budget = (32 if x.device.type == "cpu" else 512) * _MIB
        for part in chunks(x.shape[0], max(1, budget // row_bytes)):
            made = loss.run(x[part], y[part], part, needs_grad)
            for gradient, chunk in zip(grads, made, strict=True):
                if gradient is not None:
                    gradient[part] = chunk
        ctx.op, ctx.factor, ctx.hooks = "jsd", loss.factor, _ops.saved_tensor_hooks_active()
        ctx.kept = loss.kept
        # Those that get a gradient are saved for their place in the graph; after the write, for the version counter.
        ctx.save_for_backward(
            student if needs_grad[0] else None,
            teacher if needs_grad[1] else None,
            student if inplace else grads[0],
            grads[1],
        )
        return loss.reduced()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        each = None if grad_loss is None else of_kept_rows(grad_loss, ctx.kept)
        return None, None, None, *scale_kept(ctx, each)


def jsd(
    student: Tensor,
    teacher: Tensor,
    teacher_indices: Tensor | None,
    labels: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    tail_log_prob: Tensor | None,
    *,
    inplace: bool,
    shards: VocabParallel | None,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    op = "jsd"
    if is_dtensor(student):
        shards = part_of(op, "student", student, student.dim() - 1, shards)
    elif shards is None:
        raise ValueError(f"{op}: student must be a DTensor where the teacher is, but got a plain tensor")
    student = local_part(student)
    teacher = local_part(teacher) if teacher_indices is None else whole(teacher)
    indices, tail, labels, token_weight = map(whole, (teacher_indices, tail_log_prob, labels, token_weight))
    given = {
        "student": student,
        "teacher": teacher,
        "teacher_indices": indices,
        "tail_log_prob": tail,
        "labels": labels,
        "token_weight": token_weight,
        "normalizer": normalizer,
    }
    sharded = {"student": student.dim() - 1}
    if indices is None:
        sharded["teacher"] = teacher.dim() - 1
    different = check(op, shards, given, sharded, options)
    row_shape = student.shape[:-1]
    dtype = student.dtype
    if indices is None:
        dtype = torch.promote_types(dtype, teacher.dtype)
        y = teacher.to(dtype).reshape(row_shape.numel(), shards.size)
    else:
        y = teacher.to(acc_of(dtype)).reshape(row_shape.numel(), teacher.shape[-1])
        indices = indices.reshape(y.shape).long()
    cast = student.to(dtype)
    others = [teacher, indices, tail, labels, token_weight, normalizer]
    overwrite = cast is student and may_overwrite(inplace, student, others)
    x = cast.reshape(row_shape.numel(), shards.size)
    needs_grad = wanted_gradients(x, y)
    deferred = dtype == torch.float16 and any(needs_grad) and options["reduction"] in ("mean", "batchmean")
    flat = None if labels is None else labels.reshape(-1)
    top_k = None if indices is None else TopK(indices, tail, teacher.dtype, acc_of(dtype))
    stored = max(roundoff(student.dtype), roundoff(teacher.dtype))
    loss = Divergence(
        op,
        shards,
        dtype,
        top_k,
        flat,
        token_weight,
        normalizer,
        options,
        x.shape[0],
        x.device,
        deferred,
        stored,
        different,
    )
    loss.check_top_k(y)
    out = Jsd.apply(loss, needs_grad, overwrite, x, y)
    return out.reshape(row_shape) if loss.reduction == "none" else out, loss.values(out, row_shape)


class Teacher:
    """linear_jsd's: hidden states and their head, or a top-k teacher's log-probabilities."""

    def __init__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float) -> None:
        self.input, self.weight, self.bias, self.scale = input, weight, bias, scale

    def tensors(self) -> list[Tensor | None]:
        return [self.input, self.weight, self.bias]


def run_linear(
    loss: Divergence,
    linear: LinearOptions,
    teacher: Teacher,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs_grad: tuple[bool, bool, bool],
    upstream: Tensor | None = None,
    inplace: bool = False,
) -> list[Tensor | None]:
    # Some ten tensors of a chunk's logits are held at a time.
    count, accumulator = linear.plan(input, needs_grad[1], 10)
    most = min(count, input.shape[0])
    head = Head(weight, bias, linear.logit_scale, most, linear.dtype)
    input, weight = input.detach(), weight.detach()
    other = None
    if teacher.weight is not None:
        other = Head(teacher.weight, teacher.bias, teacher.scale, most, product_type(teacher.input))
    gradients = linear.gradients(head, input, weight, bias, needs_grad, accumulator, inplace)
    for part in chunks(input.shape[0], count):
        x = input[part].to(linear.dtype)
        z = head.logits(x)
        y = teacher.input[part] if other is None else other.logits(teacher.input[part].to(other.weight.dtype))
        gradient, _ = loss.run(z, y, part, (any(needs_grad), False), upstream, linear.logit_scale)
        if gradient is not None:
            z.copy_(gradient)
            gradients.add(x, z, part)
    return gradients.finish()


class LinearJsd(torch.autograd.Function):
    """Computes the gradients for an upstream gradient of 1 in the forward, chunk by chunk, and scales them in the
    backward. With `inplace` the input's gradient lies in the input."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Divergence,
        linear: LinearOptions,
        teacher: Teacher,
        needs_grad: tuple[bool, bool, bool],
        inplace: bool,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        made = run_linear(loss, linear, teacher, input, weight, bias, needs_grad, None, inplace)
        save_linear(ctx, "linear_jsd", loss.factor, inplace, (input, weight, bias), made)
        return loss.reduced()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        return (None,) * 5 + tuple(scale_kept(ctx, grad_loss))


class LinearJsdRecompute(torch.autograd.Function):
    """Keeps no gradients and computes the logits of both a second time in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Divergence,
        linear: LinearOptions,
        teacher: Teacher,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        run_linear(loss, linear, teacher, input, weight, bias, (False, False, False))
        ctx.loss, ctx.linear, ctx.scale = loss, linear, teacher.scale
        constants = [loss.labels, *(loss.top_k.tensors() if loss.top_k else ()), loss.token_weight]
        # Saved so that a change of one of them in place is an error.
        ctx.save_for_backward(input, weight, bias, *teacher.tensors(), *constants)
        return loss.reduced()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        input, weight, bias, *of_teacher = ctx.saved_tensors
        if grad_loss is None:
            return (None,) * 6
        with torch.no_grad():
            teacher = Teacher(of_teacher[0], of_teacher[1], of_teacher[2], ctx.scale)
            made = run_linear(ctx.loss, ctx.linear, teacher, input, weight, bias, ctx.needs_input_grad[3:], grad_loss)
        return None, None, None, *refuse_double_backward("linear_jsd", made, (input, weight, bias))


def linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor | None,
    teacher_indices: Tensor | None,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    labels: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    tail_log_prob: Tensor | None,
    *,
    inplace: bool,
    shards: VocabParallel | None,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    op = "linear_jsd"
    if options["vocab_size"] is not None:
        raise ValueError(
            f"{op}: vocab_size must be None with vocab_parallel, whose parts are the rows that count, but got "
            f"{options['vocab_size']}"
        )
    if is_dtensor(student_weight):
        shards = part_of(op, "student_weight", student_weight, 0, shards)
    elif shards is None:
        raise ValueError(f"{op}: student_weight must be a DTensor where another argument is, but got a plain tensor")
    if is_dtensor(teacher_weight):
        part_of(op, "teacher_weight", teacher_weight, 0, shards)
    student_weight, teacher_weight = local_part(student_weight), local_part(teacher_weight)
    student_bias, teacher_bias = local_part(student_bias), local_part(teacher_bias)
    student_input, teacher_input = whole(student_input), whole(teacher_input)
    indices, tail, labels, token_weight = map(whole, (teacher_indices, tail_log_prob, labels, token_weight))
    given = {
        "student_input": student_input,
        "student_weight": student_weight,
        "teacher_input": teacher_input,
        "teacher_weight": teacher_weight,
        "teacher_indices": indices,
        "tail_log_prob": tail,
        "student_bias": student_bias,
        "teacher_bias": teacher_bias,
        "labels": labels,
        "token_weight": token_weight,
        "normalizer": normalizer,
    }
    sharded = {"student_weight": 0, "teacher_weight": 0, "student_bias": 0, "teacher_bias": 0}
    different = check(op, shards, given, sharded, options)
    cast = autocast_input(student_input)
    linear = LinearOptions(
        shards,
        cast,
        student_weight,
        options["student_logit_scale"],
        options["accumulate_dtype"],
        options["workspace_mib"],
    )
    recompute = options["reduction"] == "none" or linear.mib == 0
    others = [value for name, value in given.items() if name != "student_input"]
    overwrite = cast is student_input and not recompute and may_overwrite(inplace, student_input, others)
    row_shape = cast.shape[:-1]
    count = row_shape.numel()
    x = cast.reshape(count, cast.shape[-1])
    if indices is None:
        rows = autocast_input(teacher_input).reshape(count, teacher_input.shape[-1])
    else:
        rows = teacher_input.to(acc_of(cast.dtype)).reshape(count, teacher_input.shape[-1])
        indices = indices.reshape(rows.shape).long()
    teacher = Teacher(rows, teacher_weight, teacher_bias, options["teacher_logit_scale"])
    needs_grad = wanted_gradients(x, student_weight, student_bias)
    deferred = cast.dtype == torch.float16 and any(needs_grad) and options["reduction"] in ("mean", "batchmean")
    flat = None if labels is None else labels.reshape(-1)
    loss = Divergence(
        op,
        shards,
        linear.dtype,
        None if indices is None else TopK(indices, tail, teacher_input.dtype, acc_of(cast.dtype)),
        flat,
        token_weight,
        normalizer,
        options,
        count,
        x.device,
        deferred and not recompute,
        different=different,
    )
    loss.check_top_k(rows)
    if recompute:
        out = LinearJsdRecompute.apply(loss, linear, teacher, x, student_weight, student_bias)
    else:
        out = LinearJsd.apply(loss, linear, teacher, needs_grad, overwrite, x, student_weight, student_bias)
    return out.reshape(row_shape) if loss.reduction == "none" else out, loss.values(out, row_shape)
