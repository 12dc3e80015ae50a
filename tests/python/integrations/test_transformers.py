"""transformers: models whose loss and attention are fusegrad's against the models as they are."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fusegrad
import pytest
import torch
import torch.nn.functional as F
from attention_reference import dropout_weight
from coverings import each_of, rows_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

tf = pytest.importorskip("transformers")
from fusegrad.integrations import transformers_attention  # noqa: E402
from fusegrad.integrations.lazy_logits import LazyLogits, LazyLogitsTensor, lazy_linear, materialize  # noqa: E402
from fusegrad.integrations.transformers import apply, remove  # noqa: E402

V = 97
SMALL: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 8,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8}),
    "gpt_oss": (  # sinks, sliding windows, experts with a loss of their own
        "GptOssConfig",
        {
            **{"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0}),
    "phi": ("PhiConfig", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),  # a head with a bias
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}),
}
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def nothing_steps_aside() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusegrad:")
        yield


def make(family: str = "llama", attention: str = "eager", **changes: Any) -> Any:
    """A small model, always with the same weights."""
    name, options = FAMILIES[family]
    config = getattr(tf, name)(**{**SMALL, **options, **changes})
    config._attn_implementation = attention
    model = tf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    return model.train()


def batch(length: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each of fusegrad's functions was called."""
    calls: dict[str, int] = {}
    for name in ("linear_cross_entropy", "flex_attention"):

        def counted(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(fusegrad, name, functools.partial(counted, name, getattr(fusegrad, name)))
    return calls


# --- the loss -----------------------------------------------------------------------------------------------------


@families
def test_loss_gradients_and_logits(family: str, fused_calls: dict[str, int]) -> None:
    model, inputs = make(family), batch()
    expected, logits = step(model, **inputs), model(**inputs).logits
    fused_calls.clear()
    assert apply(model) is model
    fused_calls.clear()
    torch.testing.assert_close(step(model, **inputs), expected)
    assert fused_calls == {"linear_cross_entropy": 1}
    made = model(**inputs).logits
    assert isinstance(made, LazyLogitsTensor)
    assert made.shape == logits.shape and made.dtype == logits.dtype
    with torch.no_grad():
        torch.testing.assert_close(made + 0, logits)
        torch.testing.assert_close(model(input_ids=inputs["input_ids"]).logits, logits)
    with pytest.raises(IndexError):
        model(**{**inputs, "labels": inputs["labels"] + V})
    assert type(model.get_output_embeddings()(torch.zeros(1, 32))) is Tensor  # lazy in the model's forward alone
    remove(model)
    assert "forward" not in vars(model) and type(model.get_output_embeddings()) is nn.Linear
    assert type(model(**inputs).logits) is Tensor
    torch.testing.assert_close(step(model, **inputs), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_no_further_from_float64_than_the_plain_model(family: str) -> None:
    model, inputs = make(family), batch()
    truth_loss, truth = step(copy.deepcopy(model).double(), **inputs)
    eager_loss, eager = step(model, **inputs)
    model.set_attn_implementation("fusegrad")
    loss, ours = step(apply(model), **inputs)
    assert abs(loss - truth_loss) <= 2 * abs(eager_loss - truth_loss) + 1e-6
    for name, expected in truth.items():
        error, eager_error = ((g[name].double() - expected).norm() for g in (ours, eager))
        assert error <= 2 * eager_error + 1e-6 * expected.norm() + 1e-9, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_autocast(family: str, dtype: torch.dtype) -> None:
    model, inputs = make(family), batch()
    truth_loss, truth = step(model, **inputs)
    with torch.autocast("cpu", dtype):
        _, eager = step(model, **inputs)
        apply(model).set_attn_implementation("fusegrad")
        loss, ours = step(model, **inputs)
        out = model(**inputs)
    assert out.logits.dtype == dtype and out.loss.dtype == torch.float32
    torch.testing.assert_close(loss, truth_loss, rtol=1e-2, atol=0)
    for name, expected in truth.items():
        error, eager_error = ((g[name] - expected).norm() for g in (ours, eager))
        assert error <= 1.5 * eager_error + 2e-3 * expected.norm(), name


def test_what_models_hand_to_their_loss() -> None:
    """num_items_in_batch, ignore_index, logits_to_keep, shift_labels; evaluation."""
    model, inputs = make("gemma2"), batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    calls: list[dict[str, Any]] = [
        {"num_items_in_batch": torch.tensor(57)},
        {"num_items_in_batch": 57},
        {"labels": inputs["input_ids"], "ignore_index": int(inputs["labels"][1, 3])},
        {"shift_labels": shifted},
        {"logits_to_keep": 9, "labels": inputs["labels"][:, -9:]},
        {"labels": torch.full_like(inputs["labels"], -100), "num_items_in_batch": 1},
    ]
    expected = [step(model, **{**inputs, **call}) for call in calls]
    with torch.no_grad():
        evaluated = model(**inputs)
    apply(model)
    for call, (loss, gradients) in zip(calls, expected, strict=True):
        ours = step(model, **{**inputs, **call})
        torch.testing.assert_close(ours, (loss, gradients), msg=lambda text, call=call: f"{call}: {text}")
    model.eval()
    with torch.no_grad():
        out = model(**inputs)
        torch.testing.assert_close((out.loss, out.logits + 0), (evaluated.loss, evaluated.logits))


def test_options() -> None:
    model, inputs = make("gemma2"), batch()
    with torch.no_grad():
        rows = model(**inputs).logits[:, :-1].reshape(-1, V)
    target = inputs["labels"][:, 1:].reshape(-1)
    kept = target != -100
    expected = F.cross_entropy(rows, target, label_smoothing=0.1) + 1e-3 * rows[kept].logsumexp(-1).square().mean()
    apply(model, z_loss=1e-3, label_smoothing=0.1, workspace_mib=0)
    torch.testing.assert_close(step(model, **inputs)[0], expected)
    remove(model)
    apply(model, inplace=True)
    out = model(**inputs)
    with pytest.raises(RuntimeError, match="LazyLogits: the head's input must be what it was"):
        out.logits.sum()


@pytest.mark.parametrize("accumulate_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation_in_the_weights_dtype(accumulate_dtype: torch.dtype) -> None:
    model, inputs = make("llama").to(torch.bfloat16), batch()
    loss, gradients = step(model, **inputs)
    apply(model, accumulate_dtype=accumulate_dtype)
    ours, grads = step(model, **inputs)
    torch.testing.assert_close(ours.float(), loss.float(), rtol=2e-2, atol=2e-2)
    for name, expected in gradients.items():
        assert (grads[name] - expected).float().norm() <= 3e-2 * expected.float().norm(), name


def test_classes() -> None:
    """All instances, those that exist and those to come; undone for all."""
    cls, inputs = tf.LlamaForCausalLM, batch()
    model = make()
    expected = step(model, **inputs)
    before = vars(cls)["forward"]
    apply(cls)
    try:
        assert isinstance(make()(**inputs).logits, LazyLogitsTensor)
        torch.testing.assert_close(step(model, **inputs), expected)
        assert isinstance(model(**inputs).logits, LazyLogitsTensor)
        with pytest.raises(ValueError, match="apply: the target must not be changed already"):
            apply(model)
    finally:
        remove(cls)
    assert vars(cls)["forward"] is before and type(model.lm_head) is nn.Linear
    assert type(model(**inputs).logits) is Tensor


def test_copies_and_files() -> None:
    """A copy computes with its own weights, and a model read from a file is the plain one."""
    model, inputs = apply(make()), batch()
    step(model, **inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    loss, gradients = step(twin, **inputs)
    plain = pickle.loads(pickle.dumps(twin))
    assert type(plain.lm_head) is nn.Linear and type(plain(**inputs).logits) is Tensor
    torch.testing.assert_close((loss, gradients), step(plain, **inputs))
    assert isinstance(twin(**inputs).logits, LazyLogitsTensor)
    assert isinstance(apply(plain)(**inputs).logits, LazyLogitsTensor)


def test_heads_that_cannot_be_lazy_step_aside_loudly() -> None:
    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    inputs = batch()
    for change in (
        lambda m: setattr(m, "lm_head", Other(32, V, bias=False)),
        lambda m: setattr(m.lm_head, "forward", functools.partial(nn.Linear.forward, m.lm_head)),
        lambda m: setattr(m, "lm_head", nn.Sequential(nn.Linear(32, V))),
    ):
        model = make()
        change(model)
        expected = step(model, **inputs)
        with pytest.raises(ValueError, match=r"^apply: z_loss must be 0 where it cannot count, but got 0.1: lin"):
            apply(model, z_loss=0.1)
        assert "forward" not in vars(model) and not hasattr(model, "_fusegrad")
        with pytest.warns(UserWarning, match="fusegrad: linear_cross_entropy steps aside for Llama.*the head") as said:
            apply(model)
        assert said[0].filename == __file__
        torch.testing.assert_close(step(model, **inputs), expected)  # said once


def test_options_count_in_training_only() -> None:
    model, inputs = make(), batch()
    trained, evaluated = step(model, **inputs)[0], model.eval()(**inputs).loss.detach()
    apply(model, z_loss=0.1, label_smoothing=0.2)
    torch.testing.assert_close(model(**inputs).loss, evaluated)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).loss, evaluated)
    assert model.train()(**inputs).loss > trained + 0.1


def skipping(self: Any, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
    """Another library's forward, which multiplies by the head's weight itself."""
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    rows = (hidden[:, :-1] @ self.lm_head.weight.T).flatten(0, 1)
    return tf.modeling_outputs.CausalLMOutput(loss=F.cross_entropy(rows, labels[:, 1:].flatten()))


@pytest.mark.parametrize("peft_model", [False, True], ids=["model", "peft"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_librarys_forward_is_said_once(when: str, peft_model: bool) -> None:
    """What it computes is its own; options that cannot count raise."""
    inputs = batch()
    expected = skipping(make(), **inputs).loss.detach()
    for z_loss in (0.0, 0.1):
        model = make()
        target = model
        if peft_model:
            peft = pytest.importorskip("peft")
            target = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        if when == "after":
            apply(target, z_loss=z_loss)
        model.forward = types.MethodType(skipping, model)
        if when == "before":
            apply(target, z_loss=z_loss)
        # What comes later is seen at the next step.
        said = [pytest.warns(UserWarning, match=r"steps aside for Llama.*skipping.* did not reach its head")]
        if z_loss:
            said = [pytest.raises(ValueError, match=r"^apply: z_loss must be 0 where it cannot count, but got 0.1")]
        said = said if when == "before" else [contextlib.nullcontext(), *said]
        for context in [*said, *([] if z_loss else [contextlib.nullcontext()] * 2)]:
            with context:
                torch.testing.assert_close(target(**inputs).loss.detach(), expected)
        remove(target)
        assert not model.model._forward_pre_hooks


def test_copies_of_models_whose_forward_was_replaced_compute_with_their_own_weights() -> None:
    model, inputs = make(), batch()

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    model.forward = types.MethodType(doubled, model)
    twin = copy.deepcopy(apply(model))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    plain = make()
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(step(twin, **inputs), step(plain, **inputs))
    assert isinstance(twin(**inputs).logits, LazyLogitsTensor)


def test_heads_that_come_later_are_fused(fused_calls: dict[str, int]) -> None:
    inputs = batch()
    model = apply(make(), z_loss=0.1)
    model.resize_token_embeddings(V + 5)
    plain = make()
    plain.resize_token_embeddings(V + 5)
    plain.load_state_dict(model.state_dict())
    fused_calls.clear()
    loss = model(**inputs).loss
    assert fused_calls == {"linear_cross_entropy": 1}
    logits = plain(**inputs).logits[:, :-1].flatten(0, 1)
    kept = inputs["labels"][:, 1:].flatten() != -100
    expected = plain(**inputs).loss + 0.1 * logits[kept].logsumexp(-1).square().mean()
    torch.testing.assert_close(loss, expected)


def test_parts_with_heads_are_named() -> None:
    """A model without a head of its own says which of its parts have one."""

    class Both(tf.PreTrainedModel):
        config_class = tf.LlamaConfig

        def __init__(self) -> None:
            super().__init__(tf.LlamaConfig(**SMALL))
            self.talker, self.thinker = make(), make("qwen2")

        def get_output_embeddings(self) -> None:
            return None

    message = r"its talker \(LlamaForCausalLM\) and its thinker \(Qwen2ForCausalLM\)$"
    with pytest.raises(
        ValueError, match=rf"^apply: the model must have output embeddings, but got a Both: apply to {message}"
    ):
        apply(Both())


def test_gradients_of_functions() -> None:
    """torch.func of a changed model: per-sample gradients are the plain model's."""
    model, inputs = make(), batch()

    def gradient(model: Any) -> Any:
        def loss(weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
            given = {"input_ids": ids[None], "labels": labels[None]}
            return torch.func.functional_call(model, weights, (), given).loss

        weights = {n: p.detach() for n, p in model.named_parameters()}
        return torch.func.grad(loss)(weights, inputs["input_ids"][0], inputs["labels"][0])

    expected = gradient(model)
    torch.testing.assert_close(gradient(apply(model)), expected)


def test_bad_targets_and_options() -> None:
    with pytest.raises(TypeError, match=r"apply: the target must be a transformers.PreTrainedModel.*but got Linear"):
        apply(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="remove: the target must be"):
        remove(nn.Linear)
    with pytest.raises(ValueError, match="apply: the model must have output embeddings, but got a LlamaModel"):
        apply(make().model)
    with pytest.raises(
        ValueError, match="remove: the target must be changed by apply or context_parallel, but got Llama"
    ):
        remove(make())
    model = make()
    with pytest.raises(ValueError, match="linear_cross_entropy: label_smoothing must be in"):
        apply(model, label_smoothing=2.0)
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="must not be changed already, but got such a LlamaForCausalLM"):
        apply(apply(model))


# --- lazy logits --------------------------------------------------------------------------------------------------


def lazy_and_plain(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Any, Tensor]:
    leaves = [torch.randn(2, 5, 8, dtype=dtype), torch.randn(11, 8, dtype=dtype), torch.randn(11, dtype=dtype)]
    leaves = [t.requires_grad_() for t in leaves]
    return leaves, lazy_linear(*leaves), F.linear(*leaves)


RECORDED: dict[str, Callable[[Any], Any]] = {
    "scales": lambda z: z * 3 / 2,
    "softcap": lambda z: torch.tanh(2.0 * z / 5) * 4 / 3,
    "casts": lambda z: z.double().to(torch.float64).to("cpu").contiguous(),
    "rows": lambda z: z[:, :-1][0, 1:],
    "ellipsis": lambda z: z[..., 1:, :],
    "mask": lambda z: z[torch.tensor([[True, False, True, True, False]] * 2)],
    "shapes": lambda z: z.view(10, 11).reshape(2, 5, -1).flatten(0, 1),
    "one row": lambda z: z[1, 2],
    "detached": lambda z: z.detach().view(-1, 11),
}
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "columns": lambda z: z[..., :3],
    "one column": lambda z: z[:, :, 2],
    "log_softmax": lambda z: F.log_softmax(z, -1),
    "other shape": lambda z: z.view(2, 55),
    "transposed": lambda z: z.transpose(0, 1) * 1,
    "tensor scale": lambda z: z * torch.tensor(2.0),
    "sum of two": lambda z: z + z,
    "division by it": lambda z: torch.mul(torch.tensor(3.0), z),
    "tanh of tanh": lambda z: z.tanh().tanh(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
}


@rows_of("name", [*RECORDED, *COMPUTED])
def test_values_of_lazy_logits(name: str) -> None:
    leaves, lazy, plain = lazy_and_plain()
    function = {**RECORDED, **COMPUTED}[name]
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", message="fusegrad:")
        made, expected = function(lazy), function(plain)
    assert isinstance(made, LazyLogitsTensor) == (name in RECORDED)
    assert bool(warned) == (name in COMPUTED and name != "numpy")
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    made = materialize(made)
    torch.testing.assert_close(made, expected)
    assert made.requires_grad == expected.requires_grad
    if made.requires_grad:
        upstream = torch.randn_like(made)
        torch.testing.assert_close(
            torch.autograd.grad(made, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
        )


@pytest.mark.parametrize("name", [n for n in RECORDED if n != "detached"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1, "ignore_index": 3}], ids=str)
def test_cross_entropy_of_lazy_logits(name: str, options: dict[str, Any], fused_calls: dict[str, int]) -> None:
    leaves, lazy, plain = lazy_and_plain()
    rows, expected_rows = (RECORDED[name](z) for z in (lazy, plain))
    target = torch.randint(0, 11, expected_rows.shape[:-1])
    loss, expected = (
        F.cross_entropy(
            z if z.dim() == 1 else z.reshape(-1, 11), target.reshape(-1)[0 if z.dim() == 1 else slice(None)], **options
        )
        for z in (rows, expected_rows)
    )
    assert fused_calls == {"linear_cross_entropy": 1}
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


def test_lazy_logits_are_never_silently_other_ones() -> None:
    leaves, lazy, _ = lazy_and_plain()
    target = torch.randint(0, 11, (10,))
    rows = lazy.view(-1, 11)

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Tensor:
            ctx.save_for_backward(materialize(x))
            return materialize(x).square().sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    for function in (lambda z: z, lambda z: torch.tanh(z / 2)[:, :-1] * 3):
        with pytest.warns(UserWarning, match="fusegrad: a gradient by them needs all logits"):
            ours = torch.autograd.grad(Squares.apply(function(lazy)), leaves)
        torch.testing.assert_close(ours, torch.autograd.grad(function(F.linear(*leaves)).square().sum(), leaves))
    with torch.no_grad():  # what is written into them counts
        lazy.transpose(0, 1).mul_(2)
        expected = F.cross_entropy(F.linear(*leaves).view(-1, 11) * 2, target)
    with pytest.warns(UserWarning, match="fusegrad: cross_entropy needs all logits"):
        torch.testing.assert_close(F.cross_entropy(rows, target), expected)
    leaves, lazy, _ = lazy_and_plain()
    assert not F.cross_entropy(lazy.detach().view(-1, 11), target).requires_grad
    with torch.no_grad():
        made = lazy_linear(*leaves)
    assert not F.cross_entropy(made.view(-1, 11), target).requires_grad
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="the head's weight must be what it was when the model ran"):
        F.cross_entropy(lazy.view(-1, 11), target)
    leaves, lazy, _ = lazy_and_plain()
    leaves[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the head's weight must still be in memory"):
        lazy.sum()
    with pytest.raises(ValueError, match=r"lazy_linear: input must be \[\.\.\., H\]"):
        lazy_linear(torch.zeros(2, 3), torch.zeros(4, 5))


def test_compiled_models() -> None:
    """One graph, the logits still there: as LazyLogits, which is no tensor."""
    plain, inputs = make("gemma2"), batch()
    expected, logits = step(plain, **inputs), plain(**inputs).logits
    torch._dynamo.reset()
    model = torch.compile(apply(make("gemma2", "fusegrad")), backend="aot_eager", fullgraph=True)
    out = model(**inputs)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected[0])
    torch.testing.assert_close({n: p.grad for n, p in model._orig_mod.named_parameters()}, expected[1])
    assert isinstance(out.logits, LazyLogits)
    torch.testing.assert_close(out.logits.materialize(), logits)
    with torch.no_grad():
        torch.testing.assert_close(out.logits.argmax(-1), logits.argmax(-1))


# --- PEFT ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["peft first", "apply first"])
def test_lora_of_the_head(dropout: float, bias: bool, first: bool, fused_calls: dict[str, int]) -> None:
    peft = pytest.importorskip("peft")
    inputs = batch()

    def adapted(change: Callable[[Any], Any]) -> Any:
        config = peft.LoraConfig(
            target_modules=["q_proj", "lm_head"], r=4, lora_dropout=dropout, lora_bias=bias, init_lora_weights=False
        )
        model = make("phi" if bias else "llama")
        torch.manual_seed(3)
        return peft.get_peft_model(change(model), config) if first else change(peft.get_peft_model(model, config))

    def seeded(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(5)
        return step(model, **inputs)

    expected = seeded(adapted(lambda m: m))
    model = adapted(apply)
    fused_calls.clear()
    torch.testing.assert_close(seeded(model), expected)
    assert fused_calls == {"linear_cross_entropy": 1}
    model.merge_adapter()
    if not dropout:
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).loss, expected[0])
    remove(model)
    assert "_Head" not in str(type(model.get_base_model().lm_head).__mro__)


def test_other_adapters_of_the_head() -> None:
    peft, inputs = pytest.importorskip("peft"), batch()
    model = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    expected = step(model, **inputs)
    apply(model)
    torch.testing.assert_close(step(model, **inputs), expected)
    assert isinstance(model(**inputs).logits, LazyLogitsTensor)
    dora = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["lm_head"], use_dora=True))
    expected = step(dora, **inputs)
    apply(dora)
    with pytest.warns(UserWarning, match="steps aside.*adapter 'default' is a variant of LoRA"):
        torch.testing.assert_close(step(dora, **inputs), expected)
    loha = peft.get_peft_model(make(), peft.LoHaConfig(target_modules=["lm_head"]))
    with pytest.warns(UserWarning, match=r"but its adapter is none of LoRA \(tuners.loha.layer.Linear\)"):
        apply(loha)


def test_disabled_adapters_of_the_head_are_its_base(fused_calls: dict[str, int]) -> None:
    """As reference passes are."""
    peft, inputs = pytest.importorskip("peft"), batch()
    for given in (
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ):
        model = peft.get_peft_model(make(), peft.LoraConfig(**given, init_lora_weights=False))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "modules_to_save" in name:
                    p.mul_(2)
        expected = step(make(), **inputs)[0]
        apply(model)
        fused_calls.clear()
        with torch.no_grad(), model.disable_adapter():
            torch.testing.assert_close(model(**inputs).loss, expected)
        assert fused_calls == {"linear_cross_entropy": 1}
        assert model(**inputs).loss != expected


# --- attention ----------------------------------------------------------------------------------------------------


def positions_of_packed(length: int = 24) -> Tensor:
    return torch.cat([torch.arange(9), torch.arange(4), torch.arange(length - 13)]).expand(2, -1)


def padding(side: str, length: int = 24) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, slice(0, 6) if side == "left" else slice(-6, None)] = 0
    return mask


