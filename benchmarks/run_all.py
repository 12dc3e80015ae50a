"""All benchmarks. Rows compile at once, in a process each, and are timed one after the other.

Compilers take minutes for a row, and its times milliseconds. So the processes of a wave compile beside one another and
stop until all have compiled (harness/turns.py). Then each is timed while no other uses its GPU. Scripts without rows,
and those that use all GPUs, run alone behind the waves. Each row is printed when it ends. Rows that fail, or do not
compile in time, are named at the end, and the exit status is 1.

Results are merged into the files of --output, where a case of another commit than most names its own
(harness/merging.py). Implementations that lose their times by it are named at the end too.

    python benchmarks/run_all.py [--device cpu] [--only 'jsd|learned'] [--gpus 0,1] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import smaller_gpus, turns
from harness.merging import merge_into

HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ)  # as it was before scripts are imported: those of JAX set FUSEGRAD_TORCH=0
# Beside a wave's other processes, each of which would start a compiler for every core.
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
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
# A GPU has room for so many rows of a wave, which hold memory while they wait. A row whose name matches a pattern
# counts as so many: peers that keep all pairs or all logits need much memory for their first calls.
ROOM = 24
HOLDS = {
    r"cross_entropy N\d{4}": 3,
    r"jsd N\d{4}": 8,
    r"token_log_prob": 4,
    r"jax_attention (graphormer|documents)": 12,
    r"jax_attention": 3,
    r"transforms (linear|.*4096)": 3,
    r"folding triangle (768|1024)": 6,
    r"double_backward .*(\(4, 16|16384)": 8,
    r"train_step": 24,
    r"biased_models": 4,
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HOST = re.compile(r"^host ")  # rows that time the host run alone


@dataclass(frozen=True)
class Job:
    """A row of a script, or all of the script."""

    script: str
    row: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The script and the row, or the row alone where its op has the script's name."""
        return self.row if self.row.startswith(self.script) else f"{self.script} {self.row}".strip()

    @property
    def holds(self) -> int:
        return next((holds for pattern, holds in HOLDS.items() if re.search(pattern, self.name)), 1)

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
    """Each job in the first wave that has room for it, or alone in one of its own."""
    made: list[Wave] = []
    for job in found:
        if not any(wave.take(job, gpus, room) for wave in made):
            made.append(Wave())
            made[-1].take(job, gpus, room)
    return made


def die_with_parent() -> None:
    """Called in a new process, which may stop: without its parent nobody would continue it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Running:
    job: Job
    gpus: str
    folder: Path
    process: subprocess.Popen[bytes]


class Runner:
    def __init__(self, options: argparse.Namespace, more: Sequence[str], folder: Path) -> None:
        self.options = options
        self.more = [*more, "--device", options.device] + (["--commit", options.commit] if options.commit else [])
        self.folder = folder
        self.failed: list[str] = []
        self.lost: list[str] = []

    def start(self, job: Job, gpus: str, environment: dict[str, str]) -> Running:
        folder = self.folder / re.sub(r"[^a-z0-9]+", "-", job.name.lower())
        folder.mkdir()
        devices = {"CUDA_VISIBLE_DEVICES": gpus} if self.options.device == "cuda" else {}
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / f"{job.script}.py"), *job.arguments, *self.more, "--output", str(folder)],
                env={**ENVIRONMENT, **devices, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                preexec_fn=die_with_parent,
            )
        return Running(job, gpus, folder, process)

    def ended(self, one: Running, why: str = "") -> None:
        """why: the failure, where the exit status does not tell."""
        print(f"\n=== {one.job.name}\n{(one.folder / 'log.txt').read_text().rstrip()}", flush=True)
        if one.process.returncode != 0:
            why = why or f"exit status {one.process.returncode}"
        found = {path.name: json.loads(path.read_text()) for path in sorted(one.folder.glob("*.json"))}
        cases = [case for document in found.values() for case in document.get("cases", [])]
        why = why or "; ".join(case["failure"] for case in cases if "failure" in case)
        if why:
            self.failed.append(f"{one.job.name}: {why}")
        elif self.options.output is not None:
            for name, document in found.items():
                self.lost += merge_into(self.options.output / name, document)

    def wave(self, wave: Wave) -> None:
        environment = {turns.PARENT: str(os.getpid())} | (FEW_THREADS if self.options.device == "cuda" else {})
        running = [self.start(job, gpu, environment) for gpu, all_ in wave.by_gpu.items() for job in all_]
        late: list[Running] = []
        began, limit = False, time.monotonic() + self.options.patience
        while running:
            for one in [one for one in running if one.process.poll() is not None]:
                self.ended(one, f"did not compile in {self.options.patience} s" if one in late else "")
                running.remove(one)
            waiting = [one for one in running if turns.waits(one.process.pid)]
            if not began:
                began = len(waiting) == len(running)
                if not began and time.monotonic() > limit:
                    late = [one for one in running if one not in waiting]
                    for one in late:
                        one.process.kill()
            else:
                busy = {one.gpus for one in running if one not in waiting}
                for gpu in {one.gpus for one in waiting} - busy:
                    turns.give(next(one.process.pid for one in waiting if one.gpus == gpu))
            time.sleep(0.1)

    def alone(self, job: Job, gpus: Sequence[str]) -> None:
        one = self.start(job, ",".join(gpus) if job.script in ALL_GPUS else gpus[0], {})
        one.process.wait()
        self.ended(one)


def visible(numbers: Sequence[str]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES has for the GPUs of these numbers: a row's process sees one of them alone."""
    known = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not known:
        return list(numbers)
    wrong = [n for n in numbers if not n.isdecimal() or int(n) >= len(known)]
    if wrong:
        raise ValueError(f"must be below {len(known)}, the number of CUDA_VISIBLE_DEVICES, but got {wrong[0]}")
    return [known[int(n)] for n in numbers]


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="All benchmarks; other options go to each of them.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--only", default="", help="regular expression on the names that --list prints")
    parser.add_argument("--gpus", default="0", help="those to use, by number among CUDA_VISIBLE_DEVICES: 0,1")
    parser.add_argument("--room", type=int, default=ROOM, help="rows that wait on a GPU at once")
    parser.add_argument("--patience", type=int, default=600, help="seconds in which a wave's rows must compile")
    parser.add_argument("--output", type=Path, help="folder whose JSON the results are merged into")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    parser.add_argument("--list", action="store_true", help="print what would run")
    options, more = parser.parse_known_args()
    if options.output is not None:
        options.output = options.output.absolute()
    gpus = ["cpu"]
    if options.device == "cuda":
        try:
            gpus = visible(options.gpus.split(","))
        except ValueError as error:
            parser.error(f"--gpus: {error}")
    found = [job for job in jobs(options.device) if re.search(options.only, job.name)]
    if options.list:
        print("\n".join(job.name for job in found))
        return 0
    if not found:
        parser.error(f"--only: must match a benchmark, see --list, but got {options.only!r}")
    # On the CPU compilers would take the cores on which another row is timed.
    room = options.room if options.device == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(options, more, Path(folder))
        for wave in waves([job for job in found if not job.alone], gpus, room):
            runner.wave(wave)
        for job in found:
            if job.alone:
                runner.alone(job, gpus)
    for what, names in (("FAILED", runner.failed), ("LOST ITS TIME", runner.lost)):
        for name in names:
            print(f"{what}: {name}", file=sys.stderr)
    return int(bool(runner.failed))


if __name__ == "__main__":
    sys.exit(main())
