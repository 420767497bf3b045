"""The captured stores, as tests read them."""

from __future__ import annotations

import gzip
import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "stores"
NAMES = tuple(sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz")))


@cache
def files(name: str, folder: str) -> dict[str, bytes]:
    """The files of one folder of a captured store, by path inside the store."""
    found: dict[str, bytes] = {}
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith(folder):
                stream = archive.extractfile(member)
                assert stream is not None
                found[path] = stream.read()
    return found


def log_files(name: str) -> dict[int, bytes]:
    """The commit log's files by their base offset."""
    return {int(path.rpartition("/")[2]): data for path, data in files(name, "commitlog/").items()}


def dump(name: str, kind: str) -> list[dict[str, Any]]:
    """The lines of one type of a dump."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [line for line in map(json.loads, lines) if line["type"] == kind]
