"""verl's signature: log-probabilities and entropies as its documentation defines them, and as verl itself has them."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import rows_of
from fusegrad import reference
from fusegrad.integrations.verl import linear_cross_entropy


def fused_linear_for_ppo() -> Any:
    """verl's head on a CPU, from the file that has it: `import verl` wants Ray and an older transformers."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    path = Path(spec.submodule_search_locations[0], "utils/experimental/torch_functional.py")
    return runpy.run_path(str(path))["FusedLinearForPPO"](chunk_size=4)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@rows_of("per_row", [False, True])
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


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_as_verl_itself(temperature: float, shape: tuple[int, ...]) -> None:
    theirs = fused_linear_for_ppo()
    hidden, weight = torch.randn(*shape, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    labels = torch.randint(0, 37, shape)
    upstream = torch.randn(2, *shape)
    results = []
    for head in (linear_cross_entropy, theirs):
        leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
        # verl raises requires_grad of a view of the hidden states, which a leaf does not allow.
        out = head(leaves[0] * 1, leaves[1], labels, temperature)
        results.append([*out, *torch.autograd.grad(out, leaves, list(upstream.unbind()))])
    for ours, right in zip(*results, strict=True):
        assert ours.shape == right.shape
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
