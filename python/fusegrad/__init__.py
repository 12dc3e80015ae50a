"""Fused losses for PyTorch whose gradients cannot be silently wrong.

``fusegrad.cross_entropy`` and ``fusegrad.linear_cross_entropy`` are drop-ins for PyTorch's own; see README.md.
"""

from fusegrad import _load

_load.load_library()  # registers torch.ops.fusegrad, which everything below calls

from fusegrad import utils  # noqa: E402
from fusegrad._C import build_info, check_targets_enabled, set_check_targets  # noqa: E402
from fusegrad.functional import Aux, AuxOutput, cross_entropy, linear_cross_entropy  # noqa: E402
from fusegrad.modules import CrossEntropyLoss, LinearCrossEntropyLoss  # noqa: E402

__version__ = build_info()["version"]

__all__ = [
    "Aux",
    "AuxOutput",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "build_info",
    "check_targets_enabled",
    "cross_entropy",
    "linear_cross_entropy",
    "set_check_targets",
    "utils",
]
