"""The losses over a vocabulary that is sharded over processes; docs/distributed.md."""

from .shards import VocabParallel

__all__ = ["VocabParallel"]
