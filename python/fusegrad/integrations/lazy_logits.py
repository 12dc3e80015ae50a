"""Logits that are not computed until something needs them: cross entropy does not.

:func:`lazy_linear` stands for ``torch.nn.functional.linear`` at the end of a language model. What models do between the
head and the loss (casts, views of rows, a bias, a scale, a softcap) is recorded, and the cross entropy of PyTorch of it
is :func:`fusegrad.linear_cross_entropy`. All else gets the logits themselves, computed once, with their gradients.
Letters: N rows (tokens), V vocabulary, H hidden size.
"""

from __future__ import annotations

import builtins
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fusegrad

__all__ = ["LazyLogits", "LazyLogitsTensor", "check_options", "lazy_linear", "materialize"]


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns NotImplemented where the logits must be computed for it."""

    @functools.wraps(method)
    def recorded_or_computed(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        made = NotImplemented if self._written() else method(self, *args, **kwargs)
        if made is NotImplemented:
            function = getattr(Tensor, method.__name__)
            made = function(self._needed_by(function), *args, **kwargs)
        return made

    return recorded_or_computed


class LazyLogits:
    """``cap * tanh(scale * (input @ weight.T + bias))``, without a cap ``scale * (...)``, to be computed.

    Not a tensor: what :func:`lazy_linear` returns within ``torch.compile``; elsewhere it is behind a
    :class:`LazyLogitsTensor`. Has a tensor's methods; those that it does not record compute the logits.

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
        like: LazyLogits | None = None,
    ) -> None:
        self.input, self.weight, self.bias, self.options = input, weight, bias, options
        self.dtype, self.scale, self.cap = dtype, scale, cap
        # How and with what the head was called, which a later computation must see again.
        self.product_dtype: torch.dtype = dtype if like is None else like.product_dtype
        self.grad: bool = torch.is_grad_enabled() if like is None else like.grad
        self.guarded: list[tuple[str, Tensor, int]] = _guarded(input, weight, bias) if like is None else like.guarded
        # A view of other logits: theirs, and how it is taken of them.
        self.base: LazyLogits | None = None
        self.view_of_base: Callable[[Tensor], Tensor] | None = None
        self.value: Tensor | None = None
        self.value_version = 0

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

    def _changed(self, input: Tensor | None = None, **changes: Any) -> LazyLogits:
        fields = {"bias": self.bias, "dtype": self.dtype, "scale": self.scale, "cap": self.cap, **changes}
        return LazyLogits(
            self.input if input is None else input, self.weight, options=self.options, like=self, **fields
        )

    def _view(self, input: Tensor, view: Callable[[Tensor], Tensor]) -> LazyLogits:
        made = self._changed(input)
        made.base, made.view_of_base = self, view
        return made

    @_recorded
    def mul(self, other: Any) -> Any:
        if isinstance(other, bool) or not isinstance(other, (int, float)):
            return NotImplemented
        return self._changed(scale=self.scale * other) if self.cap is None else self._changed(cap=self.cap * other)

    @_recorded
    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        if isinstance(other, bool) or not isinstance(other, (int, float)) or other == 0 or rounding_mode is not None:
            return NotImplemented
        return self._changed(scale=self.scale / other) if self.cap is None else self._changed(cap=self.cap / other)

    @_recorded
    def add(self, other: Any, *, alpha: Any = 1) -> Any:
        """A bias of the vocabulary, as BART's ``final_logits_bias``: the head's, of which it is a part from here on."""
        row = isinstance(other, Tensor) and 1 <= other.dim() <= self.ndim and other.numel() == self.weight.shape[0]
        if not row or other.shape[-1] != other.numel() or not other.is_floating_point() or other.device != self.device:
            return NotImplemented
        if alpha != 1 or self.scale != 1.0 or self.cap is not None:
            return NotImplemented
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            added = other.reshape(-1).clone() if self.bias is None else self.bias + other.reshape(-1)
        return self._changed(bias=added, dtype=torch.promote_types(self.dtype, other.dtype))

    @_recorded
    def tanh(self) -> Any:
        return self._changed(cap=1.0) if self.cap is None else NotImplemented

    @_recorded
    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        device = kwargs.get("device", next((a for a in args if isinstance(a, (str, torch.device))), None))
        others = [a for a in args if not isinstance(a, (torch.dtype, str, torch.device, bool))]
        if others or (device is not None and torch.empty(0, device=device).device != self.device):
            return NotImplemented
        if not (dtype or self.dtype).is_floating_point:
            return NotImplemented
        return self if dtype in (None, self.dtype) else self._changed(dtype=dtype)

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
        return self if memory_format == torch.contiguous_format else NotImplemented

    @_recorded
    def detach(self) -> LazyLogits:
        made = self._view(self.input.detach(), Tensor.detach)
        made.grad = False
        return made

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
        return self._view(self.input.reshape(*rows, self.input.shape[-1]), lambda z: z.reshape(*rows, vocab))

    @_recorded
    def view(self, *shape: Any) -> Any:
        return self.reshape(*shape)

    @_recorded
    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self.ndim < 2 or end_dim % self.ndim == self.ndim - 1:
            return NotImplemented
        return self._view(self.input.flatten(start_dim, end_dim), lambda z: z.flatten(start_dim, end_dim))

    @_recorded
    def __getitem__(self, index: Any) -> Any:
        rows = _rows_of(index if isinstance(index, tuple) else (index,), self.ndim)
        if rows is None:
            return NotImplemented
        if any(isinstance(i, Tensor) for i in rows):  # a copy
            return self._changed(self.input[rows])
        return self._view(self.input[rows], lambda z: z[rows])

    __mul__ = __rmul__ = mul
    __add__ = __radd__ = add
    __truediv__ = div

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._needed_by(getattr(Tensor, name)), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    # --- what is computed -----------------------------------------------------------------------------------------

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

    def _written(self) -> bool:
        """Whether somebody wrote into the computed logits, which are then the only truth."""
        root = self
        while root.base is not None:
            root = root.base
        return root.value is not None and root.value._version != root.value_version

    def _needed_by(self, func: Any) -> Tensor:
        """The logits, for a function that cannot do without, which in training costs what laziness was to save."""
        value = self.materialize()
        if torch.is_grad_enabled() and value.requires_grad:
            self._warn(getattr(func, "__name__", str(func)))
        return value

    def _warn(self, reason: str) -> None:
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"fusegrad: {reason} needs all logits, {list(self.shape)}: they were computed. "
                "torch.nn.functional.cross_entropy of rows of them does not need them.",
                UserWarning,
                stacklevel=5,
            )

    def materialize(self) -> Tensor:
        """The logits ``[..., V]``, computed once, connected to the graph as those of ``torch.nn.functional.linear``.

        Raises:
            RuntimeError: the head or its input has changed since, or is no longer in memory.
        """
        if self.value is not None:
            return self.value
        if self.base is not None and self.view_of_base is not None:
            with torch.set_grad_enabled(self.grad):
                self.value = self.view_of_base(self.base.materialize())
                return self.value
        with torch.set_grad_enabled(self.grad):
            self.value = self._compute(*self._operands())
        self.value_version = 0 if self.value.is_inference() else self.value._version
        return self.value

    def _compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = self.product_dtype
        with torch.autocast(input.device.type, enabled=False):
            value = F.linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            if self.scale != 1.0:
                value = value * self.scale
            if self.cap is not None:
                value = torch.tanh(value) * self.cap
            return value.to(self.dtype)

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor:
        """:func:`fusegrad.linear_cross_entropy` with what was recorded; arguments as
        ``torch.nn.functional.cross_entropy``'s, for logits ``[..., V]``. The loss is not rounded to 16 bits."""
        input, head, bias = self._operands()
        options = dict(self.options)
        smoothing = options.pop("label_smoothing", 0.0)
        # The head's products ran in this dtype, under autocast or not.
        with torch.autocast(input.device.type, enabled=False):
            return fusegrad.linear_cross_entropy(
                input.to(self.product_dtype),
                head,
                target,
                linear_bias=bias,
                weight=weight,
                ignore_index=ignore_index,
                reduction=cast(Any, reduction),
                label_smoothing=label_smoothing or smoothing,
                softcap=self.cap,
                logit_scale=self.scale if self.cap is None else self.scale * self.cap,
                **options,
            )


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
    """Tensors with their versions, which compilers do not follow."""
    if torch.compiler.is_compiling():
        return []
    names = zip(("input", "weight", "bias"), tensors, strict=True)
    return [(name, t, t._version) for name, t in names if t is not None and not t.is_inference()]


