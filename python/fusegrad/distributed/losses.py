"""cross_entropy and linear_cross_entropy over a sharded vocabulary; formulas in csrc/rows/row_kernels.h.

Each process reads its part of the logits, the processes tell each other a few numbers a row in one collective, and then
each has what the gradient of its part needs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler

from .gradients import ChunkGradients, Head, acc_of, check, check_index, chunks, product_type, scale_saved
from .shards import VocabParallel, is_dtensor, local_part, part_of, whole

_ops = torch.ops.fusegrad
_LSE, _Z_LOSS, _ACCURACY, _PREDICTED, _ENTROPY, _LOG_PROB = (1 << bit for bit in range(6))


class Rows:
    """The target and the options of one call, and what its forward finds out about each row."""

    def __init__(
        self,
        op: str,
        shards: VocabParallel,
        target: Tensor,
        weight: Tensor | None,
        token_weight: Tensor | None,
        normalizer: Tensor | None,
        options: dict[str, Any],
        input_dtype: torch.dtype,
        logits_dtype: torch.dtype,
        gradient_stored: bool,
        hidden: Tensor | None = None,
    ) -> None:
        """`target`: [N] indices, or [N, stop - start] probabilities. `gradient_stored`: the forward makes the gradient
        for an upstream gradient of 1. `hidden`: a linear loss's input."""
        self.op = op
        self.shards = shards
        self.names: list[str] = []
        self.acc = acc = acc_of(logits_dtype)
        self.aux = int(options["aux"])
        self.smoothing = float(options["label_smoothing"])
        self.z_loss = float(options["z_loss"])
        self.softcap = float(options["softcap"] or 0.0)
        self.ignore_index = -100 if options["ignore_index"] is None else int(options["ignore_index"])
        self.reduction = options["reduction"]
        self.probabilities = target.is_floating_point()
        self.weight = None if weight is None else weight.to(acc).contiguous()
        self.token_weight = None if token_weight is None else token_weight.reshape(-1).to(acc)
        self.dense = self.probabilities or (weight is not None and self.smoothing > 0)
        self.soft = self.probabilities or self.smoothing > 0
        rows, device = target.shape[0], target.device
        self.rows = rows
        self.key = row_key(None if self.probabilities else target, hidden, acc)
        if self.probabilities:
            self.target = target if target.dtype == logits_dtype else target.to(acc)
            self.target = self.target.contiguous()
            self.local = self.target
            self.kept = torch.ones(rows, dtype=torch.bool, device=device)
            self.owned = self.kept.new_zeros(shards.world, rows)
            self.at_index = torch.zeros(rows, dtype=acc, device=device)
        else:
            self.target = target.contiguous()
            self.kept = target != self.ignore_index
            check_index(op, "target", target, self.kept, shards.vocab, self.ignore_index)
            self.owned = shards.owned(target) & self.kept
            # -1 stands for ignored rows; those of other parts take any column, whose values are not used.
            local = torch.where(self.owned[shards.rank], target - shards.start, 0)
            self.local = torch.where(self.kept, local, -1)
            self.at_index = torch.full((rows,), 1 - self.smoothing, dtype=acc, device=device)
            if self.weight is not None and shards.vocab > 0:
                self.at_index *= self._class_weights()
        self.part_weight = None
        if self.soft and self.weight is not None:
            self.part_weight = self.weight[shards.start : shards.stop]
        self._scales(normalizer, input_dtype == torch.float16 and gradient_stored)

        self.loss = torch.empty(rows, dtype=acc, device=device)
        self.lse = torch.empty_like(self.loss)
        self.lse_low = torch.empty_like(self.loss)
        self.mass = torch.empty_like(self.loss) if self.dense else None
        self.entropy = torch.zeros_like(self.loss) if self.aux & _ENTROPY else None
        self.log_prob = torch.zeros_like(self.loss) if self.aux & _LOG_PROB else None
        self.predict = bool(self.aux & (_PREDICTED | _ACCURACY))
        self.predicted = torch.empty(rows, dtype=torch.int64, device=device) if self.predict else None

    def _scales(self, normalizer: Tensor | None, defer: bool) -> None:
        """Those of RowScales: 1 / D and 1 / K, and the factor that a float16 gradient leaves for later."""
        self.factor = self.divisor = None
        ones = torch.ones(2, dtype=self.acc, device=self.kept.device)
        self.scales = ones
        if self.reduction != "mean":
            return
        count = self.kept.sum().to(self.acc)
        divisor = count
        if normalizer is not None:
            count = divisor = normalizer.to(self.acc)
        elif self.weight is not None and not self.probabilities:
            divisor = torch.where(self.kept, self._class_weights(), 0).sum()
        self.divisor = divisor
        if defer:
            self.scales = torch.stack([torch.ones_like(divisor), divisor / count])
            self.factor = torch.where(divisor == 0, 0, 1 / divisor).reshape(1)
        else:
            self.scales = torch.stack([1 / divisor, 1 / count])

    def _class_weights(self) -> Tensor:
        assert self.weight is not None
        return self.weight[torch.where(self.owned.any(0), self.target, 0)]

    # --- a part of the vocabulary ---

    def statistics(self, z: Tensor, part: slice) -> Tensor:
        """[k, n] of this part's logits: lse in two numbers; that less the target's logit; with soft targets
        T = sum a (lse - z) and M = sum a; what aux values need."""
        rows, size = z.shape
        shards = self.shards
        if size == 0:
            values = self.loss.new_zeros(3 + 2 * self.soft + (self.entropy is not None) + 2 * self.predict, rows)
            values[0] = -torch.inf
            if self.predict:
                values[-2] = -torch.inf
            return values if self.key is None else torch.cat([values, self.key[part].unsqueeze(0)])
        share = self.smoothing * size / shards.vocab
        k = 1 - self.smoothing + share
        weight = self.part_weight
        # Smoothing alone, for indices: its loss is the mean of w (lse - z), the target's part is token_log_prob.
        smoothing = 0.0 if not self.soft else share / k if self.probabilities else 1.0
        aux = (self.aux & _LSE) | (_PREDICTED if self.predict else 0) | (self.aux & _ENTROPY)
        if self.soft and not self.probabilities:
            aux |= _LOG_PROB
        loss, lse, stats, predicted, _ = _ops.cross_entropy_forward(
            z, self.local[part], weight, None, None, -1, 0, smoothing, 0.0, self.softcap, aux
        )
        low = stats[0]
        values = [lse, low]
        if not self.soft:
            values.append(loss)
        elif self.probabilities:
            values += [torch.zeros_like(loss), k * loss, k * stats[1]]
        else:
            each = self.smoothing * size / shards.vocab
            mass = each * stats[1] if self.dense else torch.full_like(loss, each)
            values += [-stats[-1], each * loss, mass]
        if self.entropy is not None:
            values.append(stats[-2] if aux & _LOG_PROB else stats[-1])
        if self.predict:
            best = z.gather(1, predicted.clamp(min=0).unsqueeze(1)).squeeze(1).to(self.acc)
            values += [best, predicted.to(self.acc)]
        if self.key is not None:
            values.append(self.key[part])
        values = torch.stack(values)
        values[0], dead = lse_of_nothing(z, values[0])
        last = 4 if self.soft else 3
        values[1:last] = torch.where(dead, 0, values[1:last])
        if self.entropy is not None:
            values[last + self.soft] = torch.where(dead, 0, values[last + self.soft])
        return values

    # --- all parts ---

    def combine(self, parts: Tensor, part: slice) -> None:
        """[world, k, n] of all parts into the values of whole rows."""
        kept, owned = self.kept[part], self.owned[:, part]
        wide = parts.double()
        different = None
        if self.key is not None:
            name = "input" if self.probabilities else "target"
            different = self.shards.different(self.op, name, wide[:, -1], exact=not self.probabilities)
            wide = wide[:, :-1]
        lse, low, under = wide[:, 0], wide[:, 1], wide[:, 2]
        largest = lse.amax(0)
        log_sum = ((lse - largest) + low).exp().sum(0).log()
        if different is not None:
            log_sum = torch.where(different, torch.nan, log_sum)
        total = (largest + log_sum).to(self.acc)
        self.lse[part] = total
        self.lse_low[part] = ((largest - total.double()) + log_sum).to(self.acc)
        above = (largest - lse) + log_sum - low  # how far lse of the row is above lse of each part
        self_at = self.at_index[part].double()
        # lse - z of the target, in the part that has it. An index outside [0, V) is in none.
        missing = torch.where(owned, under + above, 0).sum(0)
        cost = torch.where(self_at == 0, 0, self_at * missing)
        mass = self_at
        if self.soft:
            masses = wide[:, 4]
            cost = cost + torch.where(masses == 0, 0, wide[:, 3] + masses * above).sum(0)
            mass = mass + masses.sum(0)
        if not self.probabilities:
            cost = torch.where(owned.any(0), cost, torch.nan)
        if self.mass is not None:
            self.mass[part] = mass.to(self.acc)
        scales = self.scales.double()
        loss = scales[0] * cost
        if self.z_loss != 0:
            loss = loss + scales[1] * self.z_loss * total.double().square()
        if self.token_weight is not None:
            loss = loss * self.token_weight[part]
        self.loss[part] = torch.where(kept if different is None else kept | different, loss, 0).to(self.acc)

        if self.log_prob is not None:
            self.log_prob[part] = torch.where(kept, -missing, 0).to(self.acc)
        if self.entropy is not None:
            shares = (-above).exp()
            each = torch.where(shares == 0, 0, shares * (wide[:, 5 if self.soft else 3] + above))
            self.entropy[part] = torch.where(kept, each.sum(0), 0).to(self.acc)
        if self.predicted is not None:
            best, index = wide[:, -2], wide[:, -1].long()
            index = torch.where(best == best.amax(0), index + self.shards.starts(index.device), self.shards.vocab)
            self.predicted[part] = torch.where(kept, index.amin(0), -1)

    def reduced(self) -> Tensor:
        """The loss of the call."""
        if self.reduction == "none":
            return self.loss
        total = self.loss.double().sum()
        if self.factor is not None:
            total = total * self.factor[0]
        if self.divisor is not None:
            total = torch.where(self.divisor == 0, torch.nan, total)
        return total.to(self.acc)

    def gradient(
        self,
        z: Tensor,
        part: slice,
        grad_loss: Tensor | None,
        grad_lse: Tensor | None,
        logit_scale: float = 1.0,
        inplace: bool = True,
    ) -> Tensor:
        """Of these rows' logits z, times logit_scale; over z where `inplace`."""
        each = grad_loss if grad_loss is None or grad_loss.dim() == 0 else grad_loss[part]
        lse = None if grad_lse is None else grad_lse[part]
        scales = self.scales
        if logit_scale != 1.0:
            scales = scales * logit_scale
            lse = None if lse is None else lse * logit_scale
        op = _ops.cross_entropy_shard_gradient_ if inplace else _ops.cross_entropy_shard_gradient
        done = op(
            z,
            each,
            lse,
            self.target[part],
            self.weight,
            self.lse[part],
            self.lse_low[part],
            None if self.mass is None else self.mass[part],
            scales,
            None if self.token_weight is None else self.token_weight[part],
            self.ignore_index,
            self.smoothing,
            self.z_loss,
            self.softcap,
            self.shards.start,
            self.shards.vocab,
        )
        return z if inplace else done

    def unit(self) -> Tensor:
        return torch.ones((), dtype=self.acc, device=self.loss.device)

    def values(self, lse: Tensor | None, shape: torch.Size) -> list[Tensor]:
        """The aux values, in the order of their bits."""
        made: list[Tensor] = []
        if self.aux & _LSE:
            assert lse is not None
            made.append(lse.reshape(shape))
        if self.aux & _Z_LOSS:
            made.append(torch.where(self.kept, self.z_loss * self.lse.square(), 0).reshape(shape))
        if self.aux & _ACCURACY:
            right = (self.predicted == self.target) & self.kept
            made.append(right.to(self.acc).reshape(shape))
        if self.aux & _PREDICTED:
            assert self.predicted is not None
            made.append(self.predicted.reshape(shape))
        for value in (self.entropy, self.log_prob):
            if value is not None:
                made.append(value.reshape(shape))
        return made

    # --- for the backward ---

    def pack(self) -> tuple[Rows, list[Tensor]]:
        """These rows without their tensors, and the tensors: autograd checks and releases what it keeps itself."""
        bare = copy.copy(self)
        bare.names = [name for name, value in vars(self).items() if isinstance(value, Tensor)]
        tensors = [getattr(self, name) for name in bare.names]
        for name in bare.names:
            setattr(bare, name, None)
        return bare, tensors

    def unpack(self, tensors: Any) -> Rows:
        rows = copy.copy(self)
        for name, tensor in zip(self.names, tensors, strict=True):
            setattr(rows, name, tensor.detach())
        return rows


