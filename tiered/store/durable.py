"""Small changes of a directory that have to survive the machine: names in a folder, a whole small file replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tiered.local.files import open_regular

if TYPE_CHECKING:
    from pathlib import Path


def sync_folder(folder: str) -> None:
    """Bring a folder's names to the disk.

    Raises:
        OSError: They may not be there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, so that their names survive the machine.

    Raises:
        OSError: They may not be there.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(os.fspath(path.parent))


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a whole small file, on the disk, so that readers see the old or the new one.

    Raises:
        OSError: Perhaps not done.
    """
    new = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_regular(os.fspath(new), flags), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(os.fspath(path.parent))
