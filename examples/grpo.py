"""A small transformer learns to add from rewards alone: GRPO whose rollout and training have the same bits.

Each prompt is a sum of two digits, "3+8="; the model samples two more digits, and a program says which of them are
right. No answer is ever shown. The digits of a group of samples of one prompt are compared with the group's mean (GRPO,
arXiv:2402.03300, section 4.1), and two updates by clipped ratios follow each round of samples.

The rollout samples token by token with a cache of keys and values, some prompts at a time; training scores all samples
in one call. A ratio of the first update compares the two, and is 1 if both compute the same log-probability. With
`fusegrad.flex_attention(batch_invariant=True)` and `fusegrad.linear_log_prob(batch_invariant=True)` it is, to the bit:
these two promise it. The model's other parts are PyTorch's, which promises nothing; they are chosen so that a row's
result does not depend on its neighbours (`row_products`), and the program checks that all ratios are 1. Beside it runs
the same with PyTorch's linear layers, scaled_dot_product_attention and log_softmax, from the same seed, whose ratios
are not.

    python examples/grpo.py                      # some minutes on two CPU cores, and a picture in demo/
    python examples/grpo.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLUS, EQUALS, VOCAB = 10, 11, 12
PROMPT, ANSWER = 4, 2
BLOCK = 64  # rows of a product
Report = dict[str, Any]
Cache = list[tuple[Tensor, Tensor]]


def row_products(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T by products of one shape, BLOCK rows each, whatever rows there are: libraries pick the order of a
    sum by the shape."""
    flat = rows.reshape(-1, rows.shape[-1])
    padded = F.pad(flat, (0, 0, 0, -len(flat) % BLOCK))
    products = torch.cat([F.linear(block, weight) for block in padded.split(BLOCK)])
    return products[: len(flat)].view(*rows.shape[:-1], -1)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    """Causal, of queries from place `first` on, [B, heads, S, size]."""
    place = torch.tensor(first, device=query.device)
    return fusegrad.flex_attention(
        query, key, value, lambda s, b, h, q, kv: torch.where(q + place >= kv, s, -torch.inf), batch_invariant=True
    )


