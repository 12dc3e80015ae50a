"""TRL's trainers: the same losses, metrics and weights as without fusegrad, and no logits."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import fusegrad
import peft
import transformers as tf
import trl
from datasets import Dataset
from fusegrad.integrations import trl_distillation, trl_heads
from fusegrad.integrations.lazy_logits import lazy_linear
from fusegrad.integrations.transformers import apply, remove
from fusegrad.integrations.trl import apply as apply_to_trainer
from fusegrad.integrations.trl import remove as remove_from_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTTrainer
from trl.kernels import ChunkedLogProbFunction

pytestmark = pytest.mark.cpu_only

V, LENGTH = 512, 24


def tokenizer() -> Any:
    """One token a word; nothing is fetched."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, V)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def data(rows: int = 8) -> Dataset:
    """Rows of different lengths, already tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, V, (LENGTH - i % 5,), generator=generator).tolist() for i in range(rows)]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(x) for x in ids]})


def make(softcap: float | None = None) -> Any:
    options: dict[str, Any] = {
        **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    if softcap is None:
        config: Any = tf.LlamaConfig(**options)
    else:
        config = tf.Gemma2Config(**options, final_logit_softcapping=softcap, query_pre_attn_scalar=8)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config)


def trained(model: Any, folder: Path, *, after: bool = False, **options: Any) -> tuple[list[dict], dict[str, Tensor]]:
    """The log and the weights after two steps; `after`: apply is called once the trainer is there."""
    arguments = trl.SFTConfig(
        str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, learning_rate=0.1, optim="sgd", disable_tqdm=True, seed=0,
        gradient_checkpointing=False, bf16=False, **options,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, args=arguments, train_dataset=data(), eval_dataset=data(3), processing_class=tokenizer()
    )
    if after:
        apply(model)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [*log, trainer.evaluate()], {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts calls of linear_cross_entropy, which must not be beside a product [rows, V] of PyTorch's."""
    calls = {"linear_cross_entropy": 0, "products": 0}
    fused = fusegrad.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["linear_cross_entropy"] += 1
        return fused(*args, **kwargs)

    monkeypatch.setattr(fusegrad, "linear_cross_entropy", counted)
    for owner, name in ((torch, "mm"), (torch, "matmul"), (torch.nn.functional, "linear")):
        product = getattr(owner, name)

        def watched(*args: Any, _product: Any = product, **kwargs: Any) -> Any:
            made = _product(*args, **kwargs)
            calls["products"] += made.dim() > 0 and made.shape[-1] == V
            return made

        monkeypatch.setattr(owner, name, watched)
    return calls


def close(found: tuple[list[dict], dict[str, Tensor]], expected: tuple[list[dict], dict[str, Tensor]]) -> None:
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_entropy")
    for one, other in zip(found[0], expected[0], strict=True):
        assert {n for n in names if n in one} == {n for n in names if n in other} != set()
        for name in names:
            if name in one:
                assert math.isclose(one[name], other[name], rel_tol=1e-4, abs_tol=1e-5), (name, one[name], other[name])
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap, after", [(None, False), (None, True), (5.0, False)], ids=str)
def test_a_run_is_trls_own(softcap: float | None, after: bool, tmp_path: Path, no_logits: dict[str, int]) -> None:
    expected = trained(make(softcap), tmp_path)
    assert no_logits["linear_cross_entropy"] == 0
    assert no_logits["products"] > 0  # TRL's tiles, of which this small vocabulary is one
    model = make(softcap)
    if not after:
        apply(model)
    no_logits.update(linear_cross_entropy=0, products=0)
    found = trained(model, tmp_path, after=after)
    checked = int(after)  # apply tries its options
    assert no_logits["linear_cross_entropy"] == 2 * 2 + 1 + checked  # steps times accumulation, and one evaluation
    assert no_logits["products"] == 0
    close(found, expected)


@pytest.mark.parametrize("options", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"packing": True}], ids=str)
def test_other_losses_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("packing"):
        options = {**options, "max_length": 32}
    expected = trained(make(), tmp_path, **options)
    close(trained(apply(make()), tmp_path, **options), expected)


