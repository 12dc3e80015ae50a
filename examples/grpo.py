"""A small transformer learns to add from rewards alone: GRPO through `fusegrad.linear_log_prob`.

Each prompt is a sum of two digits, "3+8="; the model samples two more digits, and a program says which of them are
right. No answer is ever shown. The digits of a group of samples of one prompt are compared with the group's mean (GRPO,
arXiv:2402.03300, section 4.1), and two updates by clipped ratios follow each round of samples. Beside it runs the same
with PyTorch's log_softmax over all logits, from the same seed.

    python examples/grpo.py                      # some minutes on two CPU cores, and a picture in demo/
    python examples/grpo.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fusegrad
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLUS, EQUALS, VOCAB = 10, 11, 12
PROMPT, ANSWER = 4, 2
Report = dict[str, Any]
LogProbs = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


class Model(nn.Module):
    """Embeddings, causal blocks and a head that is not applied: the loss takes hidden states."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.places = nn.Parameter(0.02 * torch.randn(PROMPT + ANSWER, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] tokens as hidden states [B, S, width]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.norm(self.blocks(self.embed(tokens) + self.places[:length], mask=mask, is_causal=True))


def sums(device: str) -> tuple[Tensor, Tensor]:
    """All hundred prompts [100, 4] and their answers [100, 2]."""
    a, b = torch.arange(100, device=device) // 10, torch.arange(100, device=device) % 10
    prompts = torch.stack([a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS)], 1)
    return prompts, torch.stack([(a + b) // 10, (a + b) % 10], 1)


def reward_of(samples: Tensor, answers: Tensor) -> Tensor:
    """[B, 2]: 1 for each right digit, else 0."""
    return (samples == answers).float()


@torch.no_grad()
def sample(model: Model, prompts: Tensor, temperature: float) -> Tensor:
    """Answers [B, 2], drawn from the model; the likeliest where the temperature is 0."""
    tokens = prompts
    for _ in range(ANSWER):
        logits = model.head(model(tokens)[:, -1])
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1)
        tokens = torch.cat([tokens, chosen], 1)
    return tokens[:, PROMPT:]


def fused(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    out = fusegrad.linear_log_prob(hidden, weight, target, logit_scale=1 / temperature)
    assert out.entropy is not None
    return out.log_prob, out.entropy


def plain(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = F.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


LOG_PROBS: dict[str, LogProbs] = {"fusegrad": fused, "PyTorch": plain}


def policy_loss(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor, clip: float, bonus: float) -> Tensor:
    """Clipped ratios of each token, and an entropy that keeps the samples of a group different."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -(torch.minimum(ratio * advantage, clipped * advantage) + bonus * entropy).mean()


def train(name: str, options: Any) -> Report:
    torch.manual_seed(options.seed)
    model = Model(options.width, options.layers, options.heads).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    prompts, answers = sums(options.device)
    log_probs = LOG_PROBS[name]
    report: Report = {"name": name, "reward": [], "entropy": [], "right": []}
    began = time.perf_counter()
    for done in range(options.rounds):
        bonus = options.entropy * min(1.0, 2 - 2 * done / options.rounds)
        chosen = torch.randint(0, len(prompts), (options.prompts,), device=options.device)
        chosen = chosen.repeat_interleave(options.group)
        samples = sample(model, prompts[chosen], options.temperature)
        reward = reward_of(samples, answers[chosen])
        groups = reward.view(-1, options.group, ANSWER)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, ANSWER)
        tokens = torch.cat([prompts[chosen], samples], 1)
        old = None
        for _ in range(options.updates):
            hidden = model(tokens[:, :-1])[:, PROMPT - 1 :]  # those that predict the samples
            log_prob, entropy = log_probs(hidden, model.head.weight, samples, options.temperature)
            old = log_prob.detach() if old is None else old
            loss = policy_loss(log_prob, entropy, old, advantage, options.clip, bonus)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        report["reward"].append(float(reward.mean()))
        report["entropy"].append(float(entropy.detach().mean()))
        best = sample(model, prompts, temperature=0)
        report["right"].append(float((best == answers).all(-1).float().mean()))
    report["seconds"] = time.perf_counter() - began
    return report


def check(reports: list[Report], least: float) -> int:
    """0 if each learned to get at least this share of the hundred sums right."""
    behind = [report["name"] for report in reports if report["right"][-1] < least]
    if behind:
        print(f"grpo: expected {least:.0%} of the sums right, which {', '.join(behind)} did not reach", file=sys.stderr)
    return len(behind) > 0


def draw(reports: list[Report], path: Path) -> None:
    """Reward of the samples, sums that the likeliest answer gets right, and entropy, by round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    titles = {"reward": "Reward of the samples", "right": "Sums right, likeliest answer", "entropy": "Entropy (nats)"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for report, style in zip(reports, ("-", "--"), strict=False):
            values = torch.tensor(report[key])
            window = min(10, len(values))
            smooth = values.unfold(0, window, 1).mean(1)
            axes.plot(range(window - 1, len(values)), smooth.tolist(), style, label=report["name"])
        axes.set(title=title, xlabel="round")
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
    parser.add_argument("--updates", type=int, default=2, help="of a round")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.4, help="its weight; falls to 0 in the second half")
    parser.add_argument("--least", type=float, default=0.85, help="share of sums that must be right in the end")
    parser.add_argument("--log-probs", choices=[*LOG_PROBS], help="one of the two alone")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(argv)
    reports = []
    for name in [options.log_probs] if options.log_probs else LOG_PROBS:
        report = train(name, options)
        reports.append(report)
        print(
            f"{name}: reward {report['reward'][0]:.2f} -> {report['reward'][-1]:.2f}, "
            f"{report['right'][-1]:.0%} of the sums right, {report['seconds']:.0f} s"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "grpo.json").write_text(json.dumps(reports))
    draw(reports, options.out / "grpo.png")
    return check(reports, options.least)


if __name__ == "__main__":
    sys.exit(main())
