"""Compilers, autocast and function transforms: right gradients, or an error that names the op."""

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from all_losses import NAMES, make
from coverings import pairs_of, rows_of
from fusegrad import reference
from support import DEVICES
from torch import Tensor

each = rows_of("name", NAMES)
everywhere = pytest.mark.parametrize("device", DEVICES)


def model(inplace: bool, ours: bool = True):
    def divergences(jsd, linear_jsd, x, w, t, **o):
        """For two students of each other, where a teacher gets a gradient too; top-k, and by recomputation."""
        top_k = (-torch.ones_like(x[:, :2]), torch.stack([t, (t + 1) % 16], -1))
        teacher = (x + 1).detach(), w.detach()
        first = jsd(x @ w, x * 3, beta=0.3, **o) + jsd(x * 5, top_k, labels=t, hard_weight=0.5, tail="renormalize", **o)
        return first + linear_jsd(x * 2, w, *teacher, **o) + linear_jsd(x * 2, w, top_k, reduction="none", **o).sum()

    def call(x, w, t):
        if ours:
            first = fusegrad.cross_entropy(x @ w, t, label_smoothing=0.1, inplace=inplace)
            second = fusegrad.linear_cross_entropy(x * 2, w, t, inplace=inplace)
            third = divergences(fusegrad.jsd, fusegrad.linear_jsd, x, w, t, inplace=inplace)
        else:
            first = F.cross_entropy(x @ w, t, label_smoothing=0.1)
            second = F.cross_entropy(F.linear(x * 2, w), t)
            third = divergences(
                lambda *a, **o: reference.jsd(*a, **o)[0], lambda *a, **o: reference.linear_jsd(*a, **o)[0], x, w, t
            )
        return (first + second + third) * 0.37

    return call


