"""The head with and without the promise of the same bits: rows alone, a few, and a packed batch.

Scored: log-probabilities and entropies without a graph, as an engine calls them. Trained: the gradients of hidden
states and weight too. Beside fusegrad's calls are PyTorch's logits and log_softmax, in its deterministic mode too, and
the same of batch_invariant_ops' matmul_persistent and log_softmax where that package is installed (CUDA, without
gradients). `weight` is one pass over the weight's memory, below which no call of few rows can be. `same` says whether
rows that were scored alone have the bits that they have in the packed call.

    python benchmarks/batch_invariant.py [--device cpu] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fusegrad
import torch
from harness.environment import environment, in_file_names
from harness.failure import Outcome
from harness.timing import Floor, median_ms
from torch import Tensor

SIZES = {"cuda": ((4096, 151936),), "cpu": ((1024, 32000),)}
ROWS = {"cuda": (1, 16, 64, 512, 8192), "cpu": (1, 16, 64, 512)}
ALONE = 5  # rows that are scored alone
Score = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def ours(**options: Any) -> Score:
    def score(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        out = fusegrad.linear_log_prob(hidden, weight, target, **options)
        assert out.entropy is not None
        return torch.stack([out.log_prob, out.entropy])

    return score


def of_logits(matmul: Callable[..., Tensor], log_softmax: Callable[..., Tensor]) -> Score:
    def score(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_p = log_softmax(matmul(hidden, weight.T).float(), dim=-1)
        return torch.stack([log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])

    return score


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def implementations(device: str) -> dict[str, tuple[Score, bool, bool]]:
    """By name: the function, whether it has gradients, whether it runs in deterministic mode."""
    plain = of_logits(torch.matmul, torch.log_softmax)
    found = {
        "fusegrad": (ours(), True, False),
        "fusegrad, batch_invariant": (ours(batch_invariant=True), True, False),
        "torch": (plain, True, False),
        "torch, deterministic": (plain, True, True),
    }
    outcome = Outcome(lambda: importlib.import_module("batch_invariant_ops"))
    if device == "cuda" and outcome.failure is None:
        of_package = of_logits(outcome.value.matmul_persistent, outcome.value.log_softmax)
        found["batch_invariant_ops"] = (of_package, False, False)
    return found


def measured(score: Score, trains: bool, inputs: tuple[Tensor, Tensor, Tensor], device: str) -> Row:
    hidden, weight, target = inputs

    def time(run: Callable[[], object]) -> float:
        return median_ms(Floor("", run), device, 5)

    def scored() -> Tensor:
        with torch.no_grad():
            return score(*inputs)

    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]

    def trained() -> None:
        values = score(leaves[0], leaves[1], target)
        torch.autograd.grad(values.sum(), leaves)

    whole = scored()
    with torch.no_grad():
        same = all(score(hidden[i : i + 1], weight, target[i : i + 1])[:, 0].equal(whole[:, i]) for i in alone(hidden))
    return {"scored": time(scored), "trained": time(trained) if trains else None, "same": same}


def alone(hidden: Tensor) -> range:
    return range(0, len(hidden), max(len(hidden) // ALONE, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=[*SIZES], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    options, _ = parser.parse_known_args()  # `make bench` gives all scripts the same
    device = options.device
    torch.manual_seed(0)
    document: dict[str, Any] = {"work": "batch_invariant", **environment(device, None), "results": []}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for width, vocab in SIZES[device]:
        weight = (torch.randn(vocab, width, device=device) * width**-0.5).to(dtype)
        reading = median_ms(Floor("", lambda w=weight: w.sum()), device, 5)
        for rows in ROWS[device]:
            hidden = torch.randn(rows, width, device=device).to(dtype)
            inputs = (hidden, weight, torch.randint(0, vocab, (rows,), device=device))
            for name, (score, trains, mode) in implementations(device).items():
                with deterministic(mode):
                    outcome = Outcome(lambda s=score, t=trains, i=inputs: measured(s, t, i, device))
                made = outcome.value if outcome.failure is None else {"failure": outcome.failure}
                row = {"N": rows, "H": width, "V": vocab, "weight": reading, "name": name, **made}
                print(
                    "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                    flush=True,
                )
                document["results"].append(row)
    if options.output is not None:
        name = f"batch_invariant-{in_file_names(document['device'])}.json"
        (options.output / name).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
