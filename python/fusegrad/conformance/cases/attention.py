"""Attention without captured gradients: shapes, masks, outputs, dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..adapters.pytorch import causal
from ..case import case
from ..problem import Loss, Problem, Tensors, plain
from ..verdict import Wrong, check

FLEX = ("flex_attention",)


def mask(problem: Problem, function: Callable[..., Tensor]) -> None:
    problem.mask_mod = lambda t: function


def shaped(problem: Problem, **shapes: tuple[int, ...]) -> None:
    for name, sizes in shapes.items():
        problem.tensors[name] = problem.normal(*sizes)


@case(12, "plain attention", FLEX)
def plain_attention(problem: Problem) -> None:
    problem.compare(plain)


@case(12, "a causal mask", FLEX)
def causal_mask(problem: Problem) -> None:
    mask(problem, causal)
    problem.compare(plain)


@case(12, "a mask of documents, read from a captured tensor", FLEX)
def document_mask(problem: Problem) -> None:
    length = problem.tensors["query"].size(2)
    problem.tensors["document"] = problem.integers(4, length).sort().values
    problem.mask_mod = lambda t: (
        lambda b, h, q_idx, kv_idx: (t["document"][q_idx] == t["document"][kv_idx]) & (q_idx >= kv_idx)
    )
    problem.compare(plain)


@case(16, "rows in which no key takes part: 0, with gradients of 0", FLEX)
def empty_rows(problem: Problem) -> None:
    mask(problem, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx >= 7))
    problem.compare(plain)


@case(16, "rows of which all scores are minus infinity", FLEX)
def empty_rows_by_score(problem: Problem) -> None:
    problem.score_mod = lambda t: (
        lambda s, b, h, q_idx, kv_idx: torch.where((q_idx >= kv_idx) & (kv_idx >= 7), s, -math.inf)
    )
    problem.compare(plain)


@case(12, "grouped queries", FLEX)
def grouped(problem: Problem) -> None:
    length, size = problem.tensors["query"].shape[2:]
    shaped(problem, query=(2, 4, length, size), upstream=(2, 4, length, size))
    problem.options["enable_gqa"] = True
    problem.compare(plain)


@case(12, "one batch of keys and values for all", FLEX)
def shared_keys(problem: Problem) -> None:
    length, size = problem.tensors["query"].shape[2:]
    shaped(problem, key=(1, 2, length, size), value=(1, 2, length, size))
    problem.compare(plain)


@case(12, "one query, many keys", FLEX)
def one_query(problem: Problem) -> None:
    size = problem.tensors["query"].size(3)
    shaped(problem, query=(2, 2, 1, size), upstream=(2, 2, 1, size))
    problem.compare(plain)


@case(12, "lengths of 77 and 51", FLEX)
def odd_lengths(problem: Problem) -> None:
    size = problem.tensors["query"].size(3)
    shaped(problem, query=(2, 2, 77, size), upstream=(2, 2, 77, size), key=(2, 2, 51, size), value=(2, 2, 51, size))
    problem.compare(plain)


@case(12, "values of another head size", FLEX)
def other_value_size(problem: Problem) -> None:
    length, size = problem.tensors["query"].shape[2:]
    shaped(problem, value=(2, 2, length, 2 * size), upstream=(2, 2, length, 2 * size))
    problem.compare(plain)


@case(12, "a head size of 40", FLEX)
def odd_head_size(problem: Problem) -> None:
    length = problem.tensors["query"].size(2)
    shaped(problem, **dict.fromkeys(("query", "key", "value", "upstream"), (2, 2, length, 40)))
    problem.compare(plain)


@case(16, "no queries", FLEX)
def no_queries(problem: Problem) -> None:
    size = problem.tensors["query"].size(3)
    shaped(problem, query=(2, 2, 0, size), upstream=(2, 2, 0, size))
    problem.compare(plain)


@case(16, "query, key and value as views of [B, S, H, D]", FLEX)
def other_layout(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        turned = {n: (t[n] * 1).transpose(1, 2).contiguous().transpose(1, 2) for n in ("query", "key", "value")}
        return loss({**t, **turned})

    problem.compare(program)


@case(16, "query, key and value as parts of one projection", FLEX, may_raise=True)
def one_projection(problem: Problem) -> None:
    def program(loss: Loss, t: Tensors) -> Any:
        parts = torch.cat([t[n] for n in ("query", "key", "value")], -1).chunk(3, -1)
        return loss({**t, **dict(zip(("query", "key", "value"), parts, strict=True))})

    problem.compare(program)


@case(10, "an expanded upstream gradient", FLEX)
def expanded_upstream(problem: Problem) -> None:
    problem.tensors["upstream"] = torch.ones((), dtype=torch.float64)
    problem.compare(plain)


@case(10, "an upstream gradient with strides", FLEX)
def strided_upstream(problem: Problem) -> None:
    problem.tensors["upstream"] = problem.tensors["upstream"].transpose(2, 3).contiguous().transpose(2, 3)
    problem.compare(plain)


@case(9, "the gradient of lse", FLEX)
def lse_gradient(problem: Problem) -> None:
    problem.options["return_lse"] = True

    def program(loss: Loss, t: Tensors) -> Any:
        out, lse = loss(t)
        return (out * t["upstream"]).sum() + (lse * t["upstream"][..., 0]).sum() * 2

    problem.compare(program)


@case(9, "lse is the natural logarithm", FLEX)
def lse_value(problem: Problem) -> None:
    problem.options["return_lse"] = True
    frozen = problem.leaf_names
    lse = problem.ours(problem.leaves(frozen))[1]
    check("lse", lse, problem.truth(problem.exact(frozen))[1], problem.dtype)


@case(12, "a scale that is given", FLEX)
def given_scale(problem: Problem) -> None:
    problem.options["scale"] = 0.3
    problem.compare(plain)


@case(9, "only the query requires grad", FLEX)
def query_alone(problem: Problem) -> None:
    problem.compare(plain, frozen=("key", "value"))


@case(9, "only the value requires grad", FLEX)
def value_alone(problem: Problem) -> None:
    problem.compare(plain, frozen=("query", "key"))


@case(12, "scores with an offset of 3000", FLEX)
def score_offset(problem: Problem) -> None:
    problem.score_mod = lambda t: lambda s, b, h, q_idx, kv_idx: s + 3000
    problem.compare(plain)


@case(12, "dropout: gradients are those of the same mask", FLEX)
def dropout(problem: Problem) -> None:
    """out is linear in value, so <out, w> is <value, its gradient> for the mask of the forward, and the mean over masks
    is attention's."""
    problem.options["dropout_p"] = 0.25
    t = problem.leaves()
    value = problem.ours(problem.activations(t))
    (found,) = torch.autograd.grad(value, t["value"])
    check(
        "<value, gradient of value>", (found.double() * t["value"].double()).sum(), value.double().cpu(), problem.dtype
    )
    problem.options.pop("dropout_p")
    without = problem.ours(problem.activations(problem.leaves()))
    if torch.equal(without, value):
        raise Wrong("dropout_p has no effect")


@case(15, "keys and values of different lengths", FLEX)
def different_lengths(problem: Problem) -> None:
    from .bad_input import must_raise

    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours({**t, "value": t["value"][:, :, :-5]}))


@case(15, "heads that do not divide", FLEX)
def different_heads(problem: Problem) -> None:
    from .bad_input import must_raise

    length, size = problem.tensors["query"].shape[2:]
    shaped(problem, query=(2, 3, length, size), upstream=(2, 3, length, size))
    problem.options["enable_gqa"] = True
    t = problem.activations(problem.leaves())
    must_raise(lambda: problem.ours(t))
