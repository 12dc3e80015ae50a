"""Reads at places that other reads give compile for each family of kernels. No GPU is needed."""

from __future__ import annotations

import pytest
import torch
from coverings import each_of
from fusegrad import _C, compile_flex
from needs import QUICKLY, has_flex_compiler, needs_flex_compiler
from reads_of_reads import BATCHES, CHAINS, HEADS, ROWS, Chain, places, same_document

pytestmark = needs_flex_compiler


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEGRAD_JIT_FLAGS", QUICKLY)
    if has_flex_compiler():
        _C.jit.forget()


SIZES = {"head_size": 64, "batch": BATCHES, "heads": HEADS, "lengths": (300, 260)}


@each_of({"architecture": ["80", "90a"], "dtype": [torch.int32, torch.float32], "chain": CHAINS})
def test_score_mods(chain: Chain, dtype: torch.dtype, architecture: str) -> None:
    table = torch.randn(ROWS, HEADS, requires_grad=True)
    compile_flex(chain(places(dtype, 300, 260), 300, table), architecture=architecture, **SIZES)


@each_of({"architecture": ["80", "90a"], "dtype": [torch.int32, torch.float32]})
def test_mask_mods(dtype: torch.dtype, architecture: str) -> None:
    mask_mod = same_document(places(dtype, 300, 260), 300)
    compile_flex(None, mask_mod, architecture=architecture, **SIZES)
