"""What the example programs share: their options, a run from start to report, and how they end."""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from lm import ExampleError
from lm.attention import ATTENTIONS, POSITIONS
from lm.data import default_cache_dir
from lm.demo import describe_parts
from lm.measure import PeakMemory
from lm.model import LOSSES, generate
from lm.training import StopRequest, Trainer, TrainingConfig

INTERRUPTED = 130

Config = TypeVar("Config", bound=TrainingConfig)


def run_program(name: str, run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The exit code of `run`; an error the user can put right, and Ctrl-C, become one line."""
    try:
        return run(options)
    except ExampleError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; no new checkpoint was written", file=sys.stderr)
        return INTERRUPTED


def make_parser(description: str, defaults: TrainingConfig) -> argparse.ArgumentParser:
    """Every option of data and run, and `--demo`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="compare the losses; see examples/README.md")

    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="a text file or a folder (default: the standard library)")
    data.add_argument("--vocab-size", type=int, default=32000, help="entries of the BPE vocabulary")
    data.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where token ids are kept")

    run = parser.add_argument_group("run")
    run.add_argument("--loss", choices=LOSSES, default=defaults.loss)
    run.add_argument("--attention", choices=ATTENTIONS, default=defaults.attention)
    run.add_argument("--positions", choices=POSITIONS, default=defaults.positions, help="embedding, or a learned bias")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--dtype", choices=("fp32", "bf16"), default=defaults.dtype, help="bf16 is autocast")
    add_switch(run, "--compile", defaults.compile, "torch.compile the model and its loss")
    add_switch(run, "--deterministic", defaults.deterministic, "bit-exact repeats on a GPU too")
    run.add_argument("--seed", type=int, default=defaults.seed)
    run.add_argument("--out", type=Path, default=Path("demo"), help="folder of checkpoint, report and picture")
    run.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    run.add_argument("--checkpoint-every", type=int, default=500, help="steps; 0: only at the end and on Ctrl-C")
    run.add_argument("--prompt", default="def ", help="the text that the sample continues")
    run.add_argument("--sample-tokens", type=int, default=80, help="length of the sample; 0: none")
    return parser


def add_training_options(
    parser: argparse.ArgumentParser, defaults: TrainingConfig, without: frozenset[str] = frozenset()
) -> None:
    group = parser.add_argument_group("model and training")
    for name in (
        "steps",
        "batch_size",
        "seq_length",
        "layers",
        "hidden_size",
        "heads",
        "dropout",
        "learning_rate",
        "warmup_steps",
        "weight_decay",
        "gradient_clip",
        "held_out_batches",
    ):
        if name not in without:
            default = getattr(defaults, name)
            group.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help=" ")
    add_switch(group, "--tied", defaults.tied, "the head uses the token embedding's weight")


def add_switch(group: argparse._ArgumentGroup, option: str, default: bool, text: str) -> None:
    group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)


def parse_with_preset(
    parser: argparse.ArgumentParser, arguments: list[str] | None, preset: Callable[[str], dict[str, Any]]
) -> argparse.Namespace:
    """The options; with `--demo`, those not given are the preset's for the device."""
    known, _ = parser.parse_known_args(arguments)
    if known.demo:
        parser.set_defaults(**preset(known.device))
    return parser.parse_args(arguments)


def config_from(options: argparse.Namespace, kind: type[Config]) -> Config:
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})


def train_and_report(trainer: Trainer, memory: PeakMemory, options: argparse.Namespace, stem: str) -> int:
    """Trains to the last step; writes `<out>/<stem>.pt` and `.json`. 0, or INTERRUPTED."""
    config, corpus = trainer.config, trainer.corpus
    checkpoint = options.out / f"{stem}.pt"
    if options.resume:
        trainer.resume(checkpoint)
    summary = (
        f"{config.loss}: {count_parameters(trainer.model) / 1e6:.1f} M parameters, vocabulary "
        f"{corpus.vocab_size}, {corpus.train.numel() / 1e6:.2f} M training tokens, "
        f"{corpus.held_out.numel() / 1e6:.2f} M held out"
    )
    if trainer.main:
        print(summary)
    first_step = trainer.step
    held_out_before = trainer.held_out_loss()
    with StopRequest() as stop:
        trainer.train(config.steps, stop, checkpoint, options.checkpoint_every)
    if trainer.step < config.steps:
        print(f"stopped at step {trainer.step}; saved {checkpoint}; add --resume to go on", file=sys.stderr)
        return INTERRUPTED
    report = {
        "loss": config.loss,
        "config": dataclasses.asdict(config),
        "description": config.describe(),
        "held_out_before": held_out_before,
        "held_out_after": trainer.held_out_loss(),
        "held_out_parts": trainer.held_out_parts(),
        "train_losses": trainer.history.losses,
        "step_seconds": trainer.history.seconds,
        "tokens_per_second": tokens_per_second(trainer, first_step),
        "peak_memory_bytes": memory.bytes(),
        "sample": sample_text(trainer, options.prompt, options.sample_tokens),
    }
    if not trainer.main:
        return 0
    print_report(report)
    (options.out / f"{stem}.json").write_text(json.dumps(report, indent=1))
    return 0


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tokens_per_second(trainer: Trainer, first_step: int) -> float:
    """From the median step of this process: the first one warms up, and other programs may disturb some."""
    seconds = trainer.history.seconds[first_step:]
    if not seconds:
        return 0.0
    return trainer.config.batch_size * trainer.config.seq_length / statistics.median(seconds)


def sample_text(trainer: Trainer, prompt: str, count: int) -> str:
    tokenizer = trainer.corpus.tokenizer
    prompt_tokens = tokenizer.encode(prompt).ids
    if not prompt_tokens or count == 0:
        return ""
    tokens = generate(trainer.plain_model(), prompt_tokens, count, trainer.config.seed)
    return prompt + tokenizer.decode(tokens)


def print_report(report: dict[str, Any]) -> None:
    print(
        f"{report['loss']}: held-out loss {report['held_out_before']:.4f} -> {report['held_out_after']:.4f}"
        f"{describe_parts(report)}, "
        f"{sum(report['step_seconds']):.1f} s, {report['tokens_per_second']:.0f} tokens/s, "
        f"peak memory {report['peak_memory_bytes'] / 2**20:.0f} MiB"
    )
    if report["sample"]:
        print(f"sample:\n{report['sample']}\n")
