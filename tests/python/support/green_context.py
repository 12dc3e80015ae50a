"""A stream on some of the GPU's multiprocessors: a kernel's CTAs run there a few at a time."""

from __future__ import annotations

import ctypes

import torch

SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = NON_BLOCKING = 1


def stream_of(multiprocessors: int) -> torch.cuda.ExternalStream:
    """A stream of so many multiprocessors at least, for the process's life."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        error = getattr(driver, name)(*arguments)
        assert error == 0, f"{name}: {error}"

    device = ctypes.c_int()
    call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
    every, some, rest = (ctypes.create_string_buffer(1024) for _ in range(3))  # CUdevResource, with room to spare
    call("cuDeviceGetDevResource", device, every, SM)
    groups = ctypes.c_uint(1)
    call("cuDevSmResourceSplitByCount", some, ctypes.byref(groups), every, rest, 0, ctypes.c_uint(multiprocessors))
    description, context, stream = (ctypes.c_void_p() for _ in range(3))
    call("cuDevResourceGenerateDesc", ctypes.byref(description), some, ctypes.c_uint(1))
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, ctypes.c_uint(DEFAULT_STREAM))
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), 0)
    return torch.cuda.ExternalStream(stream.value)
