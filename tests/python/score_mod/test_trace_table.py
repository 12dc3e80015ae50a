"""What a score_mod may call: the table of docs/design/score_mod.md, each function against PyTorch's own autograd,
values and gradients, at the points where they are special too."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from coverings import rows_of
from fusegrad import TraceError, trace_score_mod
from fusegrad._tracing import cache, elements, moves
from fusegrad._tracing.table import FUNCTIONS, OPS, Op, Refusal
from fusegrad.score_mod import split_scalars
from support import AFTER_2_11, ROOT
from torch import Tensor

DOCS = (ROOT / "docs/design/score_mod.md").read_text()
TABLE = DOCS.split("### What it may call")[1].split("\n### ")[0]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.0,
    -2.0,
    3.0,
    -3.0,
    6.0,
    20.0,
    21.0,
    0.3,
    -0.7,
    2.6,
    1e-20,
    90.0,
    -90.0,
]
SPECIAL += [math.inf, -math.inf, math.nan]


def section(title: str) -> list[str]:
    """The names in the row of the table."""
    (row,) = [line for line in TABLE.splitlines() if line.startswith(f"| {title} |")]
    return re.findall(r"`([^`]+)`", row.split("|")[2])


def function(name: str) -> Callable:
    owner, attribute = name.rsplit(".", 1)
    owners = {"torch": torch, "F": F, "torch.special": torch.special, "torch.linalg": torch.linalg, "Tensor": Tensor}
    return getattr(owners[owner], attribute)


def on_columns(mod: Callable[..., Tensor], *columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Value and gradients of mod(score, second, third) at the points of the columns, by the library."""
    cache.clear()
    n = len(columns[0])
    captured = [c.clone().requires_grad_() for c in columns[1:]]
    traced = trace_score_mod(lambda s, b, h, q, kv: mod(s, *(c[kv] for c in captured)))
    score = columns[0].reshape(1, 1, 1, n)
    arguments = traced.text, score, [b.detach() for b in traced.buffers], *split_scalars(traced.scalars)
    value = torch.ops.fusegrad.evaluate_score_mod(*arguments)
    grad_score, grads = torch.ops.fusegrad.evaluate_score_mod_backward(torch.full_like(score, 1.25), *arguments)
    found = [next((g for b, g in zip(traced.buffers, grads, strict=True) if b is c), torch.zeros(n)) for c in captured]
    return value.reshape(-1), [grad_score.reshape(-1), *found]


def by_pytorch(mod: Callable[..., Tensor], *columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [c.clone().requires_grad_() for c in columns]
    value = mod(*leaves)
    if not value.requires_grad:
        return value.double(), [torch.zeros_like(c) for c in columns]
    weight = torch.full_like(value, 1.25)
    return value.detach().double(), list(torch.autograd.grad(value, leaves, weight, materialize_grads=True))


def compare(mod: Callable[..., Tensor], *columns: Tensor, rtol: float = 1e-9) -> None:
    got, expected = on_columns(mod, *columns), by_pytorch(mod, *columns)
    options = {"rtol": rtol, "atol": 1e-12, "equal_nan": True, "check_dtype": False}
    points = lambda message: f"{message}\nat {[c.tolist() for c in columns]}"  # noqa: E731
    torch.testing.assert_close(got[0], expected[0], msg=points, **options)
    for g, e in zip(got[1], expected[1], strict=True):
        # Nothing is said of the gradient of NaN, and where PyTorch's is NaN a number will do, such as the 0 of a branch
        # that is not taken.
        compared = ~(expected[0].isnan() | (e.isnan() & g.isfinite()))
        torch.testing.assert_close(torch.where(compared, g, 0.0), torch.where(compared, e, 0.0), msg=points, **options)


# Arguments after the first, for functions that want more.
MORE: dict[str, tuple] = {
    "torch.clamp": (-1.0, 2.0),
    "torch.clip": (-1.0, 2.0),
    "torch.clamp_min": (1.0,),
    "torch.clamp_max": (1.0,),
    "F.threshold": (1.0, -3.0),
    "torch.nan_to_num": (0.5, 3.0, -3.0),
    "F.elu": (1.5,),
    "F.celu": (1.5,),
    "F.leaky_relu": (0.1,),
    "F.softplus": (2.0, 3.0),
    "F.hardtanh": (-1.0, 1.0),
    "F.hardshrink": (0.5,),
    "F.softshrink": (0.5,),
    "torch.pow": (3.0,),
    "torch.logit": (1e-3,),
}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@rows_of("name", section("of one number"))
def test_functions_of_one_number(name: str) -> None:
    x = torch.tensor(SPECIAL)
    if AFTER_2_11 and ("clamp" in name or "clip" in name):
        x = x[(x != 1) & (x != -1) & (x != 2)]
    if name == "F.hardswish":
        x = x[x != -math.inf]  # of which PyTorch makes NaN
    # PyTorch takes the sixth of hardsigmoid in float32.
    compare(lambda s: function(name)(s, *MORE.get(name, ())), x, rtol=1e-7 if "hard" in name else 1e-9)


@rows_of("name", section("of two numbers"))
def test_functions_of_two_numbers(name: str) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL, [0.0, -0.0, 1.0, -1.0, 2.0, -2.5, 0.3, math.inf, math.nan])))
    if name == "torch.floor_divide":  # which has no derivative in PyTorch
        compare(lambda s, other: function(name)(s.detach(), other.detach()), *pairs.T)
    else:
        if AFTER_2_11 and name in ("torch.fmin", "torch.fmax"):
            pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        if "xlog" in name:  # an infinite logarithm times 0 is 0, and has no gradient
            pairs = pairs[pairs[:, 1] != math.inf]
        compare(function(name), *pairs.T)


