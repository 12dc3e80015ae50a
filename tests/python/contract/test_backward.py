"""Rules 6 to 10 and 14: any number of backwards, upstream gradients, second differentiation, determinism."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from all_losses import NAMES, make
from coverings import rows_of
from fusegrad.distributed import VocabParallel
from support import DEVICES, deterministic_algorithms

each = rows_of("name", NAMES)
everywhere = pytest.mark.parametrize("device", DEVICES)
modes = pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each
@everywhere
@modes
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@rows_of("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_three_backwards_are_bitwise_equal(name, device, inplace, dtype, reduction) -> None:
    loss = make(name, device, rows=64)
    x = torch.randn(64, 8, device=device).to(dtype).requires_grad_()
    value = loss.ours(x * 1, inplace=inplace, reduction=reduction)
    upstream = torch.rand_like(value) if reduction == "none" else torch.full_like(value, 0.37)
    leaves = [x, *([loss.weight] if loss.weight is not None else [])]
    first = torch.autograd.grad(value, leaves, upstream, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(value, leaves, upstream, retain_graph=True)
    value.backward(upstream, retain_graph=True)  # accumulates into .grad, which may steal what it is given
    value.backward(upstream, retain_graph=True)
    third = torch.autograd.grad(value, leaves, upstream)
    for a, b, c, d, leaf in zip(first, copies, second, third, leaves, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c) and torch.equal(a, d)
        assert torch.equal(leaf.grad, a + a)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, leaves, upstream)


@each
@everywhere
@modes
def test_backward_uses_what_it_was_given_this_time(name, device, inplace) -> None:
    """Different upstream gradients over one kept graph: no scaling is carried over."""
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    value = loss.ours(x * 1, inplace=inplace)
    (eager,) = torch.autograd.grad(loss.eager(x), x)
    for scale in (3.0, 0.0, 1.0, 0.37):
        (grad,) = torch.autograd.grad(value * scale, x, retain_graph=True)
        torch.testing.assert_close(grad, eager * scale)


@each
@everywhere
@modes
def test_expanded_and_partial_upstream(name, device, inplace) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    for reduce in (torch.sum, lambda v: v[2:5].sum(), lambda v: (v * 2).mean()):
        (ours,) = torch.autograd.grad(reduce(loss.ours(x * 1, reduction="none", inplace=inplace)), x)
        (eager,) = torch.autograd.grad(reduce(loss.eager(x, reduction="none")), x)
        torch.testing.assert_close(ours, eager)


@each
@everywhere
@modes
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@rows_of("of_rows", [torch.nan, torch.inf])
def test_upstream_of_ignored_rows(name, device, inplace, of_rows, sharded, one_process) -> None:
    """Whatever arrives there, they have no gradient."""
    loss = make(name, device, rows=16)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    ignored = loss.target == loss.target[3]
    upstream = torch.rand(16, device=device)
    part = {"vocab_parallel": VocabParallel(None, 0, 8)} if sharded else {}

    def gradients(of_ignored: float) -> tuple[torch.Tensor, ...]:
        options = {"reduction": "none", "ignore_index": int(loss.target[3]), "inplace": inplace, **part}
        leaves = [x, *([loss.weight] if loss.weight is not None else [])]
        return torch.autograd.grad(loss.ours(x * 1, **options), leaves, upstream.masked_fill(ignored, of_ignored))

    for found, right in zip(gradients(of_rows), gradients(0.0), strict=True):
        assert right.any() and torch.equal(found, right)


@each
@modes
@rows_of("reduction", ["mean", "none"])
def test_second_differentiation_is_right_or_raises_and_names_the_op(name, inplace, reduction) -> None:
    loss = make(name, "cpu")
    x = torch.randn(8, 8, requires_grad=True)
    value = loss.ours(x * 1, inplace=inplace, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(value, x, create_graph=True)  # alone it works
    eager = torch.autograd.grad(loss.eager(x, reduction=reduction).sum(), x, create_graph=True)[0]
    torch.testing.assert_close(grad, eager)
    if not inplace or (reduction, name[0]) == ("none", "l"):  # a linear loss writes nothing then
        ours, right = (torch.autograd.grad(g.square().sum(), x)[0] for g in (grad, eager))
        torch.testing.assert_close(ours, right)
        return
    with pytest.raises(RuntimeError, match=name):
        grad.square().sum().backward()


@each
@everywhere
@modes
@rows_of("reduction", ["mean", "none"])
def test_batched_gradients(name, device, inplace, reduction) -> None:
    """is_grads_batched and vmap over a backward, of a graph that is kept and of one that is not."""
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    eager = loss.eager(x, reduction=reduction)
    upstream = torch.randn(3, *eager.shape, device=device)
    (wanted,) = torch.autograd.grad(eager, x, upstream, is_grads_batched=True)

    def ours() -> torch.Tensor:
        return loss.ours(x * 1, reduction=reduction, inplace=inplace)

    torch.testing.assert_close(torch.autograd.grad(ours(), x, upstream, is_grads_batched=True)[0], wanted)
    kept = ours()
    for _ in range(2):
        (made,) = torch.autograd.grad(kept, x, upstream, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(made, wanted)
    made = torch.vmap(lambda u: torch.autograd.grad(kept, x, u, retain_graph=True)[0])(upstream)
    torch.testing.assert_close(made, wanted)


@each
@everywhere
def test_fp16_gradients_do_not_underflow_before_the_scaler(name, device) -> None:
    """1 / N times a probability is below float16's range; times GradScaler's factor it is not."""
    rows = 4096
    loss = make(name, device, rows=rows)
    x = torch.randn(rows, 8, device=device).half().requires_grad_()
    for inplace in (False, True):
        (ours,) = torch.autograd.grad(loss.ours(x * 1, inplace=inplace) * 65536.0, x)
        (truth,) = torch.autograd.grad(loss.eager(x.float()) * 65536.0, x)
        assert ((ours.float() - truth).norm() / truth.norm()).item() < 2e-3


@each
@everywhere
def test_deterministic(name, device) -> None:
    loss = make(name, device, rows=1000)
    x = torch.randn(1000, 8, device=device, requires_grad=True)
    with deterministic_algorithms():
        runs = [torch.autograd.grad(loss.ours(x * 1), x)[0] for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@each
def test_anomaly_mode_and_accumulation(name) -> None:
    loss = make(name, "cpu")
    x = torch.randn(8, 8, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        for part in (slice(0, 4), slice(4, 8)):
            make(name, "cpu", part=part).ours(x[part] * 1, normalizer=8, inplace=True).backward()
    (eager,) = torch.autograd.grad(loss.eager(x), x)
    torch.testing.assert_close(x.grad, eager)
