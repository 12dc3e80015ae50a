"""Ready score_mods and mask_mods for :func:`fusegrad.flex_attention`.

Each function returns a score_mod ``(score, b, h, q_idx, kv_idx)`` or a mask_mod ``(b, h, q_idx, kv_idx)`` of the public
language, a few lines long, which also is what PyTorch's flex_attention takes. The tensors that a function is given get
gradients like any captured tensor: pass parameters, or what a module computed. Several calls with one mod trace it
once, and so do mods of one function with other tensors of the same shapes.
"""

from .masks import (
    and_masks,
    causal,
    dilated,
    document,
    document_ids,
    natten,
    not_mask,
    or_masks,
    padding,
    prefix,
    sliding_window,
)
from .scores import (
    alibi,
    alibi_slopes,
    compose,
    deberta,
    fire,
    forgetting_gates,
    graphormer,
    kerple_log,
    kerple_power,
    pair_bias,
    relative,
    softcap,
    swin,
    swin_v2_table,
    t5,
    transformer_xl,
)
from .sinks import with_sinks

__all__ = [
    "alibi",
    "alibi_slopes",
    "and_masks",
    "causal",
    "compose",
    "deberta",
    "dilated",
    "document",
    "document_ids",
    "fire",
    "forgetting_gates",
    "graphormer",
    "kerple_log",
    "kerple_power",
    "natten",
    "not_mask",
    "or_masks",
    "padding",
    "pair_bias",
    "prefix",
    "relative",
    "sliding_window",
    "softcap",
    "swin",
    "swin_v2_table",
    "t5",
    "transformer_xl",
    "with_sinks",
]
