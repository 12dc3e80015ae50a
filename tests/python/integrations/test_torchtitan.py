"""torchtitan's loss interface: the chunked loss's values and gradients, alone and with a sharded head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from coverings import rows_of
from fusegrad.integrations.torchtitan import FlexAttention, LinearCrossEntropyLoss, create_attention_mask
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

V, H = 23, 8


class Decoder(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(V, H), nn.Linear(H, H), nn.Tanh())
        self.lm_head = nn.Linear(H, V, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(tokens)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for n, p in model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(0, V, (2, 3, 7)).unbind(0)
    labels[0, :2] = -100
    return tokens, labels


@pytest.mark.parametrize("count", [None, 19.0, torch.tensor(19.0)], ids=["sum", "number", "tensor"])
@rows_of("bias", [False, True])
def test_values_and_gradients(bias: bool, count: float | Tensor | None) -> None:
    model = Decoder(bias).double()
    tokens, labels = batch()
    expected = F.cross_entropy(model.lm_head(model(tokens)).flatten(0, 1), labels.flatten(), reduction="sum")
    expected = expected if count is None else expected / count
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_lm_head(model.lm_head)
    loss = loss_fn(model(tokens), labels, count)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected))
    with torch.no_grad():
        torch.testing.assert_close(loss_fn(model(tokens), labels, count), expected)
    assert model.lm_head(model(tokens)).shape == (3, 7, V)


def test_accumulation_in_the_weights_dtype() -> None:
    model = Decoder(bias=False).bfloat16()
    tokens, labels = batch()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        loss_fn = LinearCrossEntropyLoss(accumulate_dtype=dtype)
        loss_fn.set_lm_head(model.lm_head)
        found.append(loss_fn(model(tokens), labels))
    torch.testing.assert_close(*found)


def test_a_sharded_head() -> None:
    """FSDP2: gathered in the head's own forward, freed after the loss, the gradient reduced."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = Decoder(bias=True)
        plain = copy.deepcopy(model)
        for part in (model.body, model.lm_head, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        tokens, labels = batch()
        loss_fn = LinearCrossEntropyLoss()
        loss_fn.set_lm_head(model.lm_head)
        loss = loss_fn(model(tokens), labels, 19.0)
        assert hasattr(model.lm_head.weight, "placements")  # sharded again
        expected = F.cross_entropy(plain.lm_head(plain(tokens)).flatten(0, 1), labels.flatten(), reduction="sum") / 19
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(gradients(model, loss), gradients(plain, expected))
    finally:
        dist.destroy_process_group()


def test_bad_input() -> None:
    loss_fn = LinearCrossEntropyLoss(z_loss=1e-4)
    with pytest.raises(RuntimeError, match="LinearCrossEntropyLoss: a head must be set"):
        loss_fn(torch.zeros(2, H), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"lm_head must be a torch.nn.Linear, but got Embedding"):
        loss_fn.set_lm_head(nn.Embedding(V, H))
    with pytest.raises(ValueError, match="label_smoothing must be in"):
        LinearCrossEntropyLoss(label_smoothing=2.0)
    with pytest.raises(TypeError, match="reduction"):
        LinearCrossEntropyLoss(reduction="sum")
    with pytest.raises(TypeError, match="LinearCrossEntropyLoss: inplace must be True or False, but got 'no'"):
        LinearCrossEntropyLoss(inplace="no")
    head = nn.Linear(H, V)
    loss_fn.set_lm_head(head)
    with pytest.raises(ValueError, match="linear_cross_entropy: "):
        loss_fn(torch.zeros(2, H), torch.zeros(3, dtype=torch.int64))
    assert "forward" not in vars(head)


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_of_packed_batches(return_lse: bool) -> None:
    """Documents that end at a token, others in each row of the batch, and a mask that is made anew at each step."""
    attention = FlexAttention()
    query, (key, value) = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 2, 70, 8)
    for _ in range(2):
        ends = (torch.rand(2, 70) < 0.1).cumsum(1)

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, ends: Tensor = ends) -> Tensor:
            return (ends[b, q_idx] == ends[b, kv_idx]) & (q_idx >= kv_idx)

        mask = create_attention_mask(mask_mod, 2, None, 70, 70, BLOCK_SIZE=16)
        expected = create_block_mask(mask_mod, 2, None, 70, 70, device="cpu", BLOCK_SIZE=16)
        assert torch.equal(mask.kv_indices, expected.kv_indices)
        options = {"block_mask": mask, "enable_gqa": True, "scale": 0.3, "return_lse": return_lse}
        ours = attention(query, key, value, **options)
        theirs = flex_attention(query, key, value, **{**options, "block_mask": expected})
        torch.testing.assert_close(ours, theirs)
