"""examples/train_lm.py --distributed, under torchrun with four processes: the steps of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

# First: it makes `lm` importable.
from lm_support import VOCAB_SIZE, command_line, isolated, run_steps, write_text  # isort: skip

import train_lm
from distributed_lm_worker import ALONE, CASES, LOSS, PROCESSES, STEPS
from lm import data
from lm.training import Trainer, read_checkpoint
from support import SUPPORT

WORKER = SUPPORT / "distributed_lm_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the processes, and one alone, left their results."""
    folder = tmp_path_factory.mktemp("distributed")
    text = write_text(tmp_path_factory.mktemp("text"))
    corpus = data.load_corpus(text, VOCAB_SIZE, folder / "cache")
    with isolated():
        for name, config in ALONE.items():
            trainer = run_steps(Trainer(config, corpus), STEPS, folder / f"one, {name}.pt")
            (folder / f"one, {name}.json").write_text(json.dumps([trainer.history.losses, trainer.held_out_loss()]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([*torchrun, WORKER, text, folder], env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    (folder / "printed").write_text(run.stdout)
    yield folder


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(folder: Path, name: str) -> None:
    losses, held_out = json.loads((folder / f"{name}.json").read_text())
    alone = f"one, {CASES[name][0]}"
    expected, expected_held_out = json.loads((folder / f"{alone}.json").read_text())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert held_out == pytest.approx(expected_held_out, rel=1e-5)
    ours, one = read_checkpoint(folder / f"{name}.pt"), read_checkpoint(folder / f"{alone}.pt")
    assert ours["config"] == one["config"] and ours["model"].keys() == one["model"].keys()
    # Adam's steps are of one size however small a gradient is: rounding decides some.
    for parameter, value in one["model"].items():
        torch.testing.assert_close(ours["model"][parameter], value, rtol=0, atol=2e-3)
    for index, state in one["optimizer"]["state"].items():
        for part, value in state.items():
            torch.testing.assert_close(ours["optimizer"]["state"][index][part], value, rtol=1e-3, atol=1e-6)


def test_one_process_prints_and_writes(folder: Path) -> None:
    printed = (folder / "printed").read_text()
    assert printed.count("held-out loss") == 1 and printed.count("sample:") == 1
    assert (folder / "out" / f"{LOSS}.json").exists() and (folder / "out" / f"{LOSS}.pt").exists()


def test_options_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.mkdir()
    arguments = command_line(write_text(text), tmp_path, "--distributed=ddp")
    assert train_lm.main(arguments) == 2 and "needs torchrun" in capsys.readouterr().err
    assert train_lm.main([*arguments, "--demo"]) == 2 and "without --distributed" in capsys.readouterr().err
    arguments = command_line(text, tmp_path, "--context-parallel=2")
    assert train_lm.main(arguments) == 2 and "needs --distributed" in capsys.readouterr().err
