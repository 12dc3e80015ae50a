"""The tensors that a traced function gets: a few elements, each a term of the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from .errors import Refused

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["MAX_ELEMENTS", "Read", "TracedTensor", "apart", "terms_of"]

MAX_ELEMENTS = 1024
"""The most elements that a value within a score_mod may have."""


def terms_of(values: Any, shape: Sequence[int] = ()) -> Tensor:
    """A tensor of terms, whatever device and dtype are the defaults."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").reshape(tuple(shape))


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """For the tracer's own work on terms: neither traced tensors nor others' modes (fake tensors, graphs in the making)
    are to take part in it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        if is_in_torch_dispatch_mode(include_infra_modes=True) or _len_torch_dispatch_stack_pre_dispatch() != 0:
            stack.enter_context(_disable_current_modes())
        yield


@dataclass(frozen=True)
class Read:
    """A captured tensor of which some dimensions are indexed: nothing is read before all of them are, or before
    something is computed from all the elements that are left."""

    buffer: int
    shape: tuple[int, ...]  # of the captured tensor
    fixed: tuple[int | None, ...]  # for each of its dimensions the term that indexes it, None: a dimension that is left


class TracedTensor(Tensor):
    """A tensor without numbers. `trace` is where its terms belong."""

    trace: Trace
    _terms: Tensor | None  # int64, of its shape
    read: Read | None
    viewed: bool  # whether others may share its memory in PyTorch

    @staticmethod
    def __new__(
        cls: type[TracedTensor], trace: Trace, terms: Tensor | None, dtype: torch.dtype, read: Read | None = None
    ) -> TracedTensor:
        if terms is not None:
            shape: Sequence[int] = terms.shape
        else:
            assert read is not None
            shape = [n for n, term in zip(read.shape, read.fixed, strict=True) if term is None]
        self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=trace.device)
        self.trace, self._terms, self.read, self.viewed = trace, terms, read, False
        return self

    @property
    def terms(self) -> Tensor:
        if self._terms is None:
            assert self.read is not None
            self._terms = self.trace.read_all(self.read)
            self.read = None
        return self._terms

    def assign(self, other: TracedTensor) -> None:
        self._terms, self.read = other.terms, None

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
        from .dispatch import dispatch

        return dispatch(func, args, kwargs or {})
