"""Trains a small language model that lightning-thunder compiles, with fusegrad's losses in thunder's trace.

    python examples/thunder_train.py [--device cuda] [--steps 200] [--fused]

The text is the source of Python's standard library, byte by byte. With --fused the output layer and the loss are one
op, fusegrad.linear_cross_entropy; without, the model calls torch.nn.functional.cross_entropy, which fusegrad_ex takes
over. At the end the program prints the trace's lines that are fusegrad's, and checks the last gradients against eager
PyTorch.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import fusegrad
import thunder
import torch
import torch.nn.functional as F
from fusegrad.integrations.thunder import fusegrad_ex
from torch import Tensor, nn

BYTES, HIDDEN, LENGTH, BATCH = 256, 128, 64, 16


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, HIDDEN // self.heads)
        query, key, value = (t.transpose(1, 2) for t in (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Tokens and targets to the loss; in plain PyTorch unless `fused`."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.tokens, self.positions = nn.Embedding(BYTES, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, BYTES, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.fused:
            return fusegrad.linear_cross_entropy(x, self.head.weight, target)
        return F.cross_entropy(self.head(x).view(-1, BYTES), target.view(-1))


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def train(device: str, steps: int, fused: bool) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    text = read_text()
    model = LanguageModel(fused).to(device)
    jitted = thunder.jit(model, executors=[fusegrad_ex, *thunder.get_default_executors()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH, 1))
        batch = text[starts + torch.arange(LENGTH + 1)].to(device)
        tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss = jitted(tokens, target)
        optimizer.zero_grad()
        loss.backward()
        if step == steps - 1:
            check_against_eager(model, tokens, target)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}", flush=True)
    for trace in (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]):
        print("\n".join(line.strip() for line in str(trace).splitlines() if "fusegrad_" in line))
    return losses


def check_against_eager(model: LanguageModel, tokens: Tensor, target: Tensor) -> None:
    """The gradients that the jitted model left are those of the same model without thunder and fusegrad."""
    fused, model.fused = model.fused, False
    eager = torch.autograd.grad(model(tokens, target), list(model.parameters()))
    model.fused = fused
    for (name, parameter), gradient in zip(model.named_parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with lightning-thunder and fusegrad's losses.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fused", action="store_true", help="output layer and loss in one op")
    arguments = parser.parse_args()
    train(arguments.device, arguments.steps, arguments.fused)


if __name__ == "__main__":
    main()
