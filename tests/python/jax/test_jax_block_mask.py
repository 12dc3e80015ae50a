"""Block masks of fusegrad.jax against PyTorch's, and against the dense masks of their mask_mods."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from coverings import pairs_of, rows_of

jax = pytest.importorskip("jax")

import fusegrad  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from fusegrad.jax import _block_mask as bm  # noqa: E402
from fusegrad.jax._block_states import bounds_within  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax_score_mods import CASES, Case, over_all_pairs  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask  # noqa: E402
from torch.nn.attention.flex_attention import create_mask, noop_mask  # noqa: E402

SIZES = (2, 3, 20, 27)
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def listed(mask: bm.BlockMask) -> list[np.ndarray]:
    return [np.asarray(getattr(mask, name)) for name in LISTS]


def expected_lists(dense: Any, block: tuple[int, int]) -> list[np.ndarray]:
    """Those that PyTorch makes of the pairs."""
    table = torch.tensor(np.array(dense))
    b, h, m, n = table.shape
    made = fusegrad.create_block_mask(lambda b, h, q, kv: table[b, h, q, kv], b, h, m, n, BLOCK_SIZE=block)
    return [getattr(made, name).numpy() for name in LISTS]


def check(mask: bm.BlockMask, dense: Any) -> None:
    for got, wanted, name in zip(listed(mask), expected_lists(dense, mask.BLOCK_SIZE), LISTS, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, wanted, err_msg=name)
    mod = mask.mask_mod
    sizes = list(np.shape(dense))
    buffers = [torch.tensor(np.array(x)) for x in mod.buffers]
    pairs = torch.ops.fusegrad.evaluate_mask_mod(mod.text, sizes, buffers, [], [])
    np.testing.assert_array_equal(pairs.numpy(), dense)


def mask_of(case: Case) -> Any:
    params, mods = case.make(*SIZES, jnp.float32)
    return mods(*params)[1]


# Several cases have the same one.
CASE_OF_MASK = {mask: case for case in CASES if (mask := mask_of(case)) is not None}


@pytest.mark.parametrize("block, traced", [(4, False), (4, True), ((8, 16), False)], ids=str)
@rows_of("case", [*CASE_OF_MASK.values()], tests=2)
def test_masks_of_the_field(case: Case, block: Any, traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bounds, and by all pairs as where what they capture is traced."""
    mask_mod = mask_of(case)
    if traced:
        monkeypatch.setattr(bm, "states_by_bounds", lambda *_: None)
        monkeypatch.setattr(bm, "_PAIRS", 400)  # some of the smaller blocks at a time
    make = lambda: bm.create_block_mask(mask_mod, *SIZES, BLOCK_SIZE=block)  # noqa: E731
    check(jax.jit(make)() if traced else make(), over_all_pairs(mask_mod, SIZES))


