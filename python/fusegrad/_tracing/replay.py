"""A trace that is kept: what of it is done again at a call, in place of the function."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .captures import Captures, Guard
from .code import Untrusted
from .errors import TraceError
from .lifted import Expression, Lifted, Number, evaluate
from .run import Run, equal
from .steps import Steps
from .tensor import grad_mode
from .thread_state import tracing_state
from .trees import mapped, tensors_of

__all__ = ["Entry", "Traced"]

Traced = tuple[str, tuple[Tensor, ...], tuple[Number, ...]]
"""Text, buffers, scalars."""

_CONSTANTS = ("prim::Constant", "prim::GetAttr", "prim::TracedAttr")  # nodes of torch.jit.trace


class _Leaf(int):
    """A captured tensor, by its place in the guard's result."""


@dataclass(frozen=True)
class _Made:
    """The output of a step."""

    step: int
    output: int


@dataclass
class _Step:
    func: Callable
    args: Any
    kwargs: Any
    grad: bool
    expected: list[tuple[torch.Size, torch.dtype]] | None
    """The outputs' shapes and dtypes, where they may depend on numbers."""


def _ambient() -> tuple:
    """The global state that a function may depend on without naming it."""
    modes: tuple = ()
    if torch._C._len_torch_function_stack() > 0:
        stack = _get_current_function_mode_stack()
        modes = tuple(mode.device if isinstance(mode, DeviceContext) else mode for mode in stack)
    return torch.get_default_dtype(), modes, any(_MODULE_HOOKS)


_MODULE_HOOKS = [
    value
    for name, value in vars(torch.nn.modules.module).items()
    if re.fullmatch("_global_(forward|backward).*_hooks", name)
]
"""The hooks of all modules."""


class _Miss(Exception):
    """The recorded trace does not hold for these values."""


def _node_of(tensor: Tensor) -> str:
    """The kind of node that makes a tensor in the program of torch.jit.trace."""
    return torch._C._get_value_trace(tensor).node().kind()


