from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fusegrad import _C
from support import DEVICES, FLEX_FAMILIES


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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


@contextmanager
def family_forced(family: str) -> Iterator[None]:
    if not family:
        yield
        return
    _C.flex.force_family(family)
    try:
        yield
    finally:
        _C.flex.force_family("")


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
