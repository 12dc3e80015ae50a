"""What each process of test_transformers_context.py runs: models of transformers whose sequences are spread, against
the same model alone. A case that fails says why in its result."""

from __future__ import annotations

import copy
import io
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from fusegrad import ContextParallel
from fusegrad.integrations.transformers import apply, context_parallel, remove
from processes import assert_raises, main
from torch import Tensor, nn

DEVICE = sys.argv[4] if __name__ == "__main__" else "cpu"
B, S, V = 2, 16, 61
CASES: dict[str, Callable[..., None]] = {}


WORLDS = (2, 4)


def runs(name: str, world: int) -> bool:
    """The Trainer takes all processes that there are."""
    return world in WORLDS and (name == "trains" or world == (max(WORLDS) if name == "trainer" else 2))


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


SIZES: dict[str, Any] = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_labels": 5},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout_prob": 0.0},
    **{"attention_probs_dropout_prob": 0.0},
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}


def make(name: str, head: str = "CausalLM", attention: str = "fusegrad", **options: Any) -> Any:
    """A small model, always with the same weights."""
    config = getattr(tf, f"{name}Config")(**{**SIZES, **options})
    config._attn_implementation, config.use_cache = attention, False  # packed rows are found without a cache alone
    model = getattr(tf, f"AutoModelFor{head}" if head else "AutoModel").from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    return model


def rows() -> dict[str, Tensor]:
    """Two rows, of which one is padded, with labels of their own."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (B, S), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :5] = -100
    labels[1, 12:], mask[1, 12:] = -100, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def summed(tensor: Tensor, context: ContextParallel) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total, group=context.group)
    return total


def close(ours: Tensor, truth: Tensor, what: str) -> None:
    largest = max(truth.abs().max().item(), 1e-3)
    torch.testing.assert_close(ours.detach(), truth.detach(), rtol=0, atol=1e-4 * largest, msg=lambda m: f"{what}: {m}")


def check(model: Any, alone: Any, context: ContextParallel, given: dict[str, Any], what: str, scale: Any = 1) -> None:
    """A step of a spread model is that of `alone`, whose loss is times `scale`."""
    truth = alone(**given)
    (truth.loss * scale).backward()
    made = model(**given)
    made.loss.backward()
    close(summed(made.loss, context) / context.world, truth.loss * scale, f"{what}, loss")
    kept = given.get("attention_mask", torch.ones(B, S)).bool()
    close(context.unshard(made.logits.detach() + 0)[kept], truth.logits[kept], f"{what}, logits")
    for (name, p), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (right.grad is None), f"{what}, {name}"
        if right.grad is not None:
            close(summed(p.grad, context) / context.world, right.grad, f"{what}, {name}")
    model.zero_grad()
    alone.zero_grad()


@case
def trains(group: Any) -> None:
    """A decoder with windows in every other layer: padded and packed rows, with and without apply and checkpoints."""
    options = {"sliding_window": 4, "query_pre_attn_scalar": 8}
    alone = make("Gemma2", attention="eager", **options)
    context = ContextParallel(group, "zigzag")
    padded = rows()
    whole = {name: padded[name] for name in ("input_ids", "labels")}
    first = torch.arange(S).expand(B, -1) < torch.tensor([[9], [S]])
    packed = torch.where(first, torch.arange(S), torch.arange(S) - 9)
    positions = whole | {"position_ids": packed}
    for kind in ("plain", "applied", "checkpointed"):
        model = make("Gemma2", **options)
        if kind == "applied":
            apply(model)
        context_parallel(model, context)
        if kind == "checkpointed":
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for given in (padded, whole, positions):
            check(model, alone, context, given, f"{kind}, {list(given)}")
    made = model(padded["input_ids"], padded["attention_mask"], labels=padded["labels"])
    torch.testing.assert_close(made.loss, model(**padded).loss)


@case
def families(group: Any) -> None:
    """Chunks, sinks, experts, both directions, classes of tokens, positions of the caller's."""
    context = ContextParallel(group, "zigzag")
    positions = {"position_ids": torch.arange(S)[None]}
    llama4 = {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "floor_scale": 4, **EXPERTS}
    compressed = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    for name, head, options, added in (
        ("Llama4Text", "CausalLM", llama4, {}),
        ("GptOss", "CausalLM", {"sliding_window": 4, **EXPERTS}, {}),
        ("Qwen3Moe", "CausalLM", EXPERTS, {}),
        ("DeepseekV3", "CausalLM", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **compressed, **EXPERTS}, {}),
        ("ModernBert", "MaskedLM", {"local_attention": 8, "global_attn_every_n_layers": 2}, {}),
        ("Llama", "TokenClassification", {}, {}),
        ("OPT", "CausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}, positions),
    ):
        given = rows() | added
        if head == "TokenClassification":
            given["labels"] = torch.where(given["labels"] < 0, given["labels"], given["labels"] % 5)
        model, alone = make(name, head, **options), make(name, head, "eager", **options)
        context_parallel(model, context)
        check(model, alone, context, given, f"{name} {head}")


