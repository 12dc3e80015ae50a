"""The batch, the loss and the result of a transformers model whose sequences are spread over processes: what each call
must be, and each process's part of it.

Letters: B batch, S the whole sequence, P processes.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForMaskedLMLoss, ForTokenClassification
from transformers.masking_utils import find_packed_sequence_indices

from fusegrad import ContextParallel
from fusegrad.distributed.shards import agree

__all__ = ["OP", "Batch", "SpreadLoss", "check_result", "told"]

OP = "context_parallel"
_SEQUENCES = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
_COMPARED = (*_SEQUENCES, "num_items_in_batch")
# What says only what is returned.
_PASSED = ("output_attentions", "output_hidden_states", "return_dict")


class Batch:
    """The arguments of one call, of whole sequences."""

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        context: ContextParallel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        signature = inspect.signature(forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        given = {name: value for name, value in given.items() if value is not None}
        self.context = context
        self.known = {name: given.pop(name) for name in _COMPARED if name in given}
        self.others = given
        _check_others(model, given)
        self._check_sequences()
        if "position_ids" not in self.known and _counts_positions(type(model).__module__):
            raise ValueError(
                f"{OP}: position_ids must be given, since {type(model).__name__} counts its own from the tokens or the "
                "attention_mask, but got None"
            )
        self.packed: Tensor | None = None
        if "position_ids" in self.known and "attention_mask" not in self.known:
            # As transformers finds them: where there is no mask.
            self.packed = find_packed_sequence_indices(self.known["position_ids"].expand(self.batch, -1))
        self.own = len(context.positions(self.length))
        if "labels" in self.known:
            SpreadLoss(model, self)  # raises where there is none
        # A cache is each process's own. Where a forward takes no such argument, it has none.
        bases = forward, model.base_model.forward
        if any("use_cache" in inspect.signature(f).parameters for f in bases):
            self.others["use_cache"] = False

    def _check_sequences(self) -> None:
        known = self.known
        first = known.get("input_ids", known.get("inputs_embeds"))
        if first is None:
            raise ValueError(f"{OP}: the model must be called with input_ids or inputs_embeds, but got neither")
        self.batch, self.length = first.shape[:2]
        for name in _SEQUENCES:
            value = known.get(name)
            if value is None:
                continue
            rows = (1, self.batch) if name == "position_ids" else (self.batch,)
            dims = 3 if name == "inputs_embeds" else 2
            shape = list(value.shape)
            if len(shape) != dims or shape[0] not in rows or shape[1] != self.length:
                raise ValueError(
                    f"{OP}: {name} must be of the whole sequence, [{self.batch}, {self.length}"
                    f"{', H' if dims == 3 else ''}], but got shape {shape}"
                )
        if "shift_labels" in known and "labels" not in known:
            raise ValueError(f"{OP}: shift_labels must come with labels, but got no labels")

    def arguments(self) -> dict[str, Any]:
        """What the model is called with in this process."""
        shard, known = self.context.shard, self.known
        made = {name: shard(known[name]) for name in ("input_ids", "inputs_embeds", "labels") if name in known}
        device = next(iter(made.values())).device
        if "position_ids" in known:
            made["position_ids"] = shard(known["position_ids"])
        else:
            made["position_ids"] = self.context.positions(self.length, device)[None]
        # For the whole sequence: by it transformers knows how many keys there are.
        made["attention_mask"] = known.get("attention_mask")
        if made["attention_mask"] is None:
            made["attention_mask"] = torch.ones(self.batch, self.length, dtype=torch.bool, device=device)
        return {**made, **self.others}


@functools.cache
def _counts_positions(module: str) -> bool:
    """Whether a model's positions are not 0, 1, 2 and so on where it is given none."""
    counting = r"create_position_ids_from|cumsum\(\s*\w*attention_mask|attention_mask(\.\w+\(\))*\.cumsum"
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # a model that was written at a prompt
        return False
    return re.search(counting, source) is not None


def _check_others(model: Any, given: dict[str, Any]) -> None:
    for name, value in given.items():
        without_effect = isinstance(value, (bool, int)) and not value
        if name not in _PASSED and not without_effect:
            what = value if isinstance(value, (bool, int, str)) else f"a {type(value).__name__}"
            raise NotImplementedError(f"{OP}: {name} must be None, since sequences are spread, but got {what}")
    config = model.config.get_text_config()
    if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise NotImplementedError(
            f"{OP}: output_router_logits must be False, in the config too, since the balance of experts is that of all "
            "tokens, but got True"
        )


