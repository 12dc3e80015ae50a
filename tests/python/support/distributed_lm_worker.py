"""What torchrun starts for test_distributed_lm.py: folder of the text, folder of the results."""

import dataclasses
import json
import sys
from pathlib import Path

from lm_support import CONFIG, VOCAB_SIZE, command_line, run_steps  # isort: skip
import torch
import train_lm
from lm import data
from lm.distributed import DistributedTrainer

STEPS, LOSS = 4, "fusegrad-inplace"
PROCESSES = 4
# What one process runs, by the attention.
ALONE = {"sdpa": dataclasses.replace(CONFIG, steps=STEPS, dropout=0.0, batch_size=PROCESSES, loss=LOSS)}
ALONE["fusegrad"] = dataclasses.replace(ALONE["sdpa"], attention="fusegrad", positions="relative")
# By name: the attention, how weights are kept, and how many processes share a sequence.
CASES = {
    "ddp": ("sdpa", "ddp", 1),
    "fsdp": ("sdpa", "fsdp", 1),
    "ddp, 2 groups": ("fusegrad", "ddp", 2),
    "fsdp, 2 groups": ("fusegrad", "fsdp", 2),
    "fsdp, 1 group": ("fusegrad", "fsdp", 4),
}


def main(text: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    corpus = data.load_corpus(text, VOCAB_SIZE, folder / "cache")
    for name, (attention, kind, context_parallel) in CASES.items():
        checkpoint = folder / f"{name}.pt"
        config = ALONE[attention]
        run_steps(DistributedTrainer(config, corpus, kind, context_parallel), 2, checkpoint)
        trainer = DistributedTrainer(config, corpus, kind, context_parallel)
        trainer.resume(checkpoint)
        run_steps(trainer, STEPS, checkpoint)
        held_out = trainer.held_out_loss()
        if trainer.main:
            (folder / f"{name}.json").write_text(json.dumps([trainer.history.losses, held_out]))
    options = ("--attention=fusegrad", "--steps=2", "--distributed=fsdp", "--context-parallel=2")
    arguments = command_line(text, folder, f"--loss={LOSS}", *options)
    assert train_lm.main(arguments) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
