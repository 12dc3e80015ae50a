"""The tables of docs/performance.md and docs/tables/performance.md, each of one run's results. See performance.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from charts import CLASSES, PEERS_OF_ATTENTION, case_of, is_run, measured, results, teraflops

Document = dict[str, Any]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def mib(one: dict[str, Any]) -> str:
    return f"{one['peak_mib']:,.0f}"


def bold(name: str) -> str:
    return f"**{name}**" if name.startswith("fusegrad") else name


def sizes_of(case: dict[str, Any]) -> str:
    return " ".join(f"{letter}{size}" for letter, size in case["sizes"].items())


def of_commit(case: dict[str, Any]) -> str:
    """Behind a case's name, where it is of an earlier commit than its run."""
    return f" (`{case['commit'][:7]}`)" if "commit" in case else ""


# --- sections ---------------------------------------------------------------------------------------------------


def summary(gpu: dict[str, Document]) -> str:
    """Each op beside its fastest peer and PyTorch."""

    def loss(label: str, op: str, ours: str, inplace: bool | None = None, **sizes: int) -> list[str]:
        """`inplace`: beside peers alone that write over the logits, or that do not."""
        case = case_of(gpu[op], **sizes)
        found = measured(case)
        # For the same loss: other weights of the teachers, and inputs that are log-probabilities, are less work.
        other = ("eager", "log_probs", "beta=")
        peers = {n: r for n, r in found.items() if not r["ours"] and not any(part in n for part in other)}
        if inplace is not None:  # the name does not say it of all: a copy of the logits does
            peers = {n: r for n, r in peers.items() if (r["peak_mib"] < 100) == inplace}
        fastest = min(peers, key=lambda name: peers[name]["ms"])
        cells = [f"{number(one['ms'])} ms, {mib(one)} MiB" for one in (found[ours], peers[fastest], found["eager"])]
        cells[1] += f" ({fastest.split()[0]})"
        return [label + of_commit(case), *cells, f"{found[ours]['floor_ratio']:.2f}"]

    def attention(work: str) -> list[str]:
        case = case_of(gpu["flex_attention"], D=128, S=4096)
        found = measured(case)
        ours, *peers = (found[f"{name} plain {work}"] for name in ("fusegrad", "fa4", "compile"))
        names = "FlashAttention 4", "compiled flex_attention"
        cells = [f"{number(one['ms'])} ms ({name})" for one, name in zip(peers, names, strict=True)]
        return [f"attention {work}{of_commit(case)}", f"{number(ours['ms'])} ms", *cells, f"{ours['floor_ratio']:.2f}"]

    rows = [
        loss("cross entropy", "cross_entropy", "fusegrad", False, N=8192, V=128256),
        loss("cross entropy, in place", "cross_entropy", "fusegrad inplace", True, N=8192, V=128256),
        loss("linear cross entropy", "linear_cross_entropy", "fusegrad", N=8192, H=4096, V=128256),
        loss("JSD", "jsd", "fusegrad", N=8192, V=128256),
        loss("linear JSD, lean", "linear_jsd", "fusegrad lean", N=8192, V=128256),
        attention("forward"),
        attention("backward"),
    ]
    return table(["", "fusegrad", "fastest peer", "PyTorch", "fusegrad / limit"], rows)


LOSSES = (
    "fusegrad inplace",
    "fusegrad",
    "fusegrad lean",
    "fusegrad beta=0",
    "fusegrad beta=1",
    "fusegrad topk",
    "quack",
    "quack inplace",
    "liger",
    "compile",
    "eager",
)


def cell(one: dict[str, Any] | None) -> str:
    return "–" if one is None else f"{number(one['ms'])} / {mib(one)} / {one['floor_ratio']:.2f}"


def losses(gpu: dict[str, Document]) -> str:
    found = [results(gpu[op], N=8192, V=128256) for op in ("cross_entropy", "jsd", "linear_jsd")]
    rows = [[bold(name), *(cell(one.get(name)) for one in found)] for name in LOSSES]
    sizes = "N 8192 V 128256"
    headings = [f"cross entropy {sizes}", f"JSD {sizes}", f"linear JSD {sizes}, H 2048, teacher's 4096"]
    return table(["ms / MiB / time over the limit", *headings], rows)


LINEAR = (
    "fusegrad",
    "fusegrad lean",
    "compile",
    "liger chunk_mem=16",
    "liger float32 chunk_mem=16",
    "liger sm90",
    "quack chunk=2048",
    "quack chunk=8192",
    "cce",
    "eager",
)


