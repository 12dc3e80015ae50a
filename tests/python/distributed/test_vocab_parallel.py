"""The losses with the vocabulary sharded over 2, 3 and 4 processes, by gloo on the CPU, and by NCCL where there are as
many GPUs: the cases of vocab_parallel_worker.py, which all run in one start of the processes."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from support import SUPPORT
from vocab_parallel_worker import CASES, CUTS, runs

WORKER = SUPPORT / "vocab_parallel_worker.py"


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, list[str]]]:
    """How many processes there were, and what went wrong in each run, a text a process; a run that is not there was not
    reached."""
    device = request.param
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = max(CUTS)
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    else:
        processes = min(torch.cuda.device_count(), processes)
        if processes < 2:
            pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("processes")
    running = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(processes), str(folder), device], env=env)
        for rank in range(processes)
    ]
    end = time.monotonic() + 600
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            assert time.monotonic() < end, "the processes must end within 600 s, but run"
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    made: dict[str, list[str]] = {}
    for rank in range(processes):
        path = folder / f"{rank}.json"
        for run, text in (json.loads(path.read_text()) if path.exists() else {}).items():
            made.setdefault(run, []).append(text)
    return processes, made


@pytest.mark.parametrize("world", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_sharded(started: tuple[int, dict[str, list[str]]], name: str, world: int) -> None:
    processes, outcomes = started
    if not runs(name, world):
        pytest.skip("does not depend on the number of processes")
    if world > processes:
        pytest.skip(f"needs {world} GPUs")
    texts = outcomes.get(f"{name}/{world}", [])
    assert not any(texts), "\n".join(text for text in texts if text)
    assert len(texts) == world, "not reached by all processes: an earlier case failed, or a process did not start"
