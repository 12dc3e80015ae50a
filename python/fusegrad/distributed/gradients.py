"""What the sharded losses' autograd Functions share: the gradient contract, and a linear head's products in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._load import check_targets_enabled
from .agreement import agree, alike
from .shards import VocabParallel

_ops = torch.ops.fusegrad


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_meta(tensor: Any, shape: Any = None) -> Any:
    """A tensor without data for the unsharded op to check; anything else as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    made = torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


_WHO = "that share a vocabulary"


def check(
    op: str,
    shards: VocabParallel,
    given: dict[str, Any],
    sharded: dict[str, int],
    options: dict[str, Any],
    own: Callable[[], None] = lambda: None,
) -> Tensor | None:
    """The unsharded op's own checks, on tensors of the whole problem's shapes, and whether all processes make the same
    call. `sharded`: which tensors of `given` are parts of the vocabulary, and along which dimension. `own`: checks of
    this process's tensors.

    Returns:
        None where they do; on a GPU a 0-d bool tensor: whether they do not. The results must be NaN then.
    """
    error: Exception | None = None
    seen: dict[str, Any] = {}
    try:
        seen = _check(op, shards, given, sharded, options)
        own()
    except Exception as found:  # told to the others before it is raised
        error = found
    if shards.world == 1:
        if error is not None:
            raise error
        return None
    device = next(iter(given.values())).device
    told: dict[str, Any] = {name: _described(seen.get(name)) for name in given}
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    told |= {**options, "the grad mode": torch.is_grad_enabled(), "autocast": cast}
    unlike = agree(op, shards.group, device, told, failed=error is not None, who=_WHO)
    if error is not None:
        raise error
    whole = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and name not in sharded and value.numel() != 0
    }
    different = alike(op, shards.group, whole, ("weight",), _WHO)
    return different if unlike is None else unlike if different is None else unlike | different


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return f"{value.dtype} {list(value.shape)}{' that requires grad' if value.requires_grad else ''}"


