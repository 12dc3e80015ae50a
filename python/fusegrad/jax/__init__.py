"""The losses and flex attention for JAX, on the CPU and CUDA: fusegrad's own kernels as custom calls of XLA.

``import fusegrad.jax`` needs JAX, not torch; see docs/jax.md.
"""

from ._library import TARGETS, build_has_cuda  # first: it loads the library

# isort: split
from ._attention import AuxOutput, AuxRequest, flex_attention
from ._cross_entropy import cross_entropy
from ._jsd import jsd
from ._linear_cross_entropy import linear_cross_entropy

__all__ = [
    "TARGETS",
    "AuxOutput",
    "AuxRequest",
    "build_has_cuda",
    "cross_entropy",
    "flex_attention",
    "jsd",
    "linear_cross_entropy",
]