@everywhere
@pairs_of({"backend": ["aot_eager", "inductor"], "dynamic": [False, True], "inplace": [False, True]})
def test_compile_without_a_graph_break(device, backend, dynamic, inplace) -> None:
    if backend == "inductor" and dynamic != inplace:
        pytest.skip("aot_eager has all; inductor compiles for seconds")
    torch._dynamo.reset()
    compiled = torch.compile(model(inplace), backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (8, 12):
        x = torch.randn(rows, 16, device=device, requires_grad=True)
        w = torch.randn(16, 16, device=device, requires_grad=True)
        t = torch.randint(0, 16, (rows,), device=device)
        ours = torch.autograd.grad(compiled(x, w, t), (x, w))
        eager = torch.autograd.grad(model(False, ours=False)(x, w, t), (x, w))
        torch.testing.assert_close(ours, eager)


@each
@rows_of("upstream", [lambda x: x.softmax(-1), torch.exp, torch.tanh])
def test_compile_with_an_upstream_op_that_saved_the_tensor(name, upstream) -> None:
    """The compiler sees the write: the gradient is right, or the call raises."""
    torch._dynamo.reset()
    loss = make(name, "cpu")
    x = torch.randn(8, 8, requires_grad=True)
    (eager,) = torch.autograd.grad(loss.eager(upstream(x)), x)
    compiled = torch.compile(lambda x: loss.ours(upstream(x), inplace=True), backend="aot_eager", fullgraph=True)
    try:
        (ours,) = torch.autograd.grad(compiled(x), x)
    except RuntimeError as error:
        assert "inplace" in str(error)
    else:
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_autograd(inplace) -> None:
    torch._dynamo.reset()
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    t = torch.randint(0, 16, (8,))
    eager = torch.autograd.grad(model(False, ours=False)(x, w, t), (x, w))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        model(inplace)(x, w, t).backward()
    torch.testing.assert_close((x.grad, w.grad), eager)


ROW_OPTIONS = (None, None, -100, 1, 0.0, 0.0, 0.0, 0)


@everywhere
@pytest.mark.parametrize("suffix", ["", "_"])
def test_opcheck_of_what_front_ends_call(device, suffix) -> None:
    x = torch.randn(4, 5, device=device, requires_grad=True)
    w = torch.randn(7, 5, device=device, requires_grad=True)
    t = torch.randint(0, 5, (4,), device=device)
    ops = torch.ops.fusegrad
    # A leaf must not be overwritten: the in-place twin is checked where it may not write.
    x = x.detach() if suffix else x
    torch.library.opcheck(getattr(ops, "cross_entropy" + suffix).default, (x, t), {"label_smoothing": 0.1})
    torch.library.opcheck(getattr(ops, "linear_cross_entropy" + suffix).default, (x, w, t), {"reduction": "sum"})
    y, v = torch.randn(4, 3, device=device), torch.randn(7, 3, device=device)
    k = torch.randn(4, 5, device=device).log_softmax(1)[:, :2]
    top_k = {"teacher_indices": torch.tensor([[1, 0]] * 4, device=device), "tail_log_prob": k[:, 0] - 3}
    hard = {"labels": t, "hard_weight": 0.5}
    # opcheck differentiates all outputs, and the aux values raise then: it has them of what needs no gradient.
    for given, head, aux in ((x, w, 0), (x.detach(), w.detach(), 3)):
        call = {"reduction": "mean", "aux": aux, **hard}
        torch.library.opcheck(getattr(ops, "jsd" + suffix).default, (given, torch.randn_like(x)), call)
        torch.library.opcheck(getattr(ops, "jsd" + suffix).default, (given, k), top_k)
        torch.library.opcheck(getattr(ops, "linear_jsd" + suffix).default, (given, head, y, v), {"aux": aux, **hard})
        call = {"reduction": "none", "aux": aux & 1, **top_k}
        torch.library.opcheck(getattr(ops, "linear_jsd" + suffix).default, (given, head, k), call)
    everything = {"aux": 63 - 1, "reduction": "sum"}
    torch.library.opcheck(getattr(ops, "cross_entropy" + suffix).default, (x.detach(), t), everything)
    differentiable = {"aux": 1 + 16 + 32, "reduction": "none"}
    torch.library.opcheck(getattr(ops, "cross_entropy" + suffix).default, (x, t), differentiable)
    torch.library.opcheck(getattr(ops, "linear_cross_entropy" + suffix).default, (x, w, t), differentiable)
    value = torch.ones(4, device=device)
    torch.library.opcheck(ops.constant_beside.default, (value, value.sum(), "an_op", "a_value"))
    torch.library.opcheck(ops.refuse_gradient.default, (0 * value, "an_op", "a_value"))


def opcheck_of_kept_logits(h: Tensor, w: Tensor, t: Tensor) -> None:
    """The backward from logits that the forward kept, with gradients of entropy and token_log_prob."""
    ops, aux = torch.ops.fusegrad, 16 + 32
    options = (-100, 0, 0.0, 0.0, 0.0, aux, 1.0, None, None, [False] * 3, True)
    forward = (h, w, t, *[None] * 4, *options)
    torch.library.opcheck(ops.linear_cross_entropy_forward.default, forward)
    _, lse, stats, _, scales, logits, *_ = ops.linear_cross_entropy_forward(*forward)
    saved = (None, None, h, w, t, None, None, lse, stats, scales, None, -100, 0.0, 0.0, 0.0, 1.0, None)
    for suffix in ("", "_"):
        backward = (*saved, [True, True, False], logits.clone(), torch.randn_like(stats), aux)
        torch.library.opcheck(getattr(ops, "linear_cross_entropy_backward" + suffix).default, backward)


@everywhere
def test_opcheck_of_the_ops_below(device) -> None:
    ops = torch.ops.fusegrad
    x, w = torch.randn(4, 7, device=device), torch.randn(7, 5, device=device)
    h, t = torch.randn(4, 5, device=device), torch.randint(0, 7, (4,), device=device)
    one = torch.ones((), device=device)
    logits = (x, t, None, *ROW_OPTIONS)
    hidden = (h, w, t, None, None, *ROW_OPTIONS, 1.0, None, None, [True, True, False])
    torch.library.opcheck(ops.cross_entropy_forward.default, logits)
    torch.library.opcheck(ops.cross_entropy_forward_.default, logits)
    torch.library.opcheck(ops.linear_cross_entropy_forward.default, hidden)
    torch.library.opcheck(ops.linear_cross_entropy_forward_.default, hidden)
    _, lse, stats, _, scales = ops.cross_entropy_forward(x, t, None, *ROW_OPTIONS)
    torch.library.opcheck(
        ops.cross_entropy_backward.default, (one, None, x, t, None, lse, stats, scales, None, -100, 0.0, 0.0, 0.0)
    )
    # Tangents of the input alone, and of all three.
    upstream, bias = torch.randn(4, 4, device=device), torch.randn(7, device=device)
    scoring = (t, None, -100, 0.1, 3.0, 49)
    some = (h, w, None, h, None, None, upstream, None, *scoring, 1.0, None, [True, True, False])
    torch.library.opcheck(ops.linear_cross_entropy_second.default, some)
    every = (h, w, bias, h, w, bias, upstream, upstream[0], *scoring, 1.0, 0, [True] * 3)
    torch.library.opcheck(ops.linear_cross_entropy_second.default, every)
    # A vocabulary whose parts are all in this process.
    part = ("", 0, [0, 7])
    torch.library.opcheck(ops.cross_entropy_forward.default, (*logits, *part))
    torch.library.opcheck(ops.cross_entropy_forward_.default, (x.clone(), *logits[1:], *part))
    backward = (one, None, x, t, None, lse, stats, scales, None, -100, 0.0, 0.0, 0.0, None, 0, *part)
    torch.library.opcheck(ops.cross_entropy_backward.default, backward)
    agree = ("an_op", "of a group", [x, t], "input,target,weight", [3, 0, -1], "reduction: mean\n", False, True, *part)
    torch.library.opcheck(ops.shards_agree.default, agree)
    for linear in (ops.shards_sum, ops.shards_use):
        for values in (x, x.t(), x.clone().requires_grad_()):
            torch.library.opcheck(linear.default, (values, *part))
    torch.library.opcheck(
        ops.linear_cross_entropy_backward.default,
        (
            one,
            None,
            h,
            w,
            t,
            None,
            None,
            lse,
            stats,
            scales,
            None,
            -100,
            0.0,
            0.0,
            0.0,
            1.0,
            None,
            [True] * 2 + [False],
            None,
        ),
    )
    opcheck_of_kept_logits(h, w, t)
    numbers = [0.5, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    y, v = torch.randn(4, 3, device=device), torch.randn(7, 3, device=device)
    rows = (None, None, t % 6, None, None, *numbers, False, False, -100, 1, 3)
    for suffix in ("", "_"):
        divergence = (x.clone(), torch.randn_like(x), *rows, [True, not suffix])
        torch.library.opcheck(getattr(ops, "jsd_forward" + suffix).default, divergence)
        heads = (h.clone(), w, None, y, v, None, *rows, 6, None, None, [True, True, False])
        torch.library.opcheck(getattr(ops, "linear_jsd_forward" + suffix).default, heads)
    torch.library.opcheck(
        ops.linear_jsd_backward.default,
        (
            one,
            h,
            w,
            None,
            y,
            v,
            *[None] * 3,
            t,
            None,
            scales,
            *numbers,
            False,
            -100,
            None,
            None,
            1,
            [True, True, False],
        ),
    )
    torch.library.opcheck(ops.scale_gradient.default, (x, one, None))
    torch.library.opcheck(ops.scale_gradient_.default, (x, one, one))


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype) -> None:
    """The linear losses cast as F.linear does, with float32 gradients; the others read what they are given."""
    x, w = torch.randn(32, 16, device=device, requires_grad=True), torch.randn(9, 16, device=device, requires_grad=True)
    t = torch.randint(0, 9, (32,), device=device)
    y, v = torch.randn(32, 8, device=device), torch.randn(9, 8, device=device)
    for inplace in (False, True):
        with torch.autocast(device, dtype):
            hidden = x * 1
            loss = fusegrad.linear_cross_entropy(hidden, w, t, inplace=inplace)
            assert hidden._version == 0, "the cast is written, not the input"
            logits = F.linear(x, w)
            second = fusegrad.cross_entropy(logits, t, inplace=inplace)
            student = x * 1
            divergence = fusegrad.linear_jsd(student, w, y, v, inplace=inplace)
            assert student._version == 0
            divergence = divergence + fusegrad.jsd(F.linear(x, w), F.linear(y, v), inplace=inplace)
        assert loss.dtype == second.dtype == divergence.dtype == torch.float32 and logits.dtype == dtype
        grads = torch.autograd.grad(loss + second + divergence, (x, w))
        heads = [z.double() for z in (x, w, y, v)]
        truth = 2 * F.cross_entropy(F.linear(*heads[:2]), t) + 2 * reference.linear_jsd(*heads)[0]
        truth = torch.autograd.grad(truth, (x, w))
        for grad, right in zip(grads, truth, strict=True):
            assert grad.dtype == torch.float32
            assert ((grad - right).norm() / right.norm()).item() < 2e-2
