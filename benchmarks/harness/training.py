"""Whole training steps: implementations that take turns on one model, its optimizer and one batch.

A step is forward, backward and optimizer. Memory is all that PyTorch's allocator handed out at most during a warm one:
weights, gradients, optimizer state and activations. On a CPU it is not measured.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.benchmark import Options, Plan, choose
from harness.failure import Outcome
from harness.model import Case, CaseResult, Measurement, Unavailable
from harness.reference import relative
from harness.timing import Timed, alternate

MIB = 2**20


@dataclass
class Training:
    """What a step needs. watched: the parameter whose gradient is compared. teacher: frozen, of a distillation."""

    model: Any
    optimizer: torch.optim.Optimizer
    tokens: Tensor
    watched: nn.Parameter
    teacher: Any = None
    _method: Method | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def enter(self, method: Method | None) -> None:
        """Makes the model the method's own; None: as it was."""
        if method is self._method:
            return
        self._method = None
        self._stack.close()
        if method is not None:
            self._stack.enter_context(method.within(self))
            self._method = method

    def clear(self) -> None:
        """Drops what a step has left behind, one that raised included."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.tokens.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Method:
    """One way to compute a step's loss, `within` a context that may change the model and undoes it."""

    name: str
    loss: Callable[[Training], Tensor]
    ours: bool = False
    essential: bool = True
    within: Callable[[Training], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


Found = list[Method | Unavailable]


class TrainingStep:
    """A method's steps, for harness.timing. The weights go on from step to step, whoever takes it."""

    def __init__(self, training: Training, method: Method) -> None:
        self._training = training
        self._method = method

    def prepare(self) -> None:
        self._training.enter(self._method)

    def run(self) -> None:
        self.gradients()
        self._training.optimizer.step()

    def gradients(self) -> Tensor:
        self._training.optimizer.zero_grad(set_to_none=True)
        loss = self._method.loss(self._training)
        loss.backward()
        return loss.detach()

    def results(self) -> tuple[Tensor, Tensor]:
        """The loss and the gradient of what is watched, with the weights as they are."""
        self.prepare()
        loss, grad = self.gradients(), self._training.watched.grad
        if grad is None:
            raise RuntimeError(f"{self._method.name}: the watched parameter must get a gradient, but got none")
        self._training.clear()
        return loss, grad


@dataclass(frozen=True)
class TrainingBenchmark:
    """What a script of training steps provides; harness.benchmark.Benchmark is one op's.

    reference: the method, in float64 from the hidden states or the queries on, that the others' errors are against.
    """

    op: str
    make: Callable[[Case], Training]
    implementations: Callable[[Case, Options], list[Method | Unavailable]]
    reference: Callable[[Case], Method]
    plans: Callable[[str, bool], list[Plan]]
    letters: tuple[str, ...]
    work: str = "forward, backward and optimizer"
    extra: Callable[[str], dict[str, object]] | None = None

    def run(self, plan: Plan, options: Options) -> CaseResult:
        """Errors with the first weights; then memory and time, while they train."""
        case = plan.case
        before = _allocated(case.device)
        training = self.make(case)
        methods, unavailable = choose(self.implementations(case, options), plan, options)
        measurements = {one.name: Measurement(one.name, one.ours) for one in methods}
        if options.accuracy and plan.accuracy:
            _check_all(training, self.reference(case), methods, measurements)
        steps: dict[str, Timed] = {}
        for one in methods:
            if measurements[one.name].failure:
                continue
            step = TrainingStep(training, one)
            outcome = Outcome(functools.partial(_warm_up, step, case.device))
            measurements[one.name].failure = outcome.failure
            training.clear()
            if not outcome.failure:
                steps[one.name] = step
                if case.device == "cuda" and options.memory and plan.memory:
                    measurements[one.name].peak_mib = (outcome.value - before) / MIB
        times, _ = alternate(steps, None, case.device, options.rounds, options.reps)
        for name, found in times.items():
            measurements[name].failure = found.failure
            measurements[name].ms = found.ms
            measurements[name].round_ms = found.rounds
            measurements[name].tokens_per_s = found.ms and training.tokens.numel() / found.ms * 1e3
        training.enter(None)
        training.clear()
        return CaseResult(case, "", None, list(measurements.values()), unavailable)


def _check_all(
    training: Training, reference: Method, methods: list[Method], measurements: dict[str, Measurement]
) -> None:
    loss, grad = (one.double() for one in TrainingStep(training, reference).results())
    for one in methods:
        outcome = Outcome(TrainingStep(training, one).results)
        measurements[one.name].failure = outcome.failure
        training.clear()
        if not outcome.failure:
            found = zip(("loss", "weight"), outcome.value, (loss, grad), strict=True)
            measurements[one.name].errors = {name: relative(value, expected) for name, value, expected in found}


def _allocated(device: str) -> int:
    """Bytes on CUDA, once nothing that can be freed is left."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _warm_up(step: TrainingStep, device: str) -> int:
    """A step in which things are compiled, tuned and allocated, and one whose peak in bytes is returned, on CUDA."""
    step.prepare()
    step.run()
    if device != "cuda":
        return 0
    _allocated(device)
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
