"""Any model of transformers with small sizes: its configuration's fields are set by their names. And its inputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

V = 97
LENGTH = 21
# The first pattern that a field's whole name matches gives its value.
SIZES: list[tuple[str, Any]] = [
    (r"(.*_)?vocab_size|vocab_size_per_layer_input|n_vocab", V),
    (r"(.*_)?num_mtp_\w*|num_nextn_predict_layers|mtp_\w*layers", 0),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers|num_nonmoe_layers|moe_layer_start_index", 1),
    (r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers)|depth|num_blocks", 2),
    (r"(.*_)?(kv_heads|key_value_heads|kv_attention_heads)", 2),
    (r"(.*_)?(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads)", 4),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"(.*_)?(head_dim|head_size|d_kv|attention_head_size|head_dim_\w*|attention_key_size|attention_value_size)", 8),
    (r"(.*_)?(lora_rank|lora_dim|rank)", 16),
    (r"(.*_)?(moe_\w*intermediate_size|moe_\w*ffn\w*|expert_\w*size|expert_dim\w*|ffn_hidden_size_moe)", 16),
    (
        r"(.*_)?(intermediate_size\w*|ffn_dim|d_ff|ff_dim|n_inner|ffn_hidden_size|mlp_dim|feedforward_\w*|d_inner|d_ffn)",
        48,
    ),
    (r"(.*_)?(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|experts_per_token|num_selects|moe_top_k)", 2),
    (r"(.*_)?(n_group|topk_group|n_groups|n_shared_experts|num_shared_experts|num_expert_group|num_limited_groups)", 1),
    (r"(.*_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts)", 4),
    (r"(.*_)?(hidden_size\w*|d_model|n_embd|embed_dim|embedding_size|emb_dim|embd_dim|word_embed_proj_dim|dim)", 32),
    (r"(.*_)?(hidden_dim|model_dim|projection_dim|embedding_dim|width|d_embed|out_hidden_size|output_dim)", 32),
    (
        r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_\w*positions|max_seq_len|max_sequence_length|seq_len\w*)",
        64,
    ),
    (r"(.*_)?(sliding_window\w*|attention_window\w*|window_size|attention_chunk_size|local_attention|chunk_size)", 8),
    (r"(.*_)?(index_head_dim|state_size|d_state|ssm_state_size)", 8),
    (r"index_topk", 4),
    (r"index_block_size|index_topk_blocks", 2),
    (r"index_local_blocks", 1),
    (r"index_kpool", 2),
    (r"(.*_)?image_size", 32),
    (r"(.*_)?patch_size", 8),
]
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _fields(kind: Any) -> dict[str, Any]:
    """The names of a configuration's options, with the values that they have by default."""
    if dataclasses.is_dataclass(kind):
        names = {f.name for f in dataclasses.fields(kind)}
        return {n: getattr(kind, n, None) for n in sorted(names)}
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def _value(name: str, default: Any) -> Any:
    if name in IDS:
        return IDS[name]
    if isinstance(default, float) and re.search("drop|jitter|noise", name):
        return 0.0
    if isinstance(default, int) and not isinstance(default, bool):
        small = next((v for pattern, v in SIZES if re.fullmatch(pattern, name)), default)
        return min(small, default) if default > 0 else default
    return default


# What some configurations want besides, tried one after the other.
BESIDES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 8},
    {"num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    {"head_dim": 16},
    {"head_dim": 128, "qk_rope_head_dim": 64},
    {"is_decoder": True},
]
# ... and some families, by their model type.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": V, "mask_token_id": 3},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4},
        **{"indexer_compress_ratio": 2, "ngram_vocab_size_base": 64},
    },
}


