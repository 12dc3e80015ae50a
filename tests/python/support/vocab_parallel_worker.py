"""What each process of test_vocab_parallel.py runs: every case on the first 2, 3 and 4 of the processes, against the
unsharded op on the same tensors and against plain formulas. A case that fails says why in its result."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fusegrad
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from fusegrad import Aux, JSDAux, VocabParallel, reference
from processes import assert_raises, main
from support import DISTILLATION, DISTILLATION_LINEAR, DISTILLATION_LOGITS, LINEAR, Distillation, Sample
from torch import Tensor

DEVICE = sys.argv[4] if __name__ == "__main__" else "cpu"
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
CASES: dict[str, Callable[..., None]] = {}


def runs(name: str, world: int) -> bool:
    if name == "derivatives":
        return world != 3
    return world == 2 or name not in ("compiled", "thunder", "autocast", "inplace", "data_parallel")


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
        for aux in auxes(sample, dtype):
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
        for aux in auxes(sample, dtype):

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
def support(shards: VocabParallel) -> None:
    """A softmax over a few columns, of which each process has some, all or none."""
    cut = slice(shards.start, shards.stop)
    ids = torch.stack([torch.randperm(V)[:5] for _ in range(ROWS)])
    target = ids[:, 2].clone()
    ids[::2, 0] = -1
    target[4] = -100
    scale = torch.rand(ROWS) + 0.5
    for dtype in (*DTYPES, torch.bfloat16):
        # Of low precision the unsharded op is the truth, without aux values: formulas would round each step.
        wide = dtype in DTYPES
        truth: Any = reference if wide else fusegrad
        aux = Aux(True, True, True, True, True, True) if wide else None
        for options in ({"reduction": "none"}, {"softcap": 2.0, "z_loss": 0.1}, {"token_weight": scale}):
            of_logits = {"support": ids, **options}
            check_same(
                f"{dtype} {list(options)}",
                lambda z, a=aux, o=of_logits: fusegrad.cross_entropy(
                    z, target, vocab_parallel=shards, return_aux=a, **o
                ),
                lambda z, t=truth, o=of_logits: t.cross_entropy(z, target, **o),
                [torch.randn(ROWS, V).to(dtype)],
                [lambda t: t[:, cut]],
                wide,
            )

            def ours(x: Tensor, w: Tensor, b: Tensor, s: Tensor, a: Any = aux, o: Any = of_logits) -> Any:
                how = {"linear_bias": b, "logit_scale": s, "workspace_mib": 1, **o}
                return fusegrad.linear_cross_entropy(x, w, target, vocab_parallel=shards, return_aux=a, **how)

            def plain(x: Tensor, w: Tensor, b: Tensor, s: Tensor, t: Any = truth, o: Any = of_logits) -> Any:
                return t.linear_cross_entropy(x, w, target, linear_bias=b, logit_scale=s, **o)

            check_same(
                f"linear {dtype} {list(options)}",
                ours,
                plain,
                [t.to(dtype) for t in (torch.randn(ROWS, H), torch.randn(V, H), torch.randn(V), scale)],
                [same, lambda t: t[cut], lambda t: t[cut], same],
                wide,
            )
    mine = torch.full((ROWS, 1), shards.rank)
    assert_raises(
        ValueError,
        "must be the same in all processes",
        lambda: fusegrad.cross_entropy(torch.randn(ROWS, V)[:, cut], mine[:, 0], support=mine, vocab_parallel=shards),
    )


@case
def row_scale(shards: VocabParallel) -> None:
    """A factor of each row's logits, or of all, with its gradient."""
    cut = slice(shards.start, shards.stop)
    probabilities = torch.rand(ROWS, V)
    index = torch.randint(0, V, (ROWS,))
    index[4] = -100
    token, classes = torch.rand(ROWS), torch.rand(V) + 0.1
    for dtype in (*DTYPES, torch.bfloat16):
        wide = dtype in DTYPES
        truth: Any = reference if wide else fusegrad
        for options in (
            {"reduction": "none"},
            {"z_loss": 0.1, "label_smoothing": 0.1, "token_weight": token},
            {"weight": classes, "label_smoothing": 0.2, "workspace_mib": 1},
            {"probabilities": True},
        ):
            how = {k: v.to(dtype) if k == "weight" else v for k, v in options.items() if k != "probabilities"}
            soft = "probabilities" in options
            plain = {k: v for k, v in how.items() if not wide or k != "workspace_mib"}
            full = probabilities.to(dtype) if soft else index
            part = full[:, cut] if soft else full
            aux = Aux(True, True, not soft, True, True, not soft) if wide else None
            for scale in (torch.rand(ROWS) + 0.5, torch.tensor(1.3)):
                check_same(
                    f"{dtype} {list(options)} {scale.dim()}",
                    lambda x, w, b, s, a=aux, h=how, t=part: fusegrad.linear_cross_entropy(
                        x, w, t, linear_bias=b, logit_scale=s, vocab_parallel=shards, return_aux=a, **h
                    ),
                    lambda x, w, b, s, p=plain, t=full, o=truth: o.linear_cross_entropy(
                        x, w, t, linear_bias=b, logit_scale=s, **p
                    ),
                    [t.to(dtype) for t in (torch.randn(ROWS, H), torch.randn(V, H), torch.randn(V), scale)],
                    [same, lambda t: t[cut], lambda t: t[cut], same],
                    wide,
                    # Products of low precision are float32's on the CPU.
                    torch.float32 if DEVICE == "cpu" and not wide else dtype,
                )
    # The factor is saved: overwritten before the backward it raises.
    scale = torch.rand(ROWS) + 0.5
    x, w = leaf(torch.randn(ROWS, H)), leaf(torch.randn(V, H)[cut])
    loss = fusegrad.linear_cross_entropy(x, w, index, logit_scale=scale, vocab_parallel=shards, reduction="none")
    scale.mul_(2)
    assert_raises(RuntimeError, "modified by an inplace operation", lambda: loss.sum().backward())
    assert_raises(
        ValueError,
        "softcap",
        lambda: fusegrad.linear_cross_entropy(x, w, index, logit_scale=leaf(scale), softcap=2.0, vocab_parallel=shards),
    )


