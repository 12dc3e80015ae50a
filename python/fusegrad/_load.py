"""Loads the ops library into the process, after a check that it fits the torch that is there."""

from __future__ import annotations

import pathlib

import torch

try:
    import fusegrad._build as _build
except ImportError as error:
    raise ImportError(
        "fusegrad is not built here: this is its source folder. Run `make build` and use .venv/bin/python from another "
        "folder than python/, or install it: pip install --no-build-isolation ."
    ) from error

_found = torch.__version__.split("+")[0]
if _found != _build.torch_version:
    # The library would fail with an unresolved symbol, or worse, load and misread torch's structures.
    raise ImportError(
        f"fusegrad {_build.version} was built for torch {_build.torch_version}, but torch {_found} is installed. "
        f"Either install the torch it was built for (pip install torch=={_build.torch_version}) or build fusegrad "
        f"for this one (in its source folder: pip install --no-build-isolation --force-reinstall --no-deps .)."
    )

torch.ops.load_library(str(pathlib.Path(__file__).parent / "lib" / "libfusegrad.so"))

import fusegrad._C as _C  # noqa: E402  (it links the library and must come after it)

from ._arguments import checked  # noqa: E402

version: str = _build.version


def build_info() -> dict[str, str | bool]:
    """What the library was built for and with: versions, CUDA (and why not), architectures, compiler."""
    return _C.build_info()


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