class LazyLogitsTensor(Tensor):
    """:class:`LazyLogits` as a tensor: what functions of PyTorch do to it is recorded or computes the logits.

    ``requires_grad`` is False as long as nothing has been computed.
    """

    _lazy: LazyLogits

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _REQUIRES_GRAD:
            return False
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"LazyLogits: {func} must get a tensor with values, but got logits that are not computed: "
            "call their materialize()"
        )

    def materialize(self) -> Tensor:
        """The logits, see :meth:`LazyLogits.materialize`."""
        return self._lazy.materialize()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._lazy).replace("LazyLogits", type(self).__name__, 1)


class _Placeholder(torch.autograd.Function):
    """Ties the tensor to the graph: a gradient by the logits themselves, from a custom Function that took them or from
    a wrapper that copied a model's outputs, goes where it would have gone."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, *tensors: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.lazy = lazy  # its tensors are checked for writes when they are used
        return Tensor._make_wrapper_subclass(LazyLogitsTensor, lazy.shape, dtype=lazy.dtype, device=lazy.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        ctx.lazy._warn("a gradient by them")
        wanted = ctx.needs_input_grad[1:]
        tensors = [None if t is None else t.detach() for t in ctx.lazy._operands()]
        leaves = [t.requires_grad_() for t, wants in zip(tensors, wanted, strict=True) if wants and t is not None]
        with torch.enable_grad():
            value = ctx.lazy._compute(*tensors)
        made = iter(torch.autograd.grad(value, leaves, grad))
        return None, *(next(made) if wants else None for wants in wanted)


def _as_tensor(lazy: LazyLogits) -> LazyLogitsTensor:
    with torch.set_grad_enabled(lazy.grad):
        made = _Placeholder.apply(lazy, lazy.input, lazy.weight, lazy.bias)
    made._lazy = lazy
    return made


def lazy_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    """The logits ``input @ weight.T + bias``, not computed.

    Args:
        input: hidden states ``[..., H]``.
        weight: of the head, ``[V, H]``.
        bias: ``[V]``.
        options: ``z_loss``, ``label_smoothing``, ``inplace``, ``accumulate_dtype``, ``workspace_mib`` of
            :func:`fusegrad.linear_cross_entropy`, for every cross entropy of these logits.

    Returns:
        A :class:`LazyLogitsTensor` ``[..., V]``; within ``torch.compile`` a :class:`LazyLogits`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "lazy_linear: input must be [..., H] and weight [V, H], "
            f"but got {list(input.shape)} and {list(weight.shape)}"
        )
    dtype, kind = input.dtype, input.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    lazy = LazyLogits(input, weight, bias, options, dtype)
    return lazy if torch.compiler.is_compiling() else _as_tensor(lazy)


