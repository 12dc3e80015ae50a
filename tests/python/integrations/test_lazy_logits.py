"""Lazy logits in the autograd graph: whatever stands between the head and the loss sees the gradient, or raises."""

from __future__ import annotations

import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coverings import each_of, rows_of
from fusegrad.integrations.lazy_logits import LazyLogitsTensor, lazy_linear, materialize
from torch import Tensor, nn

pytestmark = [pytest.mark.cpu_only, pytest.mark.filterwarnings("ignore:fusegrad")]

V = 11
TARGET = torch.arange(10) % V


def leaves(**options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 8), (V, 8), (V,))
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_(options.get("grad", True))
        for s in shapes
    ]


def scaled(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A Function whose backward multiplies by 3."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * grad.reshape(2, 5, V)

    return Scaled.apply


Step = Callable[[Any, list[Any]], Any]


def hooked(z: Any, seen: list[Any]) -> Any:
    z.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    return z


def retained(z: Any, seen: list[Any]) -> Any:
    z.retain_grad()
    seen.append(z)
    return z


def freed(z: Any, seen: list[Any]) -> Any:
    with torch.no_grad():
        return z * 1.5


def of_its_own(z: Any, seen: list[Any]) -> Any:
    """A leaf."""
    z = z.detach().requires_grad_()
    seen.append(z)
    return z


# What models do, and what must not be bypassed; each keeps the shape.
PLAIN: dict[str, Step] = {
    "scale": lambda z, _: z * 2 / 3,
    "cap": lambda z, _: torch.tanh(z / 5) * 4,
    "cast": lambda z, _: z.to(torch.float64).double().contiguous(),
    "shape": lambda z, _: z.view(10, V)[:].reshape(2, 5, -1),
    "rows": lambda z, _: z[torch.tensor([1, 0])],
    "clone": lambda z, _: z.clone(),
    "bias": lambda z, _: z + torch.arange(V, dtype=torch.float64) / 7,
}
IN_THE_WAY: dict[str, Step] = {
    **{
        f"Function: {name}": lambda z, _, forward=forward: scaled(forward)(z)
        for name, forward in {
            "x * 1": lambda x: x * 1,
            "double": lambda x: x.double(),
            "float": lambda x: x.float().double(),
            "view": lambda x: x.view(2, 5, V),
            "[:]": lambda x: x[:],
            "x": lambda x: x,
            "clone": lambda x: x.clone(),
            "detach": lambda x: x.detach(),
            "view_as": lambda x: x.view_as(x),
            "values": lambda x: materialize(x) * 1,
        }.items()
    },
    "register_hook": hooked,
    "retain_grad": retained,
    "detach_": lambda z, _: z.clone().detach_(),
    "no_grad": freed,
    "leaf": of_its_own,
    "in place": lambda z, _: z.clone().mul_(2),
    "after a Function": lambda z, _: z,
}


def run(linear: Any, steps: list[Step], reduction: str = "mean", **options: Any) -> list[Any]:
    """Loss, gradients of the head's operands, and what hooks and leaves saw."""
    given, seen = leaves(**options), []
    logits = linear(*given)
    try:
        for step in steps:
            logits = step(logits, seen)
    except RuntimeError as error:  # a hook of what has no gradient
        return [str(error)]
    loss = F.cross_entropy(logits.view(10, V), TARGET, reduction=reduction)
    if loss.requires_grad:
        (loss * 0.37).sum().backward()
    saw = [s.grad if isinstance(s, LazyLogitsTensor) or s.requires_grad else s for s in seen]
    return [loss.detach(), *(t.grad for t in given), *saw]


def same(found: list[Any], expected: list[Any]) -> None:
    if isinstance(expected[0], str):
        assert found == expected
        return
    assert [t is None for t in found] == [t is None for t in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b is not None]
    torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs], rtol=1e-6, atol=1e-6)


@each_of({"reduction": ["mean", "none"], "name": [*PLAIN, *IN_THE_WAY]})
def test_one_step_between_the_head_and_the_loss(name: str, reduction: str) -> None:
    step = {**PLAIN, **IN_THE_WAY}[name]
    expected = run(F.linear, [step], reduction)
    same(run(lazy_linear, [step], reduction), expected)


