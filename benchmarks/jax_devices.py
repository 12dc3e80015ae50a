"""fusegrad.jax.flex_attention over several GPUs, beside one: batch or heads split by jit and by shard_map.

Attention with a pair bias that all devices hold, forward and backward: the bias' gradient is the sum over devices
where the batch is split. Times are wall-clock time of calls in a row. Ideal is one device's time over their number.
Errors are relative, to one device.

    python benchmarks/jax_devices.py [--device cpu] [--devices 2] [--sizes BxHxSxD,...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad.jax as fj
import jax
import jax.numpy as jnp
import numpy as np
from harness.environment import environment, in_file_names
from harness.report import print_table, write_json
from jax.sharding import NamedSharding, PartitionSpec

OP = "jax_devices"
IN_A_ROW, ROUNDS = 8, 9
OF_IDEAL = 0.9
ERROR = 1e-2
Step = Callable[..., Any]


def attention(q: Any, k: Any, v: Any, pair: Any) -> Any:
    return fj.flex_attention(q, k, v, lambda s, b, h, i, j: s + pair[h, i, j])


def gradients(attend: Step) -> Step:
    return lambda *leaves, upstream: jax.vjp(attend, *leaves)[1](upstream)


def ways(count: int) -> dict[str, tuple[PartitionSpec, PartitionSpec, Step]]:
    """How tensors and the bias are split over `count` devices, and what attends."""
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
    batch, heads, nothing = PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()

    def mapped(of_tensor: PartitionSpec, of_pair: PartitionSpec) -> Step:
        return jax.shard_map(attention, mesh=mesh, in_specs=(of_tensor,) * 3 + (of_pair,), out_specs=of_tensor)

    by_heads = PartitionSpec("x")
    found = {
        "jit, batch": (batch, nothing, attention),
        "jit, heads": (heads, by_heads, attention),
        "shard_map, batch": (batch, nothing, mapped(batch, nothing)),
        "shard_map, heads": (heads, by_heads, mapped(heads, by_heads)),
    }
    return {name: (NamedSharding(mesh, t), NamedSharding(mesh, p), step) for name, (t, p, step) in found.items()}


def milliseconds(programs: dict[str, tuple[Step, Any]]) -> dict[str, float]:
    """Medians over rounds in which the programs take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, (program, given) in programs.items():
            jax.block_until_ready(program(**given))
            started = time.perf_counter()
            for _ in range(IN_A_ROW):
                found = program(**given)
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - started) / IN_A_ROW * 1e3)
    return {name: statistics.median(of) for name, of in times.items()}


def measured(sizes: tuple[int, int, int, int], count: int) -> dict[str, Any]:
    B, H, S, D = sizes
    rng = np.random.default_rng(0)
    shapes = {"q": (B, H, S, D), "k": (B, H, S, D), "v": (B, H, S, D), "pair": (H, S, S), "upstream": (B, H, S, D)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for name, shape in shapes.items()}
    programs: dict[str, tuple[Step, Any]] = {}
    right: list[Any] = []
    found: dict[str, Any] = {"collectives": {}, "errors": {}}

    def add(name: str, attend: Step, given: dict[str, Any]) -> None:
        for part, step in (
            ("forward", lambda q, k, v, pair, upstream: attend(q, k, v, pair)),
            ("both", lambda q, k, v, pair, upstream: gradients(attend)(q, k, v, pair, upstream=upstream)),
        ):
            one = jax.jit(step).lower(**given).compile()
            programs[f"{name} {part}"] = (one, given)
            text = one.as_text()
            kinds = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
            found["collectives"][f"{name} {part}"] = [kind for kind in kinds if f" {kind}" in text]
        made = [np.asarray(x, np.float32) for x in one(**given)]
        if not right:
            right.extend(made)
        pairs = zip(("dq", "dk", "dv", "dpair"), made, right, strict=True)
        found["errors"][name] = {n: float(np.linalg.norm(x - t) / np.linalg.norm(t)) for n, x, t in pairs}

    add("one device", attention, arrays)
    for name, (of_tensor, of_pair, attend) in ways(count).items():
        put = {n: jax.device_put(x, of_pair if n == "pair" else of_tensor) for n, x in arrays.items()}
        add(name, attend, put)
    found["ms"] = milliseconds(programs)
    found["of_ideal"] = {
        name: found["ms"][f"one device {name.rsplit(' ', 1)[1]}"] / count / ms
        for name, ms in found["ms"].items()
        if not name.startswith("one device")
    }
    return found


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    made = [
        {"goal": f"{name}: {100 * share:.1f}% of ideal >= {100 * OF_IDEAL:g}%", "passed": share >= OF_IDEAL}
        for name, share in found["of_ideal"].items()
    ]
    for name, errors in found["errors"].items():
        worst = max(errors.values())
        made.append({"goal": f"{name}: error {worst:.2g} <= {ERROR:g}", "passed": worst <= ERROR})
    for name, kinds in found["collectives"].items():
        sums = {"all-reduce"} if name.endswith("batch both") else set()
        made.append({"goal": f"{name}: collectives {kinds or 'none'}", "passed": set(kinds) <= sums})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="fusegrad.jax.flex_attention over several devices.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: JAX's own")
    parser.add_argument("--devices", type=int, help="how many (default: all)")
    parser.add_argument("--sizes", default="16x16x4096x64,64x4x512x32", help="BxHxSxD, ...")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    options = parser.parse_args()
    if options.device is not None:
        jax.config.update("jax_platforms", options.device)
    there = len(jax.devices())
    if there < 2:
        print(f"{sys.argv[0]}: not run: needs two devices, but there is {there}")
        return
    count = there if options.devices is None else options.devices
    if not 2 <= count <= there:
        parser.error(f"--devices must be from 2 to the number of devices, {there}, but got {count}")
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    document = {"op": OP, "devices": count, **environment(device, options.commit)}
    document["cases"] = cases = []
    for sizes in options.sizes.split(","):
        B, H, S, D = (int(size) for size in sizes.split("x"))
        found = measured((B, H, S, D), count)
        found["goals"] = goals(found)
        cases.append({"sizes": {"B": B, "H": H, "S": S, "D": D}, "results": found})
        print(f"B{B} H{H} S{S} D{D}, {count} devices")
        rows = [[n, f"{ms:.4g}", f"{100 * found['of_ideal'].get(n, 1):.1f}%"] for n, ms in found["ms"].items()]
        print_table(["", "ms", "of ideal"], rows)
        for goal in found["goals"]:
            print(f"  {'pass' if goal['passed'] else 'MISS'}  {goal['goal']}")
        if options.output is not None:
            write_json(options.output / f"{OP}-{count}-{in_file_names(document['device'])}.json", document)


if __name__ == "__main__":
    main()
