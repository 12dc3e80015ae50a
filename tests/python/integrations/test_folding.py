"""fusegrad.integrations.folding: modules of the real packages beside themselves, outputs and all gradients.

The packages are installed by `pip install --no-deps`; a test whose package is not there is skipped.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from folding_packages import module_of
from fusegrad.integrations import folding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

N = 7
BOLTZ, OPENFOLD3, PROTENIX, AF3 = "boltz", "openfold3", "protenix", "alphafold3_pytorch"
AF3_MODULES = ("alphafold3_pytorch.attention", "alphafold3_pytorch.alphafold3")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # Protenix would compile its own for CUDA
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.manual_seed(0)
    yield
    for name in list(folding._applied):
        folding.remove(name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each call of our attention."""
    found: list[int] = []
    original = fusegrad.folding._attend

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(fusegrad.folding, "_attend", counted)
    return found


def randomized(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Final layers begin as zeros, which hide all gradients."""
    module = module.to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.4 + (1 if p.dim() == 1 else 0))
    return module


def run(call: Callable[..., Any], inputs: Sequence[Tensor], module: nn.Module | None) -> list[Tensor]:
    leaves = [*inputs, *(() if module is None else module.parameters())]
    for t in leaves:
        t.grad = None
    out = call(*inputs)
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
    total = sum((t.double() * torch.linspace(-1, 1, t.numel(), dtype=torch.float64).view(t.shape)).sum() for t in outs)
    assert isinstance(total, Tensor)
    total.backward()
    # A copy: the next backward may write to the gradients.
    grads = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in leaves]
    return [t.detach().clone() for t in outs] + grads


def compare(
    package: str,
    call: Callable[..., Any],
    inputs: Sequence[Tensor],
    module: nn.Module | None = None,
    calls: list[int] | None = None,
    tolerance: float = 1e-6,
    plain: Callable[..., Any] | None = None,
) -> None:
    """`tolerance` is relative to each tensor's norm, and to the largest gradient's: of some, such as that of a bias of
    keys, the truth is 0."""
    theirs = run(plain or call, inputs, module)
    folding.apply(package)
    if calls is not None:
        calls.clear()
    ours = run(call, inputs, module)
    assert calls is None or calls, "none of our attention was called"
    folding.remove(package)
    largest = max(t.double().square().mean().sqrt().item() for t in theirs)
    for i, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.dtype == right.dtype and mine.shape == right.shape
        error = (mine.double() - right.double()).square().mean().sqrt().item()
        scale = right.double().square().mean().sqrt().item()
        assert error <= tolerance * (scale + 0.01 * largest), f"{i} {list(right.shape)}: {error:.3g} of {scale:.3g}"


def leaf(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes, dtype=dtype).requires_grad_()


def padded(*leading: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A mask of pairs whose last residues are padding: their rows are wholly masked."""
    there = torch.ones(*leading, N, dtype=dtype)
    there[..., N - 2 :] = 0
    return there[..., :, None] * there[..., None, :]


# --- Boltz ---


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("node", ["TriangleAttentionStartingNode", "TriangleAttentionEndingNode"])
def test_boltz_triangle_attention(node: str, chunk_size: int | None, calls: list[int]) -> None:
    made = getattr(module_of("boltz.model.layers.triangular_attention.attention"), node)(12, 4, 3)
    module = randomized(made)
    mask = padded(2)
    compare(BOLTZ, lambda x: module(x, mask, chunk_size=chunk_size), [leaf(2, N, N, 12)], module, calls)


def test_boltz_with_kernels(calls: list[int]) -> None:
    """Its call of cuEquivariance, which then need not be there. Wholly masked rows have no gradient to scores."""
    module = randomized(module_of("boltz.model.layers.triangular_attention.attention").TriangleAttention(12, 4, 3))
    mask = torch.ones(2, N, N, dtype=torch.float64)
    mask[..., N - 2 :] = 0

    def call(x: Tensor) -> Any:
        return module(x, mask, use_kernels=True)

    compare(BOLTZ, call, [leaf(2, N, N, 12)], module, calls, plain=lambda x: module(x, mask))


@pytest.mark.parametrize("multiplicity", [1, 3])
@pytest.mark.parametrize("version", ["attention", "attentionv2"])
def test_boltz_pair_bias(version: str, multiplicity: int, calls: list[int]) -> None:
    module = randomized(module_of(f"boltz.model.layers.{version}").AttentionPairBias(12, 5, 3))
    s, z = leaf(2 * multiplicity, N, 12), leaf(2, N, N, 5)
    mask = torch.ones(2 * multiplicity, N, dtype=torch.float64)
    mask[1, 3:], mask[0] = 0, 0
    more = (lambda s: {}) if version == "attention" else (lambda s: {"k_in": s})

    def call(s: Tensor, z: Tensor) -> Tensor:
        return module(s, z, mask=mask, multiplicity=multiplicity, **more(s))

    # It computes scores in float32, where a row that is masked as a whole has steps of 1/16.
    compare(BOLTZ, call, [s, z], module, calls, tolerance=1e-3)


def test_boltz_caches_and_windows(calls: list[int]) -> None:
    module = randomized(module_of("boltz.model.layers.attention").AttentionPairBias(12, 5, 3))
    s, z = leaf(4, N, 12), leaf(4, N, 2 * N, 5)

    def call(s: Tensor, z: Tensor) -> Tensor:
        cache: dict[str, Tensor] = {}

        def to_keys(t: Tensor) -> Tensor:
            return torch.cat((t, t.roll(1, 0)), 1)

        mask = torch.ones(4, N, dtype=torch.float64)
        first = module(s, z, mask, to_keys=to_keys, model_cache=cache)
        assert set(cache) == {"z"}
        return first + module(s, z * 0, mask, to_keys=to_keys, model_cache=cache)

    compare(BOLTZ, call, [s, z], module, calls, tolerance=1e-4)


@pytest.mark.parametrize("v2", [True])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compile"])
def test_boltz_layer(v2: bool, how: str, calls: list[int]) -> None:
    torch._dynamo.reset()
    layer = module_of("boltz.model.layers.pairformer").PairformerLayer(12, 8, 3, 0.0, 4, 2, v2=v2)
    layer = randomized(layer, torch.float32).eval()
    pair_mask = padded(2, dtype=torch.float32)
    mask = pair_mask.diagonal(dim1=1, dim2=2)

    def call(s: Tensor, z: Tensor) -> Any:
        if how == "checkpoint":
            return checkpoint(layer, s, z, mask, pair_mask, use_reentrant=False)
        if how == "compile":
            return torch.compile(layer, backend="aot_eager")(s, z, mask, pair_mask)
        return layer(s, z, mask, pair_mask)

    inputs = [leaf(2, N, 12, dtype=torch.float32), leaf(2, N, N, 8, dtype=torch.float32)]
    compare(BOLTZ, call, inputs, layer, None if how == "compile" else calls, tolerance=2e-3)


# --- each package ---

TRIANGLES = {
    BOLTZ: "boltz.model.layers.triangular_attention.attention",
    OPENFOLD3: "openfold3.core.model.layers.triangular_attention",
    PROTENIX: "protenix.model.triangular.triangular",
}
RESIDUES = 18  # of up to 16 Protenix takes its plain function, whatever it was asked for


def triangle_of(package: str) -> tuple[nn.Module, Tensor]:
    """Its triangle attention, and a mask of pairs whose last residues are padding."""
    made = module_of(TRIANGLES[package]).TriangleAttention(16, 8, 2)
    there = (torch.arange(RESIDUES) < RESIDUES - 3).double()
    return randomized(made), (there[:, None] * there)[None]


@pytest.mark.parametrize("package", TRIANGLES)
def test_compiled_triangle_attention(package: str, calls: list[int]) -> None:
    module, mask = triangle_of(package)

    def call(x: Tensor) -> Tensor:
        torch.compiler.reset()
        return torch.compile(module, backend="aot_eager")(x, mask)

    compare(package, call, [leaf(1, RESIDUES, RESIDUES, 16)], module, calls, plain=lambda x: module(x, mask))


@pytest.mark.parametrize("package", TRIANGLES)
def test_autocast(package: str, calls: list[int]) -> None:
    """In bfloat16 the package's scores are rounded, ours are not: ours must be nearer to float64."""
    module, mask = triangle_of(package)
    x = leaf(1, RESIDUES, RESIDUES, 16)
    truth = run(lambda x: module(x, mask), [x], module)
    module.float()
    low = x.detach().float().requires_grad_()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, mask.float())

    theirs = run(call, [low], module)
    folding.apply(package)
    ours = run(call, [low], module)
    assert calls
    for mine, other, right in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == other.dtype

        def error(t: Tensor, right: Tensor = right) -> float:
            return (t.double() - right).square().mean().sqrt().item()

        assert error(mine) <= 1.5 * error(other) + 1e-3 * right.square().mean().sqrt().item()


