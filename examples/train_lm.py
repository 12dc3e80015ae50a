"""Trains a small GPT on real text with PyTorch's cross entropy or with fusegrad's.

    python examples/train_lm.py --loss fusegrad-inplace
    python examples/train_lm.py --loss fusegrad-inplace --resume
    python examples/train_lm.py --demo

The text is Python's own standard library unless --data names a file or a folder. --demo trains with every
loss from one seed, each in a process of its own, and compares them. See docs/demo.md.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from lm import ExampleError
from lm.data import default_cache_dir, load_corpus
from lm.demo import demo_preset, run_demo
from lm.measure import PeakMemory
from lm.model import LOSSES, generate
from lm.training import StopRequest, Trainer, TrainingConfig

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        if options.demo:
            return run_demo(options)
        return train(options)
    except ExampleError as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_lm: interrupted; no new checkpoint was written", file=sys.stderr)
        return INTERRUPTED


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--demo", action="store_true", help="compare the losses; see docs/demo.md")

    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="a text file or a folder (default: the standard library)")
    data.add_argument("--vocab-size", type=int, default=32000, help="entries of the BPE vocabulary")
    data.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where token ids are kept")

    run = parser.add_argument_group("run")
    run.add_argument("--loss", choices=LOSSES, default=defaults.loss)
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

    training = parser.add_argument_group("model and training")
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
        default = getattr(defaults, name)
        training.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help=" ")
    add_switch(training, "--tied", defaults.tied, "the head uses the token embedding's weight")

    known, _ = parser.parse_known_args(arguments)
    if known.demo:
        parser.set_defaults(**demo_preset(known.device))
    return parser.parse_args(arguments)


def add_switch(group: argparse._ArgumentGroup, option: str, default: bool, text: str) -> None:
    group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)


def train(options: argparse.Namespace) -> int:
    config = TrainingConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainingConfig)}
    )
    checkpoint = options.out / f"{config.loss}.pt"
    corpus = load_corpus(options.data, options.vocab_size, options.cache_dir)
    # Before the model is built, so that its weights count, and after the text was read, which does not.
    memory = PeakMemory(torch.device(config.device))
    trainer = Trainer(config, corpus)
    if options.resume:
        trainer.resume(checkpoint)
    print(
        f"{config.loss}: {count_parameters(trainer.model) / 1e6:.1f} M parameters, vocabulary "
        f"{corpus.vocab_size}, {corpus.train.numel() / 1e6:.2f} M training tokens, "
        f"{corpus.held_out.numel() / 1e6:.2f} M held out"
    )
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
        "held_out_before": held_out_before,
        "held_out_after": trainer.held_out_loss(),
        "train_losses": trainer.history.losses,
        "step_seconds": trainer.history.seconds,
        "tokens_per_second": tokens_per_second(trainer, first_step),
        "peak_memory_bytes": memory.bytes(),
        "sample": sample_text(trainer, options.prompt, options.sample_tokens),
    }
    print_report(report)
    (options.out / f"{config.loss}.json").write_text(json.dumps(report, indent=1))
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
    tokens = generate(trainer.model, prompt_tokens, count, trainer.config.seed)
    return prompt + tokenizer.decode(tokens)


def print_report(report: dict[str, Any]) -> None:
    print(
        f"{report['loss']}: held-out loss {report['held_out_before']:.4f} -> {report['held_out_after']:.4f}, "
        f"{sum(report['step_seconds']):.1f} s, {report['tokens_per_second']:.0f} tokens/s, "
        f"peak memory {report['peak_memory_bytes'] / 2**20:.0f} MiB"
    )
    if report["sample"]:
        print(f"sample:\n{report['sample']}\n")


if __name__ == "__main__":
    sys.exit(main())
