"""flex_attention where torch.compile is at work.

A module of its own: torch._dynamo takes a second and a half to import.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from ._attention_transforms import attend
from ._bias_texts import Pattern, Read, text_of

__all__ = ["attend_within", "bias_text_within", "within_transforms"]


@torch._dynamo.allow_in_graph
def attend_within(*arguments: Any) -> tuple[Tensor, Tensor]:
    """transforms.attend as one node of the compiler's graph, for which AOTAutograd runs it."""
    return attend(*arguments)


@torch._dynamo.assume_constant_result
def within_transforms() -> bool:
    """Whether torch.func is at work where the compiler traces: it enters its levels as it goes."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch._dynamo.assume_constant_result
def bias_text_within(reads: tuple, softcap: bool, masked: str) -> str:
    """The text of attention with biases, which depends on nothing that a compiled program may change."""
    return text_of(Pattern(tuple(Read(*read) for read in reads), softcap, masked))
