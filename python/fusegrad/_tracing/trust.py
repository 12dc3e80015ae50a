"""What may be reached from a function whose trace is kept: what is a constant, what changes nothing and depends on its
arguments alone, what an object's use reads without naming it. All else is Untrusted."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .code import Untrusted
from .names import words

__all__ = [
    "CONSTRUCTORS",
    "COPIED",
    "C_FUNCTIONS",
    "HOOKS",
    "LITERALS",
    "MISSING",
    "OF_MODULES",
    "PURE_BUILTINS",
    "check_c_function",
    "check_class",
    "check_instance",
    "check_module",
    "is_trusted",
    "lookup",
    "special_methods",
]

MISSING = object()

LITERALS: tuple[type, ...] = (type(None), bool, str, bytes, complex, range, type(Ellipsis), type(NotImplemented))
LITERALS += (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
_TRUSTED = ("torch", "math", "operator", "_operator", "builtins", "functools", "typing", "numbers", "_functools")
# Parts of PyTorch whose functions depend on more than their arguments.
_STATEFUL = (
    *("torch.distributed", "torch.cuda", "torch.random", "torch.backends", "torch.utils", "torch.autograd.grad_mode"),
)
_STATEFUL_NAMES = words("initial_seed seed manual_seed compile load vmap")
PURE_BUILTINS = words(
    "abs all any bool dict divmod enumerate filter float frozenset int isinstance issubclass len list map max min pow "
    "range reversed round set slice sorted str sum tuple type zip callable property staticmethod classmethod object "
    "repr ValueError TypeError AssertionError RuntimeError NotImplementedError Exception __debug__"
)
C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    type(torch.ops.aten.add),
    type(torch.ops.aten.add.Tensor),
)
COPIED = (types.FunctionType, types.MethodType, functools.partial, list, tuple, dict)
# Special methods that no instruction names.
_NOT_CALLED = words(
    "__init__ __new__ __repr__ __str__ __init_subclass__ __set_name__ __del__ __reduce__ __reduce_ex__ __post_init__ "
    "__getstate__ __setstate__ __subclasshook__ __class_getitem__ __setattr__ __delattr__ __sizeof__ __format__ "
    "__dir__ __replace__"
)
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# The attributes that calling a module reads, apart from its forward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
# These functions read more of a module than they name.
OF_MODULES = words(
    "parameters named_parameters buffers named_buffers children named_children modules named_modules state_dict "
    "get_parameter get_buffer get_submodule"
)
# Comparisons of a dataclass compare its fields.
_OF_DATACLASSES = words("__eq__ __hash__ __lt__ __le__ __gt__ __ge__")


def is_trusted(module: str | None, roots: Sequence[str] = _TRUSTED) -> bool:
    return any(module == root or (module or "").startswith(root + ".") for root in roots)


def lookup(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def check_c_function(value: Any) -> None:
    """Checks a function whose code cannot be seen, or is PyTorch's."""
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", None)
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (types.ModuleType, type)) and not is_trusted(module, ("torch",)):
        raise Untrusted(f"{value!r} belongs to an object")
    name = getattr(value, "__name__", "")
    stateful = is_trusted(module, _STATEFUL) or name in _STATEFUL_NAMES or name.startswith(("get_", "set_", "are_"))
    if not is_trusted(module) or stateful or name.endswith("_enabled") or "autocast" in name:
        raise Untrusted(f"{name or value!r} may give another result at the next call")


def check_module(value: types.ModuleType) -> None:
    if is_trusted(value.__name__, _STATEFUL) and value.__name__ != "torch.utils":
        raise Untrusted(f"it uses {value.__name__}")
    if not is_trusted(value.__name__) and "__getattr__" in value.__dict__:
        raise Untrusted(f"the module {value.__name__} makes up attributes")


def check_class(value: type) -> bool:
    """Whether it has attributes that may be others at the next call."""
    if is_trusted(value.__module__, _STATEFUL):
        raise Untrusted(f"it uses {value.__qualname__}")
    if is_trusted(value.__module__):
        return False
    if type(value) is not type and not issubclass(type(value), enum.EnumMeta):
        raise Untrusted(f"the class {value.__qualname__} has a metaclass")
    if issubclass(value, enum.Enum):
        return False
    _check_attributes(value)
    return True


def check_instance(value: Any) -> None:
    kind = type(value)
    of_torch = is_trusted(kind.__module__) and not isinstance(value, nn.Module)
    if of_torch or not (hasattr(value, "__dict__") or hasattr(kind, "__slots__")):
        raise Untrusted(f"a captured object of {kind.__module__}.{kind.__qualname__}")
    if isinstance(value, (int, float, str, list, tuple, dict, set)):
        raise Untrusted(f"a captured object of {kind.__qualname__}, a subclass of a built-in type")
    if isinstance(value, nn.Module):
        if is_trusted(kind.__module__, ("torch.nn.utils", "torch.nn.parallel", "torch.ao")):
            raise Untrusted(f"a captured {kind.__qualname__}")
        if any(getattr(value, hooks) for hooks in HOOKS):
            raise Untrusted("a captured module has hooks")
    _check_attributes(kind)


def _check_attributes(cls: type) -> None:
    for base in cls.__mro__:
        if not is_trusted(base.__module__) and {"__getattr__", "__getattribute__"} & base.__dict__.keys():
            raise Untrusted(f"the class {base.__qualname__} makes up attributes")


def special_methods(cls: type) -> list[str]:
    """Those of a class that no instruction names: calls, indexing, arithmetic."""
    names = []
    for base in cls.__mro__:
        if is_trusted(base.__module__):
            continue
        for key, member in base.__dict__.items():
            generated = hasattr(base, "__dataclass_fields__") and key in _OF_DATACLASSES
            if key.startswith("__") and isinstance(member, types.FunctionType) and key not in _NOT_CALLED:
                names += [] if generated else [key]
    return names
