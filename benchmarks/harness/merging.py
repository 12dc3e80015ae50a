"""Results of rows that were measured apart, in one file: a row of another commit than most names its own."""

from __future__ import annotations

import collections
import copy
import json
from pathlib import Path
from typing import Any

from harness.report import write_json

Document = dict[str, Any]
OWN = ("commit", "date")  # what a case or a section says by itself of another run


def key_of(case: Document) -> object:
    """What a case is of, whatever the script calls it."""
    return *(case.get(name) for name in ("row", "name", "case", "op", "dtype")), *case.get("sizes", {}).items()


def named(case: Document) -> str:
    """As people are told of it."""
    words = [str(case[name]) for name in ("row", "name", "case", "op") if name in case]
    return " ".join(words + [f"{letter}{size}" for letter, size in case.get("sizes", {}).items()])


def timed(case: Document) -> set[str]:
    """Names of what has times in a case."""
    if isinstance(case.get("ms"), dict):
        return set(case["ms"])
    results = case.get("results", [])
    return {one["name"] for one in results if one.get("ms") is not None} if isinstance(results, list) else set(results)


def merge(old: Document | None, new: Document) -> tuple[Document, list[str]]:
    """Both documents' cases, the new ones in place of the old ones; and what had times before and has none now.

    A document without cases takes the old one's place."""
    if old is None or "cases" not in new or "cases" not in old:
        return new, []
    old, new = _with_own(old), _with_own(new)
    document = {**old, "cases": list(old["cases"]), "extra": old.get("extra", {}) | new.get("extra", {})}
    if "launch" in new:
        document["launch"] = new["launch"]
    places = {key_of(case): i for i, case in enumerate(document["cases"])}
    lost = []
    for case in new["cases"]:
        place = places.get(key_of(case))
        if place is None:
            document["cases"].append(case)
            continue
        lost += [f"{named(case)}: {name}" for name in sorted(timed(document["cases"][place]) - timed(case))]
        document["cases"][place] = case
    if not document["extra"]:
        del document["extra"]
    commits = collections.Counter(case["commit"] for case in document["cases"])
    commit = commits.most_common(1)[0][0]
    if commit == new["commit"]:
        document |= {name: fact for name, fact in new.items() if name not in ("cases", "launch", "extra")}
    document |= {"commit": commit, "date": max(one["date"] for one in document["cases"] if one["commit"] == commit)}
    for part in _parts(document):
        if part["commit"] == commit:
            for name in OWN:
                del part[name]
    return document, lost


def _parts(document: Document) -> list[Document]:
    """What may be of a run of its own."""
    launch = [document["launch"]] if "launch" in document else []
    return [*document["cases"], *launch, *document.get("extra", {}).values()]


def _with_own(document: Document) -> Document:
    """A copy whose parts all say what run they are of."""
    document = copy.deepcopy(document)
    for part in _parts(document):
        for name in OWN:
            part.setdefault(name, document[name])
    return document


def merge_files(found: Path, folder: Path) -> list[str]:
    """Merges each JSON of `found` into the one of its name in `folder`; what lost its times."""
    lost = []
    for path in sorted(found.glob("**/*.json")):
        target = folder / path.name
        old = json.loads(target.read_text()) if target.exists() else None
        document, gone = merge(old, json.loads(path.read_text()))
        lost += [f"{path.stem}, {name}" for name in gone]
        write_json(target, document)
    return lost
