"""Stops the first process that comes to a named moment, until it is killed or let go. Python runs this when it starts.

``PAUSE_AT=archive-written:2``: when a process comes there for the second time; ``PAUSE_IN``: a folder in which that process
leaves its id as ``paused``, and waits for a file ``go``.
"""

from __future__ import annotations

import os
import pathlib
import time


def _install() -> None:
    from tiered import crashpoints

    wanted, _, times = os.environ["PAUSE_AT"].partition(":")
    folder, left = os.environ["PAUSE_IN"], [int(times or 1)]

    def reached(point: str) -> None:
        if point != wanted:
            return
        left[0] -= 1
        if left[0]:
            return
        try:
            with pathlib.Path(f"{folder}/claimed").open("x"):
                pass
        except FileExistsError:
            return
        with pathlib.Path(f"{folder}/writing").open("w") as file:
            file.write(str(os.getpid()))
        pathlib.Path(f"{folder}/writing").rename(f"{folder}/paused")
        while not pathlib.Path(f"{folder}/go").exists():
            time.sleep(0.02)

    crashpoints.reached = reached


if "PAUSE_AT" in os.environ:
    _install()
