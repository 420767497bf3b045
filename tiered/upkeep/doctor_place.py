"""Doctor, before it looks: whether there is anything at the URL to look at, and where it may try out writing.

Nothing is made where no tier is. A folder that is not there, and a place with other things in it, are most likely a wrong
URL, and are refused unless the caller says that a tier is to be made there. An empty folder, or an empty prefix of a
bucket, is what a new user has: it is looked at. In a folder without a tier writing is tried in a folder of its own, which
is removed again; a crash in the middle leaves it behind, and the next run passes it by.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from backends.errors import BackendError
from backends.local import HIDDEN, LocalFolderStore
from backends.probe import PREFIX as PROBES
from tiered.api.broker_place import find_places
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore

SCRATCH = ".tiered-doctor-"
_NEW = "check the URL; if a tier is to be made here, give --new"


@contextlib.contextmanager
def trial_store(
    url: str, store: ObjectStore, probe_id: str, *, is_new: bool
) -> Iterator[ObjectStore]:
    """Where writing may be tried out: the store itself, or for a new tier in a folder, a folder that is removed again.

    Args:
        url: Of the tier.
        store: The same, opened.
        probe_id: Random; names the folder.
        is_new: A tier is to be made there: the folder may be missing, and other things may lie in it.

    Raises:
        InvalidError: There is nothing at the URL, or there is something else.
    """
    folder = folder_of(url)
    if folder is not None and not folder.is_dir():
        _require_makeable(folder, is_new=is_new)
    try:
        is_tier = bool(find_places(store))
        other = None if is_tier else _other_thing(store)
    except BackendError:
        yield store  # it cannot be reached, which the first check says
        return
    if other is not None and not is_new:
        raise InvalidError(f"no tier is here, but {other} is", where=store.url, do=_NEW)
    if folder is None or is_tier:
        yield store
        return
    with _scratch(folder if folder.is_dir() else folder.parent, probe_id) as scratch:
        yield scratch


def folder_of(url: str) -> Path | None:
    """The folder that a URL names; None for other stores."""
    if not url.startswith("file:"):
        return None
    return Path(unquote("/" + url.removeprefix("file:").removeprefix("//localhost").strip("/")))


def _require_makeable(folder: Path, *, is_new: bool) -> None:
    """Refuse a folder that is not there, but for one that `attach` is to make in a folder that is."""
    if not is_new:
        raise InvalidError("there is no such folder", where=str(folder), do=_NEW)
    if not folder.parent.is_dir():
        raise InvalidError(
            "neither this folder nor the one above it is there",
            where=str(folder),
            do="check the URL, and that the disk is mounted",
        )


def _other_thing(store: ObjectStore) -> str | None:
    """The first object that is no trace of a probe."""
    traces = (PROBES, SCRATCH, HIDDEN)
    return next((i.key for i in store.list("") if not i.key.startswith(traces)), None)


@contextlib.contextmanager
def _scratch(parent: Path, probe_id: str) -> Iterator[ObjectStore]:
    path = parent / f"{SCRATCH}{probe_id}"
    store = LocalFolderStore(path)
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(path, ignore_errors=True)
