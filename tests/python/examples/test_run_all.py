"""All benchmarks at once: rows take turns, and what they find is merged."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_all
import torch
from harness import merging, timing, turns

ROOT = Path(run_all.__file__).parent
TIMED = """
import pathlib, sys, time
from harness.turns import take_turn
took = []
for _ in range(2):
    take_turn()
    took.append(time.time())
    time.sleep(0.3)
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, took)))
"""


def wait_until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_row_stops_until_its_turn(tmp_path: Path) -> None:
    environment = {**os.environ, turns.PARENT: str(os.getpid()), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", TIMED, tmp_path / "took"], env=environment)
    wait_until(lambda: turns.waits(child.pid))
    before = time.time()
    turns.give(child.pid)
    assert not turns.waits(child.pid)
    assert child.wait(timeout=60) == 0
    assert before <= min(map(float, (tmp_path / "took").read_text().split()))


def test_rows_of_a_wave_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timed.py").write_text(TIMED)
    (tmp_path / "late.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setitem(run_all.ENVIRONMENT, "PYTHONPATH", str(ROOT))
    options = argparse.Namespace(device="cuda", commit=None, output=None, patience=3)
    runner = run_all.Runner(options, [], tmp_path)
    job = {name: run_all.Job("timed", name, (str(tmp_path / f"took-{name}"),)) for name in "abc"}
    runner.wave(run_all.Wave({"0": [job["a"], job["b"], run_all.Job("late", "d")], "1": [job["c"]]}))
    assert runner.failed == ["late d: did not compile in 3 s"]
    a, b, c = ([float(word) for word in (tmp_path / f"took-{name}").read_text().split()] for name in "abc")
    earlier, later = sorted((a, b))
    assert later[0] > earlier[1]
    assert c[0] < later[0]  # another GPU's does not wait


def test_who_waits_for_a_turn_dies_with_its_parent(tmp_path: Path) -> None:
    child = f"""
import os, subprocess, sys, time
import run_all
from harness import turns
environment = dict(os.environ) | {{turns.PARENT: str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {TIMED!r}], env=environment, preexec_fn=run_all.die_with_parent)
while not turns.waits(child.pid):
    time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", child], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def ended() -> bool:
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(") ")[2].startswith("Z")

    wait_until(ended)


def test_no_turn_is_taken_alone() -> None:
    assert turns.PARENT not in os.environ
    turns.take_turn()


def test_a_gpu_idles_equally_long_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    idle: dict[str, set[float]] = {"quick": set(), "slow": set(), "floor": set()}

    class Step(timing.Repeated):
        def __init__(self, name: str, seconds: float) -> None:
            super().__init__(lambda: time.sleep(seconds))
            self.name = name

    def median(step: Step, reps: int, host_s: float) -> float:
        idle[step.name].add(host_s)
        return 1.0

    monkeypatch.setattr(timing, "_cuda_median", median)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps: dict[str, timing.Timed] = {"quick": Step("quick", 0.0), "slow": Step("slow", 0.02)}
    times, _ = timing.alternate(steps, Step("floor", 0.0), "cuda", 2, 1)  # type: ignore[arg-type]
    assert times["quick"].ms == 1.0
    (host_s,) = idle["quick"]
    assert host_s >= 0.02 and idle["slow"] == idle["floor"] == {host_s}


def document(commit: str, date: str, **cases: dict[str, float]) -> dict[str, Any]:
    return {
        "op": "some",
        "commit": commit,
        "date": date,
        "versions": {"torch": commit},
        "cases": [{"row": row, "ms": ms} for row, ms in cases.items()],
        "extra": {"first call": {"value": len(commit)}},
    }


def test_merge() -> None:
    old = document("old", "2026-01-01T01", a={"ours": 1.0, "peer": 2.0}, b={"ours": 3.0}, c={"ours": 4.0})
    new = document("newer", "2026-01-02T02", a={"ours": 0.5})
    merged, lost = merging.merge(old, new)
    assert lost == ["a: peer"]
    assert (merged["commit"], merged["date"], merged["versions"]) == ("old", "2026-01-01T01", {"torch": "old"})
    assert merged["cases"] == [
        {"row": "a", "ms": {"ours": 0.5}, "commit": "newer", "date": "2026-01-02T02"},
        {"row": "b", "ms": {"ours": 3.0}},
        {"row": "c", "ms": {"ours": 4.0}},
    ]
    assert merged["extra"] == {"first call": {"value": 5, "commit": "newer", "date": "2026-01-02T02"}}

    more = document("newer", "2026-01-03T03", c={"ours": 5.0}, d={"ours": 6.0})
    again, lost = merging.merge(merged, more)
    assert lost == []
    assert (again["commit"], again["date"], again["versions"]) == ("newer", "2026-01-03T03", {"torch": "newer"})
    assert again["cases"] == [
        {"row": "a", "ms": {"ours": 0.5}},
        {"row": "b", "ms": {"ours": 3.0}, "commit": "old", "date": "2026-01-01T01"},
        {"row": "c", "ms": {"ours": 5.0}},
        {"row": "d", "ms": {"ours": 6.0}},
    ]
    assert again["extra"] == {"first call": {"value": 5}}
    assert merging.merge(None, new) == (new, [])
    assert merged["cases"][1] == {"row": "b", "ms": {"ours": 3.0}}  # inputs are as they were


