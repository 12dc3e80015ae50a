"""Every argument has effect or raises: the walk over all public signatures. A new argument needs an entry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
from coverings import rows_of
from fusegrad import Aux, JSDAux
from torch import Tensor

N, V, H, G = 6, 9, 5, 4
ERRORS = (ValueError, TypeError, IndexError, RuntimeError)


def tensors() -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    teacher = random(N, V)
    log_probs, indices = teacher.log_softmax(1).topk(3, 1)
    return {
        "logits": 3 * random(N, V),
        "teacher": teacher,
        "probabilities": random(N, V).softmax(1),
        "hidden": random(N, H),
        "weight": random(V, H),
        "teacher_hidden": random(N, G),
        "teacher_weight": random(V, G),
        "top_k": (log_probs, indices),
        "target": torch.tensor([0, 3, 8, 1, 2, 5]),
    }


T = tensors()
NONE = torch.zeros(V)  # of a head: as if it had no bias

# What a call is given besides `leaves`, by context; a context is a kind of call in which each argument must count.
CONTEXTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "cross_entropy": (fusegrad.cross_entropy, {"input": T["logits"]}, {"target": T["target"]}),
    "cross_entropy, probabilities": (fusegrad.cross_entropy, {"input": T["logits"]}, {"target": T["probabilities"]}),
    "linear_cross_entropy": (
        fusegrad.linear_cross_entropy,
        {"input": T["hidden"], "linear_weight": T["weight"]},
        {"target": T["target"]},
    ),
    "linear_cross_entropy, probabilities": (
        fusegrad.linear_cross_entropy,
        {"input": T["hidden"], "linear_weight": T["weight"]},
        {"target": T["probabilities"]},
    ),
    "jsd": (fusegrad.jsd, {"student": T["logits"]}, {"teacher": T["teacher"]}),
    "jsd, labels": (
        fusegrad.jsd,
        {"student": T["logits"]},
        {"teacher": T["teacher"], "labels": T["target"], "hard_weight": 0.5},
    ),
    "jsd, top-k": (fusegrad.jsd, {"student": T["logits"]}, {"teacher": T["top_k"]}),
    "jsd, log_probs": (
        fusegrad.jsd,
        {"student": T["logits"].log_softmax(1)},
        {"teacher": T["teacher"].log_softmax(1), "log_probs": True},
    ),
    "linear_jsd": (
        fusegrad.linear_jsd,
        {"student_input": T["hidden"], "student_weight": T["weight"]},
        {"teacher_input": T["teacher_hidden"], "teacher_weight": T["teacher_weight"]},
    ),
    "linear_jsd, labels": (
        fusegrad.linear_jsd,
        {"student_input": T["hidden"], "student_weight": T["weight"]},
        {
            "teacher_input": T["teacher_hidden"],
            "teacher_weight": T["teacher_weight"],
            "labels": T["target"],
            "hard_weight": 0.5,
        },
    ),
    "linear_jsd, top-k": (
        fusegrad.linear_jsd,
        {"student_input": T["hidden"], "student_weight": T["weight"]},
        {"teacher_input": T["top_k"]},
    ),
}

# A value of each argument that must change the result, or raise. Permissions and hints (`inplace`, memory) leave the
# numbers alone by design: for these a value that must raise.
VALUES: dict[str, Any] = {
    "input": T["hidden"] + 1,
    "linear_weight": T["weight"] + T["weight"].flip(0),
    "student": T["teacher"].flip(0).log_softmax(1),
    "student_input": T["hidden"] + 1,
    "student_weight": T["weight"] + T["weight"].flip(0),
    "teacher": T["teacher"].flip(0).log_softmax(1),
    "teacher_input": T["teacher_hidden"] + 1,
    "teacher_weight": T["teacher_weight"].flip(0),
    "target": T["target"].flip(0),
    "weight": torch.linspace(0.5, 2, V),
    "size_average": False,
    "reduce": False,
    "token_weight": torch.linspace(0.5, 2, N),
    "normalizer": 17.0,
    "ignore_index": 3,
    "reduction": "sum",
    "label_smoothing": 0.1,
    "z_loss": 0.1,
    "softcap": 2.0,
    "logit_scale": 0.5,
    "support": torch.stack([T["target"], (T["target"] + 1) % V], 1),
    "linear_bias": torch.linspace(-1, 1, V),
    "student_bias": torch.linspace(-1, 1, V),
    "teacher_bias": torch.linspace(-1, 1, V),
    "labels": torch.tensor([0, 3, -100, 1, 2, 5]),
    "beta": 0.1,
    "temperature": 2.0,
    "teacher_temperature": 2.0,
    "student_softcap": 2.0,
    "teacher_softcap": 2.0,
    "student_logit_scale": 0.5,
    "teacher_logit_scale": 0.5,
    "log_probs": True,
    "tail": "renormalize",
    "tail_log_prob": torch.full((N,), -4.0),
    "soft_weight": 0.5,
    "hard_weight": 0.25,
    "vocab_size": V - 1,
    "inplace": "to a leaf",
    "accumulate_dtype": torch.float16,
    "workspace_mib": -1,
    "options": object(),
    "grad_weight_into": torch.zeros(V, H),
    "batch_invariant": "of the op",
    "vocab_parallel": object(),
    "return_aux": "of the op",
    # For modules.
    "in_features": H + 1,
    "num_classes": V + 1,
    "out_features": (2,),
    "bias": True,
    "device": "meta",
    "dtype": torch.float64,
}


def value_of(name: str, context: str) -> Any:
    if name == "return_aux":
        return JSDAux(soft_loss=True) if "jsd" in context or "JSD" in context else Aux(entropy=True)
    if name == "inplace":
        return True
    if name == "batch_invariant":  # no bits of so few rows differ: a value that must raise, or what raises with it
        return True if "probabilities" in context else 1
    if name == "target" and "probabilities" in context:
        return T["probabilities"].flip(0)
    if name == "input" and context.startswith("cross"):
        return T["logits"].flip(0)
    if name in ("teacher", "teacher_input") and "top-k" in context:
        return (T["top_k"][0], (T["top_k"][1] + 1) % V)
    return VALUES[name]


def outcome(call: Callable[[dict[str, Tensor]], Any], leaves: dict[str, Tensor]) -> Any:
    """The loss, aux values and gradients; or what it raises."""
    given = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    try:
        out = call(given)
    except ERRORS as error:
        return str(error)
    loss, aux = out if isinstance(out, tuple) else (out, None)
    if loss.is_meta:
        return "meta"
    grads = torch.autograd.grad(loss.sum(), list(given.values()), allow_unused=True)
    return loss, *grads, aux is not None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str)
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@rows_of("context", [*CONTEXTS])
def test_functions(context: str) -> None:
    function, leaves, fixed = CONTEXTS[context]
    plain = outcome(lambda given: function(**given, **fixed), leaves)
    assert not isinstance(plain, str), plain
    for name in inspect.signature(function).parameters:
        value = value_of(name, context)
        if name == "log_probs" and fixed.get(name):
            value = False
        changed_leaves = {**leaves, name: value} if name in leaves else leaves
        changed = {} if name in leaves else {name: value}
        result = outcome(lambda given, c=changed: function(**{**given, **fixed, **c}), changed_leaves)
        assert not same(plain, result), f"{context}: {name} has no effect"


def test_inplace_has_effect() -> None:
    """Beside refusing leaves."""
    for context, (function, leaves, fixed) in CONTEXTS.items():
        given = {name: tensor.clone().requires_grad_() * 1 for name, tensor in leaves.items()}
        function(**given, **fixed, inplace=True)
        assert next(iter(given.values()))._version == 1, context


MODULES: dict[str, tuple[type, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Its constructor's arguments, leaves of forward, and its other arguments.
    "CrossEntropyLoss": (fusegrad.CrossEntropyLoss, {}, {"input": T["logits"]}, {"target": T["target"]}),
    "LinearCrossEntropyLoss": (
        fusegrad.LinearCrossEntropyLoss,
        {"in_features": H, "num_classes": V},
        {"input": T["hidden"]},
        {"target": T["target"]},
    ),
    "LinearCrossEntropyLoss, tied": (
        fusegrad.LinearCrossEntropyLoss,
        {"in_features": H, "num_classes": V},
        {"input": T["hidden"], "linear_weight": T["weight"]},
        {"target": T["target"]},
    ),
    "LinearCrossEntropyLoss, both biases": (
        fusegrad.LinearCrossEntropyLoss,
        {"in_features": H, "num_classes": V, "bias": True},
        {"input": T["hidden"], "linear_weight": T["weight"]},
        {"target": T["target"], "linear_bias": NONE},
    ),
    "JSDLoss": (fusegrad.JSDLoss, {}, {"student": T["logits"]}, {"teacher": T["teacher"], "labels": T["target"]}),
    "JSDLoss, top-k": (fusegrad.JSDLoss, {}, {"student": T["logits"]}, {"teacher": T["top_k"]}),
    "LinearJSDLoss": (
        fusegrad.LinearJSDLoss,
        {"in_features": H, "num_classes": V},
        {"student_input": T["hidden"]},
        {"teacher_input": T["teacher_hidden"], "teacher_weight": T["teacher_weight"], "labels": T["target"]},
    ),
    "LinearJSDLoss, top-k": (
        fusegrad.LinearJSDLoss,
        {"in_features": H, "num_classes": V},
        {"student_input": T["hidden"]},
        {"teacher_input": T["top_k"], "labels": T["target"]},
    ),
}
# What a tied weight leaves to forward: arguments of the module's own head have no effect on it by design.
OWN_HEAD = {"in_features", "num_classes", "device", "dtype"}


def module_outcome(kind: type, made: dict[str, Any], leaves: dict[str, Tensor], fixed: dict[str, Any]) -> Any:
    def call(given: dict[str, Tensor]) -> Any:
        torch.manual_seed(5)
        return kind(**made)(**given, **fixed)

    return outcome(call, leaves)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@rows_of("context", [*MODULES])
def test_modules(context: str) -> None:
    kind, made, leaves, fixed = MODULES[context]
    plain = module_outcome(kind, made, leaves, fixed)
    assert not isinstance(plain, str), plain
    for name in list(inspect.signature(kind.__init__).parameters)[1:]:
        if name in OWN_HEAD and ("tied" in context or "both" in context):
            continue
        value = value_of(name, context)
        if name == "bias" and made.get("bias"):
            continue  # the context itself: see below
        result = module_outcome(kind, {**made, name: value}, leaves, fixed)
        if name == "inplace":  # refuses the leaf
            assert isinstance(result, str)
        assert not same(plain, result), f"{context}: {name} has no effect"
    for name in list(inspect.signature(kind.forward).parameters)[1:]:
        value = value_of(name, context)
        if kind is fusegrad.CrossEntropyLoss and name == "input":
            value = T["logits"].flip(0)
        changed_leaves = {**leaves, name: value} if name in leaves else leaves
        changed = {} if name in leaves else {name: value}
        result = module_outcome(kind, made, changed_leaves, {**fixed, **changed})
        assert not same(plain, result), f"{context}: {name} of forward has no effect"


@rows_of("context", [*MODULES])
def test_attributes_of_modules_have_effect(context: str) -> None:
    kind, made, leaves, fixed = MODULES[context]
    for name in kind(**made)._given():
        value = value_of(name, context)

        def call(given: dict[str, Tensor], name: str = name, value: Any = value) -> Any:
            torch.manual_seed(5)
            module = kind(**made)
            setattr(module, name, value)
            return module(**given, **fixed)

        passed = module_outcome(kind, {**made, name: value}, leaves, fixed)
        assert same(outcome(call, leaves), passed), name
