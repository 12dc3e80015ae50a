"""What a score_mod computes from captured tensors, under torch.func and forward mode, beside plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from function_transforms import assert_same_under_transforms
from fusegrad import TraceError, create_block_mask, flex_attention, trace_score_mod
from nestings import NESTINGS
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

B, H, M, N, D = 1, 2, 3, 4, 2
Mod = Callable[[Tensor, Tensor], Callable]


class Twice(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


def normed(c: Tensor) -> Tensor:
    return (c - c.mean()) / c.square().mean().sqrt()


def table(w: Tensor) -> Tensor:
    return torch.cat([w, w.flip(0)]).softmax(0) @ torch.eye(H, dtype=w.dtype)


MODS: dict[str, Mod] = {
    "exp": lambda c, w: lambda s, b, h, i, j: s * c.exp()[h],
    "transposed": lambda c, w: lambda s, b, h, i, j: s + w.t()[h, j],
    "mean": lambda c, w: lambda s, b, h, i, j: s * w.mean(-1)[j] + c.sum(),
    "numbers": lambda c, w: lambda s, b, h, i, j: s * (c * torch.tensor([0.5, 2.0], dtype=c.dtype))[h],
    "chain": lambda c, w: lambda s, b, h, i, j: s + normed(c)[h] * table(w)[j, h],
    "in-place": lambda c, w: lambda s, b, h, i, j: s + c.clone().mul_(3).add_(c)[h],
    "outer": lambda c, w: lambda s, b, h, i, j: s * torch.outer(c, w[:, 0]).tanh()[h, j],
    "beside a read": lambda c, w: lambda s, b, h, i, j: s * c.exp()[h] * c[h] + F.softplus(w)[j, h],
    "detached": lambda c, w: lambda s, b, h, i, j: s * c.exp().detach()[h] * c[h] + w[j, h],
}


QKV = [torch.randn(B, H, n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (M, N, N)]


def attention_of(attend: Callable, mod: Mod) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda c, w: attend(*QKV, mod(c, w))


def plain(q: Tensor, k: Tensor, v: Tensor, score_mod: Callable) -> Tensor:
    scores = q @ k.mT / D**0.5
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    weights = score_mod(scores, *places).exp()  # PyTorch's softmax has no backward of its tangent
    return weights / weights.sum(-1, keepdim=True) @ v


def captured() -> tuple[Tensor, Tensor]:
    return torch.randn(H, dtype=torch.float64), torch.randn(N, H, dtype=torch.float64)


@rows_of("name", [*MODS])
def test_derivatives_of_what_is_computed_from_captured_tensors(name: str) -> None:
    assert_same_under_transforms(attention_of(flex_attention, MODS[name]), attention_of(plain, MODS[name]), captured())


OWN: dict[str, Mod] = {
    "of a read": lambda twice, c, w: lambda s, b, h, i, j: s + twice(c[h]) * w[j, h],
    "of a step's": lambda twice, c, w: lambda s, b, h, i, j: s * twice(c.exp()[h]) + twice(w.t()[h, j] * s),
}


def twice(x: Tensor) -> Tensor:
    return 2 * x - x.detach()


@pytest.mark.parametrize("name", OWN)
def test_functions_of_what_is_computed_from_captured_tensors(name: str) -> None:
    ours = attention_of(flex_attention, lambda c, w: OWN[name](Twice.apply, c, w))
    assert_same_under_transforms(ours, attention_of(plain, lambda c, w: OWN[name](twice, c, w)), captured())


def test_the_derivative_of_a_function_of_ones_own_in_forward_mode() -> None:
    """Not that of its forward."""
    c, w = captured()
    ours = attention_of(flex_attention, lambda c, w: OWN["of a read"](Twice.apply, c, w))
    truth = attention_of(plain, lambda c, w: OWN["of a read"](twice, c, w))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(c, torch.randn_like(c))
        torch.testing.assert_close(forward_ad.unpack_dual(ours(dual, w)), forward_ad.unpack_dual(truth(dual, w)))


class Of(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(x, h)
        return x * c[h]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, h = ctx.saved_tensors
        return None, torch.stack([g * x * (h == 0), g * x * (h == 1)]), None


def under_vmap(f: Callable) -> Callable:
    """Where the innermost transform is none that gradients come from."""
    return grad(lambda c, w: vmap(f)(c[None], w[None]).sum())


def in_forward_mode(f: Callable) -> Callable:
    return lambda c, w: jvp(f, (c, w), (torch.ones_like(c), torch.ones_like(w)))


@pytest.mark.parametrize("transform", [under_vmap, in_forward_mode])
def test_a_function_whose_arguments_cannot_be_told_raises(transform: Callable) -> None:
    f = attention_of(flex_attention, lambda c, w: lambda s, b, h, i, j: Of.apply(s, c, h))
    with pytest.raises(TraceError, match=r"the autograd.Function Of: .*index it before"):
        transform(f)(*captured())
    f(*captured())


@pytest.mark.parametrize("transform", [lambda f: grad(lambda *t: f(*t).sum()), under_vmap, in_forward_mode])
def test_a_function_of_captured_tensors_alone_raises(transform: Callable) -> None:
    f = attention_of(flex_attention, lambda c, w: lambda s, b, h, i, j: s + Twice.apply(c)[h])
    with pytest.raises(TraceError, match="apply it outside of the function"):
        transform(f)(*captured())
    f(*captured())


def test_a_module_by_functional_call() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, H).double()

        def forward(self, places: Tensor, attend: Callable) -> Tensor:
            return attention_of(attend, lambda c, w: lambda s, b, h, i, j: s + self.net(places).tanh()[j, h])(
                places, places
            )

    model, places = Biased(), torch.randn(3, N, 2, dtype=torch.float64)
    parameters = dict(model.named_parameters())

    def gradients(attend: Callable) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], places: Tensor) -> Tensor:
            return functional_call(model, parameters, (places, attend)).square().sum()

        return vmap(grad(loss), (None, 0))(parameters, places)

    torch.testing.assert_close(gradients(flex_attention), gradients(plain), rtol=1e-9, atol=1e-11)


def test_one_trace_serves_calls_with_and_without_transforms() -> None:
    f, truth = attention_of(flex_attention, MODS["chain"]), attention_of(plain, MODS["chain"])

    def of(f: Callable, c: Tensor, w: Tensor) -> list[Any]:
        leaf = c.clone().requires_grad_()
        return [
            f(c, w),
            *torch.autograd.grad(f(leaf, w).square().sum(), leaf),
            grad(lambda c: f(c, w).square().sum())(c),
            vmap(f, (0, None))(torch.stack([c, -c]), w),
            jvp(lambda c: f(c, w), (c,), (c,)),
        ]

    for _ in range(2):
        c, w = captured()
        torch.testing.assert_close(of(f, c, w), of(truth, c, w), rtol=1e-9, atol=1e-11)


def test_trace_score_mod_within_a_transform() -> None:
    f = attention_of(lambda q, k, v, mod: flex_attention(q, k, v, trace_score_mod(mod)), MODS["exp"])
    assert_same_under_transforms(f, attention_of(plain, MODS["exp"]), captured())


@rows_of("nesting", [*NESTINGS])
def test_nestings_of_transforms(nesting: str) -> None:
    c, w = captured()
    d = torch.randn_like(c)

    def scalar(attend: Callable) -> Callable[[Tensor], Tensor]:
        return lambda c: attention_of(attend, MODS["beside a read"])(c, w).square().sum()

    # PyTorch's forward mode over an indexed read knows no batch.
    expected = NESTINGS["vectorized" if nesting == "vectorized, forward" else nesting](scalar(plain), c, d)
    torch.testing.assert_close(NESTINGS[nesting](scalar(flex_attention), c, d), expected, rtol=1e-9, atol=1e-11)


def test_block_masks_of_each_element_of_a_batch() -> None:
    times = torch.randint(5, (3, 9))
    q, k, v = (torch.randn(3, 1, 2, 9, D, dtype=torch.float64) for _ in range(3))

    def attend(times: Tensor, *qkv: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: times[i] >= times[j], None, None, 9, 9, block_size=4)
        return flex_attention(*qkv, block_mask=mask)

    expected = torch.stack([attend(*of_each) for of_each in zip(times, q, k, v, strict=True)])
    torch.testing.assert_close(vmap(attend)(times, q, k, v), expected)
    assert vmap(lambda x: create_block_mask(lambda b, h, i, j: x[i] > 0, 1, 1, 9, 9).kv_indices)(times).shape[0] == 3


# --- within torch.compile -----------------------------------------------------------------------------------------


def not_for_the_compiler(c: Tensor, w: Tensor) -> Callable:
    return lambda s, b, h, i, j: s * c.exp()[h] + w[j, h] * QKV[0][0, 0, 0, 0].item()


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: grad(lambda c, w: f(c, w).square().sum(), (0, 1)),
    "jvp": lambda f: lambda c, w: jvp(f, (c, w), (w[0], w)),
    "vmap of grad": lambda f: lambda c, w: vmap(grad(lambda c: f(c, w).square().sum()))(torch.stack([c, -c])),
    "hessian": lambda f: hessian(lambda c, w: f(c, w).square().sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_compiled_transform(transform: str) -> None:
    torch._dynamo.reset()
    f = TRANSFORMS[transform](attention_of(flex_attention, MODS["beside a read"]))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    truth = TRANSFORMS[transform](attention_of(plain, MODS["beside a read"]))
    for _ in range(2):
        c, w = captured()
        torch.testing.assert_close(compiled(c, w), truth(c, w), rtol=1e-9, atol=1e-11)


def test_a_backward_of_a_compiled_transform() -> None:
    torch._dynamo.reset()
    c, w = captured()
    c.requires_grad_()

    def second(f: Callable, compiler: Callable) -> Tensor:
        first = compiler(lambda c: grad(lambda c: f(c, w).square().sum())(c))
        return torch.autograd.grad(first(c).square().sum(), c)[0]

    compiler = torch.compile(fullgraph=True, backend="aot_eager")
    found = second(attention_of(flex_attention, MODS["exp"]), compiler)
    torch.testing.assert_close(found, second(attention_of(plain, MODS["exp"]), lambda f: f), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_between_two_graphs_the_tracer_is_not_compiled(transform: str) -> None:
    torch._dynamo.reset()
    f = TRANSFORMS[transform](attention_of(flex_attention, not_for_the_compiler))
    c, w = captured()
    truth = TRANSFORMS[transform](attention_of(plain, not_for_the_compiler))(c, w)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(c, w), truth, rtol=1e-9, atol=1e-11)