def check_options(options: dict[str, Any]) -> None:
    """Raises what :func:`fusegrad.linear_cross_entropy` does where one of these options is wrong by itself."""
    dtype = options.get("accumulate_dtype")  # float32 or the weight's, which is not known yet
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    zero = torch.zeros(1, 1, dtype=dtype if floating else torch.float32)
    fusegrad.linear_cross_entropy(zero, zero, torch.zeros(1, dtype=torch.int64), **options)


def materialize(logits: Any) -> Any:
    """Lazy logits computed; anything else as it is."""
    return logits.materialize() if isinstance(logits, (LazyLogits, LazyLogitsTensor)) else logits


def _lazy_of(value: Any) -> LazyLogits | None:
    if isinstance(value, LazyLogitsTensor):
        return value._lazy
    return value if isinstance(value, LazyLogits) else None


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    lazy = _lazy_of(input)
    if lazy is None or lazy.ndim > 2 or size_average is not None or reduce is not None or lazy._written():
        return NotImplemented
    if _lazy_of(target) is not None or target.requires_grad or not (lazy.cap is None or lazy.cap > 0):
        return NotImplemented
    loss = lazy.cross_entropy(
        target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.to(lazy.dtype)


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch's on arguments of which some are lazy."""
    name = _RECORDED.get(func)
    if func is F.cross_entropy:
        made = _cross_entropy(*args, **kwargs)
        if made is not NotImplemented:
            return made
    elif name is not None and args:
        # torch.mul's and torch.add's lazy operand may be the second.
        swapped = name in ("mul", "add") and len(args) == 2 and _lazy_of(args[0]) is None
        first, *rest = args[::-1] if swapped else args
        lazy = _lazy_of(first)
        if lazy is not None and not any(_lazy_of(value) for value in rest):
            made = getattr(lazy, name)(*rest, **kwargs)
            if isinstance(made, LazyLogits) and isinstance(first, LazyLogitsTensor):
                return first if made is lazy else _as_tensor(made)
            return made

    def computed(value: Any) -> Tensor:
        lazy = _lazy_of(value)
        assert lazy is not None
        return lazy._needed_by(func)

    args, kwargs = tree_map_only((LazyLogits, LazyLogitsTensor), computed, (args, kwargs))
    return func(*args, **kwargs)


_REQUIRES_GRAD = Tensor.requires_grad.__get__
_METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse")),
    *(getattr(Tensor, name).__get__ for name in ("is_meta", "is_mps", "is_quantized", "is_mkldnn", "is_nested")),
    *(getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf", "output_nr")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "__len__", "element_size", "get_device")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "__hash__", "is_inference")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_RECORDED: dict[Any, str] = {
    **{getattr(Tensor, name): name for name in ("to", "float", "double", "half", "bfloat16", "contiguous", "detach")},
    **{getattr(Tensor, name): name for name in ("reshape", "view", "flatten", "__getitem__", "tanh", "mul", "div")},
    **{torch.reshape: "reshape", torch.flatten: "flatten", torch.tanh: "tanh", torch.detach: "detach"},
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide, Tensor.divide, Tensor.true_divide), "div"),
    Tensor.__truediv__: "div",
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "add"),
}
