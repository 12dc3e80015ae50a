"""What each process of test_context_parallel.py runs: every case on the first 2, 3 and 4 of the processes, against
flex_attention of one process on the whole sequence. A case that fails says why in its result."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fusegrad
import score_mods
import torch
import torch.distributed as dist
from attention_reference import dense
from fusegrad import ContextParallel, flex_attention
from fusegrad.distributed.sequence_checks import takes_ring
from processes import assert_raises, main
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

DEVICE = sys.argv[4] if __name__ == "__main__" else "cpu"
WIDEST = torch.float64 if DEVICE == "cpu" else torch.float32
WORLDS = (2, 3, 4)
B, H, HKV, S, D, E = 2, 4, 2, 21, 8, 6
CASES: dict[str, Callable[..., None]] = {}
# The cases that depend on how many processes there are; the others run on two.
EVERYWHERE = ("mods", "ways", "ranges", "captured_dtensors", "meshes", "helper", "columns")
LARGEST = ("lost", "batches_and_sequences")  # on all of the processes


def runs(name: str, world: int) -> bool:
    if name in LARGEST:
        return world == max(WORLDS)
    if name == "mods":  # the longest; an even and an odd number are enough
        return world < max(WORLDS)
    return world == 2 or name in EVERYWHERE


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def ranges_of(world: int, length: int) -> list[list[tuple[int, int]]]:
    """Uneven, in another order than the sequence's, and one process with nothing."""
    cut = length // 3
    return [[(cut + 1, length), (0, 2)], [(2, cut + 1)], [], []][:world]


def close(ours: Tensor, truth: Tensor, what: str) -> None:
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if ours.dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    if ours.dtype in (torch.bfloat16, torch.float16):
        tolerance = {"rtol": 4e-2, "atol": 3e-2}
    torch.testing.assert_close(
        ours.detach(), truth.detach().to(ours.dtype), equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance
    )