@case
def grad_weight_into(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    for dtype in (*DTYPES, torch.bfloat16):
        for options in ({}, {"reduction": "none", "workspace_mib": 0}, {"support": target[:, None]}):
            x, w = leaf(torch.randn(ROWS, H).to(dtype)), leaf(torch.randn(V, H).to(dtype))
            mine, part = leaf(x), leaf(w[cut])
            into = torch.ones_like(part, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
            start = into.clone()
            loss = fusegrad.linear_cross_entropy(
                mine, part, target, vocab_parallel=shards, grad_weight_into=into, **options
            )
            fusegrad.linear_cross_entropy(x, w, target, **options).sum().backward()
            version = into._version
            for count in (1, 2):
                loss.sum().backward(retain_graph=True)
                assert part.grad is None
                assert_close((into - start).to(dtype), count * w.grad[cut], f"{dtype} {options}")
            assert shards.size == 0 or into._version > version
            assert_close(mine.grad, 2 * x.grad, f"{dtype} {options}, input")
    w = leaf(torch.randn(V, H)[cut])
    options = {"vocab_parallel": shards, "grad_weight_into": w.detach()}
    assert_raises(
        RuntimeError if shards.size == 0 else ValueError,  # nothing shares no memory, but the others tell of theirs
        "got an error of its own in rank" if shards.size == 0 else "must not share memory",
        lambda: fusegrad.linear_cross_entropy(torch.randn(ROWS, H), w, target, **options),
    )


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
        for dtype in DTYPES:
            tensors = sample.tensors((ROWS,), V, DEVICE, dtype)
            student, teacher = torch.randn(ROWS, V, dtype=dtype), torch.randn(ROWS, V, dtype=dtype)
            if sample.options.get("log_probs"):
                student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
            aux = None if sample.options.get("log_probs") else JSDAux(True, sample.labels)
            top = sample.teacher((ROWS,), V, DEVICE)
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
        for dtype in DTYPES:
            tensors = sample.tensors((ROWS,), V, DEVICE, dtype)
            inputs = [torch.randn(ROWS, H, dtype=dtype), torch.randn(V, H, dtype=dtype)]
            parts: list[Callable[[Tensor], Tensor]] = [same, lambda t: t[cut]]
            hidden, head = torch.randn(ROWS, H + 1, dtype=dtype), torch.randn(V, H + 1, dtype=dtype)
            if sample.bias:
                inputs.append(torch.randn(V, dtype=dtype))
                parts.append(lambda t: t[cut])
            top = sample.teacher((ROWS,), V, DEVICE)
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


@case
def inplace(shards: VocabParallel) -> None:
    for name, (loss, x, w) in small_losses(shards).items():
        weight = None if w is None else leaf(w)
        functional, written = leaf(x), leaf(x)
        loss(functional, weight).backward(torch.tensor(0.37, dtype=WIDEST))
        of_weight = None if weight is None else weight.grad
        hidden = written * 1
        before = hidden.detach().clone()
        out = loss(hidden, weight, inplace=True)
        assert shards.size == 0 or not hidden.equal(before), f"{name} did not write in place"
        for _ in range(2):
            written.grad = None
            if weight is not None:
                weight.grad = None
            out.backward(torch.tensor(0.37, dtype=WIDEST), retain_graph=True)
            assert_close(written.grad, functional.grad, f"{name}, in place")
            if weight is not None:
                assert_close(weight.grad, of_weight, f"{name}, in place, weight")
        out.backward(torch.tensor(0.37, dtype=WIDEST))
        assert_close(written.grad, 2 * functional.grad, f"{name}, last backward in place")
        assert_raises(RuntimeError, "leaf", lambda: loss(leaf(x), weight, inplace=True))
        saved = leaf(x).exp()  # exp saves its result
        out = loss(saved, weight, inplace=True)
        assert_raises(RuntimeError, "modified by an inplace operation", lambda: out.backward())
        # A differentiable lse, or a value a row of a linear loss, needs the input again.
        if w is not None:
            hidden = leaf(x) * 1
            loss(hidden, weight, inplace=True, reduction="none")
            assert hidden.equal(x), name


@case
def contract(shards: VocabParallel) -> None:
    for name, (loss, x, w) in small_losses(shards).items():
        for options in ({}, {"reduction": "none"}):
            x1 = leaf(x)
            w1 = None if w is None else leaf(w)
            if w is None and "reduction" in options:
                continue
            # In place nothing is kept of which a second derivative could be made.
            (grad,) = torch.autograd.grad(loss(x1 * 1, w1, inplace=True, **options).sum(), x1, create_graph=True)
            if "reduction" not in options:
                assert_raises(RuntimeError, name, lambda: grad.sum().backward())
            with torch.no_grad():
                assert not loss(x1, w1, **options).requires_grad
            if w is None:
                continue
            frozen_input, frozen_weight = leaf(x), leaf(w)
            loss(frozen_input.detach(), frozen_weight, **options).sum().backward()
            loss(frozen_input, frozen_weight.detach(), **options).sum().backward()
            both = leaf(x), leaf(w)
            loss(*both, **options).sum().backward()
            assert_close(frozen_input.grad, both[0].grad, f"{name}, frozen weight")
            assert_close(frozen_weight.grad, both[1].grad, f"{name}, frozen input")
    target = torch.randint(0, V, (ROWS,))
    x = leaf(torch.randn(ROWS, shards.size))
    loss = fusegrad.cross_entropy(x, target, vocab_parallel=shards)
    target.zero_()
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


def check_derivatives(
    what: str,
    ours: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    inputs: list[Tensor],
    parts: list[Callable[[Tensor], Tensor]],
) -> None:
    """Second derivatives, and forward mode with a gradient of its tangent."""
    whole = [leaf(t) for t in inputs]
    mine = [leaf(part(t)) for part, t in zip(parts, inputs, strict=True)]
    moved = [torch.randn_like(t) for t in inputs]
    own_moved = [part(t) for part, t in zip(parts, moved, strict=True)]

    def second(loss: Callable[..., Tensor], given: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
        upstream = 0.7 * loss(*given).square().sum()
        first = torch.autograd.grad(upstream, given, create_graph=True)
        return torch.autograd.grad(sum((g * v).sum() for g, v in zip(first, along, strict=True)), given)

    found, expected = second(ours, mine, own_moved), second(truth, whole, moved)
    for i, (grad, full, part) in enumerate(zip(found, expected, parts, strict=True)):
        assert_close(grad, part(full), f"{what}, second derivative {i}")

    def forward(loss: Callable[..., Tensor], given: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, v) for t, v in zip(given, along, strict=True)]
            tangent = forward_ad.unpack_dual(loss(*dual)).tangent
            return tangent, *torch.autograd.grad(tangent.sum(), given)

    found, expected = forward(ours, mine, own_moved), forward(truth, whole, moved)
    assert_close(found[0], expected[0], f"{what}, tangent")
    for i, (grad, full, part) in enumerate(zip(found[1:], expected[1:], parts, strict=True)):
        assert_close(grad, part(full), f"{what}, gradient {i} of the tangent")

    def of_transforms(loss: Callable[..., Tensor], given: list[Tensor], along: list[Tensor]) -> tuple[Tensor, ...]:
        places = tuple(range(len(given)))
        gradient = torch.func.grad(lambda *x: loss(*x).square().sum(), places)
        return torch.func.jvp(gradient, tuple(t.detach() for t in given), tuple(along))[1]

    for i, (grad, full, part) in enumerate(
        zip(of_transforms(ours, mine, own_moved), of_transforms(truth, whole, moved), parts, strict=True)
    ):
        assert_close(grad, part(full), f"{what}, torch.func {i}")


@case
def derivatives(shards: VocabParallel) -> None:
    """Of second order and in forward mode, where the unsharded ops have them."""
    cut = slice(shards.start, shards.stop)
    dtype = WIDEST
    columns, rows = [lambda t: t[:, cut]], [same, lambda t: t[cut], lambda t: t[cut]]
    index = torch.randint(0, V, (ROWS,))
    index[3] = -100
    probabilities = torch.rand(ROWS, V, dtype=dtype)
    token, classes, scale = torch.rand(ROWS), torch.rand(V, dtype=dtype), torch.rand(ROWS, dtype=dtype) + 0.5
    # A softcap leaves too little of 100 for float32.
    logits = 3 * torch.randn(ROWS, V, dtype=dtype) + (100 if dtype == torch.float64 else 10)
    head = [torch.randn(*shape, dtype=dtype) for shape in ((ROWS, H), (V, H), (V,))]
    here = {"vocab_parallel": shards}

    def with_aux(out: Any) -> Tensor:
        return out[0] + out[1].lse.mean() - out[1].entropy.square().mean()

    some = {"return_aux": Aux(lse=True, entropy=True)}
    for options in (
        {},
        {"reduction": "none", "z_loss": 0.1},
        {"label_smoothing": 0.1, "weight": classes, "token_weight": token},
        {"label_smoothing": 0.2, "softcap": 20.0, "z_loss": 0.1, "reduction": "sum"},
    ):
        for target in (index, probabilities):
            mine = target if target is index else target[:, cut]
            check_derivatives(
                f"cross_entropy {list(options)}",
                lambda z, t=mine, o=options: with_aux(fusegrad.cross_entropy(z, t, **o, **some, **here)),
                lambda z, t=target, o=options: with_aux(fusegrad.cross_entropy(z, t, **o, **some)),
                [logits],
                columns,
            )
            check_derivatives(
                f"linear_cross_entropy {list(options)}",
                lambda x, w, b, t=mine, o=options: fusegrad.linear_cross_entropy(x, w, t, linear_bias=b, **o, **here),
                lambda x, w, b, t=target, o=options: fusegrad.linear_cross_entropy(x, w, t, linear_bias=b, **o),
                head,
                rows,
            )
    # The number makes tangents of float32 scalars float64 below torch.func.
    narrow = [t.float() for t in head]
    check_derivatives(
        "float32 times a number",
        lambda x, w: 0.3 * fusegrad.linear_cross_entropy(x, w, index, **here).square(),
        lambda x, w: 0.3 * fusegrad.linear_cross_entropy(x, w, index).square(),
        narrow[:2],
        rows[:2],
    )
    check_derivatives(
        "row_scale",
        lambda x, w, s: fusegrad.linear_cross_entropy(x, w, index, logit_scale=s, **here),
        lambda x, w, s: fusegrad.linear_cross_entropy(x, w, index, logit_scale=s),
        [*head[:2], scale],
        [same, lambda t: t[cut], same],
    )
    student, teacher = torch.randn(ROWS, V, dtype=dtype), torch.randn(ROWS, V, dtype=dtype)
    ids = torch.stack([torch.randperm(V)[:4] for _ in range(ROWS)])
    ids[2, 1] = -1
    top = torch.full((ROWS, 4), 0.2, dtype=dtype).log(), ids
    for options in (
        {"beta": 0.5},
        {"beta": 0.0, "temperature": 2.0, "reduction": "none"},
        {"beta": 1.0, "labels": index, "hard_weight": 0.5, "soft_weight": 0.5},
    ):
        check_derivatives(
            f"jsd {list(options)}",
            lambda s, t, o=options: fusegrad.jsd(s, t, **o, **here),
            lambda s, t, o=options: fusegrad.jsd(s, t, **o),
            [student, teacher],
            columns * 2,
        )
        check_derivatives(
            f"jsd, top-k, {list(options)}",
            lambda s, o=options: fusegrad.jsd(s, top, **o, **here),
            lambda s, o=options: fusegrad.jsd(s, top, **o),
            [student],
            columns,
        )
        check_derivatives(
            f"linear_jsd {list(options)}",
            lambda x, w, b, o=options: fusegrad.linear_jsd(
                x, w, head[0], 2 * head[1][cut], student_bias=b, **o, **here
            ),
            lambda x, w, b, o=options: fusegrad.linear_jsd(x, w, head[0], 2 * head[1], student_bias=b, **o),
            head,
            rows,
        )
    log_probs = [t.log_softmax(-1) for t in (student, teacher)]
    check_derivatives(
        "log_probs",
        lambda s, t: fusegrad.jsd(s, t, log_probs=True, **here),
        lambda s, t: fusegrad.jsd(s, t, log_probs=True),
        log_probs,
        columns * 2,
    )
    upstream = torch.randn(3, ROWS, dtype=dtype)
    found, expected = (
        torch.autograd.grad(fusegrad.cross_entropy(z, index, reduction="none", **o), z, upstream, is_grads_batched=True)
        for z, o in ((leaf(logits[:, cut]), here), (leaf(logits), {}))
    )
    assert_close(found[0], expected[0][..., cut], "batched gradients")
    batch = torch.randn(2, ROWS, shards.size, dtype=dtype)
    assert_raises(
        NotImplementedError,
        "cross_entropy: torch.vmap must not be applied with vocab_parallel",
        lambda: torch.vmap(lambda z: fusegrad.cross_entropy(z, index, **here))(batch),
    )


@case
def shapes(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    for shape in ((), (3,), (2, 3), (0,)):
        target = torch.randint(0, V, shape)
        inputs = [torch.randn(*shape, H).to(WIDEST), torch.randn(V, H).to(WIDEST)]
        check_same(
            f"linear {shape}",
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, reduction="none", vocab_parallel=shards),
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, reduction="none"),
            inputs,
            [same, lambda t: t[cut]],
        )
        check_same(
            f"linear, sum {shape}",
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, reduction="sum", vocab_parallel=shards),
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, reduction="sum"),
            inputs,
            [same, lambda t: t[cut]],
        )
    target = torch.randint(0, V, (2, 3, 2))
    check_same(
        "K dimensions",
        lambda z: fusegrad.cross_entropy(z, target, reduction="none", vocab_parallel=shards),
        lambda z: fusegrad.cross_entropy(z, target, reduction="none"),
        [torch.randn(2, V, 3, 2)],
        [lambda t: t[:, cut]],
    )
    x, w = torch.randn(ROWS, H), torch.randn(V, H)
    ignored = torch.full((ROWS,), -100)
    x1, w1 = leaf(x), leaf(w[cut])
    loss = fusegrad.linear_cross_entropy(x1, w1, ignored, vocab_parallel=shards)
    loss.backward()
    assert loss.isnan() and not x1.grad.any() and not w1.grad.any(), "all rows ignored"
    large = 1e4 * torch.ones(ROWS, 1)
    target = torch.randint(0, V, (ROWS,))
    check_same(
        "large offset",
        lambda z: fusegrad.cross_entropy(z, target, vocab_parallel=shards),
        lambda z: reference.cross_entropy(z.double(), target),
        [torch.randn(ROWS, V) + large],
        [lambda t: t[:, cut]],
    )


