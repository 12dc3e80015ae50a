"""cross_entropy: values and gradients of every option against float64 formulas."""

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import pairs_of, rows_of
from fusegrad import Aux, reference
from support import COMMON, DEVICE_DTYPES, DEVICES, Sample, acc_of, assert_as_good_as_eager, gradients

SIZES = [(9, 37), (4, 1000), (3, 4099)]


@pytest.mark.parametrize("sample", COMMON, ids=str)
@rows_of("device, dtype, inplace", [(*of, inplace) for of in DEVICE_DTYPES for inplace in (False, True)])
def test_parity(device: str, dtype: torch.dtype, sample: Sample, inplace: bool) -> None:
    for rows, vocab in SIZES:
        logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
        target = sample.target((rows,), vocab, device, dtype)
        tensors = sample.tensors((rows,), vocab, device, acc_of(dtype))
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        narrow = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        truth_target = target.double() if sample.probabilities else target
        eager_target = target if sample.probabilities else target.long()

        loss, (grad,) = gradients(
            lambda x: fusegrad.cross_entropy(x * 1, target, inplace=inplace, **tensors, **sample.options), [logits]
        )
        truth, (truth_grad,) = gradients(
            lambda x: reference.cross_entropy(
                x, truth_target if sample.probabilities else target.long(), **wide, **sample.options
            )[0],
            [logits.double()],
        )
        eager, (eager_grad,) = gradients(
            lambda x: reference.cross_entropy(x, eager_target, **narrow, **sample.options)[0], [logits]
        )
        assert loss.dtype == acc_of(dtype) and grad.dtype == dtype
        assert_as_good_as_eager(loss, eager, truth, f"loss {rows}x{vocab}")
        assert_as_good_as_eager(grad, eager_grad, truth_grad, f"gradient {rows}x{vocab}")


@pairs_of(
    {
        "device": [*DEVICES],
        "probabilities": [False, True],
        "shape": [(7,), (3, 7, 4), (2, 7, 3, 2), (0, 7), (2, 7, 0)],
    }
)
def test_shapes(device: str, probabilities: bool, shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, device=device)
    row_shape = shape[1:] if len(shape) == 1 else (shape[0], *shape[2:])
    if probabilities:
        target = torch.randn(shape, device=device).softmax(0 if len(shape) == 1 else 1)
    else:
        target = torch.randint(0, 7, row_shape, device=device)
    for reduction in ("mean", "sum", "none"):
        loss, (grad,) = gradients(lambda x, r=reduction: fusegrad.cross_entropy(x, target, reduction=r), [logits])
        truth, (truth_grad,) = gradients(lambda x, r=reduction: F.cross_entropy(x, target, reduction=r), [logits])
        torch.testing.assert_close(loss, truth, equal_nan=True)
        torch.testing.assert_close(grad, truth_grad)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_strided_unaligned_or_transposed(device: str) -> None:
    target = torch.randint(0, 301, (6,), device=device)
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(6, 310, device=device).to(dtype)
        for logits in (wide[:, 3:304], wide[:, 4:305], wide.t().contiguous().t()[:, :301]):
            leaf = logits.detach().requires_grad_()
            (grad,) = torch.autograd.grad(fusegrad.cross_entropy(leaf, target), leaf, torch.tensor(0.5).to(device))
            _, (eager,) = gradients(lambda x: F.cross_entropy(x, target), [logits.contiguous()])
            _, (truth,) = gradients(lambda x: F.cross_entropy(x, target), [logits.double()])
            assert_as_good_as_eager(grad, eager, truth, f"gradient {dtype} {logits.stride()}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
def test_infinite_logits_and_large_offsets(device: str, inplace: bool) -> None:
    target = torch.randint(40, 64, (8,), device=device)
    logits = torch.randn(8, 64, device=device)
    logits[:, :40] = -torch.inf
    for x in (logits, torch.randn(8, 64, device=device) + 1e4):
        loss, (grad,) = gradients(lambda x: fusegrad.cross_entropy(x * 1, target, inplace=inplace), [x])
        eager, (eager_grad,) = gradients(lambda x: F.cross_entropy(x, target), [x])
        truth, (truth_grad,) = gradients(lambda x: F.cross_entropy(x, target), [x.double()])
        assert_as_good_as_eager(loss, eager, truth, "loss")
        assert_as_good_as_eager(grad, eager_grad, truth_grad, "gradient")


@pytest.mark.parametrize("device", DEVICES)
def test_one_class(device: str) -> None:
    """Its loss is 0 whatever the logit."""
    logits, target = 3 * torch.randn(5, 1, device=device), torch.zeros(5, dtype=torch.long, device=device)
    loss, (grad,) = gradients(lambda x: fusegrad.cross_entropy(x, target), [logits])
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_kept(device: str) -> None:
    """What PyTorch gives: NaN for the mean, 0 for the sum; and gradients of zero."""
    for dtype in (torch.float32, torch.float16):
        logits = torch.randn(4, 9, device=device).to(dtype)
        ignored = torch.full((4,), -100, device=device)
        for reduction, value in (("mean", torch.nan), ("sum", 0.0)):
            for inplace in (False, True):
                loss, (grad,) = gradients(
                    lambda x, r=reduction, i=inplace: fusegrad.cross_entropy(x * 1, ignored, reduction=r, inplace=i),
                    [logits],
                )
                torch.testing.assert_close(loss.cpu(), torch.tensor(value), equal_nan=True)
                assert torch.equal(grad, torch.zeros_like(logits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "softcap": 3.0}], ids=["plain", "softcap"])
def test_aux(device: str, options: dict) -> None:
    logits = torch.randn(6, 50, device=device)
    target = torch.tensor([1, 49, -100, 3, 0, 7], device=device)
    _, aux = fusegrad.cross_entropy(logits, target, return_aux=Aux(*[True] * 6), **options)
    _, truth = reference.cross_entropy(logits.double(), target, **options)
    for name, value in aux._asdict().items():
        torch.testing.assert_close(value.double(), truth[name].double(), rtol=1e-5, atol=1e-5, msg=name)
    _, one = fusegrad.cross_entropy(logits, target, return_aux=Aux(entropy=True))
    assert one.lse is None and torch.equal(one.entropy, one._asdict()["entropy"])


@pytest.mark.parametrize("inplace", [False, True])
def test_lse_is_differentiable_and_nothing_else(inplace: bool) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 9, (4,))

    def both(x: torch.Tensor) -> torch.Tensor:
        loss, aux = fusegrad.cross_entropy(x * 1, target, return_aux=Aux(lse=True, entropy=True), inplace=inplace)
        return loss + (aux.lse * torch.arange(4)).sum()

    assert torch.autograd.gradcheck(both, (logits,))


@rows_of("sample", [*COMMON], tests=4)
def test_gradcheck(sample: Sample) -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target = sample.target((5,), 7, "cpu", torch.float64)
    tensors = sample.tensors((5,), 7, "cpu", torch.float64)
    inputs = [logits] if not sample.probabilities else [logits, target.requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda x, t=target: fusegrad.cross_entropy(x, t, **tensors, **sample.options), inputs
    )
