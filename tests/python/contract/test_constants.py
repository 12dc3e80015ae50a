"""What gets no gradient must not enter a loss silently: constant values that come beside a loss, and constant
arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fusegrad
import pytest
import torch
import torch.distributed as dist
from coverings import pairs_of, rows_of
from fusegrad import Aux, JSDAux, VocabParallel
from support import DEVICES
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A group of this process alone has the whole vocabulary."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


AUX = ["z_loss", "token_accuracy"]
JSD_AUX = ["soft_loss", "hard_loss"]


def tensors(device: str) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "logits": torch.randn(6, 9, device=device, requires_grad=True),
        "hidden": torch.randn(6, 5, device=device, requires_grad=True),
        "head": torch.randn(9, 5, device=device, requires_grad=True),
        "target": torch.tensor([0, 3, 8, -100, 2, 5], device=device),
        "teacher": torch.randn(6, 9, device=device),
        "teacher_hidden": torch.randn(6, 4, device=device),
        "teacher_weight": torch.randn(9, 4, device=device),
    }


def call(op: str, t: dict[str, Any], **options: Any) -> Any:
    if op == "cross_entropy":
        return fusegrad.cross_entropy(t["logits"] * 1, t["target"], **options)
    if op == "linear_cross_entropy":
        return fusegrad.linear_cross_entropy(t["hidden"] * 1, t["head"], t["target"], **options)
    if op == "jsd":
        return fusegrad.jsd(t["logits"] * 1, t["teacher"], labels=t["target"], **options)
    teacher = (t["teacher_hidden"], t["teacher_weight"])
    return fusegrad.linear_jsd(t["hidden"] * 1, t["head"], *teacher, labels=t["target"], **options)


def aux_of(op: str, *names: str) -> Any:
    return (JSDAux if op.endswith("jsd") else Aux)(**dict.fromkeys(names, True))


def leaves(op: str, t: dict[str, Any]) -> list[Tensor]:
    return [t["hidden"], t["head"]] if op.startswith("linear") else [t["logits"]]


OPS = ["cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd"]
CONSTANTS = [(op, name) for op in OPS for name in (JSD_AUX if op.endswith("jsd") else AUX)]


@pairs_of({"device": [*DEVICES], "sharded": [False, True], "op, name": [*CONSTANTS]})
def test_backward_that_reaches_an_aux_value_raises(op: str, name: str, sharded: bool, device: str) -> None:
    for options in ({}, {"reduction": "none"}, {"inplace": True}, {"reduction": "sum"}):
        t = tensors(device)
        if sharded:
            options = {**options, "vocab_parallel": VocabParallel(None, 0, 9)}
        loss, aux = call(op, t, return_aux=aux_of(op, name), **options)
        value = getattr(aux, name)
        message = f"{op}: aux.{name} must not be differentiated, since it is a constant, but a backward reached it"
        assert value.requires_grad
        with pytest.raises(NotImplementedError, match=message):
            (loss.sum() - 0.01 * value.mean()).backward(retain_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad((value * 2).sum(), leaves(op, t), retain_graph=True)
        # For logging it is detached, or left alone.
        (loss.sum() + value.detach().sum()).backward()
        expected = torch.autograd.grad(call(op, t, **options).sum(), leaves(op, t))
        for leaf, right in zip(leaves(op, t), expected, strict=True):
            torch.testing.assert_close(leaf.grad, right)


@pytest.mark.parametrize("device", DEVICES)
def test_aux_values_of_what_needs_no_gradient(device: str) -> None:
    for op, name in CONSTANTS:
        with torch.no_grad():
            _, aux = call(op, tensors(device), return_aux=aux_of(op, name))
        assert not getattr(aux, name).requires_grad
        t = {key: value.detach() for key, value in tensors(device).items()}
        _, aux = call(op, t, return_aux=aux_of(op, name))
        assert not getattr(aux, name).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_compiled(op: str, device: str) -> None:
    """A compiler asks for the gradients of all that a graph returns: what is returned for logging must not raise, what
    enters a loss must, inside the graph and after it."""
    name = "soft_loss" if op.endswith("jsd") else "z_loss"
    t = tensors(device)

    def returns(t: dict[str, Any]) -> Any:
        loss, aux = call(op, t, return_aux=aux_of(op, name))
        return loss, getattr(aux, name)

    def uses(t: dict[str, Any]) -> Tensor:
        loss, value = returns(t)
        return loss - 0.01 * value.mean()

    def check(loss: Callable[[], Tensor]) -> None:
        if device == "cpu":
            with pytest.raises(NotImplementedError, match=f"{op}: aux.{name} must not be differentiated"):
                torch.autograd.grad(loss(), leaves(op, t))
            return
        for gradient in torch.autograd.grad(loss(), leaves(op, t)):
            assert gradient.isnan().any()
        fusegrad.set_check_targets(True)
        try:
            with pytest.raises(NotImplementedError, match=f"{op}: aux.{name} must not be differentiated"):
                torch.autograd.grad(loss(), leaves(op, t))
        finally:
            fusegrad.set_check_targets(False)

    torch.compiler.reset()
    compiled = torch.compile(returns, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(call(op, t), leaves(op, t))
    loss, _ = compiled(t)
    for ours, right in zip(torch.autograd.grad(loss, leaves(op, t)), expected, strict=True):
        torch.testing.assert_close(ours, right)

    def after() -> Tensor:
        loss, value = compiled(t)
        return loss - 0.01 * value.mean()

    inside = torch.compile(uses, backend="aot_eager", fullgraph=True)
    check(after)
    check(lambda: inside(t))


def test_compiled_autograd() -> None:
    t = tensors("cpu")
    loss, aux = call("cross_entropy", t, return_aux=aux_of("cross_entropy", "z_loss", "lse"))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        (loss + aux.lse.sum()).backward(retain_graph=True)
        with pytest.raises(Exception, match=r"cross_entropy: aux\.z_loss must not be differentiated"):
            (loss + aux.z_loss.sum()).backward()


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_cuda_graph() -> None:
    """A step that returns an aux value is captured; one that minimises it is refused while it is."""
    t = tensors("cuda")
    leaf = t["logits"]

    def step(minimise: bool) -> Tensor:
        loss, aux = call("cross_entropy", t, return_aux=aux_of("cross_entropy", "z_loss"))
        (gradient,) = torch.autograd.grad(loss + aux.z_loss.sum() if minimise else loss, [leaf])
        return gradient

    right = step(False)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(False)
        with pytest.raises(NotImplementedError, match=r"aux\.z_loss must not be differentiated"):
            step(True)
    graph.replay()
    torch.testing.assert_close(out, right)


# Every floating argument beside the differentiable ones: it raises where it requires grad. `int`s cannot.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "weight": lambda g: torch.rand(9, device=g),
    "token_weight": lambda g: torch.rand(6, device=g),
    "normalizer": lambda g: torch.tensor(3.0, device=g),
}
ARGUMENTS = [
    *[("cross_entropy", name, make) for name, make in LOSSES.items()],
    *[("linear_cross_entropy", name, make) for name, make in LOSSES.items()],
    *[("jsd", name, make) for name, make in LOSSES.items() if name != "weight"],
    *[("linear_jsd", name, make) for name, make in LOSSES.items() if name != "weight"],
    ("linear_cross_entropy", "target", lambda g: torch.rand(6, 9, device=g)),
    ("linear_jsd", "teacher_hidden", lambda g: torch.randn(6, 4, device=g)),
    ("linear_jsd", "teacher_weight", lambda g: torch.randn(9, 4, device=g)),
    ("linear_jsd", "teacher_bias", lambda g: torch.randn(9, device=g)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@rows_of("op, name, make", [*ARGUMENTS])
def test_constant_argument_that_requires_grad_raises(
    op: str, name: str, make: Callable[[str], Tensor], sharded: bool, device: str
) -> None:
    t = tensors(device)
    given = make(device).requires_grad_()
    options = {"vocab_parallel": VocabParallel(None, 0, 9)} if sharded else {}
    (t if name in t else options)[name] = given
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"requires? grad|must be a|[Ee]xpected"):
        call(op, t, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_the_other_arguments_get_their_gradients(device: str) -> None:
    t = tensors(device)
    probabilities = torch.rand(6, 9, device=device).requires_grad_()
    fusegrad.cross_entropy(t["logits"], probabilities).backward()
    teacher = t["teacher"].requires_grad_()
    fusegrad.jsd(t["logits"], teacher).backward()
    bias = torch.zeros(9, device=device, requires_grad=True)
    fusegrad.linear_cross_entropy(t["hidden"], t["head"], t["target"], linear_bias=bias).backward()
    for tensor in (t["logits"], probabilities, teacher, t["hidden"], t["head"], bias):
        assert tensor.grad is not None and bool(tensor.grad.ne(0).any())
