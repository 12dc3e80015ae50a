"""A transformers model whose sequences are spread over processes. See docs/integrations.md."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import and_masks, packed_sequence_mask_function

from fusegrad import ContextParallel
from fusegrad._arguments import checked
from fusegrad._eager import eager_only

from .transformers_spread import OP, Batch, SpreadLoss, check_result, told

__all__ = ["attending", "context_of", "context_parallel", "undo", "whole_mask"]

# The name of what a model and its modules have: a backward that runs a block again finds it.
_RECORD = "_fusegrad_context"


@dataclass
class _Record:
    """What context_parallel did to a model.

    Attributes:
        forward, generate: what stood in its own ``__dict__``, or None.
    """

    context: ContextParallel
    forward: Callable[..., Any] | None
    generate: Callable[..., Any] | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:
        # Bound methods are of the copied model then.
        return _Record(self.context, copy.deepcopy(self.forward, memo), copy.deepcopy(self.generate, memo))

    def __reduce__(self) -> Any:
        return type(None), ()  # a file has the plain model: no process group is in it


@dataclass
class _Running:
    """A forward of a model whose sequence is spread.

    Attributes:
        packed: the numbers of packed sequences of the whole sequence, or None.
        attended: how often attention was called.
    """

    packed: Tensor | None
    attended: int = 0


_running: ContextVar[_Running | None] = ContextVar("_running", default=None)


@checked
def context_parallel(model: nn.Module, context: ContextParallel) -> None:
    """Lets a model take its part of each sequence: it is called with the whole batch in all processes of the context,
    and returns hidden states, logits and loss of this process's positions.

    The loss is the mean over the tokens of all processes where their losses are averaged, as DDP and FSDP average
    gradients; ``context.unshard`` makes a whole of logits. Position ids, packed sequences and 2D attention masks are
    those of the whole sequence. :func:`fusegrad.integrations.transformers.remove` undoes it.

    Args:
        model: with ``attn_implementation="fusegrad"``, which is changed; of attention alone, without recurrence and
            convolutions over the sequence. Its loss is transformers' own, of causal or masked language models or of
            tokens' classes.
        context: with ``sum_captured=False`` where DDP or FSDP sum over the same processes.

    Raises:
        TypeError: the model is no ``PreTrainedModel``, nor a PEFT model of one.
        ValueError: the model's attention is another one, or the model is spread already.
        NotImplementedError: something of the model would see only its part of the sequence.
    """
    target: Any = model
    if not isinstance(target, PreTrainedModel) and hasattr(target, "get_base_model"):
        target = target.get_base_model()
    _check_model(target)
    record = _Record(context, vars(target).get("forward"), vars(target).get("generate"))
    for module in target.modules():
        setattr(module, _RECORD, record)
    target.forward = types.MethodType(_spread_forward(type(target).forward), target)
    if hasattr(target, "generate"):
        target.generate = types.MethodType(_no_generate(type(target).generate), target)


def undo(model: Any) -> bool:
    """Undoes context_parallel of this model; False where there is nothing to undo."""
    record = vars(model).get(_RECORD)
    if record is None:
        return False
    applied = vars(model).get("_fusegrad")
    if _is_ours(vars(model).get("forward")):
        _put_back(model, "forward", record.forward)
    elif applied is not None and _is_ours(applied.forward):  # apply came later
        applied.forward = record.forward
    else:
        raise ValueError(
            f"remove: the forward of {type(model).__name__} must be that of context_parallel or of apply, but another "
            "has replaced it: undo that first"
        )
    if _is_ours(vars(model).get("generate")):
        _put_back(model, "generate", record.generate)
    for module in model.modules():
        if vars(module).get(_RECORD) is record:
            delattr(module, _RECORD)
    return True


def _put_back(model: Any, name: str, before: Callable[..., Any] | None) -> None:
    if before is None:
        delattr(model, name)
    else:
        setattr(model, name, before)


def _is_ours(method: Any) -> bool:
    return hasattr(getattr(method, "__func__", None), _RECORD)


def context_of(module: nn.Module | None) -> ContextParallel | None:
    record = getattr(module, _RECORD, None)
    return None if record is None else record.context


def attending(module: nn.Module | None) -> ContextParallel | None:
    """context_of a module that attends now, which is counted."""
    running = None if torch.compiler.is_compiling() else _running.get()
    if running is not None:
        running.attended += 1
    return context_of(module)


def whole_mask(mask: Callable[..., Any], q_length: int, kv_length: int) -> tuple[Callable[..., Any], int]:
    """A mask's function and its number of queries: those of the whole sequence while a spread forward runs."""
    # A compiler reads no context variable, and a spread forward is not compiled.
    running = None if torch.compiler.is_compiling() else _running.get()
    if running is None:
        return mask, q_length
    if running.packed is not None:
        mask = and_masks(mask, packed_sequence_mask_function(running.packed))
    return mask, kv_length


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{OP}: the model must be a transformers.PreTrainedModel or a PEFT model of one, but got {name}: "
            "DDP and others wrap it afterwards"
        )
    implementation = model.config._attn_implementation
    if implementation != "fusegrad":
        raise ValueError(f'{OP}: the model must have attn_implementation="fusegrad", but got {implementation!r}')
    if vars(model).get(_RECORD) is not None:
        raise ValueError(f"{OP}: the model must not be spread already, but got such a {name}: remove it first")
    reason = None
    if model.config.is_encoder_decoder:
        reason = "an encoder and a decoder, whose lengths are two"
    elif not any("position_ids" in inspect.signature(m.forward).parameters for m in (model, model.base_model)):
        reason = "positions that its forward does not take as position_ids"
    for path, module in model.named_modules():
        # Convolutions of images are of other arguments, which a spread forward refuses.
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            reason = f"{path}, a {type(module).__name__}, which sees its own part of the sequence alone"
    if reason is not None:
        raise NotImplementedError(
            f"{OP}: the model must have attention alone over the sequence, and positions given to it, but got {name} "
            f"with {reason}"
        )


@contextmanager
def _spread(running: _Running) -> Iterator[None]:
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)


def _spread_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def spread(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    setattr(spread, _RECORD, True)
    return spread


def _no_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{OP}: generate must be called on a model whose sequences are not spread, but got {type(self).__name__} "
            "with context_parallel: remove it first"
        )

    setattr(refused, _RECORD, True)
    return refused


@eager_only
def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record: _Record = vars(model)[_RECORD]
    context = record.context
    forward = record.forward or functools.partial(type(model).forward, model)
    batch: Batch | None = None
    error: Exception | None = None
    try:
        batch = Batch(model, forward, context, args, kwargs)
    except Exception as found:  # told to the others before it is raised
        error = found
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    told(model, context, given[0].device if given else model.device, batch)
    if batch is None:
        assert error is not None
        raise error
    running = _Running(batch.packed)
    loss = SpreadLoss(model, batch)
    with _spread(running), loss.in_place():
        made = forward(**batch.arguments())
    check_result(model, made, batch, loss, running.attended)
    return made