def linear_cross_entropy(document: Document) -> str:
    cases = [case for case in document["cases"] if case["sizes"]["N"] >= 4096]
    rows = []
    for name in LINEAR:
        cells = []
        for case in cases:
            found = [one for one in measured(case).values() if is_run(one["name"], name)]
            cells.append(cell(min(found, key=lambda one: one["ms"], default=None)))
        rows.append([bold(name), *cells])
    sizes = ["N {N} H {H} V {V}".format(**case["sizes"]) + of_commit(case) for case in cases]
    return table(["linear cross entropy", *sizes], rows)


def run(document: Document) -> str:
    """Device, date and commit of a run, as each table of the short page names them."""
    gpu = document["device"].removeprefix("NVIDIA ").split()[0]
    return f"{gpu}, {document['date'][:10]}, `{document['commit'][:7]}`"


def attention(document: Document, S: int | None = None) -> str:
    """Our time over each peer's, forward and backward, and TFLOP/s; of all lengths or one."""
    rows = []
    for case in document["cases"]:
        if S is not None and (case["sizes"]["S"] != S or case["sizes"]["B"] == 1):
            continue
        found = {one["name"]: one["ms"] for one in case["results"]}
        for kind in ("plain", "causal"):
            works = ("forward", "backward")
            ours = {work: found[f"fusegrad {kind} {work}"] for work in works}
            speeds = " / ".join(f"{teraflops(case['sizes'], work, kind, ours[work]):.0f}" for work in works)
            cells = []
            for peer in list(PEERS_OF_ATTENTION)[1:]:
                theirs = [found.get(f"{peer} {kind} {work}") for work in works]
                cells.append(" / ".join(f"{ours[w] / t:.2f}" for w, t in zip(works, theirs, strict=True) if t) or "–")
            sizes = "B{B} H{H} S{S} D{D}".format(**case["sizes"]) + of_commit(case)
            rows.append([sizes if kind == "plain" else "… causal", speeds, *cells])
    peers = list(PEERS_OF_ATTENTION.values())[1:]
    return table(["", "TFLOP/s", *(f"/ {peer}" for peer in peers)], rows)


def captured(document: Document) -> str:
    found = {name: one["ms"] for name, one in results(document, D=128, S=4096).items()}
    rows = []
    for name, label in CLASSES.items():
        frozen, default, exact = (
            found[f"fusegrad {name} {kind}backward"] for kind in ("frozen ", "", "deterministic ")
        )
        ratios = f"{default / frozen:.2f}", f"{exact / default:.2f}"
        rows.append([name[0], f"`{label}`", number(frozen), number(default), *ratios])
    plain, exact = found["fusegrad plain backward"], found["fusegrad plain deterministic backward"]
    rows.append(["–", "no captured tensor", "–", number(plain), "–", f"{exact / plain:.2f}"])
    return table(["class", "read", "frozen, ms", "with its gradient, ms", "ratio", "deterministic / default"], rows)


def score_mods(document: Document) -> str:
    found = {name: one["ms"] for name, one in results(document, D=128, S=4096).items()}
    names = {
        "alibi": "ALiBi, causal",
        "softcap": "softcap, causal",
        "relative": "relative bias, causal",
        "document": "documents, causal",
        "window": "window of 256 keys",
        "grouped": "4 query heads a key, causal",
    }
    peers = ("compile", "fa4", "cudnn")
    rows = []
    for name, label in names.items():
        cells = []
        for who in ("fusegrad", *peers):
            times = [found.get(f"{who} {name} {work}") for work in ("forward", "backward")]
            cells.append(" / ".join(number(ms) for ms in times if ms is not None) or "–")
        rows.append([label, *cells])
    return table(["ms, forward / backward", "**fusegrad**", *(PEERS_OF_ATTENTION[peer] for peer in peers)], rows)


def short(ms: float) -> str:
    return f"{ms:.3f}" if ms < 0.1 else number(ms)


def learned_biases(document: Document, leave_out: tuple[str, ...] = ()) -> str:
    """Attention that differs from an LLM's: time, how many times that without the bias, and the fastest peer.
    `leave_out`: beginnings of rows."""
    names = {"efficient": "SDPA's efficient", "cudnn": "cuDNN", "math": "plain PyTorch"}
    names |= {"flex": "compiled flex_attention", "fa4": "FlashAttention 4", "cuequivariance": "cuEquivariance"}
    rows = []
    for case in document["cases"]:
        if leave_out and case["row"].startswith(leave_out):
            continue
        ms, parts = case["ms"], ("forward", "backward")
        ours = "fusegrad" if "fusegrad forward" in ms else "plain"
        mine = [ms[f"{ours} {part}"] for part in parts if f"{ours} {part}" in ms]
        plain = [ms[f"plain {part}"] for part in parts[: len(mine)]]
        over = "–" if ours == "plain" else " / ".join(f"{a / b:.2f}" for a, b in zip(mine, plain, strict=True))
        peers = {name: [ms.get(f"{name} {part}") for part in parts[: len(mine)]] for name in names}
        whole = {name: times for name, times in peers.items() if None not in times}
        best = min(whole, key=lambda name: sum(whole[name]), default=None)
        found = "–" if best is None else f"{' / '.join(short(one) for one in whole[best])} ({names[best]})"
        rows.append([case["row"] + of_commit(case), " / ".join(short(one) for one in mine), over, found])
    return table(["ms, forward / backward", "**fusegrad**", "times that without the bias", "fastest peer"], rows)


