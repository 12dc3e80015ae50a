"""Benchmarks of several processes, a device each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def processes(device: str, dimension: str) -> Iterator[DeviceMesh]:
    """The mesh of all processes. A program that torchrun did not start ends here and starts again under it: a process
    a GPU, or two on the CPU."""
    if "WORLD_SIZE" not in os.environ:
        count = torch.cuda.device_count() if device == "cuda" else 2
        if count < 2:
            print(f"{sys.argv[0]}: not run: needs two GPUs, but there is {count}")
            raise SystemExit
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=(dimension,))
    try:
        yield mesh
    finally:
        dist.destroy_process_group()
