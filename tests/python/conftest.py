from collections.abc import Iterator

import pytest
import torch
from support import DEVICES


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=DEVICES)
def each_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each device, where all that it makes then lies; the CPU has all of `cpu_only` and float64."""
    device = request.param
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
