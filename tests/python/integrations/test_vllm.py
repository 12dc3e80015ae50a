"""Top-k log-probabilities in vLLM's form are a teacher of the divergences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fusegrad
import pytest
import torch
from fusegrad.integrations.vllm import top_log_probs

pytestmark = pytest.mark.cpu_only


def as_vllm(log_probs: torch.Tensor, k: int, sampled: int | None = None) -> list[Any]:
    """A dictionary a token; the sampled one is added where it is none of the k."""
    rows = []
    for row in log_probs:
        ids = row.topk(k).indices.tolist()
        ids = ids if sampled is None or sampled in ids else [sampled, *ids]
        rows.append({i: SimpleNamespace(logprob=row[i].item(), rank=n, decoded_token=None) for n, i in enumerate(ids)})
    return rows


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_teacher_in_vllms_form(tail: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(17, 8, generator=generator)
    teacher = torch.randn(6, 17, generator=generator).log_softmax(-1)
    positions = [None, *as_vllm(teacher[1:], 5)]
    labels = torch.tensor([-100, 0, 0, 0, 0, 0])
    log_probs, indices = top_log_probs(positions)
    assert log_probs.shape == indices.shape == (6, 5) and (indices[0] == -1).all()
    hidden.requires_grad_()
    loss = fusegrad.linear_jsd(hidden, weight, (log_probs, indices), labels=labels, beta=0.0, tail=tail)
    loss.backward()
    q, top = (hidden[1:].detach() @ weight.T).double().requires_grad_(), teacher[1:].topk(5)
    p, log_q = top.values.double().exp(), q.log_softmax(-1).gather(1, top.indices)
    if tail == "renormalize":
        p = p / p.sum(1, keepdim=True)
        terms = p * (p.log() - log_q)
    else:
        rest, log_rest = 1 - p.sum(1, keepdim=True), (1 - log_q.exp().sum(1, keepdim=True)).log()
        terms = torch.cat([p * (p.log() - log_q), rest * (rest.log() - log_rest)], 1)
    expected = terms.sum() / 5
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (by_logits,) = torch.autograd.grad(expected, q)
    torch.testing.assert_close(hidden.grad[1:].double(), by_logits @ weight.double(), rtol=1e-4, atol=1e-5)


def test_completions_of_different_lengths() -> None:
    teacher = torch.randn(2, 4, 17, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_probs, indices = top_log_probs([as_vllm(teacher[0], 3), as_vllm(teacher[1, :2], 3, sampled=16)], k=3)
    assert log_probs.shape == (2, 4, 3) and (indices[1, 2:] == -1).all()
    torch.testing.assert_close((log_probs[0], indices[0]), tuple(teacher[0].topk(3)))
    torch.testing.assert_close((log_probs[1, :2], indices[1, :2]), tuple(teacher[1, :2].topk(3)))
    numbers = top_log_probs([{3: -0.5, 4: -1.5}, {7: -0.1}])
    assert numbers[1].tolist() == [[3, 4], [7, -1]]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^top_log_probs: k must be at least 1, but got 0"):
        top_log_probs([{1: -1.0}], k=0)
    with pytest.raises(ValueError, match=r"^top_log_probs: positions must have log-probabilities, but got none"):
        top_log_probs([None])
    for value in (3.5, float("nan")):
        with pytest.raises(ValueError, match=f"^top_log_probs: log-probabilities must be at most 0, but got {value}"):
            top_log_probs([{1: value}])
