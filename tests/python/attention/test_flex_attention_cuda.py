"""What only a GPU can show of flex_attention: graphs, streams, layouts, sizes beyond 32 bits, memory that runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from attention_reference import dense
from coverings import pairs_of
from flex_cuda_support import DEVICE, ON_EACH_FAMILY, causal, inputs, relative
from flex_limits import SHARED_KIB, too_large
from fusegrad import _C, compile_flex, flex_attention, trace_mask_mod
from fusegrad._attention_low import with_low
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

pytestmark = ON_EACH_FAMILY

# --- compiling ahead ------------------------------------------------------------------------------------------


@pairs_of(
    {
        "deterministic": [False, True],
        "dtype": [torch.bfloat16, torch.float32],
        "masked": [False, True],
        "length": [50, 100, 200],
    }
)
def test_what_was_compiled_ahead_is_what_runs(
    length: int, masked: bool, dtype: torch.dtype, deterministic: bool
) -> None:
    bias, frozen, number = torch.randn(200, requires_grad=True), torch.randn(200), 3
    q, k, v = inputs(1, 2, length, length, 24, dtype)
    mask = create_block_mask(causal, None, None, length, length, device=DEVICE, BLOCK_SIZE=(32, 48)) if masked else None

    def score_mod(s, b, h, q, kv):
        return s * frozen[q] + bias[kv] * number - 0.25

    sizes = {"batch": 1, "heads": 2, "lengths": (length, length), "head_size": 24}
    compile_flex(score_mod, block_mask=mask, dtype=dtype, deterministic=deterministic, **sizes)
    before = _C.jit.stats()["compilations"]
    flex_attention(q, k, v, score_mod, mask, deterministic=deterministic).sum().backward()
    assert _C.jit.stats()["compilations"] == before


# --- how it runs ----------------------------------------------------------------------------------------------


def a_step(length: int = 300) -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]:
    """A forward and backward with everything: block mask, lse, a captured buffer."""
    leaves = [*inputs(1, 2, length, length, 64, torch.bfloat16), torch.randn(length, requires_grad=True)]
    mask = create_block_mask(causal, None, None, length, length, device=leaves[0].device)
    upstream = torch.randn_like(leaves[0])

    def step(**options) -> tuple[Tensor, ...]:
        q, k, v, bias = leaves
        out, aux = flex_attention(
            q * 1, k * 1, v * 1, lambda s, b, h, i, j: s + bias[j], mask, return_aux=AuxRequest(lse=True), **options
        )
        return out, *torch.autograd.grad((out, aux.lse.sum()), leaves, (upstream, None))

    return step, leaves


def test_steps_stay_within_their_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = a_step(301)
    found = []
    try:
        for checked in ("0", "1"):
            monkeypatch.setenv("FUSEGRAD_CHECK_SCRATCH", checked)
            _C.flex.force_whole(0)  # plans are made anew
            found.append(step(deterministic=True))
    finally:
        _C.flex.force_whole(-1)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"deterministic": True}], ids=str)
def test_nothing_synchronises(options: dict) -> None:
    step, _ = a_step()
    step(**options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(**options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"deterministic": True}], ids=str)
def test_graph_capture_and_replay(options: dict) -> None:
    step, leaves = a_step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(**options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(**options)
    for _ in range(2):
        with torch.no_grad():
            for t in leaves:
                t.copy_(torch.randn_like(t))
        graph.replay()
        for ours, eager in zip(captured, step(), strict=True):
            assert relative(ours, eager) <= (1e-5 if ours.dtype == torch.float32 else 5e-3)


def test_two_streams() -> None:
    """Calls that run beside each other share nothing: each gives the bits that it gives alone."""
    steps = [a_step(1000)[0] for _ in range(2)]
    alone = [step(deterministic=True) for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(3):
        found = []
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(deterministic=True))
        torch.cuda.synchronize()
        for got, expected in zip(found, alone, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    torch.set_default_device("cuda:1")
    step, _ = a_step()
    on_second = step(deterministic=True)
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in on_second)
    torch.manual_seed(0)
    with torch.cuda.device(1):
        assert all(torch.equal(x, y) for x, y in zip(on_second, step(deterministic=True), strict=True))


def test_slices_and_alignment() -> None:
    """Rows that begin anywhere, gaps, and an innermost dimension that is not dense."""
    wide = [torch.randn(2, 60, 2, 2 * 33, dtype=torch.bfloat16) for _ in range(3)]
    layouts = [
        lambda t: t[..., 1:25].transpose(1, 2),
        lambda t: t[..., 3:27].transpose(1, 2),
        lambda t: t[..., 2:50:2].transpose(1, 2),
        lambda t: t.flatten()[7 : 7 + 2 * 2 * 60 * 24].view(2, 2, 60, 24),
    ]
    for layout in layouts:
        parts = [layout(t).detach().requires_grad_() for t in wide]
        dense_parts = [t.detach().contiguous().clone().requires_grad_() for t in parts]
        outs = [flex_attention(*x, deterministic=True) for x in (parts, dense_parts)]
        assert torch.equal(*outs)
        upstream = torch.randn(2, 2, 60, 48, dtype=torch.bfloat16)[..., 1:25]
        grads = [torch.autograd.grad(x, t, upstream) for x, t in zip(outs, (parts, dense_parts), strict=True)]
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


# --- where the gradient of the queries goes -------------------------------------------------------------------
# By default, but for wide heads of 16 bits on sm_90a, it is added up in float32 and then rounded; else a kernel of its
# own writes it, and in place what that kernel writes replaces the queries in the end.

# Of [2, M, H, 2 * size + 2], tensors [2, H, M, size].
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "heads before rows": lambda t, size: t[..., :size].transpose(1, 2).contiguous(),
    "rows before heads": lambda t, size: t[..., :size].contiguous().transpose(1, 2),
    "a slice": lambda t, size: t[..., 1 : size + 1].transpose(1, 2),
    "columns apart": lambda t, size: t[..., 1 : 2 * size : 2].transpose(1, 2),
}
WIDTHS = [
    *[(torch.bfloat16, size) for size in (37, 40, 64, 128, 192, 256)],
    *[(torch.float16, size) for size in (40, 192)],
    *[(torch.float32, size) for size in (3, 20, 64, 128)],
]


# The Hopper kernels multiply multiples of 16 columns, of chunks of 64 in shared memory.
HEADS = [
    *[(16, 16), (32, 32), (48, 40), (72, 72), (80, 80), (80, 40), (40, 80)],
    *[(96, 88), (112, 128), (144, 144), (240, 176)],
]


@pairs_of({"deterministic": [False, True], "masked": [False, True], "d, e": [*HEADS]})
def test_head_sizes(d: int, e: int, masked: bool, deterministic: bool) -> None:
    """What lies in memory behind a row's columns reaches nothing."""
    m, n, h = 300, 333, 4
    shapes = [(2, h, m, d), (2, 2, n, d), (2, 2, n, e)]
    wide = [torch.full((*s[:3], s[3] + 24), torch.nan, dtype=torch.bfloat16) for s in shapes]
    given = [t[..., :-24].copy_(torch.randn(s)).detach().requires_grad_() for t, s in zip(wide, shapes, strict=True)]
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE, BLOCK_SIZE=128) if masked else None
    upstream = torch.randn(2, h, m, e).bfloat16()
    out = flex_attention(*given, block_mask=mask, enable_gqa=True, deterministic=deterministic)
    exact = [t.detach().double().requires_grad_() for t in given]
    truth = dense(*exact, mask=torch.ones(m, n).tril().bool() if masked else None).out
    assert relative(out, truth) <= 1e-2
    expected = torch.autograd.grad(truth, exact, upstream.double())
    for ours, right in zip(torch.autograd.grad(out, given, upstream), expected, strict=True):
        assert relative(ours, right) <= 1e-2


