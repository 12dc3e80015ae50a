"""The server of an implementation: imports it once, and forks a process for each command."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.fx.experimental.symbolic_shapes

from .adapter import find
from .case import CASES, run
from .verdict import Verdict

_LINE = 4000  # what a pipe takes at once, so that processes may share one


@dataclass
class Server:
    pid: int
    commands: int


def tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def start(name: str, device: str, results: int, folder: Path) -> Server:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            _serve(name, device, reading, results, folder)
        except BaseException as error:  # nothing above may run in this process
            print(f"conformance: the server of {name} failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(0)
    os.close(reading)
    return Server(pid, writing)


def _send(results: int, message: dict[str, Any]) -> None:
    line = (json.dumps(message) + "\n").encode()
    if len(line) > _LINE:
        message["result"]["detail"] = message["result"]["detail"][:200]
        line = (json.dumps(message) + "\n").encode()
    os.write(results, line)


def _serve(name: str, device: str, commands: int, results: int, folder: Path) -> None:
    """Forks a process for every command until there are no more."""
    if device == "cuda":
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() leaves the fork alone
    torch._inductor.config.compile_threads = 1  # a pool for each of the processes would be too many
    reason, early = _probe(name, device, folder)
    adapter = find(name) if not reason else None
    if early and adapter is not None:
        _load(adapter)
    children: dict[int, int] = {}
    rest = b""
    closed = False
    while not closed or children:
        if not closed and select.select([commands], [], [], 0.01)[0]:
            data = os.read(commands, 1 << 16)
            closed = not data
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if reason:
                    _send(results, {"job": command["job"], "kind": "absent", "reason": reason[:300]})
                    continue
                log = folder / f"{name.replace('/', '_')}-{command['job']}"
                pid = _fork(lambda: _child(adapter, early, command, device, results), log)  # noqa: B023
                children[pid] = command["job"]
                _send(results, {"job": command["job"], "kind": "forked", "pid": pid})
        if children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                _send(results, {"job": children.pop(pid), "kind": "exited", "status": status})
            elif closed:
                time.sleep(0.01)


def _load(adapter: Any) -> None:
    load = getattr(adapter, "load", None)
    if load is not None:
        load()


def _fork(function: Callable[[], None], log: Path | None = None) -> int:
    """A process that runs the function, without core dumps, and whose output goes to the log."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        place = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(place, 1)
        os.dup2(place, 2)
        function()
        status = 0
    except BaseException as error:  # the process ends here whatever happened
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _probe(name: str, device: str, folder: Path) -> tuple[str, bool]:
    """Why an implementation cannot be imported, or '', and whether processes may be forked after its import."""
    log = folder / f"{name.replace('/', '_')}-probe"

    def attempt() -> None:
        adapter = find(name)
        if device not in getattr(adapter, "devices", ("cpu", "cuda")):
            raise RuntimeError(f"the implementation is not for {device}")
        _load(adapter)
        if device == "cuda":
            pid = _fork(_needs_cuda)
            if os.waitpid(pid, 0)[1] != 0:
                os._exit(7)

    status = os.waitstatus_to_exitcode(os.waitpid(_fork(attempt, log), 0)[1])
    return (tail(log) or f"the import ended with status {status}") if status not in (0, 7) else "", status == 0


def _needs_cuda() -> None:
    torch.cuda.init()


def _child(adapter: Any, loaded: bool, command: dict[str, Any], device: str, results: int) -> None:
    torch.set_num_threads(1)
    job = command["job"]
    if not loaded:
        _load(adapter)
    for key in command["cases"]:
        _send(results, {"job": job, "kind": "started", "case": key})
        result = run(adapter, CASES[key], device)
        _send(results, {"job": job, "kind": "result", "result": asdict(result)})
        if result.verdict not in (Verdict.RIGHT, Verdict.NOT_OFFERED):
            return  # the next starts in a fresh process
        torch._dynamo.reset()
