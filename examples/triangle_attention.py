"""Trains a pair-biased transformer on molecules: from bonds to distances, by triangle attention.

    python examples/triangle_attention.py                      # fusegrad, dense attention, and no biases; a picture
    python examples/triangle_attention.py --attention fusegrad

Needs RDKit (`pip install rdkit`), which brings the molecules. See examples/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from graph.data import Molecule, load_molecules
from torch import Tensor
from torch.nn import functional as F
from triangle.model import ATTENTIONS, NO_PAIR, Pairs, PairTransformer, pad

Report = dict[str, Any]
RUNS = {"fusegrad": ("fusegrad", True), "dense": ("dense", True), "no biases": ("dense", False)}


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        molecules = load_molecules(options.molecules, max_atoms=options.atoms)
    except ImportError as error:
        print(f"triangle_attention: needs RDKit ({error}); pip install rdkit", file=sys.stderr)
        return 2
    order = torch.randperm(len(molecules), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled, held_out = [molecules[i] for i in order], len(molecules) // 5
    train, test = shuffled[held_out:], shuffled[:held_out]
    print(f"{len(train)} molecules to learn from, {len(test)} held out")
    reports = []
    for name in [options.attention] if options.attention else list(RUNS):
        report = train_model(name, train, test, options)
        reports.append(report)
        print(f"{name:10s} wrong distances {report['wrong'][-1]:.2%}, {1e3 * report['step_seconds']:.1f} ms a step")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "triangle_attention.json").write_text(json.dumps(reports, indent=1))
    draw(reports, options.out / "triangle_attention.png")
    print(f"wrote {options.out / 'triangle_attention.png'}")
    return check(reports) if not options.attention else 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", choices=tuple(RUNS), help="one run alone (default: all, and compare them)")
    parser.add_argument("--molecules", type=int, default=1000)
    parser.add_argument("--atoms", type=int, default=12, help="the most that a molecule has")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="molecules")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    return parser.parse_args(arguments)


def batches(molecules: list[Molecule], size: int, generator: torch.Generator | None = None) -> Iterator[Pairs]:
    """All molecules once, in an order drawn from `generator`, or in theirs."""
    order = range(len(molecules)) if generator is None else torch.randperm(len(molecules), generator=generator).tolist()
    for begin in range(0, len(order), size):
        yield pad([molecules[i] for i in order[begin : begin + size]])


def logits_of(model: PairTransformer, batch: Pairs, implementation: str) -> Tensor:
    return model(batch, ATTENTIONS[implementation](batch.sizes, batch.bonds.shape[-1]))


def train_model(name: str, train: list[Molecule], test: list[Molecule], options: argparse.Namespace) -> Report:
    """Trains by the cross entropy of distances, from the seed: every run sees the same numbers in the same order."""
    implementation, biased = RUNS[name]
    torch.manual_seed(options.seed)
    model = PairTransformer(options.layers, options.width, options.heads, biased).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    steps = options.epochs * -(-len(train) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps)
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    seconds: list[float] = []
    wrong = []
    for _ in range(options.epochs):
        for batch in batches(train, options.batch_size, generator):
            began = time.perf_counter()
            batch = batch.to(options.device)
            logits = logits_of(model, batch, implementation)
            loss = F.cross_entropy(logits.flatten(0, 2), batch.distances.flatten(), ignore_index=NO_PAIR)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began)
        wrong.append(share_wrong(model, implementation, test, options))
    model.eval()
    example = max(test[:50], key=lambda m: int(m.distances.max()))
    with torch.no_grad():
        found = logits_of(model, pad([example]).to(options.device), implementation).argmax(-1)[0].cpu()
    return {
        "name": name,
        "train_losses": losses,
        "wrong": wrong,
        "step_seconds": statistics.median(seconds),
        "example": {"true": example.distances.tolist(), "found": found.fill_diagonal_(0).tolist()},
    }


@torch.no_grad()
def share_wrong(
    model: PairTransformer, implementation: str, test: list[Molecule], options: argparse.Namespace
) -> float:
    """The share of the pairs of atoms held out whose distance is not the most likely one."""
    wrong = pairs = 0
    for batch in batches(test, options.batch_size):
        batch = batch.to(options.device)
        there = batch.distances != NO_PAIR
        wrong += int((there & (logits_of(model, batch, implementation).argmax(-1) != batch.distances)).sum())
        pairs += int(there.sum())
    return wrong / pairs


def check(reports: list[Report]) -> int:
    """0 if fusegrad reached what dense attention reached, and both much more than the model without biases."""
    ours, dense, blind = (report["wrong"][-1] for report in reports)
    if ours > 1.5 * dense + 0.01 or max(ours, dense) > 0.5 * blind:
        found = f"fusegrad ({ours:.2%} wrong) as good as dense ({dense:.2%})"
        print(f"triangle_attention: expected {found}, both better than without biases ({blind:.2%})", file=sys.stderr)
        return 1
    return 0


def draw(reports: list[Report], path: Path) -> None:
    """Errors by epoch, and the distances of a molecule as they are and as the first run sees them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (errors, *molecules) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for report in reports:
        style = "--" if report["name"] == "dense" else "-"
        epochs = range(1, len(report["wrong"]) + 1)
        errors.plot(epochs, [100 * x for x in report["wrong"]], label=report["name"], linestyle=style)
    errors.set(title="Wrong distances of molecules held out", xlabel="epoch", ylabel="% of pairs", yscale="log")
    errors.legend()
    example = reports[0]["example"]
    most = max(map(max, example["true"]))
    for axes, key, title in zip(molecules, ("true", "found"), ("bonds apart", "as predicted from bonds"), strict=True):
        image = axes.imshow(example[key], cmap="viridis", vmin=0, vmax=most)
        axes.set(title=f"A molecule's atoms, {title}", xlabel="atom", ylabel="atom")
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