MASKS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "causal": dict,
    "left padding": lambda: {"attention_mask": padding("left")},
    "right padding": lambda: {"attention_mask": padding("right")},
    "packed": lambda: {"position_ids": positions_of_packed()},
    "4D bools": lambda: {"attention_mask": (torch.rand(2, 1, 24, 24) < 0.7).logical_or(torch.eye(24).bool()).tril()},
    "4D floats": lambda: {"attention_mask": torch.randn(2, 1, 24, 24)},
}


@each_of({"mask": [*MASKS], "family": ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "gpt2"]})
def test_attention(family: str, mask: str, fused_calls: dict[str, int]) -> None:
    model, inputs = make(family), {**batch(), **MASKS[mask]()}
    model.config.output_router_logits = False  # the experts' own loss takes no mask of four dimensions
    if mask.endswith("padding"):
        # No key at all: zeros with fusegrad, an average of all values in eager mode. So nothing may be read there.
        read = inputs["attention_mask"].bool() & F.pad(inputs["attention_mask"], (1, -1)).bool()
        inputs["labels"] = inputs["labels"].masked_fill(~read, -100)
    if mask == "4D bools":
        plain = {**inputs, "attention_mask": torch.zeros(2, 1, 24, 24).masked_fill(~inputs["attention_mask"], -1e30)}
    else:
        plain = inputs
    expected = step(model, **plain)
    model.set_attn_implementation("fusegrad")
    ours = step(model, **inputs)
    assert fused_calls == {"flex_attention": 2}
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}], ids=str
)
def test_generation(family: str, options: dict[str, Any]) -> None:
    inputs = {"input_ids": batch()["input_ids"], "attention_mask": padding("left")}
    tokens = [
        make(family, name, output_router_logits=False)
        .eval()
        .generate(**inputs, max_new_tokens=10, do_sample=False, **options)
        for name in ("eager", "fusegrad")
    ]
    assert torch.equal(*tokens)


