"""Block masks of packed sequences: fusegrad beside PyTorch's create_block_mask, eager and compiled.

Causal documents, others at each call: what a step of training on packed batches makes anew. `ms` is the device's time
of a call, `wall` that until the device is done; `MiB` is the peak above what was there, the lists that are returned
included (`lists`). `compiled` counts what was compiled after a first call. For the attention that the mask is for (GQA
32/8, head size 128, bfloat16) the forward is measured too, on a GPU, up to 131072 tokens.

PyTorch looks at every pair of tokens: at a length where one call would take too long, by the time of the length before,
it is not run.

    python benchmarks/block_mask.py [--device cpu] [--lengths 4096,131072] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fusegrad
import torch
from harness.environment import environment, in_file_names
from harness.failure import Outcome
from harness.memory import MIB, cuda_peak_mib, resident_peak_mib
from harness.report import print_table, write_json
from harness.timing import median_ms
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

LENGTHS = {"cuda": (4096, 16384, 65536, 131072, 819200), "cpu": (4096, 16384, 32768, 65536)}
# A peer is not run where a call, of all pairs, would take longer, and the compiled one, which compiles for a minute or
# more at each length, at two lengths only.
PEER_SECONDS = {"cuda": 1.0, "cpu": 10.0}
COMPILED_LENGTHS = {"cuda": (4096, 65536), "cpu": (4096, 16384)}
DOCUMENTS, STEPS = 16, 4
FORWARD_LENGTH, FORWARD_SHARE, CPU_LENGTH, CPU_SECONDS = 131072, 0.05, 32768, 0.5


@dataclass
class Steps:
    """A call for each step in turn, as harness.timing takes one."""

    make: Callable[[Tensor], BlockMask]
    batches: list[Tensor]
    done: int = 0
    result: BlockMask | None = field(default=None, repr=False)

    def prepare(self) -> None:
        self.result = None

    def run(self) -> None:
        self.done += 1
        self.result = self.make(self.batches[self.done % len(self.batches)])


def ends_of(length: int, device: str) -> Tensor:
    """cu_seqlens of documents of uneven lengths."""
    inner = torch.randperm(length - 1)[: DOCUMENTS - 1].sort().values + 1
    return torch.cat([torch.tensor([0]), inner, torch.tensor([length])]).to(device, torch.int32)


def documents(ends: Tensor, length: int) -> Callable[..., Tensor]:
    """The mask_mod, from the number of each token's document."""
    ids = torch.searchsorted(ends[1:], torch.arange(length, device=ends.device, dtype=torch.int32), right=True)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return mask_mod


def makers(length: int, device: str) -> dict[str, Callable[[Tensor], BlockMask]]:
    def ours(ends: Tensor) -> BlockMask:
        return fusegrad.create_block_mask(documents(ends, length), None, None, length, length, device=device)

    def varlen(ends: Tensor) -> BlockMask:
        return fusegrad.varlen_mask(ends, causal=True, lengths=(length, length))

    def theirs(create: Callable[..., BlockMask], ends: Tensor) -> BlockMask:
        return create(documents(ends, length), None, None, length, length, device=device)

    found = {"fusegrad": ours, "fusegrad varlen_mask": varlen}
    found["torch"] = partial(theirs, create_block_mask)
    if length in COMPILED_LENGTHS[device]:
        found["torch compiled"] = partial(theirs, torch.compile(create_block_mask))
    return found


def compilations() -> int:
    """Kernels of ours and graphs of torch.compile's, until now."""
    return fusegrad._C.jit.stats()["compilations"] + torch._dynamo.utils.counters["stats"]["unique_graphs"]


def measured(make: Callable[[Tensor], BlockMask], length: int, device: str, reps: int) -> dict[str, float]:
    steps = Steps(make, [ends_of(length, device) for _ in range(STEPS)])
    steps.run()
    compiled = compilations()
    wall = []
    for _ in range(reps):
        steps.prepare()
        started = time.perf_counter()
        steps.run()
        if device == "cuda":
            torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - started))
    mask = steps.result
    assert mask is not None
    lists = sum(t.nbytes for t in mask.as_tuple() if isinstance(t, Tensor)) / MIB
    steps.prepare()
    del mask
    peak = (cuda_peak_mib if device == "cuda" else resident_peak_mib)(lambda: make(steps.batches[0]))
    return {
        "ms": median_ms(steps, device, reps),
        "wall_ms": statistics.median(wall),
        "compiled": compilations() - compiled,
        "peak_mib": peak,
        "lists_mib": lists,
    }


