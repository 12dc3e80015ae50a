"""Which models of transformers can take ``attn_implementation="fusegrad"``: the others are refused when it is set.

transformers asks a model's source whether it uses the AttentionInterface at all. What its attention asks of that, and
what it does itself beside it, is told by the source as well.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from .transformers_attention import HARMLESS, attention

__all__ = ["refuse_unable"]

_SERVED = frozenset(inspect.signature(attention).parameters) | HARMLESS
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


def _why_not(model: Any) -> str | None:
    if not model._can_set_attn_implementation():
        return "which computes its attention itself"
    return _reason(type(model).__module__)


def refuse_unable(model: Any, requested: Any) -> None:
    """A model that cannot take the name would fail deep in a forward, ignore it, or attend to something else.

    Raises:
        ValueError: "fusegrad" is requested of such a model.
    """
    if isinstance(requested, dict):
        requested = requested.get("", None)
    reason = _why_not(model) if requested == "fusegrad" else None
    if reason is not None:
        raise ValueError(
            f'attn_implementation: "fusegrad" must be set on a model whose attention is transformers\' '
            f"AttentionInterface, of queries, keys, values and a mask, but got {type(model).__name__}, {reason}: use "
            '"eager"; its loss can be fused'
        )


_check_attention = PreTrainedModel._check_and_adjust_attn_implementation
_set_attention = PreTrainedModel.set_attn_implementation


@functools.wraps(_check_attention)
def _check_attention_first(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_unable(self, attn_implementation)
    return _check_attention(self, attn_implementation, *args, **kwargs)


@functools.wraps(_set_attention)
def _set_attention_first(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_unable(self, attn_implementation)
    wanted = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    configs = {id(getattr(self.config, name, None)): value for name, value in wanted.items() if name}
    parts = [p for p in self.modules() if isinstance(p, PreTrainedModel) and p is not self]
    for part in parts:
        refuse_unable(part, configs.get(id(part.config), wanted.get("")))
    result = _set_attention(self, attn_implementation, *args, **kwargs)
    if attn_implementation == "fusegrad":
        # T5's stacks have copies of the config, which transformers 5.17 misses.
        for part in parts:
            part.config._attn_implementation = "fusegrad"
    return result


# Refuses a model before the implementation is set; transformers itself logs a warning at most.
PreTrainedModel._check_and_adjust_attn_implementation = _check_attention_first
PreTrainedModel.set_attn_implementation = _set_attention_first
