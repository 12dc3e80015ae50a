"""The losses over a vocabulary, and attention over a sequence, that processes share; docs/distributed.md."""

from __future__ import annotations

from typing import Any

import torch

from .. import _sharding
from .._eager import eager_only
from .row_biases import gather_bias, whole_bias
from .sequence import ContextParallel
from .shards import VocabParallel

__all__ = ["ContextParallel", "VocabParallel", "gather_bias", "whole_bias"]


@eager_only
def _loss(op: str, arguments: tuple[Any, ...], inplace: bool, shards: VocabParallel | None) -> Any:
    from . import divergences, losses  # what computes is imported where it is called

    function = getattr(divergences if op.endswith("jsd") else losses, op)
    names = (argument.name for argument in getattr(torch.ops.fusegrad, op).default._schema.arguments)
    return function(**dict(zip(names, arguments, strict=True)), inplace=inplace, shards=shards)


def _attend(*tensors_and_mods: Any, context: ContextParallel | None, **options: Any) -> Any:
    from .sequence_checks import Options
    from .sequence_tensors import attend_parts

    query, key, value, score_mod, block_mask = tensors_and_mods
    return attend_parts(query, key, value, score_mod, block_mask, Options(**options), context)


_sharding.register(loss=_loss, attend=_attend)
