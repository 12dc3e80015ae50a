"""Floating-point operations of the ops, for torch.utils.flop_counter: those of their products of matrices, as PyTorch
counts its own. A product of [n, k] by [k, m] has 2 n k m, attention those of all pairs, whatever its mask, and a
backward those that compute again what the forward did not keep.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

__all__ = ["FORMULAS", "register"]

_COUNTER = "torch.utils.flop_counter"

FORMULAS: dict[str, Callable[[dict[str, Any]], int]] = {}
"""By the op's name; of its arguments by theirs."""


def _formula(*names: str) -> Callable[[Callable[[dict[str, Any]], int]], Callable[[dict[str, Any]], int]]:
    def add(formula: Callable[[dict[str, Any]], int]) -> Callable[[dict[str, Any]], int]:
        FORMULAS.update(dict.fromkeys(names, formula))
        return formula

    return add


# --- attention: pairs of all queries and keys, times the elements of products over each -------------------------


def _pairs(a: dict[str, Any]) -> int:
    batch, heads, queries, _ = a["query"].shape
    return batch * heads * queries * a["key"].shape[2]


def _sizes(a: dict[str, Any]) -> tuple[int, int]:
    return a["query"].shape[3], a["value"].shape[3]


@_formula("flex_attention_forward")
def _attention(a: dict[str, Any]) -> int:
    return 2 * _pairs(a) * sum(_sizes(a))


@_formula("flex_attention_backward", "flex_attention_backward_")
def _attention_backward(a: dict[str, Any]) -> int:
    D, E = _sizes(a)
    of_query, of_key, of_value, *of_buffers = a["needs_grad"]
    elements = D * (1 + of_query + of_key)  # the scores again, and their gradient times keys and queries
    if a["grad_out"] is not None:
        elements += E * (of_value + (of_query or of_key or any(of_buffers)))
    return 2 * _pairs(a) * elements


@_formula("flex_attention_jvp")
def _attention_tangents(a: dict[str, Any]) -> int:
    D, E = _sizes(a)
    query, key, value = (a[f"{name}_tangent"] is not None for name in ("query", "key", "value"))
    scores = query or key or bool(a["buffer_tangents"])
    return 2 * _pairs(a) * (D * (1 + query + key) + E * (1 + scores + value))


@_formula("flex_attention_pair_tangents")
def _attention_second(a: dict[str, Any]) -> int:
    """For some heads and queries: the scores and their tangents, and the same of grad_out times values."""
    D, E = _sizes(a)
    elements = 3 * D + E * (2 + (a["grad_out_tangent"] is not None))
    return 2 * a["head_count"] * a["row_count"] * a["key"].shape[2] * elements


@_formula("pair_projection_forward")
def _pair_projection(a: dict[str, Any]) -> int:
    return 2 * a["pair"].numel() * a["projection_weight"].shape[0]


@_formula("pair_projection_backward")
def _pair_projection_backward(a: dict[str, Any]) -> int:
    of_pair, *of_parameters, _ = a["needs_grad"]
    return _pair_projection(a) * (of_pair + any(of_parameters))


# --- linear losses: rows of hidden states by the columns of a head -----------------------------------------------


def _product(rows: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * rows.shape[0] * weight.shape[0] * weight.shape[1]


@_formula("linear_cross_entropy_forward", "linear_cross_entropy_forward_")
def _linear(a: dict[str, Any]) -> int:
    of_input, of_weight, _ = a["needs_grad"]
    return _product(a["input"], a["linear_weight"]) * (1 + of_input + of_weight)


@_formula("linear_log_prob_forward")
def _log_prob(a: dict[str, Any]) -> int:
    return 2 * a["target"].numel() * a["linear_weight"].numel()


@_formula(*(f"linear_cross_entropy_backward{of}" for of in ("", "_", "_into", "_into_")))
def _linear_backward(a: dict[str, Any]) -> int:
    of_input, of_weight, _ = a["needs_grad"]
    return _product(a["input"], a["linear_weight"]) * ((a["logits"] is None) + of_input + of_weight)


def _second(rows: torch.Tensor, weight: torch.Tensor, a: dict[str, Any]) -> int:
    """The logits, their tangent, and the tangents of the gradients that are wanted, each of a product of two."""
    of_input, of_weight, _ = a["needs_grad"]
    input_moves, weight_moves = a["input_tangent"] is not None, a["weight_tangent"] is not None
    products = 1 + input_moves + weight_moves + of_input * (1 + weight_moves) + of_weight * (1 + input_moves)
    return _product(rows, weight) * products


@_formula("linear_cross_entropy_second")
def _linear_second(a: dict[str, Any]) -> int:
    return _second(a["input"], a["linear_weight"], a)


def _teacher(a: dict[str, Any]) -> int:
    return 0 if a["teacher_weight"] is None else _product(a["teacher"], a["teacher_weight"])


@_formula("linear_jsd_forward", "linear_jsd_forward_", "linear_jsd_backward")
def _divergence(a: dict[str, Any]) -> int:
    of_input, of_weight, _ = a["needs_grad"]
    return _teacher(a) + _product(a["student_input"], a["student_weight"]) * (1 + of_input + of_weight)


@_formula("linear_jsd_second")
def _divergence_second(a: dict[str, Any]) -> int:
    return _teacher(a) + _second(a["student_input"], a["student_weight"], a)


@_formula("support_logits")
def _support(a: dict[str, Any]) -> int:
    return 2 * a["index"].numel() * a["input"].shape[1]


@_formula("support_logits_backward", "support_logits_backward_into")
def _support_backward(a: dict[str, Any]) -> int:
    of_input, of_weight, _ = a["needs_grad"]
    return _support(a) * (of_input + of_weight)


# --- PyTorch's table -----------------------------------------------------------------------------------------------


def _of_call(op: Any, formula: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = {a.name: a.default_value for a in op._schema.arguments}
        given.update(zip(given, args, strict=False))
        return formula({**given, **kwargs})

    return count


def _add_to(counter: Any) -> None:
    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.fusegrad, name)
        counter.register_flop_formula(packet, get_raw=True)(_of_call(packet.default, formula))


class _OnImport:
    """Registers the formulas when PyTorch's counter is imported. It imports Triton, which takes longer than all else
    here."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _add_to(module)
            sys.meta_path.remove(_OnImport)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _add_to(counter)
    else:
        sys.meta_path.insert(0, _OnImport)
