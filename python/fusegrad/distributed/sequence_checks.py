"""What must hold of a call over a spread sequence, and which way it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..score_mod import ScoreMod, split_scalars
from .gradients import on_meta
from .sequence import ContextParallel
from .sequence_ranges import Ranges

__all__ = ["OP", "Options"]

_ops = torch.ops.fusegrad
OP = "flex_attention"
# Below this, keys and values of the whole sequence are gathered whatever their number of heads is.
_SMALL = 64 << 20


@dataclass
class Options:
    scale: float | None
    enable_gqa: bool
    max_scores: bool
    deterministic: bool | None
    dropout_p: float


def takes_ring(context: ContextParallel, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, int]) -> bool:
    if context.way != "auto":
        return context.way == "ring"
    # The same numbers in all processes: not those of a part.
    width = key.shape[3] + value.shape[3]
    keys = key.shape[0] * key.shape[1] * lengths[1] * width * key.element_size()
    queries = query.shape[0] * query.shape[1] * lengths[0] * width * query.element_size() // context.world
    return keys > max(queries, _SMALL)


def is_own(block_mask: BlockMask, own: tuple[int, int], whole: tuple[int, int]) -> bool:
    lengths = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    if lengths == whole:
        return False
    if lengths == own:
        return True
    raise ValueError(
        f"{OP}: block_mask must be made for the whole sequence, {whole[0]} queries and {whole[1]} keys, or for this "
        f"process's {own[0]} queries and {own[1]} keys, but got one for {lengths[0]} and {lengths[1]}"
    )


def check_own(block: int, ranges: Ranges) -> None:
    row = 0
    for start, stop in ranges:
        if row % block and stop > start:
            raise ValueError(
                f"{OP}: a block_mask of this process's queries must have a block_size that divides its ranges' "
                f"lengths, but got {block} and {list(ranges)}: take a mask of the whole sequence"
            )
        row += stop - start


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: ScoreMod | None,
    mask: ScoreMod | None,
    block_mask: BlockMask | None,
    options: Options,
    lengths: tuple[int, int],
    own_mask: bool,
) -> None:
    """The op's own checks, on tensors of the whole problem's shapes without data."""

    def whole(t: Tensor, length: int) -> Tensor:
        return on_meta(t, (*t.shape[:2], length, t.shape[3]))

    def mod(name: str, m: ScoreMod | None) -> tuple[Any, ...]:
        if m is None:
            return "", [], [], []
        for i, b in enumerate(m.buffers):
            if b.device != query.device:
                raise ValueError(
                    f"{OP}: {name}'s buffer @{i} must be on the query's device {query.device}, but got {b.device}"
                )
        return m.text, [on_meta(b) for b in m.buffers], *split_scalars(m.scalars)

    for name, t in (("key", key), ("value", value)):
        if t.device != query.device:
            raise ValueError(f"{OP}: {name} must be on the query's device {query.device}, but got {t.device}")
    lists: Sequence[Tensor] = []
    size: list[int] = []
    if block_mask is not None:
        m = block_mask
        lists = [
            on_meta(t)
            for t in (m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices)
            if t is not None
        ]
        if m.kv_num_blocks.device != query.device:
            raise ValueError(
                f"{OP}: block_mask must be on the query's device {query.device}, but got {m.kv_num_blocks.device}: "
                "take block_mask.to(query.device)"
            )
        size = [m.BLOCK_SIZE] * 2 if isinstance(m.BLOCK_SIZE, int) else list(m.BLOCK_SIZE)
    with torch.no_grad():
        _ops.flex_attention(
            whole(query, query.shape[2] if own_mask else lengths[0]),
            whole(key, lengths[1]),
            whole(value, lengths[1]),
            *mod("score_mod", score),
            *mod("mask_mod", mask),
            lists,
            size,
            options.scale,
            options.enable_gqa,
            False,
            False,
            int(options.max_scores),
            options.dropout_p,
        )
