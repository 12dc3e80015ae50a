"""Every family of models that transformers can make small, with fusegrad's loss and attention beside the plain model.

python tests/python/support/sweep_transformers.py [MODEL_TYPE ...] [--part I/N]: a line for each family, and what is
wrong of each check. Returns 1 where anything is. tests/python/integrations/test_transformers_families.py runs a part.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fusegrad
import huggingface_hub
import torch
import transformers as tf
from fusegrad.integrations.transformers import apply
from tiny_models import LENGTH, V, candidates, names_of, small_model
from torch import Tensor

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
LARGEST = 50_000_000  # parameters


def families() -> dict[str, str]:
    """Names of models' classes by model type; of several mappings that know a type the first."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        found = {**names_of(mapping), **found}
    return found


def make(kind: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A small model, always with the same weights, in training mode."""
    model = small_model(kind)
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST:
        raise ValueError(f"no small {kind.__name__}: {size} parameters")
    torch.manual_seed(0)
    model = kind._from_config(model.config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.2, generator=generator)
            else:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model.to(dtype).train()


def accepted(model: Any) -> dict[str, Tensor]:
    """The first of them that it computes by."""
    failure: Exception | None = None
    for inputs in candidates(model):
        try:
            forward(model, inputs)
        except Exception as e:
            failure = failure or e
        else:
            return inputs
    raise ValueError(f"no inputs: {_line(failure)}") from failure


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The second row padded on the right."""
    inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    inputs["attention_mask"][1, -4:] = 0
    if "labels" in inputs:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs


def step(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and all gradients."""
    model.zero_grad()
    torch.manual_seed(2)
    out = model(**inputs)
    loss = out.loss if "labels" in inputs else (states(out) * torch.randn_like(states(out))).mean()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def states(out: Any) -> Tensor:
    """The logits or what else the model makes first."""
    for name in ("logits", "last_hidden_state", "image_embeds", "prediction_outputs"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name)
    return next(t for t in out.to_tuple() if isinstance(t, Tensor) and t.is_floating_point())


@torch.no_grad()
def forward(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(2)
    given = {n: t for n, t in inputs.items() if n != "labels"}
    if model.config.is_encoder_decoder and given.keys() == {"input_ids"}:
        given["decoder_input_ids"] = given["input_ids"]
    return states(model.eval()(**given, **options))


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The logits of greedy tokens."""
    torch.manual_seed(2)
    out = model.eval().generate(
        inputs["input_ids"], attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=4, min_new_tokens=4,
        do_sample=False, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(out.logits)


def difference(found: Any, expected: Any) -> float:
    """The largest of the errors of all tensors, each beside its own size."""
    if isinstance(expected, Tensor):
        found, expected = {"": found}, {"": expected}
    if found.keys() != expected.keys():
        return float("inf")
    whole = max(float(t.double().norm() / t.numel() ** 0.5) for n, t in expected.items() if n != "loss")
    errors = []
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).norm() / max(tensor.numel(), 1) ** 0.5
        # A gradient that is rounding alone (keys' biases) counts beside the others.
        size = max(float(tensor.double().norm() / max(tensor.numel(), 1) ** 0.5), 1e-3 * whole)
        errors.append(0.0 if error == 0 else float(error) / size if size else float("inf"))
    return max((e if e == e else float("inf") for e in errors), default=0.0)


# Two sequences in a row.
POSITIONS = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(2, -1)

Check = Callable[[Any, dict[str, Tensor]], Any]
TOKENS: dict[str, Check] = {
    "attention": lambda model, inputs: step(model.train(), padded(inputs)),
    "no mask": forward,
    "packed": lambda model, inputs: forward(model, inputs, position_ids=POSITIONS, use_cache=False),
    "cache": generate,
    "static cache": functools.partial(generate, cache_implementation="static", disable_compile=True),
    "prefill in pieces": functools.partial(
        generate, cache_implementation="static", disable_compile=True, prefill_chunk_size=5
    ),
}
OTHERS: dict[str, Check] = {"attention": step}


def causality(model: Any, inputs: dict[str, Tensor]) -> float:
    """How much logits change by the last token alone, of the tokens before it."""
    other = inputs["input_ids"].clone()
    other[:, -1] = 3 + (other[:, -1] - 2) % (V - 13)
    before, after = (forward(model, {"input_ids": ids})[:, :-1] for ids in (inputs["input_ids"], other))
    return difference(after, before)


def fresh(model: Any) -> Any:
    """The model, or a copy whose running means a step may move."""
    return copy.deepcopy(model) if any("running" in n for n, _ in model.named_buffers()) else model


def is_causal(model: Any, inputs: dict[str, Tensor]) -> bool:
    try:
        return causality(model, inputs) < 1e-4
    except Exception:  # it wants other inputs
        return False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed; one thread, since on tiny tensors two wait for each other most of the time."""
    verbosity, threads = tf.logging.get_verbosity(), torch.get_num_threads()
    tf.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        tf.logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def counted() -> Iterator[list[None]]:
    """An item for each call of flex_attention."""
    calls: list[None] = []
    attend = fusegrad.flex_attention

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return attend(*args, **kwargs)

    fusegrad.flex_attention = counting
    try:
        yield calls
    finally:
        fusegrad.flex_attention = attend


def compared(name: str, tolerance: float = 1e-3) -> dict[str, str]:
    """What came of each check of the class of that name: "ok", why it was not made, the refusal, or "WRONG" with the
    figure. A check that the plain model fails is none.
    """
    with quiet():
        results = _compared(name, torch.float32, tolerance)
        if any(r.startswith("WRONG") for r in results.values()):  # or is it rounding, of which softmaxes make much?
            results = _compared(name, torch.float64, tolerance)
    return results


def _compared(name: str, dtype: torch.dtype, tolerance: float) -> dict[str, str]:
    results: dict[str, str] = {}
    try:
        plain = make(getattr(tf, name), dtype)
        inputs = accepted(plain)
    except Exception as e:
        return {"made": f"no: {_line(e)}"}
    checks = TOKENS if inputs.keys() <= {"input_ids", "labels"} else OTHERS
    causal = checks is TOKENS and not plain.config.is_encoder_decoder and is_causal(plain, inputs)
    if not (plain.can_generate() and (causal or plain.config.is_encoder_decoder)):
        checks = {n: c for n, c in checks.items() if not n.endswith(("cache", "pieces"))}
    if plain.config.is_encoder_decoder:  # its encoder would see pieces
        checks = {n: c for n, c in checks.items() if not n.endswith("pieces")}
    expected: dict[str, Any] = {}
    for check_name, check in checks.items():
        try:
            expected[check_name] = check(fresh(plain), inputs)
            if difference(check(fresh(plain), inputs), expected[check_name]) > tolerance / 10:
                raise ValueError("not the same twice")
        except Exception as e:
            expected.pop(check_name, None)
            results[check_name] = f"no: {_line(e)}"

    def judge(check_name: str, model: Any) -> str:
        check, truth = checks[check_name], expected[check_name]
        return _judged(lambda: difference(check(fresh(model), inputs), truth), tolerance)

    if "attention" in expected and "labels" in inputs:
        results["loss"] = judge("attention", apply(copy.deepcopy(plain)))
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("fusegrad")
    for part in (m for m in ours.modules() if isinstance(m, tf.PreTrainedModel)):
        part.config._attn_implementation = "fusegrad"  # T5's stacks have copies of the config, which 5.17 misses
    with counted() as calls:
        results |= {n: judge(n, ours) for n in expected}
        if causal:
            results["causality"] = _judged(lambda: causality(ours, inputs), tolerance)
    if not calls and expected:
        results = {n: r if n == "loss" or r != "ok" else "no: attention is not called" for n, r in results.items()}
    return results


def _judged(measured: Callable[[], float], tolerance: float) -> str:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="fusegrad:")  # the loss steps aside: the plain model's then
            found = measured()
    except UserWarning as e:
        return f"no: {_line(e)}"
    except Exception as e:
        own = str(e).startswith(("fusegrad attention:", "attn_implementation:"))
        return f"{'refused' if own else 'RAISES'}: {_line(e)}"
    return "ok" if found <= tolerance else f"WRONG: {found:.1e}"


def _line(e: Exception) -> str:
    return f"{type(e).__name__} {' '.join(str(e).split())[:160]}"


def main() -> int:
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # some configurations ask for a backbone's
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th family, from the I-th")
    arguments = parser.parse_args()
    found = families()
    first, count = map(int, arguments.part.split("/"))
    wrong, figures = 0, collections.Counter[str]()
    for model_type in arguments.model_types or list(found)[first::count]:
        results = compared(found[model_type])
        bad = any(r.startswith(("WRONG", "RAISES")) for r in results.values())
        wrong += bad
        fine = [n for n, r in results.items() if r == "ok"]
        rest = [f"{n}: {r}" for n, r in results.items() if r != "ok"]
        print("WRONG" if bad else "ok", model_type, ", ".join(fine), *rest, sep=" | ", flush=True)
        figures.update([*fine, *(["refused"] if results.get("attention", "").startswith("refused") else [])])
        figures["families"] += 1
        figures["not made"] += "made" in results
    print(dict(figures))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