@pytest.mark.parametrize("dtype, size", WIDTHS, ids=str)
def test_gradients_of_any_layout_in_order_and_in_place(dtype: torch.dtype, size: int) -> None:
    m, n, h = 150, 170, 2
    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    wide = [torch.randn(2, rows, h, 2 * size + 2).to(dtype).requires_grad_() for rows in (m, n, n)]
    bias = torch.randn(n, requires_grad=True)
    upstream = torch.randn(2, h, m, size).to(dtype)
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE, BLOCK_SIZE=64)
    allowed = torch.ones(m, n).tril().bool()

    for name, layout in LAYOUTS.items():
        exact = [t.detach().double().requires_grad_() for t in (*wide, bias)]
        expected = dense(*(layout(t, size) for t in exact[:3]), lambda s, b, h, q, kv, t=exact[3]: s + t[kv], allowed)
        truth = torch.autograd.grad(expected.out, exact, upstream.double())
        found = {}
        for captures in (False, True):
            for deterministic, inplace in ((False, False), (False, True), (True, False), (True, True)):
                given = [layout(t * 1, size) for t in wide]
                # Without a gradient of the bias there is no fixed point, for which kernels would run twice.
                held = bias if captures else bias.detach()
                out = flex_attention(
                    *given, lambda s, b, h, q, kv, t=held: s + t[kv], mask, deterministic=deterministic, inplace=inplace
                )
                grads = torch.autograd.grad(out, [*wide, bias] if captures else wide, upstream)
                assert all((t._version > 0) == inplace for t in given)
                for i, grad in enumerate(grads):
                    assert relative(grad, truth[i]) <= limit, (name, captures, deterministic, inplace, i)
                found[captures, deterministic, inplace] = grads
            for a, b in zip(found[captures, True, False], found[captures, True, True], strict=True):
                assert torch.equal(a, b), (name, captures)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 64), (torch.bfloat16, 192), (torch.float32, 16)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_any_of_the_gradients_alone(dtype: torch.dtype, size: int, deterministic: bool) -> None:
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    tensors = [*inputs(2, 2, 150, 170, size, dtype), torch.randn(170, requires_grad=True)]
    upstream = torch.randn(2, 2, 150, size).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = dense(*exact[:3], lambda s, b, h, q, kv: s + exact[3][kv]).out
    truth = torch.autograd.grad(expected, exact, upstream.double())
    for wanted in ([0], [3], [0, 3], [0, 1], [0, 2], [1, 2], [0, 2, 3], [1, 3]):
        given = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out = flex_attention(*given[:3], lambda s, b, h, q, kv, t=given[3]: s + t[kv], deterministic=deterministic)
        out.backward(upstream)
        for i, t in enumerate(given):
            assert (t.grad is not None) == (i in wanted)
            assert t.grad is None or relative(t.grad, truth[i]) <= limit, (wanted, i)


