"""cross_entropy and its module as PyTorch's are called: positional forms, dtypes of targets, shapes and options."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from support import DEVICES, gradients
from torch import Tensor

each_device = pytest.mark.parametrize("device", DEVICES)


def assert_same(calls: tuple[Any, Any], x: Tensor, *arguments: Any, **options: Any) -> None:
    ours, theirs = (gradients(lambda x, f=f: f(x, *arguments, **options), [x]) for f in calls)
    torch.testing.assert_close(ours[0].to(theirs[0].dtype), theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])


def samples(device: str) -> Any:
    """Logits, target and options over the shapes, reductions and options that PyTorch's function takes."""
    shapes = [(3,), (5, 3), (5, 3, 4), (2, 3, 2, 3), (1, 3), (5, 1), (0, 3)]
    for shape, reduction, smoothing, weighted, soft, ignore in itertools.product(
        shapes, ("mean", "sum", "none"), (0.0, 0.3), (False, True), (False, True), (None, 1, -100)
    ):
        if soft and ignore == 1:
            continue
        dim = 0 if len(shape) == 1 else 1
        x = torch.randn(shape, device=device)
        classes = shape[dim]
        rest = shape[:dim] + shape[dim + 1 :]
        target = torch.randn(shape, device=device).softmax(dim) if soft else torch.randint(classes, rest, device=device)
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        if weighted:
            options["weight"] = torch.rand(classes, device=device) + 0.1
        if ignore is not None:
            options["ignore_index"] = ignore
            if not soft and target.dim() and target.shape[0] > 1:
                target[1] = ignore  # not all rows
        # PyTorch divides the smoothing of no kept row by 0; ours is NaN too, with gradients of zero.
        if not soft and x.numel() and not (target != options.get("ignore_index", -100)).any():
            continue
        yield x, target, options


@each_device
def test_every_option(device: str) -> None:
    for x, target, options in samples(device):
        if x.numel() == 0 and options["reduction"] == "mean":
            assert fusegrad.cross_entropy(x, target, **options).isnan()
            continue
        assert_same((fusegrad.cross_entropy, F.cross_entropy), x, target, **options)


@each_device
def test_positional_forms(device: str) -> None:
    x, t = torch.randn(6, 5, device=device), torch.tensor([0, 4, 2, 1, 3, 2], device=device)
    w = torch.rand(5, device=device) + 0.1
    forms: list[tuple[Any, ...]] = [
        (),
        (w,),
        (w, None, 2),
        (w, None, 2, None, "sum"),
        (None, None, -100, None, "none", 0.1),
        (w, None, 1, None, "mean", 0.2),
    ]
    for form in forms:
        assert_same((fusegrad.cross_entropy, F.cross_entropy), x, t, *form)
        modules = fusegrad.CrossEntropyLoss(*form), torch.nn.CrossEntropyLoss(*form)
        assert_same(modules, x, t)
    positional = [
        [n for n, p in inspect.signature(f).parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        for f in (
            fusegrad.cross_entropy,
            F.cross_entropy,
            fusegrad.CrossEntropyLoss.__init__,
            torch.nn.CrossEntropyLoss.__init__,
        )
    ]
    assert positional[0] == positional[1] and positional[2] == positional[3]


@pytest.mark.parametrize(
    "size_average, reduce", [(None, False), (False, None), (True, True), (False, True), (True, None)]
)
def test_deprecated_reductions(size_average: bool | None, reduce: bool | None) -> None:
    x, t = torch.randn(6, 5), torch.randint(5, (6,))
    results = []
    for call in (fusegrad.cross_entropy, F.cross_entropy):
        with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
            results.append(call(x, t, None, size_average, -100, reduce))
    torch.testing.assert_close(*results)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        module = fusegrad.CrossEntropyLoss(None, size_average, -100, reduce)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        assert module.reduction == torch.nn.CrossEntropyLoss(None, size_average, -100, reduce).reduction
    torch.testing.assert_close(module(x, t), results[0])


@each_device
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_dtypes_of_targets(dtype: torch.dtype, device: str) -> None:
    x, t = torch.randn(6, 300, device=device), torch.tensor([0, 255, 2, 1, 3, 200], device=device)
    w, options = torch.randn(300, 7, device=device), {"ignore_index": 255}
    h = torch.randn(6, 7, device=device)
    # PyTorch takes uint8, but not int32.
    right = F.cross_entropy(x, t if dtype == torch.int32 else t.to(dtype), **options)
    torch.testing.assert_close(fusegrad.cross_entropy(x, t.to(dtype), **options), right)
    ours = fusegrad.linear_cross_entropy(h, w, t.to(dtype), **options)
    torch.testing.assert_close(ours, F.cross_entropy(h @ w.t(), t, **options))


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3])
def test_probabilities_with_an_ignore_index(ignore_index: int) -> None:
    """An error exactly where it is PyTorch's: an index that could be a class."""
    x, target, w = torch.randn(6, 5), torch.rand(6, 5), torch.randn(5, 5)
    calls = [
        lambda: F.cross_entropy(x, target, ignore_index=ignore_index),
        lambda: fusegrad.cross_entropy(x, target, ignore_index=ignore_index),
        lambda: fusegrad.linear_cross_entropy(x, w, target, ignore_index=ignore_index),
        lambda: fusegrad.CrossEntropyLoss(ignore_index=ignore_index)(x, target),
    ]
    for call in calls:
        if ignore_index < 0:
            call()
            continue
        with pytest.raises((RuntimeError, ValueError), match="ignore_index"):
            call()