def told(model: Any, context: ContextParallel, device: torch.device, batch: Batch | None) -> None:
    """Raises in all processes where one was given something else than another. On a GPU the host waits for it."""
    if context.world == 1:
        return
    given: dict[str, Any] = {"the other arguments": None, "the options of apply": None}
    tensors: dict[str, Tensor | None] = dict.fromkeys(_COMPARED)
    if batch is not None:
        tensors |= {name: torch.as_tensor(value) for name, value in batch.known.items()}
        given["the other arguments"] = sorted(batch.others.items())
        given["the options of apply"] = getattr(getattr(model, "_fusegrad", None), "options", None)
    agree(OP, "of context_parallel", context.group, device, given, batch is None, tensors)


class SpreadLoss:
    """The model's loss function, of this process's tokens, divided by the mean number of tokens of a process."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.value: Tensor | None = None
        self.given: dict[str, Any] = {}
        if "labels" not in batch.known:
            return
        function = self.function = model.loss_function
        parameters = inspect.signature(function).parameters
        shifts = "shift_labels" in parameters
        if not (shifts and "num_items_in_batch" in parameters) and function not in _UNSHIFTED:
            raise NotImplementedError(
                f"{OP}: {type(model).__name__}'s loss_function must take num_items_in_batch and shift_labels, or be "
                f"transformers' own of masked language models or tokens' classes, but got {function.__name__}"
            )
        labels = batch.known["labels"]
        if shifts:
            labels = batch.known.get("shift_labels")
            if labels is None:
                labels = pad(batch.known["labels"][:, 1:], (0, 1), value=-100)
            self.given["shift_labels"] = batch.context.shard(labels).contiguous()
        elif "shift_labels" in batch.known:
            raise ValueError(f"{OP}: shift_labels must be None for {type(model).__name__}, but got a tensor")
        tokens = batch.known.get("num_items_in_batch")
        self.given["num_items_in_batch"] = ((labels != -100).sum() if tokens is None else tokens) / batch.context.world

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self.function).bind(*args, **kwargs).arguments
        logits, rows = bound["logits"], self.batch.batch * self.batch.own
        if logits.shape[:-1].numel() != rows or bound["labels"].numel() != rows:
            raise NotImplementedError(
                f"{OP}: {type(self.model).__name__} must give its loss_function all rows, {rows}, but got logits of "
                f"{list(logits.shape)} and labels of {list(bound['labels'].shape)}"
            )
        self.value = self.function(*args, **{**kwargs, **self.given})
        return self.value

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the model's forward runs, it finds this in the place of its own."""
        attributes = vars(self.model)
        before = attributes.get("_loss_function")
        if self.given:
            attributes["_loss_function"] = self
        try:
            yield
        finally:
            if before is not None:
                attributes["_loss_function"] = before
            else:
                attributes.pop("_loss_function", None)


_UNSHIFTED = (ForMaskedLMLoss, ForTokenClassification)


def check_result(model: Any, made: Any, batch: Batch, loss: SpreadLoss, attended: int) -> None:
    """What is not of this process's positions would be a value of a part that looks like one of the whole."""
    name = type(model).__name__
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    if attended < layers:
        raise NotImplementedError(
            f"{OP}: each of {name}'s {layers} layers must have attention by fusegrad, but got {attended} calls of it: "
            "other layers see their own part of the sequence alone"
        )
    if loss.given and loss.value is None:
        raise NotImplementedError(f"{OP}: {name} must compute its loss by its loss_function, but got a loss of its own")
    fields = made.items() if isinstance(made, dict) else enumerate(made) if isinstance(made, tuple) else [(0, made)]
    for field, value in fields:
        for tensor in tree_leaves(value):
            if tensor is loss.value or not hasattr(tensor, "shape"):
                continue
            shape = list(tensor.shape)
            if len(shape) < 3 or shape[:2] != [batch.batch, batch.own]:
                raise NotImplementedError(
                    f"{OP}: all that {name} returns must be of this process's positions, [{batch.batch}, {batch.own}, "
                    f"...], or the value of its loss_function, but got {field!r} of shape {shape}"
                )
