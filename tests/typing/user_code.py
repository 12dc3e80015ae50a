"""The public API as a user's strict mypy and pyright see it. `make lint` checks this file; it is never run."""

from __future__ import annotations

from collections.abc import Callable

import fusegrad
import torch
from fusegrad import Aux, AuxOutput, JSDAux, JSDAuxOutput, ScoreMod, VocabParallel
from fusegrad.integrations import torchtitan
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput as FlexAuxOutput
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from typing_extensions import assert_type


class Model(nn.Module):
    """In place of a transformers.PreTrainedModel, which takes mypy a minute to read."""


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, mask: BlockMask, flag: bool) -> None:
    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slope[h] * (kv_idx - q_idx)

    assert_type(fusegrad.flex_attention(q, k, v).sum(), Tensor)
    assert_type(fusegrad.flex_attention(q, k, v, bias, mask, 0.125, True, kernel_options={}), Tensor)
    assert_type(fusegrad.flex_attention(q, k, v, return_lse=False, inplace=True, deterministic=True), Tensor)
    out, lse = fusegrad.flex_attention(q, k, v, return_lse=True)
    assert_type((out, lse), tuple[Tensor, Tensor])
    assert_type(fusegrad.flex_attention(q, k, v, bias, mask, None, False, True), tuple[Tensor, Tensor])
    assert_type(fusegrad.flex_attention(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    out, aux = fusegrad.flex_attention(q, k, v, bias, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_type(aux, FlexAuxOutput)
    assert_type(aux.lse, Tensor | None)

    traced = fusegrad.trace_score_mod(bias, device=q.device)
    assert_type(traced, ScoreMod)
    assert_type(fusegrad.trace_mask_mod(causal), ScoreMod)
    assert_type(traced.text, str)
    assert_type(traced.buffers, tuple[Tensor, ...])
    assert_type(fusegrad.explain(traced), str)
    assert_type(fusegrad.flex_attention(q, k, v, traced), Tensor)
    fusegrad.compile_flex(traced, causal, head_size=64, block_size=(128, 64), dtype=torch.float16)
    ScoreMod(traced.text, list(traced.buffers), traced.scalars)


def losses(x: Tensor, w: Tensor, y: Tensor, teacher: Tensor, top_k: tuple[Tensor, Tensor]) -> None:
    assert_type(fusegrad.cross_entropy(x, y), Tensor)
    fusegrad.cross_entropy(x, y, w, ignore_index=0, reduction="none", inplace=True).mean()
    loss, aux = fusegrad.cross_entropy(x, y, return_aux=Aux(lse=True))
    assert_type((loss, aux), tuple[Tensor, AuxOutput])
    assert_type(aux.entropy, Tensor | None)

    assert_type(fusegrad.linear_cross_entropy(x, w, y, normalizer=3), Tensor)
    assert_type(fusegrad.linear_cross_entropy(x, w, y, return_aux=Aux(entropy=True)), tuple[Tensor, AuxOutput])
    assert_type(fusegrad.jsd(x, teacher, labels=y), Tensor)
    assert_type(fusegrad.jsd(x, top_k, return_aux=JSDAux(soft_loss=True)), tuple[Tensor, JSDAuxOutput])
    assert_type(fusegrad.linear_jsd(x, w, teacher, w, tail="renormalize"), Tensor)
    assert_type(fusegrad.linear_jsd(x, w, top_k, return_aux=JSDAux(hard_loss=True)), tuple[Tensor, JSDAuxOutput])
    part = VocabParallel(None, 0, 128)
    assert_type((part.start, part.stop, part.vocab), tuple[int, int, int])
    assert_type(fusegrad.linear_cross_entropy(x, w, y, vocab_parallel=part), Tensor)


def modules(x: Tensor, w: Tensor, y: Tensor) -> None:
    head = fusegrad.LinearCrossEntropyLoss(64, 1000, dtype=torch.bfloat16, device="cpu")
    assert_type(head.linear, nn.Linear | None)
    assert_type(head.forward(x, y, w), Tensor)
    loss, aux = fusegrad.LinearCrossEntropyLoss(64, None, return_aux=Aux(lse=True)).forward(x, y, w)
    assert_type((loss, aux), tuple[Tensor, AuxOutput])
    assert_type(fusegrad.CrossEntropyLoss(softcap=30, ignore_index=0).forward(x, y), Tensor)
    assert_type(fusegrad.CrossEntropyLoss(return_aux=Aux(z_loss=True)).forward(x, y), tuple[Tensor, AuxOutput])
    assert_type(fusegrad.JSDLoss().forward(x, x), Tensor)
    assert_type(fusegrad.JSDLoss(return_aux=JSDAux(soft_loss=True)).forward(x, x), tuple[Tensor, JSDAuxOutput])
    assert_type(fusegrad.LinearJSDLoss(64, None).forward(x, x, w, w), Tensor)


def integrations(model: Model, x: Tensor, y: Tensor) -> None:
    from fusegrad.integrations import transformers

    assert_type(transformers.apply(model, z_loss=1e-4), Model)
    assert_type(transformers.remove(model), Model)
    loss = torchtitan.LinearCrossEntropyLoss(softcap=30.0)
    loss.set_lm_head(nn.Linear(8, 8))
    assert_type(loss(x, y, 7), Tensor)


def folding(x: Tensor, y: Tensor) -> None:
    assert_type(fusegrad.biased_attention(x, x, x, [y], scale=1, empty_rows="mean"), Tensor)
    assert_type(fusegrad.triangle_attention(x, x, x, y, kv_lengths=y), Tensor)
    assert_type(fusegrad.triangle_attention(x, x, x, y, return_aux=True), tuple[Tensor, Tensor, Tensor])


def rest() -> None:
    fusegrad.set_check_targets(True)
    assert_type(fusegrad.check_targets_enabled(), bool)
    assert_type(fusegrad.build_info(), dict[str, str | bool])
    assert_type(fusegrad.utils.cmake_prefix_path, str)
    assert_type(fusegrad.__version__, str)
    function: Callable[[Tensor, Tensor], Tensor] = fusegrad.cross_entropy
    print(function)
