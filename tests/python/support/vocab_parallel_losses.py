"""Each loss over a shared vocabulary, with all its options: values and gradients are those of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusegrad
import torch
from fusegrad import Aux, JSDAux, VocabParallel, reference
from processes import assert_raises
from support import DISTILLATION, DISTILLATION_LINEAR, DISTILLATION_LOGITS, Distillation
from torch import Tensor
from vocab_parallel_support import (
    DEVICE,
    DTYPES,
    ROWS,
    H,
    V,
    assert_close,
    auxes,
    case,
    check_same,
    leaf,
    same,
    samples_of,
)


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
        # For low precision the unsharded op is the truth, without aux values: formulas would round each step.
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
