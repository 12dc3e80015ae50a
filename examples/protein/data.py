"""Chains of proteins from the structures that OpenFold 3's wheel ships for its tests, and crops of them as batches."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

AMINO_ACIDS = (
    "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split()  # noqa: SIM905
)
UNKNOWN = len(AMINO_ACIDS)
BINS, WIDTH = 16, 1.5  # of distances, in Å; the last one is all beyond


@dataclass
class Chain:
    """Attributes:
    name: of the structure.
    kinds: ``[n]``, of its residues.
    places: ``[n, 3]``, of their alpha carbons, in Å.
    """

    name: str
    kinds: Tensor
    places: Tensor


@dataclass
class Batch:
    """Crops, padded to the longest.

    Attributes:
        kinds: ``[B, n]``.
        given: ``[B, n, n]``, the distances that are known, in bins; BINS where none is.
        distances: ``[B, n, n]``, in bins.
        there: ``[B, n]``, bool: not padding.
    """

    kinds: Tensor
    given: Tensor
    distances: Tensor
    there: Tensor

    @property
    def pairs(self) -> Tensor:
        """Whose distances are asked for: residues that are there, more than two apart, not told."""
        n = self.kinds.shape[1]
        place = torch.arange(n, device=self.kinds.device)
        far = (place[:, None] - place).abs() > 2
        return self.there[:, :, None] & self.there[:, None] & far & (self.given == BINS)

    def to(self, device: str) -> Batch:
        return Batch(*(t.to(device) for t in (self.kinds, self.given, self.distances, self.there)))


def load_chains(least: int) -> list[Chain]:
    """All different chains of at least so many residues.

    Raises:
        ImportError: openfold3 is not installed.
    """
    spec = importlib.util.find_spec("openfold3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'openfold3'")
    folder = Path(spec.submodule_search_locations[0], "tests/test_data/mmcifs")
    chains, seen = [], set()
    for path in sorted(folder.glob("*.cif")):
        for chain in read_cif(path.stem, path.read_text()):
            sequence = tuple(chain.kinds.tolist())
            if len(sequence) >= least and sequence not in seen:
                seen.add(sequence)
                chains.append(chain)
    return chains


def read_cif(name: str, text: str) -> Iterator[Chain]:
    """The chains of the first model: their alpha carbons."""
    lines = iter(text.splitlines())
    columns = {
        line.split(".")[1].strip(): at
        for at, line in enumerate(
            itertools.takewhile(
                lambda line: line.startswith("_atom_site."),
                itertools.dropwhile(lambda line: not line.startswith("_atom_site."), lines),
            )
        )
    }
    rows = [line.split() for line in text.splitlines() if line.startswith("ATOM ")]

    def of(row: list[str], column: str) -> str:
        return row[columns[column]]

    atoms = [row for row in rows if of(row, "label_atom_id") == "CA" and of(row, "label_alt_id") in (".", "A")]
    first = of(atoms[0], "pdbx_PDB_model_num") if atoms else ""
    atoms = [row for row in atoms if of(row, "pdbx_PDB_model_num") == first]
    for _, group in itertools.groupby(atoms, key=lambda row: of(row, "label_asym_id")):
        residues = list(group)
        kinds = [of(row, "label_comp_id") for row in residues]
        places = [[float(of(row, f"Cartn_{axis}")) for axis in "xyz"] for row in residues]
        found = [AMINO_ACIDS.index(kind) if kind in AMINO_ACIDS else UNKNOWN for kind in kinds]
        yield Chain(name, torch.tensor(found), torch.tensor(places))


def crop(chains: list[Chain], count: int, length: int, share: float, generator: torch.Generator) -> Batch:
    """So many crops of up to `length` residues, of which a share of the distances is given."""

    def drawn(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    n = length
    kinds, there = torch.full((count, n), UNKNOWN), torch.zeros(count, n, dtype=torch.bool)
    places = torch.zeros(count, n, 3)
    for i in range(count):
        chain = chains[drawn(len(chains))]
        size = min(length - drawn(length // 3), len(chain.kinds))
        start = drawn(len(chain.kinds) - size + 1)
        kinds[i, :size], there[i, :size] = chain.kinds[start : start + size], True
        places[i, :size] = chain.places[start : start + size]
    distances = (torch.cdist(places, places) / WIDTH).long().clamp(max=BINS - 1)
    told = torch.rand(count, n, n, generator=generator).triu(1)
    told = (told > 1 - share) | (told > 1 - share).mT
    return Batch(kinds, torch.where(told, distances, BINS), distances, there)
