"""Forward mode against reverse mode, and tangents of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor


def pushed(outputs: Sequence[Tensor], given: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """The outputs' tangents by reverse mode alone: the derivative by u of u's vector-Jacobian product."""
    upstream = [torch.zeros_like(t, requires_grad=True) for t in outputs]
    grads = torch.autograd.grad(outputs, given, upstream, create_graph=True, materialize_grads=True)
    product = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    return list(torch.autograd.grad(product, upstream, materialize_grads=True))


def tangents_of(call: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], tangents: Sequence[Tensor | None]):
    """The tangents of call(*given), where inputs with a None have none."""
    with fwAD.dual_level():
        duals = [t if d is None else fwAD.make_dual(t, d) for t, d in zip(given, tangents, strict=True)]
        return [tuple(fwAD.unpack_dual(x)) for x in call(*duals)]
