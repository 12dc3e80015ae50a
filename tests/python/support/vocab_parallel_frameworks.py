"""Losses over a shared vocabulary within autocast, compilers, DTensors and data parallelism."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import fusegrad
import torch
import torch.distributed as dist
from fusegrad import VocabParallel, reference
from processes import assert_raises
from torch import Tensor
from vocab_parallel_support import (
    DEVICE,
    ROWS,
    WIDEST,
    H,
    V,
    assert_close,
    case,
    check_same,
    leaf,
    same,
    small_losses,
)


@case
def autocast(shards: VocabParallel) -> None:
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    with torch.autocast(DEVICE, torch.bfloat16):
        check_same(
            "autocast",
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target, vocab_parallel=shards),
            lambda x, w: fusegrad.linear_cross_entropy(x, w, target),
            [torch.randn(ROWS, H), torch.randn(V, H)],
            [same, lambda t: t[cut]],
        )


@case
def compiled(shards: VocabParallel) -> None:
    """Each loss in one graph, and its backward in one."""
    from torch._dynamo.backends.common import aot_autograd

    for name, (loss, x, w) in small_losses(shards).items():
        for options in ({}, {"reduction": "none"}):
            graphs: list[Any] = []

            def count(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
                graphs.append(graph)
                return graph

            def step(x: Tensor, *w: Tensor, loss: Any = loss, options: Any = options) -> Tensor:
                return loss(x * 2, w[0] * 3 if w else None, **options) + x.sum()

            torch.compiler.reset()
            backend = aot_autograd(fw_compiler=count, bw_compiler=count)
            inputs = [x] if w is None else [x, w]
            check_same(
                f"torch.compile, {name} {options}",
                torch.compile(step, backend=backend, fullgraph=True),
                step,
                inputs,
                [same] * len(inputs),
            )
            assert len(graphs) == 2, f"{name}: a graph for the forward and one for the backward, but {len(graphs)}"
    # What differs is an error of the compiled call too.
    target = torch.full((ROWS,), shards.rank)
    whole = torch.compile(
        lambda x: fusegrad.cross_entropy(x, target, vocab_parallel=shards), backend="aot_eager", fullgraph=True
    )
    logits = torch.randn(ROWS, shards.size)
    assert_raises(ValueError, "cross_entropy: target must be the same in all processes", lambda: whole(logits))


@case
def thunder(shards: VocabParallel) -> None:
    if importlib.util.find_spec("thunder") is None or not hasattr(Tensor, "align_as"):
        return
    import thunder
    from fusegrad.integrations.thunder import fusegrad_ex

    # thunder does not see tensors that a function's function has captured.
    cut = slice(shards.start, shards.stop)
    target = torch.randint(0, V, (ROWS,))
    teacher, weight, hidden = (torch.randn(*shape).to(WIDEST) for shape in ((ROWS, V), (V, H), (ROWS, H)))
    steps: list[tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]] = [
        (lambda z, t: fusegrad.cross_entropy(z * 2, t, vocab_parallel=shards), [teacher[:, cut]], [target]),
        (lambda z, t: fusegrad.jsd(z * 2, t, vocab_parallel=shards), [teacher[:, cut]], [-teacher[:, cut]]),
        (
            lambda x, w, t: fusegrad.linear_cross_entropy(x * 2, w, t, vocab_parallel=shards),
            [hidden, weight[cut]],
            [target],
        ),
        (
            lambda x, w, h, t: fusegrad.linear_jsd(x * 2, w, h, t, vocab_parallel=shards),
            [hidden, weight[cut]],
            [hidden, -weight[cut]],
        ),
    ]
    for i, (step, inputs, others) in enumerate(steps):
        jitted = thunder.jit(step, executors=[fusegrad_ex, *thunder.get_default_executors()])
        check_same(
            f"thunder, {i}",
            lambda *x, f=jitted, o=others: f(*x, *o),
            lambda *x, f=step, o=others: f(*x, *o),
            inputs,
            [same] * len(inputs),
        )


@case
def dtensors(shards: VocabParallel) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(shards.group, DEVICE, mesh_dim_names=("tp",))
    x, target = torch.randn(12, H), torch.randint(0, V, (12,))
    head = torch.nn.Linear(H, V)
    plain = leaf(x)
    truth = reference.linear_cross_entropy(plain, head.weight, target, linear_bias=head.bias, label_smoothing=0.1)[0]
    truth.backward()
    expected = head.weight.grad, head.bias.grad
    head.zero_grad()
    parallel = parallelize_module(head, mesh, ColwiseParallel())
    assert isinstance(parallel.weight, DTensor)

    for placement in (None, Replicate(), Shard(0)):
        given = leaf(x) if placement is None else leaf(distribute_tensor(x, mesh, [placement]))
        loss = fusegrad.linear_cross_entropy(
            given, parallel.weight, target, linear_bias=parallel.bias, label_smoothing=0.1
        )
        assert_close(loss, truth, "DTensor, loss")
        loss.backward()
        grad = given.grad if placement is None else given.grad.full_tensor()
        assert placement is None or given.grad.placements == (placement,)
        assert_close(grad, plain.grad, f"DTensor {placement}, input")
        assert_close(parallel.weight.grad.full_tensor(), expected[0], "DTensor, weight")
        assert_close(parallel.bias.grad.full_tensor(), expected[1], "DTensor, bias")
        parallel.zero_grad()

    criterion = fusegrad.LinearCrossEntropyLoss(H, V)
    truth = reference.linear_cross_entropy(x, criterion.linear.weight, target)[0]
    (expected_weight,) = torch.autograd.grad(truth, criterion.linear.weight)
    parallelize_module(criterion, mesh, {"linear": ColwiseParallel()})
    loss = criterion(x, target)
    loss.backward()
    assert_close(loss, truth, "LinearCrossEntropyLoss")
    assert_close(criterion.linear.weight.grad.full_tensor(), expected_weight, "LinearCrossEntropyLoss, weight")

    logits = torch.randn(12, V)
    whole = leaf(logits)
    truth = reference.cross_entropy(whole, target)[0]
    truth.backward()
    part = leaf(distribute_tensor(logits, mesh, [Shard(1)]))
    loss = fusegrad.cross_entropy(part, target)
    loss.backward()
    assert_close(loss, truth, "DTensor logits")
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor logits, gradient")

    other = torch.randn(12, V)
    whole, part = leaf(logits), leaf(part)
    reference.jsd(whole, other)[0].backward()
    fusegrad.jsd(part, distribute_tensor(other, mesh, [Shard(1)])).backward()
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor jsd, gradient")

    weight, frozen = torch.randn(V, H), torch.randn(V, H)
    whole = leaf(weight)
    reference.linear_jsd(x, whole, x, frozen)[0].backward()
    part = leaf(distribute_tensor(weight, mesh, [Shard(0)]))
    fusegrad.linear_jsd(x, part, x, distribute_tensor(frozen, mesh, [Shard(0)])).backward()
    assert_close(part.grad.full_tensor(), whole.grad, "DTensor linear_jsd, gradient")

    for placement in (Replicate(), Shard(1)):
        wrong = distribute_tensor(weight, mesh, [placement])
        assert_raises(
            ValueError,
            "linear_cross_entropy: linear_weight must be Shard(0)",
            lambda w=wrong: fusegrad.linear_cross_entropy(x, w, target),
        )


class TinyModel(torch.nn.Module):
    """Token embedding, a block, and the loss of a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.block = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh(), torch.nn.LayerNorm(H))

    def forward(self, tokens: Tensor, target: Tensor, normalizer: Tensor, inplace: bool) -> Tensor:
        hidden = self.block(self.embedding(tokens))
        return fusegrad.linear_cross_entropy(
            hidden, self.embedding.weight, target, normalizer=normalizer, inplace=inplace
        )


