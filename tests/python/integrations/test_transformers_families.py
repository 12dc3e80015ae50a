"""transformers: more families of models, those that are refused by name, and what is special about some."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import fusegrad
import pytest
import torch
from torch import Tensor, nn

tf = pytest.importorskip("transformers")
from fusegrad.integrations.lazy_logits import lazy_linear  # noqa: E402
from fusegrad.integrations.transformers import apply  # noqa: E402

pytestmark = pytest.mark.cpu_only

V = 97
SMALL: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT: dict[str, Any] = {
    **{"n_embd": 32, "n_layer": 2, "n_head": 4},
    **{"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}
NO_DROPOUT: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
BERT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0},
    **{"attention_dropout": 0.0, "decoder_start_token_id": 1},
}
SERVED: dict[str, dict[str, Any]] = {
    "GPTNeoXConfig": NO_DROPOUT,
    "OPTConfig": {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32, "attention_dropout": 0.0},
    "Qwen3MoeConfig": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4TextConfig": {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "Phi3Config": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Olmo2Config": {},
    "Glm4Config": {},
    "Starcoder2Config": {},
    "GPTBigCodeConfig": GPT,
    "BertConfig": BERT,
    "T5Config": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        **{"decoder_start_token_id": 1},
    },
    "BartConfig": BART,
    "MBartConfig": BART,
    "MarianConfig": BART,
}
# Refused in releases of transformers in which they compute their attention themselves.
CHANGING: dict[str, dict[str, Any]] = {
    "BloomConfig": {"n_layer": 2, "n_head": 4, **NO_DROPOUT},
    "FalconConfig": {"head_dim": None, **NO_DROPOUT},
    "GPTJConfig": {"rotary_dim": 4, **GPT},
    "GPTNeoConfig": {
        **{"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    },
    "CodeGenConfig": {"rotary_dim": 4, **GPT},
    "MptConfig": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
}


@pytest.fixture(autouse=True)
def nothing_steps_aside() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusegrad:")
        yield


def config_of(name: str) -> Any:
    options = {**SMALL, **{**SERVED, **CHANGING}[name]}
    return getattr(tf, name)(**{k: v for k, v in options.items() if v is not None})


def make(name: str, attention: str | None = None) -> Any:
    """A small model, always with the same weights and biases of its logits."""
    kinds = {"BertConfig": tf.AutoModelForMaskedLM, "T5Config": tf.AutoModelForSeq2SeqLM}
    kind = tf.AutoModelForSeq2SeqLM if SERVED.get(name) is BART else kinds.get(name, tf.AutoModelForCausalLM)
    config = config_of(name)
    config._attn_implementation = attention or "eager"
    model = kind.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    for buffer_name, buffer in model.named_buffers():
        if "final_logits_bias" in buffer_name:
            buffer.normal_(generator=generator)
    return model.train()


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients, of rows of which one is padded."""
    ids = torch.randint(3, V, (2, 24), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = -100
    labels[1, 18:], mask[1, 18:] = -100, 0
    loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("name", SERVED)
def test_attention_and_loss(name: str) -> None:
    expected = step(make(name))
    close(step(make(name, "fusegrad")), expected)
    close(step(apply(make(name))), expected)


def test_windows() -> None:
    """Swin: a table of biases for each layer, and windows that are shifted and masked."""
    config = tf.SwinConfig(
        **{"image_size": 28, "patch_size": 1, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]},
        **{"window_size": 7, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0},
    )

    def gradients(attention: str) -> tuple[Tensor, dict[str, Tensor]]:
        config._attn_implementation = attention
        model, generator = tf.SwinModel(config).train(), torch.Generator().manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1, generator=generator)
        loss = model(torch.randn(2, 3, 28, 28, generator=generator)).last_hidden_state.square().sum()
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients("eager")
    assert sum("relative_position_bias_table" in name for name in expected[1]) == 3
    close(gradients("fusegrad"), expected)


@pytest.mark.parametrize("name", CHANGING)
def test_models_that_may_compute_their_attention_themselves(name: str) -> None:
    """Served, or refused by name when the implementation is set; the loss is fused in either case."""
    model = make(name)
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[type(model).__module__]):
        test_attention_and_loss(name)
        return
    message = rf"^attn_implementation: .* but got {name.removesuffix('Config')}\w*, which computes its attention itself"
    with pytest.raises(ValueError, match=message):
        make(name, "fusegrad")
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("fusegrad")
    assert model.config._attn_implementation != "fusegrad"
    close(step(apply(model)), step(make(name)))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_gpt2_with_a_cache(cache: str) -> None:
    ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(1))
    tokens = []
    for attention in ("eager", "fusegrad"):
        config = tf.GPT2Config(**{**SMALL, **GPT})
        config._attn_implementation = attention
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).eval()
        tokens.append(model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation=cache))
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    "name, option",
    [("GPT2", "attn_pdrop"), ("Bert", "attention_probs_dropout_prob"), ("Llama", "attention_dropout")],
)
def test_dropout_under_the_models_own_name(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    attend = fusegrad.flex_attention
    monkeypatch.setattr(
        fusegrad, "flex_attention", lambda *a, dropout_p, **how: given.append(dropout_p) or attend(*a, **how)
    )
    config = getattr(tf, f"{name}Config")(**{**SMALL, "n_layer": 1, option: 0.125})
    config._attn_implementation = "fusegrad"
    model = tf.AutoModel.from_config(config).train()
    model(torch.randint(3, V, (2, 7)))
    assert given and set(given) == {0.125}
    given.clear()
    model.eval()(torch.randint(3, V, (2, 7)))
    assert given and set(given) == {0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("order", ["logits + added", "added + logits", "torch.add"])
def test_a_bias_that_is_added_to_the_logits(dtype: torch.dtype, bias: bool, order: str) -> None:
    """Served with its gradient; [1, V] as BART's, and [V]."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (2, 6, 8), "weight": (V, 8), "bias": (V,), "added": (1, V)}
    leaves = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items() if bias or n != "bias"}
    target = torch.randint(0, V, (12,), generator=generator)

    def run(linear: Any, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        given = {n: t.to(dtype, copy=True).requires_grad_() for n, t in leaves.items()}
        logits, added = linear(given["hidden"], given["weight"], given.get("bias")), given["added"]
        row = added[0] if order == "torch.add" else added
        logits = {"logits + added": lambda: logits + row, "added + logits": lambda: row + logits}.get(
            order, lambda: torch.add(logits, row)
        )()
        rows = logits.view(-1, V)
        loss = nn.functional.cross_entropy(rows if dtype == torch.float64 else rows.float(), target)
        return loss, list(torch.autograd.grad(loss, given.values()))

    loss, gradients = run(lazy_linear, dtype)
    wanted, truth = run(nn.functional.linear, torch.float64)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=0)
    for a, b in zip(gradients, truth, strict=True):
        assert (a.double() - b).norm() <= tolerance * b.norm()


def test_what_is_added_but_no_bias_computes_the_logits() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(V, 8)
    for other in (torch.randn(3, V), torch.randn(3, 1), 1.0, torch.arange(V)):
        with pytest.warns(UserWarning, match="add needs all logits"):
            made = lazy_linear(hidden, weight) + other
        torch.testing.assert_close(made, nn.functional.linear(hidden, weight) + other)
