"""Block masks: which blocks of queries and keys take part, made of a mask_mod, of the ends of packed sequences, of a
dense mask, or of PyTorch's.

Letters: B batch, H query heads, M queries, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusegrad._C import score_mod as language

from ._block_states import bounds_within, states_by_bounds
from ._score_mod import Mod, trace_mask_mod

__all__ = ["BlockMask", "block_mask_from_dense", "block_mask_from_torch", "create_block_mask", "varlen_mask"]

_DEFAULT_BLOCK = 128
_PAIRS = 1 << 22
"""For tracers at most so many pairs are asked at a time, or those of one block."""
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class BlockMask:
    """Which blocks of queries and keys take part; the leaves are the lists and what the mask_mod captures.

    A row of blocks lists the columns of which some pairs take part (``kv``) and those of which all do (``full_kv``):
    how many there are, and their numbers, ascending, before all others. The lists are int32, ``[batches, heads,
    rows]`` and ``[batches, heads, rows, columns]``; 1 batch or head stands for any number.
    """

    kv_num_blocks: jax.Array
    kv_indices: jax.Array
    full_kv_num_blocks: jax.Array
    full_kv_indices: jax.Array
    mask_mod: Mod
    """What decides the pairs of blocks that are not full, in the score_mod language."""
    BLOCK_SIZE: tuple[int, int]
    """The queries and keys of a block."""
    seq_lengths: tuple[int, int]
    """M and N."""

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        lists = tuple(getattr(self, name) for name in _LISTS)
        mod = self.mask_mod
        return (*lists, mod.buffers), (mod.text, mod.scalars, self.BLOCK_SIZE, self.seq_lengths)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> BlockMask:
        text, scalars, block_size, lengths = static
        count, index, full_count, full_index, buffers = leaves
        return cls(count, index, full_count, full_index, Mod(text, buffers, scalars), block_size, lengths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, H, M and N, where B and H may be 1 for any."""
        batches, heads = self.kv_num_blocks.shape[:2]
        return (batches, heads, *self.seq_lengths)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
) -> BlockMask:
    """Makes a :class:`BlockMask` of a mask_mod, with the lists that PyTorch's ``create_block_mask`` makes.

    The mask_mod may capture arrays and tracers. The call may stand within ``jit``, ``vmap`` and the like, and what it
    makes may cross them. Bounds of the mask_mod over whole blocks decide most of them, and pairs are asked where these
    do not: on the host where what it captures has values, else within the program.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, of scalars.
        B: Batch size; None stands for any.
        H: Heads; None stands for any.
        Q_LEN: Queries.
        KV_LEN: Keys.
        BLOCK_SIZE: Queries and keys of a block, or one number for both.

    Raises:
        TraceError: where the mask_mod does what cannot be traced.
        ValueError, TypeError: ``fusegrad.jax.create_block_mask: what must hold, but got <value>``.
        IndexError: where indices that the mask_mod promised to be in range are not, and what it captures has values.
    """
    op = "fusegrad.jax.create_block_mask"
    if not callable(mask_mod):
        raise TypeError(f"{op}: mask_mod must be a function, but got {type(mask_mod).__name__}")
    sizes = _numbers(op, "B, H, Q_LEN and KV_LEN", (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN))
    return _made(op, mask_mod, sizes, _pair(op, BLOCK_SIZE))


def _made(op: str, mask_mod: Callable[..., Any], sizes: tuple[int, ...], block: tuple[int, int]) -> BlockMask:
    mod = trace_mask_mod(mask_mod, sizes=_told(sizes), op=op)
    states = states_by_bounds(op, mod, sizes, block)
    if states is not None:
        partial, full = states == 1, states == 2
    else:
        asked = [of for operation, _, of, _ in language.parse(mod.text).nodes() if operation == "input"]
        asked_sizes = [n if name in asked else min(n, 1) for name, n in zip(("b", "h"), sizes, strict=False)]
        any_pair, full = _states(mask_mod, mod, (*asked_sizes, *sizes[2:]), block)
        partial = any_pair & ~full
    library: Any = jnp if states is None else np
    shape = (*sizes[:2], *partial.shape[2:])  # 1 batch or head of what the mask_mod does not ask
    partial, full = (library.broadcast_to(x, shape) for x in (partial, full))
    return _listed(partial, full, mod, block, (sizes[2], sizes[3]))


