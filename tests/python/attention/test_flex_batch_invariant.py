"""batch_invariant: out and lse of a query have the same bits in every call that it is in."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_reference import dense
from coverings import each_of, pairs_of
from fusegrad import _C, create_block_mask, flex_attention
from needs import needs_flex_compiler
from support import DEVICE_DTYPES, DEVICES, assert_as_good_as_eager
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

Function = Callable[..., Any]
LENGTH = {"cpu": 600, "cuda": 2300}  # on CUDA two whole segments of keys and a part of one


@dataclass
class Part:
    """What a call has of the whole: batches, heads of keys, and queries; keys beyond those that its queries see."""

    batches: list[int]
    key_heads: list[int]
    queries: slice
    padding: int = 0


@dataclass
class Problem:
    """A call of all queries, and calls of some of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    kind: str
    block: int = 128
    dropout: bool = False

    @staticmethod
    def of(
        device: str, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], kind: str, block: int = 128
    ) -> Problem:
        torch.manual_seed(0)
        length = LENGTH[device]

        def random(many: int, size: int) -> Tensor:
            return torch.randn(2, many, length, size).to(device, dtype)

        return Problem(random(heads[0], sizes[0]), random(heads[1], sizes[0]), random(heads[1], sizes[1]), kind, block)

    @property
    def group(self) -> int:
        return self.query.size(1) // self.key.size(1)

    @property
    def whole(self) -> Part:
        return Part([0, 1], [*range(self.key.size(1))], slice(0, self.query.size(2)))

    def functions(self, part: Part) -> tuple[Function | None, Function | None, Tensor]:
        """score_mod and mask_mod by places of the whole; the heads."""
        device, length = self.query.device, self.query.size(2)
        batches = torch.tensor(part.batches, device=device)
        heads = torch.tensor([h * self.group + i for h in part.key_heads for i in range(self.group)], device=device)
        first = torch.tensor(part.queries.start, device=device)

        def table(*shape: int) -> Tensor:
            return torch.arange(math.prod(shape), device=device).mul(12.9898).sin().mul(2).view(shape)

        far, bias, cap = table(8, 2 * length), table(2, 8, 512).to(self.query.dtype), 5.0
        document = (torch.arange(length, device=device) // 370).int()
        score: dict[str, Function] = {
            "alibi": lambda s, b, h, q, kv: torch.where(
                q + first >= kv, s - 0.03 * (heads[h] + 1) * (q + first - kv), -torch.inf
            ),
            "relative": lambda s, b, h, q, kv: s + far[heads[h], q + first - kv + length],
            "softcap": lambda s, b, h, q, kv: cap * torch.tanh(s / cap) + bias[batches[b], heads[h], kv % 512],
        }
        mask: dict[str, Function] = {
            "causal": lambda b, h, q, kv: q + first >= kv,
            "relative": lambda b, h, q, kv: q + first >= kv,
            "softcap": lambda b, h, q, kv: q + first >= kv,
            "window": lambda b, h, q, kv: (q + first >= kv) & (q + first - kv < 130),
            "document": lambda b, h, q, kv: (document[q + first] == document[kv % length]) & (q + first >= kv),
            "by head": lambda b, h, q, kv: (q + first >= kv) & ((kv // 64 + heads[h] + batches[b]) % 3 < 2),
        }
        return score.get(self.kind), mask.get(self.kind), heads

    def run(self, part: Part, **options: Any) -> tuple[Tensor, Tensor]:
        score_mod, mask_mod, heads = self.functions(part)
        query = self.query[part.batches][:, heads, part.queries]
        # Without a mask all keys take part, elsewhere those up to the last query.
        seen = self.key.size(2) if self.kind == "all" else part.queries.stop
        key, value = (t[part.batches][:, part.key_heads, :seen] for t in (self.key, self.value))
        if part.padding > 0 and mask_mod is not None:
            key, value = (torch.cat([t, 100 * torch.randn_like(t[:, :, :1]).expand(-1, -1, part.padding, -1)], 2)
                          for t in (key, value))  # fmt: skip
        mask = None
        if mask_mod is not None:
            b, h = (query.size(0), query.size(1)) if self.kind == "by head" else (None, None)
            mask = create_block_mask(
                mask_mod, b, h, query.size(2), key.size(2), device=query.device, BLOCK_SIZE=self.block
            )
        options = {"batch_invariant": True, **options}
        if score_mod is not None and self.kind == "alibi":
            assert part.padding == 0
        out, aux = flex_attention(
            query, key, value, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True), **options
        )
        return out, aux.lse

    def parts(self) -> dict[str, Part]:
        both, length, all_heads = [0, 1], self.query.size(2), [*range(self.key.size(1))]
        found = {
            f"query {i}": Part(both, all_heads, slice(i, i + 1)) for i in (0, 1, 127, 128, 300, length // 2, length - 1)
        }
        for size in (7, 64, 100):
            for i in (0, length // 3, length - size):
                found[f"{size} queries from {i}"] = Part(both, all_heads, slice(i, i + size))
        found["a batch"] = Part([1], all_heads, slice(0, length))
        found["batches in another order"] = Part([1, 0, 1], all_heads, slice(length // 2, length))
        found["a query of a head"] = Part([1], [all_heads[-1]], slice(length - 1, length))
        found["heads in another order"] = Part([0], all_heads[::-1], slice(length - 70, length))
        if self.kind not in ("all", "alibi"):
            found["a query and keys that it does not see"] = Part(both, all_heads, slice(130, 131), 700)
            found["queries and keys that they do not see"] = Part(both, all_heads, slice(200, 290), 45)
        return found


def differing(problem: Problem, whole: tuple[Tensor, Tensor], name: str, part: Part, **options: Any) -> list[str]:
    """What of the part has other bits than in the whole."""
    heads = problem.functions(part)[2]
    wrong = []
    for what, ours, theirs in zip(("out", "lse"), problem.run(part, **options), whole, strict=True):
        expected = theirs[part.batches][:, heads, part.queries]
        as_bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[ours.element_size()]
        if not torch.equal(ours.detach().contiguous().view(as_bits), expected.detach().contiguous().view(as_bits)):
            wrong.append(f"{what} of {name}: {(ours != expected).sum().item()} of {ours.numel()}")
    return wrong


KINDS = ["all", "causal", "window", "document", "by head", "alibi", "relative", "softcap"]
HEADS = [(4, 4), (4, 2), (6, 1)]
SIZES = [(64, 64), (128, 128), (16, 16), (80, 72), (192, 128), (256, 256)]


@pairs_of({"kind": KINDS, "device_dtype": DEVICE_DTYPES, "heads": HEADS, "sizes": SIZES, "block": [128, 48]})
def test_the_same_bits(
    kind: str, device_dtype: tuple[str, torch.dtype], heads: tuple[int, int], sizes: tuple[int, int], block: int
) -> None:
    problem = Problem.of(*device_dtype, heads, sizes, kind, block)
    whole = problem.run(problem.whole)
    assert not [w for name, part in problem.parts().items() for w in differing(problem, whole, name, part)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_of({"kind": KINDS, "sizes": SIZES, "dtype": [torch.bfloat16, torch.float16]})
def test_the_same_bits_of_the_portable_family(kind: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """That of GPUs other than Hopper, in 16 bits."""
    problem = Problem.of("cuda", dtype, (4, 2), sizes, kind)
    try:
        _C.flex.force_family("portable")
        whole = problem.run(problem.whole)
        assert not [w for name, part in problem.parts().items() for w in differing(problem, whole, name, part)]
    finally:
        _C.flex.force_family("")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_of({"sizes": SIZES, "dtype": [torch.bfloat16, torch.float32]})
def test_short_segments(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Many are added up, by one CTA and by CTAs of their own."""
    problem = Problem.of("cuda", dtype, (4, 2), sizes, "causal")
    try:
        _C.flex.force_segment_keys(256)
        whole = problem.run(problem.whole)
        assert not [w for name, part in problem.parts().items() for w in differing(problem, whole, name, part)]
    finally:
        _C.flex.force_segment_keys(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_long_cache() -> None:
    """More works than multiprocessors, of segments and of heads, and the same again."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, length, 128, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((16, 40), (2, 20000), (2, 20000))
    )
    whole = flex_attention(query, key, value, enable_gqa=True, batch_invariant=True)
    for i in (0, 17, 39):
        part = flex_attention(query[1:, :, i : i + 1], key[1:], value[1:], enable_gqa=True, batch_invariant=True)
        assert torch.equal(part, whole[1:, :, i : i + 1])
        alone = flex_attention(
            query[2:, 8:, i : i + 1], key[2:, 1:], value[2:, 1:], enable_gqa=True, batch_invariant=True
        )
        assert torch.equal(alone, whole[2:, 8:, i : i + 1])
    many = flex_attention(query.repeat(1, 1, 60, 1), key, value, enable_gqa=True, batch_invariant=True)
    assert torch.equal(many[:, :, 40:80], whole)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_of_wide_heads(device: str) -> None:
    problem = Problem.of(device, torch.float32, (2, 1), (576, 512), "causal")
    whole = problem.run(problem.whole)
    assert not [w for name, part in problem.parts().items() for w in differing(problem, whole, name, part)]


@pairs_of({"device_dtype": DEVICE_DTYPES, "sizes": [(64, 64), (128, 128)]})
def test_documents_that_begin_at_segments(device_dtype: tuple[str, torch.dtype], sizes: tuple[int, int]) -> None:
    """Packed behind others they have the bits that they have alone."""
    device, dtype = device_dtype
    torch.manual_seed(0)
    length, begins = 1500, (0, 1024, 2048 + 1024)
    documents = [[torch.randn(1, 2, n, size).to(device, dtype) for size in (sizes[0], *sizes)] for n in (300, 700, 500)]
    places = torch.full((begins[-1] + length,), -1, device=device)
    packed = [torch.zeros(1, 2, len(places), size).to(device, dtype) for size in (sizes[0], *sizes)]
    for i, (begin, document) in enumerate(zip(begins, documents, strict=True)):
        end = begin + document[0].size(2)
        places[begin:end] = i
        for whole, part in zip(packed, document, strict=True):
            whole[:, :, begin:end] = part

    def of_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (places[q] == places[kv]) & (q >= kv)

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask = create_block_mask(of_document, None, None, len(places), len(places), device=device)
    out = flex_attention(*packed, block_mask=mask, batch_invariant=True)
    for begin, document in zip(begins, documents, strict=True):
        n = document[0].size(2)
        alone = create_block_mask(causal, None, None, n, n, device=device)
        part = flex_attention(*document, block_mask=alone, batch_invariant=True)
        assert torch.equal(part, out[:, :, begin : begin + n]), begin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_with_a_graph(device: str, kind: str) -> None:
    """Training keeps more of a row; its results are those of an engine."""
    problem = Problem.of(device, torch.bfloat16, (4, 2), (64, 64), kind)
    whole = problem.run(problem.whole)
    for t in (problem.query, problem.key, problem.value):
        t.requires_grad_()
    assert not differing(problem, whole, "the whole", problem.whole)
    assert not differing(problem, whole, "a few", Part([1], [1], slice(100, 300)))


@pytest.mark.parametrize("kind", ["window", "softcap"])
def test_threads_change_no_bits(kind: str) -> None:
    problem = Problem.of("cpu", torch.float32, (4, 2), (64, 64), kind)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(problem.run(problem.whole))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@each_of({"device_dtype": DEVICE_DTYPES, "sizes": SIZES, "kind": ["causal", "softcap"]})
def test_accuracy(device_dtype: tuple[str, torch.dtype], sizes: tuple[int, int], kind: str) -> None:
    problem = Problem.of(*device_dtype, (4, 2), sizes, kind)
    device = problem.query.device
    for part in (problem.whole, Part([0, 1], [0, 1], slice(problem.query.size(2) - 3, problem.query.size(2)))):
        score_mod, mask_mod, heads = problem.functions(part)
        query = problem.query[part.batches][:, heads, part.queries]
        with device:
            places = torch.meshgrid(
                *(torch.arange(n) for n in (1, 1, query.size(2), problem.key.size(2))), indexing="ij"
            )
            allowed = mask_mod(*places)
            tensors = (query, problem.key, problem.value)
            truth = dense(*(t.double() for t in tensors), score_mod, allowed)
            eager = dense(*tensors, None if score_mod is None else score_mod, allowed)
        out, lse = problem.run(part)
        assert_as_good_as_eager(out, eager.out, truth.out, "out", least=1e-6)
        torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device: str) -> None:
    """They follow the results, which are the same but for rounding."""
    problem = Problem.of(device, torch.float32, (4, 2), (64, 64), "relative")
    leaves = [t.requires_grad_() for t in (problem.query, problem.key, problem.value)]
    found = []
    for batch_invariant in (True, False):
        out, lse = problem.run(problem.whole, batch_invariant=batch_invariant)
        found.append(torch.autograd.grad((out.square().sum() + lse.sum()), leaves))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_forward_mode_and_vmap(device: str) -> None:
    problem = Problem.of(device, torch.float32, (4, 2), (64, 64), "causal")
    part = Part([0, 1], [0, 1], slice(200, 290))
    plain = problem.run(part)
    query = problem.query

    def of(query: Tensor) -> tuple[Tensor, Tensor]:
        return Problem(query, problem.key, problem.value, "causal").run(part)

    values, _ = torch.func.jvp(of, (query,), (torch.randn_like(query),))
    for ours, expected in zip(values, plain, strict=True):
        assert torch.equal(ours, expected)
    for ours, expected in zip(torch.vmap(of)(torch.stack([query, 2 * query])), plain, strict=True):
        assert torch.equal(ours[0], expected)


def test_what_cannot_hold_raises() -> None:
    q = torch.randn(1, 2, 8, 16)
    nested = torch.nested.nested_tensor([torch.randn(2, n, 16) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(NotImplementedError, match="flex_attention: batch_invariant must come with dense tensors"):
        flex_attention(nested, nested, nested, batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant"):
        flex_attention(q, q, q, batch_invariant=1)


# --- without a GPU ---


@needs_flex_compiler
@pairs_of(
    {
        "dtype": ["bfloat16", "float16", "float32"],
        "sizes": [*SIZES, (576, 512)],
        "architecture": ["80", "86", "90a", "100", "120"],
    }
)
def test_plans_have_one_tile_of_keys(dtype: str, sizes: tuple[int, int], architecture: str) -> None:
    """Whatever the lengths, heads, masks, dropout, and whether a backward may follow."""
    found = set()
    shapes = itertools.product((1, 40, 300, 5000), (1, 64, 1000, 9000), ((1, 8, 8), (2, 12, 2), (64, 32, 32)))
    for (queries, keys, (batch, heads, key_heads)), block, dropout in itertools.product(
        shapes, (None, (128, 128), (48, 48)), (False, True)
    ):
        asked = {
            "direction": "forward", "dtype": dtype, "block_size": block, "dropout": dropout, "batch_invariant": True,
            "training": dropout, "shape": [batch, heads, queries, batch, key_heads, keys, *sizes],
        }  # fmt: skip
        text, _ = _C.flex.call_plan(asked, architecture, 132)
        kernels = [line for line in text.splitlines() if "segments" in line and "merge" not in line]
        assert kernels, text
        found |= {(line.split(":")[0].strip(), re.search(r"tile \d+ x (\d+)", line)[1]) for line in kernels}
    assert len(found) == 1, found


@needs_flex_compiler
def test_max_scores_raise_on_cuda() -> None:
    asked = {"direction": "forward", "batch_invariant": True, "max_scores": True, "shape": [1, 1, 9, 1, 1, 9, 64, 64]}
    with pytest.raises(RuntimeError, match="flex_attention: batch_invariant on CUDA must not come with max_scores"):
        _C.flex.call_plan(asked, "90a", 132)


def test_compiled_programs_take_the_option() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + (i - j), batch_invariant=True)

    graphs = []
    compiled = torch.compile(call, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    assert torch.equal(compiled(q, k, v), call(q, k, v))
    (node,) = (n for n in graphs[0].graph.nodes if "flex_attention" in str(n.target))
    assert node.args[-1] is True
