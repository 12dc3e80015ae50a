"""Attention with learned biases, and the shapes around it, beside every peer that can compute them.

Rows are models' shapes: triangle attention and pair biases (AlphaFold, Evoformers, with heads last as a linear layer
of pairs leaves them, with odd lengths and for two proteins at once too), T5's buckets, windows (Swin), Graphormer's
tables, head sizes from 32 to 192, few queries against a long cache, and language models' shapes. Forward and backward
are timed each for itself. "plain" is our own attention without the function, "frozen" our backward where the tables
want no gradient, "ordered" the deterministic one. Peers: compiled flex_attention, SDPA's memory-efficient backend with
the bias as attn_mask, its cuDNN backend, FlashAttention 4, cuEquivariance's triangle_attention, and the formula in
plain PyTorch, "math".

Traffic is what a call must move once, with the biases, at 7/8 of the peak of the GPU's memory (4.3 TB/s of an H200).

On the CPU the rows are smaller ones of the same models, in float32, beside "math", SDPA ("sdpa", with the bias as
attn_mask) and compiled flex_attention's forward. Ratios are medians of the rounds': others may use the machine too.

    python benchmarks/learned_biases.py [--device cpu] [--rows 'triangle|t5'] [--peers none] [--output FOLDER]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from harness.failure import Outcome
from harness.report import print_table
from harness.rows import argument_parser, over, peers_asked_for, run_rows
from harness.timing import alternate, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

OP = "learned_biases"
BF16, FP32 = torch.bfloat16, torch.float32
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Bias:
    """A score_mod, the tables whose gradients are wanted, and the same as a dense tensor that broadcasts to scores."""

    score_mod: Callable[..., Tensor]
    tables: list[Tensor]
    dense: Callable[[], Tensor]
    captured: int = 0  # bytes of other tensors that it reads

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tables)


@dataclass(frozen=True)
class Row:
    """A shape and its limits: of the mod over plain, of both over the traffic. group: query heads to a key head."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    size: int
    value_size: int = 0
    bias: Callable[[Row], Bias] | None = None
    causal: bool = False
    group: int = 1
    backward: bool = True
    forward_limit: float | None = None
    backward_limit: float | None = None
    forward_traffic: float | None = None
    backward_traffic: float | None = None
    best: float = 1.0  # times as fast as the best peer, forward and backward together where it is not 1

    @property
    def label(self) -> str:
        size = f"{self.size}" if not self.value_size else f"{self.size}/{self.value_size}"
        keys = "" if self.keys == self.queries else f"/{self.keys}"
        return f"{self.name} ({self.batch}, {self.heads}, {self.queries}{keys}, {size})"

    @property
    def columns(self) -> int:
        return self.value_size or self.size


# --- biases ---


