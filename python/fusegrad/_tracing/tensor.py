"""The tensors that a traced function gets: a few elements, each a term of the graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from fusegrad._C.score_mod import FLOAT, INT

from .errors import Refused
from .trees import mapped
from .vectors import axes_of, axis_of, packed_shape, terms_of, unrolled

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["Read", "TracedTensor", "apart", "grad_mode", "load", "trace_of"]


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context for the tracer's own work on terms, in which neither traced tensors nor others' modes (fake tensors,
    graphs in the making) take part."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        if is_in_torch_dispatch_mode(include_infra_modes=True) or _len_torch_dispatch_stack_pre_dispatch() != 0:
            stack.enter_context(_disable_current_modes())
        yield


@contextlib.contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """torch.set_grad_enabled for the tracer itself; torch.export must not see it and make it a part of the program."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


@dataclass(frozen=True)
class Read:
    """A captured tensor of which some dimensions are indexed: nothing is read before all of them are, or before
    something is computed from all the elements that are left."""

    buffer: int
    shape: tuple[int, ...]  # of the captured tensor
    fixed: tuple[int | None, ...]  # for each of its dimensions the term that indexes it, None: a dimension that is left

    @property
    def left(self) -> list[int]:
        return [n for n, term in zip(self.shape, self.fixed, strict=True) if term is None]


class TracedTensor(Tensor):
    """A tensor without numbers. `trace` is where its terms belong."""

    trace: Trace
    _terms: Tensor | None  # int64, packed: see vectors.py
    read: Read | None
    viewed: bool  # whether others may share its memory in PyTorch
    adopted: bool  # whether its terms say by which autograd.Function it was made

    @staticmethod
    def __new__(
        cls: type[TracedTensor],
        trace: Trace,
        terms: Tensor | None,
        dtype: torch.dtype,
        read: Read | None = None,
        shape: Sequence[int] | None = None,
    ) -> TracedTensor:
        if shape is None and terms is not None:
            shape = terms.shape
        elif shape is None:
            assert read is not None
            shape = read.left
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=trace.device)
        self.trace, self._terms, self.read, self.viewed, self.adopted = trace, terms, read, False, False
        trace.functions.made.append(self)
        return self

    @property
    def packed(self) -> Tensor:
        """Its terms, in dimensions with an axis one."""
        if self._terms is None:
            assert self.read is not None
            self._terms = _read_all(self.trace, self.read)
            self.read = None
        return self._terms

    @property
    def axes(self) -> list[int]:
        """The dimensions that have an axis."""
        return axes_of(self.packed, self.shape)

    def unrolled(self, what: str, dims: Sequence[int] | None = None) -> Tensor:
        """The packed terms with the elements of `dims`, or of all dimensions, one by one."""
        dims = range(self.dim()) if dims is None else dims
        return unrolled(self.trace.graph, self.packed, self.shape, dims, what)

    @property
    def terms(self) -> Tensor:
        """The terms of all elements."""
        return self.unrolled("an operation")

    def assign(self, other: TracedTensor) -> None:
        self._terms, self.read = other.packed, None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<traced {str(self.dtype).removeprefix('torch.')} of shape {list(self.shape)}>"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise Refused(
            "a value of a score_mod or mask_mod was used outside of it", "return what the function computes instead"
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # PyTorch's own C++ code comes here too, where the function's mode is on.
        with torch._C.DisableTorchFunction(), apart():
            return trace_of((args, kwargs)).dispatch(func, args, kwargs or {})


def trace_of(tree: Any) -> Trace:
    """The one of its traced tensors."""
    found: list[Trace] = []
    mapped(tree, lambda x: found.append(x.trace) if isinstance(x, TracedTensor) else None)
    if any(trace is not found[0] for trace in found):
        raise Refused("a value of another score_mod or mask_mod", "compute within one function")
    return found[0]


def load(trace: Trace, buffer: int, indices: Sequence[int]) -> int:
    g = trace.graph
    for index, size in zip(indices, trace.buffers[buffer].shape, strict=True):
        value = g.value(index)
        if value is not None and not -size <= value < size:
            raise IndexError(f"index {value} is out of bounds for a dimension of size {size}")
        if g.type(index) == FLOAT:
            raise Refused("a float as an index", "convert it: .long()")
    return g.load(buffer, [g.cast(x, INT) for x in indices])


def _read_all(trace: Trace, read: Read) -> Tensor:
    """The terms of all elements that are left."""
    g, shape = trace.graph, read.left
    packed = packed_shape(shape)
    places = [
        [axis_of(g, shape, d)] if packed[d] != n else [g.constant(i) for i in range(n)] for d, n in enumerate(shape)
    ]
    terms = []
    for place in itertools.product(*places):
        free = iter(place)
        terms.append(load(trace, read.buffer, [next(free) if t is None else t for t in read.fixed]))
    return terms_of(terms, packed)
