"""The weight's gradient added to a tensor of the caller's, grad_weight_into, against float64 formulas."""

from __future__ import annotations

from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import reference
from fusegrad.integrations import megatron
from support import DEVICE_DTYPES, DEVICES, acc_of, assert_as_good_as_eager
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable as compiled_autograd
from torch.utils.checkpoint import checkpoint

ROWS, HIDDEN, VOCAB = 40, 16, 301


def sample(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight, targets, and a buffer that is not empty."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, device=device).to(dtype).requires_grad_() for n in (ROWS, VOCAB))
    target = torch.randint(0, VOCAB, (ROWS,), device=device)
    target[3] = -100
    return hidden, weight, target, torch.randn(VOCAB, HIDDEN, device=device, dtype=acc_of(dtype))


def plain_gradient(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.autograd.grad(fusegrad.linear_cross_entropy(hidden, weight, target, workspace_mib=0), weight)[0]


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}, {"reduction": "sum"}, {"support": True}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_micro_batches(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    hidden, weight, target, into = sample(device, dtype)
    start = into.clone()
    options = dict(options)
    if options.pop("support", False):
        options["support"] = (target.clamp_min(0)[:, None] + torch.arange(5, device=device)) % VOCAB
    plain = {name: value for name, value in options.items() if name != "workspace_mib"}
    bias = torch.randn(VOCAB, device=device).to(dtype).requires_grad_()
    for upstream in (1.0, -0.25, 3.0):
        loss = fusegrad.linear_cross_entropy(hidden, weight, target, linear_bias=bias, grad_weight_into=into, **options)
        loss.backward(torch.tensor(upstream, device=device, dtype=loss.dtype))
    assert weight.grad is None
    found = {"weight": into - start, "input": hidden.grad, "bias": bias.grad}
    truths = []
    rounded = 2 * torch.finfo(dtype).eps  # .grad of the others adds up in their dtype
    for kind in (dtype, torch.float64):
        leaves = [t.detach().to(kind).requires_grad_() for t in (hidden, weight, bias)]
        right = reference.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], **plain)[0]
        truths.append(torch.autograd.grad(right, leaves, torch.tensor(3.75, device=device).to(right.dtype)))
    for i, name in enumerate(("input", "weight", "bias")):
        assert_as_good_as_eager(
            found[name], truths[0][i], truths[1][i], name, least=2e-6 if name == "weight" else rounded
        )


@pytest.mark.parametrize("device", DEVICES)
def test_every_backward_adds(device: str) -> None:
    hidden, weight, target, into = sample(device)
    once = plain_gradient(hidden, weight, target)
    into.zero_()
    loss = fusegrad.linear_cross_entropy(hidden, weight, target, grad_weight_into=into, workspace_mib=0)
    for count in (1, 2):
        version = into._version
        loss.backward(retain_graph=True)
        assert into._version > version
        if count == 1:
            assert torch.equal(into, once)
    torch.testing.assert_close(into, 2 * once)
    torch.autograd.grad(loss, hidden, retain_graph=True)  # asks for nothing of the weight's
    torch.testing.assert_close(into, 2 * once)
    loss.backward()
    torch.testing.assert_close(into, 3 * once)


@pytest.mark.parametrize("support", [False, True])
def test_a_second_differentiation_raises(support: bool) -> None:
    hidden, weight, target, into = sample()
    options: dict[str, Any] = {"support": target.clamp_min(0)[:, None]} if support else {}
    bias = torch.zeros(VOCAB, requires_grad=True)
    loss = fusegrad.linear_cross_entropy(
        hidden, weight, target, linear_bias=bias, grad_weight_into=into, reduction="none", **options
    )
    wanted = [hidden, bias, weight]
    for_hidden, for_bias, none = torch.autograd.grad(loss.sum(), wanted, create_graph=True, allow_unused=True)
    assert none is None
    for gradient in (for_hidden, for_bias):
        with pytest.raises(NotImplementedError, match="linear_cross_entropy: the gradient must not be differentiated"):
            gradient.sum().backward(retain_graph=True)
    version = into._version
    loss.sum().backward(retain_graph=True)
    assert into._version > version