def test_an_encoder_and_a_decoder(fused_calls: dict[str, int]) -> None:
    """T5: position biases that are learned, attention to another sequence, a loss of its own without a shift."""
    config = tf.T5Config(
        **{"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        **{"decoder_start_token_id": 0, "pad_token_id": 0, "attn_implementation": "eager"},
    )
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(config)
    inputs = {**batch(), "attention_mask": padding("right")}
    inputs["labels"] = inputs["labels"][:, :9].contiguous()
    expected = step(model, **inputs)
    assert any("relative_attention_bias" in name for name in expected[1])
    apply(model).set_attn_implementation("fusegrad")
    fused_calls.clear()
    torch.testing.assert_close(step(model, **inputs), expected)
    assert fused_calls == {"linear_cross_entropy": 1, "flex_attention": 6}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool, fused_calls: dict[str, int]) -> None:
    model, inputs = make("gemma2"), batch()
    expected = step(model, **inputs)
    apply(model).set_attn_implementation("fusegrad")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fused_calls.clear()
    torch.testing.assert_close(step(model, **inputs), expected)
    assert fused_calls == {"linear_cross_entropy": 1, "flex_attention": 4}


def test_masks_of_packed_batches() -> None:
    """As PyTorch makes them; pairs are asked in the blocks where documents meet alone."""
    packed = torch.arange(700).div(190, rounding_mode="floor").expand(2, -1)

    def function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (packed[b, q_idx] == packed[b, kv_idx]) & (kv_idx <= q_idx) & (kv_idx > q_idx - 300)

    mask = transformers_attention.block_mask(2, 700, 700, mask_function=function)
    expected = torch.nn.attention.flex_attention.create_block_mask(function, 2, None, 700, 700, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(mask.kv_num_blocks, expected.kv_num_blocks)
    every = transformers_attention.block_mask(1, 256, 200, mask_function=lambda b, h, q_idx, kv_idx: kv_idx >= 0)
    assert every.full_kv_num_blocks.tolist() == [[[1, 1]]] and every.kv_num_blocks.tolist() == [[[1, 1]]]
    query, key, value = torch.randn(1, 2, 256, 8), *torch.randn(2, 1, 2, 200, 8)
    out, _ = transformers_attention.attention(nn.Module(), query, key, value, every)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value).transpose(1, 2))


