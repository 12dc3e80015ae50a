"""Whole training steps of Llama models: fusegrad beside transformers, torch.compile, Liger, quack and CCE.

Random weights and tokens, AdamW. Four kinds of step: a Llama-3.2-1B-shaped model; the same at four times the batch,
with activation checkpoints; its distillation into one of half the width, by the Jensen–Shannon divergence; attention
with a learned relative bias, at 8192 tokens. Peers' heads are called with the model's hidden states, ours by
fusegrad.integrations.transformers.apply.

    python benchmarks/train_step.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import sys

from harness.benchmark import Options, Plan
from harness.cli import main
from harness.goals import Goal
from harness.llama import CHECKPOINTS, DISTILLATION, RELATIVE_BIAS, TRAIN, make
from harness.llama_bias import exact_attention, relative_biases, with_attention
from harness.llama_losses import divergences, exact_divergence, exact_loss, losses
from harness.model import Case
from harness.training import Found, Method, TrainingBenchmark

LETTERS = ("B", "S", "L", "H", "V")
# The leanest peer's, in an earlier run on an H200.
LEANEST_GIB = {TRAIN: 34.81, CHECKPOINTS: 20.63}
OURS = (
    "fusegrad",
    "fusegrad inplace",
    "fusegrad lean",
    "fusegrad lean inplace",
    "fusegrad with attention",
    "fusegrad lean inplace with attention",
)


def implementations(case: Case, options: Options) -> Found:
    if case.op == DISTILLATION:
        return divergences(case)
    return relative_biases(case) if case.op == RELATIVE_BIAS else losses(case, options)


def reference(case: Case) -> Method:
    if case.op == RELATIVE_BIAS:
        return with_attention("exact", exact_attention)
    return Method("exact", exact_divergence if case.op == DISTILLATION else exact_loss)


def goals(kind: str, others: tuple[str, ...]) -> tuple[Goal, ...]:
    limit = LEANEST_GIB.get(kind)
    text = "" if limit is None else f", and than {limit} GiB"
    subjects = ("fusegrad", "fusegrad attention") if kind == RELATIVE_BIAS else OURS
    return tuple(
        Goal(
            f"more tokens/s than {other} in no more memory{text}",
            subjects,
            max_mib=None if limit is None else limit * 1024,
            than=other,
            min_speedup=1,
            max_memory_share=1,
        )
        for other in others
    )


def plans(device: str, quick: bool) -> list[Plan]:
    def case(kind: str, *sizes: int) -> Case:
        dtype = "bfloat16" if device == "cuda" else "float32"
        return Case(kind, tuple(zip(LETTERS, sizes, strict=True)), dtype, device)

    if device == "cpu":
        sizes = (2, 64, 2, 128, 512) if quick else (2, 512, 4, 512, 32000)
        without = r"^(?!.*compile)" if quick else r"^(?!.*compile model)"  # half a minute and more of Inductor's time
        return [
            Plan(case(kind, *sizes), tuple(_cpu_goals(kind, quick)), only="" if kind == RELATIVE_BIAS else without)
            for kind in (TRAIN, CHECKPOINTS, DISTILLATION, RELATIVE_BIAS)
        ]
    chunks = tuple(f"liger chunk_mem={n}" for n in (4, 16))
    more = ("liger float32 chunk_mem=16", "liger sm90", "quack chunk=2048", "quack chunk=8192", "cce")
    others = ("transformers", "eager", "compile", *chunks, *more)
    heads = r"^(transformers|compile|liger( chunk_mem=(4|16))?|cce|fusegrad( lean)?( inplace)?( with attention)?)$"
    few = ("transformers", "compile", *chunks, "cce")
    return [
        Plan(case(TRAIN, 4, 4096, 16, 2048, 128256), goals(TRAIN, others)),
        Plan(case(CHECKPOINTS, 16, 4096, 16, 2048, 128256), goals(CHECKPOINTS, few), only=heads, accuracy=False),
        Plan(case(DISTILLATION, 2, 4096, 16, 2048, 128256), goals(DISTILLATION, ("eager", "compile", "liger"))),
        # In float64 a layer's scores would take 16 GiB.
        Plan(case(RELATIVE_BIAS, 1, 8192, 8, 2048, 32000), goals(RELATIVE_BIAS, ("eager", "compile")), accuracy=False),
    ]


def _cpu_goals(kind: str, quick: bool) -> list[Goal]:
    """Beside what PyTorch alone does; steps of the quick sizes are the host's overhead."""
    if quick:
        return []
    subjects = ("fusegrad",) if kind == RELATIVE_BIAS else OURS
    return [Goal("more tokens/s than eager", subjects, than="eager", min_speedup=1)]


BENCHMARK = TrainingBenchmark(
    op=TRAIN, make=make, implementations=implementations, reference=reference, plans=plans, letters=LETTERS
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
