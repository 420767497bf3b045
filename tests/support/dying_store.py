"""Processes that end at named points of the store's work: run as ``python -m support.dying_store FOLDER POINT...``.

One process forks a child for each point, so that what is imported is imported once. The child writes a line for every
append that was answered; it ends with ``crashpoints.EXIT_CODE`` at its point.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from support.embedded import SYNC, create, reopen

from tiered import crashpoints
from tiered.store.new_message import NewMessage
from tiered.store.store_options import Compacting

if TYPE_CHECKING:
    from tiered.store.embedded import MessageStore

OPTIONS = replace(
    SYNC,
    flush_interval_s=0.05,
    checkpoint_interval_s=0.05,
    compacting=Compacting(20_000, 60, interval_s=1e9),
    message_bytes_max=8_000,
    sync_timeout_s=60.0,
)
OF_RECOVERY = ("store-lists-cut", "store-log-cut")
TIMES = {"store-checkpoint-due": 2, "store-checkpoint-written": 2, "store-listed": 5}
"""Where not the first time: a store's beginning writes a checkpoint."""
COUNT, BATCH = 240, 8


def messages() -> list[NewMessage]:
    return [
        NewMessage(
            f"t{at % 2}", at % 3, b"%d " % at + b"x" * 1200, tags=f"g{at % 5}", keys=f"k{at}"
        )
        for at in range(COUNT)
    ]


def live(root: Path) -> None:
    """A store's whole incarnation."""
    given = messages()
    with create(root, OPTIONS) as store, (root.parent / "told").open("w") as told:
        for start in range(0, COUNT, BATCH):
            for at, put in enumerate(store.append_batch(given[start : start + BATCH]), start):
                line = (at, put.queue_offset, put.physical_offset, put.msg_id)
                told.write(json.dumps(line) + "\n")
            told.flush()
        store.wait_listed()
        compact(store)
        for path in sorted((root / "commitlog").iterdir())[:2]:
            os.utime(path, (1, 1))
        store.expire()


def compact(store: MessageStore) -> None:
    """One pass over a topic of which the newest message of each key is kept."""
    store.create_topic("kept", queues=1, is_compacted=True)
    for number in range(120):
        store.append(NewMessage("kept", 0, b"%d " % number + b"y" * 300, keys=f"k{number % 7}"))
    store.wait_listed()
    store.compact()


def die(folder: Path, point: str) -> int:
    """The status of a child that ends at ``point``."""
    child = os.fork()
    if not child:
        crashpoints._WANTED, crashpoints._left = point, TIMES.get(point, 1)
        try:
            reopen(folder / "s", OPTIONS) if point in OF_RECOVERY else live(folder / "s")
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for point in sys.argv[2:]:
        folder = Path(sys.argv[1], point)
        folder.mkdir()
        (folder / "told").touch()
        if point in OF_RECOVERY:
            assert die(folder, "store-indexed") == crashpoints.EXIT_CODE
        print(json.dumps([point, die(folder, point)]), flush=True)


if __name__ == "__main__":
    main()
