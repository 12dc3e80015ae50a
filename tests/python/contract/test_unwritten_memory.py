"""No output of any op has an element that nothing wrote.

Under deterministic algorithms PyTorch fills new memory with NaN, and the largest number of an integer's type: no op may
return either. The dispatcher's mode sees each op's outputs, also those that only a backward gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fusegrad
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from fusegrad import Aux, JSDAux, trace_mask_mod, trace_score_mod
from fusegrad.distributed import VocabParallel
from support import (
    DEVICES,
    DISTILLATION,
    DISTILLATION_LINEAR,
    DISTILLATION_LOGITS,
    LINEAR,
    deterministic_algorithms,
)
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

each_device = pytest.mark.parametrize("device", DEVICES)
N, HIDDEN, V = 5, 13, 37

# Without elements of their own: they return a number or a flag, or what they were given, or change it.
WITHOUT_MEMORY = {"refuse_gradient", "refuse_double_backward", "constant_beside", "shards_agree"}
WITHOUT_MEMORY |= {"flex_attention_merge_"}
# A mode keeps these from being taken; what they return are gradients, which check() looks at without one.
OVER_WHAT_WAS_KEPT = {"linear_cross_entropy_backward_", "linear_cross_entropy_backward_into_", "scale_gradient_"}
OVER_WHAT_WAS_KEPT |= {"flex_attention_backward_"}


def is_composite(op: str) -> bool:
    """Made of other ops, which a mode sees in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fusegrad::{op}", "CompositeImplicitAutograd")


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms():
        yield


def assert_written(results: Any, what: str) -> None:
    for i, t in enumerate(pytree.tree_leaves(results)):
        if not isinstance(t, Tensor) or t.numel() == 0 or t.dtype == torch.bool or t.is_meta:
            continue
        unwritten = t.isnan() if t.is_floating_point() else t == torch.iinfo(t.dtype).max
        assert not unwritten.any(), f"{what}: output {i} {tuple(t.shape)} has unwritten elements"


