"""compile_flex: what it compiles, keeps and refuses. No GPU is needed; that it is what a call runs is tested on one."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import _C, ScoreMod, compile_flex, flex_attention, trace_mask_mod
from fusegrad._bias_texts import MASKED, Pattern, Read, text_of
from fusegrad.compile import _fields_of
from needs import QUICKLY, has_flex_compiler, needs_flex_compiler
from support import deterministic_algorithms
from torch.nn.attention.flex_attention import create_block_mask


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEGRAD_JIT_FLAGS", QUICKLY)
    if has_flex_compiler():
        _C.jit.forget()
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The kernels that compile_flex has compiled, by name; test_flex_kernels.py compiles them and their like."""
    plan, names, found = _C.flex.call_plan, {}, []

    def planned(*given):
        text, programs = plan(*given)
        steps = re.findall(r"^  flex_(\w+):", text, re.MULTILINE)
        names.update(zip(map(_C.jit.key, programs), steps, strict=True))
        return text, programs

    monkeypatch.setattr(_C.flex, "call_plan", planned)
    monkeypatch.setattr(_C.jit, "compile", lambda program: found.append(names[_C.jit.key(program)]))
    return found


def stats(call) -> dict[str, int]:
    before = _C.jit.stats()
    call()
    after = _C.jit.stats()
    return {key: after[key] - before[key] for key in ("compilations", "memory_hits", "disk_hits")}


def causal(b, h, q, kv):
    return q >= kv


@needs_flex_compiler
@pytest.mark.parametrize("size", [32, 64])
def test_integers_by_keys(size: int, monkeypatch) -> None:
    """They have no lines, so that nobody arrives at the barriers of a Hopper kernel's lines; ptxas died of such."""
    monkeypatch.delenv("FUSEGRAD_JIT_FLAGS")
    weight = torch.arange(300) % 40
    compile_flex(lambda s, b, h, q, kv: s * weight[kv], causal, head_size=size, architecture="90a")


@needs_flex_compiler
def test_the_same_again_is_there(folder) -> None:
    bias = torch.randn(50, requires_grad=True)

    def call(**changed) -> None:
        factor = changed.pop("factor", 0.5)
        held = changed.pop("bias", bias)
        options = {"head_size": 16, "dtype": torch.float16, "architecture": "86", **changed}
        compile_flex(lambda s, b, h, q, kv: s * factor + held[kv], causal, **options)

    assert stats(call) == {"compilations": 2, "memory_hits": 0, "disk_hits": 0}  # forward and backward
    assert len(list(folder.glob("*.sm_86.cubin"))) == 2
    again = {"compilations": 0, "memory_hits": 2, "disk_hits": 0}
    assert stats(call) == again
    # What does not matter to the kernels: other numbers, another length, head sizes that are rounded up alike.
    assert stats(lambda: call(factor=0.75, bias=torch.randn(70, requires_grad=True), head_size=9)) == again
    _C.jit.forget()
    assert stats(call) == {"compilations": 0, "memory_hits": 0, "disk_hits": 2}
    # What does: whether something is differentiated, and what; deterministic sums; blocks that tiles do not fit.
    assert stats(lambda: call(requires_grad=False, bias=bias.detach()))["compilations"] == 1
    assert stats(lambda: call(requires_grad=False))["compilations"] == 1  # the backward of the bias alone
    assert stats(lambda: call(deterministic=True))["compilations"] == 2
    assert stats(lambda: call(block_size=48))["compilations"] == 2
    assert stats(lambda: call(dropout_p=0.1))["compilations"] == 2
    assert stats(lambda: call(dropout_p=0.2)) == again
    assert stats(lambda: call(bias=torch.randn(50, dtype=torch.bfloat16, requires_grad=True)))["compilations"] == 2
    assert stats(lambda: call(batch_invariant=True)) == {"compilations": 1, "memory_hits": 1, "disk_hits": 0}
    # For few queries: tiles of 16 and 32 rows, and usual ones whose keys are split, and the deterministic dQ alone.
    assert stats(lambda: call(few_queries=True)) == {"compilations": 3, "memory_hits": 2, "disk_hits": 0}
    assert stats(lambda: call(few_queries=True, deterministic=True))["compilations"] == 1
    with deterministic_algorithms():
        assert stats(call) == {"compilations": 0, "memory_hits": 3, "disk_hits": 0}


