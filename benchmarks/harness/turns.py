"""A row's turn, where benchmarks/run_all.py compiles many at once: it is timed when all of them are compiled, and no
other uses its GPU then."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

# The environment's name of a folder, whose files say who is ready, that timing may begin, and whose turn it is.
FOLDER = "BENCHMARK_TURNS"
READY, GO = "ready", "go"
_held: list[IO[str]] = []  # until the process ends


def take_turn() -> None:
    """Called before anything is timed; returns at once where the process is not one of many."""
    folder = os.environ.get(FOLDER)
    if folder is None or _held:
        return
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
    """What the parent of the processes sees of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / READY).mkdir(parents=True)

    def ready(self) -> set[int]:
        """Ids of the processes that have compiled."""
        return {int(one.name) for one in (self.folder / READY).iterdir()}

    def begin(self) -> None:
        (self.folder / GO).touch()
