"""Linear cross entropy with its vocabulary sharded over processes: fusegrad, alone and sharded, beside PyTorch's own.

PyTorch's is a DTensor head under `loss_parallel`, whose logits are kept. Forward and backward to the hidden states,
which all processes hold, and to each one's part of the weight; times and memory are the slowest and the largest
process's. Memory is above the inputs and counts the gradients.

The step is that of a model whose layers FSDP2 shards and whose tokens are the processes' own: hidden states are
gathered for a head of a sharded vocabulary. Each layer is one graph of torch.compile, and so is the gather with the
loss.

    python benchmarks/vocab_parallel.py [--device cpu] [--shapes NxHxV,...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import fusegrad
import torch
from harness.environment import environment, in_file_names
from harness.processes import processes, timed
from harness.report import print_table, write_json
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

Loss = Callable[[Tensor, Tensor], Tensor]


def in_turn(mesh: DeviceMesh, loss: Loss, hidden: Tensor, weight: Tensor, reps: int) -> dict[str, float]:
    def run() -> Tensor:
        hidden.grad = weight.grad = None
        out = loss(hidden, weight)
        out.backward()
        return out.detach()

    value = float(run())
    (ms,), mib = timed(mesh, run, reps)
    hidden.grad = weight.grad = None
    return {"loss": value, "ms": ms, "peak_mib": mib}


def parts(mesh: DeviceMesh, vocabulary: int) -> fusegrad.VocabParallel:
    """As DTensor shards it."""
    size, rank = -(-vocabulary // mesh.size()), mesh.get_local_rank()
    return fusegrad.VocabParallel(mesh.get_group(), min(rank * size, vocabulary), min((rank + 1) * size, vocabulary))


def losses(
    mesh: DeviceMesh, shards: fusegrad.VocabParallel, target: Tensor, dtype: torch.dtype
) -> dict[str, tuple[Loss, bool]]:
    """Each loss, and whether its weight is this process's part."""
    vocabulary = shards.vocab
    lean = {"accumulate_dtype": dtype}

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        part = DTensor.from_local(
            weight, mesh, [Shard(0)], run_check=False, shape=(vocabulary, hidden.shape[1]), stride=(hidden.shape[1], 1)
        )
        with loss_parallel():
            logits = torch.nn.functional.linear(whole, part)
            loss = torch.nn.functional.cross_entropy(
                logits, DTensor.from_local(target, mesh, [Replicate()], run_check=False)
            )
        return loss.to_local()

    def ours(hidden: Tensor, weight: Tensor, **options: object) -> Tensor:
        return fusegrad.linear_cross_entropy(hidden, weight, target, **options)  # type: ignore[arg-type]

    return {
        "fusegrad, one process": (ours, False),
        "PyTorch, loss_parallel": (theirs, True),
        "fusegrad": (functools.partial(ours, vocab_parallel=shards), True),
        "fusegrad, lean": (functools.partial(ours, vocab_parallel=shards, **lean), True),
    }


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def steps(mesh: DeviceMesh, sizes: tuple[int, int, int], reps: int, layers: int = 4) -> dict[str, dict[str, float]]:
    """A forward and backward of `layers` layers under FSDP2 and the sharded head, compiled and not."""
    rows, width, vocabulary = sizes
    device = mesh.device_type
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shards, found = parts(mesh, vocabulary), {}
    torch.manual_seed(0)
    tokens = torch.randn(rows, width, device=device, dtype=dtype).chunk(mesh.size())[mesh.get_local_rank()]
    head = (torch.randn(vocabulary, width, device=device, dtype=dtype) * width**-0.5)[shards.start : shards.stop]
    head = head.clone().requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), device=device)

    def loss_of(hidden: Tensor) -> Tensor:
        whole = all_gather_tensor_autograd(hidden, 0, mesh.get_group())
        return fusegrad.linear_cross_entropy(whole, head, target, vocab_parallel=shards)

    for name, compiled in (("step", False), ("step, one graph a layer and for the loss", True)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block(width) for _ in range(layers))).to(device, dtype)
        for block in model:
            fully_shard(block, mesh=mesh)
            if compiled:
                block.forward = torch.compile(block.forward, fullgraph=True)  # its hooks stay outside
        fully_shard(model, mesh=mesh)
        last = torch.compile(loss_of, fullgraph=True) if compiled else loss_of

        def run(model: torch.nn.Module = model, last: Callable[[Tensor], Tensor] = last) -> Tensor:
            model.zero_grad()
            head.grad = None
            loss = last(model(tokens))
            loss.backward()
            return loss.detach()

        value = float(run())
        (ms,), mib = timed(mesh, run, reps)
        found[name] = {"loss": value, "ms": ms, "peak_mib": mib}
    return found


def measured(mesh: DeviceMesh, sizes: tuple[int, int, int], reps: int) -> dict[str, dict[str, float]]:
    rows, width, vocabulary = sizes
    device = mesh.device_type
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype) * width**-0.5
    target = torch.randint(0, vocabulary, (rows,), device=device)
    shards, found = parts(mesh, vocabulary), {}
    for name, (loss, sharded) in losses(mesh, shards, target, dtype).items():
        part = weight[shards.start : shards.stop].clone() if sharded else weight
        found[name] = in_turn(mesh, loss, hidden, part.requires_grad_(), reps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear cross entropy with a sharded vocabulary.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="8192x4096x128256,4096x4096x128256,8192x2304x256000", help="NxHxV, ...")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    arguments = parser.parse_args()
    device = arguments.device
    with processes(device, "tp") as mesh:
        document = {"op": "vocab_parallel", "processes": mesh.size(), **environment(device, arguments.commit)}
        document["cases"] = cases = []
        for shape in arguments.shapes.split(","):
            rows, width, vocabulary = (int(size) for size in shape.split("x"))
            found = measured(mesh, (rows, width, vocabulary), arguments.reps)
            if not cases:  # of the first shape alone
                found |= steps(mesh, (rows, width, vocabulary), arguments.reps)
            cases.append({"sizes": {"N": rows, "H": width, "V": vocabulary}, "results": found})
            if mesh.get_rank() != 0:
                continue
            print(f"N{rows} H{width} V{vocabulary}, {mesh.size()} processes")
            table = [[name, *(f"{value:.5g}" for value in one.values())] for name, one in found.items()]
            print_table(["", "loss", "ms", "MiB a process"], table)
            if arguments.output is not None:
                write_json(
                    arguments.output / f"vocab_parallel-{mesh.size()}-{in_file_names(document['device'])}.json",
                    document,
                )


if __name__ == "__main__":
    main()
