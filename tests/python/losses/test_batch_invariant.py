"""batch_invariant: a row has the same bits in every call that it is in."""

from __future__ import annotations

from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, reference
from support import DEVICE_DTYPES, assert_as_good_as_eager
from test_aux_gradients import AUX, compare
from torch import Tensor

ROWS = {"cpu": 150, "cuda": 1100}  # of two whole tiles and a part of one
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 5.0, "bias": True},
    {"logit_scale": True, "label_smoothing": 0.1},
    {"support": True},
]


def results(rows: slice | Tensor, aux: Aux, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The loss, aux values and gradients of the input of these rows."""
    hidden, weight, bias, target, scale, support, upstream = (
        t[rows] if len(t) == len(inputs[0]) else t for t in inputs
    )
    options = dict(options)
    if options.pop("bias", False):
        options["linear_bias"] = bias
    if options.pop("logit_scale", False):
        options["logit_scale"] = scale
    if options.pop("support", False):
        options["support"] = support
    hidden = hidden.clone().requires_grad_()
    loss, values = fusegrad.linear_cross_entropy(
        hidden, weight, target, reduction="none", batch_invariant=True, return_aux=aux, **options
    )
    (gradient,) = torch.autograd.grad(loss, hidden, upstream.to(loss.dtype))
    return [loss, values.lse, *([values.token_log_prob] if aux.token_log_prob else []), gradient]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_the_same_bits(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rows, hidden, vocab = ROWS[device], 64, 2051
    target = torch.randint(0, vocab, (rows,))
    support = (target[:, None] + torch.arange(700)) % vocab
    shapes = ((rows, hidden), (vocab, hidden), (vocab,))
    inputs = [torch.randn(s).to(device, dtype) for s in shapes]
    inputs += [t.to(device) for t in (target, torch.rand(rows) + 0.5, support, torch.rand(rows))]
    whole = results(slice(None), AUX, inputs, options)
    choices = {
        "one row": slice(77, 78),
        "a few": slice(3, 20),
        "not from the start": slice(1, None),
        "shuffled": torch.randperm(rows).to(device),
        "twice": torch.arange(rows, device=device).repeat(2),
    }
    for name, choice in choices.items():
        for found, all_of_them in zip(results(choice, AUX, inputs, options), whole, strict=True):
            assert torch.equal(found, all_of_them[choice]), name
    for extra in ({"workspace_mib": 0}, {"workspace_mib": 1}):
        for found, expected in zip(results(slice(None), AUX, inputs, options | extra), whole, strict=True):
            assert torch.equal(found, expected), extra
    fewer = results(slice(0, 5), Aux(lse=True), inputs, options)
    assert torch.equal(fewer[1], whole[1][:5]) and torch.equal(fewer[0], whole[0][:5])
    with torch.no_grad():
        plain = fusegrad.linear_log_prob(inputs[0][9:10], inputs[1], inputs[3][9:10], batch_invariant=True)
        assert options or torch.equal(plain.log_prob, whole[2][9:10])


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_parity(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows, hidden, vocab = ROWS[device], 16, 1003
    inputs = [torch.randn(s, device=device).mul(0.5).to(dtype) for s in ((rows, hidden), (vocab, hidden), (vocab,))]
    target = torch.randint(0, vocab, (rows,), device=device)
    target[7] = -100
    compare(
        lambda x, w, b: fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", batch_invariant=True, return_aux=AUX, **options
        ),
        lambda x, w, b: reference.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none"),
        inputs,
        rows,
        ("rrrr", "--re"),
    )


def test_into_a_buffer_and_means() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(100, 8, requires_grad=True), torch.randn(301, 8, requires_grad=True)
    target, into = torch.randint(0, 301, (100,)), torch.zeros(301, 8)
    loss = fusegrad.linear_cross_entropy(hidden, weight, target, batch_invariant=True, grad_weight_into=into)
    loss.backward()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(reference.linear_cross_entropy(*wide, target)[0], wide)
    for name, found, right in zip(("input", "weight"), (hidden.grad, into), truth, strict=True):
        assert_as_good_as_eager(found, right.float(), right, name, least=1e-6)


def test_bad_input() -> None:
    x, w = torch.randn(3, 2), torch.randn(5, 2)
    with pytest.raises(ValueError, match="batch_invariant must be False with class probabilities"):
        fusegrad.linear_cross_entropy(x, w, torch.rand(3, 5), batch_invariant=True)
