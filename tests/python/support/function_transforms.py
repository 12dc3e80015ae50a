"""A loss under every function transform, and differentiated twice, beside the plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def assert_same_under_transforms(ours: Callable, truth: Callable, inputs: Sequence[Tensor]) -> None:
    """Both are functions of the inputs, each of which gets a gradient."""
    inputs = tuple(inputs)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    places = tuple(range(len(inputs)))

    def scalar(f: Callable) -> Callable:
        return lambda *t: f(*t).square().sum()

    def same(of: Callable[[Callable], Any]) -> None:
        torch.testing.assert_close(of(ours), of(truth), rtol=1e-9, atol=1e-11)

    same(lambda f: torch.func.jvp(f, inputs, tangents))
    same(lambda f: torch.func.grad(scalar(f), places)(*inputs))
    same(lambda f: torch.func.vjp(f, *inputs)[1](f(*inputs)))
    same(lambda f: torch.func.jacrev(f, places)(*inputs))
    same(lambda f: torch.func.jacfwd(f, places)(*inputs))
    same(lambda f: torch.func.hessian(scalar(f))(*inputs))  # forward over reverse
    same(lambda f: torch.func.jacrev(torch.func.grad(scalar(f)))(*inputs))
    batch = [torch.stack([t, t * 0.5, -t]) for t in inputs]
    same(lambda f: torch.vmap(f)(*batch))
    same(lambda f: torch.vmap(torch.func.grad(scalar(f), places))(*batch))
    # Beside what is the same for all.
    same(lambda f: torch.vmap(f, in_dims=(0, *[None] * (len(inputs) - 1)))(batch[0], *inputs[1:]))


def twice(f: Callable, leaves: Sequence[Tensor]) -> list[Tensor]:
    """First and second derivatives, by create_graph=True."""
    value = f(*leaves)
    first = torch.autograd.grad((value * value).sum(), leaves, create_graph=True)
    of_squares = sum(g.square().sum() for g in first)
    return [*first, *torch.autograd.grad(of_squares, leaves, materialize_grads=True)]


def assert_second_derivatives(ours: Callable, truth: Callable, inputs: Sequence[Tensor]) -> None:
    """gradcheck, also of forward mode, gradgradcheck, and the formula's own second derivatives."""
    leaves = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)
    torch.testing.assert_close(twice(ours, leaves), twice(truth, leaves))
