"""What every loss over a shared vocabulary keeps: writes, kept graphs, derivatives of any kind, shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fusegrad
import torch
import torch.autograd.forward_ad as forward_ad
from fusegrad import Aux, VocabParallel, reference
from processes import assert_raises
from torch import Tensor
from vocab_parallel_support import (
    ROWS,
    WIDEST,
    H,
    V,
    assert_close,
    case,
    check_same,
    leaf,
    same,
    small_losses,
)


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
    """For second order and in forward mode, where the unsharded ops have them."""
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
        for reduction in ("none", "sum"):
            call: Callable[..., Tensor] = functools.partial(fusegrad.linear_cross_entropy, reduction=reduction)
            check_same(
                f"linear, {reduction} {shape}",
                lambda x, w: call(x, w, target, vocab_parallel=shards),
                lambda x, w: call(x, w, target),
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
