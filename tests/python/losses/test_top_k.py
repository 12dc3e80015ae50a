"""Top-k teachers: the mass of the bucket, padding, and what is checked of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fusegrad
import pytest
import torch
import torch.distributed as dist
from coverings import pairs_of, rows_of
from fusegrad import JSDAux, VocabParallel, reference
from support import DEVICES, gradients
from torch import Tensor

each_device = pytest.mark.parametrize("device", DEVICES)
SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def part(sharded: bool, vocab: int) -> dict[str, Any]:
    return {"vocab_parallel": VocabParallel(None, 0, vocab)} if sharded else {}


def bucketed(student: Tensor, log_probs: Tensor, indices: Tensor, log_rest: Tensor, beta: float) -> Tensor:
    """The divergence of each row by its definition, float64: over the K columns and one more."""
    log_q = student.double().log_softmax(-1)
    others = log_q.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    log_q = torch.cat([log_q.gather(-1, indices), others], -1)
    log_p = torch.cat([log_probs.double(), log_rest.double().unsqueeze(-1)], -1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    m = ((1 - beta) * log_q.exp() + beta * log_p.exp()).log()
    return (1 - beta) * (log_q.exp() * (log_q - m)).sum(-1) + beta * (log_p.exp() * (log_p - m)).sum(-1)


def floored(log_probs: Tensor) -> Tensor:
    """docs/design/divergences.md: log of the rest of what is stored, at least the resolution of its sum."""
    u = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}[log_probs.dtype]
    p = log_probs.double().exp()
    resolution = (p * (u * log_probs.double().abs() + min(u, 2**-24))).sum(-1)
    return torch.maximum(1 - p.sum(-1), resolution).log()


@each_device
@SHARDED
@rows_of("dtype, count", [(torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 256)])
def test_sums_of_one_or_more(dtype: torch.dtype, count: int, sharded: bool, device: str) -> None:
    """KL(student | teacher) stays finite where the stored probabilities leave nothing for the others."""
    vocab, rows = 1000, 512
    teacher = 8 * torch.randn(rows, vocab, device=device)
    log_probs, indices = teacher.log_softmax(-1).topk(count, -1)
    log_probs = log_probs.to(dtype)
    assert (log_probs.float().exp().sum(-1) >= 1).any()
    student = teacher + torch.randn_like(teacher)
    options = {"beta": 1.0, "reduction": "none", **part(sharded, vocab)}
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, (log_probs, indices), **options), [student])
    truth, (right,) = gradients(lambda s: bucketed(s, log_probs, indices, floored(log_probs), 1.0), [student.double()])
    assert loss.isfinite().all() and grad.isfinite().all()
    # 1 less the sum is float32's on a GPU: of the bucket's logarithm a relative error of a rounding over the floor.
    torch.testing.assert_close(loss.double(), truth, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(grad.double(), right, rtol=1e-3, atol=2e-3)
    theirs = reference.jsd(
        student.double(),
        (log_probs.double(), indices),
        tail_log_prob=floored(log_probs),
        **{name: value for name, value in options.items() if name != "vocab_parallel"},
    )[0]
    torch.testing.assert_close(theirs, truth)


@each_device
@SHARDED
@rows_of("beta", [0.0, 0.3, 1.0])
def test_tail_log_prob(beta: float, sharded: bool, device: str) -> None:
    """What was stored of the rest counts, however little it is: here down to e**-30."""
    vocab, rows, count = 300, 64, 16
    teacher = torch.linspace(1, 30, rows, device=device).unsqueeze(1) * torch.randn(rows, vocab, device=device)
    exact = teacher.double().log_softmax(-1)
    log_probs, indices = exact.topk(count, -1)
    tail = exact.scatter(-1, indices, -torch.inf).logsumexp(-1)
    hidden, weight = torch.randn(rows, 8, device=device), torch.randn(vocab, 8, device=device)
    stored = (log_probs.float(), indices.int())
    given = {"tail_log_prob": tail.float(), "beta": beta, "reduction": "none", **part(sharded, vocab)}
    truth, right = gradients(
        lambda x, w: bucketed(x @ w.t(), log_probs, indices, tail, beta), [hidden.double(), weight.double()]
    )
    for plan in ({}, {"workspace_mib": 0}):
        loss, grads = gradients(
            lambda x, w, plan=plan: fusegrad.linear_jsd(x, w, stored, **given, **plan), [hidden, weight]
        )
        for ours, expected in zip((loss, *grads), (truth, *right), strict=True):
            error = (ours.double() - expected).norm() / expected.norm()
            assert error < 2e-5, error
    student = (hidden.double() @ weight.double().t()).float()
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, stored, **given), [student])
    truth, (right,) = gradients(lambda s: bucketed(s, log_probs, indices, tail, beta), [student.double()])
    assert (loss.double() - truth).norm() / truth.norm() < 2e-5
    assert (grad.double() - right).norm() / right.norm() < 2e-5


@each_device
@SHARDED
@pairs_of(
    {"softcap": [None, 3.0], "beta, tail": [(0.0, "bucket"), (0.4, "bucket"), (1.0, "bucket"), (0.4, "renormalize")]}
)
def test_padding(beta: float, tail: str, softcap: float | None, sharded: bool, device: str) -> None:
    """Rows that have fewer than K give what they give alone, whatever their padding holds."""
    vocab, count = 40, 6
    teacher = torch.randn(8, vocab, device=device).log_softmax(-1)
    log_probs, indices = teacher.topk(count, -1)
    lengths = [6, 5, 4, 3, 2, 1, 6, 2]
    hidden, weight = torch.randn(8, 5, device=device), torch.randn(vocab, 5, device=device)
    options: dict[str, Any] = {"beta": beta, "tail": tail, "student_softcap": softcap, **part(sharded, vocab)}
    labels = torch.randint(0, vocab, (8,), device=device)
    options |= {"hard_weight": 0.3, "reduction": "none"}
    padded, columns = log_probs.clone(), indices.int()
    for row, length in enumerate(lengths):
        padded[row, length:] = torch.tensor([float("nan"), 0.0, -torch.inf, 5.0, -2.0])[: count - length].to(device)
        columns[row, length:] = -1
    loss, (grad,) = gradients(
        lambda x: fusegrad.linear_jsd(x, weight, (padded, columns), labels=labels, **options), [hidden]
    )
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        short = (log_probs[one, :length], indices[one, :length])
        alone, (right,) = gradients(
            lambda x, s=short, one=one: fusegrad.linear_jsd(x, weight, s, labels=labels[one], **options), [hidden[one]]
        )
        torch.testing.assert_close(loss[one], alone)
        torch.testing.assert_close(grad[one], right)


@each_device
def test_all_columns_and_padding_of_all(device: str) -> None:
    """K = V without padding has no bucket; a row of padding alone says nothing but what its tail says."""
    student = torch.randn(2, 5, device=device)
    log_probs = torch.randn(2, 5, device=device).log_softmax(-1)
    indices = torch.arange(5, device=device).expand(2, 5)
    loss = fusegrad.jsd(student, (log_probs, indices), beta=1.0, reduction="none")
    torch.testing.assert_close(loss, reference.jsd(student, log_probs, beta=1.0, reduction="none")[0])
    for beta in (0.0, 0.5, 1.0):
        loss, (grad,) = gradients(
            lambda s, b=beta: fusegrad.jsd(s, (log_probs, torch.full_like(indices, -1)), beta=b), [student]
        )
        assert loss == 0 and grad.eq(0).all()


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_checks_on_the_gpu() -> None:
    """Under set_check_targets; without it nothing synchronises and the numbers are what they are."""
    student = torch.randn(4, 9, device="cuda")
    indices = torch.tensor([[0, 3, -1]] * 4, device="cuda")
    logits = torch.randn(4, 3, device="cuda") + 3
    fusegrad.jsd(student, (logits, indices))
    fusegrad.set_check_targets(True)
    try:
        with pytest.raises(ValueError, match="jsd: a top-k teacher must be log-probabilities"):
            fusegrad.jsd(student, (logits, indices))
        with pytest.raises(ValueError, match="jsd: student must be log-probabilities"):
            fusegrad.jsd(student, student.log_softmax(-1), log_probs=True)
        with pytest.raises(IndexError, match="or -1 as padding, but got -2"):
            fusegrad.jsd(student, (logits - 9, indices - 1))
        fusegrad.jsd(student, (logits - 9, indices))
    finally:
        fusegrad.set_check_targets(False)
    loss = fusegrad.jsd(student, (logits - 9, indices - 1), reduction="none")
    assert loss.isnan().all()


@SHARDED
def test_what_is_checked_of_log_probabilities(sharded: bool) -> None:
    student = torch.randn(6, 50).log_softmax(-1)
    options = {"log_probs": True, **part(sharded, 50)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        fusegrad.jsd(student.to(dtype), student.flip(0).to(dtype), **options)
    # Ignored rows may hold anything, NaN stays NaN.
    wild = student.clone()
    wild[2] = 7.0
    labels = torch.zeros(6, dtype=torch.long)
    with pytest.raises(ValueError, match=r"teacher must be log-probabilities.* at row 2"):
        fusegrad.jsd(student, wild, **options)
    labels[2] = -100
    assert fusegrad.jsd(student, wild, labels=labels, **options).isfinite()
    wild[2] = float("nan")
    assert fusegrad.jsd(student, wild, **options).isnan()
    # A top-k teacher as bfloat16 rounds it, however many its columns.
    for count in (1, 7, 50):
        log_probs, indices = (4 * student).log_softmax(-1).topk(count, -1)
        fusegrad.jsd(student, (log_probs.bfloat16(), indices), **part(sharded, 50))
        with pytest.raises(ValueError, match="a top-k teacher must be log-probabilities"):
            fusegrad.jsd(student, (log_probs.exp(), indices), **part(sharded, 50))
        with pytest.raises(ValueError, match="a top-k teacher must be log-probabilities"):
            fusegrad.jsd(student, (log_probs + 10, indices), **part(sharded, 50))


@each_device
@SHARDED
@rows_of("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_no_row_costs_less_than_nothing(beta: float, sharded: bool, device: str) -> None:
    """Equal and nearly equal teachers, in every form; NaN is not hidden."""
    for dtype in (torch.float32, torch.bfloat16):
        student = (3 * torch.randn(400, 97, device=device)).to(dtype)
        for teacher in (student.clone(), student + 1e-4 * torch.randn_like(student)):
            options: dict[str, Any] = {"beta": beta, "reduction": "none", "return_aux": JSDAux(soft_loss=True)}
            options |= part(sharded, 97)
            log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
            made = [
                fusegrad.jsd(student, teacher, **options),
                fusegrad.jsd(student, teacher, temperature=0.7, **options),
                fusegrad.jsd(log_q, log_p, log_probs=True, **options),
                fusegrad.jsd(student, log_p.topk(20, -1), **options),
                fusegrad.jsd(student, log_p.topk(97, -1), **options),
            ]
            eye = torch.eye(97, device=device, dtype=dtype)
            made.append(fusegrad.linear_jsd(student, eye, teacher, eye, **options))
            for loss, aux in made:
                assert loss.ge(0).all() and aux.soft_loss.ge(0).all(), loss.min()
        for spoiled in (0, 1):
            pair = [student.clone(), teacher.clone()]
            pair[spoiled][3, 5] = float("nan")
            assert fusegrad.jsd(*pair, **options)[0][3].isnan()
            logs = [x.float().log_softmax(-1) for x in (student, teacher)]
            logs[spoiled][3, 5] = float("nan")
            if device != "cpu":  # the CPU refuses what is no distribution
                assert fusegrad.jsd(*(x.to(dtype) for x in logs), log_probs=True, **options)[0][3].isnan()


@each_device
@SHARDED
@pytest.mark.parametrize("linear", [False, True], ids=["jsd", "linear_jsd"])
def test_a_tail_of_fewer_bits(linear: bool, sharded: bool, device: str) -> None:
    """What rounding it made of the sum is no error, and it is read as the number that it is."""
    rows, vocab = 50, 11
    log_probs, indices = torch.randn(rows, vocab, device=device).log_softmax(-1).topk(3, -1)
    tail = torch.log1p(-log_probs.exp().sum(-1)).bfloat16()
    x, w = torch.randn(rows, vocab, device=device), torch.eye(vocab, device=device)

    def loss(tail: Tensor) -> Tensor:
        options = {"tail_log_prob": tail, **part(sharded, vocab)}
        if linear:
            return fusegrad.linear_jsd(x, w, (log_probs, indices), **options)
        return fusegrad.jsd(x, (log_probs, indices), **options)

    # For float32's the sum is exact: 1 is what the rounded one is beside.
    truth = reference.jsd(x.double(), (log_probs.double(), indices), tail_log_prob=tail.double())[0]
    torch.testing.assert_close(loss(tail).double(), truth, rtol=1e-5, atol=1e-6)


@each_device
@SHARDED
@pytest.mark.parametrize("linear", [False, True], ids=["jsd", "linear_jsd"])
@rows_of("reduction", ["none", "batchmean", "sum"])
def test_no_rows(linear: bool, reduction: str, sharded: bool, device: str) -> None:
    teacher = (torch.empty(0, 3, device=device), torch.empty(0, 3, dtype=torch.int64, device=device))
    x = torch.empty(0, 7, device=device, requires_grad=True)
    options = {"reduction": reduction, **part(sharded, 7)}
    leaves = [x]
    if linear:
        leaves.append(torch.randn(7, 7, device=device, requires_grad=True))
        loss = fusegrad.linear_jsd(*leaves, teacher, **options)
    else:
        loss = fusegrad.jsd(x, teacher, **options)
    assert loss.shape == ((0,) if reduction == "none" else ()) and not loss.any()
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()
