"""linear_jsd: values and gradients of every option and plan against float64 formulas."""

from __future__ import annotations

import fusegrad
import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import JSDAux, reference
from support import (
    DEVICE_DTYPES,
    DEVICES,
    DISTILLATION,
    DISTILLATION_LINEAR,
    FROZEN,
    Distillation,
    acc_of,
    assert_as_good_as_eager,
    check_frozen,
    gradients,
)

SIZES = [(7, 8, 6, 5), (150, 24, 16, 1001)]  # N, the student's H, the teacher's, V
PLANS = {"workspace_mib"}
# What jsd has too is tested there in every dtype, and by gradcheck below.
CASES = [(device, dtype, sample) for device, dtype in DEVICE_DTYPES for sample in DISTILLATION_LINEAR]
CASES += [(device, torch.float32, sample) for device in DEVICES for sample in DISTILLATION]


@rows_of("device, dtype, sample", [*CASES], tests=16)
def test_parity(device: str, dtype: torch.dtype, sample: Distillation) -> None:
    for rows, hidden, teacher_hidden, vocab in SIZES:
        student = [torch.randn(rows, hidden, device=device), torch.randn(vocab, hidden, device=device) * hidden**-0.5]
        teacher = [
            torch.randn(rows, teacher_hidden, device=device),
            torch.randn(vocab + 3 if "vocab_size" in sample.options else vocab, teacher_hidden, device=device)
            * teacher_hidden**-0.5,
        ]
        if sample.bias:
            student.append(torch.randn(vocab, device=device))
            teacher.append(torch.randn(teacher[1].shape[0], device=device))
        student, teacher = [x.to(dtype) for x in student], [x.to(dtype) for x in teacher]
        tensors = sample.tensors((rows,), sample.options.get("vocab_size", vocab), device, acc_of(dtype))
        top_k = sample.teacher((rows,), vocab, device)

        def call(function, kind, hidden_kind, x, w, b=None, inplace=None, tensors=tensors, teacher=teacher, k=top_k):
            made = {name: t.to(kind) if t.is_floating_point() else t for name, t in tensors.items()}
            y, v, c = [t.to(hidden_kind) for t in teacher] + [None] * (3 - len(teacher))
            if k is not None:
                y, v, c = (k[0].to(kind), k[1]), None, None
            options = {o: value for o, value in sample.options.items() if inplace is not None or o not in PLANS}
            if inplace is not None:
                options["inplace"] = inplace
            return function(x, w, y, v, student_bias=b, teacher_bias=c, **made, **options)

        (loss, grads), in_place = (
            gradients(
                lambda x, *s, call=call, i=inplace: call(
                    fusegrad.linear_jsd, acc_of(dtype), dtype, x * 1, *s, inplace=i
                ),
                student,
            )
            for inplace in (False, True)
        )
        assert torch.equal(loss, in_place[0]) and all(map(torch.equal, grads, in_place[1]))
        truth, truth_grads = gradients(
            lambda *s, call=call: call(reference.linear_jsd, torch.double, torch.double, *s)[0],
            [x.double() for x in student],
        )
        eager, eager_grads = gradients(lambda *s, call=call: call(reference.linear_jsd, dtype, dtype, *s)[0], student)
        # The logits themselves were rounded to the dtype, on the GPU.
        single = max(2**-20, torch.finfo(dtype).eps / 8)
        assert_as_good_as_eager(loss, eager, truth, f"loss {rows}x{vocab}", single)
        for name, ours, theirs, right in zip(("x", "w", "b"), grads, eager_grads, truth_grads, strict=False):
            assert ours.dtype == dtype
            assert_as_good_as_eager(ours, theirs, right, f"gradient of {name} {rows}x{vocab}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lean", [False, True])
def test_bfloat16_accumulation_only_when_asked_for(device: str, lean: bool) -> None:
    """Many chunks: float32 accumulation stays as good as one product, the lean choice need not."""
    x, w = torch.randn(2048, 16, device=device).bfloat16(), torch.randn(499, 16, device=device).bfloat16()
    y, v = torch.randn(2048, 24, device=device).bfloat16(), torch.randn(499, 24, device=device).bfloat16()
    y += 1
    dtype = torch.bfloat16 if lean else torch.float32
    _, grads = gradients(lambda x, w: fusegrad.linear_jsd(x, w, y, v, accumulate_dtype=dtype, workspace_mib=1), [x, w])
    _, truth = gradients(lambda x, w: reference.linear_jsd(x, w, y.double(), v.double())[0], [x.double(), w.double()])
    error = ((grads[1].double() - truth[1]).norm() / truth[1].norm()).item()
    # On the GPU the logits themselves are rounded to bfloat16.
    assert error < (3e-2 if lean else 1.5e-2 if device == "cuda" else 5e-3)


@pairs_of({"device": [*DEVICES], "trained": FROZEN, "options": [{}, {"reduction": "none"}, {"workspace_mib": 0}]})
def test_frozen_inputs(device: str, trained: tuple[bool, bool], options: dict) -> None:
    x, w = torch.randn(20, 8, device=device), torch.randn(11, 8, device=device)
    y, v = torch.randn(20, 6, device=device), torch.randn(11, 6, device=device)
    check_frozen(lambda x, w: fusegrad.linear_jsd(x, w, y, v, **options).sum(), [x, w], trained)


