"""Peak memory of one run above what was allocated before it."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.failure import Outcome
from harness.model import Case, Implementation
from harness.step import Step

if TYPE_CHECKING:
    from harness.benchmark import Options

MIB = 2**20
CHILD_SECONDS = 300
EXIT_SECONDS = 20


def cuda_peak_mib(run: Callable[[], object]) -> float:
    """What the caching allocator handed out at most during a warm run, above what was allocated before."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - base) / MIB


def cpu_peak_mib(module: str, case: Case, name: str, options: Options) -> float:
    """Peak resident memory of a warm run, in a process of its own, above that before the run.

    The process is forked from a server that has imported torch and nothing more: a fork of this one would
    inherit thread pools that do not survive forking.
    """
    context = _fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_in_child, args=(sender, module, case, name, options), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(CHILD_SECONDS):
            raise TimeoutError(f"{name}: no answer in {CHILD_SECONDS} s")
        failure, peak = receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"{name}: the measuring process died") from error
    finally:
        process.join(EXIT_SECONDS)
        process.terminate()
    if failure:
        raise RuntimeError(failure)
    return float(peak)


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


def _measure_in_child(sender: Connection, module: str, case: Case, name: str, options: Options) -> None:
    def measure() -> float:
        benchmark = importlib.import_module(module).BENCHMARK
        found = benchmark.implementations(case, options)
        chosen = next(one for one in found if isinstance(one, Implementation) and one.name == name)
        step = Step(benchmark.problem(case), chosen)
        step.run()
        step.prepare()
        return resident_peak_mib(step.run)

    outcome = Outcome(measure)
    sender.send((outcome.failure, None if outcome.failure else outcome.value))


def resident_peak_mib(run: Callable[[], object]) -> float:
    """This process's peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    base = _status_kib("VmRSS")
    run()
    return (_status_kib("VmHWM") - base) * 1024 / MIB


def _status_kib(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match.group(1))
