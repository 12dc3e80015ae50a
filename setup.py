"""Packages what the CMake build makes: pyproject.toml has the metadata, CMakeLists.txt the sources.

A library of PyTorch's ops loads with one minor version of torch. It is built against the torch of the environment that
pip installs into (also when pip builds in an isolated one), or against those of FUSEGRAD_TORCHES, and the wheel
requires one of them.
"""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent
DEFAULT_TORCH = "2.11.0"  # where the environment has none
OPTIONS = [f"FUSEGRAD_{x}" for x in ("CUDA", "CUDA_ARCHS", "NVCC", "JAX", "JAXLIB", "UNITY", "TORCHES", "MANYLINUX")]


def outer_environment() -> dict[str, str]:
    """Without the PYTHONPATH by which pip hides the environment's own packages from isolated builds."""
    isolated = "pip-build-env" in os.environ.get("PYTHONPATH", "")
    return {k: v for k, v in os.environ.items() if not (isolated and k in ("PYTHONPATH", "PYTHONNOUSERSITE"))}


def find_torches(environment: dict[str, str]) -> list[str]:
    """The versions of torch to build for: of FUSEGRAD_TORCHES' folders, or the one that Python has here."""
    folders = [folder for folder in environment.get("FUSEGRAD_TORCHES", "").split(";") if folder]
    command = [sys.executable, str(ROOT / "cmake" / "find_torch.py"), *folders]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    return [line.split(";")[1] for line in found.stdout.splitlines()] if found.returncode == 0 else []


def requirement(versions: list[str]) -> str:
    """What the wheel requires: one of the minor versions of torch 2 that it has a library for."""
    minors = {int(version.split(".")[1]) for version in versions}
    absent = [f"!=2.{minor}.*" for minor in range(min(minors), max(minors)) if minor not in minors]
    return ",".join([f"torch>=2.{min(minors)}", f"<2.{max(minors) + 1}", *absent])


def program(name: str, folder: str) -> str:
    """PyPI, then the PATH: Debian 12's CMake does not know C++20 for CUDA 13. Conda has no such packages."""
    try:
        return str(pathlib.Path(getattr(importlib.import_module(name), folder)) / name)
    except ImportError:
        return shutil.which(name) or name


ENVIRONMENT = outer_environment()
OUTER_TORCHES = find_torches(ENVIRONMENT)
if not OUTER_TORCHES:
    ENVIRONMENT = dict(os.environ)


class CMakeBuild(build_ext):
    """Runs CMake and installs into the package: build/lib… for a wheel, python/fusegrad for `pip install -e`."""

    def run(self) -> None:
        editable = self.inplace or self.editable_mode
        package = ROOT / "python" / "fusegrad" if editable else pathlib.Path(self.build_lib).absolute() / "fusegrad"
        build = pathlib.Path(os.environ.get("FUSEGRAD_BUILD_DIR") or self.build_temp).absolute()
        cmake_program, ninja = program("cmake", "CMAKE_BIN_DIR"), program("ninja", "BIN_DIR")
        configure = [
            *(cmake_program, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            # Of an earlier configuration CMake would keep its values.
            *(f"-D{name}={os.environ[name]}" for name in OPTIONS if name in os.environ),
            f"-DCMAKE_INSTALL_RPATH_USE_LINK_PATH={'ON' if editable else 'OFF'}",
        ]
        subprocess.run(configure, check=True, env=ENVIRONMENT)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        print("fusegrad: compiling takes some minutes; pip shows it with -v", flush=True)
        build_command = [cmake_program, "--build", str(build), "--parallel", jobs, "--target", "package_files"]
        subprocess.run(build_command, check=True, env=ENVIRONMENT)
        subprocess.run([cmake_program, "--install", str(build), "--prefix", str(package)], check=True)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    # Tells setuptools that the wheel is of one platform, and of every Python from 3.10 on; CMake knows the sources.
    ext_modules=[Extension("fusegrad._C", sources=[], py_limited_api=True)],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[requirement(OUTER_TORCHES or [DEFAULT_TORCH])],
    setup_requires=[] if OUTER_TORCHES else [f"torch=={DEFAULT_TORCH}"],
)
