"""Attention of a process's queries over keys that other processes have: which parts are computed, and in which order.
Two ways: keys gathered, all of them or those that a mask's lists name, or parts that travel around a ring.

Each step's backward has the lse and the output of all keys, so that its gradients are exact parts of the whole ones:
dS = P * (dP - sum(grad_out * out) + grad_lse) with P = exp(s - lse) holds for any pair by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._attention_composite import LOW, MAX_SCORES, Scoring
from .gradients import acc_of
from .sequence import ContextParallel, gathered
from .sequence_columns import Columns, Fetch, KeySums
from .sequence_masks import MaskCuts, Piece, listed_pairs, pieces
from .sequence_mods import MovedMod, Starts
from .sequence_ranges import Ranges, sizes_of, unordered
from .sequence_rows import Results, Sum, Sums, Tensors, merged, together
from .sequence_travel import Exchange, Layout

__all__ = ["Call"]

_ops = torch.ops.fusegrad
_T = TypeVar("_T")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Call:
    """All of a call but its tensors, which is the same in forward and backward.

    Args:
        queries, keys: which positions each process has.
        block_mask, cuts: both or none.
        columns: the keys to gather, where these are not all.
        starts: of b and h.
        own_buffers: for each buffer of the score_mod, whether its gradient is not summed.
        groups: over which the others are.
    """

    def __init__(
        self,
        context: ContextParallel,
        queries: Sequence[Ranges],
        keys: Sequence[Ranges],
        score: MovedMod,
        mask: MovedMod,
        block_mask: Any,
        cuts: MaskCuts | None,
        columns: Columns | None,
        starts: Starts,
        own_buffers: list[bool],
        groups: Sequence[Any],
        scale: float,
        dropout_p: float,
        max_scores: bool,
        deterministic: bool,
        ring: bool,
    ) -> None:
        self.context, self.keys, self.ring = context, keys, ring
        self.sizes = sizes_of(keys)
        self.score, self.mask, self.starts = score, mask, starts
        self.own_buffers, self.groups = own_buffers, [g for g in groups if dist.get_world_size(g) > 1]
        self.scale, self.dropout_p = scale, dropout_p
        self.max_scores, self.deterministic = max_scores, deterministic
        self.length = sum(self.sizes)
        self.block_size = [0, 0] if cuts is None else list(cuts.size)
        own = cuts is not None and cuts.own
        self.query_pieces = pieces(queries[context.rank], 0 if own else self.block_size[0])
        self.key_pieces = [pieces(part, self.block_size[1]) for part in keys]
        self.whole = Piece(0, self.length, 0)
        self.cuts, self.columns = cuts, columns
        self._pairs: dict[tuple[Piece, Piece], list[Tensor]] | None = None if columns is None else columns.lists
        if ring and cuts is not None:
            order = [piece for part in self.key_pieces for piece in part]
            self._pairs = listed_pairs(block_mask, cuts, self.query_pieces, order)

    def lists(self) -> list[Tensor]:
        """The lists of blocks that both directions read."""
        return [] if self.cuts is None else self.cuts.lists

    # --- one part ---

    def _blocks(self, q: Piece, k: Piece) -> list[Tensor] | None:
        """The lists of a pair of pieces; None where it lists nothing."""
        if self.cuts is None:
            return []
        if self._pairs is None:
            return self.cuts.rows(q)
        return self._pairs.get((q, k))

    def _scoring(self, t: Tensors, q: Piece, k: Piece, blocks: list[Tensor]) -> Scoring:
        starts = self.starts.at(q.start, k.start, q.row)
        # Pairs of different pieces must not be dropped alike.
        seed = None if t.seed is None else t.seed + (q.start * (self.length + 1) + k.start)
        score, mask = self.score.arguments(starts, t.buffers), self.mask.arguments(starts, t.mask_buffers)
        return Scoring(*score, *mask, blocks, self.block_size, self.scale, self.dropout_p, seed)

    def _forward(self, t: Tensors, q: Piece, k: Piece, key: Tensor, value: Tensor, blocks: list[Tensor]) -> Results:
        aux = LOW | (MAX_SCORES if self.max_scores else 0)
        query = t.query.narrow(2, q.row, q.size)
        return Results(*_ops.flex_attention_forward(query, key, value, *self._scoring(t, q, k, blocks), aux))

    # --- forward ---

    def forward(self, t: Tensors) -> Results:
        """The results of all of this process's queries."""
        return self._ring_forward(t) if self.ring else self._gather_forward(t)

    def _gather_forward(self, t: Tensors) -> Results:
        def run(q: Piece, k: Piece, key: Tensor, value: Tensor) -> tuple[Piece, Results]:
            blocks = self._blocks(q, k)
            assert blocks is not None
            return q, self._forward(t, q, k, key, value, blocks)

        return together(t, self._each(t, run), self.max_scores)

    def _ring_forward(self, t: Tensors) -> Results:
        made: dict[Piece, Results] = {}
        for _, cut in self._steps(t, Layout(t.key, t.value, max(self.sizes))):
            for k, key, value in cut:
                for q in self.query_pieces:
                    blocks = self._blocks(q, k)
                    if blocks is not None:
                        made[q] = merged(made.get(q), self._forward(t, q, k, key, value, blocks))
        return together(t, list(made.items()), self.max_scores)

    # --- backward ---

    def backward(
        self, t: Tensors, results: Results, upstream: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of query, key, value and the score_mod's buffers, as far as they are `wanted`; `upstream` are
        those of out, lse and max_scores."""
        sums = Sums(t, wanted, not self.ring, self.own_buffers, self.groups)
        if self.ring:
            keys = self._ring_backward(t, results, upstream, sums)
        else:
            keys = self._gather_backward(t, results, upstream, sums)
        return [sums.query(), *keys, *sums.buffers()]

    def _backward(
        self,
        t: Tensors,
        results: Results,
        upstream: Sequence[Tensor | None],
        wanted: list[bool],
        q: Piece,
        k: Piece,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Any, ...] | None:
        """The gradients of query, key, value and the score_mod's buffers from one part; None where it lists nothing."""
        blocks = self._blocks(q, k)
        if blocks is None:
            return None
        r = results.rows(q)
        # The CPU's kernels take rows' numbers as they lie in memory.
        r.lse, r.lse_low = r.lse.contiguous(), r.lse_low.contiguous()
        r.max_scores, r.max_ties = r.max_scores.contiguous(), r.max_ties.contiguous()
        grads = [None if g is None else g.narrow(2, q.row, q.size) for g in upstream]
        query = t.query.narrow(2, q.row, q.size)
        made: tuple[Any, ...] = _ops.flex_attention_backward(
            query,
            key,
            value,
            *grads,
            *r.tensors(),
            *self._scoring(t, q, k, blocks),
            self.deterministic,
            wanted,
        )
        return made

    def _gather_backward(
        self, t: Tensors, results: Results, upstream: Sequence[Tensor | None], sums: Sums
    ) -> list[Tensor | None]:
        wanted = sums.wanted[1:3]
        part = partial(self._backward, t, results, upstream, sums.wanted)
        if self.columns is not None:
            to = KeySums(self.columns, [x if want else None for x, want in zip((t.key, t.value), wanted, strict=True)])
            for q, made in self._each(t, lambda q, *with_keys: (q, part(q, *with_keys))):
                assert made is not None
                grad_query, *of_keys, grad_buffers = made
                sums.add(q, grad_query, grad_buffers)
                to.add(q, of_keys)
            return to.finished(self.context)
        whole = [self._all_keys(x) if want else None for x, want in zip((t.key, t.value), wanted, strict=True)]
        for q, k, key, value in self._gather_steps(t):
            made = part(q, k, key, value)
            assert made is not None
            grad_query, *of_keys, grad_buffers = made
            sums.add(q, grad_query, grad_buffers)
            for total, gradient in zip(whole, of_keys, strict=True):
                if total is not None:
                    total.add(k.row, gradient)
            del made, grad_query, of_keys, grad_buffers, gradient, key, value
        return [None if total is None else self._own(total.finished()).to(t.query.dtype) for total in whole]

    def _all_keys(self, own: Tensor) -> Sum:
        """For the gradients of all keys, which a reduce-scatter sums in float32 or wider."""
        acc, shape = acc_of(own.dtype), (self.length, *own.shape[:2], own.shape[3])
        if self.context.world == 1:
            return Sum(lambda: own.new_empty(shape, dtype=acc).movedim(0, 2), self.length, acc)
        return Sum.into(own.new_empty(shape, dtype=acc).movedim(0, 2))

    def _own(self, whole: Tensor) -> Tensor:
        """Takes gradients of all keys, gives those of this process's, summed over all."""
        context, own = self.context, self.sizes[self.context.rank]
        if context.world == 1:
            return whole
        largest = max(self.sizes)
        rows = unordered(whole.movedim(2, 0), self.keys, largest)
        made = rows.new_empty(largest, *rows.shape[1:])
        if made.numel():
            dist.reduce_scatter_tensor(made, rows, group=context.group)
        return made[:own].movedim(0, 2)

    def _ring_backward(
        self, t: Tensors, results: Results, upstream: Sequence[Tensor | None], sums: Sums
    ) -> list[Tensor | None]:
        """A part's sums travel with it, one step behind, and end where they began."""
        layout = Layout(t.key, t.value, max(self.sizes))
        needed = sums.wanted[1] or sums.wanted[2]
        coming: Exchange | None = None
        for part, cut in self._steps(t, layout):
            flat = layout.empty(acc_of(t.query.dtype)) if needed else t.key.new_empty(0)
            to = [Sum.into(view) for view in layout.views(flat, self.sizes[part])] if needed else []
            for k, key, value in cut:
                for q in self.query_pieces:
                    made = self._backward(t, results, upstream, sums.wanted, q, k, key, value)
                    if made is None:
                        continue
                    grad_query, *of_keys, grad_buffers = made
                    sums.add(q, grad_query, grad_buffers)
                    for total, gradient, want in zip(to, of_keys, sums.wanted[1:3], strict=False):
                        if want:
                            total.add(k.row, gradient)
            for total in to:
                total.finished()
            if coming is not None:
                flat += coming.wait()
            coming = Exchange(self.context, flat)
        assert coming is not None
        if not needed:
            return [None, None]
        own = layout.views(coming.wait(), self.sizes[self.context.rank])
        return [g.to(t.query.dtype) if want else None for g, want in zip(own, sums.wanted[1:3], strict=True)]

    def _each(self, t: Tensors, run: Callable[[Piece, Piece, Tensor, Tensor], _T]) -> list[_T]:
        """What `run` gives for each piece that _gather_steps yields.

        Where few keys are gathered, a GPU has pieces behind the first on a stream of their own: CTAs are persistent,
        and where those of one piece run out of work those of the next begin. Both streams wait for each other at both
        ends, so that no memory is given away while the other one uses it.
        """
        steps = self._gather_steps(t)
        if self.columns is None or len(self.columns.keys_of) < 2 or not t.query.is_cuda:
            return [run(*step) for step in steps]
        first = next(steps)  # begins the exchange on the caller's stream
        current, side = torch.cuda.current_stream(t.query.device), _side_stream(t.query.device)
        side.wait_stream(current)
        made = [run(*first)]
        with torch.cuda.stream(side):
            made += [run(*step) for step in steps]
        current.wait_stream(side)
        return made

    # --- what travels ---

    def _gather_steps(self, t: Tensors) -> Iterator[tuple[Piece, Piece, Tensor, Tensor]]:
        """Pieces of queries, with the keys and values that each needs."""
        columns = self.columns
        if columns is None:
            key, value = (gathered(self.context, x, 2, self.keys) for x in (t.key, t.value))
            for q in self.query_pieces:
                yield q, self.whole, key, value
            return
        fetch = Fetch(self.context, columns, (t.key, t.value))
        for number, q in enumerate((*columns.local, *columns.rest)):
            if number == len(columns.local):
                fetch.wait()
            yield q, columns.keys_of[q], *fetch.of(q)
        if not columns.rest:  # what others need of this process is under way
            fetch.wait()

    def _steps(self, t: Tensors, layout: Layout) -> Iterator[tuple[int, list[tuple[Piece, Tensor, Tensor]]]]:
        """Whose part it is in each step, this process's first, and its pieces. The next part is under way while one is
        worked on."""
        context = self.context
        flat = layout.packed(t.key, t.value)
        for step in range(context.world):
            part = (context.rank - step) % context.world
            coming = Exchange(context, flat) if step + 1 < context.world else None
            key, value = layout.views(flat, self.sizes[part])
            yield part, [(k, *(x.narrow(2, k.row, k.size) for x in (key, value))) for k in self.key_pieces[part]]
            if coming is not None:
                flat = coming.wait()
