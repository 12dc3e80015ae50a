"""linear_cross_entropy's logit_scale as a tensor: 0-d, or a factor of each row, and its gradient."""

from __future__ import annotations

from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, reference
from support import DEVICE_DTYPES, assert_as_good_as_eager
from test_aux_gradients import AUX, compare, outputs


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}, {"softcap": 5.0}, {"label_smoothing": 0.1}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_parity(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows, hidden, vocab = 150, 16, 1003
    plain = {name: value for name, value in options.items() if name != "workspace_mib"}
    inputs = [torch.randn(s, device=device).mul(0.5).to(dtype) for s in ((rows, hidden), (vocab, hidden), (vocab,))]
    target = torch.randint(0, vocab, (rows,), device=device)
    target[7] = -100
    scale = (torch.rand(rows, device=device, dtype=torch.float64) + 0.5).to(dtype)
    scale[3] = -1.5
    compare(
        lambda x, w, b: fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", logit_scale=scale, return_aux=AUX, **options
        ),
        lambda x, w, b: reference.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", logit_scale=scale.to(x.dtype), **plain
        ),
        inputs,
        rows,
        ("rrrr", "---r", "--r-"),
    )


@rows_of("one, per_row", [(1.3, False), (-0.7, False), (1.0, True), (-2.0, True)])
def test_predicted_tokens(one: float, per_row: bool) -> None:
    """For a factor below zero, the columns with the smallest products; the first of several."""
    hidden, weight = torch.randint(-2, 3, (40, 3)).double(), torch.randint(-2, 3, (30, 3)).double()
    scale = torch.randn(40, dtype=torch.float64) * one if per_row else one
    logits = hidden @ weight.T * (scale[:, None] if per_row else scale)
    target = torch.randint(0, 30, (40,))
    aux = fusegrad.linear_cross_entropy(
        hidden, weight, target, logit_scale=scale, return_aux=Aux(predicted_tokens=True, token_accuracy=True)
    )[1]
    expected = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert aux.predicted_tokens.equal(expected)
    assert aux.token_accuracy.double().equal((expected == target).double())


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {},
        {"reduction": "sum", "z_loss": 0.1, "workspace_mib": 0},
        {"reduction": "mean", "z_loss": 0.1, "label_smoothing": 0.1, "token": True},
        {"weight": True, "label_smoothing": 0.2, "token": True},
        {"probabilities": True, "reduction": "none"},
    ],
    ids=str,
)
@rows_of("per_row", [False, True])
def test_gradcheck(options: dict[str, Any], per_row: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,))]
    scale = torch.rand(5 if per_row else (), dtype=torch.float64) + 0.5
    options = dict(options)
    target = torch.tensor([0, 6, -100, 3, 2])
    index = not options.pop("probabilities", False)
    if not index:
        target = torch.rand(5, 7, dtype=torch.float64)
    if options.pop("weight", False):
        options["weight"] = torch.rand(7, dtype=torch.float64) + 0.1
    if options.pop("token", False):
        options["token_weight"] = torch.rand(5, dtype=torch.float64)
    aux = Aux(lse=True, entropy=True, token_log_prob=index)

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
        loss, values = fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, logit_scale=s, return_aux=aux, **options
        )
        return [loss, *(v for v in values if v is not None)]

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in (*leaves, scale)])
    # Without aux values, and without a bias.
    without = {"logit_scale": scale, **options}
    assert torch.autograd.gradcheck(
        lambda x, w, s: fusegrad.linear_cross_entropy(x, w, target, **{**without, "logit_scale": s}),
        (leaves[0], leaves[1], scale),
    )


@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_gradient_of_a_learned_scale(device: str, dtype: torch.dtype) -> None:
    """One number for all rows, as in a contrastive head."""
    x, w = torch.randn(64, 16, device=device).to(dtype), torch.randn(300, 16, device=device).to(dtype)
    target = torch.randint(0, 300, (64,), device=device)
    found = []
    for function, kind in ((fusegrad, dtype), (reference, dtype), (reference, torch.float64)):
        scale = torch.tensor(1.25, device=device, dtype=kind, requires_grad=True)
        out = outputs(
            fusegrad.linear_cross_entropy(x, w, target, logit_scale=scale, return_aux=AUX)
            if function is fusegrad
            else reference.linear_cross_entropy(x.to(kind), w.to(kind), target, logit_scale=scale)
        )
        (gradient,) = torch.autograd.grad(out[0] + out[2].mean() - out[3].mean(), scale)
        assert gradient.dtype == kind and gradient.shape == ()
        found.append(gradient)
    # One number, of which eager's may be right by luck, and whose logits the GPU rounds.
    assert_as_good_as_eager(*found, "scale", least=max(2**-16, torch.finfo(dtype).eps))


def test_bad_input() -> None:
    x, w, t = torch.randn(3, 2), torch.randn(5, 2), torch.zeros(3, dtype=torch.int64)
    for scale, message in (
        (torch.ones(2), r"logit_scale \(C\+\+: row_scale\) must be 0-d or have shape"),
        (torch.ones(3, dtype=torch.int64), r"logit_scale \(C\+\+: row_scale\) must be floating-point"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"linear_cross_entropy: {message}"):
            fusegrad.linear_cross_entropy(x, w, t, logit_scale=scale)
    with pytest.raises(ValueError, match=r"logit_scale \(C\+\+: row_scale\) must not require grad beside a softcap"):
        fusegrad.linear_cross_entropy(x, w, t, logit_scale=torch.ones((), requires_grad=True), softcap=3.0)
