"""What a score_mod depends on though it names it not: modes, hooks and states of PyTorch between two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import TraceError, trace_score_mod
from fusegrad._tracing import cache
from support import deterministic_algorithms
from test_trace import H, N, assert_follows, check_score_mod, fresh, misses  # noqa: F401
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def test_a_global_forward_hook() -> None:
    net = Net()

    def score_mod(s, b, h, q, kv):
        return net(s)

    assert_follows(score_mod, [net.weight], hit=False)
    assert_follows(score_mod, [net.weight], hit=True)
    hooks = [of_modules.register_module_forward_hook(lambda module, args, out: out * 3)]
    try:
        assert_follows(score_mod, [net.weight], hit=False)
        hooks.append(of_modules.register_module_forward_pre_hook(lambda module, args: (args[0] + 1,)))
        assert_follows(score_mod, [net.weight], hit=False)
    finally:
        for hook in hooks:
            hook.remove()
    assert_follows(score_mod, [net.weight], hit=True)


def _register(name: str) -> Callable[[nn.Module], object]:
    hook: Callable = lambda module, *grads: None  # noqa: E731
    return lambda net: getattr(net, name)(hook)


@pytest.mark.parametrize("of_score", [True, False])
@rows_of(
    "register",
    [
        _register("register_backward_hook"),
        _register("register_full_backward_hook"),
        _register("register_full_backward_pre_hook"),
        lambda net: of_modules.register_module_full_backward_hook(lambda module, *grads: None),
        lambda net: of_modules.register_module_full_backward_pre_hook(lambda module, *grads: None),
    ],
)
def test_backward_hooks_of_modules_are_refused(register: Callable, of_score: bool) -> None:
    net, bias = Net(), torch.randn(N, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        return net(s) if of_score else s + net(bias[kv])

    trace_score_mod(score_mod)
    hook = register(net)
    try:
        with pytest.raises(TraceError, match="hook"):
            trace_score_mod(score_mod)
    finally:
        hook.remove()
    trace_score_mod(score_mod)


def test_hooks_of_captured_tensors_are_pytorchs() -> None:
    bias = torch.randn(N, requires_grad=True)
    bias.register_hook(lambda grad: grad * 2)
    computed = bias * 3
    computed.register_hook(lambda grad: grad * 5)
    check_score_mod(lambda s, b, h, q, kv: s + computed[kv] + bias[q], [bias])


def test_whether_gradients_are_recorded() -> None:
    bias, other = torch.randn(N, requires_grad=True), torch.randn(N, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        with torch.no_grad():
            inner = 2 if torch.is_grad_enabled() else 3
        return s * inner + (bias if torch.is_grad_enabled() else other)[kv]

    trained = check_score_mod(score_mod, [bias])
    assert trained.buffers[0] is bias
    for _ in range(2):
        with torch.no_grad():
            mod = trace_score_mod(score_mod)
            assert mod.buffers[0] is other and "mul score 3.0" in mod.text
        with torch.inference_mode():
            assert trace_score_mod(score_mod).buffers[0] is other
        assert trace_score_mod(score_mod).buffers[0] is bias


def test_a_function_that_does_not_ask_has_one_text() -> None:
    bias = torch.randn(N, requires_grad=True)

    def score_mod(s, b, h, q, kv):
        with torch.no_grad():
            size = s.abs()
        return s / (1 + size) + bias.exp()[kv]

    with torch.no_grad():
        without = trace_score_mod(score_mod)
    assert trace_score_mod(score_mod).text == without.text
    assert misses() == 1
    with torch.no_grad():
        assert not trace_score_mod(score_mod).buffers[0].requires_grad
    assert trace_score_mod(score_mod).buffers[0].requires_grad


def test_inference_mode() -> None:
    def score_mod(s, b, h, q, kv):
        return s * 2 if torch.is_inference_mode_enabled() else s * 3

    for _ in range(2):
        assert "3" in trace_score_mod(score_mod).text
        with torch.inference_mode():
            assert "2" in trace_score_mod(score_mod).text


def test_autocast() -> None:
    def score_mod(s, b, h, q, kv):
        return s * 2 if torch.is_autocast_enabled("cpu") else s * 3

    for _ in range(2):
        assert "3" in trace_score_mod(score_mod).text
        with torch.autocast("cpu"):
            assert "2" in trace_score_mod(score_mod).text


def test_a_function_of_custom_fwd() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx, x):
            return x * (2 if x.dtype == torch.bfloat16 else 3)

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * 5

    for _ in range(2):
        assert "mul score 3" in trace_score_mod(lambda s, b, h, q, kv: Doubled.apply(s)).text
        with torch.autocast("cpu"):
            assert "mul score 2" in trace_score_mod(lambda s, b, h, q, kv: Doubled.apply(s)).text


@contextlib.contextmanager
def float32_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    ("asked", "context"),
    [
        (lambda: torch.are_deterministic_algorithms_enabled(), deterministic_algorithms),
        (lambda: torch.get_default_dtype() == torch.float32, float32_by_default),
        (lambda: torch.tensor(0.5).dtype == torch.float32, float32_by_default),
        (lambda: torch.get_default_device().type == "meta", lambda: torch.device("meta")),
        (lambda: torch.zeros(3).device.type == "meta", lambda: torch.device("meta")),
    ],
    ids=["deterministic", "default_dtype", "dtype_of_a_number", "default_device", "device_of_a_tensor"],
)
def test_states(asked: Callable, context: Callable) -> None:
    def score_mod(s, b, h, q, kv):
        return s * 2 if asked() else s * 3

    for _ in range(2):
        assert "3" in trace_score_mod(score_mod).text
        with context():
            assert "2" in trace_score_mod(score_mod).text


def test_a_mode_of_torch_functions() -> None:
    class ExpIsSin(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return (torch.sin if func is torch.exp else func)(*args, **(kwargs or {}))

    def score_mod(s, b, h, q, kv):
        return torch.exp(s)

    for _ in range(2):
        assert "exp score" in trace_score_mod(score_mod).text
        with ExpIsSin():
            assert "sin score" in trace_score_mod(score_mod).text


class Doubling(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is Tensor.__getitem__ else out


def test_subclasses_with_functions_of_their_own() -> None:
    table = torch.randn(N).as_subclass(Doubling)
    with pytest.raises(TraceError, match="subclass Doubling, which has functions of its own"):
        trace_score_mod(lambda s, b, h, q, kv: s + table[kv])

    class Plain(Tensor):
        pass

    plain = torch.randn(N).as_subclass(Plain)
    check_score_mod(lambda s, b, h, q, kv: s + plain[kv], [])


def test_training_and_parametrizations() -> None:
    net = Net()

    def score_mod(s, b, h, q, kv):
        return s * 2 if net.training else s * 3

    assert_follows(score_mod)
    net.eval()
    assert_follows(score_mod)

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs()

    bias = nn.Module()
    bias.table = nn.Parameter(torch.randn(H, N))

    def by_table(s, b, h, q, kv):
        return s + bias.table[h, kv]

    assert_follows(by_table, [bias.table])
    table = bias.table
    nn.utils.parametrize.register_parametrization(bias, "table", Positive())
    check_score_mod(by_table, [table])
    cache.clear()
    dropout = nn.Dropout(0.5).eval()
    check_score_mod(lambda s, b, h, q, kv: dropout(s) + F.dropout(s, training=False), [])
