"""A benchmark's quick run on the CPU: its results, and that all implementations agree in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.cli import main

OPTIONS = ("--device", "cpu", "--quick", "--rounds", "1", "--reps", "1", "--commit", "none")


def quick_run(module: Any, folder: Path) -> dict[str, Any]:
    name = module.__name__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *OPTIONS, "--output", str(folder)])
        assert main(module.BENCHMARK) == 0
    (path,) = folder.glob(f"{name}-*.json")
    return json.loads(path.read_text())


def agreeing(document: dict[str, Any], kind: str, names: set[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The case of a kind and its results, those of `names`, whose loss and gradient are those in float64."""
    (case,) = (one for one in document["cases"] if one["op"] == kind)
    assert {one["name"] for one in case["results"]} == names
    for one in case["results"]:
        assert "failure" not in one, f"{one['name']}: {one.get('failure')}"
        assert one["errors"]["loss"] < 1e-6 and one["errors"]["weight"] < 1e-5, (one["name"], one["errors"])
    return case, case["results"]