@pytest.mark.parametrize(
    "dtype, size, length",
    [(torch.bfloat16, 64, 768), (torch.bfloat16, 128, 3200), (torch.bfloat16, 256, 768), (torch.float32, 16, 768)],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_block_that_there_is_not_makes_the_gradient_nan(
    dtype: torch.dtype, size: int, length: int, inplace: bool
) -> None:
    """For its queries, and for those that are in a tile with some of them; others know nothing of it."""
    leaves = inputs(1, 1, length, length, size, dtype)
    mask = create_block_mask(causal, None, None, length, length, device=DEVICE)
    mask.kv_num_blocks[0, 0, 5], mask.kv_indices[0, 0, 5] = 2, 99
    for deterministic in (False, True):
        out = flex_attention(*(t * 1 for t in leaves), None, mask, deterministic=deterministic, inplace=inplace)
        grad = torch.autograd.grad(out, leaves[0], torch.ones_like(out))[0]
        assert grad[:, :, 640:768].isnan().all()
        assert grad[:, :, :384].isfinite().all() and grad[:, :, 1024:].isfinite().all()


# --- sizes ----------------------------------------------------------------------------------------------------


def scaled(t: Tensor) -> Callable:
    return lambda s, b, h, q, kv: s * (1 + t[h])


def rows_agree(tensors: list[Tensor], heads: list[tuple[int, int]], score_mod: Callable, bias: Tensor) -> None:
    """A few heads of a large call against float64, and the gradient of what all of them share against their sum."""
    q, k, v = tensors
    out = flex_attention(q, k, v, score_mod(bias))
    grads = torch.autograd.grad(out, (q, k, v, bias), out.detach())
    for b, h in heads:
        wide = [t[b : b + 1, h : h + 1].detach().double().requires_grad_() for t in tensors]
        held = bias.detach().double()[h : h + 1].requires_grad_()
        expected = dense(*wide, score_mod(held)).out
        upstream = out[b : b + 1, h : h + 1].detach().double()
        truth = torch.autograd.grad(expected, (*wide, held), upstream)
        assert relative(upstream, expected) <= 5e-3
        for grad, t in zip(grads[:3], truth[:3], strict=True):
            assert relative(grad[b : b + 1, h : h + 1], t) <= 1e-2
    assert grads[3].isfinite().all()


def test_more_heads_than_a_grid_has_rows() -> None:
    tensors = inputs(70000, 2, 16, 16, 16)
    rows_agree(tensors, [(0, 0), (32768, 1), (69999, 1)], scaled, torch.zeros(2).requires_grad_())


def test_more_than_two_to_the_31_elements() -> None:
    """For each of query, key, value and output, and for a captured buffer."""
    tensors = inputs(66000, 8, 64, 64, 64)
    assert tensors[0].numel() > 2**31
    rows_agree(tensors, [(0, 0), (65536, 1), (65999, 7)], scaled, torch.zeros(8).requires_grad_())
    del tensors
    torch.cuda.empty_cache()
    table = torch.zeros(2**31 + 4096, dtype=torch.bfloat16)
    table[2**31 :] = 0.5 * torch.randn(4096, dtype=torch.bfloat16)
    q, k, v = inputs(1, 1, 64, 64, 64)
    ours = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[j * 64 + i + 2**31])
    part = table[2**31 :].clone()
    assert torch.equal(ours, flex_attention(q, k, v, lambda s, b, h, i, j: s + part[j * 64 + i]))