def inputs(
    length: int = S, dtype: torch.dtype = WIDEST, heads: int = HKV, batch: int = B, sizes: tuple[int, int] = (D, E)
) -> list[Tensor]:
    shapes = (B, H, length, sizes[0]), (batch, heads, length, sizes[0]), (batch, heads, length, sizes[1])
    return [torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def block_mask(mask_mod: Any, length: int, block: int = 4, heads: int | None = None) -> BlockMask:
    if not inspect.isfunction(mask_mod):
        method, mask_mod = mask_mod, lambda b, h, q, kv: method(b, h, q, kv)
    return create_block_mask(mask_mod, B, heads, length, length, device=DEVICE, BLOCK_SIZE=block)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def compare(
    what: str,
    context: ContextParallel,
    whole: Sequence[Tensor],
    score_mod: Any = None,
    mask: BlockMask | None = None,
    captured: Sequence[Tensor] = (),
    own_mask: BlockMask | None = None,
    **options: Any,
) -> None:
    """out, lse, max_scores and all gradients of upstream gradients of each, twice; `captured` are whole everywhere."""
    aux = AuxRequest(lse=True, max_scores=True)
    gqa = whole[0].shape[1] != whole[1].shape[1]
    out, rest = flex_attention(*whole, score_mod, mask, enable_gqa=gqa, return_aux=aux, **options)
    right = [out, rest.lse, rest.max_scores]
    upstream = [torch.randn_like(t) for t in right]
    grads = torch.autograd.grad(right, [*whole, *captured], upstream, allow_unused=True, retain_graph=True)
    mine = [context.shard(t, 2).detach().requires_grad_() for t in whole]
    out, rest = flex_attention(
        *mine, score_mod, own_mask or mask, enable_gqa=gqa, return_aux=aux, context_parallel=context, **options
    )
    made = [out, rest.lse, rest.max_scores]
    for name, ours, truth in zip(("out", "lse", "max_scores"), made, right, strict=True):
        close(ours, context.shard(truth, 2), f"{what}, {name}")
    parts = [context.shard(g, 2) for g in upstream]
    first = torch.autograd.grad(made, [*mine, *captured], parts, allow_unused=True, retain_graph=True)
    again = torch.autograd.grad(made, [*mine, *captured], parts, allow_unused=True)
    for i, (ours, twice, truth) in enumerate(zip(first, again, grads, strict=True)):
        name = f"{what}, gradient {i}"
        assert (ours is None) == (truth is None), f"{name}: {ours is None}, {truth is None}"
        if ours is not None:
            assert DEVICE != "cpu" or ours.equal(twice), f"{name}: another in the second backward"
            close(ours, truth if i >= 3 else context.shard(truth, 2), name)


@case
def mods(group: Any) -> None:
    """All score_mods and mask_mods of the field."""
    world = dist.get_world_size(group)
    contexts = [
        ContextParallel(group, "contiguous", length=S, way="gather"),
        ContextParallel(group, "zigzag", length=S, way="ring"),
    ]
    whole = inputs()
    # Each compiles its kernels on a GPU.
    for i, mod in enumerate(score_mods.CASES if DEVICE == "cpu" else score_mods.CASES[::8]):
        score_mod, mask_mod, captured = mod.make(B, H, S, S, WIDEST, torch.Generator(DEVICE).manual_seed(i))
        mask = None if mask_mod is None else block_mask(mask_mod, S, heads=H)
        wanted = [t for t in captured if t.requires_grad]
        compare(mod.name, contexts[(i + world) % 2], whole, score_mod, mask, wanted)


def classes(dtype: torch.dtype, length: int = S) -> dict[str, tuple[Any, list[Tensor]]]:
    """A score_mod whose captured gradients are of each class."""

    def made(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()

    scale, key, query, rel = made(H), made(length), made(length), made(H, 2 * length)
    pair, few, many = made(H, length, length), made(7), made(5000)
    kind = torch.randint(0, 7, (length, length), generator=torch.Generator(DEVICE).manual_seed(9))
    place = torch.randint(0, 5000, (length, length))
    return {
        "A": (lambda s, b, h, q, kv: s * scale[h], [scale]),
        "B": (lambda s, b, h, q, kv: s + key[kv], [key]),
        "C": (lambda s, b, h, q, kv: s + query[q] * s, [query]),
        "D": (lambda s, b, h, q, kv: s + rel[h, q - kv + length], [rel]),
        "E": (lambda s, b, h, q, kv: s + pair[h, q, kv], [pair]),
        "F": (lambda s, b, h, q, kv: s + few[kind[q, kv]], [few]),
        "G": (lambda s, b, h, q, kv: s + many[place[q, kv]], [many]),
        "negative": (lambda s, b, h, q, kv: s + rel[h, q - kv], [rel]),
    }


@case
def ways(group: Any) -> None:
    """Each class of captured gradients, by both ways, in all placements."""
    whole = inputs()
    found = classes(WIDEST)
    if DEVICE == "cuda":  # each compiles its kernels
        found = {name: found[name] for name in ("B", "D", "E", "G")}
    masks = {None: None, "causal": block_mask(causal, S)}
    for placement in ("contiguous", "zigzag"):
        for way in ("gather", "ring"):
            context = ContextParallel(group, placement, length=S, way=way)
            compare(f"{placement} {way}", context, whole)
            for i, (name, (score_mod, captured)) in enumerate(found.items()):
                mask = list(masks)[i % 2]
                compare(f"{placement} {way} class {name} mask {mask}", context, whole, score_mod, masks[mask], captured)


@case
def ranges(group: Any) -> None:
    """Any ranges, empty ones, one position, none; masks whose blocks they cut."""
    world = dist.get_world_size(group)
    rel = torch.randn(H, 2 * S, dtype=WIDEST, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + rel[h, q - kv]

    for way in ("gather", "ring"):
        for length in (S, 3):
            whole = inputs(length)
            own = ranges_of(world, length)[dist.get_rank(group)]
            context = ContextParallel(group, own, way=way)
            for block in (None, 4, 16):
                mask = None if block is None else block_mask(causal, length, block)
                compare(f"{way} {length} blocks of {block}", context, whole, score_mod, mask, [rel])
        for length in (1, 0):
            whole = inputs(length)
            compare(f"{way} {length}", ContextParallel(group, length=length, way=way), whole)


@case
def masks(group: Any) -> None:
    """Masks of batches and heads of their own, of rows without a key, without a mask_mod, and of this process alone."""
    whole = inputs()
    documents = torch.randint(0, 3, (B, S)).sort(-1).values

    def by_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, kv]) & (q >= kv + h % 2) & (q != 5)

    counts = torch.tensor([1, 2, 0, 1, 2, 1], dtype=torch.int32).view(1, 1, 6)
    index = torch.tensor([[3, 0], [1, 5], [0, 0], [3, 3], [5, 0], [0, 0]], dtype=torch.int32)
    index = torch.nn.functional.pad(index, (0, 4)).view(1, 1, 6, 6)
    listed = BlockMask.from_kv_blocks(counts, index, BLOCK_SIZE=4, seq_lengths=(S, S))
    made = {"batches and heads": block_mask(by_batch, S, heads=H), "listed": listed}
    for way in ("gather", "ring"):
        for placement in ("contiguous", "zigzag"):
            context = ContextParallel(group, placement, length=S, way=way)
            for name, mask in made.items():
                compare(f"{name} {placement} {way}", context, whole, None, mask)
        even = inputs(24)
        context = ContextParallel(group, "zigzag", way=way)
        own = context.block_mask(causal, B, None, 24, device=DEVICE, block_size=2)
        compare(f"own {way}", context, even, None, block_mask(causal, 24, 2), own_mask=own)
    context = ContextParallel(group, "zigzag", length=S)
    assert_raises(
        ValueError,
        "block_size must divide",
        lambda: context.block_mask(causal, None, None, S, device=DEVICE, block_size=2),
    )


@case
def columns(group: Any) -> None:
    """Masks that list few keys: no others are sent, and all is as with all of them."""
    world, rank, length = dist.get_world_size(group), dist.get_rank(group), 97
    whole = inputs(length)
    documents = torch.bucketize(torch.arange(length), torch.tensor([9, 14, 40, 62, 80]), right=True)
    rel = torch.randn(H, 2 * length, dtype=WIDEST, requires_grad=True)
    bias = torch.randn(length, dtype=WIDEST, requires_grad=True)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + rel[h, q - kv] + bias[kv]

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (documents[q] == documents[kv]) & (q >= kv + h % 2) & (documents[q] != 1)

    def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv <= 6 + b) & (kv - q <= 3)

    masks = {"documents": block_mask(within, length, heads=H), "window": block_mask(window, length, 8)}
    own = ranges_of(world, length)[rank]
    for name, mask in masks.items():
        placements = {
            "balanced": ContextParallel.balanced(group, mask, way="gather"),
            "contiguous": ContextParallel(group, length=length),
            "zigzag": ContextParallel(group, "zigzag", length=length, way="gather"),
            "uneven": ContextParallel(group, own, way="gather"),
        }
        for placement, context in placements.items():
            with sent() as counts:
                compare(f"{name} {placement}", context, whole, score_mod, mask, [rel, bias])
            # Keys with values in the forward, and in two backwards, each with their gradients.
            most = 5 * length * B * HKV * (D + E) / 2
            assert len(counts) == 5 and sum(counts) < most, f"{name} {placement}: {counts}"
    context = ContextParallel(group, "zigzag", length=length, way="gather")
    with sent() as counts:
        compare("causal", context, whole, score_mod, block_mask(causal, length), [rel, bias])
    assert not counts, "a mask that lists most keys"
    low = inputs(length, torch.bfloat16)
    compare("bfloat16", context, low, None, masks["window"])
    compare("bfloat16, balanced", ContextParallel.balanced(group, masks["documents"]), low, None, masks["documents"])
    parts = [context.shard(t, 2).detach().requires_grad_() for t in low]
    found = []
    for _ in range(2):
        out = flex_attention(
            *parts, None, masks["window"], enable_gqa=True, deterministic=True, context_parallel=context
        )
        found.append([out, *torch.autograd.grad(out.float().square().sum(), parts)])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@contextlib.contextmanager
