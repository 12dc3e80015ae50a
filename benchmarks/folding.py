"""Models of proteins: triangle attention with padded residues beside all peers, rows of an MSA, attention with a pair
bias, a block of Boltz's trunk with its own attention, cuEquivariance's and ours, and the host's time of a call.

Triangle attention, forward and backward each for itself, in bfloat16 and float32; "ordered" is our deterministic
backward. "msa" is the same function for sequences of which each has all keys. "tokens" is attention_pair_bias with its
norms, projections and gate, of one sample of a trunk and of the samples of a diffusion step. "pairs" is a whole step of
Boltz's pairformer layer, its own code: `own` computes attention as the package does, `cuequivariance` with its flag for
that, `fusegrad` after `fusegrad.integrations.folding.apply("boltz")`. Errors are against float64. "host" is a call so
small that its time is the host's.

    python benchmarks/folding.py [--device cpu] [--rows triangle] [--peers none] [--output FOLDER]

Peers: those that `make bench` installs; the trunk: `pip install --no-deps boltz einops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import folding
from harness.failure import Outcome
from harness.memory import cuda_peak_mib
from harness.report import print_table
from harness.rows import argument_parser, over, peers_asked_for, run_rows
from harness.timing import Repeated, Timed, alternate, synchronize, wall_us
from torch import Tensor

OP = "folding"
BF16, FP32 = torch.bfloat16, torch.float32
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """kind: triangle, msa, tokens, pairs (a trunk block) or host. sizes: heads and head size; of an MSA its sequences
    first; of tokens the samples first and the width of the pair representation last."""

    kind: str
    N: int
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.N} {str(self.dtype).removeprefix('torch.')} {self.sizes}"


CUDA_ROWS = (
    *(Row("triangle", N, BF16, (4, 32)) for N in (256, 512, 768, 1024)),
    Row("host", 8, BF16, (4, 32)),
    *(Row("pairs", N, BF16, (384, 128, 16)) for N in (256, 512)),
    Row("pairs", 256, FP32, (384, 128, 16)),
    *(Row("tokens", N, dtype, (1, 16, 24, 128)) for dtype in (BF16, FP32) for N in (384, 768)),
    *(Row("tokens", 384, dtype, (48, 16, 48, 128)) for dtype in (BF16, FP32)),
    *(Row("msa", 256, dtype, (512, 8, 32)) for dtype in (BF16, FP32)),
    *(Row("triangle", N, FP32, (4, 32)) for N in (256, 512, 768, 1024)),
    Row("triangle", 253, BF16, (4, 32)),
)
CPU_ROWS = (
    Row("triangle", 64, FP32, (4, 32)),
    Row("triangle", 61, FP32, (4, 32)),
    Row("msa", 48, FP32, (16, 8, 32)),
    Row("tokens", 64, FP32, (2, 4, 24, 32)),
    Row("pairs", 48, FP32, (96, 64, 8)),
    Row("host", 2, FP32, (4, 32)),
)


WRONG = 0.1  # above this relative error a time says nothing; trifast's is 0.7 where sequences outnumber tokens


@dataclass(frozen=True)
class Options:
    device: str
    peers: Sequence[str]
    rounds: int
    reps: int


@dataclass
class OfPackage(Repeated):
    """A step of Boltz's own code, with fusegrad in it or without: it takes its place outside the measured time."""

    ours: bool

    def prepare(self) -> None:
        from fusegrad.integrations.folding import apply, remove

        (apply if self.ours else remove)("boltz")


def timed(works: Mapping[str, Callable[[], object] | Repeated], result: Result, options: Options) -> None:
    """Those that run, after a first call that may compile."""
    steps: dict[str, Timed] = {}
    for name, work in works.items():
        step = work if isinstance(work, Repeated) else Repeated(work)
        outcome = Outcome(lambda step=step: (step.prepare(), step.run(), synchronize(options.device)))
        if outcome.failure:
            result["failures"][name] = outcome.failure
        else:
            steps[name] = step
    times, _ = alternate(steps, None, options.device, options.rounds, options.reps)
    result["ms"] |= {name: one.ms for name, one in times.items() if one.ms is not None}
    result["rounds"] |= {name: one.rounds for name, one in times.items() if one.ms is not None}


