"""Lays out a wheel as a repository of the kernels hub: `python tools/hub.py dist/fusegrad-*.whl build/hub`.

One variant for each torch and backend, such as build/torch211-cxx11-cu130-x86_64-linux/, with the package of the wheel
and, of the libraries for torch, that one's alone. The repository's own files are those of packaging/hub.
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# For each torch the CUDA versions whose builds PyTorch publishes for it, see docs/design/wheels.md for drivers.
BACKENDS = ("cpu", "cu126", "cu130", "cu132")


def metadata(version: str, variant: str, backend: str) -> dict[str, object]:
    kind = "cpu" if backend == "cpu" else "cuda"
    return {
        "id": f"_fusegrad_{kind}_{re.sub('[^0-9a-z]', '_', version)}",
        "name": "fusegrad",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": kind},
    }


def main(wheel: pathlib.Path, folder: pathlib.Path) -> int:
    version, machine = wheel.name.split("-")[1], "aarch64" if wheel.stem.endswith("aarch64") else "x86_64"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "packaging" / "hub", folder)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("fusegrad/")]
        minors = sorted({found[1] for name in names if (found := re.match(r"fusegrad/lib/torch-([0-9.]+)/", name))})
        for minor in minors:
            for backend in BACKENDS:
                variant = f"torch{minor.replace('.', '')}-cxx11-{backend}-{machine}-linux"
                to = folder / "build" / variant
                for name in names:
                    if not name.startswith("fusegrad/lib/torch-") or f"/torch-{minor}/" in name:
                        archive.extract(name, to)
                shutil.copy(folder / "variant.py", to / "__init__.py")
                (to / "metadata.json").write_text(json.dumps(metadata(version, variant, backend), indent=2) + "\n")
    (folder / "variant.py").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
