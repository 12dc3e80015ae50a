"""The contract as a program: eager is right in every case, fusegrad too, and every verdict can be reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import SUPPORT

# What these cases compile takes seconds each; they are run by hand, see docs/tables/conformance.md.
QUICK = r"^(?!.*compiled)"


def conformance(tmp_path: Path, *arguments: str) -> tuple[int, str, dict[tuple[str, str], dict[str, Any]]]:
    """Exit status, output, and the results by implementation and case."""
    output = tmp_path / "out.json"
    environment = os.environ | {"PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fusegrad.conformance", "--device", "cpu", "--json", str(output), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert output.exists(), done.stdout + done.stderr
    results = json.loads(output.read_text())["results"]
    return done.returncode, done.stdout, {(r["implementation"], r["key"]): r for r in results}


def test_eager_and_fusegrad_are_right(tmp_path: Path) -> None:
    names = ("eager", "fusegrad", "fusegrad-inplace")
    status, _, results = conformance(
        tmp_path, "--impl", ",".join(names), "--case", QUICK, "--together", "100", "--quiet"
    )
    assert status == 0
    for (name, key), result in results.items():
        fine = result["verdict"] in ("right", "not offered") or (result["verdict"] == "raises" and result["allowed"])
        assert fine, f"{name} {key}: {result['verdict']}: {result['detail']}"
    for name in names:
        right = sum(r["verdict"] == "right" for (n, _), r in results.items() if n == name)
        assert right > 300, f"{name}: {right}"


PLANTED = {
    "planted_adapters:Wrong": ("silently wrong", ""),
    "planted_adapters:Raises": ("raises", "planted"),
    "planted_adapters:Crashes": ("crashes", "SIGABRT"),
    "planted_adapters:Hangs": ("crashes", "no end after 4 s"),
    "planted_adapters:Absent": ("not offered", "no such package"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = ",".join([*PLANTED, "planted_adapters:Least"])
    pattern = r"cross_entropy\.(softmax_upstream|kept_graph|bias|label_smoothing)$"
    arguments = ("--impl", names, "--case", pattern, "--timeout", "4", "--jobs", "4", "--together", "3", "--markdown")
    return conformance(tmp_path_factory.mktemp("planted"), *arguments)


@pytest.mark.parametrize("name", PLANTED)
def test_every_verdict_can_be_reached(planted: Any, name: str) -> None:
    verdict, detail = PLANTED[name]
    for case in ("cross_entropy.softmax_upstream", "cross_entropy.kept_graph"):
        result = planted[2][name, case]
        assert result["verdict"] == verdict and detail in result["detail"], result
    assert planted[0] == 1
    # `*_cross_entropy.bias` and `.label_smoothing` are about what none of these has.
    assert planted[2][name, "linear_cross_entropy.bias"]["verdict"] == "not offered"
    assert planted[2][name, "cross_entropy.label_smoothing"]["verdict"] == "not offered"


def test_by_how_much(planted: Any) -> None:
    """The gradient is 0.37 of itself in the first backward, 0.37^2 in the second."""
    result = planted[2]["planted_adapters:Wrong", "cross_entropy.kept_graph"]
    assert "wrote over" in result["detail"] or 0.5 < result["error"] < 1, result
    result = planted[2]["planted_adapters:Wrong", "cross_entropy.softmax_upstream"]
    assert result["error"] > 0.5, result


def test_an_adapter_needs_no_base_class(planted: Any) -> None:
    for case in ("cross_entropy.softmax_upstream", "cross_entropy.kept_graph"):
        assert planted[2]["planted_adapters:Least", case]["verdict"] == "right"


def test_the_table(planted: Any) -> None:
    output = planted[1]
    assert "| 6 | three backwards of a kept graph, upstream 0.37: the same bits |" in output
    row = next(line for line in output.splitlines() if line.startswith("| 2 | softmax before it"))
    assert "**wrong** C" in row and "**crashes**" in row and "✓" in row, row


def test_a_run_in_parts(tmp_path: Path) -> None:
    """What has no result is missing, in an empty cell, and is asked alone by the next run, which has all of them."""
    pattern = (
        "--impl",
        "eager,fusegrad",
        "--case",
        r"^cross_entropy\.(kept_graph|softmax_upstream)$",
        "--together",
        "2",
    )
    _, _, results = conformance(tmp_path, *pattern)
    assert len(results) == 4
    page = tmp_path / "out.json"
    document = json.loads(page.read_text())
    assert document["implementations"]["fusegrad"] == "functional, all defaults; float64"
    document["results"] = [r for r in document["results"] if (r["implementation"], r["key"]) != LEFT_OUT]
    page.write_text(json.dumps(document))
    command = [sys.executable, "-m", "fusegrad.conformance", *pattern, "--device", "cpu"]
    read = subprocess.run([*command, "--read", page, "--markdown"], capture_output=True, text=True, timeout=60).stdout
    assert "| missing | 0 | 1 |" in read and "| fusegrad | functional, all defaults; float64 |" in read
    assert "three backwards of a kept graph, upstream 0.37: the same bits | ✓ |  |" in read
    done = subprocess.run([*command, "--complete", page], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "cross_entropy." in line]
    assert len(lines) == 1 and lines[0].split()[:2] == list(LEFT_OUT)
    assert {(r["implementation"], r["key"]) for r in json.loads(page.read_text())["results"]} == set(results)


LEFT_OUT = ("fusegrad", "cross_entropy.kept_graph")


def test_what_cannot_be_chosen(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusegrad.conformance", "--impl", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "conformance: impl must be package.module:Class or one of eager" in done.stderr
