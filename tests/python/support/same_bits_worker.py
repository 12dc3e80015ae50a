"""What each process of test_same_bits.py runs: batch_invariant over the parts of the first 2, 3 and 4 of the processes
has the bits of one process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fusegrad
import torch
import torch.distributed as dist
from fusegrad import Aux, VocabParallel, reference
from processes import assert_raises, main
from torch import Tensor

ON_GPU = __name__ == "__main__" and "cuda" in sys.argv[4]
DTYPES = (torch.float32, torch.bfloat16, torch.float16 if ON_GPU else torch.float64)
# Segments of 304 columns are summed in three steps, the last of which is short, and so is the last segment.
SEGMENT, ROWS = 304, 40
V = 16 * SEGMENT - 12
# Products of ours on a GPU, and those of libraries.
WIDTHS = (72, 70) if ON_GPU else (70,)
# Sixteenths; uneven, in another order than the ranks', and one without any columns.
SIXTEENTHS: dict[int, list[tuple[int, int]]] = {
    2: [(0, 8), (8, 16)],
    3: [(8, 12), (0, 8), (12, 16)],
    4: [(4, 8), (8, 16), (16, 16), (0, 4)],
}
EVEN = [(0, 4), (4, 8), (8, 12), (12, 16)]
CASES: dict[str, Callable[[Any], None]] = {}
AUX = Aux(lse=True, z_loss=True, predicted_tokens=True, token_accuracy=True, entropy=True, token_log_prob=True)


def runs(name: str, world: int) -> bool:
    return True


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def bits(tensor: Tensor) -> Tensor:
    size = tensor.element_size()
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def assert_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype and bits(found).equal(bits(expected)), what


def parts_of(group: Any) -> Iterator[VocabParallel]:
    world, rank = dist.get_world_size(group), dist.get_rank()
    for cuts in (SIXTEENTHS[world], EVEN) if world == 4 else (SIXTEENTHS[world],):
        start, stop = (min(cut * SEGMENT, V) for cut in cuts[rank])
        yield VocabParallel(group, start, stop)


def inputs_of(dtype: torch.dtype, width: int = WIDTHS[0], rows: int = ROWS) -> dict[str, Tensor]:
    target = torch.randint(0, V, (rows,))
    target[5] = -100
    return {
        "hidden": torch.randn(rows, width).to(dtype),
        "weight": torch.randn(V, width).mul(0.4).to(dtype),
        "bias": torch.randn(V).to(dtype),
        "class_weight": torch.rand(V) + 0.5,
        "target": target,
        "scale": torch.rand(rows) + 0.5,
        "support": (target.clamp(0)[:, None] + 17 * torch.arange(90)) % V,
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"linear_bias": "bias", "softcap": 5.0, "workspace_mib": 0},
    {"weight": "class_weight", "label_smoothing": 0.1, "z_loss": 1e-3},
    {"label_smoothing": 0.1, "logit_scale": "scale", "workspace_mib": 1},
    {"logit_scale": "scale with gradient"},
    {"support": "support"},
    {"reduction": "mean"},
]


def results(tensors: dict[str, Tensor], options: dict[str, Any], shards: VocabParallel | None) -> list[Tensor]:
    cut = slice(None) if shards is None else slice(shards.start, shards.stop)
    hidden = tensors["hidden"].clone().requires_grad_()
    given = {"reduction": "none", "return_aux": AUX, **options}
    wanted = [hidden]
    for name, value in options.items():
        if name == "linear_bias":
            given[name] = tensors["bias"][cut]
        elif value == "scale with gradient":
            given[name] = tensors["scale"].clone().requires_grad_()
            wanted.append(given[name])
        elif isinstance(value, str) and value in tensors:
            given[name] = tensors[value]
    loss, aux = fusegrad.linear_cross_entropy(
        hidden, tensors["weight"][cut], tensors["target"], batch_invariant=True, vocab_parallel=shards, **given
    )
    value = loss.sum() + 0.7 * aux.lse.sum() - 0.3 * aux.entropy.sum() + 0.2 * aux.token_log_prob.sum()
    gradients = torch.autograd.grad(value, wanted)
    values = [loss, aux.lse, aux.z_loss, aux.predicted_tokens, aux.entropy, aux.token_log_prob]
    return [v for v in (*values, *gradients) if v is not None]


def compare(tensors: dict[str, Tensor], options: dict[str, Any], shards: VocabParallel) -> None:
    pairs = zip(results(tensors, options, shards), results(tensors, options, None), strict=True)
    for i, (found, expected) in enumerate(pairs):
        hidden = tensors["hidden"]
        what = f"{shards.bounds}, {hidden.dtype}, {list(hidden.shape)}, {options}: result {i} differs"
        assert_same_bits(found, expected, what)


@case
def same_bits(group: Any) -> None:
    for shards in parts_of(group):
        for dtype in DTYPES:
            for width in WIDTHS:
                for options in OPTIONS:
                    compare(inputs_of(dtype, width), options, shards)


@case
def many_rows(group: Any) -> None:
    """More tiles than a GPU has multiprocessors, and more than one of a CPU's; chunks that end within a tile."""
    kinds = ((torch.bfloat16, 1032), (torch.float16, 1032), (torch.float32, 136)) if ON_GPU else ((torch.float32, 70),)
    rows, least = (4300, 8) if ON_GPU else (300, 1)
    for shards in parts_of(group):
        for dtype, width in kinds:
            for budget in (None, least):
                compare(inputs_of(dtype, width, rows), {"workspace_mib": budget}, shards)


