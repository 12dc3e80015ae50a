"""Checks that csrc's includes and the package's imports go down only, and that torch's headers are in its front end:
`make lint` runs it.

docs/design/architecture.md draws the rooms. A file of one may include its own room and those below, among the front
ends its own alone. A Python module may import its own room and those below, and no two modules each other: imports
within functions count, those for type checkers do not.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "fusegrad"
# From below, by prefixes of modules' names, the longest of which counts; "" is the package itself, with all below it.
PYTHON_ROOMS = {
    "ground": ("_arguments", "_eager", "_environment", "_known", "_load", "_sharding", "_transforms", "utils"),
    "language": ("_mod_fold", "_program", "_tracing", "_score_mod_torch", "score_mod"),
    "functions": (
        *("_attention", "_bias", "_calls", "_chunks", "_flops", "_loss_chunks", "_options", "attention", "block_mask"),
        *("compile", "distillation", "folding", "functional", "modules", "nested", "pair_bias", "reference"),
    ),
    "processes": ("distributed",),
    "package": ("",),
    "users of it": ("__main__", "conformance", "doctor", "integrations"),
}
PYTHON_LEVEL = {prefix: level for level, prefixes in enumerate(PYTHON_ROOMS.values()) for prefix in prefixes}
# Without torch, and so without the others.
ALONE = ("jax", "_environment", "_mod_fold", "_program", "_tracing.names", "_tracing.bounds", "_tracing.ops")
# For the tracer: each may import those before it.
LAYERS = [
    f"_tracing{layer and '.'}{layer}"
    for layer in (
        *("", "names", "errors", "trees", "lifted", "thread_state"),
        *("bounds", "ops", "vectors", "steps", "tensor", "indexing", "functions", "trace"),  # one run of a function
        *("elements", "moves", "reads", "folds", "composed", "calls", "table", "dispatch", "run"),  # what ops become
        *("code", "trust", "guards", "copying", "captures", "replay", "cache", "compiled"),  # what is kept
    )
]
MADE = ("_C", "_build")  # by the build
# From below. The longest prefix of a file's path counts.
ROOMS = {
    "ground": ("common/", "cuda/"),
    "languages": ("score_mod/", "jit/"),
    "families": ("losses/", "attention/", "cuda/losses/", "cuda/attention/"),
    "front ends": ("pytorch/", "jax/"),
}
LEVEL = {prefix: level for level, prefixes in enumerate(ROOMS.values()) for prefix in prefixes}
TORCH = re.compile(r"(torch|ATen|c10)/")
# The one file below the front ends with headers of torch's: vectors that leave no symbol of its libraries.
VECTORS = "common/vec.h"
# The one file that may name torch's CUDA: a wheel's library has none of its symbols.
GPU = "pytorch/gpu.h"
# The headers of the C++ API that need no torch.
PLAIN_API = ("fusegrad/check_targets.h", "fusegrad/expression.h", "fusegrad/reductions.h")


def room(path: str) -> str:
    if path.startswith("fusegrad/"):
        return "common/" if path in PLAIN_API else "pytorch/"
    return max((prefix for prefix in LEVEL if path.startswith(prefix)), key=len)


def wrong(path: str, included: str) -> bool:
    here = room(path)
    if TORCH.match(included):
        return here != "pytorch/" and path != VECTORS
    if not included.startswith(("fusegrad/", *LEVEL)):
        return False
    there = room(included)
    return LEVEL[there] > LEVEL[here] or (LEVEL[there] == len(ROOMS) - 1 and there != here)


def python_room(module: str) -> str:
    """The room of a module, by its name below the package."""
    fits = [prefix for prefix in PYTHON_LEVEL if re.match(rf"{prefix}([._]|$)", module) or not prefix]
    return max(fits, key=len)


def imports(tree: ast.AST, package: list[str], modules: set[str]) -> Iterator[tuple[int, str]]:
    """The lines, and the modules below the package that they import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["fusegrad", *package][: len(package) + 2 - node.level] if node.level else []
            names = [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for name in names:
            first, _, below = name.partition(".")
            if first == "fusegrad" and below.split(".")[0] not in MADE:
                while below and below not in modules:
                    below = below.rpartition(".")[0]
                yield node.lineno, below
        yield from imports(node, package, modules)


def python_wrongs() -> Iterator[str]:
    files = {f.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): f for f in PACKAGE.rglob("*.py")}
    files = {re.sub(r"\.?__init__$", "", module): f for module, f in files.items()}
    for module in sorted({m for m in files if m.startswith("_tracing")} ^ set(LAYERS)):
        yield f"tools/check_rooms.py: LAYERS must have the modules of _tracing, but differ in {module}"
    graph: dict[str, set[str]] = {}
    for module, file in sorted(files.items()):
        inside = module.split(".") if module else []
        package = inside if file.name == "__init__.py" else inside[:-1]
        graph[module] = set()
        for line, imported in imports(ast.parse(file.read_text()), package, set(files)):
            graph[module].add(imported)
            if module.startswith(ALONE):
                wrong = not imported.startswith(ALONE)
            elif module in LAYERS and imported in LAYERS:
                wrong = LAYERS.index(imported) >= LAYERS.index(module)
            else:
                wrong = PYTHON_LEVEL[python_room(imported)] > PYTHON_LEVEL[python_room(module)]
            if wrong:
                path = file.relative_to(ROOT).as_posix()
                yield f"{path}:{line}: {module or 'fusegrad'} must not import {imported or 'fusegrad'}"
    for edges in (graph, {m: {n for n in graph if m in graph[n]} for m in graph}):
        while free := [m for m in graph if not edges[m] & graph.keys() - {m}]:
            for module in free:
                del graph[module]
    if graph:
        yield f"python/fusegrad: modules that import each other: {', '.join(sorted(graph))}"


def main() -> int:
    failed = False
    for line in python_wrongs():
        failed = True
        print(line)
    for file in sorted(CSRC.rglob("*")):
        path = file.relative_to(CSRC).as_posix().removeprefix("include/")
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh") or "/" not in path:
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if path != GPU and re.search(r"\b(at|c10)::cuda::", line):
                failed = True
                print(f"csrc/{file.relative_to(CSRC).as_posix()}:{number}: only {GPU} may name torch's CUDA")
            found = re.match(r'\s*#\s*include\s+[<"](.+)[>"]', line)
            if found and wrong(path, found[1]):
                failed = True
                print(f"csrc/{file.relative_to(CSRC).as_posix()}:{number}: {room(path)} must not include {found[1]}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
