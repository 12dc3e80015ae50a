"""What the host takes for known calls: wall-clock time of small calls, ours beside PyTorch's, in one process.

On a GPU a call is timed until it is enqueued, in bursts that the GPU has finished before the next one begins.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from harness.environment import environment, in_file_names
from harness.report import print_table, write_json
from torch import Tensor

Call = Callable[[], Any]
# For each case: ours, the peer, the goal for ours over the peer, as docs/performance.md has it.
Case = tuple[Call, Call, float | None]
BURST, ROUNDS = 50, 41


def microseconds(calls: dict[str, Call], device: str) -> dict[str, float]:
    """The median over rounds in which the calls take turns, each a burst."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 5):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            times[name].append((time.perf_counter() - start) / BURST * 1e6)
    return {name: statistics.median(found[5:]) for name, found in times.items()}


def leaves(*shapes: tuple[int, ...], device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def with_backward(call: Callable[[], Tensor], inputs: list[Tensor]) -> Call:
    upstream = torch.ones_like(call())
    return lambda: torch.autograd.grad(call(), inputs, upstream)


def attention(device: str) -> dict[str, Case]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (1, 4, 128, 64) if device == "cuda" else (1, 1, 8, 8)
    given = leaves(shape, shape, shape, device=device, dtype=dtype)
    q, k, v = (t.detach() for t in given)
    scale, slope = shape[3] ** -0.5, torch.full((), 0.5, device=device)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * scale).softmax(-1) @ v

    def scaled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * slope

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusegrad.flex_attention(q, k, v)

    def attend_mod(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusegrad.flex_attention(q, k, v, scaled)

    sdpa = F.scaled_dot_product_attention
    on_cpu = device == "cpu"
    cases: dict[str, Case] = {
        "flex_attention, SDPA": (lambda: attend(q, k, v), lambda: sdpa(q, k, v), None if on_cpu else 1.4),
        "flex_attention, four eager ops": (lambda: attend(q, k, v), lambda: formula(q, k, v), 1.3 if on_cpu else None),
        "flex_attention with a score_mod, four eager ops": (
            lambda: attend_mod(q, k, v),
            lambda: formula(q, k, v),
            1.3 if on_cpu else None,
        ),
        "flex_attention forward and backward, SDPA": (
            with_backward(lambda: attend(*given), given),
            with_backward(lambda: sdpa(*given), given),
            1.15,
        ),
        "flex_attention with a score_mod forward and backward, four eager ops": (
            with_backward(lambda: attend_mod(*given), given),
            with_backward(lambda: formula(*given), given),
            None,
        ),
    }
    if device == "cuda":
        tokens = leaves(*[(2, 16, 512, 32)] * 3, (16, 512, 512), device=device, dtype=dtype)

        def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return fusegrad.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j])

        cases["AlphaFold 3 tokens (2, 16, 512, 32), pair bias, forward and backward, SDPA with the bias"] = (
            with_backward(lambda: biased(*tokens), tokens),
            with_backward(lambda: sdpa(*tokens[:3], attn_mask=tokens[3]), tokens),
            None,
        )
    return cases


def losses(device: str) -> dict[str, Case]:
    n, v, h = 8, 64, 32
    logits, other, hidden, weight = leaves((n, v), (n, v), (n, h), (v, h), device=device, dtype=torch.float32)
    target = torch.randint(v, (n,), device=device)
    x, y, w = logits.detach(), hidden.detach(), weight.detach()
    teacher = other.detach()

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    def divergence(student: Tensor) -> Tensor:
        p, q = student.log_softmax(-1), teacher.log_softmax(-1)
        m = torch.logaddexp(p, q) - 0.6931471805599453
        return 0.5 * (F.kl_div(m, p, log_target=True, reduction="batchmean") + F.kl_div(
            m, q, log_target=True, reduction="batchmean"))  # fmt: skip

    return {
        "cross_entropy, eager": (lambda: fusegrad.cross_entropy(x, target), lambda: F.cross_entropy(x, target), 1.15),
        "cross_entropy forward and backward, eager": (
            with_backward(lambda: fusegrad.cross_entropy(logits, target), [logits]),
            with_backward(lambda: F.cross_entropy(logits, target), [logits]),
            1.15,
        ),
        "linear_cross_entropy, eager": (
            lambda: fusegrad.linear_cross_entropy(y, w, target),
            lambda: head(y, w),
            1.15,
        ),
        "linear_cross_entropy forward and backward, eager": (
            with_backward(lambda: fusegrad.linear_cross_entropy(hidden, weight, target), [hidden, weight]),
            with_backward(lambda: head(hidden, weight), [hidden, weight]),
            1.15,
        ),
        "jsd forward and backward, eager": (
            with_backward(lambda: fusegrad.jsd(logits, teacher), [logits]),
            with_backward(lambda: divergence(logits), [logits]),
            None,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of known calls.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    arguments = parser.parse_args()
    device = arguments.device
    torch.manual_seed(0)
    torch.set_num_threads(1)
    document: dict[str, Any] = {"op": "host_time", **environment(device, arguments.commit), "threads": 1, "cases": []}
    rows = []
    for name, (ours, peer, goal) in {**attention(device), **losses(device)}.items():
        found = microseconds({"fusegrad": ours, "peer": peer}, device)
        ratio = found["fusegrad"] / found["peer"]
        document["cases"].append({"name": name, "us": found, "ratio": ratio, "goal": goal})
        rows.append([name, f"{found['fusegrad']:.1f}", f"{found['peer']:.1f}", f"{ratio:.2f}", f"{goal or ''}"])
    print_table(["call, peer", "us", "peer's us", "ratio", "goal"], rows)
    if arguments.output is not None:
        write_json(arguments.output / f"host_time-{in_file_names(document['device'])}.json", document)


if __name__ == "__main__":
    main()
