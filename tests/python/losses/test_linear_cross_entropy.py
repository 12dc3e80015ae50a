"""linear_cross_entropy: values and gradients of every option and plan against float64 formulas."""

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import pairs_of, rows_of
from fusegrad import Aux, reference
from support import (
    DEVICE_DTYPES,
    DEVICES,
    FROZEN,
    LINEAR,
    Sample,
    assert_as_good_as_eager,
    check_frozen,
    gradients,
)

SIZES = [(7, 8, 5), (300, 24, 333), (150, 16, 2501)]


@pytest.mark.parametrize("sample", LINEAR, ids=str)
@rows_of("device, dtype, inplace", [(*of, inplace) for of in DEVICE_DTYPES for inplace in (False, True)])
def test_parity(device: str, dtype: torch.dtype, sample: Sample, inplace: bool) -> None:
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    names = {"workspace_mib"}
    plain = {name: value for name, value in sample.options.items() if name not in names}
    for rows, hidden, vocab in SIZES:
        inputs = [torch.randn(rows, hidden, device=device), torch.randn(vocab, hidden, device=device) * hidden**-0.5]
        if sample.bias:
            inputs.append(torch.randn(vocab, device=device))
        inputs = [tensor.to(dtype) for tensor in inputs]
        target = sample.target((rows,), vocab, device, dtype)
        tensors = sample.tensors((rows,), vocab, device, acc)
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        narrow = {name: tensor.to(dtype) for name, tensor in tensors.items()}

        def ours(x, w, b=None):
            return fusegrad.linear_cross_entropy(
                x * 1, w, target, linear_bias=b, inplace=inplace, **tensors, **sample.options
            )

        def plainly(options):
            labels = target if sample.probabilities else target.long()

            def call(x, w, b=None):
                t = labels.to(x.dtype) if sample.probabilities else labels
                return reference.linear_cross_entropy(x, w, t, linear_bias=b, **options, **plain)[0]

            return call

        loss, grads = gradients(ours, inputs)
        truth, truth_grads = gradients(plainly(wide), [tensor.double() for tensor in inputs])
        eager, eager_grads = gradients(plainly(narrow), inputs)
        # The logits themselves were rounded to the dtype, on the GPU.
        single = max(2**-22, torch.finfo(dtype).eps / 8)
        assert_as_good_as_eager(loss, eager, truth, f"loss {rows}x{hidden}x{vocab}", single)
        for i, (grad, eager_grad, truth_grad) in enumerate(zip(grads, eager_grads, truth_grads, strict=True)):
            assert grad.dtype == dtype
            assert_as_good_as_eager(grad, eager_grad, truth_grad, f"gradient {i} {rows}x{hidden}x{vocab}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lean", [False, True])
def test_bfloat16_accumulation_only_when_asked_for(device: str, lean: bool) -> None:
    """Many chunks: float32 accumulation stays as good as one product, the lean choice need not."""
    inputs = [torch.randn(2048, 16, device=device).bfloat16(), torch.randn(999, 16, device=device).bfloat16()]
    target = torch.randint(0, 4, (2048,), device=device)
    dtype = torch.bfloat16 if lean else torch.float32
    _, grads = gradients(
        lambda x, w: fusegrad.linear_cross_entropy(x, w, target, accumulate_dtype=dtype, workspace_mib=1), inputs
    )
    _, truth = gradients(
        lambda x, w: reference.linear_cross_entropy(x, w, target)[0], [tensor.double() for tensor in inputs]
    )
    error = ((grads[1].double() - truth[1]).norm() / truth[1].norm()).item()
    assert error < (3e-2 if lean else 5e-3)


