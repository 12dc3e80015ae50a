"""The gradient contract as a program: cases that take any implementation of the losses or of flex attention.

``python -m fusegrad.conformance --impl eager,fusegrad`` prints a line for each case and implementation: right, raises,
silently wrong (and by how much), crashes, not offered. An implementation of one's own is ``--impl module:Class``, see
:class:`Adapter` and docs/tables/conformance.md.
"""

from .adapter import OPS, Adapter, NotOffered
from .verdict import Verdict

__all__ = ["OPS", "Adapter", "NotOffered", "Verdict"]