def both_ways(
    name: str, call: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor
) -> dict[str, Callable[[], object]]:
    def forward() -> None:
        with torch.no_grad():
            call()

    return {f"{name} forward": forward, f"{name} both": lambda: torch.autograd.grad(call(), leaves, upstream)}


def triangle(row: Row, options: Options) -> Result:
    *sequences, H, D = row.sizes
    given = folding.problem(row.N, H, D, row.dtype, *sequences)
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}
    attentions = {"fusegrad": folding.ours(given)}
    if options.device == "cuda":
        attentions["ordered"] = folding.ours(given, deterministic=True)
    for name in options.peers:
        outcome = Outcome(lambda name=name: folding.PEERS[options.device][name](given))
        if outcome.failure:
            result["failures"][name] = outcome.failure
        else:
            attentions[name] = outcome.value
    right = folding.truth(given)
    works: dict[str, Callable[[], object]] = {}
    for name, attention in attentions.items():
        outcome = Outcome(functools.partial(folding.errors, attention, given, right))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            continue
        if (worst := max(outcome.value.values())) > WRONG:
            result["failures"][name] = f"wrong results, with a relative error of {worst:.2f}"
            continue
        result["errors"][name] = outcome.value

        works |= both_ways(name, functools.partial(attention, *given.leaves), given.leaves, given.upstream)
        if options.device == "cuda":
            result["peak_mib"][name] = cuda_peak_mib(works[f"{name} both"])
    timed(works, result, options)
    return result


def tokens(row: Row, options: Options) -> Result:
    M, H, D, c = row.sizes
    given = folding.pair_bias_problem(M, row.N, H, D, c, row.dtype)
    exact = given.double()
    right = exact.out(folding.pair_bias_formula)
    truth = [right.detach(), *torch.autograd.grad(right, exact.leaves, exact.upstream)]
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}
    works: dict[str, Callable[[], object]] = {}
    for name, way in folding.pair_bias_functions(options.peers).items():
        outcome = Outcome(lambda way=way: (attention := way(), given.out(attention)))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            continue
        attention, out = outcome.value
        found = [out.detach(), *torch.autograd.grad(out, given.leaves, given.upstream)]
        # Padded tokens are queries like others in some, and nothing in others.
        kept = (given.mask != 0)[..., None]
        pairs_of = zip(("out", *given.given), found, truth, strict=True)
        result["errors"][name] = {
            what: float(((mine.double() - theirs) * (kept if what == "out" else 1)).norm() / theirs.norm())
            for what, mine, theirs in pairs_of
            if what != "b_ln_z"  # one number more for all of a row's scores: its gradient is 0
        }

        works |= both_ways(name, functools.partial(given.out, attention), given.leaves, given.upstream)
        if options.device == "cuda":
            result["peak_mib"][name] = cuda_peak_mib(works[f"{name} both"])
    timed(works, result, options)
    return result


def pairs(row: Row, options: Options) -> Result:
    from fusegrad.integrations.folding import apply, remove

    block = folding.trunk(row.N, *row.sizes, low=row.dtype == BF16)
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}

    def with_ours(function: Callable[[], Any]) -> Any:
        apply("boltz")
        try:
            return function()
        finally:
            remove("boltz")

    ways: dict[str, Callable[[Callable[..., Any]], Any]] = {"own": lambda function: function()}
    if "cuequivariance" in options.peers:
        ways["cuequivariance"] = lambda function: function(use_cuequiv_attn=True)
    ways["fusegrad"] = with_ours
    exact = folding.trunk(row.N, *row.sizes, low=False).gradient() if row.dtype == BF16 else block.gradient()
    works: dict[str, Callable[[], object] | Repeated] = {}
    for name, way in ways.items():
        outcome = Outcome(lambda way=way: way(block.gradient))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            continue
        # For the weight of a triangle's bias, against the package's own in float32.
        result["errors"][name] = {"bias weight": float((outcome.value - exact).norm() / exact.norm())}
        step = functools.partial(block.step, use_cuequiv_attn=True) if name == "cuequivariance" else block.step
        works[f"{name} step"] = OfPackage(step, ours=name == "fusegrad")
        if options.device == "cuda":
            result["peak_mib"][name] = cuda_peak_mib(functools.partial(way, block.step))
    timed(works, result, options)
    remove("boltz")
    return result


