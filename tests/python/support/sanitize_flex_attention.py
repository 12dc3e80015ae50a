"""Small calls of flex_attention through each kind of CUDA kernel, for compute-sanitizer: a program, not a test.

    python tests/python/support/sanitize_flex_attention.py  # compiles what is not in the cache
    compute-sanitizer --tool racecheck --kernel-name kns=flex \\
        python tests/python/support/sanitize_flex_attention.py --family portable --part 0 --parts 2

memcheck, synccheck and racecheck each take some minutes; initcheck needs all kernels, also PyTorch's (no
--kernel-name). On Hopper racecheck reports three things that are none: what `touch` reads ahead into a place that
nobody reads; a tile's place, which the warps that hand dQ over read after a barrier at which others only arrive; and
stages of the forward's reads, since it does not follow __syncwarp and one lane's arrival at an mbarrier for its warp
(with an arrival of every lane there are none). Under racecheck cuBLAS fails in second derivatives: --first leaves them
out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Callable, Iterator

import torch
from fusegrad import _C, flex_attention
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

MODS: dict[str, Callable[[list[Tensor]], Callable] | None] = {
    "none": None,
    "softcap": lambda t: lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "A": lambda t: lambda s, b, h, i, j: s * t[0][h],
    "B": lambda t: lambda s, b, h, i, j: s + t[1][j],
    "C": lambda t: lambda s, b, h, i, j: s * t[2][i],
    "D": lambda t: lambda s, b, h, i, j: s + t[3][h, i - j + t[3].shape[1] // 2],
    "E": lambda t: lambda s, b, h, i, j: s + t[4][h, i, j],
    "E in 16 bits": lambda t: lambda s, b, h, i, j: s + t[7][h, i, j],
    "E by batch": lambda t: lambda s, b, h, i, j: s + t[8][b, h, i, j],
    "E, heads last": lambda t: lambda s, b, h, i, j: s + t[9][h, i, j],
    "E by group": lambda t: lambda s, b, h, i, j: s + t[10][b // 4, h, i, j],
    "F": lambda t: lambda s, b, h, i, j: s + t[5][(i * 3 + j) % 64],
    "G": lambda t: lambda s, b, h, i, j: s + t[6][(i * 31 + j * 7) % 5000],
    "buckets": lambda t: lambda s, b, h, i, j: s + t[3][h, (i - j) // 16 + t[3].shape[1] // 2],
    "AD": lambda t: lambda s, b, h, i, j: s * t[0][h] + t[3][h, i - j + t[3].shape[1] // 2],
}
MASKS = ("none", "causal", "window", "documents")
# "split": whatever takes calls of few queries, whose keys are split.
SIZES = {"portable": (32, 64, 128, 256), "hopper": (64, 80, 128, 192, 256), "split": (64, 128, 256)}


# B, H, key heads, M, N. With many heads a CTA that stays goes on to another; with many queries tiles are tall.
FEW, MANY, LONG = (2, 4, 2, 300, 333), (1, 160, 80, 100, 130), (1, 2, 1, 1700, 200)
# For keys that are split: few queries in a tile of a group's heads, and the usual tiles.
GROUPED, USUAL = (2, 6, 2, 5, 1500), (1, 2, 1, 40, 3000)
# For many batches: windows, of which CTAs stay with a head, and more pairs, whose sums are over the batches, and whose
# rows are multiples of 16 bytes.
WINDOWS, SHARED = (9, 4, 4, 49, 49), (5, 4, 2, 130, 264)
# Heads of 192 whose values have 128 columns, and so many keys that dQ is summed up.
LATENT = (1, 14, 7, 1700, 1700, 128)


def cases(family: str) -> Iterator[tuple[torch.dtype, str, str, int, bool, tuple[int, ...]]]:
    """Dtype, score_mod, mask, head size, deterministic, of each pair of which that matters one call at least; sizes."""
    dtypes = [torch.bfloat16, torch.float16 if family == "hopper" else torch.float32]
    often, seldom = (GROUPED, USUAL) if family == "split" else (FEW, MANY)
    for dtype in dtypes:
        sizes = [d for d in SIZES[family] if dtype != torch.float32 or d <= 128]
        every = list(itertools.product(MODS, MASKS, sizes, (False, True)))
        random.Random(0).shuffle(every)
        seen: set[tuple] = set()
        found = 0
        for case in every:
            new = {("mod", case[0], case[3]), ("mask", case[1], case[2]), ("size", case[2], case[3])} - seen
            if new:
                seen |= new
                yield dtype, *case, often if found % 4 else seldom
                found += 1
    if family == "split":
        return
    for mask, size, deterministic in (("causal", 128, False), ("causal", 128, True), ("none", 64, False)):
        yield torch.bfloat16, "none", mask, size, deterministic, LONG
    if family == "portable":
        for mod, sizes in itertools.product(("none", "E", "F", "E by group"), (WINDOWS, SHARED)):
            yield torch.bfloat16, mod, "none", 32, mod == "F", sizes
    else:
        pairs = ("E", "E in 16 bits", "E by batch", "E by group")
        for mod, mask, size in itertools.product(pairs, ("none", "causal"), (32, 64)):
            yield torch.bfloat16, mod, mask, size, False, SHARED
        for mod in pairs:
            yield torch.bfloat16, mod, "none", 32, True, SHARED
        for mask, deterministic in itertools.product(("none", "causal", "window"), (False, True)):
            yield torch.bfloat16, "none", mask, 192, deterministic, LATENT


def call(dtype: torch.dtype, mod: str, mask: str, d: int, deterministic: bool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    b, h, g, m, n, *e = sizes
    shapes = ((b, h, m, d), (b, g, n, d), (b, g, n, *(e or [d])))
    tensors = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    captured = [
        torch.randn(shape, device="cuda").requires_grad_()
        for shape in ((h,), (n,), (m,), (h, m + n), (h, m, n), (64,), (5000,))
    ]
    captured.append(captured[4].detach().bfloat16().requires_grad_())
    captured.append(torch.randn(b, h, m, n, device="cuda").bfloat16().requires_grad_())
    captured.append(torch.randn(m, n, h, device="cuda").bfloat16().movedim(-1, 0).requires_grad_())
    captured.append(torch.randn(-(-b // 4), h, m, n, device="cuda").bfloat16().requires_grad_())
    documents = torch.arange(n, device="cuda") // 100
    masks: dict[str, Callable] = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i - j).abs() < 70,
        "documents": lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j),
    }
    blocks = None if mask == "none" else create_block_mask(masks[mask], None, None, m, n, device="cuda")
    make = MODS[mod]
    out = flex_attention(
        *tensors, None if make is None else make(captured), blocks, enable_gqa=True, deterministic=deterministic
    )
    used = [] if make is None else captured
    torch.autograd.grad(out, tensors + used, torch.ones_like(out), allow_unused=True)
    torch.cuda.synchronize()


def call_in_forward_mode(dtype: torch.dtype, biased: bool, masked: bool, d: int, dropout_p: float) -> None:
    torch.manual_seed(0)
    b, h, g, m, n = FEW
    shapes = ((b, h, m, d), (b, g, n, d), (b, g, n, d))
    given, moved = (
        (*(torch.randn(shape, device="cuda").to(dtype) for shape in shapes), torch.randn(h, m, n, device="cuda"))
        for _ in range(2)
    )
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, m, n, device="cuda") if masked else None

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mod = (lambda s, b, h, i, j: s + bias[h, i, j]) if biased else None
        return flex_attention(query, key, value, mod, blocks, enable_gqa=True, dropout_p=dropout_p)

    torch.func.jvp(attention, given, moved)
    torch.cuda.synchronize()


def call_twice_differentiated(dtype: torch.dtype, capped: bool, masked: bool, d: int) -> None:
    """A gradient penalty, and forward mode over the backward."""
    torch.manual_seed(0)
    b, h, g, m, n = FEW
    shapes = ((b, h, m, d), (b, g, n, d), (b, g, n, d))
    given, moved = (tuple(torch.randn(shape, device="cuda").to(dtype) for shape in shapes) for _ in range(2))
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, m, n, device="cuda") if masked else None

    def loss(*x: Tensor) -> Tensor:
        mod = (lambda s, b, h, i, j: 2 * torch.tanh(s / 2)) if capped else None
        return flex_attention(*x, mod, blocks, enable_gqa=True).square().sum()

    gradient = torch.func.grad(loss, (0, 1, 2))
    torch.func.grad(lambda *x: sum(y.square().sum() for y in gradient(*x)), (0, 1, 2))(*given)
    torch.func.jvp(gradient, given, moved)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Small calls of flex_attention, for compute-sanitizer.")
    parser.add_argument("--family", choices=tuple(SIZES), default="hopper")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="processes that share the calls")
    parser.add_argument("--first", action="store_true", help="no second derivatives")
    parser.add_argument("--whole", action="store_true", help="backwards whose CTAs have all keys of a head")
    options = parser.parse_args()
    # The scratch memory is one allocation: sanitizers do not see a write from one region into the next.
    os.environ.setdefault("FUSEGRAD_CHECK_SCRATCH", "1")
    if options.family != "split":
        _C.flex.force_family(options.family)
    if options.whole:
        _C.flex.force_whole(1)
    mine = list(cases(options.family))[options.part :: options.parts]
    for case in mine:
        call(*case)
    if options.family != "split":
        dtypes = [torch.bfloat16, torch.float16 if options.family == "hopper" else torch.float32]
        modes = list(itertools.product(dtypes, (False, True), (False, True), (64, 128), (0.0, 0.1)))
        modes = modes[options.part :: options.parts]
        for mode in modes:
            call_in_forward_mode(*mode)
        twice = [] if options.first else list(itertools.product(dtypes, (False, True), (False, True), (64, 128)))
        twice = twice[options.part :: options.parts]
        for again in twice:
            call_twice_differentiated(*again)
        mine += [*modes, *twice]
    print(f"{len(mine)} calls of the {options.family} kernels")


if __name__ == "__main__":
    main()
