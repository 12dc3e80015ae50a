"""Trains a small trunk on proteins: from a fifth of the distances between residues to all of them.

    python examples/folding.py                      # fusegrad, dense attention, and no triangles; a picture in demo/
    python examples/folding.py --attention fusegrad

Needs the structures in OpenFold 3's wheel (`pip install --no-deps openfold3`). See docs/learned_biases.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from protein.data import BINS, WIDTH, Batch, Chain, crop, load_chains
from protein.model import ATTENTIONS, Trunk, loss_of
from torch import Tensor

Report = dict[str, Any]
RUNS = {"fusegrad": ("fusegrad", True), "dense": ("dense", True), "no triangles": ("fusegrad", False)}
HELD_OUT = ("1ubq", "3u8v", "4i6p", "4zey")  # structures that no run learns from


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        chains = load_chains(options.residues)
    except ImportError as error:
        print(f"folding: needs openfold3's structures ({error}); pip install --no-deps openfold3", file=sys.stderr)
        return 2
    train = [c for c in chains if c.name not in HELD_OUT]
    test = [c for c in chains if c.name in HELD_OUT]
    print(f"{len(train)} chains to learn from, {len(test)} held out")
    reports = []
    for name in [options.attention] if options.attention else list(RUNS):
        report = train_model(name, train, test, options)
        reports.append(report)
        print(f"{name:12s} off by {report['error'][-1]:.2f} Å, {1e3 * report['step_seconds']:.1f} ms a step")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "folding.json").write_text(json.dumps(reports, indent=1))
    draw(reports, options.out / "folding.png")
    print(f"wrote {options.out / 'folding.png'}")
    return check(reports) if not options.attention else 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", choices=tuple(RUNS), help="one run alone (default: all, and compare them)")
    parser.add_argument("--residues", type=int, default=24, help="the most that a crop has")
    parser.add_argument("--given", type=float, default=0.2, help="share of the distances that are told")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    return parser.parse_args(arguments)


def expected(logits: Tensor) -> Tensor:
    """The mean of the predicted distances, in Å."""
    middles = (torch.arange(BINS, device=logits.device) + 0.5) * WIDTH
    return logits.softmax(-1) @ middles


def error(model: Trunk, implementation: str, batches: list[Batch], device: str) -> float:
    """By how many Å predictions are off, of the distances that were asked for."""
    total = pairs = 0.0
    with torch.no_grad():
        for batch in (b.to(device) for b in batches):
            found = expected(model(batch, ATTENTIONS[implementation]))
            off = (found - (batch.distances + 0.5) * WIDTH).abs()[batch.pairs]
            total, pairs = total + float(off.sum()), pairs + off.numel()
    return total / pairs


def train_model(name: str, train: list[Chain], test: list[Chain], options: argparse.Namespace) -> Report:
    """Trains by the cross entropy of distances, from the seed: every run sees the same crops in the same order."""
    implementation, triangles = RUNS[name]
    torch.manual_seed(options.seed)
    model = Trunk(options.blocks, options.width, options.heads, triangles).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    generator = torch.Generator().manual_seed(options.seed)
    sizes = options.batch_size, options.residues, options.given
    held_out = [crop(test, *sizes, torch.Generator().manual_seed(1000 + i)) for i in range(4)]
    losses, seconds, errors, at = [], [], [], []
    for step in range(options.steps):
        began = time.perf_counter()
        batch = crop(train, *sizes, generator).to(options.device)
        loss = loss_of(model(batch, ATTENTIONS[implementation]), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        if (step + 1) % max(options.steps // 12, 1) == 0 or step + 1 == options.steps:
            errors.append(error(model, implementation, held_out, options.device))
            at.append(step + 1)
    example = crop(test[:1], 1, *sizes[1:], torch.Generator().manual_seed(7))
    with torch.no_grad():
        found = expected(model(example.to(options.device), ATTENTIONS[implementation]))[0].cpu()
    n = int(example.there.sum())
    return {
        "name": name,
        "train_losses": losses,
        "error": errors,
        "at": at,
        "step_seconds": statistics.median(seconds),
        "example": {
            "asked": example.pairs[0, :n, :n].tolist(),
            "true": ((example.distances[0, :n, :n] + 0.5) * WIDTH).tolist(),
            "given": (example.given[0, :n, :n] != BINS).tolist(),
            "found": found[:n, :n].tolist(),
        },
    }


def check(reports: list[Report]) -> int:
    """0 if fusegrad reached what dense attention reached, and both less than the model without triangles."""
    ours, dense, blind = (report["error"][-1] for report in reports)
    if ours > 1.1 * dense + 0.05 or max(ours, dense) > 0.75 * blind:
        told = f"fusegrad (off by {ours:.2f} Å) as good as dense ({dense:.2f} Å)"
        print(f"folding: expected {told}, both better than without triangles ({blind:.2f} Å)", file=sys.stderr)
        return 1
    return 0


def draw(reports: list[Report], path: Path) -> None:
    """Errors by step, and the distances of a crop: given, as they are, and as the first run sees them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (errors, *maps) = plt.subplots(1, 4, figsize=(18, 4), layout="constrained")
    for report in reports:
        style = "--" if report["name"] == "dense" else "-"
        errors.plot(report["at"], report["error"], label=report["name"], linestyle=style)
    errors.set(title="Distances of chains held out", xlabel="step", ylabel="off by, Å")
    errors.legend()
    example = reports[0]["example"]
    true, told = torch.tensor(example["true"]), torch.tensor(example["given"])
    found = torch.where(torch.tensor(example["asked"]), torch.tensor(example["found"]), torch.nan)
    shown = (torch.where(told, true, torch.nan), true, found)
    for axes, values, title in zip(maps, shown, ("that are given", "as they are", "as predicted"), strict=True):
        image = axes.imshow(values.tolist(), cmap="viridis", vmin=0, vmax=float(true.max()))
        axes.set(title=f"Distances {title}", xlabel="residue", ylabel="residue")
    figure.colorbar(image, ax=maps, label="Å")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