def host(row: Row, options: Options) -> Result:
    import fusegrad

    given = folding.problem(row.N, *row.sizes, row.dtype)
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}
    bias, mask = given.bias[0, 0], given.mask[0, :, 0, 0]
    q, k, v = (t[0] for t in (given.q, given.k, given.v))

    def adapter() -> None:
        """What a user writes where there is no drop-in."""

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.where(mask[b, j], score + bias[h, i, j], -1e9)

        fusegrad.flex_attention(q, k, v, score_mod)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("fusegrad", functools.partial(folding.ours(given), *given.leaves)),
        ("flex_attention of a score_mod", adapter),
    ]

    def theirs() -> Callable[..., object]:
        call = folding.cuequivariance(given)
        call(*given.leaves)  # what it lacks shows here
        return call

    if "cuequivariance" in options.peers and options.device == "cuda":
        outcome = Outcome(theirs)
        if outcome.failure:
            result["failures"]["cuequivariance"] = outcome.failure
        else:
            calls.append(("cuequivariance", functools.partial(outcome.value, *given.leaves)))
    torch.set_default_device(None)  # its function mode would be part of each call's time
    try:
        result["host_us"] = wall_us(calls, options.device, 1000)
    finally:
        torch.set_default_device(options.device)
    return result


MEASURED = {"triangle": triangle, "msa": triangle, "tokens": tokens, "pairs": pairs, "host": host}


def goals(row: Row, result: Result, peers: Sequence[str]) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    ms = result["ms"]

    def at_most(text: str, value: float, limit: float) -> None:
        found.append((f"{text}: {value:.2f} <= {limit:g}", value <= limit))

    if row.kind == "host":
        at_most("us of the host, forward", result["host_us"]["fusegrad"], 60)
    if row.kind in ("triangle", "msa", "tokens"):
        for part in ("forward", "both"):
            theirs = {
                name: over(result, f"fusegrad {part}", f"{name} {part}") for name in peers if f"{name} {part}" in ms
            }
            if theirs:
                name = max(theirs, key=lambda peer: theirs[peer])
                at_most(f"{part}, times {name}'s", theirs[name], 1.0)
        if row.kind == "triangle" and "cuequivariance both" in ms:
            at_most("both, times cuequivariance's", over(result, "fusegrad both", "cuequivariance both"), 1 / 2.5)
        if "ordered both" in ms:
            at_most("deterministic, times the default", over(result, "ordered both", "fusegrad both"), 1.1)
    if row.kind == "pairs" and "fusegrad step" in ms and "own step" in ms:
        at_most("step, times its own", over(result, "fusegrad step", "own step"), 1.0)
        if result["peak_mib"]:
            at_most("memory, times its own", result["peak_mib"]["fusegrad"] / result["peak_mib"]["own"], 0.7)
    return found


def show(row: Row, result: Result) -> None:
    print(f"\n{row.label}")
    for name, us in result.get("host_us", {}).items():
        print(f"  {name}: {us:.1f} us")
    lines = []
    for name, value in result["ms"].items():
        of, part = name.rsplit(" ", 1)
        peak = result["peak_mib"].get(of)
        worst = max(result["errors"][of].values()) if of in result["errors"] else float("nan")
        shown = part != "forward"
        lines.append([name, f"{value:.3f}", f"{peak:,.0f}" if peak and shown else "", f"{worst:.1e}" if shown else ""])
    if lines:
        print_table(["", "ms", "peak MiB", "largest error"], lines)


def main() -> None:
    parser = argument_parser("Models of proteins.", reps=5)
    arguments = parser.parse_args()
    device = arguments.device
    options = Options(
        device, peers_asked_for(parser, arguments.peers, folding.PEERS[device]), arguments.rounds, arguments.reps
    )
    run_rows(
        OP,
        arguments,
        CUDA_ROWS if device == "cuda" else CPU_ROWS,
        lambda row: MEASURED[row.kind](row, options),
        lambda row, result: goals(row, result, options.peers) if device == "cuda" else [],
        show,
    )


if __name__ == "__main__":
    main()
