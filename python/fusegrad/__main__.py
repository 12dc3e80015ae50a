"""``python -m fusegrad``: ``cache info|clear``, the folder of compiled kernels (docs/design/jit.md); ``doctor``, what a
report of a bug should say, and a test of each op."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import _C


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _info() -> None:
    info = _C.jit.cache_info()
    rows = [*sorted(info["architectures"].items()), ("other", info["other"])]
    entries = sum(row["entries"] for _, row in rows[:-1])
    total = sum(row["bytes"] for _, row in rows)
    limit = _size(info["limit"]) if info["limit"] else "0: the cache is off"
    print(f"folder   {info['folder']}\nkernels  {entries}\nsize     {_size(total)} (limit {limit})")
    for name, row in rows:
        if row["entries"]:
            print(f"{name:8} {row['entries']} files, {_size(row['bytes'])}")


def _clear() -> None:
    print(f"removed {_C.jit.cache_clear()} files from {_C.jit.cache_info()['folder']}")


def _doctor() -> int:
    from .doctor import main as examine

    return examine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusegrad")
    commands = parser.add_subparsers(dest="command", required=True)
    cache = commands.add_parser("cache", help="the folder of compiled kernels")
    action = cache.add_subparsers(dest="action", required=True)
    action.add_parser("info", help="folder, number of kernels, size, limit").set_defaults(run=_info)
    action.add_parser("clear", help="remove fusegrad's files from the folder, and no others").set_defaults(run=_clear)
    doctor = commands.add_parser("doctor", help="versions, GPUs, the cache, and a test of each op")
    doctor.set_defaults(run=_doctor)
    run = parser.parse_args(arguments).run
    try:
        return run() or 0
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
