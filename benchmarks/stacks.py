"""What training stacks save with the loss of `fusegrad.integrations.transformers.apply`: memory and time of a step.

Each stack trains the same small Llama with random weights, plain and applied, in a process of its own. Memory is the
peak of the steps after the first one above what was there when it had ended: weights, kept gradients and the
optimizer's state are not in it. Time is the median from one optimizer step to the next, so data loading, hooks and, of
GRPO, generation are in it. On a CPU memory is the process's, on a GPU what PyTorch's allocator handed out.

    python benchmarks/stacks.py [--device cpu] [--only Trainer] [--output benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from harness.environment import environment, in_file_names
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

MIB = 2**20
SECONDS = 900
STEPS = 5
SIZES = {
    # Rows, length, hidden size, layers, vocabulary.
    "cpu": (4, 256, 256, 2, 65536),
    "cuda": (8, 1024, 1024, 8, 151936),
}


class Recorder:
    """Times of optimizer steps, and the peak since the first."""

    def __init__(self, device: str) -> None:
        self.device, self.times, self.before = device, list[float](), 0.0
        register_optimizer_step_post_hook(self)

    def __call__(self, *_: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.before = self.now()
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            else:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def now(self) -> float:
        return torch.cuda.memory_allocated() / MIB if self.device == "cuda" else _status("VmRSS")

    def results(self) -> dict[str, float]:
        peak = torch.cuda.max_memory_allocated() / MIB if self.device == "cuda" else _status("VmHWM")
        steps = [b - a for a, b in zip(self.times[:-1], self.times[1:], strict=True)]
        return {"ms": round(1000 * statistics.median(steps), 1), "peak_mib": round(peak - self.before, 1)}


def _status(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s*(\d+) kB", text)[0]) / 1024


def make_model(device: str) -> Any:
    import transformers

    _, length, hidden, layers, vocabulary = SIZES[device]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2 * length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(device)


def rows_of(device: str) -> Tensor:
    rows, length, *_, vocabulary = SIZES[device]
    return torch.randint(3, vocabulary, (STEPS * rows, length))


def _tokenizer() -> Any:
    """One token a word; nothing is fetched."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 512)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _arguments(kind: Any, device: str, folder: str, **more: Any) -> Any:
    more = {"per_device_train_batch_size": SIZES[device][0], "report_to": [], "save_strategy": "no", **more}
    return kind(folder, max_steps=STEPS, use_cpu=device == "cpu", disable_tqdm=True, logging_strategy="no", **more)


def trainer(device: str, applied: bool, folder: str, **options: Any) -> None:
    import transformers
    from fusegrad.integrations.transformers import apply

    model = make_model(device)
    data = [{"input_ids": row, "labels": row} for row in rows_of(device)]
    arguments = _arguments(transformers.TrainingArguments, device, folder, **options)
    transformers.Trainer(apply(model) if applied else model, arguments, train_dataset=data).train()


def smoothed_trainer(device: str, applied: bool, folder: str) -> None:
    trainer(device, applied, folder, label_smoothing_factor=0.1)


def loop(device: str, applied: bool, _folder: str, wrap: Callable[[Any, Any], Any] | None = None) -> None:
    """A loop of one's own, within what `wrap` makes of the model and the optimizer."""
    from fusegrad.integrations.transformers import apply

    model = make_model(device)
    if applied:
        apply(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = wrap(model, optimizer) if wrap else (model, optimizer)
    for batch in rows_of(device).to(device).split(SIZES[device][0]):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate(device: str, applied: bool, folder: str) -> None:
    from accelerate import Accelerator

    found = Accelerator(cpu=device == "cpu", mixed_precision="bf16")
    loop(device, applied, folder, lambda model, optimizer: found.prepare(model, optimizer))


def ddp(device: str, applied: bool, folder: str) -> None:
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())

    def wrap(model: Any, optimizer: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), optimizer

    loop(device, applied, folder, wrap)
    dist.destroy_process_group()


