"""Training steps of examples/train_lm.py at a long sequence: one process, and FSDP2 with context parallelism on more.

Each count of processes trains the same steps on the same text, started as a user starts it: weights sharded over all of
them, each sequence shared by all of them. Times are medians of a step but the first, memory is PyTorch's peak in the
first process, and losses are compared with those of one process. Ideal is one process's time over their number.

    python benchmarks/train_lm.py [--processes 1,2] [--device cpu] [--quick] [--data FOLDER] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.environment import environment, in_file_names
from harness.processes import torchrun
from harness.report import print_table, write_json

PROGRAM = Path(__file__).parent.parent / "examples" / "train_lm.py"
SIZES = {"seq_length": 131072, "layers": 4, "hidden_size": 2048, "heads": 16}
QUICK = {"seq_length": 1024, "layers": 2, "hidden_size": 64, "heads": 2}
OF_IDEAL = 0.85
# Losses of bfloat16 steps in which sums have other orders.
LOSS_ERROR = 2e-3


def run(processes: int, options: argparse.Namespace, sizes: dict[str, int], folder: Path) -> dict[str, Any]:
    out = folder / str(processes)
    command = [sys.executable, str(PROGRAM)]
    if processes > 1:
        command = [*torchrun(processes), str(PROGRAM), "--distributed=fsdp", f"--context-parallel={processes}"]
    fixed = {"batch_size": 1, "steps": options.steps, "held_out_batches": 1, "warmup_steps": 1, "sample_tokens": 0}
    command += [f"--{name.replace('_', '-')}={value}" for name, value in {**sizes, **fixed}.items()]
    command += [f"--device={options.device}", f"--out={out}", f"--cache-dir={folder / 'cache'}"]
    command += ["--loss=fusegrad-inplace", "--attention=fusegrad", f"--positions={options.positions}"]
    command += ["--learning-rate=3e-4"]
    command += ["--dtype=bf16"] if options.device == "cuda" else []
    command += [f"--data={options.data}"] if options.data else []
    subprocess.run(command, check=True)
    report = json.loads((out / "fusegrad-inplace.json").read_text())
    return {
        "ms": 1e3 * statistics.median(report["step_seconds"][1:]),
        "step_ms": [1e3 * seconds for seconds in report["step_seconds"]],
        "peak_mib": report["peak_memory_bytes"] / 2**20,
        "losses": [*report["train_losses"], report["held_out_after"]],
    }


def goals(found: dict[int, dict[str, Any]], device: str) -> list[dict[str, Any]]:
    made = []
    for processes, one in found.items():
        if "of_ideal" in one and device == "cuda":  # a CPU's processes share its cores
            share = one["of_ideal"]
            text = f"{processes} processes: {100 * share:.1f}% of ideal >= {100 * OF_IDEAL:g}%"
            made.append({"goal": text, "passed": share >= OF_IDEAL})
        if "loss_error" in one:
            error = one["loss_error"]
            text = f"{processes} processes: error of the losses: {error:.2g} <= {LOSS_ERROR:g}"
            made.append({"goal": text, "passed": error <= LOSS_ERROR})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of a long sequence, on one process and on more.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", help="counts (default: 1, 2, 4, ... as far as there are GPUs)")
    parser.add_argument("--positions", choices=("embedding", "relative", "alibi"), default="relative")
    parser.add_argument("--seq-length", type=int, help="tokens of the one sequence of a step")
    parser.add_argument("--steps", type=int, default=6)
    quick = "a small model and sequence (default: on the CPU)"
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, help=quick)
    parser.add_argument("--data", type=Path, help="as train_lm.py's; twenty sequences and more")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, of which the first is not timed, but got {options.steps}")
    available = torch.cuda.device_count() if options.device == "cuda" else 2
    counts = [int(count) for count in options.processes.split(",")] if options.processes else [1, 2, 4, 8]
    counts = [count for count in counts if options.processes or count <= available]
    small = options.device == "cpu" if options.quick is None else options.quick
    sizes = dict(QUICK if small else SIZES)
    if options.seq_length:
        sizes["seq_length"] = options.seq_length

    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            found[count] = run(count, options, sizes, Path(folder))
    alone = found.get(1)
    for count, one in found.items():
        if alone is not None and count > 1:
            one["of_ideal"] = alone["ms"] / count / one["ms"]
            pairs = zip(one["losses"], alone["losses"], strict=True)
            one["loss_error"] = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    judged = goals(found, options.device)
    rows = []
    for count, one in found.items():
        share = f"{100 * one['of_ideal']:.1f}%" if "of_ideal" in one else ""
        error = f"{one['loss_error']:.2g}" if "loss_error" in one else ""
        rows.append([str(count), f"{one['ms']:.5g}", f"{one['peak_mib']:.0f}", share, error])
    print_table(["processes", "ms a step", "MiB a process", "of ideal", "error of losses"], rows)
    for goal in judged:
        print(f"  {'pass' if goal['passed'] else 'MISS'}  {goal['goal']}")
    if options.output is not None:
        document = {"op": "train_lm", "positions": options.positions, "sizes": sizes, "goals": judged}
        document |= environment(options.device, options.commit) | {"processes": found}
        write_json(options.output / f"train_lm-{in_file_names(document['device'])}.json", document)


if __name__ == "__main__":
    main()