def test_recorded_results_merge_with_themselves() -> None:
    paths = sorted((ROOT / "results").glob("*.json"))
    assert len(paths) > 20
    for path in paths:
        recorded = json.loads(path.read_text())
        if "cases" not in recorded or path.name.startswith("conformance"):
            continue
        keys = [merging.key_of(case) for case in recorded["cases"]]
        assert len(set(keys)) == len(keys), path
        merged, lost = merging.merge(recorded, recorded)
        assert lost == []
        assert [merging.key_of(case) for case in merged["cases"]] == keys


def test_waves_share_gpus_and_hold_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "HOLDS", {"^train_step ": 13})  # two of them are too many for a GPU
    jobs = [run_all.Job("train_step", str(i)) for i in range(3)] + [run_all.Job("jsd", str(i)) for i in range(24)]
    found = run_all.waves(jobs, ["0", "1"], 24)
    assert [job for wave in found for gpu in "01" for job in wave.by_gpu.get(gpu, [])] != []
    assert sorted(job.name for wave in found for all_ in wave.by_gpu.values() for job in all_) == sorted(
        job.name for job in jobs
    )
    for wave in found:
        for all_ in wave.by_gpu.values():
            assert sum(job.holds for job in all_) <= 24
    assert [len(wave.by_gpu.get(gpu, [])) for wave in found for gpu in "01"] == [12, 12, 1, 2]


@pytest.mark.parametrize(
    "devices, asked, taken",
    [
        (None, "1", ["1"]),
        ("", "0", ["0"]),
        ("1", "0", ["1"]),
        ("2, 3", "0,1", ["2", "3"]),
        ("GPU-a,GPU-b", "1", ["GPU-b"]),
    ],
)
def test_gpus_are_visible_ones(
    monkeypatch: pytest.MonkeyPatch, devices: str | None, asked: str, taken: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert run_all.visible(asked.split(",")) == taken


def test_gpus_that_are_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(ValueError, match="below 1, the number of CUDA_VISIBLE_DEVICES, but got 1"):
        run_all.visible(["0", "1"])


Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Of one script alone: to import all of them takes seconds."""
    for name, scripts in {"OF_CASES": (), "OF_ROWS": ("transforms",), "ALONE": (), "ALL_GPUS": ()}.items():
        monkeypatch.setattr(run_all, name, scripts)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run_all.py", "--device", "cpu", "--commit", "none", *arguments])
        return run_all.main()

    return call


def test_names_of_jobs() -> None:
    rows = {("jsd", "jsd N8"): "jsd N8", ("train_step", "siglip step B2"): "train_step siglip step B2"}
    rows |= {("host_time", ""): "host_time", ("linear_jsd", "jsd N8"): "linear_jsd jsd N8"}
    assert {of: run_all.Job(*of).name for of in rows} == rows


def test_results_of_a_row(run: Run, tmp_path: Path) -> None:
    assert run("--only", "^transforms jsd", "--rounds", "1", "--reps", "1", "--output", str(tmp_path)) == 0
    (path,) = tmp_path.glob("transforms-*.json")
    (case,) = json.loads(path.read_text())["cases"]
    assert case["row"] == "jsd (256, 4096)" and "fusegrad jvp" in case["ms"]


def test_what_fails_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "^transforms jsd", "--quick") == 1  # which the script has not
    out, err = capfd.readouterr()
    assert "unrecognized arguments: --quick" in out and "FAILED: transforms jsd (256, 4096): exit status 2" in err
    assert run("--only", "^transforms jsd", "--patience", "0") == 1
    assert "FAILED: transforms jsd (256, 4096): did not compile in 0 s" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        run("--only", "no such row")
    assert "--only: must match a benchmark" in capfd.readouterr().err
