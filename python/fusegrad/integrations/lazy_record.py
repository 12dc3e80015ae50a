"""What is known of logits that are not computed: the head's operands, and what was done to the logits since.

Letters: N rows (tokens), V vocabulary, H hidden size.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._words import name_of, warn
from .lazy_graph import Through

__all__ = ["Record"]


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns NotImplemented where the logits must be computed for it."""

    @functools.wraps(method)
    def recorded_or_computed(self: Record, *args: Any, **kwargs: Any) -> Any:
        made = NotImplemented if self.decided() else method(self, *args, **kwargs)
        if made is NotImplemented:
            function = getattr(Tensor, method.__name__)
            value = self.needed_by(function)
            made = function(value, *args, **kwargs)
            made = self if made is value else made
        return made

    return recorded_or_computed


class Record:
    """``cap * tanh(scale * (input @ weight.T + bias))``, without a cap ``scale * (...)``, to be computed.

    Attributes:
        input: ``[..., H]``, one row for each row of logits.
        weight, bias: of the head, ``[V, H]`` and ``[V]`` or None.
        options: keyword arguments for :func:`fusegrad.linear_cross_entropy`.
        shape, dtype, device: the logits'.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: dict[str, Any],
        dtype: torch.dtype,
        scale: float = 1.0,
        cap: float | None = None,
        like: Record | None = None,
    ) -> None:
        self.input, self.weight, self.bias, self.options = input, weight, bias, options
        self.dtype, self.scale, self.cap = dtype, scale, cap
        # How and with what the head was called, which a later computation must see again.
        self.product_dtype: torch.dtype = dtype if like is None else like.product_dtype
        self.grad: bool = torch.is_grad_enabled() and (like is None or like.grad)
        self.guarded: list[tuple[str, Tensor, int]] = _guarded(input, weight, bias) if like is None else like.guarded
        # What these logits are made of, how, and whether they share its memory.
        self.parent: Record | None = like
        self.made: Callable[[Tensor], Tensor] | None = None
        self.is_view = False
        # A tensor without memory, with the strides that they would have.
        self.layout: Tensor | None = None if like is not None else _layout(self.shape)
        self.value: Tensor | None = None
        self.value_version = 0
        # The value is the only truth: hooks of these logits must see what becomes of them.
        self.watched = False
        # A loss has been computed without the gradient by these logits.
        self.in_loss = False
        # Another Function has put out the tensor that stands for these logits. A link to its node, or to one with
        # hooks, where gradients must pass that.
        self.foreign = False
        self.link: Tensor | None = None
        self.warned = False

    # --- what a tensor says of itself ---------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.input.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.input.device

    @property
    def ndim(self) -> int:
        return self.input.dim()

    def dim(self) -> int:
        return self.input.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, not computed)"

    # --- what is recorded -----------------------------------------------------------------------------------------

    def _changed(self, made: Callable[[Tensor], Tensor], input: Tensor | None = None, **changes: Any) -> Any:
        fields = {"bias": self.bias, "dtype": self.dtype, "scale": self.scale, "cap": self.cap, **changes}
        changed = type(self)(
            self.input if input is None else input, self.weight, options=self.options, like=self, **fields
        )
        changed.made = made
        changed.layout = _layout(changed.shape)
        return changed

    def _view(self, made: Callable[[Tensor], Tensor], input: Tensor | None = None) -> Any:
        """What shares the logits' memory, unless its strides need a copy."""
        view = self._changed(made, input)
        view.is_view = True
        if self.layout is not None:
            view.layout = made(self.layout)
            view.is_view = view.layout.untyped_storage()._cdata == self.layout.untyped_storage()._cdata
        return view

    @_recorded
    def mul(self, other: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, Real):
            return NotImplemented
        other = builtins.float(other)
        changes = {"scale": self.scale * other} if self.cap is None else {"cap": self.cap * other}
        return self._changed(lambda z: z * other, **changes)

    @_recorded
    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        if isinstance(other, bool) or not isinstance(other, Real) or other == 0 or rounding_mode is not None:
            return NotImplemented
        other = builtins.float(other)
        changes = {"scale": self.scale / other} if self.cap is None else {"cap": self.cap / other}
        return self._changed(lambda z: z / other, **changes)

    @_recorded
    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        """A bias of the vocabulary, as BART's ``final_logits_bias``: the head's, of which it is a part from here on."""
        row = isinstance(other, Tensor) and 1 <= other.dim() <= self.ndim and other.numel() == self.weight.shape[0]
        if not row or other.shape[-1] != other.numel() or not other.is_floating_point() or other.device != self.device:
            return NotImplemented
        if alpha != 1 or self.scale != 1.0 or self.cap is not None:
            return NotImplemented
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            added = other.reshape(-1).clone()
            bias = added if self.bias is None else self.bias + added
        return self._changed(lambda z: z + added, bias=bias, dtype=torch.promote_types(self.dtype, other.dtype))

    @_recorded
    def tanh(self) -> Any:
        return self._changed(torch.tanh, cap=1.0) if self.cap is None else NotImplemented

    @_recorded
    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        device = kwargs.get("device", next((a for a in args if isinstance(a, (str, torch.device))), None))
        others = [a for a in args if not isinstance(a, (torch.dtype, str, torch.device, bool))]
        if others or (device is not None and torch.empty(0, device=device).device != self.device):
            return NotImplemented
        if not (dtype or self.dtype).is_floating_point:
            return NotImplemented
        copy = kwargs.get("copy", [a for a in args if isinstance(a, bool)][1:] == [True])
        if dtype in (None, self.dtype):
            return self._changed(Tensor.clone) if copy else self
        return self._changed(lambda z: z.to(dtype), dtype=dtype)

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    @_recorded
    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Any:
        if memory_format != torch.contiguous_format:
            return NotImplemented
        return self if self.layout is None or self.layout.is_contiguous() else self._changed(Tensor.contiguous)

    @_recorded
    def clone(self, *, memory_format: Any = torch.preserve_format) -> Any:
        whole = memory_format in (torch.preserve_format, torch.contiguous_format)
        return self._changed(Tensor.clone) if whole else NotImplemented

    @_recorded
    def detach(self) -> Any:
        made = self._view(Tensor.detach)
        made.grad = False
        return made

    @_recorded
    def view_as(self, other: Any) -> Any:
        return self.reshape(tuple(other.shape))

    @_recorded
    def reshape(self, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        if not shape or any(not isinstance(n, (int, torch.SymInt)) for n in shape):
            return NotImplemented
        rows, vocab = shape[:-1], self.weight.shape[0]
        if shape[-1] == -1 and -1 not in rows:
            if math.prod(rows) != math.prod(self.shape[:-1]):
                return NotImplemented
        elif shape[-1] != vocab:
            return NotImplemented
        return self._view(lambda z: z.reshape(*rows, vocab), self.input.reshape(*rows, self.input.shape[-1]))

    @_recorded
    def view(self, *shape: Any) -> Any:
        return self.reshape(*shape)

    @_recorded
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.ndim < 2 or end_dim % self.ndim == self.ndim - 1:
            return NotImplemented
        return self._view(lambda z: z.flatten(start_dim, end_dim), self.input.flatten(start_dim, end_dim))

    @_recorded
    def __getitem__(self, index: Any) -> Any:
        rows = _rows_of(index if isinstance(index, tuple) else (index,), self.ndim)
        if rows is None:
            return NotImplemented
        if not any(isinstance(i, Tensor) for i in rows):
            return self._view(lambda z: z[rows], self.input[rows])
        kept = tuple(i.clone() if isinstance(i, Tensor) else i for i in rows)
        return self._changed(lambda z: z[kept], self.input[kept])

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __truediv__ = div

    # --- what is computed -----------------------------------------------------------------------------------------

    def _line(self) -> Iterator[tuple[Record, bool]]:
        """These logits and what they are made of, each with whether they share its memory."""
        record: Record | None = self
        shared = True
        while record is not None:
            yield record, shared
            shared = shared and record.is_view
            record = record.parent

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head and its input as they were when the head was called, or an error."""
        for name, tensor, version in self.guarded:
            if tensor._version != version:
                raise RuntimeError(
                    f"LazyLogits: the head's {name} must be what it was when the model ran, but it has been modified "
                    f"by an inplace operation (version {tensor._version} instead of {version}): read the logits before "
                    "(a step of the optimizer is such an operation, a loss with inplace=True another)"
                )
            if tensor.numel() > 0 and tensor.untyped_storage().size() == 0:
                raise RuntimeError(
                    f"LazyLogits: the head's {name} must still be in memory, but got an empty storage: where "
                    "parameters are sharded, the head must belong to the root's group"
                )
        if self.grad:
            return self.input, self.weight, self.bias
        return self.input.detach(), self.weight.detach(), None if self.bias is None else self.bias.detach()

    def written(self) -> bool:
        """Whether somebody has written into the computed logits since."""
        return self.value is not None and self.value_version != _version(self.value)

    def decided(self) -> bool:
        """Whether the computed logits are the only truth: somebody wrote into them, or a hook must see what they do."""
        return any(r.watched or (shared and r.written()) for r, shared in self._line())

    def watch(self, change: str, *, needs_gradient: bool = True) -> None:
        """From here on the computed logits are the only truth, because something was attached to them."""
        if needs_gradient and self.in_loss:
            raise RuntimeError(
                f"LazyLogits: {change} must come before a loss of the logits is computed, but one has been, without "
                "them, so that its backward has no gradient by them: compute the loss of their materialize(), or with "
                "a model that apply has not changed"
            )
        self.refuse_lost(f"{change} must see them")
        self.watched = True

    def refuse_lost(self, reason: str) -> None:
        """Raises where an option would not count in a loss, because the logits are computed for it."""
        for name in self.lost():
            raise ValueError(
                f"LazyLogits: {name} must be 0 where a loss is computed of all logits, but got {self.options[name]}: "
                f"{reason}"
            )

    def needed_by(self, func: Any) -> Tensor:
        """The logits, for a function that cannot do without, which in training costs what laziness was to save."""
        value = self.materialize()
        if torch.is_grad_enabled() and value.requires_grad:
            self.warn_of(name_of(func))
        return value

    def warn_of(self, reason: str) -> None:
        """Says once who made the logits needed."""
        if not self.warned:
            for record, _ in self._line():
                record.warned = True
            lost = " and ".join(self.lost())
            warn(
                f"{reason} needs all logits, {list(self.shape)}: they were computed. "
                "torch.nn.functional.cross_entropy of rows of them does not need them."
                + (f" What is computed of them has no {lost}." if lost else "")
            )

    def lost(self) -> list[str]:
        """The options that count in a cross entropy without logits alone."""
        return [name for name in ("z_loss", "label_smoothing") if self.options.get(name)]

    def materialize(self) -> Tensor:
        """The logits ``[..., V]``, computed once, connected to the graph as those of ``torch.nn.functional.linear``.

        Raises:
            RuntimeError: the head or its input has changed since, or is no longer in memory.
        """
        if self.value is not None:
            return self.value
        with torch.set_grad_enabled(self.grad):
            value = self._value()
        if self.link is not None:
            with torch.enable_grad():
                value = Through.apply(self.link, value)
        self.value = value
        self.value_version = _version(self.value)
        return self.value

    def _value(self) -> Tensor:
        parent, made = self.parent, self.made
        linked = any(r.watched or r.link is not None for r, _ in self._line() if r is not self)
        if parent is None or made is None or not (self.is_view or linked):
            return self._compute(*self._operands())
        whole = parent.materialize()
        if not self.is_view and parent.written():
            raise RuntimeError(
                "LazyLogits: the logits must be what they were when they were copied, but they have been modified by "
                "an inplace operation since: read the copy before"
            )
        return made(whole)

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = self.product_dtype
        with torch.autocast(input.device.type, enabled=False):
            value = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            if self.scale != 1.0:
                value = value * self.scale
            if self.cap is not None:
                value = torch.tanh(value) * self.cap
            return value.to(self.dtype)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _untracked() -> bool:
    """Whether compilers or transforms run, in which nothing is written to tensors, and storages cannot be asked for."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _layout(shape: torch.Size) -> Tensor | None:
    return None if _untracked() else torch.empty(shape, device="meta")


def _rows_of(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...] | None:
    """The part of an index into ``ndim`` dimensions that is of rows, where it leaves the last dimension whole."""
    if any(isinstance(i, bool) or not (i is Ellipsis or isinstance(i, (int, slice, Tensor))) for i in index):
        return None
    if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) and i.dim() == 0 for i in index):
        return None
    taken = sum(
        i.dim() if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else i is not Ellipsis for i in index
    )
    place = next((n for n, i in enumerate(index) if i is Ellipsis), len(index))
    whole = (*index[:place], *[slice(None)] * (ndim - taken), *index[place + 1 :])
    if taken > ndim or any(i is Ellipsis for i in whole):
        return None
    last = whole[-1]
    return whole[:-1] if isinstance(last, slice) and last == slice(None) else None


def _guarded(*tensors: Tensor | None) -> list[tuple[str, Tensor, int]]:
    """Tensors with their versions."""
    if _untracked():
        return []
    names = zip(("input", "weight", "bias"), tensors, strict=True)
    return [(name, t, t._version) for name, t in names if t is not None and not t.is_inference()]
