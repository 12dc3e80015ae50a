"""Merges results of different runs into one file, where a case of another commit than most names its own."""

from __future__ import annotations

import collections
import copy
import json
from pathlib import Path
from typing import Any

from harness.report import write_json

Document = dict[str, Any]
OWN = ("commit", "date")  # fields of a part that comes from another run than the document


def key_of(case: Document) -> object:
    """The same for the same case of two runs."""
    return *(case.get(name) for name in ("row", "name", "case", "op", "dtype")), *case.get("sizes", {}).items()


def label_of(case: Document) -> str:
    """For messages."""
    words = [str(case[name]) for name in ("row", "name", "case", "op") if name in case]
    return " ".join(words + [f"{letter}{size}" for letter, size in case.get("sizes", {}).items()])


def timed(case: Document) -> set[str]:
    """Names of the implementations that have times in a case."""
    if isinstance(case.get("ms"), dict):
        return set(case["ms"])
    results = case.get("results", [])
    return {one["name"] for one in results if one.get("ms") is not None} if isinstance(results, list) else set(results)


def merge(old: Document | None, new: Document) -> tuple[Document, list[str]]:
    """A document with the cases of both, the new ones where both have a case, and the implementations that lose their
    times by it. A new document without cases takes the place of the old one."""
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
        lost += [f"{label_of(case)}: {name}" for name in sorted(timed(document["cases"][place]) - timed(case))]
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
    """The parts that may come from different runs."""
    launch = [document["launch"]] if "launch" in document else []
    return [*document["cases"], *launch, *document.get("extra", {}).values()]


def _with_own(document: Document) -> Document:
    """A copy in which each part names its run."""
    document = copy.deepcopy(document)
    for part in _parts(document):
        for name in OWN:
            part.setdefault(name, document[name])
    return document


def merge_into(path: Path, new: Document) -> list[str]:
    """Merges a document into a JSON file, which need not exist. Returns the implementations that lose their times."""
    merged, lost = merge(json.loads(path.read_text()) if path.exists() else None, new)
    write_json(path, merged)
    return [f"{path.stem}, {name}" for name in lost]
