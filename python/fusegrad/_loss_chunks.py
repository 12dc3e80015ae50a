"""The linear losses' rows in chunks: under function transforms, and where a backward is itself differentiated.

A chunk's rows are an op's (csrc/pytorch/autograd/composite.cpp) of the chunk's logits, which live as long as it does.
The graph keeps the inputs alone; each derivative computes the chunks again. See docs/design/transforms.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._chunks import Plan, apply

__all__: list[str] = []

# Logits that a chunk has, of which there are about so many tensors in acc at a time.
_LOGITS = {"cpu": 2**21, "cuda": 2**26}
_TENSORS = 12
_LEAST = 16  # rows

# Arguments that have a dimension of rows.
_OF_ROWS = {"input", "target", "token_weight", "row_scale"}
_OF_ROWS |= {"student_input", "teacher", "labels", "teacher_index", "tail_log_prob"}


def _step(logits: Tensor, vocab: int, workspace_mib: int | None) -> int:
    size = 8 if logits.dtype == torch.float64 else 4
    values = _LOGITS.get(logits.device.type, _LOGITS["cpu"])
    if workspace_mib is not None:
        values = min(values, workspace_mib * 2**20 // (_TENSORS * size))
    return max(values // max(vocab, 1), _LEAST)


def _in_chunks(name: str, vocab_of: str, results: tuple[int, ...]) -> Callable[..., Any]:
    """The op `name` chunk by chunk. `results`: each result's dimension of rows."""
    op = getattr(torch.ops.fusegrad, name).default
    schema = op._schema.arguments
    names = [a.name for a in schema]

    def run(*given: Any) -> Any:
        arguments = [*given, *(a.default_value for a in schema[len(given) :])]
        of = dict(zip(names, arguments, strict=True))
        rows = arguments[0].size(0)
        step = _step(arguments[0], of[vocab_of].size(0), of["workspace_mib"])
        if rows <= step:
            return op(*arguments)
        places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        tensors = [arguments[i] for i in places]
        others = [None if isinstance(a, Tensor) else a for a in arguments]

        def function(first: int, pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
            full = list(others)
            for i, piece in zip(places, pieces, strict=True):
                full[i] = piece
            found = op(*full)
            return found if isinstance(found, tuple) else (found,)

        dims = tuple(0 if names[i] in _OF_ROWS else None for i in places)
        found = apply(Plan(function, dims, results, rows, step, forward_mode=True), tensors)
        return found if len(results) > 1 else found[0]

    return run


_library = torch.library.Library("fusegrad", "IMPL")
for _name, _vocab_of, _results in (
    ("linear_cross_entropy", "linear_weight", (1, 0)),
    ("linear_jsd", "student_weight", (1,)),
):
    _chunks = _in_chunks(f"{_name}_rows", _vocab_of, _results)
    _library.impl(f"{_name}_row_chunks", _chunks, "CompositeImplicitAutograd")