@case
def autocast(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    with torch.autocast(DEVICE, torch.bfloat16):
        check_same(
            "autocast",
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, vocab_parallel=shards),
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target),
            [torch.randn(ROWS, H), torch.randn(V, H)],
            [same, lambda t: t[cut]],
        )


@case
def compiled(shards: VocabParallel) -> None:
    """Each loss in one graph, and its backward in one."""
    from torch._dynamo.backends.common import aot_autograd

    for name, (loss, x, w) in small_losses(shards).items():
        for options in ({}, {"reduction": "none"}):
            graphs: list[Any] = []

            def count(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
                graphs.append(graph)
                return graph

            def step(x: Tensor, *w: Tensor, loss: Any = loss, options: Any = options) -> Tensor:
                return loss(x * 2, w[0] * 3 if w else None, **options) + x.sum()

            torch.compiler.reset()
            backend = aot_autograd(fw_compiler=count, bw_compiler=count)
            inputs = [x] if w is None else [x, w]
            check_same(
                f"torch.compile, {name} {options}",
                torch.compile(step, backend=backend, fullgraph=True),
                step,
                inputs,
                [same] * len(inputs),
            )
            assert len(graphs) == 2, f"{name}: a graph for the forward and one for the backward, but {len(graphs)}"
    # What differs is an error of the compiled call too.
    target = torch.full((ROWS,), shards.rank)
    whole = torch.compile(
        lambda x: fusegrad.cross_entropy(x, target, vocab_parallel=shards), backend="aot_eager", fullgraph=True
    )
    logits = torch.randn(ROWS, shards.size)
    assert_raises(ValueError, "cross_entropy: target must be the same in all processes", lambda: whole(logits))


@case
def thunder(shards: VocabParallel) -> None:
    if importlib.util.find_spec("thunder") is None or not hasattr(Tensor, "align_as"):
        return
    import thunder
    from fusegrad.integrations.thunder import fusegrad_ex

    # thunder does not see tensors that a function's function has captured.
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    teacher, weight, hidden = (torch.randn(*shape).to(WIDEST) for shape in ((ROWS, V), (V, H), (ROWS, H)))
    steps: list[tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]] = [
        (lambda z, t: fusegrad.cross_entropy(z * 2, t, vocab_parallel=shards), [teacher[:, cut]], [target]),
        (lambda z, t: fusegrad.jsd(z * 2, t, vocab_parallel=shards), [teacher[:, cut]], [-teacher[:, cut]]),
        (
            lambda x, w, t: fusegrad.linear_cross_entropy(x * 2, w, t, vocab_parallel=shards),
            [hidden, weight[cut]],
            [target],
        ),
        (
            lambda x, w, h, t: fusegrad.linear_jsd(x * 2, w, h, t, vocab_parallel=shards),
            [hidden, weight[cut]],
            [hidden, -weight[cut]],
        ),
    ]
    for i, (step, inputs, others) in enumerate(steps):
        jitted = thunder.jit(step, executors=[fusegrad_ex, *thunder.get_default_executors()])
        check_same(
            f"thunder, {i}",
            lambda *x, f=jitted, o=others: f(*x, *o),
            lambda *x, f=step, o=others: f(*x, *o),
            inputs,
            [same] * len(inputs),
        )


