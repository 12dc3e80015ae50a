"""Every argument of every operation that a score_mod may call has its effect, or raises: a walk over the tracer's table
and PyTorch's schemas, values and gradients against PyTorch's own."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import TraceError, trace_score_mod
from fusegrad._tracing import cache
from fusegrad._tracing.table import OPS, Op
from fusegrad.score_mod import split_scalars
from support import AFTER_2_11
from torch import Tensor, nn

A = torch.tensor([[0.3, -1.2, 2.0], [2.0, 0.4, -0.7]], dtype=torch.float64)
UNIT, LARGE = torch.tensor([[0.2, 0.7], [0.4, 0.1]], dtype=torch.float64), A.abs() + 1
B = torch.tensor([[1.5, 0.2, -0.5], [0.3, 2.0, 1.1]], dtype=torch.float64)
ROWS = torch.tensor([[0, 1], [1, 1]])


def tensors(out: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]


def total(out: Any) -> Tensor:
    """A number in which each element of the results has its own part."""
    parts = [torch.dot(x.reshape(-1).double(), torch.arange(1.0, x.numel() + 1).double()) for x in tensors(out)]
    return torch.stack(parts).sum()


def assert_like_pytorch(call: Callable[..., Any], *given: Tensor) -> None:
    """Each tensor is a row that an index chooses, so that nothing is computed outside of the trace."""
    cache.clear()
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]
    expected = total(call(*leaves))
    floats = [x for x in leaves if x.requires_grad]
    wanted = (
        torch.autograd.grad(expected, floats, materialize_grads=True, allow_unused=True)
        if expected.requires_grad
        else [torch.zeros_like(x) for x in floats]
    )
    captured = [x.detach()[None].clone().requires_grad_(x.is_floating_point()) for x in given]
    traced = trace_score_mod(lambda s, b, h, q, kv: s + total(call(*(x[q] for x in captured))))
    score = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    arguments = traced.text, score, [x.detach() for x in traced.buffers], *split_scalars(traced.scalars)
    got = torch.ops.fusegrad.evaluate_score_mod(*arguments)
    torch.testing.assert_close(got.reshape(()), expected.detach())
    _, grads = torch.ops.fusegrad.evaluate_score_mod_backward(torch.ones_like(score), *arguments)
    for x, w in zip([x for x in captured if x.requires_grad], wanted, strict=True):
        found = [g for b, g in zip(traced.buffers, grads, strict=True) if b is x]
        torch.testing.assert_close(found[0][0] if found else torch.zeros_like(w), w.to_dense() if w.is_sparse else w)


# --- the walk -------------------------------------------------------------------------------------------------

# What an argument may be, beside its default.
VALUES: dict[str, list[Any]] = {
    "keepdim": [True], "descending": [True], "largest": [False], "sorted": [False], "stable": [True, False],
    "right": [True], "out_int32": [True], "side": ["left", "right"], "unbiased": [False],
    "correction": [0, 2, 0.5], "alpha": [2, -1.5], "rounding_mode": ["floor", "trunc"], "approximate": ["tanh"],
    "decimals": [1, -1], "beta": [2.0], "threshold": [1.0], "min_val": [-0.5], "max_val": [0.5], "min": [-0.4],
    "max": [0.4], "eps": [0.2], "value": [3.5], "fill_value": [2.5], "p": [1, 3, 0.5, math.inf, 0], "ord": [1, 3],
    "padding_idx": [0, 1], "scale_grad_by_freq": [True], "sparse": [True], "sparse_grad": [True], "k": [1, 2],
    "memory_format": [torch.contiguous_format], "pin_memory": [False], "non_blocking": [True],
    "layout": [torch.strided, torch.sparse_coo], "device": [torch.device("cpu")], "implicit": [True],
    "half_to_float": [True],
    "dtype": [torch.float32, torch.int64, torch.int8], "out_dtype": [torch.float64],
    "sorter": [torch.tensor([1, 0, 2])],
    "compute_mode": [0, 1, 2], "start": [1, -2], "end": [1, -1], "step": [2], "offset": [1, -1], "dim1": [-1],
    "dim2": [-2], "output_size": [6], "other": [B], "exponent": [2.0, B], "chunks": [2], "split_size": [1, [1, 1]],
    "split_sizes": [[1, 1]], "repeats": [[2, 1], 2], "shifts": [1, [1, 1]], "source": [0], "destination": [1],
    "axis0": [0], "axis1": [1], "dim0": [0, -1], "size": [[3, 2], [2, 3]], "shape": [[3, 2]],
    "stride": [[1, 2]], "dimension": [1, 0], "index": [ROWS], "indices": [ROWS], "condition": [A > 0],
    "mask": [A > 0], "boundaries": [torch.tensor([-0.5, 0.1, 1.0], dtype=torch.float64)], "weight": [A],
    "sorted_sequence": [torch.tensor([-0.5, 0.1, 1.0], dtype=torch.float64)], "mat2": [B.t().contiguous()],
    "vec": [B[0]], "tensor": [B[0]], "x1": [A], "x2": [B], "tensors": [[A, B]],
}  # fmt: skip
# For an operation alone: its own arguments, or those without which there is nothing to call.
OWN: dict[str, dict[str, list[Any]]] = {
    "index": {"indices": [[ROWS[0]], [None, ROWS]]},
    "index_select": {"index": [ROWS[0]]},
    "repeat_interleave": {"repeats": [torch.tensor([2, 1]), 2], "output_size": [None]},
    "bmm": {"self": [A[None]], "mat2": [B.t()[None].contiguous()], "out_dtype": []},
    "mm": {"out_dtype": []},
    "dot": {"self": [A[0]]},
    "vdot": {"self": [A[0]], "other": [B[0]]},
    "_reshape_alias": {"size": [[3, 2]], "stride": [[2, 1]]},
    "unfold": {"size": [2], "step": [1, 2]},
    "movedim": {"source": [0, [0]], "destination": [1, [1]]},
    "permute": {"dims": [[1, 0]]},
    "flip": {"dims": [[0], [1]]},
    "tile": {"dims": [[2, 1]]},
    "roll": {"dims": [[0], [0, 1], []], "shifts": [[1], [1, 2]]},
    "squeeze": {"dim": [0, [0]]},
    "select": {"index": [1, -1], "dim": [0, -1]},
    "slice": {"start": [None, 1], "end": [2, -1], "step": [2]},
    "expand": {"size": [[2, 2, 3]]},
    "view": {"dtype": [torch.int64]},
    "pow": {"self": [A.abs(), 2.0]},
    "gather": {"index": [ROWS]},
    "round": {"decimals": [1, -1, 0]},
    "_local_scalar_dense": {"self": []},
    "logit": {"self": [A.sigmoid()]},
    "xlogy": {"other": [LARGE, 2.0]},
    "special_xlog1py": {"other": [LARGE, 2.0]},
    "log_sigmoid_forward": {"self": []},  # whose second result is for its backward
    "new_empty": {"self": []},
    "new_empty_strided": {"self": []},
    "empty_like": {"self": []},
    "__lshift__": {"self": [ROWS], "other": [1, ROWS]},
    "__rshift__": {"self": [ROWS], "other": [1, ROWS]},
    "floor_divide": {"self": [ROWS + 3], "other": [2, ROWS + 1]},
}
INTEGERS = ("bitwise", "__and__", "__or__", "__xor__")
SELF = {
    "take": A.t().contiguous(), **dict.fromkeys(("acos", "asin", "atanh"), UNIT),
    **dict.fromkeys(("acosh", "log", "log10", "log1p", "log2", "rsqrt", "sqrt"), LARGE),
}  # fmt: skip


def overloads() -> list[Any]:
    """Those of tensors, not of lists, strings, names, and TorchScript's of numbers."""
    found = []
    for name in sorted(name for name, how in OPS.items() if isinstance(how, Op)):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            func = getattr(packet, overload)
            arguments = func._schema.arguments
            types = [str(a.type) for a in arguments]
            tensors = types[0] == "Tensor" or name in ("cat", "stack") or (types[0] == "number" and "Tensor" in types)
            named = any("str" in t for t in types) and any("imname" in o for o in (overload, func._overloadname))
            named = named or overload in ("names", "names_dim", "correction_names")
            if tensors and not named and not func._schema.is_mutable and not any(a.is_out for a in arguments):
                found.append(func)
    return [f for f in found if not f._overloadname.endswith("_twin")]