def test_what_has_no_effect_there_raises(tmp_path: Path) -> None:
    for option in ("z_loss", "label_smoothing"):
        with pytest.raises(ValueError, match=f"^apply: {option} must be 0 where TRL takes log-probabilities"):
            trained(apply(make(), **{option: 0.1}), tmp_path)


def test_removed_models_are_trls_again(tmp_path: Path, no_logits: dict[str, int]) -> None:
    model = make()
    remove(apply(model))
    no_logits.update(linear_cross_entropy=0)
    trained(model, tmp_path)
    assert no_logits["linear_cross_entropy"] == 0


def test_what_trl_itself_would_do_otherwise() -> None:
    """What is not served is TRL's, loudly."""
    from trl.trainer import utils

    self = apply(make())  # the model, as in the forward that TRL gives it
    head = self.get_output_embeddings()
    hidden, targets = torch.randn(5, 32, requires_grad=True), torch.randint(0, V, (5,))

    def log_probs(*outputs: str, self: Any = self) -> Any:
        return utils._ChunkedLogProbFunction.apply(hidden, head.weight, None, targets, 2.0, 64, None, 1.5, outputs)

    found, entropy, _, _, _ = log_probs("log_probs", "entropy")
    truth = (hidden @ head.weight.T * 0.75).log_softmax(-1)
    torch.testing.assert_close(found, truth.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(truth.exp() * truth).sum(-1))
    (ours,) = torch.autograd.grad(entropy.sum(), hidden)
    (right,) = torch.autograd.grad(-(truth.exp() * truth).sum(), hidden)
    torch.testing.assert_close(ours, right)
    mean = (hidden @ head.weight.T * 0.75).mean(1).detach()
    torch.testing.assert_close(log_probs("log_probs", "mean_logits")[3], mean)
    with pytest.warns(UserWarning, match=r"TRL's own head is used, because it asks for log_probs, log_sum"):
        assert log_probs("log_probs", "log_sum_sq_probs")[2] is not None


COMMON: dict[str, Any] = {
    **{"max_steps": 1, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
    **{"use_cpu": True, "learning_rate": 0.1, "optim": "sgd", "disable_tqdm": True, "seed": 0, "bf16": False},
    "gradient_checkpointing": False,
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) + 0.01 * i for i, text in enumerate(completions)]


def grpo(model: Any, folder: Path, reference: str = "") -> Any:
    arguments = trl.GRPOConfig(
        str(folder),
        num_generations=4,
        max_completion_length=6,
        beta=0.1 if reference else 0.0,
        loss_type="dapo",
        **COMMON,
    )
    prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 9)]})
    return trl.GRPOTrainer(model, reward, args=arguments, train_dataset=prompts, processing_class=tokenizer())


def dpo(model: Any, folder: Path, reference: str = "reference") -> Any:
    pairs = {"prompt": [f"w{i}" for i in range(3, 9)], "chosen": ["w5 w6 w7"] * 6, "rejected": ["w9 w8"] * 6}
    arguments = trl.DPOConfig(str(folder), **COMMON)
    given = {"args": arguments, "train_dataset": Dataset.from_dict(pairs), "processing_class": tokenizer()}
    return trl.DPOTrainer(model, ref_model=make() if reference == "reference" else None, **given)


def kto(model: Any, folder: Path) -> Any:
    labels = {
        "prompt": [f"w{i}" for i in range(3, 9)],
        "completion": ["w5 w6 w7", "w9 w8"] * 3,
        "label": [True, False] * 3,
    }
    given = {"train_dataset": Dataset.from_dict(labels), "processing_class": tokenizer()}
    return trl.KTOTrainer(model, ref_model=make(), args=trl.KTOConfig(str(folder), **COMMON), **given)


def rloo(model: Any, folder: Path) -> Any:
    arguments = trl.RLOOConfig(str(folder), num_generations=4, max_completion_length=6, beta=0.0, **COMMON)
    prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 9)]})
    return trl.RLOOTrainer(model, reward, args=arguments, train_dataset=prompts, processing_class=tokenizer())


