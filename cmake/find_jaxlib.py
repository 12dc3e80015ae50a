"""Prints the folder of the headers that jaxlib ships and its version, separated by a semicolon: of the jaxlib folder
that is named, or else of this Python's."""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys

if len(sys.argv) > 1:
    folder = pathlib.Path(sys.argv[1]).resolve()
    found = re.search(r'^_version = "([0-9.]+)"', (folder / "version.py").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(1)
    version = found[1]
else:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        sys.exit(1)
    folder, version = pathlib.Path(spec.origin).parent, importlib.metadata.version("jaxlib")
print((folder / "include").as_posix(), version, sep=";")
