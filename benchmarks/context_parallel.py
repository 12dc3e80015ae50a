"""Attention over a sequence that processes share: fusegrad, alone and on all of them, beside PyTorch's own.

PyTorch's are `context_parallel` with SDPA, where the mask is causal, and its flex_attention with gathered keys, whose
score_mods and masks see local queries unless they are rewritten: here by a table of positions. Forward and backward to
query, key and value (and to the bias of "relative"); times and memory are the slowest and the largest process's. Memory
is above the inputs and counts the gradients. "ms" is a call that nothing is queued before, so that the GPU waits for
the host at its beginning; "in a row" is one of several that follow each other, as layers do. Ideal is one process's
time over their number, of calls in a row. Errors are relative, to one process; that of the bias is its gradient's.

    python benchmarks/context_parallel.py [--device cpu] [--shapes SxH/HkvxD,...] [--output FOLDER]

A long sequence for itself: --shapes 524288x8/2x128 --cases causal,documents --reps 1 --no-peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad
import torch
import torch.distributed as dist
from fusegrad import ContextParallel
from harness.environment import environment, in_file_names
from harness.processes import processes, timed
from harness.report import print_table, write_json
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
CASES = ("causal", "documents", "relative")
SHAPES = {"cuda": "131072x32/8x128", "cpu": "2048x4/2x64"}
OF_IDEAL = 0.9  # of the better way, where the mask alone says what is computed
ERROR = 1e-2
IN_A_ROW = 4
Run = Callable[[], Tensor]


def mask_of(starts: Tensor, documents: Tensor | None) -> BlockMask:
    """Causal, within documents: `starts` [S] is where each position's document begins."""
    length, device = starts.shape[0], starts.device
    row = torch.arange(-(-length // BLOCK), device=device)
    first = starts[row * BLOCK] // BLOCK
    whole = -(
        -starts[((row + 1) * BLOCK - 1).clamp(max=length - 1)] // BLOCK
    )  # the first block within the last document
    column = torch.arange(len(row), device=device)
    full = (column >= whole[:, None]) & (column < row[:, None])
    partial = (column >= first[:, None]) & (column <= row[:, None]) & ~full

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        assert documents is not None
        return (q >= kv) & (documents[q] == documents[kv])

    mod = causal if documents is None else within
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=(length, length)
    )


class Problem:
    """Whole tensors, the same in all processes."""

    def __init__(self, case: str, length: int, heads: int, key_heads: int, size: int, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        shapes = (heads, key_heads, key_heads)
        self.qkv = [torch.randn(1, length, h, size, device=device, dtype=dtype).transpose(1, 2) for h in shapes]
        self.upstream = torch.randn_like(self.qkv[0])
        starts = torch.zeros(length, dtype=torch.int64, device=device)
        documents = None
        if case == "documents":
            ends = torch.rand(max(length // 8192, 3), device=device).mul(length).long().sort().values
            documents = torch.bucketize(torch.arange(length, device=device), ends, right=True)
            starts = torch.cat([ends.new_zeros(1), ends])[documents]
        self.mask = mask_of(starts, documents)
        self.captured: list[Tensor] = []
        self.score_mod: Any = None
        if case == "relative":
            bias = torch.randn(heads, length, device=device, requires_grad=True)
            self.captured = [bias]

            def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                return s + bias[h, q - kv]

            self.score_mod = relative

    def leaves(self, context: ContextParallel | None) -> tuple[list[Tensor], Tensor]:
        cut = (lambda t: t) if context is None else (lambda t: context.shard(t, 2))
        return [cut(t).detach().requires_grad_() for t in self.qkv], cut(self.upstream)

    def ours(self, context: ContextParallel | None) -> tuple[Run, list[Tensor]]:
        leaves, upstream = self.leaves(context)

        def run() -> Tensor:
            for t in (*leaves, *self.captured):
                t.grad = None
            out = fusegrad.flex_attention(*leaves, self.score_mod, self.mask, enable_gqa=True, context_parallel=context)
            out.backward(upstream)
            return out.detach()

        return run, leaves


def sdpa(problem: Problem, mesh: DeviceMesh, repeated: bool) -> tuple[Run, Any]:
    """PyTorch's ring over head and tail chunks; `repeated`: with a key head for each query head."""
    from torch.distributed.tensor.experimental import context_parallel

    heads = problem.upstream.shape[1]
    buffers = [t.contiguous() for t in (*problem.qkv, problem.upstream)]
    if repeated:
        buffers[1:3] = [t.repeat_interleave(heads // t.shape[1], 1) for t in buffers[1:3]]
    entered = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
    entered.__enter__()
    leaves, upstream = [t.requires_grad_() for t in buffers[:3]], buffers[3]

    def run() -> Tensor:
        for t in leaves:
            t.grad = None
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=not repeated)
        out.backward(upstream)
        return out.detach()

    return run, entered


def flex(problem: Problem, context: ContextParallel) -> Run:
    """PyTorch's compiled flex_attention of this process's queries and all keys, gathered and reduced by its collectives
    with gradients, with the mask of this process's rows."""
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
    from torch.nn.attention.flex_attention import flex_attention

    leaves, upstream = problem.leaves(context)
    name = context.group.group_name
    mine = context.positions(problem.qkv[0].shape[2], upstream.device)
    keys = context.permutation(problem.qkv[0].shape[2], upstream.device)
    whole = problem.mask
    rows, columns = mine[::BLOCK] // BLOCK, keys[::BLOCK] // BLOCK
    at = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns), device=columns.device))

    def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return whole.mask_mod(b, h, mine[q], keys[kv])

    lists = [whole.kv_num_blocks[..., rows], whole.kv_indices[..., rows, :]]
    lists += [whole.full_kv_num_blocks[..., rows], whole.full_kv_indices[..., rows, :]]
    lists[1], lists[3] = at[lists[1]].to(torch.int32), at[lists[3]].to(torch.int32)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=moved, seq_lengths=(len(mine), len(keys)))
    score_mod = None
    if problem.score_mod is not None:
        score_mod = lambda s, b, h, q, kv: problem.score_mod(s, b, h, mine[q], keys[kv])  # noqa: E731
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        for t in (*leaves, *problem.captured):
            t.grad = None
        key, value = flex_cp_allgather(leaves[1].contiguous(), leaves[2].contiguous(), 2, name)
        out = compiled(leaves[0], key, value, score_mod, mask, enable_gqa=True)
        out.backward(upstream)
        return out.detach()

    return run


def times(mesh: DeviceMesh, run: Run, reps: int) -> dict[str, float]:
    (ms, in_a_row), mib = timed(mesh, run, reps, (1, IN_A_ROW))
    return {"ms": ms, "ms_in_a_row": in_a_row, "peak_mib": mib}


def measured(mesh: DeviceMesh, case: str, sizes: tuple[int, int, int, int], reps: int, peers: bool) -> dict[str, Any]:
    problem = Problem(case, *sizes, mesh.device_type)
    whole, _ = problem.ours(None)
    truth = whole()
    gradients = [t.grad.clone() for t in problem.captured if t.grad is not None]
    found: dict[str, Any] = {}
    alone = times(mesh, whole, reps)
    found["fusegrad, one process"] = alone | {"error": 0.0}
    ideal = alone["ms_in_a_row"] / mesh.size()

    def add(name: str, run: Run, context: ContextParallel) -> None:
        pairs = [(run(), context.shard(truth, 2))]
        pairs += [(t.grad, right) for t, right in zip(problem.captured, gradients, strict=True) if t.grad is not None]
        errors = torch.stack([(ours.float() - right.float()).norm() / right.float().norm() for ours, right in pairs])
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        one = times(mesh, run, reps)
        found[name] = one | {"error": float(errors[0]), "of_ideal": ideal / one["ms_in_a_row"]}
        if gradients:
            found[name]["error_bias"] = float(errors[1])

    group = mesh.get_group()
    places: dict[str, ContextParallel] = {}
    for way in ("gather", "ring"):
        if case == "documents":
            places[f"fusegrad, {way}, balanced"] = ContextParallel.balanced(group, problem.mask, way=way)
        else:
            places[f"fusegrad, {way}, zigzag"] = ContextParallel(group, "zigzag", length=sizes[0], way=way)
    for name, context in places.items():
        add(name, problem.ours(context)[0], context)
    if peers and case == "causal":
        zigzag = places["fusegrad, ring, zigzag"]  # PyTorch's placement too
        for repeated in (False, True):
            name = "PyTorch, context_parallel, SDPA" + (", keys repeated" if repeated else "")
            attempt(found, name, lambda n, r=repeated: add_sdpa(n, problem, mesh, zigzag, add, r))
            if "failure" not in found[name]:
                break
    if peers and case != "relative":
        context = next(iter(places.values()))
        attempt(found, "PyTorch, flex_attention, gathered", lambda name: add(name, flex(problem, context), context))
    return found


def add_sdpa(
    name: str, problem: Problem, mesh: DeviceMesh, context: ContextParallel, add: Callable[..., None], repeated: bool
) -> None:
    run, entered = sdpa(problem, mesh, repeated)
    try:
        add(name, run, context)
    finally:
        entered.__exit__(None, None, None)


def attempt(found: dict[str, Any], name: str, run: Callable[[str], None]) -> None:
    """A peer that fails does so in all processes alike."""
    try:
        run(name)
    except Exception as error:  # whatever a peer raises is its result
        found[name] = {"failure": f"{type(error).__name__}: {error}"[:300]}


def bandwidths(mesh: DeviceMesh, sizes: tuple[int, int, int, int]) -> dict[str, float]:
    """Bytes a second that a process receives, GB/s, for tensors of a sequence's keys."""
    if mesh.device_type != "cuda":
        return {}
    length, _, heads, size = sizes
    rank, world = mesh.get_rank(), mesh.size()
    part = torch.randn(length // world * heads * size, device="cuda").bfloat16()
    whole, sums = part.new_empty(part.numel() * world), torch.empty(part.numel() * world, device="cuda")
    own, other = torch.empty(part.numel(), device="cuda"), torch.empty_like(part)

    def gather() -> Tensor:
        dist.all_gather_into_tensor(whole, part)
        return whole

    def scatter() -> Tensor:
        dist.reduce_scatter_tensor(own, sums)
        return own

    def ring() -> Tensor:
        operations = [
            dist.P2POp(dist.isend, part, (rank + 1) % world),
            dist.P2POp(dist.irecv, other, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return other

    received = part.numel() * part.element_size()
    cases = {
        "all_gather": (gather, received * (world - 1)),
        "reduce_scatter": (scatter, 2 * received * (world - 1)),
        "ring": (ring, received),
    }
    return {name: moved / timed(mesh, run, 9)[0][0] / 1e6 for name, (run, moved) in cases.items()}


def goals(case: str, found: dict[str, Any], device: str) -> list[dict[str, Any]]:
    ours = {name: one for name, one in found.items() if name.startswith("fusegrad") and "of_ideal" in one}
    best = max(one["of_ideal"] for one in ours.values())
    made: list[tuple[str, bool]] = []
    if case != "relative" and device == "cuda":  # a CPU's processes share its memory
        made.append((f"{100 * best:.1f}% of ideal >= {100 * OF_IDEAL:g}%", best >= OF_IDEAL))
    for key, name in (("error", "error of out"), ("error_bias", "error of the bias")):
        errors = [one[key] for one in ours.values() if key in one]
        if errors:
            made.append((f"{name}: {max(errors):.2g} <= {ERROR:g}", max(errors) <= ERROR))
    return [{"goal": text, "passed": passed} for text, passed in made]


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over a sequence that processes share.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", help=f"SxH/HkvxD, ... (default: {SHAPES['cuda']}, on the CPU {SHAPES['cpu']})")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the JSON, written after each case")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    arguments = parser.parse_args()
    device = arguments.device
    shapes = arguments.shapes or SHAPES[device]
    with processes(device, "cp") as mesh:
        document: dict[str, Any] = {"op": "context_parallel", "processes": mesh.size()}
        document |= environment(device, arguments.commit)
        document["cases"] = cases = []
        for shape in shapes.split(","):
            length, heads, size = shape.split("x")
            query_heads, _, key_heads = heads.partition("/")
            sizes = int(length), int(query_heads), int(key_heads or query_heads), int(size)
            speeds = bandwidths(mesh, sizes)
            document.setdefault("gb_per_s", speeds)
            for case in arguments.cases.split(","):
                found = measured(mesh, case, sizes, arguments.reps, not arguments.no_peers)
                judged = goals(case, found, device)
                names = ("S", "H", "Hkv", "D")
                one = {"case": case, "sizes": dict(zip(names, sizes, strict=True)), "results": found, "goals": judged}
                cases.append(one | {"gb_per_s": speeds})
                if mesh.get_rank() == 0:
                    show(case, shape, mesh.size(), speeds, found, judged)
                    if arguments.output is not None:
                        name = f"context_parallel-{mesh.size()}-{in_file_names(document['device'])}.json"
                        write_json(arguments.output / name, document)
                if device == "cuda":
                    torch.cuda.empty_cache()
        if mesh.get_rank() == 0:
            all_goals = [(f"{c['case']} S {c['sizes']['S']}", goal) for c in cases for goal in c["goals"]]
            missed = [(label, goal["goal"]) for label, goal in all_goals if not goal["passed"]]
            print(f"\n{len(all_goals)} goals, {len(missed)} missed")
            for label, text in missed:
                print(f"  MISS  {label}: {text}")


def show(
    case: str,
    shape: str,
    world: int,
    speeds: dict[str, float],
    found: dict[str, Any],
    judged: list[dict[str, Any]],
) -> None:
    print(f"{case} {shape}, {world} processes; GB/s { ({k: round(v) for k, v in speeds.items()}) }", flush=True)
    table = []
    for name, one in found.items():
        if "failure" not in one:
            share = f"{100 * one['of_ideal']:.1f}%" if "of_ideal" in one else ""
            bias = f"{one['error_bias']:.2g}" if "error_bias" in one else ""
            ms = [f"{one[key]:.4g}" for key in ("ms", "ms_in_a_row")]
            table.append([name, *ms, f"{one['peak_mib']:.0f}", share, f"{one['error']:.2g}", bias])
    headings = ["", "ms", "in a row", "MiB a process", "of ideal", "error of out", "of the bias"]
    kept = len(headings) - (not any(line[-1] for line in table))
    print_table(headings[:kept], [line[:kept] for line in table])
    for name, one in found.items():
        if "failure" in one:
            print(f"  failed: {name}: {one['failure']}", flush=True)
    for goal in judged:
        print(f"  {'pass' if goal['passed'] else 'MISS'}  {goal['goal']}", flush=True)


if __name__ == "__main__":
    main()