@case
def refused(group: Any) -> None:
    """What would see its own part of the sequence alone, or whose value would be that of the part."""
    context = ContextParallel(group, "zigzag")
    given = rows()
    conv = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    hybrid = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, **conv, **EXPERTS}
    seq2seq = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    for text, name, head, options, call in (
        ("conv1d, a Conv1d", "Qwen3Next", "CausalLM", hybrid, given),
        ("2 layers must have attention by fusegrad, but got 1", "MiniMax", "CausalLM", EXPERTS, given),
        ("an encoder and a decoder", "T5", "Seq2SeqLM", seq2seq, given),
        ("BertForMaskedLM must compute its loss by its loss_function", "Bert", "MaskedLM", {}, given),
        ("'pooler_output' of shape [2, 32]", "Bert", "", {}, {"input_ids": given["input_ids"]}),
        ("position_ids must be given", "Roberta", "CausalLM", {"is_decoder": True}, given),
        ("labels must be of the whole", "Llama", "SequenceClassification", {}, {**given, "labels": torch.ones(B)}),
        ("'logits' of shape [2, 5]", "Llama", "SequenceClassification", {}, {"input_ids": given["input_ids"]}),
        ("output_router_logits must be False", "Mixtral", "CausalLM", {**EXPERTS, "output_router_logits": True}, given),
        ("output_router_logits must be None", "Mixtral", "CausalLM", EXPERTS, {**given, "output_router_logits": True}),
    ):
        model = make(name, head, **options)

        def run(model: Any = model, call: Any = call) -> None:
            context_parallel(model, context)
            model(**call)

        assert_raises((NotImplementedError, ValueError), text, run)
    assert_raises(
        TypeError, "must be a transformers.PreTrainedModel", lambda: context_parallel(nn.Linear(2, 2), context)
    )
    eager = make("Llama", attention="eager")
    assert_raises(
        ValueError, "attn_implementation=\"fusegrad\", but got 'eager'", lambda: context_parallel(eager, context)
    )


