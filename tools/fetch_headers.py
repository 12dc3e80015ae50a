"""Fetches what a library is compiled and linked against:
`python tools/fetch_headers.py torch 2.15.0 build/torches/2.15.0`, or `jaxlib 0.8.0 build/jaxlibs/0.8.0`.

PyPI's wheel of that package, of which the headers and version.py are kept, and of torch three libraries and libgomp.
What it requires, CUDA's libraries among it, is not fetched: nothing of it is linked.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp")
KEPT = {"torch": [f"torch/lib/{name}" for name in LIBRARIES], "jaxlib": []}
# jaxlib has no wheel for this Python where that is 3.10; headers are the same for all.
PIP = {"torch": [], "jaxlib": ["--python-version=3.11"]}


def main(package: str, version: str, folder: pathlib.Path) -> int:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pip += ["--no-deps", "--only-binary=:all:", *PIP[package]]
    kept = (f"{package}/include/", f"{package}/version.py", *KEPT[package])
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "-d", downloads, f"{package}=={version}"], check=True)
        (wheel,) = pathlib.Path(downloads).glob(f"{package}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(kept)]
            # version.py last: where it is, all is.
            for name in sorted(names, key=lambda name: name == f"{package}/version.py"):
                archive.extract(name, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], pathlib.Path(sys.argv[3])))
