"""Compiles the kernels of flex attention ahead of the first call."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from . import _C
from ._arguments import checked
from ._attention_second import MOST_HEAD as _MOST_OF_SECOND
from .score_mod import ScoreMod, check_kernel_size, trace_mask_mod, trace_score_mod

__all__ = ["compile_flex"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEAD = {"head_size": _C.FLEX_MOST_HEAD_ON_CUDA, "value_size": _C.FLEX_MOST_VALUE_ON_CUDA}

# What decides between kernels beside the lengths: how many CTAs there are and whether batches fill the GPU. Calls of
# other sizes find their kernels among those of these, or compile one more.
_BATCHES = ((2, 64), (8, 16), (64, 16), (512, 16))  # and heads
_LENGTHS = (256, 512, 768, 1024, 3000, 4096, 8192)
_MOST_PAIRS = 1 << 33  # more are few calls, and deterministic sums in fixed point may be refused
_FEW_QUERIES = ((1, 4096), (16, 8192), (32, 8192), (256, 8192))  # of one batch and head

# Multiprocessors of the largest GPU of an architecture, where that is not the device's own.
_MULTIPROCESSORS = {"80": 108, "86": 84, "87": 16, "89": 142, "90": 132, "100": 148, "103": 160, "120": 188, "121": 48}


def _fields_of(name: str, mod: ScoreMod | None) -> dict[str, Any]:
    """What a plan reads of a mod, by `name`: text, buffers by dtype, sizes, strides and alignment, and numbers."""
    text, tensors, scalars = ("", (), ()) if mod is None else (mod.text, mod.buffers, mod.scalars)
    buffers = [
        (str(b.dtype).removeprefix("torch."), list(b.shape), list(b.stride()), b.data_ptr() % 16 == 0) for b in tensors
    ]
    return {name: text, f"{name}_buffers": buffers, f"{name}_scalars": list(scalars)}


def _shapes(
    batch: int | None, heads: tuple[int, int] | None, lengths: tuple[int, int] | None, mod: ScoreMod | None
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Batch, heads of queries and of keys, lengths of calls: as they are told, else several."""
    both = {(batch or b, heads or (h, h)) for b, h in _BATCHES}
    all_lengths = tuple((n, n) for n in _LENGTHS) if lengths is None else (lengths,)
    every = [(b, h, n) for (b, h), n in itertools.product(both, all_lengths)]
    shapes = [(b, h, (m, n)) for b, h, (m, n) in every if b * h[0] * m * n <= _MOST_PAIRS] or every
    for buffer in () if mod is None or mod.text == "" else mod.buffers:
        # A buffer with an element for each pair says what the lengths are, and perhaps heads and batch.
        if buffer.dim() < 2 or min(buffer.shape) < 1:
            continue
        sizes = (1, 1, *buffer.shape)
        of_buffer = lengths or (sizes[-2], sizes[-1])
        for b, h in _BATCHES:
            many = heads or ((h, h) if sizes[-3] == 1 else (sizes[-3], sizes[-3]))
            shapes.append((batch or max(sizes[-4], b), many, of_buffer))
    return shapes


