"""Copies of functions in which numbers of their surroundings are lifted; nothing that they reach is changed."""

from __future__ import annotations

import functools
import types
from typing import Any

from .code import Untrusted
from .lifted import Lifted

__all__ = ["Copy"]


class Copy:
    """The walk's edges are (kind, key, child): by them a changed child is put into a copy of its owner."""

    def __init__(self, edges: dict[int, list[tuple[str, Any, Any]]], lifted: set[int], wanted: set[int]) -> None:
        self.edges, self.lifted, self.wanted = edges, lifted, wanted
        self.done: dict[int, Any] = {}
        self.busy: set[int] = set()

    def of(self, value: Any) -> Any:
        if isinstance(value, Lifted):
            k = value.expression[1]
            return Lifted(value.value, value.expression, self.wanted) if k in self.lifted else value.value
        if id(value) not in self.edges:
            return value
        if id(value) in self.done:
            return self.done[id(value)]
        if id(value) in self.busy:
            raise Untrusted("it reaches itself")
        self.busy.add(id(value))
        changes = {}
        for kind, key, child in self.edges[id(value)]:
            new = self.of(child)
            if new is not child and not (isinstance(child, Lifted) and not isinstance(new, Lifted)):
                changes[kind, key] = new
        self.busy.discard(id(value))
        self.done[id(value)] = self._with(value, changes) if changes else value
        return self.done[id(value)]

    def _with(self, value: Any, changes: dict[tuple[str, Any], Any]) -> Any:
        def get(kind: str, key: Any, old: Any) -> Any:
            return changes.get((kind, key), old)

        if isinstance(value, types.FunctionType):
            return self._function(value, changes)
        if isinstance(value, types.MethodType):
            return types.MethodType(get("func", None, value.__func__), get("self", None, value.__self__))
        if isinstance(value, functools.partial):
            args = [get("arg", i, x) for i, x in enumerate(value.args)]
            keywords = {k: get("keyword", k, x) for k, x in value.keywords.items()}
            return functools.partial(get("func", None, value.func), *args, **keywords)
        if isinstance(value, (list, tuple)):
            return type(value)(get("item", i, x) for i, x in enumerate(value))
        if isinstance(value, dict):
            return {k: get("item", k, x) for k, x in value.items()}
        copy = object.__new__(type(value))
        copy.__dict__.update({k: get("attribute", k, x) for k, x in value.__dict__.items()})
        return copy

    def _function(self, value: types.FunctionType, changes: dict[tuple[str, Any], Any]) -> types.FunctionType:
        scope = value.__globals__
        new_globals = {key: new for (kind, key), new in changes.items() if kind == "global"}
        if new_globals:
            scope = {**scope, **new_globals}
        cells = tuple(
            types.CellType(changes["cell", i]) if ("cell", i) in changes else cell
            for i, cell in enumerate(value.__closure__ or ())
        )
        defaults = tuple(changes.get(("default", i), x) for i, x in enumerate(value.__defaults__ or ()))
        copy = types.FunctionType(value.__code__, scope, value.__name__, defaults or None, cells or None)
        copy.__kwdefaults__ = {k: changes.get(("kwdefault", k), x) for k, x in (value.__kwdefaults__ or {}).items()}
        copy.__qualname__, copy.__module__ = value.__qualname__, value.__module__
        return copy