def small_options(kind: Any, layers: int, besides: dict[str, Any]) -> dict[str, Any]:
    """The options that make a configuration of that class small."""
    options: dict[str, Any] = {}
    parts, whole, fields = getattr(kind, "sub_configs", {}), kind(), _fields(kind)
    for name, default in fields.items():
        if name in parts:
            part = type(getattr(whole, name, None))
            if hasattr(part, "sub_configs"):
                options[name] = small_options(part, layers, besides)
        elif name in besides:
            options[name] = besides[name]
        else:
            value = _value(name, default)
            if value is not default and value != default:
                options[name] = layers if name in ("num_hidden_layers", "n_layer", "num_layers") else value
    heads, shared = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads == shared and {"num_attention_heads", "num_key_value_heads"} <= options.keys():
        options["num_key_value_heads"] = options["num_attention_heads"]
    return {**options, **OF_FAMILY.get(kind.model_type, {})}


def _fit_sections(config: Any) -> None:
    """Sections of rotary frequencies, for heads of this size."""
    given = vars(config)
    rope, heads = given.get("rope_parameters"), given.get("num_attention_heads")
    if isinstance(rope, dict) and heads:
        size = given.get("head_dim") or given["hidden_size"] // heads
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def small_model(kind: Any, attention: str = "eager") -> Any:
    """A small model of that class with every kind of layer that the whole one has, on no device."""
    wanted = set(getattr(kind.config_class().get_text_config(), "layer_types", None) or ())
    failure: Exception | None = None
    for besides in BESIDES:
        for layers in (2, 3, 4, 6):
            try:
                config = kind.config_class(**small_options(kind.config_class, layers, besides))
                config._attn_implementation = attention
                _fit_sections(config.get_text_config())
                if config.is_encoder_decoder:
                    config.decoder_start_token_id = 1
                with torch.device("meta"):
                    model = kind._from_config(config)
            except Exception as e:
                failure = failure or e
                continue
            if wanted <= set(getattr(config.get_text_config(), "layer_types", None) or ()):
                return model
    raise ValueError(f"no small {kind.__name__}: {failure or 'layers of some kind are missing'}") from failure


def names_of(mapping: str) -> dict[str, str]:
    """Model types, with the name of the class that transformers' mapping has for them."""
    names = getattr(modeling_auto, mapping)
    return {t: n if isinstance(n, str) else n[0] for t, n in names.items()}


def inputs_of(model: Any, length: int = LENGTH) -> dict[str, Tensor]:
    """Two rows of tokens; with labels where the model has a loss of tokens."""
    ids = torch.randint(3, V - 10, (2, length), generator=torch.Generator().manual_seed(1))
    if model.get_output_embeddings() is None:
        return {"input_ids": ids}
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def _sizes(config: Any, *names: str, default: int) -> int:
    """The first of these that a configuration or one of its parts has."""
    parts = [config, *(getattr(config, n) for n in getattr(config, "sub_configs", {}) if getattr(config, n, None))]
    found = (getattr(p, n, None) for p in parts for n in names)
    return next((n if isinstance(n, int) else n[0] for n in found if n), default)


def candidates(model: Any) -> Iterator[dict[str, Tensor]]:
    """What the model may want to be called with."""
    generator, config = torch.Generator().manual_seed(1), model.config
    noise = functools.partial(torch.randn, generator=generator, dtype=model.dtype)
    size, channels = _sizes(config, "image_size", default=32), _sizes(config, "num_channels", "in_channels", default=3)
    mels = _sizes(config, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim", default=80)
    tokens = inputs_of(model)
    image, video = noise(2, channels, size, size), noise(2, 4, channels, size, size)
    yield tokens
    yield {"input_ids": tokens["input_ids"], "pixel_values": image}
    yield {"pixel_values": image}
    yield {"pixel_values": video}
    yield {"pixel_values_videos": video}
    patch = channels * _sizes(config, "temporal_patch_size", default=1) * _sizes(config, "patch_size", default=8) ** 2
    for name in ("hidden_states", "pixel_values"):  # patches of two images
        yield {name: noise(16 + 24, patch), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}
    for shape in ((2, 8000), (2, 1, 8000)):
        yield {"input_values": noise(*shape)}
    for shape in ((2, mels, 128), (2, 128, mels)):
        features = {"input_features": noise(*shape)}
        yield features
        yield {**features, "attention_mask": torch.ones(2, 128, dtype=torch.long)}
        yield {**features, "decoder_input_ids": tokens["input_ids"]}
