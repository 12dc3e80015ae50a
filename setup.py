"""Packages what the CMake build makes: pyproject.toml has the metadata, CMakeLists.txt the sources.

The library loads with one version of torch only, so it is built against the torch of the environment that pip
installs into (also when pip builds in an isolated one), and the wheel requires that very version.
"""

import os
import pathlib
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent
DEFAULT_TORCH = "2.11.0"  # where the environment has none
TARGETS = ("fusegrad", "_C", "fusegrad_jax")


def outer_environment() -> dict[str, str]:
    """Without the PYTHONPATH by which pip hides the environment's own packages from isolated builds."""
    isolated = "pip-build-env" in os.environ.get("PYTHONPATH", "")
    return {k: v for k, v in os.environ.items() if not (isolated and k in ("PYTHONPATH", "PYTHONNOUSERSITE"))}


def find_torch(environment: dict[str, str]) -> str | None:
    """The version of torch that Python has in this environment."""
    command = [sys.executable, str(ROOT / "cmake" / "find_torch.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    return found.stdout.split(";")[1] if found.returncode == 0 else None


ENVIRONMENT = outer_environment()
OUTER_TORCH = find_torch(ENVIRONMENT)
if OUTER_TORCH is None:
    ENVIRONMENT = dict(os.environ)
TORCH = OUTER_TORCH or DEFAULT_TORCH


class CMakeBuild(build_ext):
    """Runs CMake and installs into the package: build/lib… for a wheel, python/fusegrad for `pip install -e`."""

    def run(self) -> None:
        # Of PyPI's packages, not of the PATH: Debian 12's CMake does not know C++20 for CUDA 13.
        import cmake
        import ninja
        import pybind11

        editable = self.inplace or self.editable_mode
        package = ROOT / "python" / "fusegrad" if editable else pathlib.Path(self.build_lib).absolute() / "fusegrad"
        build = pathlib.Path(os.environ.get("FUSEGRAD_BUILD_DIR") or self.build_temp).absolute()
        cmake_program = str(pathlib.Path(cmake.CMAKE_BIN_DIR) / "cmake")
        configure = [
            *(cmake_program, "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={pathlib.Path(ninja.BIN_DIR) / 'ninja'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_INSTALL_RPATH_USE_LINK_PATH={'ON' if editable else 'OFF'}",
        ]
        subprocess.run(configure, check=True, env=ENVIRONMENT)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        subprocess.run(
            [cmake_program, "--build", str(build), "--parallel", jobs, "--target", *TARGETS],
            check=True,
            env=ENVIRONMENT,
        )
        subprocess.run([cmake_program, "--install", str(build), "--prefix", str(package)], check=True)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    # Tells setuptools that the wheel is of one platform and one Python; CMake knows the sources.
    ext_modules=[Extension("fusegrad._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[f"torch=={TORCH}"],
    setup_requires=[] if OUTER_TORCH else [f"torch=={DEFAULT_TORCH}"],
)
