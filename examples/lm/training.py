"""The training loop: steps, held-out loss, checkpoints that resume bit-exactly, Ctrl-C."""

import math
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lm import ExampleError
from lm.data import BatchStream, Corpus, atomic_save, held_out_batches
from lm.model import GPT, ModelConfig, loss_function

CHECKPOINT_FORMAT = 1
FINAL_LEARNING_RATE_FRACTION = 0.1
# (inputs [B, S], targets [B, S]) -> the batch's mean loss.
BatchLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TrainingConfig:
    """All that decides the numbers of a run. A checkpoint resumes only under an equal one."""

    loss: str = "eager"
    attention: str = "sdpa"
    positions: str = "embedding"
    device: str = "cpu"
    dtype: str = "fp32"
    compile: bool = False
    deterministic: bool = False
    steps: int = 200
    batch_size: int = 8
    seq_length: int = 256
    layers: int = 4
    hidden_size: int = 128
    heads: int = 4
    tied: bool = True
    dropout: float = 0.0
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    held_out_batches: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_length", "layers", "heads", "held_out_batches"):
            if getattr(self, name) < 1:
                raise ExampleError(f"{_option(name)} must be at least 1, but got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ExampleError(f"--dropout must be in [0, 1), but got {self.dropout}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ExampleError("--device cuda needs a GPU, but PyTorch sees none; use --device cpu")

    def describe(self) -> str:
        """One line for people: what the numbers of a run belong to."""
        return (
            f"{self.device}, {self.dtype}, batch {self.batch_size} × {self.seq_length}, "
            f"hidden size {self.hidden_size}, {self.layers} layers, seed {self.seed}"
        )


@dataclass
class History:
    """What happened in the steps so far; `seconds` excludes held-out losses and checkpoints."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Trainer:
    """A model, its optimizer and its place in the data: everything that a checkpoint holds."""

    main = True  # whether this process prints and writes files

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        self.device = torch.device(config.device)
        if config.deterministic:
            # cuBLAS is repeatable only with a workspace of fixed size, read when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        self.model = GPT(model_config(config, corpus.vocab_size)).to(self.device)
        self._parallelize()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.batches = BatchStream(corpus.train, config.batch_size, config.seq_length, config.seed)
        self.held_out = held_out_batches(corpus.held_out, config.batch_size, config.seq_length, config.held_out_batches)
        self.step = 0
        self.history = History()
        self._batch_loss = self._make_loss()
        self._compute_loss = torch.compile(self._eager_step) if config.compile else self._eager_step

    def train(self, until: int, stop: "StopRequest", checkpoint: Path | None, checkpoint_every: int) -> None:
        """Trains to step `until`, or until a stop is requested; saves to `checkpoint` then and at the end."""
        self.model.train()
        progress = tqdm(
            total=self.config.steps,
            initial=self.step,
            desc=self.config.loss,
            unit="step",
            disable=None if self.main else True,
        )
        with progress:
            while self.step < until and not self._stopping(stop):
                self._train_step()
                progress.set_postfix_str(f"loss {self.history.losses[-1]:.3f}", refresh=False)
                progress.update()
                if checkpoint and checkpoint_every and self.step % checkpoint_every == 0:
                    self.save(checkpoint)
        if checkpoint:
            self.save(checkpoint)

    def held_out_loss(self) -> float:
        """The mean loss per token over the held-out batches."""
        return self._held_out_mean(self._compute_loss).item()

    def held_out_parts(self) -> dict[str, float]:
        """What the held-out loss consists of, by name, where that is more than one thing."""
        return {}

    def plain_model(self) -> GPT:
        """The model with all of its weights in this process."""
        return self.model

    def save(self, path: Path) -> None:
        atomic_save(self._content(), path)

    def _content(self) -> dict[str, Any]:
        return {
            "format": CHECKPOINT_FORMAT,
            "config": self._identity(),
            "step": self.step,
            "batches_taken": self.batches.position,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
            "cpu_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def resume(self, path: Path) -> None:
        """Loads what `save` wrote; an error where the file was written under another configuration."""
        if not path.exists():
            raise ExampleError(f"nothing to resume: {path} does not exist; run without --resume first")
        content = read_checkpoint(path)
        self._check_identity(path, content["config"])
        self._load(content["model"], content["optimizer"])
        self.step = content["step"]
        self.batches.position = content["batches_taken"]
        self.history = History(**content["history"])
        torch.set_rng_state(content["cpu_rng"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(content["cuda_rng"], self.device)

    def _load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def _parallelize(self) -> None:
        """Before the optimizer is made: where the model is spread over processes."""

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        return self._to_device(*self.batches.next())

    def _value(self, loss: Tensor) -> float:
        """Waits for the device."""
        return loss.item()

    def _stopping(self, stop: "StopRequest") -> bool:
        return stop.requested

    def _train_step(self) -> None:
        start = time.perf_counter()
        inputs, targets = self._next_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step)
        loss = self._compute_loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # This waits for the device, so that the seconds below are those of this step.
        value = self._value(loss)
        self.step += 1
        if not math.isfinite(value):
            raise ExampleError(f"the loss is {value} at step {self.step}; use a smaller --learning-rate")
        self.history.losses.append(value)
        self.history.seconds.append(time.perf_counter() - start)

    def _eager_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            return self._batch_loss(inputs, targets)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bf16")

    def _make_loss(self) -> BatchLoss:
        function = loss_function(self.config.loss)
        return lambda inputs, targets: function(self.model(inputs), self.model.head_weight, targets)

    def _held_out_mean(self, compute: BatchLoss) -> Tensor:
        """The mean per token of what `compute` returns (of any shape) over the held-out batches, float64."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        with torch.no_grad():
            for inputs, targets in self.held_out:
                total = total + compute(*self._to_device(inputs, targets)).double().cpu() * targets.numel()
                count += targets.numel()
        self.model.train()
        return total / count

    def _to_device(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.to(self.device), targets.to(self.device)

    def _identity(self) -> dict[str, Any]:
        return {**asdict(self.config), "data": self.corpus.key}

    def _check_identity(self, path: Path, saved: dict[str, Any]) -> None:
        ours = self._identity()
        different = [
            f"{_option(name)} was {saved.get(name)} and is {ours.get(name)}"
            for name in sorted(ours.keys() | saved.keys())
            if saved.get(name) != ours.get(name)
        ]
        if different:
            raise ExampleError(
                f"cannot resume {path}: {'; '.join(different)}; give the options it was started with, "
                "or start anew without --resume"
            )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `Trainer.save` wrote to `path`, on the CPU."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        written = content["format"]
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ExampleError(f"cannot read the checkpoint {path} ({error}); delete it and start anew") from error
    if written != CHECKPOINT_FORMAT:
        raise ExampleError(
            f"{path} has checkpoint format {written}, this program reads {CHECKPOINT_FORMAT}; start anew"
        )
    return content


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth at the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    floor = FINAL_LEARNING_RATE_FRACTION
    return config.learning_rate * (floor + (1 - floor) * cosine)


def model_config(config: TrainingConfig, vocab_size: int) -> ModelConfig:
    shared = {field.name for field in fields(ModelConfig)} & {field.name for field in fields(TrainingConfig)}
    return ModelConfig(vocab_size=vocab_size, **{name: getattr(config, name) for name in shared})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


class StopRequest(AbstractContextManager["StopRequest"]):
    """Turns the first Ctrl-C (or SIGTERM) into `requested`; a second one acts as it did before."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
