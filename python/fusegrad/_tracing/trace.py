"""One run of a function on traced tensors: the graph, and what stands for what the function works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusegrad._C.score_mod import BOOL, FLOAT, INT, MAX_RANK, graph

from .._transforms import back_in, differentiated, unwrapped
from .errors import Refused
from .functions import Functions
from .lifted import Lifted
from .steps import Steps
from .tensor import Read, TracedTensor, grad_mode, load
from .trees import mapped
from .vectors import MAX_ELEMENTS, MAX_UNROLLED, packed_shape, terms_of

__all__ = ["Handler", "Trace", "category", "in_forward"]

_DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_PLAIN_TORCH_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INT


def in_forward() -> bool:
    """Whether the forward of an autograd.Function is at work, as which PyTorch switches forward mode off."""
    return not torch._C._is_fwd_grad_enabled()


class Trace:
    """The graph, the captured tensors that it reads, and what was computed from captured tensors alone."""

    def __init__(
        self,
        kind: str,
        device: torch.device,
        call: Handler,
        dispatch: Handler,
        stand_in: Callable[[Lifted], Tensor] | None = None,
        differentiable: bool = True,
        transforms: Any = None,
        symbolic_float: torch.dtype = torch.float64,
    ) -> None:
        """`call` gets the functions of torch that the traced function calls, `dispatch` the ops on its values.
        `stand_in` gives a 0-d tensor to be captured in a number's place, where numbers cannot be scalars. Without
        `differentiable` nothing requires grad: the result has no derivative. `transforms`: those of torch.func that
        were put aside, and that what is computed from captured tensors alone is within."""
        self.graph = graph(kind)
        self.device = device
        self._call, self._dispatch = call, dispatch
        self.stand_in = stand_in
        self.differentiable = differentiable
        self.transforms = transforms
        self.symbolic_float = symbolic_float
        self.functions = Functions(self)
        self.buffers: list[Tensor] = []
        self.scalars: list[Lifted] = []
        self.steps = Steps()
        self._symbols: dict[Any, Tensor] = {}
        self._versions: list[int] = []
        self.copies: dict[tuple[int, torch.dtype | torch.device], tuple[Tensor, Tensor]] = {}
        """Captured tensors in another dtype or place, beside these."""
        self._places: dict[int, int] = {}

    def close(self) -> None:
        """Called when the function has run. The collector does not see what PyTorch holds of traced values: the bases
        of views, what nodes saved. From here on values hold nothing captured, and each other no more."""
        self.functions.close()
        del self.functions, self.steps, self.buffers, self.scalars, self.stand_in, self.transforms
        self._places, self.copies, self._symbols = {}, {}, {}

    # --- running ---

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with _Mode(self):
            yield

    def call(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A PyTorch function that the traced function calls."""
        return self._call(self, func, args, kwargs)

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An op on values of the trace."""
        return self._dispatch(self, func, args, kwargs)

    def run(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's function of values of the trace."""
        detached = not torch.is_grad_enabled()
        with grad_mode(False):
            out = func(*args, **kwargs)
            if detached:
                # The function itself switched gradients off.
                out = mapped(out, lambda x: self.detached(x) if isinstance(x, TracedTensor) else x)
        return out

    # --- values ---

    def wrap(self, terms: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> TracedTensor:
        """A value of these packed terms."""
        if terms.numel() > MAX_ELEMENTS:
            raise Refused(
                f"a value of {terms.numel()} elements",
                f"compute on single scores, or on at most {MAX_ELEMENTS} numbers",
            )
        return TracedTensor(self, terms, dtype, shape=shape)

    def filled(self, term: int, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
        """A value whose elements are all one term."""
        return self.wrap(terms_of(term).expand(packed_shape(shape)), dtype, shape)

    def is_active(self, x: TracedTensor) -> bool:
        """Whether a value requires grad."""
        if not (self.differentiable and x.dtype.is_floating_point):
            return False
        if x.read is not None:
            return differentiated(self.buffers[x.read.buffer])
        return any(map(self.graph.active, x.packed.reshape(-1).tolist()))

    def detached(self, x: TracedTensor) -> TracedTensor:
        """A new value; PyTorch's detach would give a view."""
        if not self.is_active(x):
            return x
        return self.wrap(x.packed.clone().apply_(lambda t: self.graph.apply("detach", t)), x.dtype, x.shape)

    def input(self, name: str) -> TracedTensor:
        dtype = torch.float32 if name == "score" else torch.int64
        return self.wrap(terms_of(self.graph.input(name)), dtype)

    def operand(self, x: Any) -> Any:
        """An argument of PyTorch's functions; what is no number and no tensor is itself."""
        if isinstance(x, Lifted):
            return self.lifted(x)
        if isinstance(x, Tensor) and not isinstance(x, TracedTensor):
            return self.captured(x)
        return x

    def lifted(self, number: Lifted) -> TracedTensor:
        """A Python number from outside as a 0-d tensor."""
        if self.stand_in is not None:
            return self.captured(self.stand_in(number))
        known = [x.expression for x in self.scalars]
        index = known.index(number.expression) if number.expression in known else len(known)
        if index == len(known):
            self.scalars.append(number)
            self.graph.add_scalar(self.graph.type(self.graph.constant(number.value)))
        term = self.graph.scalar(index)
        dtype = torch.int64 if isinstance(number.value, int) else torch.get_default_dtype()
        return self.wrap(terms_of(term), dtype)

    def symbol(self, x: Any) -> Any:
        """A symbolic number of torch.export as a 0-d tensor, which its program makes of it."""
        if not isinstance(x, (torch.SymInt, torch.SymFloat)):
            return x
        made = self._symbols.get(x.node)
        if made is None:
            dtype = torch.int64 if isinstance(x, torch.SymInt) else self.symbolic_float
            with torch._C.DisableTorchFunction():
                made = torch.scalar_tensor(x, dtype=dtype, device=self.device)
            self._symbols[x.node] = made
        return made

    def constants(self, tensor: Tensor) -> TracedTensor:
        terms = [self.graph.constant(x) for x in unwrapped(tensor).reshape(-1).tolist()]
        return self.wrap(terms_of(terms, tensor.shape), tensor.dtype)

    def stacked(self, values: Any) -> TracedTensor:
        """torch.tensor(values), where some are traced."""
        values = self.operand(values)
        if isinstance(values, TracedTensor):
            return values
        if isinstance(values, (bool, int, float)):
            dtype = torch.float64 if isinstance(values, float) else None
            return self.constants(torch.tensor(values, dtype=dtype, device="cpu"))
        parts = [self.stacked(x) for x in values]
        if not parts:
            return self.constants(torch.tensor([], device="cpu"))
        dtype = max((x.dtype for x in parts), key=category)
        if any(x.axes for x in parts):
            return self.run(torch.stack, [self.run(Tensor.to, x, dtype) for x in parts])
        terms = [x.terms.apply_(lambda t: self.graph.cast(t, category(dtype))) for x in parts]
        return self.wrap(torch.stack(terms), dtype)

    # --- captured tensors ---

    def captured(self, tensor: Tensor) -> TracedTensor:
        """A real tensor as operand: numbers that the function wrote down, or a buffer to be read."""
        if self.steps.is_constant(tensor) and tensor.numel() <= MAX_UNROLLED and all(n <= 8 for n in tensor.shape):
            return self.constants(tensor)
        if tensor.dim() == 0 and tensor.device.type == "cpu" != self.device.type:
            tensor = self._changed(tensor, self.device)  # PyTorch lets single numbers on the CPU meet tensors of a GPU
        buffer = self._places.get(id(tensor))
        if buffer is None:
            _check(tensor)
            if in_forward() and differentiated(tensor) and not tensor.requires_grad:
                # PyTorch does not say whether it is an argument of the Function, nor for which a gradient is wanted.
                raise Refused(
                    "a captured tensor that the forward of an autograd.Function indexes, in forward mode or torch.func",
                    "index it before: pass bias[kv_idx], not bias",
                )
            buffer = self._places[id(tensor)] = len(self.buffers)
            self.buffers.append(tensor)
            self.graph.add_buffer(category(tensor.dtype), tensor.dim(), differentiated(tensor))
            self._versions.append(_version(tensor))
        return TracedTensor(self, None, tensor.dtype, Read(buffer, tuple(tensor.shape), (None,) * tensor.dim()))

    def in_float64(self, term: int) -> int:
        """For an integer that is read from a captured tensor, the read of that tensor in float64: a mod's floats are
        float32 unless it captures such a tensor, and have no room for large integers."""
        operation, type_, buffer, indices = self.graph.node(term)
        if operation != "load" or type_ != INT:
            return term
        wide = self.captured(self._changed(self.buffers[buffer], torch.float64))
        assert wide.read is not None
        return load(self, wide.read.buffer, indices)

    def _changed(self, tensor: Tensor, to: torch.dtype | torch.device) -> Tensor:
        key = id(tensor), to
        if key not in self.copies:
            with grad_mode(True), back_in(self.transforms):
                self.copies[key] = tensor, self.steps.run(Tensor.to, "to", (tensor, to), {})
        return self.copies[key][1]

    def check_unchanged(self) -> None:
        """A read stands for the tensor as it is in the end."""
        for tensor, version in zip(self.buffers, self._versions, strict=True):
            if _version(tensor) != version:
                raise Refused(
                    "a tensor was changed after it was read", "read it when it is complete, or copy it: .clone()"
                )


Handler = Callable[[Trace, Any, Sequence[Any], dict[str, Any]], Any]
"""What becomes of a call of a function of torch, or of an op."""


def _check(tensor: Tensor) -> None:
    kind = type(tensor)
    if tensor.dtype not in _DTYPES:
        raise Refused(
            f"a captured tensor of {tensor.dtype}", "capture floating point, integer or bool tensors, see .to(dtype)"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise Refused(f"a captured tensor of layout {tensor.layout}", "capture a strided tensor, see .to_dense()")
    if tensor.dim() > MAX_RANK:
        raise Refused(f"a captured tensor of {tensor.dim()} dimensions", f"use at most {MAX_RANK}, see .flatten()")
    if getattr(kind.__torch_function__, "__func__", kind.__torch_function__) not in _PLAIN_TORCH_FUNCTIONS:
        raise Refused(
            f"a captured tensor of the subclass {kind.__name__}, which has functions of its own",
            "capture a plain tensor, see .as_subclass(torch.Tensor)",
        )
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not kind.__module__.startswith(
        ("torch._subclasses", "torch._dynamo", "torch.distributed.tensor")
    ):
        raise Refused(
            f"a captured tensor of the subclass {kind.__name__}", "capture a plain tensor, such as its local part"
        )


def _version(tensor: Tensor) -> int:
    tensor = unwrapped(tensor)
    return 0 if tensor.is_inference() else tensor._version


class _Mode(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.call(func, args, kwargs or {})