@case
def rows_alone(group: Any) -> None:
    for shards in parts_of(group):
        tensors = inputs_of(torch.float32)
        whole = results(tensors, {}, None)
        for row in (0, 5, 39):
            one = {k: v[row : row + 1] if len(v) == ROWS else v for k, v in tensors.items()}
            for found, expected in zip(results(one, {}, shards), whole, strict=True):
                assert_same_bits(found, expected[row : row + 1], f"row {row} alone differs")


@case
def nothing_of_a_row(group: Any) -> None:
    """Logits that are -inf in all of one part, or everywhere."""
    for shards in parts_of(group):
        tensors = inputs_of(torch.float32)
        tensors["bias"][: V // 2] = -torch.inf
        tensors["target"].clamp_(V // 2)
        for bias in (tensors["bias"], torch.full((V,), -torch.inf)):
            given = tensors | {"bias": bias}
            pairs = zip(
                results(given, {"linear_bias": "bias"}, shards),
                results(given, {"linear_bias": "bias"}, None),
                strict=True,
            )
            for i, (found, expected) in enumerate(pairs):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=f"result {i}")


@case
def parity(group: Any) -> None:
    dtype = torch.float32 if ON_GPU else torch.float64
    close: Any = functools.partial(torch.testing.assert_close, **({"rtol": 1e-4, "atol": 1e-5} if ON_GPU else {}))
    for shards in parts_of(group):
        tensors = inputs_of(dtype)
        cut = slice(shards.start, shards.stop)
        hidden, weight = (tensors[n].clone().requires_grad_() for n in ("hidden", "weight"))
        into = torch.zeros(shards.stop - shards.start, WIDTHS[0], dtype=dtype)
        found = fusegrad.linear_log_prob(
            hidden, weight[cut], tensors["target"], batch_invariant=True, vocab_parallel=shards, grad_weight_into=into
        )
        (found.log_prob - 0.3 * found.entropy).sum().backward()
        x, w = (tensors[n].to(torch.float64, copy=True).requires_grad_() for n in ("hidden", "weight"))
        loss, aux = reference.linear_cross_entropy(x, w, tensors["target"], reduction="none")
        (-loss - 0.3 * aux["entropy"]).sum().backward()
        assert hidden.grad is not None and x.grad is not None and w.grad is not None
        for ours, truth in (
            (found.log_prob, -loss),
            (found.entropy, aux["entropy"]),
            (hidden.grad, x.grad),
            (into, w.grad[cut]),
        ):
            close(ours, truth.to(dtype))


@case
def refusals(group: Any) -> None:
    world, rank = dist.get_world_size(group), dist.get_rank()
    ends = [*(SEGMENT * (i + 1) for i in range(world - 1)), V]  # the last part is no power of two
    shards = VocabParallel(group, 0 if rank == 0 else ends[rank - 1], ends[rank])
    tensors = inputs_of(torch.float32)
    cut = slice(shards.start, shards.stop)
    assert_raises(
        ValueError,
        f"vocab_parallel's parts must be 1, 2, 4, 8 or 16 of the vocabulary's sixteenths of {SEGMENT} columns",
        lambda: fusegrad.linear_log_prob(
            tensors["hidden"], tensors["weight"][cut], tensors["target"], batch_invariant=True, vocab_parallel=shards
        ),
    )


if __name__ == "__main__":
    main(CASES, runs, lambda group: group)
