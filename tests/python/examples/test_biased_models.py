"""benchmarks/biased_models.py on the CPU: the models' own attentions and ours give the same loss and gradient of the
bias tables as one in float64."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.20")
import biased_models
from harness.biased_models import SIGLIP, SWIN, T5, TRUNK
from harness.cli import main

EXPECTED = {
    T5: {"eager", "sdpa", "fusegrad", "fusegrad table"},
    SWIN: {"eager", "sdpa", "fusegrad", "fusegrad table"},
    SIGLIP: {"eager", "sdpa", "fusegrad"},
    TRUNK: {"eager", "sdpa", "fusegrad"},
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        options = ["--device", "cpu", "--quick", "--rounds", "1", "--reps", "1", "--commit", "none"]
        patch.setattr(sys, "argv", ["biased_models.py", *options, "--output", str(folder)])
        assert main(biased_models.BENCHMARK) == 0
    (path,) = folder.glob("biased_models-*.json")
    return json.loads(path.read_text())


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", EXPECTED)
def test_all_attentions_agree(document: dict[str, Any], kind: str) -> None:
    (case,) = (one for one in document["cases"] if one["op"] == kind)
    results = {one["name"]: one for one in case["results"]}
    assert set(results) == EXPECTED[kind]
    for name, one in results.items():
        assert "failure" not in one, f"{name}: {one.get('failure')}"
        assert one["errors"]["loss"] < 1e-6 and one["errors"]["weight"] < 1e-5, (name, one["errors"])
