"""Attention with additive biases over any leading dimensions, as models of proteins call it: docs/folding.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from ._arguments import checked, described
from ._bias_texts import MASKED, plan
from .attention import attend_traced, returned
from .distributed.shards import is_dtensor

__all__ = ["attention_pair_bias", "biased_attention", "triangle_attention"]

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        scale: float | None
        mask: Tensor | None
        kv_lengths: Tensor | None
        layout: Literal["heads_first", "heads_last"]
        empty_rows: Literal["zero", "mean"]
        softcap: float | None
        dropout_p: float
        deterministic: bool | None

    class _TriangleOptions(TypedDict, total=False):
        kv_lengths: Tensor | None
        deterministic: bool | None


@overload
def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Tensor] = (),
    *,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Tensor] = (),
    *,
    return_aux: AuxRequest,
    **options: Unpack[_Options],
) -> tuple[Tensor, AuxOutput]: ...


@checked
def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Tensor] = (),
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    layout: Literal["heads_first", "heads_last"] = "heads_first",
    empty_rows: Literal["zero", "mean"] = "zero",
    softcap: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """``softmax(scale * query @ key.T + sum(biases)) @ value``, with biases that broadcast to the scores
    ``[*, H, Q, K]`` and are never expanded. See docs/folding.md.

    Args:
        query: ``[*, H, Q, D]``, any leading dimensions; dtypes as of :func:`fusegrad.flex_attention`.
        key: ``[*, H, K, D]``, of the query's dtype; its leading dimensions may broadcast to the query's.
        value: ``[*, H, K, E]``.
        biases: floating-point tensors of any dtype, added in float32 (float64 for float64) in their order. Each gets
            its gradient in its own shape and dtype, summed in float32.
        scale: ``1 / sqrt(D)`` by default. Pass 1 where the query is scaled already.
        mask: bool, True where a pair takes part; broadcasts to the scores.
        kv_lengths: whole numbers that broadcast to ``[*, H, Q, 1]``: keys from there on take no part.
        layout: "heads_last" is that of Evoformer kernels: query ``[*, Q, H, D]``, key ``[*, K, H, D]``, the output
            ``[*, Q, H, E]``. The scores stay ``[*, H, Q, K]``.
        empty_rows: what a row gives where mask and kv_lengths leave it no key: 0, or the mean of all values, as the
            packages do, whose masked scores are -1e9. Biases of -1e9 are numbers as others.
        softcap: makes of the biased score s ``softcap * tanh(s / softcap)``, before the mask.
        dropout_p, deterministic, return_aux: as of :func:`fusegrad.flex_attention`; aux values are ``[*, H, Q]``.

    Returns:
        ``[*, H, Q, E]``, its dimensions in the order of the query's strides; or that and an ``AuxOutput``.

    Raises:
        ValueError, TypeError: as ``biased_attention: what must hold, but got <value>``.
    """
    if layout == "heads_last":
        query, key, value = query.transpose(-2, -3), key.transpose(-2, -3), value.transpose(-2, -3)
    _check_query("biased_attention", ("query", "key", "value"), query, key, value)
    sizes = (*query.shape[:-1], key.shape[-2])
    for i, bias in enumerate(biases):
        _check_bias("biased_attention", f"biases[{i}]", bias, sizes)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"biased_attention: mask must be a bool tensor, True where a pair takes part, but got {mask.dtype}: an "
                "additive mask is a bias"
            )
        _check_broadcasts("biased_attention", "mask", mask, sizes)
    if kv_lengths is not None:
        _check_lengths("biased_attention", kv_lengths)
        _check_broadcasts("biased_attention", "kv_lengths", kv_lengths, (*sizes[:-1], 1))
    if not 0 <= dropout_p < 1:
        raise ValueError(f"biased_attention: dropout_p must be at least 0 and less than 1, but got {dropout_p}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"biased_attention: softcap must be more than 0, but got {softcap}")
    out, lse, max_scores = _attend(
        query, key, value, sizes, biases, mask, kv_lengths, scale, empty_rows, softcap, dropout_p, deterministic,
        return_aux is not None and return_aux.max_scores,
    )  # fmt: skip
    if layout == "heads_last":
        out = out.transpose(-2, -3)
    if return_aux is None:
        return out
    if max_scores is not None:  # empty where it was not asked for
        max_scores = max_scores.view(query.shape[:-1]) if return_aux.max_scores else None
    return returned(out, lse.view(query.shape[:-1]), max_scores, False, return_aux)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: tuple[int, ...],
    biases: Sequence[Tensor],
    mask: Tensor | None,
    kv_lengths: Tensor | None,
    scale: float | None,
    empty_rows: str,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool | None,
    maxima: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """With arguments that are right. lse and the maxima have the leading dimensions in one."""
    tensors = list(biases)
    shapes = [("bias", b.shape) for b in biases]
    for kind, t in (("mask", mask), ("lengths", kv_lengths)):
        if t is not None:
            tensors.append(t)
            shapes.append((kind, t.shape))
    made = plan(sizes, tuple(shapes), softcap is not None, "-inf" if empty_rows == "zero" else MASKED)
    buffers = [t if t.shape == seen else t.reshape(seen) for t, seen in zip(tensors, made.shapes, strict=True)]
    score = (made.text, buffers, [] if softcap is None else [float(softcap)], list(made.ints))
    leading = query.shape[:-3]
    if not key.shape[:-3] == leading == value.shape[:-3]:
        key, value = key.expand(*leading, *key.shape[-3:]), value.expand(*leading, *value.shape[-3:])
    if len(leading) != 1:
        query, key, value = _batched(query), _batched(key), _batched(value)
    out, lse, max_scores = attend_traced(
        query, key, value, score, scale=scale, enable_gqa=query.shape[1] != key.shape[1], deterministic=deterministic,
        maxima=maxima, dropout_p=dropout_p,
    )  # fmt: skip
    if len(leading) != 1:
        out = out.view(*leading, *out.shape[1:])
    return out, lse, max_scores


def _batched(t: Tensor) -> Tensor:
    """``[*, H, S, D]`` with the leading dimensions in one."""
    return t.flatten(0, -4) if t.dim() > 4 else t.unsqueeze(0)


def _shape(t: Tensor | tuple[int, ...] | torch.Size) -> str:
    return str(list(t.shape if isinstance(t, Tensor) else t))


def _check_plain(op: str, name: str, t: Tensor) -> None:
    if t.is_nested or is_dtensor(t):
        raise TypeError(f"{op}: {name} must be a plain tensor, but got a {'nested one' if t.is_nested else 'DTensor'}")


def _check_query(op: str, names: tuple[str, str, str], query: Tensor, key: Tensor, value: Tensor) -> None:
    """That key and value fit the query: all ``[*, H, S, D]``."""
    for name, t in zip(names, (query, key, value), strict=True):
        _check_plain(op, name, t)
    shape, dtype, device = query.shape, query.dtype, query.device
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: {names[0]} must be float32, bfloat16, float16 or float64, but got {dtype}")
    alike = key.dtype == dtype == value.dtype and key.device == device == value.device
    if alike and key.shape == shape == value.shape and len(shape) >= 3:
        return
    for name, t in zip(names, (query, key, value), strict=True):
        if t.dim() < 3:
            raise ValueError(f"{op}: {name} must have at least 3 dimensions, [*, H, S, D], but got {_shape(t)}")
        if t.dtype != dtype and not torch.is_autocast_enabled(device.type):
            raise TypeError(f"{op}: {name} must have the dtype of {names[0]}, {dtype}, but got {t.dtype}")
        if t.device != device:
            raise ValueError(f"{op}: {name} must be on the device of {names[0]}, {device}, but got {t.device}")
    heads, keys, shared = shape[-3], key.shape[-2], key.shape[-3]
    for name, t, wanted in (
        (names[1], key, (*shape[:-2], keys, shape[-1])),
        (names[2], value, (*shape[:-2], keys, value.shape[-1])),
    ):
        fits = t.dim() <= len(shape) and t.shape[-2:] == wanted[-2:] and t.shape[-3] == shared
        fits = fits and (shared == heads or (shared > 0 and heads % shared == 0))
        if not fits or not _broadcasts(t.shape[:-3], shape[:-3]):
            raise ValueError(
                f"{op}: {name} must have a shape that fits {names[0]}, {_shape(wanted)}, but got {_shape(t)}"
            )


def _broadcasts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    if shape == sizes:
        return True
    if len(shape) > len(sizes):
        return False
    return all(n in (1, size) for n, size in zip(reversed(shape), reversed(sizes), strict=False))


def _check_broadcasts(op: str, name: str, t: Tensor, sizes: tuple[int, ...]) -> None:
    if not _broadcasts(t.shape, sizes):
        raise ValueError(f"{op}: {name} must have a shape that broadcasts to {_shape(sizes)}, but got {_shape(t)}")


def _check_bias(op: str, name: str, bias: Any, sizes: tuple[int, ...]) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, but got {described(bias)}")
    _check_floats(op, name, bias)
    _check_plain(op, name, bias)
    _check_broadcasts(op, name, bias, sizes)


def _check_floats(op: str, name: str, bias: Tensor) -> None:
    if not bias.dtype.is_floating_point:
        more = ": what takes part is a mask" if bias.dtype == torch.bool else ""
        raise TypeError(f"{op}: {name} must be floating-point, but got {bias.dtype}{more}")


def _check_lengths(op: str, kv_lengths: Tensor) -> None:
    if kv_lengths.dtype.is_floating_point or kv_lengths.dtype == torch.bool or kv_lengths.is_complex():
        raise TypeError(f"{op}: kv_lengths must be of a dtype of whole numbers, but got {kv_lengths.dtype}")


@overload
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: Literal[False] = False,
    **options: Unpack[_TriangleOptions],
) -> Tensor: ...


@overload
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    return_aux: Literal[True],
    **options: Unpack[_TriangleOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    **options: Unpack[_TriangleOptions],
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


@checked
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Triangle attention: a drop-in for ``cuequivariance_torch.triangle_attention``, for any D, dtype and lengths that
    :func:`fusegrad.flex_attention` takes, with all results differentiable.

    Args:
        q: ``[B, N, H, Q, D]``; ``[N, H, Q, D]`` is that of B = 1, and so are the shapes below with a dimension less.
        k, v: ``[B, N, H, K, D]``.
        bias: ``[B, 1, H, Q, K]``, any floating-point dtype, read as it is.
        mask: ``[B, N, 1, 1, K]``, bool or whole numbers, where 0 makes a score of -1e9: a row of zeros gives the mean
            of its values, and no gradient to q, k and bias. A floating-point mask may as well be an additive one,
            where 0 means the contrary, and is refused.
        scale: ``1 / sqrt(D)`` by default.
        return_aux: also returns lse and max, float32, ``[B, N, H, Q]``.
        kv_lengths: ``[B, N, 1, 1, 1]``, whole numbers: keys from there on take no part, as a mask would say. A row of
            length 0 gives 0, in lse and max too. Not together with mask.
        deterministic: as of :func:`fusegrad.flex_attention`.

    Returns:
        ``[B, N, H, Q, D]``, 5 dimensions always, in q's dtype; with return_aux a tuple with lse and max.

    Raises:
        ValueError, TypeError: as ``triangle_attention: what must hold, but got <value>``.
    """
    if mask is not None and kv_lengths is not None:
        raise ValueError("triangle_attention: mask and kv_lengths must not come together, but both do")
    given = [q, k, v, bias]
    for i, (name, t) in enumerate(zip(("q", "k", "v", "bias"), given, strict=True)):
        _check_plain("triangle_attention", name, t)
        if t.dim() == 4:
            given[i] = t.unsqueeze(0)
        elif t.dim() != 5:
            raise ValueError(f"triangle_attention: {name} must have 5 dimensions, or 4 for B = 1, but got {_shape(t)}")
    q, k, v, bias = given
    _check_query("triangle_attention", ("q", "k", "v"), q, k, v)
    B, N, H, Q, D = q.shape
    K = k.shape[3]
    for name, t in (("k", k), ("v", v)):
        if t.shape != (B, N, H, K, D):
            raise ValueError(
                f"triangle_attention: {name} must have shape [B, N, H, K, D] = {[B, N, H, K, D]}, but got {_shape(t)}"
            )
    if bias.shape != (B, 1, H, Q, K):
        raise ValueError(
            f"triangle_attention: bias must have shape [B, 1, H, Q, K] = {[B, 1, H, Q, K]}, but got {_shape(bias)}"
        )
    sizes = (B, N, H, Q, K)
    _check_floats("triangle_attention", "bias", bias)
    if mask is not None:
        if mask.dtype.is_floating_point or mask.is_complex():
            raise TypeError(
                f"triangle_attention: mask must be bool, or whole numbers that are 0 where a key is masked, but got "
                f"{mask.dtype}, which may as well be additive: give mask.bool(), or mask == 0 of an additive one"
            )
        mask = _five("mask", mask, (B, N, 1, 1, K), "[B, N, 1, 1, K]")
        mask = mask if mask.dtype == torch.bool else mask.bool()
    if kv_lengths is not None:
        _check_lengths("triangle_attention", kv_lengths)
        kv_lengths = _five("kv_lengths", kv_lengths, (B, N, 1, 1, 1), "[B, N, 1, 1, 1]")
    out, lse, max_scores = _attend(
        q, k, v, sizes, (bias,), mask, kv_lengths, scale, "zero" if mask is None else "mean", None, 0.0,
        deterministic, return_aux,
    )  # fmt: skip
    if not return_aux:
        return out
    if max_scores is None:
        raise NotImplementedError(
            "triangle_attention: return_aux must be False in forward mode and torch.func transforms, but got True"
        )
    empty = None if kv_lengths is None else (kv_lengths <= 0).squeeze(-1)
    lse, max_scores = (t.view(B, N, H, Q).float() for t in (lse, max_scores))
    if empty is not None:
        lse, max_scores = lse.masked_fill(empty, 0.0), max_scores.masked_fill(empty, 0.0)
    return out, lse, max_scores


