"""Second derivatives of flex attention on CUDA, by the kernels.

The gradients of query, key and value are those of L = <grad_out, out> + <grad_lse, lse>. Their tangents along (query',
key', value', grad_out', grad_lse') are what forward mode over reverse asks for; and because the second derivatives of L
are symmetric, those along (w_query, w_key, w_value) are what a double backward gives query, key and value for the
upstream gradients w of the gradients, while grad_out and grad_lse get the tangents of out and lse. One kernel computes
what each pair of a query and a key gives (csrc/cuda/attention/pair_tangents/portable.cuh), a chunk of pairs at a time;
products of matrices make the rest of it. docs/design/transforms.md has the formulas and what goes this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._attention_composite import Call, Tensors
from ._attention_low import with_low
from ._score_mod_torch import Values, adds_reads, evaluate_reads

__all__ = ["MOST_HEAD", "second_derivatives", "takes"]

# What the kernel writes of a chunk of pairs, at most, where that is more than _ROWS queries of a group of heads.
_CHUNK_BYTES = 2**29
_ROWS = 128  # chunks of queries begin at multiples of it
MOST_HEAD = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
_INPUTS = 3  # query, key, value


def takes(
    call: Call, tensors: Sequence[Tensor], asked: Sequence[bool], moving: Sequence[int], results: Sequence[int]
) -> bool:
    """Whether the kernels have it: of a call's tensors and the upstream gradients of those of out, lse and max_scores
    that are `asked` for, and of tangents of those of them that are `moving`, the second derivatives `results`; both by
    their places."""
    query, _, value = tensors[:_INPUTS]
    count = len(tensors) - sum(asked)
    known = {0, 1, 2, *range(count, len(tensors))}
    captured = frozenset(i - _INPUTS for i in (*moving, *results) if i not in known)
    return (
        query.is_cuda
        and max(query.size(3), value.size(3)) <= MOST_HEAD.get(query.dtype, 0)
        and all(t.numel() > 0 for t in tensors[:_INPUTS])
        and call.dropout_p == 0
        and not asked[2]
        and "custom" not in call.score.text
        and (not captured or _adds(call, captured))
    )


def _adds(call: Call, captured: frozenset[int]) -> bool:
    """Whether these tensors are buffers of the score_mod that it adds to the score: what a pair gives to the gradient
    of the score is then what it gives to theirs."""
    return max(captured) < call.counts[0] and call.scale != 0 and adds_reads(call.score.text, captured)


def second_derivatives(
    call: Call,
    tensors: Sequence[Tensor],
    asked: Sequence[bool],
    outputs: Sequence[Tensor],
    tangents: dict[int, Tensor],
    results: Sequence[int],
) -> tuple[Tensor, ...]:
    """The results of what `takes` takes. `outputs`: out, lse, and what rounding took from each."""
    count = len(tensors) - sum(asked)
    moved = [tangents.get(i) for i in range(len(tensors))]

    def each(values: Sequence[Any]) -> list[Any]:
        """Values for out and lse, None where it is not asked for."""
        rest = iter(values)
        return [next(rest) if a else None for a in asked[:2]]

    t, upstream = call.split(tensors)
    buffers = range(_INPUTS, _INPUTS + call.counts[0])
    captured = _Captured(call, t, [moved[i] for i in buffers], [i in results for i in buffers])
    found = _second(call, t, each(upstream), outputs, moved[:_INPUTS], each(moved[count:]), captured)
    by_place = dict(enumerate(found[:_INPUTS]))
    by_place.update((_INPUTS + j, g) for j, g in captured.gradients.items())
    of_results = [x for x, a in zip(found[_INPUTS:], asked, strict=False) if a]
    by_place.update(zip(range(count, len(tensors)), of_results, strict=True))
    return tuple(by_place[i].to(tensors[i].dtype) for i in results)


def _second(
    call: Call,
    t: Tensors,
    upstream: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    moved: Sequence[Tensor | None],
    of_upstream: Sequence[Tensor | None],
    captured: _Captured,
) -> tuple[Tensor, ...]:
    """The tangents of the gradients of query, key and value in float32, and those of out and lse. `upstream`: gradients
    of out and lse; `moved`: tangents of query, key and value. Those of captured tensors' gradients are left there."""
    ops, scoring = torch.ops.fusegrad, call.scoring(t)
    query, key, value = t.query, t.key, t.value
    grad_out, grad_lse = upstream
    of_grad_out, of_grad_lse = of_upstream
    if all(m is None for m in moved) and not captured.moving:
        moved = [torch.zeros_like(query), None, None]
    out, lse, out_low, lse_low = outputs
    # The sum of out with grad_out is subtracted from numbers that are close to it: rounding would be the largest error.
    exact = with_low(out, out_low) if out_low.numel() > 0 else out
    _, _, of_out, of_lse, *_ = ops.flex_attention_jvp(
        query, key, value, *moved, list(captured.moving), list(captured.moving.values()), *scoring, 0
    )
    batch, heads, length, _ = query.shape
    if grad_out is None:
        grad_out = query.new_zeros(()).expand(batch, heads, length, value.size(3))
    delta = (grad_out * exact).sum(3)
    of_delta = (grad_out * of_out.float()).sum(3)
    if of_grad_out is not None:
        of_delta += (of_grad_out * exact).sum(3)
    if grad_lse is not None:
        delta = delta - grad_lse
    if of_grad_lse is not None:
        of_delta = of_delta - of_grad_lse
    rows = torch.stack([lse, lse_low, delta, of_lse, of_delta], 3)
    of_query, of_key, of_value = (torch.zeros_like(x) if m is None else m for x, m in zip(t[:3], moved, strict=True))
    shared = key.size(0) < batch  # one key for all batches
    key, value, of_key, of_value = (x.expand(batch, *x.shape[1:]) for x in (key, value, of_key, of_value))
    products = _Products(query, of_query, key, of_key, grad_out, of_grad_out, value, whole=captured.any)
    operands = (query, key, value, grad_out, of_query, of_key, of_value, of_grad_out, rows)
    for first_head, head_count, first_row, row_count in products.chunks():
        weights, gradients, seen = ops.flex_attention_pair_tangents(
            *operands, *scoring, first_head, head_count, first_row, row_count,
            captured.score_tangent(first_head, head_count, first_row, row_count),
        )  # fmt: skip
        captured.add(first_head, first_row, gradients)
        products.add(first_head, first_row, weights, gradients, seen if t.kv_blocks else None)
        del weights, gradients, seen  # before the next chunk's are made
    found = products.results()
    return (found[0], *(g.sum(0, keepdim=True) if shared else g for g in found[1:]), of_out, of_lse)


