"""A small GPT, and the losses that can train it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm import ExampleError, import_fusegrad
from lm.attention import CausalAttention

LOSSES = ("eager", "fusegrad", "fusegrad-inplace")
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model; `tied` lets the head use the token embedding's weight."""

    vocab_size: int
    seq_length: int
    layers: int
    hidden_size: int
    heads: int
    tied: bool
    dropout: float
    attention: str
    positions: str

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads != 0:
            raise ExampleError(
                f"--hidden-size must be a multiple of --heads, but got {self.hidden_size} and {self.heads}"
            )


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention = CausalAttention(config.attention, config.positions, config.heads, config.seq_length)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, context: Any = None) -> Tensor:
        hidden = hidden + self._dropped(self._attention(self.attention_norm(hidden), context))
        mlp = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + self._dropped(mlp)

    def _attention(self, hidden: Tensor, context: Any) -> Tensor:
        batch, length, width = hidden.shape
        packed = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attention(query, key, value, context)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _dropped(self, value: Tensor) -> Tensor:
        return F.dropout(value, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens [B, S] -> hidden states [B, S, H]; the head is `head_weight` [V, H], applied by the loss.

    The last operation is a LayerNorm, which saves its input but not its output: that is what allows an
    in-place loss to overwrite the hidden states.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "embedding":
            self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head: nn.Linear | None = None
        if not config.tied:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialize()

    @property
    def head_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, context: Any = None) -> Tensor:
        """`context`: fusegrad's ContextParallel, where the tokens are this process's part of the sequence."""
        hidden = self.token_embedding(tokens)
        if self.position_embedding is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            if context is not None:
                places = context.positions(context.whole(tokens.shape[1]), tokens.device)
            hidden = hidden + self.position_embedding(places)
        for block in self.blocks:
            hidden = block(hidden, context)
        return self.final_norm(hidden)

    def _initialize(self) -> None:
        residual_scale = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.endswith("attention.relative"):
                adds_to_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 * (residual_scale if adds_to_residual else 1.0))
        # Wider than the rest, so that the tokens stand out in the first hidden states: it learns much sooner.
        nn.init.normal_(self.token_embedding.weight, std=0.05)


def loss_function(name: str) -> LossFunction:
    """(hidden [B, S, H], weight [V, H], targets [B, S]) -> mean loss, for one of `LOSSES`."""
    if name == "eager":
        return eager_loss
    fusegrad = fusegrad_for_loss(name)
    inplace = name == "fusegrad-inplace"

    def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return fusegrad.linear_cross_entropy(hidden, weight, targets, inplace=inplace)

    return fused_loss


def fusegrad_for_loss(loss: str) -> Any:
    """`fusegrad`, for one of `LOSSES` that needs it."""
    if loss not in LOSSES:
        raise ExampleError(f"--loss must be one of {', '.join(LOSSES)}, but got {loss}")
    return import_fusegrad(f"--loss {loss}", without="--loss eager")


def eager_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same loss by PyTorch's own operations, which hold the logits [B * S, V] in memory."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: list[int], count: int, seed: int, top_k: int = 40) -> list[int]:
    """`count` tokens after `prompt`, drawn from the `top_k` likeliest; draws from no global random state."""
    generator = torch.Generator().manual_seed(seed)
    device = model.head_weight.device
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    for _ in range(count):
        context = torch.tensor([tokens[-model.config.seq_length :]], device=device)
        logits = F.linear(model(context)[0, -1], model.head_weight).float().cpu()
        values, candidates = logits.topk(min(top_k, logits.numel()))
        choice = torch.multinomial(values.softmax(0), 1, generator=generator)
        tokens.append(int(candidates[choice]))
    model.train(was_training)
    return tokens[len(prompt) :]
