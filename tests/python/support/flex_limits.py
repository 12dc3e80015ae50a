"""What attention's kernels need of a GPU's shared memory, for tests of smaller GPUs."""

from __future__ import annotations

import os

import pytest

# 99: the portable family's tests run as on a GPU with so much shared memory a CTA; 0: with all of the GPU's.
SHARED_KIB = int(os.environ.get("FUSEGRAD_TEST_SHARED_KIB", "0"))
NEEDS_HOPPER = pytest.mark.skipif(SHARED_KIB > 0, reason="the kernels for Hopper need more shared memory")


def too_large(architecture: str, dtype: str, sizes: tuple[int, int], direction: str, deterministic: bool) -> bool:
    """Where no tile fits: wide heads keep whole rows of queries and keys in shared memory."""
    if max(sizes) <= 256 or architecture == "90a":
        return False
    if architecture == "80":
        return dtype == "float32" and sizes[0] >= 512 and deterministic
    if dtype == "bfloat16":
        return sizes[0] > 512 and deterministic
    return deterministic or (sizes[0] >= 512 and direction != "forward")
