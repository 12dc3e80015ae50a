"""fusegrad.jax beside its peers in JAX: flex_attention of several models' shapes, forward alone and with the backward,
and linear_cross_entropy at a large vocabulary.

A time is that of one of several steps within one jitted program, several of which are enqueued, so that the host's part
is hidden as in a training step; "call" is a jitted call of one step, from the host. Memory is
XLA's own account of a program of one step: its temporaries, above arguments and results. Errors are against formulas in
float32.

    python benchmarks/jax_attention.py [--device cpu] [--rows triangle] [--peers none] [--output FOLDER]

Peers: XLA and cuDNN by jax.nn.dot_product_attention, and those that `make bench` installs.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("FUSEGRAD_TORCH", "0")  # the harness has torch, but fusegrad's half for it is not measured

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fusegrad.jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from harness.failure import Outcome
from harness.report import print_table
from harness.rows import argument_parser, over, peers_asked_for, run_rows
from harness.turns import take_turn

OP = "jax_attention"
STEPS = 2  # within a program; XLA compiles each of them
SHORT_STEPS = 4  # of rows whose step takes less time than the host takes for a program
CALLS = 8  # of a program, one enqueued behind the other
REST_S = 0.05  # before a measurement: after a tenth of a second of products an H200 lowers its clock by a tenth
AWAKE_S = 0.01  # what takes less runs once, uncounted, behind a rest: waking up takes most of a millisecond
MOST_S = 0.3  # of a program in a round: slow peers have fewer calls and repetitions
Result = dict[str, Any]
Step = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """kind: what is computed. `both`: the goal for forward and backward, ms; 0: none. steps: in a timed program."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    both: float = 0.0
    steps: int = STEPS

    @property
    def label(self) -> str:
        return f"{self.kind} {self.sizes} {self.dtype}"


CUDA_ROWS = (
    Row("triangle", (512, 4, 512, 32), both=1.35),
    Row("triangle", (256, 4, 256, 32), both=0.25, steps=SHORT_STEPS),
    Row("tokens", (2, 16, 512, 32), both=0.06, steps=SHORT_STEPS),
    Row("t5", (8, 12, 2048, 64), both=1.2),
    Row("causal", (4, 16, 4096, 128), both=1.65),
    Row("swin", (2048, 4, 49, 32)),
    Row("graphormer", (16, 8, 512, 64)),
    Row("alibi", (4, 16, 2048, 64)),
    Row("documents", (1, 16, 16384, 128)),
    Row("loss", (32768, 2560, 128256)),
)
CPU_ROWS = (
    Row("triangle", (8, 2, 64, 16), "float32"),
    Row("t5", (1, 2, 128, 16), "float32"),
    Row("causal", (1, 2, 256, 16), "float32"),
    Row("swin", (8, 2, 49, 16), "float32"),
    Row("graphormer", (2, 2, 64, 16), "float32"),
    Row("alibi", (1, 2, 128, 16), "float32"),
    Row("documents", (1, 2, 512, 16), "float32"),
    Row("loss", (256, 32, 1024), "float32"),
)


@dataclass(frozen=True)
class Problem:
    """leaves: query, key, value [B, H, S, D], then what the bias is made of; others: what wants no gradient.
    ours(*leaves, *others): the output. bias(*rest): what peers add to the scores, [B or 1, H or 1, S, S], or None.
    mask(): which pairs take part, or None; causal: that mask has a name.

    All that is large is an argument of the programs, or made by them: XLA would fold constants, for minutes."""

    leaves: tuple[jax.Array, ...]
    ours: Step
    bias: Step | None = None
    mask: Step | None = None
    causal: bool = False
    others: tuple[jax.Array, ...] = ()


def bucket(distance: Any) -> Any:
    """T5's, of 32 in both directions, up to 128 (arXiv:1910.10683)."""
    half = 16
    n = jnp.abs(distance)
    far = 8 + (jnp.log(jnp.maximum(n, 1) / 8) / np.log(128 / 8) * (half - 8)).astype(jnp.int32)
    return jnp.where(distance > 0, half, 0) + jnp.where(n < 8, n, jnp.minimum(far, half - 1))


