"""What some tests need and some machines and builds do not have."""

import pytest
from fusegrad import _C


def has_nvrtc() -> bool:
    try:
        _C.jit.nvrtc()
    except RuntimeError:
        return False
    return True


def has_flex_compiler() -> bool:
    return hasattr(_C, "flex") and has_nvrtc()


# For tests of which kernels there are, and of what compiles at all, not of its code: a third of the time.
QUICKLY = "--Ofast-compile=max"

needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC was not found")
needs_flex_compiler = pytest.mark.skipif(not has_flex_compiler(), reason="needs a build with CUDA, and NVRTC")
