"""The norm and the projection of attention's pair bias, in one pass over memory each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from biased_formulas import weights
from coverings import rows_of
from fusegrad import attention_pair_bias
from support import DEVICE_DTYPES, DEVICES, assert_as_good_as_eager
from torch import Tensor
from torch.nn import functional as F

NAMES = ("pair", "norm_weight", "norm_bias", "projection_weight", "projection_bias")
EPS = 1e-3
# c and H that the kernels take, and others; N of no multiple of their tiles, and none at all.
SIZES = [
    (2, 9, 13, 128, 16),
    (1, 33, 33, 64, 4),
    (3, 8, 8, 128, 1),
    (2, 5, 7, 48, 3),
    (1, 4, 5, 128, 17),
    (2, 0, 5, 64, 2),
]

Inputs = list[Tensor | None]


def projection(*given: object) -> Tensor:
    out = torch.ops.fusegrad.pair_projection(*given)
    assert isinstance(out, Tensor)
    return out


def plain(
    pair: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> Tensor:
    channels = pair.shape[-1:]
    if centered:
        normed = F.layer_norm(pair, channels, norm_weight, norm_bias, eps)
    else:
        normed = F.rms_norm(pair, channels, norm_weight, eps)
    return F.linear(normed, weight, bias).permute(0, 3, 1, 2)


def drawn(sizes: Sequence[int], device: str, dtype: torch.dtype, absent: str = "") -> Inputs:
    B, M, N, c, H = sizes
    shapes = {"pair": (B, M, N, c), "norm_weight": (c,), "norm_bias": (c,)}
    shapes |= {"projection_weight": (H, c), "projection_bias": (H,)}
    made: Inputs = []
    for name, shape in shapes.items():
        t = torch.randn(shape, device=device, dtype=torch.float64)
        t = 3 * t + 2 if name == "pair" else c**-0.5 * t if name == "projection_weight" else t + (name == "norm_weight")
        made.append(None if name in absent else t.to(dtype).requires_grad_())
    return made


def results(f: Callable[..., Tensor], inputs: Inputs, grad: Tensor, centered: bool) -> dict[str, Tensor]:
    out = f(*inputs, EPS, centered)
    there = {name: t for name, t in zip(NAMES, inputs, strict=True) if t is not None}
    grads = torch.autograd.grad(out, list(there.values()), grad.to(out.dtype))
    return {"out": out, **dict(zip(there, grads, strict=True))}


def double(inputs: Inputs) -> Inputs:
    return [None if t is None else t.detach().double().requires_grad_() for t in inputs]


@pytest.mark.parametrize("centered, absent", [(True, ""), (True, "norm_bias projection_bias"), (False, "norm_bias")])
@rows_of("sizes", SIZES)
@rows_of("device, dtype", DEVICE_DTYPES)
def test_values_and_gradients(
    device: str, dtype: torch.dtype, sizes: Sequence[int], centered: bool, absent: str
) -> None:
    inputs = drawn(sizes, device, dtype, absent)
    B, M, N, _, H = sizes
    grad = torch.randn(B, H, M, N, device=device).to(dtype)
    ours = results(projection, inputs, grad, centered)
    eager = results(plain, inputs, grad, centered)
    truth = results(plain, double(inputs), grad, centered)
    assert ours["out"].is_contiguous()
    for name, value in ours.items():
        assert value.dtype == dtype
        assert_as_good_as_eager(value, eager[name], truth[name], f"{name} of {sizes} {centered}")
    for name, value in results(projection, inputs, grad, centered).items():
        assert torch.equal(value, ours[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_no_parameters_and_strides(device: str) -> None:
    """Without a norm's parameters; of a transposed pair representation, and of an upstream gradient with strides."""
    dtype = torch.bfloat16
    inputs = drawn((2, 12, 17, 64, 8), device, dtype, "norm_weight norm_bias projection_bias")
    (pair, weight) = (t for t in inputs if t is not None)
    pair = pair.detach().transpose(1, 2).requires_grad_()
    given: Inputs = [pair, None, None, weight, None]
    grad = torch.randn(2, 8, 12, 17, device=device).to(dtype).transpose(2, 3)
    ours, eager = results(projection, given, grad, True), results(plain, given, grad, True)
    truth = results(plain, double(given), grad, True)
    for name, value in ours.items():
        assert_as_good_as_eager(value, eager[name], truth[name], name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient_alone(device: str, wanted: str) -> None:
    inputs = drawn((2, 9, 13, 128, 16), device, torch.bfloat16)
    grad = torch.randn(2, 16, 9, 13, device=device).bfloat16()
    all_ = results(projection, inputs, grad, True)
    given = [t.detach().requires_grad_(name == wanted) for name, t in zip(NAMES, inputs, strict=True) if t is not None]
    (found,) = torch.autograd.grad(projection(*given, EPS, True), [t for t in given if t.requires_grad], grad)
    assert torch.equal(found, all_[wanted])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_far_from_zero(device: str, dtype: torch.dtype) -> None:
    inputs = drawn((1, 16, 16, 128, 8), device, dtype)
    assert inputs[0] is not None
    inputs[0] = (inputs[0].detach() + 100).requires_grad_()
    grad = torch.randn(1, 8, 16, 16, device=device).to(dtype)
    ours, eager, truth = (results(f, given, grad, True) for f, given in
                          ((projection, inputs), (plain, inputs), (plain, double(inputs))))  # fmt: skip
    for name, value in ours.items():
        assert_as_good_as_eager(value, eager[name], truth[name], name)


@pytest.mark.parametrize("centered", [True, False])
def test_gradcheck(centered: bool) -> None:
    inputs = drawn((1, 2, 3, 8, 2), "cpu", torch.float64, "" if centered else "norm_bias")
    there = [t for t in inputs if t is not None]

    def f(*given: Tensor) -> Tensor:
        rest = iter(given)
        return projection(*(None if t is None else next(rest) for t in inputs), EPS, centered)

    assert torch.autograd.gradcheck(f, there)
    assert torch.autograd.gradgradcheck(f, there)


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float32
    given = [t.detach() for t in drawn((2, 3, 5, 64, 4), device, dtype) if t is not None]

    def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *t: f(*t, EPS, True).square().sum()

    ours, theirs = (torch.func.grad(loss(f), (0, 1, 2, 3, 4))(*given) for f in (projection, plain))
    torch.testing.assert_close(ours, theirs)
    batch = [t.unsqueeze(0) for t in given]
    ours, theirs = (torch.vmap(torch.func.grad(loss(f), (0, 3)))(*batch) for f in (projection, plain))
    torch.testing.assert_close(ours, theirs)
    tangents = tuple(torch.randn_like(t) for t in given)
    ours, theirs = (torch.func.jvp(loss(f), tuple(given), tangents) for f in (projection, plain))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_tangents_of_16_bits(device: str, dtype: torch.dtype, centered: bool) -> None:
    """On CUDA PyTorch raises an error for those of the plain formula."""
    inputs = drawn((2, 3, 5, 64, 4), device, dtype, "" if centered else "norm_bias")
    given = [t.detach() for t in inputs if t is not None]
    moving = [torch.randn_like(t) for t in given]

    def out(f: Callable[..., Tensor], *t: Tensor) -> Tensor:
        return f(*t[:2], t[2] if centered else None, *t[-2:], EPS, centered)

    wide = [tuple(t.double() for t in tensors) for tensors in (given, moving)]
    truth = torch.func.jvp(lambda *t: out(plain, *t), *wide)
    for x, y in zip(torch.func.jvp(lambda *t: out(projection, *t), tuple(given), tuple(moving)), truth, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=0, atol=float(y.abs().max()) * 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for absent in ("", "norm_weight norm_bias projection_bias"):
            inputs = drawn((2, 3, 5, 64, 4), device, dtype, absent)
            torch.library.opcheck(torch.ops.fusegrad.pair_projection.default, (*inputs, EPS, True))
            plain_inputs = [None if t is None else t.detach() for t in inputs]
            torch.library.opcheck(torch.ops.fusegrad.pair_projection_forward.default, (*plain_inputs, EPS, True))
            grad = torch.randn(2, 4, 3, 5, device=device).to(dtype)
            wanted = [t is not None for t in inputs]
            arguments = (grad, *plain_inputs, EPS, True, wanted)
            torch.library.opcheck(torch.ops.fusegrad.pair_projection_backward.default, arguments)


@pytest.mark.parametrize("norm_kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_attention_pair_bias(device: str, autocast: bool, norm_kind: Literal["layer_norm", "rms_norm"]) -> None:
    """Projected by the op, or before the call by PyTorch. The tensors have autocast's dtype already."""
    B, M, N, H, DH, D, c = 2, 2, 21, 4, 8, 32, 64
    centered, dtype = norm_kind == "layer_norm", torch.bfloat16
    w = weights(H, DH, D, c)
    rest = {n: t.detach() for n, t in w.items() if not n.endswith("_z") and (centered or not n.startswith("b_ln"))}
    pair, *parameters = drawn((B, N, N, c, H), "cpu", torch.float64, "" if centered else "norm_bias")
    single = torch.randn(B * M, N, D, dtype=torch.float64)
    upstream = torch.randn_like(single)
    names = [f"{name}_z" for name in ("w_ln", "b_ln", "w_proj", "b_proj")]

    def gradients(device: str, dtype: torch.dtype, by_it: bool) -> list[Tensor]:
        given = [None if t is None else t.detach().to(device, dtype).requires_grad_() for t in (pair, *parameters)]
        z = given[0] if by_it else plain(*given, 1e-5, centered)  # type: ignore[arg-type]
        assert z is not None
        options: dict[str, Any] = {n: t.to(device, dtype) for n, t in rest.items()}
        options |= dict.fromkeys(n for n in ("b_ln_a",) if n not in rest)
        options |= dict(zip(names, given[1:], strict=True)) if by_it else {"is_cached_z_proj": True}
        out, _ = attention_pair_bias(single.to(device, dtype), z, None, H, norm_kind=norm_kind, **options)
        assert out.dtype == dtype
        there = [t for t in given if t is not None]
        return [out, *torch.autograd.grad(out, there, upstream.to(device, dtype))]

    with torch.autocast(device, dtype, enabled=autocast):
        ours = gradients(device, dtype, True)
        eager = gradients(device, dtype, False)
    truths = [t.to(device) for t in gradients("cpu", torch.float64, False)]
    for i, (mine, theirs, truth) in enumerate(zip(ours, eager, truths, strict=True)):
        assert_as_good_as_eager(mine, theirs, truth, f"{i}")


def test_bad_input() -> None:
    pair, norm_weight, norm_bias, weight, bias = (torch.randn(s) for s in ((2, 3, 5, 16), (16,), (16,), (4, 16), (4,)))
    for error, match, changed in (
        (ValueError, r"pair must have shape \[B, M, N, c\]", {"pair": pair[0]}),
        (ValueError, r"projection_weight must have shape \[H, c\]", {"projection_weight": weight[:, 1:]}),
        (ValueError, "norm_weight must have shape", {"norm_weight": bias}),
        (ValueError, "norm_bias must have shape", {"norm_bias": bias}),
        (ValueError, "projection_bias must have shape", {"projection_bias": norm_bias}),
        (TypeError, "must have the dtype of pair", {"projection_weight": weight.double()}),
        (ValueError, "norm_bias must be None without centered", {"centered": False}),
    ):
        given = dict(zip(NAMES, (pair, norm_weight, norm_bias, weight, bias), strict=True))
        with pytest.raises(error, match=f"pair_projection: .*{match}"):
            torch.ops.fusegrad.pair_projection(**given | {"eps": EPS, "centered": True} | changed)
