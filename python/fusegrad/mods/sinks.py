"""Learned sinks: one more score of each row, whose key has no value."""

from __future__ import annotations

from torch import Tensor

from .checks import check_rank


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention as if each row had one more key, whose score is a parameter and whose value is 0 (gpt-oss).

    ``softmax([scores, sink]) @ [values, 0]`` is ``out * sigmoid(lse - sink)``, which needs no score_mod.

    Args:
        out: the output of ``flex_attention(…, return_aux=AuxRequest(lse=True))``, ``[B, H, M, E]``.
        lse: its ``aux.lse``, ``[B, H, M]``.
        sinks: ``[H]``.
    """
    check_rank("with_sinks", "out", out, "[B, H, M, E]")
    if lse.shape != out.shape[:3] or sinks.shape != out.shape[1:2]:
        raise ValueError(
            f"mods.with_sinks: lse must have shape {list(out.shape[:3])} and sinks {list(out.shape[1:2])}, "
            f"but got {list(lse.shape)} and {list(sinks.shape)}"
        )
    share = (lse - sinks.to(lse.dtype).view(1, -1, 1)).sigmoid()
    return out * share.unsqueeze(-1).to(out.dtype)
