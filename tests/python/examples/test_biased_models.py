"""benchmarks/biased_models.py on the CPU: the models' own attentions and ours give the same loss and gradient of the
bias tables as one in float64."""

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.20")
import biased_models
from benchmark_support import agreeing, quick_run
from harness.biased_models import SIGLIP, SWIN, T5, TRUNK

EXPECTED = {
    T5: {"eager", "sdpa", "fusegrad", "fusegrad table"},
    SWIN: {"eager", "sdpa", "fusegrad", "fusegrad table"},
    SIGLIP: {"eager", "sdpa", "fusegrad"},
    TRUNK: {"eager", "sdpa", "fusegrad"},
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return quick_run(biased_models, tmp_path_factory.mktemp("results"))


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", EXPECTED)
def test_all_attentions_agree(document: dict[str, Any], kind: str) -> None:
    agreeing(document, kind, EXPECTED[kind])
