"""One op with tensors to call it with: by the adapter in its dtype, and by the formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import formulas
from .adapter import NotOffered, call
from .verdict import check

Tensors = dict[str, Tensor]
Loss = Callable[..., Any]
Program = Callable[[Loss, Tensors], Any]

# The tensors that each op takes by position; others are given by name.
ORDER = {
    "cross_entropy": ("input", "target"),
    "linear_cross_entropy": ("input", "weight", "target"),
    "jsd": ("student", "teacher"),
    "linear_jsd": ("student_input", "student_weight", "teacher_input", "teacher_weight"),
    "flex_attention": ("query", "key", "value"),
}
# The tensors that get gradients; an implementation in place overwrites the first.
LEAVES = {
    "cross_entropy": ("input",),
    "linear_cross_entropy": ("input", "weight"),
    "jsd": ("student",),
    "linear_jsd": ("student_input", "student_weight"),
    "flex_attention": ("query", "key", "value"),
}
UPSTREAM = 0.37  # not 1: a gradient that was made in the forward has to be scaled


class Problem:
    """An op, its tensors and options, and the adapter under test.

    Letters: N rows, V classes, H hidden size; of attention B2, H2, S keys and queries, D.
    """

    def __init__(
        self,
        adapter: Any,
        op: str,
        device: str,
        *,
        dtype: torch.dtype | None = None,
        rows: int = 32,
        classes: int = 128,
        hidden: int = 64,
        seed: int = 0,
    ) -> None:
        self.adapter, self.op, self.device = adapter, op, device
        asked = getattr(adapter, "dtype", None)
        widest = torch.float64 if device == "cpu" else torch.float32
        self.dtype: torch.dtype = dtype or (asked(op, device) if asked else widest)
        self.generator = torch.Generator().manual_seed(seed)
        self.options: dict[str, Any] = {}
        self.score_mod: Callable[[Tensors], Callable[..., Any]] | None = None
        self.mask_mod: Callable[[Tensors], Callable[..., Any]] | None = None
        self.tensors: Tensors = {}
        self.leaf_names: tuple[str, ...] = LEAVES[op]
        self._draw(rows, classes, hidden)

    @property
    def first(self) -> str:
        return self.leaf_names[0]

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """A float64 tensor on the CPU, of values that the dtype can hold."""
        made = torch.randn(sizes, generator=self.generator, dtype=torch.float64) * scale
        return made.to(self.dtype).double()

    def integers(self, high: int, *sizes: int) -> Tensor:
        return torch.randint(high, sizes, generator=self.generator)

    def _draw(self, rows: int, classes: int, hidden: int) -> None:
        t = self.tensors
        if self.op == "flex_attention":
            length, size = (64, 16) if self.device == "cpu" else (128, 64)
            for name in ("query", "key", "value", "upstream"):
                t[name] = self.normal(2, 2, length, size)
        elif self.op in ("cross_entropy", "linear_cross_entropy"):
            t["input"] = self.normal(rows, classes if self.op == "cross_entropy" else hidden)
            t["target"] = self.integers(classes, rows)
            if self.op == "linear_cross_entropy":
                t["weight"] = self.normal(classes, hidden, scale=2 * hidden**-0.5)
        elif self.op == "jsd":
            t["student"], t["teacher"] = self.normal(rows, classes), self.normal(rows, classes)
        else:
            for side in ("student", "teacher"):
                t[f"{side}_input"] = self.normal(rows, hidden)
                t[f"{side}_weight"] = self.normal(classes, hidden, scale=2 * hidden**-0.5)

    def ignore_rows(self, rows: Any = slice(2, 7)) -> None:
        """Marks rows that do not count: in the target, or by labels."""
        name = "target" if "target" in self.tensors else "labels"
        if name == "labels" and name not in self.tensors:
            count = self.tensors[self.first].shape[0]
            self.tensors[name] = self.integers(8, count)
        self.tensors[name][rows] = -100

    # --- tensors --------------------------------------------------------------------------------------------------

    def leaves(self, frozen: tuple[str, ...] = ()) -> Tensors:
        """Fresh tensors for the adapter, those with gradients as leaves."""
        return self._made(self.device, self.dtype, frozen)

    def exact(self, frozen: tuple[str, ...] = ()) -> Tensors:
        return self._made("cpu", torch.float64, frozen)

    def _made(self, device: str, dtype: torch.dtype, frozen: tuple[str, ...]) -> Tensors:
        made = {}
        for name, t in self.tensors.items():
            copy = t.clone().to(device, dtype if t.is_floating_point() else t.dtype)
            made[name] = copy.requires_grad_(name in self.leaf_names and name not in frozen)
        return made

    def activations(self, leaves: Tensors) -> Tensors:
        """What stands before an op: copies of the leaves, which it may overwrite where it was asked to."""
        return {name: t * 1 if t.requires_grad else t for name, t in leaves.items()}

    # --- calls ----------------------------------------------------------------------------------------------------

    def ours(self, tensors: Tensors, **options: Any) -> Any:
        """The adapter's result."""
        return self._call(lambda *a, **k: call(self.adapter, self.op, *a, **k), tensors, options)

    def truth(self, tensors: Tensors, **options: Any) -> Any:
        return self._call(self._formula, tensors, options)

    def _formula(self, *tensors: Tensor, enable_gqa: bool = False, **options: Any) -> Any:
        function = formulas.attention if self.op == "flex_attention" else getattr(formulas, self.op)
        return function(*tensors, **options)

    def _call(self, function: Loss, tensors: Tensors, options: Mapping[str, Any]) -> Any:
        given = {**self.options, **options}
        if self.op != "flex_attention":
            by_name = {k: v for k, v in tensors.items() if k not in ORDER[self.op]}
            return function(*(tensors[name] for name in ORDER[self.op]), **by_name, **given)
        if self.score_mod is not None:
            given["score_mod"] = self.score_mod(tensors)
        if self.mask_mod is not None:
            given["mask_mod"] = self.mask_mod(tensors)
        out = function(*(tensors[name] for name in ORDER[self.op]), **given)
        if given.get("return_lse"):
            return out
        return (out * tensors["upstream"]).sum()

    # --- comparisons ----------------------------------------------------------------------------------------------

    def gradients(self, program: Program, loss: Loss, tensors: Tensors) -> tuple[Tensor, Tensors]:
        """What a program computes of fresh leaves, and their gradients for an upstream gradient of 0.37."""
        names = [name for name, t in tensors.items() if t.requires_grad]
        value = program(loss, self.activations(tensors))
        upstream = torch.full_like(value, UPSTREAM)
        found = torch.autograd.grad(value, [tensors[n] for n in names], upstream, allow_unused=True)
        return value, {n: g for n, g in zip(names, found, strict=True) if g is not None}

    def compare(self, program: Program, frozen: tuple[str, ...] = ()) -> None:
        """The same program with both; raises Wrong where the loss or a gradient differs."""
        value, found = self.gradients(program, self.ours, self.leaves(frozen))
        self.compare_with(program, value, found, frozen)

    def compare_with(
        self, program: Program, value: Tensor | None, found: Mapping[str, Tensor | None], frozen: tuple[str, ...] = ()
    ) -> None:
        """Compares a loss (where there is one) and gradients that were computed in some other way."""
        truth, expected = self.gradients(program, self.truth, self.exact(frozen))
        if value is not None:
            check("loss", value, truth, self.dtype)
        for name, gradient in expected.items():
            check(f"gradient of {name}", found.get(name), gradient, self.dtype)


def plain(loss: Loss, tensors: Tensors) -> Any:
    """The program that is the op alone."""
    return loss(tensors)


def attempt(function: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the function raised an error of whatever kind, and else what it returned. An op or option that is not
    offered is no error."""
    try:
        return False, function()
    except NotOffered:
        raise
    except Exception:
        return True, None
