"""examples/meanflow.py: both attentions under forward mode, and the program."""

import json
from collections.abc import Iterator
from pathlib import Path

import meanflow
import pytest
import torch
from flow.model import ATTENTIONS, DiT


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_both_attentions_give_the_same_tangents_and_gradients() -> None:
    torch.manual_seed(0)
    model = DiT(side=4, classes=3, layers=2, width=16, heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # what starts as 0 too
    z, velocity = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    r, t = torch.rand(2, 5, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1])
    results = []
    for attention in ATTENTIONS.values():

        def u_of(z: torch.Tensor, r: torch.Tensor, t: torch.Tensor, attention=attention) -> torch.Tensor:
            return model(z, r, t, labels, attention)

        u, slope = torch.func.jvp(u_of, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
        gradients = torch.autograd.grad((u - slope.detach()).square().sum(), list(model.parameters()))
        results.append([u.detach(), slope.detach(), *gradients])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert all(g.abs().max() > 0 for g in results[0])


def test_the_distance() -> None:
    images = torch.randn(500, 8, 8, generator=torch.Generator().manual_seed(0))
    assert abs(meanflow.distance_between(images, images)) < 1e-8
    assert meanflow.distance_between(images + 1, images) == pytest.approx(64)
    assert meanflow.distance_between(images * 0.5, images) == pytest.approx(
        0.25 * images.flatten(1).var(0).sum().item()
    )


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    sizes = ["--steps=3", "--batch-size=8", "--layers=1", "--width=16", "--heads=2", f"--out={tmp_path}"]
    assert meanflow.main(sizes) in (0, 1)  # three steps learn nothing
    reports = json.loads((tmp_path / "meanflow.json").read_text())
    assert [report["name"] for report in reports] == list(meanflow.RUNS)
    assert all(len(report["losses"]) == 3 for report in reports)
    assert (tmp_path / "meanflow.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    def reports(ours: float, other: float) -> list[dict]:
        return [{"distance": ours}, {"distance": other}]

    assert meanflow.check(reports(2.0, 9.0), 1e-6) == 0
    assert meanflow.check(reports(5.0, 9.0), 1e-6) == 1
    assert meanflow.check(reports(2.0, 9.0), 1e-2) == 1
    assert meanflow.check(reports(2.0, 9.0), float("nan")) == 1
