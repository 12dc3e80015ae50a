"""Tests fusegrad.jax with another JAX than the environment's, without torch: `python tools/test_jax.py 0.8.0 [pytest's
arguments]`. The library is built for that jaxlib, in build/jax-<version>. Run it by the environment that builds."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = [f"tests/python/jax/test_jax_{name}.py" for name in ("flex_attention", "transforms", "programs")]


def run(*command: object, **environment: str) -> None:
    subprocess.run([str(c) for c in command], cwd=ROOT, env={**os.environ, **environment}, check=True)


def main(version: str, *arguments: str) -> None:
    folder = ROOT / "build" / f"jax-{version}"
    python, beside = folder / "venv/bin/python", pathlib.Path(sys.executable).parent
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "--quiet", f"jax=={version}", f"jaxlib=={version}", "pytest")
    where = [python, "-c", "import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent)"]
    jaxlib = pathlib.Path(subprocess.check_output(where, text=True).strip())
    run(
        *(beside / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={beside / 'ninja'}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DFUSEGRAD_JAXLIB={jaxlib}", "-DFUSEGRAD_CUDA=OFF"),
        "-DFUSEGRAD_JAX=ON",
    )
    run(beside / "ninja", "-C", folder, "fusegrad_core", "fusegrad_jax", "_C")
    package = jaxlib.parent / "fusegrad"
    for source, name in (
        *((f, f.name) for f in (ROOT / "python/fusegrad").iterdir()),
        *((folder / f, f) for f in ("_C.abi3.so", "_build.py")),
        *((folder / f, f"lib/{f}") for f in ("libfusegrad_core.so", "libfusegrad_jax.so")),
    ):
        to = package / name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        to.symlink_to(source)
    support = ROOT / "tests/python/support"
    how = {"FUSEGRAD_TORCH": "0", "PYTHONPATH": str(support)}
    run(python, "-m", "pytest", "-q", "--noconftest", *(arguments or TESTS), **how)


if __name__ == "__main__":
    main(*sys.argv[1:])
