"""Write docs/performance.md, docs/tables/performance.md, the charts in docs/charts and the table in README.md from
benchmarks/results/*.json.

    python tools/performance.py [--check]

--check writes nothing, and fails where a file is not what this program writes. It needs no matplotlib: a chart says in
its metadata what it was drawn from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import performance_tables as tables
from charts import THEMES, charts, draw, is_stale

ROOT = Path(__file__).parents[1]
START, END = "<!-- written by tools/performance.py -->", "<!-- end -->"
Document = dict[str, Any]
# Rows of the full page that the short one goes without.
LEFT_OUT = (
    "heads",
    "few",
    "ahead",
    "triangle (253",
    "triangle, heads last",
    "af3 tokens, heads last",
    "swin 8x8",
    "t5 (32",
    "two triangles",
)
SMALLER = (  # rows of the short page
    "attention (4, 16, 4096, 128) causal",
    "attention (4, 16, 4096, 64) causal",
    "attention (8, ",
    "jsd (4096, 1",
)
LEFT_OUT_LOG_PROBS = (
    *("eager", "trl chunked", "verl chunked", "fusegrad temperature a row", "fusegrad batch invariant"),
    *("fusegrad of TRL's trainers", "fusegrad support 64", "fusegrad support 1024"),
)


def documents(device: str) -> dict[str, Document]:
    found = (ROOT / "benchmarks/results").glob(f"*-{device}.json")
    return {path.name.removesuffix(f"-{device}.json"): json.loads(path.read_text()) for path in found}


def picture(name: str, text: str) -> str:
    """A chart for readers with a light and with a dark screen."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="charts/{name}-dark.svg">'
    return f'<picture>{dark}\n<img alt="{text}" src="charts/{name}-light.svg"></picture>'


SHORT: Callable[..., str] = """# Performance
<!-- tools/performance.py writes this page from benchmarks/results/*.json; `make lint` fails where it differs. -->

What each op costs beside the fastest peers, rows where peers are ahead included. Times are the GPU's, in ms, forward
and backward; MiB are the peak above the inputs, gradients included. bfloat16, {versions}.

Clock speed varies between runs: only compare numbers of one table, and of one commit where a case names its own. Peers
run interleaved with ours in one process. A difference of 2% is noise. Short calls are limited by the host, which has
[a table of its own](#the-host).
[All rows](tables/performance.md), [how they are measured](../benchmarks/results/README.md), `make bench`.

{losses_picture}
{attention_picture}

## Summary

8192 tokens, 128256 classes; attention with B 4, H 16, S 4096, D 128, no mask. The limit is a copy of the logits, or the
matrix products alone.

{summary}

## Losses

`inplace` writes the gradient into the input, `lean` accumulates the weight's gradient in bfloat16, `topk` has a teacher
of 64 log-probabilities. CCE skips gradients below a threshold, on random weights nearly all of them. Cells are
ms / MiB / time over the limit ({run_ce}; JSD {run_jsd}; linear JSD {run_ljsd}).

{losses}

{run_lce}:

{linear_cross_entropy}

Log-probabilities and entropies, both with gradients ({run_logp}):

{log_probs}

## Attention

TFLOP/s forward / backward, and our time over each peer's: below 1 fusegrad is faster ({run_flex}).

{attention}

## Learned biases

Forward / backward with the bias and its gradient; sizes are (batch, heads, tokens, head size) ({run_biases}).

{learned_biases}

## GPUs before Hopper and consumer GPUs, measured on an H200

{run_smaller}; [more](tables/performance.md#gpus-before-hopper-and-consumer-gpus-measured-on-an-h200).

{smaller_gpus}

## Training steps

A Llama-3.2-1B-shaped model with random weights and AdamW, beside the three fastest peers ({run_steps}).

{steps}

## The host

Wall-clock time of known calls on small inputs until the call is enqueued, ours and PyTorch's in turns ({run_host}).

{on_the_host}

## CPU: two cores of an AMD EPYC, float32 where nothing else is said

{cpu}
""".format