@case
def dtensors(shards: VocabParallel) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(shards.group, DEVICE, mesh_dim_names=("tp",))
    x, target = torch.randn(12, H), torch.randint(0, V, (12,))
    head = torch.nn.Linear(H, V)
    plain = leaf(x)
    truth = reference.linear_cross_entropy(plain, head.weight, target, linear_bias=head.bias, label_smoothing=0.1)[0]
    truth.backward()
    expected = head.weight.grad, head.bias.grad
    head.zero_grad()
    parallel = parallelize_module(head, mesh, ColwiseParallel())
    assert isinstance(parallel.weight, DTensor)

    for placement in (None, Replicate(), Shard(0)):
        given = leaf(x) if placement is None else leaf(distribute_tensor(x, mesh, [placement]))
        loss = fusegrad.linear_cross_entropy(
            given, parallel.weight, target, linear_bias=parallel.bias, label_smoothing=0.1
        )
        assert_close(loss, truth, "DTensor, loss")
        loss.backward()
        grad = given.grad if placement is None else given.grad.full_tensor()
        assert placement is None or given.grad.placements == (placement,)
        assert_close(grad, plain.grad, f"DTensor {placement}, input")
        assert_close(parallel.weight.grad.full_tensor(), expected[0], "DTensor, weight")
        assert_close(parallel.bias.grad.full_tensor(), expected[1], "DTensor, bias")
        parallel.zero_grad()

    criterion = fusegrad.LinearCrossEntropyLoss(H, V)
    truth = reference.linear_cross_entropy(x, criterion.linear.weight, target)[0]
    (expected_weight,) = torch.autograd.grad(truth, criterion.linear.weight)
    parallelize_module(criterion, mesh, {"linear": ColwiseParallel()})
    loss = criterion(x, target)
    loss.backward()
    assert_close(loss, truth, "LinearCrossEntropyLoss")
    assert_close(criterion.linear.weight.grad.full_tensor(), expected_weight, "LinearCrossEntropyLoss, weight")

    logits = torch.randn(12, V)
    whole = leaf(logits)
    truth = reference.cross_entropy(whole, target)[0]
    truth.backward()
    part = leaf(distribute_tensor(logits, mesh, [Shard(1)]))
    loss = fusegrad.cross_entropy(part, target)
    loss.backward()
    assert_close(loss, truth, "DTensor logits")
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor logits, gradient")

    other = torch.randn(12, V)
    whole, part = leaf(logits), leaf(part)
    reference.jsd(whole, other)[0].backward()
    fusegrad.jsd(part, distribute_tensor(other, mesh, [Shard(1)])).backward()
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor jsd, gradient")

    weight, frozen = torch.randn(V, H), torch.randn(V, H)
    whole = leaf(weight)
    reference.linear_jsd(x, whole, x, frozen)[0].backward()
    part = leaf(distribute_tensor(weight, mesh, [Shard(0)]))
    fusegrad.linear_jsd(x, part, x, distribute_tensor(frozen, mesh, [Shard(0)])).backward()
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor linear_jsd, gradient")

    for placement in (Replicate(), Shard(1)):
        wrong = distribute_tensor(weight, mesh, [placement])
        assert_raises(
            ValueError,
            "linear_cross_entropy: linear_weight must be Shard(0)",
            lambda w=wrong: fusegrad.linear_cross_entropy(x, w, target),
        )


