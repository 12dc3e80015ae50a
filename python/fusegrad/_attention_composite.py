"""Flex attention by PyTorch's own ops, a few rows of queries at a time: for what the kernels have no derivative of.

The kernels compute the results, their tangents and the first gradients. Derivatives of the latter two, of any order
and in both modes, are those of a function of some rows of queries that autograd can see through, recomputed for each
such chunk, so that memory is linear in the lengths. See docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusegrad import _C

from ._chunks import Plan, whole_blocks
from ._program import PLACES, program
from ._score_mod_torch import Values, check_linear, evaluate

__all__ = [
    "INVARIANT", "LOW", "MAX_SCORES", "Call", "Mod", "Scoring", "Tensors", "attention_plan",
]  # fmt: skip

MAX_SCORES, LOW, INVARIANT = _C.FLEX_MAX_SCORES, _C.FLEX_LOW, _C.FLEX_INVARIANT

# Scores that a chunk has in each of its tensors, of which there are some tens.
_CHUNK = {"cpu": 2**20, "cuda": 2**24}


class Mod(NamedTuple):
    """A score_mod or mask_mod without its buffers."""

    text: str
    floats: list[float]
    ints: list[int]

    def evaluated(self, values: Values) -> Tensor:
        values.floats, values.ints = self.floats, self.ints
        return evaluate(program(self.text), values)


@dataclass(frozen=True)
class Call:
    """What shapes the scores, but for its tensors. `counts`: of the score_mod's buffers, the mask_mod's, the lists of
    blocks."""

    score: Mod
    mask: Mod
    block_size: list[int]
    scale: float
    dropout_p: float
    counts: tuple[int, int, int]
    deterministic: bool | None = None
    batch_invariant: bool = False

    @property
    def mask_places(self) -> range:
        """The mask_mod's buffers among a call's tensors."""
        first = 3 + self.counts[0]  # behind query, key, value and the score_mod's
        return range(first, first + self.counts[1])

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensors, tuple[Tensor, ...]]:
        """A call's tensors in a row, and what follows them."""
        query, key, value, *rest = tensors
        groups = []
        for count in (*self.counts, 1 if self.dropout_p > 0 else 0):
            groups.append(tuple(rest[:count]))
            rest = rest[count:]
        return Tensors(query, key, value, *groups), tuple(rest)

    def scoring(self, t: Tensors) -> Scoring:
        """As the ops below the front end take it."""
        return Scoring(
            score_mod=self.score.text,
            score_mod_buffers=list(t.buffers),
            score_mod_floats=self.score.floats,
            score_mod_ints=self.score.ints,
            mask_mod=self.mask.text,
            mask_mod_buffers=list(t.mask_buffers),
            mask_mod_floats=self.mask.floats,
            mask_mod_ints=self.mask.ints,
            kv_blocks=list(t.kv_blocks),
            block_size=self.block_size,
            scale=self.scale,
            dropout_p=self.dropout_p,
            dropout_seed=t.seed[0] if t.seed else None,
        )


class Scoring(NamedTuple):
    """What shapes the scores, as the ops below the front end take it, by their names and in their order. Also what goes
    with each of these, such as the dimension over which it is batched."""

    score_mod: Any
    score_mod_buffers: Any
    score_mod_floats: Any
    score_mod_ints: Any
    mask_mod: Any
    mask_mod_buffers: Any
    mask_mod_floats: Any
    mask_mod_ints: Any
    kv_blocks: Any
    block_size: Any
    scale: Any
    dropout_p: Any
    dropout_seed: Any

    def call(self) -> Call:
        s = self
        counts = (len(s.score_mod_buffers), len(s.mask_mod_buffers), len(s.kv_blocks))
        score = Mod(s.score_mod, s.score_mod_floats, s.score_mod_ints)
        mask = Mod(s.mask_mod, s.mask_mod_floats, s.mask_mod_ints)
        return Call(score, mask, s.block_size, s.scale, s.dropout_p if s.dropout_seed is not None else 0.0, counts)

    def of_tensors(self, values: Scoring) -> list[Any]:
        """Takes what goes with each argument, gives what goes with the tensors among them. A list that has nothing may
        be None."""
        found: list[Any] = []
        for own, of in (
            (self.score_mod_buffers, values.score_mod_buffers),
            (self.mask_mod_buffers, values.mask_mod_buffers),
            (self.kv_blocks, values.kv_blocks),
        ):
            found += of or [None] * len(own)
        return found if self.dropout_seed is None else [*found, values.dropout_seed]


class Tensors(NamedTuple):
    """`kv_blocks`: [B or 1, H or 1, ...]. `seed`: none or one."""

    query: Tensor
    key: Tensor
    value: Tensor
    buffers: tuple[Tensor, ...]
    mask_buffers: tuple[Tensor, ...]
    kv_blocks: tuple[Tensor, ...]
    seed: tuple[Tensor, ...]

    def flat(self) -> tuple[Tensor, ...]:
        return (self.query, self.key, self.value, *self.buffers, *self.mask_buffers, *self.kv_blocks, *self.seed)


# --- one chunk --------------------------------------------------------------------------------------------------


