"""Log-probabilities of tokens and entropies, both with gradients: eager, torch.compile, TRL, Liger, verl and fusegrad
beside the three products.

What is timed is `log_prob + entropy / 2` of each row, with an upstream gradient for each; beside it GRPO's whole loss
(rows named so), and calls with a support, into a buffer and with batch invariance. The floor is the three matrix
products alone (logits, gradient of the input, gradient of the weight), back to back on the op's own data. Memory is
above the inputs and counts both gradients.

verl's package cannot be imported beside a current transformers, nor without Ray. Its kernel and its head can, from a
copy of the package whose `verl/__init__.py` and `verl/utils/__init__.py` are empty files.

    python benchmarks/token_log_prob.py [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import peers
from harness.benchmark import Benchmark, Options, Plan
from harness.cli import main
from harness.goals import Goal
from harness.launch import launch_case
from harness.model import Case, Implementation, Unavailable
from harness.reference import CHUNK_BYTES, Reference
from harness.step import Step
from linear_cross_entropy import floor, problem
from torch import Tensor

OP = "token_log_prob"
MIB = 2**20
BONUS = 0.5
SIZES = ((8192, 4096, 151936), (8192, 4096, 128256))
CPU_SIZES = (1024, 512, 32000)
KEPT_RATIO, KEPT_MIB = 1.10, 2560  # beside the gradients, as below
LEAN_RATIO, LEAN_MIB = 1.40, 265
SUPPORTS = {False: (64, 256, 1024), True: (256,)}
PEERS = ("compile", "trl", "trl chunked", "liger scaled", "verl", "verl chunked")
SEQUENCES = 8  # of GRPO's loss


def objective(log_prob: Tensor, entropy: Tensor) -> Tensor:
    return log_prob.float() + BONUS * entropy.float()


class LogProbReference(Reference):
    """The objective of each row, and its gradients for an upstream of 1."""

    def errors(self, step: Step) -> dict[str, float]:
        """None of a softmax over other classes."""
        return super().errors(step) if step.implementation.variant is None else {}

    def _logit_grads(self, index: Tensor) -> Tensor:
        return self._of(self._logits(index), self._target[index])[1]

    def _losses_and_columns(self) -> tuple[Tensor, Tensor]:
        rows, columns = [], []
        assert self._weight is not None
        chunk = max(1, CHUNK_BYTES[self._activation.device.type] // (16 * len(self._weight)))
        for start in range(0, len(self._activation), chunk):
            part = slice(start, start + chunk)
            value, grads = self._of(self._logits(part), self._target[part])
            rows.append(value)
            columns.append(grads[:, self.columns])
        return torch.cat(rows), torch.cat(columns)

    def _of(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        chosen = log_p.gather(1, target[:, None])[:, 0]
        grads = -p - BONUS * p * (log_p + entropy[:, None])
        grads.scatter_add_(1, target[:, None], torch.ones_like(chosen)[:, None])
        return chosen + BONUS * entropy, grads


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    return [
        *_torch(case),
        *peers.optional("trl", "trl.trainer.utils", _trl),
        *peers.optional("trl chunked", "trl.kernels", _trl_chunked),
        *peers.cuda_only(case, "liger scaled", "liger_kernel.ops", _liger),
        *peers.cuda_only(case, "liger grpo", "liger_kernel.chunked_loss", _liger_grpo),
        *peers.cuda_only(case, "verl", "verl.utils.kernel.linear_cross_entropy", _verl),
        *peers.optional("verl chunked", "verl.utils.experimental.torch_functional", _verl_chunked),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: ours(fusegrad, case, options.quick)),
    ]


def _rows(name: str, loss: Callable[..., Tensor], **how: Any) -> Implementation:
    return Implementation(name, loss, upstream="rows", **how)


def _torch(case: Case) -> list[Implementation]:
    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_p = (hidden @ weight.T).float().log_softmax(-1)
        return objective(log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))

    return [_rows("eager", plain, essential=False), _rows("compile", torch.compile(plain, dynamic=False))]


def _trl(module: Any) -> list[Implementation]:
    """The path of its GRPO trainer: logits of the model's dtype, and one kernel over them where Triton is."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return objective(*module.selective_log_softmax_and_entropy(hidden @ weight.T, target))

    return [_rows("trl", loss)]


