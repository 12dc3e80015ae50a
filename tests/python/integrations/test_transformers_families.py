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
import sweep_transformers as sweep  # noqa: E402
from fusegrad.integrations.lazy_logits import lazy_linear  # noqa: E402
from fusegrad.integrations.transformers import apply  # noqa: E402
from tiny_models import V, small_model  # noqa: E402

pytestmark = pytest.mark.cpu_only

# The part of the sweep over all families that CI runs, one of each kind; python tests/python/support/
# sweep_transformers.py runs all.
SERVED = [
    "LlamaForCausalLM",
    "Llama4ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "GPTBigCodeForCausalLM",
    "Phi3ForCausalLM",
    "BertForMaskedLM",
    "LayoutLMForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration",
    "ViTModel",
]
# Refused in releases of transformers in which they compute their attention themselves.
CHANGING = [
    "BloomForCausalLM",
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "CodeGenForCausalLM",
    "MptForCausalLM",
]


@pytest.fixture(autouse=True)
def nothing_steps_aside() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusegrad:")
        yield


def close(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("name", SERVED)
def test_losses_attention_and_caches(name: str) -> None:
    results = sweep.compared(name)
    assert results["attention"] == "ok", results
    assert all(r == "ok" or r.startswith("no:") for r in results.values()), results
    if not name.startswith("ViT"):
        assert results["loss"] == "ok", results


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
    """Served, or refused by name; the loss is fused in either case."""
    kind = getattr(tf, name)
    results = sweep.compared(name)
    assert results["loss"] == "ok", results
    if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[kind.__module__]):
        assert results["attention"] == "ok", results
        return
    with sweep.quiet():
        model = small_model(kind)
    message = rf"^attn_implementation: .* but got {kind.__name__}, which computes its attention itself"
    model.config._attn_implementation = "fusegrad"
    with pytest.raises(ValueError, match=message):
        apply(model)


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
    with sweep.quiet():
        config = small_model(getattr(tf, f"{name}Model")).config
    setattr(config, option, 0.125)
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
