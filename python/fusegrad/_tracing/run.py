"""Runs a function on traced tensors and takes its result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusegrad._C import score_mod as language
from fusegrad._C.score_mod import BOOL, FLOAT

from .._transforms import outside_transforms, unwrapped
from .dispatch import call as call_torch
from .dispatch import dispatch
from .errors import Refused, TraceError, located, out_of_memory
from .lifted import Lifted, Number
from .steps import Steps
from .tensor import TracedTensor, apart, grad_mode
from .thread_state import restoring
from .trace import Trace, category

__all__ = ["INPUTS", "Run", "equal", "name_of", "run", "run_as_called", "symbolic_float_of"]

log = logging.getLogger("fusegrad")

INPUTS = {"score_mod": ("score", "b", "h", "q_idx", "kv_idx"), "mask_mod": ("b", "h", "q_idx", "kv_idx")}


@dataclass
class Run:
    text: str
    """Canonical."""
    fixed_text: str
    """The same with the scalars as the numbers that they are now."""
    buffers: list[Tensor]
    scalars: list[Lifted]
    steps: Steps
    copies: dict[tuple[int, torch.dtype | torch.device], tuple[Tensor, Tensor]]
    """Captured tensors in another dtype or place, beside these."""
    differentiable: bool
    """Whether what it computes has its derivative."""


def name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or getattr(getattr(function, "func", None), "__qualname__", None)
    return name or type(function).__qualname__


@restoring
def run(
    function: Callable,
    kind: str,
    device: torch.device,
    call: Callable | None = None,
    stand_in: Callable[[Lifted], Tensor] | None = None,
    grad: bool = True,
) -> Run:
    """Traces `call`, which is `function` or a copy of it; TraceError names `function`. For `stand_in` see Trace. `grad`
    is the mode in which it runs; where that is off nothing has a derivative."""
    call = call or function
    name = f"{kind} {name_of(function)}"
    try:
        with outside_transforms() as transforms:
            trace = Trace(
                kind, device, call_torch, dispatch, stand_in, grad and kind == "score_mod", transforms,
                symbolic_float_of(kind),
            )  # fmt: skip
            try:
                return _traced(trace, call, kind, grad)
            finally:
                trace.close()
    except Exception as error:
        if out_of_memory(error):
            raise
        raise located(error, name) from error


def _traced(trace: Trace, call: Callable, kind: str, grad: bool) -> Run:
    with apart():
        inputs = trace.functions.offered([trace.input(x) for x in INPUTS[kind]])
    with grad_mode(grad), trace.active():
        result = call(*inputs)
    with apart():
        term = _result(trace, kind, result)
    trace.functions.pull_back()
    with apart():
        trace.check_unchanged()
        return _texts(trace, term)


def symbolic_float_of(kind: str) -> torch.dtype:
    """For a tensor that stands for a captured float: numbers are no reason to compute a mask in float64, as captured
    tensors of it are."""
    return torch.float32 if kind == "mask_mod" else torch.float64


def run_as_called(function: Callable, kind: str, device: torch.device) -> Run:
    """Traces in the caller's grad mode. What comes out differs only where the function asks for the mode: else a call
    without gradients has the text of one with them, and so its kernels."""
    if torch.is_grad_enabled():
        return run(function, kind, device)
    without = run(function, kind, device, grad=False)
    try:
        result = run(function, kind, device)
    except TraceError as error:  # such as an op that has no backward
        log.debug("%s has no derivative: %s", name_of(function), error)
        return without
    return result if _same_values(result, without) else without


def _same_values(a: Run, b: Run) -> bool:
    (text, kept, _), (other, others, _) = (language.compact(language.forward(x.text)) for x in (a, b))
    pairs = zip((a.buffers[i] for i in kept), (b.buffers[i] for i in others), strict=True)
    return text == other and all(equal(*pair) for pair in pairs)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether one tensor may stand for the other, values included."""
    if a is b:
        return True
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or a.is_meta or type(a) not in (Tensor, Parameter):
        return False
    with grad_mode(False):
        a, b = unwrapped(a), unwrapped(b)
        return bool(((a == b) | ((a != a) & (b != b))).all())


def _result(trace: Trace, kind: str, result: Any) -> int:
    if isinstance(result, (Lifted, bool, int, float)) or (
        isinstance(result, Tensor) and not isinstance(result, TracedTensor)
    ):
        result = trace.stacked(result)
    if not isinstance(result, TracedTensor):
        raise Refused(f"it returned {type(result).__name__}", "return one tensor, such as score + bias[h]")
    if result.trace is not trace:
        raise Refused("it returned a value of another score_mod or mask_mod", "return what it computes itself")
    trace.functions.adopt(result)
    if result.dim() != 0:
        raise Refused(
            f"it returned a tensor of shape {list(result.shape)}",
            "return a single value: index every dimension of captured tensors, or sum",
        )
    term = int(result.terms)
    if kind == "mask_mod" and category(result.dtype) != BOOL:
        raise Refused(f"a mask_mod returned {result.dtype}", "return a bool, such as from a comparison")
    return trace.graph.cast(term, BOOL if kind == "mask_mod" else FLOAT)


def _texts(trace: Trace, term: int) -> Run:
    values: list[Number] = [s.value for s in trace.scalars]
    try:
        text, kept, scalars = trace.graph.compact(term)
    except ValueError as error:
        size = f"{trace.graph.size(term)} operations, {len(trace.buffers)} captured tensors and {len(values)} numbers"
        raise Refused(
            f"a function of {size}, of which the language says: {error}", "docs/design/score_mod.md has its limits"
        ) from error
    fixed_text = trace.graph.compact(term, values)[0] if values else text
    used = [trace.buffers[i] for i in kept]
    devices = {str(b.device) for b in used}
    if len(devices) > 1:
        raise Refused(
            f"captured tensors on several devices, {' and '.join(sorted(devices))}", "move them to one: .to(device)"
        )
    return Run(
        text, fixed_text, used, [trace.scalars[i] for i in scalars], trace.steps, trace.copies, trace.differentiable
    )
