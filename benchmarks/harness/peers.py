"""Other libraries' implementations, each where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.divergence import BETAS, Divergence
from harness.failure import Outcome
from harness.model import Case, Implementation, Unavailable

Found = list[Implementation | Unavailable]


def optional(name: str, module: str, build: Callable[[Any], list[Implementation]]) -> Found:
    """What `build` makes of the imported module, or why it cannot be imported."""
    outcome = Outcome(lambda: build(importlib.import_module(module)))
    return [Unavailable(name, outcome.failure)] if outcome.failure else list(outcome.value)


def cuda_only(case: Case, name: str, module: str, build: Callable[[Any], list[Implementation]]) -> Found:
    if case.device != "cuda":
        return [Unavailable(name, "runs on CUDA only")]
    return optional(name, module, build)


def torch_cross_entropy(case: Case) -> list[Implementation]:
    """Eager in the logits' dtype, eager on float32 logits as most models do, and that compiled."""

    def upcast(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target)

    found = [Implementation("eager", F.cross_entropy, floor_scale=1.5)]
    if case.dtype != "float32":
        found.append(Implementation("eager float32", upcast, floor_scale=1.5, essential=False))
    return [*found, Implementation("compile", torch.compile(upcast, dynamic=False), floor_scale=1.5)]


def liger_cross_entropy(case: Case) -> Found:
    def build(module: Any) -> list[Implementation]:
        loss = module.liger_cross_entropy
        return [
            Implementation("liger", loss, overwrites=True),
            Implementation("liger upstream 0.37", loss, overwrites=True, upstream=0.37, essential=False),
        ]

    return cuda_only(case, "liger", "liger_kernel.transformers.functional", build)


def quack_cross_entropy(case: Case) -> Found:
    def build(module: Any) -> list[Implementation]:
        def inplace(logits: Tensor, target: Tensor) -> Tensor:
            return module.cross_entropy(logits, target, inplace_backward=True)

        return [
            Implementation("quack", module.cross_entropy, floor_scale=1.5),
            Implementation("quack inplace", inplace, overwrites=True),
        ]

    return cuda_only(case, "quack", "quack.cross_entropy", build)


def torch_linear(case: Case) -> list[Implementation]:
    def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ weight.T, target)

    def upcast(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), target)

    found = [Implementation("eager", eager)]
    if case.dtype != "float32":
        found.append(Implementation("eager float32", upcast, essential=False))
    return [*found, Implementation("compile", torch.compile(upcast, dynamic=False))]


def liger_linear(case: Case) -> Found:
    """chunk_mem_const bounds Liger's memory; 1 is its default."""

    def build(module: Any) -> list[Implementation]:
        def with_options(**options: Any) -> Callable[..., Tensor]:
            return lambda hidden, weight, target: module.liger_fused_linear_cross_entropy(
                hidden, weight, target, **options
            )

        found = []
        for constant in (1, 4, 16):
            loss = with_options(chunk_mem_const=constant)
            found.append(Implementation(f"liger chunk_mem={constant}", loss, essential=constant > 1))
        for constant in (4, 16):
            loss = with_options(chunk_mem_const=constant, accum_dtype=torch.float32)
            name = f"liger float32 chunk_mem={constant}"
            found.append(Implementation(name, loss, essential=constant == 16))
        return found

    return cuda_only(case, "liger", "liger_kernel.transformers.functional", build)


def liger_sm90_linear(case: Case) -> Found:
    def build(module: Any) -> list[Implementation]:
        def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return module.liger_fused_linear_cross_entropy_sm90(hidden, weight, target)

        return [Implementation("liger sm90", loss)]

    module = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    return cuda_only(case, "liger sm90", module, build)


def quack_linear(case: Case, autotune: bool) -> Found:
    """Its scaled-exponential pipeline; its plain one with products untuned or, on request, tuned."""

    def build(module: Any) -> list[Implementation]:
        def with_options(**options: Any) -> Callable[..., Tensor]:
            return lambda hidden, weight, target: module.chunked_linear_cross_entropy(hidden, weight, target, **options)

        found = [
            Implementation(f"quack chunk={chunk}", with_options(chunk_size=chunk, use_scaled_exp=True))
            for chunk in (2048, 8192)
        ]
        plain = with_options(chunk_size=2048, use_scaled_exp=False, tuned=autotune)
        name = "quack plain tuned chunk=2048" if autotune else "quack plain chunk=2048"
        return [*found, Implementation(name, plain, essential=autotune)]

    return cuda_only(case, "quack", "quack.linear_cross_entropy", build)


