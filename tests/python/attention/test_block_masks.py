"""Block masks as PyTorch makes and takes them, and what is refused, by messages that say what to do."""

from __future__ import annotations

from collections.abc import Callable

import fusegrad
import pytest
import torch
from coverings import pairs_of
from fusegrad import flex_attention
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("each_device")

B, H, M, N, D, BLOCK = 2, 2, 40, 56, 8, 16


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def by_batch(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Another window for each batch and head; a row without a key nowhere."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 7 * b + 3 * h)


def device() -> str:
    return torch.empty(0).device.type


def inputs_of(batch: int = B, m: int = M, n: int = N) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, H, length, D, requires_grad=True) for length in (m, n, n)]


def dense(mask_mod: Callable[..., Tensor], batch: int, heads: int, m: int, n: int) -> Tensor:
    places = torch.meshgrid(*(torch.arange(size) for size in (batch, heads, m, n)), indexing="ij")
    return mask_mod(*places).expand(batch, heads, m, n)


def check(mask: BlockMask, allowed: Tensor, inputs: list[Tensor]) -> None:
    """Output and gradients of a float64 attention with the dense mask."""
    out = flex_attention(*inputs, block_mask=mask)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = scaled_dot_product_attention(*wide, attn_mask=allowed)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, upstream)
    for a, b in zip(found, torch.autograd.grad(truth, wide, upstream.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def mask_of(
    mask_mod: Callable[..., Tensor], batch: int | None, heads: int | None, m: int = M, n: int = N, block: int = BLOCK
) -> BlockMask:
    return create_block_mask(mask_mod, batch, heads, m, n, device=device(), BLOCK_SIZE=block)


# --- as PyTorch takes them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches, heads", [(B + 3, H), (B, H + 2), (B + 1, None), (None, H + 1)])
def test_a_mask_of_more_batches_or_heads_is_cut(batches: int | None, heads: int | None) -> None:
    mask_mod = by_batch if batches and heads else causal
    check(mask_of(mask_mod, batches, heads), dense(mask_mod, batches or 1, heads or 1, M, N)[:B, :H], inputs_of())


def test_a_mask_of_more_rows_is_cut_where_its_lengths_are_set() -> None:
    """As a cache of masks is used: made once for the longest sequence."""
    mask = mask_of(by_batch, B, H, 5 * M, N)
    with pytest.raises(ValueError, match=f"must be made for {M} queries and {N} keys, but got one for {5 * M} and {N}"):
        flex_attention(*inputs_of(), block_mask=mask)
    mask.seq_lengths = (M, N)
    check(mask, dense(by_batch, B, H, M, N), inputs_of())


@pytest.mark.parametrize("m, n", [(M - 16, N), (M - 20, N - 30), (1, 1)])
def test_an_adjusted_mask(m: int, n: int) -> None:
    mask = mask_of(causal, None, None)._adjust(m, n)
    if mask.seq_lengths != (m, n):  # PyTorch rounds them up to blocks
        with pytest.raises(ValueError, match=rf"set block_mask\.seq_lengths = \({m}, {n}\) where its lists"):
            flex_attention(*inputs_of(B, m, n), block_mask=mask)
        mask.seq_lengths = (m, n)
    check(mask, dense(causal, 1, 1, m, n), inputs_of(B, m, n))


def test_a_mask_of_fewer_rows_batches_or_heads_is_refused() -> None:
    mask = mask_of(causal, None, None, M - 16, N)
    mask.seq_lengths = (M, N)
    with pytest.raises(ValueError, match="kv_blocks must list the blocks of 3 rows of blocks for 40 indices"):
        flex_attention(*inputs_of(), block_mask=mask)
    for batches, heads in ((2, None), (None, 2)):
        query, key, value = (t.repeat(2, 2, 1, 1) for t in inputs_of())
        with pytest.raises(ValueError, match="must have the query's batch size and heads"):
            flex_attention(query[:3], key[:3], value[:3], block_mask=mask_of(causal, batches, heads))


def test_a_slice_wants_a_mask_mod() -> None:
    """Rows of blocks, such as those of one process or one step of a decoder."""
    whole, first = mask_of(causal, B, H, N, N), 2
    part = whole[:, :, first:]
    rows = N - first * BLOCK
    with pytest.raises(ValueError, match=r"^flex_attention: .* but got a slice of another block mask, which has none"):
        flex_attention(*inputs_of(B, rows, N), block_mask=part)
    part.mask_mod = lambda b, h, q, kv: whole.mask_mod(b, h, q + first * BLOCK, kv)
    part.seq_lengths = (rows, N)
    check(part, dense(causal, B, H, N, N)[:, :, first * BLOCK :], inputs_of(B, rows, N))
    one = whole[1]
    one.mask_mod = causal
    check(one, dense(causal, 1, 1, N, N), inputs_of(1, N, N))


def test_paged_decoding() -> None:
    """As PyTorch's own test of its paged cache: one query of each sequence, all keys and values in pages of one."""
    batch, page, pages, lengths = 4, 16, 16, [5, 17, 40, 64]
    torch.manual_seed(0)
    longest = 64
    keys, values = (torch.randn(batch, H, longest, D) for _ in range(2))
    query = torch.randn(batch, H, 1, D)
    k_cache, v_cache = (torch.zeros(1, H, pages * page, D) for _ in range(2))
    cache = PagedAttention(pages, page, batch, device=device())
    for i in reversed(range(batch)):
        place = torch.tensor([i])
        cache.reserve(place, torch.tensor([lengths[i]]))
        new = [t[i : i + 1, :, : lengths[i]] for t in (keys, values)]
        cache.assign(place, torch.arange(lengths[i])[None], *new, k_cache, v_cache)
    table = torch.tensor(lengths)

    def at_the_end(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < table[b]

    logical = create_block_mask(at_the_end, batch, 1, 1, longest, device=device(), BLOCK_SIZE=page)
    mask = cache.convert_logical_block_mask(logical)
    mask.seq_lengths = (1, mask.seq_lengths[1])
    score_mod = cache.get_score_mod(lambda s, b, h, q, kv: s * 2 + kv)
    out = flex_attention(query, k_cache, v_cache, score_mod, mask)
    scores = 2 * query.double() @ keys.double().mT / D**0.5 + torch.arange(longest)
    scores = scores.masked_fill(torch.arange(longest) >= table[:, None, None, None], -torch.inf)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ values.double(), rtol=1e-5, atol=1e-5)


# --- of other makers --------------------------------------------------------------------------------------------


def lists(rows: int, cols: int, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    return torch.full((1, 1, rows), cols, dtype=dtype), torch.arange(cols, dtype=dtype).expand(1, 1, rows, cols).clone()


@pairs_of({"dtype": [torch.int32, torch.int64], "computed": [True, False], "block": [BLOCK, (BLOCK, 8)]})
def test_lists_of_ones_own(dtype: torch.dtype, computed: bool, block: int | tuple[int, int]) -> None:
    """Without a mask_mod what is listed is full; with one it is asked."""
    wide = block if isinstance(block, int) else block[1]
    count, index = lists(3, 7 * 8 // wide + (56 % wide > 0), dtype)
    count[..., 1] = 2
    if dtype == torch.int64 and computed:
        pytest.skip("PyTorch's transposition takes int32 alone")
    options = {"BLOCK_SIZE": block, "seq_lengths": (M, N), "compute_q_blocks": computed}
    allowed = torch.ones(1, 1, M, N, dtype=torch.bool)
    allowed[:, :, BLOCK : 2 * BLOCK, 2 * wide :] = False
    mask = BlockMask.from_kv_blocks(count, index, **options)
    assert (mask.q_num_blocks is None) == (not computed)
    check(mask, allowed, inputs_of())
    mask = BlockMask.from_kv_blocks(count, index, mask_mod=causal, **options)
    check(mask, allowed & dense(causal, 1, 1, M, N), inputs_of())


def test_a_block_size_that_is_one_number() -> None:
    mask = mask_of(causal, None, None)
    mask.BLOCK_SIZE = BLOCK
    check(mask, dense(causal, 1, 1, M, N), inputs_of())


def test_captured_tensors_of_a_mask_are_read_at_each_call() -> None:
    """In blocks that are listed as partial; which are listed was decided when the mask was made."""
    limit = torch.tensor(9)
    mask = mask_of(lambda b, h, q, kv: kv <= limit, None, None, block=128)
    for value in (9, 20, 3):
        limit.fill_(value)
        check(mask, dense(lambda b, h, q, kv: kv <= value, 1, 1, M, N), inputs_of())


# --- refused ----------------------------------------------------------------------------------------------------


def test_a_mask_of_another_device() -> None:
    mask = mask_of(causal, None, None).to("meta")
    with pytest.raises(ValueError, match=r"kv_blocks must be on the query's device .* block_mask.to\(query.device\)"):
        flex_attention(*inputs_of(), block_mask=mask)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_8_bit_keys_and_values(autocast: bool) -> None:
    query, key, value = (t.detach().bfloat16() for t in inputs_of())
    for name, arguments in (
        ("key", (query, key.to(torch.float8_e4m3fn), value)),
        ("value", (query, key, value.to(torch.float8_e5m2))),
    ):
        message = rf"{name} must have the query's dtype .*{name}\.to\(query\.dtype\), times the scale"
        with torch.autocast(device(), torch.bfloat16, enabled=autocast), pytest.raises(TypeError, match=message):
            flex_attention(*arguments)


def test_the_stand_in_of_a_sliced_mask_is_known() -> None:
    """Its name is PyTorch's own matter: where it changes, the message above is lost."""
    assert fusegrad.attention._SLICED is pytorch._sliced_mask_mod_error