class Outputs(TorchDispatchMode):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen = what, set[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        if op.namespace == "fusegrad":
            name = op._schema.name.removeprefix("fusegrad::")
            self.seen.add(name)
            assert_written(results, f"{self.what}: {name}")
        return results


def check(f: Callable[..., Any], *inputs: Tensor, what: str, orders: int = 2) -> set[str]:
    """Derivatives of both modes up to the second ones, of the sum of what `f` gives, seen by the mode; the first
    without it too, where a backward may write over what the forward kept."""

    def scalar(*given: Tensor) -> Tensor:
        values = pytree.tree_leaves(f(*given))
        return sum(v.double().sum() for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def backward(create_graph: bool = False) -> None:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        grads = torch.autograd.grad(scalar(*(t * 1 for t in leaves)), leaves, create_graph=create_graph)
        assert_written(grads, what)
        if create_graph:
            twice = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves, materialize_grads=True)
            assert_written(twice, what)

    backward()
    with Outputs(what) as outputs:
        f(*inputs)
        backward()
        if orders > 0:
            with forward_ad.dual_level():
                f(*(forward_ad.make_dual(t, torch.ones_like(t)) for t in inputs))
        if orders > 1:
            backward(create_graph=True)
            places = tuple(range(len(inputs)))
            ones = tuple(torch.ones_like(t) for t in inputs)
            torch.func.jvp(torch.func.grad(scalar, places), inputs, ones)
    return outputs.seen


def normal(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def cross_entropies(device: str, dtype: torch.dtype) -> set[str]:
    seen = set()
    some = Aux(lse=True, entropy=True)
    for sample in LINEAR:
        every = Aux(True, True, not sample.probabilities, True, True, not sample.probabilities)
        x, w = normal(device, dtype, N, HIDDEN), normal(device, dtype, V, HIDDEN)
        b = [normal(device, dtype, V)] if sample.bias else []
        target = sample.target((N,), V, device, dtype)
        options = {**sample.options, **sample.tensors((N,), V, device, dtype)}
        of_logits = {k: v for k, v in options.items() if k not in ("logit_scale", "workspace_mib")}
        # The values that are for logging have no derivative.
        for aux, inplace, orders in ((None, False, 2), (some, False, 1), (every, False, 0), (None, True, 0)):
            more = {"inplace": inplace, "return_aux": aux}

            def differentiable(out: Any, all_of_it: bool = aux is not every) -> Any:
                return out if all_of_it else out[0]

            def of_rows(x: Tensor) -> Any:
                return differentiable(fusegrad.cross_entropy(x, target, **of_logits, **more))

            def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
                return differentiable(fusegrad.linear_cross_entropy(x, w, target, linear_bias=b, **options, **more))

            what = f"{sample.name}, {more}"
            seen |= check(of_rows, normal(device, dtype, N, V), what=what, orders=orders)
            seen |= check(linear, x, w, *b, what=what, orders=orders)
    return seen


def log_probs(device: str, dtype: torch.dtype) -> set[str]:
    seen = set()
    x, w, b = (normal(device, dtype, *shape) for shape in ((N, HIDDEN), (V, HIDDEN), (V,)))
    target = torch.randint(0, V, (N,), device=device)
    support = torch.stack([target, (target + 3) % V, torch.full_like(target, -1)], 1)
    scale = torch.rand(N, device=device) + 0.5
    into = torch.zeros(V, HIDDEN, device=device)
    for options in ({}, {"workspace_mib": 0}, {"batch_invariant": True}, {"logit_scale": scale}, {"softcap": 3.0}):
        of_columns = {"support": support}
        for more in ({}, {"grad_weight_into": into}, of_columns, {"grad_weight_into": into, **of_columns}):
            orders = 0 if more or "batch_invariant" in options else 2
            what = f"linear_log_prob {[*options, *more]}"

            def f(x: Tensor, w: Tensor, b: Tensor, given: dict[str, Any] = {**options, **more}) -> Any:  # noqa: B006
                return fusegrad.linear_log_prob(x, w, target, linear_bias=b, **given)

            if "grad_weight_into" in more:
                leaves = [t.clone().requires_grad_() for t in (x, w, b)]
                with Outputs(what) as outputs:
                    out = f(*leaves)
                    (out[0].sum() + out[1].sum()).backward()
                    assert_written([t.grad for t in leaves if t.grad is not None], what)
                seen |= outputs.seen
            else:
                seen |= check(f, x, w, b, what=what, orders=orders)
    with Outputs("linear_log_prob_forward") as outputs:
        torch.ops.fusegrad.linear_log_prob_forward(x, w, target, b, row_scale=scale)
    return seen | outputs.seen


def divergences(device: str, dtype: torch.dtype) -> set[str]:
    seen = set()
    for sample in [*DISTILLATION, *DISTILLATION_LOGITS, *DISTILLATION_LINEAR]:
        linear = sample in DISTILLATION_LINEAR or sample in DISTILLATION
        of_logits = sample not in DISTILLATION_LINEAR
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        options = {**sample.options, **sample.tensors((N,), V, device, acc)}
        if "labels" in options and "vocab_size" in options:
            options["labels"] = options["labels"].clamp(max=options["vocab_size"] - 1)
        x, y = normal(device, dtype, N, V), normal(device, dtype, N, V)
        if options.get("log_probs"):
            x, y = x.log_softmax(1), y.log_softmax(1)
        teacher = sample.teacher((N,), V, device)
        h, w = normal(device, dtype, N, HIDDEN), normal(device, dtype, V, HIDDEN)
        ty, tw = normal(device, dtype, N, 11), normal(device, dtype, V, 11)
        b = [normal(device, dtype, V)] if sample.bias else []
        for inplace in (False, True):
            orders = 0 if inplace else 2
            hard = "labels" in options and not options.get("log_probs")
            for aux in (None, JSDAux(soft_loss=True, hard_loss=hard)):
                more = {"inplace": inplace, "return_aux": aux}
                what = f"{sample.name}, {more}"
                first = (lambda out: out[0]) if aux else (lambda out: out)
                if of_logits and teacher is None:
                    seen |= check(
                        lambda x, y: first(fusegrad.jsd(x, y, **options, **more)), x, y, what=what, orders=orders
                    )
                elif of_logits:
                    seen |= check(
                        lambda x: first(fusegrad.jsd(x, teacher, **options, **more)), x, what=what, orders=orders
                    )
                if linear:
                    of = (teacher, None) if teacher is not None else (ty, tw)
                    seen |= check(
                        lambda h, w, *b: first(
                            fusegrad.linear_jsd(h, w, *of, student_bias=b[0] if b else None, **options, **more)
                        ),
                        *(h, w, *b),
                        what=what,
                        orders=orders,
                    )
    return seen


def shards(device: str, dtype: torch.dtype) -> set[str]:
    seen = set()
    part = VocabParallel(None, 0, V)
    ty, tw = normal(device, dtype, N, 11), normal(device, dtype, V, 11)
    target = torch.randint(0, V, (N,), device=device)
    x, h, w = normal(device, dtype, N, V), normal(device, dtype, N, HIDDEN), normal(device, dtype, V, HIDDEN)
    y = normal(device, dtype, N, V)
    more = {"vocab_parallel": part}
    for inplace in (False, True):
        for aux in (None, Aux(lse=True, entropy=True, token_log_prob=True)):
            how = {"inplace": inplace, "return_aux": aux, **more}
            what, orders = f"sharded {how}", 0 if inplace else 2
            seen |= check(lambda x: fusegrad.cross_entropy(x, target, **how), x, what=what, orders=orders)
            seen |= check(
                lambda h, w: fusegrad.linear_cross_entropy(h, w, target, **how), h, w, what=what, orders=orders
            )
        how = {"inplace": inplace, **more}
        seen |= check(lambda x: fusegrad.jsd(x, y, **how), x, what="sharded jsd", orders=orders)
        seen |= check(lambda h, w: fusegrad.linear_jsd(h, w, ty, tw, **how), h, w, what="sharded", orders=orders)
    for op in (torch.ops.fusegrad.shards_sum, torch.ops.fusegrad.shards_use):  # what second derivatives take of parts
        seen |= check(lambda x, op=op: op(x, "", 0, [0, V]).square(), x, what=f"{op}")
    return seen


def attention(device: str, dtype: torch.dtype) -> set[str]:
    """Kernels are compiled for each call here: no more of them than there are paths."""
    seen = set()
    b, h, hkv, m, n = 2, 4, 2, 67, 131
    places = torch.arange(m, device=device) % 7
    table, bias = normal(device, dtype, 7, h), normal(device, dtype, m, n)
    # Rows that see no key, and keys that no query sees.
    mask = fusegrad.create_block_mask(lambda b, h, i, j: (i < 50) & (j <= i + 9), None, None, m, n, device=device)
    every = AuxRequest(lse=True, max_scores=True)
    calls: list[tuple[tuple[int, int], dict[str, Any], int]] = [
        ((24, 40), {}, 2),
        ((24, 40), {"block_mask": mask}, 2),
        ((24, 40), {"block_mask": mask, "return_aux": every}, 0),  # max_scores has no tangent
        ((24, 40), {"dropout_p": 0.3}, 1),
        ((24, 40), {"inplace": True}, 0),
        ((24, 40), {"deterministic": False}, 0),
        ((64, 64), {}, 0),
    ]
    for (d, e), options, orders in calls:
        q, k, v = (normal(device, dtype, b, *s) for s in ((h, m, d), (hkv, n, d), (hkv, n, e)))

        def attend(*t: Tensor, options: dict[str, Any] = options) -> Any:
            q, k, v, table, bias = t

            def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s * table[places[i], h] + bias[i, j]

            out = fusegrad.flex_attention(q, k, v, score_mod, enable_gqa=True, **options)
            if "return_aux" not in options:
                return out
            return out[0], *(torch.where(t.isfinite(), t, 0) for t in (out[1].lse, out[1].max_scores))

        seen |= check(attend, q, k, v, table, bias, what=f"attention {d} {e} {[*options]}", orders=orders)
    q, k, v = (normal(device, dtype, b, *s) for s in ((h, m, 24), (hkv, n, 24), (hkv, n, 24)))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusegrad.flex_attention(q, k, v, enable_gqa=True)

    seen |= check(plain, q, k, v, what="attention without a score_mod")
    seen |= check(plain, q[:, :, :1], k, v, what="attention of one query", orders=0)

    def project(*t: Tensor) -> Tensor:
        out = torch.ops.fusegrad.pair_projection(*t, 1e-5, True)
        assert isinstance(out, Tensor)
        return out

    for channels in (128, 48):
        shapes = ((b, 9, 13, channels), (channels,), (channels,), (h, channels), (h,))
        given = [normal(device, dtype, *shape) for shape in shapes]
        seen |= check(project, *given, what=f"a pair bias of {channels} channels")

    def loss(q: Tensor, c: Tensor) -> Tensor:
        out = fusegrad.flex_attention(q, k, v, lambda s, b, h, i, j: s * c[h], enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.float().square().sum()

    with Outputs("attention of a batch") as outputs:
        c, batch = normal(device, dtype, h), torch.stack([q, q])
        torch.vmap(torch.func.grad(loss, (0, 1)), (0, None))(batch, c)
        torch.func.jvp(lambda c: torch.vmap(loss, (0, None))(batch, c), (c,), (torch.ones_like(c),))
    return seen | outputs.seen


def lists_and_graphs(device: str, dtype: torch.dtype) -> set[str]:
    ops = torch.ops.fusegrad
    with Outputs("masks") as outputs:
        for m, n in ((67, 131), (300, 131), (1, 900)):
            fusegrad.create_block_mask(lambda b, h, i, j: j <= i + h, 2, 3, m, n, device=device, block_size=(32, 16))
        lengths = torch.tensor([0, 5, 5, 67, 300], dtype=torch.int32, device=device)
        fusegrad.varlen_mask(lengths, causal=True, window=(9, 3))
        seed = torch.tensor([7], device=device)
        ops.flex_attention_dropout_mask(seed, 0.3, [1, 2, 67, 131])
        c, score = torch.randn(3), torch.randn(2, 3, 5, 7)
        given = (trace_score_mod(lambda s, b, h, i, j: s * c[h]).text, score, [c], [], [])
        ops.evaluate_score_mod(*given)
        ops.evaluate_score_mod_backward(torch.ones_like(score), *given)
        ops.evaluate_mask_mod(trace_mask_mod(lambda b, h, i, j: i >= j).text, [2, 3, 5, 7], [], [], [])
    return outputs.seen


GROUPS = [cross_entropies, log_probs, divergences, shards, attention, lists_and_graphs]


@each_device
def test_every_op_writes_all_of_its_outputs(device: str) -> None:
    """And the groups' calls reach every op."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen: set[str] = set()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for group in GROUPS:
                seen |= group(device, dtype)
    finally:
        dist.destroy_process_group()
    names = [n.removeprefix("fusegrad::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("fusegrad::")]
    missing = {n for n in names if not is_composite(n)} - seen - WITHOUT_MEMORY - OVER_WHAT_WAS_KEPT
    assert missing <= ({"flex_attention_pair_tangents"} if device == "cpu" else set())
