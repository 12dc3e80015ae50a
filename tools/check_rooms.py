"""Checks that csrc's includes go down only, and that torch's are in its front end: `make lint` runs it.

docs/architecture.md draws the rooms. A file of one may include its own room and those below, among the front ends its
own alone.
"""

import pathlib
import re
import sys

CSRC = pathlib.Path(__file__).resolve().parent.parent / "csrc"
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


def main() -> int:
    failed = False
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
