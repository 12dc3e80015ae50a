"""The transforms of the compatibility table: each takes a case and returns its gradients, by its own way to them."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed
from compat_ops import Case, widest
from support import assert_as_good_as_eager
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PASS = "✓"
ABSENT = "–"
LENGTHS = (12, 20, 28)


@dataclass(frozen=True)
class Transform:
    """`run(case)` gives the gradients of the case's leaves; with `forward_only` the loss."""

    name: str
    run: Callable[[Case], Sequence[Tensor]]
    low_precision: bool = False
    forward_only: bool = False
    cuda_only: bool = False
    slow: bool = False

    def __str__(self) -> str:
        return self.name


def gradients(case: Case, program: Callable[..., Tensor], rows: int | None = None) -> Sequence[Tensor]:
    leaves, constants = case.draw(rows)
    return torch.autograd.grad(program(*leaves, *constants), leaves)


def backward(case: Case, program: Callable[..., Tensor]) -> Sequence[Tensor]:
    """Through .grad of the leaves, where a backward accumulates."""
    leaves, constants = case.draw()
    program(*leaves, *constants).backward()
    return [t.grad for t in leaves]


class Program(nn.Module):
    """The case's program with the leaves as parameters."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        leaves, constants = case.draw()
        self.case = case
        self.leaves = nn.ParameterList(leaves)
        self.constants = constants

    def forward(self, factor: Tensor) -> Tensor:
        return factor * self.case.program(*self.leaves, *self.constants)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.leaves]


# --- without a compiler -------------------------------------------------------------------------------------------


def retain_graph(case: Case) -> Sequence[Tensor]:
    leaves, constants = case.draw()
    loss = case.program(*leaves, *constants)
    runs = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(3)]
    copies = [[t.clone() for t in run] for run in runs]
    runs.append(torch.autograd.grad(loss, leaves))
    for run in [*runs[:3], *copies]:
        for one, last in zip(run, runs[3], strict=True):
            assert torch.equal(one, last), "a backward of a kept graph differs from another, or was overwritten"
    return runs[3]


def several_outputs(case: Case) -> Sequence[Tensor]:
    """Two losses of shared leaves, and an output that has nothing to do with the op."""
    leaves, constants = case.draw()
    tensors = [*leaves, *constants]
    outputs = [case.program(*tensors), 2 * case.program(*tensors), leaves[0] * 3]
    weights = [torch.full_like(outputs[0], 0.5), torch.full_like(outputs[1], 0.25), torch.zeros_like(outputs[2])]
    return torch.autograd.grad(outputs, leaves, weights)


def gradient_accumulation(case: Case) -> Sequence[Tensor]:
    leaves, constants = case.draw()
    for part in (0.25, 0.625, 0.125):
        (part * case.program(*leaves, *constants)).backward()
    return [t.grad for t in leaves]


def anomaly_mode(case: Case) -> Sequence[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return backward(case, case.program)


def hooks_on_inputs(case: Case) -> Sequence[Tensor]:
    """A hook on each argument of the op, which doubles its gradient, and `retain_grad`, which keeps the double."""
    leaves, constants = case.draw()
    activations = case.activations([*leaves, *constants])
    before: dict[int, Tensor] = {}
    for i, t in enumerate(activations[: len(leaves)]):
        t.retain_grad()
        t.register_hook(lambda g, i=i: before.setdefault(i, g.clone()) * 2)
    case.loss(activations).backward()
    for i, t in enumerate(activations[: len(leaves)]):
        assert torch.equal(t.grad, before[i] * 2), "retain_grad does not hold what the hook returned"
    return [t.grad / 2 for t in leaves]


def save_on_cpu(case: Case) -> Sequence[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        return gradients(case, case.program)


def autocast_and_scaler(case: Case) -> Sequence[Tensor]:
    module = Program(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(case.device, init_scale=2.0**10)
    with torch.autocast(case.device, torch.bfloat16):
        loss = module(torch.ones((), device=case.device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return module.gradients()


def data_parallel(case: Case) -> Sequence[Tensor]:
    """One process; a bucket of a few bytes makes the reducer's hooks run between the parameters."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = Program(case)
        parallel = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-6)
        parallel(torch.ones((), device=case.device, dtype=case.dtype)).backward()
        return module.gradients()
    finally:
        torch.distributed.destroy_process_group()


def torch_func_grad(case: Case) -> Sequence[Tensor]:
    leaves, constants = case.draw()
    places = tuple(range(len(leaves)))
    return torch.func.grad(case.program, argnums=places)(*(t.detach() for t in leaves), *constants)


def torch_func_vjp(case: Case) -> Sequence[Tensor]:
    leaves, constants = case.draw()
    loss, pullback = torch.func.vjp(lambda *t: case.program(*t, *constants), *(t.detach() for t in leaves))
    return pullback(torch.ones_like(loss))