def sent() -> Iterator[list[int]]:
    """How many numbers this process sends with each all_to_all_single."""
    counts: list[int] = []
    original = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *rest: Any, **options: Any) -> Any:
        counts.append(given.shape[0])
        return original(output, given, *rest, **options)

    dist.all_to_all_single = counted
    try:
        yield counts
    finally:
        dist.all_to_all_single = original


@case
def shapes(group: Any) -> None:
    """Other dtypes, one batch of keys for all, as many key heads as heads, wide ones; wanted gradients of some only."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = classes(dtype)
        for way in ("gather", "ring"):
            context = ContextParallel(group, "zigzag", length=S, way=way)
            score_mod, captured = found["D"]
            compare(f"{dtype} {way}", context, inputs(dtype=dtype), score_mod, block_mask(causal, S), captured)
    for way in ("gather", "ring"):
        context = ContextParallel(group, length=S, way=way)
        compare(f"one batch {way}", context, inputs(batch=1))
        compare(f"heads {way}", context, inputs(heads=H), scale=0.7)
        wide = inputs(dtype=torch.float32, sizes=(576, 512))
        score_mod, captured = classes(torch.float32)["D"]
        compare(f"wide heads {way}", context, wide, score_mod, block_mask(causal, S), captured)
        for chosen in range(4):
            score_mod, captured = classes(WIDEST)["B"]
            parts = [context.shard(t, 2).detach() for t in inputs()]
            leaves = [*parts, captured[0].detach()]
            leaves[chosen].requires_grad_()
            bias = leaves[3]
            out = flex_attention(
                *parts, lambda s, b, h, q, kv, bias=bias: s + bias[kv], enable_gqa=True, context_parallel=context
            )
            out.sum().backward()
            assert [t.grad is None for t in leaves] == [i != chosen for i in range(4)]
    with torch.no_grad():
        parts = [context.shard(t, 2) for t in inputs()]
        assert not flex_attention(*parts, enable_gqa=True, context_parallel=context).requires_grad


@case
def rounding(group: Any) -> None:
    """16 bits are as near to float64 as the contract says of one process."""
    rel = torch.randn(H, 128)

    def score_mod(dtype: torch.dtype) -> Any:
        bias = rel.to(dtype)
        return lambda s, b, h, q, kv: s + bias[h, q - kv]

    documents = torch.bucketize(torch.arange(64), torch.tensor([12, 44]), right=True)

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[q] == documents[kv])

    whole = inputs(64, torch.bfloat16)
    upstream = torch.randn(B, H, 64, E).bfloat16()
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    masks = {
        "causal": (block_mask(causal, 64, 16), seen),
        "documents": (block_mask(within, 64, 4), seen & (documents[:, None] == documents)),
    }
    for kind, (mask, pairs) in masks.items():

        def eager(dtype: torch.dtype, pairs: Tensor = pairs) -> list[Tensor]:
            tensors = [t.detach().to(dtype).requires_grad_() for t in whole]
            out = dense(*tensors, score_mod(dtype), pairs).out
            return [out, *torch.autograd.grad(out, tensors, upstream.to(dtype))]

        truth, theirs = eager(torch.float64), eager(torch.bfloat16)
        found: list[Tensor] = []
        for way in ("gather", "ring"):
            context = ContextParallel(group, "zigzag", length=64, way=way)
            parts = [context.shard(t, 2).detach().requires_grad_() for t in whole]
            out = flex_attention(*parts, score_mod(torch.float32), mask, enable_gqa=True, context_parallel=context)
            ours = [out, *torch.autograd.grad(out, parts, context.shard(upstream, 2))]
            for i, made in enumerate(ours):
                right = context.shard(truth[i], 2)
                errors = [(t.double() - right).square().mean().sqrt() for t in (made, context.shard(theirs[i], 2))]
                assert errors[0] <= 1.5 * errors[1], f"{kind} {way} {i}: {errors}"
                if i == 0:
                    found.append(errors[0])
        assert found[1] <= 1.1 * found[0], f"{kind}: merged outputs are rounded once"


@case
def contract(group: Any) -> None:
    context = ContextParallel(group, length=S)
    parts = [context.shard(t, 2).detach().requires_grad_() for t in inputs()]
    out = flex_attention(*parts, enable_gqa=True, context_parallel=context)
    grad = torch.autograd.grad(out.sum(), parts[0], create_graph=True)[0]
    assert_raises(RuntimeError, "flex_attention", lambda: grad.sum().backward())
    mapped = torch.vmap(lambda *t: flex_attention(*t, enable_gqa=True, context_parallel=context))
    assert_raises(RuntimeError, "flex_attention", lambda: mapped(*(t.detach()[None] for t in parts)))
    documents = torch.zeros(S, dtype=torch.int64)
    mask = block_mask(lambda b, h, q, kv: documents[q] == documents[kv], S)
    out = flex_attention(*parts, None, mask, enable_gqa=True, context_parallel=context)
    documents += 1
    assert_raises(RuntimeError, "modified by an inplace operation", lambda: out.sum().backward())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        parts = [t.detach().float().requires_grad_() for t in parts]
        out = flex_attention(*parts, enable_gqa=True, context_parallel=context)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in parts)
    transposed = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in parts]
    for way in ("gather", "ring"):
        context = ContextParallel(group, length=S, way=way)
        assert flex_attention(*transposed, enable_gqa=True, context_parallel=context).transpose(1, 2).is_contiguous()


@case
def deterministic(group: Any) -> None:
    for way in ("gather", "ring"):
        context = ContextParallel(group, "zigzag", length=4 * S, way=way)
        score_mod, captured = classes(torch.float32, 4 * S)["G"]
        parts = [context.shard(t, 2).detach().requires_grad_() for t in inputs(4 * S, torch.float32)]
        found = []
        for _ in range(2):
            out = flex_attention(*parts, score_mod, enable_gqa=True, deterministic=True, context_parallel=context)
            found.append([out, *torch.autograd.grad(out.square().sum(), [*parts, *captured])])
        assert all(a.equal(b) for a, b in zip(*found, strict=True)), way


@case
def not_waiting(group: Any) -> None:
    """On a GPU, calls that each process has made before are not compared by the host: what differs is NaN."""
    if DEVICE == "cpu":
        return
    context = ContextParallel(group)
    parts = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    made = [lambda s, b, h, q, kv: s * 2, lambda s, b, h, q, kv: s * 3]
    fusegrad.set_check_targets(False)
    try:
        for score_mod in made:
            assert flex_attention(*parts, score_mod, context_parallel=context).isfinite().all()
        out = flex_attention(*parts, made[dist.get_rank(group)], context_parallel=context)
        (grad,) = torch.autograd.grad(out.sum(), parts[0])
        assert out.isnan().all() and grad.isnan().all()
        assert flex_attention(*parts, made[0], context_parallel=context).isfinite().all()
    finally:
        fusegrad.set_check_targets(True)


@case
def dropout(group: Any) -> None:
    """The backward drops what the forward dropped: with values of 1, both sum up the weights that are kept."""
    for way in ("gather", "ring"):
        for placement in ("contiguous", "zigzag"):
            context = ContextParallel(group, placement, length=64, way=way)
            query, key, _ = (context.shard(t, 2).detach() for t in inputs(64))
            value = torch.ones_like(key).requires_grad_()
            torch.manual_seed(3)
            out = flex_attention(query, key, value, enable_gqa=True, dropout_p=0.4, context_parallel=context)
            (grad,) = torch.autograd.grad(out.sum(), value)
            sums = torch.stack([out.detach().sum(), grad.sum(), out.detach().square().sum()])
            dist.all_reduce(sums, group=group)
            close(sums[0], sums[1], f"{way} {placement}")
            assert abs(sums[0].item() / (B * H * 64 * D) - 1) < 0.05 and sums[2] > 1.002 * sums[0]
            torch.manual_seed(3)
            again = flex_attention(query, key, value, enable_gqa=True, dropout_p=0.4, context_parallel=context)
            assert again.equal(out)


@case
def captured_plain(group: Any) -> None:
    """Without the sum, each process has its own queries' part of the gradient."""
    whole = inputs()
    for way in ("gather", "ring"):
        context = ContextParallel(group, length=S, way=way, sum_captured=False)
        score_mod, captured = classes(WIDEST)["D"]
        out = flex_attention(*whole, score_mod, enable_gqa=True)
        mine = torch.zeros_like(out)
        index = context.positions(device=DEVICE)
        mine[:, :, index] = 1.0
        (truth,) = torch.autograd.grad(out, captured, mine)
        parts = [context.shard(t, 2) for t in whole]
        ours = flex_attention(*parts, score_mod, enable_gqa=True, context_parallel=context)
        (found,) = torch.autograd.grad(ours.sum(), captured)
        close(found, truth, way)