def forward_ms(length: int, device: str, reps: int) -> float:
    query = torch.randn(1, 32, length, 128, device=device, dtype=torch.bfloat16)
    key, value = (torch.randn(1, 8, length, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    mask = fusegrad.varlen_mask(ends_of(length, device), causal=True)

    class Forward:
        def prepare(self) -> None:
            pass

        def run(self) -> None:
            fusegrad.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)

    return median_ms(Forward(), device, reps)


def goals(length: int, device: str, case: dict[str, Any]) -> list[tuple[str, bool]]:
    found = []
    for name in ("fusegrad", "fusegrad varlen_mask"):
        one = case["results"][name]
        if "failure" in one:
            found.append((f"{name}: runs", False))
            continue
        if device == "cpu" and length == CPU_LENGTH:
            found.append((f"{name}: {one['ms']:.1f} ms <= {CPU_SECONDS} s", one["ms"] <= 1e3 * CPU_SECONDS))
        if device == "cuda":
            most = 4 * one["lists_mib"] + 64
            found.append((f"{name}: {one['peak_mib']:.0f} MiB, no memory of all pairs", one["peak_mib"] <= most))
        found.append((f"{name}: compiles nothing for other documents", one["compiled"] == 0))
        if device == "cuda" and length == FORWARD_LENGTH:
            share = one["ms"] / case["forward_ms"]
            found.append((f"{name}: {share:.1%} of the forward <= {FORWARD_SHARE:.0%}", share <= FORWARD_SHARE))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Block masks of packed sequences.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", help="comma-separated numbers of tokens, in place of the default ones")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    arguments = parser.parse_args()
    device, reps = arguments.device, arguments.reps
    lengths = LENGTHS[device] if arguments.lengths is None else [int(n) for n in arguments.lengths.split(",")]
    torch.manual_seed(0)
    document: dict[str, Any] = {"op": "block_mask", **environment(device, arguments.commit), "cases": []}
    print(f"block masks of {DOCUMENTS} causal documents on {document['device']}, torch {torch.__version__}")
    seconds: dict[str, float] = {}  # what a pair took each maker last
    for length in lengths:
        case: dict[str, Any] = {"sizes": {"S": length}, "results": {}}
        for name, make in makers(length, device).items():
            needs = seconds.get(name, 0.0) * length**2
            if name.startswith("torch") and needs > PEER_SECONDS[device]:
                case["results"][name] = {"failure": f"not run: would take {needs:.0f} s"}
                continue
            outcome = Outcome(partial(measured, make, length, device, reps))
            case["results"][name] = {"failure": outcome.failure} if outcome.failure else outcome.value
            if not outcome.failure:
                seconds[name] = 1e-3 * outcome.value["wall_ms"] / length**2
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
        if device == "cuda" and length <= FORWARD_LENGTH:
            case["forward_ms"] = forward_ms(length, device, reps)
            torch.cuda.empty_cache()
        document["cases"].append(case)
        heading = f"; forward {case['forward_ms']:.3f} ms" if "forward_ms" in case else ""
        print(f"\n{length} tokens{heading}")
        ran = {name: one for name, one in case["results"].items() if "failure" not in one}
        columns = ("ms", "wall_ms", "peak_mib", "lists_mib")
        rows = [
            [name, *(f"{one[column]:.3f}" for column in columns), str(one["compiled"])] for name, one in ran.items()
        ]
        print_table(["", "ms", "wall", "MiB", "lists", "compiled"], rows)
        for name, one in case["results"].items():
            if "failure" in one:
                print(f"  {name}: {one['failure']}")
        case["goals"] = [{"goal": text, "passed": passed} for text, passed in goals(length, device, case)]
        for goal in case["goals"]:
            print(f"  {'pass' if goal['passed'] else 'MISS'}  {goal['goal']}", flush=True)
        if arguments.output is not None:
            write_json(arguments.output / f"block_mask-{in_file_names(document['device'])}.json", document)


if __name__ == "__main__":
    main()
