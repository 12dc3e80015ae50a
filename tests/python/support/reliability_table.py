"""Lets every allocation of every op fail in turn, and says what happened: the numbers of docs/design/faults.md.

    python tests/python/support/reliability_table.py [--device cuda] [--json]

It starts itself again with faults.cpp before the C library. What must hold, for each allocation that failed:

- An error that names the op: torch.OutOfMemoryError where PyTorch or the host gave it, a RuntimeError of PyTorch's CPU
  allocator otherwise.
- Nothing that was passed has changed; in place it has not, or the version was raised and the error says that the
  contents are lost.
- The backward that failed, called again: right, or an error.
- The next call: bitwise as one without the fault.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faults
import torch
from torch import Tensor

KINDS = {"tensor": faults.TENSOR, "host": faults.HOST, "device": faults.DEVICE}


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors]


class Sweep:
    """One case, functional or in place: every allocation of one kind."""

    def __init__(self, case: Any, inplace: bool, kind: int, given: faults.Faults) -> None:
        self.case, self.inplace, self.kind, self.faults = case, inplace, kind, given
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.leaf_bits = bits(case.leaves)
        torch.set_num_threads(case.threads)
        self.truth = self.run()
        self.counts = {}
        for phase in ("forward", "backward"):
            self.attempt(phase, 0)
            self.counts[phase] = self.faults.count
        for phase, count in self.counts.items():
            for nth in range(1, count + 1):
                self.attempt(phase, nth)

    def forward(self) -> tuple[list[Tensor], Tensor]:
        activations = self.activations()
        return activations, self.case.call(*activations, inplace=self.inplace)

    def activations(self) -> list[Tensor]:
        if self.case.cold:
            from fusegrad._tracing import cache

            cache.clear()
        return [t.clone() for t in self.case.leaves]

    def grads(self, out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out, self.case.leaves, self.upstream(out)))

    def upstream(self, out: Tensor) -> Tensor:
        return torch.full((), 0.5, dtype=out.dtype, device=out.device).expand(out.shape)

    def run(self) -> list[bytes]:
        out = self.forward()[1]
        value = bits([out])
        return value + bits(self.grads(out))

    def attempt(self, phase: str, nth: int) -> None:
        """The `nth` allocation of a phase fails; 0: none does."""
        where = f"{phase} {nth}"
        activations = self.activations()
        versions = [t._version for t in activations]
        out, error, value = None, None, None
        if phase == "backward":
            out = self.case.call(*activations, inplace=self.inplace)
            versions = [t._version for t in activations]
            before = bits(activations)
            upstream = self.upstream(out)
            call = lambda: list(torch.autograd.grad(out, self.case.leaves, upstream))  # noqa: E731
        else:
            before = bits(activations)
            call = lambda: self.case.call(*activations, inplace=self.inplace)  # noqa: E731
        with self.faults.failing(self.kind, nth):
            try:
                value = call()
            except Exception as raised:
                error = raised
        if nth == 0:
            if error is not None:
                raise error
            return
        if not self.faults.failed:
            self.outcomes["did not come to it"] += 1
            return
        if error is None:
            self.outcomes["went on"] += 1
            result = bits([value]) if phase == "forward" else bits(value)  # type: ignore[list-item,arg-type]
            whole = self.truth[:1] if phase == "forward" else self.truth[1:]
            self.require(result == whole, where, "went on to a wrong result")
        else:
            # What the dispatcher and the engine do before and after the op is theirs, and has no name.
            outside = self.kind == faults.HOST and str(error) == "std::bad_alloc"
            self.outcomes["error, outside the op" if outside else "error"] += 1
            if not outside:
                self.check_error(error, where)
            self.check_arguments(activations, before, versions, str(error), outside, where)
            if phase == "backward":
                self.check_again(call, where)
        self.require(bits(self.case.leaves) == self.leaf_bits, where, "a leaf changed")
        self.require(self.run() == self.truth, where, "the next call was wrong")

    def check_error(self, error: Exception, where: str) -> None:
        memory = torch.OutOfMemoryError if self.kind != faults.TENSOR else RuntimeError
        told = isinstance(error, memory) and self.case.op in str(error)
        self.require(told, where, f"{type(error).__name__}: {error}")

    def check_arguments(
        self,
        activations: list[Tensor],
        before: list[bytes],
        versions: list[int],
        message: str,
        outside: bool,
        where: str,
    ) -> None:
        # What the forward saved is no argument, but after an op in place it lies in one.
        lost = "contents are lost" in message and "the gradient that the forward saved" not in message
        if lost:
            self.outcomes["contents lost"] += 1
        for i, (now, old) in enumerate(zip(bits(activations), before, strict=True)):
            raised = activations[i]._version > versions[i]
            may = self.inplace and i < self.case.overwrites
            self.require(may or not (raised or now != old), where, f"argument {i} changed")
            told = raised and ("contents are lost" in message or outside)
            self.require(now == old or told, where, f"argument {i} changed without a word")
        self.require(not lost or self.inplace, where, "a functional call lost something")

    def check_again(self, call: Any, where: str) -> None:
        try:
            result = bits(call())
        except RuntimeError as error:
            self.outcomes["backward again: refused"] += 1
            told = "modified by an inplace operation" in str(error)
            self.require(told, where, f"backward again: {error}")
        else:
            self.outcomes["backward again: right"] += 1
            self.require(result == self.truth[1:], where, "backward again was wrong")

    def require(self, holds: bool, where: str, what: str) -> None:
        if not holds:
            self.wrong.append(f"{where}: {what}"[:400])

    def row(self, kind: str) -> dict[str, Any]:
        return {
            "op": self.case.op,
            "what": self.case.what,
            "call": "in place" if self.inplace else "functional",
            "memory": kind,
            **self.counts,
            "outcomes": dict(self.outcomes),
            "wrong": self.wrong,
        }


def sweep(device: str, kinds: Sequence[str], ops: Sequence[str] | None) -> list[dict[str, Any]]:
    """In this process, which has faults.cpp before its C library."""
    if device == "cuda":
        path = str(faults.build(Path(os.environ["FAULTS"]).parent, "faults_cuda"))
        allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "faults_cuda_malloc", "faults_cuda_free")
        torch.cuda.memory.change_current_allocator(allocator)
    from reliability_cases import cases

    given = faults.Faults()
    return [
        Sweep(case, inplace, KINDS[kind], given).row(kind)
        for case in cases(device)
        if ops is None or case.op in ops
        for inplace in (False, True)
        for kind in kinds
        if not (case.cold and inplace and kind == "host")  # hundreds, as in the functional call
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All cases of an op together."""
    lines = [
        "| op | call | memory | cases | allocations of forwards, of backwards | what happened |",
        "|---|---|---|---|---|---|",
    ]
    for op, call, kind in dict.fromkeys((r["op"], r["call"], r["memory"]) for r in rows):
        those = [r for r in rows if (r["op"], r["call"], r["memory"]) == (op, call, kind)]
        happened: Counter[str] = Counter()
        for r in those:
            happened.update(r["outcomes"])
            happened["**wrong**"] += len(r["wrong"])
        what = "; ".join(f"{what}: {n}" for what, n in sorted(happened.items()) if n)
        counts = ", ".join(str(sum(r[phase] for r in those)) for phase in ("forward", "backward"))
        lines.append(f"| `{op}` | {call} | {kind} | {len(those)} | {counts} | {what} |")
    return "\n".join(lines)


def run(device: str, kinds: Sequence[str], ops: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The same in a process of its own: the rows."""
    with tempfile.TemporaryDirectory() as folder:
        library = faults.build(Path(folder))
        command = [sys.executable, __file__, "--here", "--json", "--device", device, "--kinds", *kinds]
        command += ["--ops", *ops] if ops is not None else []
        done = subprocess.run(
            command, env=faults.environment(library), capture_output=True, text=True, timeout=600, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the process ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS))
    parser.add_argument("--ops", nargs="*", help="by default all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = given.kinds or (["device", "host"] if given.device == "cuda" else ["tensor", "host"])
    rows = sweep(given.device, kinds, given.ops) if given.here else run(given.device, kinds, given.ops)
    print(json.dumps(rows) if given.json else table(rows))
    wrong = [f"{r['op']}, {r['what']}, {r['call']}, {r['memory']}: {w}" for r in rows for w in r["wrong"]]
    if not given.json:
        print("\n".join(wrong))
    return 0 if given.json else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