@case
def captured_dtensors(group: Any) -> None:
    mesh = DeviceMesh.from_group(group, DEVICE)
    whole = inputs()
    placements = {
        "B": ([Replicate()], [Shard(0)]),
        "C": ([Shard(0)],),
        "D": ([Shard(0)], [Shard(1)]),
        "E": ([Shard(1)], [Shard(2)], [Replicate()]),
        "F": ([Shard(0)],),
    }
    plain = {"B": 0, "C": 0, "E": 1}  # which dimension is the queries' or keys'
    for name, ways_to_shard in placements.items():
        score_mod, (tensor,) = classes(WIDEST)[name]
        out = flex_attention(*whole, score_mod, enable_gqa=True)
        upstream = torch.randn_like(out)
        (truth,) = torch.autograd.grad(out, tensor, upstream)
        for placement in ways_to_shard:
            for way in ("gather", "ring"):
                context = ContextParallel(group, length=S, way=way)
                sharded = distribute_tensor(tensor.detach(), mesh, placement).requires_grad_()
                mod = with_captured(name, sharded)
                parts = [context.shard(t, 2) for t in whole]
                ours = flex_attention(*parts, mod, enable_gqa=True, context_parallel=context)
                close(ours, context.shard(out, 2), f"{name} {placement} {way}")
                (found,) = torch.autograd.grad(ours, sharded, context.shard(upstream, 2))
                expected = [Partial()] if placement == [Replicate()] else placement
                assert list(found.placements) == expected, f"{name} {placement}: {found.placements}"
                close(found.full_tensor(), truth, f"{name} {placement} {way}, gradient")
        if name not in plain:
            continue
        # Another placement than a DTensor's: the shards are those of this process's positions.
        context = ContextParallel(group, "zigzag", length=24)
        even = inputs(24)
        score_mod, (tensor,) = classes(WIDEST, 24)[name]
        out = flex_attention(*even, score_mod, enable_gqa=True)
        (truth,) = torch.autograd.grad(out.sum(), tensor)
        dim = plain[name]
        part = context.shard(tensor.detach(), dim).contiguous()
        if 24 % (2 * context.world):
            continue
        sharded = DTensor.from_local(part, mesh, [Shard(dim)]).requires_grad_()
        parts = [context.shard(t, 2) for t in even]
        ours = flex_attention(*parts, with_captured(name, sharded), enable_gqa=True, context_parallel=context)
        close(ours, context.shard(out, 2), f"{name} zigzag")
        (found,) = torch.autograd.grad(ours.sum(), sharded)
        close(found.to_local(), context.shard(truth, dim), f"{name} zigzag, gradient")