FULL: Callable[..., str] = """# All benchmarks
<!-- tools/performance.py writes this page from benchmarks/results/*.json; `make lint` fails where it differs. -->

One NVIDIA H200 where nothing else is said, bfloat16, {versions}. MiB are the peak above the
inputs, gradients included. A GPU's rate varies with its power and with what ran before: compare numbers of one run; a
difference of 2% is noise. [How the numbers are taken](../../benchmarks/results/README.md); `make bench` repeats them.

Times are the GPU's, without what the host takes to launch the work ([the host](#the-host)), which shows where kernels
are shorter than that.

What was tried on the way is in the [lab log](../lab/README.md), how the kernels work in [design](../design/README.md).

## Summary

8192 tokens, 128256 classes; attention with B 4, H 16, S 4096, D 128, no mask. The limit is a copy of the logits (1.5
copies where the gradient is a new tensor), or the op's matrix products alone.

{summary}

## Losses

`inplace` writes the gradient into the input, `lean` accumulates the weight's gradient in bfloat16, `topk` has a
teacher of the 64 largest log-probabilities; divergences have β 0.5 where nothing is said and start from logits.

{losses}

{linear_cross_entropy}

Log-probabilities of tokens and their entropies, both with gradients; "grpo" is the whole loss
([guide](../losses.md)). {absent_log_probs}

{log_probs}

## Attention

The first column is our speed, forward / backward; the others are our time over each peer's: below 1 fusegrad is faster.

{attention}

Score_mods and masks, B 4, H 16, S 4096, D 128:

{score_mods}

## Learned biases, head sizes, few queries

{biases_gpu}. Bias tables with gradients, sizes as (batch, heads, tokens, head size);
[which is which](../design/learned_biases.md).

{learned_biases}

Training steps of whole models, the last hidden state's loss, AdamW: with eager attention, with
scaled_dot_product_attention and the bias in memory, with ours by one line, and with ours reading the table
([how](../design/learned_biases.md#whole-models)). S is tokens, residues or the side of an image.

{models}

## GPUs before Hopper and consumer GPUs, measured on an H200

Forward / backward of the kernels that sm_80 to sm_89 and sm_120 run; losses as sm_80 to sm_89, which have no clusters,
run them. 99 KiB: as many CTAs a multiprocessor as where shared memory is so small; FlashAttention-2 has all of the
H200's ({run_smaller}).

{smaller_gpus}

## JAX

XLA's temporaries above arguments and results ({run_jax}).

{jax}

## Forward mode

Attention with the tangents of query, key and value, sizes as above; [the kernels](../design/transforms.md).

{tangents}

## Block masks

16 causal documents, others at each call; [how](../design/block_masks.md).

{block_masks}

## Gradients of captured tensors

The backward of the same size; the letters are the classes of [the design page](../design/flex_attention.md#cuda).

{captured}

The first forward and backward with a new score_mod took {first}, from the disk {disk}.

## Training steps

A Llama-3.2-1B-shaped model with random weights and AdamW; the relative bias has 8 layers at S 8192. Peers are the three
fastest. A vocabulary over several GPUs: [Distributed](../distributed.md).

{steps}

## The host

Wall-clock time of known calls on small inputs, ours and PyTorch's in turns in one process; on the GPU until the call is
enqueued. `python benchmarks/host_time.py` repeats it. Calls whose arguments have plain types go straight to the
dispatcher ([how](../design/architecture.md#a-known-call)); `return_aux`, tensors of subclasses and modes (counters of
flops) take the way through Python, some 5 to 15 µs more.

{on_the_host}

## CPU

Two cores of an AMD EPYC with AVX2, float32 where nothing else is said.

{cpu}

## Goals

{goals}

Runs: {runs}
""".format


