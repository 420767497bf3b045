"""Creates several objects of a local folder in common steps, so that they share the waits for the disk.

Ordering: all bytes are written, then forced to disk, then linked under their names; then their folders are forced to
disk, and what is above these, upwards. On a file system that commits everything at once the first of each kind of
force is the only one that costs.

What fails for one object is that object's error; the others go on. A crash leaves what ``backends.local`` says.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Piece
    from backends.errors import BackendError
    from backends.local_files import Draft, ExclusiveWriter, FolderCache


@dataclass(slots=True)
class NewObject:
    """One object that is to be, and what became of it.

    Attributes:
        key: Its key.
        folder: Relative to the root.
        name: In the folder.
        pieces: Its bytes.
        error: Why it is not there, or perhaps not; None when all went well.
        may_exist: With an error: it has its name, but perhaps not on disk.
        is_over: There is nothing more to do; else its folder was removed, and it may be tried again.
        refusal: Why it was not even tried.
    """

    key: str
    folder: bytes
    name: bytes
    pieces: Sequence[Piece]
    error: OSError | None = None
    may_exist: bool = False
    is_over: bool = False
    refusal: BackendError | None = None


def create_all(objects: Sequence[NewObject], writer: ExclusiveWriter, folders: FolderCache) -> None:
    """Take objects as far as they get; sets ``error``, ``may_exist`` and ``is_over`` of each.

    Args:
        objects: Of different keys.
        writer: Writes the files.
        folders: Opens and makes the folders.
    """
    with ExitStack() as held:
        drafts: list[tuple[NewObject, Draft]] = []
        for new in objects:
            with _noting(new):
                folder_fd = held.enter_context(folders.hold(new.folder))
                with _saying_removed(folder_fd):
                    draft = writer.write(folder_fd, new.pieces)
                held.callback(draft.close)
                drafts.append((new, draft))
        for new, draft in drafts:
            with _noting(new):
                draft.force()
        for new, draft in drafts:
            if new.error is None:
                with _noting(new), _saying_removed(draft.folder_fd):
                    draft.publish(new.name)
        _force_folders([draft for draft in drafts if _is_in_folder(draft[0])], folders)


def _is_in_folder(new: NewObject) -> bool:
    """Ours or another's. Whoever is told that a name is taken may rely on it, so that is forced to disk as well."""
    return new.error is None or isinstance(new.error, FileExistsError)


def _force_folders(drafts: Sequence[tuple[NewObject, Draft]], folders: FolderCache) -> None:
    """Force the names of files and of their folders; when that fails nobody knows what a crash would leave."""
    by_folder: dict[bytes, list[tuple[NewObject, Draft]]] = {}
    for new, draft in drafts:
        by_folder.setdefault(new.folder, []).append((new, draft))
    forced: list[bytes] = []
    for folder, inside in by_folder.items():
        try:
            os.fsync(inside[0][1].folder_fd)
        except OSError as error:
            _doubt(inside, error)
        else:
            forced.append(folder)
    try:
        folders.force_names(forced)
    except OSError as error:
        for folder in forced:
            _doubt(by_folder[folder], error)


def _doubt(drafts: Sequence[tuple[NewObject, Draft]], error: OSError) -> None:
    for new, _ in drafts:
        new.error, new.may_exist = error, True


@contextmanager
def _noting(new: NewObject) -> Iterator[None]:
    """Keep an error of the block in ``new``."""
    new.error, new.is_over = None, True
    try:
        yield
    except FileNotFoundError as error:
        new.error, new.is_over = error, False
    except OSError as error:
        new.error = error


@contextmanager
def _saying_removed(folder_fd: int) -> Iterator[None]:
    """Call it "not found" when a folder was removed; ext4 says "permission denied" then."""
    try:
        yield
    except PermissionError as error:
        if os.fstat(folder_fd).st_nlink:
            raise
        raise FileNotFoundError from error