def _check(
    op: str, shards: VocabParallel, given: dict[str, Any], sharded: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    """The tensors of the whole problem's shapes, without data."""
    first = next(iter(given.values()))
    seen = {}
    for name, value in given.items():
        shape = None
        if isinstance(value, Tensor):
            if value.device != first.device:
                raise ValueError(f"{op}: {name} must be on the input's device {first.device}, but got {value.device}")
            if value.is_cuda and value.dtype == torch.float64 and name in sharded:
                raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16 on CUDA, but got Double")
            dim = sharded.get(name)
            if dim is not None and value.dim() > dim:
                if value.shape[dim] != shards.size:
                    raise ValueError(
                        f"{op}: {name} must have stop - start = {shards.size} in dimension {dim}, the part of the "
                        f"vocabulary that this process has, but got shape {list(value.shape)}"
                    )
                shape = list(value.shape)
                shape[dim] = shards.vocab
        seen[name] = on_meta(value, shape)
    with torch.no_grad():
        getattr(_ops, op)(**seen, **options)
    return seen


def check_index(op: str, name: str, index: Tensor, kept: Tensor, vocab: int, ignore_index: int) -> None:
    """The unsharded op's check: on the CPU, and elsewhere where set_check_targets asks for it."""
    if index.device.type != "cpu" and not check_targets_enabled():
        return
    wrong = (kept & ((index < 0) | (index >= vocab))).nonzero()
    if wrong.numel() != 0:
        row = int(wrong[0, 0])
        raise IndexError(
            f"{op}: {name} must be in [0, {vocab}) or ignore_index ({ignore_index}), but got {int(index[row])} "
            f"at row {row}"
        )


def of_kept_rows(upstream: Tensor, kept: Tensor) -> Tensor:
    """An upstream gradient, 0 for ignored rows: what was saved for them is 0, whose product with NaN is not."""
    return upstream if upstream.dim() == 0 else torch.where(kept, upstream, 0)


def scale_saved(saved: Tensor, upstream: Tensor, factor: Tensor | None, hooks_were_active: bool) -> Tensor:
    """A gradient saved for an upstream gradient of 1, times the upstream gradient: in the buffer itself where this is
    its last use, else in a fresh tensor, since AccumulateGrad steals what it is given."""
    reuse = _ops.may_reuse_saved(saved, hooks_were_active)
    with torch.no_grad():
        if not reuse:
            return _ops.scale_gradient(saved.detach(), upstream, factor)
        _ops.scale_gradient_(saved, upstream, factor)
        return saved.detach()


def refuse_double_backward(
    op: str, made: Iterable[Tensor | None], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients, each as one that raises where it is differentiated again."""
    known = [tensor for tensor in inputs if tensor is not None]
    return [None if gradient is None else _ops.refuse_double_backward(op, gradient, known) for gradient in made]


def chunks(rows: int, count: int) -> Iterator[slice]:
    for first in range(0, rows, max(count, 1)):
        yield slice(first, min(first + count, rows))


def product_type(tensor: Tensor) -> torch.dtype:
    """The CPU's low-precision products cannot add to float32, so they run in float32 there."""
    low = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and tensor.device.type == "cpu" else tensor.dtype


class Head:
    """One linear head's part of the vocabulary, in the products' dtype: logits of chunks of rows in one buffer."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, rows: int, dtype: torch.dtype) -> None:
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.scale = scale
        size = weight.shape[0]
        align = 16 // self.weight.element_size()  # rows that start at 16 bytes are several times faster
        self.buffer = torch.empty(rows, -(-size // align) * align, dtype=dtype, device=weight.device)[:, :size]

    def logits(self, x: Tensor) -> Tensor:
        """scale * (x @ weight.T + bias), valid until the next call."""
        out = self.buffer[: x.shape[0]]
        if self.bias is not None:
            torch.addmm(self.bias, x, self.weight.t(), beta=self.scale, alpha=self.scale, out=out)
        elif self.scale != 1.0:
            torch.addmm(out, x, self.weight.t(), beta=0, alpha=self.scale, out=out)
        else:
            torch.mm(x, self.weight.t(), out=out)
        return out


def _multiply(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out (+)= a @ b; a float32 out takes low-precision factors on CUDA."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class ChunkGradients:
    """The gradients of a head's input, weight and bias, from those of chunks of its logits. The input's is summed over
    the processes, in float32 or (`lean`) in the products' dtype, behind the weight's product and the next chunk's."""

    def __init__(
        self,
        shards: VocabParallel,
        head: Head,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs_grad: tuple[bool, bool, bool],
        accumulator: bool,
        lean: bool,
        inplace: bool,
        grad_weight_into: Tensor | None = None,
    ) -> None:
        """The weight's gradient is added to `grad_weight_into` where there is one, and is none."""
        self.shards, self.head, self.needs_grad = shards, head, needs_grad
        product = head.weight.dtype
        self.acc = acc_of(product)
        self.sum_dtype = product if lean else self.acc
        self.input = self.weight = self.bias = None
        self.pending: Callable[[], None] | None = None
        self.started = False
        self.given = grad_weight_into is not None and needs_grad[1]
        self.results = weight.dtype, None if bias is None else bias.dtype
        if needs_grad[0]:
            self.input = input if inplace else torch.empty_like(input, memory_format=torch.contiguous_format)
        if self.given:
            self.weight = grad_weight_into
        elif needs_grad[1]:
            direct = weight.dtype == product and not accumulator
            self.weight = torch.empty(weight.shape, dtype=product if direct else self.acc, device=weight.device)
        if needs_grad[2]:
            self.bias = torch.zeros(weight.shape[0], dtype=self.acc, device=weight.device)

    def add(self, x: Tensor, z: Tensor, part: slice) -> None:
        """`x`: these rows of the input in the products' dtype; `z`: the gradient of their logits before the scale."""
        self._finish_sum()
        work: Any = None
        if self.input is not None:
            grad = torch.empty(x.shape, dtype=self.sum_dtype, device=x.device)
            _multiply(grad, z, self.head.weight, add=False)
            work = self.shards.start_sum(grad)
        if self.weight is not None:
            _multiply(self.weight, z.t(), x, self.started or self.given)
        if self.bias is not None:
            self.bias += z.sum(0, dtype=self.acc)
        self.started = True
        if self.input is not None:
            # Not before the weight's product: in place, these rows are what it reads.
            to = self.input[part]

            def finish() -> None:
                if work is not None:
                    work.wait()
                to.copy_(grad)

            self.pending = finish

    def _finish_sum(self) -> None:
        if self.pending is not None:
            self.pending()
            self.pending = None

    def finish(self) -> list[Tensor | None]:
        self._finish_sum()
        if self.given:
            self.weight = None
        if self.weight is not None and not self.started:
            self.weight.zero_()
        weight = None if self.weight is None else self.weight.to(self.results[0])
        bias = None if self.bias is None else self.bias.to(self.results[1])
        return [self.input, weight, bias]