def chosen(index: Any, table: Any) -> jax.Array:
    """Rows of the table are read by a product with it: XLA takes minutes for the gradient of an indexed read, 50
    million numbers added to a few hundred places."""
    return jax.nn.one_hot(index, table.shape[0], dtype=table.dtype)


def problem(row: Row) -> Problem:
    B, H, S, D = row.sizes
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), row.dtype)  # noqa: E731
    qkv = tuple(make(B, H, S, D) for _ in range(3))
    place = jnp.arange(S, dtype=jnp.int32)
    if row.kind == "tokens":

        def tokens(q: Any, k: Any, v: Any, pair: Any) -> Any:
            return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s + pair[b, h, i, j])

        return Problem((*qkv, make(B, H, S, S)), tokens, lambda pair: pair)
    if row.kind in ("triangle", "swin"):

        def ours(q: Any, k: Any, v: Any, pair: Any) -> Any:
            return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s + pair[h, i, j])

        return Problem((*qkv, make(H, S, S)), ours, lambda pair: pair[None])
    if row.kind == "t5":

        def t5(q: Any, k: Any, v: Any, table: Any, place: Any) -> Any:
            return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[bucket(j - i), h])

        def dense(table: Any, place: Any) -> jax.Array:
            return jnp.einsum("ijn,nh->hij", chosen(bucket(place - place[:, None]), table), table)[None]

        return Problem((*qkv, make(32, H)), t5, dense, others=(place,))
    if row.kind == "graphormer":
        index = jnp.asarray(rng.integers(0, 64, (B, S, S)), jnp.int32)

        def graph(q: Any, k: Any, v: Any, table: Any, index: Any) -> Any:
            return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[index[b, i, j], h])

        def by_index(table: Any, index: Any) -> jax.Array:
            return jnp.einsum("bijn,nh->bhij", chosen(index, table), table)

        return Problem((*qkv, make(64, H)), graph, by_index, others=(index,))

    def causal() -> jax.Array:
        at = jnp.arange(S, dtype=jnp.int32)
        return at[:, None] >= at

    if row.kind == "alibi":
        slopes = 2.0 ** (-8 * jnp.arange(1, H + 1, dtype=jnp.float32) / H)
        mask = fj.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S)

        def alibi(q: Any, k: Any, v: Any) -> Any:
            return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), mask)

        def slope() -> jax.Array:
            at = jnp.arange(S, dtype=jnp.float32)
            return (-slopes[:, None, None] * (at[:, None] - at))[None].astype(row.dtype)

        return Problem(qkv, alibi, slope, causal, True)
    if row.kind == "documents":
        of = place // (S // 16)
        allowed = lambda b, h, i, j: (i >= j) & (of[i] == of[j])  # noqa: E731
        mask = fj.create_block_mask(allowed, 1, 1, S, S)
        ours = lambda q, k, v: fj.flex_attention(q, k, v, None, mask)  # noqa: E731
        return Problem(qkv, ours, None, lambda: causal() & (of[:, None] == of))
    mask = fj.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S)
    return Problem(qkv, lambda q, k, v: fj.flex_attention(q, k, v, None, mask), None, causal, True)


# --- peers: functions of query, key and value [B, H, S, D] and a bias -----------------------------------------------


def _swapped(attention: Step) -> Step:
    """A function of [B, H, S, D] by one of [B, S, H, D]: XLA makes of it what the model's own layout would be."""

    def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(*(x.swapaxes(1, 2) for x in (q, k, v)), **options).swapaxes(1, 2)

    return run


def _dot_product(attention: Callable[..., Any], implementation: str, given: Problem) -> Step:
    """By a function with the signature of jax.nn.dot_product_attention."""
    attend = _swapped(attention)

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        mask = None if given.mask is None or given.causal else given.mask()[None, None]
        bias = None if given.bias is None else given.bias(*rest)
        return attend(q, k, v, bias=bias, mask=mask, is_causal=given.causal, implementation=implementation)

    return run


