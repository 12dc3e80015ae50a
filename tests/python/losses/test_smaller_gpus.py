"""The losses' kernels as GPUs without clusters of CTAs, and with less shared memory, launch them."""

from __future__ import annotations

from collections.abc import Iterator

import fusegrad
import pytest
import torch
from fusegrad import _C, reference
from support import assert_as_good_as_eager, gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KIB_99 = 99 << 10
# sm_80, sm_86 and sm_89, sm_120: CTAs a cluster may have, and bytes of shared memory a CTA.
GPUS = {"sm_80": (1, 163 << 10), "sm_89": (1, KIB_99), "sm_120": (8, KIB_99)}
# bfloat16: a row, or two rows, in a CTA's shared memory on all of these GPUs, on some, on none.
CLASSES = (8200, 33001, 50257, 128256)


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    _C.force_limits(*GPUS[request.param])
    yield request.param
    _C.force_limits(0, 0)


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(gpu: str, inplace: bool) -> None:
    for classes in CLASSES:
        logits = torch.randn(37, classes, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(classes, (37,), device="cuda")
        loss, (grad,) = gradients(lambda x, t=target: fusegrad.cross_entropy(x * 1, t, inplace=inplace), [logits])
        eager, (eager_grad,) = gradients(lambda x, t=target: torch.nn.functional.cross_entropy(x, t), [logits])
        right, (right_grad,) = gradients(lambda x, t=target: torch.nn.functional.cross_entropy(x, t), [logits.double()])
        assert_as_good_as_eager(loss, eager, right, f"{gpu}: loss of {classes}", single=2**-20)
        assert_as_good_as_eager(grad, eager_grad, right_grad, f"{gpu}: gradient of {classes}")


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_jsd(gpu: str, beta: float, inplace: bool) -> None:
    for classes in CLASSES:
        student, teacher = (torch.randn(19, classes, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        loss, grads = gradients(lambda s, t: fusegrad.jsd(s * 1, t * 1, beta=beta, inplace=inplace), [student, teacher])
        right, right_grads = gradients(
            lambda s, t: reference.jsd(s, t, beta=beta)[0], [student.double(), teacher.double()]
        )
        eager, eager_grads = gradients(lambda s, t: reference.jsd(s, t, beta=beta)[0], [student, teacher])
        assert_as_good_as_eager(loss, eager, right, f"{gpu}: loss of {classes}", single=2**-20)
        for ours, theirs, exact in zip(grads, eager_grads, right_grads, strict=True):
            assert_as_good_as_eager(ours, theirs, exact, f"{gpu}: gradient of {classes}")


def test_limits_hold(gpu: str) -> None:
    """A row's sums in another order than on the GPU itself: the limits reach the kernels."""
    student, teacher = (torch.randn(8, 128256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    forced = fusegrad.jsd(student, teacher, reduction="none")
    _C.force_limits(0, 0)
    usual = fusegrad.jsd(student, teacher, reduction="none")
    assert torch.allclose(forced, usual, rtol=1e-4)
    if torch.cuda.get_device_capability() == (9, 0) and gpu != "sm_120":
        assert not torch.equal(forced, usual)
