"""The divergence of rows over a sharded vocabulary; formulas in docs/distillation.md.

It is that of log-probabilities, whose normaliser all processes know after one collective; a second one sums the
divergence and what the gradients by logits take off. A top-k teacher needs the first one only: its K columns and the
tail are in every process then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gradients import acc_of, check_index
from .rows import lse_of_nothing, row_key
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
        indices: Tensor | None,
        labels: Tensor | None,
        token_weight: Tensor | None,
        normalizer: Tensor | None,
        options: dict[str, Any],
        row_count: int,
        device: torch.device,
        deferred: bool,
        hidden: Tensor | None = None,
    ) -> None:
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
        self.indices = indices
        self.labels = labels
        self.key = row_key(labels, hidden, acc)
        self.kept = torch.ones(row_count, dtype=torch.bool, device=device)
        if labels is not None:
            self.kept = labels != ignore_index
            check_index(op, "labels", labels, self.kept, shards.vocab, ignore_index)
        if indices is not None:
            _check_top_k(op, indices, shards.vocab)
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
        numbers = [self.beta, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
        loss, _, _, by_q, by_p = _ops.jsd_forward(
            log_q, log_p, None, None, None, None, numbers, True, False, -100, 0, 0, list(needs_grad)
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
            # What lse of this part is above the label's logit.
            values = [largest, rest, torch.where(mine, (largest - at) + rest, 0)]
        if self.indices is not None:
            finish = self._top_k(s, teacher, part, values, needs_grad[0])
        else:
            finish = self._dense(s, teacher, values, needs_grad)
        if self.key is not None:
            values.append(self.key[part])
        # Log-probabilities are taken as they are: there is nothing to normalise.
        gathered = shards.gather(torch.stack(values)).double() if values else s.new_zeros(0)
        different = None
        if self.key is not None:
            name = "student_input" if self.labels is None else "labels"
            different = shards.different(self.op, name, gathered[:, -1], exact=self.labels is not None)
            gathered = gathered[:, :-1]
        hard_of = _combine(gathered[:, 0], gathered[:, 1]) if self.hard_wanted else None
        soft, by_student, by_teacher = finish(gathered[:, 3:] if self.hard_wanted else gathered)
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

    def _dense(self, s: Tensor, teacher: Tensor, values: list[Tensor], needs_grad: tuple[bool, bool]) -> Any:
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
            totals = list(self.shards.gather(torch.stack(sums)).double().sum(0))
            total = totals.pop(0)
            if not self.log_probs:
                # log_q = z - lse: each gradient by z has the sum of those by log_q taken off, times q.
                if needs_grad[0]:
                    by_q.addcmul_(log_q.exp_(), totals.pop(0).to(self.acc).unsqueeze(1), value=-1)
                if needs_grad[1]:
                    by_p.addcmul_(log_p.exp_(), totals.pop(0).to(self.acc).unsqueeze(1), value=-1)
            return total, by_q if needs_grad[0] else None, by_p if needs_grad[1] else None

        return finish

    def _top_k(self, s: Tensor, teacher: Tensor, part: slice, values: list[Tensor], needs_grad: bool) -> Any:
        """`teacher` holds log-probabilities [n, K] of the columns `indices`."""
        assert self.indices is not None
        shards, size, acc = self.shards, s.shape[1], self.acc
        index = self.indices[part]
        mine = shards.owned(index)[shards.rank]
        # One more column takes what other processes have.
        rest = torch.cat([s, s.new_full((s.shape[0], 1), -torch.inf)], 1)
        column = torch.where(mine, index - shards.start, size)
        values += list(torch.where(mine, rest.gather(1, column), 0).t())
        rest.scatter_(1, column, -torch.inf)
        values += [*_log_sum(rest)]

        def finish(parts: Tensor) -> tuple[Tensor, Tensor | None, None]:
            z = parts[:, :-2].sum(0).t()  # [n, K]: each from the one process that has it
            top, log_sum = _combine(parts[:, -2], parts[:, -1])
            nothing = top == -torch.inf
            tail = torch.where(nothing, -torch.inf, top + log_sum)
            log_q = torch.cat([z, tail.unsqueeze(1)], 1).log_softmax(1)
            log_p = teacher.double()
            if self.renormalize:
                log_p = log_p - log_p.logsumexp(1, keepdim=True)
            missing = (1 - log_p.exp().sum(1)).clamp_min(0)
            if self.renormalize or index.shape[1] == shards.vocab:
                missing = torch.zeros_like(missing)
            log_p = torch.cat([log_p, missing.log().unsqueeze(1)], 1)
            soft, by_q, _ = self._divergence(log_q.to(acc), log_p.to(acc).contiguous(), (needs_grad, False))
            if not needs_grad:
                return soft, None, None
            by_z = by_q - log_q.to(acc).exp() * by_q.sum(1, keepdim=True)
            spread = (rest - torch.where(nothing, 0, top).to(acc).unsqueeze(1)).exp_()
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

    def values(self, shape: torch.Size) -> list[Tensor]:
        wanted = ((1, self.soft), (2, self.hard))
        return [torch.where(self.kept, value, 0).reshape(shape) for bit, value in wanted if self.aux & bit]


def _check_top_k(op: str, indices: Tensor, vocab: int) -> None:
    check_index(op, "the teacher's indices", indices.reshape(-1), torch.ones_like(indices.reshape(-1)) > 0, vocab, -1)
    if indices.device.type == "cpu" and indices.shape[0]:
        ordered = indices.sort(1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
        if twice.numel():
            row, column = twice[0].tolist()
            raise ValueError(
                f"{op}: the teacher's indices must be distinct in a row, but got {int(ordered[row, column])} twice "
                f"at row {row}"
            )
