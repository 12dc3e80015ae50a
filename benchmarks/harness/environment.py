"""Where and with what the numbers were taken."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import time
from pathlib import Path

import torch

PACKAGES = (
    "fusegrad",
    "torch",
    "triton",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "transformers",
    "trl",
    "verl",
    "jvp-flash-attention",
    "jax",
    "tokamax",
    "flash-attn-4",
    "cuequivariance-jax",
    "cuequivariance-torch",
    "trifast",
)


def environment(device: str, commit: str | None) -> dict[str, object]:
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit or _git_commit(),
        "device": device_name(device),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    if device == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return match.group(1).strip() if match else platform.processor()


def in_file_names(device: object) -> str:
    """A device's name as files have it."""
    return re.sub(r"[^a-z0-9]+", "-", str(device).lower()).strip("-")


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if commit and changed else commit


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
