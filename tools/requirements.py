"""Prints pyproject.toml's requirements: `python tools/requirements.py build test` for [build-system] and an extra."""

import pathlib
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())
lists = {"build": project["build-system"]["requires"], **project["project"]["optional-dependencies"]}
for name in sys.argv[1:]:
    print("\n".join(lists[name]))
