"""Random shapes, functions and masks through flex_attention for some minutes, against float64: a program, not a test.

    python tests/python/support/soak_flex_attention.py --minutes 10 [--device cpu] [--workers 8] [--seed 0]

Each worker process draws cases by itself. For a case all heads that share one key head are compared, where functions
capture nothing, and all heads otherwise: outputs, lse and gradients by their relative error. A case that takes more
than --limit seconds is a failure: its process is killed. The exit code is 1 if any case was wrong, died or hung.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_reference import dense
from fusegrad import _C, flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

# Relative errors of what is rounded to the dtype at several places.
MOST = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 1e-4}
# For a tensor with the document of each query and key.
MASKS: dict[str, Callable[[Tensor], Callable[..., Any]] | None] = {
    "none": None,
    "causal": lambda t: lambda b, h, i, j: i >= j,
    "window": lambda t: lambda b, h, i, j: (i - j).abs() < 100,
    "computed documents": lambda t: lambda b, h, i, j: (i // 150 == j // 150) & (i >= j),
    "documents": lambda t: lambda b, h, i, j: (t[i] == t[j]) & (i >= j),
    "some rows": lambda t: lambda b, h, i, j: (i % 7 != 3) & (j > 2),
}
Make = Callable[[list[Tensor]], Callable[..., Any]]
# The shapes of captured tensors, for heads, queries and keys, and the score_mod of them.
MODS: dict[str, tuple[Callable[..., list[tuple[int, ...]]], Make] | None] = {
    "none": None,
    "softcap": (lambda b, h, m, n: [], lambda t: lambda s, b, h, i, j: 20 * torch.tanh(s / 20)),
    "alibi": (lambda b, h, m, n: [], lambda t: lambda s, b, h, i, j: s + torch.exp2(-(h + 1.0)) * (j - i)),
    "head": (lambda b, h, m, n: [(h,)], lambda t: lambda s, b, h, i, j: s * t[0][h]),
    "key": (lambda b, h, m, n: [(n,)], lambda t: lambda s, b, h, i, j: s + t[0][j]),
    "query": (lambda b, h, m, n: [(m,)], lambda t: lambda s, b, h, i, j: s * t[0][i]),
    "relative": (
        lambda b, h, m, n: [(h, m + n)],
        lambda t: lambda s, b, h, i, j: s + t[0][h, i - j + t[0].shape[1] // 2],
    ),
    "keys of heads": (lambda b, h, m, n: [(h, n)], lambda t: lambda s, b, h, i, j: s * t[0][h, j]),
    "key and relative": (
        lambda b, h, m, n: [(n,), (m + n,)],
        lambda t: lambda s, b, h, i, j: s * t[0][j] + t[1][j - i + t[1].shape[0] // 2],
    ),
    "full": (lambda b, h, m, n: [(b, h, m, n)], lambda t: lambda s, b, h, i, j: s + t[0][b, h, i, j]),
    "shared": (lambda b, h, m, n: [(h, m, n)], lambda t: lambda s, b, h, i, j: s + t[0][h, i, j]),
    "shared by four": (
        lambda b, h, m, n: [(-(-b // 4), h, m, n)],
        lambda t: lambda s, b, h, i, j: s + t[0][b // 4, h, i, j],
    ),
    "buckets": (lambda b, h, m, n: [(32,)], lambda t: lambda s, b, h, i, j: s + t[0][(i * 3 + j) % 32]),
    "two": (lambda b, h, m, n: [(h,), (n,)], lambda t: lambda s, b, h, i, j: s * t[0][h] + t[1][j]),
}


@dataclass(frozen=True)
class Case:
    """`seed`: of the tensors."""

    seed: int
    dtype: torch.dtype
    sizes: tuple[int, int, int, int, int, int, int]  # B, H, Hkv, M, N, D, E
    mod: str
    mask: str
    block: int
    deterministic: bool
    frozen: bool  # what is captured wants no gradient
    narrow: bool  # what is captured has the dtype of the call, else float32
    whole: bool  # on Hopper, where it is possible, a backward's CTA takes all keys of a head
    dense: int  # the dimension, from the end, of captured tensors that have so many whose elements lie side by side


def draw(rng: random.Random, longest: int, dtypes: list[torch.dtype], mods: list[str]) -> Case:
    mod = rng.choice(mods)
    made = MODS[mod]
    captures = made is not None and bool(made[0](1, 1, 1, 1))
    batches = rng.choice([1, 2, 5] if captures else [1, 2, 3])
    if batches == 5:
        longest //= 3
    key_heads, group = rng.choice([1, 2]), rng.choice([1, 1, 2, 3])
    lengths = [max(1, int(longest ** rng.uniform(0, 1))) for _ in range(2)]
    if "relative" in mod or rng.random() < 0.5:
        lengths[1] = lengths[0]
    elif rng.random() < 0.2:  # keys that many queries attend to have tiles of their own on Hopper
        lengths[0] = rng.randint(longest // 2, 2 * longest)
    if rng.random() < 0.5:  # rows of captured pairs that are multiples of 16 bytes
        lengths = [(length + 7) // 8 * 8 for length in lengths]
    head = rng.choice([8, 32, 48, 64, 64, 72, 80, 112, 128, 128, 192, 256])
    sizes = (batches, key_heads * group, key_heads, *lengths, head)
    value = head if rng.random() < 0.7 else rng.choice([16, 64, 128])
    return Case(
        rng.randrange(2**31),
        rng.choice(dtypes),
        (*sizes, value),
        mod,
        rng.choice(list(MASKS)),
        rng.choice([64, 128, 128]),
        rng.random() < 0.25,
        rng.random() < 0.25,
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice([1, 1, 2, 3]),
    )


def errors(case: Case, device: str) -> dict[str, float]:
    """Relative errors of outputs and gradients by name."""
    torch.manual_seed(case.seed)
    if device == "cuda":
        _C.flex.force_whole(int(case.whole))
    b, h, g, m, n, d, e = case.sizes

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(case.dtype).requires_grad_()

    tensors = [new(b, h, m, d), new(b, g, n, d), new(b, g, n, e)]
    made, make_mask = MODS[case.mod], MASKS[case.mask]
    documents = torch.randint(0, 40, (max(m, n),), device=device).eq(0).cumsum(0)
    mask = None if make_mask is None else make_mask(documents)
    shapes = [] if made is None else made[0](b, h, m, n)
    held_dtype = case.dtype if case.narrow else torch.float32
    held = [torch.randn(*shape, device=device).to(held_dtype) for shape in shapes]
    held = [laid_out(x, case.dense).requires_grad_(not case.frozen) for x in held]
    mod = None if made is None else made[1](held)
    blocks = None if mask is None else create_block_mask(mask, None, None, m, n, device=device, BLOCK_SIZE=case.block)
    out, aux = flex_attention(
        *tensors,
        mod,
        blocks,
        enable_gqa=g != h,
        return_aux=AuxRequest(lse=True),
        deterministic=case.deterministic,
    )
    there = aux.lse > -math.inf
    # Numbers of the dtype, so that the backward gets what float64 has.
    upstream = new(b, h, m, e).detach().float(), torch.randn(b, h, m, device=device) * there
    heads = slice(0, h) if held else slice(0, h // g)
    batches = slice(0, b) if held else slice(b - 1, b)
    keys = slice(0, g) if held else slice(0, 1)
    found = torch.autograd.grad(
        (out.float() * upstream[0]).sum() + (torch.where(there, aux.lse, 0) * upstream[1]).sum(),
        [t for t in tensors + held if t.requires_grad],
    )
    parts = [tensors[0][batches, heads], tensors[1][batches, keys], tensors[2][batches, keys]]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in parts + held]
    index = [torch.arange(size, device=device) for size in (b, h, m, n)]
    at = (index[0][batches, None, None, None], index[1][heads, None, None], index[2][:, None], index[3])
    wide_mod = None if made is None else made[1](wide[3:])
    allowed = None if mask is None else mask(*at)
    right, lse, _ = dense(*wide[:3], wide_mod, allowed, evaluate=lambda function, _, score: function(score, *at))
    kept = lse > -math.inf
    loss = (right * upstream[0][batches, heads]).sum()
    loss = loss + (torch.where(kept, lse, 0) * upstream[1][batches, heads]).sum()
    expected = torch.autograd.grad(loss, [t for t in wide if t.requires_grad])
    mine = [found[0][batches, heads], found[1][batches, keys], found[2][batches, keys], *found[3:]]
    pairs = {"out": (out[batches, heads], right), "lse": (aux.lse[batches, heads][kept], lse[kept])}
    captured = {f"gradient {i}" for i in range(3, len(mine))}
    pairs |= {f"gradient {i}": pair for i, pair in enumerate(zip(mine, expected, strict=True))}
    # A captured tensor's gradient may cancel: its error counts beside what rows of dS add up to. They are sums of e
    # products, of probabilities that were rounded for the product with the values: attention in eager mode is wrong by
    # up to 0.7% of this in bfloat16.
    return {
        name: relative(x.detach().double(), y.detach(), 0.4 * math.sqrt(b * h * m * e) if name in captured else 0.0)
        for name, (x, y) in pairs.items()
    }


def laid_out(x: Tensor, dense: int) -> Tensor:
    """A copy in which the elements of dimension -dense lie side by side."""
    return x if dense > x.dim() else x.movedim(-dense, -1).contiguous().movedim(-1, -dense)


def relative(x: Tensor, y: Tensor, least: float) -> float:
    size = max(y.norm().item(), 1e-2 * math.sqrt(y.numel()), least)
    return (x - y).norm().item() / size if y.numel() else 0.0


def work(number: int, options: argparse.Namespace, reports: Any) -> None:
    torch.set_num_threads(1)
    rng = random.Random(options.seed * 1000 + number)
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
    longest = 3000 if options.device == "cuda" else 200
    while True:
        case = draw(rng, longest, dtypes, options.mods)
        reports.put((number, "begins", case, None))
        try:
            reports.put((number, "ends", case, errors(case, options.device)))
        except Exception as error:
            reports.put((number, "dies", case, f"{type(error).__name__}: {error}"))
            os._exit(1)  # after an error of the device nothing else is right


def main() -> int:
    parser = argparse.ArgumentParser(description="Random calls of flex_attention against float64.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one case, compiling included")
    parser.add_argument("--mods", nargs="+", choices=list(MODS), default=list(MODS), help="score_mods to draw from")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    processes = [context.Process(target=work, args=(i, options, reports)) for i in range(options.workers)]
    for process in processes:
        process.start()
    end, done, bad = time.monotonic() + 60 * options.minutes, 0, 0
    began: dict[int, tuple[float, Case]] = {}
    worst: dict[torch.dtype, float] = {}
    while time.monotonic() < end and any(process.is_alive() for process in processes):
        try:
            number, what, case, result = reports.get(timeout=1)
        except queue.Empty:
            continue
        finally:
            for i, (since, late) in list(began.items()):
                if time.monotonic() - since > options.limit:
                    print(f"HANGS {late}", flush=True)
                    processes[i].kill()
                    del began[i]
                    bad += 1
        if what == "begins":
            began[number] = time.monotonic(), case
            continue
        began.pop(number, None)
        done += 1
        most = max(result.values()) if what == "ends" else math.inf
        worst[case.dtype] = max(worst.get(case.dtype, 0.0), most)
        if not most <= MOST[case.dtype]:
            bad += 1
            print(f"WRONG {case}: {result}", flush=True)
    for process in processes:
        process.kill()
    print(f"{done} cases, {bad} wrong; largest relative errors {worst}")
    return int(bad > 0 or done == 0)


if __name__ == "__main__":
    sys.exit(main())
