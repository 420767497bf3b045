"""Named moments at which a test can end the process as a crash would: with nothing flushed, freed or told.

``TIERED_CRASH_POINT=entry-put`` ends the process when that point is reached, ``entry-put:3`` when it is reached for the
third time. Without the variable a point costs one comparison. tests/torture/README.md says of each
what recovery does; a test compares that table with the code.
"""

from __future__ import annotations

import os
import threading

VARIABLE = "TIERED_CRASH_POINT"
EXIT_CODE = 86
"""Of a process that ended at a point."""

_WANTED, _, _TIMES = os.environ.get(VARIABLE, "").partition(":")
_lock = threading.Lock()
_left = int(_TIMES or 1)


def reached(point: str) -> None:
    """Say that a named moment has come. From any thread."""
    if _WANTED and point == _WANTED:
        _count_down()


def _count_down() -> None:
    global _left  # noqa: PLW0603 (one process, one crash)
    with _lock:
        _left -= 1
        if not _left:
            os._exit(EXIT_CODE)
