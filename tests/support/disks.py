"""A small file system of a test's own, which can be full."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.servers import missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True)

    def litter(self) -> list[str]:
        """Files of the tier that no listing shows."""
        return [name for _, _, names in os.walk(self.path) for name in names if "tmp" in name]


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    """Mount one until the block ends; leaves the test out where that is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        missing("this user may not mount a file system; a full disk")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