@case
def data_parallel(shards: VocabParallel) -> None:
    """The gradients of DDP and FSDP2 are one process's, with numbers of kept tokens that differ by process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    plain = TinyModel()
    tokens, target = torch.randint(0, V, (2 * shards.world, 5)), torch.randint(0, V, (2 * shards.world, 5))
    target[0] = -100
    state = plain.state_dict()
    plain(tokens, target, (target != -100).sum(), False).backward()
    mine = slice(2 * shards.rank, 2 * shards.rank + 2)
    kept = (target[mine] != -100).sum().float()
    dist.all_reduce(kept, group=shards.group)
    for kind in ("ddp", "fsdp"):
        model = TinyModel()
        model.load_state_dict(state)
        step: Any = model
        if kind == "ddp":
            step = torch.nn.parallel.DistributedDataParallel(model, process_group=shards.group)
        else:
            mesh = DeviceMesh.from_group(shards.group, DEVICE)
            fully_shard(model.block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        step(tokens[mine], target[mine], kept / shards.world, True).backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
            assert_close(grad, plain.get_parameter(name).grad, f"{kind}, {name}")


@case
def compiled_data_parallel(shards: VocabParallel) -> None:
    """FSDP2's layers, and the loss of a sharded head of all processes' hidden states: each one graph. PyTorch does not
    trace FSDP2's own hooks."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    plain = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh())
    inputs, target = torch.randn(4 * shards.world, H), torch.randint(0, V, (4 * shards.world,))
    state, weight = plain.state_dict(), torch.randn(V, H, requires_grad=True)
    fusegrad.linear_cross_entropy(plain(inputs), weight, target).backward()
    layer = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Tanh())
    layer.load_state_dict(state)
    fully_shard(layer, mesh=DeviceMesh.from_group(shards.group, DEVICE))
    torch.compiler.reset()
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]

    def loss_of(hidden: Tensor, part: Tensor, target: Tensor) -> Tensor:
        whole = all_gather_tensor_autograd(hidden, 0, shards.group)
        return fusegrad.linear_cross_entropy(whole, part, target, vocab_parallel=shards)

    step = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    mine = slice(4 * shards.rank, 4 * shards.rank + 4)
    part = weight.detach()[shards.start : shards.stop].clone().requires_grad_()
    step(layer(inputs[mine]), part, target).backward()
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, name)
    assert_close(part.grad, weight.grad[shards.start : shards.stop], "head")
