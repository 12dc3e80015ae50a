"""What a program under test looks like: an adapter, whose methods' parameters say what it offers."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LOSSES", "OPS", "Adapter", "NotOffered", "call", "described", "find"]

LOSSES = ("cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd")
OPS = (*LOSSES, "flex_attention")


class NotOffered(Exception):
    """An adapter raises it where its implementation has no such option: the case is then not counted."""


class Adapter:
    """An implementation of some of the five ops; a base class that nobody needs to derive from.

    Each op is a method, and a method that is missing is an op that is not offered. An option is given only where a case
    is about it, always by keyword, so an option that is no parameter of the method is not offered either. Tensors come
    as the contract has them::

        cross_entropy(input, target, *, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, aux)
        linear_cross_entropy(input, weight, target, *, bias, ..., and all of cross_entropy's)
        jsd(student, teacher, *, labels, ignore_index, reduction, beta, temperature, log_probs, hard_weight,
            indices)
        linear_jsd(student_input, student_weight, teacher_input, teacher_weight, *, student_bias, ..., and jsd's)
        flex_attention(query, key, value, *, score_mod, mask_mod, scale, enable_gqa, return_lse, dropout_p)

    ``input`` is ``[N, V]`` or ``[..., H]``; ``reduction`` is 'mean' (of the rows that are kept, also for divergences),
    'sum' or 'none'. With ``aux='entropy'`` (or 'lse', 'z_loss', 'token_log_prob') a loss returns ``(loss, value)``.
    With ``indices``, ``[N, K]``, a teacher is the log-probabilities of these columns, and one class has the rest.
    ``mask_mod`` is a function; an adapter makes its block mask itself. ``return_lse`` makes it ``(out, lse)``.
    """

    name = ""  # what it was asked for by
    devices: tuple[str, ...] = ("cpu", "cuda")
    settings = ""  # in words: which of its modes this is, and the options that it has been given
    packages: tuple[str, ...] = ()  # whose versions belong to a result

    def load(self) -> None:
        """Imports what the implementation needs. An ImportError: not installed."""

    def dtype(self, op: str, device: str) -> torch.dtype:
        """In which dtype cases that do not care are run: the widest that the op takes there."""
        return torch.float64 if device == "cpu" else torch.float32


def described(adapter: Any, device: str) -> str:
    """The settings of an adapter, the dtypes in which cases run that do not care, and versions."""
    asked = getattr(adapter, "dtype", None)
    ops = [op for op in OPS if getattr(adapter, op, None) is not None]
    dtypes = {str(asked(op, device)).removeprefix("torch.") for op in ops} if asked else set()
    versions = [f"{p} {_version(p)}" for p in getattr(adapter, "packages", ())]
    return "; ".join([getattr(adapter, "settings", ""), *(" and ".join(sorted(d)) for d in [dtypes] if d), *versions])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def call(adapter: Any, op: str, *tensors: Any, **options: Any) -> Any:
    """The op of an adapter, or NotOffered where it lacks the op or one of the options."""
    method: Callable[..., Any] | None = getattr(adapter, op, None)
    if method is None:
        raise NotOffered(op)
    parameters = inspect.signature(method).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        missing = sorted(set(options) - set(parameters))
        if missing:
            raise NotOffered(f"{op} without {', '.join(missing)}")
    return method(*tensors, **options)


def find(name: str) -> Any:
    """The adapter of a name of this package, or of ``package.module:Class`` (or of an object that is one)."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        adapter = found() if isinstance(found, type) else found
        adapter.name = name
        return adapter
    from .adapters import ADAPTERS

    if name not in ADAPTERS:
        raise ValueError(
            f"conformance: impl must be package.module:Class or one of {', '.join(ADAPTERS)}, but got {name}"
        )
    module, _, attribute = ADAPTERS[name].partition(":")
    adapter = getattr(importlib.import_module(f"{__package__}.adapters.{module}"), attribute)()
    adapter.name = name
    return adapter
