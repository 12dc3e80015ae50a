"""Texts of mods for a batch that is folded into the call's own. It needs neither torch nor JAX."""

from __future__ import annotations

import functools

from fusegrad._C import score_mod as _language


@functools.lru_cache(maxsize=512)
def taken_apart(text: str, batched: tuple[bool, ...]) -> str:
    """The text for a folded batch, whose element v * B + b is element v of the batch and b of the call's own; B is a
    further number, the last. Buffers that are batched have one more dimension, the first."""
    given = _language.parse(text)
    g = _language.graph(given.kind())
    for (type_, rank), more in zip(given.buffers(), batched, strict=True):
        g.add_buffer(type_, rank + more)
    for type_ in given.scalars():
        g.add_scalar(type_)
    folded, own = g.input("b"), g.scalar(g.add_scalar(_language.INT))
    element, b = g.apply("floor_div", folded, own), g.apply("mod", folded, own)
    made: list[int] = []
    for i, (op, _, of, operands) in enumerate(given.nodes()):
        images = [made[x] for x in operands]
        if op == "load" and batched[of]:
            made.append(g.load(of, [element, *images]))
        else:
            made.append(b if (op, of) == ("input", "b") else g.copy(given, i, images))
    return g.text(made[given.result()], simplified=True).replace("\n", ";")
