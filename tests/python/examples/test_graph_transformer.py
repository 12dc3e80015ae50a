"""examples/graph_transformer.py: the molecules, and both attentions."""

import json
from pathlib import Path

import graph_transformer
import pytest
import torch
from graph.data import DISTANCES, MAX_DISTANCE, Molecule, batches, from_rdkit, load_molecules, pack
from graph.model import ATTENTIONS, GraphTransformer, block_mask

pytestmark = pytest.mark.usefixtures("one_thread")


def random_molecules(count: int) -> list[Molecule]:
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    sizes = [2 + int(integers(12, 1)) for _ in range(count)]
    return [
        Molecule(integers(9, n), integers(DISTANCES, n, n).byte(), integers(5, n, n).byte(), float(integers(9, 1)))
        for n in sizes
    ]


def test_pack_finds_every_pair() -> None:
    molecules = random_molecules(7)
    batch = pack(molecules)
    for g, m in enumerate(molecules):
        nodes = (batch.molecule == g).nonzero().squeeze(1)
        assert torch.equal(batch.elements[nodes], m.elements)
        assert batch.slot[nodes].tolist() == list(range(len(nodes)))
        entry = batch.row_start[nodes][:, None] + nodes
        assert torch.equal(batch.distances[entry], m.distances.long())
        assert torch.equal(batch.bonds[entry], m.bonds.long())


def test_batches_hold_each_molecule_once() -> None:
    molecules = random_molecules(10)
    labels = sorted(m.label for m in molecules)
    drawn = [b.labels for b in batches(molecules, 4, torch.Generator().manual_seed(1))]
    assert [len(b) for b in drawn] == [4, 4, 2]
    assert sorted(torch.cat(drawn).tolist()) == labels


def test_both_attentions_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    # More nodes than a block has, so that molecules cross blocks and whole blocks are left out.
    batch = pack(random_molecules(30))
    assert len(batch.molecule) > 128 and block_mask(batch).sparsity() > 0
    model = GraphTransformer(layers=2, width=16, heads=4).double()
    torch.nn.init.normal_(model.spatial)
    torch.nn.init.normal_(model.edge)
    results = []
    for make_attention in ATTENTIONS.values():
        model.zero_grad()
        out = model(batch, make_attention(batch))
        (out * torch.linspace(-1, 1, len(out), dtype=out.dtype)).sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert model.spatial.grad.abs().max() > 0 and model.edge.grad.abs().max() > 0


def test_a_molecule_of_rdkit() -> None:
    chem = pytest.importorskip("rdkit.Chem")
    # Sodium acetate: C-C(=O)-O and a sodium that hangs on nothing.
    molecule = from_rdkit(chem.MolFromSmiles("CC(=O)[O-].[Na+]"))
    assert molecule.elements.tolist() == [6, 6, 8, 8, 11]
    far = DISTANCES - 1
    assert molecule.distances.tolist() == [
        [0, 1, 2, 2, far],
        [1, 0, 1, 1, far],
        [2, 1, 0, 2, far],
        [2, 1, 2, 0, far],
        [far, far, far, far, 0],
    ]
    assert molecule.bonds[:4, :4].tolist() == [[0, 1, 0, 0], [1, 0, 2, 1], [0, 2, 0, 0], [0, 1, 0, 0]]
    chain = from_rdkit(chem.MolFromSmiles("C" * 25))
    assert chain.distances[0, -1] == MAX_DISTANCE and chain.distances[0, 7] == 7


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    pytest.importorskip("matplotlib")
    assert len(load_molecules(10)) == 10
    sizes = ["--molecules=60", "--epochs=2", "--batch-size=16", "--layers=1", "--width=16", "--heads=2"]
    assert graph_transformer.main([*sizes, "--attention=fusegrad", f"--out={tmp_path}"]) == 0
    (report,) = json.loads((tmp_path / "graph_transformer.json").read_text())
    assert len(report["train_losses"]) == 2 * 3 and len(report["held_out_error"]) == 2
    assert (tmp_path / "graph_transformer.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    def reports(ours: float, dense: float, blind: float) -> list[dict]:
        return [{"held_out_error": [9.0, error]} for error in (ours, dense, blind)]

    assert graph_transformer.check(reports(0.3, 0.3, 0.9)) == 0
    assert graph_transformer.check(reports(0.4, 0.3, 0.9)) == 1
    assert graph_transformer.check(reports(0.8, 0.8, 0.9)) == 1
