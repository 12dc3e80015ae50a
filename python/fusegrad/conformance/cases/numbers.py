"""Rules 11 to 13: how exact losses and gradients are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import formulas
from ..case import EVERY, case
from ..problem import Loss, Problem, Program, Tensors, plain
from ..verdict import ACCURACY, Wrong, check, distance


def _eager(problem: Problem) -> Loss:
    function = formulas.attention if problem.op == "flex_attention" else getattr(formulas, problem.op)

    def loss(t: Tensors, **options: object) -> Tensor:
        return problem._call(function, t, options)

    return loss


def compare_with_eager(problem: Problem, program: Program = plain, frozen: tuple[str, ...] = ()) -> None:
    """Rule 12: no gradient's error is more than 1.5 times that of PyTorch's own ops in the same dtype."""
    _, truth = problem.gradients(program, problem.truth, problem.exact(frozen))
    _, eager = problem.gradients(program, _eager(problem), problem.leaves(frozen))
    _, found = problem.gradients(program, problem.ours, problem.leaves(frozen))
    for name, exact in truth.items():
        if found[name].dtype != problem.dtype:
            raise Wrong(f"gradient of {name}: {found[name].dtype} instead of {problem.dtype}")
        error, bound = distance(found[name], exact), distance(eager[name], exact)
        if not error <= ACCURACY * bound + 1e-7:
            raise Wrong(
                f"gradient of {name}: {error / max(bound, 1e-300):.2g} times the error of PyTorch's own ops", error
            )


@case(12, "bfloat16: at most 1.5 times eager's error", EVERY, dtype=torch.bfloat16, rows=256)
def accuracy_bfloat16(problem: Problem) -> None:
    compare_with_eager(problem)


@case(12, "float16: at most 1.5 times eager's error", EVERY, dtype=torch.float16, rows=256)
def accuracy_float16(problem: Problem) -> None:
    compare_with_eager(problem)


@case(
    11,
    "a head's gradient over many chunks, bfloat16: at most 1.5 times eager's error",
    ("linear_cross_entropy", "linear_jsd"),
    dtype=torch.bfloat16,
    rows=2048,
    classes=1024,
    hidden=64,
)
def many_chunks(problem: Problem) -> None:
    compare_with_eager(problem)


@case(11, "float16 mean over many rows: no gradient vanishes", dtype=torch.float16, rows=4096, classes=64)
def many_rows_float16(problem: Problem) -> None:
    """The upstream gradient is a GradScaler's, without which most would be below float16's range."""
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    (value.float() * 4096).backward()
    _, truth = problem.gradients(plain, problem.truth, problem.exact())
    for name, exact in truth.items():
        check(f"gradient of {name}", t[name].grad, exact * (4096 / 0.37), problem.dtype)


@case(11, "logits with an offset of 20000, float32", ("cross_entropy", "jsd"), dtype=torch.float32)
def large_offset(problem: Problem) -> None:
    """A log-sum-exp in one float32 would be off by 1e-3 there, and so would each probability."""
    for name in ("input", "student", "teacher"):
        if name in problem.tensors:
            problem.tensors[name] = (problem.tensors[name] + 20000).float().double()
    problem.compare(plain)


@case(11, "logits with an offset of 2000 by a bias, float32", ("linear_cross_entropy",), dtype=torch.float32)
def large_offset_bias(problem: Problem) -> None:
    problem.tensors["bias"] = torch.full((128,), 2000.0, dtype=torch.float64)
    problem.compare(plain)


@case(11, "logits of a deviation of 200, float32", ("cross_entropy",), dtype=torch.float32)
def large_logits(problem: Problem) -> None:
    problem.tensors["input"] = (problem.tensors["input"] * 200).float().double()
    problem.compare(plain)


@case(11, "logits of minus infinity", ("cross_entropy", "jsd"))
def minus_infinity(problem: Problem) -> None:
    """Columns that are masked out in all rows; no target is one of them."""
    for name in ("input", "student", "teacher"):
        if name in problem.tensors:
            problem.tensors[name][:, 100:] = -math.inf
    if "target" in problem.tensors:
        problem.tensors["target"] %= 100
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    (found,) = torch.autograd.grad(value, t[problem.first], torch.full_like(value, 0.37))
    # The formulas of the columns that are left: those of minus infinity have a gradient of 0.
    exact = problem.exact()
    left = {n: (x[:, :100] if x.is_floating_point() else x) for n, x in exact.items()}
    truth = problem.truth(left)
    (expected,) = torch.autograd.grad(truth, exact[problem.first], torch.full_like(truth, 0.37))
    check("loss", value, truth, problem.dtype)
    check(f"gradient of {problem.first}", found, expected, problem.dtype)


@case(12, "each gradient in its own tensor's dtype", ("linear_cross_entropy", "linear_jsd"), may_raise=True)
def mixed_dtypes(problem: Problem) -> None:
    """A float32 weight with a bfloat16 input, as mixed precision without autocast has it."""
    t = problem.leaves(frozen=problem.leaf_names)
    first, weight = problem.leaf_names[:2]
    x = t[first].to(torch.bfloat16).requires_grad_()
    w = t[weight].float().requires_grad_()
    given = {**t, first: x * 1, weight: w}
    if "teacher_input" in t:
        given |= {n: t[n].to(torch.bfloat16) for n in ("teacher_input", "teacher_weight")}
    problem.ours(given).backward()
    for name, leaf in ((first, x), (weight, w)):
        if leaf.grad is None or leaf.grad.dtype != leaf.dtype:
            raise Wrong(f"gradient of {name}: {None if leaf.grad is None else leaf.grad.dtype}")
    exact = problem.exact()
    truth = problem.truth(exact)
    for name, gradient in zip((first, weight), torch.autograd.grad(truth, [exact[first], exact[weight]]), strict=True):
        check(f"gradient of {name}", x.grad if name == first else w.grad, gradient, torch.bfloat16)


@case(13, "more than 2^31 logits", ("cross_entropy",), devices=("cuda",), heavy=True, dtype=torch.bfloat16)
def large(problem: Problem) -> None:
    """The last rows' gradient."""
    classes, rows = 131072, 16384 + 64
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    x[-8:] = torch.randn(8, classes, generator=generator, device="cuda", dtype=torch.float32).bfloat16()
    target = torch.full((rows,), 7, device="cuda")
    tail = x[-8:].double().cpu().requires_grad_()
    x.requires_grad_()
    value = problem.ours({"input": x * 1, "target": target}, reduction="sum")
    (found,) = torch.autograd.grad(value, x)
    exact = formulas.cross_entropy(tail, target[:8].cpu(), reduction="sum")
    (expected,) = torch.autograd.grad(exact, tail)
    check("loss", value, exact + (rows - 8) * math.log(classes), torch.bfloat16)
    check("gradient of the last rows", found[-8:], expected, torch.bfloat16)
