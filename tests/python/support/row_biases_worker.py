"""What each process of test_row_biases.py runs: triangle attention over its rows, beside that of one process over all
rows. A case that fails says why in its result."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fusegrad import triangle_attention
from fusegrad.distributed import gather_bias, whole_bias
from processes import assert_raises, main
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

DEVICE = sys.argv[4] if __name__ == "__main__" else "cpu"
WIDEST = torch.float64 if DEVICE == "cpu" else torch.float32
WORLDS = (2, 3)
B, N, H, D = 2, 11, 2, 8
CASES: dict[str, Callable[..., None]] = {}


def runs(name: str, world: int) -> bool:
    return world == 2 or name in ("whole", "gathered")


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def close(ours: Tensor, truth: Tensor, what: str, tolerance: float = 1e-10) -> None:
    tolerance = tolerance if ours.dtype == torch.float64 else max(tolerance, 1e-4)
    torch.testing.assert_close(
        ours.detach(), truth.detach().to(ours.dtype), rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def problem(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The same in all processes: query, key and value, the bias, the mask with padded rows, the upstream gradient."""
    qkv = [torch.randn(B, N, H, N, D, dtype=dtype) for _ in range(3)]
    bias, there = torch.randn(B, 1, H, N, N, dtype=dtype), torch.arange(N) < N - 3
    mask = (there[:, None] & there).expand(B, N, N)[:, :, None, None]
    return qkv, bias, mask, torch.randn(B, N, H, N, D, dtype=dtype)


def rows_of(group: Any) -> list[slice]:
    """Uneven ones, in order."""
    world = dist.get_world_size(group)
    cuts = [0, *(N * (r + 1) // world - (1 if r == 0 else 0) for r in range(world - 1)), N]
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def gradients(call: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


def over_all_rows(dtype: torch.dtype) -> list[Tensor]:
    qkv, bias, mask, upstream = problem(dtype)
    leaves = [t.requires_grad_() for t in (*qkv, bias)]
    return gradients(lambda q, k, v, b: triangle_attention(q, k, v, b, mask), leaves, upstream)


@case
def whole(group: Any) -> None:
    for dtype in (WIDEST, torch.bfloat16):
        torch.manual_seed(0)
        out, *right = over_all_rows(dtype)
        torch.manual_seed(0)
        qkv, bias, mask, upstream = problem(dtype)
        own = rows_of(group)[dist.get_rank(group)]
        leaves = [t[:, own].clone().requires_grad_() for t in qkv] + [bias.requires_grad_()]

        def call(q: Tensor, k: Tensor, v: Tensor, b: Tensor, mask: Tensor = mask, own: slice = own) -> Tensor:
            return triangle_attention(q, k, v, whole_bias(b, group), mask[:, own])

        part, *found = gradients(call, leaves, upstream[:, own])
        tolerance = 1e-10 if dtype == WIDEST else 2e-2
        close(part, out[:, own], "out", tolerance)
        for name, mine, truth in zip("qkv", found, right, strict=False):
            close(mine, truth[:, own], name, tolerance)
        assert found[3].dtype == dtype and found[3].shape == bias.shape
        close(found[3], right[3], "bias", tolerance)


@case
def gathered(group: Any) -> None:
    """Each process makes the bias of its own rows of pairs."""
    torch.manual_seed(0)
    out, *right = over_all_rows(WIDEST)
    torch.manual_seed(0)
    qkv, bias, mask, upstream = problem(WIDEST)
    rows, rank = rows_of(group), dist.get_rank(group)
    own, sizes = rows[rank], [r.stop - r.start for r in rows]
    leaves = [t[:, own].clone().requires_grad_() for t in qkv] + [bias[..., own, :].clone().requires_grad_()]

    def call(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        whole = gather_bias(b, group, sizes=sizes)
        close(whole, bias, "gathered")
        return triangle_attention(q, k, v, whole, mask[:, own])

    part, *found = gradients(call, leaves, upstream[:, own])
    close(part, out[:, own], "out")
    close(found[3], right[3][..., own, :], "bias")


@case
def meshes_and_equal_parts(group: Any) -> None:
    mesh, rank = DeviceMesh.from_group(group, DEVICE), dist.get_rank(group)
    world = dist.get_world_size(group)
    whole = torch.randn(4 * world, 3, dtype=WIDEST)
    part = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    found = gather_bias(part, mesh, dim=0)
    close(found, whole, "gathered")
    (grad,) = torch.autograd.grad(found, part, whole * (rank + 1))
    close(grad, part * sum(range(1, world + 1)), "gradient")


@case
def any_number_of_backwards(group: Any) -> None:
    bias = torch.randn(3, 4, dtype=WIDEST, requires_grad=True)
    found = whole_bias(bias, group)
    first, second = (torch.autograd.grad(found, bias, torch.ones_like(bias) * 0.37, retain_graph=True)[0] for _ in "ab")
    assert torch.equal(first, second)
    close(first, torch.full_like(bias, 0.37 * dist.get_world_size(group)), "gradient")
    (again,) = torch.autograd.grad(whole_bias(bias * bias, group).sum(), bias, create_graph=True)
    assert_raises(RuntimeError, "whole_bias", lambda: again.sum().backward())


@case
def errors(group: Any) -> None:
    rank = dist.get_rank(group)
    two, whole = torch.randn(3, 2), torch.ones(3, dtype=torch.int64)
    for error, text, call in (
        (ValueError, "whole_bias: shape must be the same", lambda: whole_bias(torch.randn(3 + rank), group)),
        (
            ValueError,
            "whole_bias: requires_grad must be the same",
            lambda: whole_bias(torch.randn(3, requires_grad=rank == 0), group),
        ),
        (TypeError, "whole_bias: bias must be floating-point", lambda: whole_bias(whole, group)),
        (ValueError, "gather_bias: sizes must be the same", lambda: gather_bias(torch.randn(3 + rank, 2), group)),
        (ValueError, "gather_bias: sizes must be 2", lambda: gather_bias(two, group, sizes=[3, 3, 3])),
        (ValueError, "gather_bias: dim must be one of 2", lambda: gather_bias(two, group, dim=2)),
    ):
        assert_raises(error, text, call)
    # An error of one process is known to all.
    alone = (TypeError, "must be floating-point") if rank == 0 else (RuntimeError, "an error of its own in rank 0")
    assert_raises(*alone, lambda: whole_bias(whole if rank == 0 else two, group))


if __name__ == "__main__":
    main(CASES, runs, lambda group: group)
