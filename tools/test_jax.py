"""Tests fusegrad.jax with other versions of JAX than the environment's, without torch:
`python tools/test_jax.py 0.8.0 newest [pytest's arguments]`. The library is built for the first one's jaxlib, in
build/jax-<version>, and tested with all of them. Run it by the environment that builds."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ("flex_attention", "transforms", "second_derivatives", "programs")
TESTS = [f"tests/python/jax/test_jax_{name}.py" for name in NAMES]


def run(*command: object, **environment: str) -> None:
    subprocess.run([str(c) for c in command], cwd=ROOT, env={**os.environ, **environment}, check=True)


def environment(version: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Its Python, and the folder of its jaxlib."""
    folder = ROOT / "build" / f"jax-{version}"
    python = folder / "venv/bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
    wanted = ["jax", "jaxlib"] if version == "newest" else [f"jax=={version}", f"jaxlib=={version}"]
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted, "pytest")
    where = [python, "-c", "import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent)"]
    return python, pathlib.Path(subprocess.check_output(where, text=True).strip())


def main(*given: str) -> None:
    versions = [x for x in given if x == "newest" or x[0].isdigit()]
    tests = [x for x in given if x not in versions] or TESTS
    environments = [environment(version) for version in versions]
    folder, beside = ROOT / "build" / f"jax-{versions[0]}", pathlib.Path(sys.executable).parent
    run(
        *(beside / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={beside / 'ninja'}"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DFUSEGRAD_JAXLIB={environments[0][1]}", "-DFUSEGRAD_CUDA=OFF"),
        "-DFUSEGRAD_JAX=ON",
    )
    run(beside / "ninja", "-C", folder, "fusegrad_core", "fusegrad_jax", "_C")
    how = {"FUSEGRAD_TORCH": "0", "PYTHONPATH": str(ROOT / "tests/python/support")}
    for python, jaxlib in environments:
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
        run(python, "-m", "pytest", "-q", "--noconftest", *tests, **how)


if __name__ == "__main__":
    main(*sys.argv[1:])
