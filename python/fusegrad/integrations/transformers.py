"""Hugging Face transformers: the loss by linear cross entropy, attention by flex attention. See docs/transformers.md.

Importing this module registers ``attn_implementation="fusegrad"`` (fusegrad.integrations.transformers_attention) and
lets the Trainer's label smoothing take lazy logits. Models change by :func:`apply` alone.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from fusegrad._arguments import checked

from . import transformers_attention, transformers_models  # noqa: F401
from .lazy_logits import LazyLogits, LazyLogitsTensor, check_options, lazy_linear
from .transformers_context import context_parallel

__all__ = ["apply", "context_parallel", "remove"]

_Target = TypeVar("_Target")
# Heads that apply has prepared, with the options that they were given.
_heads: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

# The name of the record that apply leaves in a model or a class.
_RECORD = "_fusegrad"


class _Record:
    """What apply did to a model or a class."""

    def __init__(self, options: dict[str, Any], forward: Callable[..., Any] | None) -> None:
        self.options = options
        self.forward = forward  # what stood in its own __dict__
        self.heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        return _Record(self.options, self.forward)

    def __reduce__(self) -> Any:
        return type(None), ()  # the model in a file is the plain one: pickle finds its forward by name, in its class


class _Head:
    """Mixed into the class of a model's head: lazy while the model's forward runs."""

    _fusegrad_options: dict[str, Any] | None = None
    _fusegrad_bare: Any

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._fusegrad_options is not None and not args and not kwargs:
            operands = _operands(self, input)
            if not isinstance(operands, str):
                return lazy_linear(*operands, **self._fusegrad_options)
            _step_aside(self, operands)
        return super().forward(input, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The mixed class has no name that a file could hold: a copy is a plain head, until its model runs.
        return _plain, (self._fusegrad_bare,), super().__reduce_ex__(protocol)[2]


def _plain(bare: Any) -> Any:
    return bare.__new__(bare)


@functools.cache
def _lazy_class(bare: Any) -> Any:
    return type(
        bare.__name__,
        (_Head, bare),
        {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "_fusegrad_bare": bare},
    )


def _step_aside(head: Any, reason: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"fusegrad: linear_cross_entropy steps aside, all logits are computed: the head ({type(head).__name__}) "
            f"must be a linear layer with its weight in one piece, but {reason}",
            UserWarning,
            stacklevel=2,
        )


def _is_lora(head: Any) -> bool:
    return any(c.__name__ == "Linear" and c.__module__ == "peft.tuners.lora.layer" for c in type(head).__mro__)


def _why_not(linear: Any) -> str | None:
    """Why a module is not a plain linear layer, if it is not."""
    if "forward" in vars(linear):
        return "its forward was replaced"
    if type(linear).forward is not nn.Linear.forward and not isinstance(linear, _Head):
        return "its class computes something of its own"
    if type(linear.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(linear.weight).__name__}"
    if hasattr(linear.weight, "ds_id"):
        return "DeepSpeed has partitioned its weight"
    if any(c.__name__ == "FSDPModule" for c in type(linear).__mro__):
        return "it is sharded on its own: leave it in the root's group"
    return None


def _operands(head: Any, input: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | str:
    """Input, weight and bias whose linear layer the head is, or why there are none."""
    if not _is_lora(head):
        return _why_not(head) or (input, head.weight, head.bias)
    base = head.get_base_layer()
    reason = _why_not(base)
    if reason is not None:
        return f"of its base layer {reason}"
    if head.disable_adapters or head.merged:
        return "its adapters are disabled or merged" if head.disable_adapters else (input, base.weight, base.bias)
    inputs, weights, bias = [input], [base.weight], base.bias
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        if name in head.lora_variant:
            return f"adapter {name!r} is a variant of LoRA ({type(head.lora_variant[name]).__name__})"
        down, up = head.lora_A[name], head.lora_B[name]
        # z = x W' + s (dropout(x) A') B' + b = [x, s dropout(x) A'] [W, B]' + b, exactly, dropout and all.
        narrow = down(head.lora_dropout[name](input.to(down.weight.dtype))) * head.scaling[name]
        inputs.append(narrow.to(input.dtype))
        weights.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            extra = up.bias * head.scaling[name]
            bias = extra if bias is None else bias + extra
    return torch.cat(inputs, -1), torch.cat(weights, 1), bias


def _head_of(model: Any) -> Any:
    """The module that makes the logits, of PEFT's ``modules_to_save`` the active one."""
    head = model.get_output_embeddings()
    if head is not None and hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        active = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[active[0]] if active else head.original_module
    return head


