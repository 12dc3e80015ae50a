"""The losses with the vocabulary sharded over 2, 3 and 4 processes, by gloo on the CPU, and by NCCL where there are as
many GPUs: the cases of vocab_parallel_worker.py, which all run in one start of the processes."""

import pytest
import torch.distributed as dist
from coverings import rows_of

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

import processes
from support import SUPPORT
from vocab_parallel_worker import CASES, CUTS, runs


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> processes.Outcomes:
    folder = tmp_path_factory.mktemp("processes")
    return processes.start(SUPPORT / "vocab_parallel_worker.py", request.param, max(CUTS), folder)


@rows_of("name, world", [(name, world) for name in CASES for world in CUTS if runs(name, world)], tests=16)
def test_sharded(outcomes: processes.Outcomes, name: str, world: int) -> None:
    processes.check(outcomes, name, world)
