"""clang-tidy over the C++ files of QUICK, over all, or over those that are named.

    python tools/tidy.py build/torch-2.11.0 [--all | files]

The other rooms read torch's or XLA's headers, which takes ten times as long: `make lint` leaves them to `make tidy`,
which is not clean there yet. A file that is compiled several times (for an instruction set, into a test) is read once.
"""

import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICK = ("csrc/common/", "csrc/jit/")
# The compiler's omp.h is not clang's.
OPTIONS = ["--quiet", "--extra-arg=-fno-openmp"]


def main(build: pathlib.Path, named: list[str]) -> int:
    commands = {}
    for command in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(command["directory"], command["file"]).resolve()
        if path.suffix == ".cpp" and path.is_relative_to(ROOT / "csrc"):
            commands.setdefault(path.relative_to(ROOT).as_posix(), command)
    if named == ["--all"]:
        files = sorted(commands)
    else:
        files = named or sorted(name for name in commands if name.startswith(QUICK))
    # `make tidy` has a build folder of its own, without FUSEGRAD_UNITY.
    unknown = [name for name in files if name not in commands]
    if unknown:
        sys.exit(f"{build} does not compile {', '.join(unknown)}")
    database = build / "tidy"
    database.mkdir(exist_ok=True)
    (database / "compile_commands.json").write_text(json.dumps(list(commands.values())))
    tidy = pathlib.Path(sys.executable).with_name("clang-tidy")

    def check(name: str) -> bool:
        done = subprocess.run([tidy, "-p", database, *OPTIONS, name], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return 0 if all(list(threads.map(check, files))) else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]))