@case
def arguments(group: Any) -> None:
    """Those that are of a part, or of no effect, are refused by name, in all processes."""
    model, given = make("Llama"), rows()
    context_parallel(model, ContextParallel(group, "zigzag"))
    ids = given["input_ids"]
    mask4d = torch.ones(B, 1, S, S, dtype=torch.bool)
    for text, changes in (
        ("past_key_values must be None", {"past_key_values": tf.DynamicCache()}),
        ("cache must be None", {"cache": object()}),
        ("use_cache must be None, since sequences are spread, but got True", {"use_cache": True}),
        ("logits_to_keep must be None", {"logits_to_keep": 1}),
        ("token_type_ids must be None", {"token_type_ids": torch.zeros_like(ids)}),
        ("cu_seq_lens_q must be None", {"cu_seq_lens_q": torch.tensor([0, S])}),
        (
            "attention_mask must be of the whole sequence, [2, 16], but got shape [2, 1, 16, 16]",
            {"attention_mask": mask4d},
        ),
        ("position_ids must be of the whole sequence", {"position_ids": torch.arange(S // 2)[None]}),
        ("labels must be of the whole sequence", {"labels": ids[:, 1:]}),
        ("shift_labels must come with labels", {"labels": None, "shift_labels": ids}),
        ("input_ids or inputs_embeds, but got neither", {"input_ids": None}),
    ):
        call = {**given, **changes}
        assert_raises((NotImplementedError, ValueError), text, lambda c=call: model(**c))
    model(**given, use_cache=False, logits_to_keep=0, output_hidden_states=True)
    for call in (lambda: model.generate(ids, max_new_tokens=2), lambda: model.generate(ids, use_cache=False)):
        assert_raises(NotImplementedError, "context_parallel: generate must be called on a model", call)


@case
def other_rows(group: Any) -> None:
    """What differs between the processes is an error in all, that names it."""
    context = ContextParallel(group, "zigzag")
    model, given = make("Llama"), rows()
    context_parallel(model, context)
    last = context.rank == context.world - 1
    ids = given["input_ids"]
    swapped = ids.clone()
    swapped[0, [3, 4]] = ids[0, [4, 3]]
    positions = torch.arange(S)[None]
    for name, ours, theirs in (
        ("input_ids", ids, swapped),
        ("input_ids", ids, ids[:, :12]),
        ("inputs_embeds", torch.ones(B, S, 32), torch.ones(B, S, 32) * 1.001),
        ("attention_mask", given["attention_mask"], given["attention_mask"].flip(0)),
        ("attention_mask", given["attention_mask"], None),
        ("position_ids", positions, positions.flip(1)),
        ("labels", given["labels"], given["labels"].flip(0)),
        ("labels", given["labels"], None),
        ("shift_labels", ids, swapped),
        ("num_items_in_batch", 7, 8),
        ("num_items_in_batch", torch.tensor(7), torch.tensor(8)),
        ("the other arguments", True, False),
    ):
        call = {**given, ("output_hidden_states" if name.startswith("the") else name): theirs if last else ours}
        if name == "inputs_embeds":
            del call["input_ids"]
        if last and name == "input_ids" and theirs.shape[1] != S:
            call = {k: v[:, :12] for k, v in given.items()}
        text = (
            f"context_parallel: {name} must be the same in all processes of context_parallel, but got another in rank"
        )
        assert_raises(ValueError, text, lambda c=call: model(**c))
    # One that is wrong in a process alone.
    text = "logits_to_keep must be None" if last else "an error of its own in rank"
    error = NotImplementedError if last else RuntimeError
    assert_raises(error, text, lambda: model(**given, logits_to_keep=2 if last else 0))
    applied = apply(make("Llama"), z_loss=1e-3 if last else 1e-4)
    context_parallel(applied, context)
    assert_raises(ValueError, "the options of apply must be the same", lambda: applied(**given))
    check(model, make("Llama", attention="eager"), context, given, "after errors")


@case
def number_of_items(group: Any) -> None:
    """num_items_in_batch is of the whole batch, whatever process it is counted in."""
    context = ContextParallel(group, "zigzag")
    model, alone, given = make("Llama"), make("Llama", attention="eager"), rows()
    context_parallel(model, context)
    own = (given["labels"][:, 1:] != -100).sum()
    for tokens in (29, torch.tensor(29.0)):
        truth = own / 29
        call = {**given, "num_items_in_batch": tokens}
        made = model(**call)
        close(summed(made.loss, context) / context.world, alone(**given).loss * truth, f"num_items {tokens}")
        made.loss.backward()
    shifted = nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    made = model(**given, shift_labels=shifted).loss
    torch.testing.assert_close(made, model(**given).loss)


@case
def trainer(group: Any) -> None:
    """transformers' own Trainer, with DDP over the same processes, which have the same rows."""
    context = ContextParallel(group, "zigzag", sum_captured=False)
    given = rows()
    data = [{name: tensor[row] for name, tensor in given.items()} for row in (0, 1)]

    class Trainer(tf.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    alone = make("Llama", attention="eager")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(2):
        alone(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    os.environ |= {"RANK": str(context.rank), "LOCAL_RANK": str(context.rank), "WORLD_SIZE": str(context.world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for average in (True, False):
        model = make("Llama")
        context_parallel(model, context)
        with tempfile.TemporaryDirectory() as folder:
            how = tf.TrainingArguments(
                folder,
                **{"per_device_train_batch_size": B, "max_steps": 2, "learning_rate": 0.5, "max_grad_norm": 0.0},
                **{"lr_scheduler_type": "constant", "optim": "sgd", "report_to": [], "save_strategy": "no"},
                **{"use_cpu": True, "disable_tqdm": True, "average_tokens_across_devices": average},
                ddp_backend="gloo",
            )
            Trainer(model, how, train_dataset=data * context.world * 2).train()
        for (name, p), right in zip(model.named_parameters(), alone.parameters(), strict=True):
            close(p, right, f"{average}, {name}")


@case
def removes(group: Any) -> None:
    """remove leaves the model as it was, whatever came first; copies are their own; a file has the plain model."""
    context = ContextParallel(group, "zigzag")
    given, alone = rows(), make("Llama", attention="eager")
    truth = alone(**given).loss
    for order in ("cp", "apply cp", "cp apply"):
        model = make("Llama")
        before = {path: set(vars(module)) for path, module in model.named_modules()}
        for step in order.split():
            if step == "cp":
                context_parallel(model, context)
            else:
                apply(model)
        assert_raises(ValueError, "must not be spread already", lambda m=model: context_parallel(m, context))
        other = copy.deepcopy(model)
        check(other, alone, context, given, f"{order}, a copy")
        assert all(p.grad is None for p in model.parameters()), f"{order}: the copy ran the original"
        remove(other)
        close(other(**given).loss, truth, f"{order}, the copy after remove")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        close(torch.load(file, weights_only=False)(**given).loss, truth, f"{order}, from a file")
        check(model, alone, context, given, order)
        remove(model)
        after = {path: set(vars(module)) for path, module in model.named_modules()}
        assert after == before, (order, {p: after[p] ^ before[p] for p in after if after[p] != before[p]})
        close(model(**given).loss, truth, f"{order}, after remove")
        assert model.generate(given["input_ids"], max_new_tokens=2, do_sample=False).shape == (B, S + 2)
        assert_raises(ValueError, "must be changed by apply or context_parallel", lambda m=model: remove(m))


@case
def adapters(group: Any) -> None:
    """PEFT's LoRA: the base model is spread, and the adapters get their gradients."""
    try:
        import peft
    except ImportError:
        return
    context = ContextParallel(group, "zigzag")
    models = []
    for attention in ("fusegrad", "eager"):
        torch.manual_seed(3)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False
        )
        models.append(peft.get_peft_model(make("Llama", attention=attention), config))
    context_parallel(models[0], context)
    check(models[0], models[1], context, rows(), "LoRA")
    remove(models[0])
    close(models[0](**rows()).loss, models[1](**rows()).loss, "LoRA, after remove")


if __name__ == "__main__":
    main(CASES, runs, lambda group: group)
