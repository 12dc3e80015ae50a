"""Calls that go straight to the dispatcher (python/fusegrad/_known.py): whatever changes between two calls, the second
gives what it gives by the function behind, with traces made anew; and what must not go straight does not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fusegrad
import numpy as np
import pytest
import torch
from coverings import rows_of
from fusegrad._tracing import cache
from support import deterministic_algorithms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

B, H, M, D = 2, 2, 24, 8
FUNCTIONS = ("flex_attention", "cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd")


def is_direct(name: str, *args: Any, **kwargs: Any) -> bool:
    """Whether the call goes straight to the dispatcher."""
    return getattr(fusegrad, name).direct(args, kwargs) is not None


def behind(name: str) -> Callable[..., Any]:
    """The function behind the direct call: Python's checks, torch.ops."""

    @functools.wraps(getattr(fusegrad, name).__wrapped__)
    def call(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(fusegrad.attention, "_attend_known", lambda arguments, named: None):
            return getattr(fusegrad, name).__wrapped__(*args, **kwargs)

    return call


def leaves(*shapes: tuple[int, ...], seed: int = 0, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(**options).requires_grad_() for s in shapes]


def qkv(**options: Any) -> list[Tensor]:
    return leaves(*[(B, H, M, D)] * 3, **options)


def flat(result: Any) -> list[Tensor]:
    return [t for part in result for t in flat(part)] if isinstance(result, (tuple, list)) else [result]


def outcome(call: Callable[[], Any], inputs: list[Tensor]) -> Any:
    """What a call gives: its values and the gradients of the inputs, or its error."""
    described: list[Any] = []
    try:
        results = [t for t in flat(call()) if isinstance(t, Tensor)]
        for t in results:
            value = None if isinstance(t, FakeTensor) else t.detach().clone()
            described.append((t.dtype, t.shape, t.stride(), t.requires_grad, value))
        differentiable = [t for t in results if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        if not differentiable or not wanted or isinstance(differentiable[0], FakeTensor):
            return described, []
        loss = sum([(t.double() * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in differentiable])
        return described, list(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
    except Exception as error:
        return described, type(error), str(error)


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, (tuple, list)) and not isinstance(expected, torch.Size):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
    else:
        assert got == expected


def assert_known_is_fresh(name: str, arguments: Callable[[], tuple[Any, ...]], inputs: Callable[[], list[Tensor]],
                          **options: Any) -> None:  # fmt: skip
    """The public function gives what the one behind does that knows no traces."""
    got = outcome(lambda: getattr(fusegrad, name)(*arguments(), **options), inputs())
    cache.clear()
    assert_same(got, outcome(lambda: behind(name)(*arguments(), **options), inputs()))


# --- what a score_mod reads, changed between two calls ---


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, H))
        self.factor = 1.5

    def forward(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * self.factor + self.table[h]


@dataclasses.dataclass
class Settings:
    factor: float = 2.0


GLOBAL_FACTOR, GLOBAL_TABLE = 1.25, torch.linspace(0, 1, M)


class Surroundings:
    """All that the score_mod below reaches; a change is a method."""

    def __init__(self) -> None:
        self.tensor = torch.linspace(-1, 1, H)
        self.grad = torch.linspace(0, 1, M).requires_grad_()
        self.number: Any = 0.5
        self.list = [0.25, 3]
        self.dict = {"a": 0.125}
        self.settings = Settings()
        self.module = Bias()
        self.helper = lambda x: x + 1.0
        self.used: Callable[..., Any] = self.made()

    def made(self) -> Callable[..., Any]:
        tensor, grad, number, items = self.tensor, self.grad, self.number, self.list
        table, settings, module, helper = self.dict, self.settings, self.module, self.helper

        def score_mod(
            score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, default: float = 0.75, *, named: float = 1.0
        ) -> Tensor:
            bias = tensor[h] * number + grad[i] * items[0] + GLOBAL_TABLE[j] * GLOBAL_FACTOR
            bias = bias + table["a"] * settings.factor + default * named
            # Each fact of a tensor that a function may ask is a part of what it computes.
            asked = tensor.requires_grad + 2 * tensor.stride(0) + 4 * tensor.size(0) + 8 * tensor.dtype.itemsize
            bias = bias + asked + 16 * isinstance(tensor, nn.Parameter)
            return helper(module(score, b, h, i, j)) + bias

        return score_mod

    def inputs(self) -> list[Tensor]:
        reached = (self.tensor, self.grad, self.module.table)
        return [t for t in reached if isinstance(t, Tensor) and t.is_leaf and t.is_floating_point()]

    def set_cell(self, name: str, value: Any) -> None:
        cells = dict(zip(self.used.__code__.co_freevars, self.used.__closure__, strict=True))  # type: ignore[arg-type]
        cells[name].cell_contents = value
        setattr(self, name, value)


Change = Callable[[Surroundings], Any]
CHANGES: dict[str, Change] = {
    "nothing": lambda s: None,
    "another tensor": lambda s: s.set_cell("tensor", torch.linspace(3, 4, H)),
    "a tensor in place": lambda s: s.tensor.mul_(3),
    "a tensor's storage": lambda s: s.tensor.set_(torch.linspace(3, 4, H)),
    "a dtype": lambda s: s.set_cell("tensor", torch.linspace(3, 4, H, dtype=torch.float16)),
    "integers": lambda s: s.set_cell("tensor", torch.arange(H)),
    "a shape": lambda s: s.set_cell("tensor", torch.linspace(3, 4, H + 5)),
    "more dimensions": lambda s: s.set_cell("tensor", torch.linspace(3, 4, H * 2).view(H, 2)),
    "strides": lambda s: s.set_cell("tensor", torch.linspace(3, 4, 2 * H)[::2]),
    "requires_grad": lambda s: s.tensor.requires_grad_(),
    "no requires_grad": lambda s: s.grad.requires_grad_(False),
    "a parameter": lambda s: s.set_cell("tensor", nn.Parameter(torch.linspace(3, 4, H))),
    "a tensor with a graph": lambda s: s.set_cell("tensor", s.grad[:H] * 2),
    "an expanded tensor": lambda s: s.set_cell("tensor", torch.ones(()).expand(H)),
    "an inference tensor": lambda s: s.set_cell("tensor", inference_tensor()),
    "a subclass": lambda s: s.set_cell("tensor", torch.linspace(3, 4, H).as_subclass(Subclass)),
    "a complex tensor": lambda s: s.set_cell("tensor", torch.ones(H, dtype=torch.complex64)),
    "a sparse tensor": lambda s: s.set_cell("tensor", torch.ones(H).to_sparse()),
    "a meta tensor": lambda s: s.set_cell("tensor", torch.ones(H, device="meta")),
    "no tensor": lambda s: s.set_cell("tensor", [5.0] * H),
    "a number": lambda s: s.set_cell("number", 7.5),
    "a whole number": lambda s: s.set_cell("number", 7),
    "a truth value": lambda s: s.set_cell("number", True),
    "a tensor for a number": lambda s: s.set_cell("number", torch.tensor(7.5, requires_grad=True)),
    "NaN": lambda s: s.set_cell("number", float("nan")),
    "-0.0": lambda s: s.set_cell("number", -0.0),
    "numpy's number": lambda s: s.set_cell("number", np.float64(7.5)),
    "nothing for a number": lambda s: s.set_cell("number", None),
    "a list's item": lambda s: s.list.__setitem__(0, 9.0),
    "a list's length": lambda s: s.list.insert(0, 9.0),
    "a dict's item": lambda s: s.dict.update(a=9.0),
    "a dict's keys": lambda s: s.dict.update(b=9.0),
    "no key": lambda s: s.dict.clear(),
    "an object's attribute": lambda s: setattr(s.settings, "factor", 9.0),
    "another object": lambda s: s.set_cell("settings", Settings(4.0)),
    "an object of another class": lambda s: s.set_cell("settings", Bias()),
    "a module's attribute": lambda s: setattr(s.module, "factor", 9.0),
    "a module's parameter": lambda s: setattr(s.module, "table", nn.Parameter(torch.linspace(5, 6, H))),
    "a module's parameter's requires_grad": lambda s: s.module.requires_grad_(False),
    "a module's hook": lambda s: s.module.register_forward_hook(lambda module, args, out: out * 2),
    "a method of one module": lambda s: setattr(s.module, "forward", lambda score, *rest: score - 1),
    "a function": lambda s: s.set_cell("helper", lambda x: x - 1.0),
    "a function's code": lambda s: setattr(s.helper, "__code__", (lambda x: x - 1.0).__code__),
    "the function's code": lambda s: setattr(s.used, "__code__", s.made().__code__.replace(co_name="other")),
    "a default": lambda s: setattr(s.used, "__defaults__", (9.0,)),
    "no default": lambda s: setattr(s.used, "__defaults__", None),
    "a named default": lambda s: setattr(s.used, "__kwdefaults__", {"named": 9.0}),
    "an attribute of the function": lambda s: setattr(s.used, "tensor", 9.0),
    "a partial": lambda s: setattr(s, "used", functools.partial(s.used, default=9.0)),
    "another function": lambda s: setattr(s, "used", Surroundings().used),
    "a ScoreMod": lambda s: setattr(s, "used", fusegrad.trace_score_mod(s.used)),
    "another kind of ScoreMod": lambda s: setattr(s, "used", fusegrad.trace_mask_mod(lambda b, h, q, k: q >= k)),
    "no function": lambda s: setattr(s, "used", None),
    "no callable": lambda s: setattr(s, "used", 3),
    "a module": lambda s: setattr(s, "used", s.module),
    "a method": lambda s: setattr(s, "used", s.module.forward),
    "a builtin": lambda s: setattr(s, "used", max),
}


class Subclass(Tensor):
    pass


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.linspace(3, 4, H)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


@rows_of("change", [*CHANGES], tests=4)
def test_surroundings(change: str) -> None:
    cache.clear()
    inputs, s = qkv(), Surroundings()
    for _ in range(2):
        fusegrad.flex_attention(*inputs, s.used)
    assert is_direct("flex_attention", *inputs, s.used)
    CHANGES[change](s)
    # lse, since numbers that all scores share leave out as it is.
    options = {"return_lse": True}
    assert_known_is_fresh("flex_attention", lambda: (*inputs, s.used), lambda: [*inputs, *s.inputs()], **options)


@pytest.mark.parametrize("name, value", [("GLOBAL_FACTOR", 9.0), ("GLOBAL_TABLE", torch.linspace(5, 6, M))])
def test_globals(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, s = qkv(), Surroundings()
    before = fusegrad.flex_attention(*inputs, s.used)
    monkeypatch.setitem(globals(), name, value)
    assert not torch.equal(fusegrad.flex_attention(*inputs, s.used), before)
    assert_known_is_fresh("flex_attention", lambda: (*inputs, s.used), lambda: [*inputs, *s.inputs()])
    monkeypatch.delitem(globals(), name)
    assert_known_is_fresh("flex_attention", lambda: (*inputs, s.used), lambda: inputs)


def test_a_class_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, module = qkv(), Bias()
    fusegrad.flex_attention(*inputs, module)
    monkeypatch.setattr(Bias, "forward", lambda self, score, b, h, i, j: score - self.table[h])
    assert_known_is_fresh("flex_attention", lambda: (*inputs, module), lambda: [*inputs, module.table])


# --- a block mask, changed between two calls ---


def masked() -> BlockMask:
    window = torch.full((), 12)
    return fusegrad.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < window), B, H, M, M, "cpu", 16)


def another_mask_mod(mask: BlockMask) -> None:
    mask.mask_mod = lambda b, h, q, k: q > k


MASK_CHANGES: dict[str, Callable[[BlockMask], Any]] = {
    "nothing": lambda m: None,
    "mask_mod": another_mask_mod,
    "no mask_mod": lambda m: setattr(m, "mask_mod", None),
    "lists": lambda m: m.kv_num_blocks.zero_(),
    "other lists": lambda m: setattr(m, "kv_num_blocks", torch.zeros_like(m.kv_num_blocks)),
    "lists of another dtype": lambda m: setattr(m, "kv_num_blocks", m.kv_num_blocks.float()),
    "no full blocks": lambda m: (setattr(m, "full_kv_num_blocks", None), setattr(m, "full_kv_indices", None)),
    "lengths": lambda m: setattr(m, "seq_lengths", (M, M + 1)),
    "block size": lambda m: setattr(m, "BLOCK_SIZE", (32, 32)),
    "wrong block size": lambda m: setattr(m, "BLOCK_SIZE", (0, 32)),
}


@pytest.mark.parametrize("change", MASK_CHANGES)
def test_block_masks(change: str) -> None:
    inputs, mask = qkv(), masked()
    fusegrad.flex_attention(*inputs, None, mask)
    assert is_direct("flex_attention", *inputs, block_mask=mask)
    MASK_CHANGES[change](mask)
    assert_known_is_fresh("flex_attention", lambda: (*inputs, None, mask), lambda: inputs)


def test_kinds_of_block_masks() -> None:
    class Own(BlockMask):
        pass

    inputs, mask = qkv(), masked()
    own = Own(*(getattr(mask, name) for name in ("seq_lengths", "kv_num_blocks", "kv_indices", "full_kv_num_blocks",
        "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "BLOCK_SIZE",
        "mask_mod")))  # fmt: skip
    assert not is_direct("flex_attention", *inputs, None, own)
    for wrong in (own, mask.mask_mod, 3, "causal", (1, 2)):
        assert_known_is_fresh("flex_attention", lambda wrong=wrong: (*inputs, None, wrong), lambda: inputs)


# --- options and kinds of arguments ---


def loss_arguments(name: str) -> tuple[Any, ...]:
    n, v, h = 6, 16, 8
    logits, other, hidden, weight, hidden_2, weight_2 = leaves((n, v), (n, v), (n, h), (v, h), (n, h), (v, h))
    target = torch.arange(n) % v
    return {
        "flex_attention": tuple(qkv()),
        "cross_entropy": (logits, target),
        "linear_cross_entropy": (hidden, weight, target),
        "jsd": (logits, other),
        "linear_jsd": (hidden, weight, hidden_2.detach(), weight_2.detach()),
    }[name]


PER_ROW = torch.linspace(0, 2, 6)
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "flex_attention": {
        "scale": [None, 0.5, 1, True, "x", np.float64(0.5), float("inf"), torch.tensor(0.5), 10**400],
        "enable_gqa": [True, 1, None],
        "return_lse": [True, 1],
        "return_aux": [AuxRequest(lse=True), AuxRequest(max_scores=True), True],
        "kernel_options": [{}, {"BLOCK_M": 64}, 3],
        "inplace": [True, 0],
        "deterministic": [True, False, 1],
        "dropout_p": [0, 0.0, -1.0, 2.0, "x"],
        "batch_invariant": [True, False, 1],
        "context_parallel": [3],
        "score_mod": [lambda s, b, h, i, j: s * 2, lambda s: s, 3],
        "unknown": [1],
    },
    "cross_entropy": {
        "weight": [torch.ones(16), torch.ones(15), 3],
        "size_average": [True, False, 1],
        "reduce": [False],
        "ignore_index": [None, 1, 1.0, True, 2**70, np.int64(1)],
        "reduction": ["none", "sum", "mean", "median", None, "\udc80"],
        "label_smoothing": [0, 1, 0.1, 2.0, True, "x"],
        "token_weight": [PER_ROW, PER_ROW.half(), PER_ROW[1:], PER_ROW.clone().requires_grad_()],
        "normalizer": [3, 3.0, True, torch.tensor(3.0), torch.ones(2), float("nan"), float("inf"), 1e39, "x"],
        "z_loss": [1e-2, -1.0],
        "softcap": [None, 5.0, 0.0],
        "support": [torch.arange(6).view(6, 1)],
        "inplace": [True, 1],
        "vocab_parallel": [3],
        "return_aux": [fusegrad.Aux(lse=True), True],
        "unknown": [1],
    },
    "linear_cross_entropy": {
        "linear_bias": [torch.zeros(16), torch.zeros(1)],
        "logit_scale": [1, 2.0, torch.tensor(2.0), PER_ROW + 1, "x"],
        "accumulate_dtype": [None, torch.float32, torch.float16, "float32"],
        "workspace_mib": [0, 1, -1, 1.0],
        "grad_weight_into": [torch.zeros(16, 8), torch.zeros(1)],
        "batch_invariant": [True, 1],
        "reduction": ["none", "sum"],
        "options": [3],
    },
    "jsd": {
        "labels": [torch.zeros(6, dtype=torch.long)],
        "beta": [0, 1, 0.25, 2.0],
        "temperature": [2, 0.5, 0.0],
        "log_probs": [True, 1],
        "tail": ["renormalize", "x"],
        "hard_weight": [1.0],
        "reduction": ["none", "batchmean", "mean", "sum"],
        "return_aux": [fusegrad.JSDAux(soft_loss=True)],
    },
    "linear_jsd": {"beta": [0, 1], "vocab_size": [12, 99], "student_softcap": [5.0], "reduction": ["none"]},
}
OPTION_CASES = [
    (name, o, i) for name, some in OPTIONS.items() for o, values in some.items() for i in range(len(values))
]


