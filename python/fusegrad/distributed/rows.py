"""What the processes find out about each row of a cross entropy over a sharded vocabulary, each from its part of the
logits; formulas in csrc/losses/row_kernels.h."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gradients import acc_of, check_index
from .shards import VocabParallel

_ops = torch.ops.fusegrad
LSE, Z_LOSS, ACCURACY, PREDICTED, ENTROPY, LOG_PROB = (1 << bit for bit in range(6))  # AuxBit of options.h
SCALE_GRADIENT = 64  # kScaleGradient of arguments.h: mean, variance and slope are the last three statistics


DIFFERENTIABLE = LSE | ENTROPY | LOG_PROB


class Upstream(NamedTuple):
    """Upstream gradients of what :meth:`Rows.outputs` returns; None is 0."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    log_prob: Tensor | None = None

    def of(self, part: slice, factor: Tensor | None = None) -> Upstream:
        """Those of some rows, times a factor of each."""
        cut = [g if g is None or g.dim() == 0 else g[part] for g in self]
        return Upstream(*(g if g is None or factor is None else g * factor[part] for g in cut))


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
        different: Tensor | None = None,
        scale_gradient: bool = False,
    ) -> None:
        """`target`: [N] indices, or [N, stop - start] probabilities. `gradient_stored`: the forward makes the gradient
        for an upstream gradient of 1. `different`: what check() returned. `scale_gradient`: a factor of the logits gets
        a gradient."""
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
        self.different = different
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
        self.mean = torch.zeros_like(self.loss) if scale_gradient else None
        self.variance = torch.zeros_like(self.loss) if scale_gradient else None
        self.slope = torch.zeros_like(self.loss) if scale_gradient else None
        self.scale_gradient = scale_gradient
        self.moments = scale_gradient or bool(self.aux & ENTROPY)
        self.entropy = torch.zeros_like(self.loss) if self.aux & ENTROPY else None
        self.entropy_low = torch.zeros_like(self.loss) if self.aux & ENTROPY else None
        self.log_prob = torch.zeros_like(self.loss) if self.aux & LOG_PROB else None
        self.predict = bool(self.aux & (PREDICTED | ACCURACY))
        self.predicted = torch.empty(rows, dtype=torch.int64, device=device) if self.predict else None

    def _scales(self, normalizer: Tensor | None, defer: bool) -> None:
        """The scales of RowScales: 1 / D and 1 / K, and the factor that a float16 gradient leaves for later."""
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
        T = sum a (lse - z) and M = sum a; entropy and variance of z where they are needed; what aux values need."""
        rows, size = z.shape
        shards = self.shards
        if size == 0:
            count = 3 + 2 * self.soft + self.moments + self.scale_gradient + 2 * self.predict
            values = self.loss.new_zeros(count, rows)
            values[0] = -torch.inf
            if self.predict:
                values[-2] = -torch.inf
            return values
        share = self.smoothing * size / shards.vocab
        k = 1 - self.smoothing + share
        weight = self.part_weight
        # Smoothing alone, for indices: its loss is the mean of w (lse - z), the target's part is token_log_prob.
        smoothing = 0.0 if not self.soft else share / k if self.probabilities else 1.0
        aux = (self.aux & LSE) | (PREDICTED if self.predict else 0) | (ENTROPY if self.moments else 0)
        # Ignored rows have a lse, whose gradient by a factor is their mean.
        aux |= SCALE_GRADIENT | LSE if self.scale_gradient else 0
        if self.soft and not self.probabilities:
            aux |= LOG_PROB
        loss, lse, stats, predicted, _ = _ops.cross_entropy_forward(
            z, self.local[part], weight, None, None, -1, 0, smoothing, 0.0, self.softcap, aux
        )
        mean = variance = None
        if self.scale_gradient:
            mean, variance, stats = stats[-3], stats[-2], stats[:-3]
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
        if self.moments:
            entropy = stats[-3] if aux & LOG_PROB else stats[-2]
            if mean is not None and not self.probabilities:  # of ignored rows the kernel says 0
                entropy = torch.where(self.local[part] < 0, lse - mean, entropy)
            values.append(entropy)
        if variance is not None:
            values.append(variance)
        if self.predict:
            best = z.gather(1, predicted.clamp(min=0).unsqueeze(1)).squeeze(1).to(self.acc)
            values += [best, predicted.to(self.acc)]
        values = torch.stack(values)
        values[0], dead = lse_of_nothing(z, values[0])
        last = 4 if self.soft else 3
        values[1:last] = torch.where(dead, 0, values[1:last])
        for row in range(last + self.soft, last + self.soft + self.moments + self.scale_gradient):
            values[row] = torch.where(dead, 0, values[row])
        return values

    # --- all parts ---

    def combine(self, parts: Tensor, part: slice) -> None:
        """[world, k, n] of all parts into the values of whole rows."""
        kept, owned = self.kept[part], self.owned[:, part]
        wide = parts.double()
        different = self.different
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
        if self.moments:
            shares, at = (-above).exp(), 5 if self.soft else 3
            entropy = torch.where(shares == 0, 0, shares * (wide[:, at] + above)).sum(0)
            exact = torch.where(kept, entropy, 0)
            if self.entropy is not None:
                assert self.entropy_low is not None
                self.entropy[part] = exact.to(self.acc)
                self.entropy_low[part] = (exact - self.entropy[part].double()).to(self.acc)
            if self.mean is not None:
                assert self.variance is not None and self.slope is not None
                # How far the mean of z is in each part from that of the row: lse - H of both.
                away = entropy - wide[:, at] - above
                self.variance[part] = (
                    torch.where(shares == 0, 0, shares * (wide[:, at + 1] + away.square())).sum(0).to(self.acc)
                )
                self.mean[part] = (largest + log_sum - entropy).to(self.acc)
                slope = cost - torch.where(mass == 0, 0, mass * entropy)
                self.slope[part] = torch.where(kept, slope, 0).to(self.acc)
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

    def outputs(self) -> tuple[Tensor, ...]:
        """The loss, and where an aux value is differentiable all of them, empty where not asked for."""
        if not self.aux & DIFFERENTIABLE:
            return (self.reduced(),)
        empty = self.loss.new_empty(0)
        values = (self.lse, self.entropy, self.log_prob)
        return (self.reduced(), *(empty if value is None else value for value in values))

    def gradient(
        self,
        z: Tensor,
        part: slice,
        upstream: Upstream,
        logit_scale: float = 1.0,
        inplace: bool = True,
        row_scale: Tensor | None = None,
    ) -> Tensor:
        """The gradient of these rows' logits z, times logit_scale and row_scale; it is written over z where
        `inplace`."""
        each, lse, entropy, log_prob = upstream.of(part, row_scale)
        scales = self.scales
        if logit_scale != 1.0:
            scales = scales * logit_scale
            lse, entropy, log_prob = (None if g is None else g * logit_scale for g in (lse, entropy, log_prob))
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
            None if log_prob is None else log_prob.contiguous(),
            None if entropy is None else entropy.contiguous(),
            None if self.entropy is None else self.entropy[part],
            None if self.entropy_low is None else self.entropy_low[part],
        )
        return z if inplace else done

    def gradient_of_scale(self, upstream: Upstream, row_scale: Tensor) -> Tensor:
        """[N], the gradient of a factor s of each row's logits. With z = s x, by the chain rule over z: s d loss =
        slope, s d lse = mean of z, s d log p[y] = log p[y] + H, s d H = -variance of z."""
        assert self.mean is not None and self.variance is not None and self.slope is not None
        total = torch.zeros_like(self.lse)
        if upstream.loss is not None:
            each = self.scales[0] * self.slope
            if self.z_loss != 0:
                each = each + torch.where(self.kept, self.scales[1] * 2 * self.z_loss * self.lse * self.mean, 0)
            total = total + upstream.loss * (each if self.token_weight is None else each * self.token_weight)
        if upstream.lse is not None:
            total = total + upstream.lse * self.mean
        if upstream.log_prob is not None:
            assert self.log_prob is not None
            # Of ignored rows both are 0.
            entropy = torch.where(self.kept, self.lse - self.mean, 0) if self.entropy is None else self.entropy
            total = total + upstream.log_prob * (self.log_prob + entropy)
        if upstream.entropy is not None:
            total = total - torch.where(self.kept, upstream.entropy * self.variance, 0)
        return total / row_scale

    def unit(self) -> Tensor:
        return torch.ones((), dtype=self.acc, device=self.loss.device)

    def values(self, loss: Tensor, out: tuple[Tensor, ...], shape: torch.Size) -> list[Tensor]:
        """The aux values, in the order of their bits; what is a constant raises where a backward reaches it. `out`:
        what outputs() returned, as the autograd Function did."""
        made: list[Tensor] = []

        def constant(value: Tensor, name: str) -> Tensor:
            return _ops.constant_beside(value, loss, self.op, f"aux.{name}").reshape(shape)

        if self.aux & LSE:
            made.append(out[1].reshape(shape))
        if self.aux & Z_LOSS:
            made.append(constant(torch.where(self.kept, self.z_loss * self.lse.square(), 0), "z_loss"))
        if self.aux & ACCURACY:
            right = (self.predicted == self.target) & self.kept
            made.append(constant(right.to(self.acc), "token_accuracy"))
        if self.aux & PREDICTED:
            assert self.predicted is not None
            made.append(self.predicted.reshape(shape))
        if self.aux & ENTROPY:
            made.append(out[2].reshape(shape))
        if self.aux & LOG_PROB:
            made.append(out[3].reshape(shape))
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