def _five(name: str, t: Tensor, wanted: tuple[int, ...], words: str) -> Tensor:
    if t.dim() == 4:
        t = t.unsqueeze(0)
    if t.shape != wanted:
        raise ValueError(f"triangle_attention: {name} must have shape {words} = {_shape(wanted)}, but got {_shape(t)}")
    return t


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
        _check_plain(op, name, t)
    if single_repr.dim() != 3:
        raise ValueError(f"{op}: single_repr must have shape [B * M, N, D], but got {_shape(single_repr)}")
    BM, N, D = single_repr.shape
    inner = w_proj_q.shape[0] if w_proj_q.dim() else 0
    if num_heads < 1 or inner == 0 or inner % num_heads:
        raise ValueError(f"{op}: w_proj_q must have a multiple of num_heads = {num_heads} rows, but got {inner}")
    c = pair_repr.shape[-1] if pair_repr.dim() else 0
    words, wanted = ("[B, H, N, N]", (num_heads, N, N)) if is_cached_z_proj else ("[B, N, N, c]", (N, N, c))
    B = pair_repr.shape[0] if pair_repr.dim() else 0
    if pair_repr.shape[1:] != wanted or B == 0 or BM % B:
        raise ValueError(f"{op}: pair_repr must have shape {words}, N = {N}, B * M = {BM}, but got {_shape(pair_repr)}")
    M = BM // B
    if mask is not None and (mask.is_nested or mask.shape not in ((B, N), (BM, N))):
        raise ValueError(
            f"{op}: mask must have shape [B, N] = {[B, N]} or [B * M, N] = {[BM, N]}, but got "
            f"{'a nested tensor' if mask.is_nested else _shape(mask)}"
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
        _check_plain(op, name, weight)
        if weight.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {list(shape)}, but got {_shape(weight)}")
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