def nn(implementation: str) -> Callable[[Problem], Step]:
    return lambda given: _dot_product(jax.nn.dot_product_attention, implementation, given)


def tokamax(implementation: str) -> Callable[[Problem], Step]:
    def of(given: Problem) -> Step:
        import tokamax

        return _dot_product(tokamax.dot_product_attention, implementation, given)

    return of


def cuequivariance(given: Problem) -> Step:
    from cuequivariance_jax import triangle_attention

    if given.bias is None or given.mask is not None:
        raise NotImplementedError("has a bias and no mask")

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        bias = given.bias(*rest)  # type: ignore[misc]
        if bias.shape[0] != 1:
            raise NotImplementedError("has one bias for all rows")
        out = triangle_attention(q[None], k[None], v[None], bias[:, None], None, scale=q.shape[3] ** -0.5)
        return out[0][0].astype(q.dtype)

    return run


PEERS: dict[str, dict[str, Callable[[Problem], Step]]] = {
    "cuda": {
        "jax.nn XLA": nn("xla"),
        "jax.nn cuDNN": nn("cudnn"),
        "tokamax mosaic": tokamax("mosaic"),
        "tokamax triton": tokamax("triton"),
        "cuequivariance": cuequivariance,
    },
    "cpu": {"jax.nn XLA": nn("xla")},
}


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    device: str
    peers: Sequence[str]
    rounds: int
    reps: int


def again(step: Step, arguments: tuple[jax.Array, ...], steps: int) -> Any:
    """Lowers a program of several steps, each of which waits for the one before it and computes nothing besides."""

    def run(*arguments: jax.Array) -> Any:
        found = []
        for _ in range(steps):
            found.append(step(*arguments))
            arguments, _ = jax.lax.optimization_barrier((arguments, found[-1]))
        return found

    return jax.jit(run).lower(*arguments)


def timed(programs: dict[str, tuple[Step, Any, int]], result: Result, options: Options) -> None:
    """Those that run, each with its arguments, its number of steps. The rounds alternate between them."""

    take_turn()
    works: dict[str, tuple[Step, Any, int]] = {}
    short: set[str] = set()

    def seconds(name: str) -> float:
        program, arguments, calls = works[name]
        time.sleep(REST_S)
        if name in short:
            jax.block_until_ready(program(*arguments))
        started = time.perf_counter()
        jax.block_until_ready([program(*arguments) for _ in range(calls)])
        return time.perf_counter() - started

    for name, (program, arguments, steps) in programs.items():
        works[name] = (program, arguments, 1)
        outcome = Outcome(lambda name=name: seconds(name))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            del works[name]
            continue
        once = seconds(name)
        if once < AWAKE_S:
            short.add(name)
        calls = CALLS if steps > 1 else 1
        works[name] = (program, arguments, max(1, min(calls, int(MOST_S / once))))
    reps = {name: max(1, min(options.reps, int(MOST_S / seconds(name)))) for name in works}
    rounds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, (_, _, calls) in works.items():
            each = statistics.median(seconds(name) for _ in range(reps[name]))
            rounds[name].append(1e3 * each / (programs[name][2] * calls))
    result["rounds"] |= rounds
    result["ms"] |= {name: statistics.median(all_) for name, all_ in rounds.items()}


def of_attention(attend: Step, leaves: int) -> tuple[Step, Step]:
    """Forward, and forward with backward, of so many leaves, what wants no gradient, and the output's gradient."""

    def both(*arguments: jax.Array) -> Any:
        others = arguments[leaves:-1]
        return jax.vjp(lambda *x: attend(*x, *others), *arguments[:leaves])[1](arguments[-1])

    def forward(*arguments: jax.Array) -> Any:
        return attend(*arguments[:-1])

    return forward, both


