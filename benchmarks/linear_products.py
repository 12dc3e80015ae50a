"""The matrix products of the linear losses alone, cut as their plans cut them: what a plan can reach at best.

By rows: logits of chunks of rows, as a forward computes them. By columns: blocks of columns of all rows, as a backward
that computes the logits a second time does: the logits, the input's gradient added up in float32, the weight's; and one
pass that reads and writes the block, which is what a row kernel must do. `pad` widens a row beyond its block: products
are slower where rows start at multiples of a large power of 2. By tiles: products of a fixed number of rows, as
batch_invariant computes them, and whether each row has the same bits at any place of its tile and alone.

    python benchmarks/linear_products.py [--device cpu] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from harness.environment import environment, in_file_names
from harness.timing import Floor, median_ms
from torch import Tensor

SIZES = {"cuda": ((8192, 4096, 128256), (8192, 4096, 151936)), "cpu": ((512, 128, 4096),)}
ROWS = {"cuda": (512, 768, 1024, 2048), "cpu": (128, 256)}
COLUMNS = {
    "cuda": ((4096, 0), (6144, 0), (7168, 0), (8064, 0), (8192, 0), (8192, 64), (10240, 64), (12288, 64), (16384, 64)),
    "cpu": ((1024, 0), (1024, 16)),
}
TILES = {"cuda": (128, 256, 512, 1024), "cpu": (16, 64)}
Row = dict[str, Any]


def of(function: Callable[[], object], device: str) -> float:
    return median_ms(Floor("", function), device, 5)


def cuts(total: int, size: int) -> Iterator[slice]:
    for first in range(0, total, size):
        yield slice(first, min(first + size, total))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32, as the op does it: products of low precision on CUDA, of float32 on the CPU."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def all_columns(x: Tensor, w: Tensor, device: str) -> Iterator[Row]:
    grad_x, grad_w = torch.empty_like(x), torch.empty_like(w)
    z = (x @ w.T).softmax(1)
    logits = of(lambda: torch.mm(x, w.T, out=z), device)
    three = logits + of(lambda: torch.mm(z, w, out=grad_x), device) + of(lambda: torch.mm(z.T, x, out=grad_w), device)
    yield {"what": "whole", "three": three, "four": three + logits}
    for count in ROWS[device]:

        def by_rows(count: int = count) -> None:
            for part in cuts(len(x), count):
                torch.mm(x[part], w.T, out=z[: part.stop - part.start])

        yield {"what": "by rows", "rows": count, "logits": of(by_rows, device)}


def by_columns(x: Tensor, w: Tensor, device: str) -> Iterator[Row]:
    rows, vocab = len(x), len(w)
    grad_w, total = torch.empty_like(w), torch.zeros_like(x, dtype=torch.float32)
    for width, pad in COLUMNS[device]:
        block = x.new_ones(rows, width + pad)[:, :width]

        def each(product: Callable[[Tensor, slice], object], block: Tensor = block, width: int = width) -> float:
            def run() -> None:
                for part in cuts(vocab, width):
                    product(block[:, : part.stop - part.start], part)

            return of(run, device)

        yield {
            "what": "by columns",
            "columns": width,
            "pad": pad,
            "logits": each(lambda b, part: torch.mm(x, w[part].T, out=b)),
            "input": each(lambda b, part: add_product(total, b, w[part])),
            "weight": each(lambda b, part: torch.mm(b.T, x, out=grad_w[part])),
            "pass": each(lambda b, _: b.mul_(1.0)),
        }
        del block


def by_tiles(x: Tensor, w: Tensor, tile: int, device: str) -> Row:
    some = x[:tile].contiguous()
    z = some @ w.T
    p = z.softmax(1)
    back = p @ w
    moved = 0
    for shift in (1, 17 % tile, tile // 2 + 3):
        moved += int(((some.roll(shift, 0) @ w.T).roll(-shift, 0) != z).any(1).sum())
        moved += int(((p.roll(shift, 0) @ w).roll(-shift, 0) != back).any(1).sum())
    alone = torch.zeros_like(some)
    alone[5] = some[5]
    differ = int(((alone @ w.T)[5] != z[5]).sum())

    def times(run: Callable[[], object]) -> float:
        def all_of_them() -> None:
            for _ in range(len(x) // tile):
                run()

        return of(all_of_them, device)

    return {
        "logits": times(lambda: torch.mm(some, w.T, out=z)),
        "input": times(lambda: torch.mm(p, w, out=back)),
        "rows that differ by place": moved,
        "values that differ alone": differ,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=[*SIZES], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    options = parser.parse_args()
    torch.manual_seed(0)
    document: dict[str, Any] = {"work": "products", **environment(options.device, options.commit), "results": []}
    for rows, hidden, vocab in SIZES[options.device]:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        x = torch.randn(rows, hidden, device=options.device).to(dtype)
        w = (torch.randn(vocab, hidden, device=options.device) * hidden**-0.5).to(dtype)
        tiles = ({"what": "by tiles", "rows": t, **by_tiles(x, w, t, options.device)} for t in TILES[options.device])
        for made in chain(all_columns(x, w, options.device), by_columns(x, w, options.device), tiles):
            row = {"N": rows, "H": hidden, "V": vocab, **made}
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            document["results"].append(row)
        del x, w
    if options.output is not None:
        name = f"linear_products-{in_file_names(document['device'])}.json"
        (options.output / name).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