def test_tiles_in_the_order_of_sections_of_heads() -> None:
    """Heads so long that few of them are worked on together, and no multiple of that number."""
    heads, blocks, size = 5, 64, 256
    tensors = inputs(1, heads, blocks * size, blocks * size, 64)
    mask = create_block_mask(
        lambda b, h, q, kv: (q // size == kv // size) & (q >= kv), 1, 1, blocks * size, blocks * size, device=DEVICE
    )
    out = flex_attention(*tensors, block_mask=mask)
    grads = torch.autograd.grad(out, tensors, out.detach())
    q, k, v = (t.detach().double().view(heads, blocks, size, 64).requires_grad_() for t in tensors)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    truth = (q @ k.mT / 8).masked_fill(later, -torch.inf).softmax(-1) @ v
    expected = torch.autograd.grad(truth, (q, k, v), out.detach().double().view_as(truth))
    assert relative(out.view_as(truth), truth) <= 5e-3
    for grad, t in zip(grads, expected, strict=True):
        assert relative(grad.view_as(t), t) <= 1e-2


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 200 + 100 * h)


def holes(b, h, q, kv):
    return ((q // 200 + h) * 5 + kv // 170) % 8 != 0


def assert_near_dense(out: Tensor, tensors: list[Tensor], takes: Tensor | None = None) -> Tensor:
    """The output and the gradients of a query, key and value of 16 bits; the lse that is right."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    truth = dense(*wide, mask=takes)
    assert relative(out, truth.out) <= 5e-3
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, upstream)
    for grad, t in zip(grads, torch.autograd.grad(truth.out, wide, upstream.double()), strict=True):
        assert relative(grad, t) <= 1e-2
    return truth.lse


@pairs_of(
    {
        "block": [64, 128, 192, 256, (128, 64), (16, 128), (48, 256)],
        "d": [64, 128],
        "mask_mod, of_blocks, m, n": [
            (window, False, 700, 900),
            (window, True, 2300, 700),
            (holes, False, 2300, 700),
            (holes, True, 2301, 600),
        ],
    }
)
def test_tiles_of_queries_in_several_blocks(
    mask_mod: Callable, of_blocks: bool, m: int, n: int, d: int, block: int | tuple[int, int]
) -> None:
    """Kinds of tiles that differ between their queries; lists from the block mask's own, and from its blocks."""
    tensors = inputs(2, 2, m, n, d)
    mask = create_block_mask(mask_mod, 1, 2, m, n, device=DEVICE, BLOCK_SIZE=block)
    takes = mask_mod(0, torch.arange(2)[:, None, None], torch.arange(m)[:, None], torch.arange(n))
    if of_blocks:  # all pairs of those that have some
        rows, cols = mask.BLOCK_SIZE
        takes = mask.to_dense()[0].bool().repeat_interleave(rows, 1).repeat_interleave(cols, 2)[:, :m, :n]
        lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=mask.BLOCK_SIZE, seq_lengths=(m, n))
    out, aux = flex_attention(*tensors, block_mask=mask, return_aux=AuxRequest(lse=True))
    lse = assert_near_dense(out, tensors, takes)
    torch.testing.assert_close(aux.lse.double(), lse, rtol=0, atol=1e-4)


@pairs_of(
    {
        "mask_mod": [
            causal,
            window,
            lambda b, h, q, kv: (q - kv).abs() <= 70,
            # The corners of tiles take part, pairs between them do not.
            lambda b, h, q, kv: (q - kv - 40).abs() > 9,
            lambda b, h, q, kv: q - kv != 40,
            lambda b, h, q, kv: (q % 64 < 3) | (kv % 64 < 3) | ((q % 64 > 61) & (kv % 64 > 61)),
        ],
        "d": [64, 128],
        "m, n": [(1003, 1003), (515, 700), (190, 90)],
        "capped": [False, True],
    }
)
def test_partial_tiles_whose_corners_take_part(mask_mod: Callable, m: int, n: int, d: int, capped: bool) -> None:
    tensors = inputs(2, 2, m, n, d)
    mask = create_block_mask(mask_mod, 1, 2, m, n, device=DEVICE)
    takes = mask_mod(0, torch.arange(2)[:, None, None], torch.arange(m)[:, None], torch.arange(n))
    # So wide that it changes no score of 16 bits.
    score_mod = (lambda s, b, h, q, kv: 4096 * torch.tanh(s / 4096)) if capped else None
    assert_near_dense(flex_attention(*tensors, score_mod, mask), tensors, takes)


@pytest.mark.parametrize("m", [80, 140, 270, 1290])
@pytest.mark.parametrize("d", [56, 64, 128])
def test_queries_of_tall_tiles(d: int, m: int) -> None:
    """Without a mask a backward has more queries a tile where that makes so many tiles less that it takes less time."""
    tensors = inputs(2, 4, m, 300, d, hkv=2)
    assert_near_dense(flex_attention(*tensors, enable_gqa=True), tensors)


@pytest.mark.parametrize("d", [24, 48, 64])
def test_masks_that_give_keys_many_queries(d: int) -> None:
    """There dQ is added to zeros; elsewhere the first CTA stores it."""
    m, n = 1290, 300
    tensors = inputs(2, 4, m, n, d, hkv=2)
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE)
    takes = causal(0, 0, torch.arange(m)[:, None], torch.arange(n))
    assert_near_dense(flex_attention(*tensors, block_mask=mask, enable_gqa=True), tensors, takes)


