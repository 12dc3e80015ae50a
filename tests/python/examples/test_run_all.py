"""All benchmarks at once: rows take turns, and what they find is merged."""

from __future__ import annotations

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
from harness import merging, turns

ROOT = Path(run_all.__file__).parent
TURN = """
import sys, time
from harness.turns import take_turn
take_turn()
print(time.time(), end=" ")
time.sleep(0.3)
take_turn()
print(time.time())
"""


def test_turns_begin_when_all_are_ready_and_take_one_at_a_time(tmp_path: Path) -> None:
    turn = turns.Turns(tmp_path / "turns")
    more = {turns.FOLDER: str(turn.folder), "PYTHONPATH": str(ROOT)}

    def start(gpu: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **more, "CUDA_VISIBLE_DEVICES": gpu}
        return subprocess.Popen([sys.executable, "-c", TURN], env=environment, stdout=subprocess.PIPE, text=True)

    running = [start(gpu) for gpu in "001"]
    while turn.ready() != {one.pid for one in running}:
        assert all(one.poll() is None for one in running)
        time.sleep(0.05)
    began = time.time()
    turn.begin()
    first, second, other = ([float(word) for word in one.communicate(timeout=60)[0].split()] for one in running)
    assert began < min(first[0], second[0], other[0])
    earlier, later = sorted((first, second))
    assert later[0] >= earlier[1]
    assert other[0] < later[0]  # another GPU's does not wait


def test_who_waits_for_a_turn_ends_with_its_parent(tmp_path: Path) -> None:
    turn = turns.Turns(tmp_path / "turns")
    environment = {**os.environ, turns.FOLDER: str(turn.folder), "PYTHONPATH": str(ROOT)}
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {TURN!r}], stderr=open('err', 'w'))"
    child += "; import time; time.sleep(1)"
    parent = subprocess.Popen([sys.executable, "-c", child], env=environment, cwd=tmp_path)
    while not turn.ready():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 30
    while "run_all.py has ended" not in (tmp_path / "err").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_no_turn_is_taken_alone() -> None:
    assert turns.FOLDER not in os.environ
    turns.take_turn()


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
