"""One run of a function on traced tensors."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import Refused
from .graph import BOOL, FLOAT, INT, Graph, Number
from .indexing import is_full_slice, normalized, read_terms
from .lifted import Lifted
from .steps import Steps
from .tensor import MAX_ELEMENTS, Read, TracedTensor, apart, terms_of
from .trees import contains, mapped, words

__all__ = ["Trace", "category"]

_DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_MAX_CONSTANTS = 64
"""A tensor of numbers that the function itself writes down is part of the text up to so many elements."""

# Functions that hand out a tensor's value to Python.
_VALUES = words(
    """
    item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ __contains__ is_nonzero
    equal allclose data_ptr __dlpack__ __reduce_ex__ __deepcopy__ nonzero
    """
)
_IN_PLACE = words(
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__"
)


def category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INT


def _name(func: Callable) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    return name


class Trace:
    """The graph, the captured tensors that it reads, and what was computed from captured tensors alone."""

    def __init__(self, device: torch.device, stand_in: Callable[[Lifted], Tensor] | None = None) -> None:
        """`stand_in` gives a 0-d tensor to be captured in a number's place, where numbers cannot be scalars."""
        self.graph = Graph()
        self.device = device
        self.stand_in = stand_in
        self.buffers: list[Tensor] = []
        self.scalars: list[Lifted] = []
        self.steps = Steps()
        self._versions: list[int] = []
        self._on_device: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}

    # --- values ---

    def wrap(self, terms: Tensor, dtype: torch.dtype) -> TracedTensor:
        if terms.numel() > MAX_ELEMENTS:
            raise Refused(
                f"a value of {terms.numel()} elements",
                f"compute on single scores, or on at most {MAX_ELEMENTS} numbers",
            )
        return TracedTensor(self, terms, dtype)

    def input(self, name: str) -> TracedTensor:
        dtype = torch.float32 if name == "score" else torch.int64
        return self.wrap(terms_of(self.graph.input(name)), dtype)

    def number(self, value: Number, dtype: torch.dtype) -> TracedTensor:
        term = self.graph.cast(self.graph.constant(value), category(dtype))
        return self.wrap(terms_of(term), dtype)

    def lifted(self, number: Lifted) -> TracedTensor:
        """A Python number from outside as a 0-d tensor."""
        if self.stand_in is not None:
            return self.captured(self.stand_in(number))
        known = [x.expression for x in self.scalars]
        index = known.index(number.expression) if number.expression in known else len(known)
        if index == len(known):
            self.scalars.append(number)
        term = self.graph.scalar(index, number.value)
        dtype = torch.int64 if isinstance(number.value, int) else torch.get_default_dtype()
        return self.wrap(terms_of(term), dtype)

    def captured(self, tensor: Tensor) -> TracedTensor:
        """A real tensor as operand: numbers that the function wrote down, or a buffer to be read."""
        if self.steps.is_constant(tensor) and tensor.numel() <= _MAX_CONSTANTS:
            return self.constants(tensor)
        if tensor.dim() == 0 and tensor.device.type == "cpu" != self.device.type:
            tensor = self._moved(tensor)  # PyTorch lets single numbers on the CPU meet tensors of a GPU
        buffer = self._places.get(id(tensor))
        if buffer is None:
            self._check(tensor)
            buffer = self._places[id(tensor)] = len(self.buffers)
            self.buffers.append(tensor)
            self._versions.append(_version(tensor))
        return TracedTensor(self, None, tensor.dtype, Read(buffer, tuple(tensor.shape), (None,) * tensor.dim()))

    def _moved(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._on_device:
            with torch.enable_grad():
                self._on_device[id(tensor)] = self.steps.run(Tensor.to, "to", (tensor, self.device), {})
        return self._on_device[id(tensor)]

    def check_unchanged(self) -> None:
        """A read stands for the tensor as it is in the end."""
        for tensor, version in zip(self.buffers, self._versions, strict=True):
            if _version(tensor) != version:
                raise Refused(
                    "a tensor was changed after it was read", "read it when it is complete, or copy it: .clone()"
                )

    def constants(self, tensor: Tensor) -> TracedTensor:
        terms = [self.graph.constant(x) for x in tensor.reshape(-1).tolist()]
        return self.wrap(terms_of(terms, tensor.shape), tensor.dtype)

    def _check(self, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            raise Refused(
                f"a captured tensor of {tensor.dtype}",
                "capture floating point, integer or bool tensors, see .to(dtype)",
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise Refused(f"a captured tensor of layout {tensor.layout}", "capture a strided tensor, see .to_dense()")
        if tensor.dim() > 8:
            raise Refused(f"a captured tensor of {tensor.dim()} dimensions", "use at most 8, see .flatten()")
        kind = type(tensor)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not kind.__module__.startswith(
            ("torch._subclasses", "torch._dynamo")
        ):
            raise Refused(
                f"a captured tensor of the subclass {kind.__name__}", "capture a plain tensor, such as its local part"
            )

    def load(self, buffer: int, indices: Sequence[int]) -> int:
        g = self.graph
        tensor = self.buffers[buffer]
        for index, size in zip(indices, tensor.shape, strict=True):
            value = g.value(index)
            if value is not None and not -size <= value < size:
                raise IndexError(f"index {value} is out of bounds for a dimension of size {size}")
            if g.type(index) == FLOAT:
                raise Refused("a float as an index", "convert it: .long()")
        return g.load(buffer, category(tensor.dtype), [g.cast(x, INT) for x in indices])

    def read_all(self, read: Read) -> Tensor:
        """The terms of all elements that are left."""
        shape = [n for n, term in zip(read.shape, read.fixed, strict=True) if term is None]
        if math.prod(shape) > MAX_ELEMENTS:
            raise Refused(
                f"a captured tensor of shape {shape} as a whole",
                f"index it, such as by [q_idx] or [h, kv_idx], or leave at most {MAX_ELEMENTS} elements",
            )
        terms = []
        for place in itertools.product(*(range(n) for n in shape)):
            free = iter(place)
            terms.append(
                self.load(read.buffer, [self.graph.constant(next(free)) if t is None else t for t in read.fixed])
            )
        return terms_of(terms, shape)

    # --- indexing ---

    def index(self, tensor: TracedTensor, index: Any) -> TracedTensor:
        """tensor[index]."""
        items = normalized(index, tensor.dim())
        terms = [self._index_item(item) for item in items]
        return self.index_by_terms(tensor, terms)

    def _index_item(self, item: Any) -> Any:
        if item is None or isinstance(item, slice):
            if isinstance(item, slice):
                for bound in (item.start, item.stop, item.step):
                    if isinstance(bound, TracedTensor):
                        raise Refused(
                            "a slice whose bounds depend on an index",
                            "index single elements: their number must be fixed",
                        )
            return item
        if isinstance(item, Lifted):
            item = self.lifted(item)
        elif isinstance(item, (list, range)):
            item = self.stacked(list(item))
        elif isinstance(item, Tensor) and not isinstance(item, TracedTensor):
            item = self.captured(item)
        if isinstance(item, TracedTensor):
            if item.dtype.is_floating_point:
                raise Refused("a float as an index", "convert it: .long()")
            if item.dtype == torch.bool:
                raise Refused("a bool tensor as an index", "use torch.where, or .long() to index by 0 and 1")
            return item.terms
        if hasattr(item, "__index__"):
            return int(item)
        raise TypeError(f"a tensor cannot be indexed by {type(item).__name__}")

    def index_by_terms(self, tensor: TracedTensor, items: Sequence[Any]) -> TracedTensor:
        g = self.graph
        read = tensor.read
        if read is None:
            shape, terms = read_terms(g, tensor.shape, items)
            picked = [self._pick(tensor.terms, list(place)) for place in _columns(terms, shape)]
            return self.wrap(terms_of(picked, shape), tensor.dtype)
        single = [isinstance(x, int) or (isinstance(x, Tensor) and x.dim() == 0) for x in items]
        if all(one or is_full_slice(item) for one, item in zip(single, items, strict=True)):
            # Some dimensions are indexed, the others stay as they are.
            new = iter(items)
            fixed: list[int | None] = []
            for term in read.fixed:
                item = next(new) if term is None else None
                if isinstance(item, int):
                    fixed.append(g.constant(item))
                elif isinstance(item, Tensor):
                    fixed.append(int(item))
                else:
                    fixed.append(term)
            done = Read(read.buffer, read.shape, tuple(fixed))
            if None not in fixed:
                return self.wrap(terms_of(self.load(read.buffer, [x for x in fixed if x is not None])), tensor.dtype)
            return TracedTensor(self, None, tensor.dtype, done)
        shape, terms = read_terms(g, tensor.shape, items)
        loads = []
        for place in _columns(terms, shape):
            free = iter(place)
            loads.append(self.load(read.buffer, [next(free) if t is None else t for t in read.fixed]))
        return self.wrap(terms_of(loads, shape), tensor.dtype)

    def _pick(self, terms: Tensor, place: list[int]) -> int:
        """The element of values at a place that may depend on indices: a choice between all of them."""
        if not place:
            return int(terms)
        g = self.graph
        value = g.value(place[0])
        if value is not None:
            return self._pick(terms[int(value)], place[1:])
        from .ops import inside

        size = terms.shape[0]
        index = inside(g, place[0], size)
        result = self._pick(terms[size - 1], place[1:])
        for i in reversed(range(size - 1)):
            result = g.apply("where", g.apply("eq", index, g.constant(i)), self._pick(terms[i], place[1:]), result)
        return result

    def stacked(self, values: Any) -> TracedTensor:
        """torch.tensor(values), where some are traced."""
        if isinstance(values, Lifted):
            return self.lifted(values)
        if isinstance(values, TracedTensor):
            return values
        if isinstance(values, Tensor):
            return self.captured(values)
        if isinstance(values, (bool, int, float)):
            return self.constants(
                torch.tensor(values, dtype=torch.float64 if isinstance(values, float) else None, device="cpu")
            )
        parts = [self.stacked(x) for x in values]
        if not parts:
            return self.constants(torch.tensor([], device="cpu"))
        dtype = max((x.dtype for x in parts), key=category)
        terms = [x.terms.apply_(lambda t: self.graph.cast(t, category(dtype))) for x in parts]
        return self.wrap(torch.stack(terms), dtype)

    # --- running ---

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with _Mode(self), torch._C._DisableAutocast():
            yield

    def call(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A PyTorch function that the traced function calls."""
        if contains((args, kwargs), TracedTensor):
            with apart():
                return self._call_traced(func, args, kwargs)
        if contains((args, kwargs), Lifted):
            with apart():
                made = self._made_of_numbers(func, args, kwargs)
            if made is not None:
                return made
        with _Outside(self.steps):
            return self.steps.run(func, _name(func), args, kwargs)

    def _call_traced(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = _name(func)
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if kwargs.get("out") is not None or (in_place and not isinstance(args[0], TracedTensor)):
            raise Refused("a write into a captured tensor", "compute a new value, such as a = a + b for a += b")
        special = getattr(self, f"_call_{name.strip('_')}", None)
        if special is not None:
            return special(func, args, kwargs)
        if name.endswith(".__get__"):
            return self._run(func, args, kwargs)
        if name in _VALUES:
            raise _needs_value(name)
        args, kwargs = mapped((args, kwargs), self._operand)
        return self._run(func, args, kwargs)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Lifted):
            return self.lifted(x)
        if isinstance(x, Tensor) and not isinstance(x, TracedTensor):
            return self.captured(x)
        return x

    def _run(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        detached = not torch.is_grad_enabled()
        with torch.no_grad():
            out = func(*args, **kwargs)
            if detached:
                # The function itself switched gradients off.
                out = mapped(out, lambda x: x.detach() if isinstance(x, TracedTensor) else x)
        return out

    def _made_of_numbers(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor | None:
        if _name(func) in ("tensor", "as_tensor", "scalar_tensor") and args:
            made = self.stacked(args[0])
        elif _name(func) == "full" and len(args) == 2 and contains(args[1], Lifted):
            made = self.lifted(args[1])
            made = self.wrap(
                made.terms.expand(args[0] if isinstance(args[0], (tuple, list)) else (args[0],)), made.dtype
            )
        else:
            return None
        dtype = kwargs.get("dtype")
        return made if dtype is None else self._run(Tensor.to, (made, dtype), {})

    # --- functions that dispatch would not get, or not get right ---

    def _call_getitem(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, index = args
        return self.index(self._operand(tensor), index)

    def _call_setitem(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise Refused("an assignment to elements of a tensor", "compute a new value: torch.where or torch.stack")

    def _call_tensor(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        made = self.stacked(args[0] if args else kwargs["data"])
        # A copy without a gradient, as PyTorch's.
        made = self._run(Tensor.detach, (made,), {})
        return made if kwargs.get("dtype") is None else self._run(Tensor.to, (made, kwargs["dtype"]), {})

    def _call_as_tensor(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        made = self.stacked(args[0])
        return made if kwargs.get("dtype") is None else self._run(Tensor.to, (made, kwargs["dtype"]), {})

    def _call_new_tensor(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        made = self.stacked(args[1])
        return self._run(Tensor.to, (made, kwargs.get("dtype") or args[0].dtype), {})

    def _fill(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any], at: int) -> Any:
        """full_like and its kin: the value may be traced, where PyTorch wants a number."""
        fill = kwargs["fill_value"] if "fill_value" in kwargs else args[at]
        zero = 0 if not isinstance(fill, bool) else False
        args, kwargs = list(args), dict(kwargs)
        if "fill_value" in kwargs:
            kwargs["fill_value"] = zero
        else:
            args[at] = zero
        if not contains((args, kwargs), TracedTensor):
            shape = self._run(func, args, {**kwargs, "device": "meta"})
            made = self.wrap(terms_of(0).expand(shape.shape), shape.dtype)
        else:
            made = self._run(func, args, kwargs)
        value = self.stacked(fill)
        if value.dim() != 0:
            raise Refused(f"a fill value of shape {list(value.shape)}", "fill with a single number")
        term = self.graph.cast(int(value.terms), category(made.dtype))
        return self.wrap(terms_of(term).expand(made.shape), made.dtype)

    def _call_full_like(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._fill(func, args, kwargs, 1)

    def _call_full(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._fill(func, args, kwargs, 1)

    def _call_new_full(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._fill(func, args, kwargs, 2)

    def _clamp(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """PyTorch wants both bounds to be tensors, or both numbers."""

        def bound(x: Any) -> Any:
            x = self._operand(x)
            return self.stacked(x) if isinstance(x, (int, float)) else x

        args, kwargs = mapped((args, kwargs), self._operand)
        if sum(isinstance(x, TracedTensor) for x in [*args, *kwargs.values()]) > 1:
            args, kwargs = mapped((args, kwargs), bound)
        return self._run(func, args, kwargs)

    def _call_matmul(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Of a vector and a matrix PyTorch reshapes the result in place, which a tensor without memory cannot follow.
        a, b = mapped(tuple(args), self._operand)
        if _name(func) == "__rmatmul__":
            a, b = b, a
        if a.dim() == 1 and b.dim() == 2:
            return self._run(torch.mv, (b.t(), a), {})
        return self._run(torch.matmul, (a, b), {})

    _call_rmatmul = _call_matmul

    def _call_linear(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        (x, weight, *rest), kwargs = mapped((tuple(args), kwargs), self._operand)
        bias = rest[0] if rest else kwargs.get("bias")
        product = self._call_matmul(torch.matmul, (x, self._run(torch.t, (weight,), {})), {})
        return product if bias is None else self._run(torch.add, (product, bias), {})

    _call_clamp = _call_clip = _call_clamp_min = _call_clamp_max = _clamp


def _columns(terms: Sequence[Tensor], shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not terms:
        return iter([()] * math.prod(shape))
    return zip(*(t.reshape(-1).tolist() for t in terms), strict=True)


def _needs_value(name: str) -> Refused:
    if name in ("__bool__", "is_nonzero"):
        return Refused(
            "a branch on a value that differs from score to score",
            "use torch.where(condition, a, b), and & | ~ on bools",
        )
    if name in ("__index__", "__int__", "item", "tolist"):
        return Refused(
            "a value that differs from score to score as a Python number",
            "keep it a tensor, such as .long() for int() and x[index] for an element",
        )
    return Refused(f"{name} of a value that differs from score to score", "keep it a tensor")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Mode(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.trace.call(func, args, kwargs or {})


class _Outside(TorchDispatchMode):
    """Watches what a function does to captured tensors alone."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo, which takes a second, and no compiled code runs under this mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(
                f"random numbers ({func._schema.name.removeprefix('aten::')})",
                "draw them outside and capture the tensor",
            )
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            self.steps.volatile = f"{func._schema.name} depends on the values of a captured tensor"
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.steps.check_write(value)
        out = func(*args, **kwargs)
        self.steps.made((args, kwargs), out)
        return out
