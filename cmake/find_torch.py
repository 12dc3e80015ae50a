"""Prints torch's folder, its version without the local part and its CUDA version, separated by semicolons."""

import importlib.util
import pathlib
import runpy
import sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(1)
folder = pathlib.Path(spec.origin).parent
version = runpy.run_path(str(folder / "version.py"))
print(folder.as_posix(), version["__version__"].split("+")[0], version["cuda"] or "", sep=";")
