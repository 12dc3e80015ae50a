"""The losses as modules."""

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch


def test_cross_entropy_loss() -> None:
    x, t, w = torch.randn(8, 5), torch.randint(0, 5, (8,)), torch.rand(5)
    ours = fusegrad.CrossEntropyLoss(w, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(ours(x, t), torch.nn.CrossEntropyLoss(w, label_smoothing=0.1, reduction="sum")(x, t))
    assert "label_smoothing=0.1" in repr(ours) and list(ours.state_dict()) == ["weight"]


def test_linear_cross_entropy_loss_owns_its_weight_or_takes_a_tied_one() -> None:
    x, t = torch.randn(8, 6), torch.randint(0, 5, (8,))
    own = fusegrad.LinearCrossEntropyLoss(6, 5, bias=True)
    assert set(own.state_dict()) == {"linear.weight", "linear.bias"}
    own(x, t).backward()
    assert own.linear.weight.grad is not None and own.linear.bias.grad is not None
    tied = torch.nn.Embedding(5, 6)
    none = fusegrad.LinearCrossEntropyLoss(6, None)
    expected = torch.nn.functional.cross_entropy(x @ tied.weight.t(), t)
    torch.testing.assert_close(own(x, t, tied.weight, linear_bias=torch.zeros(5)), expected)
    with pytest.raises(ValueError, match="linear_bias must be given with a linear_weight where the module owns a bias"):
        own(x, t, tied.weight)
    with pytest.raises(ValueError, match="linear_bias must come with a linear_weight"):
        own(x, t, linear_bias=torch.zeros(5))
    torch.testing.assert_close(none(x, t, tied.weight), expected)
    with pytest.raises(ValueError, match="linear_weight must be given"):
        none(x, t)


def test_jsd_loss() -> None:
    student, teacher, labels = torch.randn(8, 5), torch.randn(8, 5), torch.randint(0, 5, (8,))
    ours = fusegrad.JSDLoss(beta=0.2, temperature=2.0)
    expected = fusegrad.jsd(student, teacher, labels=labels, beta=0.2, temperature=2.0)
    torch.testing.assert_close(ours(student, teacher, labels=labels), expected)
    assert "beta=0.2" in repr(ours) and not ours.state_dict()


def test_linear_jsd_loss_owns_its_weight_or_takes_a_tied_one() -> None:
    x, y, v = torch.randn(8, 6), torch.randn(8, 4), torch.randn(5, 4)
    own = fusegrad.LinearJSDLoss(6, 5, bias=True, beta=0.0)
    assert set(own.state_dict()) == {"linear.weight", "linear.bias"}
    own(x, y, v).backward()
    assert own.linear.weight.grad is not None and own.linear.bias.grad is not None
    tied = torch.nn.Embedding(5, 6)
    none = fusegrad.LinearJSDLoss(6, None, beta=0.0)
    expected = fusegrad.jsd(x @ tied.weight.t(), y @ v.t(), beta=0.0)
    torch.testing.assert_close(own(x, y, v, tied.weight, student_bias=torch.zeros(5)), expected)
    with pytest.raises(ValueError, match="student_bias must be given with a student_weight where the module owns"):
        own(x, y, v, tied.weight)
    with pytest.raises(ValueError, match="student_bias must come with a student_weight"):
        own(x, y, v, student_bias=torch.zeros(5))
    torch.testing.assert_close(none(x, y, v, tied.weight), expected)
    with pytest.raises(ValueError, match="student_weight must be given"):
        none(x, y, v)
    top_k = (torch.log(torch.tensor([[0.5, 0.2]] * 8)), torch.tensor([[1, 4]] * 8))
    own(x, top_k).backward()


OF_MODULES = [
    (fusegrad.CrossEntropyLoss, fusegrad.cross_entropy),
    (fusegrad.LinearCrossEntropyLoss, fusegrad.linear_cross_entropy),
    (fusegrad.JSDLoss, fusegrad.jsd),
    (fusegrad.LinearJSDLoss, fusegrad.linear_jsd),
]


@pytest.mark.parametrize("module, function", OF_MODULES, ids=lambda x: x.__name__)
def test_a_module_takes_all_that_its_function_takes(module: Any, function: Callable[..., Any]) -> None:
    taken, of_call = (set(inspect.signature(f).parameters) for f in (module, module.forward))
    assert not set(inspect.signature(function).parameters) - taken - of_call
    assert not taken & of_call


def test_what_changes_from_call_to_call_reaches_the_function() -> None:
    h, t, support = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,)), torch.arange(3).expand(8, 3)
    own = fusegrad.LinearCrossEntropyLoss(6, 5, dtype=torch.float64)
    weight = own.linear.weight
    logits = h @ weight.t()
    of_support = torch.nn.functional.cross_entropy(logits[:, :3], t)
    torch.testing.assert_close(own(h, t, support=support), of_support)
    torch.testing.assert_close(fusegrad.CrossEntropyLoss()(logits, t, support=support), of_support)
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, t), weight)
    into = torch.zeros(5, 6, dtype=torch.float64)
    own(h, t, grad_weight_into=into).backward()
    torch.testing.assert_close(into, expected)
    assert weight.grad is None
    modules = [fusegrad.CrossEntropyLoss(), own, fusegrad.JSDLoss(), fusegrad.LinearJSDLoss(6, 5)]
    given: list[tuple[Any, ...]] = [(logits, t), (h, t), (logits, logits), (h, h, weight)]
    for module, arguments in zip(modules, given, strict=True):
        with pytest.raises(TypeError, match=r"vocab_parallel must be a VocabParallel or None, but got 3"):
            module(*arguments, vocab_parallel=3)


def test_while_another_thread_imports_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    fusegrad.cross_entropy(torch.randn(8, 5), torch.randint(0, 5, (8,)))
    fusegrad.flex_attention(*torch.randn(3, 1, 1, 4, 8).unbind(0))
