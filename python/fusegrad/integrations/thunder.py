"""An executor for lightning-thunder: ``thunder.jit(model, executors=[fusegrad_ex, *thunder.get_default_executors()])``.

Importing this module registers :data:`fusegrad_ex`. With it, ``torch.nn.functional.cross_entropy`` of a jitted function
becomes :func:`fusegrad.cross_entropy` where its arguments allow, and fusegrad's own losses can be called. See
docs/integrations.md.

An op that thunder traces is split here into a forward and a backward by PyTorch's own AOTAutograd, from fake tensors:
the front end checks its arguments once a compilation, and the two halves are graphs of registered ops. What the
backward needs travels through thunder as tensors, so that any number of backwards can read it.
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


class _Call:
    """An op with all but its tensors fixed, on tensors of fixed shapes: a symbol of thunder's traces."""

    def __init__(
        self,
        name: str,
        op: Callable[..., Any],
        spec: TreeSpec,
        leaves: Sequence[Any],
        inputs: Sequence[_Meta],
        wanted: Sequence[bool],
    ) -> None:
        self.name, self.op, self.spec, self.leaves = name, op, spec, leaves
        self.inputs, self.wanted = inputs, wanted
        with FakeTensorMode(), torch.enable_grad():
            values, self.out_spec = self._run(self._fakes())
        self.present = [x is not None for x in values]
        made = [x for x in values if x is not None]
        self.outputs = [_Meta.of(x) for x in made]
        self.views = [x._is_view() for x in made]
        self.differentiable = [i for i, x in enumerate(made) if x.requires_grad]
        self.symbol = _symbol(name, self.outputs, self._flat)
        fusegrad_ex.register_implementation(self.symbol, self.symbol, grad_transform=self._with_gradients)

    def _fakes(self) -> list[Tensor]:
        return [m.fake(w) for m, w in zip(self.inputs, self.wanted, strict=True)]

    def _run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor | None], TreeSpec]:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if x is _TENSOR else x for x in self.leaves], self.spec)
        return tree_flatten(self.op(*args, **kwargs))

    def _flat(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in self._run(tensors)[0] if x is not None)

    def __call__(self, *tensors: TensorProxy) -> Any:
        made = iter(self.symbol(*tensors))
        return tree_unflatten([next(made) if present else None for present in self.present], self.out_spec)

    def _with_gradients(self, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        if not self.differentiable:
            return self.symbol(*tensors)
        forward, backward, saved = self._halves
        made = forward(*tensors)
        outputs = made[: len(self.outputs)]
        upstream = [prims.get_grad(outputs[i]) for i in self.differentiable]
        kept = [tensors[i] if i < len(tensors) else made[i - len(tensors)] for i in saved]
        gradients = iter(backward(*kept, *upstream))
        for tensor, wants in zip(tensors, self.wanted, strict=True):
            if wants:
                prims.put_grad(tensor, next(gradients))
        return outputs

    @functools.cached_property
    def _halves(self) -> tuple[Symbol, Symbol, list[int]]:
        """The forward, the backward, and what that takes of the forward: places among its inputs and, beyond them, its
        outputs."""

        def fresh(*tensors: Tensor) -> tuple[Tensor, ...]:
            # AOTAutograd wants outputs that share no memory.
            outputs = zip(self._flat(*tensors), self.views, strict=True)
            return tuple(x.clone() if view else x for x, view in outputs)

        count = len(self.outputs)
        with FakeTensorMode(), torch.enable_grad():
            joint = aot_export_joint_simple(fresh, tuple(self._fakes()), trace_joint=True)
            forward, backward = default_partition(joint, [], num_fwd_outputs=count)
        inputs = [n for n in forward.graph.nodes if n.op == "placeholder"]
        results = _results(forward)
        kept = [n for n in dict.fromkeys(results[count:]) if n not in inputs]
        places = {n: i for i, n in enumerate([*inputs, *results[:count], *kept])}
        _return(forward, [*results[:count], *kept])
        _return(backward, [g for g, w in zip(_results(backward), self.wanted, strict=True) if w])
        return (
            _symbol(f"{self.name}_forward", [*self.outputs, *(_Meta.of(n.meta["val"]) for n in kept)], forward),
            _symbol(f"{self.name}_backward", [m for m, w in zip(self.inputs, self.wanted, strict=True) if w], backward),
            [places[n] for n in results[count:]],
        )


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.output_node().args[0])


