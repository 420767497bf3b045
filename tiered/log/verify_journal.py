"""Reads every entry and checkpoint that a journal still has, also those that readers jump over.

An entry below the point to which the journal was trimmed is *stale*: left by a trimming that was cut short, or landed
late, from a writer that was fenced long ago, under a number that had been used and deleted. Each is held against its own
checksum; what it follows means nothing any more, since every reader begins behind it. So it is recorded, and no problem.
Where a trimming that was cut short has left a checkpoint behind, one that landed late may even follow that checkpoint, and
yet not be what the next entry follows: it is stale as well when a whole checkpoint stands behind the break.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from backends.errors import BackendError
from tiered.errors import TieredStoreError
from tiered.journal.entry import checksum
from tiered.journal.lease import read_lease
from tiered.journal.reader import JournalReader
from tiered.journal.trimming import replay_starts
from tiered.keys import LEASE, checkpoint_key, entry_key
from tiered.log.rebuild import EPOCH
from tiered.log.state import TierMachine
from tiered.log.verify_report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backends.base import ObjectStore
    from tiered.journal.entry import Entry


def check_journal(
    store: ObjectStore, prefix: str, entries: Iterable[int], checkpoints: Iterable[int]
) -> Finding:
    """Check entries (checksum, number, what each follows) and checkpoints (and that replay gives the same state).

    Args:
        store: The tier's store.
        prefix: Of the broker.
        entries: Numbers that were listed.
        checkpoints: Likewise.
    """
    return _JournalCheck(store, prefix).run(sorted(entries), sorted(checkpoints))


class _JournalCheck:
    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._machine = TierMachine()
        self._reader = JournalReader(store, prefix, self._machine)
        self._knows = True  # the reader's state is that after entry `number`
        self._trimmed = 0  # entries below this number are stale
        self._checkpoints: list[int] = []
        self._row: list[Entry] = []  # entries just behind a missing or stale one
        self._found = Finding()

    def run(self, entries: list[int], checkpoints: list[int]) -> Finding:
        start = self._rebuilt(checkpoints)  # what lies before it means nothing any more
        steps = sorted([(n, False) for n in entries] + [(n, True) for n in checkpoints])
        steps = [step for step in steps if step[0] >= start]
        self._trimmed = self._trimmed_to([n for n in entries if n >= start], checkpoints)
        self._checkpoints = checkpoints
        for number, is_checkpoint in steps:
            check = self._checkpoint if is_checkpoint else self._entry
            key = (checkpoint_key if is_checkpoint else entry_key)(self._prefix, number)
            try:
                check(number)
            except (TieredStoreError, BackendError) as error:
                self._found.problem("journal", key, str(error))
                self._knows = self._knows and is_checkpoint
        return self._found

    def _rebuilt(self, checkpoints: list[int]) -> int:
        """Number of the newest whole checkpoint at which the journal was rebuilt; 0 when it never was."""
        for number in reversed(checkpoints):
            if number % EPOCH == 0 and self._is_whole(number):
                return number
        return 0

    def _trimmed_to(self, entries: list[int], checkpoints: list[int]) -> int:
        """Number of the oldest whole checkpoint from which replay gets to the head, when none gets there from entry 1."""
        starts = replay_starts(entries, checkpoints)
        if not entries or 0 in starts or not starts or entries[0] >= starts[0]:
            return 0
        return next((number for number in starts if self._is_whole(number)), 0)

    def _is_whole(self, number: int) -> bool:
        with contextlib.suppress(TieredStoreError, BackendError):
            return self._reader.read_checkpoint(number) is not None
        return False

    def _entry(self, number: int) -> None:
        found = self._reader.read_entry(number)
        if found is None:
            return  # deleted since it was listed
        self._found.object_count += 1
        self._found.object_bytes += len(found[1])
        if number < self._trimmed:
            self._found.stale_entries.append(entry_key(self._prefix, number))
            return
        follows = number == self._reader.number + 1
        is_stale = follows and self._is_behind_a_stale_one(found[0])
        self._row = [*self._row[-2:], found[0]] if follows and not is_stale else [found[0]]
        if is_stale:
            self._found.stale_entries.append(entry_key(self._prefix, number - 1))
        elif self._knows and follows:
            self._reader.apply(*found)
            return
        elif follows and self._reader.last and found[0].previous != self._reader.last:
            key = entry_key(self._prefix, number)
            self._found.problem("journal", key, f"it is not the successor of entry {number - 1}")
        self._knows = False
        self._reader.number, self._reader.last = number, checksum(found[1])

    def _is_behind_a_stale_one(self, entry: Entry) -> bool:
        """Whether the entry before this one landed late, under a number that had been used and deleted.

        Those below it are gone, then, and it is of no newer reign.
        """
        if entry.previous == self._reader.last or len(self._row) != 1:
            return False
        behind = [number for number in self._checkpoints if number >= entry.number]
        is_older = self._row[0].generation <= entry.generation
        return is_older and any(map(self._is_whole, behind))

    def _is_vouched_for(self, number: int, last: int) -> bool:
        """Whether a checkpoint is what the next entry follows, so that the lone entry with its number landed late."""
        following = self._reader.read_entry(number + 1) if len(self._row) == 1 else None
        return following is not None and following[0].previous == last

    def _checkpoint(self, number: int) -> None:
        found = self._reader.read_checkpoint(number)
        if found is None:
            return
        self._found.object_count += 1
        state, last = found
        key = checkpoint_key(self._prefix, number)
        if number == self._reader.number and last != self._reader.last:
            if self._is_vouched_for(number, last):
                self._found.stale_entries.append(entry_key(self._prefix, number))
            else:
                self._found.problem("journal", key, "it is not of the entry with its number")
        elif number == self._reader.number and self._knows and state != self._reader.state:
            self._found.problem("journal", key, "replay gives another state")
        self._reader.state, self._reader.number, self._reader.last = state, number, last
        self._knows = True
        self._row = []  # it vouches for what is before it


def check_lease(store: ObjectStore, prefix: str) -> Finding:
    """Whether the lease, if there is one, can be read."""
    found = Finding()
    try:
        present, version = read_lease(store, prefix + LEASE)
    except (TieredStoreError, BackendError) as error:
        found.problem("lease", prefix + LEASE, str(error))
        return found
    if present is None and version is not None:
        found.problem("lease", prefix + LEASE, "it cannot be read; a writer will take it")
    return found