def takes_two(name: str) -> bool:
    """Whether a function of truth takes two."""
    return name.split(".")[-1] in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor")


@rows_of("name", section("truth"))
def test_truth(name: str) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)))
    compare(lambda s, other: torch.where(function(name)(s, *([other] if takes_two(name) else [])), 2.0, 3.0), *pairs.T)


@rows_of("name", section("of integers"))
def test_functions_of_integers(name: str) -> None:
    call = function(name)
    other = (2,) if "not" not in name else ()
    compare(lambda s: s + call((s.nan_to_num(0, 5, -5).clamp(-9, 9)).long(), *other), torch.tensor(SPECIAL))


VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.stack": lambda x: torch.stack([x, x * 2])[1, 0],
    "torch.cat": lambda x: torch.cat([x, x * 2])[4],
    "torch.dot": lambda x: torch.dot(x, x),
    "torch.matmul": lambda x: (x @ x[:, None])[0],
    "F.linear": lambda x: F.linear(x, x[None] * 2, x[:1])[0],
    "torch.einsum": lambda x: torch.einsum("i,j->ij", x, x)[0, 1],
    "torch.softmax": lambda x: x.softmax(0)[1],
    "torch.log_softmax": lambda x: x.log_softmax(0)[1],
    "torch.logsumexp": lambda x: x.logsumexp(0),
    "torch.gather": lambda x: x.gather(0, torch.tensor([1]))[0],
    "torch.take": lambda x: x.take(torch.tensor(1)),
    "torch.index_select": lambda x: x.index_select(0, torch.tensor([1]))[0],
    "F.embedding": lambda x: F.embedding(torch.tensor(1), x[:, None])[0],
    "torch.where": lambda x: torch.where(x > 0, x, x * 2).sum(),
    "torch.full_like": lambda x: (torch.full_like(x, 2) * x).sum(),
    "torch.max": lambda x: x.max(0).values + x.max(),
    "torch.min": lambda x: x.min(0).values + x.min(),
    "torch.argmax": lambda x: x[x.argmax()],
    "torch.argmin": lambda x: x[x.argmin()],
    "torch.any": lambda x: x.any() * x[0],
    "torch.all": lambda x: (x > 0).all() * x[0],
    "torch.var_mean": lambda x: sum(torch.var_mean(x, dim=0)),
    "torch.std_mean": lambda x: sum(torch.std_mean(x, dim=0)),
    "torch.var": lambda x: x.var(0),
    "torch.std": lambda x: x.std(0),
    "F.layer_norm": lambda x: F.layer_norm(x, (3,))[1],
    "torch.count_nonzero": lambda x: torch.count_nonzero(x > 0) * x[0],
    "torch.bucketize": lambda x: torch.bucketize(x[0], torch.tensor([-0.5, 0.5])) * x[1],
    "torch.searchsorted": lambda x: torch.searchsorted(torch.tensor([-0.5, 0.5]), x[0]) * x[1],
    "torch.norm": lambda x: torch.norm(x) + x.norm(3),
    "torch.dist": lambda x: torch.dist(x[:-1], x[1:]),
    "torch.cdist": lambda x: torch.cdist(x[None, :-1], x[None, 1:]).sum(),
}