class TinyModel(torch.nn.Module):
    """Token embedding, a block, and the loss of a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.block = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh(), torch.nn.LayerNorm(H))

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor, inplace: bool) -> Tensor:
        hidden = self.block(self.embedding(tokens))
        return fusegrad.linear_cross_entropy(
            hidden, self.embedding.weight, target, normalizer=normalizer, inplace=inplace
        )


@case
def data_parallel(shards: VocabParallel) -> None:
    """The gradients of DDP and FSDP2 are one process's, with numbers of kept tokens that differ by process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    plain = TinyModel()
    tokens, target = torch.randint(0, V, (2 * shards.world, 5)), torch.randint(0, V, (2 * shards.world, 5))
    target[0] = -100
    state = plain.state_dict()
    plain(tokens, target, (target != -100).sum(), False).backward()
    mine = slice(2 * shards.rank, 2 * shards.rank + 2)
    kept = (target[mine] != -100).sum().float()
    dist.all_reduce(kept, group=shards.group)
    for kind in ("ddp", "fsdp"):
        model = TinyModel()
        model.load_state_dict(state)
        step: Any = model
        if kind == "ddp":
            step = torch.nn.parallel.DistributedDataParallel(model, process_group=shards.group)
        else:
            mesh = DeviceMesh.from_group(shards.group, DEVICE)
            fully_shard(model.block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        step(tokens[mine], target[mine], kept / shards.world, True).backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
            assert_close(grad, plain.get_parameter(name).grad, f"{kind}, {name}")


@case
def compiled_data_parallel(shards: VocabParallel) -> None:
    """FSDP2's layers, and the loss of a sharded head of all processes' hidden states: each one graph. PyTorch does not
    trace FSDP2's own hooks."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    plain = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh())
    inputs, target = torch.randn(4 * shards.world, H), torch.randint(0, V, (4 * shards.world,))
    state, weight = plain.state_dict(), torch.randn(V, H, requires_grad=True)
    fusegrad.linear_cross_entropy(plain(inputs), weight, target).backward()
    layer = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh())
    layer.load_state_dict(state)
    fully_shard(layer, mesh=DeviceMesh.from_group(shards.group, DEVICE))
    torch.compiler.reset()
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]

    def loss_of(hidden: Tensor, part: Tensor, target: Tensor) -> Tensor:
        whole = all_gather_tensor_autograd(hidden, 0, shards.group)
        return fusegrad.linear_cross_entropy(whole, part, target, vocab_parallel=shards)

    step = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    mine = slice(4 * shards.rank, 4 * shards.rank + 4)
    part = weight.detach()[shards.start : shards.stop].clone().requires_grad_()
    step(layer(inputs[mine]), part, target).backward()
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, name)
    assert_close(part.grad, weight.grad[shards.start : shards.stop], "head")


@case
def bad_input(shards: VocabParallel) -> None:
    group, rank, world = shards.group, shards.rank, shards.world
    for bounds, text in (
        ([(r * 4, r * 4 + 3) for r in range(world)], "nothing covers [3, 4)"),
        ([(r * 4, r * 4 + 5) for r in range(world)], "twice [4, 5)"),
        ([(r * 4 + 1, r * 4 + 5) for r in range(world)], "nothing covers [0, 1)"),
        ([(0, 5)] * world, "twice [0, 5)"),
        ([(3, 1)] * world, "0 <= start <= stop, but got 3 and 1 in rank 0"),
        ([(0.0, 4.0)] * world, "whole numbers with 0 <= start <= stop, but got 0.0"),
    ):
        assert_raises(ValueError, text, lambda b=bounds: VocabParallel(group, *b[rank]))
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert_raises(ValueError, "group must contain this process", lambda: VocabParallel(outside, 0, 1))

    x, w, target = torch.randn(ROWS, H), torch.randn(shards.size, H), torch.randint(0, V, (ROWS,))
    z = torch.randn(ROWS, shards.size)

    def linear(**changes: Any) -> Any:
        given = {"input": x, "linear_weight": w, "target": target, "vocab_parallel": shards, **changes}
        return lambda: fusegrad.linear_cross_entropy(**given)

    def plain(**changes: Any) -> Any:
        given = {"input": z, "target": target, "vocab_parallel": shards, **changes}
        return lambda: fusegrad.cross_entropy(**given)

    wrong = torch.randn(V + 1, H)
    op = "linear_cross_entropy: "
    assert_raises(ValueError, f"{op}linear_weight must have stop - start = {shards.size}", linear(linear_weight=wrong))
    assert_raises(ValueError, f"{op}linear_bias must have stop - start", linear(linear_bias=torch.ones(V + 1)))
    assert_raises(TypeError, f"{op}vocab_parallel must be a VocabParallel", linear(vocab_parallel=group))
    assert_raises(ValueError, f"{op}label_smoothing must be in [0, 1]", linear(label_smoothing=2.0))
    assert_raises(ValueError, f"{op}weight must have shape [{V}]", linear(weight=torch.ones(V + 1)))
    assert_raises(ValueError, f"{op}a target of class indices", linear(target=target[1:]))
    widest = "float64" if DEVICE == "cpu" else "float32"
    assert_raises(TypeError, f"{op}input must be {widest}", linear(input=target))
    assert_raises(IndexError, f"{op}target must be in [0, {V})", linear(target=torch.full((ROWS,), V)))
    assert_raises(IndexError, "cross_entropy: target must be in [0, ", plain(target=torch.full((ROWS,), -3)))
    assert_raises(ValueError, "cross_entropy: input must have stop - start", plain(input=torch.randn(ROWS, V + 1)))
    assert_raises(ValueError, "weight must not require grad", plain(weight=torch.ones(V, requires_grad=True)))
    probabilities = z.softmax(-1).requires_grad_()
    assert_raises(ValueError, "target must not require grad with vocab_parallel", plain(target=probabilities))
    assert_raises(
        ValueError,
        "jsd: teacher must have stop - start",
        lambda: fusegrad.jsd(z, torch.randn(ROWS, V + 1), vocab_parallel=shards),
    )
    assert_raises(
        ValueError,
        "linear_jsd: vocab_size must be None with vocab_parallel",
        lambda: fusegrad.linear_jsd(x, w, x, w, vocab_size=3, vocab_parallel=shards),
    )
    # Rows of their own, as in data parallelism.
    other = torch.full((ROWS,), shards.rank)
    everywhere = "must be the same in all processes that share a vocabulary"
    assert_raises(ValueError, f"{op}target {everywhere}", linear(target=other))
    assert_raises(ValueError, f"cross_entropy: target {everywhere}", plain(target=other))
    probabilities = probabilities.detach()
    assert_raises(ValueError, f"{op}input {everywhere}", linear(input=x + shards.rank, target=probabilities))
    assert_raises(
        ValueError,
        f"jsd: labels {everywhere}",
        lambda: fusegrad.jsd(z, z, labels=other, vocab_parallel=shards),
    )
    index = torch.zeros(ROWS, 2, dtype=torch.long)
    log_probs = torch.full((ROWS, 2), -1.0)
    if DEVICE == "cpu":  # not checked elsewhere
        assert_raises(
            ValueError,
            "jsd: the teacher's indices must be distinct in a row",
            lambda: fusegrad.jsd(z, (log_probs, index), vocab_parallel=shards),
        )
    index[0, 1] = V
    assert_raises(
        IndexError,
        "jsd: the teacher's indices must be in [0, ",
        lambda: fusegrad.jsd(z, (log_probs, index), vocab_parallel=shards),
    )


@case
def other_calls(shards: VocabParallel) -> None:
    """Each argument and option that is another in one process alone is an error in all that names it."""
    rank, last = shards.rank, shards.world - 1
    mine = slice(shards.start, shards.stop)
    index = torch.randint(0, V, (ROWS,))
    changed = index.clone()
    changed[3] = (index[3] + 1) % V
    x, other_x = torch.randn(ROWS, H), torch.randn(ROWS, H)
    one_row, ones = x.clone(), torch.ones(ROWS)
    one_row[2] = other_x[2]
    logits, weight, classes = torch.randn(ROWS, V), torch.randn(V, H), torch.rand(V)
    ids = torch.arange(ROWS * 3).view(ROWS, 3) % V
    top = torch.full((ROWS, 3), 0.2).log()
    count = torch.tensor(1000.0)
    options = {
        "z_loss": (0.1, 0.2),
        "label_smoothing": (0.1, 0.0),
        "softcap": (None, 30.0),
        "reduction": ("mean", "sum"),
    }
    options |= {"ignore_index": (-100, 1), "token_weight": (ones, 2 * ones), "normalizer": (count, count + 1)}
    classed = {"weight": (classes, classes.flip(0)), "target": (index, changed), **options}
    kinds = {"beta": (0.5, 0.3), "temperature": (1.0, 2.0), "hard_weight": (0.5, 0.4)}
    kinds |= {"labels": (index, changed), "token_weight": (ones, 2 * ones), "normalizer": (count, count + 1)}
    hidden = {"input": (x, one_row), "logit_scale": (1.0, 2.0), "workspace_mib": (None, 1)}
    scales = {"row_scale": (ones, ones.flip(0) + torch.arange(ROWS))}
    part = weight[mine]
    trained = part.clone().requires_grad_()
    calls: list[tuple[str, dict[str, Any], dict[str, tuple[Any, Any]]]] = [
        ("cross_entropy", {"input": logits[:, mine], "target": index}, classed),
        ("linear_cross_entropy", {"input": x, "linear_weight": part, "target": index}, classed | hidden),
        (
            "linear_cross_entropy",
            {"input": x, "linear_weight": part, "target": index},
            {"linear_weight": (part, trained)},
        ),
        (
            "cross_entropy",
            {"input": logits[:, mine], "target": ids[:, 0], "support": ids},
            {"support": (ids, ids.flip(1))},
        ),
        ("jsd", {"student": logits[:, mine], "teacher": logits[:, mine], "labels": index}, kinds),
        (
            "linear_jsd",
            {"student_input": x, "student_weight": part, "teacher_input": x, "teacher_weight": part, "labels": index},
            {
                **kinds,
                "student_softcap": (None, 30.0),
                "student_input": (x, one_row),
                "teacher_input": (x, other_x),
                "student_logit_scale": (1.0, 2.0),
            },
        ),
    ]
    for op, given, changes in calls:
        for name, (ours, theirs) in changes.items():
            call = {**given, name: theirs if rank == last else ours, "vocab_parallel": shards}
            text = f"{op}: {name} must be the same in all processes that share a vocabulary, but got another in rank"
            assert_raises(ValueError, f"{text} {last}", lambda op=op, c=call: getattr(fusegrad, op)(**c))
    scale = scales["row_scale"][rank == last]
    text = "linear_cross_entropy: row_scale must be the same"
    given = {"input": x, "linear_weight": part, "target": index, "vocab_parallel": shards}
    assert_raises(ValueError, text, lambda: fusegrad.linear_cross_entropy(**given, logit_scale=scale))
    student = logits[:, mine]
    for where, theirs in (("values", (top - 0.5, ids)), ("indices", (top, ids.flip(1)))):
        teacher = theirs if rank == last else (top, ids)
        name = "teacher_indices" if where == "indices" else "teacher"
        text = f"jsd: {name} must be the same in all"
        assert_raises(ValueError, text, lambda t=teacher: fusegrad.jsd(student, t, vocab_parallel=shards))
    # An error of one process alone ends the call in all.
    wrong = {**given, "linear_weight": torch.randn(V + 1, H)} if rank == last else given
    error = ValueError if rank == last else RuntimeError
    text = "linear_weight must have stop - start" if rank == last else "that share a vocabulary must make the call, but"
    assert_raises(error, text, lambda: fusegrad.linear_cross_entropy(**wrong))
    assert_close(
        fusegrad.linear_cross_entropy(**given), reference.linear_cross_entropy(x, weight, index)[0], "after errors"
    )


if __name__ == "__main__":
    main(CASES, runs, lambda group: VocabParallel(group, *CUTS[dist.get_world_size(group)][dist.get_rank()]))
