"""Loads the library of XLA's handlers, which csrc/jax/handlers.cpp defines, and registers them."""

from __future__ import annotations

import ctypes
import pathlib

try:
    import jax
    import jax.ffi
    import jaxlib
except ImportError as error:
    raise ImportError(f"fusegrad.jax needs JAX: pip install 'jax>=0.8' (for CUDA 'jax[cuda13]'); {error}") from error

NAMES = ("forward", "gradient", "scales", "sum", "jsd")

_path = pathlib.Path(__file__).parent.parent / "lib" / "libfusegrad_jax.so"
if not _path.exists():
    raise ImportError(
        f"fusegrad.jax: {_path.name} must be in {_path.parent}, but is not: fusegrad was built without JAX. Build it "
        "where JAX is installed (in its source folder: pip install jax, then pip install --no-build-isolation "
        "--force-reinstall --no-deps .)."
    )
_library = ctypes.CDLL(str(_path))
_library.fusegrad_jax_jaxlib_version.restype = ctypes.c_char_p
_built = _library.fusegrad_jax_jaxlib_version().decode()
if tuple(map(int, jaxlib.__version__.split(".")[:3])) < tuple(map(int, _built.split(".")[:3])):
    # XLA would refuse the handlers when it makes its devices, and JAX would have none.
    raise ImportError(
        f"fusegrad.jax was built with jaxlib {_built}, but jaxlib {jaxlib.__version__} is installed: install that "
        "version or a later one, or build fusegrad with this one"
    )
_library.fusegrad_jax_plan.restype = ctypes.c_int64
_library.fusegrad_jax_plan.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_bool] * 3, ctypes.c_int64]

#: The custom calls, as jax.export wants them named: its check of what programs may contain knows them not.
TARGETS = tuple(f"fusegrad_{name}" for name in NAMES)

#: Whether the library has the CUDA kernels.
build_has_cuda: bool = hasattr(_library, "fusegrad_jax_cuda_forward")

for _name in NAMES:
    for _platform, _jax_platform in (("cpu", "cpu"), *([("cuda", "CUDA")] if build_has_cuda else [])):
        _handler = jax.ffi.pycapsule(getattr(_library, f"fusegrad_jax_{_platform}_{_name}"))
        jax.ffi.register_ffi_target(f"fusegrad_{_name}", _handler, platform=_jax_platform)


def rows_at_a_time(
    rows: int,
    hidden: int,
    vocab: int,
    element_size: int,
    *,
    cpu: bool,
    weight_grad: bool,
    low_precision_result: bool,
    workspace_mib: int | None,
) -> int:
    """Rows of logits that linear_cross_entropy holds at a time: PyTorch's plan, see csrc/losses/linear_plan.h."""
    budget = -1 if workspace_mib is None else workspace_mib
    return int(
        _library.fusegrad_jax_plan(rows, hidden, vocab, element_size, cpu, weight_grad, low_precision_result, budget)
    )