def choices(func: Any, argument: Any) -> list[Any]:
    name = func._schema.name.removeprefix("aten::")
    own = OWN.get(name, {})
    if argument.name in own:
        return own[argument.name]
    if argument.name == "self":
        return [ROWS] if name.startswith(INTEGERS) else [SELF.get(name, A)]
    if argument.name == "other" and name.startswith(INTEGERS):
        return [ROWS, 3]
    if argument.name in ("dim", "dims"):
        return [[0], [0, 1]] if "List" in str(argument.type) else [0, -1]
    return VALUES[argument.name]  # an argument that has no case yet


def fits(argument: Any, value: Any) -> bool:
    kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
    if "List[" in kind:
        return isinstance(value, list)
    if kind == "Tensor":
        return isinstance(value, Tensor)
    return not isinstance(value, (Tensor, list))


def calls(func: Any) -> list[dict[str, Any]]:
    """The required arguments, with at most one of the others given."""
    required, optional = {}, []
    for argument in func._schema.arguments:
        values = [v for v in choices(func, argument) if fits(argument, v)]
        if argument.has_default_value():
            optional += [(argument.name, v) for v in values]
        else:
            required[argument.name] = values
    if any(not v for v in required.values()):
        return []
    first = {k: v[0] for k, v in required.items()}
    others = [{**first, k: v} for k, values in required.items() for v in values[1:]]
    return [first, *others, *({**first, k: v} for k, v in optional)]