@rows_of("seed", range(40))
def test_any_steps_between_the_head_and_the_loss(seed: int) -> None:
    """Gradients are those of the plain logits, whatever the order of what is recorded and what must be seen."""
    pick = random.Random(seed)
    steps = [pick.choice([*PLAIN.values()] * 2 + [*IN_THE_WAY.values()]) for _ in range(pick.randint(2, 6))]
    same(run(lazy_linear, steps), run(F.linear, steps))


def test_plain_steps_need_no_logits() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(20):
            steps = random.Random(seed).choices(list(PLAIN.values()), k=4)
            steps = [s for i, s in enumerate(steps) if s is not PLAIN["cap"] or steps.index(s) == i]
            if PLAIN["cap"] in steps and PLAIN["bias"] in steps[steps.index(PLAIN["cap"]) :]:
                continue
            if PLAIN["scale"] in steps and PLAIN["bias"] in steps[steps.index(PLAIN["scale"]) :]:
                continue
            same(run(lazy_linear, steps), run(F.linear, steps))


def test_frozen_heads_and_gradients_by_the_logits_alone() -> None:
    def asked(z: Any, seen: list[Any]) -> Any:
        seen.append(z.requires_grad_())
        return z

    for steps in ([asked], [PLAIN["scale"], asked, PLAIN["cast"]], [asked, IN_THE_WAY["Function: x * 1"]]):
        same(run(lazy_linear, steps, grad=False), run(F.linear, steps, grad=False))


def test_what_comes_after_a_loss_raises() -> None:
    attach: dict[str, Callable[[Any], Any]] = {
        "register_hook": lambda z: z.register_hook(lambda grad: grad),
        "retain_grad": lambda z: z.retain_grad(),
    }
    for name, change in attach.items():
        logits = lazy_linear(*leaves())
        F.cross_entropy(logits.float().view(10, V), TARGET)
        with pytest.raises(RuntimeError, match=f"^LazyLogits: {name} must come before a loss"):
            change(logits)
    logits = lazy_linear(*leaves())
    loss = F.cross_entropy(logits.view(10, V), TARGET)
    with pytest.raises(RuntimeError, match=r"^LazyLogits: torch.autograd.grad by them must come before a loss"):
        torch.autograd.grad(loss, logits)
    loss.backward()
    assert logits.grad is None


def test_hooks_are_removed_by_their_handles() -> None:
    plain, ours = leaves(), leaves()
    F.cross_entropy(F.linear(*plain).view(10, V), TARGET).backward()
    logits = lazy_linear(*ours)
    first, second = (logits.register_hook(lambda grad, f=factor: f * grad) for factor in (2, 5))
    second.remove()
    loss = F.cross_entropy(logits.view(10, V), TARGET)
    first.remove()
    loss.backward()
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    logits = lazy_linear(*ours)
    assert logits.requires_grad_() is logits and logits.retain_grad() is None


@pytest.mark.parametrize("name", ["register_hook", "register_prehook"])
def test_hooks_of_a_node(name: str) -> None:
    """Hooks see the gradient of computed logits; of logits that are not computed there is none."""
    logits = lazy_linear(*leaves())
    with pytest.raises(NotImplementedError, match=rf"^LazyLogits: grad_fn\.{name} must be called of computed logits"):
        getattr(logits.grad_fn, name)(lambda *_: None)
    assert F.cross_entropy(logits.view(10, V), TARGET).isfinite()
    logits, seen = lazy_linear(*leaves()), []
    computed = logits.materialize()
    getattr(computed.grad_fn, name)(lambda *grads: seen.append(grads))
    F.cross_entropy(computed.view(10, V), TARGET).backward()
    assert len(seen) == 1


def test_a_function_that_got_a_copy_before_a_hook_raises() -> None:
    logits = lazy_linear(*leaves())
    taken = scaled(lambda x: x * 1)(logits * 1)
    logits.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match=r"^LazyLogits: a custom Function must get logits to which nothing"):
        F.cross_entropy(taken.view(10, V), TARGET).backward()