@needs_flex_compiler
def test_large_scalars_and_buffers_are_kernels_of_their_own() -> None:
    def call(number: int, buffer: torch.Tensor) -> None:
        text = "score_mod 1\nbuffer @0 f 1\nscalar $0 i64\n%0 = add kv_idx $0\n%1 = load @0 %0\nreturn %1\n"
        # For a head size with one tile: for smaller ones lengths decide between two.
        compile_flex(ScoreMod(text, [buffer], [number]), head_size=128, requires_grad=False, architecture="90a")

    small, large = torch.zeros(5), torch.empty(2**31 + 5, device="meta")
    assert stats(lambda: call(1, small))["compilations"] == 1
    assert stats(lambda: call(2**30, small))["compilations"] == 0
    assert stats(lambda: call(2**40, small))["compilations"] == 1
    assert stats(lambda: call(1, large))["compilations"] == 1


@needs_flex_compiler
@pytest.mark.parametrize(
    "head_size, deterministic, kernels",
    [
        # For two sizes of tiles, between which lengths decide, and where CTAs have whole heads.
        (64, False, ["forward_hopper"] * 2 + ["backward_hopper"] * 3),
        (64, True, ["forward_hopper"] * 2 + ["backward_hopper"] * 2 + ["grad_query_hopper"]),
        (128, False, ["forward_hopper"] + ["backward_hopper"] * 3),
        (128, True, ["forward_hopper"] + ["backward_hopper"] * 3 + ["grad_query_hopper"]),
        # Wider heads' gradient of the query has a kernel of its own in any order.
        (256, False, ["forward_hopper", "backward_wide_hopper", "grad_query_hopper"]),
    ],
)
def test_all_kernels_of_a_training_step(asked, head_size: int, deterministic: bool, kernels: list[str]) -> None:
    compile_flex(None, head_size=head_size, architecture="90a", deterministic=deterministic)
    assert sorted(asked) == sorted(kernels)


@needs_flex_compiler
@pytest.mark.parametrize("deterministic, kernels", [(False, 2), (True, 3)])
def test_sums_over_batches(asked, deterministic: bool, kernels: int) -> None:
    """They are added to memory or stored, by how many CTAs share a tile, or added up in one order."""
    bias = torch.zeros(4, 100, 104, dtype=torch.bfloat16, requires_grad=True)
    # For these lengths there is one forward, and no backward of Hopper's; the sums are the same kernels.
    options = {"head_size": 32, "deterministic": deterministic, "architecture": "90a", "lengths": (100, 104)}
    compile_flex(lambda score, b, h, q, kv: score + bias[h, q, kv], **options)
    assert asked.count("grad_buffers_hopper") == kernels


@needs_flex_compiler
def test_a_block_mask_gives_its_mask_and_block_size() -> None:
    mask = create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=48)
    options = {"head_size": 16, "requires_grad": False, "architecture": "80"}
    assert stats(lambda: compile_flex(block_mask=mask, **options))["compilations"] == 1
    same = stats(lambda: compile_flex(None, trace_mask_mod(causal), block_size=(48, 48), **options))
    assert same == {"compilations": 0, "memory_hits": 1, "disk_hits": 0}
    mask.mask_mod = torch.nn.attention.flex_attention.noop_mask
    assert stats(lambda: compile_flex(block_mask=mask, **options))["compilations"] == 1


@needs_flex_compiler
def test_tf32_is_another_kernel() -> None:
    options = {"head_size": 16, "dtype": torch.float32, "requires_grad": False, "architecture": "80"}
    assert stats(lambda: compile_flex(**options))["compilations"] == 1
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert stats(lambda: compile_flex(**options))["compilations"] == 1
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@needs_flex_compiler
def test_short_sequences_have_kernels_of_their_own() -> None:
    options = {"head_size": 16, "requires_grad": False, "architecture": "80"}
    assert stats(lambda: compile_flex(**options))["compilations"] == 1
    assert stats(lambda: compile_flex(lengths=(49, 64), **options))["compilations"] == 1
    for lengths in ((30, 20), (129, 1000)):
        again = stats(lambda lengths=lengths: compile_flex(lengths=lengths, **options))
        assert again == {"compilations": 0, "memory_hits": 1, "disk_hits": 0}


