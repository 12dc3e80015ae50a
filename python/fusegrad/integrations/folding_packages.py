"""What stands in for the attention functions of packages: each with the parameters and results of theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusegrad import biased_attention, triangle_attention


def _without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


# --- OpenFold's plain attention, as Boltz and Protenix have it too: queries are scaled before ---


def attention(query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor]) -> Tensor:
    return biased_attention(query, key, value, biases, scale=1.0)


def openfold3_attention(
    query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor], use_high_precision: bool = False
) -> Tensor:
    dtype = query.dtype
    wide = torch.float32 if use_high_precision and dtype.itemsize < 4 else dtype
    with _without_autocast(query):
        return biased_attention(query.to(wide), key.to(wide), value.to(wide), biases, scale=1.0).to(dtype)


def low_memory_attention(
    q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], q_chunk_size: int, kv_chunk_size: int
) -> Tensor:
    """The sizes of chunks say nothing here: no score is kept."""
    return biased_attention(q, k, v, biases, scale=1.0)


# --- kernels that scale by themselves, or not, and give [*, Q, H, D] ---


def evoformer_attention(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
    return biased_attention(q, k, v, biases).transpose(-2, -3)


def tri_attention(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
    return biased_attention(q, k, v, biases, scale=1.0).transpose(-2, -3)


def cueq_triangle_attn(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor], scale: float) -> Tensor:
    return biased_attention(q, k, v, biases, scale=scale).transpose(-2, -3)


def kernel_triangular_attn(q: Tensor, k: Tensor, v: Tensor, tri_bias: Tensor, mask: Tensor, scale: float) -> Any:
    return triangle_attention(q, k, v, tri_bias, mask=mask, scale=scale)


def cuequivariance_triangular_attn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, scale: float) -> Any:
    return triangle_attention(q, k, v, bias, mask=mask, scale=scale)


# --- Boltz's attention with pair bias, in float32 as its own: samples share z ---


def _pair_bias(self: Any, s: Tensor, k_in: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    """z: [B, H, Q, K]; of s there are any number of samples for each."""
    groups, heads = (z.shape[0], s.shape[0] // z.shape[0]), (self.num_heads, self.head_dim)
    g = self.proj_g(s).sigmoid()
    q = self.proj_q(s).view(*groups, -1, *heads)
    k, v = (project(k_in).view(*groups, -1, *heads) for project in (self.proj_k, self.proj_v))
    with _without_autocast(s):
        lowered = (1 - mask.float()) * -self.inf
        of_keys = lowered.view(*(groups if mask.shape[0] == s.shape[0] else (1, 1)), 1, 1, -1)
        biases = [z.unsqueeze(1), of_keys]
        scale = self.head_dim**-0.5
        o = biased_attention(q.float(), k.float(), v.float(), biases, scale=scale, layout="heads_last").to(v.dtype)
    return self.proj_o(g * o.reshape(s.shape[0], -1, self.c_s))


def boltz1_pair_bias(
    self: Any, s: Tensor, z: Tensor, mask: Tensor, multiplicity: int = 1, to_keys: Any = None, model_cache: Any = None
) -> Tensor:
    if self.initial_norm:
        s = self.norm_s(s)
    k_in = s
    if to_keys is not None:
        k_in, mask = to_keys(s), to_keys(mask.unsqueeze(-1)).squeeze(-1)
    if model_cache is None or "z" not in model_cache:
        z = self.proj_z(z)
        if model_cache is not None:
            model_cache["z"] = z
    else:
        z = model_cache["z"]
    _check_samples(s, z, multiplicity)
    return _pair_bias(self, s, k_in, z, mask)


def boltz2_pair_bias(self: Any, s: Tensor, z: Tensor, mask: Tensor, k_in: Tensor, multiplicity: int = 1) -> Tensor:
    z = self.proj_z(z)
    _check_samples(s, z, multiplicity)
    return _pair_bias(self, s, k_in, z, mask)


def _check_samples(s: Tensor, z: Tensor, multiplicity: int) -> None:
    if z.shape[0] * multiplicity not in (1, s.shape[0]):
        raise ValueError(
            f"AttentionPairBias: z must have 1 / {multiplicity} of the batch of s, {s.shape[0]}, but got {z.shape[0]}"
        )


# --- Protenix's attention of tokens and atoms ---


def protenix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None = None,
    use_efficient_implementation: bool = True,
    inplace_safe: bool = False,
) -> Tensor:
    """Scores are float32 in any dtype, so nothing is cast; inplace_safe lets its own write over scores, which are never
    in memory here."""
    biases = [] if attn_bias is None else [attn_bias]
    if use_efficient_implementation:
        return biased_attention(q, k, v, biases, scale=1.0)
    with _without_autocast(q):
        return biased_attention(q, k, v.to(q.dtype), biases, scale=1.0)


# --- alphafold3-pytorch ---


def attend(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    memory_kv: Tensor | None = None,
) -> Tensor:
    if self.is_local_attn:
        return self.local_attn(
            q, k, v, mask=mask, windowed_mask=windowed_mask, attn_bias=attn_bias, memory_kv=memory_kv
        )
    if mask is not None:
        mask = mask[:, None, None]  # [b, 1, 1, j]
    k, v, mask, attn_bias = _with_memory(memory_kv, k, v, mask, attn_bias)
    leading = q.shape[:1]
    if attn_bias is not None and attn_bias.dim() == 5:  # af3_triangle_attention's [b, 1, h, i, j]: rows share it
        leading = torch.Size((attn_bias.shape[0], q.shape[0] // attn_bias.shape[0]))
        q, k, v = (t.unflatten(0, leading) for t in (q, k, v))
        mask = None if mask is None else mask.unflatten(0, leading)
    scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
    out = _capped(self, q, k, v, attn_bias, mask, scale, self.dropout if self.training else 0.0)
    return out.flatten(0, 1) if len(leading) == 2 else out


def local_attend(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    memory_kv: Tensor | None = None,
) -> Tensor:
    """Windows of w queries, [b, h, n, w, d], which see their own keys and those of the window before."""
    from alphafold3_pytorch.attention import full_attn_bias_to_windowed

    w, length = self.window_size, q.shape[-2]
    more = -length % w
    if mask is None:
        mask = q.new_ones(q.shape[0], length, dtype=torch.bool)
    q, k, v = (F.pad(t, (0, 0, 0, more)).unflatten(-2, (-1, w)) for t in (q, k, v))
    mask = F.pad(mask, (0, more)).unflatten(-1, (-1, w))
    k, v = (_with_window_before(t, -3) for t in (k, v))
    mask = _with_window_before(mask.unsqueeze(-1), -3).squeeze(-1)[:, None, :, None]  # [b, 1, n, 1, 2w]
    if attn_bias is not None:
        if attn_bias.shape[-1] == attn_bias.shape[-2]:
            attn_bias = full_attn_bias_to_windowed(attn_bias, window_size=w)
        attn_bias = attn_bias.unsqueeze(1) if attn_bias.dim() == 4 else attn_bias
    if windowed_mask is not None:
        mask = mask & windowed_mask.unsqueeze(1)
    if memory_kv is not None:
        memory_kv = memory_kv.unsqueeze(2).expand(-1, -1, q.shape[2], -1, -1)  # [2, h, n, m, d]
    k, v, mask, attn_bias = _with_memory(memory_kv, k, v, mask, attn_bias)
    out = _capped(self, q, k, v, attn_bias, mask, q.shape[-1] ** -0.5, 0.0)
    return out.flatten(-3, -2)[..., :length, :]


def _with_window_before(t: Tensor, dim: int) -> Tensor:
    before = torch.cat((torch.zeros_like(t.narrow(dim, 0, 1)), t.narrow(dim, 0, t.shape[dim] - 1)), dim)
    return torch.cat((before, t), -2)


def _with_memory(
    memory_kv: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys and values that all rows see first, with no bias."""
    if memory_kv is None:
        return k, v, mask, bias
    m = memory_kv.shape[-2]
    k, v = (torch.cat((of.expand(t.shape[0], *of.shape), t), -2) for of, t in zip(memory_kv, (k, v), strict=True))
    return (
        k,
        v,
        None if mask is None else F.pad(mask, (m, 0), value=True),
        None if bias is None else F.pad(bias, (m, 0)),
    )


def _capped(
    self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    cap = self.attn_softclamp_value if self.enable_attn_softclamp else None
    biases = [] if bias is None else [bias]
    return biased_attention(
        q, k, v, biases, scale=scale, mask=mask, empty_rows="mean", softcap=cap, dropout_p=dropout
    )  # fmt: skip


def af3_triangle_attention(
    self: Any, pairwise_repr: Tensor, mask: Tensor | None = None, return_values: bool = False, **kwargs: Any
) -> Any:
    """Its own repeats bias and mask for every row."""
    if self.need_transpose:
        pairwise_repr = pairwise_repr.transpose(1, 2)
    b, rows = pairwise_repr.shape[:2]
    bias = self.to_attn_bias(pairwise_repr).unsqueeze(1)  # [b, 1, h, i, j]
    if mask is not None:
        mask = mask.repeat_interleave(rows, 0)
    out, values = self.attn(pairwise_repr.flatten(0, 1), mask=mask, attn_bias=bias, return_values=True, **kwargs)
    out = out.unflatten(0, (b, rows))
    if self.need_transpose:
        out = out.transpose(1, 2)
    out = self.dropout(out)
    return (out, values) if return_values else out
