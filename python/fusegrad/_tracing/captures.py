"""What a function can reach, as a check that the next call reaches the same.

A walk from the function over cells, defaults, partial arguments, globals that its code names, attributes whose names
its code has, elements of containers, and the functions among all these, until there is nothing new. On its way it
writes a Python function, the guard, that walks the same paths again without a search: it returns the captured tensors
and numbers of a call, or None where anything is not what it was. Numbers are compared by their values unless they
are lifted; tensors by dtype, shape, strides, device and requires_grad; functions by their code. Anything that the walk
does not understand raises Untrusted.
"""

from __future__ import annotations

import builtins
import enum
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._load import direct
from .._transforms import differentiated
from .code import Untrusted, facts_of
from .copying import Copy
from .lifted import Lifted, Number
from .names import words
from .tensor import TracedTensor

__all__ = ["Captures", "Guard"]

Guard = Callable[[Any], "tuple[list[Tensor], list[Number]] | None"]

_MAX_NODES = 1000
_MISSING = object()

_LITERALS: tuple[type, ...] = (type(None), bool, str, bytes, complex, range, type(Ellipsis), type(NotImplemented))
_LITERALS += (torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
_TRUSTED = ("torch", "math", "operator", "_operator", "builtins", "functools", "typing", "numbers", "_functools")
# Parts of PyTorch whose functions depend on more than their arguments.
_STATEFUL = (
    "torch.distributed",
    "torch.cuda",
    "torch.random",
    "torch.backends",
    "torch.utils",
    "torch.autograd.grad_mode",
)
_STATEFUL_NAMES = words(
    """
    initial_seed seed manual_seed compile load vmap
    """
)
_PURE_BUILTINS = words(
    """
    abs all any bool dict divmod enumerate filter float frozenset int isinstance issubclass len list map max min pow
    range reversed round set slice sorted str sum tuple type zip callable property staticmethod classmethod object
    repr ValueError TypeError AssertionError RuntimeError NotImplementedError Exception __debug__
    """
)
_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    type(torch.ops.aten.add),
    type(torch.ops.aten.add.Tensor),
)
_COPIED = (types.FunctionType, types.MethodType, functools.partial, list, tuple, dict)
# Special methods that no instruction names.
_NOT_CALLED = words(
    """
    __init__ __new__ __repr__ __str__ __init_subclass__ __set_name__ __del__ __reduce__ __reduce_ex__ __post_init__
    __getstate__ __setstate__ __subclasshook__ __class_getitem__ __setattr__ __delattr__ __sizeof__ __format__
    __dir__ __replace__
    """
)
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# The attributes that calling a module reads, apart from its forward.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
# These functions read more of a module than they name.
_OF_MODULES = words(
    "parameters named_parameters buffers named_buffers children named_children modules named_modules state_dict "
    "get_parameter get_buffer get_submodule"
)
# Comparisons of a dataclass compare its fields.
_OF_DATACLASSES = words(
    """
    __eq__ __hash__ __lt__ __le__ __gt__ __ge__
    """
)


def _in(module: str | None, roots: Sequence[str]) -> bool:
    return any(module == root or (module or "").startswith(root + ".") for root in roots)


