"""What the cases of vocab_parallel_worker.py share: parts of the vocabulary, and the comparison with whole tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fusegrad
import torch
from fusegrad import Aux, VocabParallel
from support import LINEAR, Sample
from torch import Tensor

# In a process of the worker's; pytest wants the names of the cases alone.
DEVICE = sys.argv[4] if Path(sys.argv[0]).stem == "vocab_parallel_worker" else "cpu"
# The widest of the device's dtypes is the first.
DTYPES = (torch.float64, torch.float32) if DEVICE == "cpu" else (torch.float32,)
WIDEST = DTYPES[0]
V, H, ROWS = 13, 6, 11
# Uneven, in another order than the ranks', and one without any columns; most targets are in one part.
CUTS = {
    2: [(0, 5), (5, V)],
    3: [(9, V), (0, 4), (4, 9)],
    4: [(0, 7), (7, 7), (7, 12), (12, V)],
}
ONCE = ("compiled", "thunder", "autocast", "inplace", "data_parallel")
CASES: dict[str, Callable[..., None]] = {}


def runs(name: str, world: int) -> bool:
    if name in ("derivatives", "compiled_data_parallel"):
        return world != 3
    return world == 2 or name not in ONCE


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def assert_close(ours: Tensor, truth: Tensor, what: str, made_of: torch.dtype | None = None) -> None:
    """`made_of`: a dtype to which what the result is made of was rounded."""
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if ours.dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-6}
    if DEVICE != "cpu" and ours.dtype == torch.float32 and truth.numel() != 0:
        # The widest dtype there: rounding is that of the largest number.
        tolerance["atol"] *= max(1.0, float(truth.detach().nan_to_num(0, 0, 0).abs().max()))
    if (made_of or ours.dtype) in (torch.bfloat16, torch.float16):
        tolerance = {"rtol": 4e-2, "atol": 1e-2}
    torch.testing.assert_close(
        ours.detach(), truth.detach().to(ours.dtype), equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerance
    )


def check_same(
    what: str,
    ours: Callable[..., Any],
    truth: Callable[..., Any],
    inputs: list[Tensor],
    parts: list[Callable[[Tensor], Tensor]],
    aux: bool = False,
    made_of: torch.dtype | None = None,
) -> None:
    """Losses, aux values and gradients of `ours` on parts of the inputs and of `truth` on whole ones, after a backward
    with an upstream gradient that is not 1 and after a second one."""
    whole = [leaf(t) for t in inputs]
    mine = [leaf(part(t)) for part, t in zip(parts, inputs, strict=True)]
    out, right = ours(*mine), truth(*whole)
    if aux:
        values = {name: value for name, value in out[1]._asdict().items() if value is not None}
        for name, value in values.items():
            assert_close(value, right[1][name], f"{what}, {name}")
        out = out[0]
        for factor, name in ((1.0, "lse"), (-0.7, "entropy"), (0.3, "token_log_prob")):
            if name in values:
                out = out + factor * values[name].mean()
                right = right[0] + factor * right[1][name].mean(), right[1]
    if isinstance(right, tuple):
        right = right[0]
    assert_close(out, right, f"{what}, loss", made_of)
    upstream = torch.linspace(0.3, 0.7, out.numel()).reshape(out.shape)
    first = torch.autograd.grad(out, mine, upstream.to(out.dtype), retain_graph=True)
    again = torch.autograd.grad(out, mine, upstream.to(out.dtype))
    expected = torch.autograd.grad(right, whole, upstream.to(right.dtype))
    for i, (grad, once_more, full, part) in enumerate(zip(first, again, expected, parts, strict=True)):
        assert grad.equal(once_more), f"{what}: gradient {i} of the second backward differs"
        assert_close(grad, part(full), f"{what}, gradient {i}")


def same(tensor: Tensor) -> Tensor:
    return tensor


def samples_of(shards: VocabParallel) -> Iterator[tuple[Sample, torch.dtype, Tensor, dict[str, Tensor], Tensor]]:
    for sample in LINEAR:
        for dtype in DTYPES:
            target = sample.target((ROWS,), V, DEVICE, dtype)
            part = target[:, shards.start : shards.stop] if sample.probabilities else target
            yield sample, dtype, target, sample.tensors((ROWS,), V, DEVICE, dtype), part


def auxes(sample: Sample, dtype: torch.dtype) -> tuple[Aux | None, ...]:
    """Without aux values, and in the widest dtype with all of them."""
    index = not sample.probabilities
    return (None, Aux(True, True, index, True, True, index)) if dtype == WIDEST else (None,)


def small_losses(shards: VocabParallel) -> dict[str, tuple[Callable[..., Tensor], Tensor, Tensor | None]]:
    """Each loss as a function of (x, weight), and tensors of the widest dtype for these; no weight is None."""
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    teacher, weight, hidden = (torch.randn(*shape).to(WIDEST) for shape in ((ROWS, V), (V, H), (ROWS, H)))
    common = {"vocab_parallel": shards}
    return {
        "cross_entropy": (
            lambda x, w, **o: fusegrad.cross_entropy(x, target, **common, **o),
            torch.randn(ROWS, V).to(WIDEST)[:, cut],
            None,
        ),
        "jsd": (
            lambda x, w, **o: fusegrad.jsd(x, teacher[:, cut], **common, **o),
            torch.randn(ROWS, V).to(WIDEST)[:, cut],
            None,
        ),
        "linear_cross_entropy": (
            lambda x, w, **o: fusegrad.linear_cross_entropy(x, w, target, **common, **o),
            hidden,
            weight[cut],
        ),
        "linear_jsd": (
            lambda x, w, **o: fusegrad.linear_jsd(x, w, hidden, weight[cut] * 2, **common, **o),
            hidden,
            weight[cut],
        ),
    }
