"""The head and attention with and without the promise of the same bits: rows alone, a few, and a packed batch.

Head. Scored: log-probabilities and entropies without a graph, as an engine calls them. Trained: the gradients of hidden
states and weight too. Beside fusegrad's calls are PyTorch's logits and log_softmax, in its deterministic mode too, and
the same of batch_invariant_ops' matmul_persistent and log_softmax where that package is installed (CUDA, without
gradients). `weight` is one pass over the weight's memory, below which no call of few rows can be. `same` says whether
rows that were scored alone have the bits that they have in the packed call.

Attention. Forwards of prefills and of decoding steps, whose queries are few and whose keys are a cache. Beside
fusegrad's calls is PyTorch's scaled_dot_product_attention, in its deterministic mode too. `same` says whether queries
that come alone, with the keys up to their own, have the bits that they have in the prefill of their row's sizes.

    python benchmarks/batch_invariant.py [--device cpu] [--work head|attention] [--output benchmarks/results]
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
from torch.nn.attention.flex_attention import BlockMask

SIZES = {"cuda": ((4096, 151936),), "cpu": ((1024, 32000),)}
ROWS = {"cuda": (1, 16, 64, 512, 8192), "cpu": (1, 16, 64, 512)}
ALONE = 5  # rows that are scored alone
# B, H, key heads, queries, keys, head size; causal where there are as many queries as keys, and said so
ATTENTION: dict[str, dict[str, tuple[tuple[int, ...], bool]]] = {
    "cuda": {
        "prefill": ((4, 16, 16, 4096, 4096, 128), False),
        "prefill, causal": ((4, 16, 16, 4096, 4096, 128), True),
        "prefill 64": ((4, 16, 16, 4096, 4096, 64), False),
        "prefill 64, causal": ((4, 16, 16, 4096, 4096, 64), True),
        "prefill 256": ((2, 8, 8, 4096, 4096, 256), False),
        "prefill 256, causal": ((2, 8, 8, 4096, 4096, 256), True),
        "prefill 16k, causal": ((1, 32, 8, 16384, 16384, 128), True),
        "short, causal": ((16, 16, 16, 1024, 1024, 128), True),
        "decode 1 x 8192": ((1, 32, 8, 1, 8192, 128), False),
        "decode 16 x 8192": ((16, 32, 8, 1, 8192, 128), False),
        "decode 64 x 4096": ((64, 32, 8, 1, 4096, 128), False),
        "decode 1 x 131072": ((1, 32, 8, 1, 131072, 128), False),
        "decode 16 x 8192, no groups": ((16, 16, 16, 1, 8192, 64), False),
    },
    "cpu": {
        "prefill, causal": ((1, 8, 8, 1024, 1024, 64), True),
        "decode 1 x 4096": ((1, 8, 2, 1, 4096, 64), False),
    },
}
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


# --- attention ---


def causal(queries: int, keys: int, device: str) -> BlockMask:
    first = keys - queries
    return fusegrad.create_block_mask(lambda b, h, q, kv: q + first >= kv, None, None, queries, keys, device=device)


def attentions(is_causal: bool, queries: int, keys: int, device: str) -> dict[str, tuple[Callable[..., Tensor], bool]]:
    """By name: the function of query, key and value, and whether it runs in deterministic mode."""
    mask = causal(queries, keys, device) if is_causal else None

    def flex(**options: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: fusegrad.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, **options)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    return {
        "fusegrad": (flex(), False),
        "fusegrad, batch_invariant": (flex(batch_invariant=True), False),
        "torch": (sdpa, False),
        "torch, deterministic": (sdpa, True),
    }


def same_alone(name: str, is_causal: bool, inputs: tuple[Tensor, Tensor, Tensor], device: str) -> bool:
    """Whether queries alone have the bits that they have in a prefill over all keys."""
    q, k, v = inputs
    keys = k.size(2)
    query = q if q.size(2) == keys else torch.randn(*q.shape[:2], 256, q.size(3), device=device).to(q.dtype)
    length = query.size(2)
    whole = attentions(is_causal, length, keys, device)[name][0](query, k, v)
    for i in range(0, length, max(length // ALONE, 1)):
        seen = keys - length + i + 1 if is_causal else keys
        alone_here = attentions(False, 1, seen, device)[name][0](
            query[-1:, :, i : i + 1], k[-1:, :, :seen], v[-1:, :, :seen]
        )
        if not alone_here.equal(whole[-1:, :, i : i + 1]):
            return False
    return True


def timed(
    attend: Callable[..., Tensor], name: str, is_causal: bool, inputs: tuple[Tensor, Tensor, Tensor], device: str
) -> Row:
    time = median_ms(Floor("", lambda: attend(*inputs)), device, 20)
    return {"time": time, "same": same_alone(name, is_causal, inputs, device)}


@torch.no_grad()
def attention_rows(device: str, dtype: torch.dtype) -> Iterator[Row]:
    for label, ((batch, heads, key_heads, queries, keys, size), is_causal) in ATTENTION[device].items():
        q, k, v = (
            torch.randn(batch, h, n, size, device=device).to(dtype)
            for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))
        )
        for name, (attend, mode) in attentions(is_causal, queries, keys, device).items():
            with deterministic(mode):
                outcome = Outcome(lambda a=attend, n=name, c=is_causal, i=(q, k, v): timed(a, n, c, i, device))
            made = outcome.value if outcome.failure is None else {"failure": outcome.failure}
            yield {"row": label, "name": name, **made}


def head_rows(device: str, dtype: torch.dtype) -> Iterator[Row]:
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
                yield {"N": rows, "H": width, "V": vocab, "weight": reading, "name": name, **made}


WORKS = {"head": head_rows, "attention": attention_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=[*SIZES], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", choices=[*WORKS], help="one of the two alone")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    options = parser.parse_args()
    device = options.device
    torch.manual_seed(0)
    document: dict[str, Any] = {"work": "batch_invariant", **environment(device, options.commit), "results": []}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for work in [options.work] if options.work else WORKS:
        for row in WORKS[work](device, dtype):
            print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            document["results"].append({"work": work, **row})
    if options.output is not None:
        name = f"batch_invariant-{in_file_names(document['device'])}.json"
        (options.output / name).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