def lightning(device: str, applied: bool, folder: str) -> None:
    import lightning.pytorch as pl
    from fusegrad.integrations.transformers import apply

    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = apply(make_model(device)) if applied else make_model(device)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    run = pl.Trainer(
        max_steps=STEPS, accelerator="gpu" if device == "cuda" else "cpu", default_root_dir=folder, **quiet
    )
    run.fit(Training(), torch.utils.data.DataLoader(rows_of(device), batch_size=SIZES[device][0]))


def _trl(device: str, applied: bool, made: Any) -> None:
    from fusegrad.integrations.trl import apply

    if applied:
        apply(made)
    made.train()


def sft(device: str, applied: bool, folder: str) -> None:
    import trl
    from datasets import Dataset

    data = Dataset.from_dict({"input_ids": rows_of(device).tolist()})
    arguments = _arguments(trl.SFTConfig, device, folder, max_length=None, bf16=device == "cuda")
    made = trl.SFTTrainer(make_model(device), arguments, train_dataset=data, processing_class=_tokenizer())
    _trl(device, applied, made)


def dpo(device: str, applied: bool, folder: str) -> None:
    import trl
    from datasets import Dataset

    length = SIZES[device][1]
    words = [" ".join(f"w{i}" for i in torch.randint(3, 512, (length - 16,)).tolist()) for _ in range(2 * STEPS)]
    data = Dataset.from_dict({"prompt": ["w3 w4"] * STEPS, "chosen": words[:STEPS], "rejected": words[STEPS:]})
    more = {"per_device_train_batch_size": 1, "max_length": length, "bf16": device == "cuda"}
    arguments = _arguments(trl.DPOConfig, device, folder, **more)
    made = trl.DPOTrainer(
        make_model(device), make_model(device), arguments, train_dataset=data, processing_class=_tokenizer()
    )
    _trl(device, applied, made)


def grpo(device: str, applied: bool, folder: str) -> None:
    import trl
    from datasets import Dataset

    data = Dataset.from_dict({"prompt": [f"w{3 + i} w4" for i in range(4 * STEPS)]})
    more = {"max_completion_length": 64, "num_generations": SIZES[device][0], "bf16": device == "cuda"}
    arguments = _arguments(trl.GRPOConfig, device, folder, **more)
    made = trl.GRPOTrainer(
        make_model(device), lambda completions, **_: [float(len(c)) for c in completions], args=arguments,
        train_dataset=data, processing_class=_tokenizer(),
    )  # fmt: skip
    _trl(device, applied, made)


STACKS: dict[str, Callable[[str, bool, str], None]] = {
    "a loop of one's own": loop,
    "transformers Trainer": trainer,
    "transformers Trainer, label smoothing": smoothed_trainer,
    "Accelerate, bfloat16": accelerate,
    "Lightning": lightning,
    "DDP, find_unused_parameters": ddp,
    "TRL SFTTrainer": sft,
    "TRL DPOTrainer": dpo,
    "TRL GRPOTrainer": grpo,
}


def measure(device: str, name: str, applied: bool, answers: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    recorder = Recorder(device)
    with tempfile.TemporaryDirectory() as folder:
        STACKS[name](device, applied, folder)
    answers.put(recorder.results())


def measured(device: str, name: str, applied: bool) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=measure, args=(device, name, applied, answers))
    process.start()
    process.join(SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{name}: the process ended with {process.exitcode}")
    return answers.get(timeout=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="regular expression on the stacks' names")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    asked = parser.parse_args()
    rows = []
    print(
        "| stack | memory of a step, MiB | with fusegrad | time of a step, ms | with fusegrad |\n|---|---|---|---|---|"
    )
    for name in (n for n in STACKS if re.search(asked.only, n)):
        plain, ours = (measured(asked.device, name, applied) for applied in (False, True))
        rows.append({"name": name, "plain": plain, "fusegrad": ours})
        cells = (plain["peak_mib"], ours["peak_mib"], plain["ms"], ours["ms"])
        print(f"| {name} | {' | '.join(f'{c:.0f}' for c in cells)} |", flush=True)
    if asked.output:
        facts = environment(asked.device, asked.commit)
        sizes = dict(zip(("rows", "length", "hidden", "layers", "vocabulary"), SIZES[asked.device], strict=True))
        document = {"op": "stacks", **facts, "sizes": sizes, "results": rows}
        path = asked.output / f"stacks-{in_file_names(facts['device'])}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
