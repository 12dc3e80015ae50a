"""autograd.Functions that a traced function applies.

PyTorch runs their forward, on traced tensors that require grad, and keeps what they save, as it always does: the result
has a node of PyTorch's graph. Here the node is read: the result becomes a value with a derivative of its own, and the
node's backward runs on symbolic gradients when the function has returned. So do the backwards that
torch.library.register_autograd registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

from .errors import Refused, within
from .tensor import TracedTensor, apart, grad_mode, terms_of
from .trees import tensors_of

if TYPE_CHECKING:
    from .trace import Trace

__all__ = ["Functions"]


@dataclass
class _Applied:
    """One application."""

    node: Any
    name: str
    backward: int
    """The term."""
    upstreams: list[Tensor]
    """Terms, of the shape of each output."""
    inputs: list[tuple[int, Tensor]]
    """The place and the terms of each argument that wants a gradient."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """The terms of outputs that are used."""


class Functions:
    """The applications of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.made: list[TracedTensor] = []
        """All of the trace: an argument, or a result that nothing has used yet, is found by its node."""
        self._applied: dict[int, _Applied] = {}
        self._pulling = False

    def close(self) -> None:
        self.made, self._applied = [], {}

    def offered(self, tree: Any) -> Any:
        """The results for the traced function: those that require grad say so, from here on."""
        for x in tensors_of(tree):
            if isinstance(x, TracedTensor) and not x.requires_grad and self.trace.is_active(x):
                x.requires_grad_()
        return tree

    def adopt(self, tree: Any) -> None:
        """Notes by which Functions the traced tensors were made."""
        for x in tensors_of(tree):
            if not isinstance(x, TracedTensor):
                continue
            if x.trace is not self.trace:
                raise Refused("a value of another score_mod or mask_mod", "compute within one function")
            if not x.adopted and x.grad_fn is not None and not self._pulling:
                self._adopt(x)

    def adopt_all(self) -> None:
        """Called before a write to a tensor, which may be an argument of a Function whose result is not used yet."""
        self.adopt(list(self.made))

    def _adopt(self, x: TracedTensor) -> None:
        applied = self._of(x.grad_fn)
        g = self.trace.graph
        upstreams, place = applied.upstreams[x.output_nr], x.output_nr
        if place not in applied.values:
            terms = zip(upstreams.reshape(-1).tolist(), x.terms.reshape(-1).tolist(), strict=True)
            applied.values[place] = terms_of([g.custom(u, t, applied.backward) for u, t in terms], x.shape)
        x._terms, x.read, x.adopted = applied.values[place], None, True

    def _of(self, node: Any) -> _Applied:
        if id(node) not in self._applied:
            self._applied[id(node)] = self._new(node)
        return self._applied[id(node)]

    def _new(self, node: Any) -> _Applied:
        if not isinstance(node, BackwardCFunction):
            raise Refused(
                f"an operation whose derivative is {node.name()}", "register a backward, or write an autograd.Function"
            )
        function = node._forward_cls
        if function is BackwardHookFunction:
            raise Refused("a backward hook of a module", "remove it: score_mods have no place for it")
        name = _name_of(function)
        with within(f"the autograd.Function {name}"):
            g = self.trace.graph
            shapes = [tuple(meta.shape) for meta in node._input_metadata]
            upstreams = [terms_of([g.upstream() for _ in range(torch.Size(s).numel())], s) for s in shapes]
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            places = [i for i, needed in enumerate(node.needs_input_grad) if needed]
            inputs = [(i, self._terms_at(*edge)) for i, edge in zip(places, edges, strict=True)]
        return _Applied(node, name, g.backward(), upstreams, inputs)

    def _terms_at(self, node: Any, place: int) -> Tensor:
        """The argument to which the edge of a node leads."""
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is None:
            known_tensors = [*self.made, *self.trace.buffers, *self.trace.steps.outputs()]
            variable = next((t for t in known_tensors if t.grad_fn is node and t.output_nr == place), None)
        if variable is None:
            raise Refused(
                "an argument that is neither a traced value nor a captured tensor it reads",
                "index captured tensors before: pass bias[kv_idx], not bias",
            )
        if not isinstance(variable, TracedTensor):
            variable = self.trace.captured(variable)
        self.adopt(variable)
        return variable.terms

    def pull_back(self) -> None:
        """Runs the backwards of all Functions that were applied."""
        self._pulling = True
        for applied in self._applied.values():
            if applied.values:
                with within(f"the backward of {applied.name}"):
                    self._pull_back(applied)

    def _pull_back(self, applied: _Applied) -> None:
        metadata = applied.node._input_metadata
        grads = [self.trace.wrap(u, m.dtype) for u, m in zip(applied.upstreams, metadata, strict=True)]
        with grad_mode(False), self.trace.active():
            out = applied.node.apply(*grads)
        given = out if isinstance(out, (tuple, list)) else (out,)
        wanted = len(applied.node.needs_input_grad)
        if len(given) < wanted or any(x is not None for x in given[wanted:]):
            raise Refused(
                f"it returned {len(given)} gradients for {wanted} arguments",
                "return one for each, None for no gradient",
            )
        with apart():
            for i, terms in applied.inputs:
                if given[i] is not None:
                    gradient = self._gradient(given[i], terms.shape)
                    for pair in zip(terms.reshape(-1).tolist(), gradient.reshape(-1).tolist(), strict=True):
                        self.trace.graph.add_pair(applied.backward, *pair)

    def _gradient(self, x: Any, shape: Sequence[int]) -> Tensor:
        if not isinstance(x, Tensor):
            raise Refused(f"it returned a gradient of type {type(x).__name__}", "return tensors, or None")
        if not isinstance(x, TracedTensor):
            x = self.trace.captured(x)
        if x.shape != tuple(shape):
            with grad_mode(False):
                x = x.sum_to_size(shape)  # as PyTorch's autograd does
        return x.terms


def _name_of(function: type) -> str:
    """An op's backward has a class of its own, which torch._library names."""
    name = function.__qualname__
    return name.removeprefix("GeneratedBackwardFor_") if name.startswith("GeneratedBackwardFor_") else name
