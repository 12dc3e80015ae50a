"""The losses as modules; their arguments are those of :mod:`fusegrad.functional`.

Every option is an attribute of its name: it can be read, and setting it has effect. What changes from call to call, as
``labels`` and ``support`` do, is an argument of ``forward``: a module takes all that its function takes. A module is
generic in what its ``forward`` returns, which ``return_aux`` decides: the loss, or a pair with the aux values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, get_type_hints, overload

import torch
from torch import Tensor, nn
from torch.nn._reduction import legacy_get_string
from typing_extensions import TypeVar

from . import _options, distillation, functional
from ._arguments import Device, checked, device_of
from ._options import Reduction
from ._sharding import VocabParallel
from .distillation import JSDAux, JSDAuxOutput
from .functional import Aux, AuxOutput

__all__ = ["CrossEntropyLoss", "JSDLoss", "LinearCrossEntropyLoss", "LinearJSDLoss"]

Output = TypeVar("Output", default=Tensor)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Init = TypeVar("_Init", bound=Callable[..., None])

# What changes from call to call: forward takes it.
_OF_A_CALL = {"linear_bias", "student_bias", "teacher_bias", "labels", "token_weight", "normalizer", "tail_log_prob"}
_OF_A_CALL |= {"support", "grad_weight_into", "vocab_parallel"}


def _options_of(function: Callable[..., Any]) -> Callable[[_Init], _Init]:
    """Gives an ``__init__`` the options by keyword of a loss, with their defaults and checks, beside its own."""
    shared = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _OF_A_CALL
    }

    def decorate(init: _Init) -> _Init:
        *own, _ = inspect.signature(init).parameters.values()
        added = [parameter for name, parameter in shared.items() if name not in {p.name for p in own}]
        defaults = {parameter.name: parameter.default for parameter in added}
        names = {p.name for p in (*own, *added)}

        @functools.wraps(init)
        def call(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in names:
                    raise TypeError(f"{init.__qualname__}() got an unexpected keyword argument '{name}'")
            init(self, *args, **(defaults | options))

        hints = get_type_hints(init) | {p.name: get_type_hints(function)[p.name] for p in added}
        call.__annotations__ = {name: hint for name, hint in hints.items() if name in names}
        call.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        return checked(call)  # type: ignore[return-value]

    return decorate


class _Options(nn.Module, Generic[Output]):
    """What the losses share: the options of the function, as attributes."""

    ignore_index: int

    def __init__(self, ignore_index: int | None, **options: Any) -> None:
        super().__init__()
        options["ignore_index"] = -100 if ignore_index is None else ignore_index
        self._option_names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._option_names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._given().items())


class _Loss(_Options[Output]):
    """The losses over classes have class weights too, as a buffer."""

    weight: Tensor | None

    def __init__(self, weight: Tensor | None, ignore_index: int | None, **options: Any) -> None:
        super().__init__(ignore_index, **options)
        self.register_buffer("weight", weight)


def _head(
    module: str, kind: str, linear: nn.Linear | None, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear loss: its own, or those that forward got. `kind`: what their names begin with."""
    if weight is None:
        if linear is None:
            raise ValueError(f"{module}: {kind}_weight must be given where num_classes is None, but got None")
        if bias is not None:
            raise ValueError(
                f"{module}: {kind}_bias must come with a {kind}_weight, since the module's own head has a bias of its "
                "own or none, but got one alone"
            )
        return linear.weight, linear.bias
    if bias is None and linear is not None and linear.bias is not None:
        raise ValueError(
            f"{module}: {kind}_bias must be given with a {kind}_weight where the module owns a bias, which belongs to "
            "its own weight, but got None: make the module with bias=False"
        )
    return weight, bias


