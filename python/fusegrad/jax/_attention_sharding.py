"""flex_attention of arrays whose batch and heads are split over devices: each device computes its own part. Captured
arrays are split where every read of theirs names the split number by itself, and else whole on each device, where the
mod counts from the device's first batch and head on; their gradients are then summed over the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec, reshard

from fusegrad._C import score_mod as _language

from ._attention_call import Call, Text

Axes = tuple[str, ...]
#: For each dimension, the mesh's axes over which it is split.
Spec = tuple[Axes, ...]
#: For each buffer, the dimensions that b or h names in every read: {dimension: "b" or "h"}, as pairs.
Places = tuple[tuple[tuple[int, str], ...], ...]


@dataclass(frozen=True)
class Split:
    """The mesh's axes over which batch and heads are split, and in how many parts each."""

    b: Axes = ()
    h: Axes = ()
    parts_b: int = 1
    parts_h: int = 1

    def axes(self, name: str) -> Axes:
        return self.b if name == "b" else self.h


def _axes(entry: Any) -> Axes:
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def split_of(call: Call, arrays: Sequence[Any], spec: Any, sizes: Any) -> Split:
    """That of a query whose PartitionSpec is `spec`, as far as batch and heads come out even. `sizes`: of the mesh's
    axes."""
    entries = (*spec, *(None,) * (4 - len(spec)))
    heads = 2 if call.bshd else 1
    b, h = _axes(entries[0]), _axes(entries[heads])
    parts_b, parts_h = (math.prod(sizes[a] for a in axes) for axes in (b, h))
    if arrays[0].shape[0] % parts_b:
        b, parts_b = (), 1
    of_keys = arrays[1].shape[heads]
    if arrays[0].shape[heads] % parts_h or (of_keys % parts_h and of_keys != 1):
        h, parts_h = (), 1
    return Split(b, h, parts_b, parts_h)


# --- mods ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _places(text: str) -> Places:
    graph = _language.parse(text)
    nodes = graph.nodes()
    names = {i: of for i, (op, _, of, _) in enumerate(nodes) if op == "input" and of in ("b", "h")}
    found: list[dict[int, str] | None] = [None] * len(graph.buffers())
    for op, _, of, operands in nodes:
        if op == "load":
            here = {d: names[x] for d, x in enumerate(operands) if x in names}
            before = found[of]
            found[of] = here if before is None else {d: n for d, n in before.items() if here.get(d) == n}
    return tuple(tuple(sorted((places or {}).items())) for places in found)