def with_captured(name: str, t: Any) -> Any:
    kind = torch.randint(0, 7, (S, S), generator=torch.Generator(DEVICE).manual_seed(9))
    return {
        "B": lambda s, b, h, q, kv: s + t[kv],
        "C": lambda s, b, h, q, kv: s + t[q] * s,
        "D": lambda s, b, h, q, kv: s + t[h, q - kv + S],
        "E": lambda s, b, h, q, kv: s + t[h, q, kv],
        "F": lambda s, b, h, q, kv: s + t[kind[q, kv]],
    }[name]


@case
def meshes(group: Any) -> None:
    """DTensors whose sequence, heads and batches are sharded, over one dimension of a mesh or two."""
    world = dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    found: list[tuple[Any, list[Any]]] = []
    line = DeviceMesh.from_group(group, DEVICE)
    found = [(line, [Shard(2)]), (line, [Replicate()])]
    if world == 2:
        found += [(line, [Shard(1)]), (line, [Shard(0)])]
    if world == 4:
        square = DeviceMesh(DEVICE, torch.tensor(ranks, device="cpu").view(2, 2), mesh_dim_names=("first", "second"))
        found += [(square, list(p)) for p in ((Shard(0), Shard(2)), (Shard(2), Shard(1)), (Shard(1), Shard(2)))]
        found += [(square, [Shard(0), Shard(1)]), (square, [Shard(0), Shard(0)])]
    whole = inputs()
    slopes, rel = torch.randn(H, dtype=WIDEST), torch.randn(B, 2 * S, dtype=WIDEST, requires_grad=True)
    documents = torch.randint(0, 3, (B, S)).sort(-1).values

    def by_batch(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, kv]) & (q >= kv + h % 2)

    mask = block_mask(by_batch, S, heads=H)

    def score_mod(slopes: Any, rel: Any) -> Any:
        return lambda s, b, h, q, kv: s + slopes[h] * (q - kv) + rel[b, q - kv] * h

    leaf = slopes.clone().requires_grad_()
    out, lse = flex_attention(*whole, score_mod(leaf, rel), mask, enable_gqa=True, return_lse=True)
    upstream = torch.randn_like(out)
    truth = torch.autograd.grad([out, lse.exp().sum()], [*whole, leaf, rel], [upstream, None])
    for mesh, placement in found:
        what = f"{placement}"
        # Sharded where the heads are, else replicated.
        of_slopes = [Shard(0) if p == Shard(1) else Replicate() for p in placement]
        mine = [distribute_tensor(t.detach(), mesh, placement).requires_grad_() for t in whole]
        sharded = distribute_tensor(slopes, mesh, of_slopes).requires_grad_()
        made, its_lse = flex_attention(*mine, score_mod(sharded, rel), mask, enable_gqa=True, return_lse=True)
        assert list(made.placements) == placement and made.shape == out.shape, what
        close(made.full_tensor(), out, f"{what}, out")
        close(its_lse.full_tensor(), lse, f"{what}, lse")
        total = its_lse.exp().sum().redistribute(placements=[Replicate()] * mesh.ndim)
        grads = torch.autograd.grad(
            [made, total], [*mine, sharded, rel], [distribute_tensor(upstream, mesh, placement), None]
        )
        for i, (ours, right) in enumerate(zip(grads, truth, strict=True)):
            close(ours.full_tensor() if isinstance(ours, DTensor) else ours, right, f"{what}, gradient {i}")
    if world == 2:
        mine = [distribute_tensor(t.detach(), line, [Shard(2)]) for t in whole]
        given = ContextParallel(group, length=S)
        close(
            flex_attention(*mine, enable_gqa=True, context_parallel=given).full_tensor(),
            flex_attention(*whole, enable_gqa=True),
            "given",
        )
        many = [distribute_tensor(t.detach(), line, [Shard(1)]) for t in (whole[0], whole[1][:, :1], whole[2][:, :1])]
        wrong = "query, key and value must be Shard(0), Shard(1) or Shard(2) alike"
        assert_raises(ValueError, wrong, lambda: flex_attention(mine[0], *many[1:], enable_gqa=True))
        assert_raises(TypeError, "must all be DTensors on one mesh", lambda: flex_attention(mine[0], *whole[1:]))
        assert_raises(ValueError, "query must be Shard(2)", lambda: flex_attention(*many, context_parallel=given))
        bias = distribute_tensor(torch.randn(S), line, [Shard(0)])
        assert_raises(
            TypeError,
            "a captured tensor must not be a DTensor where query is a plain tensor",
            lambda: flex_attention(*whole, lambda s, b, h, q, kv: s + bias[kv], enable_gqa=True),
        )


