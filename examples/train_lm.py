"""Trains a small GPT on real text with PyTorch's cross entropy or with fusegrad's.

    python examples/train_lm.py --loss fusegrad-inplace
    python examples/train_lm.py --loss fusegrad-inplace --resume
    python examples/train_lm.py --demo
    torchrun --nproc-per-node 2 examples/train_lm.py --loss fusegrad-inplace --distributed fsdp
    torchrun --nproc-per-node 2 examples/train_lm.py --attention fusegrad --distributed fsdp --context-parallel 2

The text is Python's own standard library unless --data names a file or a folder. --demo trains with every
loss from one seed, each in a process of its own, and compares them. See examples/README.md.
"""

import argparse
import sys

import torch
from lm import ExampleError
from lm.data import Corpus, load_corpus
from lm.demo import TRAINING, demo_preset, run_demo
from lm.measure import PeakMemory
from lm.program import add_training_options, config_from, make_parser, parse_with_preset, run_program, train_and_report
from lm.training import Trainer, TrainingConfig


def main(arguments: list[str] | None = None) -> int:
    return run_program("train_lm", run, parse_options(arguments))


def run(options: argparse.Namespace) -> int:
    if options.demo and options.distributed:
        raise ExampleError("--demo must come without --distributed")
    if options.context_parallel != 1 and not options.distributed:
        raise ExampleError("--context-parallel needs --distributed ddp or fsdp")
    return run_demo(TRAINING, options) if options.demo else train(options)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    defaults = TrainingConfig()
    parser = make_parser((__doc__ or "").partition("\n")[0], defaults)
    add_training_options(parser, defaults)
    parser.add_argument(
        "--distributed",
        choices=("ddp", "fsdp"),
        help="many processes, with whole weights or sharded ones; start it with torchrun",
    )
    parser.add_argument(
        "--context-parallel", type=int, default=1, help="processes that share each sequence; the others share the batch"
    )
    return parse_with_preset(parser, arguments, demo_preset)


def train(options: argparse.Namespace) -> int:
    config = config_from(options, TrainingConfig)
    corpus = load_corpus(options.data, options.vocab_size, options.cache_dir)
    # Before the model is built, so that its weights count, and after the text was read, which does not.
    memory = PeakMemory(torch.device(config.device))
    status = train_and_report(make_trainer(config, corpus, options), memory, options, config.loss)
    if options.distributed is not None:
        torch.distributed.destroy_process_group()
    return status


def make_trainer(config: TrainingConfig, corpus: Corpus, options: argparse.Namespace) -> Trainer:
    if options.distributed is None:
        return Trainer(config, corpus)
    from lm.distributed import DistributedTrainer  # torch.distributed's parts take a while to import

    return DistributedTrainer(config, corpus, options.distributed, options.context_parallel)


if __name__ == "__main__":
    sys.exit(main())
