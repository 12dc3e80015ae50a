"""Packages of models of proteins, without what their attention does not need: installed by `pip install --no-deps`,
they import readers of files, loggers and trainers, for which names that nothing calls stand here."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import pytest

STAND_INS = (
    "Bio", "biotite", "colt5_attention", "environs", "frame_averaging_pytorch", "gemmi", "loguru", "sh",
    "taylor_series_linear_attention", "torch_einops_utils",
)  # fmt: skip
# Parts of packages, which read files and hold language models.
PARTS = tuple(f"alphafold3_pytorch.{part}" for part in ("inputs", "nlm", "plm", "common.biomolecule"))


class _Name(type):
    """A class that has any attribute, and is indexed as a type may be."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return other

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else cls  # as a decorator too


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Env:
    """environs: nothing is set."""

    def read_env(self) -> None: ...

    def bool(self, name: str, default: bool) -> bool:
        return default


def _no_program(name: str) -> None:
    raise FileNotFoundError(name)


_REAL: dict[str, dict[str, Any]] = {
    "environs": {"Env": _Env},
    "sh": {"which": _no_program, "ErrorReturnCode_1": FileNotFoundError},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the path of finders: of what is there, the real one is found before. With `parts` the first."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in PARTS if self.parts else name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        vars(module).update({"__version__": "0", **_REAL.get(module.__name__, {})})


def module_of(name: str, *without_init: str) -> Any:
    """A module of a package. `without_init`: packages whose own __init__, which imports all of them, is not run.

    Skips where the package is not installed."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    if spec is None:
        pytest.skip(f"{name.partition('.')[0]} is not installed")
    for package in without_init:
        if package not in sys.modules:
            made = types.ModuleType(package)
            found = importlib.util.find_spec(package)
            assert found is not None and found.submodule_search_locations is not None
            made.__path__ = list(found.submodule_search_locations)
            made.__spec__ = found
            sys.modules[package] = made
    first, last = _Finder(True), _Finder(False)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