@pytest.mark.parametrize("kind", [grpo, dpo, kto, rloo], ids=lambda kind: kind.__name__)
def test_preference_trainers(kind: Any, tmp_path: Path, no_logits: dict[str, int]) -> None:
    """Log-probabilities of the policy and of the reference, in a step of each."""
    found = []
    for ours in (False, True):
        model = make()
        trainer = kind(model, tmp_path)
        if ours:
            assert apply_to_trainer(trainer) is trainer
            with pytest.raises(ValueError, match="apply: the target must not be changed already"):
                apply_to_trainer(trainer)
        no_logits.update(linear_cross_entropy=0)
        trainer.train()
        assert (no_logits["linear_cross_entropy"] > 0) == ours
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append((log, {n: p.detach().clone() for n, p in model.named_parameters()}))
    for name in ("loss", "grad_norm", "entropy", "kl", "rewards/margins", "logits/chosen"):
        assert (name in found[0][0][0]) == (name in found[1][0][0])
        if name in found[0][0][0]:
            assert math.isclose(found[0][0][0][name], found[1][0][0][name], rel_tol=1e-3, abs_tol=1e-5), name
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probs_of_a_temperature_are_trls(softcap: float | None) -> None:
    from trl.trainer import utils

    self = apply(make(5.0))
    weight = self.get_output_embeddings().weight
    hidden, targets = torch.randn(9, 32), torch.randint(0, V, (9,))
    found = []
    for function in (utils._ChunkedLogProbFunction, ChunkedLogProbFunction):
        leaves = [hidden.clone().requires_grad_(), weight.detach().clone().requires_grad_()]
        made = function.apply(*leaves, None, targets, 1.7, 64, softcap, 0.8, ("log_probs", "entropy", "is_top1"))
        (made[0] - 0.1 * made[1]).sum().backward()
        found.append([*made[:2], made[4], *(t.grad for t in leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert self is not None


def sft(model: Any, folder: Path) -> Any:
    arguments = trl.SFTConfig(str(folder), **COMMON)
    return trl.SFTTrainer(model, args=arguments, train_dataset=data(), processing_class=tokenizer())


def resized() -> Any:
    model = apply(make())
    model.resize_token_embeddings(V + 8)
    return model


def of_a_class() -> Any:
    apply(tf.LlamaForCausalLM)
    return make()


CHANGED: dict[str, Any] = {
    "copied": lambda: copy.deepcopy(apply(make())),
    "resized": resized,
    "class": of_a_class,
    "saved": lambda: peft.get_peft_model(
        apply(make()), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_models_that_changed_after_apply(how: str, tmp_path: Path, no_logits: dict[str, int]) -> None:
    try:
        trainer = sft(CHANGED[how](), tmp_path)
        no_logits.update(linear_cross_entropy=0, products=0)
        trainer.train()
        assert no_logits["linear_cross_entropy"] == 1 and no_logits["products"] == 0
    finally:
        if how == "class":
            remove(tf.LlamaForCausalLM)


@pytest.mark.parametrize("kind", ["reference", "adapters"])
@pytest.mark.parametrize("make_trainer", [dpo, grpo], ids=lambda kind: kind.__name__)
def test_policy_and_reference_by_the_same_kernel(
    make_trainer: Any, kind: str, tmp_path: Path, no_logits: dict[str, int]
) -> None:
    """Their first log-probabilities are equal bit by bit, so that the first margins and divergences are 0."""
    model = apply(make())
    if kind == "adapters":
        given = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(model, given)
    elif make_trainer is grpo:  # which reads its reference from where the model's configuration says
        model.config._name_or_path = str(tmp_path / "model")
        make().save_pretrained(model.config._name_or_path)
    trainer = make_trainer(model, tmp_path, kind)
    no_logits.update(linear_cross_entropy=0, products=0)
    trainer.train()
    assert no_logits["linear_cross_entropy"] >= 2
    if make_trainer is dpo:
        assert no_logits["products"] == 0
        assert trainer.state.log_history[0]["rewards/margins"] == 0.0
    else:
        assert trainer.state.log_history[0]["kl"] == 0.0


def test_the_two_functions_in_either_order(tmp_path: Path) -> None:
    for first in (True, False):
        trainer = sft(apply(make(), workspace_mib=8) if first else make(), tmp_path)
        apply_to_trainer(trainer)
        if not first:
            apply(trainer.model, workspace_mib=8)
        assert trainer.model._fusegrad.options["workspace_mib"] == 8
        with pytest.raises(ValueError, match="apply: the target must not be changed already"):
            apply(trainer.model)
        remove_from_trainer(trainer)
        assert trainer.model._fusegrad is not None  # it was the user's own
        remove(trainer.model)


def test_a_trainer_that_cannot_be_changed_is_as_it_was(tmp_path: Path) -> None:
    trainer = dpo(make(), tmp_path)
    apply(trainer.ref_model, workspace_mib=8)
    forward = vars(trainer.model)["forward"]
    with pytest.raises(ValueError, match="apply: workspace_mib must be what the trainer's model was given before, 8"):
        apply_to_trainer(trainer, workspace_mib=64)
    assert vars(trainer.model)["forward"] is forward and not hasattr(trainer.model, "_fusegrad")
    with pytest.raises(ValueError, match="remove: the target must be changed by apply"):
        remove_from_trainer(trainer)


def distillation(model: Any, folder: Path) -> Any:
    torch.manual_seed(3)
    teacher = make()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(2)
    arguments = trl.DistillationConfig(str(folder), max_completion_length=6, beta=0.5, **COMMON)
    prompts = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 9)]})
    given = {"args": arguments, "train_dataset": prompts, "processing_class": tokenizer()}
    return trl.DistillationTrainer(model, teacher_model=teacher, **given)


def gkd(model: Any, folder: Path) -> Any:
    """Off-policy: the rows are the data's."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    teacher = make()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(2)
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    rows = [
        [{"role": "user", "content": f"w{i} w8"}, {"role": "assistant", "content": f"w{i + 1} w{i + 2} w5"}]
        for i in range(3, 9)
    ]
    arguments = GKDConfig(str(folder), lmbda=0.0, max_length=16, max_new_tokens=4, beta=0.5, **COMMON)
    given = {"args": arguments, "train_dataset": Dataset.from_dict({"messages": rows}), "processing_class": words}
    return GKDTrainer(model, teacher_model=teacher, **given)


@pytest.mark.parametrize("make_trainer", [distillation, gkd], ids=lambda kind: kind.__name__)
def test_distillation(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    divergence = fusegrad.linear_jsd
    monkeypatch.setattr(fusegrad, "linear_jsd", lambda *a, **k: calls.append(k) or divergence(*a, **k))
    found = []
    for ours in (False, True):
        model = make()
        trainer = make_trainer(model, tmp_path)
        if ours:
            apply_to_trainer(trainer)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="fusegrad:")
            trainer.train()
        assert bool(calls) == ours
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append((log, {n: p.detach().clone() for n, p in model.named_parameters()}))
    for name in ("loss", "grad_norm", "entropy"):
        assert (name in found[0][0][0]) == (name in found[1][0][0])
        if name in found[0][0][0]:
            assert math.isclose(found[0][0][0][name], found[1][0][0][name], rel_tol=1e-4, abs_tol=1e-6), name
    for name, weight in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], weight, rtol=1e-4, atol=1e-5)


def test_the_default_keeps_less_than_trls_own() -> None:
    """Memory above the inputs, gradients included, for log-probabilities and for a loss one a row of lazy logits."""
    self = apply(make())
    hidden, weight = torch.randn(1024, 64, requires_grad=True), torch.randn(32768, 64, requires_grad=True)
    targets = torch.randint(0, 32768, (1024,))

    def trls() -> Tensor:
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("log_probs",))[0]

    def ours(self: Any = self) -> Tensor:
        return trl.trainer.utils._ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("log_probs",)
        )[0]

    def lazy() -> Tensor:
        return torch.nn.functional.cross_entropy(lazy_linear(hidden, weight), targets, reduction="none")

    def peak(run: Any) -> float:
        for _ in range(2):
            hidden.grad = weight.grad = None
            Path("/proc/self/clear_refs").write_text("5")
            before = memory("VmRSS")
            run().sum().backward()
        return memory("VmHWM") - before

    theirs = peak(trls)
    assert theirs > 128  # the logits are 128 MiB
    assert peak(ours) < 48 and peak(lazy) < 48


def memory(what: str) -> float:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what)]
    return int(line.split()[1]) / 1024


def test_apply_to_a_class_of_trainers(tmp_path: Path, no_logits: dict[str, int]) -> None:
    class Trainer(trl.SFTTrainer):
        pass

    assert apply_to_trainer(Trainer, workspace_mib=64) is Trainer
    arguments = trl.SFTConfig(str(tmp_path), **COMMON)
    trainer = Trainer(make(), args=arguments, train_dataset=data(), processing_class=tokenizer())
    no_logits.update(linear_cross_entropy=0, products=0)
    trainer.train()
    assert no_logits["linear_cross_entropy"] > 0 and no_logits["products"] == 0
    remove_from_trainer(Trainer)
    with pytest.raises(ValueError, match="remove: the target must be changed by apply"):
        remove_from_trainer(Trainer)
    with pytest.raises(TypeError, match="apply: the target must be a trainer of TRL"):
        apply_to_trainer(make())


def test_trl_that_is_loaded_after_apply(
    tmp_path: Path, no_logits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply(make())
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)
    trainer = sft(model, tmp_path)
    no_logits.update(linear_cross_entropy=0, products=0)
    trainer.train()
    assert no_logits["linear_cross_entropy"] == 1 and no_logits["products"] == 0


@pytest.mark.parametrize("place", ["function", "arguments"])
def test_a_version_that_computes_elsewhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says so, and nothing in the place of what is not known."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, more: Any) -> None: ...

    monkeypatch.setattr(trl_heads, "_chunked", None if place == "function" else Other)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Other)

    class Trainer(SFTTrainer):
        pass

    with pytest.raises(RuntimeError, match=rf"^apply: trl must be 1\.16, but got {re.escape(trl.__version__)}, which"):
        apply_to_trainer(Trainer)
    assert "_fusegrad_trl" not in vars(Trainer)
    trl_heads._say.cache_clear()
    with pytest.warns(UserWarning, match=r"TRL's own head is used: trl must be 1\.16"):
        trl_heads.serve()
    assert trl.trainer.utils._ChunkedLogProbFunction is Other
    trl_heads._say.cache_clear()


def test_divergences_of_another_version_stay_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.gkd import gkd_trainer

    def theirs(student: Tensor, teacher: Tensor) -> Tensor:
        return student

    monkeypatch.setattr(gkd_trainer.GKDTrainer, "generalized_jsd_loss", staticmethod(theirs))
    with pytest.warns(UserWarning, match=r"TRL's own divergences are used: trl must be 1\.16"):
        trl_distillation.serve()
    assert gkd_trainer.GKDTrainer.generalized_jsd_loss is theirs
    monkeypatch.delattr(gkd_trainer.GKDTrainer, "generalized_jsd_loss")
    with pytest.warns(UserWarning, match="which computes elsewhere"):
        trl_distillation.serve()


def test_nothing_imports_trl_unasked() -> None:
    program = """
        import sys
        import transformers as tf
        from fusegrad.integrations.transformers import apply
        from transformers.trainer_pt_utils import LabelSmoother

        assert not hasattr(LabelSmoother.__call__, "__wrapped__")  # patched by apply alone
        config = tf.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                num_attention_heads=2, num_key_value_heads=2)
        apply(tf.AutoModelForCausalLM.from_config(config))
        assert "trl" not in sys.modules
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True)
