"""Trains a Graphormer-like model on molecules: learned biases of distance and bond, read by a score_mod.

    python examples/graph_transformer.py                      # fusegrad, dense attention, and no biases; a picture
    python examples/graph_transformer.py --attention fusegrad

Needs RDKit (`pip install rdkit`), which brings the molecules. See examples/README.md.
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
from graph.data import BONDS, MAX_DISTANCE, Molecule, batches, load_molecules
from graph.model import ATTENTIONS, GraphTransformer
from torch.nn import functional as F

Report = dict[str, Any]
# The model without biases runs by the reference.
RUNS = {"fusegrad": ("fusegrad", True), "dense": ("dense", True), "no biases": ("dense", False)}


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        molecules = load_molecules(options.molecules)
    except ImportError as error:
        print(f"graph_transformer: needs RDKit ({error}); pip install rdkit", file=sys.stderr)
        return 2
    held_out = len(molecules) // 5
    order = torch.randperm(len(molecules), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [molecules[i] for i in order]
    train, test = shuffled[held_out:], shuffled[:held_out]
    print(f"{len(train)} molecules to learn from, {len(test)} held out; log P has a standard deviation of "
          f"{statistics.pstdev(m.label for m in test):.3f}")  # fmt: skip
    names = [options.attention] if options.attention else list(RUNS)
    reports = []
    for name in names:
        model, report = train_model(name, train, test, options)
        reports.append(report)
        print(
            f"{name:10s} held-out error {report['held_out_error'][-1]:.4f}, {report['seconds']:.1f} s, "
            f"{1e3 * report['step_seconds']:.1f} ms a step"
        )
        if name == "fusegrad":
            report["spatial"], report["edge"] = model.spatial.tolist(), model.edge.tolist()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "graph_transformer.json").write_text(json.dumps(reports, indent=1))
    if any("spatial" in report for report in reports):
        draw(reports, options.out / "graph_transformer.png")
        print(f"wrote {options.out / 'graph_transformer.png'}")
    return check(reports) if not options.attention else 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", choices=tuple(RUNS), help="one run alone (default: all, and compare them)")
    parser.add_argument("--molecules", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="molecules")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    return parser.parse_args(arguments)


def train_model(
    name: str, train: list[Molecule], test: list[Molecule], options: argparse.Namespace
) -> tuple[GraphTransformer, Report]:
    """Trains by mean squared error from the seed, so that every run sees the same numbers in the same order."""
    implementation, structure = RUNS[name]
    make_attention = ATTENTIONS[implementation]
    torch.manual_seed(options.seed)
    model = GraphTransformer(options.layers, options.width, options.heads, structure).to(options.device)
    # A bias must become as large as scores are; the weights of a layer need not go so far.
    biases = [p for p in (model.spatial, model.edge) if p.requires_grad]
    weights = [p for name, p in model.named_parameters() if name not in ("spatial", "edge")]
    rates = [options.learning_rate, 10 * options.learning_rate]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups[: 1 + bool(biases)])
    steps = options.epochs * -(-len(train) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates[: 1 + bool(biases)], total_steps=steps)
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    seconds: list[float] = []
    errors = []
    began = time.perf_counter()
    for _ in range(options.epochs):
        for batch in batches(train, options.batch_size, generator):
            step_began = time.perf_counter()
            batch = batch.to(options.device)
            loss = F.mse_loss(model(batch, make_attention(batch)), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - step_began)
        errors.append(held_out_error(model, make_attention, test, options))
    return model, {
        "name": name,
        "train_losses": losses,
        "held_out_error": errors,
        "seconds": time.perf_counter() - began,
        "step_seconds": statistics.median(seconds),
    }


@torch.no_grad()
def held_out_error(model: GraphTransformer, make_attention: Any, test: list[Molecule], options: Any) -> float:
    """The root of the mean squared error, in units of log P."""
    squares = 0.0
    for batch in batches(test, options.batch_size):
        batch = batch.to(options.device)
        squares += float(F.mse_loss(model(batch, make_attention(batch)), batch.labels, reduction="sum"))
    return (squares / len(test)) ** 0.5


def check(reports: list[Report]) -> int:
    """0 if fusegrad reached what dense attention reached, and both more than the model that sees no bonds."""
    ours, dense, blind = (report["held_out_error"][-1] for report in reports)
    # Single steps agree to 1e-5; hundreds of steps of a network drift apart as two runs of another seed do.
    if ours > 1.15 * dense or max(ours, dense) > 0.8 * blind:
        print(f"graph_transformer: expected fusegrad ({ours:.4f}) as good as dense ({dense:.4f}) and both better than "
              f"without biases ({blind:.4f})", file=sys.stderr)  # fmt: skip
        return 1
    return 0


def draw(reports: list[Report], path: Path) -> None:
    """The held-out error by epoch, and what each head of the fusegrad model learned."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    learned = next(report for report in reports if "spatial" in report)
    spatial, edge = torch.tensor(learned["spatial"]), torch.tensor(learned["edge"])
    figure, (errors, distances, bonds) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for report in reports:
        epochs = range(1, len(report["held_out_error"]) + 1)
        errors.plot(
            epochs, report["held_out_error"], label=report["name"], linestyle="--" if report["name"] == "dense" else "-"
        )
    errors.set(
        title="Error on molecules held out", xlabel="epoch", ylabel="root mean square error of log P", yscale="log"
    )
    errors.legend()
    for axes, table, names, title in (
        (distances, spatial, [*map(str, range(MAX_DISTANCE)), f"{MAX_DISTANCE}+", "none"], "Distance in bonds"),
        (bonds, edge, BONDS, "Bond"),
    ):
        limit = float(table.abs().max())
        image = axes.imshow(table.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        axes.set(title=f"Learned bias: {title.lower()}", ylabel="head", xticks=range(len(names)))
        axes.set_xticklabels(names, rotation=90 if len(names) > 8 else 0)
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
