"""Trains with every loss from one seed, each in a process of its own, and compares what came out."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lm import ExampleError
from lm.data import load_corpus
from lm.distillation import DistillationConfig, distillation_loss
from lm.model import LOSSES, loss_function
from lm.training import TrainingConfig

Report = dict[str, Any]

# The same mathematics in another order of summation: over a few hundred float32 steps the losses drift apart
# by far less than this, and a wrong gradient drives them apart by far more.
LARGEST_DIFFERENCE = 1e-3
SMOOTHED_STEPS = 10
COLORS = {"eager": "#9aa0a6", "fusegrad": "#1f77b4", "fusegrad-inplace": "#e8710a"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a demo compares: the runs of examples/<program>.py with each loss, the first one the reference."""

    program: str
    config: type[TrainingConfig]
    losses: tuple[str, ...]
    # Raises where a loss cannot run.
    check_loss: Callable[[str], object]
    # For the held-out loss, by which every run must come down.
    smallest_fall: float
    # Reports are <out>/<prefix><loss>.json.
    prefix: str = ""
    # Options of the program beside those of its config and of every program.
    more_options: tuple[str, ...] = ()


TRAINING = Comparison("train_lm", TrainingConfig, LOSSES, loss_function, smallest_fall=2.0)
# A share of the loss is the divergence, which begins below ln 2 (beta 0.5).
DISTILLATION = Comparison(
    "distil_lm",
    DistillationConfig,
    ("eager", "fusegrad"),
    distillation_loss,
    smallest_fall=1.0,
    prefix="student-",
    more_options=("teacher",),
)

# Sizes at which the loss is most of the work and the whole demo takes a few minutes.
_PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {"steps": 30, "batch_size": 6, "seq_length": 128, "layers": 2, "learning_rate": 2e-3},
    "cuda": {"steps": 300, "batch_size": 16, "seq_length": 512, "hidden_size": 256, "learning_rate": 1.5e-3},
}


def demo_preset(device: str) -> dict[str, Any]:
    """The demo's training options on this device; options given on the command line override them."""
    return _PRESETS["cuda" if torch.device(device).type == "cuda" else "cpu"]


def distillation_preset(device: str) -> dict[str, Any]:
    """The same for distillation, with fewer batches: eager's take several times as long."""
    preset = demo_preset(device)
    return {
        **preset,
        "steps": preset["steps"] * 3 // 5,
        "held_out_batches": 3,
        # A narrower model bears more.
        "learning_rate": 2 * preset["learning_rate"],
        "teacher_steps": preset["steps"],
        "hidden_size": preset.get("hidden_size", TrainingConfig.hidden_size) // 2,
    }


def run_demo(comparison: Comparison, options: argparse.Namespace) -> int:
    """0 where the losses agree and fell; 1 where not; what an interrupted run returned."""
    check_requirements(comparison)
    start = time.perf_counter()
    load_corpus(options.data, options.vocab_size, options.cache_dir)
    print(f"vocabulary and token ids: {time.perf_counter() - start:.1f} s", flush=True)
    reports = []
    for loss in comparison.losses:
        code = run_child(
            child_command(comparison.program, comparison.config, options, comparison.more_options, loss=loss)
        )
        if code != 0:
            print(f"{comparison.program}: the run with --loss {loss} ended with code {code}", file=sys.stderr)
            return code
        reports.append(json.loads((options.out / f"{comparison.prefix}{loss}.json").read_text()))
    picture = options.out / f"{comparison.program}.png"
    draw(reports, picture)
    print(format_table(reports))
    print(f"\npicture: {picture}\ntotal: {time.perf_counter() - start:.0f} s")
    failures = find_failures(reports, comparison.smallest_fall)
    for failure in failures:
        print(f"{comparison.program}: {failure}", file=sys.stderr)
    if not failures:
        print(f"The held-out losses agree to {LARGEST_DIFFERENCE}.")
    return 1 if failures else 0


def check_requirements(comparison: Comparison) -> None:
    """Finds what is missing before minutes of training, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ExampleError("--demo needs the `matplotlib` package; run: pip install matplotlib") from error
    for loss in comparison.losses:
        comparison.check_loss(loss)


def child_command(
    program: str,
    config: type[TrainingConfig],
    options: argparse.Namespace,
    more_options: tuple[str, ...] = (),
    **changed: object,
) -> list[str]:
    """The command that runs a program of this folder's parent under `options`, some of them `changed`."""
    script = Path(__file__).resolve().parent.parent / f"{program}.py"
    command = [sys.executable, str(script)]
    names = [field.name for field in dataclasses.fields(config)]
    names += ["data", "vocab_size", "cache_dir", "out", "prompt", "sample_tokens", "checkpoint_every"]
    for name in (*names, *more_options):
        command += _as_arguments(name, changed[name] if name in changed else getattr(options, name))
    return command