def test_pending_micro_batches_and_versions() -> None:
    hidden, weight, target, into = sample()
    once = plain_gradient(hidden, weight, target)
    into.zero_()
    pending = [fusegrad.linear_cross_entropy(hidden, weight, target, grad_weight_into=into) for _ in range(3)]
    for loss in reversed(pending):
        version = into._version
        loss.backward()
        assert into._version > version
    torch.testing.assert_close(into, 3 * once)
    factor = torch.ones((), requires_grad=True)
    norm = (into * factor).sum()  # saves the buffer
    fusegrad.linear_cross_entropy(hidden, weight, target, grad_weight_into=into).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        norm.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_once(reentrant: bool) -> None:
    hidden, weight, target, into = sample()
    once = plain_gradient(hidden, weight, target)
    into.zero_()

    def loss(x: Tensor) -> Tensor:
        return fusegrad.linear_cross_entropy(x, weight, target, grad_weight_into=into)

    checkpoint(loss, hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close(into, once)


def test_log_probs_in_float64() -> None:
    hidden, weight, target, into = sample(dtype=torch.float64)
    expected = torch.autograd.grad(sum(o.sum() for o in reference.linear_log_prob(hidden, weight, target)), weight)[0]
    into.zero_()
    out = fusegrad.linear_log_prob(hidden, weight, target, grad_weight_into=into)
    (out.log_prob + out.entropy).sum().backward()
    torch.testing.assert_close(into, expected)


def test_refused_before_anything_is_written() -> None:
    hidden, weight, target, into = sample()
    low = weight.detach().bfloat16().requires_grad_()
    with torch.inference_mode():
        made_there = torch.zeros(VOCAB, HIDDEN)
    cases: list[tuple[Any, Tensor, dict[str, Any], str]] = [
        (TypeError, into.bfloat16(), {}, "grad_weight_into must be Float, but got BFloat16"),
        (ValueError, into[1:], {}, "must have linear_weight's shape"),
        (ValueError, into.t().contiguous().t(), {}, "must be contiguous"),
        (ValueError, into[:1].expand(VOCAB, HIDDEN), {}, "must be contiguous"),
        (ValueError, into.clone().requires_grad_(), {}, "must not require grad"),
        (ValueError, made_there, {}, "made in inference mode"),
        (ValueError, weight.detach(), {}, "must not share memory with another argument"),
        (ValueError, into, {"linear_weight": low, "accumulate_dtype": low.dtype}, "accumulate_dtype must be None or"),
        (ValueError, into, {"linear_weight": weight.detach()}, "linear_weight must require grad with"),
        (ValueError, into.to("meta"), {}, "grad_weight_into must be on"),
    ]
    for error, buffer, options, message in cases:
        with pytest.raises(error, match=message):
            fusegrad.linear_cross_entropy(
                **{"input": hidden, "linear_weight": weight, "target": target, **options}, grad_weight_into=buffer
            )
    loss = fusegrad.linear_cross_entropy(hidden, weight, target, reduction="none", grad_weight_into=into)
    before = into.clone()
    torch.autograd.grad(loss, hidden, torch.eye(ROWS), is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="upstream gradient must not be batched"):
        torch.autograd.grad(loss, [hidden, weight], torch.eye(ROWS), is_grads_batched=True, allow_unused=True)
    assert torch.equal(into, before)
    into.resize_(0)
    with pytest.raises(ValueError, match="grad_weight_into must be as it was in the forward"):
        loss.sum().backward()


def test_compilers() -> None:
    hidden, weight, target, into = sample()
    once = plain_gradient(hidden, weight, target)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return fusegrad.linear_cross_entropy(x * 1.0, w, target, grad_weight_into=into) * 1.0

    into.zero_()
    torch.compiler.reset()
    torch.compile(loss, backend="aot_eager")(hidden, weight).backward()
    torch.testing.assert_close(into, once)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, weight)
    into.zero_()
    with compiled_autograd(torch.compile(backend="eager", dynamic=False)):
        loss(hidden, weight).backward()
    torch.testing.assert_close(into, once)


def test_opcheck() -> None:
    hidden, weight, target, into = sample(dtype=torch.float64)
    x, w = hidden.detach(), weight.detach()
    forward = torch.ops.fusegrad.linear_cross_entropy_forward(
        x, w, target, None, None, None, None, -100, 0, 0.0, 0.0, 0.0, 0, 1.0, None, None, [False] * 3, True
    )
    _, lse, stats, _, scales, logits = forward[:6]
    arguments = (torch.ones(ROWS).double(), None, x, w, target, None, None, lse, stats, scales, None)
    options = (-100, 0.0, 0.0, 0.0, 1.0, None, [True, True, False], logits)
    ops = torch.ops.fusegrad
    torch.library.opcheck(ops.linear_cross_entropy_backward_into.default, (into, *arguments, *options))
    torch.library.opcheck(ops.linear_cross_entropy_backward_into_.default, (into, *arguments, *options))
    index = torch.stack([torch.randperm(VOCAB)[:4] for _ in range(ROWS)])
    backward = (torch.randn(ROWS, 4).double(), x, w, None, index, None, None, [True, True, False])
    torch.library.opcheck(ops.support_logits_backward_into.default, (into, *backward))


def test_megatron() -> None:
    hidden, weight, target, into = sample()
    once = plain_gradient(hidden, weight, target)
    with pytest.raises(ValueError, match="linear_cross_entropy: linear_weight must have main_grad"):
        megatron.linear_cross_entropy(hidden, weight, target)
    weight.main_grad, weight.grad_added_to_main_grad = into.zero_(), False
    seen = []
    weight.register_post_accumulate_grad_hook(lambda w: seen.append((w.grad.clone(), w.grad_added_to_main_grad)))
    megatron.linear_cross_entropy(hidden, weight, target).backward()
    torch.testing.assert_close(into, once)
    assert len(seen) == 1 and seen[0][1] and not seen[0][0].any()
    out = megatron.linear_log_prob(hidden, weight, target)
    (-out.log_prob.sum() / (ROWS - 1)).backward()
    torch.testing.assert_close(into, 2 * once)
    with torch.no_grad():
        megatron.linear_cross_entropy(hidden, weight, target)
    weight.overwrite_main_grad = True
    with pytest.raises(ValueError, match="overwrite_main_grad must not be set"):
        megatron.linear_log_prob(hidden, weight, target)