def smaller_gpus(document: Document, only: tuple[str, ...] = ("",)) -> str:
    """Portable kernels beside FlashAttention-2, losses without clusters beside themselves with them. `only`: beginnings
    of rows."""
    rows = []
    for case in document["cases"]:
        if not case["row"].startswith(only):
            continue
        ms = case["ms"]
        parts = ("forward", "backward") if "flash forward" in ms else ("both",)
        ways = ("portable", "99 KiB", "flash") if len(parts) == 2 else ("no clusters", "99 KiB", "clusters")
        cells = [[ms.get(f"{way} {part}") for part in parts] for way in ways]
        texts = ["–" if None in cell else " / ".join(short(one) for one in cell) for cell in cells]
        rows.append([case["row"] + of_commit(case), *texts])
    return table(["ms", "**fusegrad**", "**with 99 KiB**", "FlashAttention-2; with clusters"], rows)


def jax_rows(document: Document) -> str:
    """Forward and backward in JAX beside the fastest peer, and XLA's temporaries."""
    rows = []
    for case in document["cases"]:
        both = {name.removesuffix(" both"): ms for name, ms in case["ms"].items() if name.endswith(" both")}
        peers = {name: ms for name, ms in both.items() if name not in ("fusegrad", "three products")}
        cell = lambda name, both=both, case=case: f"{short(both[name])} / {number(case['peak_mib'][name])}"  # noqa: E731
        best = min(peers, key=lambda name: peers[name], default=None)
        products = f"{short(both['three products'])} (three products)" if "three products" in both else "–"
        rows.append(
            [case["row"] + of_commit(case), cell("fusegrad"), f"{cell(best)} ({best})" if best else "–", products]
        )
    return table(["forward and backward, ms / MiB", "**fusegrad.jax**", "fastest peer", "limit"], rows)


def block_masks(document: Document) -> str:
    rows = []
    for case in document["cases"]:
        found = case["results"]
        cells = [
            f"{short(one['ms'])} / {number(one['peak_mib'])}" if one.get("ms") is not None else "–"
            for one in (found.get(name, {}) for name in ("fusegrad", "fusegrad varlen_mask", "torch compiled", "torch"))
        ]
        forward = case.get("forward_ms")
        rows.append([f"{case['sizes']['S']:,}", *cells, "–" if forward is None else short(forward)])
    heads = ["ms / MiB", "**create_block_mask**", "**varlen_mask**", "PyTorch, compiled", "PyTorch, eager"]
    return table([*heads, "the forward it is for, ms"], rows)


def steps(document: Document) -> str:
    titles = {
        "train_step": "training",
        "train_step with checkpoints": "… with checkpoints",
        "distillation step": "distillation",
        "relative bias step": "learned relative bias",
    }
    rows = []
    for case in document["cases"]:
        found = sorted(measured(case).values(), key=lambda one: -one["tokens_per_s"])
        ours = next(one for one in found if one["ours"])
        peers = [one for one in found if not one["ours"]][:3]
        cells = [
            f"{one['tokens_per_s']:,.0f} at {one['peak_mib'] / 1024:.1f} ({one['name']})" for one in (ours, *peers)
        ]
        sizes = "B{B} S{S}".format(**case["sizes"]) + of_commit(case)
        rows.append([f"{titles[case['op']]}, {sizes}", cells[0], ", ".join(cells[1:])])
    return table(["tokens/s at GiB", "**fusegrad**", "peers"], rows)


def models(document: Document) -> str:
    """Training steps of models with biases: time and memory of each attention."""
    names = ("eager", "sdpa", "fusegrad", "fusegrad table")
    rows = []
    for case in document["cases"]:
        found = measured(case)
        cells = [
            f"{number(found[name]['ms'])} / {found[name]['peak_mib'] / 1024:.1f}" if name in found else "–"
            for name in names
        ]
        title = case["op"].removesuffix(" step")
        rows.append([f"{title}, {sizes_of(case)}{of_commit(case)}", *cells])
    return table(["ms / GiB", *(bold(name) for name in names)], rows)


