"""Attention with additive biases over any leading dimensions, as models of proteins call it: docs/learned_biases.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from ._arguments import checked
from ._bias_checks import check_bias, check_broadcasts, check_floats, check_lengths, check_plain, check_query, shape_of
from ._bias_plans import plan
from ._bias_texts import MASKED
from .attention import attend_traced, returned

__all__ = ["biased_attention", "triangle_attention"]

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
    ``[*, H, Q, K]`` and are never expanded. See docs/learned_biases.md.

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
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() < 3:
                raise ValueError(
                    f"biased_attention: {name} must have at least 3 dimensions, [*, S, H, D], but got {shape_of(t)}"
                )
        query, key, value = query.transpose(-2, -3), key.transpose(-2, -3), value.transpose(-2, -3)
    check_query("biased_attention", ("query", "key", "value"), query, key, value)
    sizes = (*query.shape[:-1], key.shape[-2])
    for i, bias in enumerate(biases):
        check_bias("biased_attention", f"biases[{i}]", bias, sizes)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"biased_attention: mask must be a bool tensor, True where a pair takes part, but got {mask.dtype}: an "
                "additive mask is a bias"
            )
        check_broadcasts("biased_attention", "mask", mask, sizes)
    if kv_lengths is not None:
        check_lengths("biased_attention", kv_lengths)
        check_broadcasts("biased_attention", "kv_lengths", kv_lengths, (*sizes[:-1], 1))
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
        check_plain("triangle_attention", name, t)
        if t.dim() == 4:
            given[i] = t.unsqueeze(0)
        elif t.dim() != 5:
            raise ValueError(
                f"triangle_attention: {name} must have 5 dimensions, or 4 for B = 1, but got {shape_of(t)}"
            )
    q, k, v, bias = given
    check_query("triangle_attention", ("q", "k", "v"), q, k, v)
    B, N, H, Q, D = q.shape
    K = k.shape[3]
    for name, t in (("k", k), ("v", v)):
        if t.shape != (B, N, H, K, D):
            raise ValueError(
                f"triangle_attention: {name} must have shape [B, N, H, K, D] = {[B, N, H, K, D]}, but got {shape_of(t)}"
            )
    if bias.shape != (B, 1, H, Q, K):
        raise ValueError(
            f"triangle_attention: bias must have shape [B, 1, H, Q, K] = {[B, 1, H, Q, K]}, but got {shape_of(bias)}"
        )
    sizes = (B, N, H, Q, K)
    check_floats("triangle_attention", "bias", bias)
    if mask is not None:
        if mask.dtype.is_floating_point or mask.is_complex():
            raise TypeError(
                f"triangle_attention: mask must be bool, or whole numbers that are 0 where a key is masked, but got "
                f"{mask.dtype}, which may as well be additive: give mask.bool(), or mask == 0 of an additive one"
            )
        mask = _five("mask", mask, (B, N, 1, 1, K), "[B, N, 1, 1, K]")
        mask = mask if mask.dtype == torch.bool else mask.bool()
    if kv_lengths is not None:
        check_lengths("triangle_attention", kv_lengths)
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
        raise ValueError(
            f"triangle_attention: {name} must have shape {words} = {shape_of(wanted)}, but got {shape_of(t)}"
        )
    return t
