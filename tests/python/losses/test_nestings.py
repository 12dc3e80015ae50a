"""Every loss under every nesting of transforms, the linear ones in chunks of rows, against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fusegrad
import pytest
import torch
from coverings import pairs_of, rows_of
from fusegrad import Aux, _loss_chunks, reference
from nestings import NESTINGS, along
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

N, H, V = 4, 3, 6
TARGET, LABELS = torch.tensor([1, -100, 5, 0]), torch.tensor([3, 0, -100, 2])
NAMES = ("lse", "entropy", "token_log_prob")


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear losses take two rows each."""
    monkeypatch.setitem(_loss_chunks._LOGITS, "cpu", 1)
    monkeypatch.setattr(_loss_chunks, "_LEAST", 2)


def fixed(*shape: int) -> Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin() * 2


def weighted(loss: Tensor, aux: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """A number of the loss and of aux values."""
    return loss.sum() + sum((aux[name] * fixed(N)).sum() * (i + 1) for i, name in enumerate(names))


def top_k() -> tuple[Tensor, Tensor]:
    return tuple(fixed(N, V).log_softmax(-1).topk(2, -1))


def both(
    function: str, *arguments: Callable[[Tensor], Any], aux: Sequence[str] = (), **options: Any
) -> tuple[Callable, Callable]:
    """Ours and the formula of functions of x; a number of the loss and of these aux values."""

    def ours(x: Tensor) -> Tensor:
        more = {"return_aux": Aux(**dict.fromkeys(aux, True))} if aux else {}
        out = getattr(fusegrad, function)(*(a(x) for a in arguments), **options, **more)
        return weighted(out[0], out[1]._asdict(), aux) if aux else out.sum()

    def formula(x: Tensor) -> Tensor:
        return weighted(*getattr(reference, function)(*(a(x) for a in arguments), **options), aux)

    return ours, formula


def scaled(one: bool, aux: Sequence[str]) -> tuple[Callable, Callable]:
    """A head whose logits have a tensor as their factor: one, or one a row."""

    def factor(x: Tensor) -> Tensor:
        return (x.mean() if one else x.mean(1)).exp()

    def ours(x: Tensor) -> Tensor:
        more = {"logit_scale": factor(x), "return_aux": Aux(**dict.fromkeys(aux, True))}
        loss, values = fusegrad.linear_cross_entropy(x, fixed(V, H), TARGET, **more)
        return weighted(loss, values._asdict(), aux)

    def formula(x: Tensor) -> Tensor:
        return weighted(*reference.cross_entropy(x @ fixed(V, H).T * factor(x).expand(N).unsqueeze(1), TARGET), aux)

    return ours, formula


def self(x: Tensor) -> Tensor:
    return x


def given(value: Any) -> Callable[[Tensor], Any]:
    return lambda x: value


def log_softmax(x: Tensor) -> Tensor:
    """PyTorch's writes over what a backward through its tangent needs."""
    return x - x.exp().sum(-1, keepdim=True).log()


def probabilities(x: Tensor) -> Tensor:
    return log_softmax(x.sin() * 2).exp()


# Functions of [N, V], and of [N, H].
OF_LOGITS: dict[str, tuple[Callable, Callable]] = {
    "cross_entropy": both("cross_entropy", self, given(TARGET), label_smoothing=0.1, z_loss=0.1),
    "cross_entropy, aux": both("cross_entropy", self, given(TARGET), aux=NAMES, softcap=3.0),
    "cross_entropy, probabilities": both("cross_entropy", self, probabilities),
    "cross_entropy, probabilities alone": both("cross_entropy", given(fixed(N, V)), probabilities),
    "cross_entropy, probabilities alone, aux": both(
        "cross_entropy", given(fixed(N, V)), probabilities, aux=NAMES[:2], softcap=3.0
    ),
    "jsd": both("jsd", self, lambda x: x.sin() * 2, beta=0.3, labels=LABELS, hard_weight=0.4),
    "jsd, forward": both("jsd", self, lambda x: x.sin() * 2, beta=0.0),
    "jsd, reverse": both("jsd", self, lambda x: x.sin() * 2, beta=1.0, temperature=2.0),
    "jsd, student": both("jsd", self, given(fixed(N, V)), beta=0.5),
    "jsd, teacher": both("jsd", given(fixed(N, V)), self, beta=0.5),
    "jsd, log_probs": both("jsd", log_softmax, lambda x: log_softmax(x.sin() * 2), beta=0.6, log_probs=True),
    "jsd, log_probs, forward": both("jsd", log_softmax, lambda x: log_softmax(x.sin() * 2), beta=0.0, log_probs=True),
    "jsd, top-k": both("jsd", self, given(top_k()), beta=0.5, labels=LABELS, hard_weight=0.4),
    "jsd, top-k, forward": both("jsd", self, given(top_k()), beta=0.0, temperature=2.0),
}
OF_HIDDEN: dict[str, tuple[Callable, Callable]] = {
    "linear_cross_entropy": both("linear_cross_entropy", self, given(fixed(V, H)), given(TARGET), z_loss=0.1),
    "linear_cross_entropy, aux": both("linear_cross_entropy", self, given(fixed(V, H)), given(TARGET), aux=NAMES),
    "linear_cross_entropy, weight": both(
        "linear_cross_entropy", given(fixed(N, H)), lambda x: fixed(V, N) @ x, given(TARGET), logit_scale=1.5
    ),
    "linear_cross_entropy, scaled": scaled(one=True, aux=()),
    "linear_cross_entropy, scaled, lse": scaled(one=False, aux=("lse",)),
    "linear_cross_entropy, scaled, aux": scaled(one=True, aux=NAMES),
    "linear_cross_entropy, scaled rows, aux": scaled(one=False, aux=NAMES),
    "linear_jsd": both(
        "linear_jsd",
        self,
        given(fixed(V, H)),
        given(fixed(N, H) * 2),
        given(fixed(V, H)),
        labels=LABELS,
        hard_weight=0.4,
    ),
    "linear_jsd, reverse": both(
        "linear_jsd", self, given(fixed(V, H)), given(fixed(N, H) * 2), given(fixed(V, H)), beta=1.0
    ),
    "linear_jsd, top-k": both("linear_jsd", self, given(fixed(V, H)), given(top_k()), beta=0.3),
}
CASES = {name: (case, (N, V)) for name, case in OF_LOGITS.items()}
CASES |= {name: (case, (N, H)) for name, case in OF_HIDDEN.items()}
# PyTorch's softmaxes, as those of the formulas.
SAME: dict[str, Callable] = {
    "backward through a tangent": lambda f, x, d: (along(f, d)(x), grad(along(f, d))(x)),
}


def check(case: str, name: str) -> None:
    (ours, formula), shape = CASES[case]
    x, d = torch.randn(2, *shape, dtype=torch.float64)
    truth = SAME.get(name, NESTINGS[name])(formula, x, d)
    torch.testing.assert_close(NESTINGS[name](ours, x, d), truth, rtol=1e-8, atol=1e-9)


# Each loss under every other nesting, each nesting of every other loss; the rest takes as long again.
ALL = [(case, name, (i + j) % 2) for i, case in enumerate(CASES) for j, name in enumerate(NESTINGS)]


@rows_of("case, name", [(case, name) for case, name, odd in ALL if not odd], tests=12)
def test_nestings(case: str, name: str) -> None:
    check(case, name)


@pytest.mark.large
@rows_of("case, name", [(case, name) for case, name, odd in ALL if odd], tests=12)
def test_the_other_nestings(case: str, name: str) -> None:
    check(case, name)


NESTED: dict[str, Callable[[Callable], Callable]] = {
    "jacfwd(jacfwd)": lambda f: jacfwd(jacfwd(f)),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(f)),
    "hessian": hessian,
    "jacrev(hessian)": lambda f: jacrev(hessian(f)),
}


@pairs_of({"of": [*NESTED], "size": [1, 2], "of_function": ["jsd", "cross_entropy", "linear_jsd"]})
def test_batches_outside_of_what_is_differentiated(of_function: str, size: int, of: str) -> None:
    """Batches of a constant alone: its level is outside of those of the transforms between."""
    x = torch.randn(N, H if of_function == "linear_jsd" else V, dtype=torch.float64)
    batch = torch.randn(size, N, V, dtype=torch.float64)

    def call(library: Any, x: Tensor, constant: Tensor) -> Tensor:
        if of_function == "jsd":
            out = library.jsd(x, constant, beta=0.3)
        elif of_function == "cross_entropy":
            out = library.cross_entropy(x, constant.softmax(-1))
        else:
            out = library.linear_jsd(x, fixed(V, H), constant, fixed(V, V))
        return out[0] if library is reference else out

    ours, truth = (
        vmap(lambda c, library=library: NESTED[of](lambda x: call(library, x, c))(x))(batch)
        for library in (fusegrad, reference)
    )
    torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-9)
