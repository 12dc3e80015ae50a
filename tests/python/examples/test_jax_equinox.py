"""examples/jax_equinox.py: the program, on few molecules."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("equinox")
pytest.importorskip("optax")
pytest.importorskip("rdkit")


@pytest.mark.large
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_equinox

    monkeypatch.setattr(jax_equinox, "LAYERS", 1)  # each takes seconds to compile
    assert jax_equinox.main(["--molecules=90", "--epochs=1", "--atoms=8", f"--out={tmp_path}"]) == 0
    assert "The gradients are those of plain attention." in capsys.readouterr().out
    assert (tmp_path / "jax_equinox.png").stat().st_size > 1000
