"""ContextParallel.balanced: ranges of as many tokens and as much work for each process, without any process."""

import itertools
import math

import pytest
import torch
from coverings import each_of, pairs_of
from fusegrad.distributed.sequence_columns import Columns
from fusegrad.distributed.sequence_masks import Piece, pieces
from fusegrad.distributed.sequence_ranges import balanced_ranges, covered, sizes_of, zigzag
from fusegrad.distributed.sequence_rows import Sum
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

WORLDS = (2, 3, 4, 5, 8)
BLOCK = 16


def documents(rows: int, seed: int, mean: int = 64) -> Tensor:
    """By row of blocks, which document it is of."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(rows, (max(rows // mean, 3),), generator=generator).sort().values
    return torch.bucketize(torch.arange(rows), ends, right=True)


def blocks_of(kind: str, rows: int, seed: int) -> Tensor:
    row, column = torch.arange(rows)[:, None], torch.arange(rows)
    document = documents(rows, seed)
    same = document[:, None] == document
    return {
        "causal": row >= column,
        "documents": same & (row >= column),
        "both ways": same,
        "window": (row >= column) & (row - column < 20),
    }[kind]


def mask_of(blocks: Tensor, length: int, full: bool = False) -> BlockMask:
    """`blocks` [..., rows, columns]: which a mask lists, every third of them as full ones where asked for."""
    if blocks.dim() == 2:
        blocks = blocks[None, None]
    whole = blocks & (torch.arange(blocks.shape[-1]) % 3 == 0) if full else torch.zeros_like(blocks)
    lists = []
    for part in (blocks & ~whole, whole):
        order = part.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        lists += [part.sum(-1, dtype=torch.int32), order]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, seq_lengths=(length, length))


def works(ranges: list[list[tuple[int, int]]], blocks: Tensor) -> list[float]:
    """Blocks that each process's rows list; a range's part of a row counts as that part."""
    by_token = blocks.sum(-1).double().repeat_interleave(BLOCK) / BLOCK
    return [sum(float(by_token[a:b].sum()) for a, b in its) for its in ranges]


@pairs_of(
    {"world": [*WORLDS], "kind": ["causal", "documents", "both ways", "window"], "rows, rest": [(960, 0), (1001, 5)]}
)
def test_tokens_and_work_are_equal(kind: str, world: int, rows: int, rest: int) -> None:
    length = rows * BLOCK - rest
    for seed in range(1 if kind in ("causal", "window") else 2):
        blocks = blocks_of(kind, rows, seed)
        mask = mask_of(blocks, length, full=True)
        ranges = balanced_ranges(mask, world)
        assert ranges == balanced_ranges(mask, world)
        assert covered([tuple(its) for its in ranges]) == length
        sizes = sizes_of([tuple(its) for its in ranges])
        assert max(sizes) - min(sizes) <= (0 if rows % world == 0 and rest == 0 else 2 * BLOCK)
        work = works(ranges, blocks)
        assert max(work) <= 1.015 * sum(work) / world, (seed, work)
        assert sum(map(len, ranges)) <= 2 * world - 1
        assert max(map(len, ranges)) <= math.ceil(math.log2(world)) + 1
        for its in ranges:
            assert all(a < b for a, b in its) and all(first[1] < second[0] for first, second in itertools.pairwise(its))
            assert all(end % BLOCK == 0 or end == length for pair in its for end in pair)


@pytest.mark.parametrize("world", WORLDS)
def test_causal_masks_are_no_worse_than_zigzag(world: int) -> None:
    blocks = blocks_of("causal", 960, 0)
    mask = mask_of(blocks, 960 * BLOCK)
    ranges = balanced_ranges(mask, world)
    theirs = [list(its) for its in zigzag(960 * BLOCK, world)]
    assert max(works(ranges, blocks)) <= max(works(theirs, blocks))
    assert sum(map(len, ranges)) <= sum(map(len, theirs))


@pytest.mark.parametrize("kind", ["documents", "both ways"])
def test_cuts_are_where_few_keys_lie_across(kind: str) -> None:
    """Where starts of documents give equal work, they are cut there."""
    document = torch.bucketize(torch.arange(1024), torch.tensor([96, 256, 352, 512, 640, 768, 896]), right=True)
    same = document[:, None] == document
    blocks = same if kind == "both ways" else same.tril()
    ranges = balanced_ranges(mask_of(blocks, 1024 * BLOCK), 2)
    for start, _ in itertools.chain.from_iterable(ranges):
        row = start // BLOCK
        assert row == 0 or document[row] != document[row - 1], ranges


@pytest.mark.parametrize("world", WORLDS)
def test_equal_rows_are_one_range_each(world: int) -> None:
    ranges = balanced_ranges(mask_of(torch.eye(96, dtype=torch.bool), 96 * BLOCK), world)
    assert [len(its) for its in ranges] == [1] * world


def test_heads_and_batches_count_alike() -> None:
    blocks = torch.stack([blocks_of("causal", 96, 0), blocks_of("window", 96, 0)])[None].expand(2, -1, -1, -1)
    ranges = balanced_ranges(mask_of(blocks, 96 * BLOCK), 2)
    work = works(ranges, blocks.double().mean((0, 1)))
    assert max(work) <= 1.01 * sum(work) / 2


@each_of({"length": [1, 3, BLOCK, 3 * BLOCK + 1], "world": [*WORLDS]})
def test_short_sequences(length: int, world: int) -> None:
    """Shorter than a block a process, or than a token a process."""
    rows = -(-length // BLOCK)
    ranges = balanced_ranges(mask_of(blocks_of("causal", rows, 0), length), world)
    assert covered([tuple(its) for its in ranges]) == length and len(ranges) == world
    sizes = sizes_of([tuple(its) for its in ranges])
    assert max(sizes) - min(sizes) <= (1 if length < world * BLOCK else 2 * BLOCK)


def test_nothing_listed_is_an_error() -> None:
    with pytest.raises(ValueError, match="must list blocks"):
        balanced_ranges(mask_of(torch.zeros(4, 4, dtype=torch.bool), 4 * BLOCK), 2)


def test_ranges_that_follow_each_other_are_one_piece() -> None:
    assert pieces(((4, 8), (8, 12), (0, 4)), 4) == [Piece(4, 12, 0), Piece(0, 4, 8)]
    assert pieces(((2, 6), (6, 12)), 4) == [Piece(2, 4, 0), Piece(4, 12, 2)]


def test_own_keys_are_read_where_they_are() -> None:
    """Only pieces that need others' keys, or own ones that do not follow each other, have a tensor made for them."""
    queries = [{Piece(0, 8, 0): (0, 8), Piece(12, 16, 8): (10, 16)}, {Piece(8, 12, 0): (8, 12)}]
    keys = (((0, 8), (12, 16)), ((8, 12),))
    first, second = (Columns(queries, keys, rank) for rank in range(2))
    assert first.home == {Piece(0, 8, 0)} and first.local == [Piece(0, 8, 0)] and first.size == 6
    assert first.own == [(8, 2, 4)] and first.inbound == [[], [(2, 0, 2)]] and second.outbound == [[(2, 8, 2)], []]
    assert second.home == {Piece(8, 12, 0)} and second.size == 0
    assert first.apart and second.apart
    assert not Columns([{Piece(0, 2, 0): (0, 5), Piece(4, 8, 2): (4, 8)}], [((0, 8),)], 0).apart


def test_sums_are_written_once_and_added_in_float32() -> None:
    parts = [torch.randn(1, 2, 6, 3).bfloat16() for _ in range(3)]
    total = Sum(lambda: torch.full((1, 2, 12, 3), torch.nan), 12, torch.float32)
    for row, part in zip((0, 4, 4), parts, strict=True):
        total.add(row, part)
    right = torch.zeros(1, 2, 12, 3)
    for row, part in zip((0, 4, 4), parts, strict=True):
        right[:, :, row : row + 6] += part.float()
    assert total.finished().equal(right)
    # One part of all rows takes the total's place, until another comes.
    whole = Sum(lambda: torch.full((1, 2, 6, 3), torch.nan), 6, torch.float32)
    whole.add(0, parts[0])
    assert whole.finished() is parts[0]
    whole.add(0, parts[1])
    assert whole.finished().equal(parts[0].float() + parts[1].float())
    nothing = Sum(lambda: torch.full((1, 2, 6, 3), torch.nan), 6, torch.float32)
    assert nothing.finished().equal(torch.zeros(1, 2, 6, 3))
