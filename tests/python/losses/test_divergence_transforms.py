"""jsd and linear_jsd under torch.func, torch.vmap, forward-mode differentiation and a second backward, beside the plain
formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fusegrad
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from coverings import rows_of
from function_transforms import assert_same_under_transforms, assert_second_derivatives, twice
from fusegrad import JSDAux, _loss_chunks, reference
from torch import Tensor

N, V, H = 3, 5, 2
K = 3
LABELS = torch.tensor([1, -100, 4])
WEIGHTS = torch.linspace(0.5, 2, N).double()


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear losses take two rows each."""
    monkeypatch.setitem(_loss_chunks._LOGITS, "cpu", 1)
    monkeypatch.setattr(_loss_chunks, "_LEAST", 2)


def top_k(tail: bool = False) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """K log-probabilities a row, one of them padding, and the tail's."""
    whole = torch.linspace(-2, 3, N * V, dtype=torch.float64).view(N, V).cos().mul(3).log_softmax(1)
    log_probs, indices = whole.topk(K, 1)
    indices[0, 1] = -1
    rest = whole.exp().scatter(1, indices.clamp_min(0), 0).sum(1).log()
    return (log_probs, indices), {"tail_log_prob": rest} if tail else {}


# Options of both ops, of logits as teacher.
DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "forward, none": {"beta": 0.0, "reduction": "none"},
    "reverse, temperature": {"beta": 1.0, "temperature": 2.0},
    "hard part": {"beta": 0.3, "labels": LABELS, "hard_weight": 0.7, "soft_weight": 0.5, "reduction": "mean"},
    "weighted": {"beta": 0.0, "temperature": 1.5, "token_weight": WEIGHTS, "reduction": "sum"},
    "reverse, labels, none": {"beta": 1.0, "labels": LABELS, "hard_weight": 0.2, "reduction": "none"},
    "normalizer": {"labels": LABELS.clamp_min(0).int(), "ignore_index": 4, "normalizer": 7.0},
    "hard part alone": {"labels": LABELS, "hard_weight": 1.0, "soft_weight": 0.0},
}
# And of a top-k teacher, with whether it has a tail.
TOP_K: dict[str, tuple[bool, dict[str, Any]]] = {
    "bucket": (False, {"temperature": 1.5}),
    "bucket, forward": (False, {"beta": 0.0, "reduction": "none", "token_weight": WEIGHTS}),
    "tail, reverse": (True, {"beta": 1.0, "labels": LABELS, "hard_weight": 0.5}),
    "renormalize": (False, {"beta": 0.4, "tail": "renormalize"}),
}
HEADS: dict[str, Any] = {"student_softcap": 3.0, "student_logit_scale": 1.5}
TEACHERS: dict[str, Any] = {"teacher_softcap": 2.0, "teacher_logit_scale": 0.8, "teacher_temperature": 1.3}

Case = tuple[Callable, Callable, list[Tensor]]


def dense(options: dict[str, Any]) -> Case:
    """Functions of both sides' logits."""
    inputs = [torch.randn(N, V, dtype=torch.float64) for _ in range(2)]
    return lambda *t: fusegrad.jsd(*t, **options), lambda *t: reference.jsd(*t, **options)[0], inputs


def of_log_probs(options: dict[str, Any]) -> Case:
    return (
        lambda *t: fusegrad.jsd(*(x.log_softmax(-1) for x in t), log_probs=True, **options),
        lambda *t: reference.jsd(*(x.log_softmax(-1) for x in t), log_probs=True, **options)[0],
        dense({})[2],
    )


def with_top_k(tail: bool, options: dict[str, Any]) -> Case:
    teacher, more = top_k(tail)
    return (
        lambda x: fusegrad.jsd(x, teacher, **more, **options),
        lambda x: reference.jsd(x, teacher, **more, **options)[0],
        [torch.randn(N, V, dtype=torch.float64)],
    )


