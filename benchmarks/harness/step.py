"""One forward, or forward and backward, of an implementation on a problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.model import Implementation, Problem


class _Source(torch.autograd.Function):
    """Hands out a buffer as the output of an earlier op, and ends the backward there.

    Logits and hidden states are never leaves in a model, and in-place losses refuse leaves. A tensor that
    shares the buffer's storage without being a view of it costs nothing and may be overwritten.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, buffer: Tensor, sink: list[Tensor] | None) -> Tensor:
        ctx.sink = sink
        alias = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        return alias.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        if ctx.sink is not None:
            ctx.sink.extend(grads)
        return None, None, None


class Step:
    """Runs an implementation again and again on one problem."""

    def __init__(self, problem: Problem, implementation: Implementation) -> None:
        self.problem = problem
        self.implementation = implementation
        self._anchor = torch.zeros((), device=problem.activation.device, requires_grad=True)
        self._pending: Tensor | None = None
        if implementation.overwrites:
            problem.keep_copy()

    def prepare(self) -> None:
        """Outside the measured region: undo what the last run overwrote; the forward of a backward alone."""
        if self.implementation.overwrites:
            self.problem.restore()
        if self.implementation.backward_alone:
            self._pending, _ = self._forward(None)

    def run(self) -> None:
        if self._pending is None:
            self._run(None)
        else:
            loss, self._pending = self._pending, None
            loss.backward(self.upstream(loss))

    def results(self) -> dict[str, Tensor]:
        """The loss and the gradients of a run on fresh inputs: 'loss', 'activation', 'weight'."""
        self.prepare()
        self._pending = None
        return self._run([])

    def row_scale(self) -> Tensor:
        """[N] float64: the upstream gradient of each row's loss."""
        rows = self.problem.upstream_rows.double()
        upstream = self.implementation.upstream
        return rows if upstream == "rows" else torch.full_like(rows, float(upstream) / rows.numel())

    def _run(self, sink: list[Tensor] | None) -> dict[str, Tensor]:
        problem, implementation = self.problem, self.implementation
        if not implementation.backward:
            with torch.no_grad():
                return {"loss": implementation.loss(problem.activation, *problem.others(problem.weight))}
        loss, weight = self._forward(sink)
        loss.backward(self.upstream(loss))
        results = {"loss": loss.detach()}
        if sink:
            results["activation"] = sink[0]
        if weight is not None and weight.grad is not None:
            results["weight"] = weight.grad
        return results

    def _forward(self, sink: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        """The loss, and the leaf that stands for the weight."""
        problem, implementation = self.problem, self.implementation
        activation = _Source.apply(self._anchor, problem.activation, sink)
        trains = not implementation.frozen_weight
        weight = None if problem.weight is None else problem.weight.detach().requires_grad_(trains)
        return implementation.loss(activation, *problem.others(weight)), weight

    def upstream(self, loss: Tensor) -> Tensor | None:
        """What the implementation's loss is differentiated with."""
        upstream = self.implementation.upstream
        if upstream == "rows":
            return self.problem.upstream_rows.to(loss.dtype)
        return None if upstream == 1.0 else torch.full_like(loss, float(upstream))
