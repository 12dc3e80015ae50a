"""A transformers model whose sequences are spread over processes. See docs/transformers.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.masking_utils import and_masks, find_packed_sequence_indices, packed_sequence_mask_function

from fusegrad import ContextParallel
from fusegrad._arguments import checked
from fusegrad._eager import eager_only

__all__ = ["context_of", "context_parallel", "whole_mask"]

# The name of what modules have whose attention is over spread sequences: a backward that runs a block again finds it.
_CONTEXT = "_fusegrad_context"
# While a forward runs: the mask of packed sequences of the whole sequence, or None, in a list.
_running: ContextVar[list[Any] | None] = ContextVar("_running", default=None)


@checked
def context_parallel(model: nn.Module, context: ContextParallel) -> None:
    """Lets a model take its part of each sequence: it is called with the whole batch in all processes of the context,
    and returns hidden states, logits and loss of this process's positions.

    The loss is the mean over the tokens of all processes where their losses are averaged, as DDP and FSDP average
    gradients; ``context.unshard`` makes a whole of logits. Position ids, packed sequences and 2D attention masks are
    those of the whole sequence.

    Args:
        model: with ``attn_implementation="fusegrad"``, which is changed; a decoder of causal attention, chunks and
            windows.
        context: with ``sum_captured=False`` where DDP or FSDP sum over the same processes.

    Raises:
        ValueError: the model's attention is another one.
    """
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "fusegrad":
        raise ValueError(
            f'context_parallel: the model must have attn_implementation="fusegrad", but got {implementation!r}'
        )
    for module in model.modules():
        setattr(module, _CONTEXT, context)
    model.forward = functools.partial(_forward, model.forward, context)


def context_of(module: nn.Module | None) -> ContextParallel | None:
    return getattr(module, _CONTEXT, None)


def whole_mask(mask: Callable[..., Any], q_length: int, kv_length: int) -> tuple[Callable[..., Any], int]:
    """A mask's function and its number of queries: those of the whole sequence while a spread forward runs."""
    # A compiler reads no context variable, and a spread forward is not compiled.
    running = None if torch.compiler.is_compiling() else _running.get()
    if running is None:
        return mask, q_length
    (packed,) = running
    if packed is not None:
        mask = and_masks(mask, packed_sequence_mask_function(packed))
    return mask, kv_length


@contextmanager
def _spread(packed: Tensor | None) -> Iterator[None]:
    token = _running.set([packed])
    try:
        yield
    finally:
        _running.reset(token)


@eager_only
def _forward(
    forward: Callable[..., Any],
    context: ContextParallel,
    input_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    **others: Any,
) -> Any:
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("context_parallel: the model must be called with input_ids or inputs_embeds, but got neither")
    for name in ("past_key_values", "cache_position"):
        if others.get(name) is not None:
            raise ValueError(f"context_parallel: {name} must be None, but got a {type(others[name]).__name__}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"context_parallel: attention_mask must be [B, S] or None, but got shape {list(attention_mask.shape)}"
        )
    batch, length = given.shape[:2]
    packed = None
    if position_ids is None:
        position_ids = torch.arange(length, device=given.device)[None]
    elif attention_mask is None:
        packed = find_packed_sequence_indices(position_ids.expand(batch, -1))
    if attention_mask is None:
        # Of the whole sequence: by it transformers knows how many keys there are.
        attention_mask = torch.ones(batch, length, dtype=torch.bool, device=given.device)
    if labels is not None:
        following = others.pop("shift_labels", None)
        if following is None:
            following = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if others.get("num_items_in_batch") is None:
            others["num_items_in_batch"] = (following != -100).sum() / dist.get_world_size(context.group)
        others["shift_labels"] = context.shard(following).contiguous()
        others["labels"] = context.shard(labels)
    with _spread(packed):
        return forward(
            input_ids=None if input_ids is None else context.shard(input_ids),
            inputs_embeds=None if inputs_embeds is None else context.shard(inputs_embeds),
            attention_mask=attention_mask,
            position_ids=context.shard(position_ids),
            use_cache=False,
            **{name: value for name, value in others.items() if name != "use_cache"},
        )
