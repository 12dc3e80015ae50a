"""``python -m fusegrad doctor``: what a report of a bug should say about the machine, and a test of each op on it."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _C, _load, attention, build_info, distillation, functional, reference

Line = tuple[str, str]
_BESIDE = ("triton", "transformers", "trl", "torchtitan", "lightning-thunder", "jax", "liger-kernel")


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _versions() -> Iterator[Line]:
    info = build_info()
    folder = _load.folder
    yield "fusegrad", f"{info['version']} in {folder}"
    for library in sorted((folder / "lib").rglob("*.so")):
        note = ", the one loaded" if library == _load.library else ""
        yield "library", f"{library.relative_to(folder / 'lib')}, {_size(library.stat().st_size)}{note}"
    yield "built for", f"torch {info['torch_version']}, by {info['compiler']}"
    yield "built", str(info["cuda_status"])
    yield "torch", f"{torch.__version__} with CUDA {torch.version.cuda}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    for name in _BESIDE:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _driver() -> str:
    loaded = pathlib.Path("/proc/driver/nvidia/version")
    if not loaded.exists():
        return "none is loaded"
    return loaded.read_text().splitlines()[0].removeprefix("NVRM version:").strip()


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture of the build, such as 80 or 90a, runs on a GPU of this capability."""
    number = "".join(c for c in architecture if c.isdigit())
    major, minor = int(number[:-1]), int(number[-1])
    if not architecture.isdigit():  # of one architecture alone
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _gpus() -> Iterator[Line]:
    yield "driver", _driver()
    if not torch.cuda.is_available():
        yield "gpu", "none that torch can use"
        return
    built = [a for a in str(build_info()["cuda_archs"]).replace(",", ";").split(";") if a]
    for i in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(i)
        served = any(_runs(a, (of.major, of.minor)) for a in built)
        note = "" if served else f"; the losses' kernels are not built for it, but for {', '.join(built) or 'none'}"
        yield f"gpu {i}", f"{of.name}, sm_{of.major}{of.minor}, {_size(of.total_memory)}{note}"


def _kernels() -> Iterator[Line]:
    info = _C.jit.cache_info()
    kept = ", ".join(f"{name}: {of['entries']}" for name, of in sorted(info["architectures"].items()) if of["entries"])
    limit = _size(info["limit"]) if info["limit"] else "0: the cache is off"
    yield "cache", f"{info['folder']}, limit {limit}; compiled kernels: {kept or 'none'}"
    for name, value in sorted(os.environ.items()):
        if name.startswith("FUSEGRAD_"):
            yield name, value


# --- a test of each op -------------------------------------------------------------------------------------------


def _error(call: Callable[..., Tensor], truth: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """The largest relative error of the result and of the inputs' gradients, by norms, against float64."""

    def results(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in given]
        value = function(*leaves)
        return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]

    ours = results(call, inputs)
    right = results(truth, [t.double() for t in inputs])
    pairs = [(a.double(), b) for a, b in zip(ours, right, strict=True)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
    return max(errors) if all(e == e for e in errors) else float("nan")


def _ops(device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    generator = torch.Generator().manual_seed(0)
    x, w, other = random(48, 24), random(100, 24) / 5, random(100, 24) / 5
    target = torch.randint(100, (48,), generator=generator).to(device)
    q, k, v, bias = random(2, 2, 48, 16), random(2, 2, 48, 16), random(2, 2, 48, 16), random(2, 48)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j])

    def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT / 4 + bias[None, :, None, :]).softmax(-1) @ v

    yield (
        "cross_entropy",
        lambda: _error(
            lambda z: functional.cross_entropy(z, target), lambda z: F.cross_entropy(z, target), [x @ w.t()]
        ),
    )
    yield (
        "linear_cross_entropy",
        lambda: _error(
            lambda x, w: functional.linear_cross_entropy(x, w, target),
            lambda x, w: F.cross_entropy(x @ w.t(), target),
            [x, w],
        ),
    )
    student, teacher = x @ w.t(), x @ other.t()
    yield (
        "jsd",
        lambda: _error(
            lambda z: distillation.jsd(z, teacher), lambda z: reference.jsd(z, teacher.double())[0], [student]
        ),
    )
    yield (
        "linear_jsd",
        lambda: _error(
            lambda x, w: distillation.linear_jsd(x, w, x.detach(), other),
            lambda x, w: reference.linear_jsd(x, w, x.detach(), other.double())[0],
            [x, w],
        ),
    )
    yield "flex_attention", lambda: _error(attend, plain, [q, k, v, bias])


def _tests() -> Iterator[tuple[str, str, bool]]:
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    for device in devices:
        limit = 1e-5 if device == "cpu" else 3e-3  # products may run in TF32
        for name, test in _ops(device):
            started = time.monotonic()
            try:
                error = test()
            except Exception as raised:  # shown, and the exit status says it
                yield f"{name}, {device}", f"raises {type(raised).__name__}: {raised}", False
                continue
            right = error <= limit
            took = f"{time.monotonic() - started:.2f} s"
            yield f"{name}, {device}", f"{'right' if right else 'WRONG'}: error {error:.1e}, {took}", right


def main() -> int:
    """Prints the report, to be put into a report of a bug as it is. 0 where all ops are right, else 1."""
    for name, text in (*_versions(), *_gpus(), *_kernels()):
        print(f"{name:12} {text}")
    print("\nvalue and gradients against float64:")
    right = True
    for name, text, ok in _tests():
        print(f"{name:28} {text}", flush=True)
        right = right and ok
    print("all ops are right" if right else "NOT all ops are right", file=sys.stdout if right else sys.stderr)
    return 0 if right else 1