def lse_of_nothing(z: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse with -inf where a part's logits are all -inf, for which the CPU's kernel says NaN; and where that is so."""
    dead = lse == -torch.inf
    if z.device.type == "cpu" and bool(lse.isnan().any()):
        dead = dead | (lse.isnan() & (z.amax(1) == -torch.inf))
        lse = torch.where(dead, -torch.inf, lse)
    return lse, dead


def row_key(index: Tensor | None, hidden: Tensor | None, acc: torch.dtype) -> Tensor | None:
    """[N]: what tells whether all processes have the same rows. A weight that data parallelism sharded looks like a
    sharded vocabulary, but its processes have rows of their own."""
    if index is not None:
        return index.to(acc)
    if hidden is None or hidden.shape[1] == 0:
        return None
    return hidden.detach()[:, 0].to(acc)


class CrossEntropy(torch.autograd.Function):
    """Keeps the logits and lse; the gradient is computed in the backward, or in the forward over the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, logits: Tensor, inplace: bool) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        everything = slice(0, rows.rows)
        rows.combine(rows.shards.gather(rows.statistics(logits, everything)), everything)
        if inplace:
            rows.gradient(logits, everything, rows.unit(), None)
        ctx.inplace = inplace
        ctx.rows, kept = rows.pack()
        # Saved after the write, so that its version counter is the one that the write left.
        ctx.save_for_backward(logits, *kept)
        return (rows.reduced(), rows.lse) if rows.aux & _LSE else (rows.reduced(),)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        logits, *kept = ctx.saved_tensors
        rows: Rows = ctx.rows.unpack(kept)
        if grad_loss is None and grad_lse is None:
            return None, None, None
        if ctx.inplace:
            assert grad_loss is not None
            gradient = scale_saved(logits, grad_loss, rows.factor, hooks_were_active=False)
        else:
            with torch.no_grad():
                gradient = rows.gradient(logits, slice(0, rows.rows), grad_loss, grad_lse, inplace=False)
        return None, _ops.refuse_double_backward("cross_entropy", gradient, [logits]), None


