"""JAX's score_mods and mask_mods in the language: values and derivatives against JAX's own of the functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_mods_support import check_mask_mod, check_score_mod  # noqa: E402
from jax_score_mods import CASES, OWN_DERIVATIVES, Case  # noqa: E402

SIZES = [(2, 3, 5, 6), (1, 2, 6, 4)]
sizes_given = pytest.mark.parametrize("sizes", SIZES, ids=["2x3x5x6", "1x2x6x4"])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", [*CASES, *OWN_DERIVATIVES], ids=lambda case: case.name)
@sizes_given
def test_mods_of_the_field(case: Case, sizes: tuple[int, int, int, int]) -> None:
    params, mods = case.make(*sizes, jnp.float64)
    score_mod, mask_mod = mods(*params)
    if mask_mod is not None:
        check_mask_mod(mask_mod, sizes)
    if score_mod is not None:
        check_score_mod(lambda *params: mods(*params)[0], params, sizes)
