"""autograd.Functions that a traced function applies.

PyTorch runs their forward, on traced tensors that require grad, and keeps what they save, as it always does: the result
has a node of PyTorch's graph. Here the node is read: the result becomes a value with a derivative of its own, and the
node's backward runs on symbolic gradients when the function has returned. So do the backwards that
torch.library.register_autograd registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn.modules._functions import BackwardHookFunction

from .errors import Refused, within
from .tensor import TracedTensor, apart, grad_mode
from .trees import tensors_of
from .vectors import terms_of

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
    within: _Applied | None
    """The application whose backward applied it."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """The terms of outputs that are used."""
    pulled: bool = False


class Functions:
    """The applications of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.made: list[TracedTensor] = []
        """All of the trace: an argument, or a result that nothing has used yet, is found by its node."""
        self._applied: dict[int, _Applied] = {}
        self._pulled: _Applied | None = None

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
            if not x.adopted and x.grad_fn is not None:
                self._adopt(x)

    def adopt_all(self) -> None:
        """Called before a write to a tensor, which may be an argument of a Function whose result is not used yet."""
        self.adopt(list(self.made))

    def _adopt(self, x: TracedTensor) -> None:
        g = self.trace.graph
        node, place = x.grad_fn, x.output_nr
        if self._pulled is not None and id(node) not in self._applied:
            inputs = self._inputs_of(node)
            kept = [t for _, of_input in inputs for t in of_input.reshape(-1).tolist()]
            value = x.terms.reshape(-1).tolist()
            if self._pulled.within is not None or any(map(g.on_upstream, value)) or not _is_function(node):
                # The language has no derivative of one's own by an upstream gradient: it is that of what was computed.
                x._terms = terms_of([g.stripped(t, kept) for t in value], x.shape)
                x.read, x.adopted = None, True
                return
        applied = self._of(node)
        if place not in applied.values:
            columns = zip(applied.upstreams[place].reshape(-1).tolist(), x.terms.reshape(-1).tolist(), strict=True)
            applied.values[place] = terms_of([g.custom(u, t, applied.backward) for u, t in columns], x.shape)
        x._terms, x.read, x.adopted = applied.values[place], None, True

    def _of(self, node: Any) -> _Applied:
        if id(node) not in self._applied:
            self._applied[id(node)] = self._new(node)
        return self._applied[id(node)]

    def _new(self, node: Any) -> _Applied:
        if not _is_function(node):
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
            inputs = self._inputs_of(node)
        return _Applied(node, name, g.backward(), upstreams, inputs, self._pulled)

    def _inputs_of(self, node: Any) -> list[tuple[int, Tensor]]:
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        needed = getattr(node, "needs_input_grad", [True] * len(edges))  # which a node of C++ does not have
        places = [i for i, need in enumerate(needed) if need]
        return [(i, self._without_own(self._terms_at(*edge))) for i, edge in zip(places, edges, strict=True)]

    def _without_own(self, terms: Tensor) -> Tensor:
        """Within a backward its own results are values alone: they must not depend on it."""
        own: dict[int, int] = {}
        applied = self._pulled
        while applied is not None:
            for of_output in applied.values.values():
                own.update((t, self.trace.graph.node(t)[3][0]) for t in of_output.reshape(-1).tolist())
            applied = applied.within
        if not own:
            return terms
        return terms_of([self.trace.graph.substitute(t, own) for t in terms.reshape(-1).tolist()], terms.shape)

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
        """Runs the backwards of all Functions that were applied, those included that backwards apply."""
        while pending := [a for a in self._applied.values() if a.values and not a.pulled]:
            for applied in pending:
                self._pulled, applied.pulled = applied, True
                with within(f"the backward of {applied.name}"):
                    self._pull_back(applied)
        self._pulled = None

    def _pull_back(self, applied: _Applied) -> None:
        metadata = applied.node._input_metadata
        grads = [self.trace.wrap(u, m.dtype) for u, m in zip(applied.upstreams, metadata, strict=True)]
        # As under create_graph=True: what a backward itself detaches is detached.
        once = _is_once_differentiable(applied.node._forward_cls.backward)
        if not once:
            with apart():
                self.offered(grads)
        with grad_mode(True), self.trace.active():
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
                    gradient = self._without_own(self._gradient(given[i], terms.shape))
                    if once:  # which PyTorch does not differentiate at all; it runs without gradients
                        found = [self.trace.graph.stripped(t) for t in gradient.reshape(-1).tolist()]
                        gradient = terms_of(found, gradient.shape)
                    for pair in zip(terms.reshape(-1).tolist(), gradient.reshape(-1).tolist(), strict=True):
                        self.trace.graph.add_pair(applied.backward, *pair)

    def _gradient(self, x: Any, shape: Sequence[int]) -> Tensor:
        if not isinstance(x, Tensor):
            raise Refused(f"it returned a gradient of type {type(x).__name__}", "return tensors, or None")
        if not isinstance(x, TracedTensor):
            x = self.trace.captured(x)
        self.adopt(x)
        if x.shape != tuple(shape):
            with grad_mode(False):
                x = x.sum_to_size(shape)  # as PyTorch's autograd does
        return x.terms


def _is_function(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _is_once_differentiable(backward: Any) -> bool:
    """Whether a backward is decorated by once_differentiable."""
    wrappers = [x for x in once_differentiable.__code__.co_consts if isinstance(x, CodeType)]
    return getattr(backward, "__code__", None) in wrappers


def _name_of(function: type) -> str:
    """An op's backward has a class of its own, which torch._library names."""
    return function.__qualname__.removeprefix("GeneratedBackwardFor_")
