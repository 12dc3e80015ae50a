"""What GPUs before Hopper and consumer GPUs run, measured on a larger one: the portable kernels of attention, and the
losses without clusters of CTAs, each with all of the GPU's shared memory and with 99 KiB a CTA (sm_86, sm_89, sm_120).

Beside attention: PyTorch's FlashAttention-2, whose kernels are those of these GPUs, with all of this one's memory.
Beside a loss: itself with clusters. With 99 KiB as many CTAs run on a multiprocessor as on one that has 100 KiB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from harness.failure import Outcome
from harness.report import print_table
from harness.rows import argument_parser, over, run_rows
from harness.timing import alternate

OP = "smaller_gpus"
KIB_OF_SMALL = 99
COLUMNS = {"portable": 0, "99 KiB": KIB_OF_SMALL << 10}  # bytes of shared memory, 0: all that the GPU has
LOSS_LIMIT = 1.15  # times the same with clusters


@dataclass(frozen=True)
class Attention:
    """bfloat16, (B, H, S, D). keys: heads of keys and values, 0: as many as of queries."""

    sizes: tuple[int, int, int, int]
    causal: bool = False
    keys: int = 0

    @property
    def label(self) -> str:
        batch, heads, length, size = self.sizes
        grouped = f"{heads}/{self.keys}" if self.keys else f"{heads}"
        return f"attention ({batch}, {grouped}, {length}, {size})" + (" causal" if self.causal else "")


@dataclass(frozen=True)
class Loss:
    """op with bfloat16 logits [N, V], or of a linear layer of `hidden` columns."""

    op: str
    rows: int
    classes: int
    hidden: int = 0

    @property
    def label(self) -> str:
        return f"{self.op} ({', '.join(str(n) for n in (self.rows, self.hidden, self.classes) if n)})"


Row = Attention | Loss
ROWS: tuple[Row, ...] = (
    Attention((4, 16, 4096, 128)),
    Attention((4, 16, 4096, 128), causal=True),
    Attention((4, 16, 4096, 64)),
    Attention((4, 16, 4096, 64), causal=True),
    Attention((2, 8, 4096, 256)),
    Attention((2, 8, 4096, 256), causal=True),
    Attention((32, 16, 512, 64), causal=True),
    Attention((16, 16, 1024, 128), causal=True),
    Attention((4, 32, 4096, 128), causal=True, keys=8),
    Attention((8, 16, 2048, 96)),
    Attention((128, 12, 197, 64)),
    Attention((16, 16, 2048, 32)),
    Loss("cross_entropy", 8192, 128256),
    Loss("cross_entropy", 8192, 32000),
    Loss("jsd", 4096, 128256),
    Loss("jsd", 4096, 32000),
    Loss("linear_cross_entropy", 8192, 128256, 4096),
    Loss("linear_jsd", 2048, 128256, 2048),
)


def limited(cluster: int, shared_bytes: int) -> None:
    """The portable family of attention, and losses, as on a GPU with these limits; 0: the GPU's own."""
    from fusegrad import _C

    _C.flex.force_family("portable")
    _C.force_limits(cluster, shared_bytes)


@dataclass
class Timed:
    work: Callable[[], object]
    limit: Callable[[], None]

    def prepare(self) -> None:
        """Runs the work once: what is forced anew is planned anew, which takes the host longer than a known call."""
        self.limit()
        self.work()

    def run(self) -> None:
        self.work()


def attention_steps(row: Attention) -> dict[str, Timed]:
    import fusegrad

    batch, heads, length, size = row.sizes

    def make(count: int) -> Tensor:
        return torch.randn(batch, count, length, size, dtype=torch.bfloat16, requires_grad=True)

    inputs = make(heads), make(row.keys or heads), make(row.keys or heads)
    upstream = make(heads).detach()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length) if row.causal else None

    def ours(*x: Tensor) -> Tensor:
        return fusegrad.flex_attention(*x, block_mask=mask, enable_gqa=row.keys > 0)

    def flash(*x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*x, is_causal=row.causal, enable_gqa=row.keys > 0)

    steps: dict[str, Timed] = {}
    ways = [(name, ours, lambda limit=limit: limited(0, limit)) for name, limit in COLUMNS.items()]
    for name, attend, limit in [*ways, ("flash", flash, lambda: None)]:
        limit()
        out = attend(*inputs)

        def forward(attend: Callable[..., Tensor] = attend) -> object:
            with torch.no_grad():
                return attend(*inputs)

        def backward(out: Tensor = out) -> object:
            return torch.autograd.grad(out, inputs, upstream, retain_graph=True)

        steps |= {f"{name} forward": Timed(forward, limit), f"{name} backward": Timed(backward, limit)}
    return steps


