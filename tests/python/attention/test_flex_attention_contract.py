"""flex_attention and the gradient contract: in place, any number of backwards, compilers, bad input, memory."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable

import fusegrad
import pytest
import torch
from attention_reference import dense
from coverings import pairs_of, rows_of
from fusegrad import _C, flex_attention
from support import deterministic_algorithms
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("each_flex_device")

SHAPE = (1, 2, 40, 8)
OP = torch.ops.fusegrad


def causal(b, h, q, kv):
    return q >= kv


def mask_of(length: int = 40) -> BlockMask:
    """With a traced mask_mod, as torch.compile wants it for a full graph."""
    device = torch.get_default_device().type
    mask = create_block_mask(causal, None, None, length, length, device=device, BLOCK_SIZE=16)
    mask.mask_mod = fusegrad.trace_mask_mod(causal)
    return mask


def make(x: Tensor) -> list[Tensor]:
    """Query, key and value that are no leaves, of one leaf [3, ...]: each lies in memory of its own."""
    return [x[i] * (i + 1) for i in range(3)]


def loss(tensors: list[Tensor], **options) -> Tensor:
    out = flex_attention(*tensors, block_mask=mask_of(), **options)
    return (out * torch.linspace(-1, 1, out.size(-1), dtype=out.dtype)).sum()


def expected_gradient(x: Tensor) -> Tensor:
    wide = x.detach().double().requires_grad_()
    out = dense(*make(wide), None, torch.ones(40, 40).tril().bool()).out
    (grad,) = torch.autograd.grad((out * torch.linspace(-1, 1, 8, dtype=torch.float64)).sum(), wide)
    return grad


def leaf() -> Tensor:
    return torch.randn(3, *SHAPE, requires_grad=True)


# --- in place -------------------------------------------------------------------------------------------------


def test_in_place_overwrites_in_the_last_backward_alone() -> None:
    x = leaf()
    tensors = make(x)
    before = [t.detach().clone() for t in tensors]
    for t in tensors:
        t.retain_grad()
    value = loss(tensors, inplace=True)
    assert all(t._version == 0 and torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    value.backward(retain_graph=True)
    assert all(t._version == 0 and torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    kept = [t.grad.clone() for t in tensors]
    x.grad = None
    for t in tensors:
        t.grad = None
    value.backward()
    for t, grad in zip(tensors, kept, strict=True):
        assert t._version == 1 and torch.equal(t, grad) and torch.equal(t.grad, grad)
    torch.testing.assert_close(x.grad.double(), expected_gradient(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups, keys", [(1, 1), (2, 1), (1, 300)])
def test_in_place_gives_the_same_bits(groups: int, keys: int, each_flex_device: str) -> None:
    """With shared key heads, and with key blocks that several threads share."""
    tensors = [torch.randn(2, 2, 70, 8), *(torch.randn(2, 2 // groups, max(keys, 40), 8) for _ in range(2))]
    found = []
    for inplace in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors]
        given = [t * 1 for t in leaves]
        out = flex_attention(*given, enable_gqa=True, inplace=inplace, deterministic=each_flex_device == "cuda")
        out.square().sum().backward()
        assert all(t._version == int(inplace) for t in given)
        found.append([t.grad for t in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_in_place_of_strided_tensors() -> None:
    """[B, M, H, D] in memory, and a part of a wider tensor."""
    leaves = [torch.randn(1, 40, 2, 16, requires_grad=True) for _ in range(3)]
    parts = [(t * 1)[..., 4:12].transpose(1, 2) for t in leaves]
    loss(parts, inplace=True).backward()
    assert all(t._version > 0 for t in parts)
    plain = [t.detach().requires_grad_() for t in leaves]
    loss([(t * 1)[..., 4:12].transpose(1, 2) for t in plain]).backward()
    for a, b in zip(leaves, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("upstream", [torch.exp, torch.tanh])
def test_an_upstream_op_that_saved_the_tensor_raises(upstream: Callable) -> None:
    x = leaf()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss([upstream(x[0]), *make(x)[1:]], inplace=True).backward()
    loss([upstream(x[0]), *make(x)[1:]]).backward()


def is_leaf(x: Tensor) -> Tensor:
    return x.requires_grad_()


def is_view_of_a_leaf(x: Tensor) -> Tensor:
    return x.requires_grad_()[:]


def is_no_grad_view(x: Tensor) -> Tensor:
    y = x.requires_grad_() * 1
    with torch.no_grad():
        return y.view(SHAPE)


def is_unbound(x: Tensor) -> Tensor:
    return (torch.stack([x, x]).requires_grad_() * 1).unbind(0)[0]


def is_expanded(x: Tensor) -> Tensor:
    return (x[:, :1].clone().requires_grad_() * 1).expand(SHAPE)


@pytest.mark.parametrize("kind", [is_leaf, is_view_of_a_leaf, is_no_grad_view, is_unbound, is_expanded])
@rows_of("position", [0, 1, 2])
def test_what_would_corrupt_is_refused(kind: Callable, position: int) -> None:
    tensors = make(leaf())
    tensors[position] = kind(torch.randn(SHAPE))
    with pytest.raises(RuntimeError):
        loss(tensors, inplace=True)
    loss(tensors).backward()


def test_an_overlap_with_another_argument_is_refused() -> None:
    q, k, v = make(leaf())
    with pytest.raises(RuntimeError, match="written-to tensor"):
        flex_attention(q, k, k, inplace=True)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        bias = q.detach().view(-1)
        flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], inplace=True)


def test_in_place_stays_out_of_place() -> None:
    """Hooks, a frozen input, autocast, no grad, storage in common that cannot be told apart."""
    x = leaf()

    def stays(tensors: list[Tensor]) -> None:
        before = [t.detach().clone() for t in tensors]
        value = loss(tensors, inplace=True)
        if value.requires_grad:
            value.backward()
        assert all(t._version == 0 and torch.equal(t, b) for t, b in zip(tensors, before, strict=True))

    with torch.autograd.graph.save_on_cpu():
        stays(make(x))
    q, k, v = make(x)
    stays([q, k.detach(), v])
    with torch.no_grad():
        stays([q, k, v])
    with torch.autocast(x.device.type, torch.bfloat16):
        stays(make(x))
    packed = torch.randn(1, 40, 3, 2, 8, requires_grad=True) * 1
    stays([packed[:, :, i].transpose(1, 2) for i in range(3)])
    x.grad = None
    checkpoint(lambda x: loss(make(x), inplace=True), x, use_reentrant=False).backward()
    torch.testing.assert_close(x.grad.double(), expected_gradient(x), rtol=1e-4, atol=1e-5)


# --- backward -------------------------------------------------------------------------------------------------


@pairs_of(
    {
        "inplace": [False, True],
        "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
        "threads": [1, 3],
    }
)
def test_three_backwards_are_bitwise_equal(
    dtype: torch.dtype, inplace: bool, threads: int, each_flex_device: str
) -> None:
    q, k, v = (torch.randn(1, 2, 200, 16).to(dtype).requires_grad_() for _ in range(3))
    bias = torch.randn(200).to(dtype).requires_grad_()
    inputs = (q, k, v, bias)
    upstream = torch.full((1, 2, 200, 16), 0.37, dtype=dtype)
    attention = functools.partial(
        flex_attention,
        score_mod=lambda s, b, h, i, j: s * bias[i] + bias[j],
        deterministic=each_flex_device == "cuda",
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = attention(q * 1, k * 1, v * 1, inplace=inplace)
        runs = [torch.autograd.grad(out, inputs, upstream, retain_graph=i < 2) for i in range(3)]
        again = attention(q * 1, k * 1, v * 1)
        runs.append(torch.autograd.grad(again, inputs, upstream))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, again)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, upstream)


def test_modified_inputs_are_noticed() -> None:
    q, k, v = make(leaf())
    bias = torch.randn(40, requires_grad=True) * 1
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j])
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic_mode() -> None:
    x = leaf()
    with deterministic_algorithms():
        runs = [torch.autograd.grad(loss(make(x)), x)[0] for _ in range(2)]
    runs.append(torch.autograd.grad(loss(make(x), deterministic=True), x)[0])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


# --- compilers, autocast, transforms --------------------------------------------------------------------------


@pairs_of({"backend": ["aot_eager", "inductor"], "dynamic": [False, True], "inplace": [False, True]})
def test_compile_without_a_graph_break(backend: str, dynamic: bool, inplace: bool, each_flex_device: str) -> None:
    if backend == "inductor" and (dynamic != inplace or (each_flex_device == "cuda" and not dynamic)):
        pytest.skip("aot_eager has all; inductor compiles for seconds, and one is enough on a GPU")
    torch._dynamo.reset()
    bias = torch.randn(64, requires_grad=True)
    score_mod = fusegrad.trace_score_mod(lambda s, b, h, q, kv: s + bias[kv] * bias[q])

    def call(x: Tensor, attention: Callable, **options) -> Tensor:
        q, k, v = (x * (i + 1) for i in range(3))
        out = attention(q, k, v, score_mod, mask, **options)
        return out.square().sum()

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (24, 40):
        mask = mask_of(length)
        x = torch.randn(2, 2, length, 8, requires_grad=True)
        ours = torch.autograd.grad(compiled(x, flex_attention, inplace=inplace), (x, bias))
        eager = torch.autograd.grad(call(x, flex_attention), (x, bias))
        torch.testing.assert_close(ours, eager)


def test_compile_with_functions() -> None:
    torch._dynamo.reset()
    bias = torch.randn(40, requires_grad=True)
    q, k, v = make(leaf())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * 1, k, v, lambda s, b, h, i, j: s * 2 + bias[j]) * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours, eager = (f(q, k, v) for f in (compiled, call))
    torch.testing.assert_close(ours, eager)
    grads = [torch.autograd.grad(x.square().sum(), (q, bias), retain_graph=True) for x in (ours, eager)]
    torch.testing.assert_close(*grads)


def test_programs_hold_one_line_texts() -> None:
    """TorchInductor writes a GPU program's arguments into comments, which a line's end would end."""
    torch._dynamo.reset()
    bias, texts = torch.randn(40, requires_grad=True), []

    def look(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        texts.extend(x for node in graph.graph.nodes for x in node.args if isinstance(x, str) and "score_mod" in x)
        return graph

    compiler = aot_autograd(fw_compiler=look, bw_compiler=look)
    traced = fusegrad.trace_score_mod(lambda s, b, h, i, j: s * bias[j])
    for score_mod in (lambda s, b, h, i, j: s + bias[j], traced):
        compiled = torch.compile(flex_attention, backend=compiler, fullgraph=True)
        compiled(*make(leaf()), score_mod).sum().backward()
    assert len(texts) == 4 and not any("\n" in text for text in texts), texts


def test_compiled_autograd() -> None:
    torch._dynamo.reset()
    x = leaf()
    bias = torch.randn(40, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss(make(x), score_mod=lambda s, b, h, i, j: s + bias[j] * 2.0).backward()
    found = x.grad, bias.grad
    expected = torch.autograd.grad(loss(make(x), score_mod=lambda s, b, h, i, j: s + bias[j] * 2.0), (x, bias))
    torch.testing.assert_close(found, expected)


def op_arguments(requires_grad: bool = True) -> tuple:
    q, k, v = (torch.randn(2, 2, 24, 8, requires_grad=requires_grad) for _ in range(3))
    bias = torch.randn(24, requires_grad=requires_grad)
    number = 0.5
    text = (
        "score_mod 1\nbuffer @0 f 1\nscalar $0 f\n%0 = load @0 kv_idx\n%1 = mul score $0\n%2 = add %1 %0\nreturn %2\n"
    )
    mask = mask_of(24)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    return q, k, v, text, [bias], [number], [], mask.mask_mod.text, [], [], [], lists, [16, 16]


def test_opcheck() -> None:
    arguments = op_arguments()
    # By default CUDA adds up in any order, and opcheck runs everything twice.
    torch.library.opcheck(OP.flex_attention.default, arguments, {"aux": 1, "deterministic": True})
    torch.library.opcheck(OP.flex_attention.default, arguments, {"scale": 0.3, "deterministic": True})
    plain = op_arguments(requires_grad=False)
    forward = (*plain, 0.3, 0.0, None, 3)
    torch.library.opcheck(OP.flex_attention_forward.default, forward)
    saved = OP.flex_attention_forward(*forward)
    upstream = [torch.randn_like(t) for t in saved[:3]]
    backward = (*plain[:3], *upstream, *saved, *plain[3:], 0.3, 0.0, None, True, [True, False, True, True])
    torch.library.opcheck(OP.flex_attention_backward.default, backward)
    into = [torch.empty_like(plain[4][0])]
    torch.library.opcheck(OP.flex_attention_backward_.default, (*backward[:-1], [True] * 4, into))


def test_autocast_casts_as_pytorch_does() -> None:
    q, k, v = make(leaf())
    with torch.autocast(q.device.type, torch.bfloat16):
        out = flex_attention(q, k, v)
        if q.device.type == "cpu":
            assert flex_attention(q.double(), k.double(), v.double()).dtype == torch.float64
        mixed = flex_attention(q, k.bfloat16(), v.half())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert torch.equal(mixed, flex_attention(q.bfloat16(), k.bfloat16(), v.half().bfloat16()))


# --- bad input ------------------------------------------------------------------------------------------------

X = torch.ones(SHAPE)
TEXT = "score_mod 1\nbuffer @0 f 1\n%0 = load @0 kv_idx\n%1 = add score %0\nreturn %1\n"
QKV = ("query", "key", "value")
BAD = [
    ({"query": X[0]}, ValueError, "query must have shape [B, H, M, D], but got [2, 40, 8]"),
    ({"value": X[0]}, ValueError, "value must have shape [B, Hkv, N, E], but got [2, 40, 8]"),
    ({"query": X.long()}, TypeError, "query must be float64, float32, bfloat16 or float16, but got Long"),
    ({"key": X.double()}, TypeError, "key must have the query's dtype Float, but got Double"),
    ({"key": X.to("meta")}, ValueError, "key must be on the query's device cpu, but got meta"),
    ({"query": X[..., :0], "key": X[..., :0]}, ValueError, "query must have a head size D of at least 1, but got"),
    ({"key": X[..., :4]}, ValueError, "key must have the query's head size 8, but got 4"),
    ({"value": X[:, :, :3]}, ValueError, "value must have the key's batch, heads and length [1, 2, 40]"),
    ({"query": X.expand(3, 2, 40, 8), "key": X.expand(2, 2, 40, 8), "value": X.expand(2, 2, 40, 8)}, ValueError,
     "key must have the query's batch size 3 or 1, but got 2"),
    ({"key": X[:, :1], "value": X[:, :1]}, ValueError, "key must have the query's heads 2 unless enable_gqa is set"),
    ({"query": X.expand(1, 2, 40, 8).repeat(1, 2, 1, 1)[:, :3], "enable_gqa": True}, ValueError,
     "query must have a multiple of the key's heads with enable_gqa, but got 3 and 2"),
    ({"scale": math.inf}, ValueError, "scale must be a finite number, but got inf"),
    ({"return_lse": True, "return_aux": AuxRequest()}, ValueError, "return_lse must not come together with return_aux"),
    ({"kernel_options": 3}, TypeError, "kernel_options must be a dict or None, but got 3"),
    ({"block_mask": create_block_mask(causal, None, None, 40, 30, device="cpu")}, ValueError,
     "block_mask must be made for 40 queries and 40 keys, but got one for 40 and 30"),
    ({"block_mask": create_block_mask(causal, 2, None, 40, 40, device="cpu"), **{n: X.repeat(3, 1, 1, 1) for n in QKV}},
     ValueError, "kv_blocks must have the query's batch size and heads [3, 2], more, or 1 in their place, but got"),
]  # fmt: skip


@pytest.mark.cpu_only
@rows_of("given, error, message", [*BAD])
def test_bad_input(given: dict, error: type[Exception], message: str) -> None:
    arguments = {"query": X, "key": X, "value": X, **given}
    with pytest.raises(error) as caught:
        flex_attention(**arguments)
    assert str(caught.value).startswith("flex_attention: ") and message in str(caught.value)


NUMBERS = """score_mod 1
scalar $0 bool
scalar $1 f
scalar $2 i64
%0 = where $0 $1 score
%1 = add %0 $2
return %1
"""

BAD_OP = [
    ({"score_mod": "nonsense"}, ValueError, "score_mod must be a text of the score_mod language, but got 1:1"),
    ({"score_mod": "mask_mod 1\nreturn true\n"}, ValueError, "score_mod must be a score_mod, but got a mask_mod"),
    ({"score_mod": TEXT}, ValueError, "score_mod must come with the 1 buffers that it declares, but got 0"),
    ({"score_mod": NUMBERS, "ints": [1, 1]}, ValueError,
     "score_mod's scalars must be 1 floats and 2 integers and bools, as the text says, but got 0 and 2"),
    ({"score_mod": NUMBERS, "floats": [1.0], "ints": [2, 1]}, ValueError,
     "score_mod's scalar $0 must be a bool, 0 or 1, as the text says, but got 2"),
    ({"score_mod": TEXT, "buffers": [X[0, 0]]}, ValueError, "score_mod's buffer @0 must have 1 dimensions, as"),
    ({"score_mod": TEXT, "buffers": [torch.ones(40).long()]}, TypeError, "score_mod's buffer @0 must hold f, as"),
    ({"score_mod": TEXT, "buffers": [torch.ones(40, device="meta")]}, ValueError, "must be on the query's device"),
    ({"ints": [1]}, ValueError, "score_mod must have a text where it captures something, but got an empty one"),
    ({"buffers": [X]}, ValueError, "score_mod must have a text where it captures something, but got an empty one"),
    ({"mask_mod": "mask_mod 1\nreturn true\n"}, ValueError, "mask_mod must come with a block mask, but got none"),
    ({"kv_blocks": [X]}, ValueError, "kv_blocks must be num_blocks and indices of the partial and perhaps of the"),
    ({"kv_blocks": [X, X], "block_size": [16, 16]}, TypeError, "kv_blocks must hold int32 or int64, but got Float"),
    ({"kv_blocks": [torch.ones(1, 1, 2).int(), torch.ones(1, 1, 2, 1).int()], "block_size": [16, 16]}, ValueError,
     "kv_blocks must list the blocks of 3 rows of blocks for 40 indices in blocks of 16, but got 2"),
    ({"kv_blocks": [torch.ones(1, 1, 3).int()] * 2, "block_size": [0, 16]}, ValueError,
     "block_size must be two positive numbers, but got [0, 16]"),
    ({"aux": 8}, ValueError, "aux must be 0 or 1 (max_scores), but got 8"),
]  # fmt: skip


@pytest.mark.cpu_only
@rows_of("given, error, message", [*BAD_OP])
def test_bad_input_of_the_op(given: dict, error: type[Exception], message: str) -> None:
    names = ["score_mod", "buffers", "floats", "ints", "mask_mod", "mask_buffers", "mask_floats", "mask_ints"]
    names += ["kv_blocks", "block_size"]
    lists = [given.get(name, "" if name.endswith("_mod") else []) for name in names]
    with pytest.raises(error) as caught:
        OP.flex_attention(X, X, X, *lists, aux=given.get("aux", 0))
    assert str(caught.value).startswith("flex_attention: ") and message in str(caught.value)


@pytest.mark.cpu_only
def test_low_parts_alone_are_int8() -> None:
    rest = ("", [], [], [], "", [], [], [], [], [], 1.0, 0.0, None)
    with pytest.raises(RuntimeError, match="no kernels for Char"):
        OP.flex_attention_forward(*[X.to(torch.int8)] * 3, *rest, _C.FLEX_LOW)
    x = X.to(torch.bfloat16)
    out, lse, max_scores, max_ties, low, lse_low = OP.flex_attention_forward(x, x, x, *rest, _C.FLEX_LOW)
    assert low.dtype == torch.int8
    for wrong in (low.to(torch.bfloat16), low.to(torch.uint8)):
        saved = (out, lse, max_scores, max_ties, wrong, lse_low)
        with pytest.raises(TypeError, match="out_low must be int8, but got"):
            OP.flex_attention_backward(x, x, x, x, None, None, *saved, *rest, False, [True] * 3)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only
def test_memory_is_linear_in_the_lengths() -> None:
    """8192 x 8192 scores of one float32 head are 256 MiB; what a forward and backward add to the peak is far less."""
    program = """
        import resource, torch
        from fusegrad import flex_attention

        torch.set_num_threads(2)

        def run(length):
            q, k, v, bias = (torch.ones(1, 1, length, 8, requires_grad=True) for _ in range(4))
            flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[b, h, j, 0]).sum().backward()

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        run(256)
        before = peak()
        run(8192)
        print(peak() - before)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 64