def linear(options: dict[str, Any], top: bool | None = None) -> Case:
    """Functions of the student's input, weight and bias."""
    inputs = [torch.randn(s, dtype=torch.float64) for s in ((N, H), (V, H), (V,))]
    more = {**options, **HEADS}
    if top is None:
        # A vocabulary that is padded on both sides.
        teacher = [torch.randn(s, dtype=torch.float64) for s in ((N, 4), (V + 2, 4), (V + 2,))]
        of_teacher: tuple[Any, ...] = tuple(teacher[:2])
        more = {**more, **TEACHERS, "teacher_bias": teacher[2], "vocab_size": V - 1}
        if "labels" in more and more.get("ignore_index") is None:
            more["labels"] = LABELS.clamp_max(V - 2)
    else:
        pair, tail = top_k(top)
        of_teacher, more = (pair,), {**more, **tail}
    ours, truth = fusegrad.linear_jsd, reference.linear_jsd
    return (
        lambda x, w, b: ours(x, w, *of_teacher, student_bias=b, **more),
        lambda x, w, b: truth(x, w, *of_teacher, student_bias=b, **more)[0],
        inputs,
    )


CASES: dict[str, Callable[[], Case]] = {
    **{f"jsd, {name}": lambda o=o: dense(o) for name, o in DENSE.items()},
    **{f"jsd, log_probs, beta {b}": lambda b=b: of_log_probs({"beta": b}) for b in (0.0, 0.5, 1.0)},
    **{f"jsd, top-k {name}": lambda o=o: with_top_k(*o) for name, o in TOP_K.items()},
    **{
        f"linear_jsd, {name}": lambda name=name: linear(DENSE[name])
        for name in ("plain", "forward, none", "hard part", "reverse, labels, none")
    },
    **{
        f"linear_jsd, top-k {name}": lambda name=name: linear(TOP_K[name][1], TOP_K[name][0])
        for name in ("bucket", "tail, reverse")
    },
}
cases = rows_of("case", CASES, tests=3)


@cases
def test_transforms(case: Callable[[], Case]) -> None:
    assert_same_under_transforms(*case())


@cases
def test_second_derivatives(case: Callable[[], Case]) -> None:
    assert_second_derivatives(*case())


def test_without_memory_for_gradients() -> None:
    """workspace_mib=0 makes no gradients in the forward."""
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((N, H), (V, H)))
    teacher = torch.randn(N, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    found = [twice(lambda *t: fusegrad.linear_jsd(*t, *teacher, workspace_mib=m), [x, w]) for m in (0, None)]
    right = twice(lambda *t: reference.linear_jsd(*t, *teacher)[0], [x, w])
    torch.testing.assert_close(found, [right, right])


def test_one_side_alone() -> None:
    """Each side's gradients, where the other one is a constant."""
    _, _, (student, teacher) = dense({})
    for f in (lambda x: (x, teacher), lambda x: (student, x)):
        x = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
        found = [twice(lambda x, op=op, f=f: op(*f(x), beta=0.3), [x]) for op in (fusegrad.jsd, plain_jsd)]
        torch.testing.assert_close(*found)


def plain_jsd(*t: Any, **options: Any) -> Tensor:
    return reference.jsd(*t, **options)[0]


def test_a_teacher_made_of_the_student() -> None:
    """What flows to the student through the teacher comes in once."""
    x = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    found = [twice(lambda x, op=op: op(x, x.roll(1, 1) * 2), [x]) for op in (fusegrad.jsd, plain_jsd)]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("top", [False, True], ids=["dense", "top-k"])
def test_aux_values(top: bool) -> None:
    """Constants of a backward, they have derivatives under a transform."""
    both = JSDAux(soft_loss=True, hard_loss=True)
    teacher: Any = top_k()[0] if top else torch.randn(N, V, dtype=torch.float64)

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        loss, aux = fusegrad.jsd(x, teacher, labels=LABELS, return_aux=both)
        return loss, aux.soft_loss, aux.hard_loss

    def truth(x: Tensor) -> tuple[Tensor, ...]:
        loss, aux = reference.jsd(x, teacher, labels=LABELS)
        return loss, aux["soft_loss"], aux["hard_loss"]

    x, tangent = torch.randn(2, N, V, dtype=torch.float64)
    torch.testing.assert_close(*(torch.func.jvp(f, (x,), (tangent,)) for f in (ours, truth)))
    torch.testing.assert_close(*(torch.func.jacrev(f)(x) for f in (ours, truth)))
    # create_graph=True: a backward that reaches one raises, as it does without.
    leaf = x.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"jsd: aux\.soft_loss must not be differentiated"):
        torch.autograd.grad(ours(leaf)[1].sum(), leaf, create_graph=True)