@rows_of("func", overloads())
def test_each_argument(func: Any) -> None:
    if AFTER_2_11 and func.name() in ("aten::clamp", "aten::clamp_max"):
        pytest.skip("at a bound this torch has another subgradient")
    for given in calls(func):
        places = [k for k, v in given.items() if isinstance(v, Tensor)]

        def call(*x: Tensor, given: dict[str, Any] = given, places: list[str] = places) -> Any:
            return func(**{**given, **dict(zip(places, x, strict=True))})

        leaves = [given[k].clone().requires_grad_(given[k].is_floating_point()) for k in places]
        try:
            expected = total(call(*leaves))
            if expected.requires_grad:
                expected.backward()
        except (RuntimeError, IndexError, NotImplementedError):
            continue  # arguments that do not go together
        with contextlib.suppress(TraceError):
            assert_like_pytorch(call, *leaves)


# --- what the walk has shown ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 2, -1, -4])
def test_the_padding_row_of_an_embedding_gets_no_gradient(padding: int) -> None:
    weight = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([0, 2, 3, 3, 0])
    assert_like_pytorch(lambda i, w: F.embedding(i, w, padding_idx=padding), indices, weight)
    module = nn.Embedding(4, 3, padding_idx=padding, dtype=torch.float64)
    rows = torch.tensor([0, 1, 2, 3])
    mod = lambda s, b, h, q, kv: s + module(rows[kv]).sum()  # noqa: E731
    traced = trace_score_mod(mod)
    score = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    _, grads = torch.ops.fusegrad.evaluate_score_mod_backward(
        torch.ones_like(score), traced.text, score, [x.detach() for x in traced.buffers], *split_scalars(traced.scalars)
    )
    (grad,) = (g for b, g in zip(traced.buffers, grads, strict=True) if b is module.weight)
    torch.testing.assert_close(grad, (rows != padding % 4).double()[:, None].expand(4, 3))


@rows_of(
    "call, name",
    [
        (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), "scale_grad_by_freq=True of embedding"),
        (lambda w, i: F.embedding(i, w, sparse=True), "sparse=True of embedding"),
        (lambda w, i: F.embedding(i, w, max_norm=1.0), "max_norm of F.embedding, which writes"),
        (lambda w, i: F.embedding_bag(i, w, max_norm=1.0), "max_norm of F.embedding_bag, which writes"),
        (lambda w, i: w.gather(0, i, sparse_grad=True), "sparse_grad=True of gather"),
        (lambda w, i: w.to_sparse(), "layout|sparse"),
        (lambda w, i: w.view(torch.int64), "the operation view.dtype"),
        (lambda w, i: torch.repeat_interleave(w, i[0], 0), "the operation repeat_interleave"),
    ],
)
def test_what_has_no_effect_here_is_refused_by_name(call: Callable[[Tensor, Tensor], Tensor], name: str) -> None:
    weight, index = A.clone().requires_grad_(), ROWS
    with pytest.raises(TraceError) as caught:
        trace_score_mod(lambda s, b, h, q, kv: s + total(call(weight * s, index[q][None].expand(2, 2))))
    assert re.search(name, str(caught.value).splitlines()[0])  # not in the line of the function
