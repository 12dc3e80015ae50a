"""Training under torchrun: every process takes its rows of each batch, and with context parallelism its part of each of
their sequences; DDP or FSDP2 averages the gradients over all processes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lm import ExampleError, import_fusegrad
from lm.data import Corpus, atomic_save
from lm.model import GPT, LossFunction, loss_function
from lm.training import BatchLoss, StopRequest, Trainer, TrainingConfig, model_config

KINDS = ("ddp", "fsdp")


class LossModel(nn.Module):
    """The model with its loss. What DDP and FSDP2 wrap must use the head's weight inside of its forward: FSDP2 has
    gathered it there, once, and DDP waits for its gradient."""

    def __init__(self, model: GPT, loss: LossFunction, context: Any = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.context = context

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.context is not None:
            inputs, targets = self.context.shard(inputs), self.context.shard(targets)
        return self.loss(self.model(inputs, self.context), self.model.head_weight, targets)


class DistributedTrainer(Trainer):
    """All processes draw the same batches and random numbers; rank 0 writes the files. The steps are those of one
    process with the whole batch, to rounding; its checkpoints and theirs are the same.

    `context_parallel` processes, with consecutive ranks, share each sequence; groups of as many share the batch.
    """

    def __init__(self, config: TrainingConfig, corpus: Corpus, kind: str, context_parallel: int = 1) -> None:
        if kind not in KINDS:
            raise ExampleError(f"--distributed must be one of {', '.join(KINDS)}, but got {kind}")
        if "RANK" not in os.environ:
            raise ExampleError("--distributed needs torchrun: torchrun --nproc-per-node 2 examples/train_lm.py ...")
        if config.compile:
            raise ExampleError("--distributed must come without --compile")
        if not dist.is_initialized():
            if config.device == "cuda":
                device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(device)
                dist.init_process_group("nccl", device_id=device)
            else:
                dist.init_process_group("gloo")
        self.kind = kind
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if context_parallel < 1 or self.world % context_parallel != 0:
            raise ExampleError(f"--context-parallel must divide the {self.world} processes, but got {context_parallel}")
        self.groups = self.world // context_parallel
        if config.batch_size % self.groups != 0:
            raise ExampleError(
                f"--batch-size must be a multiple of the {self.groups} groups of processes, but got {config.batch_size}"
            )
        self.context = make_context(config, self.groups, context_parallel) if context_parallel > 1 else None
        super().__init__(config, corpus)
        self.main = self.rank == 0

    def plain_model(self) -> GPT:
        if self.kind != "fsdp":
            return self.model
        model = GPT(model_config(self.config, self.corpus.vocab_size)).to(self.device)
        model.load_state_dict(_gathered(self.model.state_dict()))
        return model

    def save(self, path: Path) -> None:
        content = self._content()
        for name in ("model", "optimizer"):
            content[name] = _gathered(content[name])
        if self.main:
            atomic_save(content, path)
        dist.barrier()

    def _load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        # The optimizer numbers its parameters in the model's order.
        for index, state in optimizer["state"].items():
            like = list(parameters.values())[index]
            optimizer["state"][index] = {
                name: _like(value, like) if value.dim() else value for name, value in state.items()
            }
        super()._load({name: _like(value, parameters.get(name)) for name, value in model.items()}, optimizer)

    def _parallelize(self) -> None:
        module = LossModel(self.model, loss_function(self.config.loss), self.context)
        if self.kind != "fsdp":
            self._module: nn.Module = DistributedDataParallel(module)
            return
        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        self._module = fully_shard(module, mesh=mesh)

    def _make_loss(self) -> BatchLoss:
        return self._module

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = super()._next_batch()
        mine = self.rank * self.groups // self.world
        return inputs.chunk(self.groups)[mine], targets.chunk(self.groups)[mine]

    def _value(self, loss: Tensor) -> float:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world

    def _held_out_mean(self, compute: BatchLoss) -> Tensor:
        mean = super()._held_out_mean(compute)
        if self.context is None:  # every process computed the whole
            return mean
        shared = mean.to(self.device)
        dist.all_reduce(shared)
        return shared.cpu() / self.world

    def _stopping(self, stop: StopRequest) -> bool:
        """Whether any process was asked to: all must end after the same step."""
        asked = torch.tensor(float(stop.requested), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0


def make_context(config: TrainingConfig, groups: int, size: int) -> Any:
    """fusegrad's ContextParallel of this process's group of `size`."""
    if config.attention != "fusegrad":
        raise ExampleError("--context-parallel needs --attention fusegrad")
    if config.seq_length % (2 * size) != 0:
        raise ExampleError(
            f"--seq-length must be a multiple of two chunks for each of the {size} processes of a group, "
            f"but got {config.seq_length}"
        )
    fusegrad = import_fusegrad("--context-parallel", without="--context-parallel 1")
    mesh = init_device_mesh(torch.device(config.device).type, (groups, size), mesh_dim_names=("batch", "sequence"))
    # DDP and FSDP2 sum up the gradients of what a score_mod captures, as of all other parameters.
    return fusegrad.ContextParallel(mesh["sequence"], "zigzag", sum_captured=False)


def _gathered(state: Any) -> Any:
    """Sharded tensors as whole ones, in whatever holds them."""
    if isinstance(state, dict):
        return {name: _gathered(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_gathered(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def _like(value: Tensor, like: Tensor | None) -> Tensor:
    """A whole tensor, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
