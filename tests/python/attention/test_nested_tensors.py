"""Jagged NestedTensors in flex_attention: each sequence by itself, in float64, is the truth."""

from __future__ import annotations

import pytest
import torch
from fusegrad import flex_attention, trace_score_mod, varlen_mask
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

pytestmark = pytest.mark.usefixtures("each_device")

H, D = 4, 16
QUERIES, KEYS = [5, 40, 1, 33], [5, 40, 20, 7]


def jagged(lengths: list[int], heads: int = H) -> Tensor:
    parts = [torch.randn(n, heads, D) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2).detach().requires_grad_()


def inputs(keys: list[int] = QUERIES, kv_heads: int = H) -> list[Tensor]:
    torch.manual_seed(0)
    query, key = jagged(QUERIES), jagged(keys, kv_heads)
    value = torch.nested.nested_tensor_from_jagged(torch.randn_like(key.values()), key.offsets(), jagged_dim=2)
    return [query, key, value.detach().requires_grad_()]


def one_by_one(tensors: list[Tensor], bias: Tensor | None, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output and lse of each sequence, with autograd."""
    outs, sums = [], []
    for b, (q, k, v) in enumerate(zip(*(t.unbind() for t in tensors), strict=True)):
        k, v = (t.repeat_interleave(H // t.size(0), 0) for t in (k, v))
        scores = q.double() @ k.double().mT / D**0.5
        m, n = torch.arange(q.size(1)), torch.arange(k.size(1))
        if bias is not None:
            scores = scores + bias[b][:, None, None] * (m[:, None] - 2 * n)
        if causal:
            scores = scores.masked_fill(n > m[:, None] + len(n) - len(m), -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ v.double())
    return outs, sums


def compare(ours: Tensor, truth: list[Tensor]) -> None:
    for a, b in zip(ours.unbind(), truth, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [QUERIES, KEYS], ids=["alike", "of their own lengths"])
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_each_sequence_by_itself(keys: list[int], kv_heads: int) -> None:
    tensors = inputs(keys, kv_heads)
    out = flex_attention(*tensors, enable_gqa=kv_heads != H)
    assert out.shape == tensors[0].shape and out.layout == torch.jagged
    truth, _ = one_by_one(tensors, None, False)
    compare(out, truth)
    upstream = torch.randn(out.values().shape)
    found = torch.autograd.grad((out.values() * upstream).sum(), tensors)
    wanted = torch.autograd.grad((torch.cat(truth, 1) * upstream).sum(), tensors)
    for a, b in zip(found, wanted, strict=True):
        compare(a, list(b.unbind()))


def test_score_mods_see_places_within_sequences() -> None:
    """And the sequence's number as b; what they capture gets its gradient."""
    tensors, bias = inputs(), torch.randn(len(QUERIES), H, requires_grad=True)
    mask = varlen_mask(tensors[0].offsets(), causal=True)
    out, aux = flex_attention(
        *tensors,
        lambda s, b, h, q, kv: s + bias[b, h] * (q - 2 * kv),
        mask,
        return_aux=AuxRequest(lse=True),
    )
    truth, sums = one_by_one(tensors, bias.double(), True)
    compare(out, truth)
    compare(aux.lse, sums)
    assert aux.max_scores is None
    upstream = torch.randn(out.values().shape)
    (found,) = torch.autograd.grad((out.values() * upstream).sum(), bias)
    (wanted,) = torch.autograd.grad((torch.cat(truth, 1) * upstream).sum(), bias)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)
    lse = flex_attention(*tensors, block_mask=mask, return_lse=True)[1]
    compare(lse, one_by_one(tensors, None, True)[1])


def test_what_is_refused() -> None:
    query, key, value = inputs()
    strided = torch.nested.nested_tensor([torch.randn(n, H, D) for n in QUERIES]).transpose(1, 2)
    with pytest.raises(TypeError, match=r"of layout torch\.jagged, but got a query that is nested, strided"):
        flex_attention(strided, strided, strided)
    with pytest.raises(TypeError, match="but got a key that is dense"):
        flex_attention(query, torch.randn(4, H, 40, D), value)
    with pytest.raises(ValueError, match=r"query must be nested as \[B, H, j, D\].* take transpose\(1, 2\)"):
        flex_attention(query.transpose(1, 2), key, value)
    with pytest.raises(ValueError, match="value the key's lengths"):
        flex_attention(query, key, inputs(KEYS)[2])
    with pytest.raises(TypeError, match="must be a function, but got a ScoreMod"):
        flex_attention(query, key, value, trace_score_mod(lambda s, b, h, q, kv: s * 2))
    with pytest.raises(ValueError, match="block_mask must be made for 79 queries and 79 keys"):
        flex_attention(query, key, value, block_mask=varlen_mask(torch.tensor([0, 40])))
