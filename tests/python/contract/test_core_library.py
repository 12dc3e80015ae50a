"""libfusegrad_core: the kernels, once, and nothing of torch. docs/design/architecture.md draws what stands on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fusegrad
import pytest

FOLDER = Path(fusegrad.__file__).parent / "lib"
CORE = FOLDER / "libfusegrad_core.so"
FRONT_ENDS = [*FOLDER.glob("torch-*/libfusegrad.so"), *FOLDER.glob("libfusegrad_jax.so")]


def printed(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", printed("readelf", "-d", library))


def test_no_symbol_of_torch() -> None:
    undefined = printed("nm", "-D", "--undefined-only", "--demangle", CORE).splitlines()
    assert len(undefined) > 20, "nm found what the C library defines"
    of_torch = re.compile(r"\b(at|c10|caffe2|torch)::|Sleef_|GOMP|omp_|\bcuda[A-Z]")
    assert [line for line in undefined if of_torch.search(line)] == []
    assert [name for name in needed(CORE) if re.match("lib(torch|c10|gomp|cuda|python)", name)] == []


def test_it_loads_alone() -> None:
    """All its symbols are found in a process without torch, jaxlib and CUDA's runtime."""
    code = f"import ctypes, os; ctypes.CDLL({str(CORE)!r}, os.RTLD_NOW); print(open('/proc/self/maps').read())"
    maps = printed(sys.executable, "-I", "-S", "-c", code)
    assert CORE.name in maps
    assert re.findall(r"/lib(?:torch|c10|gomp|cudart|jax)[^/]*$", maps, re.MULTILINE) == []


@pytest.mark.parametrize("library", FRONT_ENDS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_kernels_are_in_it_alone(library: Path) -> None:
    assert CORE.name in needed(library)
    kernels = re.compile(r" [DRBVu] .*(kCpuRowKernels|kCudaRowKernels|kTileKernels|kAttentionFloat)")
    assert kernels.search(printed("nm", "-D", "--defined-only", CORE)) is not None
    assert kernels.search(printed("nm", "-D", "--defined-only", library)) is None
    assert ".nv_fatbin" not in printed("readelf", "-S", "-W", library)


def test_a_torch_without_a_library_is_named() -> None:
    """Another minor version, and a nightly of one that there is a library for, whose structures may differ."""
    code = """
import torch
for version in ("2.1.0", torch.__version__.split("+")[0] + ".dev20261101+cpu"):
    torch.__version__ = version
    try:
        import fusegrad
    except ImportError as error:
        print(error)
"""
    found = printed(sys.executable, "-I", "-c", code).splitlines()
    minors = ", ".join(sorted(path.name.removeprefix("torch-") for path in FOLDER.glob("torch-*")))
    assert len(found) == 2
    for line, version in zip(found, ("2.1.0", ".dev20261101"), strict=True):
        assert f"has libraries for torch {minors}, but torch" in line and f"{version} is installed" in line
        assert "pip install 'torch==" in line and "pip install --no-build-isolation" in line
