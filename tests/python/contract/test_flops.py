"""torch.utils.flop_counter counts what the ops compute: as PyTorch counts the same written with its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad._flops import FORMULAS
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

N, H, V, T, K = 33, 16, 50, 8, 5
B, HEADS, M, KEYS, D, E = 2, 4, 32, 40, 16, 8


def count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def leaves(*shapes: tuple[int, ...], needs: Sequence[bool] = (True, True, True)) -> list[Tensor]:
    return [torch.randn(s).requires_grad_(n) for s, n in zip(shapes, needs, strict=False)]


def test_every_op_has_a_formula_or_no_product() -> None:
    """What an op of none of these names computes is not known here: add it to one of them."""
    elementwise = (
        *("cross_entropy", "jsd", "scale_gradient", "support_positions", "evaluate_", "create_block_mask"),
        *("refuse_gradient", "flex_attention_dropout_mask", "flex_attention_merge_", "shards_"),
    )
    names = [n.removeprefix("fusegrad::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("fusegrad::")]
    assert len(names) > 60
    for name in names:
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(f"fusegrad::{name}", "CompositeImplicitAutograd")
        assert composed or (name in FORMULAS) != name.startswith(elementwise), name
    assert set(FORMULAS) <= set(names)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
@rows_of("heads", [HEADS, 2])
def test_attention(heads: int, needs: Sequence[int]) -> None:
    """A backward computes the scores again; a mask takes nothing from what is counted. PyTorch's own backward counts
    all products, whichever are wanted."""
    tensors = leaves((B, HEADS, M, D), (B, heads, KEYS, D), (B, heads, KEYS, E), needs=[bool(n) for n in needs])
    mask = fusegrad.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, M, KEYS, BLOCK_SIZE=8)

    def run(attention: Callable) -> None:
        out = attention(*tensors)
        if any(needs):
            out.square().sum().backward()

    again = 2 * B * HEADS * M * KEYS * D if any(needs) else 0
    for block_mask in (None, mask):
        ours = count(lambda m=block_mask: run(lambda *t: fusegrad.flex_attention(*t, block_mask=m, enable_gqa=True)))
        assert ours == count(lambda: run(plain_attention)) + again
    if all(needs):
        shapes = [(B, HEADS, M, D), (B, HEADS, KEYS, D), (B, HEADS, KEYS, E)]
        of_pytorch = torch.utils.flop_counter.sdpa_flop_count(*shapes)
        of_pytorch += torch.utils.flop_counter.sdpa_backward_flop_count((B, HEADS, M, E), *shapes)
        assert ours == of_pytorch


def test_tangents_and_second_derivatives() -> None:
    tensors = [t.detach() for t in leaves((B, HEADS, M, D), (B, HEADS, KEYS, D), (B, HEADS, KEYS, E))]
    for moving, elements in (
        ((0,), 2 * D + 2 * E),
        ((1,), 2 * D + 2 * E),
        ((2,), D + 2 * E),
        ((0, 1, 2), 3 * D + 3 * E),
    ):

        def of(*some: Tensor, moving: Sequence[int] = moving) -> Tensor:
            given = list(tensors)
            for i, t in zip(moving, some, strict=True):
                given[i] = t
            return fusegrad.flex_attention(*given)

        some = tuple(tensors[i] for i in moving)
        products = count(lambda of=of, some=some: torch.func.jvp(of, some, some))
        assert products == 2 * B * HEADS * M * KEYS * elements
    wide = leaves((B, HEADS, M, D), (B, HEADS, KEYS, D), (B, HEADS, KEYS, E))

    def twice() -> None:
        grads = torch.autograd.grad(fusegrad.flex_attention(*wide).square().sum(), wide, create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    assert count(twice) > 2 * count(lambda: fusegrad.flex_attention(*wide).square().sum().backward())


def head(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), torch.arange(N) % V)


@pytest.mark.parametrize("reduction, again", [("mean", 0), ("none", 0), ("none, in chunks", 1)])
@rows_of("needs", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_linear_cross_entropy(needs: Sequence[int], reduction: str, again: int) -> None:
    x, w = leaves((N, H), (V, H), needs=[bool(n) for n in needs])
    target = torch.arange(N) % V

    def run(loss: Tensor) -> None:
        if loss.requires_grad:
            loss.sum().backward()

    how = {"reduction": reduction.split(",")[0], "workspace_mib": 0 if again else None}
    ours = count(lambda: run(fusegrad.linear_cross_entropy(x, w, target, **how)))
    plain = count(lambda: run(F.cross_entropy(F.linear(x, w), target)))
    assert ours == plain + (2 * N * H * V if again and any(needs) else 0)
    if not again:
        assert plain == 2 * N * H * V * (1 + sum(needs))
    called = torch.ops.fusegrad.linear_log_prob_forward
    assert count(lambda: called(x.detach(), w.detach(), target)) == 2 * N * H * V


def test_transforms_of_linear_cross_entropy() -> None:
    x, w = leaves((N, H), (V, H))
    target = torch.arange(N) % V
    ours = lambda x: fusegrad.linear_cross_entropy(x, w.detach(), target)  # noqa: E731
    plain = lambda x: head(x, w.detach())  # noqa: E731

    def second(f: Callable) -> Callable[[], object]:
        return lambda: torch.func.jvp(torch.func.grad(f), (x.detach(),), (x.detach(),))

    assert count(second(ours)) >= count(second(plain)) > 0


def test_linear_jsd_and_supports() -> None:
    x, w = leaves((N, H), (V, H))
    y, u = torch.randn(N, T), torch.randn(V, T)
    ours = count(lambda: fusegrad.linear_jsd(x, w, y, u).backward())
    assert ours == 2 * N * V * (3 * H + T)
    support = torch.stack([torch.randperm(V)[:K] for _ in range(N)])
    target = support[:, 2].clone()
    assert count(lambda: fusegrad.linear_cross_entropy(x, w, target, support=support).backward()) == 6 * N * K * H


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "fusegrad"])
def test_in_whatever_order_they_are_imported(first: str) -> None:
    """fusegrad does not import the counter, which loads Triton."""
    program = f"""
import sys, importlib.util, torch
if {first!r} == "fusegrad":
    import fusegrad
    assert "torch.utils.flop_counter" not in sys.modules
    importlib.util.find_spec("torch.utils.flop_counter")
import torch.utils.flop_counter
import fusegrad
assert torch.ops.fusegrad.flex_attention_forward in torch.utils.flop_counter.flop_registry
assert not any("_flops" in getattr(f, "__module__", "") for f in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
