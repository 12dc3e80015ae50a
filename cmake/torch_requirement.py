"""The wheel's requirement of torch, as pyproject.toml's dynamic metadata.

A library of PyTorch's ops loads with one minor version of torch. It is built against the torch of the environment that
pip installs into (also when pip builds in an isolated one), or against those of FUSEGRAD_TORCHES, and the wheel
requires one of them.
"""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

DEFAULT = "2.11.0"  # where the environment has none


def torches() -> list[str]:
    """The versions that CMake will build for."""
    folders = [folder for folder in os.environ.get("FUSEGRAD_TORCHES", "").split(";") if folder]
    command = [sys.executable, str(pathlib.Path(__file__).parent / "find_torch.py"), *folders]
    found = subprocess.run(command, capture_output=True, text=True)
    return [line.split(";")[1] for line in found.stdout.splitlines()] if found.returncode == 0 else []


def requirement(versions: list[str]) -> str:
    minors = {int(version.split(".")[1]) for version in versions}
    absent = [f"!=2.{minor}.*" for minor in range(min(minors), max(minors)) if minor not in minors]
    return ",".join([f"torch>=2.{min(minors)}", f"<2.{max(minors) + 1}", *absent])


def get_requires_for_dynamic_metadata(settings: Mapping[str, Any]) -> list[str]:
    return [] if torches() else [f"torch=={DEFAULT}"]


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"dependencies": [requirement(torches() or [DEFAULT])]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """A wheel's requirement may be another than its source distribution's."""
    return {"dependencies": True}