def _trl_chunked(module: Any) -> list[Implementation]:
    """What its trainers take since 1.16: log-probabilities from hidden states, by tiles of the logits."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = module.ChunkedLogProbFunction.apply(
            hidden, weight, None, target, 1.0, 32768, None, 1.0, ("log_probs", "entropy")
        )
        return objective(out[0], out[1])

    return [_rows("trl chunked", loss)]


def grpo(log_prob: Tensor) -> Tensor:
    """GRPO's loss of the first update: all advantages are 1, so that the ratio's gradient alone counts."""
    ratio = (log_prob - log_prob.detach()).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


def _liger_grpo(module: Any) -> list[Implementation]:
    fused = module.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        states, ids = hidden.unflatten(0, (SEQUENCES, -1)), target.unflatten(0, (SEQUENCES, -1))
        return fused(states, weight, ids, torch.ones_like(ids), torch.ones(SEQUENCES, device=ids.device))[0]

    return [Implementation("liger grpo", loss, variant="grpo")]


def _liger(module: Any) -> list[Implementation]:
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll, entropy = function.apply(hidden, weight, target, 1.0, -100, 1, True)
        return objective(-nll, entropy)

    return [_rows("liger scaled", loss)]


def _verl(module: Any) -> list[Implementation]:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return objective(*module.linear_cross_entropy(hidden, weight, target, 1.0, "none"))

    return [_rows("verl", loss)]


def _verl_chunked(module: Any) -> list[Implementation]:
    """Its head without a kernel: 512 rows at a time, in both passes."""
    fused = module.FusedLinearForPPO(impl_backend="torch")

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return objective(*fused(hidden, weight, target, 1.0))

    return [_rows("verl chunked", loss)]


def ours(fusegrad: Any, case: Case, quick: bool) -> list[Implementation]:
    def make(name: str, extra: Callable[[Tensor], dict[str, Any]], **how: Any) -> Implementation:
        made: dict[str, Any] = {}

        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            if not made:  # before anything is timed
                made.update(extra(target))
            return objective(*fusegrad.linear_log_prob(hidden, weight, target, **made))

        return _rows(f"fusegrad{name}", loss, ours=True, **how)

    rows, vocabulary = case["N"], case["V"]

    from fusegrad.integrations.lazy_logits import default_workspace

    def policy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return grpo(fusegrad.linear_log_prob(hidden, weight, target, return_entropy=False).log_prob)

    def support(target: Tensor, count: int) -> Tensor:
        """Distinct ids of each row, the target's first."""
        steps = torch.arange(count, device=target.device) * (vocabulary // count)
        return (target[:, None] + steps) % vocabulary

    found = [
        make("", lambda _: {}),
        make(" recompute", lambda _: {"workspace_mib": LEAN_MIB}),
        make(" of TRL's trainers", lambda t: {"workspace_mib": default_workspace(rows, t.device)}),
        Implementation("fusegrad grpo", policy, ours=True, variant="grpo"),
        make(" batch invariant", lambda _: {"batch_invariant": True}, essential=False),
        make(" temperature a row", lambda t: {"logit_scale": torch.ones(rows, device=t.device)}),
    ]
    supports = SUPPORTS[quick]
    return found + [
        make(f" support {k}", lambda t, k=k: {"support": support(t, k)}, variant=k)
        for k in supports
        if vocabulary >= 2 * k
    ]


def _goals(rows: int, hidden: int, vocabulary: int, quick: bool) -> tuple[Goal, ...]:
    gradients = math.ceil((rows + vocabulary) * hidden * 2 / MIB)
    kept, lean = gradients + KEPT_MIB, gradients + LEAN_MIB
    text = f"<= {KEPT_RATIO} x floor at <= {kept} MiB"
    goals = [
        Goal(text, ("fusegrad",), max_floor_ratio=KEPT_RATIO, max_mib=kept),
        Goal(
            f"recomputed <= {LEAN_RATIO} x floor at <= {lean} MiB",
            ("fusegrad recompute",),
            max_floor_ratio=LEAN_RATIO,
            max_mib=lean,
        ),
    ]
    for peer in PEERS:
        goals.append(
            Goal(f"ahead of {peer}", ("fusegrad", "fusegrad recompute"), than=peer, min_speedup=1, max_memory_share=1)
        )
    goals.append(
        Goal(
            "in TRL's trainers ahead of trl chunked",
            ("fusegrad of TRL's trainers",),
            than="trl chunked",
            min_speedup=1,
            max_memory_share=1,
        )
    )
    goals.append(Goal("ahead of liger grpo", ("fusegrad grpo",), than="liger grpo", min_speedup=1, max_memory_share=1))
    for name in (" temperature a row", *(f" support {k}" for k in SUPPORTS[quick])):
        subject = f"fusegrad{name}"
        goals.append(Goal(f"{name.strip()}: <= 1.05 of without", (subject,), than="fusegrad", min_speedup=1 / 1.05))
    return tuple(goals)


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cpu":
        sizes = tuple(zip("NHV", CPU_SIZES, strict=True))
        return [Plan(Case(OP, sizes, "float32", device), memory=False)]
    return [
        Plan(Case(OP, tuple(zip("NHV", sizes, strict=True)), "bfloat16", device), _goals(*sizes, quick))
        for sizes in SIZES
    ]


BENCHMARK = Benchmark(
    op=OP,
    module="token_log_prob",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("N", "H", "V"),
    launch_case=lambda device: launch_case(OP, (("N", 4), ("H", 32), ("V", 64)), device),
    launch_pairs=(("fusegrad", "compile", "leaf"),),
    reference=LogProbReference,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
