"""What only a GPU can show: no synchronisation, graphs, bad indices, memory, sizes beyond 32 bits."""

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from all_losses import NAMES, make
from coverings import pairs_of, rows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
each = rows_of("name", NAMES)
modes = pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])


@each
@modes
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"normalizer": 7.0, "z_loss": 1e-3}], ids=str)
def test_nothing_synchronises(name, inplace, options) -> None:
    loss = make(name, "cuda")
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    loss.ours(x * 1, inplace=inplace, **options).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (loss.ours(x * 1, inplace=inplace, **options).sum() * 0.37).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each
@modes
def test_graph_capture_and_replay(name, inplace) -> None:
    loss = make(name, "cuda")
    x = torch.randn(8, 8, device="cuda", requires_grad=True)

    def step() -> torch.Tensor:
        return torch.autograd.grad(loss.ours(x * 1, inplace=inplace) * 0.37, x)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = step()
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(grad, torch.autograd.grad(loss.eager(x) * 0.37, x)[0])


@modes
def test_an_index_out_of_range_gives_nan_in_its_row_alone(inplace) -> None:
    target = torch.tensor([1, 2000, -5, 3, -100], device="cuda")
    x = torch.randn(5, 1000, device="cuda", requires_grad=True)
    loss = fusegrad.cross_entropy(x * 1, target, reduction="none", inplace=inplace)
    loss.sum().backward()
    wrong = torch.tensor([False, True, True, False, False], device="cuda")
    assert torch.equal(loss.isnan(), wrong)
    assert torch.equal(x.grad.isnan().all(1), wrong) and torch.equal(x.grad.isnan().any(1), wrong)
    fusegrad.set_check_targets(True)
    try:
        with pytest.raises(IndexError, match="but got 2000 at row 1"):
            fusegrad.cross_entropy(x * 1, target, inplace=inplace)
    finally:
        fusegrad.set_check_targets(False)


def test_in_place_allocates_nothing_of_the_logits_size() -> None:
    logits = torch.randn(512, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
    target = torch.randint(0, 32000, (512,), device="cuda")
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = fusegrad.cross_entropy(logits, target, inplace=True)
    torch.autograd.grad(loss * 0.37, logits)
    assert torch.cuda.max_memory_allocated() - base < 2**20


@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_elements(inplace) -> None:
    rows, vocab = 17000, 128256
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device="cuda")
    (grad,) = torch.autograd.grad(fusegrad.cross_entropy(logits * 1, target, inplace=inplace, reduction="sum"), logits)
    for row in (0, 16743, 16999):
        x = logits[row : row + 1].double().detach().requires_grad_()
        (truth,) = torch.autograd.grad(F.cross_entropy(x, target[row : row + 1]), x)
        assert ((grad[row] - truth[0]).norm() / truth.norm()).item() < 5e-3


@pairs_of({"vocab": [1, 7, 21, 1025, 32000, 50257, 128257, 256000, 600001], "dtype": [torch.float32, torch.bfloat16]})
@modes
def test_every_width_and_alignment(vocab, dtype, inplace) -> None:
    """One warp, one CTA, clusters, and rows that no cluster's shared memory holds."""
    wide = torch.randn(5, vocab + 5, device="cuda").to(dtype)
    target = torch.randint(0, vocab, (5,), device="cuda")
    for logits in (wide[:, :vocab].contiguous(), wide[:, 3 : 3 + vocab]):
        leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        loss = fusegrad.cross_entropy(leaf * 1, target, inplace=inplace, reduction="sum")
        (grad,) = torch.autograd.grad(loss, leaf)
        x = logits.double().requires_grad_()
        (truth,) = torch.autograd.grad(F.cross_entropy(x, target, reduction="sum"), x)
        assert (grad - truth).norm().item() <= (1e-5 if dtype == torch.float32 else 5e-3) * truth.norm().item() + 1e-9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each
@modes
def test_another_device_than_the_current_one(name, inplace) -> None:
    loss = make(name, "cuda:1")
    x = torch.randn(8, 8, device="cuda:1", requires_grad=True)
    out = loss.ours(x * 1, inplace=inplace) * 0.37
    (grad,) = torch.autograd.grad(out, x)
    assert torch.cuda.current_device() == 0 and out.device.index == grad.device.index == 1
    torch.testing.assert_close(grad, torch.autograd.grad(loss.eager(x) * 0.37, x)[0])
