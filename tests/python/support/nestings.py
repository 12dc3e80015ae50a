"""Ways in which function transforms and torch.autograd nest, of a function of one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Counts the ops of ours, and those of the size of the logits that are PyTorch's softmaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[op.name().removeprefix("fusegrad::").split(".")[0]] += 1
        return op(*args, **(kwargs or {}))


def backward_twice(f: Callable, x: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * d).sum(), leaf, create_graph=True)
    (third,) = torch.autograd.grad((second * d).sum(), leaf)
    return first.detach(), second.detach(), third


def gradient_of_tangent(f: Callable, x: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        leaf = x.clone().requires_grad_()
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, d))).tangent
        return tangent.detach(), *torch.autograd.grad(tangent, leaf)


def tangent_of_gradient(f: Callable, x: Tensor, d: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), d)
        (first,) = torch.autograd.grad(f(dual), dual, create_graph=True)
        return forward_ad.unpack_dual(first).tangent.detach()


def gradient_of_a_dual(f: Callable, x: Tensor, d: Tensor) -> Tensor:
    """A Hessian-vector product: forward_ad over func.grad."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(grad(f)(forward_ad.make_dual(x, d))).tangent


def along(f: Callable, d: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: jvp(f, (x,), (d,))[1]


functional = torch.autograd.functional
NESTINGS: dict[str, Callable[[Callable, Tensor, Tensor], Any]] = {
    "hessian": lambda f, x, d: hessian(f)(x),
    "jacrev(jacrev)": lambda f, x, d: jacrev(jacrev(f))(x),
    "jacfwd(jacfwd)": lambda f, x, d: jacfwd(jacfwd(f))(x),
    "jacrev(jacfwd)": lambda f, x, d: jacrev(jacfwd(f))(x),
    "jvp(grad)": lambda f, x, d: jvp(grad(f), (x,), (d,)),
    "vjp(grad)": lambda f, x, d: vjp(grad(f), x)[1](d),
    "grad(jvp)": lambda f, x, d: grad(along(f, d))(x),
    "vmap(grad)": lambda f, x, d: vmap(grad(f))(torch.stack([x, d])),
    "vmap(vmap(grad))": lambda f, x, d: vmap(vmap(grad(f)))(torch.stack([x, d, x + d]).unsqueeze(1)),
    "vmap(hessian)": lambda f, x, d: vmap(hessian(f))(torch.stack([x, d])),
    "grad(vmap)": lambda f, x, d: grad(lambda x: vmap(f)(torch.stack([x, d * x])).square().sum())(x),
    "vmap of tangents": lambda f, x, d: vmap(lambda d: jvp(grad(f), (x,), (d,))[1])(torch.stack([x, d])),
    "third: jvp(jvp(grad))": lambda f, x, d: along(along(grad(f), d), d)(x),
    "third: grad(vjp(grad))": lambda f, x, d: grad(lambda x: (vjp(grad(f), x)[1](d)[0] * d).sum())(x),
    "third: grad(jvp(jvp))": lambda f, x, d: grad(along(along(f, d), d))(x),
    "third: jacrev(hessian)": lambda f, x, d: jacrev(hessian(f))(x),
    "third: jacrev(jacrev(jacrev))": lambda f, x, d: jacrev(jacrev(jacrev(f)))(x),
    "third: vjp(vjp(grad))": lambda f, x, d: vjp(lambda x: vjp(grad(f), x)[1](d)[0], x)[1](d),
    "third: jacfwd(jacrev(jacfwd))": lambda f, x, d: jacfwd(jacrev(jacfwd(f)))(x),
    "third: vmap(jacrev(hessian))": lambda f, x, d: vmap(jacrev(hessian(f)))(torch.stack([x, d])),
    "vmap of one": lambda f, x, d: (vmap(jacfwd(f))(x[None]), vmap(hessian(f))(x[None])),
    "tangent of a func.grad": gradient_of_a_dual,
    "vectorized over func.grad": lambda f, x, d: functional.hessian(
        lambda x: (grad(f)(x) * d).sum(), x, vectorize=True
    ),
    "fourth": lambda f, x, d: along(grad(along(along(f, d), d)), d)(x),
    "create_graph": backward_twice,
    "backward through a tangent": gradient_of_tangent,
    "tangent of a backward": tangent_of_gradient,
    "vectorized": lambda f, x, d: functional.hessian(f, x, vectorize=True),
    "vectorized, forward": lambda f, x, d: functional.hessian(
        f, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}
