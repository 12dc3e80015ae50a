"""Hugging Face transformers: the loss by linear cross entropy, attention by flex attention. See docs/integrations.md.

Importing this module registers ``attn_implementation="fusegrad"`` (fusegrad.integrations.transformers_attention) and
changes nothing. A model that cannot take it is refused in its first forward, and by :func:`apply`. Models and the
Trainer change by :func:`apply` alone.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from fusegrad._arguments import checked

from . import transformers_attention
from .lazy_logits import check_options
from .transformers_context import context_parallel, undo
from .transformers_heads import HeadCall, LazyHead, head_of, lazy_class, why_not
from .transformers_models import refuse_unable
from .transformers_record import RECORD, ModelRecord, applied, record_of
from .transformers_trainer import serve_label_smoothing

__all__ = ["apply", "context_parallel", "remove"]

_Target = TypeVar("_Target")


class _BackboneHook:
    """Runs before a model's backbone, which every forward calls, another library's too."""

    def __init__(self, model: Any, record: ModelRecord) -> None:
        self.model, self.record = weakref.ref(model), record

    def __call__(self, backbone: nn.Module, args: Any) -> None:
        model, record = self.model(), self.record
        if model is None or torch.compiler.is_compiling() or not (torch.is_grad_enabled() and model.training):
            return
        _serve_trl()
        if record.running:
            return
        if record.pending:
            forward = vars(model).get("forward")
            replaced = not hasattr(getattr(forward, "__func__", forward), RECORD)
            where = f"{getattr(forward, '__module__', None)}.{getattr(forward, '__qualname__', forward)}"
            reason = f"its forward was replaced by {where}" if replaced else "its backbone was run without its forward"
            record.not_fused(model, f"{reason}, which did not reach its head", may_raise=replaced)
        record.pending = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = memo.get(id(self.model()))
        return _ignore if model is None else _BackboneHook(model, copy.deepcopy(self.record, memo))

    def __reduce__(self) -> Any:
        return _inert, ()


def _ignore(backbone: nn.Module, args: Any) -> None:
    pass


def _inert() -> Callable[..., None]:
    return _ignore


def _serve_trl() -> None:
    """TRL's trainers multiply by a model's head themselves."""
    if "trl.trainer.utils" in sys.modules:
        from . import trl_heads

        trl_heads.serve()


def _prepare(model: Any, record: ModelRecord) -> Any:
    """The model's head, able to be lazy; None where it cannot be, said loudly."""
    head = head_of(model)
    if isinstance(head, LazyHead):
        return head
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"apply: the head of {type(model).__name__} must be prepared before torch.compile, but it is new: apply to "
            "the model itself, after what replaces its head, or run it once"
        )
    reason = why_not(head)
    if reason is not None:
        record.not_fused(model, _no_head(head, reason))
        return None
    head.__class__ = lazy_class(head.__class__)
    record.heads.add(head)
    return head


def _no_head(head: Any, reason: str) -> str:
    return f"the head ({type(head).__name__}) must be a linear layer with its weight in one piece, but {reason}"


def _run(model: Any, forward: Callable[..., Any], record: ModelRecord, args: Any, kwargs: Any) -> Any:
    # A call without gradients and labels, as in generation, asks for logits alone.
    if not torch.is_grad_enabled() and kwargs.get("labels") is None and not record.without_gradients:
        return forward(*args, **kwargs)
    head = _prepare(model, record)
    if head is None:
        return forward(*args, **kwargs)
    head.call = call = HeadCall(record.for_training(model.training))
    record.running, record.reached = True, False
    try:
        made = forward(*args, **kwargs)
    finally:
        head.call = None
        record.running = record.pending = False
    if not (call.reached or record.reached or torch.compiler.is_compiling()):
        inner = getattr(forward, "func", forward)
        where = f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', inner)}"
        reason = f"its forward, {where}, did not reach its head" if call.reason is None else _no_head(head, call.reason)
        record.not_fused(model, reason, may_raise=model.training)
    return made