def page(template: Callable[..., str], gpu: dict[str, Document], host: dict[str, Document], **more: str) -> str:
    found = gpu["cross_entropy"]["versions"]
    names = {"torch": "torch", "liger-kernel": "Liger", "quack-kernels": "quack", "cut-cross-entropy": "CCE"}
    took = [f"{tables.number(one['value'])} {one['unit']}" for one in gpu["flex_attention"]["extra"].values()]
    values = {
        "versions": ", ".join(f"{name} {found[key]}" for key, name in names.items()),
        "summary": tables.summary(gpu),
        "on_the_host": tables.on_the_host(gpu["host_time"]),
        "losses": tables.losses(gpu),
        "linear_cross_entropy": tables.linear_cross_entropy(gpu["linear_cross_entropy"]),
        "attention": tables.attention(gpu["flex_attention"]),
        "score_mods": tables.score_mods(gpu["flex_attention"]),
        "log_probs": tables.log_probs(gpu["token_log_prob"]),
        "absent_log_probs": tables.absent(gpu["token_log_prob"]),
        "learned_biases": tables.learned_biases(gpu["learned_biases"]),
        "biases_gpu": tables.run(gpu["learned_biases"]),
        "models": tables.models(gpu["biased_models"]),
        "tangents": tables.tangents(gpu["transforms"]),
        "block_masks": tables.block_masks(gpu["block_mask"]),
        "smaller_gpus": tables.smaller_gpus(gpu["smaller_gpus"]),
        "run_smaller": tables.run(gpu["smaller_gpus"]),
        "run_jax": tables.run(gpu["jax_attention"]),
        "jax": tables.jax_rows(gpu["jax_attention"]),
        "captured": tables.captured(gpu["flex_attention"]),
        "first": took[0],
        "disk": took[1],
        "steps": tables.steps(gpu["train_step"]),
        "cpu": tables.cpu(host),
        "goals": tables.goals(gpu),
        "runs": tables.runs(gpu, host),
    }
    return template(**values | more)


def short_page(gpu: dict[str, Document], host: dict[str, Document]) -> str:
    runs = {
        "ce": "cross_entropy",
        "lce": "linear_cross_entropy",
        "jsd": "jsd",
        "ljsd": "linear_jsd",
        "logp": "token_log_prob",
        "flex": "flex_attention",
        "biases": "learned_biases",
        "steps": "train_step",
        "host": "host_time",
        "smaller": "smaller_gpus",
    }
    return page(
        SHORT,
        gpu,
        host,
        attention=tables.attention(gpu["flex_attention"], S=4096),
        log_probs=tables.log_probs(gpu["token_log_prob"], V=128256, leave_out=LEFT_OUT_LOG_PROBS),
        learned_biases=tables.learned_biases(gpu["learned_biases"], leave_out=LEFT_OUT),
        smaller_gpus=tables.smaller_gpus(gpu["smaller_gpus"], only=SMALLER),
        losses_picture=picture(
            "losses", "Time and memory of the losses beside Liger, quack, torch.compile and PyTorch"
        ),
        attention_picture=picture("attention", "TFLOP/s of causal attention beside FlashAttention 4, cuDNN and others"),
        **{f"run_{name}": tables.run(gpu[op]) for name, op in runs.items()},
    )


def readme_table(gpu: dict[str, Document]) -> str:
    ops = ("cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd", "flex_attention")
    names = ", ".join(f"{op} {tables.run(gpu[op]).partition(', ')[2]}" for op in ops)
    return f"{tables.summary(gpu)}\n\nRuns: {names}."


def main() -> int:
    gpu, host = documents("nvidia-h200"), documents("amd-epyc")
    shown = charts(gpu)
    for op, document in documents("nvidia-h100-80gb-hbm3").items():
        if "date" in document and ("date" not in gpu.get(op, {}) or document["date"] > gpu[op]["date"]):
            gpu[op] = document
    readme = (ROOT / "README.md").read_text()
    before, rest = readme.split(START + "\n", 1)
    after = rest.split(END, 1)[1]
    written = {
        "docs/performance.md": short_page(gpu, host),
        "docs/tables/performance.md": page(FULL, gpu, host),
        "README.md": f"{before}{START}\n{readme_table(gpu)}\n{END}{after}",
    }
    stale = [name for name, text in written.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    undrawn = [(name, theme) for name in shown for theme in THEMES if is_stale(chart_path(name, theme), shown[name])]
    if "--check" in sys.argv[1:]:
        for name in [*stale, *(str(chart_path(*one).relative_to(ROOT)) for one in undrawn)]:
            print(f"{name} is not what tools/performance.py writes from benchmarks/results", file=sys.stderr)
        return bool(stale or undrawn)
    for name in stale:
        (ROOT / name).write_text(written[name])
    for name, theme in undrawn:
        draw(name, shown[name], theme, chart_path(name, theme))
    return 0


def chart_path(name: str, theme: str) -> Path:
    return ROOT / f"docs/charts/{name}-{theme}.svg"


if __name__ == "__main__":
    sys.exit(main())
