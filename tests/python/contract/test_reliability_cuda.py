"""Faults that only a GPU has: its memory and its driver. Every allocation in turn: test_reliability.py."""

from __future__ import annotations

import fusegrad
import pytest
import torch
from test_reliability_processes import in_process
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_fraction_of_the_memory() -> None:
    x = torch.randn(16384, 64, device="cuda", requires_grad=True)
    w = torch.randn(32768, 64, device="cuda", requires_grad=True)
    y = torch.randint(0, 32768, (16384,), device="cuda")

    def call(inplace: bool = False, workspace: int = 64) -> list[Tensor]:
        loss = fusegrad.linear_cross_entropy(x * 1, w, y, inplace=inplace, workspace_mib=workspace)
        return list(torch.autograd.grad(loss, [x, w]))

    truth = call()
    torch.cuda.empty_cache()
    # Logits of 2 GiB and their one chunk do not fit.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    try:
        for inplace in (False, True):
            with pytest.raises(torch.OutOfMemoryError, match="linear_cross_entropy"):
                call(inplace, 4096)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(a, b) for a, b in zip(call(), truth, strict=True))


def test_a_kernel_is_loaded_where_torch_holds_all_memory(tmp_path) -> None:
    done = in_process(
        """
import torch, fusegrad
q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
held = []
for size in (1 << 30, 1 << 26, 1 << 21):
    try:
        while True:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
held.clear()  # it is torch's cache now, and the driver has none
before = torch.cuda.memory_reserved()
# No kernel of PyTorch's own is loaded here: those do not empty its cache.
out = fusegrad.flex_attention(*leaves, lambda s, b, h, i, j: s * 1.5)
grads = torch.autograd.grad(out, leaves, q)
torch.cuda.synchronize()
torch.cuda.empty_cache()
print(bool(out.isfinite().all()), all(bool(g.isfinite().all()) for g in grads))
""",
        FUSEGRAD_CACHE_DIR=str(tmp_path),
        timeout=300,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_that_does_not_compile(inplace: bool, tmp_path, monkeypatch, each_flex_family) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    leaves = [torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (s * 0.75).sin() if inplace else (s * 0.75).cos()

    def call() -> tuple[list[Tensor], Tensor]:
        activations = [t * 1 for t in leaves]
        return activations, fusegrad.flex_attention(*activations, mod, inplace=inplace, deterministic=True)

    wrong = "-Dfloat=nonsense"
    monkeypatch.setenv("FUSEGRAD_JIT_FLAGS", wrong)
    with pytest.raises(RuntimeError, match="was not compiled for sm_") as raised:
        call()
    assert "FUSEGRAD_JIT_FLAGS" in str(raised.value) and "flex_attention" in str(raised.value)
    monkeypatch.delenv("FUSEGRAD_JIT_FLAGS")
    activations, out = call()  # its backward may be compiled ahead
    truth = torch.autograd.grad(out.sum(), leaves)
    activations, out = call()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), leaves), truth, strict=True))
    del activations


def test_a_child_that_was_forked_after_use() -> None:
    done = in_process(
        """
import os, torch, fusegrad
x, y = torch.randn(64, 100, device="cuda", requires_grad=True), torch.zeros(64, dtype=torch.long, device="cuda")
q = torch.randn(1, 2, 100, 64, device="cuda", requires_grad=True)
def calls():
    yield lambda: fusegrad.cross_entropy(x, y)
    yield lambda: fusegrad.flex_attention(q, q, q)
    yield lambda: fusegrad.cross_entropy(torch.randn(64, 4, device="cuda"), y)
for call in calls():
    call()
torch.cuda.synchronize()
pid = os.fork()
if pid == 0:
    told = 0
    for call in calls():
        try:
            call()
        except RuntimeError as error:
            told += 1
    os._exit(told)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert done.stdout.split() == ["3"], done.stderr