def test_tangents_of_a_constant() -> None:
    """linear_jsd's teacher gets no gradient, but what it has for a tangent counts."""
    t = [torch.randn(s, dtype=torch.float64) for s in ((N, H), (V, H), (N, 4), (V, 4))]
    tangents = tuple(torch.randn_like(x) for x in t)
    found = torch.func.jvp(fusegrad.linear_jsd, tuple(t), tangents)
    torch.testing.assert_close(found, torch.func.jvp(lambda *t: reference.linear_jsd(*t)[0], tuple(t), tangents))
    with pytest.raises(ValueError, match="linear_jsd: teacher_input must not require grad"):
        torch.func.grad(lambda x: fusegrad.linear_jsd(t[0], t[1], x, t[3]))(t[2])


# --- values at the edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_rows(beta: float) -> None:
    """No loss and no gradient, exactly; the Hessian is Fisher's information, times beta * (1 - beta) of a mixture."""
    x = torch.randn(1, V, dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        return fusegrad.jsd(z, x, beta=beta)

    gradient, value = torch.func.grad_and_value(loss)(x)
    assert value == 0 and not gradient.any()
    q = x.softmax(1)[0]
    fisher = (q.diag() - q.outer(q)) * (beta * (1 - beta) if 0 < beta < 1 else 1)
    torch.testing.assert_close(torch.func.hessian(loss)(x).view(V, V), fisher)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_impossible_columns(beta: float) -> None:
    """Columns of probability 0 on both sides count for nothing, in derivatives of either order."""
    x, y = torch.randn(2, N, V, dtype=torch.float64)
    hole = x.new_full((N, 1), -torch.inf)

    def filled(x: Tensor, y: Tensor) -> Tensor:
        return fusegrad.jsd(torch.cat([hole, x], 1), torch.cat([hole, y], 1), beta=beta)

    for places in ((0,), (0, 1)):
        for of in (torch.func.grad, lambda f, p: torch.func.hessian(f, p)):
            torch.testing.assert_close(*(of(f, places)(x, y) for f in (filled, lambda *t: plain_jsd(*t, beta=beta))))


@pytest.mark.parametrize("side", [0, 1], ids=["student", "teacher"])
def test_columns_that_one_side_excludes(side: int) -> None:
    x, y = torch.randn(2, N, V, dtype=torch.float64)
    (x, y)[side][:, 1] = -torch.inf
    for beta in (0.5, side):  # and the KL that is finite, of the side that excludes
        options = {"beta": 1.0 - beta if beta != 0.5 else 0.5}
        found = [torch.func.grad(lambda z, f=f: f(z, y, **options))(x) for f in (fusegrad.jsd, plain_jsd)]
        torch.testing.assert_close(*found)
        exclude = torch.tensor([c for c in range(V) if c != 1])
        blocks = [
            torch.func.hessian(lambda z, f=f: f(x.index_copy(1, exclude, z), y, **options))(x[:, exclude])
            for f in (fusegrad.jsd, plain_jsd)
        ]
        torch.testing.assert_close(*blocks)


def test_an_infinite_divergence() -> None:
    """KL(p | q) where q = 0 < p: infinite, and the student's gradient is q - p. Without weight it is left out."""
    x, y = torch.randn(2, 1, V, dtype=torch.float64)
    x[0, 2] = -torch.inf
    gradient, value = torch.func.grad_and_value(lambda z: fusegrad.jsd(z, y, beta=0.0))(x)
    assert value == torch.inf
    torch.testing.assert_close(gradient, x.softmax(1) - y.softmax(1))
    label = torch.tensor([0])
    hard = torch.func.grad(lambda z: fusegrad.jsd(z, y, beta=0.0, soft_weight=0.0, hard_weight=1.0, labels=label))(x)
    torch.testing.assert_close(hard, x.softmax(1) - torch.eye(V, dtype=torch.float64)[:1])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_far_and_near_in_float32(beta: float) -> None:
    """Probabilities of 1e-30 are in no divisor, and a small divergence keeps its digits."""
    torch.manual_seed(3)
    x = torch.randn(4, 64)
    near = x, x + 1e-3 * torch.randn(4, 64), 0
    far = x * 25, torch.randn(4, 64) * 25, 1e-6
    for student, teacher, least in (near, far):
        of_dtype = []
        for dtype in (torch.float32, torch.float64):
            z, y, tangent = student.to(dtype), teacher.to(dtype), torch.ones(4, 64, dtype=dtype).cumsum(1).sin()
            f = fusegrad.jsd if dtype == torch.float32 else plain_jsd
            gradient = torch.func.grad(lambda z, f=f, y=y: f(z, y, beta=beta))
            of_dtype.append([f(z, y, beta=beta), *torch.func.jvp(gradient, (z,), (tangent,))])
        for ours, right in zip(*of_dtype, strict=True):
            assert (ours - right).norm().item() <= 2e-3 * right.norm().item() + least


def test_rows_that_do_not_count() -> None:
    """Also where they are NaN; without a row that is kept loss and gradient are 0."""
    x, y = torch.randn(2, N, V, dtype=torch.float64)
    wild, teacher = x.clone(), y.clone()
    wild[1], teacher[1] = torch.nan, torch.inf
    options: dict[str, Any] = {"labels": LABELS, "hard_weight": 0.5}
    found = [torch.func.hessian(lambda z, t=t: fusegrad.jsd(z, t, **options))(s) for s, t in ((x, y), (wild, teacher))]
    torch.testing.assert_close(*found)
    (log_probs, indices), tail = top_k(True)
    strange = log_probs.clone()
    strange[1] = torch.nan
    rest = tail["tail_log_prob"].clone()
    rest[1] = torch.nan
    of_top_k = [
        torch.func.grad(lambda z, t=t, r=r: fusegrad.jsd(z, (t, indices), tail_log_prob=r, **options))(s)
        for s, t, r in ((x, log_probs, tail["tail_log_prob"]), (wild, strange, rest))
    ]
    torch.testing.assert_close(*of_top_k)
    none = torch.full((N,), -100)
    gradient, value = torch.func.grad_and_value(lambda z: fusegrad.jsd(z, y, labels=none))(x)
    assert value == 0 and not gradient.any()
    leaf = wild.clone().requires_grad_()
    (first,) = torch.autograd.grad(fusegrad.jsd(leaf, teacher, **options), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert not first[1].any() and not second[1].any() and second.isfinite().all()


def test_all_columns_in_the_top_k() -> None:
    """There is no tail: the dense divergence."""
    x, y = torch.randn(2, N, V, dtype=torch.float64)
    teacher = y.log_softmax(1).topk(V, 1)
    of = (lambda z: fusegrad.jsd(z, tuple(teacher)), lambda z: plain_jsd(z, y))
    torch.testing.assert_close(*(torch.func.hessian(f)(x) for f in of), rtol=1e-6, atol=1e-9)


def test_wrong_labels_and_columns() -> None:
    x, y = torch.randn(2, N, V)
    wrong = torch.tensor([0, V, 1])
    with pytest.raises(IndexError, match="jsd: labels must be in"), forward_ad.dual_level():
        fusegrad.jsd(forward_ad.make_dual(x, x), y, labels=wrong)
    batched = torch.vmap(lambda z, t: fusegrad.jsd(z, y, labels=t, reduction="none"))(x[None], wrong[None])[0]
    assert batched.isnan().tolist() == [False, True, False]
    (log_probs, indices), _ = top_k()
    outside = indices.clone()
    outside[2, 0] = V
    with pytest.raises(IndexError, match="jsd: the teacher's indices"), forward_ad.dual_level():
        fusegrad.jsd(forward_ad.make_dual(x, x), (log_probs, outside))
    batched = torch.vmap(lambda z, i: fusegrad.jsd(z, (log_probs, i), reduction="none"))(x[None], outside[None])[0]
    assert batched.isnan().tolist() == [False, False, True]
    with pytest.raises(ValueError, match="jsd: teacher must be log-probabilities"), forward_ad.dual_level():
        fusegrad.jsd(forward_ad.make_dual(x, x), y, log_probs=True)


# --- what users do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_top_k", [False, True], ids=["dense", "top-k"])
def test_per_sample_gradients(of_top_k: bool) -> None:
    """vmap over grad: rows, labels and teachers batched, the head not."""
    rows, labels, head = torch.randn(N, H), torch.tensor([0, -100, 2]), torch.randn(V, H)
    teachers = [t.float() if t.is_floating_point() else t for t in top_k()[0]] if of_top_k else [torch.randn(N, V)]

    def of(f: Callable) -> Any:
        def loss(w: Tensor, x: Tensor, label: Tensor, *teacher: Tensor) -> Tensor:
            t = teacher if of_top_k else teacher[0]
            return f(x @ w.T, t, labels=label, hard_weight=0.3, beta=0.2, reduction="sum")

        in_dims = (None, *[0] * (2 + len(teachers)))
        return torch.vmap(torch.func.grad(loss), in_dims=in_dims)(head, rows, labels, *teachers)

    torch.testing.assert_close(of(fusegrad.jsd), of(plain_jsd))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    exact = linear({"labels": LABELS, "hard_weight": 0.5}, None)[2]
    teacher = torch.randn(N, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    low = [t.to(dtype) for t in exact]

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fusegrad.linear_jsd(x, w, *(t.to(dtype) for t in teacher), student_bias=b)

    tangents = tuple(torch.randn_like(t) for t in low)
    value, tangent = torch.func.jvp(ours, tuple(low), tangents)
    assert value.dtype == tangent.dtype == torch.float32
    right = torch.func.jvp(
        lambda x, w, b: reference.linear_jsd(x, w, *(t.to(dtype).double() for t in teacher), student_bias=b)[0],
        tuple(t.double() for t in low),
        tuple(t.double() for t in tangents),
    )
    close = {"rtol": 3e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close((value.double(), tangent.double()), right, **close)
    for gradient, leaf in zip(torch.func.grad(ours, (0, 1, 2))(*low), low, strict=True):
        assert gradient.dtype == leaf.dtype


def test_student_and_teacher_of_two_dtypes() -> None:
    x, y = torch.randn(N, V), torch.randn(N, V, dtype=torch.bfloat16)
    found = torch.func.grad(fusegrad.jsd, (0, 1))(x, y)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(found[0], torch.func.grad(plain_jsd)(x, y.float()))


def test_inplace() -> None:
    """A permission without effect under a transform; after a write a second differentiation is refused."""
    x, y = torch.randn(2, N, V)
    kept = x.clone()
    found = torch.func.grad(lambda z: fusegrad.jsd(z * 1, y, inplace=True))(x)
    torch.testing.assert_close(found, torch.func.grad(plain_jsd)(x, y))
    assert torch.equal(x, kept)
    w, u = torch.randn(V, V), torch.randn(V, V)
    for loss in (fusegrad.jsd, lambda s, t, **o: fusegrad.linear_jsd(s, w, t, u, **o)):
        leaf = torch.randn(N, V, requires_grad=True)
        (first,) = torch.autograd.grad(loss(leaf * 1, y, inplace=True), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="jsd: the gradient must not be differentiated a second time"):
            first.sum().backward()


def test_compiled() -> None:
    x, y = torch.randn(2, N, V)
    gradient = torch.func.grad(lambda z: fusegrad.jsd(z, y))
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager", fullgraph=True)(x), gradient(x))