class LinearOptions:
    def __init__(
        self, shards: VocabParallel, input: Tensor, weight: Tensor, logit_scale: float, accumulate_dtype: Any, mib: Any
    ) -> None:
        self.shards, self.logit_scale, self.mib = shards, logit_scale, mib
        self.dtype = product_type(input)
        accumulate = accumulate_dtype or acc_of(self.dtype)
        self.lean = accumulate == self.dtype
        self.low_precision_result = weight.dtype != accumulate

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


def run_linear(
    rows: Rows,
    linear: LinearOptions,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs_grad: tuple[bool, bool, bool],
    statistics: bool,
    grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
    inplace: bool = False,
) -> list[Tensor | None]:
    """All chunks: the statistics of their logits where they are not known, then the gradients that are wanted."""
    count, accumulator = linear.plan(input, needs_grad[1], 1)
    head = Head(weight, bias, linear.logit_scale, min(count, input.shape[0]), linear.dtype)
    input, weight = input.detach(), weight.detach()
    gradients = ChunkGradients(linear.shards, head, input, weight, bias, needs_grad, accumulator, linear.lean, inplace)
    for part in chunks(input.shape[0], count):
        x = input[part].to(linear.dtype)
        z = head.logits(x)
        if statistics:
            rows.combine(linear.shards.gather(rows.statistics(z, part)), part)
        if any(needs_grad):
            rows.gradient(z, part, grad_loss, grad_lse, linear.logit_scale)
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
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        made = run_linear(rows, linear, input, weight, bias, needs_grad, True, rows.unit(), None, inplace)
        save_linear(ctx, "linear_cross_entropy", rows.factor, inplace, (input, weight, bias), made)
        return rows.reduced()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Any, ...]:
        return (None, None, None, None, *scale_linear(ctx, grad_loss))