BAD = [
    ({"head_size": 0}, ValueError, "head_size must be a whole number from 1 to 576, but got 0"),
    ({"value_size": 513}, ValueError, "value_size must be a whole number from 1 to 512, but got 513"),
    ({"dtype": torch.float64}, TypeError, "dtype must be bfloat16, float16 or float32, but got torch.float64"),
    ({"mask_mod": causal, "block_size": 0}, ValueError, "block_size must be one or two positive numbers, but got 0"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and less than 1, but got 1.0"),
    ({"lengths": (0, 5)}, ValueError, "lengths must be two positive numbers, but got (0, 5)"),
    ({"architecture": "sm_90"}, ValueError, "architecture must be one such as '80' or '90a', but got 'sm_90'"),
    (
        {"mask_mod": causal, "block_mask": create_block_mask(causal, None, None, 8, 8, device="cpu")},
        ValueError,
        "mask_mod must not come together with block_mask, but got both",
    ),
]


@rows_of("given, error, message", [*BAD])
def test_bad_input(given: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        compile_flex(**{"head_size": 16, "architecture": "90a", **given})
    assert str(caught.value) == f"compile_flex: {message}"


def pair(t):
    return lambda s, b, h, q, kv: s + t[h, q, kv]


HALF = torch.bfloat16
# Of B, H, M and N the captured tensor, and its score_mod.
BIASES = {
    "none": (lambda *_: None, None),
    "pairs": (lambda b, h, m, n: torch.zeros(h, m, n, dtype=HALF), pair),
    "pairs of batches": (lambda *sizes: torch.zeros(sizes), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv]),
    "heads last": (lambda b, h, m, n: torch.zeros(m, n, h, dtype=HALF).movedim(-1, 0), pair),
    "relative": (lambda b, h, m, n: torch.zeros(h, m + n), lambda t: lambda s, b, h, q, kv: s + t[h, q - kv + 100]),
    "keys": (lambda b, h, m, n: torch.zeros(n), lambda t: lambda s, b, h, q, kv: s + t[kv]),
    "a table": (lambda b, h, m, n: torch.zeros(32, h), lambda t: lambda s, b, h, q, kv: s + t[(q - kv).abs() % 32, h]),
    "a scale": (lambda b, h, m, n: torch.ones(h), lambda t: lambda s, b, h, q, kv: s * t[h]),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pairs_of(
    {
        "deterministic": [False, True],
        "sizes": [(1, 1, 1, 4096), (2, 4, 100, 104), (8, 4, 64, 64), (4, 16, 1024, 1024)],
        "name": [*BIASES],
    }
)
def test_calls_of_told_sizes_compile_nothing(name: str, sizes: tuple[int, int, int, int], deterministic: bool) -> None:
    make, of = BIASES[name]
    batch, heads, *lengths = sizes
    bias = make(*sizes)
    score_mod = None
    if bias is not None:
        bias = bias.cuda().requires_grad_()
        score_mod = of(bias)
    options = {"batch": batch, "heads": heads, "lengths": tuple(lengths), "head_size": 32}
    compile_flex(score_mod, deterministic=deterministic, **options)
    shape = (batch, heads, lengths[0], 32)
    q = torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (
        torch.randn(batch, heads, lengths[1], 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(2)
    )
    before = _C.jit.stats()["compilations"]
    flex_attention(q, k, v, score_mod, deterministic=deterministic).backward(torch.randn_like(q))
    torch.cuda.synchronize()
    assert _C.jit.stats()["compilations"] == before


@pytest.mark.skipif(hasattr(_C, "flex"), reason="a build with CUDA")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(NotImplementedError, match="compile_flex: fusegrad must be built with CUDA"):
        compile_flex(head_size=16, architecture="90a")


@needs_flex_compiler
@rows_of("direction", ["forward", "backward"])
def test_dimensions_that_are_read_at_0_cost_nothing(direction: str) -> None:
    """A bias of [1, 1, H, M, N], as models give them, has the plan of one of [H, M, N], down to its shared memory."""

    def plan(*first: str) -> str:
        bias = torch.randn(*[1 for _ in first], 4, 256, 256, dtype=torch.bfloat16)
        text = text_of(Pattern((Read("bias", (*first, "h", "q_idx", "kv_idx")),), False, MASKED))
        fields = _fields_of("score_mod", ScoreMod(text, (bias,)))
        fields |= {"direction": direction, "shape": [256, 4, 256, 256, 4, 256, 32, 32], "dtype": "bfloat16"}
        fields |= {"training": True, "needs_grad": [True] * 4} if direction == "backward" else {"training": True}
        return _C.flex.call_plan(fields, "90a", 132)[0]

    assert plan() == plan("0") == plan("0", "0") == plan("0", "0", "0")
