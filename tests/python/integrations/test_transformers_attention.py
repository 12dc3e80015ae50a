"""transformers: what attention and masks are given. Each argument counts, changes nothing, or is refused by name."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

tf = pytest.importorskip("transformers")
import sweep_transformers as sweep  # noqa: E402
from fusegrad.integrations import transformers_attention, transformers_models  # noqa: E402
from fusegrad.integrations.transformers import apply  # noqa: E402
from fusegrad.integrations.transformers_attention import attention, block_mask  # noqa: E402
from tiny_models import inputs_of, small_model  # noqa: E402
from transformers.masking_utils import causal_mask_function, chunked_overlay, sdpa_mask  # noqa: E402

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with sweep.quiet():
        yield


def pair(name: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A small model with eager attention, the same with fusegrad's, and what they are called with."""
    plain, ours = (sweep.make(getattr(tf, name)).eval() for _ in range(2))
    ours.set_attn_implementation("fusegrad")
    return plain, ours, inputs_of(plain)


def shallow(*models: Any) -> None:
    """One layer: a compiler's time goes by the layers."""
    for model in models:
        del model.model.layers[1:]
        model.config.num_hidden_layers = 1


def heads(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


# --- caches -------------------------------------------------------------------------------------------------------

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static, in pieces": {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": 5},
    "dynamic, in pieces": {"prefill_chunk_size": 5},
    "longer static": {"cache_implementation": "static", "disable_compile": True, "max_cache_len": 40},
    "beams": {"cache_implementation": "static", "disable_compile": True, "num_beams": 2},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_logits_with_a_cache(name: str, cache: str) -> None:
    """Without padding, of which tokens could be the same by chance: the logits."""
    plain, ours, inputs = pair(name)
    options = CACHES[cache]
    expected = sweep.generate(plain, inputs, **options)
    torch.testing.assert_close(sweep.generate(ours, inputs, **options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers offloads from a GPU, and compiles there alone")
@pytest.mark.parametrize("cache", ["static", "offloaded_static", "offloaded"])
def test_caches_on_a_gpu(cache: str) -> None:
    """The static one compiles each token's graph and records it. With offloaded layers that ends the process, whatever
    attention computes."""
    plain, ours, inputs = pair("LlamaForCausalLM")
    ids = {"input_ids": inputs["input_ids"].cuda()}
    expected = sweep.generate(plain.cuda(), ids, cache_implementation="static", disable_compile=True)
    for pieces in ({}, {"prefill_chunk_size": 8}):
        options = {"cache_implementation": cache, "disable_compile": cache == "offloaded_static", **pieces}
        found = sweep.generate(ours.cuda(), ids, **options)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_compiled_generation() -> None:
    """Masks made before the compiled graph of each token."""
    plain, ours, inputs = pair("LlamaForCausalLM")
    shallow(plain, ours)
    compiled = tf.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    options = {"cache_implementation": "static", "prefill_chunk_size": 8}
    expected = sweep.generate(plain, inputs, disable_compile=True, **options)
    found = sweep.generate(ours, inputs, compile_config=compiled, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_masks_of_a_compiled_model() -> None:
    """Made in the graph that raises the cache's counter."""
    plain, ours, inputs = pair("LlamaForCausalLM")
    shallow(plain, ours)
    ids, logits = inputs["input_ids"], []
    for model in (plain, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        cache = tf.StaticCache(config=plain.config, max_cache_len=24)
        cache.early_initialization(2, 4, 8, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            logits.append([model(ids[:, r], past_key_values=cache).logits for r in (slice(6), slice(6, 11))])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", ["q_offset", "kv_offset", "attention_mask", "captured"])
def test_masks_keep_what_their_owner_changes(changed: str) -> None:
    """Between the mask and attention, and between attention and its backward."""
    owned = {
        "q_offset": torch.tensor(3),
        "kv_offset": torch.tensor(1),
        "attention_mask": torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.8,
        "captured": torch.tensor([0, 2]),
    }

    def function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal_mask_function(b, h, q_idx, kv_idx) & chunked_overlay(7, owned["captured"])(b, h, q_idx, kv_idx)

    def made(maker: Any) -> Any:
        given = {n: t for n, t in owned.items() if n != "captured"}
        return maker(2, 8, 11, mask_function=function, allow_is_causal_skip=False, **given)

    allowed, mask = made(sdpa_mask), made(block_mask)
    whole = heads((2, 2, 8, 4), (2, 2, 11, 4), (2, 2, 11, 4))
    owned[changed].logical_not_() if changed == "attention_mask" else owned[changed].add_(4)
    out, _ = attention(nn.Module(), *whole, mask)
    owned[changed].zero_()
    part, _ = attention(nn.Module(), *(t[:, :, -5:] if i == 0 else t for i, t in enumerate(whole)), mask[:, :, -5:])
    expected = F.scaled_dot_product_attention(*whole, attn_mask=allowed).nan_to_num().transpose(1, 2)
    torch.testing.assert_close((out, part[:, :]), (expected, expected[:, -5:]))
    upstream = torch.randn_like(out)
    found, truth = (torch.autograd.grad(o, whole, upstream) for o in (out, expected))
    torch.testing.assert_close(found, [t.nan_to_num() for t in truth])


# --- arguments ----------------------------------------------------------------------------------------------------


def test_arguments_that_are_not_known() -> None:
    query, key, value = heads((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    module = nn.Module()
    expected, _ = attention(module, query, key, value, None)
    for name in ("indices", "block_indices", "cache", "block_table", "alibi"):
        with pytest.raises(NotImplementedError, match=f"^fusegrad attention: .* but Module gave {name}: use attn_impl"):
            attention(module, query, key, value, None, **{name: torch.zeros(1)})
        assert torch.equal(attention(module, query, key, value, None, **{name: None})[0], expected)
        with pytest.raises(TypeError, match=f"^fusegrad attention: a mask's arguments must be .* but got {name}"):
            block_mask(1, 5, 5, **{name: 1})
    for name in transformers_attention.HARMLESS:
        assert torch.equal(attention(module, query, key, value, None, **{name: 3})[0], expected), name


def calls() -> Iterator[tuple[str, set[str]]]:
    """The models' sources, with the names of all that they call attention with."""
    for path in sorted((Path(tf.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS.get_interface(" in source:
            found = re.findall(r"^( +)[^\n]*attention_interface\(\n(.*?)\n\1\)", source, flags=re.DOTALL | re.MULTILINE)
            yield source, {n for _, call in found for n in re.findall(r"^ +(\w+)=", call, flags=re.MULTILINE)}


def test_every_argument_of_every_model_counts_or_is_refused() -> None:
    given = list(calls())
    assert len(given) > 300
    unserved = [source for source, names in given if names - transformers_models._SERVED]
    assert unserved
    for source in unserved:
        assert "attends by" in next(transformers_models._reasons(source)), source[:2000]


REFUSED = {
    "DeepseekV32ForCausalLM": "DeepseekV32Attention attends by indices",
    "GlmMoeDsaForCausalLM": "GlmMoeDsaAttention attends by indices",
    "AXK2ForCausalLM": "AXK2Attention attends by indices",
    "HYV4ForCausalLM": "HYV4Attention attends by indices",
    "Dots3NoteForCausalLM": "Dots3NoteTextAttention attends by indices",
    "MiniMaxM3VLForCausalLM": "MiniMaxM3VLAttention attends by block_indices",
    "DogeForCausalLM": "DogeAttention makes its masks of tensors",
    "DeepseekV4ForCausalLM": "DeepseekV4Attention makes its masks of tensors",
    "BigBirdPegasusForConditionalGeneration": "BigBirdPegasusSelfAttention computes its attention itself",
    "GitForCausalLM": "GitSelfAttention computes its attention itself",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_by_name(name: str) -> None:
    if not hasattr(tf, name):
        pytest.skip(f"transformers has no {name}")
    message = rf"^attn_implementation: .* but got \w+, whose {REFUSED[name]}: use \"eager\"; its loss can be fused"
    with torch.device("meta"):
        model = small_model(getattr(tf, name))
        model.set_attn_implementation("fusegrad")
        with pytest.raises(ValueError, match=message):
            apply(model)
        assert "forward" not in vars(model)  # nothing is changed


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_forward_refuses(name: str) -> None:
    """Without apply too: no result of a model that cannot take it."""
    if not hasattr(tf, name):
        pytest.skip(f"transformers has no {name}")
    results = {check: r for check, r in sweep.compared(name).items() if check != "loss" and not r.startswith("no:")}
    assert results and all(r.startswith("refused") for r in results.values()), results


def test_nothing_is_patched_at_import() -> None:
    script = """
import transformers
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import LabelSmoother
before = [dict(vars(kind)) for kind in (PreTrainedModel, Trainer, LabelSmoother)]
import fusegrad.integrations.transformers
after = [dict(vars(kind)) for kind in (PreTrainedModel, Trainer, LabelSmoother)]
assert before == after
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_parts_of_a_model() -> None:
    with torch.device("meta"):
        model = small_model(tf.LlavaForConditionalGeneration)
        model.set_attn_implementation({"text_config": "fusegrad"})
        parts = (model.config, model.config.text_config, model.config.vision_config)
        assert [c._attn_implementation for c in parts] == ["eager", "fusegrad", "eager"]
        model = small_model(tf.MiniMaxM3SparseForConditionalGeneration)
        model.set_attn_implementation({"text_config": "fusegrad"})
        with pytest.raises(ValueError, match=r"^attn_implementation: .* attends by block_indices"):
            apply(model)


def test_models_that_take_their_masks_for_tensors() -> None:
    """An error that names the attention, whatever they do with a mask."""
    mask: Any = block_mask(1, 5, 5)
    for use in (
        lambda: torch.zeros(1, 1, 5, 5) + mask,
        lambda: torch.cat([mask, torch.zeros(1, 1, 5, 5)], -1),
        lambda: F.pad(mask, (0, 1)),
        lambda: torch.zeros(5, 5).masked_fill(mask, 1.0),
    ):
        with pytest.raises(NotImplementedError, match=r"^fusegrad attention: the model must hand its masks"):
            use()
    for name in ("dtype", "device", "expand", "squeeze"):
        with pytest.raises(AttributeError, match=f"^fusegrad attention: .* but asked one for its {name}"):
            getattr(mask, name)
    assert not hasattr(mask, "masked_fill")
    query, key = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 7, 8)
    with pytest.raises(ValueError, match=r"^fusegrad attention: the mask must be for the 5 queries and 7 keys of M"):
        attention(nn.Module(), query, key, key, mask)


@pytest.mark.parametrize("shape", [(4,), (1, 4, 1, 1), (2, 4, 6, 1), (1, 4, 6, 1)], ids=str)
@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks(name: str, shape: tuple[int, ...]) -> None:
    """With their gradient, against float64 formulas."""
    query, key, value, sinks = heads((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), shape)
    out, _ = attention(nn.Module(), query, key, value, block_mask(1, 6, 6), 0.3, **{name: sinks})
    scores = (0.3 * query @ key.repeat_interleave(2, 1).mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    column = (sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks).expand(2, 4, 6, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream, leaves = torch.randn_like(out), (query, key, value, sinks)
    found, truth = (torch.autograd.grad(o, leaves, upstream) for o in (out, expected))
    torch.testing.assert_close(found, truth)


def test_sinks_that_do_not_fit() -> None:
    query, key, value = heads((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    for shape in ((3,), (2, 4), (2, 3, 6, 1), (2, 4, 5, 1), (2, 4, 6, 2)):
        message = rf"sinks must be \[4\] or \[2 or 1, 4, 6 or 1, 1\], but got {re.escape(str(list(shape)))}"
        with pytest.raises(ValueError, match=message):
            attention(nn.Module(), query, key, value, block_mask(1, 6, 6), sinks=torch.zeros(shape))
    with pytest.raises(ValueError, match="sinks must be given once"):
        attention(nn.Module(), query, key, value, None, sinks=torch.zeros(4), s_aux=torch.zeros(4))


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (1, 4), (1, 6))), ids=str)
def test_masks_and_biases_of_fewer_rows(sizes: tuple[int, int, int]) -> None:
    """[B or 1, H or 1, M or 1, N], a key longer than needed: bools, what is added, and a bias with its gradient."""
    query, key, value, bias = heads((2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8), (*sizes, 8))
    allowed = torch.rand(*sizes, 8, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed[..., 0] = True
    added = torch.zeros(*sizes, 8, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    upstream = torch.randn(2, 6, 4, 8, dtype=torch.float64)

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return (out, *torch.autograd.grad(out, (query, key, value, bias), upstream))

    expected = F.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), (added + bias)[..., :7].expand(2, 4, 6, 7)
    ).transpose(1, 2)
    truth = gradients(expected)
    for mask in (allowed, added):
        out, _ = attention(nn.Module(), query, key, value, mask, position_bias=bias, is_causal=False)
        torch.testing.assert_close(gradients(out), truth)


def test_masks_and_biases_that_do_not_fit() -> None:
    query, key, value = heads((2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    for shape in ((2, 4, 6, 6), (3, 1, 6, 7), (2, 2, 6, 7), (2, 4, 5, 7), (6, 7)):
        for name in ("attention_mask", "position_bias"):
            mask = {"attention_mask": None, "is_causal": False, name: torch.zeros(shape)}
            message = rf"{name} must be \[2 or 1, 4 or 1, 6 or 1, >= 7\], but got {re.escape(str(list(shape)))}"
            with pytest.raises(ValueError, match=message):
                attention(nn.Module(), query, key, value, **mask)


# --- packed sequences ---------------------------------------------------------------------------------------------

LENGTHS = (4, 9, 1, 7)
# What the collator gives: position ids, each token's index, the sequences' ends. transformers takes position ids for
# sequences where attention is causal alone.
PACKED = [
    (name, p, s, f)
    for name in ("LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM")
    for p, s, f in itertools.product((False, True), repeat=3)
    if s or f or (p and name.endswith("CausalLM"))
]


def flattened(p: bool, s: bool, f: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    rows = [{"input_ids": torch.randint(3, 80, (n,), generator=generator).tolist()} for n in LENGTHS]
    options = {"return_position_ids": p, "return_seq_idx": s, "return_flash_attn_kwargs": f}
    return tf.DataCollatorWithFlattening(return_tensors="pt", **options)(rows)


@pytest.mark.parametrize("name, p, s, f", PACKED)
def test_collators_of_packed_sequences(name: str, p: bool, s: bool, f: bool) -> None:
    """Every way in which DataCollatorWithFlattening tells them: each sequence as if it were alone."""
    plain, ours, _ = pair(name)
    batch: dict[str, Any] = flattened(p, s, f)
    batch.pop("labels")
    if name.endswith("CausalLM"):
        batch["use_cache"] = False
    else:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        expected = torch.cat([plain(r).logits for r in batch["input_ids"].split(LENGTHS, 1)], 1)
        found = ours(**batch).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_packed_sequences_in_training_and_compiled() -> None:
    plain, ours, _ = pair("LlamaForCausalLM")
    shallow(plain, ours)
    batch = flattened(p=False, s=False, f=True)
    expected = sweep.step(plain.train(), {**flattened(p=True, s=False, f=False), "use_cache": False})
    assert sweep.difference(sweep.step(ours.train(), batch), expected) < 1e-4
    with torch.no_grad():
        loss = torch.compile(ours, backend="aot_eager", fullgraph=True)(**batch).loss
    torch.testing.assert_close(loss, expected["loss"])


def test_packed_sequences_that_change_in_place() -> None:
    query, key, value = heads((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    causal, ends = block_mask(1, 6, 6), torch.tensor([0, 2, 6])
    for end in (2, 4):
        ends[1] = end
        found = [attention(nn.Module(), query, key, value, causal, cu_seq_lens_q=ends)[0] for _ in range(2)]
        documents = torch.arange(6) >= end
        allowed = (documents[:, None] == documents) & torch.ones(6, 6).tril().bool()
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed).transpose(1, 2)
        torch.testing.assert_close(found, [expected, expected])


def test_packed_sequences_that_do_not_fit() -> None:
    query, key, value = heads((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))
    module, causal = nn.Module(), block_mask(1, 6, 6)
    for ends in ([0, 3], [0, 3, 7]):
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must end with the 6 queries and 6 keys"):
            attention(module, query, key, value, causal, cu_seq_lens_q=torch.tensor(ends))
    with pytest.raises(ValueError, match=r"seq_idx must be \[1 or 1, 6\] for as many .* but got \[1, 5\]"):
        attention(module, query, key, value, causal, seq_idx=torch.zeros(1, 5, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="must have a block mask or none, but got a mask that is a tensor"):
        attention(module, query, key, value, torch.zeros(1, 1, 6, 6), cu_seq_lens_q=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="of one row, but got 2 rows"):
        two = [torch.cat([t, t]) for t in (query, key, value)]
        attention(module, *two, causal, cu_seq_lens_q=torch.tensor([0, 6]))
