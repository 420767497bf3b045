"""Small embedded stores, and their commits taken step by step."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from support.stored import NAMES
from support.waiting import until

from tiered.clock import Clock, SystemClock
from tiered.store.commitlog import GroupCommits
from tiered.store.embedded import MessageStore
from tiered.store.new_message import Appended, NewMessage
from tiered.store.special import inner_batch
from tiered.store.store_options import Flush, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.encoding import Prepared, RecordPlaces

SMALL = StoreOptions(65_536, 50, index_slots=100, index_items=400)
SYNC = StoreOptions(65_536, 50, index_slots=100, index_items=400, flush=Flush.SYNC)


def create(root: Path, options: StoreOptions = SMALL, clock: Clock | None = None) -> MessageStore:
    return MessageStore.create(
        root, **NAMES, clock=clock or SystemClock(), options=options, rng=random.Random(1)
    )


def reopen(
    root: Path, options: StoreOptions = SMALL, clock: Clock | None = None, **more: Any
) -> MessageStore:
    return MessageStore.open(
        root, **NAMES, clock=clock or SystemClock(), options=options, rng=random.Random(2), **more
    )


def batch(store: MessageStore, count: int) -> NewMessage:
    messages = [
        NewMessage("grouped", 1, b"%d" % at, tags="a", keys=f"k{at}") for at in range(count)
    ]
    return store.complete(inner_batch(messages))


class Groups:
    """What the flush thread of a store does, step by step: its own thread is kept from it."""

    def __init__(self, store: MessageStore) -> None:
        self.written: list[int] = []
        self.refuses: Exception | None = None
        self.sync_refuses: OSError | None = None
        self._store = store
        self.commits = GroupCommits(
            self._write, self._sync, SystemClock(), needs_sync=True, needs_replica=False
        )
        store._commits = self.commits

    def _write(self, messages: Prepared) -> RecordPlaces:
        if self.refuses is not None:
            raise self.refuses
        self.written.append(len(messages))
        return self._store._log.append(messages, self._store._encoder.store_host)

    def _sync(self) -> int:
        if self.sync_refuses is not None:
            raise self.sync_refuses
        return self._store._log.sync()

    def together(self, batches: list[list[NewMessage]]) -> list[list[Appended] | Exception]:
        """Append batches in threads of their own, all of them in one group, in their order."""
        found: list[list[Appended] | Exception] = [[] for _ in batches]

        def work(number: int) -> None:
            try:
                found[number] = list(self._store.append_batch(batches[number]))
            except Exception as error:  # noqa: BLE001 (it is looked at)
                found[number] = error

        threads = []
        for number in range(len(batches)):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            until(lambda wanted=number + 1: len(self.commits._unwritten) == wanted)
        try:
            self.commits.run_once()
        finally:
            for thread in threads:
                thread.join()
        return found
