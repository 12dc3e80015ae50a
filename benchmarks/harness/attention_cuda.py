"""What the benchmark of flex attention measures on CUDA.

For each variant forward and backward alone. Beside fusegrad: PyTorch's FlashAttention-2 and cuDNN kernels by way
of scaled_dot_product_attention, its flex_attention, compiled, and FlashAttention 4. "Grouped" is causal attention of
four query heads to a key; "dropout" drops a tenth of the weights, which FlashAttention-2 alone of the peers has. The
floor is a forward's two products over the pairs of a causal mask, as one; a backward has
five, a variant without a mask twice the pairs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from harness.benchmark import Options, Plan
from harness.goals import Goal
from harness.model import Case, Implementation, Problem, Unavailable
from harness.peers import optional
from harness.reference import relative
from harness.step import Step
from harness.timing import Floor

OP = "flex_attention"
SQUARE = 8192
BACKWARD = 2.5  # products of a backward over those of a forward
# At most so many times the same backward without the captured gradient.
LIMITS = {"A": 1.1, "B": 1.1, "C": 1.1, "D": 1.2, "E": 1.6, "F": 2.0, "G": 5.0}
QUICK_CLASSES = "ADG"
DOCUMENT, WINDOW, SOFTCAP = 512, 256, 20.0
DROPOUT = 0.1
DROPOUT_LIMIT = 1.15  # at most so many times the same without
GROUP = 4  # query heads to a key head, where they are grouped
PLAIN = ("plain", "causal", "grouped")  # variants that all peers have
PEERS = (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))
WIDE_PEERS = (("efficient", SDPBackend.EFFICIENT_ATTENTION), ("math", SDPBackend.MATH))  # that have heads above 256


@dataclass(frozen=True)
class Variant:
    """A score_mod and a mask, and the same in plain PyTorch over all scores of a head. group: query heads to a key."""

    name: str
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    dense: Callable[[Tensor, int], Tensor] | None = None
    bias: Tensor | None = None
    group: int = 1
    dropout: float = 0.0


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def variants(case: Case) -> list[Variant]:
    length = case["S"]
    document = torch.arange(length, device="cuda", dtype=torch.int32) // DOCUMENT
    relative_bias = 0.1 * torch.randn(case["H"], 2 * length, device="cuda")
    distance = torch.arange(length, device="cuda") - torch.arange(length, device="cuda")[:, None]
    return [
        Variant("plain"),
        Variant("causal", mask_mod=causal),
        Variant(
            "alibi",
            lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1) * 0.5),
            causal,
            lambda s, h: s + distance * 2.0 ** (-(h + 1) * 0.5),
        ),
        Variant(
            "softcap",
            lambda s, b, h, q, kv: SOFTCAP * torch.tanh(s / SOFTCAP),
            causal,
            lambda s, h: SOFTCAP * torch.tanh(s / SOFTCAP),
        ),
        Variant(
            "relative",
            lambda s, b, h, q, kv: s + relative_bias[h, q - kv + length],
            causal,
            lambda s, h: s + relative_bias[h][length - distance],
        ),
        Variant("document", mask_mod=lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])),
        Variant("window", mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW)),
        Variant("grouped", mask_mod=causal, group=GROUP),
        Variant("dropout", dropout=DROPOUT),
        Variant("causal dropout", mask_mod=causal, dropout=DROPOUT),
    ]


def captured(case: Case, classes: str) -> list[Variant]:
    """One score_mod for each class of captured gradients, without a mask."""
    heads, length = case["H"], case["S"]

    def floats(*sizes: int) -> Tensor:
        return (0.1 * torch.randn(sizes, device="cuda")).requires_grad_()

    kinds = torch.randint(64, (length, length), device="cuda", dtype=torch.int32)
    places = torch.randint(100_000, (length, length), device="cuda", dtype=torch.int32)
    made: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Callable[..., Tensor]]]] = {
        "A": ("scale[h]", (heads,), lambda t: lambda s, b, h, q, kv: s * t[h]),
        "B": ("bias[kv]", (length,), lambda t: lambda s, b, h, q, kv: s + t[kv]),
        "C": ("scale[q]", (length,), lambda t: lambda s, b, h, q, kv: s * t[q]),
        "D": ("rel[h, q - kv]", (heads, 2 * length), lambda t: lambda s, b, h, q, kv: s + t[h, q - kv + length]),
        "E": ("bias[h, q, kv]", (heads, length, length), lambda t: lambda s, b, h, q, kv: s + t[h, q, kv]),
        "F": ("table[kind[q, kv]]", (64,), lambda t: lambda s, b, h, q, kv: s + t[kinds[q, kv]]),
        "G": ("table[place[q, kv]]", (100_000,), lambda t: lambda s, b, h, q, kv: s + t[places[q, kv]]),
    }
    found = []
    for name in classes:
        text, sizes, function = made[name]
        bias = floats(*sizes)
        found.append(Variant(f"{name} {text}", function(bias), bias=bias))
    return found


def problem(case: Case) -> Problem:
    """The query is the activation; key and value, and those of fewer heads, are leaves."""

    def make(heads: int) -> Tensor:
        return torch.randn(case["B"], heads, case["S"], case["D"], dtype=case.torch_dtype, device="cuda")

    heads = case["H"]
    few = max(heads // GROUP, 1)
    keys = tuple(make(count).requires_grad_() for count in (heads, heads, few, few))
    return Problem(make(heads), torch.empty(0), make(heads), constants=keys)


def keys_of(variant: Variant, constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    key, value, few_keys, few_values = constants
    return (key, value) if variant.group == 1 else (few_keys, few_values)


def floor(problem: Problem) -> Floor:
    batch, heads, length, size = problem.activation.shape
    columns = max(batch * heads * length * length * size // SQUARE**2, 1)
    a, b = (torch.randn(SQUARE, n, dtype=torch.bfloat16, device="cuda") for n in (SQUARE, columns))
    out = torch.empty_like(b)
    return Floor("the two products' work as one", lambda: torch.mm(a, b, out=out))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def both(
    name: str, attention: Attention, variant: Variant, essential: bool = True, forward: bool = True, **how: Any
) -> list[Implementation]:
    """Forward and backward of an attention."""

    def loss(query: Tensor, _: Tensor, *constants: Tensor) -> Tensor:
        key, value = keys_of(variant, constants)
        # A step ends with the gradients that it made.
        key.grad = value.grad = None
        if variant.bias is not None:
            variant.bias.grad = None
        return attention(query, key, value)

    pairs = 2.0 if variant.mask_mod is None else 1.0
    how |= {"variant": variant, "essential": essential, "upstream": "rows"}
    found = [Implementation(f"{name} backward", loss, backward_alone=True, floor_scale=BACKWARD * pairs, **how)]
    if forward:
        found.insert(0, Implementation(f"{name} forward", loss, backward=False, floor_scale=pairs, **how))
    return found


def implementations(case: Case, options: Options) -> list[Implementation | Unavailable]:
    shapes = variants(case)
    length = case["S"]
    masks = {
        v.name: None if v.mask_mod is None else create_block_mask(v.mask_mod, None, None, length, length, device="cuda")
        for v in shapes
    }
    found: list[Implementation | Unavailable] = []
    for variant in (one for one in shapes if one.name in PLAIN):
        for name, backend in WIDE_PEERS if case["D"] > 256 else PEERS:
            found += both(f"{name} {variant.name}", sdpa(backend, variant.mask_mod is not None), variant)
    for variant in (one for one in shapes if one.dropout > 0):
        attention = sdpa(SDPBackend.FLASH_ATTENTION, variant.mask_mod is not None, variant.dropout)
        found += both(f"flash {variant.name}", attention, variant)
    found += optional("fa4", "flash_attn.cute", lambda module: fa4(module, shapes))
    for variant in (one for one in shapes if one.dropout == 0):
        compiled = compiled_flex(variant, masks[variant.name])
        found += both(f"compile {variant.name}", compiled, variant, essential=variant.name == "plain")
    return found + optional("fusegrad", "fusegrad", lambda module: ours(module, case, shapes, masks, options))


def sdpa(backend: SDPBackend, is_causal: bool, dropout: float = 0.0) -> Attention:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = query.shape[1] != key.shape[1]
            how: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": grouped, "dropout_p": dropout}
            return F.scaled_dot_product_attention(query, key, value, **how)

    return attention


def fa4(module: Any, shapes: list[Variant]) -> list[Implementation]:
    """FlashAttention 4, which has batch, length, head, column in this order; of score_mods it has softcap."""
    found = []
    for variant in shapes:
        if variant.name not in (*PLAIN, "softcap"):
            continue
        how = {"causal": variant.mask_mod is not None, "softcap": SOFTCAP if variant.name == "softcap" else 0.0}

        def attention(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any] = how) -> Tensor:
            out = module.flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), **how)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        found += both(f"fa4 {variant.name}", attention, variant)
    return found


def compiled_flex(variant: Variant, mask: BlockMask | None) -> Attention:
    # PyTorch's backward has no scheme for captured gradients: the table is one that gets none.
    # All variants, each with and without gradients, are compilations of one function, which beyond the limit runs
    # uncompiled.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    how = {"score_mod": variant.score_mod, "block_mask": mask, "enable_gqa": variant.group > 1}
    return lambda query, key, value: compiled(query, key, value, **how)


def ours(
    fusegrad: Any, case: Case, shapes: list[Variant], masks: dict[str, BlockMask | None], options: Options
) -> list[Implementation]:
    def attention(variant: Variant, mask: BlockMask | None, wanted: bool = True, **how: Any) -> Attention:
        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if variant.bias is not None:
                variant.bias.requires_grad_(wanted)
            options = {"enable_gqa": variant.group > 1, "dropout_p": variant.dropout, **how}
            return fusegrad.flex_attention(query, key, value, variant.score_mod, mask, **options)

        return call

    found: list[Implementation] = []
    for variant in shapes:
        found += both(f"fusegrad {variant.name}", attention(variant, masks[variant.name]), variant, ours=True)
    plain = shapes[0]
    ordered = attention(plain, None, deterministic=True)
    found += both("fusegrad plain deterministic", ordered, plain, forward=False, ours=True)
    for variant in captured(case, QUICK_CLASSES if options.quick else "".join(LIMITS)):
        for suffix, how in ((" frozen", {"wanted": False}), ("", {}), (" deterministic", {"deterministic": True})):
            call = attention(variant, None, **how)
            essential = suffix != " deterministic"
            found += both(f"fusegrad {variant.name}{suffix}", call, variant, essential, forward=False, ours=True)
    return found


class Reference:
    """Output and the query's gradient of two heads in float64, with all scores in memory."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def errors(self, step: Step) -> dict[str, float]:
        variant = step.implementation.variant
        if (variant.score_mod is not None and variant.dense is None) or variant.dropout > 0:
            return {}  # the tests compare captured gradients and dropout
        problem, results, errors = self._problem, step.results(), {}
        batch, heads, length, size = problem.activation.shape
        q, kv = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
        for b, h in {(0, 0), (batch - 1, heads - 1)}:
            query = problem.activation[b, h].double()
            keys = keys_of(variant, problem.constants)
            key, value = (t[b, h * t.shape[1] // heads].detach().double() for t in keys)
            query.requires_grad_()
            score = query @ key.T * size**-0.5
            score = score if variant.dense is None else variant.dense(score, h)
            if variant.mask_mod is not None:
                score = torch.where(variant.mask_mod(b, h, q, kv), score, -torch.inf)
            out = score.softmax(-1) @ value
            found = {"loss": relative(results["loss"][b, h], out.detach())}
            if "activation" in results:
                (grad,) = torch.autograd.grad(out, query, problem.upstream_rows[b, h].double())
                found["activation"] = relative(results["activation"][b, h], grad)
            for name, error in found.items():
                errors[name] = max(errors.get(name, 0.0), error)
        return errors


def no_slower(than: str, variants: tuple[str, ...], mine: str = "") -> list[Goal]:
    """`mine`: our variant, where it is not the same."""
    return [
        Goal(
            f"{part} {mine or name} no slower than {than} {name}",
            (f"fusegrad {mine or name} {part}",),
            than=f"{than} {name} {part}",
            min_speedup=1,
        )
        for name in variants
        for part in ("forward", "backward")
    ]


def plans(quick: bool) -> list[Plan]:
    def case(b: int, h: int, s: int, d: int) -> Case:
        return Case(OP, (("B", b), ("H", h), ("S", s), ("D", d)), "bfloat16", "cuda")

    plain = ("plain", "causal")
    goals = no_slower("flash", plain)
    ordered, default = "fusegrad plain deterministic backward", "fusegrad plain backward"
    goals.append(Goal("deterministic <= 1.3 x default", (ordered,), than=default, min_speedup=1 / 1.3))
    goals += no_slower("fusegrad", ("causal",), "grouped")
    goals += [
        Goal(
            f"{part} {name} <= {DROPOUT_LIMIT} x without",
            (f"fusegrad {name} {part}",),
            than=f"fusegrad {than} {part}",
            min_speedup=1 / DROPOUT_LIMIT,
        )
        for name, than in (("dropout", "plain"), ("causal dropout", "causal"))
        for part in ("forward", "backward")
    ]
    goals += no_slower("flash", ("dropout", "causal dropout"))
    texts = {"A": "scale[h]", "B": "bias[kv]", "C": "scale[q]", "D": "rel[h, q - kv]", "E": "bias[h, q, kv]",
             "F": "table[kind[q, kv]]", "G": "table[place[q, kv]]"}  # fmt: skip
    captured_goals = []
    for name, limit in LIMITS.items():
        if not quick or name in QUICK_CLASSES:
            subject = f"fusegrad {name} {texts[name]}"
            frozen = f"{subject} frozen backward"
            text = f"gradient of {name} <= {limit} x the backward without"
            captured_goals.append(Goal(text, (f"{subject} backward",), than=frozen, min_speedup=1 / limit))
    found = [Plan(case(4, 16, 4096, 128), (*goals, *captured_goals), memory=False)]
    if quick:
        return found
    few = r"^(flash|cudnn|fa4|compile (plain|causal)|fusegrad [a-z])"
    found += [Plan(case(b, h, 4096, d), tuple(goals), only=few, memory=False) for b, h, d in ((4, 16, 64), (2, 8, 256))]
    # What FlashAttention 4 is compared at.
    peers = (*no_slower("fa4", (*plain, "softcap")), *no_slower("cudnn", plain))
    for heads, size in ((32, 64), (16, 128), (8, 256)):
        only = r"^(cudnn|fa4|fusegrad) (plain|causal|softcap|grouped) (forward|backward)"
        found.append(Plan(case(2, heads, 8192, size), peers, only=only, accuracy=False, memory=False))
    # Short sequences, and fewer heads than there are multiprocessors.
    others = (*no_slower("cudnn", plain), *no_slower("compile", plain))
    for sizes in ((32, 16, 512, 128), (16, 16, 1024, 128), (8, 16, 2048, 128), (1, 8, 4096, 128), (1, 16, 4096, 64)):
        only = r"^(cudnn|fa4|compile|fusegrad) (plain|causal) (forward|backward)"
        found.append(Plan(case(*sizes), others, only=only, accuracy=False, memory=False))
    # Gemma 4's global layers.
    others = (*no_slower("efficient", plain), *no_slower("math", plain))
    only = r"^(efficient|math|fusegrad) (plain|causal) (forward|backward)"
    found += [Plan(case(*sizes), others, only=only, memory=False) for sizes in ((1, 8, 4096, 512), (4, 8, 1024, 512))]
    return found


# --- the first call -------------------------------------------------------------------------------------------

_PROGRAM = """
    import time
    import torch
    from fusegrad import flex_attention

    q, k, v = (torch.randn(1, 4, 512, 128, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3))
    bias = torch.randn(512, device="cuda", requires_grad=True)

    def step(score_mod):
        torch.cuda.synchronize()
        began = time.perf_counter()
        flex_attention(q, k, v, score_mod).sum().backward()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    step(lambda s, b, h, i, j: s + bias[j])
    print(step(lambda s, b, h, i, j: s * 0.83 + bias[j] * 1.17))
    with torch.no_grad():
        small = [t[:, :, :64].contiguous() for t in (q, k, v)]
        times = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(50):
                flex_attention(*small)
            times.append((time.perf_counter() - began) / 50)
            torch.cuda.synchronize()
    print(1e6 * sorted(times)[10])
"""


def first_calls() -> dict[str, object]:
    """The first forward and backward with a new score_mod, in two processes one after the other; a known call."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FUSEGRAD_CACHE_DIR": os.path.join(folder, "cache")}
        found = []
        for _ in range(2):
            command = [sys.executable, "-c", textwrap.dedent(_PROGRAM)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found.append([float(x) for x in done.stdout.split()])
    rows = [
        ("first call, forward and backward", "ms", found[0][0], 1500.0),
        ("first call, from the disk", "ms", found[1][0], 30.0),
        ("forward call that is known, host", "us", found[1][1], 60.0),
    ]
    print()
    for name, unit, value, limit in rows:
        word = "pass" if value <= limit else "MISS"
        print(f"{word}  {name}: {value:.1f} {unit}, limit {limit:g}")
    return {name: {"value": value, "unit": unit, "limit": limit} for name, unit, value, limit in rows}
