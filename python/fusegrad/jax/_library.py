"""Loads the library of XLA's handlers, which csrc/jax/handlers.cpp defines, and registers them."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

from .. import _build

try:
    import jax
    import jax.ffi
    import jaxlib
except ImportError as error:
    raise ImportError(f"fusegrad.jax needs JAX: pip install 'jax>=0.8' (for CUDA 'jax[cuda13]'); {error}") from error

NAMES = ("forward", "gradient", "scales", "sum", "jsd", "flex_forward", "flex_backward", "flex_tangents")

_path = pathlib.Path(_build.__file__).parent / "lib" / "libfusegrad_jax.so"
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
# Where NVRTC may be, which compiles kernels at run time.
_library.fusegrad_jax_packages(str(pathlib.Path(jaxlib.__file__).parent.parent).encode())
_library.fusegrad_jax_plan.restype = ctypes.c_int64
_library.fusegrad_jax_plan.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_bool] * 3, ctypes.c_int64]

#: The custom calls, as jax.export wants them named: its check of what programs may contain knows them not.
TARGETS = tuple(f"fusegrad_{name}" for name in NAMES)

#: A number of score_mod::DType, and a shape.
_FlexArray = tuple[int, tuple[int, ...]]

#: Attributes of flex_attention's calls, in the order in which the library takes them.
FLEX_FLAGS = ("bshd", "lists", "block_q", "block_kv", "max_scores", "low", "deterministic", "grad_out", "grad_lse")

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


_ERRORS = {-1: ValueError, -2: NotImplementedError, -3: RuntimeError}

if build_has_cuda:
    _integers = ctypes.POINTER(ctypes.c_int64)
    _library.fusegrad_jax_flex_scratch.restype = ctypes.c_int64
    _text, _float, _count = ctypes.c_char_p, ctypes.c_double, ctypes.c_int64
    _library.fusegrad_jax_flex_scratch.argtypes = (
        *(_count, _text, _text, _float, _float, _integers),
        *(_integers, _count, _integers, _count),
        *(_integers, _count, _count, ctypes.c_bool),
    )
    _library.fusegrad_jax_flex_error.restype = ctypes.c_char_p


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def flex_scratch(
    direction: int,
    attributes: dict[str, Any],
    arguments: Sequence[_FlexArray],
    results: Sequence[_FlexArray],
    *,
    wait: bool,
) -> int:
    """Bytes of scratch memory that a call of flex_attention needs on the current GPU; its kernels begin to be compiled,
    and are when it returns if it is to wait. Arrays are a number of score_mod::DType and a shape."""
    a = attributes
    flags = [a[name] for name in FLEX_FLAGS]
    wanted, scalars = list(a["wanted"]), list(a["scalars"])
    arrays = [n for dtype, shape in (*arguments, *results) for n in (dtype, len(shape), *shape)]
    found = int(
        _library.fusegrad_jax_flex_scratch(
            *(direction, a["score_mod"].encode(), a["mask_mod"].encode(), a["scale"], a["dropout_p"], _numbers(flags)),
            *(_numbers(wanted), len(wanted), _numbers(scalars), len(scalars)),
            *(_numbers(arrays), len(arguments), len(results), wait),
        )
    )
    if found < 0:
        message = _library.fusegrad_jax_flex_error().decode()
        raise _ERRORS[found]("fusegrad.jax." + message if message.startswith("flex_attention: ") else message)
    return found