@given(st.integers(0, 1 << 30), st.sampled_from(["int32", "int8", "uint8", "float32", "bfloat16", "bool"]))
@settings(max_examples=5, deadline=None)
def test_bounds_and_pairs_agree(seed: int, dtype: str) -> None:
    """For random captured tables, read at indices with ranges."""
    generator = np.random.default_rng(seed)
    sizes = (2, 2, int(generator.integers(1, 70)), int(generator.integers(1, 70)))
    block = (int(generator.integers(1, 20)), int(generator.integers(1, 20)))
    table = jnp.asarray(np.sort(generator.integers(-3, 4, (2, 90)), axis=1) % 7, dtype)
    start, step = (int(x) for x in generator.integers(1, 9, 2))

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = jnp.abs(table[b, q + start] * 1 - table[h, (kv * step) // 8]) < 2 if dtype != "bool" else table[b, q]
        return near & (q - kv < 30) | (table[b, jnp.clip(q - kv, 0, 80)] > table[h, kv // step])

    mod = bm.trace_mask_mod(mask_mod, sizes=sizes)
    states = bm.states_by_bounds("test", mod, sizes, block)
    any_pair, all_pairs, some, known = jax.jit(
        lambda: (*bm._states(mask_mod, mod, sizes, block), *bounds_within(mod, sizes, block))
    )()
    np.testing.assert_array_equal(np.broadcast_to(states, any_pair.shape), any_pair.astype(int) + all_pairs)
    assert bool((some | ~any_pair).all()) and bool((all_pairs | ~known).all())


def test_pairs_of_few_blocks_are_asked_within_jit() -> None:
    """For packed sequences, those at their ends and on the diagonal: all pairs would be minutes of a CPU."""
    S = 8192
    ends = np.array([0, 700, 3000, 3001, 8000, S])
    of = jnp.asarray(np.searchsorted(ends, np.arange(S), side="right") - 1, jnp.int32)

    def mask_mod(b: Any, h: Any, q: Any, kv: Any, of: jax.Array) -> Any:
        return (of[q] == of[kv]) & (q >= kv)

    def make(of: jax.Array) -> Any:
        given = functools.partial(mask_mod, of=of)
        mod = bm.trace_mask_mod(given, sizes=(None, None, S, S))
        some, known = bounds_within(mod, (1, 1, S, S), (128, 128))
        return bm.create_block_mask(given, None, None, S, S), (some & ~known).sum()

    made, open_blocks = jax.jit(make)(of)
    right = bm.create_block_mask(functools.partial(mask_mod, of=of), None, None, S, S)
    for got, wanted in zip(listed(made), listed(right), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert int(open_blocks) < 200 < (S // 128) ** 2


def test_promises_that_are_not_kept() -> None:
    table = jnp.ones(4, bool)
    with pytest.raises(IndexError, match=r"create_block_mask: mask_mod: index [4-7] is out of range for dimension 0"):
        bm.create_block_mask(lambda b, h, q, kv: table[jnp.stack([q, q])].all(), 1, 1, 8, 8)


def test_any_batch_and_head() -> None:
    mask = bm.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 300)
    assert mask.shape == (1, 1, 256, 300) and mask.BLOCK_SIZE == (128, 128)
    check(mask, np.tril(np.ones((1, 1, 256, 300), bool)))


def test_one_batch_stands_for_any() -> None:
    """What is known of one batch says nothing of those that it stands for."""
    lengths = jnp.asarray([3, 9, 20, 5], jnp.int32)
    mask = bm.create_block_mask(lambda b, h, q, kv: (kv < lengths[b]) | (b > 1), None, 1, 20, 27, BLOCK_SIZE=4)
    expected = over_all_pairs(lambda b, h, q, kv: (kv < lengths[b]) | (b > 1), (4, 1, 20, 27))
    buffers = [torch.tensor(np.array(x)) for x in mask.mask_mod.buffers]
    got = torch.ops.fusegrad.evaluate_mask_mod(mask.mask_mod.text, [4, 1, 20, 27], buffers, [], [])
    np.testing.assert_array_equal(got.numpy(), expected)


@rows_of("sizes", [(1, 2, 0, 5), (0, 2, 4, 5), (1, 1, 4, 0)])
def test_without_pairs(sizes: tuple[int, int, int, int]) -> None:
    mask = bm.create_block_mask(lambda b, h, q, kv: q >= kv, *sizes, BLOCK_SIZE=4)
    rows, columns = -(-sizes[2] // 4), -(-sizes[3] // 4)
    assert [x.shape for x in listed(mask)] == [(*sizes[:2], rows), (*sizes[:2], rows, columns)] * 2


def test_captured_tracers_cross_transforms() -> None:
    """A mask of traced lengths is made within jit, leaves it, and enters another one."""
    lengths = jnp.asarray([5, 17], jnp.int32)

    @jax.jit
    def make(lengths: jax.Array) -> bm.BlockMask:
        return bm.create_block_mask(lambda b, h, q, kv: kv < lengths[b] * 1, *SIZES, BLOCK_SIZE=4)

    traces = []

    @jax.jit
    def use(mask: bm.BlockMask) -> jax.Array:
        traces.append(mask.mask_mod.text)
        return mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() + sum(x.sum() for x in mask.mask_mod.buffers)

    for values in (lengths, lengths + 1):
        mask = make(values)
        check(mask, over_all_pairs(lambda b, h, q, kv, values=values: kv < values[b], SIZES))
        assert int(use(mask)) > 0
    assert len(traces) == 1 and make._cache_size() == 1


def test_vmap() -> None:
    starts = jnp.asarray([[0, 3], [2, 9]], jnp.int32)

    def make(start: jax.Array) -> bm.BlockMask:
        return bm.create_block_mask(lambda b, h, q, kv: kv >= start[b], *SIZES, BLOCK_SIZE=4)

    together = jax.vmap(make)(starts)
    for i, start in enumerate(starts):
        for got, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(make(start)), strict=True):
            np.testing.assert_array_equal(got[i], wanted)


def test_of_a_dense_mask() -> None:
    dense = np.random.default_rng(0).random((2, 1, 12, 21)) < 0.4
    dense[0, 0, :8] = True
    check(bm.block_mask_from_dense(dense, (4, 7)), dense)


@pairs_of({"causal": [False, True], "window": [None, (2, 1), (-1, 3), (0, -1)], "traced": [False, True]})
def test_packed_sequences(causal: bool, window: tuple[int, int] | None, traced: bool) -> None:
    ends_q, ends_k = np.array([0, 5, 5, 12, 20]), np.array([0, 7, 9, 9, 24])
    lengths = (23, 26)

    def make(q: Any, k: Any) -> bm.BlockMask:
        return bm.varlen_mask(q, k, causal=causal, window=window, lengths=lengths, block_size=4)

    mask = (jax.jit(make) if traced else make)(ends_q, ends_k)
    theirs = fusegrad.varlen_mask(
        torch.tensor(ends_q), torch.tensor(ends_k), causal=causal, window=window, lengths=lengths, block_size=4
    )
    check(mask, create_mask(theirs.mask_mod, 1, 1, *lengths, device="cpu").numpy())
    np.testing.assert_array_equal(mask.kv_num_blocks, theirs.kv_num_blocks.numpy())


def test_lengths_of_the_sequences() -> None:
    assert bm.varlen_mask(jnp.asarray([0, 3, 9])).seq_lengths == (9, 9)


def test_segments() -> None:
    ids = np.random.default_rng(0).integers(3, size=(2, 13))
    mask = bm.varlen_mask(segment_ids=ids, causal=True, window=(4, -1), block_size=4)
    q, kv = np.arange(13)[:, None], np.arange(13)
    dense = (ids[:, :, None] == ids[:, None, :]) & (kv <= q) & (kv >= q - 4)
    check(mask, dense[:, None])
    one = bm.varlen_mask(segment_ids=ids[0], segment_ids_k=ids[1, :9], block_size=4)
    check(one, (ids[0][:, None] == ids[1, :9])[None, None])


def test_pytorchs() -> None:
    table = torch.rand(2, 3, 20, 27) < 0.5
    table[..., :8, :16] = True
    theirs = fusegrad.create_block_mask(lambda b, h, q, kv: table[b, h, q, kv], *SIZES, BLOCK_SIZE=(4, 8))
    ours = jnp.asarray(table.numpy())
    check(bm.block_mask_from_torch(theirs, lambda b, h, q, kv: ours[b, h, q, kv]), table.numpy())
    with pytest.raises(ValueError, match="block_mask_from_torch: mask_mod must be given"):
        bm.block_mask_from_torch(theirs)
    bare = TorchBlockMask.from_kv_blocks(
        theirs.kv_num_blocks, theirs.kv_indices, BLOCK_SIZE=(4, 8), mask_mod=noop_mask, seq_lengths=(20, 27)
    )
    made = bm.block_mask_from_torch(bare)
    assert made.mask_mod.text == "" and int(made.full_kv_num_blocks.sum()) == 0
    np.testing.assert_array_equal(made.kv_indices, theirs.kv_indices.numpy())


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


@rows_of(
    "call, error, message",
    [
        (
            lambda: bm.create_block_mask(causal, 1, 1, -1, 4),
            ValueError,
            "create_block_mask: B, H, Q_LEN and KV_LEN must",
        ),
        (lambda: bm.create_block_mask(causal, 1, 1, 4, 4.0), ValueError, "create_block_mask: B, H, Q_LEN and KV_LEN"),
        (lambda: bm.create_block_mask(causal, 1, 1, 4, 4, 0), ValueError, "create_block_mask: the block size must"),
        (lambda: bm.create_block_mask(causal, 1, 1, 4, 4, (1, 2, 3)), ValueError, "the block size must be one or two"),
        (lambda: bm.create_block_mask(None, 1, 1, 4, 4), TypeError, "create_block_mask: mask_mod must be a function"),
        (lambda: bm.create_block_mask(3, 1, 1, 4, 4), TypeError, "create_block_mask: mask_mod must be a function"),
        (lambda: bm.create_block_mask(lambda *x: x[2], 1, 1, 4, 4), ValueError, "mask_mod must return bool"),
        (lambda: bm.block_mask_from_dense(np.ones((2, 2))), TypeError, "block_mask_from_dense: mask must be bool"),
        (lambda: bm.block_mask_from_dense(np.ones((2, 2), bool)), ValueError, "shape .B, H, M, N."),
        (lambda: bm.varlen_mask(), ValueError, "either cu_seqlens_q or segment_ids must be given"),
        (lambda: bm.varlen_mask(np.array([0.0, 1.0])), TypeError, "cu_seqlens_q must be integers"),
        (lambda: bm.varlen_mask(np.array([1, 2])), ValueError, "cu_seqlens_q must not descend from 0 on"),
        (lambda: bm.varlen_mask(np.array([0, 3, 2])), ValueError, "cu_seqlens_q must not descend from 0 on"),
        (lambda: bm.varlen_mask(np.array([0, 3]), lengths=(2, 3)), ValueError, "lengths must not be below"),
        (lambda: bm.varlen_mask(np.array([0, 3]), np.array([0, 1, 2])), ValueError, "alike, but got"),
        (lambda: bm.varlen_mask(np.array([0, 3]), window=(-2, 1)), ValueError, "window must be 2 integers from -1 on"),
        (
            lambda: bm.varlen_mask(segment_ids=np.zeros(3, int), lengths=(3, 3)),
            ValueError,
            "must not come with segment",
        ),
        (lambda: bm.varlen_mask(segment_ids=np.zeros(3)), TypeError, "segment_ids must be integers"),
        (lambda: jax.jit(bm.varlen_mask)(np.array([0, 3])), ValueError, "lengths must be given where"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
