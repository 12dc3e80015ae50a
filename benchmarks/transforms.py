"""Forward mode of attention, and the losses' transforms, beside PyTorch's and the one fused kernel that there is.

Attention is that of a DiT block (head sizes 64 to 128, 256 to 4096 tokens), without a mask, and a row with a learned
bias that has a tangent. "forward" is our output alone; "fusegrad" is torch.func.jvp, the output and its tangent for
tangents of query, key and value; "trained" is the same where a backward may follow. Peers: "math", the formula in plain
PyTorch; "sdpa", scaled_dot_product_attention's composite backend; "jvp-flash-attention", a package of Triton kernels.
The error is of the last head's tangent, relative to its root mean square in float64, beside that of "math".

Losses: the jvp of cross_entropy and of jsd by the student, and their Hessians' products with a vector by a second
backward, beside PyTorch's; the same of the linear ones by hidden states and weight; with the peak of memory above the
inputs.

On the CPU rows are small and in float32. Ratios are medians of the rounds'.

    python benchmarks/transforms.py [--device cpu] [--rows 'attention.*64'] [--peers none] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from harness.failure import Outcome
from harness.memory import cuda_peak_mib
from harness.report import print_table
from harness.rows import argument_parser, over, peers_asked_for, run_rows
from harness.timing import Repeated, alternate, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OP = "transforms"
OVER_FORWARD, OVER_PEER, OVER_EAGER = 3.3, 0.6, 1.5
OVER_FORMULA, OVER_FORMULAS_MEMORY = 1.0, 0.5  # a loss's derivative, of the formula's time and peak
Work = Callable[[], Any]
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """Attention's batch, heads, tokens and head size; or a loss's rows, of a linear one hidden size, and classes.
    limited: whether goals are its."""

    name: str
    sizes: tuple[int, ...]
    biased: bool = False
    limited: bool = True

    @property
    def label(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.sizes))})"


CUDA_ROWS = (
    Row("attention", (64, 16, 256, 64)),
    Row("attention", (16, 16, 1024, 64)),
    Row("attention", (4, 16, 4096, 64)),
    Row("attention", (64, 16, 256, 72), limited=False),
    Row("attention", (64, 8, 256, 128)),
    Row("attention", (16, 8, 1024, 128)),
    Row("attention", (4, 8, 4096, 128)),
    Row("attention, bias", (4, 16, 2048, 64), biased=True, limited=False),
    Row("cross entropy", (4096, 32768)),
    Row("linear cross entropy", (8192, 4096, 128256)),
    Row("jsd", (4096, 32768)),
    Row("jsd, top-k", (4096, 32768)),
    Row("linear jsd", (4096, 4096, 32768)),
)
CPU_ROWS = (
    Row("attention", (1, 4, 256, 64)),
    Row("attention", (1, 4, 256, 128)),
    Row("attention, bias", (1, 4, 256, 64), biased=True, limited=False),
    Row("cross entropy", (256, 4096)),
    Row("linear cross entropy", (512, 64, 8192)),
    Row("jsd", (256, 4096)),
)


# --- attention ---


def formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    score = query @ key.mT * query.size(-1) ** -0.5
    return (score if bias is None else score + bias.to(score.dtype)).softmax(-1) @ value


def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return fusegrad.flex_attention(query, key, value)
    return fusegrad.flex_attention(query, key, value, lambda score, b, h, q, k: score + bias[h, q, k])


def sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    mask = None if bias is None else bias.to(query.dtype)
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value, mask)


def jvp_flash_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    from jvp_flash_attention.jvp_attention import JVPAttn

    if bias is not None:
        raise NotImplementedError("no biases with tangents")
    return JVPAttn.fwd_dual(query, key, value)


PEERS: dict[str, dict[str, Attention]] = {
    "cuda": {"math": formula, "sdpa": sdpa, "jvp-flash-attention": jvp_flash_attention},
    "cpu": {"math": formula, "sdpa": sdpa},
}


def attention_steps(row: Row, device: str, peers: Sequence[str]) -> tuple[dict[str, Work], dict[str, float]]:
    """What is timed, and the errors."""
    batch, heads, tokens, size = row.sizes
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def operands() -> tuple[Tensor, ...]:
        made = [torch.randn(batch, heads, tokens, size, dtype=dtype) for _ in range(3)]
        return (*made, 0.5 * torch.randn(heads, tokens, tokens)) if row.biased else tuple(made)

    given, moved = operands(), operands()
    trained = tuple(t.detach().requires_grad_() for t in given)

    def jvp(attention: Attention, of: tuple[Tensor, ...]) -> Work:
        return lambda: torch.func.jvp(attention, of, moved)

    def forward() -> Tensor:
        with torch.no_grad():
            return ours(*given)

    steps = {"forward": forward, "fusegrad": jvp(ours, given), "trained": jvp(ours, trained)}
    steps |= {name: jvp(PEERS[device][name], given) for name in peers}
    last = [tuple(t[-1:, -1:] if t.dim() == 4 else t[-1:] for t in of) for of in (given, moved)]
    truth = torch.func.jvp(formula, *(tuple(t.double() for t in of) for of in last))[1]

    def error(tangent: Tensor) -> float:
        return float((tangent.double() - truth).norm() / truth.norm())

    errors = {
        "fusegrad": error(torch.func.jvp(ours, given, moved)[1][-1:, -1:]),
        "math": error(torch.func.jvp(formula, *last)[1]),
    }
    return steps, errors


# --- losses ---


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """As it is written in float32."""
    log_q, log_p = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    log_m = ((q + p) / 2).log()
    return ((q * (log_q - log_m)).sum() + (p * (log_p - log_m)).sum()) / (2 * student.size(0))


def top_k_divergence(student: Tensor, log_p: Tensor, index: Tensor) -> Tensor:
    """KL(p | q) over K classes and a bucket for the others."""
    log_q = student.float().log_softmax(-1)
    others = log_q.scatter(1, index, -torch.inf).logsumexp(1)
    tail = (1 - log_p.exp().sum(1)).log()
    each = (log_p.exp() * (log_p - log_q.gather(1, index))).sum(1) + tail.exp() * (tail - others)
    return each.mean()


Losses = tuple[list[Tensor], list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]


def losses(row: Row, dtype: torch.dtype) -> Losses:
    """What derivatives are by, and along; ours and the formula as functions of it."""
    rows, *hidden, classes = row.sizes
    shapes = [(rows, hidden[0]), (classes, hidden[0])] if hidden else [(rows, classes)]
    scale = hidden[0] ** -0.5 if hidden else 1.0

    def random() -> list[Tensor]:
        return [torch.randn(shape, dtype=dtype) * (scale if i else 1.0) for i, shape in enumerate(shapes)]

    given, moved, teacher = random(), random(), random()
    if "cross entropy" in row.name:
        target = torch.randint(classes, (rows,))
        loss = fusegrad.linear_cross_entropy if hidden else fusegrad.cross_entropy
        return (
            given,
            moved,
            lambda *t: loss(*t, target),
            lambda *t: F.cross_entropy((F.linear(*t) if hidden else t[0]).float(), target),
        )
    if row.name == "jsd, top-k":
        log_p, index = teacher[0].float().log_softmax(-1).topk(64, 1)
        return (
            given,
            moved,
            lambda x: fusegrad.jsd(x, (log_p, index), beta=0.0),
            lambda x: top_k_divergence(x, log_p, index),
        )
    if hidden:
        return (
            given,
            moved,
            lambda *t: fusegrad.linear_jsd(*t, *teacher),
            lambda *t: divergence(F.linear(*t), F.linear(*teacher)),
        )
    return given, moved, lambda x: fusegrad.jsd(x, teacher[0]), lambda x: divergence(x, teacher[0])


def loss_steps(row: Row, device: str) -> dict[str, Work]:
    given, moved, ours, formula = losses(row, torch.bfloat16 if device == "cuda" else torch.float32)
    leaves = [t.clone().requires_grad_() for t in given]

    def jvp(loss: Callable[..., Tensor]) -> Work:
        return lambda: torch.func.jvp(loss, tuple(given), tuple(moved))

    def product(loss: Callable[..., Tensor]) -> Work:
        """The Hessian's with a vector."""

        def work() -> None:
            grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
            torch.autograd.grad(grads, leaves, moved)

        return work

    return {
        "fusegrad gradient": lambda: torch.autograd.grad(ours(*leaves), leaves),
        "fusegrad jvp": jvp(ours),
        "math jvp": jvp(formula),
        "fusegrad second backward": product(ours),
        "math second backward": product(formula),
    }