# --- OpenFold 3 ---


@pytest.mark.parametrize("options", [{}, {"use_lma": True}, {"chunk_size": 2}, {"transpose_bias": True}], ids=str)
@rows_of("leading", [(), (2,), (2, 3)])
def test_openfold3_triangle_attention(leading: tuple[int, ...], options: dict[str, Any], calls: list[int]) -> None:
    made = module_of("openfold3.core.model.layers.triangular_attention").TriangleAttention(12, 4, 3, inf=1e9)
    module, mask = randomized(made), padded(*leading)
    if "chunk_size" in options and not leading:
        pytest.skip("its chunks are of a batch's rows")
    compare(OPENFOLD3, lambda x: module(x, mask, **options), [leaf(*leading, N, N, 12)], module, calls)


def test_openfold3_pair_bias(calls: list[int]) -> None:
    made = module_of("openfold3.core.model.layers.attention_pair_bias").AttentionPairBias(12, 12, 12, 12, 5, 4, 3)
    module, mask = randomized(made), torch.ones(2, N, dtype=torch.float64)
    mask[0, 4:], mask[1] = 0, 0
    for high in (False, True):
        compare(
            OPENFOLD3,
            lambda a, z, high=high: module(a, z, mask, use_high_precision_attention=high),
            [leaf(2, N, 12), leaf(2, N, N, 5)],
            module,
            calls,
        )