@pairs_of(
    {
        "d, e": [(192, 128), (160, 128), (144, 72)],
        "n": [140, 900],  # with 900 keys dQ is summed up, with 140 it has a kernel of its own
        "m": [60, 1290],
        "mask": [None, window, holes],
        "deterministic": [False, True],
    }
)
def test_wide_heads_whose_warpgroups_have_keys_of_their_own(
    d: int, e: int, n: int, m: int, mask: Callable | None, deterministic: bool
) -> None:
    tensors = inputs(4, 12, m, n, d, hkv=12 if mask else 6, e=e)
    blocks = takes = None
    if mask is not None:
        blocks = create_block_mask(mask, None, 12, m, n, device=DEVICE)
        takes = mask(0, torch.arange(12)[:, None, None], torch.arange(m)[:, None], torch.arange(n))
    out = flex_attention(*tensors, block_mask=blocks, enable_gqa=mask is None, deterministic=deterministic)
    assert_near_dense(out, tensors, takes)


@pairs_of({"modified": [False, True], "masked": [False, True], "grows": [True, False], "d": [64, 128, 256]})
def test_scores_that_grow_or_fall_with_the_keys(d: int, grows: bool, masked: bool, modified: bool) -> None:
    """A row's maximum is another one tile after tile, or stays the first; more rows of tiles than multiprocessors."""
    b, h, m, n = 5, 12, 700, 900
    q, k, v = (t.detach() for t in inputs(b, h, m, n, d))
    place = torch.arange(n) if grows else torch.arange(n).flip(0)
    k *= (place / 60).to(k.dtype)[:, None]
    slope = 0.3 if grows else -0.3
    mod = (lambda s, b, h, q, kv: s + slope * (kv - 400)) if modified else None
    mask = create_block_mask(causal, None, None, m, n, device=DEVICE) if masked else None
    out, aux = flex_attention(q, k, v, mod, mask, return_aux=AuxRequest(lse=True))
    alive = torch.ones(m, n, dtype=torch.bool).tril() if masked else None
    truth = dense(q.double(), k.double(), v.double(), mod, alive)
    assert relative(out, truth.out) <= 5e-3
    torch.testing.assert_close(aux.lse.double(), truth.lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mask", ["all", "late", "window"])
@pytest.mark.parametrize("d", [63, 64, 96, 128, 256])
def test_scores_that_leap(d: int, mask: str) -> None:
    """Exponentials of scores would overflow that are relative to the first ones. Some rows have none of the first."""
    b, h, hkv, m, n, dtype = 3, 4, 2, 700, 900, torch.float16 if d == 96 else torch.bfloat16
    q, k, v = (t.detach() for t in inputs(b, h, m, n, d, dtype, hkv))
    leaps = (torch.arange(n) % 400 > 350) & (torch.arange(n) > 200)
    k[0] *= torch.where(leaps, 60, 1).to(dtype)[:, None]
    k[1] *= (2 ** (torch.arange(n) / 90)).to(dtype)[:, None]
    k[2] *= 200
    masks = {
        "all": None,
        "late": lambda b, h, q, kv: (q >= kv - 300) & ((kv >= 150) | (q % 5 == 0)) & (q % 97 != 3),
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 300),
    }
    chosen = masks[mask]
    blocks = None if chosen is None else create_block_mask(chosen, None, None, m, n, device=DEVICE)
    alive = None if chosen is None else chosen(0, 0, torch.arange(m)[:, None], torch.arange(n))
    out, aux = flex_attention(q, k, v, None, blocks, enable_gqa=True, return_aux=AuxRequest(lse=True))
    k, v = (t.double().repeat_interleave(h // hkv, 1) for t in (k, v))
    truth = dense(q.double(), k, v, None, alive)
    assert relative(out, truth.out) <= 5e-3
    torch.testing.assert_close(aux.lse.double(), truth.lse, rtol=1e-5, atol=1e-3)
    inf = k.clone()
    inf[0, 0, 500, 0], inf[1, 1, 10, 0] = torch.inf, torch.nan
    ours = flex_attention(q, inf.to(dtype), v.to(dtype), None, blocks)
    wrong = ~dense(q.double(), inf, v, None, alive).out.isfinite().all(-1)
    assert torch.equal(~ours.isfinite().all(-1), wrong)
    assert relative(ours[~wrong], truth.out[~wrong]) <= 5e-3


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_query_that_is_not_finite_leaves_other_heads_alone(d: int) -> None:
    """The last tile of the head before reads what is known of its first queries, too."""
    mask = create_block_mask(causal, None, None, 100, 100, device=DEVICE)
    q, k, v = inputs(1, 2, 100, 100, d)
    upstream = torch.randn_like(q)
    expected = torch.autograd.grad(flex_attention(q, k, v, None, mask), (q, k, v), upstream)
    with torch.no_grad():
        q[0, 1, 0, 3] = torch.nan
    found = torch.autograd.grad(flex_attention(q, k, v, None, mask), (q, k, v), upstream)
    for grad, want in zip(found, expected, strict=True):
        assert grad[0, 1].isnan().any()
        assert relative(grad[0, 0], want[0, 0]) <= 1e-3


@pytest.mark.parametrize("d", [64, 128])
def test_values_in_blocks_that_are_not_attended_may_be_infinite(d: int) -> None:
    q, k, v = (t.detach() for t in inputs(1, 2, 1000, 1000, d))
    mask = create_block_mask(causal, 1, 1, 1000, 1000, device=DEVICE)
    infinite = v.clone()
    infinite[:, :, 896:] = torch.inf
    expected, out = (flex_attention(q, k, x, block_mask=mask)[:, :, :896] for x in (v, infinite))
    assert torch.equal(out, expected)


def test_no_memory_in_the_backward_is_an_error_and_no_more() -> None:
    step, _ = a_step()
    before = step(deterministic=True)
    q, k, v = inputs(4, 16, 4096, 4096, 64)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    for inplace in (False, True):
        tensors = [t * 1 for t in (q, k, v)]
        out = flex_attention(*tensors, inplace=inplace)
        kept = [t.detach().clone() for t in tensors]
        upstream = torch.randn_like(out)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
        rest = []  # of larger blocks, which could be had without asking the device
        try:
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    rest.append(torch.empty(2**22, dtype=torch.uint8))
            with pytest.raises(torch.OutOfMemoryError):
                torch.autograd.grad(out, tensors, upstream, retain_graph=not inplace)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del rest
        assert all(torch.equal(t, x) for t, x in zip(tensors, kept, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(before, step(deterministic=True), strict=True))


# --- low parts ---------------------------------------------------------------------------------------------------


@pairs_of(
    {
        "dtype": [torch.bfloat16, torch.float16],
        "m, n": [(300, 260), (1, 5000), (130, 4100), (33, 49)],
        "d, e": [(64, 64), (128, 128), (96, 72), (24, 24), (40, 63), (256, 256), (192, 128), (512, 512)],
        "kind": ["plain", "causal", "invariant", "tangents", "heads inside"],
    }
)
def test_what_rounding_takes_from_the_output(dtype: torch.dtype, m: int, n: int, d: int, e: int, kind: str) -> None:
    """Queries of zeros weigh keys alike, so the kernels know their mean to float32."""
    if kind == "invariant" and (d > 256 or e > 256):
        pytest.skip("batch_invariant ends there")
    q, k, v = torch.zeros(2, 4, m, d), torch.randn(2, 2, n, d), torch.randn(2, 2, n, e)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    if kind == "heads inside":
        q, k, v = (t.movedim(1, 2).contiguous().movedim(2, 1) for t in (q, k, v))
    allowed, mask = torch.ones(m, n, dtype=torch.bool), ("", [], [], [], [], [])
    if kind == "causal":
        allowed = torch.arange(m)[:, None] >= torch.arange(n)
        made = create_block_mask(lambda b, h, i, j: i >= j, None, None, m, n, device=DEVICE)
        lists = [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices]
        mask = (trace_mask_mod(made.mask_mod).text, [], [], [], lists, list(made.BLOCK_SIZE))
    truth = (allowed.double() @ v.double() / allowed.sum(1, keepdim=True)).repeat_interleave(2, 1)
    scoring = ("", [], [], [], *mask, 1.0, 0.0, None)
    aux = _C.FLEX_LOW | (_C.FLEX_INVARIANT if kind == "invariant" else 0)
    ops = torch.ops.fusegrad
    if kind == "tangents":
        out, _, _, _, low, _ = ops.flex_attention_jvp(q, k, v, None, None, v, [], [], *scoring, aux)
    else:
        out, _, _, _, low, _ = ops.flex_attention_forward(q, k, v, *scoring, aux)
    assert low.dtype == torch.int8
    some = truth.abs() > 1e-3
    assert (with_low(out, low).double() - truth)[some].norm() <= 2e-2 * (out.double() - truth)[some].norm()


# --- wide heads -----------------------------------------------------------------------------------------------


def wide_step(
    dtype: torch.dtype, d: int, e: int, wants: tuple[bool, bool, bool] = (True, True, True), **options
) -> list[Tensor]:
    """Output and gradients, of a bias too, with grouped heads under a causal mask."""
    torch.manual_seed(0)
    shapes = [(2, 4, 150, d), (2, 2, 170, d), (2, 2, 170, e)]
    held = [torch.randn(s).to(dtype).requires_grad_(w) for s, w in zip(shapes, wants, strict=True)]
    bias = torch.randn(150, 170).requires_grad_()
    mask = create_block_mask(causal, None, None, 150, 170, device=DEVICE, BLOCK_SIZE=(32, 48))
    q, k, v = (t * 1 for t in held)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j], mask, enable_gqa=True, **options)
    given = [*(t for t in held if t.requires_grad), bias]
    return [out, *torch.autograd.grad(out, given, torch.randn_like(out))]


WIDE = [(512, 512), (576, 512), (300, 257), (64, 512), (512, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", WIDE, ids=str)
def test_wide_heads_in_place_and_in_one_order(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    if SHARED_KIB == 99 and too_large("86", str(dtype).removeprefix("torch."), sizes, "backward", deterministic=True):
        pytest.skip("no tile fits")
    usual = wide_step(dtype, *sizes)
    for options in ({"inplace": True}, {"deterministic": True}):
        for x, y in zip(wide_step(dtype, *sizes, **options), usual, strict=True):
            assert relative(x, y) <= (1e-5 if x.dtype == torch.float32 else 1e-2)
    again = [wide_step(dtype, *sizes, deterministic=True) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*again, strict=True))


@pytest.mark.parametrize("wants", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_wide_heads_of_which_one_gets_a_gradient(wants: tuple[bool, bool, bool], inplace: bool) -> None:
    _, *all_of = wide_step(torch.bfloat16, 576, 512)
    _, gradient, of_bias = wide_step(torch.bfloat16, 576, 512, wants, inplace=inplace)
    assert relative(gradient, all_of[wants.index(True)]) <= 1e-2
    assert relative(of_bias, all_of[3]) <= 1e-5


def test_wide_heads_of_few_queries_split_their_keys() -> None:
    q, k, v = (torch.randn(1, 2, n, d).bfloat16() for n, d in ((3, 576), (5000, 576), (5000, 512)))
    out = flex_attention(q, k, v)
    (truth, *_) = dense(q.double(), k.double(), v.double(), None)
    assert relative(out, truth) <= 1e-2


# --- bad input ------------------------------------------------------------------------------------------------


def test_what_the_gpu_does_not_have() -> None:
    q = torch.randn(1, 1, 16, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match="query must be float32, bfloat16 or float16 on CUDA, but got Double"):
        flex_attention(q, q, q)
    wide, narrow = torch.randn(1, 1, 16, 577), torch.randn(1, 1, 16, 513)
    with pytest.raises(NotImplementedError, match="query must have a head size of at most 576 on CUDA, but got 577"):
        flex_attention(wide, wide, narrow)
    with pytest.raises(NotImplementedError, match="value must have a head size of at most 512 on CUDA, but got 513"):
        flex_attention(narrow, narrow, narrow)
    x = torch.randn(1, 1, 16, 16)
    with pytest.raises(ValueError, match="key must be on the query's device cuda:0, but got cpu"):
        flex_attention(x, x.cpu(), x)
    assert x.isfinite().all()
