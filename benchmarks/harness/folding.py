"""Triangle attention, attention with a pair bias, and a block of Boltz's trunk, by fusegrad and by all peers that can
compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Triangle = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NAMES = ("out", "q", "k", "v", "bias")


@dataclass
class Problem:
    """q, k and v ``[1, R, H, N, D]``, the bias ``[1, 1, H, N, N]``, the mask ``[1, R, 1, 1, N]`` of residues that are
    padding in the last eighth, the upstream gradient. R rows: N residues of a triangle, or the sequences of an MSA."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor
    upstream: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.bias


def problem(N: int, H: int, D: int, dtype: torch.dtype, sequences: int | None = None) -> Problem:
    """Triangle attention, or of `sequences` rows that are all there."""
    torch.manual_seed(0)
    rows = N if sequences is None else sequences
    q, k, v, upstream = (torch.randn(1, rows, H, N, D).to(dtype) for _ in range(4))
    bias = torch.randn(1, 1, H, N, N).to(dtype)
    there = torch.arange(N) < N - N // 8
    rows_there = there if sequences is None else torch.ones(rows, dtype=torch.bool)
    mask = (rows_there[:, None] & there)[None, :, None, None].contiguous()
    # Nothing of padded rows reaches a loss.
    upstream = upstream * rows_there.view(1, rows, 1, 1, 1) * there.view(1, 1, 1, N, 1)
    return Problem(*(t.requires_grad_() for t in (q, k, v, bias)), mask, upstream)


def truth(given: Problem, rows: int = 16) -> list[Tensor]:
    """The output and all gradients in float64, a few rows at a time."""
    bias = given.bias.detach().double().requires_grad_()
    parts: list[list[Tensor]] = []
    for first in range(0, given.q.shape[1], rows):
        part = slice(first, first + rows)
        q, k, v = (t.detach()[:, part].double().requires_grad_() for t in (given.q, given.k, given.v))
        score = q @ k.mT * q.shape[-1] ** -0.5 + bias
        out = torch.where(given.mask[:, part], score, -1e9).softmax(-1) @ v
        out.backward(given.upstream[:, part].double())
        parts.append([out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)])
    assert bias.grad is not None
    return [*(torch.cat(of, 1) for of in zip(*parts, strict=True)), bias.grad]


def errors(attention: Triangle, given: Problem, right: Sequence[Tensor]) -> dict[str, float]:
    """Relative to each one's norm, without the output's padded rows, where peers give what they like."""
    out = attention(*given.leaves)
    found = [out.detach(), *torch.autograd.grad(out, given.leaves, given.upstream)]
    kept = given.upstream != 0
    found[0], right = found[0] * kept, [right[0] * kept, *right[1:]]
    return {
        name: float((mine.double() - theirs).norm() / theirs.norm())
        for name, mine, theirs in zip(NAMES, found, right, strict=True)
    }


def ours(given: Problem, deterministic: bool | None = None) -> Triangle:
    import fusegrad

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return fusegrad.triangle_attention(q, k, v, bias, given.mask, deterministic=deterministic)

    return attention


def cuequivariance(given: Problem) -> Triangle:
    from cuequivariance_torch import triangle_attention

    return lambda q, k, v, bias: triangle_attention(q, k, v, bias, mask=given.mask)


def trifast(given: Problem) -> Triangle:
    from trifast import triangle_attention

    mask = ~given.mask[:, :, 0, 0]  # it fills where the mask is True

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return triangle_attention(*(t.transpose(1, 2) for t in (q, k, v)), bias[:, 0], mask).transpose(1, 2)

    return attention


def sdpa(given: Problem) -> Triangle:
    # Below -1e9 the weights of masked keys are 0 in 16 bits too.
    lowered = torch.zeros_like(given.mask, dtype=given.q.dtype).masked_fill(~given.mask, -1e9)
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        N = q.shape[1]
        with sdpa_kernel(backends if q.is_cuda else backends[1:]):
            out = F.scaled_dot_product_attention(q[0], k[0], v[0], (bias + lowered).expand(1, N, -1, -1, -1)[0])
        return out[None]

    return attention


def flex(given: Problem) -> Triangle:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    compiled, mask = torch.compile(flex_attention, dynamic=False), given.mask[0, :, 0, 0]

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        pairs = bias[0, 0]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(mask[b, j], score + pairs[h, i, j], -1e9)

        return compiled(q[0], k[0], v[0], score_mod=score_mod)[None]

    return attention


def formula(given: Problem) -> Triangle:
    if given.q.shape[1] ** 3 * given.q.shape[2] > 2**30:
        raise NotImplementedError("scores of more than 2^30 pairs")

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        score = q @ k.mT * q.shape[-1] ** -0.5 + bias
        return torch.where(given.mask, score, -1e9).softmax(-1) @ v

    return attention


PEERS: dict[str, dict[str, Callable[[Problem], Triangle]]] = {
    "cuda": {"cuequivariance": cuequivariance, "trifast": trifast, "sdpa": sdpa, "flex": flex, "math": formula},
    "cpu": {"sdpa": sdpa, "math": formula},
}


# --- attention with a pair bias: its norms, projections and gate too ---

