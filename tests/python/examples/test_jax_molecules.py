"""examples/jax_molecules.py: the program, on few molecules."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("rdkit")


@pytest.mark.large
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jax_molecules

    assert jax_molecules.main(["--molecules=100", "--epochs=1", "--atoms=8", f"--out={tmp_path}"]) == 0
    assert "The gradients are those of plain attention." in capsys.readouterr().out
    assert (tmp_path / "jax_molecules.png").stat().st_size > 1000
