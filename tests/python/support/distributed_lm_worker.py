"""What torchrun starts for test_distributed_lm.py: folder of the text, folder of the results."""

import dataclasses
import json
import sys
from pathlib import Path

from lm_support import CONFIG, VOCAB_SIZE, command_line, run_steps  # isort: skip
import torch
import train_lm
from lm import data
from lm.distributed import KINDS, DistributedTrainer

STEPS, LOSS = 4, "fusegrad-inplace"
RUN = dataclasses.replace(CONFIG, steps=STEPS, dropout=0.0, loss=LOSS)
# What each kind's steps are compared with.
CONFIGS = dict.fromkeys(KINDS, RUN) | {"cp": dataclasses.replace(RUN, attention="fusegrad", positions="relative")}


def main(text: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    corpus = data.load_corpus(text, VOCAB_SIZE, folder / "cache")
    for kind, config in CONFIGS.items():
        checkpoint = folder / f"{kind}.pt"
        run_steps(DistributedTrainer(config, corpus, kind), 2, checkpoint)
        trainer = DistributedTrainer(config, corpus, kind)
        trainer.resume(checkpoint)
        run_steps(trainer, STEPS, checkpoint)
        held_out = trainer.held_out_loss()
        if trainer.main:
            (folder / f"{kind}.json").write_text(json.dumps([trainer.history.losses, held_out]))
    arguments = command_line(text, folder, f"--loss={LOSS}", "--steps=2", "--distributed=fsdp")
    assert train_lm.main(arguments) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
