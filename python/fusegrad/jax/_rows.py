"""The row kernels as custom calls. Letters: N rows, V vocabulary; acc: float32, or float64 for float64 logits.

Formulas in csrc/losses/row_kernels.h. A result that overwrites an argument is declared to XLA as its alias: XLA then
knows who reads the argument before and who the result after, and copies the argument where it is needed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._check import acc_type
from ._manual import result


@dataclass(frozen=True)
class Loss:
    """The options of a cross entropy, hashable."""

    op: str
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0

    def attributes(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "ignore_index": np.int64(self.ignore_index),
            "label_smoothing": np.float64(self.label_smoothing),
            "z_loss": np.float64(self.z_loss),
            "softcap": np.float64(self.softcap),
            "logit_scale": np.float64(self.logit_scale),
        }


@dataclass(frozen=True)
class Rows:
    """The targets of the rows: [N] class indices or [N, V] probabilities, [V], [N] and [1] of acc."""

    target: jax.Array
    weight: jax.Array | None = None
    token_weight: jax.Array | None = None
    normalizer: jax.Array | None = None

    @property
    def probabilities(self) -> bool:
        return self.target.ndim == 2

    def dense(self, loss: Loss) -> bool:
        """Whether the kernel sums the coefficients of a row itself, into `mass`."""
        return self.probabilities or (self.weight is not None and loss.label_smoothing > 0)


jax.tree_util.register_dataclass(Rows, ["target", "weight", "token_weight", "normalizer"], [])


def _call(name: str, results: list[Any], aliases: dict[int, int] | None = None) -> Any:
    return jax.ffi.ffi_call(f"fusegrad_{name}", results, input_output_aliases=aliases or {}, vmap_method="sequential")


def or_empty(x: jax.Array | None, like: jax.Array, dtype: Any) -> jax.Array:
    """Handlers take what is absent as an array without elements, of the same manual axes as the others."""
    return like.reshape(-1)[:0].astype(dtype) if x is None else x


def forward(
    loss: Loss, logits: jax.Array, rows: Rows, scales: jax.Array | None, *, gradient: bool
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    """A row's loss [N], its statistics (lse, lse_low, mass; [N], or [0] where not needed), and over the logits, where
    wanted, the gradient for an upstream gradient of 1."""
    acc = acc_type(logits.dtype)
    n = logits.shape[0]
    per_row = [result(logits, (n,), acc) for _ in range(3)]
    outputs = [*per_row, result(logits, (n if rows.dense(loss) else 0,), acc)]
    if gradient:
        outputs.append(result(logits, logits.shape, logits.dtype))
    out = _call("forward", outputs, {0: 4} if gradient else None)(
        logits,
        rows.target,
        or_empty(rows.weight, logits, acc),
        or_empty(rows.token_weight, logits, acc),
        or_empty(scales, logits, acc),
        **loss.attributes(),
    )
    return out[0], tuple(out[1:4]), out[4] if gradient else None


def gradient(
    loss: Loss,
    logits: jax.Array,
    rows: Rows,
    scales: jax.Array | None,
    statistics: tuple[jax.Array, ...],
    upstream: jax.Array,
) -> jax.Array:
    """Writes the gradient over the logits, from the forward's statistics, for an upstream gradient of one value or
    [N]."""
    acc = acc_type(logits.dtype)
    (out,) = _call("gradient", [result(logits, logits.shape, logits.dtype)], {0: 0})(
        logits,
        rows.target,
        or_empty(rows.weight, logits, acc),
        or_empty(rows.token_weight, logits, acc),
        or_empty(scales, logits, acc),
        *statistics,
        upstream,
        **loss.attributes(),
    )
    return out


def mean_scales(
    op: str,
    like: jax.Array,
    index: jax.Array | None,
    weight: jax.Array | None,
    normalizer: jax.Array | None,
    *,
    rows: int,
    vocab: int,
    ignore_index: int,
    values_per_row: float = 1.0,
) -> jax.Array:
    """The scales of a mean, [4] of acc: of the loss, of the z-loss, the factor that float16 leaves for later (it would
    underflow), the divisor. `like` has the logits' dtype and manual axes."""
    acc = acc_type(like.dtype)
    (out,) = _call("scales", [result(like, (4,), acc)])(
        or_empty(index, like, jnp.int32),
        or_empty(weight, like, acc),
        or_empty(normalizer, like, acc),
        op=op,
        rows=np.int64(rows),
        vocab=np.int64(vocab),
        ignore_index=np.int64(ignore_index),
        values_per_row=np.float64(values_per_row),
        defer=like.dtype == jnp.float16,
    )
    return out


def reduce(loss: jax.Array, scales: jax.Array | None, *, nan_if_none: bool) -> jax.Array:
    """The sum of the rows' losses in a fixed order, times the deferred factor. `nan_if_none`: NaN where the divisor is
    0."""
    (out,) = _call("sum", [result(loss, (), loss.dtype)])(
        loss,
        or_empty(scales, loss, loss.dtype),
        factor=scales is not None,
        nan_if_zero=scales is not None and nan_if_none,
    )
    return out


def scaled(gradient: jax.Array, upstream: jax.Array, scales: jax.Array | None) -> jax.Array:
    """The gradient for an upstream gradient of 1, [N, ...], for one of a single value or [N]."""
    acc = acc_type(gradient.dtype)
    factor = upstream.astype(acc)
    if scales is not None and gradient.dtype == jnp.float16:
        factor = factor * scales[2]
    return (gradient.astype(acc) * factor.reshape(factor.shape + (1,) * (gradient.ndim - 1) * factor.ndim)).astype(
        gradient.dtype
    )
