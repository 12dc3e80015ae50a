"""Whole training steps of models whose attention has a learned bias, or heads of 72: fusegrad beside the models' own
attentions.

T5's encoder (buckets), Swin (tables of windows), SigLIP's vision tower (D 72, no bias), blocks of ESMFold's trunk
(triangle attention), all from transformers with random weights, AdamW, a loss of the last hidden state. "fusegrad" is
one line (`attn_implementation`), "fusegrad table" a few that read the table where it is. The error "weight" is that of
the gradient of a bias table: the first one, of T5 the only one, of the trunk its projection's; of SigLIP of a query
projection's.

    python benchmarks/biased_models.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import sys

from harness.benchmark import Options, Plan
from harness.biased_models import SIGLIP, SWIN, T5, TRUNK, implementations, make, reference
from harness.cli import main
from harness.goals import Goal
from harness.model import Case
from harness.training import Found, TrainingBenchmark

LETTERS = ("B", "S", "L", "H")


def plans(device: str, quick: bool) -> list[Plan]:
    def case(kind: str, *sizes: int) -> Case:
        dtype = "bfloat16" if device == "cuda" else "float32"
        return Case(kind, tuple(zip(LETTERS, sizes, strict=True)), dtype, device)

    if device == "cpu":
        small = {T5: (2, 48, 2, 128), SWIN: (1, 224, 1, 32), SIGLIP: (2, 56, 2, 144), TRUNK: (1, 24, 2, 64)}
        large = {T5: (2, 512, 4, 512), SWIN: (4, 224, 2, 96), SIGLIP: (2, 224, 2, 576), TRUNK: (1, 96, 2, 128)}
        return [Plan(case(kind, *sizes), ()) for kind, sizes in (small if quick else large).items()]

    def goals(subjects: tuple[str, ...]) -> tuple[Goal, ...]:
        return tuple(
            Goal(f"faster than {other} in no more memory", subjects, than=other, min_speedup=1, max_memory_share=1)
            for other in ("eager", "sdpa")
        )

    return [
        Plan(case(T5, 8, 2048, 12, 768), goals(("fusegrad table",))),
        Plan(case(T5, 32, 512, 12, 768), goals(("fusegrad table",))),
        Plan(case(SWIN, 64, 224, 18, 128), goals(("fusegrad table",))),
        Plan(case(SIGLIP, 16, 384, 12, 1152), goals(("fusegrad",))),
        Plan(case(TRUNK, 1, 256, 4, 128), goals(("fusegrad",))),
    ]


def found(case: Case, options: Options) -> Found:
    return implementations(case)


BENCHMARK = TrainingBenchmark(
    op="biased_models", make=make, implementations=found, reference=reference, plans=plans, letters=LETTERS
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