def _return(graph: fx.GraphModule, results: Sequence[fx.Node]) -> None:
    graph.graph.output_node().args = (tuple(results),)
    graph.recompile()


def _symbol(name: str, outputs: Sequence[_Meta], function: Callable[..., Any]) -> Symbol:
    """A primitive of thunder's traces. Each has a name of its own: it stands for one set of options and shapes."""

    def meta(*tensors: TensorProxy) -> tuple[TensorProxy, ...]:
        return tuple(m.proxy() for m in outputs)

    return fusegrad_ex.register_operator(f"fusegrad_{name}_{next(_names)}", meta=meta, fn=function)


def _requiring_grad(tensors: Sequence[TensorProxy]) -> tuple[bool, ...]:
    """Which of them a gradient flows through. A proxy's own flag counts for inputs alone: operations copy it from one
    of their operands."""
    producers = {o.name: s for s in itertools.chain.from_iterable(get_tracectx().scopes) for o in s.flat_proxy_outs}
    known: dict[str, bool] = {}

    def requires(p: Any) -> bool:
        if not isinstance(p, TensorProxy) or ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags:
            return False
        if p.name not in known:
            producer = producers.get(p.name)
            given = [] if producer is None else [x for x in producer.flat_proxy_args if x.name != p.name]
            floating = to_torch_dtype(p.dtype).is_floating_point
            known[p.name] = floating and (any(map(requires, given)) if given else bool(p.requires_grad))
        return known[p.name]

    return tuple(map(requires, tensors))


_calls: dict[Any, _Call] = {}


def _call(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Puts a call of an op into the trace."""
    if "inplace" in kwargs:
        kwargs["inplace"] = False  # a permission, of which a functional trace makes no use
    leaves, spec = tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, (NumberProxy, Tensor)):
            raise NotImplementedError(
                f"{name}: arguments must be tensors that thunder traces, or constants (not with "
                f"cache='symbolic values'), but got {type(leaf).__name__}"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, TensorProxy)]
    constants = tuple(_TENSOR if isinstance(leaf, TensorProxy) else leaf for leaf in leaves)
    inputs = tuple(_Meta.of(t) for t in tensors)
    types = tuple(type(c) for c in constants)  # 1, 1.0 and True are equal, but not the same argument
    wanted = _requiring_grad(tensors)
    key = (name, repr(spec), constants, types, inputs, wanted, _autocast())
    if key not in _calls:
        _calls[key] = _Call(name, op, spec, constants, inputs, wanted)
    return _calls[key](*tensors)


def _autocast() -> tuple[Any, ...]:
    return tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda"))


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "flex_attention: it must not be called in a function that thunder.jit compiles, which does not see what "
        "score_mods capture; use torch.compile, or call it outside"
    )


for _op in (fusegrad.cross_entropy, fusegrad.linear_cross_entropy, fusegrad.jsd, fusegrad.linear_jsd):
    fusegrad_ex._lookasides[_op] = functools.partial(_call, _op.__name__, _op)
fusegrad_ex._lookasides[fusegrad.flex_attention] = _flex_attention


def _cross_entropy(
    input: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    """PyTorch's, by fusegrad where that has kernels for it and by thunder else: other devices and dtypes, and the
    deprecated arguments, which thunder refuses."""
    dtype, device = to_torch_dtype(input.dtype), to_torch_device(input.device).type
    dtypes = [torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if device == "cpu" else [])]
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if device not in ("cpu", "cuda") or dtype not in dtypes or size_average is not None or reduce is not None:
        return thunder.torch.cross_entropy(input, target, weight, size_average, reduce=reduce, **options)
    loss = _call("cross_entropy", fusegrad.cross_entropy, input, target, weight, **options)
    return loss if loss.dtype == input.dtype else thunder.torch.to(loss, input.dtype)  # rounded, as PyTorch's is


fusegrad_ex._lookasides[torch.nn.functional.cross_entropy] = _cross_entropy
