"""Fetches what a library is compiled and linked against: `python tools/fetch_torch.py 2.15.0 build/torches/2.15.0`.

PyPI's wheel of that torch, of which the headers, three libraries, libgomp and version.py are kept. What torch requires,
CUDA's libraries among it, is not fetched: nothing of it is linked.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libgomp")
KEPT = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES))


def main(version: str, folder: pathlib.Path) -> int:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "-d", downloads, f"torch=={version}"], check=True)
        (wheel,) = pathlib.Path(downloads).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(KEPT)]
            # version.py last: where it is, all is.
            for name in sorted(names, key=lambda name: name == "torch/version.py"):
                archive.extract(name, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], pathlib.Path(sys.argv[2])))