@checked
def compile_flex(
    score_mod: Callable[..., Any] | ScoreMod | None = None,
    mask_mod: Callable[..., Any] | ScoreMod | None = None,
    *,
    head_size: int,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_mask: BlockMask | None = None,
    block_size: int | tuple[int, int] = 128,
    requires_grad: bool = True,
    deterministic: bool | None = None,
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
    few_queries: bool = False,
    tangents: bool = False,
    second_derivatives: bool = False,
    batch: int | None = None,
    heads: int | tuple[int, int] | None = None,
    lengths: tuple[int, int] | None = None,
    architecture: str | None = None,
) -> None:
    """Compiles what a call of :func:`fusegrad.flex_attention` on a GPU and its backward need, into the memory of this
    process and the cache on the disk; nothing is run. Where ``batch``, ``heads`` and ``lengths`` are told, these are
    the kernels of that call's plan, and no others. What is not told is taken to be several sizes of long sequences;
    most calls of other sizes run the same kernels. Positive scales and the values of captured tensors and numbers do
    not matter. Kernels that give ``max_scores`` are compiled by the first call that asks for it.

    Args:
        score_mod: As for the call. Captured tensors count with their dtypes, sizes, strides and ``requires_grad``.
        mask_mod: The mask_mod of the call's block mask; None where there is no block mask.
        head_size: D of query and key, at most 576.
        value_size: E of the values, at most 512; by default D.
        dtype: bfloat16, float16 or float32.
        block_mask: A block mask whose mask_mod and block size are used, in place of mask_mod and block_size.
        block_size: The block size of the call's block mask, for queries and keys.
        requires_grad: Whether query, key and value all get gradients, or none of them; a backward that is asked for
            some of them only has a kernel of its own.
        deterministic: As for the call.
        dropout_p: As for the call. Only whether it is 0 makes a difference.
        batch_invariant: As for the call.
        few_queries: Also the kernels of calls whose queries are at most 32, or too few to fill the GPU, whose keys are
            split instead.
        tangents: Also the kernels of forward mode, where query, key, value and all captured tensors of floats have
            tangents. They depend on whether a backward may follow, that is, whether anything requires a gradient.
        second_derivatives: Also the kernels of gradients that are differentiated, of query, key and value. Forward mode
            through a backward takes those of ``tangents`` too.
        batch: B of the calls.
        heads: H of the calls; (H, Hkv) where key and value have fewer.
        lengths: M and N of the calls. Short sequences, where one of them is at most 128, have kernels of their own,
            which are compiled only where lengths are told.
        architecture: Such as "80", "90a", "100" or "120", for which no GPU is needed; by default that of the current
            device.

    Raises:
        ValueError, TypeError: as ``compile_flex: what must hold, but got <value>``.
        NotImplementedError: where fusegrad was built without CUDA.
        TraceError: where a function cannot be traced, or is too large for a kernel.
        RuntimeError: where NVRTC is missing or a kernel does not compile.
    """
    value_size = head_size if value_size is None else value_size
    for name, size in (("head_size", head_size), ("value_size", value_size)):
        most = _MOST_HEAD[name]
        if not 1 <= size <= most:
            raise ValueError(f"compile_flex: {name} must be a whole number from 1 to {most}, but got {size!r}")
    if dtype not in _DTYPES:
        raise TypeError(f"compile_flex: dtype must be bfloat16, float16 or float32, but got {dtype}")
    if block_mask is not None and mask_mod is not None:
        raise ValueError("compile_flex: mask_mod must not come together with block_mask, but got both")
    sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
    blocks = block_mask is not None or mask_mod is not None
    if block_mask is not None:
        mask_mod = None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
        sizes = (block_mask.BLOCK_SIZE[0], block_mask.BLOCK_SIZE[1])
    if min(sizes) < 1:
        raise ValueError(f"compile_flex: block_size must be one or two positive numbers, but got {block_size!r}")
    if architecture is not None and not re.fullmatch(r"[0-9]{2,3}[af]?", architecture):
        raise ValueError(f"compile_flex: architecture must be one such as '80' or '90a', but got {architecture!r}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"compile_flex: dropout_p must be at least 0 and less than 1, but got {dropout_p}")
    if lengths is not None and min(lengths) < 1:
        raise ValueError(f"compile_flex: lengths must be two positive numbers, but got {lengths!r}")
    if batch is not None and batch < 1:
        raise ValueError(f"compile_flex: batch must be a positive number, but got {batch!r}")
    both = (heads, heads) if isinstance(heads, int) else heads
    if both is not None and (min(both) < 1 or both[0] % both[1] != 0):
        raise ValueError(f"compile_flex: heads must be positive, the first a multiple of the second, but got {heads!r}")
    flex = getattr(_C, "flex", None)
    if flex is None:
        raise NotImplementedError("compile_flex: fusegrad must be built with CUDA, but got a build without")

    score = None if score_mod is None else trace_score_mod(score_mod)
    mask = None if mask_mod is None else trace_mask_mod(mask_mod)
    buffers = () if score is None else score.buffers
    wants = [b.requires_grad for b in buffers]
    needs_grad = [requires_grad] * 3 + wants
    training = any(needs_grad)
    if score is not None:
        check_kernel_size(score.text, tuple(wants) if training else None)
    multiprocessors = None
    if architecture is None:
        try:
            architecture = flex.current_architecture()
        except RuntimeError as error:
            raise ValueError(
                f"compile_flex: architecture must be given where there is no GPU, but got None ({error})"
            ) from None
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    multiprocessors = multiprocessors or _MULTIPROCESSORS.get(architecture.rstrip("af"), 132)

    common = {
        "dtype": str(dtype).removeprefix("torch."),
        **_fields_of("score_mod", score),
        **_fields_of("mask_mod", mask),
        "block_size": sizes if blocks else None,
        "dropout": dropout_p > 0,
        "full_float32": torch.backends.cuda.matmul.fp32_precision != "tf32",
        "training": training,
    }
    asked: list[dict[str, Any]] = [{"direction": "forward", "batch_invariant": batch_invariant}]
    if training:
        ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        asked.append({"direction": "backward", "needs_grad": needs_grad, "deterministic": ordered})
    if tangents:
        asked.append({"direction": "tangents", "buffer_tangents": [b.is_floating_point() for b in buffers]})
    if second_derivatives:
        asked.append({"direction": "tangents", "buffer_tangents": [False] * len(buffers), "training": False})
    if second_derivatives and max(head_size, value_size) <= _MOST_OF_SECOND[dtype]:
        asked += [{"direction": "pair_tangents", "grad_out_tangent": of_grad_out} for of_grad_out in (False, True)]
    shapes = _shapes(batch, both, lengths, score)
    few = [(1, (1, 1), lengths) for lengths in _FEW_QUERIES] if few_queries else []
    programs = {}
    for b, (h, kv_heads), (m, n) in {*shapes, *few}:
        shape = [b, h, m, b, kv_heads, n, head_size, value_size]
        for one in asked:
            _, found = flex.call_plan({**common, **one, "shape": shape}, architecture, multiprocessors)
            programs.update({_C.jit.key(program): program for program in found})
    with ThreadPoolExecutor(len(programs)) as threads:
        list(threads.map(_C.jit.compile, programs.values()))