def test_what_a_tensor_says_of_its_graph() -> None:
    logits = lazy_linear(*leaves())
    plain = F.linear(*leaves())
    for z in (logits, logits[0], logits * 2):
        assert z.requires_grad and z.grad_fn is not None and not z.is_leaf and not z.retains_grad
    assert not logits.detach().requires_grad and not lazy_linear(*leaves(grad=False)).requires_grad
    with torch.no_grad():
        assert not (logits * 2).requires_grad and not logits[0].requires_grad
        assert logits._version == plain._version
    logits.retain_grad()
    assert logits.retains_grad


@pytest.mark.parametrize("kind", ["full", "full pre", "forward"])
def test_hooks_of_the_head(kind: str) -> None:
    """For the module whose output is lazy: gradients that hooks read and change are those of plain logits."""

    class Head(nn.Linear):
        linear: Any = staticmethod(F.linear)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x, self.weight, self.bias)

    def grads(linear: Any) -> list[Tensor]:
        torch.manual_seed(0)
        head, seen = Head(8, V).double(), []
        head.linear = linear
        if kind == "full":
            head.register_full_backward_hook(lambda m, i, o: (seen.append(o[0].clone()), (i[0] * 2,))[1])
        elif kind == "full pre":
            head.register_full_backward_pre_hook(lambda m, o: (seen.append(o[0].clone()), (o[0] * 2,))[1])
        else:
            head.register_forward_hook(lambda m, i, o: hooked(o, seen))
        x = leaves()[0]
        F.cross_entropy(head(x).view(10, V), TARGET).backward()
        return [x.grad, head.weight.grad, head.bias.grad, *seen]

    torch.testing.assert_close(grads(lazy_linear), grads(F.linear))


