"""The picture of the JAX examples: the errors of runs from the same numbers, by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_errors(errors: Mapping[str, Sequence[float]], path: Path, title: str, unit: str, reference: str) -> None:
    """A curve for each run; that of the `reference`, on which ours lies, is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for name, run in errors.items():
        axes.plot(range(1, len(run) + 1), run, "--" if name == reference else "-", label=name)
    axes.set(title=title, xlabel="epoch", ylabel=unit, yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")
