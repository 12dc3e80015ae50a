"""Want of memory at every allocation, and faults of files and threads: after each an error with a name, nothing lost
without a word, and the next call right. What is failed and how often: docs/design/faults.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import faults
import pytest
import reliability_table
from needs import has_nvrtc
from support import DEVICES, SUPPORT

pytestmark = pytest.mark.skipif(faults.compiler() is None, reason="faults.cpp needs a C++ compiler")

OPS = ["cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd", "flex_attention"]
KINDS = {"cpu": ["tensor", "host"], "cuda": ["device", "host"]}


@pytest.fixture(scope="module")
def swept() -> dict[str, list[dict[str, Any]]]:
    return {device: reliability_table.run(device, KINDS[device]) for device in DEVICES}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device,kind", [(device, kind) for device in DEVICES for kind in KINDS[device]])
def test_out_of_memory_at_every_allocation(swept, device: str, kind: str, op: str) -> None:
    rows = [r for r in swept[device] if r["op"] == op and r["memory"] == kind]
    assert {r["call"] for r in rows} == {"functional", "in place"}
    for row in rows:
        assert not row["wrong"], (row["what"], row["call"], row["wrong"][:5])
        outside = row["outcomes"].get("error, outside the op", 0)
        assert outside <= 8 if kind == "host" else not outside
        failed = sum(row["outcomes"].get(k, 0) for k in ("error", "went on")) + outside
        assert failed == row["forward"] + row["backward"] - row["outcomes"].get("did not come to it", 0)
        # Flex attention in place takes two tensors on the CPU: its kernels' own memory is the host's.
        assert row["outcomes"]["error"] >= 2


@pytest.mark.parametrize("device", DEVICES)
def test_contents_are_lost_in_place_alone_and_told(swept, device: str) -> None:
    lost = {r["call"] for r in swept[device] if r["outcomes"].get("contents lost")}
    assert lost == {"in place"}


# --- files and threads ----------------------------------------------------------------------------------------

FAULTY = """
import errno, json, os, pathlib, shutil
import faults
from fusegrad import _C

jit, given = _C.jit, faults.Faults()
folder = pathlib.Path(os.environ["FUSEGRAD_CACHE_DIR"])
log = os.open(str(folder.parent / "log"), os.O_RDWR | os.O_CREAT)
os.dup2(log, 2)  # warnings are written there
program = jit.Program('extern "C" __global__ void probe(float* x) { x[threadIdx.x] *= 2; }', "90a", name="probe")
truth = jit.compile(program)
found = {}

def attempt(begin, nth, error):
    begin()
    jit.forget()
    os.ftruncate(log, 0)
    with given.failing(faults.FILE, nth, error):
        right = jit.compile(program) == truth
    told = os.pread(log, 1 << 20, 0).count(b"compiled kernels are not kept")
    jit.forget()
    again = jit.compile(program) == truth  # whatever was left in the folder
    return right, again, told, given.count, given.failed

folders = iter(range(10**6))

def cold():
    # That a folder was told of is remembered: each attempt has one of its own.
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["FUSEGRAD_CACHE_DIR"] = str(folder / str(next(folders)))

def warm():
    cold()
    jit.forget()
    jit.compile(program)

for name, begin in (("store", cold), ("load", warm)):
    count = attempt(begin, 0, 0)[3]
    tried = [attempt(begin, n, e) for e in (errno.ENOSPC, errno.EIO, errno.EROFS) for n in range(1, count + 1)]
    found[name] = {
        "count": count,
        "failed": sum(t[4] for t in tried),
        "right": all(t[0] and t[1] for t in tried),
        "most warnings": max(t[2] for t in tried),
        "warnings": sum(t[2] for t in tried),
    }

warm()
found["command"] = []
for call in (jit.cache_info, jit.cache_clear):
    with given.failing(faults.FILE, 0):
        call()
    for n in range(1, given.count + 1):
        jit.forget()
        jit.compile(program)
        with given.failing(faults.FILE, n, errno.EIO):
            try:
                call()
            except RuntimeError as error:
                found["command"].append("Input/output error" in str(error))
            else:
                found["command"].append(False)

cold()
jit.forget()
with given.failing(faults.THREAD, 1):
    found["threads"] = [jit.compile(program) == truth]
found["threads"].append(given.failed)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> dict[str, Any]:
    """What a process found in which calls of the cache of kernels fail, each in turn."""
    if not has_nvrtc():
        pytest.skip("NVRTC was not found")
    folder = tmp_path_factory.mktemp("faulty")
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", FAULTY],
        env={
            **faults.environment(faults.build(folder)),
            "FUSEGRAD_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = folder / "log"
    assert done.returncode == 0, log.read_text()[-3000:] if log.exists() else done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["store", "load"])
def test_every_system_call_of_the_cache_fails_in_turn(faulty, name: str) -> None:
    found = faulty[name]
    assert found["count"] >= 3 and found["failed"] == 3 * found["count"]
    assert found["right"] and found["most warnings"] <= 1, found
    assert name == "load" or found["warnings"] >= 6  # a store that fails is told


def test_the_cache_command_tells_what_failed(faulty) -> None:
    assert len(faulty["command"]) >= 5 and all(faulty["command"]), faulty


def test_no_more_threads_can_be_had(faulty) -> None:
    assert faulty["threads"] == [True, True]