def test_openfold3_diffusion_shares_pairs_between_samples(calls: list[int]) -> None:
    layers = module_of("openfold3.core.model.layers.attention_pair_bias")
    module = randomized(layers.DiffusionAttentionPairBias(12, 12, 12, 6, 5, 4, 3))
    mask = torch.ones(2, 1, N, dtype=torch.float64)
    mask[0, 0, 4:] = 0
    inputs = [leaf(2, 3, N, 12), leaf(2, 1, N, N, 5), leaf(2, 3, N, 6)]
    compare(OPENFOLD3, lambda a, z, s: module(a, z, s, mask), inputs, module, calls)


@pytest.mark.parametrize("name", ["_cueq_triangle_attn", "_deepspeed_evo_attn", "_triton_evo_attn", "_lma"])
@rows_of("leading", [(5,), (2, 5), (2, 3, 5)])
def test_openfold3_kernels(name: str, leading: tuple[int, ...], calls: list[int]) -> None:
    """What stands for kernels that are not there, beside the plain function."""
    attention = module_of("openfold3.core.model.primitives.attention")
    mask, pair = torch.zeros(*leading, 1, 1, N, dtype=torch.float64), leaf(*leading[:-1], 1, 3, N, N)
    mask[..., -2:] = -1e9
    inputs = [*(leaf(*leading, 3, N, 4) for _ in range(3)), pair]
    scaled = name == "_lma"

    def plain(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
        out = attention._attention(q if scaled else 0.5 * q, k, v, [mask, pair])
        return out if name == "_lma" else out.transpose(-2, -3)

    more: dict[str, Any] = {"_cueq_triangle_attn": {"scale": 0.5}, "_lma": {"q_chunk_size": 2, "kv_chunk_size": 3}}

    def ours(q: Tensor, k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
        return getattr(attention, name)(q, k, v, [mask, pair], **more.get(name, {}))

    compare(OPENFOLD3, ours, inputs, None, calls, plain=plain)


def test_openfold3_block(calls: list[int]) -> None:
    made = module_of("openfold3.core.model.latent.pairformer").PairFormerBlock(
        12, 8, 4, 3, 8, 4, 2, "swiglu", 2, 0.0, False, 1e9
    )
    module, pair_mask = randomized(made).eval(), padded(2)
    single = pair_mask.diagonal(dim1=1, dim2=2)

    def call(s: Tensor, z: Tensor) -> Any:
        return checkpoint(lambda s, z: module(s, z, single, pair_mask), s, z, use_reentrant=False)

    compare(OPENFOLD3, call, [leaf(2, N, 12), leaf(2, N, N, 8)], module, calls, tolerance=1e-5)


# --- Protenix ---


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@rows_of("kind", ["torch", "triattention", "deepspeed", "cuequivariance"])
def test_protenix_triangle_attention(kind: str, batch: tuple[int, ...], calls: list[int]) -> None:
    """For up to 16 residues it takes its plain function, whatever it was asked for."""
    length = 18
    module = randomized(module_of("protenix.model.triangular.triangular").TriangleAttention(12, 4, 3))
    if kind == "cuequivariance" and batch:
        pytest.skip("it takes the first of a batch")
    mask = torch.ones(*batch, length, length, dtype=torch.float64)
    mask[..., 15:] = 0
    compare(
        PROTENIX,
        lambda x: module(x, mask, triangle_attention=kind),
        [leaf(*batch, length, length, 12)],
        module,
        calls,
        plain=lambda x: module(x, mask),
    )


@pytest.mark.parametrize("efficient", [True, False])
def test_protenix_tokens_and_atoms(efficient: bool, calls: list[int]) -> None:
    transformer = module_of("protenix.model.modules.transformer")
    for options in ({}, {"n_queries": 4, "n_keys": 8}):
        module = randomized(transformer.AttentionPairBias(True, False, 3, 12, 6, 5), torch.float32)
        module.attention.use_efficient_implementation = efficient
        of_z = (3, 4, 8, 5) if options else (9, 9, 5)
        inputs = [leaf(*sizes, dtype=torch.float32) for sizes in ((2, 9, 12), (2, 9, 6), (1, *of_z))]
        compare(PROTENIX, lambda a, s, z, o=options: module(a, s, z, **o), inputs, module, calls, tolerance=1e-4)


# --- alphafold3-pytorch ---


SOME = torch.arange(N) < torch.tensor([[4], [6]])
# For its float64 scores the lowest number is -inf, so that wholly masked rows are NaN.
NONE = torch.arange(N) < torch.tensor([[4], [0]])


def af3() -> Any:
    return [module_of(name, AF3) for name in AF3_MODULES]


@pytest.mark.parametrize("node", ["starting", "ending"])
def test_alphafold3_triangle_attention(node: str, calls: list[int]) -> None:
    module = randomized(af3()[1].TriangleAttention(dim=12, heads=3, dim_head=4, node_type=node))
    for values in (False, True):
        compare(AF3, lambda x, v=values: module(x, mask=SOME, return_values=v), [leaf(2, N, N, 12)], module, calls)
    compare(AF3, lambda x: module(x), [leaf(2, N, N, 12)], module, calls)
    randomized(module, torch.float32)
    compare(AF3, lambda x: module(x, mask=NONE), [leaf(2, N, N, 12, dtype=torch.float32)], module, calls, 1e-4)


CLAMPED = {"enable_attn_softclamp": True, "attn_softclamp_value": 2.0}


@pytest.mark.parametrize("window_size", [None, 3])
@rows_of("options", [{}, {"num_memory_kv": 2}, CLAMPED])
def test_alphafold3_attention(window_size: int | None, options: dict[str, Any], calls: list[int]) -> None:
    attention, _ = af3()
    module = randomized(attention.Attention(dim=12, heads=3, dim_head=4, window_size=window_size, **options))
    compare(AF3, lambda x: module(x), [leaf(2, N, 12)], module, calls)
    compare(AF3, lambda x: module(x, mask=SOME), [leaf(2, N, 12)], module, calls)
    compare(AF3, lambda x, b: module(x, mask=SOME, attn_bias=b), [leaf(2, N, 12), leaf(2, 3, N, N)], module, calls)
    if window_size is not None:
        windows = torch.rand(2, 3, 3, 6) > 0.3
        windows[..., 3:] |= torch.eye(3, dtype=torch.bool)
        compare(
            AF3,
            lambda x, b: module(x, attn_bias=b, windowed_mask=windows),
            [leaf(2, N, 12), leaf(2, 3, 3, 3, 6)],
            module,
            calls,
        )
    randomized(module, torch.float32)
    compare(AF3, lambda x: module(x, mask=NONE), [leaf(2, N, 12, dtype=torch.float32)], module, calls, 1e-4)


def test_alphafold3_pair_bias(calls: list[int]) -> None:
    module = randomized(af3()[1].AttentionPairBias(heads=3, dim_pairwise=5, dim=12, dim_head=4))
    compare(AF3, lambda s, z: module(s, pairwise_repr=z), [leaf(2, N, 12), leaf(2, N, N, 5)], module, calls)


def test_alphafold3_dropout_is_of_training() -> None:
    module = randomized(af3()[0].Attention(dim=12, heads=3, dim_head=4, dropout=0.5))
    x = leaf(2, N, 12)
    right = module.eval()(x)
    folding.apply(AF3)
    torch.testing.assert_close(module(x), right)
    torch.manual_seed(0)
    first = module.train()(x)
    torch.manual_seed(0)
    assert torch.equal(first, module(x)) and not torch.allclose(first, right)


# --- apply and remove ---


def functions() -> dict[str, Any]:
    primitives = module_of("boltz.model.layers.triangular_attention.primitives")
    attention = module_of("boltz.model.layers.attention")
    return {"_attention": primitives._attention, "forward": attention.AttentionPairBias.forward}


def test_remove_undoes_apply() -> None:
    before = functions()
    assert folding.apply(BOLTZ) == BOLTZ
    changed = functions()
    assert all(changed[name] is not before[name] for name in before)
    folding.apply(BOLTZ)
    assert functions() == changed
    folding.remove(sys.modules[BOLTZ])
    assert functions() == before
    folding.remove(BOLTZ)


def test_names_that_other_modules_have() -> None:
    primitives = module_of("boltz.model.layers.triangular_attention.primitives")
    other = types.ModuleType("boltz.other")
    other.plain = primitives._attention  # type: ignore[attr-defined]
    sys.modules["boltz.other"] = other
    try:
        original = primitives._attention
        folding.apply(BOLTZ)
        assert other.plain is primitives._attention is not original  # type: ignore[attr-defined]
        folding.remove(BOLTZ)
        assert other.plain is original  # type: ignore[attr-defined]
    finally:
        del sys.modules["boltz.other"]


def test_a_model_stands_for_its_package() -> None:
    layer = module_of("boltz.model.layers.pairformer").PairformerLayer(12, 8, 3, 0.0, 4, 2)
    before = functions()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    assert folding.apply(model) is model
    assert functions() != before and set(folding._applied) == {BOLTZ}
    folding.remove(model)
    assert functions() == before


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"a package must be one of boltz, openfold3, .*, but got torch"):
        folding.apply(torch)
    with pytest.raises(ValueError, match=r"a model must have modules of boltz, .*, but got a Linear"):
        folding.apply(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="TorchScript, as Chai-1 comes"):
        folding.apply(torch.jit.trace(nn.Linear(2, 2), torch.randn(2)))
    with pytest.raises(TypeError, match="apply: target must be"):
        folding.apply(3)  # type: ignore[type-var]
    primitives = module_of("boltz.model.layers.triangular_attention.primitives")
    original = primitives._attention
    monkeypatch.setattr(primitives, "_attention", lambda query, key, value, biases, more: None)
    with pytest.raises(RuntimeError, match="the parameters query, key, value, biases, but got a version with query"):
        folding.apply(BOLTZ)
    monkeypatch.setattr(primitives, "_attention", original)
    monkeypatch.delattr(primitives, "kernel_triangular_attn")
    with pytest.raises(RuntimeError, match=r"must have .*kernel_triangular_attn, but got a version without it"):
        folding.apply(BOLTZ)
    assert BOLTZ not in folding._applied and primitives._attention is original
