"""One run of a function on traced tensors."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusegrad._C.score_mod import BOOL, FLOAT, INT, MAX_RANK, Graph, graph

from .._transforms import back_in, differentiated, unwrapped
from .errors import Refused, RefusedWrite, unknown, within
from .functions import Functions
from .indexing import is_full_slice, normalized, read_terms
from .lifted import Lifted, Number
from .names import words
from .ops import checked, inside
from .steps import Steps
from .tensor import MAX_ELEMENTS, Read, TracedTensor, apart, grad_mode
from .trees import contains, mapped, tensors_of
from .vectors import SMALL, axis_of, packed_shape, terms_of

__all__ = ["Trace", "category"]

_DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_SYMBOLS = (torch.SymInt, torch.SymFloat)
_MAX_CONSTANTS = 64
"""A tensor of numbers that the function itself writes down is part of the text up to so many elements."""

# Functions that hand out a tensor's value to Python.
_VALUES = words(
    """
    item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ __contains__ is_nonzero
    equal allclose data_ptr __dlpack__ __reduce_ex__ __deepcopy__ nonzero
    """
)
# Functions that ask for, or take part in, a gradient that PyTorch computes.
_GRADIENTS = words(
    """
    grad_fn.__get__ grad.__get__ is_leaf.__get__ output_nr.__get__ requires_grad.__set__ grad.__set__ data.__set__
    register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ backward grad
    """
)
_NAMESPACES = ("aten", "prims")
"""The ops that the table of operations may say something of."""
_IN_PLACE = words(
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__"
)


def _writes(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INT


def _is_pytorchs(func: Any) -> bool:
    """Whether a name says what it is: another's function may have the name of one of PyTorch's."""
    if isinstance(func, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return False
    scope = getattr(func, "__globals__", None)
    module = getattr(func, "__module__", None) if scope is None else scope.get("__name__")
    return module is None or module.split(".")[0] in ("torch", "builtins")


def _name(func: Callable) -> str:
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _qualified(func)
    if not _is_pytorchs(func):
        return f"{getattr(func, '__module__', '')}::{getattr(func, '__qualname__', func)}"
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    return name


class Trace:
    """The graph, the captured tensors that it reads, and what was computed from captured tensors alone."""

    def __init__(
        self,
        kind: str,
        device: torch.device,
        dispatch: Callable[..., Any],
        stand_in: Callable[[Lifted], Tensor] | None = None,
        differentiable: bool = True,
        transforms: Any = None,
        symbolic_float: torch.dtype = torch.float64,
    ) -> None:
        """`stand_in` gives a 0-d tensor to be captured in a number's place, where numbers cannot be scalars. Without
        `differentiable` nothing requires grad: the result has no derivative. `transforms`: those of torch.func that
        were put aside, and that what is computed from captured tensors alone is within."""
        self.graph = graph(kind)
        self.device = device
        self._dispatch = dispatch
        self.stand_in = stand_in
        self.differentiable = differentiable
        self.transforms = transforms
        self.symbolic_float = symbolic_float
        self.functions = Functions(self)
        self.buffers: list[Tensor] = []
        self.scalars: list[Lifted] = []
        self._symbols: dict[Any, Tensor] = {}
        self.steps = Steps()
        self._versions: list[int] = []
        self.copies: dict[tuple[int, torch.dtype | torch.device], tuple[Tensor, Tensor]] = {}
        """Of captured tensors in another dtype or place, beside these."""
        self._places: dict[int, int] = {}

    def close(self) -> None:
        """Called when the function has run. The collector does not see what PyTorch holds of traced values: the bases
        of views, what nodes saved. From here on values hold nothing captured, and each other no more."""
        self.functions.close()
        del self.functions, self.steps, self.buffers, self.scalars, self.stand_in, self.transforms
        self._places, self.copies, self._symbols = {}, {}, {}

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
            self.graph.add_scalar(self.graph.type(self.graph.constant(number.value)))
        term = self.graph.scalar(index)
        dtype = torch.int64 if isinstance(number.value, int) else torch.get_default_dtype()
        return self.wrap(terms_of(term), dtype)

    def captured(self, tensor: Tensor) -> TracedTensor:
        """A real tensor as operand: numbers that the function wrote down, or a buffer to be read."""
        if self.steps.is_constant(tensor) and tensor.numel() <= _MAX_CONSTANTS and all(n <= 8 for n in tensor.shape):
            return self.constants(tensor)
        if tensor.dim() == 0 and tensor.device.type == "cpu" != self.device.type:
            tensor = self._changed(tensor, self.device)  # PyTorch lets single numbers on the CPU meet tensors of a GPU
        buffer = self._places.get(id(tensor))
        if buffer is None:
            self._check(tensor)
            if _in_forward() and differentiated(tensor) and not tensor.requires_grad:
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

    def _symbol(self, x: Any) -> Any:
        """A symbolic number of torch.export as a 0-d tensor, which its program makes of it."""
        if not isinstance(x, _SYMBOLS):
            return x
        made = self._symbols.get(x.node)
        if made is None:
            dtype = torch.int64 if isinstance(x, torch.SymInt) else self.symbolic_float
            with torch._C.DisableTorchFunction():
                made = torch.scalar_tensor(x, dtype=dtype, device=self.device)
            self._symbols[x.node] = made
        return made

    def in_float64(self, term: int) -> int:
        """Of an integer that is read from a captured tensor, the read of that tensor in float64: a mod's floats are
        float32 unless it captures such a tensor, and have no room for large integers."""
        operation, type_, buffer, indices = self.graph.node(term)
        if operation != "load" or type_ != INT:
            return term
        wide = self.captured(self._changed(self.buffers[buffer], torch.float64))
        assert wide.read is not None
        return self.load(wide.read.buffer, indices)

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

    def constants(self, tensor: Tensor) -> TracedTensor:
        terms = [self.graph.constant(x) for x in unwrapped(tensor).reshape(-1).tolist()]
        return self.wrap(terms_of(terms, tensor.shape), tensor.dtype)

    def _check(self, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES:
            raise Refused(
                f"a captured tensor of {tensor.dtype}",
                "capture floating point, integer or bool tensors, see .to(dtype)",
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise Refused(f"a captured tensor of layout {tensor.layout}", "capture a strided tensor, see .to_dense()")
        if tensor.dim() > MAX_RANK:
            most = MAX_RANK
            raise Refused(f"a captured tensor of {tensor.dim()} dimensions", f"use at most {most}, see .flatten()")
        kind = type(tensor)
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

    def load(self, buffer: int, indices: Sequence[int]) -> int:
        g = self.graph
        tensor = self.buffers[buffer]
        for index, size in zip(indices, tensor.shape, strict=True):
            value = g.value(index)
            if value is not None and not -size <= value < size:
                raise IndexError(f"index {value} is out of bounds for a dimension of size {size}")
            if g.type(index) == FLOAT:
                raise Refused("a float as an index", "convert it: .long()")
        return g.load(buffer, [g.cast(x, INT) for x in indices])

    def read_all(self, read: Read) -> Tensor:
        """The terms of all elements that are left."""
        g, shape = self.graph, read.left
        packed = packed_shape(shape)
        if math.prod(packed) > MAX_ELEMENTS:
            raise Refused(
                f"a captured tensor of shape {shape} as a whole",
                f"index it, such as by [q_idx] or [h, kv_idx], or leave at most {MAX_ELEMENTS} elements",
            )
        places = [
            [axis_of(g, shape, d)] if packed[d] != n else [g.constant(i) for i in range(n)] for d, n in enumerate(shape)
        ]
        terms = []
        for place in itertools.product(*places):
            free = iter(place)
            terms.append(self.load(read.buffer, [next(free) if t is None else t for t in read.fixed]))
        return terms_of(terms, packed)

    # --- indexing ---

    def index(self, tensor: TracedTensor, index: Any) -> TracedTensor:
        """tensor[index]."""
        items = normalized(index, tensor.dim())
        found = self.index_by_terms(tensor, [self._index_item(item) for item in items])
        if not any(isinstance(item, (Tensor, list, range)) for item in items):
            tensor.viewed = found.viewed = True
        return found

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
            return item
        if hasattr(item, "__index__"):
            return int(item)
        raise TypeError(f"a tensor cannot be indexed by {type(item).__name__}")

    def index_by_terms(self, tensor: TracedTensor, items: Sequence[Any]) -> TracedTensor:
        """tensor[items]: None, slices, ints, and traced integers."""
        g = self.graph
        read = tensor.read
        if read is None:
            shape, packed, terms = read_terms(g, tensor.packed, tensor.shape, items)
            picked = [self._pick(tensor, list(place)) for place in _columns(terms, packed)]
            return self.wrap(terms_of(picked, packed), tensor.dtype, shape)
        single = [isinstance(x, int) or (isinstance(x, Tensor) and x.dim() == 0) for x in items]
        if all(one or is_full_slice(item) for one, item in zip(single, items, strict=True)):
            # Some dimensions are indexed, the others stay as they are.
            new = iter(items)
            fixed: list[int | None] = []
            for term in read.fixed:
                item = next(new) if term is None else None
                if isinstance(item, int):
                    fixed.append(g.constant(item))
                elif isinstance(item, TracedTensor):
                    fixed.append(int(item.packed))
                else:
                    fixed.append(term)
            done = Read(read.buffer, read.shape, tuple(fixed))
            if None not in fixed:
                return self.wrap(terms_of(self.load(read.buffer, [x for x in fixed if x is not None])), tensor.dtype)
            return TracedTensor(self, None, tensor.dtype, done)
        shape, packed, terms = read_terms(g, None, tensor.shape, items)
        loads = []
        for place in _columns(terms, packed):
            free = iter(place)
            loads.append(self.load(read.buffer, [next(free) if t is None else t for t in read.fixed]))
        return self.wrap(terms_of(loads, packed), tensor.dtype, shape)

    def _pick(self, tensor: TracedTensor, place: list[int]) -> int:
        """The element at a place that may depend on indices: of an axis the term there, of single elements a choice
        between all of them. Out of range, where that is no error: NaN, 0 or false, as of a captured tensor."""
        g = self.graph
        place = [inside(g, index, size) for index, size in zip(place, tensor.shape, strict=True)]
        images = {axis_of(g, tensor.shape, d): place[d] for d in tensor.axes}
        result = _chosen(g, tensor.packed, place, images)
        for index in place:
            operation, _, _, operands = g.node(index)
            if operation == "within":
                nothing = g.constant(math.nan if g.type(result) == FLOAT else False)
                outside = g.apply("eq", index, operands[1])
                result = g.apply("where", outside, g.cast(nothing, g.type(result)), result)
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
        if any(x.axes for x in parts):
            return self._run(torch.stack, ([self._run(Tensor.to, (x, dtype), {}) for x in parts],), {})
        terms = [x.terms.apply_(lambda t: self.graph.cast(t, category(dtype))) for x in parts]
        return self.wrap(torch.stack(terms), dtype)

    # --- running ---

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._dispatch(self, func, args, kwargs)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with _Mode(self):
            yield

    def call(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A PyTorch function that the traced function calls."""
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():  # as in grad_mode
                return func(*args)
        if func is F.embedding and (kwargs.get("max_norm") is not None or any(x is not None for x in args[3:4])):
            raise Refused("max_norm of F.embedding, which writes into the table", "scale the rows outside")
        with torch._C._DisableAutocast():
            if contains((args, kwargs), TracedTensor):
                if contains((args, kwargs), _SYMBOLS):
                    args, kwargs = mapped((args, kwargs), self._symbol)
                with apart():
                    self.functions.adopt((args, kwargs))
                    try:
                        return self.functions.offered(self._call_traced(func, args, kwargs))
                    except RefusedWrite as error:
                        if _writes(_name(func)) or kwargs.get("out") is not None:
                            raise Refused(error.what, error.instead) from None
                        raise unknown(_name(func).removeprefix("aten::")) from None
            if contains((args, kwargs), Lifted):
                with apart():
                    made = self._made_of_numbers(func, args, kwargs)
                if made is not None:
                    return self.functions.offered(made)
            if self.transforms is not None and _in_forward() and any(map(differentiated, tensors_of((args, kwargs)))):
                raise Refused(
                    "an autograd.Function of captured tensors alone under torch.func",
                    "apply it outside of the function, and capture what it returns",
                )
            with back_in(self.transforms), _Outside(self.steps):
                return self.steps.run(func, _name(func), args, kwargs)

    def _call_traced(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            return self._call_op(func, args, kwargs)
        name = _name(func)
        if not _is_pytorchs(func):
            raise Refused(f"the function {name}, which is not PyTorch's", "write it with functions of torch")
        if name in _GRADIENTS:
            raise Refused(
                f"{name.removesuffix('.__get__')} of a value of a score_mod, such as for a hook",
                "write an autograd.Function whose backward does it",
            )
        if name == "requires_grad.__get__" and self._depends_on_score(args[0]):
            raise Refused("whether the score requires grad, which is not known", "leave it to autograd")
        if kwargs.get("out") is not None or (_writes(name) and not isinstance(args[0], TracedTensor)):
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

    def _depends_on_score(self, x: TracedTensor) -> bool:
        return x.read is None and any(map(self.graph.on_score, x.terms.reshape(-1).tolist()))

    def _call_op(self, func: OpOverload | OpOverloadPacket, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """torch.ops.namespace.name, or an overload of it."""
        name = _qualified(func)
        in_place = name.endswith("_") and not name.endswith("__")
        if kwargs.get("out") is not None or (in_place and not (args and isinstance(args[0], TracedTensor))):
            raise Refused("a write into a captured tensor", "compute a new value, such as a = a + b for a += b")
        args, kwargs = mapped((args, kwargs), self._operand)
        if name.split("::")[0] in _NAMESPACES or not _has_backward(name, self.device):
            return self._run(func, args, kwargs)
        with within(f"the op {name}"):
            return func(*args, **kwargs)  # its backward is an autograd.Function, which PyTorch applies

    def python_op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An op of another's namespace, below autograd: its kernel, if that is a Python function."""
        name = func._schema.name
        if func._schema.is_mutable or not _has_python_kernel(func, self.device):
            raise Refused(
                f"the op {name}, which score_mods do not have",
                "make it by torch.library.custom_op of functions of torch, and without writes",
            )
        self.steps.volatile = self.steps.volatile or f"{name} has a kernel in Python"
        with within(f"the op {name}"), torch._C._EnableTorchFunction(), self.active():
            backend = _backend(self.device)
            kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(func.name(), backend)
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
            return kernel.call_boxed(keys, *args, **kwargs)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Lifted):
            return self.lifted(x)
        if isinstance(x, Tensor) and not isinstance(x, TracedTensor):
            return self.captured(x)
        return x

    def _run(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        detached = not torch.is_grad_enabled()
        with grad_mode(False):
            out = func(*args, **kwargs)
            if detached:
                # The function itself switched gradients off.
                out = mapped(out, lambda x: self.detached(x) if isinstance(x, TracedTensor) else x)
        return out

    def detached(self, x: TracedTensor) -> TracedTensor:
        """A new value; PyTorch's detach would give a view."""
        if not self.is_active(x):
            return x
        return self.wrap(x.packed.clone().apply_(lambda t: self.graph.apply("detach", t)), x.dtype, x.shape)

    def _made_of_numbers(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedTensor | None:
        if _name(func) in ("tensor", "as_tensor", "scalar_tensor") and args:
            made = self.stacked(args[0])
        elif _name(func) == "full" and len(args) == 2 and contains(args[1], Lifted):
            made = self.lifted(args[1])
            shape = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
            made = self.filled(int(made.terms), shape, made.dtype)
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
            made = self.filled(0, shape.shape, shape.dtype)
        else:
            made = self._run(func, args, kwargs)
        value = self.stacked(fill)
        if value.dim() != 0:
            raise Refused(f"a fill value of shape {list(value.shape)}", "fill with a single number")
        term = self.graph.cast(int(value.terms), category(made.dtype))
        return self.filled(term, made.shape, made.dtype)

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
        # PyTorch reshapes the product of a vector and a matrix in place, which a tensor without memory cannot follow.
        a, b = mapped(tuple(args), self._operand)
        if _name(func) == "__rmatmul__":
            a, b = b, a
        if a.dim() == 1 and b.dim() == 2:
            return self._run(torch.mv, (b.t(), a), {})
        return self._run(torch.matmul, (a, b), {})

    _call_rmatmul = _call_matmul

    def _call_one_hot(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """PyTorch looks at the values: for the number of classes, and for those that are none."""
        g = self.graph
        (x, *rest), kwargs = mapped((tuple(args), kwargs), self._operand)
        classes = rest[0] if rest else kwargs.get("num_classes", -1)
        if not isinstance(classes, int) or classes <= 0:
            raise Refused("one_hot without a number of classes", "give num_classes")
        if x.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"one_hot wants integers of 64 or 32 bits, not {x.dtype}")
        terms = [checked(g, t, classes) for t in x.packed.reshape(-1).tolist()]
        index = self.wrap(terms_of(terms, x.packed.shape), torch.int64, x.shape)
        numbers = [axis_of(g, [classes], 0)] if classes > SMALL else [g.constant(i) for i in range(classes)]
        places = self.wrap(terms_of(numbers, [-1]), torch.int64, [classes])
        hot = self._run(torch.eq, (self._run(torch.unsqueeze, (index, -1), {}), places), {})
        return self._run(Tensor.to, (hot, torch.int64), {})

    def _call_embedding(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        max_norm = kwargs.get("max_norm", args[3] if len(args) > 3 else None)
        if max_norm is not None and not isinstance(max_norm, bool):  # torch.embedding has a bool in its place
            raise Refused(f"max_norm={max_norm} of embedding, which writes into the weight", "leave it out")
        args, kwargs = mapped((args, kwargs), self._operand)
        return self._run(func, args, kwargs)

    _call_embedding_bag = _call_embedding

    def _call_linear(self, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        (x, weight, *rest), kwargs = mapped((tuple(args), kwargs), self._operand)
        bias = rest[0] if rest else kwargs.get("bias")
        product = self._call_matmul(torch.matmul, (x, self._run(torch.t, (weight,), {})), {})
        return product if bias is None else self._run(torch.add, (product, bias), {})

    _call_clamp = _call_clip = _call_clamp_min = _call_clamp_max = _clamp


_PLAIN_TORCH_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def _qualified(func: OpOverload | OpOverloadPacket) -> str:
    return func._schema.name if isinstance(func, OpOverload) else func._qualified_op_name


def _backend(device: torch.device | None) -> str:
    return torch._C._dispatch_key_for_device("cpu" if device is None else device.type)


def _has_backward(name: str, device: torch.device) -> bool:
    keys = ("Autograd", f"Autograd{_backend(device)}")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _has_python_kernel(func: OpOverload, device: torch.device) -> bool:
    """Whether torch.library.impl registered the kernel for the device, from Python."""
    namespace, name = func._schema.name.split("::")
    overload = func._schema.overload_name
    names = (f"{name}.{overload}",) if overload else (name, f"{name}.default")
    for key in (_backend(device), "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return any(f"{namespace}/{n}/{key}" in torch.library._impls for n in names)
    return False


def _chosen(g: Graph, terms: Tensor, place: Sequence[int], images: dict[int, int]) -> int:
    if not place:
        return g.substitute(int(terms), images)
    value = g.value(place[0])
    size = terms.shape[0]
    if value is not None or size == 1:
        return _chosen(g, terms[int(value or 0) if size > 1 else 0], place[1:], images)
    result = _chosen(g, terms[size - 1], place[1:], images)
    for i in reversed(range(size - 1)):
        here = g.apply("eq", place[0], g.constant(i))
        result = g.apply("where", here, _chosen(g, terms[i], place[1:], images), result)
    return result


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


def _in_forward() -> bool:
    """Whether the forward of an autograd.Function is at work, as which PyTorch switches forward mode off."""
    return not torch._C._is_fwd_grad_enabled()


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