def loss_steps(row: Loss) -> dict[str, Timed]:
    import fusegrad

    def make(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16).mul_(sizes[-1] ** -0.5 if row.hidden else 1).requires_grad_()

    target = torch.randint(row.classes, (row.rows,))
    if row.op == "cross_entropy":
        inputs: tuple[Tensor, ...] = (make(row.rows, row.classes),)
        work = lambda: fusegrad.cross_entropy(inputs[0], target)  # noqa: E731
    elif row.op == "jsd":
        inputs, teacher = (make(row.rows, row.classes),), make(row.rows, row.classes).detach()
        work = lambda: fusegrad.jsd(inputs[0], teacher)  # noqa: E731
    elif row.op == "linear_cross_entropy":
        inputs = make(row.rows, row.hidden), make(row.classes, row.hidden)
        work = lambda: fusegrad.linear_cross_entropy(*inputs, target)  # noqa: E731
    else:
        inputs = make(row.rows, row.hidden), make(row.classes, row.hidden)
        teachers = [make(row.rows, row.hidden).detach(), make(row.classes, row.hidden).detach()]
        work = lambda: fusegrad.linear_jsd(*inputs, *teachers)  # noqa: E731

    def step() -> object:
        return torch.autograd.grad(work(), inputs)

    ways = {
        "clusters": lambda: limited(0, 0),
        "no clusters": lambda: limited(1, 0),
        "99 KiB": lambda: limited(1, KIB_OF_SMALL << 10),
    }
    return {f"{name} both": Timed(step, limit) for name, limit in ways.items()}


def measured(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    result: dict[str, Any] = {"row": row.label, "failures": {}}
    steps = attention_steps(row) if isinstance(row, Attention) else loss_steps(row)
    for name, step in list(steps.items()):
        outcome = Outcome(lambda step=step: (step.prepare(), torch.cuda.synchronize()))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            del steps[name]
    times, _ = alternate(dict(steps), None, "cuda", options.rounds, options.reps)
    result["ms"] = {name: one.ms for name, one in times.items() if one.ms is not None}
    result["rounds"] = {name: one.rounds for name, one in times.items() if one.ms is not None}
    return result


def goals(row: Row, result: dict[str, Any]) -> list[tuple[str, bool]]:
    """A ratio to FlashAttention-2 of at most 1, to the same loss with clusters of at most LOSS_LIMIT."""
    attention = isinstance(row, Attention)
    than, limit = ("flash", 1.0) if attention else ("clusters", LOSS_LIMIT)
    found = []
    for name in result["ms"]:
        way, part = name.rsplit(" ", 1)
        if way != than and f"{than} {part}" in result["ms"]:
            ratio = over(result, name, f"{than} {part}")
            found.append((f"{name}: {ratio:.3f} x {than} <= {limit:g}", ratio <= limit))
    return found


def show(row: Row, result: dict[str, Any]) -> None:
    print(f"\n{row.label}")
    print_table(["", "ms"], [[name, f"{ms:.4f}"] for name, ms in result["ms"].items()])


def main(arguments: list[str]) -> int:
    parser = argument_parser(__doc__ or "", reps=5)
    parser.add_argument("--family", choices=("portable",), required=True, help="whose kernels attention takes")
    options = parser.parse_args(arguments)
    if options.device != "cuda":
        parser.error("--family portable: needs a CUDA GPU")
    if options.peers is not None:
        parser.error("--peers: FlashAttention-2 of PyTorch is the only one")
    run_rows(OP, options, ROWS, lambda row: measured(row, options), goals, show)
    return 0