PairBias = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass
class PairBiasProblem:
    """M samples ``[M, N, H * D]`` that share a pair representation ``[1, N, N, c]``, of tokens that are padding in the
    last eighth, and all weights."""

    given: dict[str, Tensor]
    heads: int
    mask: Tensor
    upstream: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.given.values())

    def out(self, attention: PairBias) -> Tensor:
        """As all functions of this signature: cuEquivariance's."""
        single, pair, *_ = self.leaves
        weights = {name: t for name, t in self.given.items() if name not in ("single", "pair")}
        return attention(single, pair, self.mask, self.heads, **weights)[0]

    def double(self) -> PairBiasProblem:
        given = {name: t.detach().double().requires_grad_() for name, t in self.given.items()}
        return PairBiasProblem(given, self.heads, self.mask.double(), self.upstream.double())


def pair_bias_problem(M: int, N: int, H: int, D: int, c: int, dtype: torch.dtype) -> PairBiasProblem:
    torch.manual_seed(0)
    width = H * D
    given = {"single": torch.randn(M, N, width), "pair": torch.randn(1, N, N, c)}
    for name, size in (("a", width), ("z", c)):
        given |= {f"w_ln_{name}": torch.rand(size) + 0.5, f"b_ln_{name}": 0.1 * torch.randn(size)}
    given |= {f"w_proj_{name}": torch.randn(width, width) / width**0.5 for name in "qkvgo"}
    given |= {"b_proj_q": 0.1 * torch.randn(width), "w_proj_z": torch.randn(H, c) / c**0.5}
    mask = (torch.arange(N) < N - N // 8).to(dtype)[None]
    upstream = torch.randn(M, N, width).to(dtype) * mask[..., None]
    return PairBiasProblem({name: t.to(dtype).requires_grad_() for name, t in given.items()}, H, mask, upstream)


def pair_bias_formula(
    single: Tensor, pair: Tensor, mask: Tensor, heads: int, w_ln_a: Tensor, b_ln_a: Tensor, w_ln_z: Tensor,
    b_ln_z: Tensor, w_proj_q: Tensor, w_proj_k: Tensor, w_proj_v: Tensor, w_proj_g: Tensor, w_proj_o: Tensor,
    b_proj_q: Tensor, w_proj_z: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    """AlphaFold 3's Algorithm 24 without its adaptive norm, as models write it."""
    a = F.layer_norm(single, single.shape[-1:], w_ln_a, b_ln_a)
    bias = F.linear(F.layer_norm(pair, pair.shape[-1:], w_ln_z, b_ln_z), w_proj_z).permute(0, 3, 1, 2)
    parts = ((w_proj_q, b_proj_q), (w_proj_k, None), (w_proj_v, None))
    q, k, v = (F.linear(a, *part).unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    score = q @ k.mT * q.shape[-1] ** -0.5 + bias + ((mask - 1) * 1e6)[:, None, None]
    out = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return F.linear(F.linear(a, w_proj_g).sigmoid() * out, w_proj_o), None


def pair_bias_functions(peers: Sequence[str]) -> dict[str, Callable[[], PairBias]]:
    def fusegrad() -> PairBias:
        from fusegrad import attention_pair_bias

        return attention_pair_bias

    def cuequivariance() -> PairBias:
        from cuequivariance_torch import attention_pair_bias

        return attention_pair_bias

    ways: dict[str, Callable[[], PairBias]] = {"fusegrad": fusegrad}
    if "cuequivariance" in peers:
        ways["cuequivariance"] = cuequivariance
    if "math" in peers:
        ways["math"] = lambda: pair_bias_formula
    return ways


# --- a block of Boltz's trunk, its own code ---


@dataclass
class Trunk:
    """One pairformer layer, without dropout; bfloat16 by autocast where `low`."""

    layer: torch.nn.Module
    s: Tensor
    z: Tensor
    mask: Tensor
    pair_mask: Tensor
    low: bool

    def step(self, **how: Any) -> None:
        self.layer.zero_grad(set_to_none=True)
        with torch.autocast(self.z.device.type, torch.bfloat16, enabled=self.low):
            s, z = self.layer(self.s, self.z, self.mask, self.pair_mask, **how)
        (s.float().square().mean() + z.float().square().mean()).backward()

    def gradient(self, **how: Any) -> Tensor:
        """By the weight that makes the bias of the first triangle attention."""
        self.step(**how)
        return self.layer.tri_att_start.linear.weight.grad.double().clone()


def trunk(N: int, single: int, pair: int, heads: int, low: bool) -> Trunk:
    from boltz.model.layers.pairformer import PairformerLayer

    torch.manual_seed(0)
    layer = PairformerLayer(single, pair, heads, 0.0, pair // 4, 4, v2=True)
    with torch.no_grad():
        for p in layer.parameters():  # its last layers begin as zeros, which hide all other gradients
            if not p.any():
                p.normal_(std=0.02)
    layer = layer.to(torch.get_default_device())
    mask = (torch.arange(N) < N - N // 8).float()[None]
    pair_mask = mask[:, :, None] * mask[:, None]
    s, z = torch.randn(1, N, single, requires_grad=True), torch.randn(1, N, N, pair, requires_grad=True)
    return Trunk(layer, s, z, mask, pair_mask, low)
