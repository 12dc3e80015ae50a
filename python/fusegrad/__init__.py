"""Fused losses and flex attention for PyTorch whose gradients cannot be silently wrong.

``fusegrad.cross_entropy``, ``linear_cross_entropy`` and ``flex_attention`` are drop-ins for PyTorch's own; see
README.md. Where torch is not installed, or FUSEGRAD_TORCH=0 is in the environment, the package has ``fusegrad.jax``
alone.
"""

from typing import TYPE_CHECKING

from ._environment import with_torch

if with_torch:
    from ._load import build_info  # first: it registers torch.ops.fusegrad, which everything below calls

    # isort: split
    from . import (
        _flops,
        _loss_chunks,  # noqa: F401  it implements ops
        mods,
        utils,
    )
    from ._load import check_targets_enabled, set_check_targets
    from ._load import version as __version__
    from .attention import flex_attention
    from .block_mask import create_block_mask, varlen_mask
    from .compile import compile_flex
    from .distillation import JSDAux, JSDAuxOutput, jsd, kl_div, linear_jsd
    from .distributed import ContextParallel, VocabParallel
    from .folding import biased_attention, triangle_attention
    from .functional import Aux, AuxOutput, LogProb, cross_entropy, linear_cross_entropy, linear_log_prob
    from .modules import CrossEntropyLoss, JSDLoss, LinearCrossEntropyLoss, LinearJSDLoss
    from .pair_bias import attention_pair_bias
    from .score_mod import ScoreMod, TraceError, explain, trace_mask_mod, trace_score_mod

    _flops.register()
elif not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise AttributeError(
            f"fusegrad.{name} needs torch, which is not installed or is kept out of this process by FUSEGRAD_TORCH=0; "
            "without torch there is fusegrad.jax"
        )


__all__ = [
    "Aux",
    "AuxOutput",
    "ContextParallel",
    "CrossEntropyLoss",
    "JSDAux",
    "JSDAuxOutput",
    "JSDLoss",
    "LinearCrossEntropyLoss",
    "LinearJSDLoss",
    "LogProb",
    "ScoreMod",
    "TraceError",
    "VocabParallel",
    "__version__",
    "attention_pair_bias",
    "biased_attention",
    "build_info",
    "check_targets_enabled",
    "compile_flex",
    "create_block_mask",
    "cross_entropy",
    "explain",
    "flex_attention",
    "jsd",
    "kl_div",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_prob",
    "mods",
    "set_check_targets",
    "trace_mask_mod",
    "trace_score_mod",
    "triangle_attention",
    "utils",
    "varlen_mask",
]
