"""What each process of test_vocab_parallel.py runs: every case on the first 2, 3 and 4 of four processes, against the
unsharded op on the same tensors and, in float64, against plain formulas. A case that fails says why in its result."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fusegrad
import torch
import torch.distributed as dist
from fusegrad import Aux, JSDAux, VocabParallel, reference
from support import DISTILLATION, DISTILLATION_LINEAR, DISTILLATION_LOGITS, LINEAR, Distillation, Sample
from torch import Tensor

V, H, ROWS = 13, 6, 11
# Uneven, in another order than the ranks', and one without any columns; most targets are in one part.
CUTS = {
    2: [(0, 5), (5, V)],
    3: [(9, V), (0, 4), (4, 9)],
    4: [(0, 7), (7, 7), (7, 12), (12, V)],
}
CASES: dict[str, Callable[..., None]] = {}


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def assert_close(ours: Tensor, truth: Tensor, what: str) -> None:
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if ours.dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-6}
    if ours.dtype in (torch.bfloat16, torch.float16):
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
        if "lse" in values:
            out, right = out + values["lse"].mean(), (right[0] + right[1]["lse"].mean(), None)
    if isinstance(right, tuple):
        right = right[0]
    assert_close(out, right, f"{what}, loss")
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
        for dtype in (torch.float64, torch.float32):
            target = sample.target((ROWS,), V, "cpu", dtype)
            part = target[:, shards.start : shards.stop] if sample.probabilities else target
            yield sample, dtype, target, sample.tensors((ROWS,), V, "cpu", dtype), part


@case
def cross_entropy(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    for sample, dtype, target, tensors, part in samples_of(shards):
        linear_only = {"logit_scale", "workspace_mib"} & sample.options.keys()
        if linear_only or sample.bias:
            continue
        logits = 3 * torch.randn(ROWS, V, dtype=dtype)
        logits[0, shards.bounds[0][0] : shards.bounds[0][1]] = -torch.inf  # nothing of a row in one part
        if sample.options.get("label_smoothing") or sample.probabilities or sample.options.get("softcap"):
            logits[0] = 1.0
        else:
            target[0] = shards.bounds[-1][1] - 1
        for aux in (None, Aux(True, True, not sample.probabilities, True, True, not sample.probabilities)):
            if aux is not None and not logits.isfinite().all():
                logits[0] = 1.0  # the reference's entropy is NaN there

            def ours(z: Tensor, aux: Any = aux) -> Any:
                return fusegrad.cross_entropy(
                    z, part, vocab_parallel=shards, return_aux=aux, **tensors, **sample.options
                )

            def truth(z: Tensor) -> Any:
                return reference.cross_entropy(
                    z, target if sample.probabilities else target.long(), **tensors, **sample.options
                )

            check_same(f"{sample} {dtype}", ours, truth, [logits], [lambda t: t[:, cut]], aux is not None)


@case
def linear_cross_entropy(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    for sample, dtype, target, tensors, part in samples_of(shards):
        inputs = [torch.randn(ROWS, H, dtype=dtype), torch.randn(V, H, dtype=dtype)]
        parts: list[Callable[[Tensor], Tensor]] = [same, lambda t: t[cut]]
        if sample.bias:
            inputs.append(torch.randn(V, dtype=dtype))
            parts.append(lambda t: t[cut])
        for aux in (None, Aux(True, True, not sample.probabilities, True, True, not sample.probabilities)):

            def ours(x: Tensor, w: Tensor, b: Tensor | None = None, aux: Any = aux) -> Any:
                return fusegrad.linear_cross_entropy(
                    x, w, part, linear_bias=b, vocab_parallel=shards, return_aux=aux, **tensors, **sample.options
                )

            def truth(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
                plain = {k: v for k, v in sample.options.items() if k != "workspace_mib"}
                full = target if sample.probabilities else target.long()
                return reference.linear_cross_entropy(x, w, full, linear_bias=b, **tensors, **plain)

            check_same(f"{sample} {dtype}", ours, truth, inputs, parts, aux is not None)


@case
def many_chunks(shards: VocabParallel) -> None:
    """Several chunks of rows, which must be the same in parts of any size; low precision, whose sums are float32."""
    shards = VocabParallel._of(shards.group, [(200 * start, 200 * stop) for start, stop in shards.bounds])
    cut, vocab = slice(shards.start, shards.stop), shards.vocab
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w, head = torch.randn(150, H).to(dtype), torch.randn(vocab, H).to(dtype), torch.randn(vocab, H).to(dtype)
        target = torch.randint(0, vocab, (150,))
        for options in ({"workspace_mib": 1}, {"workspace_mib": 0}, {"workspace_mib": 1, "accumulate_dtype": dtype}):
            check_same(
                f"{dtype} {options}",
                lambda x, w, o=options: fusegrad.linear_cross_entropy(x, w, target, vocab_parallel=shards, **o),
                lambda x, w, o=options: fusegrad.linear_cross_entropy(x, w, target, **o),
                [x, w],
                [same, lambda t: t[cut]],
            )
            check_same(
                f"linear_jsd {dtype} {options}",
                lambda x, w, o=options: fusegrad.linear_jsd(x, w, x.detach(), head[cut], vocab_parallel=shards, **o),
                lambda x, w, o=options: fusegrad.linear_jsd(x, w, x.detach(), head, **o),
                [x, w],
                [same, lambda t: t[cut]],
            )


def plain_divergence(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in ("workspace_mib", "vocab_size")}


@case
def jsd(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    for sample in (*DISTILLATION, *DISTILLATION_LOGITS):
        for dtype in (torch.float64, torch.float32):
            tensors = sample.tensors((ROWS,), V, "cpu", dtype)
            student, teacher = torch.randn(ROWS, V, dtype=dtype), torch.randn(ROWS, V, dtype=dtype)
            if sample.options.get("log_probs"):
                student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
            aux = None if sample.options.get("log_probs") else JSDAux(True, sample.labels)
            top = sample.teacher((ROWS,), V, "cpu")
            if top is not None:
                top = (top[0].to(dtype), top[1])

            def ours(s: Tensor, t: Any = top, sample: Distillation = sample, aux: Any = aux) -> Any:
                return fusegrad.jsd(s, t, vocab_parallel=shards, return_aux=aux, **tensors, **sample.options)

            def truth(s: Tensor, t: Any = top, sample: Distillation = sample) -> Any:
                return reference.jsd(s, t, **tensors, **sample.options)

            both = [student] if top is not None else [student, teacher]
            check_same(f"{sample} {dtype}", ours, truth, both, [lambda t: t[:, cut]] * len(both), aux is not None)


@case
def linear_jsd(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    for sample in (*DISTILLATION, *DISTILLATION_LINEAR):
        if "vocab_size" in sample.options:
            continue
        for dtype in (torch.float64, torch.float32):
            tensors = sample.tensors((ROWS,), V, "cpu", dtype)
            inputs = [torch.randn(ROWS, H, dtype=dtype), torch.randn(V, H, dtype=dtype)]
            parts: list[Callable[[Tensor], Tensor]] = [same, lambda t: t[cut]]
            hidden, head = torch.randn(ROWS, H + 1, dtype=dtype), torch.randn(V, H + 1, dtype=dtype)
            if sample.bias:
                inputs.append(torch.randn(V, dtype=dtype))
                parts.append(lambda t: t[cut])
            top = sample.teacher((ROWS,), V, "cpu")
            teacher: tuple[Any, ...] = (hidden, head)
            mine: tuple[Any, ...] = (hidden, head[cut])
            if top is not None:
                teacher = mine = ((top[0].to(dtype), top[1]),)
            aux = JSDAux(True, sample.labels)

            def ours(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
                return fusegrad.linear_jsd(
                    x, w, *mine, student_bias=b, vocab_parallel=shards, return_aux=aux, **tensors, **sample.options
                )

            def truth(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
                options = plain_divergence(sample.options)
                return reference.linear_jsd(x, w, *teacher, student_bias=b, **tensors, **options)

            check_same(f"{sample} {dtype}", ours, truth, inputs, parts, True)