@case
def helper(group: Any) -> None:
    """Batches and positions, there and back."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = torch.arange(2 * S).view(2, S)
    for context in (
        ContextParallel(group, length=S),
        ContextParallel(group, "zigzag", length=S),
        ContextParallel(group, ranges_of(world, S)[rank]),
    ):
        mine = context.shard(tokens)
        index = context.positions(device=DEVICE)
        assert mine.equal(tokens[:, index])
        assert context.unshard(mine).equal(tokens)
        assert context.unshard(mine.t().contiguous(), 0).equal(tokens.t())
        order = context.permutation(device=DEVICE)
        sizes = [sum(b - a for a, b in ranges) for ranges in context.ranges()]
        assert tokens[:, order].split(sizes, 1)[rank].equal(mine)
        part = mine.double().requires_grad_()
        weight = torch.randn(2, S, dtype=torch.float64)
        (grad,) = torch.autograd.grad((context.unshard(part) * weight).sum(), part)
        assert grad.equal(weight[:, index])
    # The ring is for keys that are larger than a process's queries.
    for key_heads, ring in ((32 // world, False), (32, True)):
        heads = (32, key_heads, key_heads)
        many = [torch.empty(1, h, 1 << 16, 128, dtype=torch.bfloat16, device="meta") for h in heads]
        assert takes_ring(ContextParallel(group), *many, (world << 16, world << 16)) == ring
    documents = torch.tensor([0] * 40 + [1] * 8 + [2] * 16)
    for mask_mod in (causal, lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv])):
        mask = create_block_mask(mask_mod, None, None, 64, 64, device=DEVICE, BLOCK_SIZE=4)
        context = ContextParallel.balanced(group, mask, way="ring")
        assert context.length == 64 and context.way == "ring"
        whole = inputs(64)
        compare("balanced", context, whole, None, mask)
        counts = (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().double()
        index = context.positions(device=DEVICE)
        work = counts[index // 4].sum() / 4
        # For sixteen rows; test_balanced_ranges.py has longer ones.
        assert world == 3 or work <= 1.1 * counts.sum() / world, (work, counts.sum() / world)


@case
def errors(group: Any) -> None:
    """Each is an error in all processes, or in the one and an error about it in the others; none waits."""
    rank = dist.get_rank(group)

    def made(text: str, error: type[Exception] = ValueError, **arguments: Any) -> None:
        given = {"group": group, **arguments}
        assert_raises(
            error, text, lambda: ContextParallel(given.pop("group"), given.pop("placement", "zigzag"), **given)
        )

    made("placement must be 'contiguous', 'zigzag' or a list", placement="ring")
    made("placement must be the same in all processes", placement=("zigzag", "contiguous")[rank])
    made("placement must be the same in all processes", placement="zigzag" if rank == 0 else [(0, 4)])
    made("without gaps and overlaps", placement=[(4 * rank, 4 * rank + 5)])
    made("must be pairs of whole numbers", placement=[(0.5, 3)])
    made("must be pairs of whole numbers", placement=7)
    made("length must be None where placement is ranges", placement=[(4 * rank, 4 * rank + 4)], length=8)
    made("length must be the same", length=8 + rank)
    made("length must be a whole number", length=-1)
    made("way must be 'auto', 'gather' or 'ring'", way="both")
    made("sum_captured must be True or False", sum_captured=3)
    context = ContextParallel(group, "zigzag")
    assert_raises(ValueError, "length must be given", context.positions)
    assert_raises(ValueError, "two chunks of one length", lambda: context.whole(3))

    query, key, value = (torch.randn(1, 2, 8, 4) for _ in range(3))

    def call(text: str, error: type[Exception] = ValueError, q: Any = None, **arguments: Any) -> None:
        arguments.setdefault("context_parallel", context)
        assert_raises(error, text, lambda: flex_attention(query if q is None else q, key, value, **arguments))

    same = "must be the same in all processes of context_parallel, but got another in rank 1"
    odd = rank == 1
    longer = torch.randn(1, 2, 10, 4) if odd else query
    own = ContextParallel(group, "contiguous", length=16)
    call(f"the shapes of query, key and value {same}", q=longer)
    call(
        "query must have" if odd else "an error of its own in rank 1",
        ValueError if odd else RuntimeError,
        q=longer,
        context_parallel=own,
    )
    call(f"score_mod {same}", score_mod=lambda s, b, h, q, kv: s * (2 if odd else 3))
    call(f"score_mod {same}", score_mod=(lambda s, b, h, q, kv: s + q) if odd else None)
    bias = torch.randn(16, dtype=torch.float64 if odd else torch.float32)
    call(f"what score_mod captures {same}", score_mod=lambda s, b, h, q, kv: s + bias[kv])
    mask = block_mask(causal, 16)
    call(f"block_mask {same}", block_mask=mask if odd else None)
    call(f"the other options {same}", scale=0.5 if odd else None)
    call(f"which tensors require grad {same}", q=query.clone().requires_grad_(odd))
    text, kind = ("item", fusegrad.TraceError) if odd else ("an error of its own in rank 1", RuntimeError)
    call(text, kind, score_mod=(lambda s, b, h, q, kv: s * s.item()) if odd else None)
    call("block_mask must be made for the whole sequence, 16 queries", block_mask=block_mask(causal, 12))
    call("context_parallel must be a ContextParallel", TypeError, context_parallel=group)
    call("key must have the query's heads", q=torch.randn(1, 4, 8, 4))
    assert flex_attention(query, key, value, context_parallel=context).shape == query.shape


class Layer(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24, bias=False)
        self.rel = torch.nn.Parameter(torch.randn(2, length))
        self.length, self.heads = length, 2

    def forward(self, x: Tensor, context: ContextParallel | None) -> Tensor:
        q, k, v = self.project(x).unflatten(2, (3, self.heads, 4)).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(causal, None, None, self.length, self.length, device=DEVICE, BLOCK_SIZE=4)
        rel = self.rel

        def score_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return s + rel[h, q_idx - kv_idx]

        out = flex_attention(q, k, v, score_mod, mask, context_parallel=context)
        return out.transpose(1, 2).flatten(2)


def close_gradients(layer: Layer, one: Layer, what: str) -> None:
    """Those of a layer's parameters, whole or sharded, to those of one process."""
    for (name, ours), truth in zip(layer.named_parameters(), one.parameters(), strict=True):
        assert ours.grad is not None and truth.grad is not None
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        close(grad, truth.grad, f"{what} {name}")


