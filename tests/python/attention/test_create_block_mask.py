"""create_block_mask and varlen_mask: equal to what PyTorch makes pair by pair."""

from __future__ import annotations

import inspect
import io

import fusegrad
import pytest
import torch
from block_masks import BLOCK_MASKS, blocks_of, dense
from coverings import each_of, rows_of
from fusegrad import _C, create_block_mask, varlen_mask
from needs import needs_flex_compiler
from torch import Tensor
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask

pytestmark = pytest.mark.usefixtures("each_device")

B, H = 2, 3
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


def device() -> str:
    return torch.empty(0).device.type


def same(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in LISTS:
        a, b = getattr(ours, name), getattr(theirs, name)
        # On a GPU the sort of PyTorch keeps the order of axes that vmap left.
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and torch.equal(a, b), name


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def test_there_are_enough_masks() -> None:
    assert len(BLOCK_MASKS) >= 60


@rows_of("name", BLOCK_MASKS.keys(), tests=8)
@rows_of("block", [32, (64, 16)])
def test_as_pytorch(name: str, block: int | tuple[int, int]) -> None:
    """Whole blocks, and lengths that are no multiple of one."""
    M, N = (192, 192) if block == 32 else (187, 201)
    mod = BLOCK_MASKS[name](B, H, M, N)
    ours = create_block_mask(mod, B, H, M, N, device=device(), block_size=block)
    same(ours, pytorch.create_block_mask(mod, B, H, M, N, device=device(), BLOCK_SIZE=block))


@pytest.mark.parametrize("dims", [7, 8])
def test_a_captured_tensor_of_many_dimensions(dims: int) -> None:
    """Bounds of whole blocks have one dimension more than the language's 8."""
    table = torch.randn([20, *[2] * (dims - 1)], device=device())

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (table[(q, *[kv % 2] * (dims - 1))] > 0) & (table[(19, *[0] * (dims - 1))] < 9)

    ours = create_block_mask(mod, 1, 1, 20, 20, device=device(), block_size=4)
    same(ours, pytorch.create_block_mask(mod, 1, 1, 20, 20, device=device(), BLOCK_SIZE=4))


@pytest.mark.parametrize("M, N", [(0, 8), (8, 0), (1, 1), (300, 20), (5, 700)])
def test_any_lengths(M: int, N: int) -> None:
    ours = create_block_mask(causal, None, None, M, N, device=device(), block_size=16)
    allowed = dense(causal, 1, 1, M, N)
    partial, full = blocks_of(allowed, (16, 16))
    assert torch.equal(ours.kv_num_blocks, partial.sum(-1, dtype=torch.int32))
    assert torch.equal(ours.full_q_num_blocks, full.sum(-2, dtype=torch.int32))
    assert ours.kv_indices.shape == partial.shape and ours.q_indices.shape == partial.mT.shape


def test_large_buffers_have_coarse_parts() -> None:
    """Reads at any place of a tensor of more elements than its table has parts."""
    S, count = 700, 9000
    place, value = torch.randint(0, count, (S,)).sort().values, torch.randint(0, 50, (count,)).sort().values
    table = torch.rand(2, count) < 0.002
    for mod in (
        lambda b, h, q, kv: value[place[q]] == value[place[kv]],
        lambda b, h, q, kv: table[b, place[q]] | table[b, place[kv] - 1],
        lambda b, h, q, kv: (value[place[q]] - value[place[kv] - count // 2]).abs() < 3,
    ):
        ours = create_block_mask(mod, 2, None, S, S, device=device(), block_size=64)
        same(ours, pytorch.create_block_mask(mod, 2, None, S, S, device=device(), BLOCK_SIZE=64))


# --- values, devices, errors --------------------------------------------------------------------------------------


def test_new_values_make_new_lists_and_compile_nothing() -> None:
    limit, ids, numbers = torch.tensor(9), torch.arange(96) // 40, [3]

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[q] == ids[kv]) & (kv <= limit + numbers[0])

    create_block_mask(mod, None, None, 96, 96, device=device(), block_size=16)
    before = _C.jit.stats()
    for number, length in ((5, 96), (30, 96), (70, 90)):
        numbers[0] = number
        limit.add_(1)
        ids.copy_(torch.randint(0, 3, (96,)).sort().values)
        ours = create_block_mask(mod, None, None, length, length, device=device(), block_size=16)
        same(ours, pytorch.create_block_mask(mod, None, None, length, length, device=device(), BLOCK_SIZE=16))
    assert _C.jit.stats()["compilations"] == before["compilations"]


@pytest.mark.cpu_only
def test_reads_out_of_range() -> None:
    """Raise where any pair has one, also where bounds decide; a negative index counts from the end."""
    table = torch.arange(40) < 20
    text = "index 40 is out of range for dimension 0 of captured buffer 0, which has size 40"
    decided = lambda b, h, q, kv: (q < 0) & table[q]  # noqa: E731
    for mod in (lambda b, h, q, kv: table[q], decided, lambda b, h, q, kv: ~table[q] | (q > kv)):
        with pytest.raises(IndexError, match=f"^create_block_mask: mask_mod: {text}"):
            create_block_mask(mod, None, None, 41, 8, device="cpu", block_size=16)
    below = create_block_mask(lambda b, h, q, kv: table[q - 40], None, None, 40, 8, device="cpu", block_size=8)
    assert below.full_kv_num_blocks.flatten().tolist() == [1, 1, 0, 0, 0]
    with pytest.raises(IndexError, match="index -41 is out of range"):
        create_block_mask(lambda b, h, q, kv: table[q - 41], None, None, 40, 8, device="cpu")


def test_the_mask_works() -> None:
    """In flex_attention, with the mask_mod that it was given."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(B, H, 70, 16) for _ in range(3))
    ids = torch.arange(70) // 30
    traced = fusegrad.trace_mask_mod(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv))
    mask = create_block_mask(traced, None, None, 70, 70, block_size=16)
    assert mask.mask_mod is traced and mask.kv_indices.device.type == device()
    out = fusegrad.flex_attention(query, key, value, block_mask=mask)
    allowed = (ids[:, None] == ids) & torch.ones(70, 70, dtype=torch.bool).tril()
    wide = (t.double() for t in (query, key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=allowed)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


@rows_of(
    "arguments, options, error, message",
    [
        ((0, -1, 8, 8), {}, ValueError, "B and H at least 1"),
        ((1, 1, -8, 8), {}, ValueError, "lengths must be at least 0"),
        ((1, 1, 8, 8), {"block_size": 0}, ValueError, "block_size must be two positive numbers"),
        ((1, 1, 8, 8), {"block_size": (8, 8, 8)}, TypeError, "block_size must be a whole number, a pair"),
        ((1, 1, 8, 8.0), {}, TypeError, "KV_LEN must be a whole number"),
        ((1, 1, 8, 8), {"device": "meta:x"}, ValueError, "device must be"),
        ((1, 1, 8, 8), {"BLOCK_SIZE": 8, "block_size": 16}, ValueError, "BLOCK_SIZE must not come together with"),
    ],
)
def test_what_is_refused(arguments: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^create_block_mask: .*{message}"):
        create_block_mask(causal, *arguments, **options)


def test_pytorchs_arguments() -> None:
    """In their order and by their names, whose list is read from PyTorch."""
    later = ("separate_full_blocks", "compute_dq_write_order", "dq_kv_order")  # of torch 2.15 alone
    theirs = [n for n in inspect.signature(pytorch.create_block_mask).parameters if n not in later]
    assert list(inspect.signature(create_block_mask).parameters)[: len(theirs)] == theirs
    on = device()
    named = {"B": 2, "H": None, "Q_LEN": 70, "KV_LEN": 90, "device": on, "BLOCK_SIZE": (16, 32), "_compile": False}
    expected = pytorch.create_block_mask(causal, **named)
    same(create_block_mask(mask_mod=causal, **named), expected)
    same(create_block_mask(causal, *named.values()), expected)
    same(create_block_mask(causal, 2, None, 70, 90, torch.device(on), _compile=True, block_size=(16, 32)), expected)
    if on == "cuda":
        same(create_block_mask(causal, 2, None, 70, 90, 0, (16, 32)), expected)
    limit = torch.tensor(3)
    for place in (on, torch.device(on)):
        assert fusegrad.trace_mask_mod(lambda b, h, q, kv: kv < limit, device=place).kind == "mask_mod"
        assert fusegrad.trace_score_mod(lambda s, b, h, q, kv: s * limit, device=place).kind == "score_mod"


def test_a_score_mod_is_refused() -> None:
    mod = fusegrad.trace_score_mod(lambda s, b, h, q, kv: s)
    with pytest.raises(TypeError, match="must be a mask_mod, but got a score_mod"):
        create_block_mask(mod, 1, 1, 8, 8)


def test_opcheck() -> None:
    ids = torch.arange(40) // 16
    mod = fusegrad.trace_mask_mod(lambda b, h, q, kv: (ids[q] == ids[kv]) & (kv < 7 * h))
    arguments = (torch.empty(0), mod.text, list(mod.buffers), [], [], [1, 2, 40, 40], [16, 16])
    torch.library.opcheck(torch.ops.fusegrad.create_block_mask, arguments)
    ends = torch.tensor([0, 3, 9]), torch.tensor([0, 5, 9])
    torch.library.opcheck(torch.ops.fusegrad.varlen_keys, (*ends, 12, True, 2, -1))


class Program(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.nn.Buffer(torch.arange(200) // 70)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.ids
        mask = create_block_mask(
            lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None, None, x.size(2), x.size(2), block_size=32
        )
        return fusegrad.flex_attention(x, x, x, block_mask=mask)


@pytest.mark.cpu_only
def test_within_compiled_and_exported_programs() -> None:
    """For any length, in one graph; saved and loaded."""
    program, given = Program(), [torch.randn(1, 2, n, 8) for n in (100, 130, 200)]
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    lengths = {"x": {2: torch.export.Dim("n", min=66, max=200)}}
    exported = torch.export.export(program, (given[0],), dynamic_shapes=lengths)
    file = io.BytesIO()
    torch.export.save(exported, file)
    loaded = torch.export.load(file).module()
    for x in given:
        for found in (compiled(x), loaded(x)):
            torch.testing.assert_close(found, program(x))


@pytest.mark.cpu_only
def test_varlen_mask_within_a_compiled_program() -> None:
    def run(x: Tensor, ends: Tensor) -> Tensor:
        return fusegrad.flex_attention(x, x, x, block_mask=varlen_mask(ends, causal=True, lengths=(70, 70)))

    x = torch.randn(1, 2, 70, 8)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for ends in (torch.tensor([0, 30, 70]), torch.tensor([0, 41, 60])):
        torch.testing.assert_close(compiled(x, ends), run(x, ends))


# --- packed sequences ---------------------------------------------------------------------------------------------


def packed(q_ends: list[int], k_ends: list[int], causal: bool, window: tuple[int, int], M: int, N: int) -> Tensor:
    """[M, N], pair by pair."""
    allowed = torch.zeros(M, N, dtype=torch.bool, device="cpu")
    for i in range(len(q_ends) - 1):
        for q in range(q_ends[i], q_ends[i + 1]):
            own = k_ends[i + 1] - (q_ends[i + 1] - q)
            for kv in range(k_ends[i], k_ends[i + 1]):
                before, after = own - kv, kv - own
                fits = (window[0] < 0 or before <= window[0]) and (window[1] < 0 or after <= window[1])
                allowed[q, kv] = fits and not (causal and after > 0)
    return allowed


@each_of(
    {
        "causal": [False, True],
        "window": [None, (5, -1), (9, 0), (3, 4)],
        "q_ends, k_ends, lengths": [
            ([0, 70], None, None),
            ([0, 10, 10, 33, 64, 70], None, None),
            ([0, 10, 33, 64], None, (80, 71)),
            ([0, 5, 9, 50], [0, 40, 42, 60], None),
            ([0, 16, 32], [0, 0, 32], None),
        ],
    }
)
def test_packed_sequences(
    q_ends: list[int],
    k_ends: list[int] | None,
    lengths: tuple[int, int] | None,
    window: tuple[int, int] | None,
    causal: bool,
) -> None:
    ends = [torch.tensor(e, dtype=torch.int32) for e in ([q_ends] if k_ends is None else [q_ends, k_ends])]
    M, N = lengths or (q_ends[-1], (k_ends or q_ends)[-1])
    mask = varlen_mask(*ends, causal=causal, window=window, lengths=lengths, block_size=16)
    allowed = packed(q_ends, k_ends or q_ends, causal, window or (-1, -1), M, N).to(device())
    assert torch.equal(dense(mask.mask_mod, 1, 1, M, N)[0, 0], allowed)
    theirs = pytorch.create_block_mask(lambda b, h, q, kv: allowed[q, kv], 1, 1, M, N, device(), BLOCK_SIZE=16)
    same(mask, theirs)


@pytest.mark.parametrize(
    "q_ends, k_ends, options, error, message",
    [
        ([0, 3], [0, 3, 4], {}, ValueError, "cu_seqlens_k must be as long as cu_seqlens_q, 2, but got 3"),
        ([0.0, 3.0], None, {}, TypeError, "cu_seqlens_q must be int32 or int64"),
        ([0], None, {}, ValueError, r"cu_seqlens_q must be \[sequences \+ 1\]"),
        ([0, 5], None, {"window": (-2, 0)}, ValueError, "window must be two numbers from -1 on"),
        ([0, 5], None, {"window": 3}, TypeError, "window must be a pair"),
    ],
)
def test_what_varlen_mask_refuses(
    q_ends: list, k_ends: list | None, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^varlen_mask: {message}"):
        varlen_mask(torch.tensor(q_ends), None if k_ends is None else torch.tensor(k_ends), **options)


@pytest.mark.cpu_only
def test_ends_are_checked_on_the_cpu() -> None:
    for ends in ([1, 4], [0, 5, 3]):
        with pytest.raises(ValueError, match="cu_seqlens_q must not descend from 0 on"):
            varlen_mask(torch.tensor(ends))
    with pytest.raises(ValueError, match="lengths must not be below those of the sequences"):
        varlen_mask(torch.tensor([0, 9]), lengths=(8, 9))


# --- kernels, without a GPU ---------------------------------------------------------------------------------------

KERNELS = ["causal mask", "documents, causal", "offsets of documents", "a table by distance", "points near one another"]


@needs_flex_compiler
@pytest.mark.cpu_only
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_with_few_spills(name: str) -> None:
    mod = fusegrad.trace_mask_mod(BLOCK_MASKS[name](B, H, 192, 192))
    dtypes = [str(b.dtype).removeprefix("torch.") for b in mod.buffers]
    program = _C.flex.block_mask_program(mod.text, dtypes, [list(b.shape) for b in mod.buffers], (128, 128), "90a")
    (found,) = _C.jit.resources(program).values()
    # Captured offsets of 64 bits take two registers each.
    assert found["spill_store_bytes"] <= 32 and found["registers"] <= 128
