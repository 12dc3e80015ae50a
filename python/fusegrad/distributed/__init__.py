"""The losses over a vocabulary, and attention over a sequence, that processes share; docs/distributed.md."""

from .row_biases import gather_bias, whole_bias
from .sequence import ContextParallel
from .shards import VocabParallel

__all__ = ["ContextParallel", "VocabParallel", "gather_bias", "whole_bias"]
