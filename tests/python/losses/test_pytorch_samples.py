"""linear_cross_entropy and its module on the samples by which PyTorch (>= 2.13) tests its own."""

from __future__ import annotations

from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from support import gradients
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this PyTorch has no linear_cross_entropy with options"
)
# What ours refuses: more than one axis of classes, and probabilities of a loss whose logits are never whole.
REFUSED = r"linear_weight must have shape|out_features must be \(\)|target must be"


@pytest.mark.parametrize("variant", ["", "chunked", "chunked_none"])
@rows_of("dtype", [torch.float32, torch.float64])
def test_samples_of_the_function(variant: str, dtype: torch.dtype) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(x for x in op_db if x.name == "nn.functional.linear_cross_entropy" and x.variant_test_name == variant)
    same = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        weight, target = sample.args
        if weight.dim() != 2:
            with pytest.raises(ValueError, match=REFUSED):
                fusegrad.linear_cross_entropy(sample.input, weight, target, **sample.kwargs)
            continue
        bias = sample.kwargs.pop("linear_bias", None)
        inputs = [sample.input, weight, *([] if bias is None else [bias])]

        def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None = None, sample: Any = sample) -> Tensor:
            return f(x, w, sample.args[1].detach(), linear_bias=b, **sample.kwargs)

        ours = gradients(lambda *x: call(fusegrad.linear_cross_entropy, *x), inputs)
        theirs = gradients(lambda *x: call(F.linear_cross_entropy, *x), inputs)
        torch.testing.assert_close(ours, theirs)
        same += 1
    assert same > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_samples_of_the_module(dtype: torch.dtype) -> None:
    from torch.testing._internal.common_modules import module_inputs_torch_nn_LinearCrossEntropyLoss

    same = 0
    for sample in module_inputs_torch_nn_LinearCrossEntropyLoss(None, "cpu", dtype, True, True):
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        if options["out_features"]:
            with pytest.raises(ValueError, match=REFUSED):
                fusegrad.LinearCrossEntropyLoss(*arguments, **options)
            continue
        modules = [m(*arguments, **options) for m in (fusegrad.LinearCrossEntropyLoss, torch.nn.LinearCrossEntropyLoss)]
        modules[0].load_state_dict(modules[1].state_dict())
        x, target = sample.forward_input.args
        found = []
        for module in modules:
            leaf = x.detach().clone().requires_grad_()
            loss = module(leaf, target)
            loss.backward(torch.ones_like(loss))
            found.append([loss.detach(), leaf.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(*found, equal_nan=True)
        same += 1
    assert same > 50


def test_errors_of_the_module() -> None:
    from torch.testing._internal.common_modules import module_error_inputs_torch_nn_LinearCrossEntropyLoss

    for sample in module_error_inputs_torch_nn_LinearCrossEntropyLoss(None, "cpu", torch.float64, True, True):
        given = sample.module_error_input
        with pytest.raises((ValueError, TypeError), match=r"^LinearCrossEntropyLoss|^linear_cross_entropy"):
            module = fusegrad.LinearCrossEntropyLoss(*given.constructor_input.args, **given.constructor_input.kwargs)
            module(*given.forward_input.args)
