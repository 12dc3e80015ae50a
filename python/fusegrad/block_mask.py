"""Block masks: which blocks of queries and keys take part, made from a mask_mod or from the ends of packed sequences.

Letters: B batch, H query heads, M queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._arguments import Device, checked, device_of
from .score_mod import ScoreMod, split_scalars, trace_mask_mod

__all__ = ["create_block_mask", "varlen_mask"]

_DEFAULT_BLOCK = 128
# A BlockMask's lists, in the order of the op's.
_LISTS = tuple(f"{of}_{what}" for of in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices"))


def _pair(op: str, block_size: int | tuple[int, int]) -> list[int]:
    sizes = [block_size, block_size] if isinstance(block_size, int) else list(block_size)
    if len(sizes) != 2:
        raise ValueError(f"{op}: block_size must be one or two numbers, but got {block_size!r}")
    return sizes


def fields_of(
    mask_mod: Callable[..., Any] | ScoreMod, sizes: list[int], device: torch.device, block_size: list[int]
) -> dict[str, Any]:
    """What a BlockMask is made of, for ``sizes`` B, H, M and N."""
    mod = trace_mask_mod(mask_mod, device=device)
    lists = torch.ops.fusegrad.create_block_mask(
        torch.empty(0, device=device),
        mod.text.replace("\n", ";"),
        list(mod.buffers),
        *split_scalars(mod.scalars),
        sizes,
        block_size,
    )
    return {
        "seq_lengths": (sizes[2], sizes[3]),
        **dict(zip(_LISTS, lists, strict=True)),
        "BLOCK_SIZE": (block_size[0], block_size[1]),
        "mask_mod": mask_mod,
    }


@checked
def create_block_mask(
    mask_mod: Callable[..., Any] | ScoreMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
    BLOCK_SIZE: int | tuple[int, int] | None = None,
    _compile: bool = False,
    *,
    block_size: int | tuple[int, int] | None = None,
) -> BlockMask:
    """Makes PyTorch's ``BlockMask`` of a mask_mod, equal to what PyTorch's ``create_block_mask`` makes, whose arguments
    it takes.

    Bounds of the mask_mod over whole blocks decide most of them: those of its indices, and minima and maxima of what it
    captures. Pairs are asked only where bounds do not decide, so that no memory of the order of Q_LEN * KV_LEN is
    needed, only the lists of the BlockMask themselves. Other values of captured tensors, and other lengths, compile
    nothing anew. See docs/design/block_masks.md.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, or what :func:`fusegrad.trace_mask_mod` made of it.
        B: Batch size; None stands for any.
        H: Heads; None stands for any.
        Q_LEN: Queries.
        KV_LEN: Keys.
        device: Where the lists are made; the captured tensors must be there. Default: that of the first captured
            tensor which is not on the CPU, else PyTorch's default device.
        BLOCK_SIZE: Queries and keys of a block, or one number for both; 128 by default.
        _compile: Taken for PyTorch's sake: bounds need neither compiling nor the memory that it saves there.
        block_size: Another name of BLOCK_SIZE, the one that fusegrad's other functions have.

    Returns:
        The ``BlockMask``, with lists by queries and by keys. A block that ends beyond the last query or key is never
        full, as in PyTorch.

    Raises:
        TraceError: where the mask_mod does what cannot be traced.
        ValueError: where a size is wrong, or a captured tensor is on another device.
        IndexError: on the CPU, where a pair reads a captured tensor out of range; on CUDA such a read gives 0.
    """
    place = device_of("create_block_mask", device)
    if place is None:
        found = [b.device for b in trace_mask_mod(mask_mod).buffers if b.device.type != "cpu"]
        place = found[0] if found else torch.empty(0).device
    if BLOCK_SIZE is not None and block_size is not None:
        raise ValueError(
            "create_block_mask: BLOCK_SIZE must not come together with block_size, another name of it, but got "
            f"{BLOCK_SIZE} and {block_size}"
        )
    given = block_size if BLOCK_SIZE is None else BLOCK_SIZE
    blocks = _pair("create_block_mask", _DEFAULT_BLOCK if given is None else given)
    sizes = [1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN]
    return BlockMask(**fields_of(mask_mod, sizes, place, blocks))


@checked
def varlen_mask(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    lengths: tuple[int, int] | None = None,
    block_size: int | tuple[int, int] = _DEFAULT_BLOCK,
) -> BlockMask:
    """The block mask of packed sequences: a query sees keys of its own sequence alone.

    A query's place among the keys is counted from the ends of both sequences: the last query stands at the last key, as
    in FlashAttention.

    Args:
        cu_seqlens_q: ``[sequences + 1]``, int32 or int64, not descending from 0 on: sequence i has the queries from
            ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``, without the latter. On the device of the mask. On the CPU
            the values are checked.
        cu_seqlens_k: The same of the keys; by default ``cu_seqlens_q``.
        causal: A query sees no key after its own place.
        window: How many keys before and after its own place a query sees; -1: all.
        lengths: M and N, where the packed tensors are longer than the sequences: what lies beyond takes no part. By
            default the sequences' own, for which a GPU must be waited for.
        block_size: Queries and keys of a block, or one number for both.

    Returns:
        PyTorch's ``BlockMask`` for one batch and all heads; its mask_mod reads two numbers of each query.

    Raises:
        TypeError, ValueError: where an argument is not as above.
    """
    sizes = _pair("varlen_mask", block_size)
    ends = [cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k]
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"varlen_mask: window must be two numbers from -1 on, but got {window}")
    unread = cu_seqlens_q.device.type != "cpu" or torch.compiler.is_compiling()
    totals = None if lengths is not None and unread else _totals(ends)
    if lengths is None:
        assert totals is not None
        lengths = totals
    if totals is not None and (lengths[0] < totals[0] or lengths[1] < totals[1]):
        raise ValueError(f"varlen_mask: lengths must not be below those of the sequences, {totals}, but got {lengths}")
    first, last = torch.ops.fusegrad.varlen_keys(*ends, lengths[0], causal, left, right)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= first[q_idx]) & (kv_idx <= last[q_idx])

    return BlockMask(**fields_of(mask_mod, [1, 1, *lengths], cu_seqlens_q.device, sizes))


def _totals(ends: list[Tensor]) -> tuple[int, int]:
    """The lengths of the sequences together, of queries and of keys."""
    totals = []
    for name, one in zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True):
        if one.is_nested or one.layout != torch.strided or one.dim() != 1 or one.numel() < 2:
            got = "a nested tensor" if one.is_nested else f"{list(one.shape)}, {one.layout}"
            raise ValueError(f"varlen_mask: {name} must be [sequences + 1], dense, but got {got}")
        if one.device.type == "cpu" and not (one[0] == 0 and bool((one.diff() >= 0).all())):
            raise ValueError(f"varlen_mask: {name} must not descend from 0 on, but got {one.tolist()[:16]}")
        totals.append(int(one[-1]))
    return totals[0], totals[1]
