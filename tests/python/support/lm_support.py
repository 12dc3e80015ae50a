"""What the tests of the example programs share: tiny text, a tiny model. Makes `lm` and the programs importable."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from lm.training import StopRequest, Trainer, TrainingConfig  # noqa: E402

VOCAB_SIZE = 280
# Dropout makes the random state matter, and an epoch of a few batches makes a resumed run cross its end.
CONFIG = TrainingConfig(
    steps=12,
    batch_size=2,
    seq_length=16,
    layers=1,
    hidden_size=16,
    heads=2,
    dropout=0.1,
    warmup_steps=2,
    held_out_batches=2,
)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Keeps the global random state; one thread, since on tiny tensors two wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def write_text(folder: Path) -> Path:
    for index in range(4):
        lines = (f"def function_{line}(a, b):\n    return a * {line} + b\n" for line in range(index, index + 6))
        (folder / f"file_{index}.py").write_text("".join(lines))
    return folder


def run_steps(trainer: Trainer, until: int, checkpoint: Path | None = None) -> Trainer:
    with StopRequest() as stop:
        trainer.train(until, stop, checkpoint, checkpoint_every=0)
    return trainer


def command_line(text_folder: Path, tmp_path: Path, *more: str) -> list[str]:
    names = (
        "steps",
        "batch_size",
        "seq_length",
        "layers",
        "hidden_size",
        "heads",
        "dropout",
        "held_out_batches",
    )
    sizes = [f"--{name.replace('_', '-')}={getattr(CONFIG, name)}" for name in names]
    folders = [f"--data={text_folder}", f"--cache-dir={tmp_path / 'cache'}", f"--out={tmp_path / 'out'}"]
    return [*sizes, *folders, f"--vocab-size={VOCAB_SIZE}", "--device=cpu", "--sample-tokens=4", *more]
