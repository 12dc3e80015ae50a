"""score_mods and mask_mods of flex attention as texts of a small language: docs/design/score_mod.md.

A Python function that PyTorch's flex_attention accepts is run once on traced tensors; what it computes becomes a
graph with a canonical text, and the tensors and numbers that it reads from its surroundings become arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegrad._C import score_mod as _language

from ._arguments import Device, checked, device_of
from ._tracing.cache import trace as _trace
from ._tracing.errors import TraceError

__all__ = ["ScoreMod", "TraceError", "explain", "trace_mask_mod", "trace_score_mod"]


class ScoreMod:
    """A traced score_mod or mask_mod, which stands wherever its function may. It cannot be changed.

    Args:
        text: In the language of docs/design/score_mod.md; becomes canonical.
        buffers: What the text calls ``@0``, ``@1``, …: tensors of the declared ranks, floating point, integer or
            bool as declared.
        scalars: What it calls ``$0``, ``$1``, …: Python numbers of the declared types.

    Attributes:
        text: The canonical text.
        buffers: The captured tensors, in the order of the text.
        scalars: The captured numbers, in the order of the text.
        kind: ``"score_mod"`` or ``"mask_mod"``.

    Raises:
        ValueError: where the text is wrong (with line and column), or buffers or scalars are not what it declares.
    """

    __slots__ = ("buffers", "kind", "scalars", "text")

    text: str
    buffers: tuple[Tensor, ...]
    scalars: tuple[int | float | bool, ...]
    kind: str

    @checked
    def __init__(self, text: str, buffers: Sequence[Tensor] = (), scalars: Sequence[int | float | bool] = ()) -> None:
        try:
            graph = _language.parse(text)
        except ValueError as error:  # it begins with line and column
            raise ValueError(f"ScoreMod: the text must be as docs/design/score_mod.md says, but got {error}") from None
        kind = graph.kind()
        if kind not in ("score_mod", "mask_mod"):
            raise ValueError(f"ScoreMod: the text must be of a score_mod or a mask_mod, but got a {kind}")
        _check_captured(graph, buffers, scalars)
        text = graph.text(graph.result())
        for name, value in (("text", text), ("buffers", tuple(buffers)), ("scalars", tuple(scalars)), ("kind", kind)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a ScoreMod cannot be changed: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a ScoreMod cannot be changed: {name}")

    def __repr__(self) -> str:
        lines = [f"ScoreMod({self.kind}", *("    " + line for line in self.text.splitlines()[1:])]
        for i, b in enumerate(self.buffers):
            lines.append(f"  @{i}: {str(b.dtype).removeprefix('torch.')} {list(b.shape)} on {b.device}")
        lines += [f"  ${i}: {s!r}" for i, s in enumerate(self.scalars)]
        return "\n".join(lines) + ")"

    def __reduce__(self) -> tuple:
        return ScoreMod, (self.text, self.buffers, self.scalars)

    def __call__(self, *args: Any) -> Any:
        raise TypeError("a ScoreMod is no function: hand it to fusegrad.flex_attention in place of one")


def _check_captured(graph: _language.Graph, buffers: Sequence[Tensor], scalars: Sequence[int | float | bool]) -> None:
    declared_buffers = [(_language.TYPES[type_], rank) for type_, rank in graph.buffers()]
    declared_scalars = [_language.TYPES[type_] for type_ in graph.scalars()]
    for what, expected, got in (("buffers", declared_buffers, buffers), ("scalars", declared_scalars, scalars)):
        if len(expected) != len(got):
            raise ValueError(
                f"ScoreMod: {what} must be as many as the text declares, {len(expected)}, but got {len(got)}"
            )
    for i, ((kind, rank), buffer) in enumerate(zip(declared_buffers, buffers, strict=True)):
        if not isinstance(buffer, Tensor):
            raise ValueError(f"ScoreMod: buffer @{i} must be a tensor, but got {type(buffer).__name__}")
        found = "bool" if buffer.dtype == torch.bool else "f" if buffer.dtype.is_floating_point else "i64"
        if found != kind or buffer.dim() != rank:
            raise ValueError(
                f"ScoreMod: buffer @{i} must be {kind} of rank {rank}, but got {buffer.dtype} of shape "
                f"{list(buffer.shape)}"
            )
    for i, (kind, scalar) in enumerate(zip(declared_scalars, scalars, strict=True)):
        if {bool: "bool", int: "i64", float: "f"}.get(type(scalar)) != kind:
            raise ValueError(f"ScoreMod: scalar ${i} must be {kind}, but got {scalar!r}")


@checked
def trace_score_mod(function: Callable[..., Any] | ScoreMod, *, device: Device | None = None) -> ScoreMod:
    """Traces a score_mod: ``function(score, b, h, q_idx, kv_idx)`` of 0-d tensors, as for PyTorch's flex_attention.

    The function runs, a few times, on tensors without values; the same code with captured tensors of the same shapes is
    not run again, whatever values they and captured numbers have (docs/design/score_mod.md says what is checked at each
    call).

    Args:
        function: Returns the new score, a 0-d tensor. A :class:`ScoreMod` is returned as it is.
        device: The device of ``score`` and the indices as the function sees it. Default: that of
            the first captured tensor which is not on the CPU.

    Returns:
        The text with the captured tensors and numbers of this call.

    Raises:
        TraceError: where the function does what a score_mod cannot; the message has its line.
        TypeError: for something that cannot be called, or a ScoreMod of a mask_mod.
    """
    return _traced(function, "score_mod", device_of("trace_score_mod", device))


@checked
def trace_mask_mod(function: Callable[..., Any] | ScoreMod, *, device: Device | None = None) -> ScoreMod:
    """Traces a mask_mod: ``function(b, h, q_idx, kv_idx)`` of 0-d tensors. All else is as in :func:`trace_score_mod`.

    Args:
        function: Returns a 0-d bool tensor, whether the key takes part. A :class:`ScoreMod` is returned as it is.
        device: The device of the indices as the function sees them.

    Returns:
        The text with the captured tensors and numbers of this call.

    Raises:
        TraceError, TypeError: as :func:`trace_score_mod`.
    """
    return _traced(function, "mask_mod", device_of("trace_mask_mod", device))


def _traced(function: Callable[..., Any] | ScoreMod, kind: str, device: torch.device | None) -> ScoreMod:
    if isinstance(function, ScoreMod):
        if function.kind != kind:
            raise TypeError(f"trace_{kind}: the ScoreMod must be a {kind}, but got a {function.kind}")
        return function
    if torch.compiler.is_compiling():
        from ._tracing.compiled import trace_within

        text, buffers, scalars = trace_within(function, kind, device)
        return _made(kind, text, tuple(buffers), tuple(scalars))
    return _made(kind, *_trace(function, kind, device))


def _made(kind: str, text: str, buffers: tuple[Tensor, ...], scalars: tuple[int | float | bool, ...]) -> ScoreMod:
    """Makes a ScoreMod without the checks, since what the tracer makes is right."""
    made = object.__new__(ScoreMod)
    for name, value in (("text", text), ("buffers", buffers), ("scalars", scalars), ("kind", kind)):
        object.__setattr__(made, name, value)
    return made


@functools.lru_cache(maxsize=512)
def check_kernel_size(text: str, wants_grad: tuple[bool, ...] | None) -> None:
    """TraceError where a GPU's kernel of the score_mod, with wants_grad and its derivative, would be too large."""
    try:
        _language.check_kernel_size(text, wants_grad)
    except ValueError as error:
        raise TraceError(str(error)) from None


def split_scalars(scalars: Sequence[int | float | bool]) -> tuple[list[float], list[int]]:
    """The scalars as the ops take them: the floats, and the integers and bools (0 or 1), each in the text's order."""
    if not scalars:
        return [], []
    return [s for s in scalars if isinstance(s, float)], [int(s) for s in scalars if not isinstance(s, float)]


@checked
def explain(score_mod: Callable[..., Any] | ScoreMod) -> str:
    """Explains a score_mod: its text, its derivative, and how the gradient of each captured read is summed, and
    why (docs/design/score_mod.md). A captured tensor counts as differentiable where it requires grad.

    Args:
        score_mod: A function or what :func:`trace_score_mod` made of it.

    Returns:
        Text, for people.

    Raises:
        TraceError, TypeError: as :func:`trace_score_mod`.
    """
    mod = trace_score_mod(score_mod)
    return _language.explain(mod.text, [b.requires_grad for b in mod.buffers])