# --- a row ---


def measured(row: Row, device: str, peers: Sequence[str], rounds: int, reps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    result: dict[str, Any] = {"row": row.label, "failures": {}}
    if row.name.startswith("attention"):
        steps, result["errors"] = attention_steps(row, device, peers)
    else:
        steps = loss_steps(row, device)
    for name, work in list(steps.items()):
        outcome = Outcome(lambda work=work: (work(), synchronize(device)))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            del steps[name]
    if device == "cuda" and not row.name.startswith("attention"):
        result["peak MiB"] = {name: cuda_peak_mib(work) for name, work in steps.items()}
    times, _ = alternate({name: Repeated(work) for name, work in steps.items()}, None, device, rounds, reps)
    result["ms"] = {name: one.ms for name, one in times.items() if one.ms is not None}
    result["rounds"] = {name: one.rounds for name, one in times.items() if one.ms is not None}
    return result


def goals(row: Row, result: dict[str, Any]) -> list[tuple[str, bool]]:
    if not row.name.startswith("attention"):
        return loss_goals(result)
    if "fusegrad" not in result["ms"]:
        return [("runs", False)]
    errors = result["errors"]
    ratio = errors["fusegrad"] / errors["math"]
    # For float32 both are rounding.
    found = [(f"error: {ratio:.2f} x math's <= {OVER_EAGER}", ratio <= OVER_EAGER)]
    for name, limit in (("forward", OVER_FORWARD), ("jvp-flash-attention", OVER_PEER)):
        if row.limited and name in result["ms"]:
            ratio = over(result, "fusegrad", name)
            found.append((f"{ratio:.2f} x {name} <= {limit}", ratio <= limit))
    return found


def loss_goals(result: dict[str, Any]) -> list[tuple[str, bool]]:
    found = []
    for step in ("jvp", "second backward"):
        names = f"fusegrad {step}", f"math {step}"
        if any(name not in result["ms"] for name in names):
            found.append((f"{step} runs", False))
            continue
        ratio = over(result, *names)
        found.append((f"{step}: {ratio:.2f} x the formula <= {OVER_FORMULA}", ratio <= OVER_FORMULA))
        if peaks := result.get("peak MiB"):
            ours, theirs = (peaks[name] for name in names)
            most = OVER_FORMULAS_MEMORY * theirs
            found.append((f"{step}: {ours:.0f} MiB <= {most:.0f}", ours <= most))
    return found


def show(row: Row, result: dict[str, Any]) -> None:
    errors = result.get("errors")
    print(f"\n{row.label}" + (f"; error {errors['fusegrad']:.1e}, math's {errors['math']:.1e}" if errors else ""))
    first = next(iter(result["ms"]))
    lines = [[name, f"{ms:.3f}", f"{over(result, name, first):.2f}"] for name, ms in result["ms"].items()]
    peaks = result.get("peak MiB", {})
    lines = [[*line, f"{peaks[line[0]]:.0f}" if peaks else ""] for line in lines]
    print_table(["", "ms", f"x {first}", "peak MiB"], lines)


def main() -> None:
    parser = argument_parser("Forward mode of attention, and the losses' transforms.", reps=5)
    arguments = parser.parse_args()
    device = arguments.device
    peers = peers_asked_for(parser, arguments.peers, PEERS[device])

    def one(row: Row) -> dict[str, Any]:
        return measured(row, device, peers, arguments.rounds, arguments.reps)

    run_rows(OP, arguments, CUDA_ROWS if device == "cuda" else CPU_ROWS, one, goals, show)


if __name__ == "__main__":
    main()
