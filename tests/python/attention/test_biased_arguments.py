"""Arguments of attention with biases: each has effect, and a wrong one is an error in the packages' words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.distributed as dist
from biased_formulas import weights
from coverings import rows_of
from fusegrad import attention_pair_bias, biased_attention, triangle_attention
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest


def effects() -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]:
    """Calls, and for each argument a value that must change what is returned."""
    torch.manual_seed(0)
    q, k, v, other = (torch.randn(2, 5, 3, 5, 8) for _ in range(4))
    bias, mask = torch.randn(2, 1, 3, 5, 5), torch.rand(2, 5, 1, 1, 5) > 0.5
    mask[0, 0] = False
    lengths = torch.randint(0, 5, (2, 5, 1, 1, 1))
    w = {name: t.detach() for name, t in weights(3, 4, 6, 4, torch.float32).items()}
    pairs = {"single_repr": torch.randn(4, 5, 6), "pair_repr": torch.randn(2, 5, 5, 4), "mask": torch.rand(2, 5)}
    optional = [n for n in w if n[2:] in ("ln_q", "ln_k", "ln_z") or n.startswith("b_")]
    return {
        "biased_attention": (
            biased_attention,
            {"query": q, "key": k, "value": v, "biases": [bias], "mask": mask},
            {
                **{"query": other, "key": other, "value": other, "biases": [-bias], "scale": 0.1, "mask": ~mask},
                **{"kv_lengths": lengths, "layout": "heads_last", "empty_rows": "mean", "softcap": 1.0},
                **{"dropout_p": 0.5, "return_aux": AuxRequest(lse=True)},
            },
        ),
        "triangle_attention": (
            triangle_attention,
            {"q": q, "k": k, "v": v, "bias": bias},
            {
                **{"q": other, "k": other, "v": other, "bias": -bias, "mask": mask, "scale": 0.1},
                **{"return_aux": True, "kv_lengths": lengths},
            },
        ),
        "attention_pair_bias": (
            attention_pair_bias,
            {**pairs, "num_heads": 3, **w, "inf": 2.0},
            {
                **{name: -t for name, t in pairs.items()},
                **{name: t.flip(0) * 2 for name, t in w.items()},
                **{"num_heads": 4, "inf": 1.0, "eps": 1.0, "attn_scale": 0.1, "return_z_proj": True},
                **{"is_cached_z_proj": True, "norm_kind": "rms_norm"},
                **{name: None for name in optional if name != "b_ln_a"},
            },
        ),
    }


@pytest.mark.parametrize("name", ["biased_attention", "triangle_attention", "attention_pair_bias"])
def test_every_argument_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, call, changed = effects()[name]
    # On the CPU the bits are the same in any case: what counts is what reaches the op.
    told: list[Any] = []
    original = fusegrad.folding.attend_traced
    monkeypatch.setattr(
        fusegrad.folding, "attend_traced", lambda *a, **more: told.append(more["deterministic"]) or original(*a, **more)
    )

    def result(**options: Any) -> list[Tensor] | str:
        torch.manual_seed(1)
        try:
            return [t for t in torch.utils._pytree.tree_leaves(function(**{**call, **options})) if t is not None]
        except (ValueError, TypeError) as error:
            return str(error)

    plain = result()
    assert not isinstance(plain, str), plain
    for argument in inspect.signature(function).parameters:
        if argument == "deterministic":
            result(deterministic=True)
            assert told[-1] is True and told[0] is None
            continue
        if argument in ("b_proj_z", "b_proj_k"):  # the same for all keys, which a softmax takes away
            continue
        other = result(**{argument: changed[argument]})
        same = isinstance(other, list) and len(other) == len(plain) and all(map(torch.equal, other, plain))
        assert not same, f"{argument} has no effect"


# --- errors ---


def good() -> dict[str, Any]:
    q = torch.randn(2, 5, 3, 7, 8)
    return {"query": q, "key": q.clone(), "value": q.clone(), "biases": [torch.randn(2, 1, 3, 7, 7)]}


@rows_of(
    "changed, error, text",
    [
        (
            {"key": torch.randn(2, 5, 3, 7, 9)},
            ValueError,
            r"key must have a shape that fits query, \[2, 5, 3, 7, 8\], but got \[2, 5, 3, 7, 9\]",
        ),
        ({"key": torch.randn(3, 5, 3, 7, 8)}, ValueError, "key must have a shape that fits query"),
        ({"value": torch.randn(2, 5, 3, 6, 8)}, ValueError, "value must have a shape that fits query"),
        ({"value": torch.randn(2, 5, 2, 7, 8)}, ValueError, "value must have a shape that fits query"),
        (
            {"query": torch.randn(7, 8)},
            ValueError,
            r"query must have at least 3 dimensions, \[\*, H, S, D\], but got \[7, 8\]",
        ),
        ({"query": torch.randn(7), "layout": "heads_last"}, ValueError, r"dimensions, \[\*, S, H, D\], but got \[7\]"),
        ({"query": torch.zeros(2, 5, 3, 7, 8, dtype=torch.int32)}, TypeError, "query must be float32"),
        (
            {"key": torch.randn(2, 5, 3, 7, 8).half()},
            TypeError,
            "key must have the dtype of query, torch.float32, but got torch.float16",
        ),
        (
            {"biases": [torch.randn(2, 2, 3, 7, 7)]},
            ValueError,
            r"biases\[0\] must have a shape that broadcasts to \[2, 5, 3, 7, 7\], but got \[2, 2, 3, 7, 7\]",
        ),
        ({"biases": [torch.randn(1, 2, 5, 3, 7, 7)]}, ValueError, r"biases\[0\] must have a shape that broadcasts"),
        (
            {"biases": [torch.ones(7, 7).bool()]},
            TypeError,
            r"biases\[0\] must be floating-point, but got torch.bool: what takes part is a mask",
        ),
        ({"biases": [torch.ones(7, 7).long()]}, TypeError, r"biases\[0\] must be floating-point, but got torch.int64"),
        ({"biases": [None]}, TypeError, r"biases\[0\] must be a tensor, but got None"),
        ({"biases": torch.randn(7, 7)}, TypeError, "biases must be a sequence, but got torch.Tensor"),
        (
            {"mask": torch.ones(7)},
            TypeError,
            r"mask must be a bool tensor, .* but got torch.float32: an additive mask is a bias",
        ),
        (
            {"mask": torch.ones(6).bool()},
            ValueError,
            r"mask must have a shape that broadcasts to \[2, 5, 3, 7, 7\], but got \[6\]",
        ),
        (
            {"kv_lengths": torch.ones(7).long()},
            ValueError,
            r"kv_lengths must have a shape that broadcasts to \[2, 5, 3, 7, 1\], but got \[7\]",
        ),
        (
            {"kv_lengths": torch.ones(1)},
            TypeError,
            "kv_lengths must be of a dtype of whole numbers, but got torch.float32",
        ),
        ({"softcap": 0.0}, ValueError, "softcap must be more than 0, but got 0.0"),
        ({"empty_rows": "nan"}, ValueError, "empty_rows must be 'zero' or 'mean', but got 'nan'"),
        ({"layout": "bhqd"}, ValueError, "layout must be 'heads_first' or 'heads_last', but got 'bhqd'"),
        ({"bias": torch.ones(7, 7)}, TypeError, "unexpected keyword argument 'bias'"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        biased_attention(**{**good(), **changed})


@rows_of(
    "changed, error, text",
    [
        (
            {"bias": torch.randn(2, 5, 3, 7, 7)},
            ValueError,
            r"bias must have shape \[B, 1, H, Q, K\] = \[2, 1, 3, 7, 7\], but got \[2, 5, 3, 7, 7\]",
        ),
        (
            {"bias": torch.randn(3, 7, 7)},
            ValueError,
            r"bias must have 5 dimensions, or 4 for B = 1, but got \[3, 7, 7\]",
        ),
        ({"bias": torch.ones(2, 1, 3, 7, 7).bool()}, TypeError, "bias must be floating-point, but got torch.bool"),
        ({"k": torch.randn(2, 5, 3, 7, 9)}, ValueError, "k must have a shape that fits q"),
        (
            {"v": torch.randn(2, 5, 3, 7, 4)},
            ValueError,
            r"v must have shape \[B, N, H, K, D\] = \[2, 5, 3, 7, 8\], but got \[2, 5, 3, 7, 4\]",
        ),
        (
            {"mask": torch.ones(2, 5, 7).bool()},
            ValueError,
            r"mask must have shape \[B, N, 1, 1, K\] = \[2, 5, 1, 1, 7\], but got \[2, 5, 7\]",
        ),
        (
            {"mask": torch.zeros(2, 5, 1, 1, 7)},
            TypeError,
            "mask must be bool, or whole numbers that are 0 where a key is masked, but got torch.float32",
        ),
        ({"kv_lengths": torch.ones(2, 5).int()}, ValueError, r"kv_lengths must have shape \[B, N, 1, 1, 1\]"),
        ({"kv_lengths": torch.ones(2, 5, 1, 1, 1)}, TypeError, "kv_lengths must be of a dtype of whole numbers"),
        (
            {"mask": torch.ones(2, 5, 1, 1, 7).bool(), "kv_lengths": torch.ones(2, 5, 1, 1, 1).int()},
            ValueError,
            "mask and kv_lengths must not come together",
        ),
        ({"precision": "tf32"}, TypeError, "unexpected keyword argument 'precision'"),
    ],
)
def test_errors_of_triangle_attention(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    q = torch.randn(2, 5, 3, 7, 8)
    with pytest.raises(error, match=text):
        triangle_attention(**{"q": q, "k": q, "v": q, "bias": torch.randn(2, 1, 3, 7, 7), **changed})


@rows_of(
    "changed, text",
    [
        (
            {"pair_repr": torch.randn(3, 5, 5, 4)},
            r"pair_repr must have shape \[B, N, N, c\], N = 5, B \* M = 4, but got \[3, 5, 5, 4\]",
        ),
        ({"pair_repr": torch.randn(2, 5, 5, 4), "is_cached_z_proj": True}, r"pair_repr must have shape \[B, H, N, N\]"),
        (
            {"mask": torch.ones(3, 5)},
            r"mask must have shape \[B, N\] = \[2, 5\] or \[B \* M, N\] = \[4, 5\], but got \[3, 5\]",
        ),
        ({"num_heads": 3}, "w_proj_q must have a multiple of num_heads = 3 rows, but got 8"),
        ({"w_proj_z": None}, "w_proj_z must be given where pair_repr is not projected, but got None"),
        ({"norm_kind": "rms_norm"}, "b_ln_a must be None with norm_kind='rms_norm'"),
        ({"norm_kind": "batch"}, "norm_kind must be 'layer_norm' or 'rms_norm', but got 'batch'"),
    ],
)
def test_errors_of_attention_pair_bias(changed: dict[str, Any], text: str) -> None:
    w: dict[str, Any] = {n: t.float().detach() for n, t in weights(2, 4, 6, 4).items()}
    arguments = {
        "single_repr": torch.randn(4, 5, 6),
        "pair_repr": torch.randn(2, 5, 5, 4),
        "mask": None,
        "num_heads": 2,
    }
    with pytest.raises(ValueError, match=text):
        attention_pair_bias(**{**arguments, **w, **changed})


@rows_of("name", ["query", "key", "value", "biases", "q", "k", "v", "bias", "single_repr", "pair_repr", "w_proj_q"])
@rows_of("kind", ["nested", "DTensor"])
def test_other_tensors_are_refused(name: str, kind: str) -> None:
    q = torch.randn(2, 5, 3, 7, 8)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (biased_attention, good()),
        (triangle_attention, {"q": q, "k": q, "v": q, "bias": torch.randn(2, 1, 3, 7, 7)}),
        (attention_pair_bias, effects()["attention_pair_bias"][1]),
    ]
    function, call = next((f, c) for f, c in calls if name in c)
    given = call[name][0] if name == "biases" else call[name]
    text = rf"^{function.__name__}: {name}.* must be a plain tensor, but got a {kind}"
    if kind == "nested":
        other = torch.nested.nested_tensor([*given], layout=torch.jagged)
        with pytest.raises(TypeError, match=text):
            function(**{**call, name: [other] if name == "biases" else other})
        return
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = distribute_tensor(given, init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=text):
            function(**{**call, name: [other] if name == "biases" else other})
    finally:
        dist.destroy_process_group()