@rows_of("name, option, which", OPTION_CASES, tests=8)
def test_options(name: str, option: str, which: int) -> None:
    cache.clear()
    arguments = loss_arguments(name)
    getattr(fusegrad, name)(*arguments)
    value = OPTIONS[name][option][which]
    inputs = [t for t in arguments if t.is_floating_point()]
    if option == "inplace":  # of no leaves, which the call may overwrite
        anew = lambda: tuple(t * 1 if t.is_floating_point() else t for t in arguments)  # noqa: E731
        assert_known_is_fresh(name, anew, lambda: inputs, **{option: value})
    else:
        assert_known_is_fresh(name, lambda: arguments, lambda: inputs, **{option: value})


ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "a dtype": lambda t: t.half(),
    "another dtype": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "a shape": lambda t: t[..., :-1],
    "no dimensions": lambda t: t.sum(),
    "strides": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "no requires_grad": lambda t: t.detach(),
    "a parameter": lambda t: nn.Parameter(t.detach()) if t.is_floating_point() else t,
    "a subclass": lambda t: t.as_subclass(Subclass),
    "numpy": lambda t: t.detach().numpy(),
    "a list": lambda t: t.tolist(),
    "None": lambda t: None,
    "sparse": lambda t: t.detach().to_sparse(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([*t.detach()]),
    "conj": lambda t: torch.complex(t.detach().float(), t.detach().float()).conj(),
    "negative": lambda t: torch._neg_view(t),
    "no elements": lambda t: t[:0],
}


