"""Turns of rows that benchmarks/run_all.py compiles at once: a row is timed when all of them are compiled, and while no
other uses its GPU."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

# The environment variable that names a folder. Its files say who is ready, that timing may begin, and whose turn it is.
FOLDER = "BENCHMARK_TURNS"
READY, GO = "ready", "go"
_held: list[IO[str]] = []  # the lock, until the process ends


def take_turn(release: Callable[[], object] = lambda: None) -> None:
    """Waits for the process's turn before it times anything. Returns at once where run_all.py did not start it.

    release: gives back memory that the process does not use while it waits.

    Raises:
        RuntimeError: run_all.py ended before timing began.
    """
    folder = os.environ.get(FOLDER)
    if folder is None or _held:
        return
    release()
    turns, parent = Path(folder), os.getppid()
    (turns / READY / str(os.getpid())).touch()
    while not (turns / GO).exists():
        if os.getppid() != parent:
            raise RuntimeError("run_all.py has ended, and nobody says that timing may begin")
        time.sleep(0.1)
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "cpu")
    _held.append((turns / f"turn-{gpu}").open("w"))
    fcntl.flock(_held[0], fcntl.LOCK_EX)


class Turns:
    """The parent's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / READY).mkdir(parents=True)

    def ready(self) -> set[int]:
        """Ids of the processes that have compiled."""
        return {int(one.name) for one in (self.folder / READY).iterdir()}

    def begin(self) -> None:
        (self.folder / GO).touch()