def _lookup(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _MISSING


@dataclass
class _Holder:
    """Something that has attributes."""

    value: Any
    name: str  # in the guard
    liftable: bool
    done: set[str] = field(default_factory=set)
    via: set[str] = field(default_factory=set)
    implicit: bool = False


class Captures:
    """The walk from `function`."""

    def __init__(self, function: Any) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[Number] = []
        self.liftable: set[int] = set()  # numbers that a copy of the function can be made with
        self.can_lift = True
        self._number_variables: list[str] = []
        self._lines: list[str] = []
        self._constants: list[Any] = []
        self._seen: dict[int, tuple[Any, str, bool]] = {}
        self._edges: dict[int, list[tuple[str, Any, Any]]] = {}
        self._names: list[str] = []
        self._holders: dict[int, _Holder] = {}
        self._used: set[str] = {"*"}
        self._methods: set[int] = set()
        self._using_first: set[int] = set()  # functions that do more with their first argument than take an attribute
        self._stores, self._mutable = False, False
        self._functions: list[types.FunctionType] = []
        self._count = 0
        self._places: dict[int, int] = {}
        self._root = function
        self._visit(function, "root", True, "*")
        while self._scan():
            pass
        for f in self._functions:
            if not set(self._names).isdisjoint(f.__dict__):
                raise Untrusted(f"it reads an attribute of the function {f.__qualname__}")
        if self._stores and self._mutable:
            raise Untrusted("it assigns to elements, and reaches a list, a dict or an object")

    # --- the guard's source ---

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _need(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def _need_keys(self, expression: str, keys: list[str]) -> None:
        """Of a dict, or of None for none."""
        self._need(f"list({expression} or ()) == {self._constant(keys)}" if keys else f"not {expression}")

    def _variable(self, expression: str) -> str:
        self._count += 1
        if self._count > _MAX_NODES:
            raise Untrusted(f"it can reach more than {_MAX_NODES} objects")
        self._lines.append(f"v{self._count} = {expression}")
        return f"v{self._count}"

    def guard(self, lifted: set[int]) -> Guard:
        """`lifted`: the numbers whose values may be others."""
        if any(name in t.__dict__ for t in self.tensors for name in self._names):
            raise Untrusted("it reads an attribute that a captured tensor was given")
        lines = list(self._lines)
        for i, (name, value) in enumerate(zip(self._number_variables, self.numbers, strict=True)):
            if i not in lifted:
                # Compared as text, since 0.0 must differ from -0.0 and NaN equal NaN.
                lines.append(f"if repr({name}) != {repr(value)!r}: return None")
        tensors = ", ".join(self._tensor_variables())
        lines.append(f"return [{tensors}], [{', '.join(self._number_variables)}]")
        source = "def guard(root):\n    " + "\n    ".join(lines) + "\n"
        scope = {"lookup": _lookup, "missing": _MISSING, "differentiated": differentiated, "same": direct.same_tensor}
        # The source consists of what is written in this file: names and values of the user's are constants.
        scope |= {f"c{i}": value for i, value in enumerate(self._constants)}
        exec(source, scope)
        return scope.pop("guard")  # whose globals must not hold it: a cycle

    def _tensor_variables(self) -> list[str]:
        return [self._seen[id(t)][1] for t in self.tensors]

    def place_of(self, tensor: Tensor) -> int | None:
        """The tensor's place among the captured ones."""
        return self._places.get(id(tensor))

    # --- the walk ---

    def _child(
        self, owner: Any, kind: str, key: Any, value: Any, expression: str, liftable: bool, via: str = "*"
    ) -> None:
        """`via`: the name under which code gets at it; "*" if there is none."""
        variable = self._variable(expression)
        child = self._visit(value, variable, liftable, via)
        if liftable:
            self._edges.setdefault(id(owner), []).append((kind, key, value if child is None else child))

    def _visit(self, value: Any, name: str, liftable: bool, via: str) -> Lifted | None:
        kind = type(value)
        if kind in (int, float):
            self._need(f"type({name}) is {kind.__name__}")
            self.numbers.append(value)
            self._number_variables.append(name)
            if liftable:
                self.liftable.add(len(self.numbers) - 1)
                return Lifted(value, ("path", len(self.numbers) - 1), set())
            return None
        if kind in _LITERALS:
            constant = self._constant(value)
            self._need(f"type({name}) is {self._constant(kind)} and {name} == {constant}")
            return None
        seen = self._seen.get(id(value))
        if seen is not None:
            self._need(f"{name} is {seen[1]}")
            if id(value) in self._holders:
                self._holders[id(value)].via.add(via)
            if seen[2] != liftable and isinstance(value, _COPIED) | hasattr(value, "__dict__"):
                self.can_lift = False  # a copy would be used on one path, the number itself on the other
            return None
        self._seen[id(value)] = (value, name, liftable)
        self._visit_object(value, kind, name, liftable)
        if id(value) in self._holders:
            self._holders[id(value)].via.add(via)
        return None

    def _visit_object(self, value: Any, kind: type, name: str, liftable: bool) -> None:
        if isinstance(value, Tensor):
            self._visit_tensor(value, name)
        elif kind is types.FunctionType:
            self._visit_function(value, name, liftable)
        elif kind is types.MethodType:
            self._need(f"type({name}) is {self._constant(kind)}")
            self._methods.add(id(value.__func__))
            self._child(value, "self", None, value.__self__, f"{name}.__self__", liftable, "<self>")
            self._child(value, "func", None, value.__func__, f"{name}.__func__", liftable)
        elif kind is functools.partial:
            self._visit_partial(value, name, liftable)
        elif kind is types.ModuleType or issubclass(kind, types.ModuleType):
            self._visit_module(value, name)
        elif isinstance(value, type):
            self._visit_class(value, name)
        elif kind in (list, tuple):
            self._mutable = self._mutable or kind is list
            self._need(f"type({name}) is {kind.__name__} and len({name}) == {len(value)}")
            for i, item in enumerate(value):
                self._child(value, "item", i, item, f"{name}[{i}]", liftable)
        elif kind is dict:
            self._mutable = True
            if not all(type(key) in (str, int) for key in value):
                raise Untrusted("a captured dict has keys that are neither strings nor ints")
            keys = [(type(key), key) for key in value]
            self._need(f"type({name}) is dict and [(type(k), k) for k in {name}] == {self._constant(keys)}")
            for key, item in value.items():
                self._child(value, "item", key, item, f"{name}[{self._constant(key)}]", liftable)
        elif kind in (set, frozenset) and all(type(x) in (str, int) for x in value):
            self._need(f"type({name}) is {kind.__name__} and {name} == {self._constant(kind(value))}")
            self._need(f"all(type(x) in (str, int) for x in {name})")
        elif isinstance(value, enum.Enum):
            self._need(f"{name} is {self._constant(value)}")
        elif isinstance(value, _C_FUNCTIONS):
            self._visit_c_function(value, name)
        else:
            self._visit_instance(value, kind, name, liftable)

    def _visit_tensor(self, value: Tensor, name: str) -> None:
        c = self._constant
        if isinstance(value, TracedTensor):
            raise Untrusted("it reaches a value of a trace")
        if value.layout != torch.strided:
            raise Untrusted(f"a captured tensor of layout {value.layout}")
        # One call where the tensor is a plain one, as nearly all are; it asks for no less than what stands behind it.
        facts = direct.tensor_facts(value)
        self._need(
            f"same({name}, {c(facts)}) or type({name}) is {c(type(value))} and {name}.dtype is {c(value.dtype)} "
            f"and {name}.shape == {c(value.shape)} and {name}.stride() == {c(value.stride())} "
            f"and {name}.requires_grad is {value.requires_grad} and {name}.device == {c(value.device)} "
            f"and differentiated({name}) is {differentiated(value)}"
        )
        self._places[id(value)] = len(self.tensors)
        self.tensors.append(value)

    def _visit_function(self, value: types.FunctionType, name: str, liftable: bool) -> None:
        ours = _in(value.__module__, _TRUSTED)
        if ours and value.__closure__ is None:
            self._visit_c_function(value, name)
            return
        self._need(f"type({name}) is {self._constant(types.FunctionType)}")
        self._need(f"{name}.__code__ is {self._constant(value.__code__)}")
        self._need_keys(f"{name}.__dict__", list(value.__dict__))
        self._functions.append(value)
        facts = facts_of(value.__code__)
        if facts.tests_types and not ours:
            self.can_lift = False
        self._add_names(facts.attributes)
        self._used |= facts.used
        self._stores = self._stores or facts.stores_items
        code = value.__code__
        if set(code.co_varnames[:1]) & facts.used or code.co_cellvars:
            self._using_first.add(id(value))
        for i, cell in enumerate(value.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                raise Untrusted(f"{value.__code__.co_freevars[i]} has no value yet") from None
            expression, via = f"{name}.__closure__[{i}].cell_contents", value.__code__.co_freevars[i]
            self._child(value, "cell", i, content, expression, liftable, via)
        defaults = value.__defaults__ or ()
        self._need(f"len({name}.__defaults__ or ()) == {len(defaults)}" if defaults else f"not {name}.__defaults__")
        for i, default in enumerate(defaults):
            self._child(value, "default", i, default, f"{name}.__defaults__[{i}]", liftable)
        keywords = value.__kwdefaults__ or {}
        self._need_keys(f"{name}.__kwdefaults__", list(keywords))
        for key, default in keywords.items():
            expression = f"{name}.__kwdefaults__[{self._constant(key)}]"
            self._child(value, "kwdefault", key, default, expression, liftable)
        if not ours:
            self._visit_globals(value, facts.globals, name, liftable)

    def _visit_globals(self, value: types.FunctionType, names: list[str], name: str, liftable: bool) -> None:
        if not names:
            return
        scope = self._variable(f"{name}.__globals__")
        for key in names:
            constant = self._constant(key)
            if key in value.__globals__:
                self._child(value, "global", key, value.__globals__[key], f"{scope}[{constant}]", liftable, key)
                continue
            built_in = builtins.__dict__.get(key, _MISSING)
            if built_in is _MISSING or key not in _PURE_BUILTINS:
                raise Untrusted(f"{value.__qualname__} uses {key}")
            self._need(f"{constant} not in {scope}")
            self._need(f"{self._constant(builtins.__dict__)}.get({constant}) is {self._constant(built_in)}")

    def _visit_partial(self, value: functools.partial, name: str, liftable: bool) -> None:
        self._need(f"type({name}) is {self._constant(functools.partial)} and len({name}.args) == {len(value.args)}")
        self._need(f"list({name}.keywords) == {self._constant(list(value.keywords))} and not {name}.__dict__")
        if value.__dict__:
            raise Untrusted("a partial has attributes")
        self._child(value, "func", None, value.func, f"{name}.func", liftable)
        for i, item in enumerate(value.args):
            self._child(value, "arg", i, item, f"{name}.args[{i}]", liftable)
        for key, item in value.keywords.items():
            self._child(value, "keyword", key, item, f"{name}.keywords[{self._constant(key)}]", liftable)

    def _visit_c_function(self, value: Any, name: str) -> None:
        module = getattr(value, "__module__", None) or getattr(type(value), "__module__", None)
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and not _in(module, ("torch",)):
            raise Untrusted(f"{value!r} belongs to an object")
        known = getattr(value, "__name__", "")
        stateful = _in(module, _STATEFUL) or known in _STATEFUL_NAMES or known.startswith(("get_", "set_", "are_"))
        if not _in(module, _TRUSTED) or stateful or known.endswith("_enabled") or "autocast" in known:
            raise Untrusted(f"{known or value!r} may give another result at the next call")
        self._need(f"{name} is {self._constant(value)}")

    def _visit_module(self, value: types.ModuleType, name: str) -> None:
        if _in(value.__name__, _STATEFUL) and value.__name__ != "torch.utils":
            raise Untrusted(f"it uses {value.__name__}")
        if not _in(value.__name__, _TRUSTED) and "__getattr__" in value.__dict__:
            raise Untrusted(f"the module {value.__name__} makes up attributes")
        self._need(f"{name} is {self._constant(value)}")
        self._hold(value, name, False)

    def _visit_class(self, value: type, name: str) -> None:
        self._need(f"{name} is {self._constant(value)}")
        if _in(value.__module__, _STATEFUL):
            raise Untrusted(f"it uses {value.__qualname__}")
        if _in(value.__module__, _TRUSTED):
            return
        if type(value) is not type and not issubclass(type(value), enum.EnumMeta):
            raise Untrusted(f"the class {value.__qualname__} has a metaclass")
        if issubclass(value, enum.Enum):
            return
        self._hold(value, name, False)

    def _hold(self, value: Any, name: str, liftable: bool) -> None:
        if not isinstance(value, types.ModuleType):
            for base in (value if isinstance(value, type) else type(value)).__mro__:
                own = not _in(base.__module__, _TRUSTED)
                if own and ("__getattr__" in base.__dict__ or "__getattribute__" in base.__dict__):
                    raise Untrusted(f"the class {base.__qualname__} makes up attributes")
        self._holders[id(value)] = _Holder(value, name, liftable)

    def _special_methods(self, cls: type) -> list[str]:
        """The special methods of a class, which no instruction names: calls, indexing, arithmetic."""
        names = []
        for base in cls.__mro__:
            if _in(base.__module__, _TRUSTED):
                continue
            for key, member in base.__dict__.items():
                generated = hasattr(base, "__dataclass_fields__") and key in _OF_DATACLASSES
                if key.startswith("__") and isinstance(member, types.FunctionType) and key not in _NOT_CALLED:
                    names += [] if generated else [key]
        return names

    def _visit_instance(self, value: Any, kind: type, name: str, liftable: bool) -> None:
        if _in(kind.__module__, _TRUSTED) and not isinstance(value, nn.Module):
            raise Untrusted(f"a captured object of {kind.__module__}.{kind.__qualname__}")
        if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            raise Untrusted(f"a captured object of {kind.__module__}.{kind.__qualname__}")
        if isinstance(value, (int, float, str, list, tuple, dict, set)):
            raise Untrusted(f"a captured object of {kind.__qualname__}, a subclass of a built-in type")
        self._mutable = self._mutable or hasattr(kind, "__setitem__")
        self._need(f"type({name}) is {self._constant(kind)}")
        self._hold(value, name, liftable and hasattr(value, "__dict__") and kind.__new__ is object.__new__)
        if isinstance(value, nn.Module):
            if _in(kind.__module__, ("torch.nn.utils", "torch.nn.parallel", "torch.ao")):
                raise Untrusted(f"a captured {kind.__qualname__}")
            for hooks in _HOOKS:
                if getattr(value, hooks):
                    raise Untrusted("a captured module has hooks")
                self._need(f"not {name}.{hooks}")

    def _implicit_names(self, holder: _Holder) -> list[str]:
        """The attributes that code may use of an object without naming them, when it is called or handed on."""
        value = holder.value
        if isinstance(value, (type, types.ModuleType)):
            return [*self._special_methods(value), *_CONSTRUCTORS] if isinstance(value, type) else []
        names = self._special_methods(type(value))
        if not isinstance(value, nn.Module):
            return names
        names.append("forward")
        if any(base is not nn.Module and _in(base.__module__, ("torch.nn",)) for base in type(value).__mro__):
            # PyTorch's own code reads what it likes.
            for group in ("_parameters", "_buffers", "_modules"):
                entries = value.__dict__[group]
                self._need(f"list({holder.name}.{group}) == {self._constant(list(entries))}")
                names += entries
            names += [key for key, x in value.__dict__.items() if isinstance(x, (*_LITERALS, int, float))]
        return names

    def _add_names(self, names: Any) -> None:
        self._names += [x for x in names if x not in self._names]

    # --- attributes ---

    def _scan(self) -> bool:
        """Looks for attributes that are not known yet; whether there was anything to look at."""
        looked = False
        if self._methods & self._using_first:
            self._used.add("<self>")
        for holder in list(self._holders.values()):
            names = [(key, key) for key in self._names]
            if not holder.implicit and holder.via & self._used:
                holder.implicit = True
                implicit = self._implicit_names(holder)
                holder.done -= set(implicit)
                names = [*((key, "*") for key in implicit), *names]
            for key, via in names:
                if key not in holder.done:
                    holder.done.add(key)
                    looked = True
                    self._attribute(holder, key, via)
        return looked

    def _attribute(self, owner: _Holder, key: str, via: str) -> None:
        holder, variable, liftable = owner.value, owner.name, owner.liftable
        constant = self._constant(key)
        if isinstance(holder, types.ModuleType):
            self._module_attribute(holder, variable, key, constant)
            return
        if isinstance(holder, type):
            self._class_attribute(holder, variable, key, constant)
            return
        kind = type(holder)
        of_class = _lookup(kind, key)
        if of_class is not _MISSING:
            self._class_attribute(kind, self._constant(kind), key, constant)
            if isinstance(of_class, types.MemberDescriptorType):
                value = getattr(holder, key, _MISSING)
                if value is not _MISSING:
                    self._child(holder, "slot", key, value, f"getattr({variable}, {constant})", False, via)
                return
            if isinstance(of_class, property):
                return
        own = getattr(holder, "__dict__", {})
        if key in own:
            expression = f"{variable}.__dict__[{constant}]"
            self._child(holder, "attribute", key, own[key], expression, liftable, via)
            return
        if hasattr(holder, "__dict__"):
            self._need(f"{constant} not in {variable}.__dict__")
        if of_class is _MISSING:
            self._need(f"lookup({self._constant(kind)}, {constant}) is missing")
        if isinstance(holder, nn.Module):
            if key in _OF_MODULES:
                raise Untrusted(f"it may call {type(holder).__qualname__}.{key}")
            for group in ("_parameters", "_buffers", "_modules"):
                entries = own[group]
                if key in entries:
                    self._child(holder, group, key, entries[key], f"{variable}.{group}[{constant}]", False, via)
                else:
                    self._need(f"{constant} not in {variable}.{group}")

    def _module_attribute(self, module: types.ModuleType, variable: str, key: str, constant: str) -> None:
        value = module.__dict__.get(key, _MISSING)
        if value is _MISSING:
            self._need(f"{constant} not in {variable}.__dict__")
            return
        if _in(module.__name__, _TRUSTED):
            found = self._variable(f"{variable}.__dict__.get({constant}, missing)")
            if isinstance(value, types.ModuleType) and _in(value.__name__, _TRUSTED):
                self._visit(value, found, False, key)
            elif callable(value) and not isinstance(value, type):
                self._visit_c_function(value, found)
            else:
                self._need(f"{found} is {self._constant(value)}")
            return
        self._child(module, "attribute", key, value, f"{variable}.__dict__[{constant}]", False, key)

    def _class_attribute(self, cls: type, variable: str, key: str, constant: str) -> None:
        raw = _lookup(cls, key)
        found = self._variable(f"lookup({variable}, {constant})")
        if raw is _MISSING:
            self._need(f"{found} is missing")
            return
        base = next(b for b in cls.__mro__ if key in b.__dict__)
        if _in(base.__module__, _TRUSTED) or isinstance(raw, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            self._need(f"{found} is {self._constant(raw)}")
        elif isinstance(raw, (staticmethod, classmethod)):
            self._need(f"type({found}) is {self._constant(type(raw))}")
            self._child(cls, "class", key, raw.__func__, f"{found}.__func__", False)
        elif isinstance(raw, property):
            self._need(f"type({found}) is {self._constant(property)}")
            self._methods.add(id(raw.fget))
            self._child(cls, "class", key, raw.fget, f"{found}.fget", False)
        elif hasattr(type(raw), "__get__") and not isinstance(raw, types.FunctionType):
            raise Untrusted(f"{cls.__qualname__}.{key} is a descriptor")
        else:
            self._methods.add(id(raw))
            self._visit(raw, found, False, key)

    # --- a copy with lifted numbers ---

    def copy(self, lifted: set[int], wanted: set[int]) -> Any:
        """The function with the numbers `lifted` replaced; nothing that it reaches is changed."""
        return Copy(self._edges, lifted, wanted).of(self._root)