def test_slices_of_masks() -> None:
    """Ranges of tokens, as of a mask that is a tensor."""
    packed = torch.arange(300).div(90, rounding_mode="floor").expand(3, -1) + torch.arange(3)[:, None]
    padding = torch.rand(3, 300) < 0.8

    def function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (packed[b, q_idx] == packed[0, kv_idx]) & (kv_idx <= q_idx)

    mask = transformers_attention.block_mask(3, 300, 300, mask_function=function, attention_mask=padding)
    whole = torch.vmap(lambda b: function(b, 0, torch.arange(300)[:, None], torch.arange(300)))(torch.arange(3))
    whole = (whole & padding[:, None])[:, None]
    assert mask[:, :, slice(0, None), :] is mask and mask[:] is mask
    every = slice(None)
    for index in (
        (every, every, slice(-1, None), every),
        (every, every, slice(-140, None)),
        (slice(1, 3), every, slice(20, 290), slice(None, 200)),
        (slice(2, None),),
        (every, every, slice(5, None), slice(130, None)),
    ):
        part, allowed = mask[index], whole[index]
        assert part.shape == allowed.shape
        again = part[every, every, slice(1, None)] if allowed.shape[2] > 1 else part
        tensors = torch.randn(3, allowed.shape[0], 2, 300, 8)
        for m, a in ((part, allowed), (again, allowed[:, :, allowed.shape[2] - again.shape[2] :])):
            q, k, v = (t[:, :, :n] for t, n in zip(tensors, (a.shape[2], a.shape[3], a.shape[3]), strict=True))
            expected = F.scaled_dot_product_attention(q, k, v, attn_mask=a).nan_to_num()
            torch.testing.assert_close(fusegrad.flex_attention(q, k, v, block_mask=m), expected)
    for index in (0, (every, None), (every, every, slice(None, None, 2)), (every,) * 5):
        with pytest.raises(IndexError, match=r"^fusegrad attention: a block mask's index must be up to four slices"):
            mask[index]


