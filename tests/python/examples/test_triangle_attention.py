"""examples/triangle_attention.py: both attentions, and the program."""

import json
from pathlib import Path

import pytest
import torch
import triangle_attention
from graph.data import DISTANCES, Molecule
from triangle.model import ATTENTIONS, NO_PAIR, PairTransformer, pad

pytestmark = pytest.mark.usefixtures("one_thread")


def random_molecules(*sizes: int) -> list[Molecule]:
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    return [Molecule(integers(9, n), integers(DISTANCES, n, n).byte(), integers(5, n, n).byte(), 0.0) for n in sizes]


def test_what_is_no_pair() -> None:
    batch = pad(random_molecules(3, 5))
    assert batch.bonds.shape == batch.distances.shape == (2, 5, 5) and batch.sizes.tolist() == [3, 5]
    assert (batch.distances != NO_PAIR).sum((1, 2)).tolist() == [3 * 2, 5 * 4]
    assert (batch.distances[0, 3:] == NO_PAIR).all() and (batch.distances.diagonal(dim1=1, dim2=2) == NO_PAIR).all()


@pytest.mark.parametrize("biased", [True, False])
def test_both_attentions_give_the_same_gradients(biased: bool) -> None:
    torch.manual_seed(0)
    batch = pad(random_molecules(4, 7, 9))
    model = PairTransformer(layers=2, width=16, heads=4, biased=biased).double()
    results = []
    for make_attention in ATTENTIONS.values():
        model.zero_grad()
        out = model(batch, make_attention(batch.sizes, 9))[batch.distances != NO_PAIR]
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    if biased:
        assert all(layer.bias.weight.grad.abs().max() > 0 for layer in model.attention)


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    pytest.importorskip("matplotlib")
    sizes = ["--molecules=40", "--atoms=8", "--epochs=2", "--batch-size=16", "--layers=1", "--width=16", "--heads=2"]
    assert triangle_attention.main([*sizes, "--attention=fusegrad", f"--out={tmp_path}"]) == 0
    (report,) = json.loads((tmp_path / "triangle_attention.json").read_text())
    assert len(report["train_losses"]) == 2 * 2 and len(report["wrong"]) == 2
    assert (tmp_path / "triangle_attention.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    def reports(ours: float, dense: float, blind: float) -> list[dict]:
        return [{"wrong": [1.0, share]} for share in (ours, dense, blind)]

    assert triangle_attention.check(reports(0.02, 0.02, 0.5)) == 0
    assert triangle_attention.check(reports(0.10, 0.02, 0.5)) == 1
    assert triangle_attention.check(reports(0.30, 0.30, 0.5)) == 1
