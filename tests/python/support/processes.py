"""Cases that several processes run together: one start of the processes for all of them.

A worker script has `CASES`, by name; `main` runs each on the first 2, 3, … of the processes and writes down what went
wrong. A test module starts the script once for a device and asks for each case: "cpu" by gloo, "cuda" by NCCL with a
GPU for each process, "one cuda" by gloo with one GPU for all.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fusegrad
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

Outcomes = tuple[int, dict[str, list[str]]]


def start(worker: Path, device: str, processes: int, folder: Path) -> Outcomes:
    """How many processes there were, and what went wrong in each run, a text a process; a run that is not there was not
    reached. For pytest's workers, which may have a part of a module's tests each, one starts them."""
    session = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    found = session / f"{worker.stem}, {device}.json"
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(_start(worker, device, processes, folder)))
    count, made = json.loads(found.read_text())
    return count, made


def _start(worker: Path, device: str, processes: int, folder: Path) -> Outcomes:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [str(rank) for rank in range(processes)]
    if device != "cuda":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        ranks = ["all"]
    elif device == "one cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    else:
        processes = min(torch.cuda.device_count(), processes)
        if processes < 2:
            pytest.skip("needs two GPUs")
        ranks = ranks[:processes]
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), rank, str(processes), str(folder), device], env=env, start_new_session=True
        )
        for rank in ranks
    ]
    end = time.monotonic() + 600
    try:
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            assert time.monotonic() < end, "the processes must end within 600 s, but run"
            time.sleep(0.1)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    made: dict[str, list[str]] = {}
    for rank in range(processes):
        path = folder / f"{rank}.json"
        for run, text in (json.loads(path.read_text()) if path.exists() else {}).items():
            made.setdefault(run, []).append(text)
    return processes, made


def check(outcomes: Outcomes, name: str, world: int) -> None:
    """Fails as the case did on the first `world` processes."""
    processes, made = outcomes
    if world > processes:
        pytest.skip(f"needs {world} GPUs")
    texts = made.get(f"{name}/{world}", [])
    assert not any(texts), "\n".join(text for text in texts if text)
    assert len(texts) == world, "not reached by all processes: an earlier case failed, or a process did not start"


def assert_raises(error: type[Exception] | tuple[type[Exception], ...], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except error as raised:
        assert text in str(raised), f"expected {text!r}, got {raised}"
    else:
        raise AssertionError(f"nothing raised, expected {text!r}")


def _forked(processes: int) -> int:
    """This process's rank: copies of one that has imported all. The first waits for them, and ends with the first that
    fails."""
    # What the first backward, DTensor and torch.compile import, sympy among it: once, not in each process.
    for module in ("torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor", "torch._dynamo"):
        importlib.import_module(module)
    children = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            return rank
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:
            os._exit(1)
    os._exit(0)


def _by_way_of_the_cpu() -> torch.library.Library:
    """Makes collectives of CUDA tensors those of copies on the CPU, which are all that gloo's functional ones take.
    They last as long as what is returned."""
    ops = torch.ops._c10d_functional

    def gathered(values: Tensor, size: int, group: str) -> Tensor:
        all_of_them: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(values.cpu(), size, group))
        return all_of_them.to(values.device)

    def added(values: Tensor, operation: str, group: str) -> Tensor:
        return values.copy_(ops.wait_tensor(ops.all_reduce(values.cpu(), operation, group)))

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gathered, "CUDA")
    library.impl("all_reduce_", added, "CUDA")
    return library


def main(
    cases: dict[str, Callable[..., None]], runs: Callable[[str, int], bool], made_of: Callable[[Any], Any]
) -> None:
    """A worker's: `made_of` makes of a group what cases are given."""
    processes, folder, device = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    rank = _forked(processes) if sys.argv[1] == "all" else int(sys.argv[1])
    torch.set_num_threads(1)
    staged = _by_way_of_the_cpu() if device == "one cuda" else None  # noqa: F841
    if device != "cpu":
        index = rank if device == "cuda" else 0
        torch.cuda.set_device(index)
        torch.set_default_device(f"cuda:{index}")
        fusegrad.set_check_targets(True)  # without it, values of targets and indices are not looked at
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(minutes=5),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    outcomes: dict[str, str] = {}
    for world in range(2, processes + 1):
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        given = made_of(group)
        for name, function in cases.items():
            if not runs(name, world):
                continue
            torch.manual_seed(0)
            try:
                function(given)
                outcomes[f"{name}/{world}"] = ""
            except SystemExit:  # a process that the others lose
                (folder / f"{rank}.json").write_text(json.dumps({**outcomes, f"{name}/{world}": ""}))
                os._exit(0)
            except Exception:
                outcomes[f"{name}/{world}"] = f"rank {rank}: {traceback.format_exc()}"
            (folder / f"{rank}.json").write_text(json.dumps(outcomes))
            if outcomes[f"{name}/{world}"]:
                # The others may wait for this process in a collective: its end is an error there.
                os._exit(1)
    # No process may end while another talks to it; after a loss there is nobody to wait for.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)