def distributed_layer(kind: str, length: int, group: Any) -> tuple[Layer, Any]:
    """The layer that one process has, and what is called in its place: by FSDP2 or DDP over the group."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    layer = Layer(length)
    if kind == "fsdp":
        fully_shard(layer, mesh=DeviceMesh.from_group(group, DEVICE))
        return layer, layer
    return layer, DistributedDataParallel(layer, process_group=group)


@case
def data_parallel(group: Any) -> None:
    """FSDP2 and DDP over the processes that share a sequence: gradients are those of one process."""
    world = dist.get_world_size(group)
    context = ContextParallel(group, "zigzag", sum_captured=False)
    length = 8 * world
    x, weight = torch.randn(1, length, 8), torch.randn(1, length, 8)

    torch.manual_seed(1)
    one = Layer(length)
    (one(x, None) * weight).sum().backward()
    for kind in ("fsdp", "ddp"):
        layer, model = distributed_layer(kind, length, group)
        # Both average over the processes.
        loss = world * (model(context.shard(x), context) * context.shard(weight)).sum()
        loss.backward()
        close_gradients(layer, one, kind)


@case
def batches_and_sequences(group: Any) -> None:
    """Two rows of a batch, each over two processes: FSDP2 and DDP over all four, and heads over two with FSDP2 over the
    sequence's."""
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_process_group_ranks(group)
    square = torch.tensor(ranks, device="cpu").view(2, 2)
    mesh = DeviceMesh(DEVICE, square, mesh_dim_names=("first", "cp"))
    row = mesh.get_local_rank("first")
    length = 16
    x, weight = torch.randn(2, length, 8), torch.randn(2, length, 8)
    context = ContextParallel(mesh["cp"], "zigzag", length=length, sum_captured=False)
    torch.manual_seed(1)
    one = Layer(length)
    (one(x, None) * weight).sum().backward()

    for kind in ("fsdp", "ddp"):
        layer, model = distributed_layer(kind, length, group)
        mine = context.shard(x[row : row + 1])
        (4 * model(mine, context) * context.shard(weight[row : row + 1])).sum().backward()
        close_gradients(layer, one, kind)

    # A head for each process of the first dimension, with its rows of the projection and of rel.
    torch.manual_seed(1)
    layer = Layer(length)
    rows = torch.arange(24).view(3, 2, 4)[:, row].flatten()
    layer.project.weight = torch.nn.Parameter(layer.project.weight.detach()[rows])
    layer.rel = torch.nn.Parameter(layer.rel.detach()[row : row + 1])
    layer.heads = 1
    fully_shard(layer, mesh=mesh["cp"])
    out = layer(context.shard(x), context)
    (2 * out * context.shard(weight)[..., 4 * row : 4 * row + 4]).sum().backward()
    assert one.project.weight.grad is not None and one.rel.grad is not None
    grads = [p.grad.full_tensor() for p in (layer.project.weight, layer.rel)]
    close(grads[0], one.project.weight.grad[rows], "heads, projection")
    close(grads[1], one.rel.grad[row : row + 1], "heads, rel")


