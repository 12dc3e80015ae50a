"""All public functions and modules x values of wrong types: an error of the contract's form, and nothing is done."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import fusegrad
import numpy as np
import pytest
import torch
from coverings import rows_of
from fusegrad import _calls, _options, _sharding
from fusegrad._arguments import checked, kinds_of
from fusegrad._attention_composite import Scoring

WRONG = {
    "None": None,
    "str": "x",
    "float": 3.5,
    "int": 3,
    "bool": True,
    "numpy": np.zeros(3),
    "list": [1, 2],
    "strided nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "sparse": torch.eye(8).to_sparse(),
    "complex": torch.zeros(8, 7, dtype=torch.complex64),
    "meta": torch.zeros(8, 7, device="meta"),
    "0-d tensor": torch.tensor(2.0),
    "dtype": torch.float16,
    "object": object(),
}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Calls that are right, of all that is public and takes arguments."""
    x, h, w, t = torch.randn(8, 7), torch.randn(8, 5), torch.randn(7, 5), torch.randint(0, 7, (8,))
    q, heads = torch.randn(1, 2, 8, 4), {"teacher_input": torch.randn(8, 3), "teacher_weight": torch.randn(7, 3)}
    flags = ("lse", "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_log_prob")
    given: dict[str, dict[str, Any]] = {
        "cross_entropy": {"input": x, "target": t},
        "linear_cross_entropy": {"input": h, "linear_weight": w, "target": t},
        "linear_log_prob": {"input": h, "linear_weight": w, "target": t},
        "jsd": {"student": x, "teacher": torch.randn(8, 7)},
        "kl_div": {"student": x, "teacher": torch.randn(8, 7)},
        "linear_jsd": {"student_input": h, "student_weight": w, **heads},
        "flex_attention": {"query": q, "key": q.clone(), "value": q.clone()},
        "biased_attention": {"query": q, "key": q.clone(), "value": q.clone()},
        "triangle_attention": {"q": q, "k": q.clone(), "v": q.clone(), "bias": torch.randn(1, 2, 8, 8)},
        "attention_pair_bias": {
            **{"single_repr": torch.randn(2, 8, 6), "pair_repr": torch.randn(1, 8, 8, 3), "mask": None, "num_heads": 2},
            **{"w_ln_a": torch.ones(6), "b_ln_a": None, "w_proj_q": torch.randn(4, 6), "b_proj_q": None},
            **{f"w_proj_{name}": torch.randn(4, 6) for name in "kvg"},
            **{"w_proj_o": torch.randn(6, 4), "w_proj_z": torch.randn(2, 3)},
        },
        "compile_flex": {"head_size": 64, "requires_grad": False, "architecture": "90a"},
        "create_block_mask": {"mask_mod": causal, "B": 1, "H": 2, "Q_LEN": 8, "KV_LEN": 8},
        "varlen_mask": {"cu_seqlens_q": torch.tensor([0, 3, 8])},
        "trace_score_mod": {"function": lambda s, b, h, i, j: s},
        "trace_mask_mod": {"function": causal},
        "explain": {"score_mod": lambda s, b, h, i, j: s},
        "ScoreMod": {"text": fusegrad.trace_mask_mod(causal).text},
        "CrossEntropyLoss": {},
        "JSDLoss": {},
        "LinearCrossEntropyLoss": {"in_features": 5, "num_classes": 7},
        "LinearJSDLoss": {"in_features": 5, "num_classes": 7},
        "Aux": dict.fromkeys(flags, True),
        "JSDAux": {"soft_loss": True, "hard_loss": True},
        "set_check_targets": {"enabled": False},
    }
    return {name: (getattr(fusegrad, name), arguments) for name, arguments in given.items()}


# What takes none, makes no checks of its own, or has its own test; those of the last two are in
# vocab_parallel_worker.py and context_parallel_worker.py.
OTHERS = {"__version__", "utils", "mods", "build_info", "check_targets_enabled", "AuxOutput", "JSDAuxOutput", "LogProb"}
OTHERS |= {"TraceError", "VocabParallel", "ContextParallel"}


def test_the_walk_is_whole() -> None:
    assert set(fusegrad.__all__) == set(calls()) | OTHERS


def parameters() -> list[tuple[str, str]]:
    return [(op, name) for op, (function, _) in calls().items() for name in inspect.signature(function).parameters]


def test_all_arguments_are_annotated() -> None:
    """An argument that may be anything is one that nothing checks."""
    for op, (function, _) in calls().items():
        checked = function.__init__ if inspect.isclass(function) else function
        kinds = kinds_of(checked)
        missing = [name for name in inspect.signature(function).parameters if name not in kinds]
        assert not missing, f"{op}: {missing} may be anything"
        assert hasattr(checked, "__wrapped__"), f"{op}: @checked is missing"