class CrossEntropyLoss(_Loss[Output]):
    """:func:`fusegrad.cross_entropy` as a module, a drop-in for :class:`torch.nn.CrossEntropyLoss`.

    Args: as the function's.

    Raises:
        TypeError, ValueError: an argument is of a wrong type. Values are checked where ``forward`` runs.
    """

    reduction: Reduction
    label_smoothing: float

    @overload
    def __init__(
        self: CrossEntropyLoss[Tensor],
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        return_aux: None = None,
        **options: Unpack[_options.CrossEntropy],
    ) -> None: ...

    @overload
    def __init__(
        self: CrossEntropyLoss[tuple[Tensor, AuxOutput]],
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        return_aux: Aux,
        **options: Unpack[_options.CrossEntropy],
    ) -> None: ...

    @_options_of(functional.cross_entropy)
    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int | None = None,
        reduce: bool | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        super().__init__(weight, ignore_index, reduction=reduction, label_smoothing=label_smoothing, **options)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        support: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
    ) -> Output:
        """The loss of logits.

        Args:
            input: logits ``[V]``, ``[N, V]`` or ``[N, V, d1, ...]``.
            target: class indices ``[]``, ``[N]``, ``[N, d1, ...]``, or class probabilities of the input's shape.
            token_weight, normalizer, support, vocab_parallel: as in :func:`fusegrad.cross_entropy`.

        Returns:
            As :func:`fusegrad.cross_entropy`: the loss, with ``return_aux`` ``(loss, AuxOutput)``.

        Raises:
            ValueError, TypeError, IndexError: as :func:`fusegrad.cross_entropy`, under its name.
        """
        loss: Any = functional.cross_entropy(
            input,
            target,
            self.weight,
            token_weight=token_weight,
            normalizer=normalizer,
            support=support,
            vocab_parallel=vocab_parallel,
            **self._given(),
        )
        return loss

    if TYPE_CHECKING:
        __call__ = forward


class LinearCrossEntropyLoss(_Loss[Output]):
    """A linear head and its cross entropy, as :class:`torch.nn.LinearCrossEntropyLoss` of PyTorch >= 2.13.

    Owns ``linear.weight`` ``[num_classes, in_features]`` (and ``linear.bias``); ``forward`` also takes a tied weight
    instead, with the bias that belongs to it. With ``num_classes=None`` it owns none, and ``forward`` must be given
    one.

    Args:
        in_features: H.
        num_classes: V, or None.
        out_features: PyTorch's, for losses over K dimensions: ``()`` alone.
        bias, device, dtype: of the owned head.
        weight, ignore_index, ...: as :func:`fusegrad.linear_cross_entropy`.

    Raises:
        ValueError: ``out_features`` is not empty; a bias without a weight in ``forward``, or a tied weight without a
            bias where the module owns one.
    """

    linear: nn.Linear | None
    reduction: Reduction
    label_smoothing: float

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor],
        in_features: int,
        num_classes: int | None,
        *,
        return_aux: None = None,
        **arguments: Unpack[_options.LinearCrossEntropyModule],
    ) -> None: ...

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, AuxOutput]],
        in_features: int,
        num_classes: int | None,
        *,
        return_aux: Aux,
        **arguments: Unpack[_options.LinearCrossEntropyModule],
    ) -> None: ...

    @_options_of(functional.linear_cross_entropy)
    def __init__(
        self,
        in_features: int,
        num_classes: int | None,
        *,
        out_features: Sequence[int] = (),
        bias: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if tuple(out_features) != ():
            raise ValueError(
                "LinearCrossEntropyLoss: out_features must be (), since a weight has one row a class here, but got "
                f"{out_features}"
            )
        place = device_of(type(self).__name__, device)
        super().__init__(**options)
        self.linear = (
            None if num_classes is None else nn.Linear(in_features, num_classes, bias=bias, device=place, dtype=dtype)
        )

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        linear_weight: Tensor | None = None,
        *,
        linear_bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        support: Tensor | None = None,
        grad_weight_into: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
    ) -> Output:
        """The loss of hidden states.

        Args:
            input: hidden states ``[..., H]``.
            target: class indices ``[...]``, or class probabilities ``[..., V]``.
            linear_weight, linear_bias: ``[V, H]`` and ``[V]``, in place of the module's own.
            token_weight, normalizer, support, grad_weight_into, vocab_parallel: as in
                :func:`fusegrad.linear_cross_entropy`.

        Returns:
            As :func:`fusegrad.linear_cross_entropy`: the loss, with ``return_aux`` ``(loss, AuxOutput)``.

        Raises:
            ValueError, TypeError, IndexError: as :func:`fusegrad.linear_cross_entropy`, under its name.
        """
        linear_weight, linear_bias = _head("LinearCrossEntropyLoss", "linear", self.linear, linear_weight, linear_bias)
        loss: Any = functional.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            token_weight=token_weight,
            normalizer=normalizer,
            support=support,
            grad_weight_into=grad_weight_into,
            vocab_parallel=vocab_parallel,
            **self._given(),
        )
        return loss

    if TYPE_CHECKING:
        __call__ = forward


