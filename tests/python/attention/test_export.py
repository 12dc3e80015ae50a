"""torch.export of flex_attention with all that a call may hold: saved, loaded, at other batches and lengths.

The table of docs/tables/compatibility.md has every op (test_compatibility.py)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from fusegrad import flex_attention
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

pytestmark = pytest.mark.cpu_only

H, D, BLOCK = 2, 4, 16
BATCH, LENGTH, ROWS = Dim("batch", min=2, max=64), Dim("length", min=2, max=4096), Dim("rows", min=2, max=256)
each_mode = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


def inputs_of(batch: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(batch, H, length, D, dtype=torch.float64, generator=generator) for _ in range(3))


def exported(module: nn.Module, inputs: tuple[Tensor, ...], shapes: Any, strict: bool) -> list[ExportedProgram]:
    """From a file, and the same decomposed."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs, dynamic_shapes=shapes, strict=strict), file)
    file.seek(0)
    program = torch.export.load(file)
    return [program, program.run_decompositions()]


class Captures(nn.Module):
    """Learned tensors, some computed within the function, a table, numbers of both types, a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bias = nn.Parameter(torch.randn(16, dtype=torch.float64, generator=generator))
        self.distance = nn.Parameter(torch.randn(129, dtype=torch.float64, generator=generator))
        self.register_buffer("offset", torch.arange(64) // 4)
        self.slope, self.shift = 0.1, 64

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            with torch.no_grad():
                factor = self.bias.exp()[self.offset[kv_idx]]
            return score * factor + self.slope * self.distance[q_idx - kv_idx + self.shift]

        return flex_attention(query, key, value, score_mod)


class Lengths(nn.Module):
    """A length and what is computed from it, as symbolic numbers in the function."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        m, n = query.size(2), key.size(2)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + 0.1 * (q_idx - kv_idx + m).clamp(1, n - 1) / n

        return flex_attention(query, key, value, score_mod)


@each_mode
@pytest.mark.parametrize("module", [Captures, Lengths])
def test_score_mods(module: type[nn.Module], strict: bool) -> None:
    plain = module()
    for program in exported(plain, inputs_of(2, 32), ({0: BATCH, 2: LENGTH},) * 3, strict):
        for batch, length in ((2, 32), (3, 48), (5, 7)):
            inputs = inputs_of(batch, length)
            torch.testing.assert_close(program.module()(*inputs), plain(*inputs), rtol=0, atol=1e-14)


class Masked(nn.Module):
    """The lists of blocks are inputs: create_block_mask itself cannot be exported with dynamic lengths."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, count: Tensor, index: Tensor, documents: Tensor
    ) -> Tensor:
        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])

        mask = BlockMask.from_kv_blocks(
            count, index, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(query.size(2), key.size(2)),
            compute_q_blocks=False,
        )  # fmt: skip
        return flex_attention(query, key, value, block_mask=mask)


def masked_inputs(batch: int, length: int) -> tuple[Tensor, ...]:
    rows = (length + BLOCK - 1) // BLOCK
    count = torch.arange(1, rows + 1, dtype=torch.int32)[None, None]
    index = torch.arange(rows, dtype=torch.int32).expand(1, 1, rows, rows).contiguous()
    return *inputs_of(batch, length), count, index, torch.arange(length) // 5


@each_mode
def test_block_masks_as_inputs(strict: bool) -> None:
    shapes = (*({0: BATCH, 2: LENGTH},) * 3, {2: ROWS}, {2: ROWS, 3: ROWS}, {0: LENGTH})
    for program in exported(Masked(), masked_inputs(2, 40), shapes, strict):
        for batch, length in ((2, 40), (3, 75)):
            inputs = masked_inputs(batch, length)
            documents = inputs[-1]
            allowed = torch.ones(length, length).tril().bool() & (documents[:, None] == documents)
            truth = nn.functional.scaled_dot_product_attention(*inputs[:3], attn_mask=allowed)
            torch.testing.assert_close(program.module()(*inputs), truth)


class Causal(nn.Module):
    """A mask that the module holds, for one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.mask = create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, block_mask=self.mask)


@each_mode
def test_block_masks_as_constants(strict: bool) -> None:
    for program in exported(Causal(32), inputs_of(2, 32), ({0: BATCH},) * 3, strict):
        inputs = inputs_of(3, 32)
        truth = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(program.module()(*inputs), truth)
