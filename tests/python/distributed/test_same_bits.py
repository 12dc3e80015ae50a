"""batch_invariant over a vocabulary that 2, 3 and 4 processes share: the bits of one process. The cases of
same_bits_worker.py, which all run in one start of the processes for each device."""

import pytest
import torch.distributed as dist
from coverings import rows_of

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

import processes
from same_bits_worker import CASES, SIXTEENTHS
from support import SUPPORT


@pytest.fixture(scope="module", params=["cpu", "one cuda", "cuda"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> processes.Outcomes:
    folder = tmp_path_factory.mktemp("processes")
    return processes.start(SUPPORT / "same_bits_worker.py", request.param, max(SIXTEENTHS), folder)


@rows_of("name, world", [(name, world) for name in CASES for world in SIXTEENTHS], tests=8)
def test_the_same_bits(outcomes: processes.Outcomes, name: str, world: int) -> None:
    processes.check(outcomes, name, world)
