"""Runs a chunk of a test without the rights of root, who may read and write everything."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534


def run_unprivileged(body: Callable[[], None]) -> None:
    """Run ``body`` here, or, as root, in a forked child that is nobody; fails when it fails.

    What ``body`` needs must be imported before: nobody may not be able to read the libraries.
    """
    if os.geteuid() != 0:
        body()
        return
    child = os.fork()
    if child == 0:
        os._exit(_as_nobody(body))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "see the traceback of the child on stderr"


def _as_nobody(body: Callable[[], None]) -> int:
    """In the child: the exit code."""
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        body()
    except BaseException:  # noqa: BLE001 (nothing of a child may run the parent's code)
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
        return 1
    return 0


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A folder that everybody can come to; pytest's own are for their owner only."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