def _fused_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class or of a model, for which it is called as a method."""

    @functools.wraps(forward)
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = getattr(self, RECORD)
        own = record.forward if RECORD in vars(self) else None
        inner = own if own is not None else functools.partial(forward, self)
        return _run(self, inner, record, args, kwargs)

    setattr(fused, RECORD, True)
    return fused


@checked
def apply(
    target: _Target,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    inplace: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    workspace_mib: int | None = None,
) -> _Target:
    """Lets a causal language model compute its loss without its logits.

    While the model runs with gradients or with labels, its head returns a
    :class:`~fusegrad.integrations.lazy_logits.LazyLogitsTensor`, and the cross entropy of that is
    :func:`fusegrad.linear_cross_entropy`. So whatever a model, a Trainer or a script does with logits holds: shift,
    ``num_items_in_batch``, ``logits_to_keep``, scales and softcaps. ``outputs.logits`` computes the logits when it is
    used.

    Args:
        target: a ``PreTrainedModel``, a PEFT model of one, or a class of such models: then all of its instances.
        z_loss, label_smoothing: added to every cross entropy of the logits (a call's own smoothing comes first) while
            the model is in training mode; an evaluation's loss has none.
        inplace: permission to overwrite the head's input with its gradient; the logits cannot be read afterwards.
        accumulate_dtype, workspace_mib: as in :func:`fusegrad.linear_cross_entropy`.

    Returns:
        The target, changed.

    Raises:
        TypeError: the target is none of these.
        ValueError: it has no output embeddings, or is changed already; it has ``attn_implementation="fusegrad"`` and
            cannot take it; an option is wrong, or z_loss or label_smoothing cannot count, because the head is no plain
            linear layer.
    """
    model = _unwrapped(target, "apply")
    options: dict[str, Any] = {
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "inplace": inplace,
        "accumulate_dtype": accumulate_dtype,
        "workspace_mib": workspace_mib,
    }
    check_options(options)
    known = record_of(model)
    if known is not None and known.of_trainer:
        known.options, known.of_trainer = options, False
        return target
    if known is not None:
        raise ValueError(
            f"apply: the target must not be changed already, but got such a {_name(model)}: remove it first"
        )
    record = ModelRecord(options, vars(model).get("forward"))
    if isinstance(model, type):
        setattr(model, RECORD, record)
        model.forward = _fused_forward(model.forward)  # type: ignore[attr-defined]
    else:
        if model.get_output_embeddings() is None:
            parts = _parts_with_heads(model)
            raise ValueError(f"apply: the model must have output embeddings, but got a {type(model).__name__}{parts}")
        refuse_unable(model)
        _prepare(model, record)
        setattr(model, RECORD, record)
        applied.add(model)
        # A bound method, which a copy of the model binds to the copy.
        model.forward = types.MethodType(_fused_forward(type(model).forward), model)
        if model.base_model is not model:
            model.base_model.register_forward_pre_hook(_BackboneHook(model, record))
    serve_label_smoothing()
    _serve_trl()
    return target


def _parts_with_heads(model: Any) -> str:
    parts = [(name, m) for name, m in model.named_modules() if name and isinstance(m, PreTrainedModel)]
    able = [f"its {name} ({type(m).__name__})" for name, m in parts if m.get_output_embeddings() is not None]
    return f": apply to {' and '.join(able)}" if able else ""


def remove(target: _Target) -> _Target:
    """Undoes :func:`apply` and :func:`context_parallel` of the same target.

    Returns:
        The target, as it was.

    Raises:
        TypeError, ValueError: the target is no model or class of models, or neither has changed it.
    """
    model = _unwrapped(target, "remove")
    spread = undo(model)
    record = vars(model).get(RECORD)
    if record is None and spread:
        return target
    if record is None:
        raise ValueError(
            f"remove: the target must be changed by apply or context_parallel, but got {_name(model)} as it is"
        )
    heads = set(record.heads)
    if not isinstance(model, type):
        heads |= {m for m in model.modules() if isinstance(m, LazyHead)}
        hooks = model.base_model._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, _BackboneHook) and hook.record is record]:
            del hooks[key]
    for head in heads:
        vars(head).pop("call", None)
        if "bare" in vars(type(head)):  # not where another mixed itself in since: without a call it is inert
            head.__class__ = type(head).bare
    if record.forward is None:
        del model.forward
    else:
        model.forward = record.forward
    delattr(model, RECORD)
    applied.discard(model)
    return target


def _name(model: Any) -> str:
    return model.__name__ if isinstance(model, type) else type(model).__name__


def _unwrapped(target: Any, op: str) -> Any:
    """The model or class that is to be changed."""
    if not isinstance(target, (PreTrainedModel, type)) and hasattr(target, "get_base_model"):
        target = target.get_base_model()
    if isinstance(target, PreTrainedModel) or (isinstance(target, type) and issubclass(target, PreTrainedModel)):
        return target
    raise TypeError(
        f"{op}: the target must be a transformers.PreTrainedModel, a PEFT model of one, or such a class, "
        f"but got {target if isinstance(target, type) else type(target).__name__}"
    )


transformers.AttentionInterface.register("fusegrad", transformers_attention.attention)
transformers.AttentionMaskInterface.register("fusegrad", transformers_attention.block_mask)
