"""Loads the ops library into the process, after a check that it fits the torch that is there."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import re
from typing import Any

import torch

try:
    import fusegrad._build as _build
except ImportError as error:
    raise ImportError(
        "fusegrad is not built here: this is its source folder. Run `make build` and use .venv/bin/python from another "
        "folder than python/, or install it: pip install --no-build-isolation ."
    ) from error

folder = pathlib.Path(_build.__file__).parent
"""Where the libraries are: an editable installation has them elsewhere than the Python files."""
_found = torch.__version__.split("+")[0]
_minor = ".".join(_found.split(".")[:2])
# torch keeps its C++ structures from one patch release to the next. A nightly or a release candidate may differ from
# the release: the library would fail with an unresolved symbol, or worse, load and misread them.
_built = _build.torch_versions.get(_minor)
if _built is None or not (re.fullmatch(r"[0-9.]+", _found) or _found == _built):
    raise ImportError(
        f"fusegrad {_build.version} has libraries for torch {', '.join(_build.torch_versions)}, but torch {_found} is "
        f"installed. Either install one of those (pip install 'torch=={[*_build.torch_versions][-1]}.*') or build "
        "fusegrad for this one (in its source folder: "
        "pip install --no-build-isolation --force-reinstall --no-deps .)."
    )

library = folder / "lib" / f"torch-{_minor}" / "libfusegrad.so"
"""The library of PyTorch's ops that this process has loaded."""
torch.ops.load_library(str(library))

import fusegrad._C as _C  # noqa: E402  (it links the core, which the library has brought)


def _module_of(library: pathlib.Path, name: str) -> Any:
    """The Python module of this torch, which stands beside its library."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(library.parent / "_direct.abi3.so"))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=loader.path))
    loader.exec_module(module)
    return module


direct: Any = _module_of(library, "fusegrad._direct")
"""Calls of the ops, straight to the dispatcher."""

from ._arguments import checked  # noqa: E402

version: str = _build.version


def build_info() -> dict[str, str | bool]:
    """What the loaded libraries were built for and with: versions, CUDA (and why not), architectures, compiler."""
    return {**_C.build_info(), "torch_version": _built}


@checked
def set_check_targets(enabled: bool) -> None:
    """Whether class indices out of range raise IndexError on the GPU too, which synchronises at every call (off by
    default). Without it such a row's loss and gradient are NaN. The CPU always raises.

    Raises:
        TypeError: ``set_check_targets: enabled must be True or False, but got <value>``.
    """
    _C.set_check_targets(enabled)


def check_targets_enabled() -> bool:
    """Whether ``set_check_targets(True)`` is in force."""
    return bool(_C.check_targets_enabled())
