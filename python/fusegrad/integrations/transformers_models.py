"""Which models of transformers can take ``attn_implementation="fusegrad"``.

transformers asks a model's source whether it uses the AttentionInterface at all. What its attention asks of that, and
what it does itself beside it, is told by the source as well.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

__all__ = ["HARMLESS", "refuse_unable", "refuse_unable_attention", "serves"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# What models hand to attention besides, which changes none of its results here: what the mask holds already, what the
# model itself reads, and how kernels of other libraries go about it.
_HELD_BY_THE_MASK = frozenset(("position_ids", "sliding_window"))
_OF_THE_MODEL = frozenset(
    [
        "cache_position",
        "grid_thw",
        "input_ids",
        "inputs_embeds",
        "interpolate_pos_encoding",
        "labels",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "shift_labels",
        "token_type_ids",
        "use_cache",
    ]
)
_OF_OTHER_KERNELS = frozenset(("deterministic", "kernel_options", "max_length_k", "max_length_q"))
HARMLESS = _HELD_BY_THE_MASK | _OF_THE_MODEL | _OF_OTHER_KERNELS

_SERVED = set(HARMLESS)


def serves(function: _Function) -> _Function:
    """Notes an attention's arguments: a model may call it by them."""
    _SERVED.update(inspect.signature(function).parameters)
    return function


_ASKED = re.compile(r"isinstance\(\w*mask, [\w.]*(Tensor|BlockMask)\)")
# Scores of a model's own, to which a mask is added that transformers makes by the implementation's name.
_OWN_SCORES = re.compile(r"\+ attention_mask\n")


def _unserved(tree: ast.AST) -> set[str]:
    """Arguments that attention is called with, and does not compute by."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    given = {k.arg for c in calls if getattr(c.func, "id", "") == "attention_interface" for k in c.keywords}
    return {name for name in given if name is not None} - _SERVED


def _asks_what_a_mask_is(tree: ast.AST) -> bool:
    """Whether a mask counts, or grows, only if it is a tensor. Where it is cropped there it may be none."""
    for n in ast.walk(tree):
        if not isinstance(n, ast.If) or not _ASKED.search(ast.unparse(n.test)):
            continue
        if not all(isinstance(s, ast.Assign) and isinstance(s.value, ast.Subscript) for s in n.body):
            return True
    return False


def _reasons(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    for c in tree.body:
        if not isinstance(c, ast.ClassDef) or "Attention" not in c.name:
            continue
        text = ast.get_source_segment(source, c) or ""
        if "get_interface(" not in text:
            if "softmax(" in text and "self.value" in text and _OWN_SCORES.search(text):
                yield f"whose {c.name} computes its attention itself"
        elif names := sorted(_unserved(c)):
            yield f"whose {c.name} attends by {', '.join(names)}"
        elif _asks_what_a_mask_is(c):
            yield f"whose {c.name} makes its masks of tensors"


@functools.cache
def _reason(module: str) -> str | None:
    """Why the models of a module cannot take it, if they cannot."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None  # transformers cannot read it either, and does not set the implementation
    return next(_reasons(source), None)


def _error(name: str, reason: str) -> ValueError:
    return ValueError(
        'attn_implementation: "fusegrad" must be set on a model whose attention is transformers\' AttentionInterface, '
        f'of queries, keys, values and a mask, but got {name}, {reason}: use "eager"; its loss can be fused'
    )


def refuse_unable(model: Any) -> None:
    """A model that cannot take the name would fail deep in a forward, or ignore it.

    Raises:
        ValueError: such a model, or a part of one, has it.
    """
    for part in (m for m in model.modules() if hasattr(m, "_can_set_attn_implementation")):
        if part.config._attn_implementation == "fusegrad":
            own = None if part._can_set_attn_implementation() else "which computes its attention itself"
            if reason := own or _reason(type(part).__module__):
                raise _error(type(part).__name__, reason)


@torch.compiler.assume_constant_result
def _reason_of(module: str) -> str | None:
    return _reason(module)


def refuse_unable_attention(module: torch.nn.Module) -> None:
    """Raises:
    ValueError: the module would attend to something else than its model means.
    """
    if reason := _reason_of(type(module).__module__):
        raise _error(type(module).__name__, reason)
