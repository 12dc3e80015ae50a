"""Compilation at run time and the cache of kernels, as Python and the command line see them; no GPU is needed.

What happens to the folder behind the library's back is tested in tests/cpp/test_jit_cache.cpp and _processes.cpp.
"""

import os
import pathlib
import subprocess
import sys

import fusegrad.__main__ as command
import pytest
from fusegrad import _C
from needs import needs_nvrtc
from support import ROOT

jit = _C.jit
SOURCE = """
#include "cuda/device/score_mod.cuh"
extern "C" __global__ void probe(float* x) { x[threadIdx.x] = fusegrad::device::score_mod::gelu(x[threadIdx.x]); }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    for name in list(os.environ):
        if name.startswith(("FUSEGRAD_JIT", "FUSEGRAD_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    jit.forget()
    return tmp_path / "cache"


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    code = f"from fusegrad import _C\njit = _C.jit\nSOURCE = {SOURCE!r}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


@needs_nvrtc
def test_compiles_and_keeps(folder) -> None:
    before = jit.stats()
    cubin = jit.compile(jit.Program(SOURCE, "90a", name="probe"))
    assert cubin[:4] == b"\x7fELF" and b"probe" in cubin
    assert jit.compile(jit.Program(SOURCE, "90a", name="probe")) == cubin
    jit.forget()
    assert jit.compile(jit.Program(SOURCE, "90a", name="probe")) == cubin
    after = jit.stats()
    assert {k: after[k] - before[k] for k in after} == {
        "compilations": 1,
        "memory_hits": 1,
        "disk_hits": 1,
        "rejected": 0,
    }
    assert jit.compile(jit.Program(SOURCE, "80", name="probe")) != cubin
    assert len(list(folder.iterdir())) == 2
    found = jit.resources(jit.Program(SOURCE, "90a"))["probe"]
    assert 0 < found["registers"] <= 32 and found["spill_store_bytes"] == 0


@needs_nvrtc
def test_another_process_finds_it() -> None:
    cubin = jit.compile(jit.Program(SOURCE, "86", name="probe"))
    done = in_new_process(
        "cubin = jit.compile(jit.Program(SOURCE, '86', name='probe'))\n"
        "print(jit.stats()['compilations'], jit.stats()['disk_hits'], cubin.hex())"
    )
    assert done.stdout.split() == ["0", "1", cubin.hex()], done.stderr


@needs_nvrtc
def test_errors_name_what_was_compiled(folder) -> None:
    program = jit.Program("nonsense", "90a", name="flex_forward", score_mod="score_mod 1\nreturn score\n")
    with pytest.raises(RuntimeError) as raised:
        jit.compile(program)
    message = str(raised.value)
    (kept,) = folder.iterdir()
    for part in ("flex_forward was not compiled for sm_90a", "return score", f"source: {kept}", "log:\n"):
        assert part in message
    with pytest.raises(ValueError, match="the architecture must be one such as '80' or '90a', but got 'sm_80'"):
        jit.compile(jit.Program(SOURCE, "sm_80"))


def test_missing_nvrtc_is_named() -> None:
    done = in_new_process("jit.compile(jit.Program(SOURCE, '80'))", FUSEGRAD_NVRTC="/nowhere/libnvrtc.so.13")
    assert done.returncode != 0
    assert "NVRTC, which must be installed, but was not found:\n  /nowhere/libnvrtc.so.13: cannot open" in done.stderr
    assert "FUSEGRAD_NVRTC=/path" in done.stderr and "Exception raised from" not in done.stderr
    # A library that is not NVRTC.
    done = in_new_process("jit.compile(jit.Program(SOURCE, '80'))", FUSEGRAD_NVRTC="libm.so.6")
    assert "libm.so.6: not NVRTC of CUDA 12 or later" in done.stderr


def test_headers_are_the_files() -> None:
    root = ROOT / "csrc"
    headers = jit.headers()
    assert "cuda/device/score_mod.cuh" in headers

    def code(text: str) -> list[str]:
        return [line for line in (line.split("//")[0].rstrip() for line in text.splitlines()) if line]

    for name, text in headers.items():
        assert "//" not in text
        assert code(text) == code((root / ("jit/cstdint.h" if name == "cstdint" else name)).read_text())


def test_command_line(folder, capsys, monkeypatch) -> None:
    assert command.main(["cache", "info"]) == 0
    assert f"folder   {folder}\nkernels  0\nsize     0.0 KiB (limit 512.0 MiB)\n" == capsys.readouterr().out
    folder.mkdir(mode=0o700)
    for architecture, size in (("80", 1024), ("90a", 2048), ("90a", 1024)):
        (folder / f"{size:064x}.sm_{architecture}.cubin").write_bytes(bytes(size))
    (folder / "failed-x.cu").write_text("x")
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setenv("FUSEGRAD_CACHE_LIMIT_MIB", "7")
    assert command.main(["cache", "info"]) == 0
    out = capsys.readouterr().out
    for line in ("kernels  3", "(limit 7.0 MiB)", "sm_80    1 files, 1.0 KiB", "sm_90a   2 files, 3.0 KiB"):
        assert line in out
    assert "other    1 files" in out
    assert command.main(["cache", "clear"]) == 0
    assert "removed 4 files" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    monkeypatch.setenv("FUSEGRAD_CACHE_LIMIT_MIB", "0")
    assert command.main(["cache", "info"]) == 0
    assert "the cache is off" in capsys.readouterr().out


def test_command_line_errors(folder, capsys, monkeypatch) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    for action in ("info", "clear"):
        assert command.main(["cache", action]) == 1
        assert "no other user may write to it, but its mode is 0777" in capsys.readouterr().err
    monkeypatch.setenv("FUSEGRAD_CACHE_LIMIT_MIB", "many")
    assert command.main(["cache", "info"]) == 1
    err = capsys.readouterr().err
    assert err == ("jit: FUSEGRAD_CACHE_LIMIT_MIB must be a whole number of MiB, 0 or more, but got 'many'\n")
    with pytest.raises(SystemExit):
        command.main(["cache"])


def test_module_runs(folder) -> None:
    done = subprocess.run([sys.executable, "-m", "fusegrad", "cache", "info"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"folder   {folder}" in done.stdout


@needs_nvrtc
def test_flags_of_the_environment_are_blamed(monkeypatch) -> None:
    monkeypatch.setenv("FUSEGRAD_JIT_FLAGS", "--nonsense")
    with pytest.raises(RuntimeError, match=r"FUSEGRAD_JIT_FLAGS must hold flags .*, but got '--nonsense'"):
        jit.compile(jit.Program(SOURCE, "90a", name="probe"))