@pairs_of({"device": [*DEVICES], "trained": FROZEN, "options": [{}, {"reduction": "none"}, {"workspace_mib": 0}]})
def test_frozen_inputs(device: str, trained: tuple[bool, bool], options: dict) -> None:
    x, w = torch.randn(20, 8, device=device), torch.randn(11, 8, device=device)
    target = torch.randint(0, 11, (20,), device=device)
    check_frozen(lambda x, w: fusegrad.linear_cross_entropy(x, w, target, **options).sum(), [x, w], trained)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_dtypes(device: str) -> None:
    """The products in the input's dtype, each gradient in its own tensor's."""
    target = torch.randint(0, 33, (64,), device=device)
    for x_dtype, w_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x = torch.randn(64, 16, device=device).to(x_dtype)
        w = torch.randn(33, 16, device=device).to(w_dtype)
        _, grads = gradients(lambda x, w: fusegrad.linear_cross_entropy(x, w, target), [x, w])
        assert [g.dtype for g in grads] == [x_dtype, w_dtype]
        _, truth = gradients(
            lambda x, w: reference.linear_cross_entropy(x, w, target)[0], [x.double(), w.to(x_dtype).double()]
        )
        for grad, right in zip(grads, truth, strict=True):
            assert ((grad.double() - right).norm() / right.norm()).item() < 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 2), (0,)], ids=str)
def test_shapes_and_aux(device: str, shape: tuple[int, ...]) -> None:
    x, w = torch.randn(*shape, 8, device=device), torch.randn(11, 8, device=device)
    target = torch.randint(0, 11, shape, device=device)
    loss, aux = fusegrad.linear_cross_entropy(x, w, target, reduction="none", return_aux=Aux(*[True] * 6))
    truth, truth_aux = reference.linear_cross_entropy(x.double(), w.double(), target, reduction="none")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    for name, value in aux._asdict().items():
        torch.testing.assert_close(value.double(), truth_aux[name].double(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_lse_is_differentiable(reduction: str) -> None:
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64)
    target = torch.randint(0, 6, (4,))

    def both(x, w, b):
        loss, aux = fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction=reduction, return_aux=Aux(lse=True)
        )
        return loss.sum() + (aux.lse * torch.arange(4)).sum()

    assert torch.autograd.gradcheck(both, [t.requires_grad_() for t in (x, w, b)])


@rows_of("sample", [*LINEAR], tests=4)
def test_gradcheck(sample: Sample) -> None:
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (7, 3), (7,)))
    target = sample.target((5,), 7, "cpu", torch.float64)
    tensors = sample.tensors((5,), 7, "cpu", torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w, b: fusegrad.linear_cross_entropy(x, w, target, linear_bias=b, **tensors, **sample.options),
        (x, w, b),
    )


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="PyTorch >= 2.13")
def test_a_call_of_pytorchs_own_runs_unchanged() -> None:
    x, w = torch.randn(20, 8), torch.randn(11, 8)
    target = torch.randint(0, 11, (20,))
    for options in (None, torch.nn.LinearCrossEntropyOptions()):
        arguments = {"linear_bias": torch.randn(11), "label_smoothing": 0.1, "reduction": "sum", "options": options}
        ours = gradients(lambda x, w, a=arguments: fusegrad.linear_cross_entropy(x, w, target, **a), [x, w])
        theirs = gradients(lambda x, w, a=arguments: F.linear_cross_entropy(x, w, target, **a), [x, w])
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="linear_cross_entropy: accumulate_dtype and options"):
        fusegrad.linear_cross_entropy(x, w, target, options=options, accumulate_dtype=torch.float32)


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["float64", "float32", "int64"])
def test_a_normalizer_of_numpy(kind: str) -> None:
    """torch.compile makes an array of it."""
    numpy = pytest.importorskip("numpy")
    input, weight, target = torch.randn(4, 8), torch.randn(11, 8), torch.arange(4)

    def loss(count: object) -> torch.Tensor:
        return fusegrad.linear_cross_entropy(input, weight, target, normalizer=count)

    count = getattr(numpy, kind)(3)
    expected = F.cross_entropy(input @ weight.T, target, reduction="sum") / 3
    torch.testing.assert_close(loss(count), expected)
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(count), expected)
