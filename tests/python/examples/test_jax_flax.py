"""examples/jax_flax.py: its attention_fn beside flax's own, and the program, on few images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
pytest.importorskip("sklearn")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    import jax_flax

    monkeypatch.setattr(jax_flax, "LAYERS", 1)  # each takes seconds to compile
    return jax_flax


def test_the_program(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--images=100", "--epochs=1", f"--out={tmp_path}"]) == 0
    assert "The gradients are those of flax's attention." in capsys.readouterr().out
    assert (tmp_path / "jax_flax.png").stat().st_size > 1000


@pytest.mark.parametrize("of_bias", [None, (6, 7), (1, 4, 6, 7), (2, 3, 4, 1, 7)], ids=str)
@pytest.mark.parametrize("of_mask", [None, (2, 3, 1, 6, 7), (1, 1, 1, 7)], ids=str)
def test_the_attention_fn(example: Any, of_bias: Any, of_mask: Any) -> None:
    """Biases and masks of any sizes that broadcast to the scores', [2, 3] batches of [4, 6, 7]."""
    random = np.random.default_rng(0)
    make = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, k, v = make(2, 3, 6, 4, 8), make(2, 3, 7, 4, 8), make(2, 3, 7, 4, 8)
    bias = None if of_bias is None else make(*of_bias)
    mask = None if of_mask is None else random.random(of_mask) < 0.8
    if mask is not None:
        mask[..., 0] = True  # each query sees a key
    for given in ({}, {"is_causal": True}):
        run = lambda f, given=given: jax.value_and_grad(  # noqa: E731
            lambda q, k, v: (f(q, k, v, bias, mask, deterministic=True, **given) ** 2).sum(), (0, 1, 2)
        )(q, k, v)
        ours, right = run(example.flex_attention_fn), run(nnx.dot_product_attention)
        jax.tree.map(lambda x, t: np.testing.assert_allclose(x, t, rtol=1e-3, atol=1e-4), ours, right)


def test_what_the_attention_fn_refuses(example: Any) -> None:
    x = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(NotImplementedError, match="broadcast_dropout must be False"):
        example.flex_attention_fn(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="sow_weights"):
        example.flex_attention_fn(x, x, x, module=object())
    dropped = example.flex_attention_fn(
        x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(0), broadcast_dropout=False
    )
    assert np.unique(np.asarray(dropped)).size > 1