def attention(row: Row, options: Options) -> Result:
    given = problem(row)
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}
    result["first_s"] = {}
    upstream = jnp.asarray(np.random.default_rng(1).standard_normal(given.leaves[0].shape), row.dtype)
    arguments = (*given.leaves, *given.others, upstream)
    attentions: dict[str, Step] = {"fusegrad": given.ours}
    for name in options.peers:
        outcome = Outcome(lambda name=name: PEERS[options.device][name](given))
        if outcome.failure:
            result["failures"][name] = outcome.failure
        else:
            attentions[name] = outcome.value
    right = Outcome(lambda: _truth(given, upstream))
    started = time.perf_counter()
    ours = jax.jit(of_attention(given.ours, len(given.leaves))[1]).lower(*arguments).compile()
    jax.block_until_ready(ours(*arguments))
    result["first_s"]["fusegrad"] = time.perf_counter() - started
    lowered: dict[str, tuple[Any, int]] = {}
    for name, attend in attentions.items():
        forward, both = of_attention(attend, len(given.leaves))

        def lower(name: str = name, forward: Step = forward, both: Step = both) -> None:
            if name != "fusegrad":
                lowered[f"{name} call"] = jax.jit(both).lower(*arguments), 1
            lowered[f"{name} forward"] = again(forward, arguments, row.steps), row.steps
            lowered[f"{name} both"] = again(both, arguments, row.steps), row.steps

        outcome = Outcome(lower)
        if outcome.failure:
            result["failures"][name] = outcome.failure
    programs: dict[str, tuple[Step, Any, int]] = {"fusegrad call": (ours, arguments, 1)}
    with ThreadPoolExecutor() as pool:  # peers take minutes one after the other
        waiting = {name: pool.submit(one.compile) for name, (one, _) in lowered.items()}
        for name, (_, steps) in lowered.items():
            outcome = Outcome(waiting[name].result)
            if outcome.failure:
                result["failures"][name] = outcome.failure
            else:
                programs[name] = outcome.value, arguments, steps
    for name in attentions:
        if f"{name} call" not in programs:
            continue
        one = programs[f"{name} call"][0]
        result["peak_mib"][name] = one.memory_analysis().temp_size_in_bytes / 2**20  # type: ignore[attr-defined]
        found = Outcome(lambda one=one: jax.block_until_ready(one(*arguments)))
        if not found.failure and not right.failure:
            result["errors"][name] = _errors(found.value, right.value)
    timed(programs, result, options)
    return result


def _truth(given: Problem, upstream: jax.Array) -> Any:
    def formula(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        scores = jnp.einsum("bhid,bhjd->bhij", q, k) * q.shape[3] ** -0.5
        if given.bias is not None:
            scores = scores + given.bias(*rest)
        if given.mask is not None:
            scores = jnp.where(given.mask(), scores, -jnp.inf)
        return jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores, -1), v)

    wide = [x.astype(jnp.float32) for x in given.leaves]
    _, both = of_attention(formula, len(wide))
    with jax.default_matmul_precision("highest"):
        found = jax.jit(both)(*wide, *given.others, upstream.astype(jnp.float32))
    return [np.asarray(x) for x in found]


def _errors(found: Any, right: Any) -> dict[str, float]:
    names = ("dq", "dk", "dv", "dbias")
    pairs = [(np.asarray(x.astype(jnp.float32)), t) for x, t in zip(found, right, strict=True)]
    return {n: float(np.linalg.norm(x - t) / np.linalg.norm(t)) for n, (x, t) in zip(names, pairs, strict=False)}


# --- the loss -------------------------------------------------------------------------------------------------------


