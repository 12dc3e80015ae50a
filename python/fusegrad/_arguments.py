"""What each argument of the public functions may be: its annotation, checked when it is called.

mypy, pyright and this module read the same text, so that there is no second table. A kind of annotation that is not
known here is an error when the function is defined.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import abc
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

__all__ = ["Device", "check", "checked", "described", "device_of", "kinds_of"]

Device: TypeAlias = torch.device | str | int
"""What PyTorch takes for a device."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Kind(NamedTuple):
    """What an argument may be.

    Attributes:
        words: for messages, None last.
        plain: the exact types that are right whatever their value: all that most calls ask for.
        holds: decides on all others.
        strings: some strings are right, so that another is a wrong value and not a wrong type.
    """

    words: tuple[str, ...]
    plain: tuple[type, ...]
    holds: Callable[[Any], bool]
    strings: bool = False

    @property
    def what(self) -> str:
        *first, last = self.words
        return f"{', '.join(first)} or {last}" if first else last


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # A tensor is none: the dispatcher would read it, which waits for the device and cuts its gradient off.
    number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat, Real)) and not isinstance(value, bool)
    return number or is_compiled_number(value)


def is_compiled_number(value: Any) -> bool:
    """torch.compile makes 0-d arrays of numpy's numbers."""
    return torch.compiler.is_compiling() and type(value).__module__ == "numpy" and value.ndim == 0


def _is_tensor(value: Any) -> bool:
    # Whatever stands in for tensors in calls of torch, such as torch.fx's proxies, is left to the op.
    return isinstance(value, Tensor) or (
        hasattr(type(value), "__torch_function__") and not isinstance(value, (type, torch.dtype, torch.device))
    )


def _is_device(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        torch.device(value)
    except RuntimeError:
        return False
    return True


_SINGLE: dict[Any, Kind] = {
    Tensor: Kind(("a tensor",), (Tensor, nn.Parameter), _is_tensor),
    bool: Kind(("True", "False"), (bool,), lambda value: False),
    int: Kind(("a whole number",), (int,), _is_whole),
    float: Kind(("a number",), (int, float), _is_number),
    str: Kind(("a string",), (str,), lambda value: isinstance(value, str)),
    torch.dtype: Kind(("a torch.dtype",), (torch.dtype,), lambda value: False),
    torch.device: Kind(("a torch.device",), (torch.device,), lambda value: False),
    type(None): Kind(("None",), (type(None),), lambda value: False),
}

_DEVICE_NAME = Kind(("a device's name",), (), _is_device, strings=True)


def _any_of(kinds: Sequence[Kind]) -> Kind:
    kinds = sorted(kinds, key=lambda kind: kind.words == ("None",))
    words = tuple(dict.fromkeys(word for kind in kinds for word in kind.words))
    tests = [kind.holds for kind in kinds]
    plain: tuple[type, ...] = tuple(dict.fromkeys(t for k in kinds for t in k.plain))
    return Kind(words, plain, lambda value: any(t(value) for t in tests), any(k.strings for k in kinds))


def _tuple_of(kinds: Sequence[Kind], what: str) -> Kind:
    def holds(value: Any) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == len(kinds)
            and all(type(v) in k.plain or k.holds(v) for v, k in zip(value, kinds, strict=True))
        )

    return Kind((what,), (), holds)


def kind_of(annotation: Any) -> Kind | None:
    """None: anything."""
    if annotation is Any or isinstance(annotation, TypeVar):
        return None
    if annotation in _SINGLE:
        return _SINGLE[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if torch.device in inner and str in inner:
            inner = tuple(_DEVICE_NAME if a is str else a for a in inner)
        kinds = [a if isinstance(a, Kind) else kind_of(a) for a in inner]
        return None if None in kinds else _any_of([k for k in kinds if k is not None])
    if origin is Literal:
        names = tuple(map(repr, inner))
        return Kind(names, (), lambda value: isinstance(value, str) and value in inner, strings=True)
    if origin is abc.Callable:
        return Kind(("a callable",), (types.FunctionType,), callable)
    if origin is abc.Mapping:
        return Kind(("a dict",), (dict,), lambda value: isinstance(value, abc.Mapping))
    if origin is abc.Sequence:  # what is in it, the function checks
        return Kind(("a sequence",), (tuple, list), lambda value: isinstance(value, abc.Sequence))
    if origin is tuple and not inner:
        return Kind(("()",), (), lambda value: isinstance(value, tuple) and not value)
    if origin is tuple:
        each = [kind_of(a) for a in inner]
        known = [k for k in each if k is not None]
        if len(known) == len(each) and len(set(inner)) == 1:
            what = known[0].what.removeprefix("a ")
            return _tuple_of(known, f"a pair of {what}s" if len(known) == 2 else f"a tuple of {len(known)} {what}s")
    if isinstance(annotation, type) and origin is None:
        name = annotation.__name__
        words = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
        return Kind((words,), (annotation,), lambda value: isinstance(value, annotation))
    raise NotImplementedError(f"fusegrad._arguments: no kind of argument is known for {annotation}")


def described(value: Any) -> str:
    """A value as messages show it: a small one itself, else its type."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        text = repr(value)
        return text if len(text) <= 80 else text[:77] + "..."
    kind = value if isinstance(value, type) else type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name}" if kind is value else name


def kinds_of(function: Callable[..., Any]) -> dict[str, Kind]:
    """The kind of each argument, without those that may be anything."""
    hints = get_type_hints(function)
    kinds = {name: kind_of(hints[name]) for name in inspect.signature(function).parameters if name in hints}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def check(op: str, name: str, kind: Kind, value: Any) -> None:
    """Raises unless the value is of the kind: TypeError, or ValueError for a string that is no choice."""
    if type(value) not in kind.plain and not kind.holds(value):
        error = ValueError if kind.strings and isinstance(value, str) else TypeError
        raise error(f"{op}: {name} must be {kind.what}, but got {described(value)}")


def device_of(op: str, device: Device | None) -> torch.device | None:
    """Raises ValueError for the number of a GPU that is not there, which PyTorch would say in words of its own."""
    if isinstance(device, int) and not 0 <= device < torch.cuda.device_count():
        raise ValueError(
            f"{op}: device must be the number of one of the {torch.cuda.device_count()} GPUs that are there, a "
            f"torch.device or a device's name, but got {device}"
        )
    return None if device is None else torch.device(device)


def checked(function: _Function) -> _Function:
    """Checks the arguments of each call against their annotations, before anything else: some 30 ns each. Messages name
    the function, or the class that is made."""
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    path = function.__qualname__.split(".")
    op = path[-2] if path[-1] == "__init__" else path[-1]
    kinds = kinds_of(function)
    positional = [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.KEYWORD_ONLY]
    plain = {name: kind.plain for name, kind in kinds.items()}
    plain_positional = [plain.get(name, ()) for name in positional]
    nothing: tuple[type, ...] = ()

    def look(name: str, value: Any) -> None:
        if name in kinds:
            check(op, name, kinds[name], value)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value, name, right in zip(args, positional, plain_positional, strict=False):
            if type(value) not in right:
                look(name, value)
        for name, value in kwargs.items():
            if type(value) not in plain.get(name, nothing):
                look(name, value)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
