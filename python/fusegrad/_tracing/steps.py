"""What a traced function computes from captured tensors alone: recorded, to be done again at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._transforms import unwrapped
from .errors import Refused
from .lifted import Lifted
from .names import words
from .trees import contains, mapped, tensors_of

__all__ = ["Outside", "Step", "Steps"]

# Operations that depend on a tensor's shape, dtype and strides alone.
_METADATA = words(
    "shape.__get__ dtype.__get__ device.__get__ ndim.__get__ layout.__get__ is_cuda.__get__ is_cpu.__get__ "
    "requires_grad.__get__ itemsize.__get__ nbytes.__get__ is_sparse.__get__ is_quantized.__get__ "
    "is_meta.__get__ size dim numel nelement ndimension stride element_size __len__ is_floating_point "
    "is_complex is_signed is_contiguous result_type promote_types can_cast is_tensor get_device "
    "broadcast_shapes is_same_size __repr__"
)
# Those of them that torch.jit.trace records for a tensor that depends on its inputs.
_SIZES = words("shape.__get__ size numel nelement __len__ stride nbytes.__get__")


def _storage(tensor: Tensor) -> int:
    return unwrapped(tensor).untyped_storage()._cdata


@dataclass
class Step:
    func: Callable
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    grad: bool  # whether gradients were recorded


class Steps:
    """The steps of one run. It holds every tensor that it has seen: identities stay unique."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.known: dict[int, tuple[int, int]] = {}  # of a tensor: the step that made it, and which output
        self.writes = 0
        self.measured: list[Tensor] = []  # of which it read a size
        self.volatile: str | None = None  # why the steps must not be done again without a new trace
        self._constants: dict[int, Tensor] = {}
        self._fresh: dict[int, Tensor] = {}  # by storage: made by the function

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it holds numbers that the function itself wrote down."""
        return id(tensor) in self._constants

    def run(self, func: Callable, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        inputs = tensors_of((args, kwargs))
        real_args, real_kwargs = mapped((args, kwargs), lambda x: x.value if isinstance(x, Lifted) else x)
        writes = self.writes
        out = func(*real_args, **real_kwargs)
        if name in _METADATA:
            if name in _SIZES:
                self.measured.extend(inputs)
            return out
        outputs = tensors_of(out)
        values: list[Any] = []
        mapped(out, lambda x: values.append(x) if not isinstance(x, Tensor) and x is not None else None)
        if values:
            self.volatile = self.volatile or f"{name} of a captured tensor gave Python a value"
        if not outputs and self.writes == writes:
            return out
        constant = all(self.is_constant(x) for x in inputs) and not contains((args, kwargs), Lifted)
        if self.writes != writes and not constant:
            self._no_longer_constant(inputs)
        index = len(self.steps)
        self.steps.append(Step(func, args, kwargs, outputs, torch.is_grad_enabled()))
        given = {id(x) for x in inputs}
        for place, tensor in enumerate(outputs):
            if id(tensor) in given:
                continue  # such as .contiguous() of what is contiguous
            self.known[id(tensor)] = (index, place)
            if constant:
                self._constants[id(tensor)] = tensor
        return out

    def _no_longer_constant(self, inputs: Sequence[Tensor]) -> None:
        """Called after a value that is not constant was written into one of them."""
        storages = {_storage(x) for x in inputs}
        self._constants = {k: t for k, t in self._constants.items() if _storage(t) not in storages}

    def outputs(self) -> list[Tensor]:
        return [x for step in self.steps for x in step.outputs]

    def made(self, inputs: Any, outputs: Any) -> None:
        """An ATen operation of a step: its outputs are new where they share no memory with its inputs."""
        old = {_storage(x) for x in tensors_of(inputs)}
        for tensor in tensors_of(outputs):
            if (storage := _storage(tensor)) not in old:
                self._fresh[storage] = tensor

    def check_write(self, tensor: Any) -> None:
        self.writes += 1
        for x in tensors_of(tensor):
            if _storage(x) not in self._fresh:
                raise Refused("a write into a captured tensor", "write into a copy of it, see .clone()")


class Outside(TorchDispatchMode):
    """Watches what a function does to captured tensors alone."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo, which takes a second, and no compiled code runs under this mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Refused(
                f"random numbers ({func._schema.name.removeprefix('aten::')})",
                "draw them outside and capture the tensor",
            )
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            self.steps.volatile = f"{func._schema.name} depends on the values of a captured tensor"
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.steps.check_write(value)
        out = func(*args, **kwargs)
        self.steps.made((args, kwargs), out)
        return out