def floats(*sizes: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(sizes).mul_(0.5).to(dtype).requires_grad_()


def pairs(of: str, dtype: torch.dtype, heads_last: bool = False) -> Callable[[Row], Bias]:
    """`t[h, q, k]` or `t[b, h, q, k]`. heads_last: a view of what a linear layer makes of pairs, `[.., q, k, h]`."""

    def make(row: Row) -> Bias:
        sizes = {"b": row.batch, "h": row.heads, "q": row.queries, "k": row.keys}
        leaf = floats(*(sizes[letter] for letter in (of.replace("h", "") + "h" if heads_last else of)), dtype=dtype)
        table = leaf.movedim(-1, -3) if heads_last else leaf

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + (table[h, q, k] if of == "hqk" else table[b, h, q, k])

        return Bias(score_mod, [leaf], lambda: table[None] if of == "hqk" else table)

    return make


def two_groups(dtype: torch.dtype) -> Callable[[Row], Bias]:
    """`t[b // n, h, q, k]`: the batches are the rows, or the samples, of two proteins."""

    def make(row: Row) -> Bias:
        table, n = floats(2, row.heads, row.queries, row.keys, dtype=dtype), row.batch // 2

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + table[b // n, h, q, k]

        return Bias(score_mod, [table], lambda: table.repeat_interleave(n, 0))

    return make


def t5(row: Row) -> Bias:
    """T5's 32 buckets of distances, half of them for each direction."""
    table = floats(32, row.heads)
    exact, most, far = 8, 15, 128

    def bucket(distance: Tensor) -> Tensor:
        n = torch.abs(distance)
        steps = torch.log(torch.clamp(n, min=1).float() / exact) / math.log(far / exact) * (most + 1 - exact)
        large = torch.clamp(exact + steps.to(torch.int32), max=most)
        return torch.where(n < exact, n, large) + torch.where(distance > 0, most + 1, 0)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[bucket(k - q), h]

    def dense() -> Tensor:
        places = torch.arange(row.keys) - torch.arange(row.queries)[:, None]
        return table[bucket(places)].permute(2, 0, 1)[None]

    return Bias(score_mod, [table], dense)


def window(heads_last: bool) -> Callable[[Row], Bias]:
    """Swin's table of relative places in a window: `t[idx[q, k], h]` or `t[h, idx[q, k]]`."""

    def make(row: Row) -> Bias:
        side = math.isqrt(row.queries)
        at = torch.arange(row.queries)
        y, x = (part[:, None] - part + side - 1 for part in (at // side, at % side))
        index = (y * (2 * side - 1) + x).to(torch.int32)
        elements = (2 * side - 1) ** 2
        table = floats(elements, row.heads) if heads_last else floats(row.heads, elements)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + (table[index[q, k], h] if heads_last else table[h, index[q, k]])

        def dense() -> Tensor:
            return (table[index.long()].permute(2, 0, 1) if heads_last else table[:, index.long()])[None]

        return Bias(score_mod, [table], dense, index.nbytes)

    return make


def graphormer(row: Row) -> Bias:
    """Two tables, of the distance of two nodes and of the edge between them."""
    distance, edge = (torch.randint(most, (row.batch, row.queries, row.keys), dtype=torch.int32) for most in (24, 64))
    of_distance, of_edge = floats(512, row.heads), floats(64, row.heads)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + of_distance[distance[b, q, k], h] + of_edge[edge[b, q, k], h]

    def dense() -> Tensor:
        return (of_distance[distance.long()] + of_edge[edge.long()]).permute(0, 3, 1, 2)

    return Bias(score_mod, [of_distance, of_edge], dense, distance.nbytes + edge.nbytes)


BOX: dict[str, Any] = {"forward_limit": 1.35, "backward_limit": 1.40}
BUCKETS: dict[str, Any] = {"forward_limit": 1.15, "backward_limit": 1.25}
TABLE: dict[str, Any] = {"forward_limit": 1.35, "backward_limit": 1.40}
GRAPH: dict[str, Any] = {"forward_limit": 2.0, "backward_limit": 2.0}
ATTENTION_ALONE = ("cudnn", "fa4")  # peers of rows without a bias, where none are asked for
SMALL: dict[str, Any] = {"forward_traffic": 2.0, "backward_traffic": 2.5}
TRIANGLE = pairs("hqk", BF16)
CUDA_ROWS = (
    Row("triangle", 256, 4, 256, 256, 32, bias=TRIANGLE, best=1.5, **BOX),
    Row("triangle", 512, 4, 512, 512, 32, bias=TRIANGLE, best=1.5, **BOX),
    Row("triangle", 768, 4, 768, 768, 32, bias=TRIANGLE, best=1.5, **BOX),
    Row("af3 tokens", 2, 16, 512, 512, 24, bias=pairs("bhqk", BF16), **BOX),
    Row("triangle", 253, 4, 253, 253, 32, bias=TRIANGLE, **BOX),
    Row("triangle, heads last", 256, 4, 256, 256, 32, bias=pairs("hqk", BF16, heads_last=True), **BOX),
    Row("af3 tokens, heads last", 2, 16, 512, 512, 24, bias=pairs("bhqk", BF16, heads_last=True)),
    Row("two triangles", 512, 4, 256, 256, 32, bias=two_groups(BF16), **BOX),
    Row("af3 samples", 48, 16, 384, 384, 48, bias=two_groups(BF16), **BOX),
    Row("af3 float32", 2, 16, 768, 768, 64, bias=pairs("bhqk", FP32), **BOX),
    Row("af3 atoms", 64, 4, 32, 128, 32, bias=pairs("bhqk", BF16), **BOX),
    Row("evoformer", 16, 4, 768, 768, 32, bias=pairs("bhqk", BF16), **BOX),
    Row("t5", 8, 12, 2048, 2048, 64, bias=t5, **BUCKETS),
    Row("t5", 32, 12, 512, 512, 64, bias=t5, **BUCKETS),
    Row("swin 7x7", 2048, 16, 49, 49, 32, bias=window(True), **TABLE, **SMALL),
    Row("swin 8x8", 2048, 16, 64, 64, 32, bias=window(False), **TABLE, **SMALL),
    Row("graphormer", 256, 32, 64, 64, 24, bias=graphormer, **GRAPH),
    Row("heads", 64, 16, 256, 256, 80, **SMALL),
    Row("heads", 8, 16, 2048, 2048, 80),
    Row("heads", 16, 16, 1024, 1024, 72),
    Row("heads", 8, 16, 1024, 1024, 48),
    Row("heads causal", 4, 32, 4096, 4096, 96, causal=True),
    Row("heads causal", 2, 16, 4096, 4096, 192, 128, causal=True),
    Row("heads", 16, 16, 2048, 2048, 32),
    Row("heads", 16, 8, 1024, 1024, 32),
    Row("heads", 128, 12, 197, 197, 64, **SMALL),
    Row("heads causal", 64, 32, 512, 512, 64, causal=True),
    Row("heads causal", 32, 32, 1024, 1024, 64, causal=True),
    Row("heads causal", 16, 32, 2048, 2048, 64, causal=True),
    Row("heads causal", 32, 16, 1024, 1024, 128, causal=True),
    Row("heads causal", 16, 16, 2048, 2048, 128, causal=True),
    Row("heads causal", 4, 16, 3001, 3001, 128, causal=True),
    Row("few", 1, 32, 1, 8192, 128, group=4, backward=False, forward_traffic=1.5),
    Row("few", 16, 32, 1, 8192, 128, group=4, backward=False, forward_traffic=1.5),
    Row("few", 64, 32, 1, 4096, 128, group=4, backward=False, forward_traffic=1.5),
    Row("few", 1, 32, 1, 131072, 128, group=4, backward=False, forward_traffic=1.5),
    Row("ahead", 2, 16, 8192, 8192, 128),
    Row("ahead causal", 2, 16, 8192, 8192, 128, causal=True),
    Row("ahead", 2, 32, 8192, 8192, 64),
    Row("ahead", 2, 8, 8192, 8192, 256),
    Row("ahead grouped causal", 2, 32, 8192, 8192, 128, causal=True, group=4),
)
# Enough for some milliseconds on two cores.
CPU_ROWS = (
    Row("triangle", 16, 4, 128, 128, 32, bias=TRIANGLE),
    Row("triangle", 8, 4, 256, 256, 32, bias=TRIANGLE),
    Row("triangle, heads last", 8, 4, 253, 253, 32, bias=pairs("hqk", FP32, heads_last=True)),
    Row("two triangles", 16, 4, 128, 128, 32, bias=two_groups(FP32)),
    Row("two triangles", 16, 4, 256, 256, 32, bias=two_groups(FP32)),
    Row("af3 tokens", 1, 16, 256, 256, 24, bias=pairs("bhqk", FP32)),
    Row("af3 tokens", 1, 8, 384, 384, 64, bias=pairs("bhqk", FP32)),
    Row("af3 atoms", 16, 4, 32, 128, 32, bias=pairs("bhqk", FP32)),
    Row("evoformer", 4, 4, 256, 256, 32, bias=pairs("bhqk", FP32)),
    Row("t5", 1, 12, 512, 512, 64, bias=t5),
    Row("t5", 4, 8, 128, 128, 64, bias=t5),
    Row("swin 7x7", 32, 16, 49, 49, 32, bias=window(True)),
    Row("swin 8x8", 32, 16, 64, 64, 32, bias=window(False)),
    Row("graphormer", 8, 32, 64, 64, 24, bias=graphormer),
    Row("heads", 2, 8, 256, 256, 80),
    Row("heads", 1, 8, 1024, 1024, 80),
    Row("heads", 1, 8, 512, 512, 72),
    Row("heads causal", 1, 8, 1024, 1024, 96, causal=True),
    Row("heads causal", 1, 4, 1024, 1024, 192, 128, causal=True),
    Row("heads", 1, 8, 1024, 1024, 32),
    Row("heads", 2, 12, 197, 197, 64),
    Row("heads causal", 1, 16, 512, 512, 64, causal=True),
    Row("few", 1, 32, 1, 4096, 128, group=4, backward=False),
    Row("few", 4, 32, 1, 2048, 128, group=4, backward=False),
)


# --- implementations ---


@dataclass
class Call:
    """One forward or one backward again and again; the backward's graph is kept."""

    attention: Attention
    inputs: tuple[Tensor, Tensor, Tensor]
    tables: Sequence[Tensor] = ()
    upstream: Tensor | None = None
    _out: Tensor | None = field(default=None, repr=False)

    def prepare(self) -> None:
        if self.upstream is not None and self._out is None:
            self._out = self.attention(*self.inputs)

    def run(self) -> None:
        if self.upstream is None:
            with torch.no_grad():
                self.attention(*self.inputs)
        else:
            assert self._out is not None
            wanted = (*self.inputs, *(t for t in self.tables if t.requires_grad))
            torch.autograd.grad(self._out, wanted, self.upstream, retain_graph=True)


def causal_mask(row: Row) -> Any:
    if not row.causal:
        return None
    return create_block_mask(
        lambda b, h, q, k: q >= k, None, None, row.queries, row.keys, device=torch.get_default_device().type
    )


def ours(row: Row, bias: Bias | None) -> dict[str, Attention]:
    import fusegrad

    mask = causal_mask(row)
    how: dict[str, Any] = {"block_mask": mask, "enable_gqa": row.group > 1}

    def plain(*x: Tensor) -> Tensor:
        return fusegrad.flex_attention(*x, **how)

    if bias is None:
        return {"plain": plain}

    def learned(wanted: bool = True, **more: Any) -> Attention:
        def attention(*x: Tensor) -> Tensor:
            for table in bias.tables:
                table.requires_grad_(wanted)
            return fusegrad.flex_attention(*x, bias.score_mod, **how, **more)

        return attention

    return {
        "plain": plain,
        "frozen": learned(wanted=False),
        "fusegrad": learned(),
        "ordered": learned(deterministic=True),
    }


def flex(row: Row, bias: Bias | None) -> Attention:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    how = {"block_mask": causal_mask(row), "enable_gqa": row.group > 1, "score_mod": bias and bias.score_mod}
    return lambda *x: compiled(*x, **how)


def sdpa(backends: Sequence[SDPBackend], row: Row, bias: Bias | None) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = None
        if bias is not None:
            shape = (row.batch, row.heads, row.queries, row.keys)
            mask = bias.dense().to(query.dtype).expand(shape)
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=row.causal, enable_gqa=row.group > 1
            )

    return attention


def fa4(row: Row, bias: Bias | None) -> Attention:
    if bias is not None:
        raise NotImplementedError("no learned biases")
    from flash_attn.cute import flash_attn_func

    def attention(*x: Tensor) -> Tensor:
        out = flash_attn_func(*(t.transpose(1, 2) for t in x), causal=row.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


def cuequivariance(row: Row, bias: Bias | None) -> Attention:
    if bias is None or not row.name.startswith("triangle"):
        raise NotImplementedError("triangle attention alone")
    from cuequivariance_torch import triangle_attention

    # [1, N, H, N, D], with a bias [1, 1, H, N, N].
    def attention(*x: Tensor) -> Tensor:
        return triangle_attention(*(t[None] for t in x), bias=bias.dense()[None])[0]

    return attention


def formula(row: Row, bias: Bias | None) -> Attention:
    if row.batch * row.heads * row.queries * row.keys > 2**30:
        raise NotImplementedError("scores of more than 2^30 pairs")

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(row.group, 1) for t in (key, value))
        score = query @ key.mT * row.size**-0.5
        if bias is not None:
            score = score + bias.dense().to(score.dtype)
        if row.causal:
            score = score.masked_fill(~score.new_ones(score.shape[-2:]).tril().bool(), -torch.inf)
        return score.softmax(-1) @ value

    return attention


CPU_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
PEERS: dict[str, dict[str, Callable[[Row, Bias | None], Attention]]] = {
    "cuda": {
        "flex": flex,
        "efficient": lambda row, bias: sdpa([SDPBackend.EFFICIENT_ATTENTION], row, bias),
        "cudnn": lambda row, bias: sdpa([SDPBackend.CUDNN_ATTENTION], row, bias),
        "fa4": fa4,
        "cuequivariance": cuequivariance,
        "math": formula,
    },
    "cpu": {
        "flex": flex,
        "sdpa": lambda row, bias: sdpa(CPU_BACKENDS, row, bias),
        "math": formula,
    },
}


# --- a row ---


def error(out: Tensor, inputs: Sequence[Tensor], row: Row, bias: Bias) -> float:
    """The error of the last head's output, relative to its root mean square in float64."""
    query, key, value = (t[-1, -1].double() for t in inputs)
    score = query @ key.mT * row.size**-0.5 + bias.dense()[-1, -1].double()
    expected = score.softmax(-1) @ value
    return float((out[-1, -1] - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Options:
    """How a row is measured. ordered: deterministic backwards too."""

    device: str
    peers: Sequence[str]
    ordered: bool
    rounds: int
    reps: int


def bytes_a_ms() -> float:
    gpu = torch.cuda.get_device_properties(0)
    return 7 / 8 * 2 * gpu.memory_clock_rate * gpu.memory_bus_width / 8  # kHz, bits, double data rate


def measured(row: Row, options: Options) -> dict[str, Any]:
    torch.manual_seed(0)
    device = options.device
    bias = None if row.bias is None else row.bias(row)

    def make(heads: int, length: int, size: int) -> Tensor:
        dtype = BF16 if device == "cuda" else FP32
        return torch.randn(row.batch, heads, length, size, dtype=dtype, requires_grad=True)

    few = row.heads // row.group
    inputs = (
        make(row.heads, row.queries, row.size),
        make(few, row.keys, row.size),
        make(few, row.keys, row.columns),
    )
    query, key, value = (t.detach() for t in inputs)
    detached = query, key, value
    upstream = make(row.heads, row.queries, row.columns).detach()
    attentions = ours(row, bias)
    if not options.ordered:
        attentions.pop("ordered", None)
    result: dict[str, Any] = {"row": row.label, "failures": {}}
    for name in options.peers:
        outcome = Outcome(lambda name=name: PEERS[device][name](row, bias))
        if outcome.failure:
            result["failures"][name] = outcome.failure
        else:
            attentions[name] = outcome.value
    tables = [] if bias is None else bias.tables
    calls: dict[str, Call] = {}
    for name, attention in attentions.items():
        if name not in ("frozen", "ordered"):
            calls[f"{name} forward"] = Call(attention, detached)
        if row.backward:
            calls[f"{name} backward"] = Call(attention, inputs, [] if name in ("plain", "frozen") else tables, upstream)
    for name, call in list(calls.items()):
        outcome = Outcome(lambda call=call: (call.prepare(), call.run(), synchronize(device)))
        if outcome.failure:
            result["failures"][name] = outcome.failure
            del calls[name]
    for table in tables:
        table.requires_grad_()
    if bias is not None and "fusegrad forward" in calls:
        with torch.no_grad():
            result["error"] = error(attentions["fusegrad"](*inputs), inputs, row, bias)
    times, _ = alternate(dict(calls), None, device, options.rounds, options.reps)
    result["ms"] = {name: one.ms for name, one in times.items() if one.ms is not None}
    result["rounds"] = {name: one.rounds for name, one in times.items() if one.ms is not None}
    of_inputs = sum(t.nbytes for t in inputs) + upstream.nbytes
    of_bias = 0 if bias is None else bias.bytes
    captured = 0 if bias is None else bias.captured
    if device == "cuda":
        rate = bytes_a_ms()
        result["traffic"] = {
            "forward": (of_inputs + of_bias + captured) / rate,
            "backward": (2 * of_inputs + 2 * of_bias + captured) / rate,
        }
    return result


def goals(row: Row, result: dict[str, Any], peers: Sequence[str]) -> list[tuple[str, bool]]:
    ms, found = result["ms"], []
    main = "plain" if row.bias is None else "fusegrad"
    parts = ("forward", "backward") if row.backward else ("forward",)
    limits = {
        "forward": (row.forward_limit, row.forward_traffic),
        "backward": (row.backward_limit, row.backward_traffic),
    }

    def at_most(text: str, ratio: float, limit: float) -> None:
        found.append((f"{text.format(f'{ratio:.2f}')} <= {limit:g}", ratio <= limit))

    for part in parts:
        mine = f"{main} {part}"
        if mine not in ms:
            found.append((f"{part}: runs", False))
            continue
        over_plain, over_traffic = limits[part]
        if over_plain is not None and f"plain {part}" in ms:
            at_most(part + ": {} x plain", over(result, mine, f"plain {part}"), over_plain)
        if over_traffic is not None:
            at_most(part + ": {} x the traffic", ms[mine] / result["traffic"][part], over_traffic)
        if f"ordered {part}" in ms:
            at_most(part + ", deterministic: {} x the default", over(result, f"ordered {part}", mine), 1.3)
        theirs = {name: over(result, mine, f"{name} {part}") for name in peers if f"{name} {part}" in ms}
        if theirs:
            name = max(theirs, key=lambda peer: theirs[peer])
            at_most(part + ": {} x " + name, theirs[name], 1.0)
    if row.best != 1.0:
        both = {name: sum(ms.get(f"{name} {part}", math.inf) for part in parts) for name in (*peers, main)}
        name = min(both, key=lambda one: both[one] if one != main else math.inf)
        if name != main and both[name] < math.inf:
            at_most("both: {} x " + name, both[main] / both[name], round(1 / row.best, 3))
    return found


def show(row: Row, result: dict[str, Any]) -> None:
    ms, traffic = result["ms"], result.get("traffic")
    print(f"\n{row.label}" + (f"; error {result['error']:.1e}" if "error" in result else ""))
    lines = []
    for name, value in ms.items():
        part = name.rsplit(" ", 1)[1]
        plain = ms.get(f"plain {part}")
        line = [name, f"{value:.3f}", f"{value / plain:.2f}" if plain else ""]
        lines.append(line + ([f"{value / traffic[part]:.2f}"] if traffic else []))
    print_table(["", "ms", "x plain"] + (["x traffic"] if traffic else []), lines)


def main() -> None:
    parser = argument_parser("Attention with learned biases.", reps=3)
    parser.add_argument("--no-ordered", dest="ordered", action="store_false", help="skip deterministic backwards")
    arguments = parser.parse_args()
    device = arguments.device
    peers = peers_asked_for(parser, arguments.peers, PEERS[device])
    # The CPU's backward is in one order always.
    options = Options(device, peers, arguments.ordered and device == "cuda", arguments.rounds, arguments.reps)
    attention_alone = options
    if arguments.peers is None and device == "cuda":
        attention_alone = replace(options, peers=ATTENTION_ALONE)

    run_rows(
        OP,
        arguments,
        CUDA_ROWS if device == "cuda" else CPU_ROWS,
        lambda row: measured(row, options if row.bias else attention_alone),
        lambda row, result: goals(row, result, peers),
        show,
    )


if __name__ == "__main__":
    main()