class LinearCrossEntropyRecompute(torch.autograd.Function):
    """Keeps one lse a row and computes the logits a second time in the backward: reduction 'none', a differentiable
    lse, and where memory must be least."""

    @staticmethod
    def forward(
        ctx: Any, rows: Rows, linear: LinearOptions, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        run_linear(rows, linear, input, weight, bias, (False, False, False), True)
        ctx.linear = linear
        ctx.rows, kept = rows.pack()
        ctx.save_for_backward(input, weight, bias, *kept)
        return (rows.reduced(), rows.lse) if rows.aux & _LSE else (rows.reduced(),)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Any, ...]:
        input, weight, bias, *kept = ctx.saved_tensors
        if grad_loss is None and grad_lse is None:
            return None, None, None, None, None
        needs_grad = ctx.needs_input_grad[2:]
        with torch.no_grad():
            rows = ctx.rows.unpack(kept)
            made = run_linear(rows, ctx.linear, input, weight, bias, needs_grad, False, grad_loss, grad_lse)
        inputs = [tensor for tensor in (input, weight, bias) if tensor is not None]
        refused = (None if g is None else _ops.refuse_double_backward("linear_cross_entropy", g, inputs) for g in made)
        return None, None, *refused


def save_linear(
    ctx: Any, op: str, factor: Tensor | None, inplace: bool, inputs: tuple[Any, ...], made: list[Tensor | None]
) -> None:
    """Keeps the gradients that a linear loss made for an upstream gradient of 1."""
    ctx.op, ctx.factor = op, factor
    ctx.hooks = _ops.saved_tensor_hooks_active()
    # The inputs are saved for their place in the graph: a second differentiation must find its way to the error.
    ctx.save_for_backward(*inputs, inputs[0] if inplace else made[0], *made[1:])


