"""Benchmarks of several processes, a device each: how they start, and times of the slowest."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.memory import cuda_peak_mib


def torchrun(count: int) -> list[str]:
    """The command in front of a program and its arguments."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]


@contextmanager
def processes(device: str, dimension: str) -> Iterator[DeviceMesh]:
    """The mesh of all processes. A program that torchrun did not start ends here and starts again under it: a process
    a GPU, or two on the CPU."""
    if "WORLD_SIZE" not in os.environ:
        count = torch.cuda.device_count() if device == "cuda" else 2
        if count < 2:
            print(f"{sys.argv[0]}: not run: needs two GPUs, but there is {count}")
            raise SystemExit
        os.execv(sys.executable, [*torchrun(count), *sys.argv])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=(dimension,))
    try:
        yield mesh
    finally:
        dist.destroy_process_group()


def timed(
    mesh: DeviceMesh, run: Callable[[], object], reps: int, in_a_row: Sequence[int] = (1,)
) -> tuple[list[float], float]:
    """Milliseconds of a call for each number of calls in a row (medians, of the slowest process in each repetition),
    and MiB, those of the largest process; 0 on the CPU."""
    cuda = mesh.device_type == "cuda"
    run()
    peak = cuda_peak_mib(run) if cuda else 0.0

    def once(calls: int) -> float:
        dist.barrier(mesh.get_group())
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / calls

    found = [[once(calls) for calls in in_a_row] for _ in range(reps)]
    slowest = torch.tensor([*found, [peak] * len(in_a_row)], device=mesh.device_type, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.get_group())
    return slowest[:-1].median(0).values.tolist(), float(slowest[-1, 0])