def _as_arguments(name: str, value: object) -> list[str]:
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    # One word, so that a value may begin with a dash.
    return [f"--{option}={value}"]


def run_child(command: list[str]) -> int:
    # glibc raises this threshold as it runs, and then keeps freed blocks of many MiB in a fragmented heap. A
    # fixed one makes it give them back, so that the peak of resident memory is that of the live tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20)}
    with subprocess.Popen(command, env=environment) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                # The terminal sends Ctrl-C to the child too, which saves its checkpoint and ends.
                continue


def find_failures(reports: list[Report], smallest_fall: float) -> list[str]:
    """What is wrong with the results: losses that differ from the first one's, or did not fall."""
    failures = []
    reference = reports[0]
    for report in reports:
        fall = report["held_out_before"] - report["held_out_after"]
        # Written so that NaN fails.
        if not fall >= smallest_fall:
            failures.append(
                f"{report['loss']}: the held-out loss must fall by at least {smallest_fall}, but went from "
                f"{report['held_out_before']:.4f} to {report['held_out_after']:.4f}"
            )
        difference = abs(report["held_out_after"] - reference["held_out_after"])
        if not difference <= LARGEST_DIFFERENCE:
            failures.append(
                f"{report['loss']}: the held-out loss must equal that of {reference['loss']} to "
                f"{LARGEST_DIFFERENCE}, but differs by {difference:.2g}"
            )
    return failures


def format_table(reports: list[Report]) -> str:
    parts = tuple(reports[0]["held_out_parts"])
    header = ("loss", "held-out before", "after", *parts, "time s", "tokens/s", "peak MiB")
    rows = [
        (
            report["loss"],
            f"{report['held_out_before']:.4f}",
            f"{report['held_out_after']:.4f}",
            *(f"{report['held_out_parts'][part]:.4f}" for part in parts),
            f"{sum(report['step_seconds']):.1f}",
            f"{report['tokens_per_second']:.0f}",
            f"{report['peak_memory_bytes'] / 2**20:.0f}",
        )
        for report in reports
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, tuple("-" * width for width in widths), *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def describe_parts(report: Report) -> str:
    """ " (soft 0.1, hard 5.2)", or nothing where the loss is one thing."""
    parts = ", ".join(f"{name} {value:.4f}" for name, value in report["held_out_parts"].items())
    return f" ({parts})" if parts else ""


def draw(reports: list[Report], path: Path) -> None:
    """Writes a picture: the loss by step, the loss by time, peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time, memory) = pyplot.subplots(
        1, 3, figsize=(14, 4.6), width_ratios=(1, 1, 0.8), layout="constrained"
    )
    for index, report in enumerate(reports):
        name = report["loss"]
        losses = torch.tensor(report["train_losses"], dtype=torch.float64)
        seconds = torch.tensor(report["step_seconds"], dtype=torch.float64).cumsum(0)
        steps = torch.arange(1, len(losses) + 1)
        # The curves coincide: each is drawn narrower than the one below it.
        by_step.plot(steps, losses, color=COLORS[name], label=name, linewidth=5.0 - 1.9 * index)
        by_time.plot(seconds, _running_mean(losses), color=COLORS[name], linewidth=2.2)
        by_time.plot(seconds[-1], _running_mean(losses)[-1], "o", color=COLORS[name])
    by_step.set(title="Training loss by step (curves coincide)", xlabel="step", ylabel="loss, nats per token")
    by_time.set(title=f"Training loss by time (mean of {SMOOTHED_STEPS} steps)", xlabel="seconds")
    by_step.legend(frameon=False)
    _draw_memory(memory, reports)
    for axes in (by_step, by_time):
        axes.grid(alpha=0.25)
    for axes in (by_step, by_time, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(reports[0]["description"], fontsize=10, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_memory(axes: Any, reports: list[Report]) -> None:
    names = [report["loss"] for report in reports]
    mebibytes = [report["peak_memory_bytes"] / 2**20 for report in reports]
    bars = axes.bar(names, mebibytes, color=[COLORS[name] for name in names], width=0.65)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set(title="Peak memory of training", ylabel="MiB")
    axes.margins(y=0.12)


def _running_mean(values: torch.Tensor) -> torch.Tensor:
    """The mean of each value and of those before it, up to SMOOTHED_STEPS."""
    sums = torch.cat([torch.zeros(1, dtype=values.dtype), values.cumsum(0)])
    ends = torch.arange(1, len(values) + 1)
    starts = (ends - SMOOTHED_STEPS).clamp(min=0)
    return (sums[ends] - sums[starts]) / (ends - starts)
