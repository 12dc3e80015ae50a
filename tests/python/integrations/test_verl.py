"""verl's signature: log-probabilities and entropies as its documentation defines them."""

from __future__ import annotations

import pytest
import torch
from fusegrad import reference
from fusegrad.integrations.verl import linear_cross_entropy


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_values_and_gradients(reduction: str, per_row: bool) -> None:
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    labels = torch.randint(0, 11, (6,))
    temperature = torch.rand(6) + 0.5 if per_row else 0.7
    log_probs, entropy = linear_cross_entropy(hidden, weight, labels, temperature, reduction)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    scale = 1 / temperature.double() if isinstance(temperature, torch.Tensor) else 1 / temperature
    right, right_entropy = reference.linear_log_prob(*wide, labels, logit_scale=scale)
    if reduction != "none":
        right = getattr(right, reduction)()
    torch.testing.assert_close(log_probs.double(), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), right_entropy, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(log_probs.sum() - entropy.mean(), [hidden, weight])
    expected = torch.autograd.grad(right.sum() - right_entropy.mean(), wide)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


def test_bad_input() -> None:
    x, w, t = torch.randn(3, 2), torch.randn(5, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction must be 'none', 'sum' or 'mean', but got 'avg'"):
        linear_cross_entropy(x, w, t, reduction="avg")