@rows_of("name, change", [*itertools.product(FUNCTIONS, ARGUMENTS)], tests=4)
def test_tensors(name: str, change: str) -> None:
    cache.clear()
    plain = loss_arguments(name)
    getattr(fusegrad, name)(*plain)
    for i in range(len(plain)):
        arguments = list(plain)
        arguments[i] = ARGUMENTS[change](arguments[i])
        given = [t for t in arguments if isinstance(t, Tensor) and t.is_leaf and t.is_floating_point()]
        assert_known_is_fresh(name, lambda given=arguments: tuple(given), lambda given=given: given)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ways_to_give_arguments(name: str) -> None:
    arguments = loss_arguments(name)
    function = getattr(fusegrad, name)
    parameters = list(inspect.signature(function).parameters)
    expected = function(*arguments)
    named = dict(zip(parameters, arguments, strict=False))
    assert is_direct(name, **named)
    assert_same(function(**named), expected)
    for wrong in (arguments[:-1], (*arguments, *[None] * 40), ()):
        assert_known_is_fresh(name, lambda wrong=wrong: wrong, lambda: [])
    assert_known_is_fresh(name, lambda: arguments, lambda: [], **{parameters[0]: arguments[0]})  # given twice
    not_interned = "".join(["reduc", "tion"]) if "reduction" in parameters else "".join(["sca", "le"])
    value = "sum" if "reduction" in parameters else 0.5
    assert_same(function(*arguments, **{not_interned: value}), behind(name)(*arguments, **{not_interned: value}))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_the_ops(name: str) -> None:
    """What a direct call leaves out, the op fills in."""
    parameters = inspect.signature(getattr(fusegrad, name)).parameters
    arguments = {a.name: a for a in getattr(torch.ops.fusegrad, name).default._schema.arguments}
    both = [n for n in parameters if n in arguments and not n.endswith("_mod")]
    assert len(both) > 5
    for n in both:
        empty = parameters[n].default is inspect.Parameter.empty
        assert empty != arguments[n].has_default_value(), n
        assert empty or parameters[n].default == arguments[n].default_value, n


