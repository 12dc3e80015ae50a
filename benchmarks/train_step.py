"""Whole training steps of Llama models: fusegrad beside transformers, torch.compile, Liger, quack and CCE.

Random weights and tokens, AdamW. Four kinds of step: a Llama-3.2-1B-shaped model; the same at four times the batch,
with activation checkpoints; its distillation into one of half the width, by the Jensen–Shannon divergence; attention
with a learned relative bias, at 8192 tokens. Peers' heads are called with the model's hidden states, ours by
fusegrad.integrations.transformers.apply.

    python benchmarks/train_step.py [--device cpu] [--quick] [--output benchmarks/results]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import peers
from harness.benchmark import Options, Plan
from harness.cli import main
from harness.divergence import Divergence
from harness.goals import Goal
from harness.model import Case, Implementation, Unavailable
from harness.training import Method, Training, TrainingBenchmark
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

OP = "train_step"
CHECKPOINTS, DISTILLATION, RELATIVE_BIAS = "train_step with checkpoints", "distillation step", "relative bias step"
LETTERS = ("B", "S", "L", "H", "V")
HEAD_SIZE = 64
# The least memory of a peer, measured beside tokens/s before there was this script.
LEANEST_GIB = {OP: 34.81, CHECKPOINTS: 20.63}
LEAN_MIB = 512
REFERENCE_ROWS = 512
OURS = ("fusegrad", "fusegrad inplace", "fusegrad lean", "fusegrad lean inplace")

Found = list[Method | Unavailable]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


# --- models ---------------------------------------------------------------------------------------------------


def llama(case: Case, hidden: int) -> Any:
    """A LlamaForCausalLM of the case's depth and vocabulary, its head tied; four query heads share a key."""
    heads = hidden // HEAD_SIZE
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=case["L"],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=HEAD_SIZE,
        intermediate_size=4 * hidden,
        vocab_size=case["V"],
        max_position_embeddings=max(8192, case["S"]),
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(case.device):
        model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model.to(case.torch_dtype)


def make(case: Case) -> Training:
    teacher = llama(case, case["H"]).eval().requires_grad_(False) if case.op == DISTILLATION else None
    model = llama(case, case["H"] // 2 if case.op == DISTILLATION else case["H"]).train()
    watched = model.lm_head.weight
    if case.op == CHECKPOINTS:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.op == RELATIVE_BIAS:
        for layer in model.model.layers:
            size = (model.config.num_attention_heads, 2 * case["S"])
            bias = 0.1 * torch.randn(size, dtype=case.torch_dtype, device=case.device)
            layer.self_attn.relative_bias = nn.Parameter(bias)
        watched = model.model.layers[0].self_attn.relative_bias
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, case["V"], (case["B"], case["S"]), device=case.device)
    return Training(model, optimizer, tokens, watched, teacher)


def hidden_states(model: Any, tokens: Tensor) -> Tensor:
    """[B * S, H]"""
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


def plain(training: Training) -> Tensor:
    """What the model itself computes from labels, which is fusegrad's loss after `apply`."""
    return training.model(input_ids=training.tokens, labels=training.tokens, use_cache=False).loss


def compiled() -> Callable[[Training], Tensor]:
    made: dict[str, Any] = {}

    def loss(training: Training) -> Tensor:
        model = made.setdefault("model", torch.compile(training.model, dynamic=False))
        return model(input_ids=training.tokens, labels=training.tokens, use_cache=False).loss

    return loss


# --- the loss -------------------------------------------------------------------------------------------------


def next_tokens(tokens: Tensor) -> Tensor:
    """[B * S] the labels of all hidden states, as transformers shifts them: the last one's is ignored."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()


def with_head(head: Implementation) -> Method:
    """An op's implementation, `loss(hidden, weight, target)`, as the head of the model."""

    def loss(training: Training) -> Tensor:
        hidden = hidden_states(training.model, training.tokens)
        return head.loss(hidden, training.model.lm_head.weight, next_tokens(training.tokens))

    return Method(head.name, loss, essential=head.essential)


def with_apply(name: str, essential: bool = True, loss: Callable[[Training], Tensor] = plain, **options: Any) -> Method:
    from fusegrad.integrations.transformers import apply, remove

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        apply(training.model, **options)
        try:
            yield
        finally:
            remove(training.model)

    return Method(name, loss, ours=True, essential=essential, within=within)


def our_losses(case: Case) -> list[Method]:
    lean: dict[str, Any] = {"accumulate_dtype": case.torch_dtype, "workspace_mib": LEAN_MIB}
    return [
        with_apply("fusegrad"),
        with_apply("fusegrad inplace", inplace=True),
        with_apply("fusegrad lean", **lean),
        with_apply("fusegrad lean inplace", inplace=True, **lean),
        with_apply("fusegrad lean 256 MiB", essential=False, **{**lean, "workspace_mib": 256}),
        with_apply("fusegrad compile model", essential=False, loss=compiled()),
    ]


