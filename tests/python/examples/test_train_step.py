"""benchmarks/train_step.py on the CPU: every step runs, and all implementations give the same loss and gradient."""

from typing import Any

import pytest

pytest.importorskip("transformers")
import train_step
from benchmark_support import agreeing, quick_run
from harness import llama

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
    return quick_run(train_step, tmp_path_factory.mktemp("results"))


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", EXPECTED)
def test_all_implementations_agree(document: dict[str, Any], kind: str) -> None:
    case, results = agreeing(document, kind, EXPECTED[kind])
    for one in results:
        assert one["tokens_per_s"] == pytest.approx(case["sizes"]["B"] * case["sizes"]["S"] / one["ms"] * 1e3, rel=1e-3)


@pytest.mark.cpu_only
def test_peers_that_cannot_run_say_why(document: dict[str, Any]) -> None:
    not_run = {kind: case["not_run"] for kind, case in zip(EXPECTED, document["cases"], strict=True)}
    assert set(not_run[llama.TRAIN]) >= PEERS
    assert set(not_run[llama.DISTILLATION]) == {"liger"}
    assert set(not_run[llama.RELATIVE_BIAS]) == {"compile"}
    assert all(reasons.values() for reasons in not_run.values())
