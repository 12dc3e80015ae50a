"""Trains a model that draws a digit in one step: MeanFlow, by forward mode through every attention.

    python examples/meanflow.py                # MeanFlow, and flow matching beside it; a picture
    python examples/meanflow.py --steps 3000
    python examples/meanflow.py --quick        # a few steps of a tiny model, to see that it runs

The algorithm is that of "Mean Flows for One-step Generative Modeling" (Geng et al. 2025, arXiv:2505.13447), written
from its formulas. Needs scikit-learn (`pip install scikit-learn`), which brings the digits. See examples/README.md.
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
from flow.model import ATTENTIONS, DiT
from torch import Tensor

Report = dict[str, Any]
SIDE, CLASSES, SHOWN = 8, 10, 8
RUNS = ("MeanFlow", "flow matching")
QUICK = {"steps": 6, "batch_size": 16, "layers": 1, "width": 16, "heads": 2}


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        images, labels = load_digits()
    except ImportError as error:
        print(f"meanflow: needs scikit-learn ({error}); pip install scikit-learn", file=sys.stderr)
        return 2
    print(f"{len(images)} digits; two halves of them are {distance_between(images[::2], images[1::2]):.2f} apart")
    reports = []
    for name in RUNS:
        report = train_model(name, images, labels, options)
        reports.append(report)
        print(f"{name:14s} distance {report['distance']:.2f}, {1e3 * report['step_seconds']:.1f} ms a step", flush=True)
    apart = max(report["apart"] for report in reports)
    print(f"losses with dense attention in place of fusegrad's: the same within {apart:.1e}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "meanflow.json").write_text(json.dumps(reports, indent=1))
    draw(reports, images, labels, options.out / "meanflow.png")
    print(f"wrote {options.out / 'meanflow.png'}")
    return check(reports, apart, options.quick)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model, which learns nothing")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    return options


def load_digits() -> tuple[Tensor, Tensor]:
    """The 1797 handwritten digits that scikit-learn ships: images [N, 8, 8] in [-1, 1], and which digit each is."""
    from sklearn import datasets

    digits = datasets.load_digits()
    return torch.tensor(digits.images, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)


def draw_times(count: int, flow_matching: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs r <= t: of every other one, and for flow matching of all, r = t, where u is the velocity itself. Spread so
    widely that the model sees times near the one step's, r = 0 and t = 1."""
    both = torch.randn(2, count, generator=generator).mul(1.5).sigmoid()
    r, t = both.amin(0), both.amax(0)
    same = torch.rand(count, generator=generator) < 0.5
    return torch.where(same | torch.tensor(flow_matching), t, r), t


