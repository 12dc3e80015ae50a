"""score_mods that read tensors at places that other reads give, such as ``t[x[k].long(), h]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ROWS, BATCHES, HEADS = 40, 3, 4


class Places(NamedTuple):
    """In ROWS rows, numbered from either end."""

    q: Tensor
    k: Tensor
    of_batch: Tensor  # [BATCHES, keys]
    difference: Tensor
    others: Tensor  # by places
    is_first: Tensor  # by keys


def places(dtype: torch.dtype, queries: int, keys: int) -> Places:
    def made(*sizes: int) -> Tensor:
        return torch.randint(-ROWS, ROWS, sizes).to(dtype)

    return Places(
        made(queries),
        made(keys),
        made(BATCHES, keys),
        made(queries + keys - 1),
        made(ROWS),
        torch.rand(keys) < 0.3,
    )


# Makes a score_mod of places, the number of queries and a table [ROWS, HEADS].
Chain = Callable[[Places, int, Tensor], Callable[..., Tensor]]
CHAINS: dict[str, Chain] = {
    "by key": lambda x, m, t: lambda s, b, h, q, k: s + t[x.k[k].long(), h],
    "by query": lambda x, m, t: lambda s, b, h, q, k: s * (1 + t[x.q[q].long(), h]),
    "by difference": lambda x, m, t: lambda s, b, h, q, k: s + t[x.difference[k - q + m - 1].long(), h],
    "by a batch's key": lambda x, m, t: lambda s, b, h, q, k: s * (1 + t[x.of_batch[b, k].long(), h]),
    "two, by key": lambda x, m, t: lambda s, b, h, q, k: s + t[x.others[x.k[k].long()].long(), h],
    "two, by query": lambda x, m, t: lambda s, b, h, q, k: s * (1 + t[x.others[x.q[q].long()].long(), h]),
    "two, by difference": lambda x, m, t: (
        lambda s, b, h, q, k: s + t[x.others[x.difference[k - q + m - 1].long()].long(), h]
    ),
    "by the places' difference": lambda x, m, t: lambda s, b, h, q, k: s + t[(x.k[k] - x.q[q]).long() % ROWS, h],
    "by key and query": lambda x, m, t: lambda s, b, h, q, k: s + t[x.k[k].long(), q % HEADS],
    "by key, and the place": lambda x, m, t: lambda s, b, h, q, k: s + t[x.k[k].long(), h] * x.k[k] / ROWS,
    "by key and difference": lambda x, m, t: (
        lambda s, b, h, q, k: s * (1 + t[x.k[k].long(), h]) + t[x.difference[k - q + m - 1].long(), h]
    ),
    "by whether": lambda x, m, t: lambda s, b, h, q, k: s + t[x.is_first[k].long(), h],
}


def same_document(x: Places, m: int) -> Callable[..., Tensor]:
    """A mask_mod, by documents of places of queries and keys and by their difference."""
    return lambda b, h, q, k: (
        (x.others[x.q[q].long()] % 4 == x.others[x.k[k].long()] % 4)
        | (x.others[x.difference[k - q + m - 1].long()] > 0)
    )
