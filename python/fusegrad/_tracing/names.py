"""Lists of names. Without torch, for what fusegrad.jax uses too."""

from __future__ import annotations

__all__ = ["words"]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
