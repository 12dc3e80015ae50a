"""What calls over processes leave behind: neither torch.compile loaded, which takes seconds and keeps a process group's
threads alive, nor a reference to the group."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

PROGRAM = """
import sys, torch, torch.distributed as dist, weakref, fusegrad
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
shards, context = fusegrad.VocabParallel(None, 0, 50), fusegrad.ContextParallel(None, "zigzag")
logits, bias = torch.randn(4, 50, requires_grad=True), torch.randn(8, requires_grad=True)
fusegrad.cross_entropy(logits, torch.arange(4), vocab_parallel=shards).backward()
fusegrad.jsd(logits, torch.randn(4, 50), vocab_parallel=shards).backward()
fusegrad.linear_cross_entropy(logits[:, :8], torch.randn(50, 8), torch.arange(4), vocab_parallel=shards).backward()
qkv = torch.randn(1, 2, 8, 16, requires_grad=True)
add = lambda score, b, h, q_idx, kv_idx: score + bias[q_idx]
fusegrad.flex_attention(qkv, qkv, qkv, add, context_parallel=context).sum().backward()
assert bias.grad is not None and "torch._dynamo" not in sys.modules
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None  # with its threads, while shards, context and the graphs' tensors are still there
try:
    shards.group
except RuntimeError as error:
    assert "VocabParallel: its process group must be there, but has been destroyed" in str(error), error
else:
    raise AssertionError("nothing raised")
"""


def test_sharded_calls_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