@rows_of("name", section("of several numbers"))
def test_functions_of_several_numbers(name: str) -> None:
    mod = VECTORS.get(name, lambda x: function(name)(x, 0))
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))

    def elements(*x: Tensor) -> Tensor:
        if x[0].dim() == 0:
            return mod(torch.stack(x))
        return torch.stack([mod(torch.stack(column)) for column in zip(*x, strict=True)])

    compare(elements, *x)


# Functions of several numbers where they have no derivative, beside those of the table. Not cdist's largest difference:
# PyTorch gives each of equal ones the whole gradient.
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"norm {p}": lambda x, p=p: x.norm(p) for p in (2, 1, 3, 4, 0.5, 1.5, 0, -1, math.inf, -math.inf)},
    **{f"dist {p}": lambda x, p=p: torch.dist(x[:-1], x[1:], p) for p in (2, 1, 3, 0.5, math.inf)},
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x[None, :-1], x[None, 1:], p).sum() for p in (2, 1, 3)},
    "square of the norm": lambda x: x.norm() ** 2,
    "norm by a number": lambda x: (x / (x.norm() + 1))[0],
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, 0, True)[0],
    "matrix norm": lambda x: torch.linalg.matrix_norm(torch.stack([x, x * 2])),
    "norms of rows": lambda x: torch.stack([x, x - x[0], x * 0]).norm(dim=1).sum(),
    "normalize": lambda x: F.normalize(x, dim=0)[0],
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=0),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x, eps=0.0),
    "std_mean of all": lambda x: sum(torch.std_mean(x)),
    "std without correction": lambda x: x.std(correction=0),
    "norm of a function": lambda x: torch.tanh(x - x.roll(1)).norm(),
    "max of a matrix": lambda x: torch.stack([x, x.flip(0)]).max(),
    "amin of a matrix": lambda x: torch.stack([x, x.flip(0)]).amin((0, 1)),
    "largest size": lambda x: torch.outer(x, x).norm(math.inf),
    "prod of a matrix": lambda x: torch.outer(x, x).prod(),
    "logsumexp of both": lambda x: torch.logsumexp(torch.stack([x, x]), (0, 1)),
    "softmax": lambda x: x.softmax(0) @ x,
    "sinc": lambda x: torch.sinc(x).sum(),
    "logit": lambda x: torch.logit(x.abs() / 2).sum(),
}


@pytest.mark.parametrize("length", [2, 3, 4])
@rows_of("name", [*section("of several numbers"), *KINKS])
def test_subgradients(name: str, length: int) -> None:
    """At ties, zeros and infinities. Elements of up to 2 are single, more have an axis."""
    mod = KINKS.get(name) or VECTORS.get(name) or (lambda x: function(name)(x, 0))
    if length < 3 and name in ("torch.cat", "F.layer_norm", "F.linear"):
        pytest.skip("a function of three numbers")
    if name == "F.layer_norm":
        mod = lambda x: F.layer_norm(x, (length,))[1]  # noqa: E731
    values = [0.0, 1.0, -1.0] if length == 4 else [0.0, -0.0, 1.0, -1.0, 2.0]
    if "prod" not in name and name != "torch.einsum":  # which have infinite gradients, and PyTorch's NaN
        values += [math.inf] if length < 4 else []
    columns = torch.tensor(list(itertools.product(values, repeat=length)))

    def elements(*x: Tensor) -> Tensor:
        if x[0].dim() == 0:
            return mod(torch.stack(x))
        return torch.stack([mod(torch.stack(column)) for column in zip(*x, strict=True)])

    compare(elements, *columns.T)


def test_the_table_has_all_that_the_tracer_knows() -> None:
    """By the names of ATen's operations, in place ones and synonyms aside."""
    unlisted = (moves.move, elements.fill, elements.to_copy, elements.local_scalar)
    known = {name for name, how in OPS.items() if isinstance(how, Op) and how.handler not in unlisted} | {"full_like"}
    listed = {n.split(".")[-1] for n in re.findall(r"`([^`]+)`", TABLE)}
    synonyms = {
        "log_sigmoid_forward": "logsigmoid", "rsub": "sub", "__and__": "bitwise_and", "__or__": "bitwise_or",
        "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
        "special_xlog1py": "xlog1py", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "vdot": "dot",
        "masked_fill": "where", "index": "gather", "linalg_vector_norm": "vector_norm", "_cdist_forward": "cdist",
        "_euclidean_dist": "cdist", "_softmax": "softmax", "_log_softmax": "log_softmax",
    }  # fmt: skip
    assert {synonyms.get(n, n) for n in known} - listed == set()


@rows_of("name", section("not in the language"))
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        TraceError, match=r"the operation .*, which score_mods do not have; write it with the functions"
    ):
        trace_score_mod(lambda s, b, h, q, kv: function(name)(s))


