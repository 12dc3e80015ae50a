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
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import higher_order_ops as dynamo
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from .errors import Refused, TraceError
from .lifted import Expression, Lifted, NumberWanted
from .run import INPUTS, Run, run, run_as_called, symbolic_float_of
from .trees import mapped

__all__ = ["attend_within", "bias_text_within", "trace_within", "within_transforms"]


class _TraceWithin(HigherOrderOperator):
    """`(function, kind, device) -> (text, buffers, scalars)`. Dynamo evaluates it; no graph ever holds it."""

    def __init__(self) -> None:
        super().__init__("fusegrad_trace_within")

    def __call__(self, function: Callable, kind: str, device: torch.device | None) -> tuple[str, list, list]:
        """Traces without Dynamo, in torch.export, whose modes see what is computed from captured tensors alone.
        The trace is not kept: a guard on fake tensors would fix their sizes."""
        result = run_as_called(function, kind, torch.empty(0).device if device is None else device)
        return result.text, list(result.buffers), [s.value for s in result.scalars]


trace_within = _TraceWithin()


@torch._dynamo.allow_in_graph
def attend_within(*arguments: Any) -> tuple[Tensor, Tensor]:
    """transforms.attend as one node of the compiler's graph, for which AOTAutograd runs it."""
    from .._attention_transforms import attend

    return attend(*arguments)


@torch._dynamo.assume_constant_result
def within_transforms() -> bool:
    """Whether torch.func is at work where the compiler traces: it enters its levels as it goes."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch._dynamo.assume_constant_result
def bias_text_within(reads: tuple, softcap: bool, masked: str) -> str:
    """The text of attention with biases, which depends on nothing that a compiled program may change."""
    from .._bias_texts import Pattern, Read, text_of

    return text_of(Pattern(tuple(Read(*read) for read in reads), softcap, masked))


_Numbers = (torch.SymInt, torch.SymFloat)


class _Recorder(fx.Interpreter):
    """Runs Dynamo's graph of a function, notes which node made which tensor, and has its symbolic numbers lifted, but
    for those in `fixed`."""

    def __init__(
        self, graph: fx.GraphModule, kind: str, device: torch.device, fixed: dict[fx.Node, int | float]
    ) -> None:
        super().__init__(graph)
        self.kind, self.device, self.fixed = kind, device, fixed
        self.made: dict[int, tuple[Tensor, fx.Node]] = {}
        self.numbers: list[fx.Node] = []
        self.wanted: set[int] = set()
        self.stand_ins: dict[Expression, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, Tensor):
            self.made.setdefault(id(out), (out, n))
        if not isinstance(out, _Numbers):
            return out
        if n in self.fixed:
            return self.fixed[n]
        value = n.meta["example_value"].node.hint
        if value is None:
            raise Refused("a number that depends on a tensor's values", "keep it a tensor")
        self.numbers.append(n)
        return Lifted(value, ("path", len(self.numbers) - 1), self.wanted)

    def stand_in(self, number: Lifted) -> Tensor:
        """A 0-d tensor for a number: the op's scalars would be guards, and another value another compilation."""
        made = self.stand_ins.get(number.expression)
        if made is None:
            dtype = torch.int64 if isinstance(number.value, int) else symbolic_float_of(self.kind)
            made = self.stand_ins[number.expression] = torch.empty((), dtype=dtype, device=self.device)
        return made


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
        hoist = _Hoist(tx, outer, recorder, result.copies)
        return VariableTracker.build(tx, (result.text, [hoist.buffer(b) for b in result.buffers], []))


dynamo._hop_name_to_variable_class["fusegrad_trace_within"] = _TraceWithinVariable


