"""Attention with a pair bias and all that is around it: norms, projections, the gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import checked
from ._bias_checks import check_plain, shape_of
from .folding import biased_attention

__all__ = ["attention_pair_bias"]


def _in_one_pass(given: tuple[Tensor | None, ...]) -> bool:
    """Whether norm and projection of the pair representation are one op: of 16 bits that no autocast would change."""
    pair = given[0]
    assert pair is not None
    kind, dtype = pair.device.type, pair.dtype
    if dtype not in (torch.bfloat16, torch.float16) or any(t is not None and t.dtype != dtype for t in given):
        return False
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == dtype


@checked
def attention_pair_bias(
    single_repr: Tensor,
    pair_repr: Tensor,
    mask: Tensor | None,
    num_heads: int,
    w_ln_a: Tensor,
    b_ln_a: Tensor | None,
    w_proj_q: Tensor,
    b_proj_q: Tensor | None,
    w_proj_k: Tensor,
    w_proj_v: Tensor,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_proj_z: Tensor | None = None,
    b_proj_o: Tensor | None = None,
    b_proj_z: Tensor | None = None,
    w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: Tensor | None = None,
    b_proj_v: Tensor | None = None,
    w_ln_q: Tensor | None = None,
    b_ln_q: Tensor | None = None,
    w_ln_k: Tensor | None = None,
    b_ln_k: Tensor | None = None,
    b_proj_g: Tensor | None = None,
    norm_kind: Literal["layer_norm", "rms_norm"] = "layer_norm",
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention with a pair bias, its norms, projections and gate: a drop-in for
    ``cuequivariance_torch.attention_pair_bias``. The M samples that share a pair representation share its projection,
    which is never repeated.

    Args:
        single_repr: ``[B * M, N, D]``; a pair representation's samples follow one another.
        pair_repr: ``[B, N, N, c]``, or with is_cached_z_proj its projection ``[B, H, N, N]``.
        mask: ``[B, N]`` or ``[B * M, N]``, 1 is valid: ``(mask - 1) * inf`` is added to scores; a mask that requires
            grad gets one.
        num_heads: H. w_proj_q, w_proj_k, w_proj_v and w_proj_g are ``[H * DH, D]``, w_proj_o ``[D, H * DH]``, w_proj_z
            ``[H, c]``; the gate comes from the normalized single_repr.
        w_ln_q, b_ln_q, w_ln_k, b_ln_k: where one is given, projected queries or keys are normalized before they are
            split into heads.
        inf: what a masked score is lowered by.
        eps: of all norms.
        attn_scale: ``1 / sqrt(DH)`` by default.
        return_z_proj: also returns the projection of pair_repr, ``[B, H, N, N]``.
        norm_kind: "rms_norm" wants all biases of norms None.
        deterministic: as of :func:`fusegrad.flex_attention`.

    Returns:
        ``[B * M, N, D]``, and the projection or None.

    Raises:
        ValueError, TypeError: as ``attention_pair_bias: what must hold, but got <value>``.
    """
    op = "attention_pair_bias"
    if w_proj_z is None and not is_cached_z_proj:
        raise ValueError(f"{op}: w_proj_z must be given where pair_repr is not projected, but got None")
    norm_biases = {"b_ln_a": b_ln_a, "b_ln_q": b_ln_q, "b_ln_k": b_ln_k, "b_ln_z": b_ln_z}
    given = [name for name, t in norm_biases.items() if t is not None]
    if norm_kind == "rms_norm" and given:
        raise ValueError(f"{op}: {given[0]} must be None with norm_kind='rms_norm', but got a tensor")
    for name, t in (("single_repr", single_repr), ("pair_repr", pair_repr), ("w_proj_q", w_proj_q)):
        check_plain(op, name, t)
    if single_repr.dim() != 3:
        raise ValueError(f"{op}: single_repr must have shape [B * M, N, D], but got {shape_of(single_repr)}")
    BM, N, D = single_repr.shape
    inner = w_proj_q.shape[0] if w_proj_q.dim() else 0
    if num_heads < 1 or inner == 0 or inner % num_heads:
        raise ValueError(f"{op}: w_proj_q must have a multiple of num_heads = {num_heads} rows, but got {inner}")
    c = pair_repr.shape[-1] if pair_repr.dim() else 0
    words, wanted = ("[B, H, N, N]", (num_heads, N, N)) if is_cached_z_proj else ("[B, N, N, c]", (N, N, c))
    B = pair_repr.shape[0] if pair_repr.dim() else 0
    if pair_repr.shape[1:] != wanted or B == 0 or BM % B:
        raise ValueError(
            f"{op}: pair_repr must have shape {words}, N = {N}, B * M = {BM}, but got {shape_of(pair_repr)}"
        )
    M = BM // B
    if mask is not None and (mask.is_nested or mask.shape not in ((B, N), (BM, N))):
        raise ValueError(
            f"{op}: mask must have shape [B, N] = {[B, N]} or [B * M, N] = {[BM, N]}, but got "
            f"{'a nested tensor' if mask.is_nested else shape_of(mask)}"
        )
    wide, whole = (inner,), (D,)
    weights: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("w_ln_a", w_ln_a, whole), ("b_ln_a", b_ln_a, whole), ("w_proj_q", w_proj_q, (inner, D)),
        ("b_proj_q", b_proj_q, wide), ("w_proj_k", w_proj_k, (inner, D)), ("b_proj_k", b_proj_k, wide),
        ("w_proj_v", w_proj_v, (inner, D)), ("b_proj_v", b_proj_v, wide), ("w_proj_g", w_proj_g, (inner, D)),
        ("b_proj_g", b_proj_g, wide), ("w_proj_o", w_proj_o, (D, inner)), ("b_proj_o", b_proj_o, whole),
        ("w_ln_q", w_ln_q, wide), ("b_ln_q", b_ln_q, wide), ("w_ln_k", w_ln_k, wide), ("b_ln_k", b_ln_k, wide),
    ]  # fmt: skip
    if not is_cached_z_proj:
        weights += [("w_proj_z", w_proj_z, (num_heads, c)), ("b_proj_z", b_proj_z, (num_heads,))]
        weights += [("w_ln_z", w_ln_z, (c,)), ("b_ln_z", b_ln_z, (c,))]
    for name, weight, shape in weights:
        if weight is None:
            continue
        check_plain(op, name, weight)
        if weight.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {list(shape)}, but got {shape_of(weight)}")
        if not weight.dtype.is_floating_point:
            raise TypeError(f"{op}: {name} must be floating-point, but got {weight.dtype}")

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if norm_kind == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    x = norm(single_repr, w_ln_a, b_ln_a)
    query, key = F.linear(x, w_proj_q, b_proj_q), F.linear(x, w_proj_k, b_proj_k)
    value, gate = F.linear(x, w_proj_v, b_proj_v), F.linear(x, w_proj_g, b_proj_g)
    if w_ln_q is not None or b_ln_q is not None:
        query = norm(query, w_ln_q, b_ln_q)
    if w_ln_k is not None or b_ln_k is not None:
        key = norm(key, w_ln_k, b_ln_k)
    z = pair_repr
    if not is_cached_z_proj:
        assert w_proj_z is not None
        projected = (pair_repr, w_ln_z, b_ln_z, w_proj_z, b_proj_z)
        if _in_one_pass(projected):
            z = torch.ops.fusegrad.pair_projection(*projected, eps, norm_kind == "layer_norm")
        else:
            z = F.linear(norm(pair_repr, w_ln_z, b_ln_z), w_proj_z, b_proj_z).permute(0, 3, 1, 2)
    biases = [z.unsqueeze(1)]
    if mask is not None:
        acc = torch.float64 if query.dtype == torch.float64 else torch.float32
        biases.append(((mask.to(acc) - 1) * inf).view(B, -1, 1, 1, N))
    query, key, value = (t.view(B, M, N, num_heads, -1) for t in (query, key, value))
    out = biased_attention(
        query, key, value, biases, scale=attn_scale, layout="heads_last", deterministic=deterministic
    )
    out = out.reshape(BM, N, inner) * gate.sigmoid()
    return F.linear(out, w_proj_o, b_proj_o), z if return_z_proj else None