def vmap_of_grad(case: Case) -> Sequence[Tensor]:
    """For a batch, the case's leaves being its second element."""
    leaves, constants = case.draw()
    places = tuple(range(len(leaves)))
    batch = [torch.stack([t.detach() * 0.5, t.detach()]) for t in leaves]
    dims = (*(0 for _ in leaves), *(None for _ in constants))
    found = torch.vmap(torch.func.grad(case.program, argnums=places), in_dims=dims)(*batch, *constants)
    return [g[1] for g in found]


def create_graph(case: Case) -> Sequence[Tensor]:
    """The gradients, having compared those of a function of them."""

    def of(program: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        leaves, constants = case.draw()
        leaves = [t.detach().to(dtype).requires_grad_() for t in leaves]
        constants = [t.to(dtype) if t.is_floating_point() else t for t in constants]
        first = torch.autograd.grad(program(*leaves, *constants), leaves, create_graph=True)
        return first, torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    first, second = of(case.program, widest(case.device))
    truth = of(case.plain().program, torch.float64)[1]
    for i, (ours, right) in enumerate(zip(second, truth, strict=True)):
        scale = right.abs().max().item() + 1.0
        if (ours.double() - right).abs().max().item() > scale * (1e-10 if ours.dtype == torch.float64 else 1e-3):
            raise SilentDifference(f"{case}: gradient {i} of the gradients")
    return [g.detach() for g in first]


# --- checkpoints --------------------------------------------------------------------------------------------------


def checkpoint_non_reentrant(case: Case) -> Sequence[Tensor]:
    return gradients(case, lambda *t: checkpoint(case.program, *t, use_reentrant=False))


def checkpoint_reentrant(case: Case) -> Sequence[Tensor]:
    return backward(case, lambda *t: checkpoint(case.program, *t, use_reentrant=True))


def _of_ours(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = op.namespace == "fusegrad"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def _of_others(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = op.namespace == "fusegrad"
    return CheckpointPolicy.PREFER_RECOMPUTE if ours else CheckpointPolicy.PREFER_SAVE


def selective_checkpoint(policy: Callable[..., CheckpointPolicy]) -> Callable[[Case], Sequence[Tensor]]:
    def run(case: Case) -> Sequence[Tensor]:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return gradients(case, lambda *t: checkpoint(case.program, *t, use_reentrant=False, context_fn=contexts))

    return run


# --- compilers ----------------------------------------------------------------------------------------------------


def compiled(backend: str, **options: Any) -> Callable[[Case], Sequence[Tensor]]:
    """One graph, or an error: fullgraph."""

    def run(case: Case) -> Sequence[Tensor]:
        torch._dynamo.reset()
        return gradients(case, torch.compile(case.program, backend=backend, fullgraph=True, **options))

    return run


def compile_dynamic(case: Case) -> Sequence[Tensor]:
    """Three lengths by one compilation; the other two are checked here."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    program = torch.compile(case.program, backend=counter, fullgraph=True, dynamic=True)
    results = {LENGTHS[0]: gradients(case, program, LENGTHS[0])}
    compilations = counter.frame_count
    results |= {rows: gradients(case, program, rows) for rows in LENGTHS[1:]}
    assert counter.frame_count == compilations, "compiled again for another length"
    for rows in LENGTHS[1:]:
        check(replace(case, rows=rows), results[rows])
    return results[LENGTHS[0]]


def reduce_overhead(case: Case) -> Sequence[Tensor]:
    """Warm-up, recording and replay of the CUDA graphs."""
    torch._dynamo.reset()
    program = torch.compile(case.program, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        result = [t.clone() for t in gradients(case, program)]
    return result


@contextlib.contextmanager
def compiled_autograd(backend: str) -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        yield


def compiled_backward(case: Case) -> Sequence[Tensor]:
    with compiled_autograd("aot_eager"):
        return backward(case, case.program)


def cuda_graphs(case: Case) -> Sequence[Tensor]:
    """Captured with the inputs of one draw, replayed with others."""
    leaves, constants = case.draw()
    sample = [torch.randn_like(t).requires_grad_() for t in leaves]
    program = torch.cuda.make_graphed_callables(lambda *t: case.program(*t, *constants), tuple(sample))
    for _ in range(2):
        result = [t.clone() for t in torch.autograd.grad(program(*leaves), leaves)]
    return result


def export(case: Case) -> Sequence[Tensor]:
    leaves, constants = case.draw()

    class Forward(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return case.program(*tensors)

    inputs = (*(t.detach() for t in leaves), *constants)
    return [torch.export.export(Forward(), inputs).module()(*inputs)]


def to_a_file(case: Case, strict: bool) -> Sequence[Tensor]:
    """Lengths dynamic where draws of other lengths differ, through a file, once decomposed and once not; at another
    length it is checked here."""

    def inputs_of(rows: int) -> tuple[Tensor, ...]:
        leaves, constants = case.draw(rows)
        return (*(t.detach() for t in leaves), *constants)

    class Forward(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return case.program(*tensors)

    inputs, others = (inputs_of(rows) for rows in LENGTHS[:2])
    length = torch.export.Dim("length", min=2, max=4096)
    dynamic = tuple(
        {i: length for i, (m, n) in enumerate(zip(one.shape, other.shape, strict=True)) if m != n}
        for one, other in zip(inputs, others, strict=True)
    )
    file = io.BytesIO()
    program = torch.export.export(Forward(), inputs, dynamic_shapes={"tensors": dynamic}, strict=strict)
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    result = loaded.module()(*inputs)
    for one in (loaded, loaded.run_decompositions()):
        assert torch.equal(one.module()(*inputs), result)
        check(replace(case, rows=LENGTHS[1]), [one.module()(*others)], _FORWARD)
    return [result]


def jit_trace(case: Case) -> Sequence[Tensor]:
    """Traced with other values."""
    leaves, constants = case.draw()
    sample = [torch.randn_like(t).requires_grad_() for t in leaves]
    return gradients(case, torch.jit.trace(case.program, (*sample, *constants)))


_FORWARD = Transform("forward", lambda case: [], forward_only=True)

TRANSFORMS = [
    Transform("eager", lambda case: gradients(case, case.program)),
    Transform("torch.compile, aot_eager", compiled("aot_eager")),
    Transform("torch.compile, inductor", compiled("inductor"), slow=True),
    Transform("torch.compile, dynamic shapes", compile_dynamic),
    Transform("torch.compile, reduce-overhead", reduce_overhead, cuda_only=True),
    Transform("compiled autograd", compiled_backward),
    Transform("make_graphed_callables", cuda_graphs, cuda_only=True),
    Transform("torch.export", export, forward_only=True),
    Transform("torch.export, dynamic, saved and loaded", partial(to_a_file, strict=False), forward_only=True),
    Transform("torch.export, strict, saved and loaded", partial(to_a_file, strict=True), forward_only=True, slow=True),
    Transform("torch.jit.trace", jit_trace),
    Transform("checkpoint, non-reentrant", checkpoint_non_reentrant),
    Transform("checkpoint, reentrant", checkpoint_reentrant),
    Transform("selective checkpoint, op saved", selective_checkpoint(_of_ours)),
    Transform("selective checkpoint, op recomputed", selective_checkpoint(_of_others)),
    Transform("save_on_cpu", save_on_cpu),
    Transform("autocast and GradScaler", autocast_and_scaler, low_precision=True),
    Transform("gradient accumulation", gradient_accumulation),
    Transform("retain_graph, three times", retain_graph),
    Transform("autograd.grad of several outputs", several_outputs),
    Transform("anomaly mode", anomaly_mode),
    Transform("hooks on inputs", hooks_on_inputs),
    Transform("DistributedDataParallel", data_parallel),
    Transform("torch.func.grad", torch_func_grad),
    Transform("torch.func.vjp", torch_func_vjp),
    Transform("vmap of torch.func.grad", vmap_of_grad),
    Transform("create_graph, differentiated again", create_graph),
]


# --- cells --------------------------------------------------------------------------------------------------------


class SilentDifference(AssertionError):
    """A wrong result without an error: what must never be."""


def check(case: Case, results: Sequence[Tensor], transform: Transform | None = None) -> None:
    """The rule of errors for each result. In low precision eager's error is that under the same transform."""
    loss, truth = case.truth()
    names = [f"gradient {i}" for i in range(len(truth))]
    eager: Sequence[Tensor]
    if transform is not None and transform.forward_only:
        leaves, constants = case.draw()
        eager, truth, names = [case.plain().program(*leaves, *constants)], [loss], ["loss"]
    elif transform is not None and transform.low_precision:
        eager = transform.run(case.plain())
    else:
        eager = gradients(case, case.plain().program)
    for name, ours, by_eager, right in zip(names, results, eager, truth, strict=True):
        try:
            assert ours is not None, f"{name} is missing"
            assert ours.dtype == by_eager.dtype, f"{name} has dtype {ours.dtype}, eager's {by_eager.dtype}"
            # Eager's few numbers may be right by luck; and where one key has nearly all of a row's weight, dP less
            # its mean is what rounding leaves of both, if that mean is grad_out * out (docs/flex_attention.md).
            rough = right.numel() <= 16 or (case.op.name == "flex_attention" and case.device == "cuda")
            assert_as_good_as_eager(ours, by_eager, right, f"{case}: {name}", least=2**-18 if rough else 0.0)
        except AssertionError as error:
            raise SilentDifference(str(error)) from error


def outcome(case: Case, transform: Transform) -> str:
    """The cell: PASS, ABSENT, or "error: …" with the op's own message.

    Raises:
        SilentDifference: where the result is wrong.
        Exception: what was raised, where its message does not name the op.
    """
    if transform.cuda_only and case.device != "cuda":
        return ABSENT
    case = replace(case, dtype=torch.float32 if transform.low_precision else widest(case.device))
    try:
        results = transform.run(case)
    except SilentDifference:
        raise
    except Exception as error:
        named = re.search(rf"(?:fusegrad::)?\b{case.op.name}_?: [^\n]*", str(error))
        if named is None:
            raise
        return f"error: {named.group()}"
    check(case, results, transform)
    return PASS
