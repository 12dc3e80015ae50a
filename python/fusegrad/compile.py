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
from .score_mod import ScoreMod, check_kernel_size, trace_mask_mod, trace_score_mod

__all__ = ["compile_flex"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HEAD = 256
_MOST_INT32 = (1 << 31) - 1
_SMALL_SCALAR = 1 << 30


def _case_of(mod: ScoreMod | None) -> tuple[tuple[str, list[str]], tuple[bool, bool]]:
    """Text and dtypes, then whether the places in buffers and the scalars are small, as a call finds them."""
    if mod is None:
        return ("", []), (True, True)
    buffers = all(
        sum((n - 1) * stride for n, stride in zip(b.shape, b.stride(), strict=True)) <= _MOST_INT32
        and b.numel() <= _MOST_INT32
        for b in mod.buffers
    )
    scalars = all(isinstance(s, float) or abs(s) <= _SMALL_SCALAR for s in mod.scalars)
    return (mod.text, [str(b.dtype).removeprefix("torch.") for b in mod.buffers]), (buffers, scalars)


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
    few_queries: bool = False,
    tangents: bool = False,
    second_derivatives: bool = False,
    lengths: tuple[int, int] | None = None,
    architecture: str | None = None,
) -> None:
    """Compiles what a call of :func:`fusegrad.flex_attention` on a GPU and its backward need, into the memory of this
    process and the cache on the disk; nothing is run. Strides, batch, heads, positive scales, the values of captured
    tensors and numbers, and lengths above 128 do not matter: one compilation serves them all, but for calls of few
    queries, which have kernels of their own. Kernels that give ``max_scores`` are compiled by the first call that asks
    for it.

    Args:
        score_mod: As for the call. Captured tensors count with their dtypes, numbers of elements and ``requires_grad``.
        mask_mod: The mask_mod of the call's block mask; None where there is no block mask.
        head_size: D of query and key, at most 256.
        value_size: E of the values; by default D.
        dtype: bfloat16, float16 or float32.
        block_mask: A block mask whose mask_mod and block size are used, in place of mask_mod and block_size.
        block_size: The block size of the call's block mask, for queries and keys.
        requires_grad: Whether query, key and value all get gradients, or none of them; a backward that is asked for
            some of them only has a kernel of its own.
        deterministic: As for the call.
        dropout_p: As for the call. Only whether it is 0 makes a difference.
        few_queries: Also the kernels of calls whose queries are at most 32, or too few to fill the GPU, whose keys are
            split instead.
        tangents: Also the kernels of forward mode, where query, key, value and all captured tensors of floats have
            tangents. They depend on whether a backward may follow, that is, whether anything requires a gradient.
        second_derivatives: Also the kernels of gradients that are differentiated, of query, key and value. Forward mode
            through a backward takes those of ``tangents`` too.
        lengths: M and N of the calls, where one of them is at most 128: short sequences have tiles, and so kernels, of
            their own. By default those of longer ones are compiled.
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
        if not 1 <= size <= _MOST_HEAD:
            raise ValueError(f"compile_flex: {name} must be a whole number from 1 to {_MOST_HEAD}, but got {size!r}")
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
    flex = getattr(_C, "flex", None)
    if flex is None:
        raise NotImplementedError("compile_flex: fusegrad must be built with CUDA, but got a build without")

    score = None if score_mod is None else trace_score_mod(score_mod)
    mask = None if mask_mod is None else trace_mask_mod(mask_mod)
    score_text, score_small = _case_of(score)
    mask_text, mask_small = _case_of(mask)
    buffers = () if score is None else score.buffers
    wants = [b.requires_grad for b in buffers]
    floats = [b.is_floating_point() for b in buffers]
    training = requires_grad or any(wants)
    if score is not None:
        check_kernel_size(score.text, tuple(wants) if training else None)
    ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    if architecture is None:
        try:
            architecture = flex.current_architecture()
        except RuntimeError as error:
            raise ValueError(
                f"compile_flex: architecture must be given where there is no GPU, but got None ({error})"
            ) from None

    def case_of(
        kernel: str, columns: int | None = None, of: list[bool] | None = None, out_low: bool = training, **more: Any
    ) -> Any:
        return flex.Case(
            kernel,
            str(dtype).removeprefix("torch."),
            head_size,
            columns or value_size,
            score_text,
            mask_text,
            sizes if blocks else None,
            of if of is not None else [] if kernel == "forward" else floats if kernel == "tangents" else wants,
            [b.numel() for b in buffers],
            training=out_low,
            deterministic=ordered,
            needs_grad=requires_grad or kernel == "tangents",
            dropout_p=dropout_p,
            split=torch.backends.cuda.matmul.fp32_precision != "tf32",
            score_mod_small=score_small,
            mask_mod_small=mask_small,
            lengths=lengths or (0, 0),
            sizes=[list(b.shape) for b in buffers],
            **more,
        )

    cases = []
    for many_batches in (False, True) if lengths is not None else (False,):
        cases += [
            case_of("forward", many_batches=many_batches, aligned_boxes=aligned, forward_rows=rows)
            for aligned, rows in itertools.product((True, False), (128, 192, 256))
        ]
        if training:
            cases += flex.backward_kernels(case_of("backward", many_batches=many_batches), ordered, architecture)
    if few_queries:
        cases += [case_of("forward", few_rows=rows) for rows in flex.few_query_tiles(head_size, value_size)]
        cases += [case_of("forward", key_splits=True, aligned_boxes=aligned) for aligned in (True, False)]
        if training:
            split = flex.backward_kernels(case_of("backward", key_splits=True), ordered, architecture)
            cases += [case for case in split if flex.plan(case, architecture)["key_splits"]]
    if tangents:
        cases += [case_of("tangents", part) for part in flex.tangents_parts(value_size)]
    if second_derivatives:
        still = [False] * len(buffers)
        cases += [case_of("tangents", part, still, False) for part in flex.tangents_parts(value_size)]
        cases += [case_of(kernel) for kernel in ("pair_tangents", "pair_tangents of grad_out")]
    programs = {_C.jit.key(program): program for program in (flex.program(case, architecture) for case in cases)}
    with ThreadPoolExecutor(len(programs)) as threads:
        list(threads.map(_C.jit.compile, programs.values()))
