"""Models whose attention has a learned bias, or a head size of 72, by transformers with random weights, and their
attentions: the model's own ones, ours by fusegrad.integrations, and ours in a few lines that read the tables where
they are, as docs/learned_biases.md shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    SiglipVisionConfig,
    SiglipVisionModel,
    SwinConfig,
    SwinModel,
    T5Config,
    T5EncoderModel,
)
from transformers.models.esm import modeling_esmfold as esmfold
from transformers.models.swin import modeling_swin as swin

from harness import peers
from harness.model import Case
from harness.training import Found, Method, Training

T5, SWIN, SIGLIP, TRUNK = "t5 encoder step", "swin step", "siglip step", "folding trunk step"
# A forward of a module, in place of its class's.
Forward = Callable[..., Any]


# --- models ---------------------------------------------------------------------------------------------------


def make(case: Case) -> Training:
    torch.manual_seed(0)
    with torch.device(case.device):
        model, inputs, watched = MODELS[case.op](case)
    model = model.to(case.torch_dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Training(model, optimizer, inputs, watched(model))


def t5(case: Case) -> tuple[Any, Tensor, Callable[[Any], Any]]:
    """T5 v1.1's encoder, of the case's depth."""
    heads = case["H"] // 64
    config = T5Config(
        d_model=case["H"], d_kv=64, d_ff=8 * case["H"] // 3, num_layers=case["L"], num_heads=heads, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", vocab_size=32128, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 32128, (case["B"], case["S"]))
    return T5EncoderModel(config), tokens, lambda m: table_of_t5(m)


def table_of_t5(model: Any) -> Any:
    return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight


def swin_model(case: Case) -> tuple[Any, Tensor, Callable[[Any], Any]]:
    """Swin-B's widths and windows of 7 x 7; S is the image's side, L the third stage's depth."""
    width = case["H"]
    heads = [width // 32 * 2**i for i in range(4)]
    config = SwinConfig(
        image_size=case["S"], embed_dim=width, depths=[2, 2, case["L"], 2], num_heads=heads, window_size=7,
        drop_path_rate=0.0,
    )  # fmt: skip
    images = torch.randn(case["B"], 3, case["S"], case["S"])
    return SwinModel(config), images, lambda m: next(p for n, p in m.named_parameters() if "bias_table" in n)


def siglip(case: Case) -> tuple[Any, Tensor, Callable[[Any], Any]]:
    """SigLIP so400m's vision tower, heads of 72, of the case's depth; S is the image's side."""
    config = SiglipVisionConfig(
        hidden_size=case["H"], intermediate_size=4304 * case["H"] // 1152, num_hidden_layers=case["L"],
        num_attention_heads=case["H"] // 72, image_size=case["S"], patch_size=14,
    )  # fmt: skip
    images = torch.randn(case["B"], 3, case["S"], case["S"])
    return SiglipVisionModel(config), images, lambda m: next(p for n, p in m.named_parameters() if "q_proj.weight" in n)


class Trunk(torch.nn.Module):
    """Blocks of ESMFold's trunk over S residues, H channels of a pair."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from transformers.models.esm.configuration_esm import TrunkConfig

        config = TrunkConfig(
            sequence_state_dim=8 * case["H"], pairwise_state_dim=case["H"], sequence_head_width=32,
            pairwise_head_width=32, dropout=0.0,
        )  # fmt: skip
        self.blocks = torch.nn.ModuleList(esmfold.EsmFoldTriangularSelfAttentionBlock(config) for _ in range(case["L"]))
        for module in self.modules():  # the blocks begin as the identity, which would leave no gradients
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.05)

    def forward(self, pairs: Tensor) -> Tensor:
        sequence = pairs.new_zeros(*pairs.shape[:2], 8 * pairs.shape[3])
        for block in self.blocks:
            sequence, pairs = block(sequence, pairs)
        return pairs


def trunk(case: Case) -> tuple[Any, Tensor, Callable[[Any], Any]]:
    pairs = torch.randn(case["B"], case["S"], case["S"], case["H"])
    return Trunk(case), pairs, lambda m: m.blocks[0].tri_att_start.linear.weight


MODELS = {T5: t5, SWIN: swin_model, SIGLIP: siglip, TRUNK: trunk}


def loss(training: Training) -> Tensor:
    """The model's output as a number whose gradients have no favourite element."""
    inputs = training.tokens
    if inputs.is_floating_point():
        inputs = inputs.to(training.watched.dtype)
    result = training.model(inputs)
    return getattr(result, "last_hidden_state", result).float().tanh().square().mean()


# --- attentions -----------------------------------------------------------------------------------------------


def own(name: str, implementation: str, ours: bool = False) -> Method:
    """The model with one of transformers' attentions."""

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        before = training.model.config._attn_implementation
        training.model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            training.model.set_attn_implementation(before)

    return Method(name, loss, ours, within=within)


def patched(name: str, kind: type, forward: Forward, ours: bool = False) -> Method:
    """The model whose modules of a class compute `forward`."""

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        before = kind.forward  # type: ignore[attr-defined]
        kind.forward = forward  # type: ignore[attr-defined]
        try:
            yield
        finally:
            kind.forward = before  # type: ignore[attr-defined]

    return Method(name, loss, ours, within=within)


def exact(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float = 1.0, **options: Any
) -> tuple[Tensor, None]:
    scores = scaling * query.double() @ key.double().mT
    for added in (mask, options.get("position_bias")):
        if added is not None:
            scores = scores + added.double()
    return (scores.softmax(-1) @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None


def t5_table(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, None]:
    """T5's buckets by the distance, and the table at them."""
    from fusegrad import flex_attention

    length, table = query.shape[2], module.table
    distance = torch.arange(-length + 1, length, device=query.device)
    bucket = module._relative_position_bucket(distance, bidirectional=True)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[bucket[kv_idx - q_idx + length - 1], h]

    out: Any = flex_attention(query, key, value, score_mod, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def swin_table(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
    """SwinAttention: the table at the relative places, and in shifted windows the mask of the window."""
    from fusegrad import flex_attention

    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    table = self.relative_position_bias.relative_position_bias_table
    area = hidden_states.shape[1]
    index = self.relative_position_bias.relative_position_index.view(area, area)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score + table[index[q_idx, kv_idx], h]
        if attention_mask is not None:
            score = score + attention_mask[b % attention_mask.shape[0], q_idx, kv_idx]
        return score

    out: Any = flex_attention(query, key, value, score_mod, scale=self.scaling)
    return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape)), None


def rows_of(t: Tensor) -> Tensor:
    """[B, I, H, J, D] as [B * I, H, J, D]."""
    return t.reshape(-1, *t.shape[-3:])


def esm_forward(attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """EsmFoldAttention with `attention(query, key, value, bias of rows [B * I, J], bias of pairs [B, H, J, J])`."""

    def forward(self: Any, q_x: Tensor, kv_x: Tensor, biases: list[Tensor], **_: Any) -> Tensor:
        query, key, value = self._prep_qkv(q_x, kv_x)
        of_rows, of_pairs = biases
        out = attention(rows_of(query), rows_of(key), rows_of(value), of_rows.flatten(0, 1)[:, 0, 0], of_pairs[:, 0])
        return self._wrap_up(out.view(query.shape).transpose(-2, -3), q_x)

    return forward


def triangle(query: Tensor, key: Tensor, value: Tensor, of_rows: Tensor, of_pairs: Tensor) -> Tensor:
    from fusegrad import flex_attention

    rows = query.shape[0] // of_pairs.shape[0]
    one = of_pairs.shape[0] == 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + of_pairs[0 if one else b // rows, h, q_idx, kv_idx] + of_rows[b, kv_idx]

    out: Any = flex_attention(query, key, value, score_mod, scale=1.0)
    return out


def triangle_exact(query: Tensor, key: Tensor, value: Tensor, of_rows: Tensor, of_pairs: Tensor) -> Tensor:
    rows = query.shape[0] // of_pairs.shape[0]
    scores = query.double() @ key.double().mT + of_rows.double()[:, None, None]
    scores = scores + of_pairs.double().repeat_interleave(rows, 0)
    return (scores.softmax(-1) @ value.double()).to(query.dtype)


def triangle_sdpa(query: Tensor, key: Tensor, value: Tensor, of_rows: Tensor, of_pairs: Tensor) -> Tensor:
    rows = query.shape[0] // of_pairs.shape[0]
    bias = of_rows[:, None, None] + of_pairs.repeat_interleave(rows, 0)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, bias, scale=1.0)


def with_table(method: Method) -> Method:
    """T5 keeps its table in the first layer only."""

    @contextlib.contextmanager
    def within(training: Training) -> Iterator[None]:
        for block in training.model.encoder.block:
            object.__setattr__(block.layer[0].SelfAttention, "table", table_of_t5(training.model))
        with method.within(training):
            yield

    return Method(method.name, loss, method.ours, within=within)


def implementations(case: Case) -> Found:
    if case.op == TRUNK:
        kind = esmfold.EsmFoldAttention
        return [
            Method("eager", loss),
            patched("sdpa", kind, esm_forward(triangle_sdpa)),
            *peers.optional("fusegrad", "fusegrad", lambda _: [patched("fusegrad", kind, esm_forward(triangle), True)]),
        ]

    def ours(_: Any) -> list[Method]:
        import fusegrad.integrations.transformers  # noqa: F401, which registers the attention

        found = [own("fusegrad", "fusegrad", ours=True)]
        if case.op == T5:
            AttentionInterface.register("t5 table", t5_table)
            found.append(with_table(own("fusegrad table", "t5 table", ours=True)))
        if case.op == SWIN:
            found.append(patched("fusegrad table", swin.SwinAttention, swin_table, ours=True))
        return found

    return [own("eager", "eager"), own("sdpa", "sdpa"), *peers.optional("fusegrad", "fusegrad", ours)]


def reference(case: Case) -> Method:
    if case.op == TRUNK:
        return patched("exact", esmfold.EsmFoldAttention, esm_forward(triangle_exact))
    AttentionInterface.register("exact", exact)
    return own("exact", "exact")
