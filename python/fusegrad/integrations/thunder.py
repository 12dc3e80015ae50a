"""An executor for lightning-thunder: ``thunder.jit(model, executors=[fusegrad_ex, *thunder.get_default_executors()])``.

Importing this module registers :data:`fusegrad_ex`. With it, ``torch.nn.functional.cross_entropy`` of a jitted function
becomes :func:`fusegrad.cross_entropy` where its arguments allow, and fusegrad's own losses can be called. docs/thunder.md
has an example.

An op that thunder traces is split here into a forward and a backward by PyTorch's own AOTAutograd, from fake tensors:
the front end checks its arguments once a compilation, and the two halves are graphs of registered ops. What the backward
needs travels through thunder as tensors, so that any number of backwards can read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
import torch
from thunder.core import prims
from thunder.core.devices import to_device, to_torch_device
from thunder.core.dtypes import to_dtype, to_torch_dtype
from thunder.core.proxies import NumberProxy, ProxyTag, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import default_partition
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

import fusegrad

__all__ = ["fusegrad_ex"]

fusegrad_ex = OperatorExecutor("fusegrad", version=fusegrad.__version__)
register_executor(fusegrad_ex)

_TENSOR = object()
_names = itertools.count()


@dataclass(frozen=True)
class _Meta:
    """What a trace knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor | TensorProxy) -> _Meta:
        if isinstance(tensor, Tensor):
            return cls(tuple(tensor.shape), tensor.dtype, tensor.device)
        shape = tuple(int(n) for n in tensor.shape)
        return cls(shape, to_torch_dtype(tensor.dtype), to_torch_device(tensor.device))

    def proxy(self) -> TensorProxy:
        return TensorProxy(
            shape=self.shape, device=to_device(self.device), dtype=to_dtype(self.dtype), requires_grad=False
        )

    def fake(self, requires_grad: bool) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=requires_grad)


@dataclass(frozen=True)
class _Halves:
    """A forward and a backward. `saved` are places among the inputs, or beyond them among the forward's outputs."""

    forward: Symbol
    backward: Symbol
    saved: tuple[int, ...]
    differentiable: tuple[int, ...]
    """Of the outputs, those that bring a gradient."""


class _Call:
    """An op with all but its tensors fixed, on tensors of fixed shapes: a symbol of thunder's traces."""

    def __init__(
        self, name: str, op: Callable[..., Any], spec: TreeSpec, leaves: Sequence[Any], inputs: Sequence[_Meta]
    ) -> None:
        self.name, self.op, self.spec, self.leaves, self.inputs = name, op, spec, leaves, inputs
        self._halves: dict[tuple[bool, ...], _Halves] = {}
        outputs, self.out_spec, _ = self._outputs([False] * len(inputs))
        self.symbol = _symbol(name, outputs, self._flat)
        fusegrad_ex.register_implementation(self.symbol, self.symbol, grad_transform=self._with_gradients)

    def _run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], TreeSpec]:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if x is _TENSOR else x for x in self.leaves], self.spec)
        return tree_flatten(self.op(*args, **kwargs))

    def _flat(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in self._run(tensors)[0] if x is not None)

    def _outputs(self, wanted: Sequence[bool]) -> tuple[list[_Meta], TreeSpec, tuple[int, ...]]:
        """Of a call: the outputs that are tensors, the structure of all, and which of the tensors require grad."""
        with FakeTensorMode(), torch.enable_grad():
            values, spec = self._run([m.fake(w) for m, w in zip(self.inputs, wanted, strict=True)])
        self.absent = [x is None for x in values]
        tensors = [x for x in values if x is not None]
        return [_Meta.of(x) for x in tensors], spec, tuple(i for i, x in enumerate(tensors) if x.requires_grad)

    def __call__(self, *tensors: TensorProxy) -> Any:
        made = iter(self.symbol(*tensors))
        return tree_unflatten([None if absent else next(made) for absent in self.absent], self.out_spec)

    def _with_gradients(self, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        requiring = _names_requiring_grad()
        wanted = tuple(t.name in requiring for t in tensors)
        if not any(wanted):
            return self.symbol(*tensors)
        if wanted not in self._halves:
            self._halves[wanted] = self._split(wanted)
        halves = self._halves[wanted]
        made = halves.forward(*tensors)
        outputs = made[: len(self.absent) - sum(self.absent)]
        saved = [tensors[i] if i < len(tensors) else made[i - len(tensors)] for i in halves.saved]
        upstream = [prims.get_grad(outputs[i]) for i in halves.differentiable]
        gradients = iter(halves.backward(*saved, *upstream))
        for tensor, wants in zip(tensors, wanted, strict=True):
            if wants:
                prims.put_grad(tensor, next(gradients))
        return outputs

    def _split(self, wanted: tuple[bool, ...]) -> _Halves:
        outputs, _, differentiable = self._outputs(wanted)

        def fresh(*tensors: Tensor) -> tuple[Tensor, ...]:
            # AOTAutograd wants outputs that share no memory; aux values do.
            loss, *aux = self._flat(*tensors)
            return loss, *(x.clone() for x in aux)

        with FakeTensorMode(), torch.enable_grad():
            fakes = tuple(m.fake(w) for m, w in zip(self.inputs, wanted, strict=True))
            joint = aot_export_joint_simple(fresh, fakes, trace_joint=True)
            forward, backward = default_partition(joint, [], num_fwd_outputs=len(outputs))
        inputs = {n.name: i for i, n in enumerate(_placeholders(forward))}
        made = _results(forward)
        saved = made[len(outputs) :]
        kept = list(dict.fromkeys(n for n in saved if n.name not in inputs))
        places = {n: len(inputs) + len(outputs) + i for i, n in enumerate(kept)}
        forward = _returning(forward, [*made[: len(outputs)], *kept])
        gradients = [g for g, w in zip(_results(backward), wanted, strict=True) if w]
        backward = _returning(backward, gradients)
        return _Halves(
            _symbol(f"{self.name}_forward", [*outputs, *(_Meta.of(n.meta["val"]) for n in kept)], forward),
            _symbol(f"{self.name}_backward", [m for m, w in zip(self.inputs, wanted, strict=True) if w], backward),
            tuple(inputs[n.name] if n.name in inputs else places[n] for n in saved),
            differentiable,
        )


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.output_node().args[0])


