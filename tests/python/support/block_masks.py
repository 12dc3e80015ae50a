"""mask_mods of the field, for tests that go over them all: each is made for B, H, M queries, N keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from score_mods import CASES
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

__all__ = ["BLOCK_MASKS", "blocks_of", "dense"]

MaskMod = Callable[..., Tensor]
Make = Callable[[int, int, int, int], MaskMod]
BLOCK_MASKS: dict[str, Make] = {}


def mask(name: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        BLOCK_MASKS[name] = make
        return make

    return add


def plain(**masks: MaskMod) -> None:
    """Masks that capture nothing."""
    for name, mod in masks.items():
        BLOCK_MASKS[name.replace("_", " ")] = lambda B, H, M, N, mod=mod: mod


def dense(mask_mod: MaskMod, B: int, H: int, M: int, N: int) -> Tensor:
    """``[B, H, M, N]``, every pair at once."""
    places = torch.meshgrid(*(torch.arange(size) for size in (B, H, M, N)), indexing="ij")
    return mask_mod(*places).expand(B, H, M, N)


def blocks_of(allowed: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which blocks are partial and which full, bool: a block that ends beyond the pairs is never full."""
    M, N = allowed.shape[-2:]
    rows, cols = block_size
    padded = torch.nn.functional.pad(allowed, (0, -N % cols, 0, -M % rows))
    blocks = padded.unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows)).transpose(-3, -2).flatten(-2)
    full = blocks.all(-1)
    return blocks.any(-1) & ~full, full


def causal(b, h, q, kv):
    return q >= kv


def documents(S: int, count: int = 5) -> Tensor:
    return torch.randint(0, count, (S,)).sort().values


for case in CASES:

    def make(B: int, H: int, M: int, N: int, case=case) -> MaskMod:
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        return case.make(B, H, M, N, torch.float32, generator)[1]

    if case.make(2, 3, 40, 48, torch.float32, torch.Generator("cpu").manual_seed(0))[0] is None:
        BLOCK_MASKS[case.name] = make

