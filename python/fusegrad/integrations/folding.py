"""Attention of Boltz, OpenFold 3, Protenix and alphafold3-pytorch by :func:`fusegrad.biased_attention`; see
docs/learned_biases.md.

Needs none of them: what a package calls is replaced in the package that is there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fusegrad._arguments import checked

from . import folding_packages as packages

__all__ = ["apply", "remove"]


class _Place(NamedTuple):
    """Attributes:
    module: where it is.
    name: of a function there, or of a class and its method.
    ours: what stands there instead; it has the same parameters.
    """

    module: str
    name: str
    ours: Any


_TRIANGULAR = "boltz.model.layers.triangular_attention.primitives"
_OPENFOLD3 = "openfold3.core.model.primitives.attention"
_PROTENIX, _AF3 = "protenix.model.triangular.layers", "alphafold3_pytorch"
_PLACES: dict[str, tuple[_Place, ...]] = {
    "boltz": (
        _Place(_TRIANGULAR, "_attention", packages.attention),
        _Place(_TRIANGULAR, "kernel_triangular_attn", packages.kernel_triangular_attn),
        _Place("boltz.model.layers.attention", "AttentionPairBias.forward", packages.boltz1_pair_bias),
        _Place("boltz.model.layers.attentionv2", "AttentionPairBias.forward", packages.boltz2_pair_bias),
    ),
    "openfold3": (
        _Place(_OPENFOLD3, "_attention", packages.openfold3_attention),
        _Place(_OPENFOLD3, "_cueq_triangle_attn", packages.cueq_triangle_attn),
        _Place(_OPENFOLD3, "_deepspeed_evo_attn", packages.evoformer_attention),
        _Place(_OPENFOLD3, "_triton_evo_attn", packages.evoformer_attention),
        _Place(_OPENFOLD3, "_lma", packages.low_memory_attention),
    ),
    "protenix": (
        _Place(_PROTENIX, "_attention", packages.attention),
        _Place(_PROTENIX, "_deepspeed_evo_attn", packages.evoformer_attention),
        _Place(_PROTENIX, "_tri_attention", packages.tri_attention),
        _Place(_PROTENIX, "cuequivariance_triangular_attn", packages.cuequivariance_triangular_attn),
        _Place("protenix.model.modules.primitives", "_attention", packages.protenix_attention),
    ),
    "alphafold3_pytorch": (
        _Place(f"{_AF3}.attention", "Attend.forward", packages.attend),
        _Place(f"{_AF3}.attention", "Attend.local_attn", packages.local_attend),
        _Place(f"{_AF3}.alphafold3", "TriangleAttention.forward", packages.af3_triangle_attention),
    ),
}


class _Change(NamedTuple):
    place: _Place
    original: Callable[..., Any]
    ours: Callable[..., Any]


_applied: dict[str, list[_Change]] = {}


@checked
def apply(target: str | types.ModuleType | nn.Module) -> Any:
    """Makes a package of models compute its attention by fusegrad: all its models, those that are there already too.

    Functions and methods of the package are replaced, in all of its modules that have them, so a model's modules,
    weights and checkpoints stay as they are. A second call changes nothing.

    Args:
        target: the package, its name ("boltz", "openfold3", "protenix" or "alphafold3_pytorch"), or a model whose
            modules are its.

    Returns:
        The target.

    Raises:
        ValueError: for another package, or a model without a module of these.
        NotImplementedError: for a TorchScript model, as Chai-1's: its functions are compiled into it.
        RuntimeError: where the package has another function than this was made for; nothing is changed then.
    """
    for name in _packages_of(target):
        if name in _applied:
            continue
        _applied[name] = [_changed(name, place) for place in _PLACES[name]]
        for change in _applied[name]:
            _put(name, change.place, change.original, change.ours)
    return target


@checked
def remove(target: str | types.ModuleType | nn.Module) -> Any:
    """Undoes :func:`apply`: the package's own functions stand where they stood.

    Args:
        target: as of :func:`apply`.

    Returns:
        The target.

    Raises:
        ValueError, NotImplementedError: as :func:`apply`.
    """
    for name in _packages_of(target):
        for change in _applied.pop(name, ()):
            _put(name, change.place, change.ours, change.original)
    return target


def _packages_of(target: Any) -> list[str]:
    known = ", ".join(_PLACES)
    if isinstance(target, nn.Module):
        modules = list(target.modules())
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            raise NotImplementedError(
                "apply: a model must be of Python's modules, but got TorchScript, as Chai-1 comes: its functions are "
                "compiled into it, and nothing of them can be replaced"
            )
        names = sorted({type(m).__module__.partition(".")[0] for m in modules} & set(_PLACES))
        if not names:
            raise ValueError(f"apply: a model must have modules of {known}, but got a {type(target).__name__}")
        return names
    name = target if isinstance(target, str) else target.__name__
    name = name.partition(".")[0].replace("-", "_")
    if name not in _PLACES:
        raise ValueError(f"apply: a package must be one of {known}, but got {name}")
    return [name]


def _changed(package: str, place: _Place) -> _Change:
    """What would change at a place.

    Raises:
        RuntimeError: it is not there, or has other parameters.
    """
    module = importlib.import_module(place.module)
    try:
        original: Any = functools.reduce(getattr, place.name.split("."), module)
    except AttributeError:
        raise RuntimeError(
            f"apply: {package} must have {place.module}.{place.name}, but got a version without it"
        ) from None
    theirs, ours = (list(inspect.signature(f).parameters) for f in (original, place.ours))
    if theirs != ours:
        raise RuntimeError(
            f"apply: {place.module}.{place.name} must have the parameters {', '.join(ours)}, but got a version with "
            f"{', '.join(theirs)}"
        )
    # One of its own for each place, so that remove knows what stood where.
    code = place.ours
    own = types.FunctionType(code.__code__, code.__globals__, code.__name__, code.__defaults__)
    return _Change(place, original, own)


def _put(package: str, place: _Place, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    *owners, name = place.name.split(".")
    if owners:
        setattr(functools.reduce(getattr, owners, sys.modules[place.module]), name, new)
        return
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] != package or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
