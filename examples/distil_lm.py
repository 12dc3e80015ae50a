"""Distils a small GPT into one of half its width with PyTorch's operations or with fusegrad's linear_jsd.

    python examples/train_lm.py --steps 2000 --out runs/teacher
    python examples/distil_lm.py --loss fusegrad --teacher runs/teacher/eager.pt
    python examples/distil_lm.py --demo

Without --teacher, a teacher is trained first. --demo distils with eager and with fusegrad from one seed, each
in a process of its own, and compares them. See examples/README.md.
"""

import argparse
import sys
from pathlib import Path

import torch
from lm.data import load_corpus
from lm.demo import DISTILLATION, check_requirements, child_command, distillation_preset, run_child, run_demo
from lm.distillation import (
    DistillationConfig,
    DistillationTrainer,
    distillation_loss,
    load_teacher,
    teacher_hidden_size,
)
from lm.measure import PeakMemory
from lm.program import (
    add_training_options,
    config_from,
    make_parser,
    parse_with_preset,
    run_program,
    train_and_report,
)
from lm.training import TrainingConfig

# For the teacher that is trained where none is given, so that every loss distils from the same one.
TEACHER_LOSS = "eager"


def main(arguments: list[str] | None = None) -> int:
    return run_program("distil_lm", run, parse_options(arguments))


def run(options: argparse.Namespace) -> int:
    # What is wrong or missing is found before a teacher is trained, not after.
    make_config(options, TrainingConfig.hidden_size)
    if options.demo:
        check_requirements(DISTILLATION)
    else:
        distillation_loss(options.loss)
    if options.teacher is None:
        code = train_teacher(options)
        if code != 0:
            return code
        options.teacher = teacher_checkpoint(options)
    return run_demo(DISTILLATION, options) if options.demo else distil(options)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    defaults = DistillationConfig()
    parser = make_parser((__doc__ or "").partition("\n")[0], defaults)
    parser.add_argument("--teacher", type=Path, help="a checkpoint of train_lm on the same text (default: train one)")
    parser.add_argument("--teacher-steps", type=int, default=defaults.steps, help="steps where one is trained")
    group = parser.add_argument_group("distillation")
    group.add_argument("--beta", type=float, default=defaults.beta, help="0: KL(p|q), 1: KL(q|p), between: JSD")
    group.add_argument("--temperature", type=float, default=defaults.temperature, help="of student and teacher")
    group.add_argument("--soft-weight", type=float, default=defaults.soft_weight, help="of the divergence")
    group.add_argument("--hard-weight", type=float, default=defaults.hard_weight, help="of the cross entropy")
    group.add_argument("--hidden-size", type=int, help="of the student (default: half the teacher's)")
    add_training_options(parser, defaults, without=frozenset({"hidden_size"}))
    return parse_with_preset(parser, arguments, distillation_preset)


def teacher_checkpoint(options: argparse.Namespace) -> Path:
    return options.out / "teacher" / f"{TEACHER_LOSS}.pt"


def train_teacher(options: argparse.Namespace) -> int:
    """In a process of its own, whose memory does not count as distillation's."""
    width = TrainingConfig.hidden_size if options.hidden_size is None else 2 * options.hidden_size
    checkpoint = teacher_checkpoint(options)
    print("teacher:", flush=True)
    command = child_command(
        "train_lm",
        TrainingConfig,
        options,
        loss=TEACHER_LOSS,
        hidden_size=width,
        steps=options.teacher_steps,
        out=checkpoint.parent,
        sample_tokens=0,
    )
    if options.resume and checkpoint.exists():
        command.append("--resume")
    code = run_child(command)
    if code != 0:
        print(f"distil_lm: the teacher's training ended with code {code}", file=sys.stderr)
    return code


def make_config(options: argparse.Namespace, teacher_width: int) -> DistillationConfig:
    width = teacher_width // 2 if options.hidden_size is None else options.hidden_size
    return config_from(argparse.Namespace(**{**vars(options), "hidden_size": width}), DistillationConfig)


def distil(options: argparse.Namespace) -> int:
    corpus = load_corpus(options.data, options.vocab_size, options.cache_dir)
    teacher_width = teacher_hidden_size(options.teacher)
    config = make_config(options, teacher_width)
    # Before the models are built, so that their weights count, and after the text was read, which does not.
    memory = PeakMemory(torch.device(config.device))
    teacher = load_teacher(options.teacher, corpus, config)
    print(f"teacher: hidden size {teacher_width}; student: {config.hidden_size}")
    return train_and_report(DistillationTrainer(config, corpus, teacher), memory, options, f"student-{config.loss}")


if __name__ == "__main__":
    sys.exit(main())
