"""triangle_attention and attention_pair_bias: cuEquivariance's calls, beside what its documentation defines."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from biased_formulas import DEVICE_DTYPES, compare, drawn, pair_bias_formula, triangle, weights
from coverings import pairs_of, rows_of
from fusegrad import attention_pair_bias, triangle_attention
from torch import Tensor


@pytest.mark.parametrize("B, N, Q, K", [(2, 7, 7, 7), (1, 5, 3, 9), (3, 1, 33, 17)])
@rows_of("device, dtype", [*DEVICE_DTYPES])
def test_triangle_attention(B: int, N: int, Q: int, K: int, device: str, dtype: torch.dtype) -> None:
    q, k, v = (drawn(B, N, 2, n, 8, device=device, dtype=dtype) for n in (Q, K, K))
    bias = drawn(B, 1, 2, Q, K, device=device, dtype=dtype)
    mask = torch.rand(B, N, 1, 1, K, device=device) > 0.4
    mask[0, 0] = False
    lengths = torch.randint(0, K + 1, (B, N, 1, 1, 1), dtype=torch.int32, device=device)
    lengths[0, 0] = 0
    for options in ({}, {"mask": mask}, {"mask": mask.int()}, {"kv_lengths": lengths}):
        chosen = options.get("mask"), options.get("kv_lengths")
        compare(
            lambda *t, o=options: triangle_attention(*t, **o),
            lambda *t, c=chosen: triangle(*t, c[0] if c[0] is None else c[0].bool(), c[1]),
            [q, k, v, bias],
        )


def test_triangle_attention_of_four_dimensions() -> None:
    """cuEquivariance adds the batch, and its results keep it."""
    q, k, v, bias = drawn(5, 2, 7, 8), drawn(5, 2, 7, 8), drawn(5, 2, 7, 8), drawn(1, 2, 7, 7)
    mask = torch.rand(5, 1, 1, 7) > 0.3
    out, lse, most = triangle_attention(q, k, v, bias, mask, return_aux=True)
    assert out.shape == (1, 5, 2, 7, 8) and lse.shape == most.shape == (1, 5, 2, 7)
    assert lse.dtype == most.dtype == torch.float32
    torch.testing.assert_close(out[0], triangle(q, k, v, bias, mask))
    grads = torch.autograd.grad(out.sum(), [q, bias])
    assert [g.shape for g in grads] == [q.shape, bias.shape]


def test_aux_of_triangle_attention() -> None:
    q, k, v, bias = drawn(1, 3, 2, 5, 8), drawn(1, 3, 2, 5, 8), drawn(1, 3, 2, 5, 8), drawn(1, 1, 2, 5, 5)
    score = q @ k.transpose(-1, -2) * 8**-0.5 + bias
    mask = torch.ones(1, 3, 1, 1, 5, dtype=torch.bool)
    mask[0, 1], mask[0, 2, ..., 3:] = False, False
    masked = torch.where(mask, score, -1e9)
    _, lse, most = triangle_attention(q, k, v, bias, mask, return_aux=True)
    torch.testing.assert_close(lse, masked.logsumexp(-1).float())
    torch.testing.assert_close(most, masked.amax(-1).float())
    lengths = torch.tensor([5, 0, 3], dtype=torch.int32).view(1, 3, 1, 1, 1)
    out, lse, most = triangle_attention(q, k, v, bias, return_aux=True, kv_lengths=lengths)
    assert (out[0, 1] == 0).all() and (lse[0, 1] == 0).all() and (most[0, 1] == 0).all()
    torch.testing.assert_close(lse[0, [0, 2]], masked.logsumexp(-1).float()[0, [0, 2]])
    grads = torch.autograd.grad(lse.sum() + most.sum(), [q, bias])
    assert all(g.isfinite().all() for g in grads) and (grads[0][0, 1] == 0).all()


@pairs_of({"dtype": [torch.float64, torch.float32], "kind": ["all", "least", "rms_norm", "cached"], "M": [1, 3]})
def test_attention_pair_bias(kind: str, M: int, dtype: torch.dtype) -> None:
    B, N, H, DH, D, c = 2, 7, 3, 4, 10, 5
    w = weights(H, DH, D, c, dtype)
    if kind == "least":
        w = {n: w[n] for n in ("w_ln_a", "w_proj_q", "w_proj_k", "w_proj_v", "w_proj_g", "w_proj_o", "w_proj_z")}
    if kind == "rms_norm":
        w = {n: t for n, t in w.items() if not n.startswith("b_ln")}
    if kind == "cached":
        w = {n: t for n, t in w.items() if n not in ("w_proj_z", "b_proj_z", "w_ln_z", "b_ln_z")}
    single = drawn(B * M, N, D, dtype=dtype)
    pair = drawn(B, H, N, N, dtype=dtype) if kind == "cached" else drawn(B, N, N, c, dtype=dtype)
    leaves, names = [single, pair, *w.values()], list(w)
    optional = ("b_ln_a", "b_proj_q")
    for mask in (None, torch.rand(B, N) > 0.3, (torch.rand(B * M, N) > 0.3).to(dtype)):

        def ours(single: Tensor, pair: Tensor, *of: Tensor, mask: Tensor | None = mask) -> Tensor:
            given: dict[str, Any] = {**dict.fromkeys(optional), **dict(zip(names, of, strict=True))}
            options: dict[str, Any] = {"is_cached_z_proj": kind == "cached"}
            if kind == "rms_norm":
                options["norm_kind"] = "rms_norm"
            out, z = attention_pair_bias(single, pair, mask, H, return_z_proj=True, attn_scale=0.4, **given, **options)
            assert z is not None and z.shape == (B, H, N, N)
            return out

        compare(
            ours,
            lambda single, pair, *of, m=mask: pair_bias_formula(
                single, pair, m, H, dict(zip(names, of, strict=True)), cached=kind == "cached",
                rms=kind == "rms_norm", scale=0.4,
            ),
            leaves,
            part=16,
        )  # fmt: skip


def test_a_mask_with_a_gradient() -> None:
    w = weights(2, 4, 6, 5)
    single, pair = drawn(4, 5, 6), drawn(2, 5, 5, 5)
    mask = torch.rand(2, 5).double().requires_grad_()
    out, _ = attention_pair_bias(single, pair, mask, 2, inf=3.0, **w)
    right = pair_bias_formula(single, pair, mask, 2, w, inf=3.0)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), mask), torch.autograd.grad(right.sin().sum(), mask))


def test_signatures_are_cuequivariances() -> None:
    """Names and order, from its documentation."""
    theirs = ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths"]
    assert list(inspect.signature(triangle_attention).parameters)[: len(theirs)] == theirs
    names = (  # noqa: SIM905
        "single_repr pair_repr mask num_heads w_ln_a b_ln_a w_proj_q b_proj_q w_proj_k w_proj_v w_proj_g w_proj_o "
        "w_proj_z b_proj_o b_proj_z w_ln_z b_ln_z inf eps attn_scale return_z_proj is_cached_z_proj b_proj_k b_proj_v "
        "w_ln_q b_ln_q w_ln_k b_ln_k b_proj_g norm_kind"
    ).split()
    assert list(inspect.signature(attention_pair_bias).parameters)[: len(names)] == names
