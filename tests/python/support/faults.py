"""Faults on request: allocations, threads and system calls of which the n-th fails. See faults.cpp.

What is preloaded cannot be put into a process that runs: tests start another one, with :func:`environment`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

TENSOR, HOST, THREAD, FILE, DEVICE = 1, 2, 4, 8, 16
"""What fails: tensors' memory on the CPU, operator new in fusegrad, pthread_create, fusegrad's calls on files and
folders, tensors' memory on the GPU."""

_HERE = Path(__file__).parent


def compiler() -> str | None:
    """A C++ compiler, or None."""
    return shutil.which("c++") or shutil.which("g++")


def build(folder: Path, name: str = "faults") -> Path:
    """Compiles faults.cpp, in a second, or faults_cuda.cpp, the GPU's allocator."""
    path = folder / f"lib{name}.so"
    command = [str(compiler()), "-shared", "-fPIC", "-O1", "-std=c++20", str(_HERE / f"{name}.cpp"), "-o", str(path)]
    if name == "faults_cuda":
        torch_folder = Path(torch.__file__).parent
        command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return path


def environment(library: Path) -> Mapping[str, str]:
    """For a process whose calls may fail."""
    return {**os.environ, "LD_PRELOAD": str(library), "FAULTS": str(library)}


def _code_of(name: str) -> tuple[int, int]:
    """Where the code of a loaded library lies."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and Path(fields[5]).name == name and "x" in fields[1]:
            found += [int(x, 16) for x in fields[0].split("-")]
    return min(found), max(found)


class Faults:
    """The faults of this process, which was started with :func:`environment`, and has loaded fusegrad."""

    def __init__(self) -> None:
        self.path = os.environ["FAULTS"]
        self._library = ctypes.CDLL(self.path)
        self._library.faults_count.restype = ctypes.c_long
        self._library.faults_ranges.argtypes = [ctypes.c_size_t] * 6
        self._library.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
        libraries = ("libc10.so", "libfusegrad.so", "libfusegrad_core.so")
        self._library.faults_ranges(*(end for name in libraries for end in _code_of(name)))

    @contextmanager
    def failing(self, kind: int, nth: int, error: int = 0) -> Iterator[None]:
        """Within it the `nth` call of a kind fails (from 1; 0: none), system calls with `error`.

        Garbage of earlier calls is not collected in it: a node of torch 2.15's autograd allocates when it is destroyed,
        and the process ends where that fails.
        """
        collects = gc.isenabled()
        gc.disable()
        self._library.faults_arm(kind, nth, error)
        try:
            yield
        finally:
            self.count = int(self._library.faults_count())
            """Calls of the kind in the last block."""
            self.failed = bool(self._library.faults_failed())
            """Whether one of them failed."""
            self._library.faults_arm(0, 0, 0)
            if collects:
                gc.enable()
