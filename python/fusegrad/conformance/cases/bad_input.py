"""Rules 15 and 16: what is wrong raises, what is extreme works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..case import case
from ..problem import Loss, Problem, Tensors, attempt, plain
from ..verdict import Wrong, check

CLASSES = ("cross_entropy", "linear_cross_entropy")
LINEAR = ("linear_cross_entropy", "linear_jsd")


def must_raise(function: Callable[[], Any]) -> None:
    """An error of whatever kind, asynchronous ones of the GPU included."""

    def call() -> Any:
        value = function()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return value

    raised, value = attempt(call)
    if not raised:
        raise Wrong(f"no error, but a loss of {value.detach().float().mean().item():.4g}")


def _out_of_range(problem: Problem, index: int) -> None:
    """An error; or, where nothing may wait for the GPU, NaN, and the other rows as they are."""
    problem.tensors["target"][3] = index
    t = problem.leaves()

    def call() -> Tensor:
        value = problem.ours(problem.activations(t))
        value.backward()
        return value.detach().cpu()  # an error of the GPU's kernels comes here

    raised, value = attempt(call)
    if not raised and not value.isnan().all():
        raise Wrong(f"no error, but a loss of {value.item():.4g}")


@case(15, "a target of V: an error, or NaN on the GPU", CLASSES)
def target_too_large(problem: Problem) -> None:
    _out_of_range(problem, 128)


@case(15, "a target of -7", CLASSES)
def target_negative(problem: Problem) -> None:
    _out_of_range(problem, -7)


@case(15, "a target far out of range", CLASSES)
def target_far(problem: Problem) -> None:
    _out_of_range(problem, 2**40)


@case(15, "a target for fewer rows than there are", CLASSES)
def target_too_short(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, "target": t["target"][:-3]}))


@case(15, "a target for more rows than there are", CLASSES)
def target_too_long(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, "target": torch.cat([t["target"], t["target"]])}))


@case(15, "a target of bools", CLASSES)
def target_of_bools(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, "target": t["target"] > 60}))


@case(15, "a target on another device", CLASSES, devices=("cuda",))
def target_elsewhere(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, "target": t["target"].cpu()}))


@case(15, "a reduction that does not exist")
def unknown_reduction(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours(t, reduction="average"))


@case(15, "a teacher of other rows", ("jsd", "linear_jsd"))
def teacher_of_other_rows(problem: Problem) -> None:
    name = "teacher" if problem.op == "jsd" else "teacher_input"
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, name: t[name][:-5]}))


@case(15, "a teacher of other classes", ("jsd", "linear_jsd"))
def teacher_of_other_classes(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    part = {"teacher": t["teacher"][:, :-8]} if problem.op == "jsd" else {"teacher_weight": t["teacher_weight"][:-8]}
    must_raise(lambda: problem.ours({**t, **part}))


@case(15, "logits that are said to be log-probabilities", ("jsd",), devices=("cpu",))
def logits_as_log_probs(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours(t, log_probs=True))


@case(15, "a weight of another hidden size", LINEAR)
def weight_of_other_size(problem: Problem) -> None:
    name = problem.leaf_names[1]
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, name: t[name][:, :-8]}))


@case(15, "integer logits", ("cross_entropy", "jsd"))
def integer_logits(problem: Problem) -> None:
    t = problem.leaves(frozen=problem.leaf_names)
    must_raise(lambda: problem.ours({**t, problem.first: (t[problem.first] * 10).long()}))


@case(15, "class weights of the wrong length", CLASSES)
def class_weights_too_short(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    weights = torch.ones(120, dtype=problem.dtype, device=problem.device)
    must_raise(lambda: problem.ours(t, class_weight=weights))


@case(15, "a label smoothing of 1.5", CLASSES)
def too_much_smoothing(problem: Problem) -> None:
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours(t, label_smoothing=1.5))


@case(16, "ignored rows: no loss, no gradient, not in the mean's divisor")
def ignored(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(plain)


@case(16, "another ignore_index, that is a class too")
def ignored_class(problem: Problem) -> None:
    problem.ignore_rows()
    name = "target" if "target" in problem.tensors else "labels"
    problem.tensors[name][problem.tensors[name] == -100] = 5
    problem.options["ignore_index"] = 5
    problem.compare(plain)


@case(16, "ignored rows with reduction 'none'")
def ignored_none(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(lambda loss, t: loss(t, reduction="none").sum())


@case(16, "an upstream gradient of NaN at an ignored row reaches nothing")
def ignored_nan_upstream(problem: Problem) -> None:
    """Such as of a mean over the rows of each sample, of which one has none."""
    problem.ignore_rows()
    gradients = []
    for call, t in ((problem.ours, problem.leaves()), (problem.truth, problem.exact())):
        rows = call(problem.activations(t), reduction="none")
        upstream = torch.full_like(rows, 0.37)
        upstream[3] = torch.nan
        gradients.append(torch.autograd.grad(rows, [t[n] for n in problem.leaf_names], upstream))
    for name, found, expected in zip(problem.leaf_names, *gradients, strict=True):
        check(f"gradient of {name}", found, expected, problem.dtype)


@case(16, "NaN in an ignored row reaches nothing")
def ignored_nan(problem: Problem) -> None:
    """Padding may hold anything; of a head it reaches the weight's gradient by a product with 0."""
    problem.ignore_rows()
    t, exact = problem.leaves(), problem.exact()
    with torch.no_grad():
        t[problem.first][3] = torch.nan
    value = problem.ours(problem.activations(t))
    found = torch.autograd.grad(value, t[problem.first])[0]
    truth = problem.truth(exact)
    expected = torch.autograd.grad(truth, exact[problem.first])[0]
    check("loss", value, truth, problem.dtype)
    kept = torch.ones(found.size(0), dtype=torch.bool)
    kept[3] = False
    check(f"gradient of the other rows of {problem.first}", found.cpu()[kept], expected[kept], problem.dtype)


