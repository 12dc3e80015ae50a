"""What becomes of the functions of torch that a traced function calls, and of the ops on its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from .._transforms import back_in, differentiated
from .calls import made_of_numbers
from .elements import bound, name_of, result, unknown_op
from .errors import Refused, RefusedWrite, unknown, within
from .lifted import Lifted
from .names import words
from .steps import Outside
from .table import FUNCTIONS, OPS, Op, Refusal
from .tensor import TracedTensor, apart
from .trace import Trace, category, in_forward
from .trees import contains, mapped, tensors_of

__all__ = ["call", "dispatch"]

_ATEN = ("aten", "prims")
"""The namespaces whose ops are PyTorch's own."""
_IN_PLACE = words(
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__ "
    "__ilshift__ __irshift__"
)
_WITHOUT_EFFECT = words("device pin_memory non_blocking memory_format stable sorted")
"""Arguments that say nothing of the elements: where they lie, and an order that they have anyway."""


# --- functions of torch ---------------------------------------------------------------------------------------


def call(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of torch that the traced function calls."""
    if func is torch._C._set_grad_enabled:
        with torch._C.DisableTorchFunction():  # as in grad_mode
            return func(*args)
    if func in (F.embedding, F.embedding_bag) and any(x is not None for x in (kwargs.get("max_norm"), *args[3:4])):
        raise Refused(f"max_norm of F.{func.__name__}, which writes into the table", "scale the rows outside")
    with torch._C._DisableAutocast():
        if contains((args, kwargs), TracedTensor):
            if contains((args, kwargs), (torch.SymInt, torch.SymFloat)):
                args, kwargs = mapped((args, kwargs), trace.symbol)
            with apart():
                trace.functions.adopt((args, kwargs))
                try:
                    return trace.functions.offered(_call_traced(trace, func, args, kwargs))
                except RefusedWrite as error:
                    if _writes(_called(func)) or kwargs.get("out") is not None:
                        raise Refused(error.what, error.instead) from None
                    raise unknown(_called(func).removeprefix("aten::")) from None
        if contains((args, kwargs), Lifted):
            with apart():
                made = made_of_numbers(trace, _called(func), args, kwargs)
            if made is not None:
                return trace.functions.offered(made)
        if trace.transforms is not None and in_forward() and any(map(differentiated, tensors_of((args, kwargs)))):
            raise Refused(
                "an autograd.Function of captured tensors alone under torch.func",
                "apply it outside of the function, and capture what it returns",
            )
        with back_in(trace.transforms), Outside(trace.steps):
            return trace.steps.run(func, _called(func), args, kwargs)


def _call_traced(trace: Trace, func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = _called(func)
    is_op = isinstance(func, (OpOverload, OpOverloadPacket))
    if not is_op and not _is_pytorchs(func):
        raise Refused(f"the function {name}, which is not PyTorch's", "write it with functions of torch")
    if kwargs.get("out") is not None or (_writes(name) and not (args and isinstance(args[0], TracedTensor))):
        raise Refused("a write into a captured tensor", "compute a new value, such as a = a + b for a += b")
    how = None if is_op else FUNCTIONS.get(name)
    if isinstance(how, Refusal):
        raise how.error(name.split(".")[0])
    if how is not None:
        return how(trace, func, args, kwargs)
    args, kwargs = mapped((args, kwargs), trace.operand)
    if is_op and name.split("::")[0] not in _ATEN and _has_backward(name, trace.device):
        with within(f"the op {name}"):
            return func(*args, **kwargs)  # its backward is an autograd.Function, which PyTorch applies
    return trace.run(func, *args, **kwargs)


def _writes(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_pytorchs(func: Any) -> bool:
    """Whether a name says what it is: another's function may have the name of one of PyTorch's."""
    if isinstance(func, HigherOrderOperator):
        return False
    scope = getattr(func, "__globals__", None)
    module = getattr(func, "__module__", None) if scope is None else scope.get("__name__")
    return module is None or module.split(".")[0] in ("torch", "builtins")


def _called(func: Callable) -> str:
    """The name by which a function is looked up."""
    if isinstance(func, OpOverload):
        return func._schema.name
    if isinstance(func, OpOverloadPacket):
        return func._qualified_op_name
    if not _is_pytorchs(func):
        return f"{getattr(func, '__module__', '')}::{getattr(func, '__qualname__', func)}"
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):  # of a property
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    return name


# --- ops ------------------------------------------------------------------------------------------------------


def dispatch(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op on values of the trace."""
    namespace, name = func._schema.name.split("::")
    if namespace not in _ATEN:
        return _run_kernel(trace, func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise Refused(f"random numbers ({name})", "draw them outside and capture the tensor")
    if func._schema.is_mutable:
        return _in_place(trace, func, name, args, kwargs)
    out = _functional(trace, func, namespace, name, args, kwargs)
    if any(r.alias_info is not None for r in func._schema.returns):
        mapped((args, out), _mark_viewed)
    return out


def _mark_viewed(x: Any) -> None:
    if isinstance(x, TracedTensor):
        x.viewed = True


def _functional(trace: Trace, func: Any, namespace: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    how = OPS.get(name)
    if isinstance(how, Refusal):
        raise how.error(name)
    if isinstance(how, Op) and (namespace == "aten" or how.read is None):
        if how.read is not None:
            _check_all_read(func, how.read, args, kwargs)
        return how.handler(trace, func, args, kwargs)
    from torch._decomp import decomposition_table  # takes half a second to import

    if func in decomposition_table:
        return decomposition_table[func](*args, **kwargs)
    if func._can_decompose():
        return func.decompose(*args, **kwargs)
    raise unknown_op(func)


def _check_all_read(func: Any, read: frozenset[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """An argument that is not read must be as if it were left out."""
    given = bound(func, args, kwargs)
    for argument in func._schema.arguments:
        value = given[argument.name]
        if argument.name in read or argument.name in _WITHOUT_EFFECT or value is None:
            continue
        if argument.name == "layout" and value == torch.strided:
            continue
        if not argument.has_default_value() or value != argument.default_value:
            what = f"{argument.name}={value} of {name_of(func)}, which score_mods do not have"
            raise Refused(what, "leave it out")


def _in_place(trace: Trace, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`score += x` is a new value under the old name, as long as nothing else may show the old one."""
    trace.functions.adopt_all()
    target, base = args[0] if args else None, name[:-1]
    if not (isinstance(target, TracedTensor) and name.endswith("_") and hasattr(torch.ops.aten, base)):
        raise RefusedWrite("a write into a captured tensor", "compute a new value, such as a + b for a += b")
    if target.viewed:
        raise RefusedWrite("a write into a value that has views", "compute a new value, such as a + b for a += b")
    if name == "copy_":
        value = torch.ops.aten._to_copy(args[1], dtype=target.dtype)
        value = torch.ops.aten.expand(value, list(target.shape))
    elif name in ("fill_", "zero_"):
        value = torch.ops.aten.full_like(target, args[1] if len(args) > 1 else 0)
    else:
        value = getattr(getattr(torch.ops.aten, base), func._overloadname)(*args, **kwargs)
    if value.shape != target.shape or category(value.dtype) > category(target.dtype):
        raise RefusedWrite(
            f"an in-place operation whose result is {value!r}, not {target!r}", "compute a new value: a = a + b"
        )
    target.assign(result(trace, value.packed, target.dtype, shape=target.shape))
    return target


# --- ops of others ----------------------------------------------------------------------------------------------


def _backend(device: torch.device) -> str:
    return torch._C._dispatch_key_for_device(device.type)


def _has_backward(name: str, device: torch.device) -> bool:
    keys = ("Autograd", f"Autograd{_backend(device)}")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _run_kernel(trace: Trace, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op of another's namespace, below autograd: its kernel, if that is a Python function."""
    name, backend = func._schema.name, _backend(trace.device)
    if func._schema.is_mutable or not _has_python_kernel(func, backend):
        raise Refused(
            f"the op {name}, which score_mods do not have",
            "make it by torch.library.custom_op of functions of torch, and without writes",
        )
    trace.steps.volatile = trace.steps.volatile or f"{name} has a kernel in Python"
    with within(f"the op {name}"), torch._C._EnableTorchFunction(), trace.active():
        kernel = torch._C._dispatch_get_computed_kernel_for_dispatch_key(func.name(), backend)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
        return kernel.call_boxed(keys, *args, **kwargs)


def _has_python_kernel(func: OpOverload, backend: str) -> bool:
    """Whether torch.library.impl registered the kernel for the device, from Python."""
    namespace, name = func._schema.name.split("::")
    overload = func._schema.overload_name
    names = (f"{name}.{overload}",) if overload else (name, f"{name}.default")
    for key in (backend, "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return any(f"{namespace}/{n}/{key}" in torch.library._impls for n in names)
    return False
