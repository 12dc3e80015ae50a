"""Runs cases in processes of their own.

A server is forked for each implementation, which imports it once and forks a process for each case, so that a start
costs milliseconds. Where the import initialises CUDA, which a fork does not survive, each process imports for itself.
On a GPU, where each process pays for a context, one process runs several cases for as long as they are right, and what
is not right is run again in a process of its own: that verdict counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .adapter import find
from .case import CASES, Case, Result, out_of_question
from .server import Server, start, tail
from .verdict import Verdict


@dataclass
class Job:
    """Cases that one process runs, one after the other."""

    implementation: str
    cases: list[str]
    pid: int = 0
    current: str = ""
    deadline: float = 0.0
    late: bool = False
    done: list[str] = field(default_factory=list)


def run_all(
    names: list[str],
    cases: list[Case],
    device: str,
    jobs: int,
    timeout: float,
    limit: float,
    together: int,
    report: Callable[[Result], None],
    known: Collection[tuple[str, str]] = (),
) -> None:
    """Each case with each implementation, `jobs` processes at a time; `together` cases in a process. What has no
    verdict after `limit` seconds is left out, and so is what is `known`."""
    with tempfile.TemporaryDirectory(prefix="fusegrad-conformance-") as folder:
        reading, writing = os.pipe()
        servers = {name: start(name, device, writing, Path(folder)) for name in names}
        try:
            planned = _planned(names, cases, device, report, known)
            _Run(servers, reading, Path(folder), timeout, limit, report).run(planned, jobs, together)
        finally:
            for server in servers.values():
                os.close(server.commands)
            for server in servers.values():  # which hold the pipes of those before them, until they end
                os.waitpid(server.pid, 0)
            os.close(reading)
            os.close(writing)


def _planned(
    names: list[str],
    cases: list[Case],
    device: str,
    report: Callable[[Result], None],
    known: Collection[tuple[str, str]],
) -> dict[str, list[Case]]:
    """The cases of each implementation that need a process; of the others the result is reported."""
    planned = {}
    for name in names:
        asked = [c for c in cases if (name, c.key) not in known]
        # Another's module is imported in its own processes alone.
        reasons = {c.key: "" if ":" in name else out_of_question(find(name), c, device) for c in asked}
        planned[name] = [c for c in asked if not reasons[c.key]]
        for key, reason in reasons.items():
            if reason:
                report(Result(name, key, Verdict.NOT_OFFERED, reason))
    return planned


class _Run:
    """The state of run_all: what waits, what runs, what came."""

    def __init__(
        self,
        servers: dict[str, Server],
        reading: int,
        folder: Path,
        timeout: float,
        limit: float,
        report: Callable[[Result], None],
    ) -> None:
        self.end = time.monotonic() + limit
        self.servers, self.reading, self.folder, self.timeout = servers, reading, folder, timeout
        self.report = report
        self.waiting: list[Job] = []
        self.heavy: list[Job] = []
        self.running: dict[int, Job] = {}
        self.absent: dict[str, str] = {}
        self.number = 0
        self.rest = b""

    def run(self, planned: dict[str, list[Case]], jobs: int, together: int) -> None:
        for name, cases in planned.items():
            light = [c.key for c in cases if not c.heavy]
            self.waiting += [Job(name, light[i : i + together]) for i in range(0, len(light), together)]
            self.heavy += [Job(name, [c.key]) for c in cases if c.heavy]
        while self.waiting or self.running or self.heavy:
            while self.waiting and len(self.running) < jobs:
                self._start(self.waiting.pop(0))
            if self.heavy and not self.waiting and len(self.running) < 2:
                self._start(self.heavy.pop(0))
            for message in self._messages(0.05):
                self._handle(message)
            for job in self.running.values():
                if job.pid and job.deadline and time.monotonic() > job.deadline and not job.late:
                    job.late = True
                    _kill(job.pid)
            if time.monotonic() > self.end:
                for job in self.running.values():
                    if job.pid:
                        _kill(job.pid)
                return

    def _start(self, job: Job) -> None:
        self.number += 1
        self.running[self.number] = job
        line = json.dumps({"job": self.number, "cases": job.cases}) + "\n"
        os.write(self.servers[job.implementation].commands, line.encode())

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        if not select.select([self.reading], [], [], seconds)[0]:
            return
        *lines, self.rest = (self.rest + os.read(self.reading, 1 << 16)).split(b"\n")
        yield from map(json.loads, lines)

    def _handle(self, message: dict[str, Any]) -> None:
        number = message["job"]
        job = self.running[number]
        kind = message["kind"]
        if kind == "forked":
            job.pid = message["pid"]
        elif kind == "absent":
            self._absent(number, job, message["reason"])
        elif kind == "started":
            job.current, job.deadline = message["case"], time.monotonic() + self.timeout
        elif kind == "result":
            self._result(job, Result(**{**message["result"], "verdict": Verdict(message["result"]["verdict"])}))
        elif kind == "exited":
            self._exited(number, job, message["status"])

    def _absent(self, number: int, job: Job, reason: str) -> None:
        del self.running[number]
        for key in job.cases:
            self._give(Result(job.implementation, key, Verdict.NOT_OFFERED, reason))

    def _result(self, job: Job, result: Result) -> None:
        job.done.append(result.key)
        job.deadline = 0.0
        alone = len(job.cases) == 1
        if alone or result.verdict in (Verdict.RIGHT, Verdict.NOT_OFFERED):
            self._give(result)
        else:
            self.waiting.append(Job(job.implementation, [result.key]))

    def _give(self, result: Result) -> None:
        self.report(result)

    def _exited(self, number: int, job: Job, status: int) -> None:
        del self.running[number]
        log = self.folder / f"{job.implementation.replace('/', '_')}-{number}"
        left = [key for key in job.cases if key not in job.done]
        if (left and job.current == left[0]) or (left and status != 0):
            broken = left.pop(0)
            if len(job.cases) > 1:
                self.waiting.append(Job(job.implementation, [broken]))
            else:
                why = f"no end after {self.timeout:.0f} s" if job.late else _status(status)
                detail = f"{why}: {tail(log)}" if tail(log) else why
                allowed = CASES[broken].may_raise
                self._give(Result(job.implementation, broken, Verdict.CRASHES, detail, allowed=allowed))
        if left:
            self.waiting.append(Job(job.implementation, left))
        log.unlink(missing_ok=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGKILL)


def _status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"
