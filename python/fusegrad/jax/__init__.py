"""The losses for JAX, on the CPU and CUDA: fusegrad's own row kernels as custom calls of XLA, its matmuls.

``import fusegrad.jax`` needs JAX, not torch; see docs/jax.md.
"""

from ._library import TARGETS, build_has_cuda  # first: it loads the library

# isort: split
from ._cross_entropy import cross_entropy
from ._jsd import jsd
from ._linear_cross_entropy import linear_cross_entropy

__all__ = ["TARGETS", "build_has_cuda", "cross_entropy", "jsd", "linear_cross_entropy"]
