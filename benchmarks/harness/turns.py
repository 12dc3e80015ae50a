"""Turns of rows that benchmarks/run_all.py compiles at once. A row's process stops before it times anything, and
continues when all of them have compiled and no other row uses its GPU. The threads of a stopped process, those of
compilers and XLA among them, take no core from the row that is timed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

PARENT = "BENCHMARK_TURNS"  # the environment variable that names run_all.py's process
_taken = False


def take_turn(release: Callable[[], object] = lambda: None) -> None:
    """Waits for the process's turn before it times anything. Returns at once where run_all.py did not start it.

    release: gives back memory that the process does not use while it waits.
    """
    global _taken
    if _taken or os.environ.get(PARENT) != str(os.getppid()):
        return
    _taken = True
    release()
    os.kill(os.getpid(), signal.SIGSTOP)


def waits(pid: int) -> bool:
    """Whether a child, which has not ended, waits for its turn."""
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def give(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
