"""The losses with the vocabulary sharded over 2, 3 and 4 processes (gloo, CPU): the cases of vocab_parallel_worker.py,
which all run in one start of four processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from vocab_parallel_worker import CASES, PROCESSES, runs

WORKER = Path(__file__).with_name("vocab_parallel_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What went wrong in each run, a text a process; a run that is not there was not reached."""
    folder = tmp_path_factory.mktemp("processes")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(folder)], env=env) for rank in range(PROCESSES)
    ]
    try:
        for process in processes:
            process.wait(timeout=600)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    made: dict[str, list[str]] = {}
    for rank in range(PROCESSES):
        path = folder / f"{rank}.json"
        for run, text in (json.loads(path.read_text()) if path.exists() else {}).items():
            made.setdefault(run, []).append(text)
    return made


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_sharded(outcomes: dict[str, list[str]], name: str, world: int) -> None:
    if not runs(name, world):
        pytest.skip("does not depend on the number of processes")
    texts = outcomes.get(f"{name}/{world}", [])
    assert not any(texts), "\n".join(text for text in texts if text)
    assert len(texts) == world, "not reached by all processes: an earlier case failed, or a process did not start"