# --- what watches PyTorch ---


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def device_and_functions() -> Iterator[Functions]:
    with torch.device("cpu"), Functions() as mode:
        yield mode


# Whether a call within it may go straight.
CONTEXTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), True),
    "default dtype": (lambda: default_dtype(torch.float64), True),
    "global hooks": (global_hook, True),
    "deterministic algorithms": (deterministic_algorithms, True),
    "saved tensors' hooks": (torch.autograd.graph.save_on_cpu, True),
    "a function mode": (Functions, False),
    "a dispatch mode": (Dispatches, False),
    "a device": (lambda: torch.device("cpu"), True),
    "another device": (lambda: torch.device("meta"), True),
    "a device and a function mode": (device_and_functions, False),
    "fake tensors": (lambda: FakeTensorMode(allow_non_fake_inputs=True), False),
    "below autograd": (torch._C._AutoDispatchBelowAutograd, False),
    "no functions of subclasses": (torch._C.DisableTorchFunctionSubclass, True),
    "no functions": (torch._C.DisableTorchFunction, False),
}


@rows_of("name, context", [*itertools.product(FUNCTIONS, CONTEXTS)], tests=4)
def test_contexts(name: str, context: str) -> None:
    cache.clear()
    enter, straight = CONTEXTS[context]
    arguments, module = loss_arguments(name), Bias()
    if name == "flex_attention" and context != "no functions":  # without which nothing can be traced
        arguments = (*arguments, lambda s, b, h, i, j: module(s, b, h, i, j))
    function = getattr(fusegrad, name)
    function(*arguments)
    inputs = [t for t in arguments if isinstance(t, Tensor) and t.is_floating_point()]
    with enter() as mode:
        assert is_direct(name, *arguments) == straight
        got = outcome(lambda: function(*arguments), inputs)
        seen = list(getattr(mode, "seen", ()))
    cache.clear()
    with enter() as mode:
        expected = outcome(lambda: behind(name)(*arguments), inputs)
        assert seen == list(getattr(mode, "seen", ())) or name == "flex_attention"
    if isinstance(mode, (Functions, Dispatches)):
        assert any(f"fusegrad.{name}" in call for call in seen)
    assert_same(got, expected)
    assert is_direct(name, *arguments)  # again


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name: str) -> None:
    arguments = loss_arguments(name)
    function = getattr(fusegrad, name)
    function(*arguments)
    first, rest = arguments[0], arguments[1:]

    def seen_by(transform: Callable[..., Any]) -> None:
        straight: list[bool] = []

        def known(x: Tensor) -> Tensor:
            straight.append(is_direct(name, x, *rest))
            return function(x, *rest).sum()

        got = outcome(lambda: transform(known), [])
        assert not any(straight)
        assert_same(got, outcome(lambda: transform(lambda x: behind(name)(x, *rest).sum()), []))

    seen_by(lambda f: torch.func.grad(f)(first))
    seen_by(lambda f: torch.vmap(f)(torch.stack([first, first])))
    seen_by(lambda f: torch.func.jvp(f, (first,), (torch.ones_like(first),)))
    seen_by(lambda f: torch.func.functionalize(f)(first))

    def dual(f: Callable[..., Any]) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(first.detach(), torch.ones_like(first))))

    seen_by(dual)


