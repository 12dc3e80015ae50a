"""Fused losses whose gradients are right."""

from . import utils
from ._load import build_info
from ._load import version as __version__

__all__ = ["__version__", "build_info", "utils"]