@rows_of("op, name", parameters())
def test_wrong_types(op: str, name: str) -> None:
    function, good = calls()[op]
    kind = kinds_of(function.__init__ if inspect.isclass(function) else function)[name]
    tensors = {n: v for n, v in good.items() if isinstance(v, torch.Tensor)}
    before = {n: v.clone() for n, v in tensors.items()}
    for which, value in WRONG.items():
        allowed = type(value) in kind.plain or kind.holds(value)
        try:
            function(**{**good, name: value})
        except (TypeError, ValueError, NotImplementedError) as error:
            text = str(error)
            assert text.startswith(f"{op}: ") and " must " in text and "but got" in text, f"{which}: {text}"
            assert len(text) < 300, text
        else:
            assert allowed, f"{op}: {name}={which} was taken for something"
        for n, tensor in tensors.items():
            assert torch.equal(tensor, before[n]) and tensor._version == 0, f"{name}={which} wrote to {n}"


@rows_of(
    "call, error, message",
    [
        (
            lambda x, t: fusegrad.flex_attention(None, x, x),
            TypeError,
            "flex_attention: query must be a tensor, but got None",
        ),
        (
            lambda x, t: fusegrad.jsd(x, None),
            TypeError,
            "jsd: teacher must be a tensor or a pair of tensors, but got None",
        ),
        (
            lambda x, t: fusegrad.jsd(x, (x, 3)),
            TypeError,
            "jsd: teacher must be a tensor or a pair of tensors, but got tuple",
        ),
        (
            lambda x, t: fusegrad.cross_entropy(x, t, normalizer="x"),
            TypeError,
            "cross_entropy: normalizer must be a number, a tensor or None, but got 'x'",
        ),
        (
            lambda x, t: fusegrad.jsd(x, x, normalizer=1e308),
            ValueError,
            "jsd: normalizer must be a finite number in torch.float32, but got 1e+308",
        ),
        (
            lambda x, t: fusegrad.linear_cross_entropy(x, x, t, normalizer=float("nan")),
            ValueError,
            "linear_cross_entropy: normalizer must be a finite number in torch.float32, but got nan",
        ),
        (
            lambda x, t: fusegrad.jsd(x, x, log_probs=True, return_aux=fusegrad.JSDAux(hard_loss=True)),
            ValueError,
            "jsd: log_probs must come without a hard loss, which is of logits, but got return_aux with hard_loss",
        ),
        (
            lambda x, t: fusegrad.cross_entropy(x, t, inplace="no"),
            TypeError,
            "cross_entropy: inplace must be True or False, but got 'no'",
        ),
        (
            lambda x, t: fusegrad.cross_entropy(x, t, ignore_index=torch.float16),
            TypeError,
            "cross_entropy: ignore_index must be a whole number or None, but got torch.float16",
        ),
        # The dispatcher would read it, and its gradient would be lost.
        (
            lambda x, t: fusegrad.cross_entropy(x, t, z_loss=torch.tensor(0.1, requires_grad=True)),
            TypeError,
            "cross_entropy: z_loss must be a number, but got torch.Tensor",
        ),
        (
            lambda x, t: fusegrad.cross_entropy(x, t, return_aux=True),
            TypeError,
            "cross_entropy: return_aux must be an Aux or None, but got True",
        ),
        (
            lambda x, t: fusegrad.linear_jsd(x, x, x, x[0, 0]),
            ValueError,
            "linear_jsd: teacher_weight must have shape [V, H], but got []",
        ),
    ],
)
def test_message(call: Callable[..., Any], error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        call(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))
    assert str(caught.value) == message


def public_devices() -> list[tuple[str, Any]]:
    """All public functions, methods and constructors that take a device."""
    found = []
    for name in fusegrad.__all__:
        of = getattr(fusegrad, name)
        members = [(name, of)] if callable(of) else []
        if isinstance(of, type):
            inherited = (m for kind in of.__mro__ if kind.__module__.startswith("fusegrad") for m in vars(kind).items())
            members = [(f"{name}.{m}", member) for m, member in dict(inherited).items()]
        for path, member in members:
            if inspect.isfunction(member) and "device" in inspect.signature(member).parameters:
                found.append((path, member))
    return found


@rows_of("path, function", public_devices())
def test_a_device_is_what_pytorch_takes_for_one(path: str, function: Any) -> None:
    allowed = set(get_args(get_type_hints(function)["device"]))
    assert {torch.device, str, int} <= allowed, (path, allowed)


def test_devices_by_name() -> None:
    assert len(public_devices()) >= 6
    devices = ["cpu", torch.device("cpu")] + ([0] if torch.cuda.is_available() else [])
    for device in devices:
        kind = torch.device(device).type
        made = [fusegrad.LinearCrossEntropyLoss(5, 7, device=device), fusegrad.LinearJSDLoss(5, 7, device=device)]
        assert {p.device.type for module in made for p in module.parameters()} == {kind}
        mask = fusegrad.create_block_mask(causal, 1, 1, 8, 8, device=device)
        assert mask.kv_num_blocks.device.type == kind
        fusegrad.trace_mask_mod(causal, device=device)
        fusegrad.trace_score_mod(lambda s, b, h, i, j: s * 2, device=device)


def test_numbers_of_numpy_are_numbers() -> None:
    x, t = torch.randn(4, 4), torch.arange(4)
    loss = fusegrad.cross_entropy(x, t, label_smoothing=np.float32(0.5), ignore_index=np.int64(2))
    assert torch.equal(loss, fusegrad.cross_entropy(x, t, label_smoothing=0.5, ignore_index=2))