@case
def torchtitan(group: Any) -> None:
    from fusegrad.integrations.torchtitan import FlexContextParallel
    from torch.distributed.tensor.parallel import parallelize_module

    model = torch.nn.ModuleDict({"inner_attention": torch.nn.Module()})
    parallelize_module(model, DeviceMesh.from_group(group, DEVICE), {"inner_attention": FlexContextParallel()})
    whole = inputs(24)
    mask = block_mask(causal, 24)
    context = ContextParallel(group, "zigzag")
    parts = [context.shard(t, 2) for t in whole]
    out, lse = model["inner_attention"](*parts, block_mask=mask, scale=0.3, return_lse=True)
    right = flex_attention(*whole, None, mask, 0.3, True, True)
    close(out, context.shard(right[0], 2), "out")
    close(lse, context.shard(right[1], 2), "lse")


@case
def lost(group: Any) -> None:
    """The last case: a process ends, and the others get an error."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if DEVICE != "cpu" or world < 4:
        return
    context = ContextParallel(group, way="ring")
    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    out = flex_attention(query, key, value, context_parallel=context)
    if rank == world - 1:
        raise SystemExit
    assert_raises(RuntimeError, "", lambda: out.sum().backward())
    gather = ContextParallel._of(group)
    assert_raises(RuntimeError, "", lambda: flex_attention(query, key, value, context_parallel=gather))


if __name__ == "__main__":
    main(CASES, runs, lambda group: group)
