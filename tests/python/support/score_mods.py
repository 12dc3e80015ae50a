"""score_mods and mask_mods from the field, in the words of PyTorch: for every test that goes over them all.

Each case makes, for the sizes of a call (B, H, M queries, N keys), a score_mod or None, a mask_mod or None, and the
captured tensors that get gradients. Tensors are drawn from the generator, floating-point ones of the dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

__all__ = ["CASES", "OWN_DERIVATIVES", "Case"]

Mods = tuple[Callable | None, Callable | None, list[Tensor]]


@dataclass
class Draw:
    """The sizes of a call, and tensors for it."""

    B: int
    H: int
    M: int
    N: int
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def S(self) -> int:
        return max(self.M, self.N)

    def floats(self, *sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(sizes, generator=self.generator, dtype=torch.float64)
        return (scale * values).to(self.dtype).requires_grad_()

    def integers(self, high: int, *sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, sizes, generator=self.generator).to(dtype)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[[Draw], Mods]

    def make(self, B: int, H: int, M: int, N: int, dtype: torch.dtype, generator: torch.Generator) -> Mods:
        return self.function(Draw(B, H, M, N, dtype, generator))


CASES: list[Case] = []


def case(function: Callable[[Draw], Mods]) -> Callable[[Draw], Mods]:
    CASES.append(Case(function.__name__, function))
    return function


def score_case(name: str, make: Callable[[Draw], tuple[Callable, list[Tensor]]]) -> None:
    CASES.append(Case(name, lambda d: (lambda made: (made[0], None, made[1]))(make(d))))


def mask_case(name: str, make: Callable[[Draw], Callable]) -> None:
    CASES.append(Case(name, lambda d: (None, make(d), [])))


# --- masks ----------------------------------------------------------------------------------------------------


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


mask_case("causal mask", lambda d: causal_mask)
mask_case("no mask", lambda d: noop_mask)
mask_case("mask that needs nothing", lambda d: lambda b, h, q, kv: b.new_ones((), dtype=torch.bool))


def sliding_window(window: int) -> Callable:
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    return mask


mask_case("sliding window", lambda d: sliding_window(3))
mask_case("symmetric window", lambda d: lambda b, h, q, kv: torch.abs(q - kv) <= 2)


@case
def dilated_window(d: Draw) -> Mods:
    window, dilation = 8, 2

    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= window) & (distance % dilation == 0)

    return None, mask, []


@case
def prefix_lm(d: Draw) -> Mods:
    prefix_length = d.integers(d.N, d.B, dtype=torch.int32)

    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length[b]

    return None, or_masks(prefix, causal_mask), []


@case
def document_mask(d: Draw) -> Mods:
    document_id = d.integers(3, d.S).sort().values

    def same_document(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return None, and_masks(same_document, causal_mask), []


@case
def document_mask_by_offsets(d: Draw) -> Mods:
    """Each document has its own positions: what attention-gym wraps around another mask."""
    lengths = [d.S // 2, d.S - d.S // 2]
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    document_id = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def wrapped(inner: Callable) -> Callable:
        def mask(b, h, q_idx, kv_idx):
            same = document_id[q_idx] == document_id[kv_idx]
            q, kv = q_idx - offsets[document_id[q_idx]], kv_idx - offsets[document_id[kv_idx]]
            return same & inner(b, h, q, kv)

        return mask

    return None, wrapped(sliding_window(2)), []


@case
def natten_mask(d: Draw) -> Mods:
    """A neighbourhood of kernel_size in two dimensions, shifted where it would leave the image."""
    width, kernel_size = 4, 3

    def position(i):
        return i // width, i % width

    def mask(b, h, q_idx, kv_idx):
        qx, qy = position(q_idx)
        kvx, kvy = position(kv_idx)
        x = qx.clamp(kernel_size // 2, (width - 1) - kernel_size // 2)
        y = qy.clamp(kernel_size // 2, (width - 1) - kernel_size // 2)
        return ((x - kvx).abs() <= kernel_size // 2) & ((y - kvy).abs() <= kernel_size // 2)

    return None, mask, []


@case
def attention_sinks_mask(d: Draw) -> Mods:
    sinks = 2
    return None, or_masks(lambda b, h, q, kv: kv < sinks, sliding_window(3)), []


@case
def mask_of_a_head(d: Draw) -> Mods:
    window_of_head = torch.arange(1, d.H + 1)
    return None, lambda b, h, q, kv: torch.where(h % 2 == 0, q >= kv, q - kv <= window_of_head[h]), []


@case
def captured_mask(d: Draw) -> Mods:
    allowed = torch.rand(d.B, d.M, d.N, generator=d.generator) < 0.7
    return None, lambda b, h, q, kv: allowed[b, q, kv], []


@case
def padding_mask(d: Draw) -> Mods:
    length = d.integers(d.N + 1, d.B)
    return None, lambda b, h, q, kv: (kv < length[b]).logical_and(~(q >= length[b])), []


@case
def causal_with_offset(d: Draw) -> Mods:
    """Decoding: the position of the first query is a tensor."""
    offset = torch.tensor(d.N - d.M)
    return None, lambda b, h, q, kv: q + offset >= kv, []


@case
def shared_question_mask(d: Draw) -> Mods:
    """Answers see the question and themselves."""
    groups = d.integers(3, d.S)
    return None, lambda b, h, q, kv: ((groups[kv] == 0) | (groups[q] == groups[kv])) & (kv <= q), []


# --- scores without parameters --------------------------------------------------------------------------------


def identity(score, b, h, q_idx, kv_idx):
    return score


score_case("identity", lambda d: (identity, []))
score_case("causal", lambda d: (lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")), []))
score_case("times two", lambda d: (lambda s, b, h, q, kv: s * 2, []))
score_case("squared", lambda d: (lambda s, b, h, q, kv: s * s - 0.5 * s**2, []))
score_case("relative bias", lambda d: (lambda s, b, h, q, kv: s + (q - kv), []))
score_case("head offset", lambda d: (lambda s, b, h, q, kv: s + 2 * h, []))
score_case("inverse causal", lambda d: (lambda s, b, h, q, kv: torch.where(q <= kv, s, -torch.inf), []))


@case
def checkerboard(d: Draw) -> Mods:
    def score_mod(score, b, h, q_idx, kv_idx):
        score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
        return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)

    return score_mod, None, []


@case
def alibi(d: Draw) -> Mods:
    H = d.H

    def score_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / H))
        return score + (kv_idx - q_idx) * scale

    return score_mod, causal_mask, []


@case
def softcap(d: Draw) -> Mods:
    soft_cap = 20

    def score_mod(score, b, h, q_idx, kv_idx):
        return soft_cap * torch.tanh(score / soft_cap)

    return score_mod, causal_mask, []


@case
def relative_position_in_place(d: Draw) -> Mods:
    def score_mod(score, b, h, q_idx, kv_idx):
        score += q_idx - kv_idx
        score *= 0.5
        return score

    return score_mod, None, []


@case
def activations(d: Draw) -> Mods:
    def score_mod(s, b, h, q, kv):
        s = F.gelu(s) + F.silu(s).tanh() + F.softplus(s) + F.leaky_relu(s, 0.1) + F.elu(s)
        s = s + F.logsigmoid(s) + F.hardswish(s) + s.sigmoid() + F.gelu(s, approximate="tanh") + F.relu(s)
        return s + torch.erf(s) + F.mish(s) + s.clamp(-3, 3) + s.clamp(min=-1.0) + F.hardtanh(s) + F.softsign(s)

    return score_mod, None, []


@case
def functions(d: Draw) -> Mods:
    def score_mod(s, b, h, q, kv):
        p = s.abs() + 0.5
        s = s + p.log() + p.log2() + p.log10() + p.log1p() + p.sqrt() + p.rsqrt() + p.reciprocal() + p**1.5
        s = s + torch.sin(s) + s.cos() + (s * 0.3).tan() + torch.exp(-p) + torch.exp2(-p) + torch.expm1(-p)
        return s + torch.fmod(s, 1.7) + s % 1.3 + torch.lerp(s, p, 0.25) + torch.addcmul(s, p, p, value=0.1) + 2 - p

    return score_mod, None, []


@case
def integers_and_bools(d: Draw) -> Mods:
    def score_mod(s, b, h, q, kv):
        near = (q - kv).abs() < 3
        steps = torch.div(q - kv, 3, rounding_mode="trunc") + (q - kv) // 3 + torch.fmod(q - kv, 3)
        bits = ((q ^ kv) & 3) + (q << 1) - (kv >> 1) + (q | 1)
        return s + near + (near + (q == 0)).float() + steps / 4 + bits * 0.1 + torch.sign(q - kv) + near * s

    return score_mod, None, []


# --- biases ---------------------------------------------------------------------------------------------------


def with_floats(name: str, sizes: Callable[[Draw], tuple[int, ...]], make: Callable[[Tensor, Draw], Callable]) -> None:
    def function(d: Draw) -> tuple[Callable, list[Tensor]]:
        bias = d.floats(*sizes(d))
        return make(bias, d), [bias]

    score_case(name, function)


with_floats("bias of a head", lambda d: (d.H,), lambda t, d: lambda s, b, h, q, kv: s + t[h])
with_floats("scale of a head", lambda d: (d.H,), lambda t, d: lambda s, b, h, q, kv: s * t[h])
with_floats("bias of a key", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + t[kv])
with_floats("bias of a query", lambda d: (d.M,), lambda t, d: lambda s, b, h, q, kv: s + t[q])
with_floats("bias of a pair", lambda d: (d.M, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[q, kv])
with_floats("full bias", lambda d: (d.B, d.H, d.M, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[b, h, q, kv])
with_floats("indexed one by one", lambda d: (d.B, d.H, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[b][h][kv])
with_floats("transposed", lambda d: (d.N, d.H), lambda t, d: lambda s, b, h, q, kv: s + t.t()[h, kv])
with_floats("relative", lambda d: (2 * d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[q - kv + d.S])
with_floats("relative of a head", lambda d: (d.H, 2 * d.S), lambda t, d: lambda s, b, h, q, kv: s + t[h, q - kv + d.S])
with_floats("negative indices", lambda d: (2 * d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[kv - q])
with_floats("learned softcap", lambda d: (), lambda t, d: lambda s, b, h, q, kv: t * torch.tanh(s / t))
with_floats("without the score", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: t[kv] * 2)
with_floats("read twice", lambda d: (d.S,), lambda t, d: lambda s, b, h, q, kv: s + t[q] * t[kv])
with_floats(
    "read twice at one place", lambda d: (d.S,), lambda t, d: lambda s, b, h, q, kv: (s + t[q]) * t[q].sigmoid()
)
with_floats("last element", lambda d: (3,), lambda t, d: lambda s, b, h, q, kv: s * t[-1] + t[0])
with_floats("not a leaf", lambda d: (d.N,), lambda t, d: (lambda u: lambda s, b, h, q, kv: s + u[kv])(t.exp() * 2))
with_floats("made within", lambda d: (d.N,), lambda t, d: lambda s, b, h, q, kv: s + (torch.exp(t) * 2)[kv])
with_floats(
    "expanded", lambda d: (d.N,), lambda t, d: (lambda u: lambda s, b, h, q, kv: s + u[h, kv])(t.expand(d.H, -1))
)
with_floats(
    "index_select and take",
    lambda d: (d.N,),
    lambda t, d: lambda s, b, h, q, kv: s + t.index_select(0, kv).sum() * t.take(kv),
)
with_floats(
    "gather", lambda d: (d.H, d.N), lambda t, d: lambda s, b, h, q, kv: s + t[h].gather(0, kv) * F.embedding(h, t)[0]
)
with_floats(
    "clamped distance",
    lambda d: (d.H, 9),
    lambda t, d: lambda s, b, h, q, kv: s + t[h, torch.clamp(q - kv, -4, 4) + 4],
)


@case
def product_of_vectors(d: Draw) -> Mods:
    a, w = d.floats(d.H, 3), d.floats(d.N, 3)
    return lambda s, b, h, q, kv: s + (a[h] * w[kv]).sum(), None, [a, w]


@case
def dot_products(d: Draw) -> Mods:
    a, w, m = d.floats(d.M, 3), d.floats(d.N, 3), d.floats(3, 3)

    def score_mod(s, b, h, q, kv):
        return s + a[q] @ w[kv] + torch.dot(a[q], m @ w[kv]) - torch.einsum("i,i->", a[q], w[kv]) / 3

    return score_mod, None, [a, w, m]


@case
def stacked(d: Draw) -> Mods:
    w = d.floats(3)

    def score_mod(s, b, h, q, kv):
        features = torch.stack([s, (q - kv).float() / 4, torch.ones_like(s)])
        return (features * w).sum() + torch.cat([features, w]).amax() + F.softmax(features * w, dim=0)[0]

    return score_mod, None, [w]


@case
def small_network(d: Draw) -> Mods:
    """A continuous position bias: a network of the distance, as a module that is called."""
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).to(d.dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=d.generator))

    def score_mod(s, b, h, q, kv):
        x = torch.stack([(q - kv) / 8, (h + 1) / 2]).to(d.dtype)
        return s + net(x)[0]

    return score_mod, None, list(net.parameters())


@case
def bias_and_scale(d: Draw) -> Mods:
    bias, scale, shift = d.floats(d.H, d.N), d.floats(d.B, d.H), d.floats()
    return lambda s, b, h, q, kv: s * scale[b, h] + bias[h, kv] * shift, causal_mask, [bias, scale, shift]


@case
def learned_alibi(d: Draw) -> Mods:
    log_slopes = d.floats(d.H)
    return lambda s, b, h, q, kv: s + (kv - q) * log_slopes.exp()[h], causal_mask, [log_slopes]


@case
def bias_by_offset(d: Draw) -> Mods:
    bias, offset = d.floats(d.N), d.integers(d.N, d.M)
    return lambda score, b, h, q_idx, kv_idx: score + bias[offset[q_idx]], None, [bias]


@case
def gather_of_a_gather(d: Draw) -> Mods:
    bias, first, second = d.floats(7), d.integers(5, d.B, d.M), d.integers(7, 5, dtype=torch.int32)
    return lambda s, b, h, q, kv: s + bias[second[first[b, q]]] * bias[second[first[b, q]] - 1], None, [bias]


@case
def index_from_the_score(d: Draw) -> Mods:
    bias = d.floats(9)
    return lambda s, b, h, q, kv: s + bias[(s * 2).long().clamp(-4, 4) + 4], None, [bias]


def t5_bucket(relative_position: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    n = torch.clamp(relative_position, min=0)
    max_exact = num_buckets // 2
    ratio = torch.log(torch.clamp(n, min=1).float() / max_exact) / math.log(max_distance / max_exact)
    large = max_exact + (ratio * (num_buckets - max_exact)).to(torch.long)
    return torch.where(n < max_exact, n, torch.minimum(large, torch.full_like(large, num_buckets - 1)))


@case
def t5(d: Draw) -> Mods:
    table = d.floats(8, d.H)
    return lambda s, b, h, q, kv: s + table[t5_bucket(q - kv, 8, 16), h], causal_mask, [table]


@case
def t5_by_a_table(d: Draw) -> Mods:
    table, buckets = d.floats(8, d.H), t5_bucket(torch.arange(-d.S, d.S), 8, 16)
    return lambda s, b, h, q, kv: s + table[buckets[q - kv + d.S], h], None, [table]


@case
def swin(d: Draw) -> Mods:
    """A relative bias in two dimensions."""
    width = 4
    rows = (d.S + width - 1) // width
    table = d.floats(2 * rows, 2 * width, d.H)

    def score_mod(score, b, h, q_idx, kv_idx):
        dx = q_idx // width - kv_idx // width + rows
        dy = q_idx % width - kv_idx % width + width
        return score + table[dx, dy, h]

    return score_mod, None, [table]


@case
def graphormer(d: Draw) -> Mods:
    """Biases of the distance between two nodes, and of the mean of the edges on a path between them."""
    spatial, edge = d.floats(5, d.H), d.floats(4, d.H)
    distance, path = d.integers(5, d.B, d.M, d.N), d.integers(4, d.B, d.M, d.N, 2)

    def score_mod(score, b, h, q_idx, kv_idx):
        edges = edge[path[b, q_idx, kv_idx], h].mean()
        return score + spatial[distance[b, q_idx, kv_idx], h] + edges

    return score_mod, None, [spatial, edge]


@case
def learned_sinks(d: Draw) -> Mods:
    sink = d.floats(d.H)
    return lambda s, b, h, q, kv: torch.where(kv == 0, sink[h], s), causal_mask, [sink]


@case
def document_bias(d: Draw) -> Mods:
    """One tensor of document ids read by the score_mod and the mask_mod."""
    document, bias = d.integers(3, d.B, d.S), d.floats(3, 3)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[document[b, q_idx], document[b, kv_idx]]

    return score_mod, lambda b, h, q, kv: (document[b, q] == document[b, kv]) | (q >= kv), [bias]


@case
def float_buffer_in_both(d: Draw) -> Mods:
    threshold = d.floats(d.N)
    return lambda s, b, h, q, kv: s * threshold[kv], lambda b, h, q, kv: (threshold[kv] > 0) | (q == kv), [threshold]


@case
def bf16_bias(d: Draw) -> Mods:
    bias = d.floats(d.H, d.N).detach().to(torch.bfloat16).requires_grad_()
    return lambda s, b, h, q, kv: s + bias[h, kv], None, [bias]


@case
def frozen_bias(d: Draw) -> Mods:
    bias, scale = d.floats(d.N).detach(), d.floats(d.H)
    return lambda s, b, h, q, kv: s * scale[h] + bias[kv], None, [scale]


@case
def detached_bias(d: Draw) -> Mods:
    bias = d.floats(d.N)
    return lambda s, b, h, q, kv: s * bias[kv].detach() + bias[kv], None, [bias]


@case
def slice_of_a_bias(d: Draw) -> Mods:
    bias = d.floats(3, d.H, d.N + 2)
    layer = 1
    return lambda s, b, h, q, kv: s + bias[layer, :, 2:][h, kv] + bias[..., kv][layer, h], None, [bias]


# --- ways to capture ------------------------------------------------------------------------------------------

GLOBAL_SCALE = 0.75


def global_number(score, b, h, q_idx, kv_idx):
    return helper(score) + GLOBAL_SCALE


def helper(x):
    return x * GLOBAL_SCALE


score_case("a global number", lambda d: (global_number, []))


class Bias(nn.Module):
    def __init__(self, bias: Tensor, window: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.detach())
        self.register_buffer("offset", torch.arange(bias.shape[-1]))
        self.window, self.scale = window, 0.5

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return self.scale * score + self.bias[h, self.offset[kv_idx]]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.window

    def forward(self, query: Tensor) -> Tensor:
        raise NotImplementedError


@case
def module_attributes(d: Draw) -> Mods:
    module = Bias(d.floats(d.H, d.N), 4)
    return module.score_mod, module.mask_mod, [module.bias]


class Callable_:
    def __init__(self, table: Tensor) -> None:
        self.table, self.shift = table, 1

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score + self.row(h)[kv_idx] * self.shift

    def row(self, h):
        return self.table[h]


@case
def callable_object(d: Draw) -> Mods:
    table = d.floats(d.H, d.N)
    return Callable_(table), None, [table]


@case
def partial(d: Draw) -> Mods:
    def score_mod(score, b, h, q_idx, kv_idx, bias, scale):
        return score * scale + bias[kv_idx]

    bias = d.floats(d.N)
    return functools.partial(score_mod, bias=bias, scale=0.3), None, [bias]


@case
def defaults_and_keywords(d: Draw) -> Mods:
    bias = d.floats(d.N)

    def score_mod(score, b, h, q_idx, kv_idx, bias=bias, *, scale=0.3):
        return score * scale + bias[kv_idx]

    return score_mod, None, [bias]


@case
def nested_functions(d: Draw) -> Mods:
    bias, options = d.floats(d.N), {"scale": 2.0, "limits": [3, 5]}

    def scaled(x):
        return x * options["scale"]

    def score_mod(score, b, h, q_idx, kv_idx):
        def add(x):
            return x + bias[kv_idx]

        total = add(scaled(score))
        for limit in options["limits"]:
            total = torch.where(kv_idx > limit, total * 0.5, total)
        return total

    return score_mod, None, [bias]


@case
def several_score_mods(d: Draw) -> Mods:
    """Composition, as people write it."""
    bias = d.floats(d.N)

    def compose(*mods: Any) -> Callable:
        def score_mod(score, b, h, q_idx, kv_idx):
            for mod in mods:
                score = mod(score, b, h, q_idx, kv_idx)
            return score

        return score_mod

    cap = lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0)  # noqa: E731
    return compose(cap, lambda s, b, h, q, kv: s + bias[kv], identity), None, [bias]


@case
def vector_times_matrix(d: Draw) -> Mods:
    a, m = d.floats(d.H, 3), d.floats(3, 2)

    def score_mod(s, b, h, q, kv):
        return s + (a[h] @ m)[0] + (torch.stack([s, s * 2, s - 1]) @ m).sum() + F.linear(a[h], m.t())[1] * s

    return score_mod, None, [a, m]


# --- with derivatives of their own ------------------------------------------------------------------------------

OWN_DERIVATIVES: list[Case] = []
"""autograd.Functions and custom ops: no vmap, no torch.jit.trace, traced at each call."""


def own_derivative(function: Callable[[Draw], Mods]) -> Callable[[Draw], Mods]:
    OWN_DERIVATIVES.append(Case(function.__name__, function))
    return function


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ClippedGradient(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.bound, ctx.bound), None


class GatedPair(torch.autograd.Function):
    """Two outputs, and what it saves."""

    @staticmethod
    def forward(x, gate):
        return x * gate.sigmoid(), x + gate

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx, grad_product, grad_sum):
        x, gate, product = ctx.saved_tensors
        return grad_product * gate.sigmoid() + grad_sum * 0.5, grad_product * (product - x * 0.25)


@torch.library.custom_op("fusegrad_score_mods::tanh", mutates_args=())
def approximate_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def _save_output(ctx, inputs, output):
    ctx.save_for_backward(output)


def _tanh_backward(ctx, grad):
    (out,) = ctx.saved_tensors
    return grad * (1 - out * out)


approximate_tanh.register_fake(torch.empty_like)
approximate_tanh.register_autograd(_tanh_backward, setup_context=_save_output)


@own_derivative
def straight_through(d: Draw) -> Mods:
    bias = d.floats(d.N)
    return lambda s, b, h, q, kv: s + StraightThrough.apply(bias[kv], 0.5) * s.sin(), causal_mask, [bias]


@own_derivative
def clipped_gradient(d: Draw) -> Mods:
    bias = d.floats(d.H, d.N)
    return (
        lambda s, b, h, q, kv: ClippedGradient.apply(s + ClippedGradient.apply(bias[h, kv], 0.01), 0.02),
        None,
        [bias],
    )


@own_derivative
def gated_pair(d: Draw) -> Mods:
    bias = d.floats(d.M)

    def score_mod(s, b, h, q, kv):
        product, total = GatedPair.apply(s, bias[q])
        return torch.where(q > kv, product, product.sin() + total)

    return score_mod, None, [bias]


@own_derivative
def softcap_by_an_op(d: Draw) -> Mods:
    return lambda s, b, h, q, kv: 20 * torch.ops.fusegrad_score_mods.tanh(s / 20), causal_mask, []
