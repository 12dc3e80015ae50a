"""Peak memory of a training loop."""

import contextlib
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory since construction.

    CUDA: `torch.cuda.max_memory_allocated`. CPU: the peak of the process's resident memory above what was
    resident at construction, so each measurement needs a process of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_resident_peak()
            self._start = _status_bytes("VmRSS")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _status_bytes("VmHWM") - self._start


def _reset_resident_peak() -> None:
    """Sets VmHWM to VmRSS. Where the kernel does not allow it, the peak is the process's whole life's."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")