def loss(row: Row, options: Options) -> Result:
    N, H, V = row.sizes
    result: Result = {"row": row.label, "failures": {}, "ms": {}, "rounds": {}, "errors": {}, "peak_mib": {}}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((N, H), np.float32), row.dtype)
    w = jnp.asarray(rng.standard_normal((V, H), np.float32) * H**-0.5, row.dtype)
    target = jnp.asarray(rng.integers(0, V, N), jnp.int32)

    def plain(x: Any, w: Any) -> Any:
        logits = (x @ w.T).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[:, None], 1)[:, 0]).mean()

    def products(x: Any, w: Any) -> Any:
        z = x @ w.T
        return z @ w, z.T @ x

    ways: dict[str, Step] = {
        "fusegrad": jax.grad(lambda x, w: fj.linear_cross_entropy(x, w, target), (0, 1)),
        "three products": products,
        "XLA": jax.grad(plain, (0, 1)),
    }
    for implementation in ("xla", "chunked_xla"):

        def theirs(x: Any, w: Any, implementation: str = implementation) -> Any:
            import tokamax

            how: Any = {"reduction": "mean", "implementation": implementation}
            return tokamax.linear_softmax_cross_entropy_loss(x, target, w.T, **how)

        ways[f"tokamax {implementation}"] = jax.grad(theirs, (0, 1))
    programs: dict[str, tuple[Step, Any, int]] = {}
    for name, way in ways.items():
        outcome = Outcome(lambda way=way: jax.jit(way).lower(x, w).compile())
        if outcome.failure:
            result["failures"][name] = outcome.failure
            continue
        result["peak_mib"][name] = outcome.value.memory_analysis().temp_size_in_bytes / 2**20
        programs[f"{name} both"] = (outcome.value, (x, w), 1)
    timed(programs, result, options)
    return result


# --- goals ----------------------------------------------------------------------------------------------------------


def goals(row: Row, result: Result) -> list[tuple[str, bool]]:
    ms, found = result["ms"], list[tuple[str, bool]]()

    def at_most(text: str, value: float, limit: float) -> None:
        found.append((f"{text}: {value:.3f} <= {limit:g}", value <= limit))

    if "fusegrad both" not in ms:
        return [("fusegrad runs", False)]
    if row.both:
        at_most("forward and backward, ms", ms["fusegrad both"], row.both)
    if row.kind == "loss" and "three products both" in ms:
        at_most("times the three products", over(result, "fusegrad both", "three products both"), 1.08)
    for part in ("forward", "both"):
        names = [n.removesuffix(f" {part}") for n in ms if n.endswith(f" {part}") and not n.startswith("fusegrad")]
        peers = [n for n in names if n != "three products"]
        if peers and f"fusegrad {part}" in ms:
            best = min(peers, key=lambda n: ms[f"{n} {part}"])
            at_most(f"{part}, times {best}'s", over(result, f"fusegrad {part}", f"{best} {part}"), 1.0)
    others = {n: m for n, m in result["peak_mib"].items() if n not in ("fusegrad", "three products")}
    if others and row.kind != "loss":
        best = min(others, key=lambda n: others[n])
        at_most(f"MiB of temporaries, beside {best}'s", result["peak_mib"]["fusegrad"], others[best])
    return found


def show(row: Row, result: Result) -> None:
    print(f"\n{row.label}")
    lines = []
    for name, value in result["ms"].items():
        of, part = name.rsplit(" ", 1)
        both = part == "both"
        errors = result["errors"].get(of)
        peak = f"{result['peak_mib'][of]:,.0f}" if both and of in result["peak_mib"] else ""
        first = result.get("first_s", {}).get(of)
        error = f"{max(errors.values()):.1e}" if both and errors else ""
        lines.append([name, f"{value:.3f}", peak, error, f"{first:.2f}" if both and first else ""])
    if lines:
        print_table(["", "ms", "MiB of temporaries", "largest error", "s of the first call"], lines)


def main() -> None:
    parser = argument_parser("fusegrad.jax beside its peers in JAX.", reps=10)
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    peers = peers_asked_for(parser, arguments.peers, PEERS[device])
    options = Options(device, peers, arguments.rounds, arguments.reps)
    run_rows(
        OP,
        arguments,
        CUDA_ROWS if device == "cuda" else CPU_ROWS,
        lambda row: (loss if row.kind == "loss" else attention)(row, options),
        lambda row, result: goals(row, result) if device == "cuda" else [],
        show,
    )


if __name__ == "__main__":
    main()
