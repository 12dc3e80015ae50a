"""Molecules as graphs, packed one behind the other.

The molecules are the first 5000 of the NCI Open Database, which RDKit's wheels ship; what is to be predicted is their
octanol-water partition coefficient, log P, as the fragment contributions of Wildman and Crippen (J. Chem. Inf. Comput.
Sci. 1999, 39, 868) give it. A contribution depends on an atom's neighbours, so a model that sees the elements alone
cannot learn it: the bonds must come in through the attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

# Bond types; 0: no bond.
BONDS = ("none", "single", "double", "triple", "aromatic")
# Distances in bonds: 0 is the atom itself, farther ones than the farthest count as that; the last is between parts of a
# molecule that hang together by no bond (salts).
MAX_DISTANCE = 16
DISTANCES = MAX_DISTANCE + 2
ELEMENTS = 119  # atomic numbers


@dataclass(frozen=True)
class Molecule:
    """A graph of n nodes, the heavy atoms."""

    elements: Tensor  # [n] int64
    distances: Tensor  # [n, n] uint8, below DISTANCES
    bonds: Tensor  # [n, n] uint8, below len(BONDS)
    label: float  # log P


@dataclass(frozen=True)
class Batch:
    """G molecules of S nodes in all, as one sequence.

    `distances` and `bonds` are the molecules' tables row by row, so that the entry of nodes i and j of one molecule is
    number `row_start[i] + j`: `row_start` has the position of the molecule's first node taken off.
    """

    elements: Tensor  # [S] int64
    molecule: Tensor  # [S] int64, ascending
    row_start: Tensor  # [S] int64
    distances: Tensor  # [sum of n * n] int64
    bonds: Tensor  # [sum of n * n] int64
    slot: Tensor  # [S] int64: the position among the molecule's own nodes
    labels: Tensor  # [G] float32

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def load_molecules(count: int = 5000, max_atoms: int = 40) -> list[Molecule]:
    """The first `count` molecules of RDKit's file that have a bond and at most `max_atoms` heavy atoms."""
    from rdkit import Chem, RDConfig, RDLogger

    RDLogger.DisableLog("rdApp.*")  # a few of the file's molecules break the rules of valence
    path = Path(RDConfig.RDDataDir) / "NCI" / "first_5K.smi"
    molecules = []
    for mol in Chem.SmilesMolSupplier(str(path), delimiter="\t", titleLine=False):
        if mol is not None and mol.GetNumBonds() > 0 and mol.GetNumAtoms() <= max_atoms:
            molecules.append(from_rdkit(mol))
        if len(molecules) == count:
            break
    return molecules


def from_rdkit(mol) -> Molecule:  # type: ignore[no-untyped-def]  # rdkit.Chem.Mol; RDKit may be absent
    from rdkit import Chem
    from rdkit.Chem import Crippen

    n = mol.GetNumAtoms()
    elements = torch.tensor([atom.GetAtomicNum() for atom in mol.GetAtoms()])
    apart = torch.from_numpy(Chem.GetDistanceMatrix(mol))  # of atoms that hang together by no bond: 1e8
    distances = torch.where(apart > n, DISTANCES - 1, apart.clamp(max=MAX_DISTANCE)).byte()
    bonds = torch.zeros(n, n, dtype=torch.uint8)
    types = {Chem.BondType.SINGLE: 1, Chem.BondType.DOUBLE: 2, Chem.BondType.TRIPLE: 3, Chem.BondType.AROMATIC: 4}
    for bond in mol.GetBonds():
        i, j = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        bonds[i, j] = bonds[j, i] = types.get(bond.GetBondType(), 1)
    return Molecule(elements, distances, bonds, Crippen.MolLogP(mol))


def pack(molecules: Sequence[Molecule]) -> Batch:
    sizes = torch.tensor([len(m.elements) for m in molecules])
    first = sizes.cumsum(0) - sizes
    table = (sizes * sizes).cumsum(0) - sizes * sizes
    molecule = torch.arange(len(molecules)).repeat_interleave(sizes)
    slot = torch.arange(int(sizes.sum())) - first[molecule]
    return Batch(
        elements=torch.cat([m.elements for m in molecules]),
        molecule=molecule,
        row_start=(table - first)[molecule] + slot * sizes[molecule],
        distances=torch.cat([m.distances.flatten() for m in molecules]).long(),
        bonds=torch.cat([m.bonds.flatten() for m in molecules]).long(),
        slot=slot,
        labels=torch.tensor([m.label for m in molecules]),
    )


def batches(molecules: Sequence[Molecule], size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
    """All molecules once, in an order drawn from `generator`, or in theirs."""
    order = range(len(molecules)) if generator is None else torch.randperm(len(molecules), generator=generator).tolist()
    for begin in range(0, len(order), size):
        yield pack([molecules[i] for i in order[begin : begin + size]])
