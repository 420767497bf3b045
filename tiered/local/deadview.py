"""A stopped store: one look at it, which stays true as long as nobody starts on it.

**Contract.** The log ends where a broker's start would end it (``tiered.local.recovery``). Within that end everything
counts: consume queues as they stand, cut as a start cuts them, and, where they say nothing, entries rebuilt from the
log in memory. What is walked at opening: the part that a start walks; the whole log when it is small
(``whole_log_bytes_max``) or something suggests that consume queues are missing. A follower that meets an unlisted
record later has it claimed here as well, so that nothing is passed over in silence.

A record whose queue offset is taken by another entry, or that a start would not list, is dropped and counted: a broker
started on the store would not serve it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.format.block import RecordBlock, group_by_queue, tag_hashes
from tiered.format.record import RecordFault
from tiered.format.sysflag import (
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    TRANSACTION_NONE,
)
from tiered.local.consumequeues import QueueIndex, Tail
from tiered.local.matching import Match, match
from tiered.local.pieces import LogPieces, Next, Piece
from tiered.local.recovery import find_log_end, plan_start, read_heads
from tiered.local.resync import Resync

if TYPE_CHECKING:
    from tiered.format.checkpoint import Checkpoint
    from tiered.local.catalog import Catalog, QueueState
    from tiered.local.entries import Flags, Longs
    from tiered.local.files import FileRow
    from tiered.local.sightings import Sightings
    from tiered.model import MessageQueue

_PIECE_BYTES: Final = 8 << 20


class DeadView:
    """See the module.

    Attributes:
        log: The commit log.
        catalog: The queues.
        log_end: Where the log ends.
        torn_bytes: Bytes behind it that are not zero.
    """

    is_live = False

    def __init__(
        self,
        log: FileRow,
        catalog: Catalog,
        sightings: Sightings,
        *,
        is_clean: bool,
        checkpoint: Checkpoint,
        whole_log_bytes_max: int,
    ) -> None:
        self.log = log
        self.catalog = catalog
        self.log_end = 0
        self.torn_bytes = 0
        self._sightings = sightings
        self._is_clean = is_clean
        self._pieces = LogPieces(log)
        self._tails: dict[MessageQueue, Tail] = {}
        self._listed: dict[MessageQueue, int] = {}
        """One past the last queue offset of which a record was seen that counts."""
        self._decided_from = 2**63 - 1
        """Of the log from here on it has been decided what counts."""
        self._open(checkpoint, whole_log_bytes_max)

    @property
    def log_min(self) -> int:
        """First physical offset of the log; its end when there are no files."""
        return self.log.bases[0] if self.log.bases else self.log_end

    def claim(
        self, state: QueueState, block: RecordBlock, found: Match, *, replayed: bool = False
    ) -> None:
        """Decide on records that their queue does not list; those that count are listed from now on.

        Args:
            state: Their queue.
            block: Holds the records.
            found: ``is_listed`` is brought up to date.
            replayed: A broker's start after a crash would list them again, by its own rules.
        """
        if found.is_all_listed:
            return
        unlisted = ~found.is_listed & is_message(block, found.indices)
        if not unlisted.any():
            return
        if not replayed:
            unlisted &= block.physical_offsets[found.indices] < self._decided_from
            if not unlisted.any():
                return
        wanted = unlisted & self._is_open(found, replayed) & self._is_known(state.queue, replayed)
        if replayed:
            wanted &= self._is_replayed(state.queue, block, found)
        self._sightings.count("dropped_records", int((unlisted & ~wanted).sum()))
        if not wanted.any():
            return
        self._rebuild(state, block, found, wanted)
        found.is_listed |= wanted
        found.is_all_listed = bool(found.is_listed.all())
        found.entries = None

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, checkpoint: Checkpoint, whole_log_bytes_max: int) -> None:
        others = self.catalog.load()
        if not self.log.bases:
            return
        for queue, state in self.catalog.states.items():
            self._tails[queue] = state.index.tail()
        start = plan_start(
            read_heads(self.log, self._pieces),
            is_clean=self._is_clean,
            checkpoint=checkpoint,
            listed_end=self._listed_end(others),
        )
        end = find_log_end(self.log, self._pieces, start, self._visit_replayed)
        self.log_end, self.torn_bytes = end.end, end.torn_bytes
        if start > self.log.bases[0] and self._needs_whole_scan(start, whole_log_bytes_max):
            self._scan(self.log.bases[0], start)
            start = self.log.bases[0]
        self._decided_from = start
        for state in self.catalog.states.values():
            self._set_bounds(state)
        self.catalog.log_min = self.log_min

    def _listed_end(self, others: list[QueueIndex]) -> int:
        ends = [tail.max_physical for tail in self._tails.values()]
        ends += [index.tail().max_physical for index in others]
        return max(ends, default=-1)

    def _visit_replayed(self, piece: Piece, count: int) -> None:
        sound = np.zeros(len(piece.block), np.bool_)
        sound[:count] = True
        self._take(piece.block, sound, replayed=not self._is_clean)

    def _take(self, block: RecordBlock, sound: Flags, *, replayed: bool) -> None:
        for queue, indices in group_by_queue(block, among=sound):
            state = self.catalog.find(queue)
            if state is None:
                continue
            found = match(state.index, block, indices)
            self.claim(state, block, found, replayed=replayed)
            self._extend(queue, found)

    def _extend(self, queue: MessageQueue, found: Match) -> None:
        """Listed records push the end that a start would see."""
        _, end = found.last_listed()
        tail = self._tails.get(queue, Tail(0, -1))
        if end > tail.end:
            self._tails[queue] = Tail(end, tail.max_physical)
        self._listed[queue] = max(end, self._listed.get(queue, 0))

    def _scan(self, position: int, limit: int) -> None:
        """Walk the log below recovery's start for records that no consume queue lists."""
        resync = Resync(self.log, self.catalog)
        while position < limit:
            piece = self._pieces.read(position, limit, _PIECE_BYTES, check_crc=False)
            self._take(piece.block, piece.block.faults == RecordFault.OK, replayed=False)
            position = piece.end
            if piece.follows is Next.FILE:
                position = piece.next_file if piece.next_file is not None else limit
            elif piece.follows in {Next.NOTHING, Next.BROKEN}:
                position = resync.behind(position, limit)

    def _needs_whole_scan(self, start: int, whole_log_bytes_max: int) -> bool:
        """Whether the log is small, or a record that begins a file is not listed where it should be."""
        if self.log_end - self.log.bases[0] <= whole_log_bytes_max:
            return True
        for base in self.log.bases:
            if base >= start:
                break
            piece = self._pieces.read(base, base + self.log.file_bytes, 1 << 12, check_crc=False)
            if self._has_unlisted(piece.block):
                self._sightings.note(
                    "consume queues lack entries: the whole log was scanned for them"
                )
                return True
        return False

    def _has_unlisted(self, block: RecordBlock) -> bool:
        for queue, indices in group_by_queue(block):
            state = self.catalog.find(queue)
            if state is None or not self._is_known(queue, replayed=False):
                continue
            found = match(state.index, block, indices)
            if (
                not found.is_all_listed
                and (
                    ~found.is_listed & self._is_open(found, False) & is_message(block, indices)
                ).any()
            ):
                return True
        return False

    def _set_bounds(self, state: QueueState) -> None:
        index = state.index
        end = max(index.cut_end(self.log_end), self._listed.get(state.queue, 0))
        claimed = index.rebuilt.bounds
        if claimed is not None:
            end = max(end, claimed[1])
        first = index.span()[0]
        low = index.first_not_below(self.log_min, end) if index.row.bases else end
        if claimed is not None:
            low = min(low, claimed[0])
        state.min, state.end = min(low, end), end
        self._sightings.count(
            "below_min_entries", max(0, state.min - first) if index.row.bases else 0
        )

    # -- claims ----------------------------------------------------------------------------------

    def _is_known(self, queue: MessageQueue, replayed: bool) -> bool:
        """Whether records of a queue without entries count: not those of a topic that was deleted."""
        names = self.catalog.topics.names
        if replayed or names is None or queue.topic in names:
            return True
        self.catalog.leave_out(queue.topic, "deleted topic: records are left in the log")
        return False

    def _is_open(self, found: Match, replayed: bool) -> Flags:
        """At which queue offsets the queue lists nothing, or (unless a start decides) nothing that can be."""
        places = found.listed_at
        nowhere: Flags = places < 0
        if not replayed:
            nowhere |= (places < self.log_min) | (places >= self.log.end)
        return nowhere

    def _is_replayed(self, queue: MessageQueue, block: RecordBlock, found: Match) -> Flags:
        """Which records a start lists again: those above what the queue lists already, in place and in offset.

        Below the end of the queue an entry that says nothing is a lost page, which a start fills too.
        """
        tail = self._tails.get(queue, Tail(0, -1))
        ends = block.physical_offsets[found.indices] + block.sizes[found.indices]
        above: Flags = ends > tail.max_physical
        return above | (found.offsets < tail.end)

    def _rebuild(self, state: QueueState, block: RecordBlock, found: Match, wanted: Flags) -> None:
        indices, offsets = found.indices[wanted], found.offsets[wanted]
        physical = block.physical_offsets[indices]
        sizes, tags = block.sizes[indices], tag_hashes(_only(block, indices))
        if found.counts is not None:
            counts = found.counts[wanted]
            within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            offsets = np.repeat(offsets, counts) + within
            physical, tags = np.repeat(physical, counts), np.repeat(tags, counts)
            sizes = np.repeat(sizes, counts)
        state.index.rebuilt.add(offsets, physical, sizes, tags)
        state.end = max(state.end, int(offsets.max()) + 1)
        self._sightings.count("rebuilt_entries", len(offsets))


def is_message(block: RecordBlock, indices: Longs) -> Flags:
    """Which records get an entry at all: those of a prepared or rolled-back transaction do not."""
    state = block.sys_flags[indices] & TRANSACTION_MASK
    found: Flags = (state == TRANSACTION_NONE) | (state == TRANSACTION_COMMIT)
    return found


def _only(block: RecordBlock, indices: Longs) -> RecordBlock:
    """A block of some records of another one."""
    columns = {name: getattr(block, name)[indices] for name in block.__slots__ if name != "buffer"}
    return RecordBlock(buffer=block.buffer, **columns)
