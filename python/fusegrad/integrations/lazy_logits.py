"""Logits that are not computed until something needs them: cross entropy does not.

:func:`lazy_linear` stands for ``torch.nn.functional.linear`` at the end of a language model. What models do between the
head and the loss (casts, views of rows, a bias, a scale, a softcap) is recorded, and the cross entropy of PyTorch of it
is :func:`fusegrad.linear_cross_entropy`. All else gets the logits themselves, computed once, with their gradients.
Letters: N rows (tokens), V vocabulary, H hidden size.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import fusegrad

from ._words import name_of
from .lazy_graph import Link, Placeholder, Rewire, Tie, is_own, is_timing, passes_gradients
from .lazy_record import Record

__all__ = [
    "LazyLogits",
    "LazyLogitsTensor",
    "check_options",
    "default_workspace",
    "lazy_linear",
    "lazy_of",
    "materialize",
]


class LazyLogits(Record):
    """``cap * tanh(scale * (input @ weight.T + bias))``, without a cap ``scale * (...)``, to be computed.

    Not a tensor: what :func:`lazy_linear` returns within ``torch.compile`` and the transforms of ``torch.func``;
    elsewhere it is behind a :class:`LazyLogitsTensor`. Has a tensor's methods; those that it does not record compute
    the logits.

    Attributes:
        input, weight, bias, options, shape, dtype, device: see :class:`~fusegrad.integrations.lazy_record.Record`.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "detach_", "requires_grad_"):
            self.watch(name, needs_gradient=name not in ("detach_", "requires_grad_"))
        return getattr(self.needed_by(getattr(Tensor, name)), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

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
        if reduction == "none" and options.get("workspace_mib") is None:
            options["workspace_mib"] = default_workspace(target.numel(), input.device)
        # The head's products ran in this dtype, under autocast or not.
        with torch.autocast(input.device.type, enabled=False):
            loss = fusegrad.linear_cross_entropy(
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
        return self._taken_by(loss)

    def divergence(self, teacher: LazyLogits, **options: Any) -> Tensor:
        """:func:`fusegrad.linear_jsd` of two heads' logits, of which the teacher's get no gradient.

        Args:
            teacher: of the same vocabulary.
            options: of the function, besides operands, scales and softcaps.
        """
        input, head, bias = self._operands()
        fixed = [None if t is None else t.detach() for t in teacher._operands()]
        with torch.autocast(input.device.type, enabled=False):
            loss = fusegrad.linear_jsd(
                input.to(self.product_dtype),
                head,
                cast(Tensor, fixed[0]).to(teacher.product_dtype),
                fixed[1],
                student_bias=bias,
                teacher_bias=fixed[2],
                student_softcap=self.cap,
                teacher_softcap=teacher.cap,
                student_logit_scale=self.scale if self.cap is None else self.scale * self.cap,
                teacher_logit_scale=teacher.scale if teacher.cap is None else teacher.scale * teacher.cap,
                accumulate_dtype=self.options.get("accumulate_dtype"),
                workspace_mib=self.options.get("workspace_mib"),
                **options,
            )
        return self._taken_by(loss)

    def _taken_by(self, loss: Tensor) -> Tensor:
        """A loss without these logits; nodes of the graph between them and the head run in its backward."""
        if not (torch.is_grad_enabled() and loss.requires_grad):
            return loss
        line = [record for record, _ in self._line()]
        for record in line:
            record.in_loss = True
        links = [record.link for record in line if record.link is not None]
        return Tie.apply(loss, *links) if links else loss


class LazyLogitsTensor(Tensor):
    """:class:`LazyLogits` as a tensor: what functions of PyTorch do to it is recorded or computes the logits."""

    _lazy: LazyLogits

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What PyTorch calls below autograd: a custom Function that returns its argument makes a view of it."""
        name = _BELOW_AUTOGRAD.get(func)
        if name is None:
            raise RuntimeError(
                f"LazyLogits: {func} must get a tensor with values, but got logits that are not computed: "
                "call their materialize()"
            )
        lazy = args[0]._lazy
        made = getattr(lazy, name)(*(args[1:] or ((lazy,) if name == "view_as" else ())))
        return _as_tensor(made) if isinstance(made, LazyLogits) else made

    def materialize(self) -> Tensor:
        """The logits, see :meth:`~fusegrad.integrations.lazy_record.Record.materialize`."""
        return _settled(self).materialize()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._lazy).replace("LazyLogits", type(self).__name__, 1)


def _as_tensor(lazy: LazyLogits) -> LazyLogitsTensor:
    with torch.set_grad_enabled(lazy.grad):
        made = Placeholder.apply(LazyLogitsTensor, lazy, lazy.input, lazy.weight, lazy.bias)
    made._lazy = lazy
    return made


def _node(tensor: LazyLogitsTensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def _settled(tensor: LazyLogitsTensor) -> LazyLogits:
    """What a tensor stands for: the output of another Function than ours are logits whose gradient must pass it."""
    lazy, node = tensor._lazy, _node(tensor)
    if not lazy.foreign and not is_own(node, lazy):
        lazy.foreign = True
        lazy.link = _link(tensor)
        if passes_gradients(node) and lazy.parent is not None:
            lazy.grad = lazy.parent.grad
        else:
            lazy.watch("another Function", needs_gradient=False)
    return lazy


def _link(tensor: LazyLogitsTensor) -> Tensor:
    with torch.enable_grad():
        return Link.apply(tensor)


def lazy_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
    """The logits ``input @ weight.T + bias``, not computed.

    Args:
        input: hidden states ``[..., H]``.
        weight: of the head, ``[V, H]``.
        bias: ``[V]``.
        options: ``z_loss``, ``label_smoothing``, ``inplace``, ``accumulate_dtype``, ``workspace_mib`` of
            :func:`fusegrad.linear_cross_entropy`, for every cross entropy of these logits.

    Returns:
        A :class:`LazyLogitsTensor` ``[..., V]``; within ``torch.compile`` and transforms a :class:`LazyLogits`.

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
    return lazy if torch.compiler.is_compiling() or _transformed() else _as_tensor(lazy)


def _transformed() -> bool:
    """Whether a transform of torch.func or forward mode runs, which know no Functions such as ours."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def default_workspace(rows: int, device: torch.device) -> int:
    """MiB for one loss a row, whose backward comes later: logits that fit are kept, others are computed again.

    Without a budget all would be kept. On a GPU 32 KiB a row are blocks of 16384 columns in 16 bits.
    """
    if device.type == "cpu":
        return 16
    # A compiler would compile anew for each number of rows.
    return 64 if torch.compiler.is_compiling() else min(max(rows // 32, 16), 256)


def check_options(options: dict[str, Any]) -> None:
    """Raises what :func:`fusegrad.linear_cross_entropy` does where one of these options is wrong by itself."""
    dtype = options.get("accumulate_dtype")  # float32 or the weight's, which is not known yet
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    zero = torch.zeros(1, 1, dtype=dtype if floating else torch.float32)
    fusegrad.linear_cross_entropy(zero, zero, torch.zeros(1, dtype=torch.int64), **options)


def materialize(logits: Any) -> Any:
    """Lazy logits computed; anything else as it is."""
    return logits.materialize() if isinstance(logits, (LazyLogits, LazyLogitsTensor)) else logits


def lazy_of(value: Any) -> LazyLogits | None:
    if isinstance(value, LazyLogitsTensor):
        return _settled(value)
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
    lazy = lazy_of(input)
    if lazy is None or lazy.ndim > 2 or size_average is not None or reduce is not None or lazy.decided():
        return NotImplemented
    if lazy_of(target) is not None or target.requires_grad or not (lazy.cap is None or lazy.cap > 0):
        return NotImplemented
    loss = lazy.cross_entropy(
        target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    kind = lazy.device.type
    # Autocast has the loss of 16 bits in float32.
    return loss if torch.is_autocast_enabled(kind) and lazy.dtype.itemsize < 4 else loss.to(lazy.dtype)


def _attach(func: Callable[..., Any], tensor: LazyLogitsTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook or a change of the graph at these logits."""
    lazy = _settled(tensor)
    if func is Tensor.register_hook and args and is_timing(args[0]):
        with torch._C.DisableTorchFunctionSubclass():
            handle = func(tensor, *args, **kwargs)
        lazy.link = _link(tensor) if lazy.link is None else lazy.link
        return handle
    lazy.watch(name_of(func), needs_gradient=func in _OF_GRADIENTS)
    value = lazy.needed_by(func)
    if func in _DETACHING and not lazy.is_view:
        lazy.value, lazy.link = value.detach(), None
        with torch._C.DisableTorchFunctionSubclass():
            tensor.detach_()
    elif lazy.link is not None:  # through which the gradient of the value comes
        with torch._C.DisableTorchFunctionSubclass():
            made = func(tensor, *args, **kwargs)
        return made if func is Tensor.register_hook else tensor
    else:
        made = func(value, *args, **kwargs)
        if value.requires_grad:
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                Rewire.apply(tensor, value, lazy)
        return tensor if made is value else made
    return tensor


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of PyTorch's on arguments of which some are lazy."""
    name = _RECORDED.get(func)
    first = args[0] if args else None
    if isinstance(first, LazyLogitsTensor) and func in _ATTACHING:
        return _attach(func, first, args[1:], kwargs)
    if isinstance(first, LazyLogitsTensor) and func in _OF_THE_GRAPH:
        own = _settled(first)
        if own.watched and own.link is None:
            return func(own.materialize(), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is F.cross_entropy:
        made = _cross_entropy(*args, **kwargs)
        if made is not NotImplemented:
            return made
        lazy = lazy_of(first)
        if lazy is not None:
            lazy.refuse_lost("the cross entropy is not of rows of classes")
    elif name is not None and args:
        # torch.mul's and torch.add's lazy operand may be the second.
        swapped = name in ("mul", "add") and len(args) == 2 and lazy_of(args[0]) is None
        first, *rest = args[::-1] if swapped else args
        lazy = lazy_of(first)
        if lazy is not None and not any(lazy_of(value) for value in rest):
            made = getattr(lazy, name)(*rest, **kwargs)
            if isinstance(made, LazyLogits) and isinstance(first, LazyLogitsTensor):
                return first if made is lazy else _as_tensor(made)
            return made

    def computed(value: Any) -> Tensor:
        lazy = lazy_of(value)
        assert lazy is not None
        if func is torch.autograd.grad:
            lazy.watch("torch.autograd.grad by them")
        return lazy.needed_by(func)

    args, kwargs = tree_map_only((LazyLogits, LazyLogitsTensor), computed, (args, kwargs))
    return func(*args, **kwargs)


def _attributes(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


_METADATA: set[Any] = {
    *_attributes("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse", "is_meta", "is_mps"),
    *_attributes("is_quantized", "is_mkldnn", "is_nested"),
    *(_attributes("names") if hasattr(Tensor, "names") else ()),  # torch 2.15 has no named tensors
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "__len__", "element_size", "get_device")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "__hash__", "is_inference")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
# What the tensor itself answers until something is attached to its values.
_OF_THE_GRAPH = _attributes(
    "requires_grad", "grad_fn", "is_leaf", "output_nr", "grad", "retains_grad", "_backward_hooks", "_base"
)
_OF_GRADIENTS = {Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook}
_DETACHING = {Tensor.detach_, torch.detach_}
_ATTACHING: set[Any] = {
    *_OF_GRADIENTS,
    *_DETACHING,
    *(Tensor.requires_grad_, Tensor.set_),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "data", "_backward_hooks")),
}
_RECORDED: dict[Any, str] = {
    **{getattr(Tensor, name): name for name in ("to", "float", "double", "half", "bfloat16", "contiguous", "detach")},
    **{getattr(Tensor, name): name for name in ("reshape", "view", "flatten", "__getitem__", "tanh", "mul", "div")},
    **{Tensor.clone: "clone", torch.clone: "clone", Tensor.data.__get__: "detach", Tensor.view_as: "view_as"},
    **{torch.reshape: "reshape", torch.flatten: "flatten", torch.tanh: "tanh", torch.detach: "detach"},
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide, Tensor.divide, Tensor.true_divide), "div"),
    Tensor.__truediv__: "div",
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "add"),
}
_aten = torch.ops.aten
_BELOW_AUTOGRAD: dict[Any, str] = {
    **{_aten.view.default: "view", _aten.alias.default: "view_as", _aten.detach.default: "detach"},
    **{_aten.clone.default: "clone", _aten._unsafe_view.default: "view"},
}
