"""examples/grpo.py: rewards, the policy's loss by both heads, and a short run."""

import json
from pathlib import Path

import grpo
import pytest
import torch

SMALL = ["--prompts=4", "--group=4", "--width=16", "--layers=1", "--heads=2"]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_sums_and_rewards() -> None:
    prompts, answers = grpo.sums("cpu")
    row = [3, grpo.PLUS, 8, grpo.EQUALS]
    (at,) = (prompts == torch.tensor(row)).all(1).nonzero()
    assert answers[at].tolist() == [[1, 1]]
    samples = torch.tensor([[1, 1], [1, 0], [0, 2]])
    assert grpo.reward_of(samples, torch.tensor([[1, 1]] * 3)).tolist() == [[1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("name", [*grpo.OPS])
def test_a_cache_changes_nothing_but_rounding(name: str) -> None:
    torch.manual_seed(0)
    model = grpo.Model(16, 2, 2, grpo.OPS[name])
    tokens = torch.randint(0, grpo.VOCAB, (5, 6))
    whole, cache = model(tokens), []
    steps = torch.cat([model(tokens[:, :3], cache), *(model(tokens[:, i : i + 1], cache) for i in range(3, 6))], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5)
    if name == "fusegrad":
        assert torch.equal(steps, whole)


def test_log_probabilities_of_the_rollout_are_those_of_training() -> None:
    torch.manual_seed(0)
    model = grpo.Model(64, 2, 4, grpo.OPS["fusegrad"])
    prompts, _ = grpo.sums("cpu")
    rollouts = [grpo.sample(model, some, 0.8) for some in prompts.split(7)]
    samples, old = (torch.cat(parts) for parts in zip(*rollouts, strict=True))
    tokens = torch.cat([prompts, samples], 1)
    hidden = model(tokens[:, :-1])[:, grpo.PROMPT - 1 :]
    log_prob, _ = grpo.fused_log_probs(hidden, model.head.weight, samples, 0.8)
    assert log_prob.requires_grad and torch.equal(log_prob, old)


def test_both_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    prompts, _ = grpo.sums("cpu")
    samples = torch.randint(0, 10, (8, 2))
    tokens = torch.cat([prompts[:8], samples], 1)
    advantage, old = torch.randn(8, 2).double(), -2.5 + 0.3 * torch.randn(8, 2).double()
    found = []
    for ops in grpo.OPS.values():
        torch.manual_seed(1)
        model = grpo.Model(16, 1, 2, ops).double()
        hidden = model(tokens[:, :-1])[:, grpo.PROMPT - 1 :]
        log_prob, entropy = ops.log_probs(hidden, model.head.weight, samples, 0.8)
        loss = grpo.policy_loss(log_prob, entropy, old, advantage, 0.2, 0.01)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert grpo.main([*SMALL, "--rounds=3", "--least=0", f"--out={tmp_path}"]) == 0
    reports = json.loads((tmp_path / "grpo.json").read_text())
    assert [report["name"] for report in reports] == ["fusegrad", "PyTorch"]
    assert all(len(report[key]) == 3 for report in reports for key in ("reward", "right", "entropy", "off"))
    assert max(reports[0]["off"]) == 0
    assert reports[0]["reward"][0] == reports[1]["reward"][0]  # the same seed, before anything is learned
    assert (tmp_path / "grpo.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    reports = [
        {"name": "fusegrad", "right": [0.1, 0.95], "off": [0.0, 0.0]},
        {"name": "PyTorch", "right": [0.1, 0.8], "off": [1e-7, 1e-6]},
    ]
    assert grpo.check(reports, 0.9) == 1 and grpo.check(reports, 0.8) == 0
    reports[0]["off"][1] = 1e-7
    assert grpo.check(reports, 0.8) == 1