def plain_attention(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    places = torch.arange(first, first + queries, device=query.device)[:, None]
    mask = places >= torch.arange(keys, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def fused_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    out = fusegrad.linear_log_prob(hidden, weight, target, logit_scale=1 / temperature, batch_invariant=True)
    assert out.entropy is not None
    return out.log_prob, out.entropy


def plain_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True)
class Ops:
    """What a model computes with."""

    linear: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    log_probs: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


OPS = {
    "fusegrad": Ops(row_products, fused_attention, fused_log_probs),
    "PyTorch": Ops(F.linear, plain_attention, plain_log_probs),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x: Tensor, ops: Ops, cached: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The result, and the keys and values with those that came before."""
        inner = ops.linear(self.norms[0](x), self.inner.weight)
        query, key, value = inner.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        first = 0
        if cached is not None:
            first = cached[0].shape[2]
            key, value = (torch.cat(both, 2) for both in zip(cached, (key, value), strict=True))
        out = ops.attention(query, key, value, first).transpose(1, 2).flatten(2)
        x = x + ops.linear(out, self.outer.weight)
        # A ReLU is exact; vectorised functions may round the last few elements of a tensor in another way.
        return x + ops.linear(ops.linear(self.norms[1](x), self.up.weight).relu(), self.down.weight), (key, value)


class Model(nn.Module):
    """Embeddings, causal blocks and a head that is not applied: the loss takes hidden states."""

    def __init__(self, width: int, layers: int, heads: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.embed = nn.Embedding(VOCAB, width)
        self.places = nn.Parameter(0.02 * torch.randn(PROMPT + ANSWER, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, S] tokens as hidden states [B, S, width]. `cache`: of the tokens before, to which theirs are added."""
        first = cache[0][0].shape[2] if cache else 0
        x = self.embed(tokens) + self.places[first : first + tokens.shape[1]]
        kept = []
        for i, block in enumerate(self.blocks):
            x, keys_and_values = block(x, self.ops, cache[i] if cache else None)
            kept.append(keys_and_values)
        if cache is not None:
            cache[:] = kept
        return self.norm(x)


def sums(device: str) -> tuple[Tensor, Tensor]:
    """All hundred prompts [100, 4] and their answers [100, 2]."""
    a, b = torch.arange(100, device=device) // 10, torch.arange(100, device=device) % 10
    prompts = torch.stack([a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS)], 1)
    return prompts, torch.stack([(a + b) // 10, (a + b) % 10], 1)


def reward_of(samples: Tensor, answers: Tensor) -> Tensor:
    """[B, 2]: 1 for each right digit, else 0."""
    return (samples == answers).float()


@torch.no_grad()
def sample(model: Model, prompts: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Answers [B, 2], drawn from the model, and their log-probabilities; the likeliest where the temperature is 0."""
    cache: Cache = []
    tokens, chosen, log_probs = prompts, [], []
    every = torch.arange(VOCAB, device=prompts.device).expand(len(prompts), VOCAB)
    for _ in range(ANSWER):
        hidden = model(tokens, cache)[:, -1:].expand(-1, VOCAB, -1)
        # The distribution is what the op says of every token.
        log_p, _ = model.ops.log_probs(hidden, model.head.weight, every, temperature or 1.0)
        tokens = torch.multinomial(log_p.exp(), 1) if temperature > 0 else log_p.argmax(-1, keepdim=True)
        chosen.append(tokens)
        log_probs.append(log_p.gather(1, tokens))
    return torch.cat(chosen, 1), torch.cat(log_probs, 1)


def policy_loss(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, clip: float, bonus: float) -> Tensor:
    """Clipped ratios of each token, and an entropy that keeps the samples of a group different."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -(torch.minimum(ratio * advantage, clipped * advantage) + bonus * entropy).mean()


def train(name: str, options: Any) -> Report:
    torch.manual_seed(options.seed)
    model = Model(options.width, options.layers, options.heads, OPS[name]).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    prompts, answers = sums(options.device)
    report: Report = {"name": name, "reward": [], "entropy": [], "right": [], "off": []}
    began = time.perf_counter()
    for done in range(options.rounds):
        bonus = options.entropy * min(1.0, 2 - 2 * done / options.rounds)
        chosen = torch.randint(0, len(prompts), (options.prompts,), device=options.device)
        chosen = chosen.repeat_interleave(options.group)
        rollouts = [sample(model, some, options.temperature) for some in prompts[chosen].split(options.together)]
        samples, old = (torch.cat(parts) for parts in zip(*rollouts, strict=True))
        reward = reward_of(samples, answers[chosen])
        groups = reward.view(-1, options.group, ANSWER)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, ANSWER)
        tokens = torch.cat([prompts[chosen], samples], 1)
        for update in range(options.updates):
            hidden = model(tokens[:, :-1])[:, PROMPT - 1 :]  # those that predict the samples
            log_prob, entropy = model.ops.log_probs(hidden, model.head.weight, samples, options.temperature)
            if update == 0:
                report["off"].append(float(((log_prob.detach() - old).exp() - 1).abs().max()))
            loss = policy_loss(log_prob, entropy, old, advantage, options.clip, bonus)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        report["reward"].append(float(reward.mean()))
        report["entropy"].append(float(entropy.detach().mean()))
        best, _ = sample(model, prompts, temperature=0)
        report["right"].append(float((best == answers).all(-1).float().mean()))
    report["seconds"] = time.perf_counter() - began
    return report


def check(reports: list[Report], least: float) -> int:
    """0 if each learned to get at least this share of the hundred sums right, and fusegrad's first ratios are all 1."""
    behind = [report["name"] for report in reports if report["right"][-1] < least]
    if behind:
        print(f"grpo: expected {least:.0%} of the sums right, which {', '.join(behind)} did not reach", file=sys.stderr)
    off = max([most for report in reports if report["name"] == "fusegrad" for most in report["off"]], default=0.0)
    if off > 0:
        print(
            f"grpo: expected ratios of exactly 1 before the first update, but one is off by {off:.1e}", file=sys.stderr
        )
    return len(behind) > 0 or off > 0


def draw(reports: list[Report], path: Path) -> None:
    """Reward of the samples, sums that the likeliest answer gets right, entropy, and how far ratios are from 1 before
    the first update, by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    titles = {"reward": "Reward of the samples", "right": "Sums right, likeliest answer", "entropy": "Entropy (nats)"}
    for axes, (key, title) in zip(panels[:3], titles.items(), strict=True):
        for report, style in zip(reports, ("-", "--"), strict=False):
            values = torch.tensor(report[key])
            window = min(10, len(values))
            smooth = values.unfold(0, window, 1).mean(1)
            axes.plot(range(window - 1, len(values)), smooth.tolist(), style, label=report["name"])
        axes.set(title=title, xlabel="round")
    for report, style in zip(reports, ("-", "--"), strict=False):
        panels[3].plot(report["off"], style, label=report["name"])
    panels[3].set(title="Largest |ratio - 1|, first update", xlabel="round")
    panels[3].set_yscale("symlog", linthresh=1e-8)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=800, help="samples are drawn so many times")
    parser.add_argument("--prompts", type=int, default=32, help="of a round")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--together", type=int, default=48, help="samples that are drawn at a time")
    parser.add_argument("--updates", type=int, default=2, help="of a round")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.4, help="its weight; falls to 0 in the second half")
    parser.add_argument("--least", type=float, default=0.85, help="share of sums that must be right in the end")
    parser.add_argument("--ops", choices=[*OPS], help="one of the two alone")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(argv)
    reports = []
    for name in [options.ops] if options.ops else OPS:
        report = train(name, options)
        reports.append(report)
        print(
            f"{name}: reward {report['reward'][0]:.2f} -> {report['reward'][-1]:.2f}, "
            f"{report['right'][-1]:.0%} of the sums right, ratios off by {max(report['off']):.1e}, "
            f"{report['seconds']:.0f} s"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "grpo.json").write_text(json.dumps(reports))
    draw(reports, options.out / "grpo.png")
    return check(reports, options.least)


if __name__ == "__main__":
    sys.exit(main())
