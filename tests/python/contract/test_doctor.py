"""python -m fusegrad doctor: its report, and that it sees an op that is wrong or raises."""

from __future__ import annotations

from typing import Any

import fusegrad
import fusegrad.__main__ as command
import pytest
import torch
from fusegrad import distillation, doctor, functional

OPS = ("cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd", "flex_attention")


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    said = dict(line.split(maxsplit=1) for line in printed.splitlines() if " " in line)
    assert said["fusegrad"].startswith(fusegrad.__version__) and said["torch"].startswith(torch.__version__)
    assert {"library", "built", "python", "cpu", "driver", "cache"} <= set(said)
    for op in OPS:
        assert said[f"{op},"].startswith("cpu") and " right: error " in said[f"{op},"]


def test_variables_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEGRAD_JIT_PROGRESS", "off")
    doctor.main()
    assert "FUSEGRAD_JIT_PROGRESS off" in capsys.readouterr().out


def test_wrong_ops_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(*_: Any) -> None:
        raise RuntimeError("planted")

    right = functional.cross_entropy
    # The value is right, the gradient is not.
    monkeypatch.setattr(functional, "cross_entropy", lambda z, t: right(z.detach() * 2 - z, t) * 1.0)
    monkeypatch.setattr(distillation, "jsd", lambda z, _: z.mean() * float("nan"))
    monkeypatch.setattr(distillation, "linear_jsd", raises)
    assert doctor.main() == 1
    out, err = capsys.readouterr()
    found = {line.split(",")[0]: line for line in out.splitlines() if ", cpu " in line}
    assert "WRONG: error" in found["cross_entropy"] and "WRONG: error nan" in found["jsd"]
    assert "raises RuntimeError: planted" in found["linear_jsd"] and " right:" in found["flex_attention"]
    assert err == "NOT all ops are right\n"


@pytest.mark.parametrize(
    "architecture, capability, runs",
    [
        ("80", (8, 6), True),
        ("80", (9, 0), False),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("120", (12, 0), True),
    ],
)
def test_architectures(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert doctor._runs(architecture, capability) == runs