plain(
    strictly_causal=lambda b, h, q, kv: q > kv,
    anticausal=lambda b, h, q, kv: q <= kv,
    everything=noop_mask,
    nothing=lambda b, h, q, kv: q < 0,
    window=lambda b, h, q, kv: (q >= kv) & (q - kv < 40),
    window_on_both_sides=lambda b, h, q, kv: (q - kv).abs() < 33,
    window_by_squares=lambda b, h, q, kv: (q - kv) ** 2 < 900,
    window_by_floats=lambda b, h, q, kv: (q - kv).float().abs() * 0.5 <= 16.0,
    window_by_a_quotient=lambda b, h, q, kv: (q - kv) / 40 <= 1.0,
    window_by_a_root=lambda b, h, q, kv: ((q - kv) ** 2 + 1.0).sqrt() < 30,
    window_by_exp=lambda b, h, q, kv: torch.exp(-(q - kv).abs() / 16) > 0.1,
    sinks_and_a_window=lambda b, h, q, kv: (kv < 4) | ((q >= kv) & (q - kv < 24)),
    dilated=lambda b, h, q, kv: (q - kv) % 3 == 0,
    dilated_window=lambda b, h, q, kv: ((q - kv).abs() < 60) & ((q - kv) % 4 == 0),
    strided=lambda b, h, q, kv: (q >= kv) & ((q - kv < 16) | (kv % 16 == 15)),
    chunks=lambda b, h, q, kv: (q // 48 == kv // 48) & (q >= kv),
    chunks_of_a_block=lambda b, h, q, kv: q // 32 == kv // 32,
    blockwise_causal=lambda b, h, q, kv: q // 32 >= kv // 32,
    blocks_by_shifts=lambda b, h, q, kv: (q >> 5) == (kv >> 5),
    remainder_by_bits=lambda b, h, q, kv: (q & 31) >= (kv & 31),
    parity_by_xor=lambda b, h, q, kv: ((q ^ kv) & 64) == 0,
    butterfly=lambda b, h, q, kv: ((q // 16) ^ (kv // 16)) & ((q // 16) ^ (kv // 16)) - 1 == 0,
    prefix=lambda b, h, q, kv: (kv < 50) | (q >= kv),
    prefix_by_batch=lambda b, h, q, kv: (kv < 40 * (b + 1)) | (q >= kv),
    windows_by_head=lambda b, h, q, kv: (q - kv).abs() <= 20 * h,
    one_head_causal=lambda b, h, q, kv: torch.where(h == 1, q >= kv, q - kv < 70),
    heads_alternate=lambda b, h, q, kv: torch.where(h % 2 == 0, q >= kv, q <= kv),
    rings=lambda b, h, q, kv: (torch.minimum((q - kv) % 128, (kv - q) % 128)) < 20,
    vertical_stripes=lambda b, h, q, kv: (kv % 64 < 8) & (kv <= q),
    upper_half=lambda b, h, q, kv: q + kv < 150,
    from_the_end=lambda b, h, q, kv: -q > kv - 120,
    clamped=lambda b, h, q, kv: (q - 10).clamp(32, 96) >= kv,
    steps_of_floats=lambda b, h, q, kv: torch.floor(q / 48) == torch.floor(kv / 48),
    rounded=lambda b, h, q, kv: torch.round(q * 0.03) >= torch.round(kv * 0.03),
    signs=lambda b, h, q, kv: torch.sign(q - kv) + torch.sign(q - 100) > 0,
    not_causal=lambda b, h, q, kv: ~(q >= kv) | (q == kv),
    exclusive_or=lambda b, h, q, kv: (q >= kv) ^ (q - kv > 64),
    an_infinite_bound=lambda b, h, q, kv: (q - kv).float() < torch.inf,
    never_equal_to_nan=lambda b, h, q, kv: (q - kv) * torch.nan == 0,
    natten=lambda b, h, q, kv: ((q // 14 - kv // 14).abs() <= 3) & ((q % 14 - kv % 14).abs() <= 3),
    natten_3d=lambda b, h, q, kv: (
        ((q // 36 - kv // 36).abs() <= 1) & ((q // 6 % 6 - kv // 6 % 6).abs() <= 2) & ((q % 6 - kv % 6).abs() <= 2)
    ),
    tiles_of_an_image=lambda b, h, q, kv: (q // 14 // 4 == kv // 14 // 4) & (q % 14 // 4 == kv % 14 // 4),
)


@mask("documents, causal")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = documents(max(M, N))
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


@mask("documents of each batch")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = torch.stack([documents(max(M, N)) for _ in range(B)]).int()
    return lambda b, h, q, kv: ids[b, q] == ids[b, kv]


@mask("documents, one or two blocks long")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = torch.arange(max(M, N)) // 32 * 2 // 3
    return lambda b, h, q, kv: ids[q] == ids[kv]


@mask("documents that are not in order")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = torch.randint(0, 4, (max(M, N),)).to(torch.uint8)
    return lambda b, h, q, kv: ids[q] == ids[kv]


@mask("documents with padding")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = documents(max(M, N))
    ids[-30:] = -1
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0) & (q >= kv)


@mask("huge identifiers")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = documents(max(M, N)) * (1 << 61) - (1 << 62)
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] - ids[kv] + 1 > 0)


@mask("sums that wrap around")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    far = torch.full((max(M, N),), (1 << 63) - 100)
    return lambda b, h, q, kv: far[q] + q > far[kv] - kv


@mask("positions within documents")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = documents(max(M, N))
    starts = torch.searchsorted(ids, torch.arange(5))
    place = torch.arange(max(M, N)) - starts[ids]
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (place[q] >= place[kv]) & (place[q] - place[kv] < 20)


@mask("offsets of documents")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    ids = documents(max(M, N))
    starts = torch.searchsorted(ids, torch.arange(5))
    return lambda b, h, q, kv: (ids[q] == ids[kv]) & (q - starts[ids[q]] >= 2 * (kv - starts[ids[kv]]))


@mask("transfusion")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    """Text is causal, the tokens of an image see all of it."""
    begin, length = torch.tensor([[20, 110], [64, 128]])[:B], torch.tensor([[50, 30], [32, 9]])[:B]

    def image(b, h, q, kv):
        found = q < 0
        for i in range(2):
            start, end = begin[b, i], begin[b, i] + length[b, i]
            found = found | ((q >= start) & (q < end) & (kv >= start) & (kv < end))
        return found

    return or_masks(causal, image)


@mask("bounds of each query")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    first, count = torch.randint(0, N, (M,)), torch.randint(0, 60, (M,), dtype=torch.int32)
    return lambda b, h, q, kv: (kv >= first[q]) & (kv < first[q] + count[q])


@mask("a table of all pairs")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    table = torch.rand(M, N) < 0.0005
    return lambda b, h, q, kv: table[q, kv]


@mask("a table of blocks")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    table = torch.rand(H, math.ceil(M / 32), math.ceil(N / 32)) < 0.4
    return lambda b, h, q, kv: table[h, q // 32, kv // 32]


@mask("a table by distance")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    table = torch.arange(2 * max(M, N)) % 90 < 20
    return lambda b, h, q, kv: table[q - kv]


@mask("random floats below a bound")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    table = torch.rand(H, M, N)
    return lambda b, h, q, kv: (table[h, q, kv] < 0.3) & (q >= kv)


@mask("scores with infinities and NaN")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    score = torch.randn(max(M, N)).sort().values
    score[10], score[70], score[140] = torch.inf, -torch.inf, torch.nan
    return lambda b, h, q, kv: (score[q] > score[kv]) | ~(score[kv] < 1)


@mask("points near one another")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    x = torch.rand(max(M, N), 2).sort(0).values
    return lambda b, h, q, kv: (x[q, 0] - x[kv, 0]) ** 2 + (x[q, 1] - x[kv, 1]) ** 2 < 0.05


@mask("Sudoku")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    row, col = torch.arange(max(M, N)) // 9 % 9, torch.arange(max(M, N)) % 9
    box = row // 3 * 3 + col // 3
    return lambda b, h, q, kv: (row[q] == row[kv]) | (col[q] == col[kv]) | (box[q] == box[kv])


@mask("groups that see groups")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    group, sees = torch.randint(0, 7, (max(M, N),)).sort().values, torch.rand(7, 7) < 0.4
    return lambda b, h, q, kv: sees[group[q], group[kv]]


@mask("several of a number")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    window, prefix, sinks = 25, torch.tensor(60), 3
    near = or_masks(lambda b, h, q, kv: q - kv < window, lambda b, h, q, kv: kv < sinks)
    return and_masks(or_masks(lambda b, h, q, kv: kv < prefix, causal), near)


@mask("any of several ranges")
def _(B: int, H: int, M: int, N: int) -> MaskMod:
    begin = torch.arange(20) * 11
    return lambda b, h, q, kv: ((begin <= kv) & (kv < begin + 4)).any() & (q >= kv)