def test_copies_and_views_of_written_logits() -> None:
    """What a copy was made of may be written to later; a view has what was written."""
    for make in (
        lambda z: z.clone(),
        lambda z: z[:, :-1].reshape(-1, V),
        lambda z: z[:, 1:].contiguous(),
        lambda z: z[0],
    ):
        found = []
        for linear in (lazy_linear, F.linear):
            with torch.no_grad():
                logits = linear(*leaves())
                part = make(logits)
                logits.mul_(3)
                rows = part.reshape(-1, V)
                found.append(F.cross_entropy(rows, TARGET[: rows.shape[0]]))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("cast", [False, True], ids=["head", "head and cast"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_over_the_head(reentrant: bool, cast: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def grads(linear: Any) -> list[Any]:
        given = leaves()

        def logits(x: Tensor) -> Any:
            made = linear(x, *given[1:])
            return made.float().double() if cast else made

        made = checkpoint(logits, given[0], use_reentrant=reentrant)
        F.cross_entropy(made.view(10, V), TARGET).backward()
        return [t.grad for t in given]

    same(grads(lazy_linear), grads(F.linear))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap of grad"])
def test_transforms(transform: str) -> None:
    """torch.func and forward mode, which know no custom Functions of the old kind."""
    x, weight, bias = (t.detach() for t in leaves())

    def loss(linear: Any, x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(linear(x, weight, bias).float().reshape(-1, V), TARGET[: x.shape[:-1].numel()])

    def made(linear: Any) -> Any:
        of = functools.partial(loss, linear)
        if transform == "grad":
            return torch.func.grad(of, argnums=(0, 1))(x, weight)
        if transform == "vjp":
            return torch.func.vjp(of, x, weight)[1](torch.tensor(0.5, dtype=torch.float32))
        if transform == "jvp":
            return torch.func.jvp(of, (x, weight), (x.cos(), weight.sin()))
        return torch.func.vmap(torch.func.grad(of, argnums=1), in_dims=(0, None))(x, weight)

    torch.testing.assert_close(made(lazy_linear), made(F.linear), rtol=1e-5, atol=1e-6)


def test_warnings_point_at_the_users_line_and_name_what_it_says() -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "log_softmax": lambda z: F.log_softmax(z, -1),
        "==": lambda z: z == 0,
        "sub": lambda z: z - torch.ones(V, dtype=torch.float64),
        "[...]": lambda z: z[..., 3],
        ".T": lambda z: z.view(10, V).T,
        "gather": lambda z: z.gather(-1, torch.zeros(2, 5, 1, dtype=torch.int64)),
        "cross_entropy": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET.view(2, 5)),
        "register_hook": lambda z: z.register_hook(print),
    }
    for name, use in uses.items():
        logits = lazy_linear(*leaves())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use(logits)
        (said, *_) = [w for w in caught if "fusegrad" in str(w.message)]
        wanted = "transpose" if name == "cross_entropy" else name
        assert str(said.message).startswith(f"fusegrad: {wanted} needs all logits, "), str(said.message)
        assert said.filename == __file__


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_loss_has_pytorchs_dtype(dtype: torch.dtype) -> None:
    given = [t.detach().to(dtype) for t in leaves()]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, expected = (F.cross_entropy(f(*given).view(10, V), TARGET) for f in (lazy_linear, F.linear))
        assert found.dtype == expected.dtype


def test_options_that_cannot_count() -> None:
    """A cross entropy raises; what else is computed of the logits is said to have none."""
    for name in ("z_loss", "label_smoothing"):
        logits = lazy_linear(*leaves(), **{name: 0.1})
        message = rf"^LazyLogits: {name} must be 0 where a loss is computed of all logits, but got 0.1: .*"
        with pytest.raises(ValueError, match=message + "another Function must see them"):
            F.cross_entropy(scaled(lambda x: x * 1)(logits).view(10, V), TARGET)
        with pytest.raises(ValueError, match=message + "register_hook must see them"):
            logits.register_hook(print)
        with pytest.raises(ValueError, match=message + "the cross entropy is not of rows of classes"):
            F.cross_entropy(logits, torch.zeros(2, V, dtype=torch.int64))
        with pytest.warns(UserWarning, match=f"log_softmax needs all logits.* has no {name}"):
            F.log_softmax(logits, -1)
        assert F.cross_entropy(logits.view(10, V), TARGET) > 0


class Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(o.clone() for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def test_copies_of_outputs_by_a_function_need_no_logits() -> None:
    """As those that DDP makes: what the loss does not use is not computed."""
    given = leaves()
    logits = lazy_linear(*given)
    loss = F.cross_entropy(logits.view(10, V), TARGET)
    loss, logits = Sinks.apply(loss, logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    plain = leaves()
    F.cross_entropy(F.linear(*plain).view(10, V), TARGET).backward()
    same([t.grad for t in given], [t.grad for t in plain])
    assert isinstance(logits, LazyLogitsTensor)


TIMED: list[Tensor | None] = []


def timing(grad: Tensor | None) -> None:
    TIMED.append(grad)


timing.__module__ = "torch.distributed.fsdp._fully_shard"


def test_hooks_of_the_time_run_without_logits() -> None:
    """FSDP's hooks run once a backward, though the loss is computed without the logits."""
    logits = lazy_linear(*leaves())
    logits.register_hook(timing)
    loss = F.cross_entropy(logits.view(10, V), TARGET)
    TIMED.clear()
    loss.backward()
    assert TIMED == [None] and isinstance(logits, LazyLogitsTensor) and logits._lazy.value is None


@rows_of("name", ["plain", "timing", *IN_THE_WAY])
def test_nothing_lives_longer_than_its_graph(name: str) -> None:
    """Without the garbage collector."""
    step = {**IN_THE_WAY, "plain": lambda z, _: z.float(), "timing": lambda z, _: z.register_hook(timing) and z}[name]
    gc.disable()
    try:
        given: list[Any] = leaves()
        hidden, seen = given[0] * 1, []
        alive = weakref.ref(hidden)
        logits = lazy_linear(hidden, *given[1:])
        loss = F.cross_entropy(step(logits, seen).view(10, V), TARGET)
        if loss.requires_grad:
            loss.backward()
        del logits, loss, hidden, given
        seen.clear()
        assert alive() is None
    finally:
        gc.enable()
