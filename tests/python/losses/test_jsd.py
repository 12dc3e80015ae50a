"""jsd: values and gradients of every option against float64 formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import pairs_of, rows_of
from fusegrad import JSDAux, reference
from support import (
    DEVICE_DTYPES,
    DEVICES,
    DISTILLATION,
    DISTILLATION_LOGITS,
    Distillation,
    acc_of,
    assert_as_good_as_eager,
    gradients,
)
from torch import Tensor

SIZES = [(9, 37), (3, 4099)]


@pytest.mark.parametrize("sample", [*DISTILLATION, *DISTILLATION_LOGITS], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_parity(device: str, dtype: torch.dtype, sample: Distillation) -> None:
    for rows, vocab in SIZES:
        student = (2 * torch.randn(rows, vocab, device=device)).to(dtype)
        teacher = (student + torch.randn(rows, vocab, device=device)).to(dtype)
        if sample.options.get("log_probs"):
            student, teacher = student.float().log_softmax(-1).to(dtype), teacher.float().log_softmax(-1).to(dtype)
        tensors = sample.tensors((rows,), vocab, device, acc_of(dtype))
        top_k = sample.teacher((rows,), vocab, device)

        def call(function, kind, student, *teacher, tensors=tensors, top_k=top_k, **options):
            made = {name: t.to(kind) if t.is_floating_point() else t for name, t in tensors.items()}
            given = teacher[0] if top_k is None else (top_k[0].to(kind), top_k[1])
            return function(student, given, **made, **sample.options, **options)

        inputs = [student] if top_k is not None else [student, teacher]
        (loss, grads), in_place = (
            gradients(
                lambda s, *t, call=call, i=inplace: call(fusegrad.jsd, acc_of(dtype), s * 1, *t, inplace=i), inputs
            )
            for inplace in (False, True)
        )
        assert torch.equal(loss, in_place[0]) and all(map(torch.equal, grads, in_place[1]))
        truth, truth_grads = gradients(
            lambda *x, call=call: call(reference.jsd, torch.double, *x)[0], [x.double() for x in inputs]
        )
        eager, eager_grads = gradients(lambda *x, call=call: call(reference.jsd, dtype, *x)[0], inputs)
        assert loss.dtype == acc_of(dtype)
        assert_as_good_as_eager(loss, eager, truth, f"loss {rows}x{vocab}", single=2**-20)
        for name, ours, theirs, right in zip(("student", "teacher"), grads, eager_grads, truth_grads, strict=False):
            assert ours.dtype == dtype
            assert_as_good_as_eager(ours, theirs, right, f"gradient of the {name} {rows}x{vocab}")


@pairs_of(
    {
        "device": [*DEVICES],
        "beta": [0.0, 0.3, 1.0],
        "log_probs": [False, True],
        "dtype, rows, vocab": [(torch.bfloat16, 300, 8200), (torch.bfloat16, 3, 33001), (torch.float16, 5, 20008)],
    }
)
def test_long_rows(device: str, beta: float, log_probs: bool, dtype: torch.dtype, rows: int, vocab: int) -> None:
    """Rows that several CTAs of a GPU share: aligned or not, and more of them than it works on at a time."""
    student = 2 * torch.randn(rows, vocab, device=device)
    teacher = student + torch.randn(rows, vocab, device=device)
    if log_probs:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    student, teacher = student.to(dtype), teacher.to(dtype)
    options = {"labels": torch.randint(0, vocab, (rows,), device=device), "beta": beta, "reduction": "none"}
    options["labels"][1::5] = -100
    options |= {"log_probs": True} if log_probs else {"hard_weight": 0.3, "soft_weight": 0.7}
    upstream = torch.rand(rows, device=device)
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, teacher, **options), [student], upstream)
    truth, (right,) = gradients(
        lambda s: reference.jsd(s, teacher.double(), **options)[0], [student.double()], upstream.double()
    )
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0)
    # Row by row: one wrong row among many must show.
    rounding = torch.finfo(dtype).eps / 2
    error, norm = (grad.double() - right).norm(dim=-1), right.norm(dim=-1)
    subnormal = torch.finfo(dtype).smallest_normal * rounding * vocab**0.5
    assert (error <= 2.5 * rounding * norm + 2 * subnormal).all()  # rounded twice at most


@pairs_of(
    {
        "device": [*DEVICES],
        "beta": [0.0, 0.3, 1.0],
        "dtype, rows, vocab": [
            (torch.bfloat16, 300, 8200),
            (torch.bfloat16, 3, 33001),
            (torch.float16, 5, 20008),
            (torch.float32, 5, 8201),
        ],
        "hard": [{}, {"hard_weight": 0.3, "soft_weight": 0.7}],
    }
)
def test_long_rows_of_a_top_k_teacher(
    device: str, beta: float, dtype: torch.dtype, rows: int, vocab: int, hard: dict[str, float]
) -> None:
    """Its columns lie anywhere: neighbours, in a row's first and last vectors, the label among them or not."""
    student = (2 * torch.randn(rows, vocab, device=device)).to(dtype)
    inner = torch.stack([9 + torch.randperm(vocab // 2 - 9, device=device)[:8] for _ in range(rows)])
    edges = torch.tensor([0, 1, 6, 7, 8, vocab // 2, vocab // 2 + 1, vocab - 9, vocab - 2, vocab - 1], device=device)
    indices = torch.cat([inner, edges.expand(rows, -1)], -1)
    log_probs = (student.float() + torch.randn(rows, vocab, device=device)).log_softmax(-1).gather(-1, indices)
    labels = torch.where(torch.rand(rows, device=device) < 0.5, indices[:, 3], torch.full_like(indices[:, 0], 77))
    labels[1::5] = -100
    options = {"labels": labels, "beta": beta, "reduction": "none", **hard}
    upstream = torch.rand(rows, device=device)
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, (log_probs, indices), **options), [student], upstream)
    truth, (right,) = gradients(
        lambda s: reference.jsd(s, (log_probs.double(), indices), **options)[0], [student.double()], upstream.double()
    )
    # The bucket has nearly all of both: the divergence is a small difference of the parts that float32 holds.
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=2e-8)
    # Row by row and for the bucket's columns alone, whose gradients are far smaller than those of the K.
    rounding = max(torch.finfo(dtype).eps / 2, 1e-4)  # float32 loses digits where the bucket's p is near q
    of_rest = torch.ones_like(right).scatter_(-1, indices, 0).scatter_(-1, labels.clamp(min=0)[:, None], 0)
    for mask in (torch.ones_like(right), of_rest):
        error, norm = ((grad.double() - right) * mask).norm(dim=-1), (right * mask).norm(dim=-1)
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * vocab**0.5
        assert (error <= 2.5 * rounding * norm + 2 * subnormal).all()  # rounded twice at most


@pairs_of({"device": [*DEVICES], "beta": [0.1, 0.5, 0.9], "log_probs": [False, True]})
def test_probabilities_far_apart_are_as_good_as_eagers(device: str, beta: float, log_probs: bool) -> None:
    """Where p is 2^30 times q, log(p / m) is a small number, not the difference of two logarithms of 30."""
    inputs = list(6 * torch.randn(2, 100, 500, device=device))
    if log_probs:
        inputs = [x.log_softmax(-1) for x in inputs]
    (_, ours), (_, eager), (_, truth) = (
        gradients(lambda s, t, f=function: f(s, t, beta=beta, log_probs=log_probs), given)
        for function, given in (
            (fusegrad.jsd, inputs),
            (lambda *x, **o: reference.jsd(*x, **o)[0], inputs),
            (lambda *x, **o: reference.jsd(*x, **o)[0], [x.double() for x in inputs]),
        )
    )
    for name, *of in zip(("student", "teacher"), ours, eager, truth, strict=True):
        assert_as_good_as_eager(*of, f"gradient of the {name}")


@pairs_of(
    {
        "device": [*DEVICES],
        "end": [0, 1],
        "distance": [1e-6, 1e-7, 1e-8, 1e-12],
        "of": ["logits", "log_probs", "top-k"],
    }
)
def test_mixtures_near_an_end(device: str, end: int, distance: float, of: str) -> None:
    """For peaked rows m is little but the far side's share, which float32 does not have as a difference from 1."""
    beta = 1 - distance if end else distance
    for rows, vocab in ((64, 7), (64, 500), (64, 9001)):
        inputs = list(12 * torch.randn(2, rows, vocab, device=device))
        if of == "log_probs":
            inputs = [x.log_softmax(-1) for x in inputs]
        count = 2
        if of == "top-k":
            count = 1
            log_probs, index = inputs.pop().double().log_softmax(-1).topk(3, -1)
            tail = torch.log1p(-log_probs.exp().sum(-1).clamp(max=1 - 1e-12)).float()
            log_probs = log_probs.float()

        def call(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
            options = {"beta": beta, "log_probs": of == "log_probs"}
            if of == "top-k":
                given = (*given, (log_probs.to(given[0].dtype), index))
                options = {"beta": beta, "tail_log_prob": tail.to(given[0].dtype)}
            return function(*given, **options)

        def plain(*given: Tensor, **options: Any) -> Tensor:
            return reference.jsd(*given, **options)[0]

        (_, ours), (_, eager), (_, truth) = (
            gradients(lambda *x, f=function: call(f, *x), [x.to(dtype) for x in inputs])
            for function, dtype in ((fusegrad.jsd, torch.float32), (plain, torch.float32), (plain, torch.float64))
        )
        for i in range(count):
            assert_as_good_as_eager(ours[i], eager[i], truth[i], f"gradient {i}, {rows} x {vocab}")


@pairs_of({"device": [*DEVICES], "beta": [0.0, 0.3, 1.0], "dtype": [torch.bfloat16, torch.float16]})
def test_long_rows_far_apart(device: str, beta: float, dtype: torch.dtype) -> None:
    """Where most of one row's mass is, the other's probabilities are 0 in float32."""
    vocab = 8200
    student, teacher = torch.randn(2, 5, vocab, device=device)
    student[:, : vocab // 3] -= 120
    teacher[:, vocab // 2 :] -= 110
    student[:, 5], teacher[:, 5] = -400, 2
    student, teacher = student.to(dtype), teacher.to(dtype)
    options = {"beta": beta, "reduction": "none"}
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, teacher, **options), [student])
    truth, (right,) = gradients(lambda s: reference.jsd(s, teacher.double(), **options)[0], [student.double()])
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0)
    rounding = torch.finfo(dtype).eps / 2
    subnormal = torch.finfo(dtype).smallest_normal * rounding * vocab**0.5
    assert ((grad.double() - right).norm(dim=-1) <= 2.5 * rounding * right.norm(dim=-1) + 2 * subnormal).all()


@pairs_of({"device": [*DEVICES], "beta": [0.0, 0.5, 1.0], "vocab": [300, 8200], "of_teacher": [False, True]})
def test_a_nan_is_its_rows(device: str, beta: float, vocab: int, of_teacher: bool) -> None:
    inputs = torch.randn(2, 4, vocab, device=device).bfloat16()
    inputs[int(of_teacher), 2, vocab // 2] = torch.nan
    student, teacher = inputs
    loss, (grad,) = gradients(lambda s: fusegrad.jsd(s, teacher, beta=beta, reduction="none"), [student])
    expected = torch.tensor([False, False, True, False], device=device)
    assert torch.equal(loss.isnan(), expected) and torch.equal(grad.isnan().all(-1), expected)
    assert torch.equal(grad.isnan().any(-1), expected)


@pairs_of({"device": [*DEVICES], "beta": [0.0, 0.3, 0.5, 1.0], "dtype": [torch.float32, torch.bfloat16]})
def test_equal_rows_cost_exactly_nothing(device: str, beta: float, dtype: torch.dtype) -> None:
    student = (5 * torch.randn(6, 1003, device=device)).to(dtype)
    student[:, :9] = -torch.inf
    for temperature in (1.0, 1.7):
        loss, grads = gradients(
            lambda s, t, T=temperature: fusegrad.jsd(s, t, beta=beta, temperature=T), [student, student.clone()]
        )
        assert loss.item() == 0
        for grad in grads:
            assert torch.equal(grad, torch.zeros_like(student))


@pairs_of({"device": [*DEVICES], "beta": [0.0, 0.5, 1.0], "log_probs": [False, True]})
def test_infinite_logits(device: str, beta: float, log_probs: bool) -> None:
    """-inf in both, or where the formula has a factor 0: finite and right. Elsewhere the divergence is infinite."""
    student, teacher = torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)
    student[:, :8] = teacher[:, :8] = -torch.inf
    if beta != 0:
        student[:, 8:16] = -torch.inf
    if beta != 1:
        teacher[:, 16:24] = -torch.inf
    if log_probs:
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    options = {"beta": beta, "log_probs": log_probs}
    loss, grads = gradients(lambda s, t: fusegrad.jsd(s, t, **options), [student, teacher])
    truth, truth_grads = gradients(lambda s, t: reference.jsd(s, t, **options)[0], [student.double(), teacher.double()])
    assert truth.isfinite() and all(grad.isfinite().all() for grad in truth_grads)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)
    for grad, right in zip(grads, truth_grads, strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=1e-4, atol=1e-7)
    if not log_probs:
        # A part that does not count may be infinite.
        teacher[:, 60] = -torch.inf
        labels = torch.full((4,), 30, device=device)
        hard = {"labels": labels, "hard_weight": 1.0, "soft_weight": 0.0}
        for top_k in (teacher, (torch.full_like(teacher[:, :2], -torch.inf), torch.stack([labels, labels + 1], -1))):
            loss, (grad,) = gradients(lambda s, t=top_k: fusegrad.jsd(s, t, beta=beta, **hard), [student])
            eager, (right,) = gradients(lambda s: F.cross_entropy(s, labels), [student])
            torch.testing.assert_close(loss, eager)
            torch.testing.assert_close(grad, right)
    if beta == 0:
        student[0, 40] = -torch.inf
        student = student.log_softmax(-1)
        assert fusegrad.jsd(student, teacher, **options).item() == torch.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_far_apart_and_close(device: str, beta: float) -> None:
    """Probabilities below float32's range, large offsets, and a divergence that naive sums lose in rounding."""
    far = 40 * torch.randn(4, 500, device=device)
    close = 2 * torch.randn(4, 500, device=device)
    # On the GPU exponentials are good to 2^-22 and sums are float32; eager loses a tenth and more where rows are close.
    gpu = device == "cuda"
    for student, teacher, bound, grad_bound in (
        (far, 40 * torch.randn(4, 500, device=device), 1e-5, 1e-3 if gpu else 1e-5),
        (close + 1e4, close + 1e4 + torch.randn_like(close), 1e-5, 1e-5),
        (close, close + 1e-3 * torch.randn_like(close), 5e-2 if gpu else 1e-3, 1e-3),
    ):
        loss, grads = gradients(lambda s, t: fusegrad.jsd(s, t, beta=beta), [student, teacher])
        truth, truth_grads = gradients(
            lambda s, t: reference.jsd(s, t, beta=beta)[0], [student.double(), teacher.double()]
        )
        torch.testing.assert_close(loss.double(), truth, rtol=bound, atol=0)
        for grad, right in zip(grads, truth_grads, strict=True):
            assert (grad - right).norm().item() < grad_bound * right.norm().item() + 1e-8


@pairs_of(
    {
        "device": [*DEVICES],
        "shape": [(7,), (2, 3, 7), (2, 2, 2, 7), (0, 7), (2, 0, 7), (3, 0)],
        "inplace": [False, True],
    }
)
def test_shapes(device: str, shape: tuple[int, ...], inplace: bool) -> None:
    student, teacher = torch.randn(shape, device=device), torch.randn(shape, device=device)
    labels = torch.randint(0, 7, shape[:-1], device=device)
    if labels.numel() > 1:
        labels.view(-1)[1] = -100
    aux = JSDAux(soft_loss=True, hard_loss=shape[-1] > 0)
    labels = labels if shape[-1] else None
    for reduction in ("none", "sum", "mean", "batchmean"):
        options = {"labels": labels, "reduction": reduction}
        loss, grads = gradients(
            lambda s, t, o=options: fusegrad.jsd(s * 1, t, inplace=inplace, **o), [student, teacher]
        )
        truth, truth_grads = gradients(
            lambda s, t, o=options: reference.jsd(s, t, **o)[0].nan_to_num(), [student.double(), teacher.double()]
        )
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([g.double() for g in grads], list(truth_grads), rtol=1e-4, atol=1e-6)
    _, values = fusegrad.jsd(student, teacher, labels=labels, return_aux=aux)
    _, right = reference.jsd(student.double(), teacher.double(), labels=labels)
    for name, value in values._asdict().items():
        if value is not None:
            torch.testing.assert_close(value.double(), right[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_strided_unaligned_or_transposed(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wide, other = (torch.randn(6, 310, device=device).to(dtype) for _ in range(2))
        for cut in (lambda x: x[:, 3:304], lambda x: x[:, 4:305], lambda x: x.t().contiguous().t()[:, :301]):
            student, teacher = cut(wide), cut(other)
            _, grads = gradients(fusegrad.jsd, [student.contiguous(), teacher.contiguous()])
            leaves = [student.detach().requires_grad_(), teacher.detach().requires_grad_()]
            strided = torch.autograd.grad(fusegrad.jsd(*leaves), leaves, torch.tensor(0.5, device=device))
            # Another start of the row is another order of summation.
            bound = 1e-6 if dtype == torch.float32 else 4e-3
            for a, b in zip(grads, strided, strict=True):
                assert (a - b).norm() <= bound * a.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_two_dtypes(device: str, inplace: bool) -> None:
    """Both are read in the narrowest dtype that holds either; each gradient has its own tensor's."""
    kinds = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
    for student_dtype, teacher_dtype in kinds + ([(torch.float32, torch.float64)] if device == "cpu" else []):
        student = torch.randn(8, 100, device=device).to(student_dtype)
        teacher = torch.randn(8, 100, device=device).to(teacher_dtype)
        wide = torch.promote_types(student_dtype, teacher_dtype)
        loss, grads = gradients(lambda s, t: fusegrad.jsd(s * 1, t, inplace=inplace), [student, teacher])
        right, right_grads = gradients(fusegrad.jsd, [student.to(wide), teacher.to(wide)])
        assert torch.equal(loss, right) and [g.dtype for g in grads] == [student_dtype, teacher_dtype]
        for grad, wanted in zip(grads, right_grads, strict=True):
            assert torch.equal(grad, wanted.to(grad.dtype))


@pairs_of(
    {
        "device": [*DEVICES],
        "student_grad, teacher_grad": [(True, False), (False, True), (False, False)],
        "beta": [0.0, 0.5, 1.0],
    }
)
def test_frozen_sides(device: str, student_grad: bool, teacher_grad: bool, beta: float) -> None:
    student, teacher = torch.randn(5, 40, device=device), torch.randn(5, 40, device=device)
    _, both = gradients(lambda s, t: fusegrad.jsd(s, t, beta=beta), [student, teacher])
    for inplace in (False, True):
        s, t = student.clone().requires_grad_(student_grad), teacher.clone().requires_grad_(teacher_grad)
        loss = fusegrad.jsd(s * 1, t, beta=beta, inplace=inplace)
        assert loss.requires_grad == (student_grad or teacher_grad)
        if loss.requires_grad:
            (loss * 0.5).backward()
        for tensor, grad in ((s, both[0]), (t, both[1])):
            assert (tensor.grad is not None) == tensor.requires_grad
            if tensor.requires_grad:
                torch.testing.assert_close(tensor.grad, grad)


@pairs_of(
    {
        "device": [*DEVICES],
        "dtype": [torch.float32, torch.float16],
        "reduction": ["none", "sum", "mean", "batchmean"],
    }
)
def test_no_row_kept(device: str, dtype: torch.dtype, reduction: str) -> None:
    student, teacher = torch.randn(4, 9, device=device).to(dtype), torch.randn(4, 9, device=device).to(dtype)
    labels = torch.full((4,), -100, device=device)
    for inplace in (False, True):
        loss, grads = gradients(
            lambda s, t, i=inplace: fusegrad.jsd(
                s * 1, t, labels=labels, hard_weight=1.0, reduction=reduction, inplace=i
            ),
            [student, teacher],
        )
        for value in (loss, *grads):
            assert torch.equal(value, torch.zeros_like(value))


@pairs_of({"device": [*DEVICES], "beta": [0.0, 0.5, 1.0], "tail": ["bucket", "renormalize"]})
def test_a_top_k_teacher_with_all_columns_is_a_dense_one(device: str, beta: float, tail: str) -> None:
    if tail == "renormalize" and beta == 1:
        return
    student, teacher = torch.randn(5, 33, device=device), torch.randn(5, 33, device=device)
    order = torch.argsort(torch.rand(5, 33, device=device), -1)
    top_k = (teacher.log_softmax(-1).gather(-1, order), order)
    ours = gradients(lambda s: fusegrad.jsd(s, top_k, beta=beta, tail=tail), [student])
    dense = gradients(lambda s: fusegrad.jsd(s, teacher, beta=beta), [student])
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_top_k_teacher_whose_rows_have_fewer(device: str, beta: float) -> None:
    """Padding of -inf adds nothing to the bucket; a peaked student's small tail neither underflows nor cancels."""
    student = 30 * torch.randn(5, 200, device=device)
    indices = torch.stack([torch.randperm(200, device=device)[:8] for _ in range(5)])
    log_probs = torch.randn(5, 200, device=device).log_softmax(-1).gather(-1, indices)
    log_probs[:, 5:] = -torch.inf
    for tail in ("bucket", "renormalize"):
        loss, (grad,) = gradients(lambda s, t=tail: fusegrad.jsd(s, (log_probs, indices), beta=beta, tail=t), [student])
        truth, (right,) = gradients(
            lambda s, t=tail: reference.jsd(s, (log_probs.double(), indices), beta=beta, tail=t)[0], [student.double()]
        )
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=0)
        assert ((grad - right).norm() / right.norm()).item() < (1e-3 if device == "cuda" else 1e-5)


@rows_of("sample", [*DISTILLATION, *DISTILLATION_LOGITS], tests=4)
def test_gradcheck(sample: Distillation) -> None:
    student, teacher = (torch.randn(5, 7, dtype=torch.float64) for _ in range(2))
    if sample.options.get("log_probs"):
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    top_k = sample.teacher((5,), 7, "cpu")
    if top_k is not None:
        top_k = (top_k[0].double(), top_k[1])
    tensors = sample.tensors((5,), 7, "cpu", torch.float64)
    inputs = [student.requires_grad_()] if top_k is not None else [student.requires_grad_(), teacher.requires_grad_()]
    assert torch.autograd.gradcheck(lambda s, t=top_k: fusegrad.jsd(s, t, **tensors, **sample.options), inputs)


def test_the_divergence_is_pytorchs_at_the_ends() -> None:
    student, teacher = torch.randn(6, 50), torch.randn(6, 50)
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    for beta, theirs in ((0.0, (log_q, log_p)), (1.0, (log_p, log_q))):
        eager = F.kl_div(*theirs, reduction="batchmean", log_target=True)
        torch.testing.assert_close(fusegrad.jsd(student, teacher, beta=beta), eager)
        torch.testing.assert_close(fusegrad.jsd(log_q, log_p, beta=beta, log_probs=True), eager)


# --- the name that PyTorch has for the ends ------------------------------------------------------------------


@pairs_of(
    {
        "reduction": ["none", "sum", "mean", "batchmean"],
        "log_probs": [False, True],
        "reverse": [False, True],
        "device, dtype": [*DEVICE_DTYPES],
    }
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_kl_div_is_pytorchs(device: str, dtype: torch.dtype, reverse: bool, log_probs: bool, reduction: str) -> None:
    logits = [(2 * torch.randn(65, 131, device=device)).to(dtype) for _ in range(2)]
    if log_probs:
        logits = [x.float().log_softmax(-1).to(dtype) for x in logits]
    upstream = torch.randn(65 if reduction == "none" else (), dtype=torch.float64, device=device)

    def pytorchs(student: Tensor, teacher: Tensor) -> Tensor:
        log_q, log_p = (x if log_probs else x.log_softmax(-1) for x in (student, teacher))
        input, target = (log_p, log_q) if reverse else (log_q, log_p)
        loss = F.kl_div(input, target, reduction=reduction, log_target=True)
        loss = loss.sum(-1) if reduction == "none" else loss
        return (loss * upstream.to(loss.dtype)).sum()

    def ours(student: Tensor, teacher: Tensor) -> Tensor:
        loss = fusegrad.kl_div(student, teacher, reverse=reverse, log_probs=log_probs, reduction=reduction)
        assert loss.dtype == acc_of(dtype) and loss.shape == upstream.shape
        return (loss * upstream.to(loss.dtype)).sum()

    loss, grads = gradients(ours, logits)
    truth, truth_grads = gradients(pytorchs, [x.double() for x in logits])
    eager, eager_grads = gradients(pytorchs, logits)
    assert_as_good_as_eager(loss, eager, truth, "loss", single=2**-20)
    for mine, theirs, right in zip(grads, eager_grads, truth_grads, strict=True):
        assert_as_good_as_eager(mine, theirs, right, "gradient")


def test_kl_div_is_an_end_of_jsd_and_its_errors_have_its_name() -> None:
    student, teacher = torch.randn(2, 8, 7)
    options: dict[str, Any] = {
        **{"labels": torch.tensor([0, 1, -100, 3, 4, 5, 6, 0]), "token_weight": torch.rand(8), "normalizer": 3.0},
        **{"temperature": 2.0, "reduction": "mean"},
    }
    for reverse in (False, True):
        beta = float(reverse)
        expected = fusegrad.jsd(student, teacher, beta=beta, **options)
        assert torch.equal(fusegrad.kl_div(student, teacher, reverse=reverse, **options), expected)
    top_k = teacher.log_softmax(-1).topk(3)
    expected = fusegrad.jsd(student, top_k, beta=0.0, tail="renormalize")
    assert torch.equal(fusegrad.kl_div(student, (top_k[0], top_k[1]), tail="renormalize"), expected)
    with pytest.raises(ValueError, match=r"^kl_div: temperature must be"):
        fusegrad.kl_div(student, teacher, temperature=0.0)
    with pytest.raises(TypeError, match=r"^kl_div: student must be a tensor"):
        fusegrad.kl_div(None, teacher)


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_is_below_zero(device: str) -> None:
    """For distributions that are equal but for a few roundings, where the sum of the terms may be."""
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        for apart in (0.0, 1e-7, 1e-4):
            student = 10 * torch.randn(200, 333, device=device)
            teacher = student + apart * torch.randn_like(student)
            top = teacher.log_softmax(-1).topk(5, -1)
            for given in (teacher, (top.values, top.indices)):
                assert (fusegrad.jsd(student, given, beta=beta, reduction="none") >= 0).all(), (beta, apart)
