"""Score_mods: what a score becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checks import check_at_least, check_integers, check_rank

__all__ = [
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "compose",
    "deberta",
    "fire",
    "forgetting_gates",
    "graphormer",
    "kerple_log",
    "kerple_power",
    "pair_bias",
    "relative",
    "softcap",
    "swin",
    "swin_v2_table",
    "t5",
    "transformer_xl",
]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def compose(*score_mods: ScoreMod) -> ScoreMod:
    """One score_mod after the other, the first one on the scores themselves."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for mod in score_mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


def softcap(cap: float | Tensor) -> ScoreMod:
    """``cap * tanh(score / cap)`` (Gemma 2); a tensor cap is a 0-d one, and gets a gradient."""
    if isinstance(cap, Tensor):
        if cap.dim() != 0:
            raise ValueError(f"mods.softcap: cap must be a number or a 0-d tensor, but got shape {list(cap.shape)}")
    else:
        check_at_least("softcap", "cap", cap, 0, above=True)
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes ``[heads]`` that ALiBi fixes: powers of ``2 ** (-8 / heads)``; where heads is no power of two those of
    the next smaller one, then every second one of the next larger. Press et al. 2022."""
    check_at_least("alibi_slopes", "heads", heads, 1)
    whole = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4.0 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, device=device)


def alibi(slopes: Tensor) -> ScoreMod:
    """``score - slopes[h] * |q_idx - kv_idx|``: with a causal mask ALiBi, without one its symmetric form.

    Args:
        slopes: ``[H]``, fixed (:func:`alibi_slopes`) or a parameter.
    """
    check_rank("alibi", "slopes", slopes, "[H]")
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()


def relative(table: Tensor) -> ScoreMod:
    """``score + table[h, clamp(q_idx - kv_idx, -R, R) + R]``, a bias by clipped distance. Shaw et al. 2018.

    Args:
        table: ``[H, 2R + 1]``.
    """
    reach = check_rank("relative", "table", table, "[H, 2R + 1]").shape[1] // 2
    if table.shape[1] % 2 == 0:
        raise ValueError(f"mods.relative: table must have shape [H, 2R + 1], but got {list(table.shape)}")

    return lambda score, b, h, q_idx, kv_idx: score + table[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]


def t5(table: Tensor, *, bidirectional: bool, max_distance: int = 128, length: int = 4096) -> ScoreMod:
    """T5's bias by buckets of distance. Raffel et al. 2020; the buckets are those of transformers' ``T5Attention``.

    Args:
        table: ``[buckets, H]``, the weight of ``relative_attention_bias``.
        bidirectional: an encoder's buckets, half of which are for keys behind the query; a decoder has one for all of
            those.
        max_distance: from which on all distances share the last bucket.
        length: distances up to it are computed once, as a table of buckets; larger ones share the last bucket, so it
            must be at least max_distance.
    """
    check_rank("t5", "table", table, "[buckets, H]")
    if length < max_distance:
        raise ValueError(f"mods.t5: length must be at least max_distance, {max_distance}, but got {length}")
    buckets = table.shape[0]
    relative = torch.arange(-length, length + 1, device=table.device)  # of the key to the query
    first = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        first, distance = (relative > 0) * buckets, relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = buckets // 2
    further = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + further.long()).clamp(max=buckets - 1)
    bucket = (first + torch.where(distance < exact, distance, far)).to(torch.int32)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[bucket[(kv_idx - q_idx).clamp(-length, length) + length], h]

    return score_mod


def swin(table: Tensor, window: tuple[int, int]) -> ScoreMod:
    """Swin's bias of the two-dimensional offset within a window. Liu et al. 2021, equation 4.

    Args:
        table: ``[(2 * Wh - 1) * (2 * Ww - 1), H]``, ``relative_position_bias_table``; for Swin v2 see
            :func:`swin_v2_table`.
        window: ``(Wh, Ww)``. A window's positions are in row-major order.
    """
    check_rank("swin", "table", table, "[offsets, H]")
    height, width = window
    if table.shape[0] != (2 * height - 1) * (2 * width - 1):
        raise ValueError(
            f"mods.swin: table must have (2 * {height} - 1) * (2 * {width} - 1) = {(2 * height - 1) * (2 * width - 1)} "
            f"rows, but got {table.shape[0]}"
        )

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        rows = q_idx // width - kv_idx // width + height - 1
        columns = q_idx % width - kv_idx % width + width - 1
        return score + table[rows * (2 * width - 1) + columns, h]

    return score_mod


def swin_v2_table(offsets: Tensor) -> Tensor:
    """Swin v2's table for :func:`swin`: ``16 * sigmoid`` of its network's output for all offsets.

    Swin v2 normalizes queries and keys and multiplies scores by a learned scale, which the caller applies to the
    queries. Liu et al. 2022, section 3.3.

    Args:
        offsets: the network's output, ``[(2 * Wh - 1) * (2 * Ww - 1), H]`` or ``[1, 2 * Wh - 1, 2 * Ww - 1, H]``.
    """
    return 16 * offsets.reshape(-1, offsets.shape[-1]).sigmoid()


def pair_bias(bias: Tensor, mask: Tensor | None = None) -> ScoreMod:
    """A bias of each pair, and of keys that are padding a score of -1e9 (AlphaFold's).

    Rows all of whose keys are padding are a mean of the values then. With a mask_mod (:func:`padding`) they are 0.

    Args:
        bias: ``[H, M, N]`` or ``[B, H, M, N]``.
        mask: ``[B, N]``, bool: True takes part.
    """
    shape = list(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
    if not isinstance(bias, Tensor) or bias.dim() not in (3, 4):
        raise ValueError(f"mods.pair_bias: bias must have shape [H, M, N] or [B, H, M, N], but got {shape}")
    if mask is not None and check_rank("pair_bias", "mask", mask, "[B, N]").dtype != torch.bool:
        raise TypeError(f"mods.pair_bias: mask must be bool, but got {mask.dtype}")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score + (bias[h, q_idx, kv_idx] if bias.dim() == 3 else bias[b, h, q_idx, kv_idx])
        return score if mask is None else torch.where(mask[b, kv_idx], score, -1e9)

    return score_mod


def graphormer(spatial: Tensor, distance: Tensor, edge: Tensor | None = None, path: Tensor | None = None) -> ScoreMod:
    """Graphormer's biases: of the shortest path's length, and the mean of the edges on it. Ying et al. 2021, equations
    6 and 7, with a scalar weight for each kind of edge.

    Args:
        spatial: ``[distances, H]``.
        distance: ``[B, M, N]``, integers.
        edge: ``[kinds, H]``; path: ``[B, M, N, L]``, integers: the kinds of the edges on the path. Both, or neither.
    """
    check_rank("graphormer", "spatial", spatial, "[distances, H]")
    check_integers("graphormer", "distance", check_rank("graphormer", "distance", distance, "[B, M, N]"))
    if (edge is None) != (path is None):
        raise ValueError("mods.graphormer: edge and path must both be given, or neither, but got one")
    if edge is None or path is None:
        return lambda score, b, h, q_idx, kv_idx: score + spatial[distance[b, q_idx, kv_idx], h]
    check_rank("graphormer", "edge", edge, "[kinds, H]")
    check_integers("graphormer", "path", check_rank("graphormer", "path", path, "[B, M, N, L]"))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + spatial[distance[b, q_idx, kv_idx], h] + edge[path[b, q_idx, kv_idx], h].mean()

    return score_mod


def transformer_xl(query: Tensor, positions: Tensor, scale: float) -> ScoreMod:
    """Transformer-XL's term of positions, ``(q_i + v) . r_{i - j}``; its term of contents is the score of queries plus
    u. Dai et al. 2019, section 3.3.

    Args:
        query: ``q + v``, ``[B, H, M, D]``.
        positions: ``r`` of the distances M - 1 down to -(N - 1), ``[H, M + N - 1, D]``: that of ``q_idx - kv_idx`` at
            ``M - 1 - (q_idx - kv_idx)``.
        scale: of the scores, usually ``D ** -0.5``.
    """
    last = check_rank("transformer_xl", "query", query, "[B, H, M, D]").shape[2] - 1
    check_rank("transformer_xl", "positions", positions, "[H, M + N - 1, D]")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + scale * torch.dot(query[b, h, q_idx], positions[h, last - (q_idx - kv_idx)])

    return score_mod


def deberta(
    query: Tensor, key: Tensor, position_query: Tensor, position_key: Tensor, scale: float, buckets: Tensor
) -> ScoreMod:
    """DeBERTa's disentangled terms, of contents to positions and of positions to contents. He et al. 2021, equation 4.

    Args:
        query, key: ``[B, H, M, D]`` and ``[B, H, N, D]``.
        position_query, position_key: projected embeddings of the relative positions, ``[H, R, D]``.
        scale: of all three terms, ``(3 * D) ** -0.5``.
        buckets: ``[2S - 1]``, integers in [0, R): that of ``q_idx - kv_idx`` at ``q_idx - kv_idx + S - 1``; S must be
            at least both lengths.
    """
    check_rank("deberta", "query", query, "[B, H, M, D]")
    check_rank("deberta", "key", key, "[B, H, N, D]")
    check_rank("deberta", "position_query", position_query, "[H, R, D]")
    check_rank("deberta", "position_key", position_key, "[H, R, D]")
    check_integers("deberta", "buckets", check_rank("deberta", "buckets", buckets, "[2S - 1]"))
    middle = buckets.shape[0] // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        to_position = torch.dot(query[b, h, q_idx], position_key[h, buckets[q_idx - kv_idx + middle]])
        to_content = torch.dot(key[b, h, kv_idx], position_query[h, buckets[q_idx - kv_idx + middle]])
        return score + scale * (to_position + to_content)

    return score_mod


def fire(weights: Sequence[Tensor], biases: Sequence[Tensor | None], c: Tensor, threshold: Tensor) -> ScoreMod:
    """FIRE: a network of the distance, on a logarithmic scale and relative to the query's position, for causal
    attention. Li et al. 2024, equation 8: ``f(log(c * (i - j) + 1) / log(c * max(i, threshold) + 1))``. ReLU stands
    between the layers.

    Args:
        weights: of the network's layers, ``[W, 1]``, …, ``[H, W]``.
        biases: of the layers, or None each.
        c, threshold: 0-d tensors, parameters that stay positive.
    """
    if len(weights) != len(biases) or not weights:
        raise ValueError(
            "mods.fire: biases must have a tensor or None for each layer, "
            f"but got {len(biases)} for {len(weights)} weights"
        )
    *hidden, last = list(zip(weights, biases, strict=True))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).clamp(min=0)
        far = torch.maximum(q_idx.to(c.dtype), threshold)
        x = (torch.log(c * distance + 1) / torch.log(c * far + 1)).reshape(1)
        for weight, bias in hidden:
            x = (weight @ x if bias is None else weight @ x + bias).relu()
        weight, bias = last
        return score + torch.dot(weight[h], x) + (0 if bias is None else bias[h])

    return score_mod


def kerple_power(r1: Tensor, r2: Tensor) -> ScoreMod:
    """``score - r1[h] * |q_idx - kv_idx| ** r2[h]``. KERPLE, Chi et al. 2022, the power variant.

    Args:
        r1, r2: ``[H]``, r1 > 0 and 0 < r2 <= 2.
    """
    check_rank("kerple_power", "r1", r1, "[H]")
    check_rank("kerple_power", "r2", r2, "[H]")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        # 0 ** r2 has no gradient by r2 that is a number.
        power = torch.where(distance > 0, distance.clamp(min=1).to(r2.dtype) ** r2[h], 0.0)
        return score - r1[h] * power

    return score_mod


def kerple_log(r1: Tensor, r2: Tensor) -> ScoreMod:
    """``score - r1[h] * log(1 + r2[h] * |q_idx - kv_idx|)``. KERPLE, Chi et al. 2022, the logarithmic variant.

    Args:
        r1, r2: ``[H]``, both > 0.
    """
    check_rank("kerple_log", "r1", r1, "[H]")
    check_rank("kerple_log", "r2", r2, "[H]")
    return lambda score, b, h, q_idx, kv_idx: score - r1[h] * torch.log1p(r2[h] * (q_idx - kv_idx).abs())


def forgetting_gates(log_gates: Tensor) -> ScoreMod:
    """The forgetting transformer's decay, for causal attention: the sum of the logarithms of the gates between a key
    and a query. Lin et al. 2025, equation 5: ``sum(log f_l for l in j + 1 .. i)``.

    Args:
        log_gates: ``[B, H, S]``, ``logsigmoid`` of a projection. Their running sum is taken in float32 or wider.
    """
    check_rank("forgetting_gates", "log_gates", log_gates, "[B, H, S]")
    wide = log_gates if log_gates.dtype == torch.float64 else log_gates.float()
    total = wide.cumsum(-1)
    return lambda score, b, h, q_idx, kv_idx: score + (total[b, h, q_idx] - total[b, h, kv_idx])
