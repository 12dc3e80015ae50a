"""Attention dropout: values and gradients against dense attention in float64 under the pairs that the op says it keeps,
what those are like, and that they follow PyTorch's generators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from coverings import each_of, pairs_of, rows_of
from fusegrad import flex_attention
from test_flex_attention import DTYPES, Sizes, block_mask, causal, check
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("each_flex_device")

OP = torch.ops.fusegrad
SHAPE = (2, 3, 70, 16)


def mask_of(seed: int, p: float, *sizes: int) -> Tensor:
    return OP.flex_attention_dropout_mask(torch.tensor(seed), p, list(sizes))


def seed() -> Tensor:
    """That of a call right after torch.manual_seed(0)."""
    torch.manual_seed(0)
    return torch.randint(2**63 - 1, (), dtype=torch.int64)


def inputs(*shape: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.randn(shape or SHAPE, dtype=dtype).requires_grad_() for _ in range(3)]


# --- values and gradients -------------------------------------------------------------------------------------

SIZES = [
    Sizes(2, 3, 70, 130, 8, 8),
    Sizes(1, 2, 300, 300, 64, 64),
    Sizes(2, 4, 65, 33, 16, 24, Hkv=2),
    Sizes(3, 2, 17, 40, 5, 3, Hkv=1, Bkv=1),
    Sizes(1, 2, 130, 257, 128, 128, Hkv=1),
    Sizes(1, 2, 200, 150, 128, 64),
    Sizes(1, 1, 140, 200, 256, 256),
    Sizes(1, 1, 70, 100, 64, 192),
]


@each_of({"sizes": [*SIZES], "dtype": [*DTYPES]})
def test_parity(dtype: torch.dtype, sizes: Sizes) -> None:
    gqa = bool(sizes.Hkv)
    tensors = sizes.tensors(dtype)
    check(tensors, lambda _: None, [], enable_gqa=gqa, dropout_p=0.1)
    allowed = torch.ones(sizes.M, sizes.N).tril().bool()
    on_cpu = tensors[0].device.type == "cpu"  # its kernels are one for all block sizes, and always in order
    mask = block_mask(causal, sizes.M, sizes.N, (32, 48) if on_cpu else 128)
    scale = 1.3 * sizes.D**-0.5
    check(tensors, lambda _: None, [], mask, allowed, enable_gqa=gqa, aux=False, scale=scale, dropout_p=0.3)
    if not on_cpu:
        check(tensors, lambda _: None, [], mask, allowed, enable_gqa=gqa, aux=False, dropout_p=0.2, deterministic=True)
        mask = block_mask(causal, sizes.M, sizes.N, (32, 48))
        check(tensors, lambda _: None, [], mask, allowed, enable_gqa=gqa, scale=scale, dropout_p=0.4)


def sum_of_all(held: list[Tensor]) -> Callable:
    """Captured tensors of several classes of gradients."""
    by_head, by_key, by_query, pairs, table = held
    return lambda s, b, h, q, kv: (
        s * by_head[h] * by_query[q] + by_key[kv] + pairs[h, q, kv] + 0.2 * torch.tanh(s) * table[(q * 7 + kv) % 5]
    )


@pairs_of(
    {
        "deterministic": [False, True],
        "sizes": [Sizes(2, 2, 70, 90, 64, 64), Sizes(1, 2, 130, 200, 128, 128), Sizes(1, 7, 80, 70, 160, 136)],
        "dtype": [*DTYPES],
    }
)
def test_captured_tensors(dtype: torch.dtype, sizes: Sizes, deterministic: bool) -> None:
    def held(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.5 + 0.5).requires_grad_()

    if deterministic and torch.get_default_device().type == "cpu":
        pytest.skip("the CPU's kernels are always in order")
    buffers = [held(sizes.H), held(sizes.N), held(sizes.M), held(sizes.H, sizes.M, sizes.N), held(5)]
    mask = block_mask(lambda b, h, q, kv: (q - kv).abs() % 40 < 25, sizes.M, sizes.N)
    place = torch.arange(sizes.M)[:, None] - torch.arange(sizes.N)
    options = {"dropout_p": 0.25, "deterministic": deterministic}
    check(sizes.tensors(dtype), sum_of_all, buffers, **options)
    check(sizes.tensors(dtype), sum_of_all, buffers, mask, place.abs() % 40 < 25, aux=False, **options)


def test_rows_without_a_key() -> None:
    mask = block_mask(lambda b, h, q, kv: (q >= 40) & (kv < q), 150, 150)
    q = torch.arange(150)
    allowed = (q[:, None] >= 40) & (q < q[:, None])
    tensors = Sizes(1, 2, 150, 150, 64, 64).tensors()
    check(tensors, lambda _: None, [], mask, allowed, dropout_p=0.2)
    out = flex_attention(*tensors, block_mask=mask, dropout_p=0.2)
    assert not out[:, :, :40].any()


@rows_of("p", [1e-3, 0.5, 0.96, 0.97, 0.99, 1 - 2**-15, 1 - 1e-9])
def test_every_p(p: float) -> None:
    if p <= 0.99:  # beyond, outputs are a few numbers and zeros
        check(Sizes(1, 2, 60, 400, 64, 64).tensors(), lambda _: None, [], dropout_p=p)
    share = 1 - mask_of(5, p, 1, 1, 1000, 1000).double().mean().item()
    exact = min(round(p * 2**40), 2**40 - 2**25) / 2**40
    assert abs(share - exact) < 4 * math.sqrt(exact * (1 - exact) / 1e6)
    assert abs(exact - min(p, 1 - 2**-15)) <= 2**-40


def test_many_keys_and_queries() -> None:
    """Tiles beyond the first few, of every part of a head."""
    tensors = Sizes(1, 1, 700, 1100, 64, 64).tensors(torch.float32)
    check(tensors, lambda _: None, [], dropout_p=0.15)
    tensors = Sizes(1, 1, 1100, 500, 128, 128).tensors(torch.bfloat16)
    check(
        tensors, lambda _: None, [], block_mask(causal, 1100, 500), torch.ones(1100, 500).tril().bool(), dropout_p=0.15
    )


def test_no_dropout_is_the_op_without() -> None:
    tensors = inputs()
    state = torch.get_rng_state()
    out = flex_attention(*tensors)
    again = flex_attention(*tensors, dropout_p=0.0)
    assert torch.equal(out, again)
    assert torch.equal(torch.get_rng_state(), state)
    # So small that nothing is dropped; a GPU's kernels may have other tiles.
    torch.testing.assert_close(flex_attention(*tensors, dropout_p=1e-9), out)


def test_lse_and_maxima_are_those_without() -> None:
    tensors = inputs()
    both = AuxRequest(lse=True, max_scores=True)
    _, plain = flex_attention(*tensors, return_aux=both)
    _, dropped = flex_attention(*tensors, return_aux=both, dropout_p=0.5)
    torch.testing.assert_close(tuple(dropped), tuple(plain))


def test_inplace_and_only_some_gradients() -> None:
    q, k, v = inputs()
    upstream = torch.randn(SHAPE)

    def gradients(inplace: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        x, y, z = q * 1.0, k * 1.0, v * 1.0
        return torch.autograd.grad(flex_attention(x, y, z, inplace=inplace, dropout_p=0.3), (q, k, v), upstream)

    all_of_them = gradients(False)
    torch.testing.assert_close(gradients(True), all_of_them)
    for i, t in enumerate((q, k, v)):
        torch.manual_seed(1)
        given = [x if i == j else x.detach() for j, x in enumerate((q, k, v))]
        (found,) = torch.autograd.grad(flex_attention(*given, dropout_p=0.3), t, upstream)
        torch.testing.assert_close(found, all_of_them[i])


@pytest.mark.cpu_only
def test_gradcheck() -> None:
    q, k, v = inputs(1, 2, 5, 3, dtype=torch.float64)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def call(*t: Tensor) -> Tensor:
        torch.manual_seed(3)
        return flex_attention(*t[:3], lambda s, b, h, i, j: s * t[3][j], dropout_p=0.4)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


# --- what is dropped ------------------------------------------------------------------------------------------


def test_statistics() -> None:
    p, sizes = 0.1, (2, 3, 700, 900)
    kept = mask_of(1234, p, *sizes).double()
    exact = round(p * 2**40) / 2**40
    variance = exact * (1 - exact)

    def even(sums: Tensor, count: int) -> None:
        """Means of `count` of them: mostly within the deviation that is due, never far out."""
        deviations = (sums.flatten() - (1 - exact)) / math.sqrt(variance / count)
        assert deviations.abs().max() < 4 + math.sqrt(2 * math.log(deviations.numel()))
        if deviations.numel() > 100:
            assert 0.8 < deviations.std() < 1.2

    even(kept.mean(), kept.numel())
    even(kept.mean((2, 3)), 700 * 900)
    even(kept.mean((0, 1, 3)), 6 * 900)
    even(kept.mean((0, 1, 2)), 6 * 700)
    # For each place in a block of numbers.
    blocks = kept[:, :, :688, :896].reshape(6, 43, 16, 56, 16)
    even(blocks.mean((0, 1, 3)), 6 * 43 * 56)
    # Neighbours, blocks side by side, heads and batches.
    centred = kept - (1 - exact)
    for shift in [(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 8), (0, 0, 0, 16), (0, 0, 1, 0), (0, 0, 8, 0), (0, 0, 16, 0),
                  (0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 16, 16)]:  # fmt: skip
        first = centred[tuple(slice(None, n - s) for n, s in zip(sizes, shift, strict=True))]
        second = centred[tuple(slice(s, None) for s in shift)]
        correlation = (first * second).mean() / variance
        assert correlation.abs() < 4.5 / math.sqrt(first.numel()), shift
    # Queries by keys the other way round.
    square = centred[..., :700]
    assert ((square * square.mT).mean() / variance).abs() < 6 / math.sqrt(square.numel())


def philox(words: list[Tensor], key: tuple[int, int], rounds: int, first: int = 0) -> list[Tensor]:
    """Rounds of Philox4x32 from `first` on, of words in int64."""
    low = 2**32 - 1
    x = words
    for i in range(first, first + rounds):
        bump = [(k + i * w) & low for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        # Products of 32 by 32 bits in halves of 16: int64 has no sign to spare.
        halves = []
        for word, factor in ((x[0], 0xD2511F53), (x[2], 0xCD9E8D57)):
            lower, upper = word * (factor & 0xFFFF), word * (factor >> 16)
            total = lower + ((upper & 0xFFFF) << 16)
            halves.append((total & low, (upper >> 16) + (total >> 32)))
        (low0, high0), (low1, high1) = halves
        x = [high1 ^ x[1] ^ bump[0], low1, high0 ^ x[3] ^ bump[1], low0]
    return x


@pytest.mark.parametrize("p", [0.1, 0.5, 2.0**-8, 0.9])
def test_masks_are_what_the_documentation_says(p: float) -> None:
    """By blocks of 16 queries by 64 keys on 32 lanes, in plain integers."""
    number, heads, queries, keys = (1 << 62) + 12345678901, 3, 40, 150
    found = mask_of(number, p, 1, heads, queries, keys)[0].cpu()
    h, q, k = torch.meshgrid(*(torch.arange(n, device="cpu") for n in (heads, queries, keys)), indexing="ij")
    none = torch.zeros_like(h)
    head = philox([h, none, none, none], (number & 0xFFFFFFFF, number >> 32), 10)
    lane = q % 8 * 4 + k % 8 // 2
    lower = philox([q // 16 * 32 + lane, k // 64, head[0], head[1]], (0, 0), 7)
    digits = philox(lower, (0, 0), 2, 7) + lower
    bit = k % 2 * 16 + q % 16 // 8 * 8 + k % 64 // 8
    value = none
    for word in digits:
        value = value * 2 + (word >> bit & 1)
    low = 2**32 - 1
    product = (digits[5] * (digits[6] & 0xFFFF) + ((digits[5] * (digits[6] >> 16) & 0xFFFF) << 16)) & low
    value = (value << 32) + ((product + digits[7]) & low)
    assert torch.equal(found, value >= round(p * 2**40))


def test_calls_differ_and_seeds_say_how() -> None:
    sizes = (1, 2, 130, 70)
    masks = [mask_of(s, 0.5, *sizes) for s in (0, 1, 2, 1 << 32, (1 << 63) - 1)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(a.numel())
    # A pair's place alone counts, not how many there are.
    assert torch.equal(mask_of(1, 0.5, 1, 2, 45, 33), masks[1][:, :, :45, :33])
    # For batches and heads their product.
    assert torch.equal(mask_of(1, 0.5, 2, 3, 20, 20).view(6, 20, 20), mask_of(1, 0.5, 1, 6, 20, 20)[0])


# --- generators -----------------------------------------------------------------------------------------------


def test_manual_seed() -> None:
    tensors = inputs()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        found.append([flex_attention(*tensors, dropout_p=0.3) for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    tensors = inputs()
    upstream = torch.randn(SHAPE)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * 1.0, k, v, dropout_p=0.3)

    def gradients(call: Callable) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        out = call(*tensors)
        torch.rand(3)  # what is drawn in between
        for t in tensors:
            t.grad = None
        out.backward(upstream)
        return out, *(t.grad for t in tensors)

    torch.testing.assert_close(gradients(lambda *t: checkpoint(block, *t, use_reentrant=reentrant)), gradients(block))


def test_compiled() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flex_attention(q, k, v, dropout_p=0.3), flex_attention(q, k, v, dropout_p=0.3)

    def run(call: Callable) -> list[Tensor]:
        torch.manual_seed(9)
        first, second = call(q, k, v)
        return [first, second, *torch.autograd.grad((first * second).sum(), (q, k, v))]

    expected = run(twice)
    assert not torch.equal(expected[0], expected[1])
    found = run(torch.compile(twice, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.cpu_only
def test_inductor_and_its_checkpoints() -> None:
    """TorchInductor draws other numbers; forward and backward have the same ones."""
    torch._dynamo.reset()
    q, k, v = inputs(1, 1, 40, 40)
    v = torch.eye(40).expand(1, 1, 40, 40).clone().requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kept = [checkpoint(flex_attention, q, k, v, dropout_p=0.5, use_reentrant=False) for _ in range(2)]
        return *kept, flex_attention(q, k, v, dropout_p=0.5)

    outs = torch.compile(call, fullgraph=True)(q, k, v)
    # For values that are the identity the output is the weights, and of an upstream of the identity the gradient of
    # values is their transpose.
    for i, out in enumerate(outs):
        assert not any(torch.equal(out, other) for other in outs[:i])
        (found,) = torch.autograd.grad(out, v, torch.eye(40).expand_as(out), retain_graph=True)
        torch.testing.assert_close(found, out.mT)


def test_opcheck() -> None:
    q, k, v = (torch.randn(2, 2, 24, 8) for _ in range(3))
    mods = ("", [], [], [], "", [], [], [], [], [])
    number = seed()
    torch.library.opcheck(OP.flex_attention_dropout_mask.default, (number, 0.3, [2, 2, 24, 24]))
    forward = (q, k, v, *mods, 0.3, 0.25, number, 3)
    torch.library.opcheck(OP.flex_attention_forward.default, forward)
    saved = OP.flex_attention_forward(*forward)
    upstream = [torch.randn_like(t) for t in saved[:3]]
    backward = (q, k, v, *upstream, *saved, *mods, 0.3, 0.25, number, True, [True] * 3)
    torch.library.opcheck(OP.flex_attention_backward.default, backward)
    torch.library.opcheck(OP.flex_attention_backward_.default, (*backward, []))


@pytest.mark.cpu_only
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_what_p_must_be(p: float) -> None:
    with pytest.raises(ValueError, match=r"^flex_attention: dropout_p must be at least 0 and less than 1, but got"):
        flex_attention(*inputs(), dropout_p=p)


# --- CUDA -----------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_the_gpu_has_the_bits_of_the_cpu(p: float) -> None:
    for number in (0, 12345, (1 << 63) - 2):
        sizes = [2, 3, 133, 257]
        found = [
            OP.flex_attention_dropout_mask(torch.tensor(number, device=d), p, sizes).cpu() for d in ("cpu", "cuda")
        ]
        assert torch.equal(*found)


@needs_gpu
def test_cuda_graphs_draw_anew() -> None:
    if torch.get_default_device().type != "cuda":
        pytest.skip("of the GPU")
    tensors = inputs(1, 2, 200, 64, dtype=torch.bfloat16)
    upstream = torch.randn(1, 2, 200, 64, dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        number = torch.randint(2**62, ())  # what PyTorch draws by itself must be drawn again, too
        out = flex_attention(*tensors, dropout_p=0.3)
        return [number, out, *torch.autograd.grad(out, tensors, upstream)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replayed() -> list[Tensor]:
        graph.replay()
        return [t.clone() for t in found]

    torch.manual_seed(11)
    first, second = replayed(), replayed()
    assert not torch.equal(first[1], second[1])
    torch.manual_seed(11)
    assert all(torch.equal(a, b) for a, b in zip(replayed()[:2], first, strict=False))
    torch.manual_seed(11)
    for a, b in zip(first, step(), strict=True):
        torch.testing.assert_close(a, b)
