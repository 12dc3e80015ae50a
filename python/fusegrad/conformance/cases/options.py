"""The losses' options, alone and together, and values beside the loss: what an argument says must have an effect."""

from __future__ import annotations

from typing import Any

import torch

from ..case import case
from ..problem import Loss, Problem, Program, Tensors
from ..verdict import check

CLASSES = ("cross_entropy", "linear_cross_entropy")
DIVERGENCES = ("jsd", "linear_jsd")


def given(problem: Problem, **options: Any) -> Program:
    return lambda loss, t: loss(t, **options)


def class_weights(problem: Problem) -> Program:
    """A program that gives weights of the classes: a constant, in the dtype of the other tensors."""
    weights = problem.normal(128).abs() + 0.1

    def program(loss: Loss, t: Tensors) -> Any:
        x = t[problem.first]
        return loss({**t, problem.first: x * 1}, class_weight=weights.to(x.device, x.dtype))

    return program


@case(10, "label smoothing", CLASSES)
def label_smoothing(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(given(problem, label_smoothing=0.1))


@case(10, "class weights", CLASSES)
def class_weight(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(class_weights(problem))


@case(10, "class weights, label smoothing, ignored rows together", CLASSES)
def weight_and_smoothing(problem: Problem) -> None:
    problem.ignore_rows()
    problem.options["label_smoothing"] = 0.2
    problem.compare(class_weights(problem))


@case(10, "z-loss", CLASSES)
def z_loss(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(given(problem, z_loss=0.01))


@case(10, "softcap", CLASSES)
def softcap(problem: Problem) -> None:
    problem.compare(given(problem, softcap=2.0))


@case(10, "softcap, z-loss, label smoothing, ignored rows together", CLASSES)
def all_together(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(given(problem, softcap=2.0, z_loss=0.01, label_smoothing=0.1))


@case(10, "z-loss with reduction 'sum'", CLASSES)
def z_loss_sum(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(given(problem, z_loss=0.01, reduction="sum"))


@case(10, "beta 0, KL(teacher | student)", DIVERGENCES)
def beta_zero(problem: Problem) -> None:
    problem.compare(given(problem, beta=0.0))


@case(10, "beta 1, KL(student | teacher)", DIVERGENCES)
def beta_one(problem: Problem) -> None:
    problem.compare(given(problem, beta=1.0))


@case(10, "beta 0.1", DIVERGENCES)
def beta_tenth(problem: Problem) -> None:
    problem.compare(given(problem, beta=0.1))


@case(10, "temperature 2", DIVERGENCES)
def temperature(problem: Problem) -> None:
    problem.compare(given(problem, temperature=2.0))


@case(10, "log-probabilities instead of logits", ("jsd",))
def log_probs(problem: Problem) -> None:
    for name in ("student", "teacher"):
        problem.tensors[name] = problem.tensors[name].log_softmax(-1)
    problem.compare(given(problem, log_probs=True))


@case(10, "the labels' cross entropy mixed in", DIVERGENCES)
def hard_labels(problem: Problem) -> None:
    problem.ignore_rows()
    problem.compare(given(problem, hard_weight=0.5))


@case(16, "equal student and teacher: at least 0, gradients of 0", ("jsd",), dtype=torch.float32)
def equal_teacher(problem: Problem) -> None:
    problem.tensors["teacher"] = problem.tensors["student"].clone()
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    (found,) = torch.autograd.grad(value, t["student"])
    # 1e-8 is the rounding of a probability of 1/128 in float32.
    check("loss", value + 1, torch.ones((), dtype=torch.float64), torch.float32)
    check("gradient of student + 1", found + 1, torch.ones_like(found, dtype=torch.float64), torch.float32)


def _entropy_bonus(problem: Problem, aux: str) -> None:
    problem.ignore_rows()

    def program(loss: Loss, t: Tensors) -> Any:
        value, rows = loss(t, aux=aux)
        return value - 0.5 * rows.mean()

    problem.compare(program)


@case(9, "entropy, returned beside the loss, enters it", CLASSES, may_raise=True)
def entropy_enters(problem: Problem) -> None:
    _entropy_bonus(problem, "entropy")


@case(9, "lse, returned beside the loss, enters it", CLASSES, may_raise=True)
def lse_enters(problem: Problem) -> None:
    _entropy_bonus(problem, "lse")


@case(9, "the tokens' log-probabilities enter the loss", CLASSES, may_raise=True)
def log_prob_enters(problem: Problem) -> None:
    _entropy_bonus(problem, "token_log_prob")


@case(9, "the z-loss, returned beside the loss, enters it", CLASSES, may_raise=True)
def z_loss_enters(problem: Problem) -> None:
    """A sum of rows, as one number or one a row: what a program then sums."""
    problem.ignore_rows()

    def program(loss: Loss, t: Tensors) -> Any:
        value, rows = loss(t, aux="z_loss", z_loss=0.01, reduction="sum")
        return value - 0.5 * rows.sum()

    problem.compare(program)