# What has arguments of its own.
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "__setitem__": lambda x: x.__setitem__(0, 1.0),
    "__contains__": lambda x: 1.0 in x,
    "__deepcopy__": copy.deepcopy,
    "__reduce_ex__": lambda x: x.__reduce_ex__(2),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "requires_grad.__set__": lambda x: setattr(x, "requires_grad", True),
    "grad.__set__": lambda x: setattr(x, "grad", x),
    "data.__set__": lambda x: setattr(x, "data", x),
    "register_hook": lambda x: x.register_hook(print),
    "register_post_accumulate_grad_hook": lambda x: x.register_post_accumulate_grad_hook(print),
    "grad": lambda x: torch.autograd.grad(x, x),
    "quantile": lambda x: x.quantile(0.5),
    "nanquantile": lambda x: x.nanquantile(0.5),
    **{name: lambda x, name=name: getattr(x, name)(1) for name in ("topk", "kthvalue")},
    **{
        name: lambda x, name=name: getattr(x, name)(0)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    },
}


@rows_of("name", sorted({n for table in (FUNCTIONS, OPS) for n, how in table.items() if isinstance(how, Refusal)}))
def test_each_refusal_has_its_text(name: str) -> None:
    """For a method, a function or a property."""
    how = FUNCTIONS[name] if name in FUNCTIONS else OPS[name]
    attribute, _, kind = name.partition(".")
    call = REFUSED.get(name)
    if call is None and kind:
        call = lambda x: getattr(x, attribute)  # noqa: E731
    elif call is None:
        call = lambda x: getattr(x if hasattr(x, name) else torch, name)(*([] if hasattr(x, name) else [x]))  # noqa: E731
    with pytest.raises(TraceError) as caught:
        trace_score_mod(lambda s, b, h, q, kv: call(torch.stack([s, s * 2, s * 3])))
    message = str(how.error(attribute))
    assert message in str(caught.value).splitlines()[0]


@rows_of("name", [name for name, how in OPS.items() if isinstance(how, Refusal)])
def test_a_refused_op_is_refused_within_pytorchs_functions(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    arguments = {"topk": (1,), "kthvalue": (1,), "median": (), "nanmedian": ()}.get(name, (0,))
    with pytest.raises(TraceError, match=f"{name} of values that differ from score to score; compute it outside of"):
        trace_score_mod(lambda s, b, h, q, kv: packet(torch.stack([s, s * 2, s * 3]), *arguments))


HIDDEN_WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (1, 1))[1],
    "vander": lambda x: torch.vander(x)[0, 0],
    "local_response_norm": lambda x: F.local_response_norm(x[None, :, None], 2)[0, 0, 0],
}


@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_what_writes_within_is_refused_by_name(name: str) -> None:
    if AFTER_2_11 and name in ("pad", "local_response_norm"):
        pytest.skip("this torch makes it of operations that do not write")
    with pytest.raises(TraceError, match=rf"the operation {name}, which score_mods do not have"):
        trace_score_mod(lambda s, b, h, q, kv: HIDDEN_WRITES[name](torch.stack([s, q, kv])))


@pytest.mark.parametrize("traced", [True, False])
def test_max_norm_of_an_embedding_is_refused_by_name(traced: bool) -> None:
    layer = torch.nn.Embedding(4, 2, max_norm=1.0)
    with pytest.raises(TraceError, match=r"max_norm of F\.embedding, which writes into the table; scale the rows"):
        trace_score_mod(lambda s, b, h, q, kv: s + layer(q if traced else torch.tensor(1))[0])


def test_the_functions_own_writes_are_called_writes() -> None:
    x, n = torch.randn(3), 1
    for write in (
        lambda s: x.add_(s),
        lambda s: torch.add(x, s, out=x),
        lambda s: torch.stack([s, s])[0].add_(1),
        lambda s: torch.stack([s, s])[n].add_(1),
        lambda s: torch.stack([s, s])[:1].add_(1),
        lambda s: (lambda t: (t[0], t.add_(1))[0])(torch.stack([s, s])),
    ):
        with pytest.raises(TraceError, match="a write into"):
            trace_score_mod(lambda s, b, h, q, kv, write=write: write(s).sum())


def test_an_internal_failure_is_in_the_languages_words() -> None:
    with pytest.raises(TraceError, match="the operation prims::sum, which score_mods do not have"):
        trace_score_mod(lambda s, b, h, q, kv: torch.ops.prims.sum(torch.stack([s, s]), [0]))
