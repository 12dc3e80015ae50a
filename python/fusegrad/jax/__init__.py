"""The losses and flex attention for JAX, on the CPU and CUDA: fusegrad's own kernels as custom calls of XLA.

``import fusegrad.jax`` needs JAX, not torch; see docs/jax.md.
"""

from ._library import TARGETS, build_has_cuda  # first: it loads the library

# isort: split
from ._attention import AuxOutput, AuxRequest, flex_attention
from ._block_mask import BlockMask, block_mask_from_dense, block_mask_from_torch, create_block_mask, varlen_mask
from ._compile import compile_flex
from ._cross_entropy import cross_entropy
from ._jsd import jsd
from ._linear_cross_entropy import linear_cross_entropy
from ._score_mod import TraceError

__all__ = [
    "TARGETS",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "TraceError",
    "block_mask_from_dense",
    "block_mask_from_torch",
    "build_has_cuda",
    "compile_flex",
    "create_block_mask",
    "cross_entropy",
    "flex_attention",
    "jsd",
    "linear_cross_entropy",
    "varlen_mask",
]
