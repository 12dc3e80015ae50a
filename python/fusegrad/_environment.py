"""Whether this process wants fusegrad's PyTorch half: not where torch is missing, or FUSEGRAD_TORCH=0 says so."""

from __future__ import annotations

import importlib.util
import os

with_torch: bool = os.environ.get("FUSEGRAD_TORCH", "1") != "0" and importlib.util.find_spec("torch") is not None
