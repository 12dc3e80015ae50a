"""autograd.Functions and custom ops in score_mods: values and gradients as PyTorch's autograd gives them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from coverings import rows_of
from fusegrad import TraceError, trace_mask_mod, trace_score_mod
from fusegrad._tracing import cache
from test_trace import N, assert_follows, check_mask_mod, check_score_mod, fresh  # noqa: F401
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Clipped(Function):
    """The identity, whose gradient is clipped: not linear in it."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.bound, ctx.bound), None


class Identity(Function):
    """Returns its argument, which PyTorch makes another tensor of."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


class Saves(Function):
    @staticmethod
    def forward(ctx, x, y):
        out = x * y.exp()
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y, out = ctx.saved_tensors
        return grad * out.tanh() * 3, grad.square() * x - y


class WithContext(Function):
    @staticmethod
    def forward(x, y, scale):
        return x.sin() * scale, (x * y).cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.scale = inputs
        ctx.save_for_backward(x, y, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, first, second):
        _x, _y, a, b = ctx.saved_tensors
        both = (first.square() + second.square() + 1).sqrt()  # of both at once
        return first * a / both, second * b * ctx.scale if ctx.needs_input_grad[1] else None, None


class Partly(Function):
    """Outputs of which one has no gradient, and one is an integer."""

    @staticmethod
    def forward(ctx, x):
        sign, place = x.sign(), (x > 0).long()
        ctx.mark_non_differentiable(sign, place)
        return x.abs(), sign, place

    @staticmethod
    def backward(ctx, grad, sign, place):
        return grad * 0.5 + sign + place


class NoGradient(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return None, grad * 4


class Outer(Function):
    """Applies Functions in both directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return Rounded.apply(x, 0.5) * 2

    @staticmethod
    def backward(ctx, grad):
        return Clipped.apply(grad, 0.25) * ctx.x.detach().cos()


class Vectors(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return (x[:, None] * y).sum(0)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y).sum() * 2 * torch.ones_like(x), (grad * x.sum()).expand(3, 3).sum(0)


