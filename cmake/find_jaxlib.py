"""Prints the folder of the headers that jaxlib ships and its version, separated by a semicolon."""

import importlib.metadata
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("jaxlib")
if spec is None or spec.origin is None:
    sys.exit(1)
print((pathlib.Path(spec.origin).parent / "include").as_posix(), importlib.metadata.version("jaxlib"), sep=";")
