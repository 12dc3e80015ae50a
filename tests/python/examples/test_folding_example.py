"""examples/folding.py: both attentions, the structures, and the program; benchmarks/folding.py beside its peers."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from harness import folding as harness
from protein.data import BINS, UNKNOWN, WIDTH, Batch, Chain, crop, load_chains, read_cif
from protein.model import ATTENTIONS, Trunk, loss_of
from support import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
PROGRAM = runpy.run_path(str(ROOT / "examples/folding.py"))  # benchmarks/folding.py has the same name


def random_chain(n: int) -> Chain:
    return Chain("random", torch.randint(UNKNOWN, (n,)), torch.randn(n, 3).cumsum(0) * 3)


def batch() -> Batch:
    torch.manual_seed(0)
    return crop([random_chain(15), random_chain(9)], 3, 12, 0.2, torch.Generator().manual_seed(0))


CIF = """
loop_
_atom_site.group_PDB
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.pdbx_PDB_model_num
ATOM N  . GLY A 0.0 0.0 0.0 1
ATOM CA . GLY A 1.0 2.0 3.0 1
ATOM CA A ALA A 4.5 2.0 3.0 1
ATOM CA B ALA A 9.5 9.0 9.0 1
ATOM CA . MSE B 0.5 0.0 0.0 1
ATOM CA . GLY A 7.0 7.0 7.0 2
"""


def test_what_a_file_has() -> None:
    first, second = read_cif("1abc", CIF)
    assert first.kinds.tolist() == [7, 0] and second.kinds.tolist() == [UNKNOWN]
    assert first.places.tolist() == [[1.0, 2.0, 3.0], [4.5, 2.0, 3.0]]


def test_what_a_crop_has() -> None:
    crops = batch()
    assert crops.given.shape == crops.distances.shape == (3, 12, 12)
    told = crops.given != BINS
    assert torch.equal(crops.given[told], crops.distances[told]) and torch.equal(told, told.mT) and told.any()
    assert not (crops.pairs & told).any() and not crops.pairs[~crops.there].any()
    assert not crops.pairs.diagonal(2, 1, 2).any() and crops.pairs.any()


def test_both_attentions_give_the_same_gradients() -> None:
    crops = batch()
    model = Trunk(blocks=2, width=12, heads=3).double()
    results = []
    for attentions in ATTENTIONS.values():
        model.zero_grad()
        logits = model(crops, attentions)
        loss_of(logits, crops).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert len(grads) == len(list(model.parameters())) and all(g.isfinite().all() for g in grads)
        results.append([logits.detach()[crops.pairs], *grads])
    for ours, dense in zip(*results, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-11)
    assert all(block.triangles[0].bias.weight.grad.abs().max() > 0 for block in model.blocks)


def test_the_structures() -> None:
    try:
        chains = load_chains(28)
    except ImportError:
        pytest.skip("openfold3 is not installed")
    assert len(chains) >= 10
    ubiquitin = next(c for c in chains if c.name == "1ubq")
    assert len(ubiquitin.kinds) == 76
    steps = (ubiquitin.places[1:] - ubiquitin.places[:-1]).norm(dim=1)
    assert ((steps > 3.6) & (steps < 4.0)).all()  # alpha carbons of neighbours are 3.8 Å apart


def test_the_program(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    try:
        load_chains(28)
    except ImportError:
        pytest.skip("openfold3 is not installed")
    sizes = ["--residues=12", "--steps=4", "--batch-size=2", "--blocks=1", "--width=6", "--heads=2"]
    assert PROGRAM["main"]([*sizes, "--attention=fusegrad", f"--out={tmp_path}"]) == 0
    (report,) = json.loads((tmp_path / "folding.json").read_text())
    assert len(report["train_losses"]) == 4 and 0 < report["error"][-1] < BINS * WIDTH
    assert (tmp_path / "folding.png").stat().st_size > 1000


def test_the_check_fails_where_it_should() -> None:
    def reports(ours: float, dense: float, blind: float) -> list[dict]:
        return [{"error": [9.0, off]} for off in (ours, dense, blind)]

    assert PROGRAM["check"](reports(2.0, 2.0, 3.0)) == 0
    assert PROGRAM["check"](reports(2.5, 2.0, 3.0)) == 1
    assert PROGRAM["check"](reports(2.5, 2.5, 3.0)) == 1


@pytest.mark.cpu_only
def test_the_benchmarks_peers_agree() -> None:
    given = harness.problem(9, 2, 8, torch.float32)
    right = harness.truth(given, rows=4)
    for make in (harness.ours, harness.sdpa, harness.formula):
        found = harness.errors(make(given), given, right)
        assert max(found.values()) < 1e-5, (make.__name__, found)


@pytest.mark.cpu_only
def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--device", "cpu", "--rows", "triangle 61|host", "--rounds", "1", "--reps", "1", "--commit", "none"]
    monkeypatch.setattr(sys, "argv", ["folding.py", *options, "--output", str(tmp_path)])
    try:
        runpy.run_path(str(ROOT / "benchmarks/folding.py"), run_name="__main__")
    finally:
        torch.set_default_device(None)
    (path,) = tmp_path.glob("folding-*.json")
    triangle, host = json.loads(path.read_text())["cases"]
    assert set(triangle["errors"]) == {"fusegrad", "sdpa", "math"} and not triangle["failures"]
    assert host["host_us"]["fusegrad"] > 0