@pytest.mark.parametrize("device", DEVICES)
def test_two_heads_of_two_dtypes(device: str) -> None:
    """Each side's products in its own input's dtype; the student's gradients in their own tensors'."""
    kinds = [torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if device == "cpu" else [])]
    for student_dtype in kinds:
        for teacher_dtype in kinds:
            x, w = (torch.randn(*s, device=device).to(student_dtype) for s in ((64, 16), (33, 16)))
            y, v = (torch.randn(*s, device=device).to(teacher_dtype) for s in ((64, 12), (33, 12)))
            _, grads = gradients(lambda x, w, y=y, v=v: fusegrad.linear_jsd(x, w, y, v), [x, w])
            _, truth = gradients(
                lambda x, w, y=y, v=v: reference.linear_jsd(x, w, y.double(), v.double())[0], [x.double(), w.double()]
            )
            low = any(t in (torch.bfloat16, torch.float16) for t in (student_dtype, teacher_dtype))
            for grad, right in zip(grads, truth, strict=True):
                assert grad.dtype == student_dtype
                assert ((grad.double() - right).norm() / right.norm()).item() < (2e-2 if low else 1e-5)
    # A float32 weight beside bfloat16 hidden states gets a float32 gradient.
    x, w = torch.randn(64, 16, device=device).bfloat16(), torch.randn(33, 16, device=device)
    y, v = torch.randn(64, 12, device=device).bfloat16(), torch.randn(33, 12, device=device)
    _, grads = gradients(lambda x, w: fusegrad.linear_jsd(x, w, y, v), [x, w])
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 2), (0,)], ids=str)
def test_shapes_and_aux(device: str, shape: tuple[int, ...]) -> None:
    x, w = torch.randn(*shape, 8, device=device), torch.randn(11, 8, device=device)
    y, v = torch.randn(*shape, 6, device=device), torch.randn(11, 6, device=device)
    labels = torch.randint(0, 11, shape, device=device)
    aux = JSDAux(soft_loss=True, hard_loss=True)
    loss, values = fusegrad.linear_jsd(x, w, y, v, labels=labels, hard_weight=0.3, reduction="none", return_aux=aux)
    truth, right = reference.linear_jsd(
        x.double(), w.double(), y.double(), v.double(), labels=labels, hard_weight=0.3, reduction="none"
    )
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    for name, value in values._asdict().items():
        torch.testing.assert_close(value.double(), right[name], rtol=1e-5, atol=1e-5, msg=name)
    _, one = fusegrad.linear_jsd(x, w, y, v, labels=labels, return_aux=JSDAux(hard_loss=True))
    assert one.soft_loss is None
    torch.testing.assert_close(one.hard_loss, values.hard_loss)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_of_the_vocabulary_gets_no_gradient(device: str, options: dict, dtype: torch.dtype) -> None:
    """Whatever stands in the rows beyond vocab_size, NaN too."""
    x, w = torch.randn(20, 8, device=device).to(dtype), torch.randn(16, 8, device=device).to(dtype)
    y, v = torch.randn(20, 6, device=device).to(dtype), torch.randn(13, 6, device=device).to(dtype)
    b, c = torch.randn(16, device=device).to(dtype), torch.randn(13, device=device).to(dtype)
    for padded in (w, v, b, c):
        padded[11:] = torch.nan

    def call(x, w, b, v=v, c=c, **more):
        return fusegrad.linear_jsd(x, w, y, v, student_bias=b, teacher_bias=c, **options, **more).sum()

    loss, grads = gradients(lambda x, w, b: call(x, w, b, vocab_size=11), [x, w, b])
    right, cut = gradients(lambda x, w, b: call(x, w, b, v=v[:11], c=c[:11]), [x, w[:11], b[:11]])
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(grads[0], cut[0])
    for whole, part in zip(grads[1:], cut[1:], strict=True):
        torch.testing.assert_close(whole[:11], part)
        assert torch.equal(whole[11:], torch.zeros_like(whole[11:]))


@pytest.mark.parametrize("part", ["teacher_input", "teacher_weight", "teacher_bias"])
def test_a_teacher_that_requires_grad_is_refused(part: str) -> None:
    arguments = {
        "teacher_input": torch.randn(4, 6),
        "teacher_weight": torch.randn(11, 6),
        "teacher_bias": torch.randn(11),
    }
    arguments[part].requires_grad_()
    with pytest.raises(ValueError, match=f"linear_jsd: {part} must not require grad"):
        fusegrad.linear_jsd(torch.randn(4, 8), torch.randn(11, 8), **arguments)


@rows_of("sample", [*DISTILLATION, *DISTILLATION_LINEAR], tests=4)
def test_gradcheck(sample: Distillation) -> None:
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (7, 3), (7,)))
    y, v = (torch.randn(*s, dtype=torch.float64) for s in ((5, 2), (7, 2)))
    top_k = sample.teacher((5,), 4, "cpu")
    if top_k is not None:
        y, v = (top_k[0].double(), top_k[1]), None
    tensors = sample.tensors((5,), 4, "cpu", torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w, b: fusegrad.linear_jsd(x, w, y, v, student_bias=b, **tensors, **sample.options), (x, w, b)
    )
