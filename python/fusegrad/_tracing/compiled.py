"""Tracing where torch.compile or torch.export is at work.

Dynamo traces a score_mod as it traces that of PyTorch's own flex_attention: into a graph of its own, with what the
function captures as that graph's inputs. That graph is then traced as any other function; its text is a constant of
the compiled program, the captured tensors and numbers are values of it. So nothing is traced at run time, and new
values of captured tensors are no reason to compile again.

A module of its own: torch._dynamo takes a second and a half to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import higher_order_ops as dynamo
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._ops import HigherOrderOperator

from .errors import TraceError
from .lifted import Expression, Lifted, NumberWanted
from .run import INPUTS, Run, run

__all__ = ["trace_within"]


class _TraceWithin(HigherOrderOperator):
    """`(function, kind, device) -> (text, buffers, scalars)`. Dynamo evaluates it; no graph ever holds it."""

    def __init__(self) -> None:
        super().__init__("fusegrad_trace_within")

    def __call__(self, function: Callable, kind: str, device: torch.device) -> tuple[str, list, list]:
        """Without Dynamo: in torch.export, whose modes see what the function computes from captured tensors alone.
        Not kept: a guard on fake tensors would fix their sizes."""
        result = run(function, kind, device)
        return result.text, list(result.buffers), [s.value for s in result.scalars]


trace_within = _TraceWithin()


class _Recorder(fx.Interpreter):
    """Runs Dynamo's graph of a function and notes which node made which tensor."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.made: dict[int, tuple[Tensor, fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, Tensor):
            self.made.setdefault(id(out), (out, n))
        return out


class _TraceWithinVariable(dynamo.TorchHigherOrderOperatorVariable):
    _HOP_NAME = "fusegrad.flex_attention"

    def _call_function(self, tx: Any, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]) -> Any:
        function, kind, device = args
        graph, outer = _graph_of(tx, self.value, function, kind.as_python_constant(), device.as_python_constant())
        try:
            result, recorder = _trace(graph, kind.as_python_constant(), device.as_python_constant())
        except TraceError as error:
            # Between two graphs the function is traced as it stands, where the error can name its line.
            unimplemented(
                gb_type="fusegrad cannot trace a score_mod or mask_mod within a compiled function",
                context=str(function),
                explanation=str(error),
                hints=["Hand in fusegrad.trace_score_mod(function), made outside of the compiled function."],
            )
        hoist = _Hoist(tx, outer)
        buffers = [hoist.variable(recorder.made[id(b)][1]) for b in result.buffers]
        scalars = [hoist.number(s.expression, recorder.module) for s in result.scalars]
        return VariableTracker.build(tx, (result.text, buffers, scalars))


dynamo._hop_name_to_variable_class["fusegrad_trace_within"] = _TraceWithinVariable


def _graph_of(
    tx: Any, op: HigherOrderOperator, function: VariableTracker, kind: str, device: torch.device
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Proxy]]:
    """Dynamo's graph of a function, and for what it captures, the graph's inputs beyond the function's own, their
    values outside."""
    with dynamo.discard_graph_changes(tx):
        inputs = []
        for name in INPUTS[kind]:
            options = {"dtype": torch.float32 if name == "score" else torch.int64, "device": device}
            empty = VariableTracker.build(tx, torch.empty)
            options = {key: VariableTracker.build(tx, value) for key, value in options.items()}
            inputs.append(empty.call_function(tx, [VariableTracker.build(tx, ())], options))
    # Without it a 0-d index would be read as a Python number.
    with TransformGetItemToIndex():
        _, graph, captured = dynamo.speculate_subgraph(
            tx,
            function,
            inputs,
            {},
            description=f"fusegrad.flex_attention: {kind}",
            source_target=op,
            set_subgraph_inputs="flatten_manual",
            supports_input_mutation=False,
            supports_aliasing=True,
        )
    module = fx.GraphModule(tx.output.nn_modules, graph)
    return module, {inner.node: proxy for proxy, inner in captured.items()}


def _trace(graph: fx.GraphModule, kind: str, device: torch.device) -> tuple[Run, _Recorder]:
    """Traces Dynamo's graph. Where Python needs the value of a captured number, it becomes part of the text: a guard."""
    captured = [n for n in graph.graph.nodes if n.op == "placeholder"][len(INPUTS[kind]) :]
    fixed: dict[int, Any] = {}
    while True:
        wanted: set[int] = set()
        recorder = _Recorder(graph)
        stand_ins = [fixed[i] if i in fixed else _stand_in(n, i, wanted) for i, n in enumerate(captured)]

        def call(*inputs: Tensor, recorder: _Recorder = recorder, stand_ins: list = stand_ins) -> Any:
            return recorder.run(*inputs, *stand_ins)

        try:
            return run(call, kind, device), recorder
        except NumberWanted:
            for i in wanted:
                value = captured[i].meta["example_value"]
                fixed[i] = float(value) if isinstance(value, torch.SymFloat) else int(value)


def _stand_in(node: fx.Node, place: int, wanted: set[int]) -> Any:
    value = node.meta["example_value"]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return Lifted(value.node.hint, ("path", place), wanted)
    return value


class _Hoist:
    """Does in the program what a function computes from captured values alone."""

    def __init__(self, tx: Any, outer: dict[fx.Node, fx.Proxy]) -> None:
        self.tx, self.outer = tx, outer
        self.made: dict[fx.Node, VariableTracker] = {}

    def variable(self, node: fx.Node) -> VariableTracker:
        made = self.made.get(node)
        if made is None:
            if node in self.outer:
                proxy = self.outer[node]
                value = proxy.node.meta["example_value"]
                made = wrap_fx_proxy(self.tx, proxy, example_value=value)
            else:
                made = self._emit(node.op, node.target, *fx.map_arg((node.args, node.kwargs), self._proxy))
            self.made[node] = made
        return made

    def _proxy(self, node: fx.Node) -> Any:
        return self.variable(node).as_proxy()

    def _emit(self, op: str, target: Any, args: Any, kwargs: Any) -> VariableTracker:
        return wrap_fx_proxy(self.tx, self.tx.output.create_proxy(op, target, args, kwargs))

    def number(self, expression: Expression, graph: fx.GraphModule) -> VariableTracker:
        head = expression[0]
        if head == "path":
            captured = [n for n in graph.graph.nodes if n in self.outer]
            return self.variable(captured[expression[1]])
        if head == "number":
            return VariableTracker.build(self.tx, expression[2])
        operands = tuple(self.number(x, graph).as_proxy() for x in expression[1:])
        return self._emit("call_function", head, operands, {})
