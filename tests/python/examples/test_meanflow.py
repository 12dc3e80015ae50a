"""examples/meanflow.py: both attentions under forward mode, and the program."""

import json
from pathlib import Path

import meanflow
import pytest
import torch
from flow.model import ATTENTIONS, DiT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", meanflow.RUNS)
def test_both_attentions_give_the_same_loss_and_gradients(name: str) -> None:
    """Those of the loss through forward mode, whose target is a constant, in float64."""
    torch.manual_seed(0)
    model = DiT(side=4, classes=3, layers=2, width=16, heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # what starts as 0 too
    images, labels = torch.randn(5, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    results = []
    for attention in ATTENTIONS:
        loss = meanflow.loss_of(model, images, labels, attention, name, torch.Generator().manual_seed(1))
        results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert all(g.abs().max() > 0 for g in results[0])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tangents(attention: str) -> None:
    """The slope along (v, 0, 1) beside a difference quotient."""
    torch.manual_seed(0)
    model = DiT(side=4, classes=3, layers=2, width=16, heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    z, velocity = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    r, t, labels = torch.zeros(3).double(), torch.full((3,), 0.6).double(), torch.arange(3)

    def u_of(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return model(z, r, t, labels, ATTENTIONS[attention])

    _, slope = torch.func.jvp(u_of, (z, t), (velocity, torch.ones_like(t)))
    h = 1e-5
    expected = (u_of(z + h * velocity, t + h) - u_of(z - h * velocity, t - h)) / (2 * h)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-6)


def test_the_distance() -> None:
    images = torch.randn(500, 8, 8, generator=torch.Generator().manual_seed(0))
    assert abs(meanflow.distance_between(images, images)) < 1e-8
    assert meanflow.distance_between(images + 1, images) == pytest.approx(64)
    images -= images.mean(0)
    # For half the standard deviations: the sum of (1 - 0.5)^2 times the variances.
    variances = images.double().flatten(1).var(0).sum().item()
    assert meanflow.distance_between(images * 0.5, images) == pytest.approx(0.25 * variances)


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    assert meanflow.main(["--quick", f"--out={tmp_path}"]) == 0
    reports = json.loads((tmp_path / "meanflow.json").read_text())
    assert [report["name"] for report in reports] == list(meanflow.RUNS)
    assert all(len(report["losses"]) == meanflow.QUICK["steps"] for report in reports)
    assert (tmp_path / "meanflow.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    def reports(ours: float, other: float) -> list[dict]:
        return [{"distance": ours}, {"distance": other}]

    assert meanflow.check(reports(2.0, 9.0), 1e-6) == 0
    assert meanflow.check(reports(5.0, 9.0), 1e-6) == 1
    assert meanflow.check(reports(2.0, 9.0), 1e-2) == 1
    assert meanflow.check(reports(2.0, 9.0), float("nan")) == 1
    assert meanflow.check(reports(9.0, 9.0), 1e-6, quick=True) == 0
    assert meanflow.check(reports(2.0, 9.0), 1e-2, quick=True) == 1