def losses(case: Case, options: Options) -> Found:
    heads = [
        *peers.torch_linear(case),
        *peers.liger_linear(case),
        *peers.liger_sm90_linear(case),
        *peers.quack_linear(case, options.autotune),
        *peers.cce_linear(case),
    ]
    return [
        Method("transformers", plain),
        Method("compile model", compiled(), essential=False),
        *(one if isinstance(one, Unavailable) else with_head(one) for one in heads),
        *peers.optional("fusegrad", "fusegrad", lambda _: our_losses(case)),
    ]


def exact_loss(training: Training) -> Tensor:
    """In float64 from the hidden states on, some rows at a time."""
    hidden, target = hidden_states(training.model, training.tokens), next_tokens(training.tokens)
    weight = training.model.lm_head.weight.double()

    def part(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(hidden.double() @ weight.T, target, reduction="sum")

    return in_parts(part, hidden, target, weight) / (target >= 0).sum()


def in_parts(part: Callable[..., Tensor], hidden: Tensor, rows: Tensor, *others: Tensor) -> Tensor:
    pieces = zip(hidden.split(REFERENCE_ROWS), rows.split(REFERENCE_ROWS), strict=True)
    return torch.stack([checkpoint(part, *piece, *others, use_reentrant=False) for piece in pieces]).sum()


# --- distillation ---------------------------------------------------------------------------------------------


def both_hidden_states(training: Training) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = hidden_states(training.teacher, training.tokens)
    return hidden_states(training.model, training.tokens), teacher


def with_divergence(name: str, essential: bool, divergence: Callable[..., Tensor], ours: bool = False) -> Method:
    """`divergence(hidden, weight, labels, teacher_hidden, teacher_weight)` of the two models."""

    def loss(training: Training) -> Tensor:
        student, teacher = both_hidden_states(training)
        weights = training.model.lm_head.weight, training.teacher.lm_head.weight
        return divergence(student, weights[0], training.tokens.flatten(), teacher, weights[1])

    return Method(name, loss, ours, essential)


def our_divergences(fusegrad: Any, case: Case) -> list[Method]:
    def made(name: str, **options: Any) -> Method:
        def divergence(student: Tensor, weight: Tensor, _: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
            return fusegrad.linear_jsd(student, weight, teacher, teacher_weight, **options)

        return with_divergence(name, True, divergence, ours=True)

    lean: dict[str, Any] = {"accumulate_dtype": case.torch_dtype, "workspace_mib": LEAN_MIB}
    return [
        made("fusegrad"),
        made("fusegrad inplace", inplace=True),
        made("fusegrad lean", **lean),
        made("fusegrad lean inplace", inplace=True, **lean),
    ]


def divergences(case: Case) -> Found:
    heads = [*peers.torch_linear_jsd(case), *peers.liger_linear_jsd(case)]
    chosen = [one for one in heads if isinstance(one, Unavailable) or one.variant == Divergence()]
    return [
        *(
            one if isinstance(one, Unavailable) else with_divergence(one.name, one.essential, one.loss)
            for one in chosen
        ),
        *peers.optional("fusegrad", "fusegrad", lambda fusegrad: our_divergences(fusegrad, case)),
    ]


def exact_divergence(training: Training) -> Tensor:
    student, teacher = both_hidden_states(training)
    weights = training.model.lm_head.weight.double(), training.teacher.lm_head.weight.double()

    def part(student: Tensor, teacher: Tensor, weight: Tensor, teacher_weight: Tensor) -> Tensor:
        logits, expected = student.double() @ weight.T, teacher.double() @ teacher_weight.T
        return Divergence().rows(logits, training.tokens, expected).sum()

    return in_parts(part, student, teacher, *weights) / len(student)


# --- a learned relative bias ----------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def with_attention(
    name: str, attention: Attention, ours: bool = False, essential: bool = True, head: Method | None = None
) -> Method:
    """`attention(query, key, value, bias, scale)`, [B, heads, S, D], in every layer; the loss is the model's."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        out = attention(query, key, value, module.relative_bias, scaling)
        return out.transpose(1, 2).contiguous(), None

    registered = f"relative {name}"
    AttentionInterface.register(registered, attend)

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        training.model.set_attn_implementation(registered)
        with head.within(training) if head else contextlib.nullcontext():
            yield

    return Method(name, plain, ours, essential, within)


def relative_biases(case: Case) -> Found:
    length = case["S"]
    mask = create_block_mask(causal, None, None, length, length, device=case.device)

    def flexible(flex: Callable[..., Tensor]) -> Attention:
        def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
            def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return score + bias[h, q - kv + length]

            return flex(query, key, value, score_mod=score_mod, block_mask=mask, scale=scale, enable_gqa=True)

        return attention

    def ours(fusegrad: Any) -> list[Method]:
        attention = flexible(fusegrad.flex_attention)
        return [
            with_attention("fusegrad", attention, ours=True, head=with_apply("")),
            with_attention("fusegrad attention", attention, ours=True),
        ]

    def compiled_flex() -> Found:
        if case.device != "cuda":
            return [Unavailable("compile", "PyTorch's flex attention has gradients on CUDA only")]
        return [with_attention("compile", flexible(torch.compile(flex_attention, dynamic=False)))]

    return [with_attention("eager", dense), *compiled_flex(), *peers.optional("fusegrad", "fusegrad", ours)]


def dense_bias(bias: Tensor, length: int) -> Tensor:
    """[heads, S, S] what is added to the scores, -inf above the diagonal."""
    place = torch.arange(length, device=bias.device)
    distance = place[:, None] - place
    return bias[:, distance + length].masked_fill(distance < 0, -torch.inf)


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    # Each query head with a key of its own: the kernels that take a bias know no groups.
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    return F.scaled_dot_product_attention(query, key, value, dense_bias(bias, query.shape[2])[None], scale=scale)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    scores = scale * query.double() @ key.mT + dense_bias(bias.double(), query.shape[2])
    return (scores.softmax(-1) @ value).to(query.dtype)


# --- cases ----------------------------------------------------------------------------------------------------


def implementations(case: Case, options: Options) -> Found:
    if case.op == DISTILLATION:
        return divergences(case)
    return relative_biases(case) if case.op == RELATIVE_BIAS else losses(case, options)


def reference(case: Case) -> Method:
    if case.op == RELATIVE_BIAS:
        return with_attention("exact", exact_attention)
    return Method("exact", exact_divergence if case.op == DISTILLATION else exact_loss)


def goals(kind: str, others: tuple[str, ...]) -> tuple[Goal, ...]:
    limit = LEANEST_GIB.get(kind)
    text = "" if limit is None else f", and than {limit} GiB"
    subjects = ("fusegrad", "fusegrad attention") if kind == RELATIVE_BIAS else OURS
    return tuple(
        Goal(
            f"more tokens/s than {other} in no more memory{text}",
            subjects,
            max_mib=None if limit is None else limit * 1024,
            than=other,
            min_speedup=1,
            max_memory_share=1,
        )
        for other in others
    )


def plans(device: str, quick: bool) -> list[Plan]:
    def case(kind: str, *sizes: int) -> Case:
        dtype = "bfloat16" if device == "cuda" else "float32"
        return Case(kind, tuple(zip(LETTERS, sizes, strict=True)), dtype, device)

    if device == "cpu":
        sizes = (2, 64, 2, 128, 512) if quick else (2, 512, 4, 512, 32000)
        without = r"^(?!.*compile)" if quick else r"^(?!.*compile model)"  # half a minute and more of Inductor's time
        return [
            Plan(case(kind, *sizes), tuple(_cpu_goals(kind, quick)), only="" if kind == RELATIVE_BIAS else without)
            for kind in (OP, CHECKPOINTS, DISTILLATION, RELATIVE_BIAS)
        ]
    chunks = tuple(f"liger chunk_mem={n}" for n in (4, 16))
    more = ("liger float32 chunk_mem=16", "liger sm90", "quack chunk=2048", "quack chunk=8192", "cce")
    others = ("transformers", "eager", "compile", *chunks, *more)
    heads = r"^(transformers|compile|liger( chunk_mem=(4|16))?|cce|fusegrad( lean)?( inplace)?)$"
    few = ("transformers", "compile", *chunks, "cce")
    return [
        Plan(case(OP, 4, 4096, 16, 2048, 128256), goals(OP, others)),
        Plan(case(CHECKPOINTS, 16, 4096, 16, 2048, 128256), goals(CHECKPOINTS, few), only=heads, accuracy=False),
        Plan(case(DISTILLATION, 2, 4096, 16, 2048, 128256), goals(DISTILLATION, ("eager", "compile", "liger"))),
        # In float64 a layer's scores would take 16 GiB.
        Plan(case(RELATIVE_BIAS, 1, 8192, 8, 2048, 32000), goals(RELATIVE_BIAS, ("eager", "compile")), accuracy=False),
    ]


def _cpu_goals(kind: str, quick: bool) -> list[Goal]:
    """Beside what PyTorch alone does; steps of the quick sizes are the host's overhead."""
    if quick:
        return []
    subjects = ("fusegrad",) if kind == RELATIVE_BIAS else OURS
    return [Goal("more tokens/s than eager", subjects, than="eager", min_speedup=1)]


BENCHMARK = TrainingBenchmark(
    op=OP, make=make, implementations=implementations, reference=reference, plans=plans, letters=LETTERS
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
