"""The losses over a vocabulary, and attention over a sequence, that processes share; docs/distributed.md."""

from .sequence import ContextParallel
from .shards import VocabParallel

__all__ = ["ContextParallel", "VocabParallel"]
