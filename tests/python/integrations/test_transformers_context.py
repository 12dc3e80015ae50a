"""Models of transformers whose sequences are spread over 2 and 4 processes, by gloo on the CPU: the cases of
transformers_context_worker.py, which all run in one start of the processes."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)
pytest.importorskip("transformers")

import processes
from support import SUPPORT
from transformers_context_worker import CASES, WORLDS, runs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> processes.Outcomes:
    folder = tmp_path_factory.mktemp("processes")
    return processes.start(SUPPORT / "transformers_context_worker.py", "cpu", max(WORLDS), folder)


@pytest.mark.parametrize("name, world", [(name, world) for name in CASES for world in WORLDS if runs(name, world)])
def test_transformers_context(outcomes: processes.Outcomes, name: str, world: int) -> None:
    processes.check(outcomes, name, world)