def _prepare(model: Any, heads: weakref.WeakSet[nn.Module]) -> Any:
    """The model's head, able to be lazy; None where it cannot be, said loudly."""
    head = _head_of(model)
    if isinstance(head, _Head):
        return head
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"apply: the head of {type(model).__name__} must be prepared before torch.compile, but it is new: apply to "
            "the model itself, after what replaces its head, or run it once"
        )
    lora = _is_lora(head)
    reason = _why_not(head) if isinstance(head, nn.Linear) else None if lora else "it is none"
    if reason is not None:
        _step_aside(head, reason)
        return None
    head.__class__ = _lazy_class(head.__class__)
    heads.add(head)
    return head


def _run(model: Any, forward: Callable[..., Any], record: _Record, args: Any, kwargs: Any) -> Any:
    # A call without gradients and labels, as in generation, asks for logits alone.
    if not torch.is_grad_enabled() and kwargs.get("labels") is None:
        return forward(*args, **kwargs)
    head = _prepare(model, record.heads)
    if head is None:
        return forward(*args, **kwargs)
    head._fusegrad_options = record.options
    try:
        return forward(*args, **kwargs)
    finally:
        head._fusegrad_options = None


def _fused_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class or of a model, for which it is called as a method."""

    @functools.wraps(forward)
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = getattr(self, _RECORD)
        own = record.forward if _RECORD in vars(self) else None
        inner = own if own is not None else functools.partial(forward, self)
        return _run(self, inner, record, args, kwargs)

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
        z_loss, label_smoothing: added to every cross entropy of the logits (a call's own smoothing comes first).
        inplace: permission to overwrite the head's input with its gradient; the logits cannot be read afterwards.
        accumulate_dtype, workspace_mib: as in :func:`fusegrad.linear_cross_entropy`.

    Returns:
        The target, changed.

    Raises:
        TypeError: the target is none of these.
        ValueError: it has no output embeddings, or is changed already; an option is wrong.
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
    if getattr(model, _RECORD, None) is not None:
        raise ValueError(
            f"apply: the target must not be changed already, but got such a {_name(model)}: remove it first"
        )
    if isinstance(model, type):
        setattr(model, _RECORD, _Record(options, vars(model).get("forward")))
        model.forward = _fused_forward(model.forward)  # type: ignore[attr-defined]
        return target
    if model.get_output_embeddings() is None:
        raise ValueError(f"apply: the model must have output embeddings, but got a {type(model).__name__}")
    record = _Record(options, vars(model).get("forward"))
    setattr(model, _RECORD, record)
    head = _prepare(model, record.heads)
    if head is not None:
        _heads[head] = options
    if "trl.trainer.utils" in sys.modules:
        from . import trl  # noqa: F401
    # A bound method, which a copy of the model binds to the copy.
    model.forward = types.MethodType(_fused_forward(type(model).forward), model)
    return target


def remove(target: _Target) -> _Target:
    """Undoes :func:`apply` of the same target.

    Returns:
        The target, as it was.

    Raises:
        TypeError, ValueError: the target is no model or class of models, or apply has not changed it.
    """
    model = _unwrapped(target, "remove")
    record = vars(model).get(_RECORD)
    if record is None:
        raise ValueError(f"remove: the target must be changed by apply, but got {_name(model)} as it is")
    heads = set(record.heads)
    if not isinstance(model, type):
        heads |= {m for m in model.modules() if isinstance(m, _Head)}
    for head in heads:
        _heads.pop(head, None)
        if "_fusegrad_bare" in vars(type(head)):  # not where another mixed itself in since: without options it is inert
            head.__class__ = type(head)._fusegrad_bare
    if record.forward is None:
        del model.forward
    else:
        model.forward = record.forward
    delattr(model, _RECORD)
    return target


def options_of_head(weight: Tensor) -> dict[str, Any] | None:
    """What apply was given for the model whose head has this weight; None where it has changed no such model."""
    found = (options for head, options in list(_heads.items()) if getattr(head, "weight", None) is weight)
    return next(found, None)


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


_smooth = LabelSmoother.__call__


@functools.wraps(_smooth)
def _smooth_lazily(
    self: LabelSmoother, model_output: Any, labels: Tensor, shift_labels: bool = False, **kwargs: Any
) -> Tensor:
    logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
    if not isinstance(logits, (LazyLogits, LazyLogitsTensor)):
        return _smooth(self, model_output, labels, shift_labels, **kwargs)
    if shift_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    items = kwargs.get("num_items_in_batch")
    loss = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=self.ignore_index,
        reduction="mean" if items is None else "sum",
        label_smoothing=self.epsilon,
    )
    return loss if items is None else loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


LabelSmoother.__call__ = _smooth_lazily
transformers.AttentionInterface.register("fusegrad", transformers_attention.attention)
transformers.AttentionMaskInterface.register("fusegrad", transformers_attention.block_mask)