@pytest.mark.skipif(not hasattr(tf, "Gemma4TextConfig"), reason="transformers has no Gemma 4")
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_layers_that_share_keys_keep_the_last_queries(keep: int) -> None:
    small = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"}
    config = tf.Gemma4TextConfig(
        **small, num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=8,
        num_kv_shared_layers=2, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=V,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.Gemma4ForCausalLM(config).eval()
    inputs = {"input_ids": batch()["input_ids"], "attention_mask": padding("left"), "logits_to_keep": keep}
    logits = []
    for attention in ("eager", "fusegrad"):
        model.set_attn_implementation(attention)
        logits.append(model(**inputs).logits[:, -5:])
    torch.testing.assert_close(*logits, rtol=2e-5, atol=2e-6)


def test_sinks_softcaps_and_position_biases() -> None:
    """Against the formulas in float64, with the gradients of sinks and biases; a sink in a row without a key too."""
    leaves = [torch.randn(2, h, 10, 8, dtype=torch.float64) for h in (4, 2, 2)]
    leaves += [torch.randn(4, dtype=torch.float64), torch.randn(1, 4, 10, 10, dtype=torch.float64)]
    query, key, value, sinks, bias = (t.requires_grad_() for t in leaves)
    allowed = (torch.rand(2, 1, 10, 10) < 0.5).index_fill(2, torch.tensor([3]), False)
    out, weights = transformers_attention.attention(
        nn.Module(), query, key, value, allowed, 0.3, softcap=2.0, s_aux=sinks, position_bias=bias
    )
    assert weights is None
    scores = 2 * torch.tanh(0.3 * query @ key.repeat_interleave(2, 1).mT / 2) + bias
    scores = torch.cat([scores.masked_fill(~allowed, -torch.inf), sinks.view(1, -1, 1, 1).expand(2, 4, 10, 1)], -1)
    expected = (scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


def test_attention_dropout_of_one_layer() -> None:
    query, key, value = (torch.randn(2, heads, 10, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    weight = dropout_weight(0.3, (2, 4, 10, 10))
    module = nn.Module()
    out, _ = transformers_attention.attention(module, query, key, value, None, dropout=0.3, s_aux=sinks)
    scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(2, 4, 10, 1)], -1)
    weights = scores.softmax(-1)[..., :-1] * weight.float()
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream, leaves = torch.randn_like(out), (query, key, value, sinks)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, leaves, upstream)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_dropout_of_a_model(reentrant: bool) -> None:
    model = make(attention="fusegrad", attention_dropout=0.2)
    inputs = batch()
    torch.manual_seed(4)
    expected = step(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(4)
    torch.testing.assert_close(step(model, **inputs), expected)
    model.gradient_checkpointing_disable()
    assert model(**inputs).loss != expected[0]
    model.eval()
    assert model(**inputs).loss == model(**inputs).loss


def test_what_attention_refuses() -> None:
    inputs = batch()
    with pytest.raises(NotImplementedError, match="fusegrad attention: output_attentions must be False"):
        make(attention="fusegrad")(**inputs, output_attentions=True)
    with pytest.raises(
        ValueError, match=r"attention_mask must be \[2 or 1, 4 or 1, 24 or 1, >= 24\], but got \[2, 1, 24, 7\]"
    ):
        make(attention="fusegrad")(**inputs, attention_mask=torch.zeros(2, 1, 24, 7))
    query, key = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 5, 8)
    with pytest.raises(ValueError, match="as many queries as keys, but got 3 and 5"):
        transformers_attention.attention(nn.Module(), query, key, key, None)


# --- training stacks ----------------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(3, V, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone().index_fill_(0, torch.arange(i % 5), -100)}


def trained(model: Any, folder: Path, **options: Any) -> tuple[list[float], float]:
    """The loss of each step of a Trainer, and the evaluation's."""
    pytest.importorskip("accelerate")
    compute_loss = options.pop("compute_loss_func", None)
    arguments = tf.TrainingArguments(
        **{"output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "use_cpu": True, "seed": 0},
        **{"gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none"},
        **{"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, **options},
    )
    trainer = tf.Trainer(
        model,
        arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(),
        compute_loss_func=compute_loss,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    trainer.train()
    evaluated = trainer.evaluate()
    assert 0 <= evaluated["eval_accuracy"] <= 1
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], evaluated["eval_loss"]


def shifted_sum(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows = outputs.logits[:, :-1].float().flatten(0, 1)
    count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1), reduction="sum") / count


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing_factor": 0.1}, {"compute_loss_func": shifted_sum}, {"bf16": True}],
    ids=["plain", "smoothing", "own loss", "bf16"],
)
def test_a_trainer_run(options: dict[str, Any], tmp_path: Path, fused_calls: dict[str, int]) -> None:
    expected = trained(make("gemma2"), tmp_path, **options)
    fused_calls.clear()
    ours = trained(apply(make("gemma2", "fusegrad")), tmp_path, **options)
    assert fused_calls["linear_cross_entropy"] >= 8 and fused_calls["flex_attention"] >= 16
    assert len(ours[0]) == 4 and len(set(ours[0])) > 1
    torch.testing.assert_close(ours, expected, rtol=2e-2 if "bf16" in options else 1e-4, atol=1e-4)


def wrapped_by(kind: str, model: Any) -> Any:
    """A model in what training stacks put around it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind.startswith("FSDP2"):
        mesh = dist.init_device_mesh("cpu", (1,))
        for part in [*model.model.layers, *([model.lm_head] if "head" in kind else []), model]:
            fully_shard(part, mesh=mesh)
        return model
    if kind == "FSDP1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "Fabric":
        fabric = pytest.importorskip("lightning.fabric", exc_type=ImportError)
        return fabric.Fabric(accelerator="cpu").setup_module(model)
    if kind == "Accelerate":
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, mixed_precision="bf16")
        return accelerator.prepare_model(model)
    options = {"static graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
    given = next((o for name, o in options.items() if name in kind), {})
    return nn.parallel.DistributedDataParallel(model, **given)


class Largest(TorchDispatchMode):
    """The largest tensor that an op of PyTorch makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and not isinstance(t, LazyLogitsTensor) and not t.is_meta:
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return made


@pytest.mark.parametrize("outside", [False, True], ids=["model's loss", "own loss"])
@pytest.mark.parametrize(
    "kind",
    ["DDP", "DDP, static graph", "DDP, unused", "FSDP2", "FSDP2 of the head", "FSDP1", "Fabric", "Accelerate"],
)
def test_wrapped_models(kind: str, outside: bool) -> None:
    """Gradients pass through what a wrapper does to parameters and outputs, and there are no logits."""
    import torch.distributed as dist

    if "head" in kind:
        warnings.filterwarnings("ignore", message="fusegrad:")
    inputs, model = batch(64), make(vocab_size=8192)  # so that logits are larger than all else
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "Accelerate"):
        loss, expected = step(model, **inputs)
    model.zero_grad()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapped = wrapped_by(kind, apply(model))
        for _ in range(2):  # what is found out in a first step is used in the second
            model.zero_grad()
            with Largest() as largest:
                out = wrapped(**inputs) if not outside else wrapped(input_ids=inputs["input_ids"])
                ours = out.loss if not outside else shifted_sum(out, inputs["labels"])
                ours.backward()
        assert isinstance(out.logits, LazyLogitsTensor) == ("head" not in kind)
        if "head" not in kind and "FSDP1" not in kind:
            assert largest.numel < 2 * 63 * 8192
        gradients = {
            n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
            for n, p in model.named_parameters()
            if p.grad is not None
        }
        gradients = {n.replace("_fsdp_wrapped_module.", ""): g for n, g in gradients.items()}
        assert gradients.keys() == expected.keys()
        if kind == "Accelerate":
            torch.testing.assert_close(ours.float(), loss.float(), rtol=1e-2, atol=0)
            for name, g in expected.items():
                assert (gradients[name] - g).norm() <= 2e-2 * g.norm(), name
        else:
            torch.testing.assert_close((ours, gradients), (loss, expected))
    finally:
        dist.destroy_process_group()


def test_a_lightning_run(fused_calls: dict[str, int]) -> None:
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

    class Training(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, inputs: dict[str, Tensor], index: int) -> Tensor:
            # Half of the steps by a loss of the user's own.
            if index % 2:
                loss = self.model(**inputs).loss
            else:
                loss = shifted_sum(self.model(input_ids=inputs["input_ids"]), inputs["labels"])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(model: Any) -> list[float]:
        module = Training(model)
        trainer = lightning.Trainer(
            **{"max_steps": 4, "accelerator": "cpu", "logger": False, "barebones": True, "gradient_clip_val": 1.0}
        )
        trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=2))
        return module.losses

    expected, model = run(make()), apply(make(attention="fusegrad"))
    fused_calls.clear()
    ours = run(model)
    assert fused_calls == {"linear_cross_entropy": 4, "flex_attention": 8}
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """It learns something in a few steps, and compares its last gradients with the plain model's itself."""
    import transformers_train

    losses = transformers_train.train("cpu", 6)
    assert losses[-1] < losses[0] - 0.3
    assert "gradients are the plain model's" in capsys.readouterr().out