@functools.lru_cache(maxsize=512)
def _counted_on(text: str, places: Places, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The text in which each name counts from a first one on, but in the reads of `places`; the first ones are further
    buffers, the last, in the order of the names that are returned: those of which there is any other use."""
    given = _language.parse(text)
    nodes = given.nodes()
    inputs = {i: of for i, (op, _, of, _) in enumerate(nodes) if op == "input" and of in names}
    used = {inputs[given.result()]} if given.result() in inputs else set()
    for op, _, of, operands in nodes:
        own = dict(places[of]) if op == "load" else {}
        used |= {inputs[x] for d, x in enumerate(operands) if x in inputs and own.get(d) != inputs[x]}
    if not used:
        return text, ()
    g = _language.graph(given.kind())
    for type_, rank in given.buffers():
        g.add_buffer(type_, rank)
    for type_ in given.scalars():
        g.add_scalar(type_)
    ordered = tuple(name for name in names if name in used)
    first = {name: g.load(g.add_buffer(_language.INT, 0), []) for name in ordered}
    made: list[int] = []
    for i, (op, _, of, operands) in enumerate(nodes):
        images = [made[x] for x in operands]
        if op == "load":
            own = dict(places[of])
            images = [g.input(own[d]) if d in own else x for d, x in enumerate(images)]
            made.append(g.load(of, images))
        elif i in inputs and inputs[i] in used:
            made.append(g.apply("add", g.input(inputs[i]), first[inputs[i]]))
        else:
            made.append(g.copy(given, i, images))
    return g.text(made[given.result()], simplified=True).replace("\n", ";"), ordered


@dataclass(frozen=True)
class Parts:
    """How the arrays of a call are split. `score`, `mask`: the dimensions of buffers that are."""

    split: Split
    score: Places
    mask: Places

    @staticmethod
    def of(call: Call, arrays: Sequence[Any], split: Split) -> Parts:
        heads = 2 if call.bshd else 1
        size = {"b": arrays[0].shape[0], "h": arrays[0].shape[heads]}
        names = tuple(n for n in ("b", "h") if split.axes(n))

        def places(mod: Text, buffers: Sequence[Any]) -> Places:
            found = _places(mod.text) if mod.text else ()
            return tuple(
                tuple((d, n) for d, n in one if n in names and x.shape[d] == size[n])
                for one, x in zip(found, buffers, strict=True)
            )

        n = call.inputs
        return Parts(
            split,
            places(call.score_mod, arrays[3:n]),
            places(call.mask_mod, arrays[n : n + call.mask_mod.buffers]),
        )

    def specs(self, call: Call, arrays: Sequence[Any]) -> list[Spec]:
        """How the arrays of a call are split."""
        s = self.split
        n, of_mask = call.inputs, call.mask_mod.buffers
        specs = [self.tensor(call, x, i > 0) for i, x in enumerate(arrays[:3])]
        for x, places in zip(arrays[3 : n + of_mask], (*self.score, *self.mask), strict=True):
            own = dict(places)
            specs.append(tuple(s.axes(own[d]) if d in own else () for d in range(len(x.shape))))
        for x in arrays[n + of_mask : n + of_mask + call.lists]:
            lead = (s.b if x.shape[0] > 1 else (), s.h if x.shape[1] > 1 else ())
            specs.append((*lead, *((),) * (len(x.shape) - 2)))
        return specs + [((),) * len(x.shape) for x in arrays[len(specs) :]]

    def tensor(self, call: Call, x: Any, of_keys: bool = False) -> Spec:
        """How query, key, value, the output, or a number for each row is split."""
        s = self.split
        if len(x.shape) == 3:
            return (s.b, s.h, ())
        heads = x.shape[2 if call.bshd else 1]
        b = () if of_keys and x.shape[0] == 1 else s.b
        h = () if of_keys and heads % s.parts_h else s.h
        return (b, (), h, ()) if call.bshd else (b, h, (), ())

    def local(self, call: Call, arrays: Sequence[jax.Array]) -> tuple[Call, list[jax.Array]]:
        """One device's part of the call, of its parts of the arrays."""
        s = self.split
        names = tuple(n for n in ("b", "h") if s.axes(n))
        heads = arrays[0].shape[2 if call.bshd else 1]
        first = {"b": (s.b, arrays[0].shape[0]), "h": (s.h, heads)}
        n, of_mask = call.inputs, call.mask_mod.buffers

        def mod(text: Text, places: Places) -> tuple[Text, list[jax.Array]]:
            if not text.text or not names:
                return text, []
            moved, used = _counted_on(text.text, places, names)
            starts = [jnp.int32(jax.lax.axis_index(first[name][0]) * first[name][1]) for name in used]
            return replace(text, text=moved, buffers=text.buffers + len(used)), starts

        score, of_score = mod(call.score_mod, self.score)
        mask, of_masks = mod(call.mask_mod, self.mask)
        rest = list(arrays[n + of_mask :])
        if call.dropout_p > 0 and (s.b or s.h):
            # Pairs of the devices' parts are numbered alike, so that each part has a seed of its own.
            part = jax.lax.axis_index((*s.b, *s.h)).astype(jnp.uint32)
            rest[-1] = rest[-1] ^ (part * jnp.uint32(0x9E3779B9))
        full = [*arrays[:n], *of_score, *arrays[n : n + of_mask], *of_masks, *rest]
        return replace(call, score_mod=score, mask_mod=mask), full

    def summed(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """The sum over the devices on which an array is whole."""
        own = {a for axes in spec for a in axes}
        over = tuple(a for a in (*self.split.b, *self.split.h) if a not in own)
        return jax.lax.psum(gradient, over) if over else gradient


def partition_spec(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec))


# --- arrays that say how they are split --------------------------------------------------------------------------


def over_explicit_axes(
    call: Call, arrays: Sequence[jax.Array], sharding: Any, run: Callable[[Call, Sequence[jax.Array]], Any]
) -> list[jax.Array]:
    """run(call, arrays), of a query whose type has the sharding, by each device for its part."""
    mesh = sharding.mesh
    parts = Parts.of(call, arrays, split_of(call, arrays, sharding.spec, dict(mesh.shape)))
    specs = [partition_spec(s) for s in parts.specs(call, arrays)]
    results = [jax.ShapeDtypeStruct(*x) for x in call.outputs(arrays[0], arrays[2])]
    mapped = jax.shard_map(
        lambda *mine: tuple(run(*parts.local(call, mine))),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(partition_spec(parts.tensor(call, x)) for x in results),
    )
    return list(mapped(*(reshard(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True))))


# --- arrays that jit splits ---------------------------------------------------------------------------------------


def partitioned(
    call: Call,
    whole: Callable[..., Any],
    part: Callable[[Parts, Sequence[jax.Array]], Any],
    arrays: Sequence[Any],
    others: Sequence[tuple[Any, int | None]],
    results: Sequence[tuple[Any, int | None]],
) -> Callable[..., Any]:
    """A function of the call's arrays and of others, which XLA's partitioner may give to the devices in parts.
    `others`, `results`: types, each with the number of the array that it is split as, or None where it is as the output
    or a number for each row. Results that are as an array are its gradients. `part` computes the results' parts."""

    def specs_of(parts: Parts) -> tuple[list[Spec], list[Spec]]:
        of = parts.specs(call, arrays)

        def spec(x: Any, like: int | None) -> Spec:
            return parts.tensor(call, x) if like is None else of[like]

        return [*of, *(spec(x, i) for x, i in others)], [spec(x, i) for x, i in results]

    def partition(mesh: Any, given: Any, wanted: Any) -> Any:
        split = split_of(call, arrays, getattr(given[0].sharding, "spec", ()), mesh.shape)
        parts = Parts.of(call, arrays, split)
        of_arguments, of_results = specs_of(parts)

        def lower(*mine: jax.Array) -> Any:
            found = part(parts, mine)
            return tuple(
                x if i is None else parts.summed(x, spec)
                for x, spec, (_, i) in zip(found, of_results, results, strict=True)
            )

        put = [tuple(NamedSharding(mesh, partition_spec(s)) for s in of) for of in (of_results, of_arguments)]
        return mesh, lower, *put

    # Shardy is told that batch and heads may be split, and nothing else.
    heads = 2 if call.bshd else 1
    all_heads, of_keys = arrays[0].shape[heads], arrays[1].shape[heads]
    grouped = all_heads != of_keys > 1
    alone: list[str] = []

    def factors(spec: Spec, keys: bool) -> str:
        names = []
        for axes in spec:
            name = "" if not axes else axes[0]
            if name == "h" and keys:
                name = "k" if grouped else "h" if of_keys == all_heads else ""
            elif name == "h" and grouped:
                name = "(k g)"
            if not name:
                name = f"x{len(alone)}"
                alone.append(name)
            names.append(name)
        return " ".join(names)

    of_arguments, of_results = specs_of(Parts.of(call, arrays, Split(("b",), ("h",))))
    likes = [*range(len(arrays)), *(i for _, i in others)]
    left = ", ".join(factors(s, i in (1, 2)) for s, i in zip(of_arguments, likes, strict=True))
    right = ", ".join(factors(s, i in (1, 2)) for s, (_, i) in zip(of_results, results, strict=True))
    sizes = {"g": all_heads // of_keys} if grouped else {}
    function = custom_partitioning(lambda *args: tuple(whole(*args)))
    function.def_partition(
        partition=partition,
        sharding_rule=f"{left} -> {right}",
        need_replication_factors=tuple(alone),
        **sizes,
    )
    return function
