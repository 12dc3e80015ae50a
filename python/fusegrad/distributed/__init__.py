"""The losses over a vocabulary, and attention over a sequence, that processes share; docs/distributed.md."""

from __future__ import annotations

from typing import Any

from .. import _sharding
from .losses import loss
from .row_biases import gather_bias, whole_bias
from .sequence import ContextParallel
from .shards import VocabParallel

__all__ = ["ContextParallel", "VocabParallel", "gather_bias", "whole_bias"]


def _attend(*tensors_and_mods: Any, context: ContextParallel | None, **options: Any) -> Any:
    from .sequence_checks import Options
    from .sequence_tensors import attend_parts

    query, key, value, score_mod, block_mask = tensors_and_mods
    return attend_parts(query, key, value, score_mod, block_mask, Options(**options), context)


_sharding.register(loss=loss, attend=_attend)