class _IndexedByTensors(TorchFunctionMode):
    """Gives Dynamo the shape of `tensor[index]` where PyTorch would ask a 0-d index for its value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            args = (args[0], mapped(args[1], self._stand_in))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _stand_in(x: Any) -> Any:
        number = isinstance(x, Tensor) and x.dim() == 0 and not x.is_floating_point() and x.dtype != torch.bool
        return 0 if number else x


def _graph_of(
    tx: Any, op: HigherOrderOperator, function: VariableTracker, kind: str, device: torch.device | None
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Proxy]]:
    """Dynamo's graph of a function, and for what it captures, the graph's inputs beyond the function's own, their
    values outside."""
    with dynamo.discard_graph_changes(tx):
        inputs = []
        for name in INPUTS[kind]:
            options = {"dtype": torch.float32 if name == "score" else torch.int64, "device": device}
            empty = VariableTracker.build(tx, torch.empty)
            options = {key: VariableTracker.build(tx, value) for key, value in options.items()}
            made = empty.call_function(tx, [VariableTracker.build(tx, ())], options)
            if name == "score":  # else Dynamo takes autograd.Functions for their forward
                grad = {"requires_grad": VariableTracker.build(tx, True)}
                made = made.call_method(tx, "new_empty", [VariableTracker.build(tx, ())], grad)
                made = made.call_method(tx, "clone", [], {})  # no leaf: it may be written to
            inputs.append(made)
    with _IndexedByTensors():
        _, graph, captured = dynamo.speculate_subgraph(
            tx,
            function,
            inputs,
            {},
            description=f"fusegrad.flex_attention: {kind}",
            source_target=op,
            set_subgraph_inputs="flatten_manual",
            supports_input_mutation=True,  # of its own arguments; a write into what it captures is refused below
            supports_aliasing=True,
        )
    module = fx.GraphModule(tx.output.nn_modules, graph)
    return module, {inner.node: proxy for proxy, inner in captured.items()}


def _bound(recorder: _Recorder, captured: Sequence[Any]) -> Callable:
    return lambda *inputs: recorder.run(*inputs, *captured)


def _trace(graph: fx.GraphModule, kind: str, device: torch.device | None) -> tuple[Run, _Recorder]:
    """Traces Dynamo's graph. Where Python needs a captured number's value, it becomes part of the text: a guard."""
    captured = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"][len(INPUTS[kind]) :]
    if device is None:  # as without a compiler
        devices = [x.device for x in captured if isinstance(x, Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    fixed: dict[fx.Node, int | float] = {}
    while True:
        recorder = _Recorder(graph, kind, device, fixed)
        try:
            call = _bound(recorder, captured)
            return run(call, kind, device, stand_in=recorder.stand_in), recorder
        except NumberWanted:
            for node in (recorder.numbers[i] for i in recorder.wanted):
                value = node.meta["example_value"]
                fixed[node] = int(value) if isinstance(value, torch.SymInt) else float(value)


class _Hoist:
    """Does in the program what a function computes from captured values alone."""

    def __init__(self, tx: Any, outer: dict[fx.Node, fx.Proxy], recorder: _Recorder, copies: dict) -> None:
        self.tx, self.outer, self.recorder = tx, outer, recorder
        self.numbers = {id(t): expression for expression, t in recorder.stand_ins.items()}
        self.copies = {id(copy): (source, to) for (_, to), (source, copy) in copies.items()}
        self.made: dict[fx.Node, VariableTracker] = {}

    def buffer(self, tensor: Tensor) -> VariableTracker:
        expression = self.numbers.get(id(tensor))
        if expression is None and id(tensor) in self.copies:
            source, to = self.copies[id(tensor)]
            return self._emit("call_method", "to", (self.buffer(source).as_proxy(), to), {})
        if expression is None:
            return self.variable(self.recorder.made[id(tensor)][1])
        options = {"dtype": tensor.dtype, "device": self.recorder.device}
        return self._emit("call_function", torch.scalar_tensor, (self._number(expression),), options)

    def variable(self, node: fx.Node) -> VariableTracker:
        made = self.made.get(node)
        if made is None:
            made = self.made[node] = self._captured(node) if node in self.outer else self._computed(node)
        return made

    def _captured(self, node: fx.Node) -> VariableTracker:
        proxy = self.outer[node]
        value = proxy.node.meta["example_value"]
        if proxy.node.op == "placeholder" or not isinstance(value, Tensor):
            return wrap_fx_proxy(self.tx, proxy, value)
        # Dynamo has a variable for it, which cannot be found by its proxy.
        return self._emit("call_function", torch.ops.aten.alias.default, (proxy,), {})

    def _computed(self, node: fx.Node) -> VariableTracker:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.variable(n).as_proxy())
        return self._emit(node.op, node.target, args, kwargs)

    def _number(self, expression: Expression) -> Any:
        head = expression[0]
        if head == "path":
            return self.variable(self.recorder.numbers[expression[1]]).as_proxy()
        if head == "number":
            return expression[2]
        return self._emit("call_function", head, tuple(self._number(x) for x in expression[1:]), {}).as_proxy()

    def _emit(self, op: str, target: Any, args: Any, kwargs: Any) -> VariableTracker:
        return wrap_fx_proxy(self.tx, self.tx.output.create_proxy(op, target, args, kwargs))
