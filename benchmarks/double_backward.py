"""Gradients of gradients of attention, beside attention in plain PyTorch, which keeps the scores.

"penalty" is a gradient penalty: a forward, a backward with create_graph=True, and the backward of the sum of the
gradients' squares; "product", torch.func.jvp of torch.func.grad, the Hessian's product with a vector. "gradient" is our
forward and backward alone. Beside milliseconds the MiB at the peak, beyond what was there. The error is that of the
last head's results, relative to their root mean square in float64, beside plain PyTorch's in the same dtype.

The goal is that of a penalty of 4096 tokens or more: plain PyTorch takes three times as long, or runs out of memory. On
the CPU rows are small and in float32. Ratios are medians of the rounds'.

    python benchmarks/double_backward.py [--device cpu] [--rows causal] [--dtype float16] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fusegrad
import torch
from harness.failure import Outcome
from harness.report import print_table
from harness.rows import argument_parser, over, run_rows
from harness.timing import Repeated, alternate, synchronize
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

OP = "double_backward"
OVER_EAGER, ERROR = 3.0, 1.5
LONG = 4096
CAP = 30.0
Attention = Callable[..., Tensor]
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Row:
    """Batch, heads, tokens, head size. biased: a learned bias of each head and key, whose gradient is differentiated
    too, and for which there is no goal."""

    sizes: tuple[int, int, int, int]
    name: str = "all pairs"

    @property
    def biased(self) -> bool:
        return self.name == "learned bias"

    @property
    def label(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.sizes))})"


CUDA_ROWS = (
    Row((1, 16, 1024, 64)),
    Row((1, 16, 4096, 64)),
    Row((1, 16, 4096, 64), "causal"),
    Row((1, 16, 4096, 64), "softcap"),
    Row((4, 16, 4096, 64)),
    Row((4, 16, 4096, 128)),
    Row((4, 16, 4096, 128), "causal"),
    Row((1, 8, 16384, 64)),
    Row((1, 16, 1024, 64), "learned bias"),
    Row((1, 16, 4096, 64), "learned bias"),
)
CPU_ROWS = (Row((1, 4, 256, 64)), Row((1, 4, 256, 64), "causal"), Row((1, 4, 256, 64), "learned bias"))


def plain(row: Row) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        s = q @ k.mT * q.shape[-1] ** -0.5
        if row.name == "softcap":
            s = CAP * torch.tanh(s / CAP)
        for b in bias:
            s = s + b[None, :, None]
        if row.name == "causal":
            i = torch.arange(s.size(-1))
            s = s.masked_fill(i > i[:, None], -torch.inf)
        return s.softmax(-1) @ v

    return attention


def ours(row: Row) -> Attention:
    tokens = row.sizes[2]
    mask: BlockMask | None = None
    if row.name == "causal":
        device = str(torch.get_default_device())
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, tokens, tokens, device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        if row.name == "softcap":
            return fusegrad.flex_attention(q, k, v, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP))
        if bias:
            return fusegrad.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[0][h, j])
        return fusegrad.flex_attention(q, k, v, block_mask=mask)

    return attention


def penalty(attention: Attention, tensors: Results) -> Results:
    grads = torch.autograd.grad(attention(*tensors).square().sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)


def product(attention: Attention, tensors: Results, moved: Results) -> Results:
    plain = tuple(t.detach() for t in tensors)
    grad = torch.func.grad(lambda *x: attention(*x).square().sum(), tuple(range(len(plain))))
    return torch.func.jvp(grad, plain, moved)[1]


# --- a row ---


def peak_mib(work: Callable[[], object], device: str) -> float | None:
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def relative(found: Results, truth: Results) -> float:
    """The largest of the results' errors."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def measured(row: Row, device: str, dtype: torch.dtype, rounds: int, reps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    _, heads, tokens, _ = row.sizes
    made = [torch.randn(row.sizes) for _ in range(6)]
    if row.biased:
        made = [*made[:3], torch.randn(heads, tokens), *made[3:], torch.randn(heads, tokens)]
    given = tuple(t.to(dtype).requires_grad_() for t in made[: len(made) // 2])
    moved = tuple(t.to(dtype) for t in made[len(made) // 2 :])
    mine, eager = ours(row), plain(row)
    work: dict[str, Callable[[], object]] = {
        "gradient": lambda: torch.autograd.grad(mine(*given).square().sum(), given),
        "fusegrad penalty": lambda: penalty(mine, given),
        "eager penalty": lambda: penalty(eager, given),
        "fusegrad product": lambda: product(mine, given, moved),
        "eager product": lambda: product(eager, given, moved),
    }
    result: dict[str, Any] = {"row": row.label, "dtype": str(dtype), "failures": {}, "mib": {}}
    for name in list(work):
        outcome = Outcome(lambda name=name: (work[name](), synchronize(device), peak_mib(work[name], device))[2])
        if outcome.failure:
            result["failures"][name] = outcome.failure
            del work[name]
            if device == "cuda":
                torch.cuda.empty_cache()
        else:
            result["mib"][name] = outcome.value
    if tokens <= LONG and not row.biased:
        last = tuple(t.detach()[-1:, -1:].clone().requires_grad_() for t in given)
        wide = tuple(t.detach().double().requires_grad_() for t in last)
        truth = penalty(eager, wide)
        result["errors"] = {
            "fusegrad": relative(tuple(g[-1:, -1:] for g in penalty(mine, given)), truth),
            "eager": relative(penalty(eager, last), truth),
        }
    steps = {name: Repeated(one) for name, one in work.items()}
    times, _ = alternate(steps, None, device, rounds, reps)
    result["ms"] = {name: one.ms for name, one in times.items() if one.ms is not None}
    result["rounds"] = {name: one.rounds for name, one in times.items() if one.ms is not None}
    return result


def goals(row: Row, result: dict[str, Any]) -> list[tuple[str, bool]]:
    found = []
    if errors := result.get("errors"):
        ratio = errors["fusegrad"] / errors["eager"]
        # For float32 both are rounding.
        found.append((f"error: {ratio:.2f} x eager's <= {ERROR}", ratio <= ERROR))
    if row.biased or row.sizes[2] < LONG or "fusegrad penalty" not in result["ms"]:
        return found
    if failure := result["failures"].get("eager penalty"):
        found.append((f"eager fails: {failure}", "memory" in failure.lower()))
    else:
        ratio = over(result, "eager penalty", "fusegrad penalty")
        found.append((f"eager takes {ratio:.2f} x as long >= {OVER_EAGER}", ratio >= OVER_EAGER))
    return found


def show(row: Row, result: dict[str, Any]) -> None:
    errors = result.get("errors")
    print(f"\n{row.label}" + (f"; error {errors['fusegrad']:.1e}, eager's {errors['eager']:.1e}" if errors else ""))
    mib = result["mib"]
    lines = [[n, f"{ms:.3f}", "" if mib[n] is None else f"{mib[n]:.0f}"] for n, ms in result["ms"].items()]
    print_table(["", "ms", "MiB"], lines)


def main() -> None:
    parser = argument_parser("Gradients of gradients of attention.", reps=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 on CUDA, else float32")
    arguments = parser.parse_args()
    device = arguments.device
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device == "cuda" else "float32"))

    def one(row: Row) -> dict[str, Any]:
        return measured(row, device, dtype, arguments.rounds, arguments.reps)

    run_rows(OP, arguments, CUDA_ROWS if device == "cuda" else CPU_ROWS, one, goals, show)


if __name__ == "__main__":
    main()