class Entry:
    """One trace of one function. It holds no captured tensor."""

    def __init__(self, captures: Captures, result: Run, lifted: set[int]) -> None:
        self.text = result.text
        steps = result.steps
        _, modes, hooks = _ambient()
        if hooks or any(isinstance(mode, TorchFunctionMode) for mode in modes):
            raise Untrusted("modules have global hooks, or a TorchFunctionMode is active")
        if steps.volatile is not None:
            raise Untrusted(steps.volatile)
        self._steps, self.buffers = _recorded(steps, result.buffers, captures)
        self._measured = _leaves(steps, steps.measured, captures)
        self._scalars: list[tuple[Expression, type]] = [(s.expression, type(s.value)) for s in result.scalars]
        used: set[int] = set().union(*(s.paths() for s in result.scalars), *(_paths(s) for s in self._steps))
        self.lifted = lifted & used
        self._ambient = _ambient()
        self._guard: Guard = captures.guard(self.lifted)
        with grad_mode(True):  # as it was traced
            replayed = self.match(captures._root)
        if replayed is None or not all(_same(*b) for b in zip(replayed[1], result.buffers, strict=True)):
            raise Untrusted("what it computes from captured tensors cannot be repeated")

    def match(self, function: Any, recorder: Any = None) -> Traced | None:
        """What the trace says for the function as it is now; None where it does not hold. `recorder`: see trace."""
        try:
            found = self._guard(function)
            if found is None or _ambient() != self._ambient:
                return None
            tensors, numbers = found
            if recorder is not None:
                self._check_sizes(tensors, recorder)
            scalars = tuple([self._scalar(*x, numbers) for x in self._scalars]) if self._scalars else ()
            made = self._run_steps(tensors, numbers, recorder) if self._steps else []
        except (_Miss, AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if recorder is not None and (type(error) is RuntimeError or isinstance(error, TraceError)):
                raise  # the recorder's own, such as of a constant that requires grad, and the one above
            return None  # the function is traced again, which raises the user's error
        buffers = [tensors[b] if isinstance(b, _Leaf) else made[b.step][b.output] for b in self.buffers]
        return self.text, tuple(buffers), scalars

    def _check_sizes(self, tensors: Sequence[Tensor], recorder: Any) -> None:
        """A size that the function reads is a number of its text: that of what depends on the inputs must not be."""
        with tracing_state(recorder):
            for leaf in self._measured:
                tensor = tensors[leaf]
                if not isinstance(tensor, Parameter) and _node_of(tensor) not in _CONSTANTS:
                    raise TraceError(
                        "flex_attention: a score_mod or mask_mod must not read sizes of what depends on the inputs of "
                        "torch.jit.trace, but got one that does, whose program would be right for these sizes alone: "
                        "read them outside of the function, such as n = x.size(0)"
                    )

    @staticmethod
    def _scalar(expression: Expression, kind: type, numbers: Sequence[Number]) -> Any:
        value = evaluate(expression, numbers)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _Miss
        if type(value) is not kind:
            raise _Miss
        return value

    def _run_steps(self, tensors: Sequence[Tensor], numbers: Sequence[Number], recorder: Any) -> list[list[Tensor]]:
        made: list[list[Tensor]] = []

        def resolve(x: Any) -> Any:
            if isinstance(x, _Leaf):
                return tensors[x]
            if isinstance(x, _Made):
                return made[x.step][x.output]
            return evaluate(x.expression, numbers) if isinstance(x, Lifted) else x

        with torch._C._DisableAutocast():
            for step in self._steps:
                args, kwargs = mapped(step.args, resolve), mapped(step.kwargs, resolve)
                with contextlib.nullcontext() if recorder is None else tracing_state(recorder):
                    if step.grad:
                        out = step.func(*args, **kwargs)
                    else:
                        with torch.no_grad():
                            out = step.func(*args, **kwargs)
                made.append(tensors_of(out))
                if step.expected is not None and [(t.shape, t.dtype) for t in made[-1]] != step.expected:
                    raise _Miss
        return made


def _same(a: Tensor, b: Tensor) -> bool:
    return a.requires_grad == b.requires_grad and equal(a, b)


def _paths(step: _Step) -> set[int]:
    found: set[int] = set()
    mapped((step.args, step.kwargs), lambda x: found.update(x.paths()) if isinstance(x, Lifted) else None)
    return found


def _recorded(steps: Steps, buffers: Sequence[Tensor], captures: Captures) -> tuple[list[_Step], list[_Leaf | _Made]]:
    """The steps that the buffers need, in terms of captured tensors."""

    def source(tensor: Tensor) -> _Leaf | _Made:
        made = steps.known.get(id(tensor))
        if made is not None:
            return _Made(*made)
        leaf = captures.place_of(tensor)
        if leaf is None:
            raise Untrusted("it reads a tensor that comes neither from its surroundings nor from a function of PyTorch")
        return _Leaf(leaf)

    sources = [source(b) for b in buffers]
    needed = {s.step for s in sources if isinstance(s, _Made)}
    if steps.writes:
        needed = set(range(len(steps.steps)))
    pending = list(needed)
    while pending:
        step = steps.steps[pending.pop()]
        for tensor in tensors_of((step.args, step.kwargs)):
            origin = source(tensor)
            if isinstance(origin, _Made) and origin.step not in needed:
                needed.add(origin.step)
                pending.append(origin.step)
    order = {old: new for new, old in enumerate(sorted(needed))}

    def renumbered(origin: _Leaf | _Made) -> _Leaf | _Made:
        return origin if isinstance(origin, _Leaf) else _Made(order[origin.step], origin.output)

    recorded = []
    for index in order:
        step = steps.steps[index]
        args, kwargs = mapped(
            (tuple(step.args), step.kwargs), lambda x: renumbered(source(x)) if isinstance(x, Tensor) else x
        )
        made = _Step(step.func, args, kwargs, step.grad, None)
        if _paths(made):
            made.expected = [(t.shape, t.dtype) for t in step.outputs]
        recorded.append(made)
    return recorded, [renumbered(s) for s in sources]


def _leaves(steps: Steps, tensors: Sequence[Tensor], captures: Captures) -> set[int]:
    """The captured tensors, by their places, of which these are or are made."""
    found: set[int] = set()
    pending, seen = list(tensors), set[int]()
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        made = steps.known.get(id(tensor))
        if made is not None:
            step = steps.steps[made[0]]
            pending.extend(tensors_of((step.args, step.kwargs)))
        elif (leaf := captures.place_of(tensor)) is not None:
            found.add(leaf)
    return found
