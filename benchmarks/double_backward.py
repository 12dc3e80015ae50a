"""A gradient penalty through attention: a forward, a backward with create_graph=True, and the backward of that.

Beside attention in plain PyTorch, which keeps the scores. Milliseconds, and MiB at the peak beyond what was there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fusegrad import flex_attention
from torch import Tensor

SHAPES = [(1, 16, 1024, 64), (1, 16, 4096, 64), (4, 16, 4096, 128), (1, 8, 16384, 64)]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias[None, :, None]).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j])


def penalty(attention: Callable, tensors: list[Tensor]) -> None:
    out = attention(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)


def measured(attention: Callable, tensors: list[Tensor], repeats: int) -> dict[str, float] | str:
    cuda = tensors[0].is_cuda
    try:
        penalty(attention, tensors)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        start = time.perf_counter()
        for _ in range(repeats):
            penalty(attention, tensors)
        if cuda:
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    took = (time.perf_counter() - start) / repeats * 1e3
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else 0.0
    return {"ms": round(took, 2), "MiB": round(peak, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, help="one shape of this length, for a CPU")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    shapes = [(1, 4, given.length, 64)] if given.length else SHAPES
    rows = []
    for b, h, s, d in shapes:
        torch.manual_seed(0)
        made = [torch.randn(b, h, s, d, device=given.device) for _ in range(3)]
        made.append(torch.randn(h, s, device=given.device))
        tensors = [t.to(dtype).requires_grad_() for t in made]
        row = {"shape": [b, h, s, d], "dtype": given.dtype}
        for name, attention in (("fusegrad", fused), ("eager", plain)):
            row[name] = measured(attention, tensors, given.repeats)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