def _visible(call: Call, t: Tensors, indices: dict[str, Tensor], sizes: tuple[int, int, int, int]) -> Tensor | None:
    """Which pairs take part, a bool tensor that broadcasts to [B, H, rows, N]; None: all."""
    if not t.kv_blocks:
        return None
    q, kv = indices["q_idx"], indices["kv_idx"]
    rows, columns = (x // size for x, size in zip((q, kv), call.block_size, strict=True))
    sees: Tensor | None = None
    for i in range(len(t.kv_blocks) - 2, -1, -2):  # a block that is listed twice is full
        counts, listed = t.kv_blocks[i : i + 2]
        blocks = -(-sizes[3] // call.block_size[1])
        inside = (torch.arange(listed.size(3), device=q.device) < counts[..., None]) & (listed < blocks)
        states = torch.zeros(*listed.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
        states = states.scatter(3, torch.where(inside, listed, blocks).long(), True)
        part = states[:, :, rows.reshape(-1)][..., columns.reshape(-1)]
        if i == 0 and call.mask.text:
            # As the kernels do: see MaskProgram in csrc/score_mod/evaluate_cpu.h.
            wide = any(b.dtype == torch.float64 for b in t.mask_buffers)
            dtype = torch.float64 if wide else torch.float32
            allowed = call.mask.evaluated(Values(indices, t.mask_buffers, [], [], dtype, sizes, part))
            part = part & allowed
        sees = part if sees is None else sees | part
    return sees


def _attend(
    call: Call, acc: torch.dtype, asked: tuple[bool, bool, bool], first: int, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Those that are asked for of out, lse and max_scores, of the queries from `first` on."""
    t, _ = call.split(tensors)
    query, key, value = t.query, t.key, t.value
    batch, heads, rows, _ = query.shape
    key_heads, keys = key.shape[1:3]
    group = heads // max(key_heads, 1)
    sizes = (batch, heads, rows, keys)
    places = []
    for dim, (size, start) in enumerate(((batch, 0), (heads, 0), (rows, first), (keys, 0))):
        shape = [1] * 4
        shape[dim] = size
        places.append(torch.arange(start, start + size, device=query.device).reshape(shape))
    indices = dict(zip(PLACES, places, strict=True))
    visible = _visible(call, t, indices, sizes)
    if visible is not None:
        # A key that none of these queries sees is not read: it may hold anything.
        seen = visible.any(2).expand(batch, heads, keys)
        seen = seen.reshape(batch, key_heads, group, keys).any(2)
        if key.size(0) == 1:
            seen = seen.any(0, keepdim=True)
        key, value = (torch.where(seen[..., None], x, 0) for x in (key, value))
    grouped = query.reshape(batch, key_heads, group * rows, query.size(3))
    score = (grouped @ key.transpose(2, 3) * call.scale).reshape(sizes)
    if call.score.text:
        if visible is not None:
            score = torch.where(visible, score, 0)
        starts = {"b": 0, "h": 0, "q_idx": first, "kv_idx": 0}
        values = Values({"score": score, **indices}, t.buffers, [], [], acc, sizes, visible, starts)
        score = call.score.evaluated(values).expand(sizes)
    if visible is not None:
        score = torch.where(visible, score, -torch.inf)
    alive = (score != -torch.inf).any(3, keepdim=True)
    score = torch.where(alive, score, 0)
    results = []
    if asked[0]:
        weights = torch.where(alive, score.softmax(3), 0)
        if call.dropout_p > 0:
            weights = weights * _kept(call, t.seed[0], first, sizes).to(acc)
        out = weights.reshape(batch, key_heads, group * rows, keys) @ value
        results.append(out.reshape(batch, heads, rows, value.size(3)))
    alive = alive.squeeze(3)
    if asked[1]:
        results.append(torch.where(alive, score.logsumexp(3), -torch.inf))
    if asked[2]:
        largest = score.amax(3) if keys > 0 else score.new_zeros(batch, heads, rows)
        results.append(torch.where(alive, largest, -torch.inf))
    return tuple(results)


def _kept(call: Call, seed: Tensor, first: int, sizes: tuple[int, int, int, int]) -> Tensor:
    """What dropout multiplies weights by, in float64."""
    kept = torch.ops.fusegrad.flex_attention_dropout_mask(seed, call.dropout_p, list(sizes), first)
    return kept.double() * _C.dropout_scale(call.dropout_p)


def attention_plan(call: Call, tensors: Sequence[Tensor], asked: tuple[bool, bool, bool], acc: torch.dtype) -> Plan:
    """A plan on the call's tensors, floats of which in acc: out, lse and max_scores as asked for."""
    if "custom" in call.score.text:
        check_linear(call.score.text)
    query, key = tensors[:2]
    row = query.size(0) * query.size(1) * key.size(2)
    most = program(call.score.text).most if call.score.text else 1
    budget = _CHUNK.get(query.device.type, _CHUNK["cpu"])
    return Plan(
        lambda first, pieces: _attend(call, acc, asked, first, pieces),
        (2, *(None,) * (len(tensors) - 1)),
        (2,) * sum(asked),
        query.size(2),
        whole_blocks(budget // max(row * most, 1)),
    )
