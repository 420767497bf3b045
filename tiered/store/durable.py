"""Small changes of a directory that have to survive the machine: names in a folder, a whole small file replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a whole small file, on the disk, so that readers see the old or the new one.

    Raises:
        OSError: Perhaps not done.
    """
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(os.fspath(path.parent))