class ConstantGradient(Function):
    """Also where the gradient that reaches it is 0."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + 1


def make(draw: Callable) -> dict[str, tuple[Callable, list[Tensor]]]:
    bias, other, table = draw(N), draw(N), draw(N, 3)
    rounded = Rounded.apply

    def no_grad(s, b, h, q, kv):
        with torch.no_grad():
            size = Identity.apply(s)
        return s * 0.5 + size + Identity.apply(s).detach()

    def written(s, b, h, q, kv):
        y = Clipped.apply(s, 0.25)
        s += 1
        y += s * 2
        return y * s + Identity.apply(y)

    def branches(s, b, h, q, kv):
        return torch.where(s > 0, ConstantGradient.apply(s), Clipped.apply(s, 0.125) * 3) + ConstantGradient.apply(
            bias[kv]
        )

    def whole(s, b, h, q, kv):
        return s + Saves.apply(bias.view(2, 4), s)[h, kv % 4]

    def computed(s, b, h, q, kv):
        return s + Saves.apply(bias[:3].exp(), table[kv]).sum() + Identity.apply(bias * 2)[kv]

    def used_once(s, b, h, q, kv):
        return WithContext.apply(s, bias[kv], 0.5)[1]

    def both(s, b, h, q, kv):
        first, second = WithContext.apply(s, bias[kv], 0.5)
        return first + second * second

    def parts(s, b, h, q, kv):
        size, sign, place = Partly.apply(s)
        return size * 3 + sign * bias[kv] + place

    return {
        "straight_through": (lambda s, b, h, q, kv: rounded(s, 0.5) + Rounded.apply(bias[kv] * s, 0.25), [bias]),
        "clipped": (lambda s, b, h, q, kv: Clipped.apply(s, 0.25) * 1.5 + Clipped.apply(bias[kv], 0.5) * s, [bias]),
        "identity": (lambda s, b, h, q, kv: Identity.apply(s) + Identity.apply(Identity.apply(bias[kv])), [bias]),
        "saved": (lambda s, b, h, q, kv: Saves.apply(s, bias[kv]) + Saves.apply(other[q], s * 0.5), [bias, other]),
        "setup_context": (both, [bias]),
        "one_of_two_outputs": (used_once, [bias]),
        "not_differentiable": (parts, [bias]),
        "no_gradient": (lambda s, b, h, q, kv: NoGradient.apply(s, bias[kv]) + s, [bias]),
        "nested": (lambda s, b, h, q, kv: Outer.apply(s) + Outer.apply(Clipped.apply(bias[q], 0.5)), [bias]),
        "vectors": (lambda s, b, h, q, kv: Vectors.apply(table[kv], table[q] * s).sum(), [table]),
        "without_gradients": (no_grad, []),
        "written": (written, []),
        "branches": (branches, [bias]),
        "a_whole_tensor": (whole, [bias]),
        "computed_outside": (computed, [bias, table]),
    }


CASES = tuple(make(torch.ones))


@rows_of("name", [*CASES])
def test_functions(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    mod, parameters = make(lambda *shape: torch.randn(*shape, generator=generator).requires_grad_())[name]
    assert_follows(mod, parameters)
    assert_follows(mod, parameters)
    with torch.no_grad():
        assert trace_score_mod(mod).text == trace_score_mod(mod).text


def test_a_mask_has_no_derivative() -> None:
    mod = check_mask_mod(lambda b, h, q, kv: Rounded.apply(q / 3, 1.0) >= Identity.apply(kv * 0.25))
    assert "custom" not in mod.text


def test_a_bias_that_is_not_indexed_before() -> None:
    bias = torch.randn(5000, requires_grad=True)
    with pytest.raises(TraceError, match=r"in the autograd\.Function Mixed: an operation on a vector of 5000 elements"):
        trace_score_mod(lambda s, b, h, q, kv: s + Mixed.apply(bias, kv))


class Mixed(Function):
    @staticmethod
    def forward(ctx, table, index):
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class BranchesForward(Function):
    @staticmethod
    def forward(ctx, x):
        return x if x > 0 else -x

    @staticmethod
    def backward(ctx, grad):
        return grad


class BranchesBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad if grad > 0 else -grad


class TooFew(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


class Number(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 1.0


class OwnGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, grad)[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (BranchesForward, r"in the autograd.Function BranchesForward: a branch .*torch.where"),
        (BranchesBackward, r"in the backward of BranchesBackward: a branch .*torch.where"),
        (NoBackward, r"in the backward of NoBackward: NotImplementedError"),
        (Number, r"in the backward of Number: it returned a gradient of type float"),
        (OwnGradient, r"in the backward of OwnGradient: requires_grad_ of a value"),
    ],
)
def test_what_cannot_be_traced_names_the_function(function: type, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_score_mod(lambda s, b, h, q, kv: function.apply(s) + s)


def test_too_few_gradients() -> None:
    with pytest.raises(TraceError, match="in the backward of TooFew: it returned 1 gradients for 2 arguments"):
        trace_score_mod(lambda s, b, h, q, kv: TooFew.apply(s, s))


# --- ops of others ----------------------------------------------------------------------------------------------


@torch.library.custom_op("fusegrad_peers::exp", mutates_args=())
def peers_exp(x: Tensor) -> Tensor:
    return torch.tanh(x) + torch.stack([x, -x])[0] * 0


def _save_output(ctx, inputs, output):
    ctx.save_for_backward(output)


def _of_tanh(ctx, grad):
    (out,) = ctx.saved_tensors
    return grad * (1 - out * out) * 2  # ours: no other rule gives it


peers_exp.register_autograd(_of_tanh, setup_context=_save_output)


@torch.library.custom_op("fusegrad_peers::clamp", mutates_args=())
def peers_clamp(x: Tensor, *, low: float = 0.0, many: bool = False) -> Tensor:
    return x * low + (1 if many else 0)


def _scale(ctx, inputs, keyword_only_inputs, output):
    ctx.low = keyword_only_inputs["low"]


peers_clamp.register_autograd(lambda ctx, grad: grad * ctx.low, setup_context=_scale)


@torch.library.custom_op("fusegrad_peers::sum", mutates_args=())
def peers_sum(x: list[Tensor], y: Tensor) -> list[Tensor]:
    return [x[0] * y, x[1] + y]


def _save_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs[0], inputs[1])


def _of_sum(ctx, grads):
    a, _, y = ctx.saved_tensors
    return [grads[0] * y * 3, grads[1] * 2], grads[0] * a + grads[1]


peers_sum.register_autograd(_of_sum, setup_context=_save_all)


@torch.library.custom_op("fusegrad_peers::sin", mutates_args=())
def peers_sin(x: Tensor) -> Tensor:
    return x.sin()


torch.library.define("fusegrad_peers::tanh", "(Tensor x) -> Tensor")
torch.library.impl("fusegrad_peers::tanh", "CompositeExplicitAutograd", lambda x: x.tanh() * 2)
torch.library.define("fusegrad_peers::mul", "(Tensor x) -> Tensor")
torch.library.define("fusegrad_peers::add_", "(Tensor(a!) x) -> Tensor(a!)")


class ApproximateTanh(Function):
    """As attention-gym writes its softcap."""

    @staticmethod
    def forward(x):
        return torch.ops.fusegrad_peers.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


def test_ops_with_the_name_of_another() -> None:
    bias = torch.randn(N, requires_grad=True)
    ops = torch.ops.fusegrad_peers
    check_score_mod(lambda s, b, h, q, kv: ops.exp(s) + peers_exp(bias[kv]) + ops.exp.default(s * 2), [bias])
    check_score_mod(lambda s, b, h, q, kv: ops.clamp(s, low=0.5) + peers_clamp(bias[kv], many=True, low=2.0), [bias])
    check_score_mod(lambda s, b, h, q, kv: sum(x.sin() for x in ops.sum([s, bias[q]], bias[kv])), [bias])
    check_score_mod(lambda s, b, h, q, kv: s + ops.exp(bias)[kv], [bias])


def test_an_approximate_softcap() -> None:
    approximate = ApproximateTanh.apply
    text = check_score_mod(lambda s, b, h, q, kv: 20 * approximate(s / 20), []).text
    assert "tanh" in text and "custom" in text


def test_an_op_without_a_backward() -> None:
    with pytest.raises(TraceError, match=r"fusegrad_peers.*sin.*no autograd formula was registered"):
        trace_score_mod(lambda s, b, h, q, kv: peers_sin(s))
    with torch.no_grad():
        assert "sin score" in trace_score_mod(lambda s, b, h, q, kv: peers_sin(s)).text
    trace_mask_mod(lambda b, h, q, kv: peers_sin(q / 2) > 0)


@pytest.mark.parametrize(
    ("mod", "name"),
    [
        (lambda s, b, h, q, kv: torch.ops.fusegrad_peers.mul(s), "fusegrad_peers::mul"),
        (lambda s, b, h, q, kv: torch.ops.fusegrad_peers.add_(s), "fusegrad_peers::add_"),
        (lambda s, b, h, q, kv: torch.ops.fusegrad.evaluate_mask_mod("", [1], [s], [], []), "fusegrad::evaluate"),
    ],
)
def test_other_ops_are_refused_by_their_full_name(mod: Callable, name: str) -> None:
    with pytest.raises(TraceError, match=name):
        trace_score_mod(mod)


def clamp(x: Tensor) -> Tensor:
    """A function of the user's with torch's protocol and a name of PyTorch's."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(clamp, (x,), x)
    return x * 2


