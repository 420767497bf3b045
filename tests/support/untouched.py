"""Whether a folder stays as it was: its entries before and after, and what a process of ours does to it but read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

WATCHING = Path(__file__).parent / "watching"
Entries = dict[str, tuple[int, ...]]


def entries(folder: Path) -> Entries:
    """Each file and folder in it: which it is, rights, links, size, times of the last writing and of any change."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        about = path.lstat()
        numbers = (about.st_ino, about.st_mode, about.st_nlink, about.st_size)
        found[str(path.relative_to(folder))] = (*numbers, about.st_mtime_ns, about.st_ctime_ns)
    return found


class Watch:
    """Lets each process of ours that starts from now on write down what it does to a folder."""

    def __init__(self, folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = log
        monkeypatch.setenv("WATCHED", str(folder))
        monkeypatch.setenv("WATCHED_LOG", str(log))
        monkeypatch.setenv("PYTHONPATH", str(WATCHING), prepend=os.pathsep)

    def acts(self) -> tuple[int, list[str]]:
        """How many processes were watched, and what they did."""
        lines = self._log.read_text().splitlines()
        acts = [line for line in lines if line != "watched"]
        return len(lines) - len(acts), acts