class _Captured:
    """Captured tensors of _adds. With L a read's tangents add L' to a score's, and the gradient of what is read is that
    of the score: its tangent is what the pairs that read it have as the tangent of theirs, summed up."""

    def __init__(self, call: Call, t: Tensors, tangents: Sequence[Tensor | None], wanted: Sequence[bool]) -> None:
        self.call, self.tensors = call, t
        self.moving = {j: m for j, m in enumerate(tangents) if m is not None}
        self.gradients = {
            j: torch.zeros_like(b, dtype=torch.float32)
            for j, (b, w) in enumerate(zip(t.buffers, wanted, strict=True))
            if w
        }
        self.any = bool(self.moving or self.gradients)

    def _reads(self, buffers: dict[int, Tensor], first_head: int, head_count: int, first_row: int, rows: int) -> Tensor:
        """What the score_mod adds of them in a chunk, which has whole batches or is in one: broadcasts to [batches,
        heads, rows, N]."""
        t, heads = self.tensors, self.tensors.query.size(1)
        keys, device = t.key.size(2), t.query.device
        starts = {"b": first_head // heads, "h": first_head % heads, "q_idx": first_row, "kv_idx": 0}
        sizes = (max(head_count // heads, 1), min(head_count, heads), rows, keys)
        places = {}
        for dim, (name, size) in enumerate(zip(starts, sizes, strict=True)):
            shape = [1] * len(sizes)
            shape[dim] = size
            places[name] = torch.arange(starts[name], starts[name] + size, device=device).reshape(shape)
        score = self.call.score
        values = Values(places, t.buffers, score.floats, score.ints, torch.float32, sizes, None, starts)
        return evaluate_reads(score.text, values, [buffers.get(j) for j in range(len(t.buffers))])

    def score_tangent(self, first_head: int, head_count: int, first_row: int, row_count: int) -> Tensor | None:
        if not self.moving:
            return None
        keys = self.tensors.key.size(2)
        heads = self.tensors.query.size(1)
        result = torch.empty(head_count, row_count, -(-keys // 8) * 8, device=self.tensors.query.device)
        part = result.view(-1, min(head_count, heads), row_count, result.size(2))[..., :keys]
        part.copy_(self._reads(self.moving, first_head, head_count, first_row, row_count))
        return result

    def add(self, first_head: int, first_row: int, of_pairs: Tensor) -> None:
        """`of_pairs`: what the kernel gives for the gradients by query * key."""
        if not self.gradients:
            return
        head_count, row_count = of_pairs.shape[:2]
        heads, keys = self.tensors.query.size(1), self.tensors.key.size(2)
        upstream = of_pairs[:, :, 0, :keys].view(-1, min(head_count, heads), row_count, keys)
        buffers = {j: self.tensors.buffers[j].detach() for j in self.gradients}

        def added(*given: Tensor) -> Tensor:
            chosen = dict(zip(buffers, given, strict=True))
            return self._reads(chosen, first_head, head_count, first_row, row_count)

        value, pull = torch.func.vjp(added, *buffers.values())
        of_reads = upstream.float().sum_to_size(value.shape) / self.call.scale
        for total, g in zip(self.gradients.values(), pull(of_reads), strict=True):
            total += g


class _Products:
    """What the products of chunks add up to, in float32."""

    def __init__(
        self, query: Tensor, of_query: Tensor, key: Tensor, of_key: Tensor, grad_out: Tensor,
        of_grad_out: Tensor | None, value: Tensor, whole: bool = False,
    ) -> None:  # fmt: skip
        """`whole`: chunks have whole batches, or are in one."""
        self.whole = whole
        self.batch, self.heads, self.length, _ = query.shape
        self.key_heads, self.keys = key.shape[1:3]
        self.columns = -(-self.keys // 8) * 8
        self.element = query.element_size()
        self.parts = 1 if of_grad_out is None else 2
        # The operand of each product has two parts, one for each part of a row of what the kernel gives.
        self.queries, self.of_keys = (query, of_query), (key, of_key)
        self.grads = (grad_out,) if of_grad_out is None else (grad_out, of_grad_out)

        def empty(like: Tensor, heads: int, rows: int) -> Tensor:
            return like.new_zeros(self.batch * heads, rows, like.size(3), dtype=torch.float32)

        self.grad_query = empty(query, self.heads, self.length)
        self.grad_key = empty(key, self.key_heads, self.columns)
        self.grad_value = empty(value, self.key_heads, self.columns)

    def chunks(self) -> list[tuple[int, int, int, int]]:
        """(first_head, head_count, first_row, row_count) of each."""
        group = self.heads // self.key_heads
        row = group * self.columns * (2 + self.parts) * self.element
        all_heads = self.batch * self.heads
        together = max(_CHUNK_BYTES // (row * self.length), 1)
        together = group * -(-self.batch * self.key_heads // -(-self.batch * self.key_heads // together))
        batch = self.heads
        if self.whole:
            together = together // batch * batch if together >= batch else together
            while batch % together and together % batch:
                together -= group
        step = self.length if row * self.length <= _CHUNK_BYTES else max(_CHUNK_BYTES // row // _ROWS, 1) * _ROWS
        return [
            (head, min(together, all_heads - head), first, min(step, self.length - first))
            for head in range(0, all_heads, together)
            for first in range(0, self.length, step)
        ]

    def add(self, first_head: int, first_row: int, weights: Tensor, gradients: Tensor, seen: Tensor | None) -> None:
        head_count, row_count = gradients.shape[:2]
        group = self.heads // self.key_heads
        groups = head_count // group
        mine = slice(first_head, first_head + head_count)
        of_keys = slice(first_head // group, first_head // group + groups)
        rows = slice(first_row, first_row + row_count)

        def of_rows(parts: Sequence[Tensor]) -> Tensor:
            pieces = [t.flatten(0, 1)[mine, rows] for t in parts]
            return torch.stack(pieces, 2).reshape(groups, group * row_count * len(pieces), -1)

        keys = [F.pad(t.flatten(0, 1)[of_keys], (0, 0, 0, self.columns - self.keys)) for t in self.of_keys]
        if seen is not None:
            # A key that none of these queries sees is not read: it may hold anything.
            keys = [torch.where(seen[..., None] != 0, t, 0) for t in keys]
        by_row = gradients.view(groups, group * row_count, 2 * self.columns)
        of_query = _multiply(by_row, torch.cat(keys, 1))
        self.grad_query[mine, rows] = of_query.view(head_count, row_count, -1)
        by_part = gradients.view(groups, group * row_count * 2, self.columns)
        self.grad_key[of_keys] += _multiply(by_part.mT, of_rows(self.queries))
        by_part = weights.view(groups, group * row_count * self.parts, self.columns)
        self.grad_value[of_keys] += _multiply(by_part.mT, of_rows(self.grads))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        query = self.grad_query.unflatten(0, (self.batch, self.heads))
        key, value = (
            t[:, : self.keys].unflatten(0, (self.batch, self.key_heads)) for t in (self.grad_key, self.grad_value)
        )
        return query, key, value


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Matrices in batches, summed in float32."""
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)
