"""Flex attention: PyTorch's scaled_dot_product_attention and compiled flex_attention beside fusegrad.

On CUDA forward and backward are timed each for itself: harness/attention_cuda.py. What follows is the CPU's, all of
it causal. The floor is the arithmetic of a forward's two products over the causal half of the scores, as one large
product; a step with its backward has seven. Names that end in "forward" compute no gradients; those with a class letter
capture a buffer, see docs/design/score_mod.md, and "frozen" ones want no gradient for it.

    python benchmarks/flex_attention.py [--device cpu] [--quick] [--output benchmarks/results]
    python benchmarks/flex_attention.py --family portable [--output benchmarks/results]  # harness/smaller_gpus.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from harness import attention_cuda, peers, smaller_gpus
from harness.benchmark import Benchmark, Options, Plan
from harness.cli import main
from harness.goals import Goal
from harness.launch import launch_case
from harness.model import Case, Implementation, Problem, Unavailable
from harness.reference import relative
from harness.step import Step
from harness.timing import Floor
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

OP = "flex_attention"
MIB = 2**20
SQUARE = 1024
STEP = 3.5  # products of a step over those of a forward
# The backward is about seven tenths of a step: 15% and 50% of it are so much of a step.
CHEAP_GRADIENT, OTHER_GRADIENT = 1 / 1.105, 1 / 1.35


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


@dataclass(frozen=True)
class Variant:
    """What shapes the scores: a score_mod, its buffer if it captures one, and the same over all scores of a head."""

    name: str
    score_mod: Callable[..., Tensor] | None = None
    bias: Tensor | None = None
    dense: Callable[[Tensor, int], Tensor] | None = None


def alibi(case: Case) -> Variant:
    distance = torch.arange(case["S"]) - torch.arange(case["S"])[:, None]
    return Variant(
        "alibi",
        lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1) * 1.0),
        dense=lambda s, h: s + distance * 2.0 ** -(h + 1),
    )


def captured(case: Case) -> list[Variant]:
    """One score_mod for each class of captured gradients."""
    heads, length = case["H"], case["S"]
    generator = torch.Generator().manual_seed(0)

    def floats(*sizes: int) -> Tensor:
        return 0.1 * torch.randn(sizes, generator=generator)

    kinds = torch.randint(64, (length, length), generator=generator, dtype=torch.int32)
    places = torch.randint(100_000, (length, length), generator=generator)
    made: list[tuple[str, Tensor, Callable[[Tensor], Callable[..., Tensor]]]] = [
        ("A scale[h]", floats(heads), lambda t: lambda s, b, h, q, kv: s * t[h]),
        ("B bias[kv]", floats(length), lambda t: lambda s, b, h, q, kv: s + t[kv]),
        ("C scale[q]", floats(length), lambda t: lambda s, b, h, q, kv: s * t[q]),
        ("D rel[h, q - kv]", floats(heads, 2 * length), lambda t: lambda s, b, h, q, kv: s + t[h, q - kv + length]),
        ("E bias[h, q, kv]", floats(heads, length, length), lambda t: lambda s, b, h, q, kv: s + t[h, q, kv]),
        ("F table[kind[q, kv]]", floats(64), lambda t: lambda s, b, h, q, kv: s + t[kinds[q, kv]]),
        ("G table[place[q, kv]]", floats(100_000), lambda t: lambda s, b, h, q, kv: s + t[places[q, kv]]),
    ]
    return [Variant(name, function(bias), bias) for name, bias, function in made]


def problem(case: Case) -> Problem:
    if case.device == "cuda":
        return attention_cuda.problem(case)
    shape = (case["B"], case["H"], case["S"], case["D"])
    make = functools.partial(torch.randn, dtype=case.torch_dtype, device=case.device)
    return Problem(make(3, *shape), torch.empty(0), make(shape))


def floor(problem: Problem) -> Floor:
    if problem.activation.is_cuda:
        return attention_cuda.floor(problem)
    _, batch, heads, length, size = problem.activation.shape
    columns = max(batch * heads * length * length * size // SQUARE**2, 1)
    a, b = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, columns)
    out = torch.empty(SQUARE, columns)
    return Floor("the two products' work as one", lambda: torch.mm(a, b, out=out))


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    if case.device == "cuda":
        return attention_cuda.implementations(case, options)
    mask = create_block_mask(causal, None, None, case["S"], case["S"], device=case.device)

    def sdpa(x: Tensor, target: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x.unbind(0), is_causal=True)

    compiled = torch.compile(flex_attention, dynamic=False)

    def flex(x: Tensor, target: Tensor) -> Tensor:
        return compiled(*x.unbind(0), block_mask=mask)

    plain = Variant("")
    return [
        Implementation("sdpa", sdpa, upstream="rows", floor_scale=STEP, variant=plain),
        Implementation("sdpa forward", sdpa, backward=False, variant=plain),
        Implementation("compile forward", flex, backward=False, variant=plain),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: ours(fusegrad, case, mask)),
    ]


def ours(fusegrad: Any, case: Case, mask: BlockMask) -> list[Implementation]:
    def make(variant: Variant, suffix: str = "", essential: bool = True, **how: Any) -> Implementation:
        def attention(x: Tensor, target: Tensor) -> Tensor:
            if variant.bias is not None:
                # A step ends with the gradients that it made.
                variant.bias.grad = None
                variant.bias.requires_grad_("frozen" not in suffix)
            return fusegrad.flex_attention(*x.unbind(0), score_mod=variant.score_mod, block_mask=mask)

        name = " ".join(part for part in ("fusegrad", variant.name, suffix) if part)
        scale = STEP if how.get("backward", True) else 1.0
        return Implementation(
            name, attention, ours=True, variant=variant, essential=essential, upstream="rows", floor_scale=scale, **how
        )

    plain, slopes = Variant(""), alibi(case)
    found = [make(plain), make(slopes)]
    found += [make(variant, "forward", backward=False) for variant in (plain, slopes)]
    for variant in captured(case):
        found += [make(variant, suffix, essential=False) for suffix in ("frozen", "")]
    return found


class AttentionReference:
    """Output and gradients of a few heads in float64, with all scores in memory."""

    def __init__(self, problem: Problem) -> None:
        self._inputs = problem.activation.double()
        self._upstream = problem.upstream_rows.double()

    def errors(self, step: Step) -> dict[str, float]:
        variant = step.implementation.variant
        results = step.results()
        if variant.score_mod is not None and variant.dense is None:
            return {}  # the tests compare captured gradients
        errors: dict[str, float] = {}
        for head in {0, self._inputs.shape[2] - 1}:
            x = self._inputs[:, 0, head].clone().requires_grad_()
            score = x[0] @ x[1].T * x.shape[-1] ** -0.5
            score = score if variant.dense is None else variant.dense(score, head)
            out = score.masked_fill(torch.ones_like(score).triu(1).bool(), -torch.inf).softmax(-1) @ x[2]
            self._note(errors, "loss", results["loss"][0, head], out.detach())
            if "activation" in results:
                (grad,) = torch.autograd.grad(out, x, self._upstream[0, head])
                self._note(errors, "activation", results["activation"][:, 0, head], grad)
        return errors

    @staticmethod
    def _note(errors: dict[str, float], name: str, value: Tensor, expected: Tensor) -> None:
        errors[name] = max(errors.get(name, 0.0), relative(value, expected))


def plans(device: str, quick: bool) -> list[Plan]:
    if device == "cuda":
        return attention_cuda.plans(quick)
    case = Case(OP, (("B", 1), ("H", 8), ("S", 2048), ("D", 64)), "float32", device)
    goals = [
        Goal("forward no slower than compiled", ("fusegrad forward",), than="compile forward", min_speedup=1),
        Goal("forward <= 1.3 x sdpa", ("fusegrad forward",), than="sdpa forward", min_speedup=1 / 1.3),
        Goal("step <= 1.3 x sdpa", ("fusegrad",), than="sdpa", min_speedup=1 / 1.3),
        Goal("forward with ALiBi <= 1.5 x sdpa", ("fusegrad alibi forward",), than="sdpa forward", min_speedup=1 / 1.5),
        Goal("step with ALiBi <= 1.5 x sdpa", ("fusegrad alibi",), than="sdpa", min_speedup=1 / 1.5),
    ]
    if not quick:
        for variant in captured(Case(OP, (("B", 1), ("H", 1), ("S", 2), ("D", 1)), "float32", device)):
            cheap = variant.name[0] in "ABCD"
            goals.append(
                Goal(
                    f"gradient of {variant.name}: <= {15 if cheap else 50}% of the backward",
                    (f"fusegrad {variant.name}",),
                    than=f"fusegrad {variant.name} frozen",
                    min_speedup=CHEAP_GRADIENT if cheap else OTHER_GRADIENT,
                )
            )
    found = [Plan(case, tuple(goals), memory=False)]
    if not quick:
        long = Case(OP, (("B", 1), ("H", 1), ("S", 16384), ("D", 64)), "float32", device)
        # The output, the three gradients, and the one of the tensor that holds all three inputs.
        results_mib = 7 * long["H"] * long["S"] * long["D"] * 4 / MIB
        memory = Goal("peak <= 64 MiB beyond what is returned", ("fusegrad",), max_mib=64 + results_mib)
        found.append(Plan(long, (memory,), only="^fusegrad$", accuracy=False))
    return found


BENCHMARK = Benchmark(
    op=OP,
    module="flex_attention",
    problem=problem,
    implementations=implementations,
    floor=floor,
    plans=plans,
    letters=("B", "H", "S", "D"),
    launch_case=lambda device: launch_case(OP, (("B", 1), ("H", 1), ("S", 8), ("D", 8)), device),
    reference=lambda problem: (attention_cuda.Reference if problem.activation.is_cuda else AttentionReference)(problem),
    extra=lambda device: attention_cuda.first_calls() if device == "cuda" else {},
)

if __name__ == "__main__":
    asked = sys.argv[1:]
    family = any(one.partition("=")[0] == "--family" for one in asked)
    sys.exit(smaller_gpus.main(asked) if family else main(BENCHMARK))