def _returning(graph: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
    graph.graph.output_node().args = (tuple(results),)
    graph.recompile()
    return graph


def _symbol(name: str, outputs: Sequence[_Meta], function: Callable[..., Any]) -> Symbol:
    """A primitive of thunder's traces. Each has a name of its own: it stands for one set of options and shapes."""

    def meta(*tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        return tuple(m.proxy() for m in outputs)

    return fusegrad_ex.register_operator(f"fusegrad_{name}_{next(_names)}", meta=meta, fn=function)


def _names_requiring_grad() -> set[str]:
    """Of the trace so far, the values that a gradient flows through. A proxy's own flag counts for inputs alone: thunder
    copies it from an operand."""
    trace = get_tracectx()
    names = {p.name for p in trace.args or () if isinstance(p, TensorProxy) and p.requires_grad}
    for symbol in itertools.chain.from_iterable(trace.scopes):
        given = [p.name for p in symbol.flat_proxy_args]
        for p in symbol.flat_proxy_outs:
            if not isinstance(p, TensorProxy) or ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags:
                continue
            inherits = any(name in names for name in given)
            if to_torch_dtype(p.dtype).is_floating_point and (inherits or (not given and p.requires_grad)):
                names.add(p.name)
    return names


_calls: dict[Any, _Call] = {}


def _call(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Puts a call of an op into the trace."""
    if "inplace" in kwargs:
        kwargs["inplace"] = False  # a permission, of which a functional trace makes no use
    leaves, spec = tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, (NumberProxy, Tensor)):
            raise NotImplementedError(
                f"{name}: arguments must be tensors that thunder traces, or constants (not with cache='symbolic values'), "
                f"but got {type(leaf).__name__}"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, TensorProxy)]
    constants = tuple(_TENSOR if isinstance(leaf, TensorProxy) else leaf for leaf in leaves)
    inputs = tuple(_Meta.of(t) for t in tensors)
    types = tuple(type(c) for c in constants)  # 1, 1.0 and True are equal, but not the same argument
    key = (name, repr(spec), constants, types, inputs, torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled())
    if key not in _calls:
        _calls[key] = _Call(name, op, spec, constants, inputs)
    return _calls[key](*tensors)


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "flex_attention: it must not be called in a function that thunder.jit compiles, which does not see what score_mods "
        "capture; use torch.compile, or call it outside"
    )


for _op in (fusegrad.cross_entropy, fusegrad.linear_cross_entropy, fusegrad.jsd, fusegrad.linear_jsd):
    fusegrad_ex._lookasides[_op] = functools.partial(_call, _op.__name__, _op)
fusegrad_ex._lookasides[fusegrad.flex_attention] = _flex_attention


# --- torch.nn.functional.cross_entropy --------------------------------------------------------------------------


def _allows(
    a: TensorProxy,
    /,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Whether fusegrad computes what PyTorch would."""
    tensors = [a, target, *([] if weight is None else [weight])]
    dtype = to_torch_dtype(a.dtype)
    kinds = {"cpu": (torch.float64,), "cuda": ()}.get(to_torch_device(a.device).type)
    return (
        kinds is not None
        and dtype in (torch.float32, torch.bfloat16, torch.float16, *kinds)
        and all(t.device == a.device for t in tensors)
        and a.numel != 0
        and size_average is None
        and reduce is None
    )


def _cross_entropy(
    a: TensorProxy,
    /,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = _call("cross_entropy", fusegrad.cross_entropy, a, target, weight, **options)
    return thunder.torch.to(loss, a.dtype)  # PyTorch's loss is rounded to the logits' dtype


def _cross_entropy_with_gradients(a: TensorProxy, /, target: TensorProxy, *args: Any, **kwargs: Any) -> TensorProxy:
    raise NotImplementedError


fusegrad_ex.register_implementation(
    thunder.torch.cross_entropy, checker=_allows, execution_transform=_cross_entropy
)
