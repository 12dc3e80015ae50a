"""All benchmarks. Rows are compiled at once, in a process each, and timed one after the other.

Compilers take minutes for a row, and its times milliseconds. So the processes of a wave compile beside one another,
wait until all have (harness/turns.py), and each is timed when no other uses its GPU. What times itself in another way,
or uses all GPUs, runs alone behind the waves. Each row is printed when it ends. One that fails, or does not compile in
time, is named at the end, and the exit status is 1.

Results are merged into the files of --output: a case of another commit than most keeps its own (harness/merging.py).
What had times there and has none now is named too.

    python benchmarks/run_all.py [--device cpu] [--only 'jsd|learned'] [--gpus 0,1] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import smaller_gpus, turns
from harness.merging import merge_files

HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ)  # before scripts are imported: JAX's keep torch out of their process
OF_ROWS = ("learned_biases", "folding", "transforms", "double_backward", "jax_attention")
OF_CASES = (
    "flex_attention",
    "cross_entropy",
    "jsd",
    "linear_jsd",
    "linear_cross_entropy",
    "token_log_prob",
    "train_step",
    "biased_models",
)
ALONE = ("block_mask", "batch_invariant", "linear_products", "host_time", "stacks")
ALL_GPUS = ("context_parallel", "vocab_parallel", "jax_devices", "train_lm")
# Rows at once on a GPU, by what they hold while they wait; 1 where nothing is said.
ROOM = 24
HOLDS = {"linear_cross_entropy": 4, "linear_jsd": 6, "token_log_prob": 4, "jax_attention": 3, "transforms": 3,
         "train_step": 12, "biased_models": 6}  # fmt: skip
HOST = re.compile(r"^host ")  # rows whose time is the host's: alone


@dataclass(frozen=True)
class Job:
    """A process: a row of a script, or all of it."""

    script: str
    row: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.script} {self.row}".strip()

    @property
    def holds(self) -> int:
        return HOLDS.get(self.script, 1)

    @property
    def alone(self) -> bool:
        return self.script in (*ALONE, *ALL_GPUS) or bool(HOST.match(self.row))


@dataclass
class Wave:
    """Jobs that compile at once, by GPU."""

    by_gpu: dict[str, list[Job]] = field(default_factory=dict)

    def take(self, job: Job, gpus: Sequence[str], room: int) -> bool:
        """Whether it is in: on the GPU that holds least."""
        held = {gpu: sum(one.holds for one in self.by_gpu.get(gpu, [])) for gpu in gpus}
        gpu = min(gpus, key=lambda one: held[one])
        if held[gpu] and held[gpu] + job.holds > room:
            return False
        self.by_gpu.setdefault(gpu, []).append(job)
        return True


def jobs(device: str) -> Iterator[Job]:
    """All rows of all scripts, and the scripts that have none."""
    for script in OF_CASES:
        for number, plan in enumerate(importlib.import_module(script).BENCHMARK.plans(device, False)):
            yield Job(script, f"{plan.case.op} {plan.case.label}", ("--case", str(number)))
    for script in OF_ROWS:
        if needs_jax(script):
            continue
        module = importlib.import_module(script)
        for row in module.CUDA_ROWS if device == "cuda" else module.CPU_ROWS:
            yield Job(script, row.label, ("--rows", f"^{re.escape(row.label)}$"))
    if device == "cuda":
        for small in smaller_gpus.ROWS:
            arguments = ("--family", "portable", "--rows", f"^{re.escape(small.label)}$")
            yield Job("flex_attention", f"portable, {small.label}", arguments)
    for script in (*ALONE, *ALL_GPUS):
        if not needs_jax(script):
            yield Job(script)


def needs_jax(script: str) -> bool:
    """Whether it is left out, which is said."""
    left_out = script.startswith("jax_") and importlib.util.find_spec("jax") is None
    if left_out:
        print(f"Left out: {script}, which needs JAX (pip install jax)", file=sys.stderr)
    return left_out


def waves(found: Sequence[Job], gpus: Sequence[str], room: int) -> list[Wave]:
    made: list[Wave] = []
    for job in found:
        if not made or not made[-1].take(job, gpus, room):
            made.append(Wave())
            made[-1].take(job, gpus, room)
    return made


class Runner:
    def __init__(self, options: argparse.Namespace, more: Sequence[str], folder: Path) -> None:
        self.options = options
        self.more = [*more, "--device", options.device] + (["--commit", options.commit] if options.commit else [])
        self.folder = folder
        self.failed: list[str] = []
        self.lost: list[str] = []

    def start(self, job: Job, gpu: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        place = self.folder / re.sub(r"[^a-z0-9]+", "-", f"{job.name} {gpu}".lower())
        place.mkdir()
        devices = {"CUDA_VISIBLE_DEVICES": gpu} if self.options.device == "cuda" else {}
        return subprocess.Popen(
            [sys.executable, str(HERE / f"{job.script}.py"), *job.arguments, *self.more, "--output", str(place)],
            env={**ENVIRONMENT, **devices, **environment},
            stdin=subprocess.DEVNULL,
            stdout=(place / "log.txt").open("w"),
            stderr=subprocess.STDOUT,
            cwd=place,
            text=True,
        )

    def ended(self, job: Job, process: subprocess.Popen[str], why: str = "") -> None:
        place = Path(str(process.args[-1]))  # type: ignore[index]
        print(f"\n=== {job.name}\n{(place / 'log.txt').read_text().rstrip()}", flush=True)
        if process.returncode != 0:
            why = why or f"exit status {process.returncode}"
        for path in place.glob("*.json"):
            raised = [case["failure"] for case in json.loads(path.read_text()).get("cases", []) if "failure" in case]
            why = why or "; ".join(raised)
        if why:
            self.failed.append(f"{job.name}: {why}")
        elif self.options.output is not None:
            self.lost += merge_files(place, self.options.output)

    def wave(self, wave: Wave, number: int) -> None:
        turn = turns.Turns(self.folder / f"turns-{number}")
        # Compilers of a process are many by themselves.
        environment = {turns.FOLDER: str(turn.folder), "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
        if self.options.device == "cpu":
            environment = {turns.FOLDER: str(turn.folder)}
        running = [(job, self.start(job, gpu, environment)) for gpu, all_ in wave.by_gpu.items() for job in all_]
        try:
            self.watch(running, turn)
        finally:
            for _, process in running:
                process.kill()

    def watch(self, running: list[tuple[Job, subprocess.Popen[str]]], turn: turns.Turns) -> None:
        """Until all have ended, which leaves none."""
        late: set[int] = set()
        began, limit = False, time.monotonic() + self.options.patience
        while running:
            if not began:
                waiting = [one for _, one in running if one.pid not in turn.ready() and one.poll() is None]
                if waiting and time.monotonic() > limit:
                    late |= {one.pid for one in waiting}
                    for one in waiting:
                        one.kill()
                        one.wait()
                    waiting = []
                if not waiting:
                    turn.begin()
                    began = True
            for job, process in list(running):
                if process.poll() is not None:
                    why = f"did not compile in {self.options.patience} s" if process.pid in late else ""
                    self.ended(job, process, why)
                    running.remove((job, process))
            time.sleep(0.1)

    def alone(self, job: Job, gpus: Sequence[str]) -> None:
        process = self.start(job, ",".join(gpus) if job.script in ALL_GPUS else gpus[0], {})
        process.wait()
        self.ended(job, process)


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="All benchmarks; other options go to each of them.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--only", default="", help="regular expression on '<script> <row>'")
    parser.add_argument("--gpus", default="0", help="those to use, by number: 0,1")
    parser.add_argument("--room", type=int, default=ROOM, help="rows that wait on a GPU at once")
    parser.add_argument("--patience", type=int, default=600, help="seconds in which a wave's rows must compile")
    parser.add_argument("--output", type=Path, help="folder whose JSON the results are merged into")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    parser.add_argument("--list", action="store_true", help="print what would run")
    options, more = parser.parse_known_args()
    if options.output is not None:
        options.output = options.output.absolute()
    gpus = options.gpus.split(",") if options.device == "cuda" else ["cpu"]
    found = [job for job in jobs(options.device) if re.search(options.only, job.name)]
    if options.list:
        print("\n".join(job.name for job in found))
        return 0
    if not found:
        parser.error(f"--only: must match a benchmark, see --list, but got {options.only!r}")
    # Cores that compile would disturb what is timed on them.
    room = options.room if options.device == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(options, more, Path(folder))
        for number, wave in enumerate(waves([job for job in found if not job.alone], gpus, room)):
            runner.wave(wave, number)
        for job in found:
            if job.alone:
                runner.alone(job, gpus)
    for what, names in (("FAILED", runner.failed), ("no time any more", runner.lost)):
        for name in names:
            print(f"{what}: {name}", file=sys.stderr)
    return int(bool(runner.failed))


if __name__ == "__main__":
    sys.exit(main())