def tangents(document: Document) -> str:
    peers = {"math": "PyTorch, its formula", "jvp-flash-attention": "jvp-flash-attention"}
    rows = []
    for case in document["cases"]:
        if "forward" not in case["ms"]:
            continue
        ms = case["ms"]
        cells = [short(ms["forward"]), short(ms["fusegrad"]), f"{ms['fusegrad'] / ms['forward']:.2f}"]
        rows.append([case["row"], *cells, *(short(ms[peer]) if peer in ms else "–" for peer in peers)])
    return table(["ms", "forward", "**with its tangents**", "times the forward", *peers.values()], rows)


def log_probs(document: Document, V: int | None = None, leave_out: tuple[str, ...] = ()) -> str:
    rows = []
    for case in document["cases"]:
        if V is not None and case["sizes"]["V"] != V:
            continue
        sizes = sizes_of(case) + of_commit(case)
        rows += [
            [sizes, bold(one["name"]), number(one["ms"]), f"{one['floor_ratio']:.2f}", mib(one)]
            for one in measured(case).values()
            if one["name"] not in leave_out
        ]
    return table(["", "", "ms", "times the products", "MiB"], rows)


def absent(document: Document) -> str:
    """The peers that a run did not have, or that failed in it."""
    names: dict[str, None] = {}
    for case in document["cases"]:
        names |= dict.fromkeys(case.get("not_run", {}))
        names |= dict.fromkeys(one["name"] for one in case["results"] if one.get("ms") is None)
    return f"Not in this run: {', '.join(names)}." if names else "All peers ran."


def cpu(ones: dict[str, Document]) -> str:
    rows = []
    for case in ones["flex_attention"]["cases"][:1]:
        found = {one["name"]: one["ms"] for one in case["results"]}
        sizes = "attention B{B} H{H} S{S} D{D} causal".format(**case["sizes"])
        rows.append(
            [
                f"{sizes}, forward",
                number(found["fusegrad forward"]),
                number(found["compile forward"]),
                number(found["sdpa forward"]),
            ]
        )
        rows.append([f"{sizes}, forward and backward", number(found["fusegrad"]), "–", number(found["sdpa"])])
    for op in ("cross_entropy", "linear_cross_entropy"):
        for case in ones[op]["cases"]:
            found = {one["name"]: one["ms"] for one in case["results"]}
            sizes = sizes_of(case)
            name = f"{op.replace('_', ' ')} {sizes} {case['dtype']}"
            rows.append([name, *(number(found[who]) for who in ("fusegrad", "compile", "eager"))])
    return table(["ms", "**fusegrad**", "compiled", "eager or SDPA"], rows)


def goals(gpu: dict[str, Document]) -> str:
    """How many goals each run met, and the missed ones with what is too much."""
    rows = []
    graded = ("cross_entropy", "linear_cross_entropy", "jsd", "linear_jsd", "token_log_prob", "flex_attention")
    for op in (*graded, "train_step", "biased_models"):
        verdicts = [goal for case in gpu[op]["cases"] for goal in case["goals"] if goal["passed"] is not None]
        missed = sorted((g for g in verdicts if not g["passed"]), key=lambda goal: -goal["worst_excess"])
        text = "; ".join(f"{goal['goal']} (by {100 * goal['worst_excess']:.1f}%)" for goal in missed)
        rows.append([op, f"{len(verdicts) - len(missed)} of {len(verdicts)}", text or "none"])
    for op in ("learned_biases", "block_mask", "transforms"):
        passed = [goal["passed"] for case in gpu[op]["cases"] for goal in case["goals"]]
        rows.append([op, f"{sum(passed)} of {len(passed)}", "none" if all(passed) else "the file has them"])
    return table(["run", "goals met", "missed"], rows)


def on_the_host(document: Document) -> str:
    """What known calls take the host, beside PyTorch's in the same process."""
    rows = []
    for case in document["cases"]:
        name, _, peer = case["name"].rpartition(", ")
        us = case["us"]
        rows.append((name, number(us["fusegrad"]), f"{peer} {number(us['peer'])}", f"{case['ratio']:.2f}"))
    return table(["call", "**µs**", "beside", "ratio"], rows)


def runs(gpu: dict[str, Document], host: dict[str, Document]) -> str:
    on_gpu = ((f"{op}, {d['device'].split()[1]}", d) for op, d in gpu.items() if "op" in d)
    named = sorted([*on_gpu, *((f"{op}, CPU", d) for op, d in host.items() if "op" in d)], key=lambda one: one[0])
    return "; ".join(f"{name}: {d['date'][:10]} `{d['commit'][:7]}`" for name, d in named) + "."