@pytest.mark.cpu_only
def test_compiled() -> None:
    """torch.compile wraps the message."""
    x, t = torch.randn(4, 4), torch.arange(4)
    for wrong in ({"inplace": "no"}, {"z_loss": "x"}, {"return_aux": True}):
        call = torch.compile(lambda x, t, w=wrong: fusegrad.cross_entropy(x, t, **w), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=f"cross_entropy: {next(iter(wrong))} must be .*but got"):
            call(x, t)
    with pytest.raises(Exception, match="flex_attention: scale must be a number or None, but got 'x'"):
        torch.compile(fusegrad.flex_attention, backend="eager", fullgraph=True)(*[x.view(1, 1, 4, 4)] * 3, scale="x")


def test_a_kind_that_nobody_knows() -> None:
    def function(x: set[int]) -> None: ...

    with pytest.raises(NotImplementedError, match="no kind of argument is known"):
        checked(function)


OPTIONS = [
    (fusegrad.cross_entropy, _options.CrossEntropyFunction),
    (fusegrad.linear_cross_entropy, _options.LinearCrossEntropyFunction),
    (fusegrad.jsd, _options.JSDFunction),
    (fusegrad.linear_jsd, _options.LinearJSDFunction),
    (fusegrad.CrossEntropyLoss, _options.CrossEntropy),
    (fusegrad.LinearCrossEntropyLoss, _options.LinearCrossEntropyModule),
    (fusegrad.JSDLoss, _options.JSD),
    (fusegrad.LinearJSDLoss, _options.LinearJSDModule),
]


@rows_of("of, types", [*OPTIONS])
def test_types_of_the_overloads_are_those_of_the_signature(of: Any, types: Any) -> None:
    given = inspect.signature(of).parameters.values()
    names = {p.name for p in given if p.kind is p.KEYWORD_ONLY} - {"return_aux"}
    known = {
        "VocabParallel": _sharding.VocabParallel,
        "LinearCrossEntropyOptions": fusegrad.functional.LinearCrossEntropyOptions,
    }
    hints = get_type_hints(of.__init__ if isinstance(of, type) else of)
    assert get_type_hints(types, None, known) == {name: hints[name] for name in names}


@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd"])
def test_calls_by_name_have_the_order_of_the_schemas(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(op: str) -> list[str]:
        return [a.name for a in getattr(torch.ops.fusegrad, op).default._schema.arguments]

    *taken, _, _ = inspect.signature(getattr(_calls, op)).parameters
    assert taken == names(op) == names(f"{op}_")
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_calls, f"_{op.upper()}", (lambda *given: seen.append(given), lambda *given: seen.append(())))
    monkeypatch.setattr(_sharding, "loss", lambda *given: seen.append(given))
    getattr(_calls, op)(**{name: name for name in taken}, inplace=False, shards=None)
    getattr(_calls, op)(**{name: name for name in taken}, inplace=False, shards="shards")
    assert seen == [tuple(taken), (op, tuple(taken), False, "shards")]


def test_what_shapes_the_scores_has_the_order_of_the_schemas() -> None:
    scoring = list(Scoring._fields)
    for op, first in (("forward", 3), ("backward", 12), ("backward_graph", 12), ("jvp", 8)):
        arguments = getattr(torch.ops.fusegrad, f"flex_attention_{op}").default._schema.arguments
        assert [a.name for a in arguments][first : first + len(scoring)] == scoring


def test_aux_values_have_the_bits_of_the_ops() -> None:
    x, t = torch.randn(8, 7), torch.randint(0, 7, (8,))
    for asked, output in ((fusegrad.Aux, fusegrad.AuxOutput), (fusegrad.JSDAux, fusegrad.JSDAuxOutput)):
        assert tuple(inspect.signature(asked).parameters) == output._fields
    lse, p = x.logsumexp(1), x.softmax(1)
    expected = {
        "lse": lse,
        "z_loss": 0.5 * lse**2,
        "token_accuracy": (x.argmax(1) == t).float(),
        "predicted_tokens": x.argmax(1),
        "entropy": -(p * p.log()).sum(1),
        "token_log_prob": x.gather(1, t[:, None])[:, 0] - lse,
    }
    for name, value in expected.items():
        _, aux = fusegrad.cross_entropy(x, t, z_loss=0.5, return_aux=fusegrad.Aux(**{name: True}))
        assert [n for n in aux._fields if getattr(aux, n) is not None] == [name]
        torch.testing.assert_close(getattr(aux, name), value)
    options = {"labels": t, "hard_weight": 0.5, "beta": 0.0}
    for name, value in (
        ("soft_loss", torch.zeros(8)),
        ("hard_loss", torch.nn.functional.cross_entropy(x, t, reduction="none")),
    ):
        _, aux = fusegrad.jsd(x, x, return_aux=fusegrad.JSDAux(**{name: True}), **options)
        assert [n for n in aux._fields if getattr(aux, n) is not None] == [name]
        torch.testing.assert_close(getattr(aux, name), value)
