"""Trains a small Gemma 2 of random weights with the Trainer, its loss and its attention fusegrad's.

    python examples/transformers_train.py [--device cuda] [--steps 60]

The text is the source of Python's standard library, byte by byte, several snippets packed into one row. The plain model
is trained beside it from the same weights; at the end the program compares losses and the gradients of one more batch.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from fusegrad.integrations.transformers import apply
from torch import Tensor
from torch.utils.data import Dataset

LENGTH, BATCH = 128, 8


class Packed(Dataset):
    """Rows of three snippets. Positions that begin again say where one ends: none attends to another."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        lengths = (40, 56, LENGTH - 96)
        starts = torch.randint(0, len(self.text) - LENGTH, (3,), generator=random).tolist()
        snippets = [self.text[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        labels = [torch.cat([torch.tensor([-100]), s[1:]]) for s in snippets]  # none predicts the next one's first byte
        positions = torch.cat([torch.arange(n) for n in lengths])
        return {"input_ids": torch.cat(snippets), "labels": torch.cat(labels), "position_ids": positions}


def make_model(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        max_position_embeddings=LENGTH,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attn_implementation=attention,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def run(model: Any, device: str, steps: int) -> list[float]:
    """The losses that the Trainer logs."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=device == "cpu",
            dataloader_pin_memory=device != "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Packed())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(device: str, steps: int) -> list[float]:
    """The loss of each step."""
    model, plain = make_model("fusegrad"), make_model("eager")
    apply(model)  # the loss; attn_implementation="fusegrad" was the attention
    losses, expected = run(model, device, steps), run(plain, device, steps)
    for step in range(0, steps, max(1, steps // 10)):
        print(f"step {step:4}  loss {losses[step]:.4f}, of the plain model {expected[step]:.4f}")

    plain.load_state_dict(model.state_dict())
    batch = {name: value.unsqueeze(0).to(device) for name, value in Packed()[0].items()}
    for each in (model, plain):
        each.zero_grad()
        each(**batch).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    print("All gradients are the plain model's.")
    out = model(**batch)
    print(f"outputs.logits: {out.logits!r}")
    with torch.no_grad():
        right = out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
        print(f"accuracy on the batch, for which they are computed: {right.float().mean():.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    train(args.device, args.steps)