def test_captured_tensors_under_transforms() -> None:
    inputs = [t.detach() for t in qkv()]

    def attend(call: Callable[..., Any], bias: Tensor) -> Tensor:
        return call(*inputs, lambda s, b, h, i, j: s + bias[h])

    bias = torch.linspace(-1, 1, H)
    attend(fusegrad.flex_attention, bias)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).sum())(bias),
        lambda f: torch.vmap(f)(torch.stack([bias, bias * 2])),
        lambda f: torch.func.jvp(f, (bias,), (torch.ones_like(bias),)),
    ):
        got = outcome(lambda t=transform: t(lambda x: attend(fusegrad.flex_attention, x)), [])
        cache.clear()
        assert_same(got, outcome(lambda t=transform: t(lambda x: attend(behind("flex_attention"), x)), []))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tracers(name: str) -> None:
    arguments = tuple(t.detach() for t in loss_arguments(name))
    function = getattr(fusegrad, name)
    expected = function(*arguments)

    def call(*given: Tensor) -> Tensor:
        return function(*given)

    other = tuple(t + 1 if t.is_floating_point() else t for t in arguments)
    graph = make_fx(call)(*arguments)
    assert f"fusegrad.{name}" in graph.code
    traced = torch.jit.trace(call, arguments, check_trace=False)
    assert "fusegrad::" in str(traced.graph)
    exported = torch.export.export(type("M", (nn.Module,), {"forward": lambda self, *a: call(*a)})(), arguments)
    for program in (graph, traced, exported.module(), torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(program(*arguments), expected)
        torch.testing.assert_close(program(*other), function(*other))


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = qkv()
    fusegrad.flex_attention(*inputs)
    with FlopCounterMode(display=False) as counter:
        fusegrad.flex_attention(*inputs)
    assert counter.get_total_flops() > 0


# --- lifetimes and threads ---


def test_nothing_is_kept() -> None:
    """Neither the tensors of calls, nor those of functions, nor of errors."""
    gc.collect()
    references: list[Any] = []
    for _ in range(3):
        inputs, bias = qkv(), torch.ones(H, requires_grad=True)
        out, lse = fusegrad.flex_attention(*inputs, lambda s, b, h, i, j, bias=bias: s + bias[h], return_lse=True)
        with pytest.raises(ValueError):
            fusegrad.flex_attention(inputs[0], inputs[1][..., 1:], inputs[2])
        for name in FUNCTIONS[1:]:
            arguments = loss_arguments(name)
            references += [weakref.ref(t) for t in (*arguments, getattr(fusegrad, name)(*arguments))]
        references += [weakref.ref(t) for t in (*inputs, bias, out, lse)]
        del inputs, bias, out, lse, arguments
    assert not [r for r in references if r() is not None]


def test_reference_counts() -> None:
    for name in FUNCTIONS:
        arguments = loss_arguments(name)
        named = {"reduction": "sum"} if name != "flex_attention" else {"scale": 0.5, "return_lse": True}
        counted = [*arguments, None, "sum", named]
        wrong = {**named, "return_aux": 3}
        for _ in range(3):
            assert is_direct(name, *arguments, **named)
        before = [sys.getrefcount(x) for x in counted]
        for _ in range(50):
            getattr(fusegrad, name).direct(arguments, named)
            assert getattr(fusegrad, name).direct(arguments, wrong) is None
        after = [sys.getrefcount(x) for x in counted]
        assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True))