def scale_linear(ctx: Any, grad_loss: Tensor | None) -> list[Tensor | None]:
    saved = ctx.saved_tensors
    if grad_loss is None:
        return [None] * 3
    inputs = [tensor for tensor in saved[:3] if tensor is not None]
    made: list[Tensor | None] = []
    for gradient, wanted in zip(saved[3:], ctx.needs_input_grad[-3:], strict=True):
        if gradient is None or not wanted:
            made.append(None)
            continue
        scaled = scale_saved(gradient, grad_loss, ctx.factor, ctx.hooks)
        made.append(_ops.refuse_double_backward(ctx.op, scaled, inputs))
    return made


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


@_disable_dynamo
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    options: dict[str, Any],
    inplace: bool,
    shards: VocabParallel | None,
) -> tuple[Tensor, list[Tensor]]:
    op = "cross_entropy"
    class_dim = 0 if input.dim() <= 1 else 1
    if is_dtensor(input):
        shards = part_of(op, "input", input, class_dim, shards)
        input = local_part(input)
        target = local_part(target) if target.is_floating_point() else whole(target)
    assert shards is not None
    weight, token_weight, target = whole(weight), whole(token_weight), whole(target)
    given = {"input": input, "target": target, "weight": weight, "token_weight": token_weight, "normalizer": normalizer}
    sharded = {"input": class_dim}
    if target.is_floating_point():
        sharded["target"] = class_dim
    check(op, shards, given, sharded, options)
    refuse_target_gradient(op, target)
    row_shape = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    overwrite = (
        input.dim() <= 2
        and not options["aux"] & _LSE
        and may_overwrite(inplace, input, [target, weight, token_weight, normalizer])
    )
    logits = input
    if input.dim() == 1:
        logits = input.unsqueeze(0)
    elif input.dim() > 2:
        logits = input.movedim(1, -1).reshape(row_shape.numel(), shards.size)
    if target.is_floating_point():
        target = target.movedim(class_dim, -1).reshape(row_shape.numel(), shards.size)
    else:
        target = target.reshape(-1)
    rows = Rows(op, shards, target, weight, token_weight, normalizer, options, input.dtype, input.dtype, overwrite)
    out = CrossEntropy.apply(rows, logits, overwrite)
    loss = out[0].reshape(row_shape) if rows.reduction == "none" else out[0]
    return loss, rows.values(out[1] if len(out) > 1 else None, row_shape)