def test_rows_of_classes_last() -> None:
    x, t = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    with pytest.raises(
        ValueError, match=r"must have shape \[2, 5\], but got \[2, 4\]: the classes are the input's"
    ) as raised:
        fusegrad.cross_entropy(x, t)
    assert "input.flatten(0, -2) and target.flatten()" in str(raised.value) and "input.movedim(-1, 1)" in str(
        raised.value
    )
    torch.testing.assert_close(
        fusegrad.cross_entropy(x.flatten(0, -2), t.flatten()), F.cross_entropy(x.movedim(-1, 1), t)
    )
    torch.testing.assert_close(fusegrad.cross_entropy(x.movedim(-1, 1), t), F.cross_entropy(x.movedim(-1, 1), t))


def test_attributes_of_the_module() -> None:
    """As PyTorch's: readable, and setting them has effect."""
    x, t, w = torch.randn(6, 5), torch.tensor([0, 4, 2, 1, 3, 2]), torch.rand(5)
    for module in (fusegrad.CrossEntropyLoss(), torch.nn.CrossEntropyLoss()):
        assert (module.reduction, module.ignore_index, module.label_smoothing) == ("mean", -100, 0.0)
        assert module.weight is None and not module.state_dict()
    ours, theirs = fusegrad.CrossEntropyLoss(), torch.nn.CrossEntropyLoss()
    for name, value in {"reduction": "none", "ignore_index": 2, "label_smoothing": 0.2, "weight": w}.items():
        for module in (ours, theirs):
            setattr(module, name, value)
        assert getattr(ours, name) is value
        torch.testing.assert_close(ours(x, t), theirs(x, t))
        assert f"{name}=" in repr(ours) or name == "weight"


@pytest.mark.parametrize(
    "module",
    [
        fusegrad.CrossEntropyLoss(torch.rand(5), label_smoothing=0.1, return_aux=fusegrad.Aux(lse=True)),
        fusegrad.LinearCrossEntropyLoss(4, 5, bias=True, z_loss=0.1),
        fusegrad.JSDLoss(beta=0.3),
        fusegrad.LinearJSDLoss(4, 5, teacher_softcap=2.0),
    ],
    ids=lambda module: type(module).__name__,
)
def test_copies_of_modules(module: torch.nn.Module) -> None:
    x, t = torch.randn(6, 4 if hasattr(module, "linear") else 5), torch.randint(5, (6,))
    jsd = "JSD" in type(module).__name__
    arguments = (x, x + 1, torch.randn(5, 4))[: 3 if hasattr(module, "linear") else 2] if jsd else (x, t)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
    for other in copies:
        assert repr(other) == repr(module)
        for ours, right in zip(*(torch.utils._pytree.tree_leaves(m(*arguments)) for m in (other, module)), strict=True):
            assert ours is right is None or torch.equal(ours, right)
    traced = torch.jit.trace(module, arguments) if "return_aux=None" in repr(module) else None
    if traced is not None:
        torch.testing.assert_close(traced(*arguments), module(*arguments))


def test_linear_cross_entropy_takes_what_pytorchs_takes() -> None:
    """Of PyTorch >= 2.13: its parameters, with their defaults; what is refused says why."""
    x, w, t = torch.randn(6, 4), torch.randn(5, 4), torch.randint(5, (6,))
    names = ["linear_bias", "weight", "reduction", "ignore_index", "label_smoothing", "options"]
    ours = inspect.signature(fusegrad.linear_cross_entropy).parameters
    assert list(ours)[:3] == ["input", "linear_weight", "target"] and set(names) <= set(ours)
    if hasattr(F, "linear_cross_entropy"):
        theirs = inspect.signature(F.linear_cross_entropy).parameters
        assert list(theirs)[:3] == list(ours)[:3]
        for name, parameter in theirs.items():
            assert ours[name].default == parameter.default, name
    with pytest.raises(TypeError, match=r"options must be a LinearCrossEntropyOptions or None, but got dict"):
        fusegrad.linear_cross_entropy(x, w, t, options={"acc_dtype": torch.float32})
    with pytest.raises(ValueError, match=r"linear_weight must have shape \[V, H\], but got \[5, 2, 4\]"):
        fusegrad.linear_cross_entropy(x, torch.randn(5, 2, 4), torch.randint(5, (6, 2)))
    with pytest.raises(ValueError, match=r"LinearCrossEntropyLoss: out_features must be \(\)"):
        fusegrad.LinearCrossEntropyLoss(4, 5, out_features=(2,))
    torch.testing.assert_close(fusegrad.linear_cross_entropy(x, w, t, ignore_index=None), F.cross_entropy(x @ w.t(), t))
    torch.testing.assert_close(  # rows before [..., H] may have any shape
        fusegrad.linear_cross_entropy(x.view(2, 3, 4), w, t.view(2, 3)), F.cross_entropy(x @ w.t(), t)
    )
