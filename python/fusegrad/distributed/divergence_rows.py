"""The divergence of rows over a sharded vocabulary; formulas in docs/design/divergences.md.

It is that of log-probabilities, whose normaliser all processes know after one collective; a second one sums the
divergence and what the gradients by logits take off. A top-k teacher needs the first one only: its K columns and the
tail are in every process then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._load import check_targets_enabled
from .gradients import acc_of, check_index
from .rows import lse_of_nothing
from .shards import VocabParallel

_ops = torch.ops.fusegrad


def _log_sum(z: Tensor) -> tuple[Tensor, Tensor]:
    """lse of each row in two numbers, whose sum is exact for large offsets."""
    rows = z.shape[0]
    if z.shape[1] == 0:
        return z.new_full((rows,), -torch.inf), z.new_zeros(rows)
    any_column = torch.zeros(rows, dtype=torch.int64, device=z.device)
    _, lse, stats, _, _ = _ops.cross_entropy_forward(z, any_column, None, None, None, -1, 0, 0.0, 0.0, 0.0, 0)
    lse, nothing = lse_of_nothing(z, lse)
    return lse, torch.where(nothing, 0, stats[0])


def _combine(largest: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:
    """[world, n] of all parts, in float64, as two numbers of whole rows: the largest, and what lse is above it."""
    top = largest.amax(0)
    return top, ((largest - top) + log_sums).exp().sum(0).log()


class Divergence:
    """The options of one call, and its rows' losses. `student` and `teacher` of run() are logits before the softcap."""

    def __init__(
        self,
        op: str,
        shards: VocabParallel,
        dtype: torch.dtype,
        top_k: TopK | None,
        labels: Tensor | None,
        token_weight: Tensor | None,
        normalizer: Tensor | None,
        options: dict[str, Any],
        row_count: int,
        device: torch.device,
        deferred: bool,
        stored: float = 0.0,
        different: Tensor | None = None,
    ) -> None:
        """`stored`: the roundoff of the dtype in which log-probabilities came. `different`: what check() returned."""
        self.op = op
        self.shards = shards
        self.acc = acc = acc_of(dtype)
        self.beta = float(options["beta"])
        self.temperature = float(options["temperature"])
        own = options.get("teacher_temperature")
        self.teacher_temperature = self.temperature if own is None else float(own)
        self.student_softcap = float(options.get("student_softcap") or 0.0)
        self.teacher_softcap = float(options.get("teacher_softcap") or 0.0)
        self.soft_weight, self.hard_weight = float(options["soft_weight"]), float(options["hard_weight"])
        self.log_probs = bool(options.get("log_probs", False))
        self.renormalize = options["tail"] == "renormalize"
        self.reduction = options["reduction"]
        self.aux = int(options["aux"])
        self.hard_wanted = self.hard_weight != 0 or bool(self.aux & 2)
        ignore_index = -100 if options["ignore_index"] is None else int(options["ignore_index"])
        self.rows, self.device = row_count, device
        self.top_k = top_k
        self.stored = stored
        self.labels = labels
        self.different = different
        self.kept = torch.ones(row_count, dtype=torch.bool, device=device)
        if labels is not None:
            self.kept = labels != ignore_index
            check_index(op, "labels", labels, self.kept, shards.vocab, ignore_index)
        self.token_weight = None if token_weight is None else token_weight.reshape(-1).to(acc)
        self.scale = torch.ones((), dtype=acc, device=device)
        if self.reduction in ("mean", "batchmean"):
            count = self.kept.sum() if normalizer is None else normalizer
            self.scale = 1 / (count.to(acc) * (shards.vocab if self.reduction == "mean" else 1))
        # float16's range is too small for gradients over the number of rows.
        self.factor = torch.where(self.scale.isinf(), 0, self.scale).reshape(1) if deferred else None
        self.soft = torch.zeros(row_count, dtype=acc, device=device)
        self.hard = torch.zeros_like(self.soft)

    def _logits(self, z: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
        """The capped logits and those over the temperature, acc."""
        y = z.to(self.acc)
        if softcap != 0:
            y = softcap * torch.tanh(y / softcap)
        return y, y if temperature == 1 else y / temperature

    def _subtract(self, s: Tensor, of: tuple[Tensor, Tensor]) -> Tensor:
        """s - lse, in two steps: the first is exact where it matters."""
        return (s - of[0].to(self.acc).unsqueeze(1)).sub_(of[1].to(self.acc).unsqueeze(1))

    def _divergence(self, log_q: Tensor, log_p: Tensor, needs_grad: tuple[bool, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over these columns, and the gradients by the log-probabilities."""
        rows = (None, None, None, None, None)
        temperatures, softcaps, scales, weights, roundoff = (1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0), 0.0
        numbers = (self.beta, *temperatures, *softcaps, *scales, *weights, roundoff)
        log_probs, renormalize, ignore_index, reduction, aux = True, False, -100, 0, 0
        loss, _, _, by_q, by_p = _ops.jsd_forward(
            log_q,
            log_p,
            *rows,
            *numbers,
            log_probs,
            renormalize,
            ignore_index,
            reduction,
            aux,
            list(needs_grad),
            partial=True,
        )
        return loss, by_q, by_p

    def run(
        self,
        student: Tensor,
        teacher: Tensor,
        part: slice,
        needs_grad: tuple[bool, bool],
        upstream: Tensor | None = None,
        logit_scale: float = 1.0,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Losses of these rows, and the gradients of the logits that are wanted, times logit_scale, acc."""
        shards, size = self.shards, student.shape[1]
        kept = self.kept[part]
        y, s = self._logits(student, self.student_softcap, self.temperature)
        values: list[Tensor] = []
        owned = label = None
        if self.hard_wanted:
            assert self.labels is not None
            owned = shards.owned(self.labels[part]) & kept
            mine = owned[shards.rank]
            label = torch.where(mine, self.labels[part] - shards.start, 0)
            largest, rest = _log_sum(y)
            at = y.gather(1, label.unsqueeze(1)).squeeze(1) if size else torch.zeros_like(rest)
            # The difference of this part's lse and the label's logit.
            values = [largest, rest, torch.where(mine, (largest - at) + rest, 0)]
        if self.top_k is not None:
            finish = self._over_top_k(s, teacher, part, values, needs_grad[0])
        else:
            finish = self._dense(s, teacher, part, values, needs_grad)
        # Log-probabilities are taken as they are: there is nothing to normalise.
        gathered = shards.gather(torch.stack(values)).double() if values else s.new_zeros(0)
        different = self.different
        hard_of = _combine(gathered[:, 0], gathered[:, 1]) if self.hard_wanted else None
        soft, by_student, by_teacher = finish(gathered[:, 3:] if self.hard_wanted else gathered)
        soft = torch.where(soft < 0, 0, soft)  # what rounding left of 0; NaN stays
        if different is not None:
            soft = torch.where(different, torch.nan, soft)
        self.soft[part] = torch.where(kept, soft, 0).to(self.acc)
        if self.hard_wanted:
            assert hard_of is not None and owned is not None and label is not None
            above = (hard_of[0] - gathered[:, 0]) + hard_of[1] - gathered[:, 1]
            cost = torch.where(owned, gathered[:, 2] + above, 0).sum(0)
            self.hard[part] = torch.where(owned.any(0), cost, torch.where(kept, torch.nan, 0)).to(self.acc)

        factor = torch.ones_like(self.soft[part])
        if self.factor is None:
            factor = factor * self.scale
        if upstream is not None:
            factor = factor * (upstream if upstream.dim() == 0 else upstream[part])
        if self.token_weight is not None:
            factor = factor * self.token_weight[part]
        if different is not None:
            factor = torch.where(different, torch.nan, factor)
        factor = torch.where(kept, factor, 0).unsqueeze(1)
        grad_student = grad_teacher = None
        if needs_grad[0]:
            by_z: Tensor | None = None
            if self.soft_weight != 0:
                by_z = by_student.mul_(factor * (self.soft_weight * logit_scale / self.temperature))
            if self.hard_weight != 0:
                assert hard_of is not None and owned is not None and label is not None
                hard = self._subtract(y, hard_of).exp_()
                if size:
                    hard.scatter_add_(1, label.unsqueeze(1), -owned[shards.rank].to(self.acc).unsqueeze(1))
                hard.mul_(factor * (self.hard_weight * logit_scale))
                by_z = hard if by_z is None else by_z.add_(hard)
            grad_student = self._by_logits(by_z, y, self.student_softcap, kept)
        if needs_grad[1]:
            y, _ = self._logits(teacher, self.teacher_softcap, 1.0)
            by_z = by_teacher.mul_(factor * (self.soft_weight / self.teacher_temperature))
            grad_teacher = self._by_logits(by_z, y, self.teacher_softcap, kept)
        return grad_student, grad_teacher

    def _by_logits(self, by_z: Tensor | None, y: Tensor, softcap: float, kept: Tensor) -> Tensor:
        if by_z is None:
            return torch.zeros_like(y)
        if softcap != 0:
            by_z.mul_(1 - (y / softcap).square())
        # An ignored row may hold what is not finite.
        return by_z if self.labels is None else by_z.masked_fill_(~kept.unsqueeze(1), 0)

    def _dense(
        self, s: Tensor, teacher: Tensor, part: slice, values: list[Tensor], needs_grad: tuple[bool, bool]
    ) -> Any:
        _, t = self._logits(teacher, self.teacher_softcap, self.teacher_temperature)
        if not self.log_probs:
            values += [*_log_sum(s), *_log_sum(t)]

        def finish(parts: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
            log_q, log_p = s, t
            if not self.log_probs:
                log_q = self._subtract(s, _combine(parts[:, 0], parts[:, 1]))
                log_p = self._subtract(t, _combine(parts[:, 2], parts[:, 3]))
            soft, by_q, by_p = self._divergence(log_q.contiguous(), log_p.contiguous(), needs_grad)
            sums = [soft]
            for gradient, wanted in ((by_q, needs_grad[0]), (by_p, needs_grad[1])):
                if wanted and not self.log_probs:
                    sums.append(gradient.sum(1))
            if self.log_probs:
                sums += [s.exp().sum(1), t.exp().sum(1)]
            totals = list(self.shards.gather(torch.stack(sums)).double().sum(0))
            if self.log_probs and _checked(s):
                for name, sum_of in zip(("student", "teacher"), totals[-2:], strict=True):
                    high = torch.zeros_like(self.kept[part])
                    _check_sums(self.op, name, sum_of, high, self.kept[part], self.shards.vocab, self.stored, True)
            total = totals.pop(0)
            if not self.log_probs:
                # log_q = z - lse: each gradient by z has the sum of those by log_q taken off, times q.
                if needs_grad[0]:
                    by_q.addcmul_(log_q.exp_(), totals.pop(0).to(self.acc).unsqueeze(1), value=-1)
                if needs_grad[1]:
                    by_p.addcmul_(log_p.exp_(), totals.pop(0).to(self.acc).unsqueeze(1), value=-1)
            return total, by_q if needs_grad[0] else None, by_p if needs_grad[1] else None

        return finish

    def _over_top_k(self, s: Tensor, teacher: Tensor, part: slice, values: list[Tensor], needs_grad: bool) -> Any:
        """`teacher` holds log-probabilities [n, K] of the columns `indices`."""
        assert self.top_k is not None
        top_k, shards, size, acc = self.top_k, self.shards, s.shape[1], self.acc
        index = top_k.indices[part]
        mine = shards.owned(index)[shards.rank]
        # One more column takes what other processes have.
        others = torch.cat([s, s.new_full((s.shape[0], 1), -torch.inf)], 1)
        column = torch.where(mine, index - shards.start, size)
        values += list(torch.where(mine, others.gather(1, column), 0).t())
        others.scatter_(1, column, -torch.inf)
        values += [*_log_sum(others)]

        def finish(parts: Tensor) -> tuple[Tensor, Tensor | None, None]:
            z = parts[:, :-2].sum(0).t()  # [n, K]: each from the one process that has it
            z = torch.where(index == -1, -torch.inf, z)
            top, log_sum = _combine(parts[:, -2], parts[:, -1])
            nothing = top == -torch.inf
            tail = torch.where(nothing, -torch.inf, top + log_sum)
            log_q = torch.cat([z, tail.unsqueeze(1)], 1).log_softmax(1)
            log_p = torch.where(index == -1, -torch.inf, teacher.double())
            if self.renormalize:
                log_p = log_p - log_p.logsumexp(1, keepdim=True)
                rest = torch.full_like(log_p[:, 0], -torch.inf)
            else:
                rest = top_k.log_rest(log_p, part)
                rest = torch.where((index != -1).sum(1) == shards.vocab, -torch.inf, rest)
            log_p = torch.cat([log_p, rest.unsqueeze(1)], 1)
            soft, by_q, _ = self._divergence(log_q.to(acc), log_p.to(acc).contiguous(), (needs_grad, False))
            if not needs_grad:
                return soft, None, None
            by_z = by_q - log_q.to(acc).exp() * by_q.sum(1, keepdim=True)
            spread = (others - torch.where(nothing, 0, top).to(acc).unsqueeze(1)).exp_()
            per_tail = torch.where(nothing, 0, by_z[:, -1] * torch.where(nothing, 0, -log_sum).exp().to(acc))
            gradient = spread.mul_(per_tail.unsqueeze(1))
            gradient.scatter_add_(1, column, torch.where(mine, by_z[:, :-1], 0))
            return soft, gradient[:, :size], None

        return finish

    def reduced(self) -> Tensor:
        loss = torch.zeros_like(self.soft, dtype=torch.float64)
        if self.soft_weight != 0:
            loss = loss + self.soft_weight * self.soft
        if self.hard_weight != 0:
            loss = loss + self.hard_weight * self.hard
        if self.token_weight is not None:
            loss = loss * self.token_weight
        loss = torch.where(self.kept, loss, 0)
        if self.reduction == "none":
            return loss.to(self.acc)
        loss = loss.sum()
        return torch.where(loss == 0, 0, loss * self.scale).to(self.acc)

    def values(self, loss: Tensor, shape: torch.Size) -> list[Tensor]:
        wanted = ((1, "soft_loss", self.soft), (2, "hard_loss", self.hard))
        return [
            _ops.constant_beside(torch.where(self.kept, value, 0), loss, self.op, f"aux.{name}").reshape(shape)
            for bit, name, value in wanted
            if self.aux & bit
        ]

    def check_top_k(self, log_probs: Tensor) -> None:
        """The unsharded op's check of a teacher's [N, K], where there is one."""
        if self.top_k is None or not _checked(log_probs):
            return
        _check_indices(self.op, self.top_k.indices, self.shards.vocab)
        values = log_probs.double().masked_fill(self.top_k.indices == -1, -torch.inf)
        sums = values.exp().sum(1)
        if self.top_k.tail is not None:
            sums = sums + self.top_k.tail.double().exp()
        high = values.amax(1) > 16 * self.top_k.roundoff
        _check_sums(self.op, "a top-k teacher", sums, high, self.kept, log_probs.shape[1], self.top_k.roundoff, False)


class TopK:
    """A top-k teacher's columns, -1 where a row has fewer, and what is known of the rest."""

    def __init__(self, indices: Tensor, tail: Tensor | None, stored: torch.dtype, acc: torch.dtype) -> None:
        self.indices = indices
        self.tail = None if tail is None else tail.reshape(-1)
        self.roundoff = max(roundoff(t) for t in (stored, acc, *([] if tail is None else [tail.dtype])))

    def tensors(self) -> list[Tensor | None]:
        return [self.indices, self.tail]

    def log_rest(self, log_p: Tensor, part: slice) -> Tensor:
        """[n] of [n, K]: as in docs/design/divergences.md."""
        if self.tail is not None:
            return self.tail[part].to(log_p.dtype)
        p = log_p.exp()
        each = min(self.roundoff, roundoff(torch.float32)) - self.roundoff * log_p
        return torch.maximum(1 - p.sum(1), torch.where(p > 0, p * each, 0).sum(1)).log()


def roundoff(dtype: torch.dtype) -> float:
    """Half the spacing of a dtype's numbers at 1."""
    return torch.finfo(dtype).eps / 2


def _checked(tensor: Tensor) -> bool:
    return tensor.numel() != 0 and (tensor.device.type == "cpu" or check_targets_enabled())


def _check_sums(
    op: str, name: str, sums: Tensor, high: Tensor, kept: Tensor, columns: int, stored: float, whole: bool
) -> None:
    """The unsharded op's check."""
    tolerance = max(1e-3, 16 * stored * (1 + math.log(columns)))
    wrong = (high | (sums > 1 + tolerance) | ((sums < 1 - tolerance) & whole)) & kept
    rows = wrong.nonzero()
    if rows.numel():
        row = int(rows[0, 0])
        raise ValueError(
            f"{op}: {name} must be log-probabilities, none above 0, whose exponentials sum to "
            f"{'1' if whole else 'at most 1'} (within {tolerance:g}), but got a sum of {float(sums[row]):g} at row "
            f"{row}: logits need log_softmax, and probabilities log"
        )


def _check_indices(op: str, indices: Tensor, vocab: int) -> None:
    wrong = ((indices < -1) | (indices >= vocab)).nonzero()
    if wrong.numel():
        row, column = wrong[0].tolist()
        raise IndexError(
            f"{op}: the teacher's indices must be in [0, {vocab}), or -1 as padding, but got "
            f"{int(indices[row, column])} at row {row}, column {column}"
        )
    if indices.device.type == "cpu":
        ordered = indices.sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)).nonzero()
        if twice.numel():
            row, column = twice[0].tolist()
            raise ValueError(
                f"{op}: the teacher's indices must be distinct in a row, but got {int(ordered[row, column])} twice "
                f"at row {row}"
            )