def test_a_users_function_with_a_name_of_pytorchs() -> None:
    with pytest.raises(TraceError, match=r"test_trace_functions::clamp, which is not PyTorch's"):
        trace_score_mod(lambda s, b, h, q, kv: clamp(s))


# --- what asks for gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, kv: s if s.requires_grad else -s,
        lambda s, b, h, q, kv: s if s.grad_fn is None else -s,
        lambda s, b, h, q, kv: (s * 2).register_hook(lambda g: g * 2) and s,
        lambda s, b, h, q, kv: torch.autograd.grad(s * 2, s)[0],
        lambda s, b, h, q, kv: s * 2 if (s * 2).is_leaf else s,
    ],
)
def test_gradients_that_a_score_mod_asks_for(mod: Callable) -> None:
    with pytest.raises(TraceError, match=r"of a value of a score_mod|requires grad, which is not known"):
        trace_score_mod(mod)


def test_whether_a_captured_tensor_requires_grad() -> None:
    bias = torch.randn(N, requires_grad=True)
    check_score_mod(lambda s, b, h, q, kv: s + bias[kv] * (2 if bias[kv].requires_grad else 1), [bias])
    cache.clear()
    assert math.isfinite(trace_score_mod(lambda s, b, h, q, kv: s + q.requires_grad).text.count("score"))
