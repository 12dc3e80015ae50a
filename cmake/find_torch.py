"""Prints torch's folder, its version without the local part and its CUDA version or "none", separated by semicolons: of
the folders that are named, a line each, or of this Python's torch."""

import importlib.util
import os
import pathlib
import runpy
import subprocess
import sys

folders = [pathlib.Path(name) for name in sys.argv[1:]]
if not folders and "pip-build-env" in os.environ.get("PYTHONPATH", ""):
    # pip's isolated build hides the packages of the environment that it installs into, torch among them.
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    if subprocess.run([sys.executable, __file__], env=outside).returncode == 0:
        sys.exit(0)
if not folders:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(1)
    folders = [pathlib.Path(spec.origin).parent]
for folder in folders:
    if not (folder / "version.py").exists():
        sys.exit(1)
    version = runpy.run_path(str(folder / "version.py"))
    print(folder.resolve().as_posix(), version["__version__"].split("+")[0], version["cuda"] or "none", sep=";")