def loss_of(
    model: DiT, images: Tensor, labels: Tensor, attention: str, name: str, generator: torch.Generator
) -> Tensor:
    """With z = (1 - t) x + t e and its velocity v = e - x, the mean velocity u(z, r, t) between r and t fulfils
    u = v - (t - r) du/dt, where du/dt is the tangent of u along (v, 0, 1): one forward mode gives u and it. The right
    side is a constant for the gradient, and an image's weight is one over its error (the paper's adaptive weight)."""
    flow_matching = name == "flow matching"
    noise = torch.randn(images.shape, generator=generator).to(images)
    r, t = (x.to(images) for x in draw_times(len(images), flow_matching, generator))
    z, velocity = images + t[:, None, None] * (noise - images), noise - images

    def u_of(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return model(z, r, t, labels, ATTENTIONS[attention])

    if flow_matching:
        u, target = u_of(z, r, t), velocity
    else:
        tangents = velocity, torch.zeros_like(r), torch.ones_like(t)
        u, slope = torch.func.jvp(u_of, (z, r, t), tangents)
        target = velocity - (t - r)[:, None, None] * slope.detach()
    error = (u - target).square().mean((1, 2))
    return (error / (error.detach() + 1e-2)).mean()


def train(
    name: str, images: Tensor, labels: Tensor, options: argparse.Namespace
) -> tuple[DiT, list[float], list[float]]:
    """A model trained from the seed, its losses, and the seconds of its steps."""
    torch.manual_seed(options.seed)
    model = DiT(SIDE, CLASSES, options.layers, options.width, options.heads)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=options.steps)
    generator = torch.Generator().manual_seed(options.seed)
    losses, seconds = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        chosen = torch.randint(len(images), (options.batch_size,), generator=generator)
        loss = loss_of(model, images[chosen], labels[chosen], "fusegrad", name, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return model, losses, seconds


def train_model(name: str, images: Tensor, labels: Tensor, options: argparse.Namespace) -> Report:
    model, losses, seconds = train(name, images, labels, options)
    order = labels.sort(stable=True).indices
    samples = draw_samples(name, model, labels[order], options.seed)
    return {
        "name": name,
        "losses": losses,
        "distance": distance_between(samples, images),
        "apart": losses_apart(name, model, images, labels, options.seed),
        "step_seconds": statistics.median(seconds),
        "samples": [samples[labels[order] == c][:SHOWN].tolist() for c in range(CLASSES)],
    }


@torch.no_grad()
def draw_samples(name: str, model: DiT, labels: Tensor, seed: int) -> Tensor:
    """Images out of noise in one step, x = e - u(e, 0, 1). Flow matching knows u where r = t, the velocity at t = 1."""
    noise = torch.randn(len(labels), SIDE, SIDE, generator=torch.Generator().manual_seed(seed + 1))
    t = torch.ones(len(labels))
    r = t if name == "flow matching" else torch.zeros_like(t)
    return noise - model(noise, r, t, labels, ATTENTIONS["fusegrad"])


def distance_between(samples: Tensor, images: Tensor) -> float:
    """The Frechet distance of normal distributions with the pixels' means and covariances."""
    (mean, covariance), (other, of_other) = (
        (x.double().flatten(1).mean(0), x.double().flatten(1).T.cov()) for x in (samples, images)
    )
    values, vectors = torch.linalg.eigh(of_other)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ covariance @ root).clamp_min(0).sqrt().sum()
    return float((mean - other).square().sum() + covariance.trace() + of_other.trace() - 2 * mixed)


@torch.no_grad()
def losses_apart(name: str, model: DiT, images: Tensor, labels: Tensor, seed: int) -> float:
    """How far the losses of a trained model with both attentions are apart, relative."""
    chosen = slice(0, None, 10)
    ours, dense = (
        loss_of(model, images[chosen], labels[chosen], attention, name, torch.Generator().manual_seed(seed)).item()
        for attention in ATTENTIONS
    )
    return abs(ours - dense) / dense


def check(reports: list[Report], apart: float, quick: bool = False) -> int:
    """0 if both attentions train alike, and one step of MeanFlow is far nearer to the digits than one of the other."""
    ours, other = (report["distance"] for report in reports)
    if not apart < 1e-3 or (not quick and not ours < 0.5 * other):
        found = f"equal losses ({apart:.1e} apart) and MeanFlow ({ours:.2f}) nearer than flow matching ({other:.2f})"
        print(f"meanflow: expected {found}", file=sys.stderr)
        return 1
    return 0


def draw(reports: list[Report], images: Tensor, labels: Tensor, path: Path) -> None:
    """Digits as they are, and as each model draws them in one step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = {"digits": [images[labels == c][:SHOWN].tolist() for c in range(CLASSES)]}
    for report in reports:
        columns[f"{report['name']}, one step: distance {report['distance']:.1f}"] = report["samples"]
    figure, all_axes = plt.subplots(1, len(columns), figsize=(13, 5.6), layout="constrained")
    for axes, (title, rows) in zip(all_axes, columns.items(), strict=True):
        tiles = torch.tensor(rows)  # [classes, SHOWN, side, side]
        tiles = torch.nn.functional.pad(tiles, (0, 1, 0, 1), value=-1.0).transpose(1, 2).flatten(2).flatten(0, 1)
        axes.imshow(tiles.numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axes.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
