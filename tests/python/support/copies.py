"""Programs in processes of their own, which begin with torch and fusegrad imported: copies of one that does nothing
else. Importing takes longer than most programs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path


class Copies:
    """Starts the process that is copied; a context manager that ends it."""

    def __init__(self) -> None:
        self._original = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._original:
            assert self._original.stdin is not None
            self._original.stdin.close()

    def run(self, program: Path) -> tuple[int, str, str]:
        """Runs a file in its folder, with an alarm after five minutes: how it ended, and what it printed."""
        assert self._original.stdin is not None and self._original.stdout is not None
        print(json.dumps(str(program)), file=self._original.stdin, flush=True)
        status = int(self._original.stdout.readline())
        return status, *((program.parent / name).read_text() for name in ("stdout", "stderr"))


def _run(path: Path) -> int:
    import signal

    signal.alarm(300)
    os.chdir(path.parent)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(name, "w") as file:
            os.dup2(file.fileno(), number)
    os.close(0)
    sys.argv = [str(path)]
    sys.path[0] = str(path.parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    import fusegrad  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = _run(Path(json.loads(line)))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
