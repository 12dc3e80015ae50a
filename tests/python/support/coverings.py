"""Fewer cases than all combinations: parameters of which every two values meet, or of which each value occurs; and one
test of many rows, each of which fails for itself."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = tuple[int, ...]


def covering(sizes: Sequence[int]) -> list[Row]:
    """Rows of one value of each axis, in which any two values of two axes meet. The same in every run."""
    axes = range(len(sizes))
    both = list(itertools.combinations(axes, 2))
    missing = {(i, a, j, b) for i, j in both for a in range(sizes[i]) for b in range(sizes[j])}

    def new(row: dict[int, int], axis: int, value: int) -> int:
        others = ((axis, value, j, b) if axis < j else (j, b, axis, value) for j, b in row.items())
        return sum(pair in missing for pair in others)

    rows = []
    while missing:
        i, a, j, b = min(missing)
        row, turn = {i: a, j: b}, len(rows)
        for axis in sorted(set(axes) - {i, j}, key=lambda axis: -sizes[axis]):
            # Equally good values take turns.
            order = [(v + turn) % sizes[axis] for v in range(sizes[axis])]
            row[axis] = max(order, key=lambda value: new(row, axis, value))
        missing -= {(i, row[i], j, row[j]) for i, j in both}
        rows.append(tuple(row[axis] for axis in axes))
    return rows


def turns(sizes: Sequence[int]) -> list[Row]:
    """As many rows as the longest axis has values, each value in one of them at least."""
    return [tuple((i + n * (i // size)) % size for n, size in enumerate(sizes)) for i in range(max(sizes))]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(_text, value))
    name = getattr(value, "__name__", getattr(value, "name", None))
    return (name if isinstance(name, str) else str(value)).removeprefix("torch.")[:60]


def _cases(axes: dict[str, Iterable[Any]], rows: Iterable[Row], values: list[list[Any]], tests: int | None) -> Any:
    texts = [list(axis) if isinstance(axis, Mapping) else None for axis in axes.values()]
    cases = []
    for row in rows:
        given: list[Any] = []
        shown = []
        for axis, (names, place) in enumerate(zip(axes, row, strict=True)):
            value, text = values[axis][place], texts[axis]
            given += value if "," in names else [value]
            shown.append(text[place] if text else _text(tuple(value) if "," in names else value))
        cases.append((given, "-".join(shown)))
    asked = [name.strip() for names in axes for name in names.split(",")]
    if tests is None:
        return pytest.mark.parametrize(asked, [pytest.param(*given, id=text) for given, text in cases])
    return _rows(asked, [given for given, _ in cases], [text for _, text in cases], tests)


def _values(axes: dict[str, Iterable[Any]]) -> list[list[Any]]:
    return [list(axis.values() if isinstance(axis, Mapping) else axis) for axis in axes.values()]


def pairs_of(axes: dict[str, Iterable[Any]], *, tests: int | None = None) -> Any:
    """``pytest.mark.parametrize`` of {"names": values}, in whose cases every two values of two axes meet. A mapping's
    keys name its values. With ``tests`` the cases are rows of so many tests, see :func:`rows_of`."""
    values = _values(axes)
    return _cases(axes, covering([len(axis) for axis in values]), values, tests)


def each_of(axes: dict[str, Iterable[Any]], *, tests: int | None = None) -> Any:
    """The same with as many cases as the longest axis has values: for axes that have little to do with one another."""
    values = _values(axes)
    return _cases(axes, turns([len(axis) for axis in values]), values, tests)


def rows_of(
    names: str, values: Iterable[Any], *, tests: int = 1
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, in so many tests of many rows, each a subtest: for long tables of short rows."""
    rows = list(values.values() if isinstance(values, Mapping) else values)
    texts = list(map(str, values)) if isinstance(values, Mapping) else [_text(row) for row in rows]
    asked = [name.strip() for name in names.split(",")]
    assert not any(isinstance(row, type(pytest.param())) for row in rows), "rows are values, not pytest.param"
    return _rows(asked, [row if len(asked) > 1 else [row] for row in rows], texts, tests)


def _rows(
    asked: list[str], rows: list[Sequence[Any]], texts: list[str], tests: int
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    assert tests <= len(rows), f"{tests} tests of {len(rows)} rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, part: int = 0, **given: Any) -> None:
            if "subtests" in signature.parameters:
                given["subtests"] = subtests
            for row, text in list(zip(rows, texts, strict=True))[part::tests]:
                row_given = dict(zip(asked, row, strict=True))
                if torch := sys.modules.get("torch"):  # as a test begins
                    torch.manual_seed(0)
                    torch._dynamo.reset()
                with subtests.test(text):
                    test(**given, **row_given)

        kind = inspect.Parameter.KEYWORD_ONLY
        kept = [p.replace(kind=kind) for name, p in signature.parameters.items() if name not in asked]
        more = [*(["part"] if tests > 1 else []), *(["subtests"] if "subtests" not in signature.parameters else [])]
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*(inspect.Parameter(name, kind) for name in more), *kept]
        )
        del run.__wrapped__
        return pytest.mark.parametrize("part", range(tests))(run) if tests > 1 else run

    return decorate
