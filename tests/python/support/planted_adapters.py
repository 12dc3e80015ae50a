"""Implementations with planted faults, for the tests of fusegrad.conformance: one for each verdict."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from fusegrad.conformance import Adapter
from torch import Tensor


class Overwrites(torch.autograd.Function):
    """Cross entropy whose forward writes the gradient over the logits, and tells nobody; nor that it scales it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, target)
        gradient = (logits.softmax(-1) - F.one_hot(target, logits.size(1))) / logits.size(0)
        ctx.gradient = logits.data.copy_(gradient)  # `.data` has a version counter of its own
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.mul_(upstream), None


class Wrong(Adapter):
    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        return Overwrites.apply(input, target)


class Raises(Adapter):
    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("planted")


class Crashes(Adapter):
    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        os.abort()


class Hangs(Adapter):
    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        time.sleep(60)
        return input.sum()


class Absent(Adapter):
    def load(self) -> None:
        raise ImportError("there is no such package")

    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        raise AssertionError


class Least:
    """No base class, one op, no options."""

    def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(input, target)
