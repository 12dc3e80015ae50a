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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import trust
from .code import Untrusted, facts_of
from .copying import Copy
from .guards import Guard, GuardSource
from .lifted import Lifted, Number
from .tensor import TracedTensor

__all__ = ["Captures"]


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
        self.liftable: set[int] = set()  # numbers that a copy of the function can be made with
        self.can_lift = True
        self._source = GuardSource()
        self._constant, self._need = self._source.constant, self._source.need
        self._numbers: list[tuple[str, Number]] = []
        self._seen: dict[int, tuple[Any, str, bool]] = {}
        self._edges: dict[int, list[tuple[str, Any, Any]]] = {}
        self._names: list[str] = []
        self._holders: dict[int, _Holder] = {}
        self._used: set[str] = {"*"}
        self._methods: set[int] = set()
        self._using_first: set[int] = set()  # functions that do more with their first argument than take an attribute
        self._stores, self._mutable = False, False
        self._functions: list[types.FunctionType] = []
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

    def guard(self, lifted: set[int]) -> Guard:
        """`lifted`: the numbers whose values may be others."""
        if any(name in t.__dict__ for t in self.tensors for name in self._names):
            raise Untrusted("it reads an attribute that a captured tensor was given")
        fixed = [(name, value) for i, (name, value) in enumerate(self._numbers) if i not in lifted]
        # Compared as text, since 0.0 must differ from -0.0 and NaN equal NaN.
        more = [f"repr({name}) == {repr(value)!r}" for name, value in fixed]
        tensors = [self._seen[id(t)][1] for t in self.tensors]
        return self._source.compiled(more, tensors, [name for name, _ in self._numbers])

    def place_of(self, tensor: Tensor) -> int | None:
        """The tensor's place among the captured ones."""
        return self._places.get(id(tensor))

    # --- the walk ---

    def _child(
        self, owner: Any, kind: str, key: Any, value: Any, expression: str, liftable: bool, via: str = "*"
    ) -> None:
        """`via`: the name under which code gets at it; "*" if there is none."""
        variable = self._source.variable(expression)
        child = self._visit(value, variable, liftable, via)
        if liftable:
            self._edges.setdefault(id(owner), []).append((kind, key, value if child is None else child))

    def _visit(self, value: Any, name: str, liftable: bool, via: str) -> Lifted | None:
        kind = type(value)
        if kind in (int, float):
            self._need(f"type({name}) is {kind.__name__}")
            self._numbers.append((name, value))
            if not liftable:
                return None
            self.liftable.add(len(self._numbers) - 1)
            return Lifted(value, ("path", len(self._numbers) - 1), set())
        if kind in trust.LITERALS:
            constant = self._constant(value)
            self._need(f"type({name}) is {self._constant(kind)} and {name} == {constant}")
            return None
        seen = self._seen.get(id(value))
        if seen is not None:
            self._need(f"{name} is {seen[1]}")
            if id(value) in self._holders:
                self._holders[id(value)].via.add(via)
            if seen[2] != liftable and isinstance(value, trust.COPIED) | hasattr(value, "__dict__"):
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
        elif issubclass(kind, types.ModuleType):
            trust.check_module(value)
            self._need(f"{name} is {self._constant(value)}")
            self._holders[id(value)] = _Holder(value, name, False)
        elif isinstance(value, type):
            self._need(f"{name} is {self._constant(value)}")
            if trust.check_class(value):
                self._holders[id(value)] = _Holder(value, name, False)
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
        elif isinstance(value, trust.C_FUNCTIONS):
            trust.check_c_function(value)
            self._need(f"{name} is {self._constant(value)}")
        else:
            self._visit_instance(value, kind, name, liftable)

    def _visit_tensor(self, value: Tensor, name: str) -> None:
        if isinstance(value, TracedTensor):
            raise Untrusted("it reaches a value of a trace")
        if value.layout != torch.strided:
            raise Untrusted(f"a captured tensor of layout {value.layout}")
        self._source.need_tensor(name, value)
        self._places[id(value)] = len(self.tensors)
        self.tensors.append(value)

    def _visit_function(self, value: types.FunctionType, name: str, liftable: bool) -> None:
        ours = trust.is_trusted(value.__module__)
        if ours and value.__closure__ is None:
            trust.check_c_function(value)
            self._need(f"{name} is {self._constant(value)}")
            return
        self._need(f"type({name}) is {self._constant(types.FunctionType)}")
        self._need(f"{name}.__code__ is {self._constant(value.__code__)}")
        self._source.need_keys(f"{name}.__dict__", list(value.__dict__))
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
        self._source.need_keys(f"{name}.__kwdefaults__", list(keywords))
        for key, default in keywords.items():
            expression = f"{name}.__kwdefaults__[{self._constant(key)}]"
            self._child(value, "kwdefault", key, default, expression, liftable)
        if not ours:
            self._visit_globals(value, facts.globals, name, liftable)

    def _visit_globals(self, value: types.FunctionType, names: list[str], name: str, liftable: bool) -> None:
        if not names:
            return
        scope = self._source.variable(f"{name}.__globals__")
        for key in names:
            constant = self._constant(key)
            if key in value.__globals__:
                self._child(value, "global", key, value.__globals__[key], f"{scope}[{constant}]", liftable, key)
                continue
            built_in = builtins.__dict__.get(key, trust.MISSING)
            if built_in is trust.MISSING or key not in trust.PURE_BUILTINS:
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

    def _visit_instance(self, value: Any, kind: type, name: str, liftable: bool) -> None:
        trust.check_instance(value)
        self._mutable = self._mutable or hasattr(kind, "__setitem__")
        self._need(f"type({name}) is {self._constant(kind)}")
        liftable = liftable and hasattr(value, "__dict__") and kind.__new__ is object.__new__
        self._holders[id(value)] = _Holder(value, name, liftable)
        if isinstance(value, nn.Module):
            self._need(" and ".join(f"not {name}.{hooks}" for hooks in trust.HOOKS))

    def _implicit_names(self, holder: _Holder) -> list[str]:
        """The attributes that code may use of an object without naming them, when it is called or handed on."""
        value = holder.value
        if isinstance(value, (type, types.ModuleType)):
            return [*trust.special_methods(value), *trust.CONSTRUCTORS] if isinstance(value, type) else []
        names = trust.special_methods(type(value))
        if not isinstance(value, nn.Module):
            return names
        names.append("forward")
        if any(
            base is not nn.Module and trust.is_trusted(base.__module__, ("torch.nn",)) for base in type(value).__mro__
        ):
            # PyTorch's own code reads what it likes.
            for group in ("_parameters", "_buffers", "_modules"):
                entries = value.__dict__[group]
                self._need(f"list({holder.name}.{group}) == {self._constant(list(entries))}")
                names += entries
            names += [key for key, x in value.__dict__.items() if isinstance(x, (*trust.LITERALS, int, float))]
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
        of_class = trust.lookup(kind, key)
        if of_class is not trust.MISSING:
            self._class_attribute(kind, self._constant(kind), key, constant)
            if isinstance(of_class, types.MemberDescriptorType):
                value = getattr(holder, key, trust.MISSING)
                if value is not trust.MISSING:
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
        if of_class is trust.MISSING:
            self._need(f"lookup({self._constant(kind)}, {constant}) is missing")
        if isinstance(holder, nn.Module):
            if key in trust.OF_MODULES:
                raise Untrusted(f"it may call {type(holder).__qualname__}.{key}")
            for group in ("_parameters", "_buffers", "_modules"):
                entries = own[group]
                if key in entries:
                    self._child(holder, group, key, entries[key], f"{variable}.{group}[{constant}]", False, via)
                else:
                    self._need(f"{constant} not in {variable}.{group}")

    def _module_attribute(self, module: types.ModuleType, variable: str, key: str, constant: str) -> None:
        value = module.__dict__.get(key, trust.MISSING)
        if value is trust.MISSING:
            self._need(f"{constant} not in {variable}.__dict__")
            return
        if trust.is_trusted(module.__name__):
            found = self._source.variable(f"{variable}.__dict__.get({constant}, missing)")
            if isinstance(value, types.ModuleType) and trust.is_trusted(value.__name__):
                self._visit(value, found, False, key)
            elif callable(value) and not isinstance(value, type):
                trust.check_c_function(value)
                self._need(f"{found} is {self._constant(value)}")
            else:
                self._need(f"{found} is {self._constant(value)}")
            return
        self._child(module, "attribute", key, value, f"{variable}.__dict__[{constant}]", False, key)

    def _class_attribute(self, cls: type, variable: str, key: str, constant: str) -> None:
        raw = trust.lookup(cls, key)
        found = self._source.variable(f"lookup({variable}, {constant})")
        if raw is trust.MISSING:
            self._need(f"{found} is missing")
            return
        base = next(b for b in cls.__mro__ if key in b.__dict__)
        if trust.is_trusted(base.__module__) or isinstance(
            raw, (types.MemberDescriptorType, types.GetSetDescriptorType)
        ):
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