def _told(sizes: tuple[int, ...]) -> tuple[int | None, ...]:
    """What a mask_mod may count upon: 1 batch or head stands for any number."""
    return (*(n if n > 1 else None for n in sizes[:2]), *sizes[2:])


def _listed(partial: Any, full: Any, mod: Mod, block: tuple[int, int], lengths: tuple[int, int]) -> BlockMask:
    library: Any = np if isinstance(partial, np.ndarray) else jnp
    orders = [jnp.asarray(library.argsort(~listed, axis=-1, stable=True), jnp.int32) for listed in (partial, full)]
    counts = [jnp.asarray(listed.sum(-1), jnp.int32) for listed in (partial, full)]
    return BlockMask(counts[0], orders[0], counts[1], orders[1], mod, block, lengths)


def _states(
    mask_mod: Callable[..., Any], mod: Mod, sizes: tuple[int, ...], block: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """For each block, [B, H, rows, columns], whether any and whether all of its pairs take part. One that ends beyond
    the queries or keys has pairs that do not. Pairs are asked, some blocks at a time, where bounds do not decide."""
    batches, heads, queries, keys = sizes
    rows, columns = -(-queries // block[0]), -(-keys // block[1])
    shape = (batches, heads, rows, columns)
    count = batches * heads * rows * columns
    if 0 in sizes:
        return jnp.zeros(shape, bool), jnp.zeros(shape, bool)
    some, all_pairs = (x.reshape(-1) for x in bounds_within(mod, sizes, block))
    open_ones = some & ~all_pairs
    at_a_time = min(max(1, _PAIRS // (block[0] * block[1])), count)
    (order,) = jnp.nonzero(open_ones, size=count + at_a_time, fill_value=count)
    # A loop of unknown length has no gradient in reverse mode, not even of bools: nothing in it may be differentiated.
    asked, floats = jax.closure_convert(mask_mod, *[jnp.int32(0)] * 4)
    constants = [jax.lax.stop_gradient(x) for x in floats]
    of_keys = jax.vmap(lambda *place: asked(*place, *constants), in_axes=(None, None, None, 0))
    of_pairs = jax.vmap(of_keys, in_axes=(None, None, 0, None))

    def of_block(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, h, row, column = jnp.unravel_index(place, shape)
        q = row * block[0] + jnp.arange(block[0], dtype=jnp.int32)
        kv = column * block[1] + jnp.arange(block[1], dtype=jnp.int32)
        # What lies beyond reads what the last ones read.
        found = of_pairs(b, h, jnp.minimum(q, queries - 1), jnp.minimum(kv, keys - 1))
        found = found & (q < queries)[:, None] & (kv < keys)
        return found.any(), found.all()

    def ask(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, some, all_pairs = state
        blocks = jax.lax.dynamic_slice_in_dim(order, first, at_a_time).astype(jnp.int32)
        any_found, all_found = jax.vmap(of_block)(jnp.minimum(blocks, count - 1))
        put = lambda x, of: x.at[blocks].set(of, mode="drop")  # noqa: E731
        return first + at_a_time, put(some, any_found), put(all_pairs, all_found)

    left = open_ones.sum(dtype=jnp.int32)
    first = jnp.zeros_like(left)
    _, some, all_pairs = jax.lax.while_loop(lambda s: s[0] < left, ask, (first, some, all_pairs))
    return some.reshape(shape), all_pairs.reshape(shape)


def block_mask_from_dense(mask: Any, BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK) -> BlockMask:
    """The block mask of a dense ``mask``, bool ``[B, H, M, N]``, with 1 for what stands for any number of batches or
    heads: true where the pair takes part."""
    op = "fusegrad.jax.block_mask_from_dense"
    dense = jnp.asarray(mask)
    if dense.dtype != jnp.bool_:
        raise TypeError(f"{op}: mask must be bool, but got {dense.dtype}")
    if dense.ndim != 4:
        raise ValueError(f"{op}: mask must have shape [B, H, M, N], but got {list(dense.shape)}")

    def mask_mod(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        return dense[b, h, q_idx, kv_idx]

    return _made(op, mask_mod, dense.shape, _pair(op, BLOCK_SIZE))


def varlen_mask(
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    *,
    segment_ids: Any = None,
    segment_ids_k: Any = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    lengths: tuple[int, int] | None = None,
    block_size: int | tuple[int, int] = _DEFAULT_BLOCK,
) -> BlockMask:
    """The block mask of packed sequences: a query sees keys of its own sequence alone.

    A query's place among the keys is counted from the ends of both sequences, as in FlashAttention: the last query
    stands at the last key. With ``segment_ids`` it is the query's own number.

    Args:
        cu_seqlens_q: ``[sequences + 1]``, integers, not descending from 0 on: sequence i has the queries from
            ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``, without the latter.
        cu_seqlens_k: The same of the keys; by default ``cu_seqlens_q``.
        segment_ids: In place of these, ``[M]`` or ``[B, M]``: the sequence of each query. Sequences may lie apart.
        segment_ids_k: The same of the keys; by default ``segment_ids``.
        causal: A query sees no key after its own place.
        window: How many keys before and after its own place a query sees; -1: all.
        lengths: M and N, with ``cu_seqlens_q``: what lies beyond the sequences takes no part. Within ``jit`` they must
            be told; else the sequences' own are the default.
        block_size: Queries and keys of a block, or one number for both.

    Raises:
        ValueError, TypeError: ``fusegrad.jax.varlen_mask: what must hold, but got <value>``.
    """
    op = "fusegrad.jax.varlen_mask"
    block = _pair(op, block_size)
    left, right = (-1, -1) if window is None else _numbers(op, "window", window, least=-1, count=2)
    right = 0 if causal else right

    def seen(own: jax.Array, kv: jax.Array) -> jax.Array:
        found = jnp.ones((), bool)
        if left >= 0:
            found &= kv >= own - left
        if right >= 0:
            found &= kv <= own + right
        return found

    if (cu_seqlens_q is None) == (segment_ids is None):
        raise ValueError(f"{op}: either cu_seqlens_q or segment_ids must be given, but got both or neither")
    if segment_ids is not None:
        if cu_seqlens_k is not None or lengths is not None:
            raise ValueError(f"{op}: cu_seqlens_k and lengths must not come with segment_ids")
        of_q = _integers(op, "segment_ids", segment_ids, (1, 2))
        of_k = of_q if segment_ids_k is None else _integers(op, "segment_ids_k", segment_ids_k, (of_q.ndim,))
        of_q, of_k = (x if x.ndim == 2 else x[None] for x in (of_q, of_k))
        if of_q.shape[0] != of_k.shape[0]:
            raise ValueError(f"{op}: segment_ids_k must have {of_q.shape[0]} batches, but got {of_k.shape[0]}")

        def same(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
            return (of_q[b, q_idx] == of_k[b, kv_idx]) & seen(q_idx, kv_idx)

        return _made(op, same, (of_q.shape[0], 1, of_q.shape[1], of_k.shape[1]), block)

    if segment_ids_k is not None:
        raise ValueError(f"{op}: segment_ids_k must come with segment_ids")
    ends_q = _integers(op, "cu_seqlens_q", cu_seqlens_q, (1,))
    ends_k = ends_q if cu_seqlens_k is None else _integers(op, "cu_seqlens_k", cu_seqlens_k, (1,))
    if ends_q.shape != ends_k.shape or ends_q.shape[0] < 2:
        raise ValueError(
            f"{op}: cu_seqlens_q and cu_seqlens_k must be [sequences + 1], of at least one sequence and alike, but got "
            f"{list(ends_q.shape)} and {list(ends_k.shape)}"
        )
    sizes = _lengths(op, ends_q, ends_k, lengths)
    q = jnp.arange(sizes[0], dtype=jnp.int32)
    after = jnp.searchsorted(ends_q, q, side="right").astype(jnp.int32)
    sequence = jnp.minimum(after, ends_q.shape[0] - 1) - 1
    end_k = ends_k[sequence + 1]
    own = q + end_k - ends_q[sequence + 1]
    first, last = ends_k[sequence], end_k - 1
    if left >= 0:
        first = jnp.maximum(first, own - left)
    if right >= 0:
        last = jnp.minimum(last, own + right)
    last = jnp.where(after == sequence + 1, last, -1)

    def within(b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
        return (kv_idx >= first[q_idx]) & (kv_idx <= last[q_idx])

    return _made(op, within, (1, 1, *sizes), block)


def _lengths(op: str, ends_q: jax.Array, ends_k: jax.Array, lengths: tuple[int, int] | None) -> tuple[int, int]:
    if lengths is not None:
        lengths = _numbers(op, "lengths", lengths, count=2)
    if any(isinstance(x, jax.core.Tracer) for x in (ends_q, ends_k)):
        if lengths is None:
            raise ValueError(f"{op}: lengths must be given where cu_seqlens are traced, but got None")
        return lengths
    for name, ends in (("cu_seqlens_q", ends_q), ("cu_seqlens_k", ends_k)):
        if ends[0] != 0 or bool((jnp.diff(ends) < 0).any()):
            raise ValueError(f"{op}: {name} must not descend from 0 on, but got {ends.tolist()[:16]}")
    totals = int(ends_q[-1]), int(ends_k[-1])
    if lengths is not None and (lengths[0] < totals[0] or lengths[1] < totals[1]):
        raise ValueError(f"{op}: lengths must not be below those of the sequences, {totals}, but got {lengths}")
    return totals if lengths is None else lengths


def block_mask_from_torch(block_mask: Any, mask_mod: Callable[..., Any] | None = None) -> BlockMask:
    """PyTorch's ``BlockMask``, whose lists are taken through DLPack, without a copy where JAX has the device.

    Args:
        block_mask: ``torch.nn.attention.flex_attention.BlockMask``.
        mask_mod: Its mask_mod as a function of JAX, which decides the pairs of blocks that are not full. None: all
            pairs of listed blocks take part, as with ``BlockMask.from_kv_blocks`` without a mask_mod; a ``block_mask``
            that has one of its own is refused then.

    Raises:
        ValueError: where the ``block_mask`` has a mask_mod and none is given.
    """
    op = "fusegrad.jax.block_mask_from_torch"
    own = getattr(block_mask, "mask_mod", None)
    if mask_mod is None and own is not None and getattr(own, "__name__", "") != "noop_mask":
        raise ValueError(
            f"{op}: mask_mod must be given as a function of JAX, since the block mask has one of PyTorch's, but got "
            "None"
        )
    lists = [getattr(block_mask, name) for name in _LISTS]
    count, index = (jax.dlpack.from_dlpack(x.contiguous()) for x in lists[:2])
    if lists[2] is None:
        full_count, full_index = jnp.zeros_like(count), jnp.broadcast_to(jnp.arange(index.shape[-1]), index.shape)
    else:
        full_count, full_index = (jax.dlpack.from_dlpack(x.contiguous()) for x in lists[2:])
    count, index, full_count, full_index = (x.astype(jnp.int32) for x in (count, index, full_count, full_index))
    lengths, block = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    mod = trace_mask_mod(mask_mod, sizes=_told((*count.shape[:2], *lengths)), op=op)
    return BlockMask(count, index, full_count, full_index, mod, block, lengths)


def _integers(op: str, name: str, given: Any, ranks: tuple[int, ...]) -> jax.Array:
    x = jnp.asarray(given)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be integers, but got {x.dtype}")
    if x.ndim not in ranks:
        raise ValueError(f"{op}: {name} must have {' or '.join(map(str, ranks))} dimensions, but got {list(x.shape)}")
    return x.astype(jnp.int32)


def _numbers(op: str, name: str, given: Any, least: int = 0, count: int | None = None) -> tuple[Any, ...]:
    numbers = tuple(given) if isinstance(given, tuple | list) else (given,)
    right = all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in numbers)
    if not right or count not in (None, len(numbers)):
        raise ValueError(
            f"{op}: {name} must be {'' if count is None else f'{count} '}integers from {least} on, but got {given}"
        )
    return numbers


def _pair(op: str, block_size: Any) -> tuple[int, int]:
    sizes = _numbers(op, "the block size", block_size, least=1)
    if len(sizes) not in (1, 2):
        raise ValueError(f"{op}: the block size must be one or two numbers, but got {block_size}")
    return sizes[0], sizes[-1]
