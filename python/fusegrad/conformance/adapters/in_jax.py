"""Implementations in JAX: tensors and gradients are handed over by DLPack, and jax.vjp stands in torch's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusegrad

from .. import formulas
from ..adapter import Adapter, NotOffered


def _array(tensor: Tensor) -> Any:
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):  # else float64 becomes float32
        return jnp.array(jnp.from_dlpack(tensor.detach().contiguous()), copy=True)


def _tensor(array: Any) -> Tensor:
    return torch.from_dlpack(array).clone()


class _Call(torch.autograd.Function):
    """A function of arrays, which returns an array or a pair of them."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        import jax

        arrays = [_array(t) for t in tensors]
        places = [i for i, t in enumerate(tensors) if t.requires_grad]

        def of_floats(*floats: Any) -> Any:
            given = list(arrays)
            for place, x in zip(places, floats, strict=True):
                given[place] = x
            return function(*given)

        with jax.enable_x64(True):
            out, ctx.vjp = jax.vjp(of_floats, *(arrays[i] for i in places))
        ctx.places, ctx.count, ctx.pair = places, len(tensors), isinstance(out, tuple)
        return tuple(map(_tensor, out)) if ctx.pair else _tensor(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        import jax

        given = tuple(map(_array, upstream))
        with jax.enable_x64(True):
            found = ctx.vjp(given if ctx.pair else given[0])
        grads: list[Tensor | None] = [None] * ctx.count
        for place, g in zip(ctx.places, found, strict=True):
            grads[place] = _tensor(g)
        return None, *grads


class _InJAX(Adapter):
    packages: tuple[str, ...] = ("jax", "jaxlib")

    def load(self) -> None:
        import jax  # noqa: F401


class FusegradJAX(_InJAX):
    """fusegrad.jax. A score_mod or mask_mod of tensors is traced as PyTorch's; its text and arrays are JAX's."""

    settings = "fusegrad.jax, all defaults"

    def load(self) -> None:
        import fusegrad.jax  # noqa: F401

    def cross_entropy(
        self, input: Tensor, target: Tensor, *, class_weight: Tensor | None = None, **options: Any
    ) -> Any:
        import fusegrad.jax as fj

        if "aux" in options:
            raise NotOffered("cross_entropy with aux")
        tensors = [input, target, *([] if class_weight is None else [class_weight])]
        return _Call.apply(lambda x, t, *w: fj.cross_entropy(x, t, *w, **options), *tensors)

    def linear_cross_entropy(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        **options: Any,
    ) -> Any:
        import fusegrad.jax as fj

        if "aux" in options:
            raise NotOffered("linear_cross_entropy with aux")
        named = {"linear_bias": bias, "weight": class_weight}
        there = {name: t for name, t in named.items() if t is not None}

        def function(x: Any, w: Any, t: Any, *more: Any) -> Any:
            return fj.linear_cross_entropy(x, w, t, **dict(zip(there, more, strict=True)), **options)

        return _Call.apply(function, input, weight, target, *there.values())

    def jsd(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        reduction: str = "mean",
        labels: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.5,
        temperature: float = 1.0,
        log_probs: bool = False,
        hard_weight: float = 0.0,
    ) -> Any:
        import fusegrad.jax as fj

        options: dict[str, Any] = {
            "beta": beta,
            "temperature": temperature,
            "log_probs": log_probs,
            "hard_weight": hard_weight,
        }
        average = "batchmean" if reduction == "mean" else reduction

        def function(s: Any, t: Any, *labels: Any) -> Any:
            told = {"labels": labels[0], "ignore_index": ignore_index} if labels else {}
            return fj.jsd(s, t, reduction=average, **told, **options)

        return _Call.apply(function, student, teacher, *([] if labels is None else [labels]))

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        score_mod: Any = None,
        mask_mod: Any = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        import fusegrad.jax as fj
        from fusegrad.jax._score_mod import Mod

        if "dropout_p" in options:
            raise NotOffered("flex_attention with dropout_p: JAX's keys are no seeds of torch")
        traced = None if score_mod is None else fusegrad.trace_score_mod(score_mod, device=query.device)
        captured: Sequence[Tensor] = () if traced is None else traced.buffers
        dense = [] if mask_mod is None else [_dense(mask_mod, query, key)]
        aux = fj.AuxRequest(lse=True) if return_lse else None

        def function(q: Any, k: Any, v: Any, *more: Any) -> Any:
            buffers, mask = more[: len(captured)], more[len(captured) :]
            mod: Any = None if traced is None else Mod(traced.text, tuple(buffers), tuple(traced.scalars))
            lists = fj.block_mask_from_dense(mask[0]) if mask else None
            out = fj.flex_attention(q, k, v, mod, lists, return_aux=aux, **options)
            return (out[0], out[1].lse) if return_lse else out

        return _Call.apply(function, query, key, value, *captured, *dense)


def _dense(mask_mod: Any, query: Tensor, key: Tensor) -> Tensor:
    sizes = (query.size(0), query.size(1), query.size(2), key.size(2))
    taken: Tensor = mask_mod(*formulas.indices(query, key))
    return taken.expand(sizes).contiguous()


class _DotProduct(_InJAX):
    """Masks, no functions of scores; [B, S, H, D]. Softmax is float32 whatever the dtype."""

    def dtype(self, op: str, device: str) -> torch.dtype:
        return torch.float32

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
        raise NotImplementedError

    def flex_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,  # they always let heads share
    ) -> Any:
        dense = [] if mask_mod is None else [_dense(mask_mod, query, key)]

        def function(q: Any, k: Any, v: Any, *mask: Any) -> Any:
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            return self.attend(q, k, v, mask[0] if mask else None, scale).swapaxes(1, 2)

        return _Call.apply(function, query, key, value, *dense)


class JaxNN(_DotProduct):
    settings = "jax.nn.dot_product_attention, implementation=None"

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
        import jax

        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)


class Tokamax(_DotProduct):
    settings = "tokamax.dot_product_attention, whichever implementation it takes"
    packages = ("jax", "jaxlib", "tokamax")
    devices = ("cuda",)

    def load(self) -> None:
        import tokamax  # noqa: F401

    def attend(self, q: Any, k: Any, v: Any, mask: Any, scale: float | None) -> Any:
        import tokamax

        told = {} if scale is None else {"logits_scale": scale}
        return tokamax.dot_product_attention(q, k, v, mask=mask, **told)
