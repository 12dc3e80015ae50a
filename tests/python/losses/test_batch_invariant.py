"""batch_invariant: a row has the same bits in every call that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, reference
from support import DEVICE_DTYPES, DEVICES, acc_of, assert_as_good_as_eager, gradients
from test_aux_gradients import AUX, compare
from torch import Tensor

ROWS = {"cpu": 150, "cuda": 1100}  # on CUDA two whole tiles and a part of one
cuda_only = pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 5.0, "bias": True},
    {"logit_scale": True, "label_smoothing": 0.1},
    {"support": True},
]


def results(rows: slice | Tensor, aux: Aux, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The loss, aux values and gradients of the input of these rows."""
    hidden, weight, bias, target, scale, support, upstream = (
        t[rows] if len(t) == len(inputs[0]) else t for t in inputs
    )
    options = dict(options)
    if options.pop("bias", False):
        options["linear_bias"] = bias
    if options.pop("logit_scale", False):
        options["logit_scale"] = scale
    if options.pop("support", False):
        options["support"] = support
    hidden = hidden.clone().requires_grad_()
    loss, values = fusegrad.linear_cross_entropy(
        hidden, weight, target, reduction="none", batch_invariant=True, return_aux=aux, **options
    )
    (gradient,) = torch.autograd.grad(loss, hidden, upstream.to(loss.dtype))
    return [loss, values.lse, *([values.token_log_prob] if aux.token_log_prob else []), gradient]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_the_same_bits(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rows, hidden, vocab = ROWS[device], 64, 2051
    target = torch.randint(0, vocab, (rows,))
    support = (target[:, None] + torch.arange(700)) % vocab
    shapes = ((rows, hidden), (vocab, hidden), (vocab,))
    inputs = [torch.randn(s).to(device, dtype) for s in shapes]
    inputs += [t.to(device) for t in (target, torch.rand(rows) + 0.5, support, torch.rand(rows))]
    whole = results(slice(None), AUX, inputs, options)
    choices = {
        "one row": slice(77, 78),
        "a few": slice(3, 20),
        "not from the start": slice(1, None),
        "shuffled": torch.randperm(rows).to(device),
        "twice": torch.arange(rows, device=device).repeat(2),
    }
    for name, choice in choices.items():
        for found, all_of_them in zip(results(choice, AUX, inputs, options), whole, strict=True):
            assert torch.equal(found, all_of_them[choice]), name
    for extra in ({"workspace_mib": 0}, {"workspace_mib": 1}):
        for found, expected in zip(results(slice(None), AUX, inputs, options | extra), whole, strict=True):
            assert torch.equal(found, expected), extra
    fewer = results(slice(0, 5), Aux(lse=True), inputs, options)
    assert torch.equal(fewer[1], whole[1][:5]) and torch.equal(fewer[0], whole[0][:5])
    with torch.no_grad():
        plain = fusegrad.linear_log_prob(inputs[0][9:10], inputs[1], inputs[3][9:10], batch_invariant=True)
        assert options or torch.equal(plain.log_prob, whole[2][9:10])


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 0}], ids=str)
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_parity(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rows, hidden, vocab = ROWS[device], 16, 1003
    inputs = [torch.randn(s, device=device).mul(0.5).to(dtype) for s in ((rows, hidden), (vocab, hidden), (vocab,))]
    target = torch.randint(0, vocab, (rows,), device=device)
    target[7] = -100
    compare(
        lambda x, w, b: fusegrad.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", batch_invariant=True, return_aux=AUX, **options
        ),
        lambda x, w, b: reference.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none"),
        inputs,
        rows,
        ("rrrr", "--re"),
    )


