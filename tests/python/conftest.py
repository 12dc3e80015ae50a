import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Before torch is loaded: the workers of pytest-xdist, and the processes that they start, share the cores. Tests of
# several threads set their number themselves.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    # What JAX compiles for one worker need not be compiled for another, nor for the processes that tests start.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{tempfile.gettempdir()}/fusegrad-jax-programs-{os.getppid()}"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Processes share a GPU, and JAX takes three quarters of its memory when it begins.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# TorchInductor's own vectors are not what is tested: without them, and without the programs that ask the compiler for
# them and the processes that would compile, its code takes a third of the time to compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import fusegrad
import pytest
import torch
from flex_limits import SHARED_KIB
from fusegrad import _C
from support import DEVICES, FLEX_FAMILIES


def pytest_unconfigure() -> None:
    # The process that started the workers.
    shutil.rmtree(f"{tempfile.gettempdir()}/fusegrad-jax-programs-{os.getpid()}", ignore_errors=True)


def pytest_collection_finish() -> None:
    """The garbage collector need not look through what was imported: torch alone has half a million objects."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped for want of CUDA."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    build = sum("build with CUDA" in reason for reason in reasons)
    gpu = sum("GPU" in reason for reason in reasons)
    info = fusegrad.build_info()
    if build and not info["cuda"]:
        terminalreporter.write_line(
            f"{build} tests and modules need a build with CUDA; this one is {info['cuda_status']}"
        )
    if gpu:
        terminalreporter.write_line(f"{gpu} tests and modules need a GPU")


def state_of_torch() -> dict[str, object]:
    return {
        "torch functions": torch._C._is_torch_function_enabled(),
        "modes of functions": torch._C._len_torch_function_stack(),
        "modes of dispatch": torch._C._len_torch_dispatch_stack(),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def same_state() -> Iterator[None]:
    """Fails a test that leaves another state of PyTorch than it found, which others would fail of."""
    before = state_of_torch()
    torch.manual_seed(0)
    yield
    assert state_of_torch() == before


def on_the_device(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    if device == "cpu":
        yield device
        return
    given = request.node.callspec.params
    if request.node.get_closest_marker("cpu_only"):
        pytest.skip("for the CPU alone")
    if given.get("dtype") == torch.float64 or given.get("threads", 1) != 1:
        pytest.skip("float64 and the number of threads are the CPU's")
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture(params=DEVICES)
def each_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each device, where all that it makes then lies; the CPU has all of `cpu_only` and float64."""
    yield from on_the_device(request, request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch's own: for steps so small that handing out their work takes longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def family_forced(family: str) -> Iterator[None]:
    if not family:
        yield
        return
    _C.flex.force_family(family)
    _C.force_limits(0, SHARED_KIB << 10 if family == "portable" else 0)
    try:
        yield
    finally:
        _C.flex.force_family("")
        _C.force_limits(0, 0)


@pytest.fixture
def made_on_the_gpu() -> Iterator[None]:
    """Tensors of the test are on the GPU unless they say where."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(params=FLEX_FAMILIES)
def each_flex_family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for every family of kernels of flex attention that the GPU has."""
    with family_forced(request.param):
        yield request.param


@pytest.fixture(params=["cpu", *(f"cuda {family}".strip() for family in FLEX_FAMILIES)])
def each_flex_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """As each_device, and once for every family of kernels of flex attention that the GPU has."""
    device, _, family = request.param.partition(" ")
    with family_forced(family):
        yield from on_the_device(request, device)
