"""The models of the training steps: Llama by transformers, random weights and tokens, AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from harness.model import Case
from harness.training import Method, Training

# Kinds of steps; the first is the plain one.
TRAIN, CHECKPOINTS = "train_step", "train_step with checkpoints"
DISTILLATION, RELATIVE_BIAS = "distillation step", "relative bias step"
HEAD_SIZE = 64
# What the models have, transformers' default: PyTorch's scaled_dot_product_attention.
ATTENTION = "sdpa"


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
    model.set_attn_implementation(ATTENTION)
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


def with_apply(
    name: str,
    essential: bool = True,
    loss: Callable[[Training], Tensor] = plain,
    attention: str = "",
    **options: Any,
) -> Method:
    """`options` are those of `apply`, `attention` is transformers' attn_implementation, '' for the model's."""
    from fusegrad.integrations.transformers import apply, remove

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        apply(training.model, **options)
        if attention:
            training.model.set_attn_implementation(attention)
        try:
            yield
        finally:
            if attention:
                training.model.set_attn_implementation(ATTENTION)
            remove(training.model)

    return Method(name, loss, ours=True, essential=essential, within=within)