def cce_linear(case: Case) -> Found:
    """By default it skips gradients that are small; without the filter it is exact to rounding."""

    def build(module: Any) -> list[Implementation]:
        def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return module.linear_cross_entropy(hidden, weight, target, filter_eps=None)

        return [
            Implementation("cce", module.linear_cross_entropy),
            Implementation("cce exact", exact, essential=False),
        ]

    return cuda_only(case, "cce", "cut_cross_entropy", build)


def torch_jsd(case: Case) -> Found:
    """The formulas in float32, eager and compiled."""
    found: Found = []
    for variant in BETAS:

        def loss(student: Tensor, labels: Tensor, teacher: Tensor, *_: Tensor, variant: Any = variant) -> Tensor:
            return variant.rows(student.float(), labels, teacher.float()).mean()

        found += _eager_and_compiled(case, loss, variant, floor_scale=1.5)
    return found


def torch_linear_jsd(case: Case) -> Found:
    """Products in the inputs' dtype, the formulas in float32."""
    found: Found = []
    for variant in BETAS:

        def loss(
            hidden: Tensor,
            weight: Tensor,
            labels: Tensor,
            teacher_hidden: Tensor,
            teacher_weight: Tensor,
            variant: Any = variant,
        ) -> Tensor:
            teacher = (teacher_hidden @ teacher_weight.T).float()
            return variant.rows((hidden @ weight.T).float(), labels, teacher).mean()

        found += _eager_and_compiled(case, loss, variant)
    return found


def _eager_and_compiled(case: Case, loss: Callable[..., Tensor], variant: Divergence, **how: Any) -> Found:
    """On the CPU, where the process that measures a compiled one's memory takes 20 s, the default alone compiled."""
    default = variant == Divergence()
    how |= {"variant": variant, "essential": default}
    found: Found = [Implementation(f"eager{variant.suffix}", loss, **how)]
    if default or case.device == "cuda":
        found.append(Implementation(f"compile{variant.suffix}", torch.compile(loss, dynamic=False), **how))
    return found


def liger_jsd(case: Case) -> Found:
    """It takes log-probabilities, so from logits both log_softmax are part of it. Its beta is ours."""

    def build(module: Any) -> list[Implementation]:
        def make(name: str, variant: Divergence, essential: bool = True) -> Implementation:
            def loss(student: Tensor, labels: Tensor, teacher: Tensor, *_: Tensor) -> Tensor:
                if not variant.log_probs:
                    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
                return module.liger_jsd(student, teacher, beta=variant.beta)

            return Implementation(name, loss, floor_scale=1.5, variant=variant, essential=essential)

        return [
            make("liger", Divergence()),
            make("liger log_probs", Divergence(log_probs=True)),
            make("liger beta=0", Divergence(beta=0), essential=False),
            make("liger beta=1", Divergence(beta=1), essential=False),
        ]

    return cuda_only(case, "liger", "liger_kernel.transformers.functional", build)


def liger_linear_jsd(case: Case) -> Found:
    def build(module: Any) -> list[Implementation]:
        def make(name: str, variant: Divergence, essential: bool = False, **options: Any) -> Implementation:
            def loss(
                hidden: Tensor, weight: Tensor, labels: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor
            ) -> Tensor:
                return module.liger_fused_linear_jsd(
                    hidden, weight, teacher_hidden, teacher_weight, jsd_beta=variant.beta, **options
                )

            return Implementation(name, loss, variant=variant, essential=essential)

        return [
            make("liger", Divergence(), essential=True),
            make("liger float32", Divergence(), accum_dtype=torch.float32),
            make("liger beta=0", Divergence(beta=0)),
            make("liger beta=1", Divergence(beta=1)),
        ]

    return cuda_only(case, "liger", "liger_kernel.transformers.functional", build)