class JSDLoss(_Options[Output]):
    """:func:`fusegrad.jsd` as a module.

    Args: as the function's.

    Raises:
        TypeError, ValueError: an argument is of a wrong type. Values are checked where ``forward`` runs.
    """

    @overload
    def __init__(self: JSDLoss[Tensor], *, return_aux: None = None, **options: Unpack[_options.JSD]) -> None: ...

    @overload
    def __init__(
        self: JSDLoss[tuple[Tensor, JSDAuxOutput]], *, return_aux: JSDAux, **options: Unpack[_options.JSD]
    ) -> None: ...

    @_options_of(distillation.jsd)
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def forward(
        self,
        student: Tensor,
        teacher: Tensor | tuple[Tensor, Tensor],
        *,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        tail_log_prob: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
    ) -> Output:
        """The divergence of two sets of logits.

        Args:
            student: logits ``[..., V]``.
            teacher: logits ``[..., V]``, or a pair ``(log_probs, indices)`` of shape ``[..., K]``.
            labels, token_weight, normalizer, tail_log_prob, vocab_parallel: as in :func:`fusegrad.jsd`.

        Returns:
            As :func:`fusegrad.jsd`: the loss, with ``return_aux`` ``(loss, JSDAuxOutput)``.

        Raises:
            ValueError, TypeError, IndexError: as :func:`fusegrad.jsd`, under its name.
        """
        loss: Any = distillation.jsd(
            student,
            teacher,
            labels=labels,
            token_weight=token_weight,
            normalizer=normalizer,
            tail_log_prob=tail_log_prob,
            vocab_parallel=vocab_parallel,
            **self._given(),
        )
        return loss

    if TYPE_CHECKING:
        __call__ = forward


class LinearJSDLoss(_Options[Output]):
    """A student's linear head and its divergence from a teacher's: :func:`fusegrad.linear_jsd` as a module.

    Owns ``linear.weight`` ``[num_classes, in_features]`` (and ``linear.bias``) of the student; ``forward`` also takes a
    tied weight instead, with the bias that belongs to it. With ``num_classes=None`` it owns none, and ``forward`` must
    be given one. The teacher's head is the teacher's: ``forward`` takes it, and it gets no gradient.

    Args:
        in_features: H of the student.
        num_classes: V, or None.
        bias, device, dtype: of the owned head.
        beta, ...: as :func:`fusegrad.linear_jsd`.

    Raises:
        ValueError: a student's bias without a weight in ``forward``, or a tied weight without a bias where the module
            owns one.
    """

    linear: nn.Linear | None

    @overload
    def __init__(
        self: LinearJSDLoss[Tensor],
        in_features: int,
        num_classes: int | None,
        *,
        return_aux: None = None,
        **options: Unpack[_options.LinearJSDModule],
    ) -> None: ...

    @overload
    def __init__(
        self: LinearJSDLoss[tuple[Tensor, JSDAuxOutput]],
        in_features: int,
        num_classes: int | None,
        *,
        return_aux: JSDAux,
        **options: Unpack[_options.LinearJSDModule],
    ) -> None: ...

    @_options_of(distillation.linear_jsd)
    def __init__(
        self,
        in_features: int,
        num_classes: int | None,
        *,
        bias: bool = False,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        place = device_of(type(self).__name__, device)
        super().__init__(**options)
        self.linear = (
            None if num_classes is None else nn.Linear(in_features, num_classes, bias=bias, device=place, dtype=dtype)
        )

    def forward(
        self,
        student_input: Tensor,
        teacher_input: Tensor | tuple[Tensor, Tensor],
        teacher_weight: Tensor | None = None,
        student_weight: Tensor | None = None,
        *,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        labels: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        tail_log_prob: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
    ) -> Output:
        """The divergence of the student's head from the teacher's.

        Args:
            student_input: hidden states ``[..., H]``.
            teacher_input: hidden states ``[..., H']``, or a pair ``(log_probs, indices)`` of shape ``[..., K]``.
            teacher_weight, teacher_bias: of the teacher's head, ``[V, H']`` and ``[V]``.
            student_weight, student_bias: ``[V, H]`` and ``[V]``, in place of the module's own.
            labels, token_weight, normalizer, tail_log_prob, vocab_parallel: as in :func:`fusegrad.jsd`.

        Returns:
            As :func:`fusegrad.linear_jsd`: the loss, with ``return_aux`` ``(loss, JSDAuxOutput)``.

        Raises:
            ValueError, TypeError, IndexError: as :func:`fusegrad.linear_jsd`, under its name.
        """
        student_weight, student_bias = _head("LinearJSDLoss", "student", self.linear, student_weight, student_bias)
        loss: Any = distillation.linear_jsd(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            labels=labels,
            token_weight=token_weight,
            normalizer=normalizer,
            tail_log_prob=tail_log_prob,
            vocab_parallel=vocab_parallel,
            **self._given(),
        )
        return loss

    if TYPE_CHECKING:
        __call__ = forward
