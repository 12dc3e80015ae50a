"""benchmarks/train_step.py on the CPU: every step runs, and all implementations give the same loss and gradient."""

import json
import sys
from typing import Any

import pytest

pytest.importorskip("transformers")
import train_step
from harness import llama
from harness.cli import main

HEADS = {"fusegrad", "fusegrad inplace", "fusegrad lean", "fusegrad lean inplace"}
ATTENTION = {"fusegrad with attention", "fusegrad lean inplace with attention"}
EXPECTED = {
    llama.TRAIN: HEADS | ATTENTION | {"transformers", "eager"},
    llama.CHECKPOINTS: HEADS | ATTENTION | {"transformers", "eager"},
    llama.DISTILLATION: HEADS | {"eager"},
    llama.RELATIVE_BIAS: {"fusegrad", "fusegrad attention", "eager"},
}
PEERS = {"liger", "cce", "quack"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        options = ["--device", "cpu", "--quick", "--rounds", "1", "--reps", "1", "--commit", "none"]
        patch.setattr(sys, "argv", ["train_step.py", *options, "--output", str(folder)])
        assert main(train_step.BENCHMARK) == 0
    (path,) = folder.glob("train_step-*.json")
    return json.loads(path.read_text())


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", EXPECTED)
def test_all_implementations_agree(document: dict[str, Any], kind: str) -> None:
    (case,) = (one for one in document["cases"] if one["op"] == kind)
    results = {one["name"]: one for one in case["results"]}
    assert set(results) == EXPECTED[kind]
    for name, one in results.items():
        assert "failure" not in one, f"{name}: {one.get('failure')}"
        assert one["errors"]["loss"] < 1e-6 and one["errors"]["weight"] < 1e-5, (name, one["errors"])
        assert one["tokens_per_s"] == pytest.approx(case["sizes"]["B"] * case["sizes"]["S"] / one["ms"] * 1e3, rel=1e-3)


@pytest.mark.cpu_only
def test_peers_that_cannot_run_say_why(document: dict[str, Any]) -> None:
    not_run = {kind: case["not_run"] for kind, case in zip(EXPECTED, document["cases"], strict=True)}
    assert set(not_run[llama.TRAIN]) >= PEERS
    assert set(not_run[llama.DISTILLATION]) == {"liger"}
    assert set(not_run[llama.RELATIVE_BIAS]) == {"compile"}
    assert all(reasons.values() for reasons in not_run.values())