def test_threads() -> None:
    inputs = [t.detach() for t in qkv()]
    slopes = [torch.full((), float(i)) for i in range(4)]
    expected = [behind("flex_attention")(*inputs, lambda s, b, h, i, j, x=x: s * x) for x in slopes]
    wrong: list[int] = []

    def work(which: int) -> None:
        slope = slopes[which]
        for _ in range(50):
            out = fusegrad.flex_attention(*inputs, lambda s, b, h, i, j: s * slope)
            if not torch.equal(out, expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- flex_attention with texts: biased_attention, triangle_attention, and what known() leaves to Python ---


def biased(kind: str) -> tuple[Callable[[], Any], list[Tensor]]:
    inputs = leaves(*[(2, 3, H, M, D)] * 3, (2, 1, H, M, M))
    mask = torch.arange(2 * 3 * M).view(2, 3, 1, 1, M) % 5 > 0
    q, k, v, bias = inputs
    calls: dict[str, Callable[[], Any]] = {
        "biased": lambda: fusegrad.biased_attention(q, k, v, [bias], mask=mask, softcap=5.0),
        "triangle": lambda: fusegrad.triangle_attention(q, k, v, bias, mask, return_aux=True),
        "maxima": lambda: list(
            fusegrad.flex_attention(
                q[0], k[0], v[0], lambda s, b, h, i, j: s + bias[0, 0, h, i, j], return_aux=AuxRequest(True, True)
            )[1]
        ),
    }
    return calls[kind], inputs


@pytest.mark.parametrize("kind", ["biased", "triangle", "maxima"])
def test_calls_with_texts_go_straight(kind: str) -> None:
    call, inputs = biased(kind)
    real, found = fusegrad.attention._attend_known, []
    with mock.patch.object(fusegrad.attention, "_attend_known", lambda *a: found.append(real(*a)) or found[-1]):
        got = outcome(call, inputs)
        assert len(found) == 1 and found[0] is not None
        with forward_ad.dual_level(), Functions() as mode:
            call()
        assert found[1] is None and any("fusegrad.flex_attention" in one for one in mode.seen)
    with mock.patch.object(fusegrad.attention, "_attend_known", lambda *a: None):
        assert_same(got, outcome(call, inputs))


def test_a_tangent_does_not_go_straight() -> None:
    _, inputs = biased("biased")
    with forward_ad.dual_level():
        q = forward_ad.make_dual(inputs[0].detach(), torch.ones_like(inputs[0]))
        assert fusegrad.attention._attend_known((*[q[0]] * 3, ("", [], [], []) * 2 + ([], [])), {}) is None
        plain = q[0].clone().detach()
        assert fusegrad.attention._attend_known((*[plain] * 3, ("", [], [], []) * 2 + ([], [])), {}) is not None


def test_reference_counts_with_texts() -> None:
    q, k, v = qkv()
    mods = ("", [], [], []) * 2 + ([], [])
    arguments = (q, k, v, mods)
    before = [sys.getrefcount(x) for x in (*arguments, arguments)]
    for _ in range(50):
        fusegrad.attention._attend_known(arguments, {})
        assert fusegrad.attention._attend_known((q, k, v, mods[1:]), {}) is None
    after = [sys.getrefcount(x) for x in (*arguments, arguments)]
    assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True))
