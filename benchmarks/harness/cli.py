"""The command line that every benchmark script has."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch

from harness.benchmark import Benchmark, Options, Plan, release
from harness.environment import environment, in_file_names
from harness.goals import Verdict, judge
from harness.launch import run_launch
from harness.model import DTYPES, Case
from harness.report import as_json, print_case, print_verdicts, write_json
from harness.training import TrainingBenchmark

AnyBenchmark = Benchmark | TrainingBenchmark


def main(benchmark: AnyBenchmark) -> int:
    """Run what the command line asks for; 1 where --strict and a goal was missed or not measured."""
    arguments = _parser(benchmark).parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    options = _options(arguments)
    plans = _plans(benchmark, arguments)
    document: dict[str, Any] = {"op": benchmark.op, "work": benchmark.work}
    document |= environment(arguments.device, arguments.commit)
    document["rounds"], document["reps"] = options.rounds, options.reps
    print(f"{benchmark.op} on {document['device']}, torch {torch.__version__}, {document['date']}", flush=True)
    verdicts: list[Verdict] = []
    cases: list[dict[str, Any]] = []
    document["cases"] = cases
    for plan in plans:
        case_started = time.monotonic()
        result = benchmark.run(plan, options)
        found = [judge(goal, result) for goal in plan.goals]
        print_case(result)
        print_verdicts(found)
        print(f"  ({time.monotonic() - case_started:.0f} s)", flush=True)
        verdicts += found
        cases.append(as_json(result, found))
        release(arguments.device)
        _write(arguments, benchmark, document)
    launches_pass = True
    first = arguments.case in (None, 0)
    if arguments.launch and first and isinstance(benchmark, Benchmark):
        launch = run_launch(benchmark, arguments.device, options)
        document["launch"] = launch
        launches_pass = all(one["passed"] for one in launch["comparisons"])  # type: ignore[attr-defined]
        _write(arguments, benchmark, document)
    extra = {} if benchmark.extra is None or not first else benchmark.extra(arguments.device)
    if extra:
        document["extra"] = extra
        _write(arguments, benchmark, document)
    _finish(verdicts)
    print(f"{time.monotonic() - started:.0f} s in all")
    return int(arguments.strict and not (launches_pass and all(one.passed for one in verdicts)))


def _parser(benchmark: AnyBenchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Benchmark of {benchmark.op}: ours, its peers and the floor.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = "x".join(benchmark.letters)
    parser.add_argument("--shapes", help=f"comma-separated {sizes}[:dtype], in place of the default cases")
    parser.add_argument("--case", type=int, help="number of one default case; the first measures launch overhead too")
    parser.add_argument("--only", default="", help="regular expression on the implementations' names")
    parser.add_argument("--quick", action="store_true", help="essential implementations, cases and repetitions")
    parser.add_argument("--rounds", type=int, help="rounds in which the implementations alternate")
    parser.add_argument("--reps", type=int, help="repetitions of each in a round")
    parser.add_argument("--autotune", action="store_true", help="quack's autotuned products too: 100 s a shape")
    parser.add_argument("--no-accuracy", action="store_true", help="skip the comparison with float64")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak memory")
    parser.add_argument("--no-launch", dest="launch", action="store_false", help="skip the launch overhead")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    parser.add_argument("--commit", help="what to record, where this is not a git checkout")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every goal is reached")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    reps = {("cuda", False): 5, ("cuda", True): 3, ("cpu", False): 3, ("cpu", True): 2}
    return Options(
        rounds=arguments.rounds or (2 if arguments.quick else 3),
        reps=arguments.reps or reps[arguments.device, arguments.quick],
        only=arguments.only,
        quick=arguments.quick,
        autotune=arguments.autotune,
        accuracy=not arguments.no_accuracy,
        memory=not arguments.no_memory,
    )


def _plans(benchmark: AnyBenchmark, arguments: argparse.Namespace) -> list[Plan]:
    plans = benchmark.plans(arguments.device, arguments.quick)
    if arguments.case is not None:
        plans = benchmark.plans(arguments.device, False)  # numbers are those of all cases
        if arguments.shapes or not 0 <= arguments.case < len(plans):
            raise SystemExit(f"--case: a number below {len(plans)} expected, and no --shapes, but got {arguments.case}")
        return [plans[arguments.case]]
    if not arguments.shapes:
        return plans
    known = {plan.case: plan for plan in benchmark.plans(arguments.device, False)}
    cases = [_case(benchmark, text, arguments.device) for text in arguments.shapes.split(",")]
    return [known.get(case, Plan(case)) for case in cases]


def _case(benchmark: AnyBenchmark, text: str, device: str) -> Case:
    numbers, _, dtype = text.partition(":")
    sizes = [int(number) for number in re.findall(r"\d+", numbers)]
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    if len(sizes) != len(benchmark.letters) or dtype not in DTYPES:
        raise SystemExit(f"--shapes: {'x'.join(benchmark.letters)}[:dtype] expected, but got {text!r}")
    return Case(benchmark.op, tuple(zip(benchmark.letters, sizes, strict=True)), dtype, device)


def _write(arguments: argparse.Namespace, benchmark: AnyBenchmark, document: dict[str, Any]) -> None:
    """After every case, so that a run that is cut short leaves what it has."""
    if arguments.output is not None:
        write_json(arguments.output / f"{_stem(benchmark, document)}.json", document)


def _finish(verdicts: list[Verdict]) -> None:
    missed = [one for one in verdicts if one.passed is False]
    unknown = [one for one in verdicts if one.passed is None]
    print(f"\n{len(verdicts)} goals, {len(missed)} missed, {len(unknown)} not measured")
    print_verdicts(verdicts)


def _stem(benchmark: AnyBenchmark, document: dict[str, Any]) -> str:
    return f"{benchmark.op}-{in_file_names(document['device'])}"