def scored(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    """log_prob, entropy, and the gradient of the hidden states of their weighted sum."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = fusegrad.linear_log_prob(hidden, weight, target, batch_invariant=True, **options)
    value = out.log_prob.sum() if out.entropy is None else (out.log_prob - 0.3 * out.entropy).sum()
    value.backward()
    assert hidden.grad is not None
    return [out.log_prob.detach(), out.entropy if out.entropy is None else out.entropy.detach(), hidden.grad]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same numbers, NaN and the signs of zeros too."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return found.contiguous().view(kind).equal(expected.contiguous().view(kind))


Check = Callable[[str, Sequence[Tensor | None], Tensor | slice], None]


def walk(hidden: Tensor, weight: Tensor, target: Tensor) -> Check:
    """Rows alone, in chunks, in other orders, between rows of padding, with other budgets and outputs, kept and
    recomputed. Returns what compares results of some rows with those of all."""
    rows, width, device = len(hidden), hidden.size(1), hidden.device
    packed = scored(hidden, weight, target)

    def check(name: str, found: Sequence[Tensor | None], index: Tensor | slice) -> None:
        for i, (ours, whole) in enumerate(zip(found, packed, strict=True)):
            assert ours is None or same_bits(ours, whole[index]), f"{name}: result {i}"

    for size in (1, 7, 64, 100, 129):
        starts = range(0, rows, size) if size > 7 else (0, 77, rows - size)
        for start in starts:
            part = slice(start, start + size)
            check(f"rows {start} to {start + size}", scored(hidden[part], weight, target[part]), part)
    order = torch.randperm(rows).to(device)
    check("permuted", scored(hidden[order], weight, target[order]), order)
    many = torch.arange(1000, device=device) % rows
    check("1000 rows", scored(hidden[many], weight, target[many]), many)
    padded = torch.full((2 * rows, width), torch.nan, dtype=hidden.dtype, device=device)
    labels = torch.full((2 * rows,), -100, device=device)
    padded[1::2], labels[1::2] = hidden, target
    check("padded", [t[1::2] for t in scored(padded, weight, labels)], slice(None))
    for budget in (0, 1, 2, 64):
        check(f"workspace_mib={budget}", scored(hidden, weight, target, workspace_mib=budget), slice(None))
    into = torch.zeros(weight.shape, dtype=packed[0].dtype, device=device)
    check("into a buffer", scored(hidden, weight, target, grad_weight_into=into), slice(None))
    strided = weight.t().contiguous().t()
    check("a transposed weight", scored(hidden, strided, target), slice(None))
    alone = scored(hidden, weight, target, return_entropy=False)
    assert same_bits(alone[0], packed[0])
    odd = torch.cat([hidden[:, :3], hidden], 1)[:, 3:]
    for index in (slice(None), slice(5, 6), order):
        for states in (hidden[index], odd[index]):
            found = torch.ops.fusegrad.linear_log_prob_forward(states, weight, target[index])
            check("an engine's call", [found[0], found[1], None], index)
    return check


def walk_inputs(device: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows, width, vocab = sizes
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).mul(0.2).to(dtype)
    target = torch.randint(0, vocab, (rows,))
    target[::11] = -100
    return hidden.to(device), weight.to(device), target.to(device)


@rows_of("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_walk(dtype: torch.dtype) -> None:
    """Sizes that are no multiples of any block, and sums of several blocks; on any number of threads too."""
    hidden, weight, target = walk_inputs("cpu", dtype, (300, 530, 3001))
    check = walk(hidden, weight, target)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            check(f"{count} threads", scored(hidden, weight, target), slice(None))
            check(f"{count} threads, one row", scored(hidden[40:41], weight, target[40:41]), slice(40, 41))
    finally:
        torch.set_num_threads(threads)


@cuda_only
@rows_of(
    "dtype, sizes",
    [
        (torch.bfloat16, (300, 528, 20011)),  # rows of logits begin anywhere in a line
        (torch.float16, (300, 528, 20011)),
        (torch.bfloat16, (300, 530, 3001)),  # rows that TMA does not copy
        (torch.bfloat16, (4300, 1032, 1003)),  # more tiles of the gradient than multiprocessors
        (torch.float32, (300, 528, 20011)),
    ],
)
def test_walk_on_a_gpu(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    walk(*walk_inputs("cuda", dtype, sizes))


@cuda_only
@rows_of("dtype", [torch.bfloat16, torch.float16])
def test_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    """Against plain formulas, where the sums over the vocabulary are split among multiprocessors and where not."""
    for rows, width, vocab in ((3, 1032, 1003), (100, 264, 2051), (4300, 1032, 1003)):
        hidden, weight, target = walk_inputs("cuda", dtype, (rows, width, vocab))

        def plain(h: Tensor, w: Tensor, y: Tensor = target) -> Tensor:
            log_p = torch.nn.functional.linear(h, w).to(acc_of(h.dtype)).log_softmax(-1)
            kept = y.ne(-100)
            picked = log_p.gather(1, y.masked_fill(~kept, 0)[:, None])[:, 0]
            return (picked + 0.3 * (log_p.exp() * log_p).sum(-1)).masked_fill(~kept, 0)

        values: dict[torch.dtype, tuple[Tensor, ...]] = {}
        for kind in (dtype, torch.float64):
            leaf = hidden.to(kind, copy=True).requires_grad_()
            value = plain(leaf, weight.to(kind))
            values[kind] = (value.detach(), *torch.autograd.grad(value.sum(), leaf))
        log_prob, entropy, gradient = scored(hidden, weight, target)
        found = (log_prob - 0.3 * entropy, gradient)
        names, right = ("value", "gradient"), values[torch.float64]
        for name, ours, eager, truth in zip(names, found, values[dtype], right, strict=True):
            assert_as_good_as_eager(ours, eager, truth, f"{rows} rows: {name}")


@cuda_only
def test_in_a_cuda_graph() -> None:
    hidden, weight, target = walk_inputs("cuda", torch.bfloat16, (300, 528, 20011))
    op = torch.ops.fusegrad.linear_log_prob_forward
    whole = op(hidden, weight, target)
    for rows in (1, 100):
        states, labels = hidden[:rows].clone(), target[:rows].clone()
        op(states, weight, labels)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(states, weight, labels)
        states.copy_(hidden[-rows:]), labels.copy_(target[-rows:])
        graph.replay()
        for found, expected in zip(captured, whole, strict=True):
            assert same_bits(found, expected[-rows:])


@rows_of("dtype", [torch.float32, torch.float64])
def test_infinities(dtype: torch.dtype) -> None:
    """Columns that a bias of -inf takes out, a whole segment of them and all, as plain formulas have them."""
    rows, width, vocab = 5, 9, 67
    hidden, weight = torch.randn(rows, width, dtype=dtype), torch.randn(vocab, width, dtype=dtype)
    bias = torch.randn(vocab, dtype=dtype)
    bias[:20] = -torch.inf
    target = torch.arange(rows) + 30
    for added in (bias, torch.full((vocab,), -torch.inf, dtype=dtype)):
        out = fusegrad.linear_log_prob(hidden, weight, target, linear_bias=added, batch_invariant=True)
        wide = [t.double() for t in (hidden, weight, added)]
        truth = torch.nn.functional.linear(*wide).log_softmax(-1)
        expected = truth.gather(1, target[:, None])[:, 0].to(dtype)
        torch.testing.assert_close(out.log_prob, expected, equal_nan=True)


def test_engine_call() -> None:
    """The op without a graph: no gradient, wrong calls refused, the same values for all that linear_log_prob takes."""
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(40, 5, requires_grad=True)
    target, scale = torch.randint(0, 40, (2, 3)), torch.rand(2, 3) + 0.5
    states, op = hidden.view(2, 3, 5), torch.ops.fusegrad.linear_log_prob_forward
    expected = fusegrad.linear_log_prob(states, weight, target, logit_scale=scale, softcap=4.0, batch_invariant=True)
    log_prob, entropy, lse = op(states.detach(), weight.detach(), target, softcap=4.0, row_scale=scale)
    assert same_bits(log_prob, expected.log_prob.detach()) and expected.entropy is not None
    assert same_bits(entropy, expected.entropy.detach())
    logits = 4 * ((states @ weight.T) * scale[..., None] / 4).tanh()
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach())
    assert op(states.detach(), weight.detach(), target, return_entropy=False)[1].numel() == 0
    with pytest.raises(RuntimeError, match="linear_log_prob_forward"):
        op(states, weight, target)[0].sum().backward()
    with pytest.raises(ValueError, match=r"^linear_log_prob_forward: a target of class indices must have shape"):
        op(states.detach(), weight.detach(), target[0])
    with pytest.raises(TypeError, match=r"^linear_log_prob_forward: "):
        op(states.detach(), weight.detach().double(), target)
    with pytest.raises(IndexError, match=r"^linear_log_prob_forward: "):
        op(states.detach(), weight.detach(), target + 40)
    torch.library.opcheck(op.default, (states.detach(), weight.detach(), target))


@rows_of(
    "options",
    [
        {},
        {"label_smoothing": 0.3},
        {"weight": True},
        {"weight": True, "label_smoothing": 0.2, "z_loss": 0.1},
        {"softcap": 4.0, "label_smoothing": 0.1, "reduction": "sum"},
        {"reduction": "none", "logit_scale": -0.7},
    ],
)
def test_segments_add_up_to_the_loss(options: dict[str, Any]) -> None:
    """For rows whose largest logits are in one segment of the vocabulary."""
    hidden, weight = 3 * torch.randn(9, 5, dtype=torch.float64), torch.randn(67, 5, dtype=torch.float64)
    weight[:20] *= 5
    target = torch.randint(0, 67, (9,))
    target[3] = -100
    given = {**options, "weight": torch.rand(67, dtype=torch.float64) + 0.1} if "weight" in options else options
    found = gradients(
        lambda h, w: fusegrad.linear_cross_entropy(h, w, target, batch_invariant=True, **given), [hidden, weight]
    )
    right = gradients(lambda h, w: reference.linear_cross_entropy(h, w, target, **given)[0], [hidden, weight])
    torch.testing.assert_close(found, right)


def test_into_a_buffer_and_means() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(100, 8, requires_grad=True), torch.randn(301, 8, requires_grad=True)
    target, into = torch.randint(0, 301, (100,)), torch.zeros(301, 8)
    loss = fusegrad.linear_cross_entropy(hidden, weight, target, batch_invariant=True, grad_weight_into=into)
    loss.backward()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.autograd.grad(reference.linear_cross_entropy(*wide, target)[0], wide)
    for name, found, right in zip(("input", "weight"), (hidden.grad, into), truth, strict=True):
        assert_as_good_as_eager(found, right.float(), right, name, least=1e-6)


def test_bad_input() -> None:
    x, w = torch.randn(3, 2), torch.randn(5, 2)
    with pytest.raises(ValueError, match="batch_invariant must be False with class probabilities"):
        fusegrad.linear_cross_entropy(x, w, torch.rand(3, 5), batch_invariant=True)
