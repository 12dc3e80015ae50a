"""Rules 1 to 5 of the contract: when an op may overwrite its input, and how autograd hears of it."""

import pytest
import torch
from all_losses import NAMES, make
from coverings import rows_of
from support import DEVICES
from torch.utils.checkpoint import checkpoint

each = rows_of("name", NAMES)
everywhere = pytest.mark.parametrize("device", DEVICES)


@each
@everywhere
def test_functional_writes_nothing(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device)
    activation = x.clone().requires_grad_() * 1
    value = loss.ours(activation)
    value.backward()
    assert torch.equal(activation, x) and activation._version == 0


@each
@everywhere
@rows_of("upstream", [torch.softmax, lambda x, _: x.exp(), lambda x, _: x.tanh()])
def test_an_upstream_op_that_saved_the_tensor_raises(name: str, device: str, upstream) -> None:
    """The graph of the report: softmax, then the loss in place."""
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.ours(upstream(x, -1), inplace=True).backward()
    (ours,) = torch.autograd.grad(loss.ours(upstream(x, -1)), x)
    (eager,) = torch.autograd.grad(loss.eager(upstream(x, -1)), x)
    torch.testing.assert_close(ours, eager)


@each
@everywhere
def test_in_place_overwrites_and_raises_the_version(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    activation = x * 1
    before = activation.detach().clone()
    value = loss.ours(activation, inplace=True)
    assert activation._version == 1 and not torch.equal(activation, before)
    assert activation.grad_fn is not None
    activation.retain_grad()
    (value * 0.37).backward()
    (eager,) = torch.autograd.grad(loss.eager(x) * 0.37, x)
    torch.testing.assert_close(x.grad, eager)
    torch.testing.assert_close(activation.grad, eager)


@each
@everywhere
def test_in_place_through_a_view(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    activation = x * 2
    view = activation[4:12]
    loss.ours(view, inplace=True).backward()
    assert activation._version > 0
    (eager,) = torch.autograd.grad(loss.eager((x * 2)[4:12]), x)
    torch.testing.assert_close(x.grad, eager)


def leaf(x):
    return x.requires_grad_()


def view_of_a_leaf(x):
    return x.requires_grad_()[:]


def no_grad_view(x):
    y = x.requires_grad_() * 1
    with torch.no_grad():
        return y.view(8, 8)


def unbound(x):
    return (torch.stack([x, x]).requires_grad_() * 1).unbind(0)[0]


def expanded(x):
    return (x[:1].clone().requires_grad_() * 1).expand(8, 8)


@each
@everywhere
@rows_of("kind", [leaf, view_of_a_leaf, no_grad_view, unbound, expanded])
def test_what_would_corrupt_is_refused_before_the_first_write(name: str, device: str, kind) -> None:
    loss = make(name, device)
    activation = kind(torch.randn(8, 8, device=device))
    before = activation.detach().clone()
    with pytest.raises(RuntimeError):
        loss.ours(activation, inplace=True)
    assert torch.equal(activation, before) and activation._version == 0


@everywhere
def test_an_overlap_with_another_argument_is_refused(device: str) -> None:
    import fusegrad

    activation = torch.randn(8, 8, device=device, requires_grad=True) * 1
    before = activation.detach().clone()
    with pytest.raises(RuntimeError, match="written-to tensor"):
        fusegrad.linear_cross_entropy(
            activation, activation.detach(), torch.zeros(8, dtype=torch.long, device=device), inplace=True
        )
    # A student that is its own teacher.
    with pytest.raises(RuntimeError, match="written-to tensor"):
        fusegrad.jsd(activation, activation.detach(), inplace=True)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        weight = torch.randn(8, 8, device=device)
        fusegrad.linear_jsd(activation, weight, activation.detach(), weight, inplace=True)
    assert torch.equal(activation, before)


@each
@everywhere
def test_nothing_is_written_without_a_gradient(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device)
    for activation, context in (
        (x.clone(), torch.enable_grad()),
        (x.clone().requires_grad_(), torch.no_grad()),
        (x.clone().requires_grad_() * 1, torch.inference_mode()),
    ):
        with context:
            loss.ours(activation, inplace=True)
        assert torch.equal(activation, x) and activation._version == 0
    with torch.inference_mode():
        activation = x * 1
        loss.ours(activation, inplace=True)
        assert torch.equal(activation, x)


@each
@everywhere
def test_saved_tensor_hooks_keep_it_out_of_place(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    (eager,) = torch.autograd.grad(loss.eager(torch.softmax(x, -1)), x)
    with torch.autograd.graph.save_on_cpu():
        activation = torch.softmax(x, -1)
        value = loss.ours(activation, inplace=True)
        assert activation._version == 0
    (ours,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(ours, eager)

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        value = loss.ours(x * 1)
    copies = [t.detach().clone() for t in kept]
    (value * 0.37).backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True)), "a hook's tensor was scaled in place"


@each
@everywhere
@rows_of("reentrant", [False, True])
def test_activation_checkpointing(name: str, device: str, reentrant: bool) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    checkpoint(lambda x: loss.ours(x.tanh() * 2, inplace=True), x, use_reentrant=reentrant).backward()
    (eager,) = torch.autograd.grad(loss.eager(x.tanh() * 2), x)
    torch.testing.assert_close(x.grad, eager)


@each
@everywhere
def test_layouts_that_rows_cannot_be_written_in_stay_out_of_place(name: str, device: str) -> None:
    loss = make(name, device)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    activation = (x * 1).t()
    value = loss.ours(activation, inplace=True)
    assert activation._version == 0
    (ours,) = torch.autograd.grad(value, x)
    (eager,) = torch.autograd.grad(loss.eager(x.t()), x)
    torch.testing.assert_close(ours, eager)