@case(16, "all rows ignored: gradients of zero")
def all_ignored(problem: Problem) -> None:
    """The mean may be NaN, as PyTorch's is, or 0; gradients are finite."""
    problem.ignore_rows(slice(None))
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37))
    if value.isfinite().all() and value.abs().max() > 0:
        raise Wrong("loss", value.abs().max().item())
    for name, gradient in zip(problem.leaf_names, found, strict=True):
        if not (gradient == 0).all():
            raise Wrong(f"gradient of {name} is not zero: {gradient.abs().max().item():.3g}")


@case(
    16, "a teacher that is equal to the student: no row below 0", ("jsd", "linear_jsd"), dtype=torch.float32, rows=256
)
def no_row_below_zero(problem: Problem) -> None:
    problem.tensors[problem.first] *= 4  # exact in any dtype; of probabilities near 1 logarithms lose most
    for name in problem.leaf_names:
        problem.tensors[name.replace("student", "teacher")] = problem.tensors[name]
    for beta in (0.1, 0.5, 0.9):
        rows = problem.ours(problem.activations(problem.leaves()), reduction="none", beta=beta)
        if not rows.min() >= 0:
            raise Wrong(f"a divergence of {rows.min().item():.3g}", -rows.min().item())


def _top_k(problem: Problem, count: int, deviation: float) -> None:
    teacher = (problem.tensors["teacher"] * deviation).log_softmax(-1).topk(count, -1)
    problem.tensors["teacher"] = teacher.values.to(problem.dtype).double()
    problem.tensors["indices"] = teacher.indices


@case(16, "a teacher of its 16 largest log-probabilities", ("jsd",))
def top_k_teacher(problem: Problem) -> None:
    _top_k(problem, 16, 1)
    for beta in (0.0, 0.5, 1.0):
        problem.options["beta"] = beta
        problem.compare(plain)


@case(16, "stored log-probabilities whose sum is 1 and more: finite", ("jsd",), dtype=torch.bfloat16, rows=256)
def top_k_teacher_without_rest(problem: Problem) -> None:
    _top_k(problem, 64, 8)
    if not (problem.tensors["teacher"].exp().sum(-1) >= 1).any():
        raise AssertionError("no row of this case has a sum of 1")
    value, found = problem.gradients(lambda loss, t: loss(t, beta=1.0), problem.ours, problem.leaves())
    for name, x in {"loss": value, "gradient": found["student"]}.items():
        if not x.isfinite().all():
            raise Wrong(f"{name}: {(~x.isfinite()).sum().item()} numbers are not finite")


@case(16, "no rows", rows=0)
def no_rows(problem: Problem) -> None:
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37))
    for name, gradient in zip(problem.leaf_names, found, strict=True):
        if not (gradient == 0).all():
            raise Wrong(f"gradient of {name} is not zero")


@case(16, "one class", classes=1)
def one_class(problem: Problem) -> None:
    problem.compare(plain)


@case(16, "131 classes, hidden size 67, 33 rows", classes=131, hidden=67, rows=33)
def odd_sizes(problem: Problem) -> None:
    problem.compare(plain)


@case(16, "one row", rows=1)
def one_row(problem: Problem) -> None:
    problem.compare(plain)


@case(16, "columns that are not dense")
def transposed(problem: Problem) -> None:
    problem.compare(lambda loss, t: loss({**t, problem.first: (t[problem.first] * 1).T.contiguous().T}))


@case(16, "rows with a stride")
def strided(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        x = t[problem.first] * 1
        return loss({**t, problem.first: torch.stack([x, x * 0], 1)[:, 0]})

    problem.compare(program)


@case(16, "a weight that is not dense", LINEAR)
def transposed_weight(problem: Problem) -> None:
    name = problem.leaf_names[1]

    def program(loss: Loss, t: Tensors) -> Any:
        return loss({**t, name: (t[name] * 1).T.contiguous().T})

    problem.compare(program)


@case(16, "[batch, sequence, hidden]", LINEAR, may_raise=True)
def three_dimensions(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        shaped = {n: t[n].unflatten(0, (4, 8)) for n in t if n in (problem.first, "target", "teacher_input")}
        return loss({**t, **shaped})

    problem.compare(program)


@case(16, "a target with a stride", CLASSES)
def strided_target(problem: Problem) -> None:
    problem.compare(lambda loss, t: loss({**t, "target": torch.stack([t["target"], t["target"] * 0], 1)[:, 0]}))


@case(16, "int32 targets", CLASSES, may_raise=True)
def int32_target(problem: Problem) -> None:
    t = problem.leaves()
    value = problem.ours(problem.activations(t) | {"target": t["target"].int()})
    problem.compare_with(plain, value, dict(_gradients(problem, value, t)))


def _gradients(problem: Problem, value: Any, t: Tensors) -> Any:
    found = torch.autograd.grad(value, [t[n] for n in problem.leaf_names], torch.full_like(value, 0.37))
    return zip(problem.leaf_names, found, strict=True)