def autocast_input(input: Tensor) -> Tensor:
    """Under autocast only the input is cast here: the op itself rounds the weight, so that a float32 weight gets its
    gradient in float32."""
    if input.dtype == torch.float64 or not torch.is_autocast_enabled(input.device.type):
        return input
    return input.to(torch.get_autocast_dtype(input.device.type))


@_disable_dynamo
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    normalizer: Tensor | None,
    options: dict[str, Any],
    inplace: bool,
    shards: VocabParallel | None,
) -> tuple[Tensor, list[Tensor]]:
    op = "linear_cross_entropy"
    if is_dtensor(linear_weight):
        shards = part_of(op, "linear_weight", linear_weight, 0, shards)
    elif shards is None:
        raise ValueError(
            f"{op}: linear_weight must be a DTensor where another argument is, or vocab_parallel be given, "
            "but got a plain tensor"
        )
    linear_weight, linear_bias = local_part(linear_weight), local_part(linear_bias)
    target = local_part(target) if target.is_floating_point() else whole(target)
    input, weight, token_weight = whole(input), whole(weight), whole(token_weight)
    given = {
        "input": input,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": weight,
        "token_weight": token_weight,
        "normalizer": normalizer,
    }
    sharded = {"linear_weight": 0, "linear_bias": 0}
    if target.is_floating_point():
        sharded["target"] = target.dim() - 1
    check(op, shards, given, sharded, options)
    refuse_target_gradient(op, target)
    cast = autocast_input(input)
    linear = LinearOptions(
        shards, cast, linear_weight, options["logit_scale"], options["accumulate_dtype"], options["workspace_mib"]
    )
    recompute = options["reduction"] == "none" or bool(options["aux"] & _LSE) or linear.mib == 0
    overwrite = (
        cast is input
        and not recompute
        and may_overwrite(inplace, input, [linear_weight, linear_bias, target, weight, token_weight, normalizer])
    )
    row_shape = input.shape[:-1]
    matrix = cast.reshape(row_shape.numel(), input.shape[-1])
    target = target.reshape(row_shape.numel(), shards.size) if target.is_floating_point() else target.reshape(-1)
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
        matrix,
    )
    if recompute:
        out = LinearCrossEntropyRecompute.apply(rows, linear, matrix, linear_weight, linear_bias)
    else:
        out = (LinearCrossEntropy.apply(rows, linear, needs_grad, overwrite, matrix, linear_weight, linear_bias),)
    loss = out[0].reshape(row_shape) if rows.reduction == "none" else out[0]
    return loss, rows.values(out[1] if len(out) > 1 else None, row_shape)
