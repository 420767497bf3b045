"""A JoyQueue (JMQ 4) store directory behind the interface of local stores, live or dead, read-only; and its follower.

A partition is a queue. A record is a message of the journal, byte for byte; a client's batch is an inner batch, whose items
share one.

**Contract.** What is *confirmed* of a group's journal ends with the last sound message at or below the commit position of
the last ``checkpoint.json`` that could be read: where the broker itself would end after a crash. What stands above waits.
The broker writes that file once a minute and in place; one that is not whole changes nothing.

A partition's index is made from the journal. The broker's index files say with which message a partition begins, and are
asked for where a message stands: what they say counts where a message there says the same. No checksum covers the header
of a message. One that doesn't go on where its partition was, or with which the next doesn't go on, counts only if the index
files vouch for it, or if something was lost just before it; else it is damaged, and its place in its partition is a hole.
What is gone with its file is missing.

A *fall*: a file shrank, or is another, or one is gone that was not the first; the commit position fell; the last confirmed
message is another. Then all is looked at anew, and followers name the group's queues. It is looked for with each poll and
before and after each read, by three calls of the system a group, so that what was read meanwhile is thrown away.

Files may vanish from the left at any moment. They are opened when they are seen first, at most ``_OPEN_MAX`` at once, and
a follower reads on in those for a minute; the queues' bounds move at once.

Whether a broker runs is told by its lock on ``lock`` (asked for, never taken), which a crash leaves as a file: it is of
interest to people only, since the checkpoint decides either way.

Methods may be called from any thread. One lock guards what is known of groups; records are read without it. Nothing is
written, created, renamed or locked in the directory (I10). After a crash there is nothing to clean up.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.clock import Clock, SystemClock
from tiered.errors import ClosedError, InvalidError
from tiered.format import jmq_message
from tiered.format.record_kind import RecordKind, epochs_of, tag_codes
from tiered.local.classification import AnomalyCounters, hole_counter
from tiered.local.interface import (
    HoleReason,
    LeaderEpoch,
    LeftOut,
    Lineage,
    Quarantined,
    RecordBatch,
    StoreIdentity,
    StoreReport,
    Waiting,
)
from tiered.local.jmq_files import (
    Checkpoint,
    Entry,
    GroupFolder,
    IndexFiles,
    Row,
    file_mark,
    find_groups,
    find_partitions,
    is_jmq,
    read_checkpoint,
    read_row,
)
from tiered.local.layout import is_locked
from tiered.local.mapped_file_queue import FileCache, directory_stamp
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from typing_extensions import Buffer

__all__ = ["JmqFollower", "JmqStore", "is_jmq"]

Longs = npt.NDArray[np.int64]
_OPEN_MAX: Final = 64
_INDEXES_OPEN_MAX: Final = 64
_LEAVING_S: Final = 60.0
_LEFTS_AGAIN_S: Final = 0.5
_GROUPS_AGAIN_S: Final = 5.0
_STEP_BYTES: Final = 4 << 20
_STEP_BYTES_MIN: Final = 4 << 10
_AHEAD_BYTES: Final = 64 << 10
"""Looked at behind each step, so that its last messages are held against those that follow."""
_TAIL_BYTES: Final = 64 << 10
_HOLES_MAX: Final = 4096
"""More than so many indexes without a message are a range that is passed over, not items."""
_RAW_BYTES_MAX: Final = 16 << 20
_PLACES_MAX: Final = 4096
_LOOKS_BACK: Final = 8
_READS_AGAIN: Final = 8
_INDEX_END: Final = 2**62
_FAR: Final = 2**63 - 1


# -- stretches of a journal --------------------------------------------------------------------------


# Rows of a table of items: one column a message, or a hole of some indexes.
_INDEX, _COUNT, _START, _SIZE, _TAG, _TIME, _PLACE = range(7)


@dataclass(slots=True, eq=False)
class _Stretch:
    """Messages of one file in a row, and what lies between them."""

    data: bytes
    partitions: Longs
    table: Longs  # int64[7, n]
    is_good: npt.NDArray[np.bool_]  # sound, and can be what it says
    taken: int  # so many of them are to be taken; the others are looked at only
    start: int  # position in the journal
    end: int  # where the next stretch begins
    lost_bytes: int  # of what lies between them


def _read_stretch(
    row: Row, cache: FileCache, position: int, limit: int, size: int
) -> _Stretch | None:
    """What begins at a position (or behind it, where nothing is) within ``size`` bytes, one message at least.

    None: nothing below ``limit``. Of a file that is gone, or has been cut meanwhile, what is there no more is lost.
    """
    span = row.span_at(position)
    if span is None or span[0] >= limit:
        return None
    base, end = span[0], min(span[1], limit)
    start, wanted = max(position, base), size + _AHEAD_BYTES
    while True:
        stop = min(start + wanted, end)
        data = row.read(cache, base, start, stop - start)
        is_short = len(data) < stop - start
        room = 0 if is_short else end - stop
        block, lost = jmq_message.walk_over_damage(data, 0, len(data), room=room)
        if len(block) or is_short or not room:
            break
        wanted *= 4
    taken = max(1, int(np.searchsorted(block.positions, size)))
    if taken < len(block):
        end = start + block.some(slice(taken)).end
    elif room:
        end = start + block.end
    else:
        lost.append((block.end, end - start))
    return _stretch(data, block, taken, (start, end), sum(b - a for a, b in lost))


def _stretch(
    data: bytes, block: jmq_message.MessageBlock, taken: int, span: tuple[int, int], lost_bytes: int
) -> _Stretch:
    headers = block.headers
    partitions, index = (headers[name].astype(np.int64) for name in ("partition", "index"))
    counts = block.counts()
    terms = headers["term"].astype(np.int64)
    table = np.stack(
        (
            index,
            counts,
            block.positions,
            headers["size"].astype(np.int64),
            tag_codes(RecordKind.JMQ, terms),
            block.store_times_ms(),
            block.positions + span[0],
        )
    )
    can_be = (partitions >= 0) & (index >= 0) & (index < _INDEX_END) & (counts > 0)
    table[_COUNT, ~can_be] = 0
    good = block.is_sound & can_be
    return _Stretch(data, partitions, table, good, min(taken, len(block)), *span, lost_bytes)


# -- groups ------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What a look at a group's files found: it changes when there may be something new."""

    folder: tuple[int, int] | None
    last: tuple[int, int, int] | None
    checkpoint: tuple[int, int, int] | None


class _Group:
    """One partition group: its journal, how much of it is confirmed, and its partitions' bounds.

    What changes it needs the store's lock.
    """

    def __init__(
        self, folder: GroupFolder, cache: FileCache, indexes: FileCache, numbers: Iterator[int]
    ) -> None:
        self.folder = folder
        self.cache = cache
        self._index_cache = indexes
        self._numbers = numbers
        self.generation = next(numbers)  # another one after each fall
        self.row = Row(folder.path)
        self.readable = self.row  # with files that have vanished on the left, and are open
        self.checkpoint: Checkpoint | None = None
        self.confirmed = 0  # position at which the last confirmed message ends
        self.committed = 0  # up to where the checkpoint would have it, as far as there are files
        self.bounds: dict[int, QueueBounds] = {}
        self.left_out: list[LeftOut] = []
        self._indexes: dict[int, IndexFiles] = {}
        self._tail: tuple[int, bytes] | None = (
            None  # the last confirmed message: position and header
        )
        self._seen: _Seen | None = None
        self._vanished_s = 0.0
        # As far as the journal has been walked.
        self._epochs: dict[int, dict[int, int]] = {}
        self._places: dict[int, list[tuple[int, int]]] = {}

    # -- looking at its files --------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """See what has changed: three calls of the system where nothing has."""
        if self.readable is not self.row and now_s >= self._vanished_s + _LEAVING_S:
            self.readable = self.row
            self.cache.drop_deleted()
        path = self.folder.path
        seen = _Seen(
            directory_stamp(path), file_mark(self.row.last_path), file_mark(self.folder.checkpoint)
        )
        if seen == self._seen:
            return
        checkpoint = read_checkpoint(self.folder) or self.checkpoint
        row = read_row(path)
        has_fallen = self._has_fallen(row, checkpoint)
        last = seen.last if row.last_path == self.row.last_path else file_mark(row.last_path)
        self._seen = _Seen(seen.folder, last, seen.checkpoint)
        if has_fallen:
            self._forget()
        self._follow(row, now_s)
        is_new = checkpoint != self.checkpoint
        self.checkpoint = checkpoint
        committed = max(row.left, min(checkpoint.committed if checkpoint else 0, row.right))
        if has_fallen or is_new or committed != self.committed:
            self._confirm(committed, is_anew=has_fallen)

    def _has_fallen(self, row: Row, checkpoint: Checkpoint | None) -> bool:
        """Whether something that was there is there no more, other than files on the left."""
        if not self.row.files:
            return False
        if not row.files or row.left < self.row.left:
            return True
        there = {file.base: file for file in row.files}
        for known in self.row.files:
            file = there.get(known.base)
            if known.base >= row.left and (
                file is None or file.inode != known.inode or file.size < known.size
            ):
                return True
        if self.checkpoint and checkpoint and checkpoint.committed < self.checkpoint.committed:
            return True
        if self._tail is None or self._tail[0] < row.left:
            return False
        return self._head_at(row, self._tail[0]) != self._tail[1]

    def _head_at(self, row: Row, position: int) -> bytes:
        span = row.span_at(position)
        if span is None:
            return b""
        return row.read(self.cache, span[0], position, jmq_message.HEAD_BYTES)

    def _forget(self) -> None:
        """Nothing holds any more that was known."""
        self.generation = next(self._numbers)
        self._epochs.clear()
        self._places.clear()
        self.readable, self._tail, self.confirmed = Row(self.folder.path), None, 0
        self.cache.drop_deleted()
        self._index_cache.drop_deleted()

    def _follow(self, row: Row, now_s: float) -> None:
        """Take over the files; those that have vanished on the left stay readable for a while. New ones are opened."""
        gone = tuple(file for file in self.readable.files if file.base < row.left)
        known = {file.base for file in self.row.files}
        if self.readable is self.row:
            self._vanished_s = now_s
        self.row = row
        self.readable = Row(row.folder, gone + row.files) if gone else row
        self.cache.drop_deleted([row.path(file.base) for file in row.files])
        for file in row.files[-_OPEN_MAX:]:
            if file.base not in known:
                row.read(self.cache, file.base, file.base, 0)

    def follow_partitions(self) -> None:
        """See which partitions there are, and where they begin."""
        found, self.left_out = find_partitions(self.folder)
        removed = {left.name.rpartition("/")[2].partition(".")[0] for left in self.left_out}
        nexts = self.checkpoint.nexts if self.checkpoint else {}
        found |= {number for number in nexts if str(number) not in removed}
        for number in self._indexes.keys() - found:
            del self._indexes[number]
        for number in found - self._indexes.keys():
            path = f"{self.folder.path}/index/{number}"
            self._indexes[number] = IndexFiles(path, self._index_cache)
        for index in self._indexes.values():
            index.look()
        if found != self.bounds.keys():
            self._bound(0)
        for number, index in self._indexes.items():
            bounds, left = self.bounds[number], index.left
            if left is not None and left != bounds.min:
                self.bounds[number] = _bounds(left, bounds.end)

    # -- how much is confirmed -------------------------------------------------------------------

    def _confirm(self, committed: int, *, is_anew: bool) -> None:
        """Say how much is confirmed, now that so much has been committed."""
        before = 0 if is_anew else self.confirmed
        found = self._last_sound(committed)
        self.committed = committed
        self.confirmed = found[1] if found else self.row.left
        self._tail = (found[0], self._head_at(self.row, found[0])) if found else None
        self.bounds = {} if is_anew else self.bounds
        if self._indexes.keys() == self.bounds.keys() and self.confirmed != before:
            self._bound(before)
        self.follow_partitions()

    def _last_sound(self, limit: int) -> tuple[int, int] | None:
        """Where the last sound message at or below ``limit`` begins and ends: as the broker's recovery looks for it.

        It takes none for sound that has no body.
        """
        for base, until in reversed(self.row.spans()):
            end, size = min(until, limit), _TAIL_BYTES
            while end > base:
                start = max(base, end - size)
                data = self.row.read(self.cache, base, start, end - start)
                block, _ = jmq_message.walk_over_damage(data, 0, len(data))
                sound = np.flatnonzero(block.is_sound & (block.headers["body_size"] > 0))
                if len(sound):
                    place = start + int(block.positions[sound[-1]])
                    stop = place + int(block.headers["size"][sound[-1]])
                    # A message may hold another one: only where the walk began with a whole file is it sure.
                    if stop == end or start == base:
                        return place, stop
                if start == base:
                    break
                size *= 8
        return None

    def _bound(self, before: int) -> None:
        """Find each partition's end: by its index files, or else by a walk from what was confirmed before."""
        ends = self._ends_by_index()
        if ends is None and before > self.row.left:
            ends = self._ends_by_walk(before, {n: int(b.end) for n, b in self.bounds.items()})
        lefts: dict[int, int | None] = {n: index.left for n, index in self._indexes.items()}
        if ends is None:
            nexts = self.checkpoint.nexts if self.checkpoint else {}
            walk = _Walk(self, self.row.left, dict(lefts))
            walk.go(self)
            lefts |= walk.firsts
            ends = {
                number: nexts.get(number, 0) if end is None else end
                for number, end in walk.wanted.items()
            }
        self.bounds = {
            number: _bounds(ends[number] if (left := lefts[number]) is None else left, ends[number])
            for number in self._indexes
        }

    def _ends_by_index(self) -> dict[int, int] | None:
        """Each partition's end by index files, as far as they reach; None: they are behind, or damaged.

        The checkpoint says up to where in the journal they are complete.
        """
        if self.checkpoint is None:
            return None
        limit = min(self.checkpoint.indexed, self.confirmed)
        ends, reached = dict[int, int](), self.row.left
        for number, index in self._indexes.items():
            left, right = index.left or 0, index.right()
            known = self.checkpoint.nexts.get(number, 0)
            if right < known:
                return None
            end = left + _first_behind(index, range(left, right), limit)
            if limit == self.checkpoint.indexed and end != max(known, left):
                return None
            for at in (end - 1, end) if limit < self.checkpoint.indexed else (end - 1,):
                entry = index.entry(at) if left <= at < max(right, end) else None
                if at < end and entry:
                    reached = max(reached, entry.end)
                if left <= at < right and not self._holds(number, at, entry):
                    return None
            ends[number] = end
        if reached < limit:
            return None
        return ends if limit == self.confirmed else self._ends_by_walk(limit, ends)

    def _ends_by_walk(self, start: int, ends: dict[int, int]) -> dict[int, int]:
        walk = _Walk(self, start, {number: ends.get(number) for number in self._indexes})
        walk.go(self)
        nexts = self.checkpoint.nexts if self.checkpoint else {}
        return {
            number: nexts.get(number, 0) if end is None else end
            for number, end in walk.wanted.items()
        }

    # -- where messages stand --------------------------------------------------------------------

    def entry(self, partition: int, number: int) -> Entry | None:
        """What the index files say of a message."""
        index = self._indexes.get(partition)
        return None if index is None else index.entry(number)

    def left_of(self, partition: int) -> int:
        """The first message that the broker serves, by its index files."""
        index = self._indexes.get(partition)
        return (index.left or 0) if index is not None else 0

    def says(self, partition: int, number: int, count_: int, place: int) -> bool | None:
        """Whether the index files have a message (or batch of so many) just there; None: they have none of its number."""
        first, last, behind = (self.entry(partition, number + n) for n in (0, count_ - 1, count_))
        if first is None:
            return None
        is_there = last is not None and first.position == last.position == place
        return is_there and (behind is None or behind.position != place)

    def _holds(self, partition: int, number: int, entry: Entry | None) -> bool:
        """Whether the message that an index names is there, and says that it is this one; its body may be damaged."""
        raw = self.raw(entry) if entry else b""
        block = jmq_message.walk_messages(raw, 0, len(raw), size_max=len(raw))
        if not len(block) or block.end != len(raw) or not block.is_whole[0]:
            return False
        head = block.headers[0]
        first = int(head["index"])
        is_within = first <= number < first + int(block.counts()[0])
        return is_within and int(head["partition"]) == partition

    def raw(self, entry: Entry) -> bytes:
        """The bytes that an index says are a message; none where the journal has none."""
        span = self.readable.span_at(entry.position)
        if span is None or not span[0] <= entry.position or entry.end > span[1]:
            return b""
        size = min(entry.size, _RAW_BYTES_MAX)
        return self.readable.read(self.cache, span[0], entry.position, size)

    def place_of(self, partition: int, number: int) -> int:
        """A position from which on a walk meets a partition's message: its own, as a rule."""
        if number >= self.bounds[partition].end:
            return self.confirmed
        for n in range(_LOOKS_BACK):
            at = number - ((1 << n) - 1)
            entry = self.entry(partition, at) if at >= self.bounds[partition].min else None
            if entry and entry.end <= self.confirmed and self._holds(partition, at, entry):
                return entry.position
        places = self._places.get(partition, ())
        found = bisect_right(places, (number, _FAR)) - 1
        return places[found][1] if found >= 0 else self.row.left

    def note(self, partition: int, table: Longs) -> None:
        """Remember of messages that were met: the terms, and where the first of them stands."""
        real = table[:, table[_SIZE] > 0]
        if not real.shape[1]:
            return
        epochs = self._epochs.setdefault(partition, {})
        terms: npt.NDArray[np.int64] = epochs_of(real[_TAG])
        for n in np.flatnonzero(np.diff(terms, prepend=-2)).tolist():
            term, first = int(terms[n]), int(real[_INDEX, n])
            epochs[term] = min(first, epochs.get(term, first))
        places = self._places.setdefault(partition, [])
        place = int(real[_INDEX, 0]), int(real[_PLACE, 0])
        if bisect_left(places, place) == bisect_right(places, place):
            insort(places, place)
        if len(places) > _PLACES_MAX:
            del places[1::2]

    def epochs(self, partition: int) -> tuple[LeaderEpoch, ...]:
        """The terms of what is served, as far as they were met; those that begin where a higher one has begun left out."""
        found, low, least = list[LeaderEpoch](), _FAR, self.bounds[partition].min
        for term, first in sorted(self._epochs.get(partition, {}).items(), reverse=True):
            if low > least and first < low:
                low = max(first, least)
                found.append(LeaderEpoch(term, low))
        return tuple(reversed(found))

    # -- what waits ------------------------------------------------------------------------------

    def waiting(self) -> Waiting:
        """What is in the journal and not confirmed."""
        size = self.row.right - self.confirmed
        if size <= 0:
            return Waiting()
        above = [
            max(0, index.right() - self.bounds[number].end)
            for number, index in self._indexes.items()
        ]
        if self.checkpoint is None:
            reason = f"{self.folder}: no checkpoint.json of it could be read yet"
        elif self.confirmed < self.committed:
            reason = f"{self.folder}: nothing sound follows in its journal behind {self.confirmed}"
            if self.committed < self.row.right:
                reason += f" up to the commit position {self.committed}"
        else:
            reason = (
                f"{self.folder}: it is above the commit position {self.checkpoint.committed}"
                " that its checkpoint.json says"
            )
        is_damaged = self.confirmed < self.committed
        return Waiting(max(1, sum(above)), size, reason, is_damaged)


def _first_behind(index: IndexFiles, numbers: range, limit: int) -> int:
    """How many of an index's messages, counted from the first, end at or below a position."""

    def end_of(number: int) -> int:
        entry = index.entry(number)
        return _FAR if entry is None else entry.end

    return bisect_right(numbers, limit, key=end_of)


def _bounds(left: int, end: int) -> QueueBounds:
    return QueueBounds(QueueOffset(left), QueueOffset(max(left, end)))


# -- walks -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Found:
    """Messages and holes of one partition in a row: what will be a batch."""

    partition: int
    table: Longs
    data: Buffer
    quarantined: Sequence[Quarantined]


@dataclass(slots=True)
class _Sifted:
    """Messages and holes of one partition, as they are found one by one."""

    wanted: int
    items: list[Sequence[int]]
    quarantined: list[Quarantined]


class _Walk:
    """A way along a journal, up to what is confirmed. For one thread."""

    def __init__(self, group: _Group, position: int, wanted: dict[int, int | None]) -> None:
        """Begin.

        Args:
            wanted: With which index each partition goes on; None: with the first that is met. No others are looked at.
        """
        self.generation = group.generation
        self.position = position
        self.wanted = wanted
        self.firsts: dict[int, int] = {}  # of partitions that went on with the first that was met
        self._expected: dict[int, int] = {}
        self._lost_bytes = 0
        self._lost_at: dict[int, int] = {}

    def go(self, group: _Group) -> None:
        """Walk to the end, for what it tells of the partitions."""
        while self.position < group.confirmed:
            self.step(group, _STEP_BYTES)

    def step(self, group: _Group, size: int) -> tuple[list[_Found], int]:
        """The next bytes of the journal, about so many, and how many they were."""
        stretch = _read_stretch(group.readable, group.cache, self.position, group.confirmed, size)
        if stretch is None:
            self.position = group.confirmed
            return [], 0
        self._lost_bytes += stretch.start - self.position + stretch.lost_bytes
        self._begin(stretch)
        sifted = self._take_even(stretch)
        if sifted is None:
            sifted = self._sift(group, stretch)
        found = list[_Found]()
        for partition, (table, quarantined) in sifted.items():
            group.note(partition, table)
            found += self._found(partition, table, stretch.data, quarantined)
        self.position = stretch.end
        return found, stretch.end - stretch.start

    def _begin(self, stretch: _Stretch) -> None:
        """Let partitions begin of which nobody knows where."""
        for partition in [number for number, first in self.wanted.items() if first is None]:
            mine = np.flatnonzero((stretch.partitions == partition) & stretch.is_good)
            if len(mine):
                first = int(stretch.table[_INDEX, mine[0]])
                self.wanted[partition] = self.firsts[partition] = first

    def _take_even(
        self, stretch: _Stretch
    ) -> dict[int, tuple[Longs, Sequence[Quarantined]]] | None:
        """All messages, by partition, where each goes on where the one before ended; None: one does not."""
        if stretch.lost_bytes or not stretch.is_good.all():
            return None
        order = np.argsort(stretch.partitions, kind="stable")
        partitions, table = stretch.partitions[order], stretch.table[:, order]
        ends = table[_INDEX] + table[_COUNT]
        begins = np.flatnonzero(np.diff(partitions, prepend=-1))
        goes_on = np.append(False, table[_INDEX, 1:] == ends[:-1])
        found = dict[int, tuple[Longs, Sequence[Quarantined]]]()
        for at, until in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
            partition, first = int(partitions[at]), int(table[_INDEX, at])
            wanted = self.wanted.get(partition)
            if wanted is None:
                continue
            expected = self._expected.get(partition)
            is_right = first <= wanted if expected is None else first == expected
            if not is_right or not goes_on[at + 1 : until].all():
                return None
            taken = at + int(np.searchsorted(order[at:until], stretch.taken))
            if taken > at:
                found[partition] = table[:, at:taken], ()
        for partition, (mine, _) in found.items():
            self._expected[partition] = int(mine[_INDEX, -1] + mine[_COUNT, -1])
            self._lost_at[partition] = self._lost_bytes
        return found

    def _sift(
        self, group: _Group, stretch: _Stretch
    ) -> dict[int, tuple[Longs, Sequence[Quarantined]]]:
        """The same one by one, where something is damaged."""
        nexts, following = dict[int, int](), list[int]()
        for number in reversed(range(len(stretch.partitions))):
            partition = int(stretch.partitions[number])
            following.append(nexts.get(partition, -1))
            if stretch.is_good[number]:
                nexts[partition] = int(stretch.table[_INDEX, number])
        following.reverse()
        sifted = dict[int, _Sifted]()
        for number in range(stretch.taken):
            partition = int(stretch.partitions[number])
            wanted = self.wanted.get(partition)
            if wanted is not None:
                piece = sifted.setdefault(partition, _Sifted(wanted, [], []))
                if self._sift_one(group, stretch, number, following[number], piece):
                    continue
            elif partition in group.bounds:
                continue
            self._lost_bytes += int(stretch.table[_SIZE, number])
        return {
            partition: (np.array(piece.items, np.int64).T, piece.quarantined)
            for partition, piece in sifted.items()
            if piece.items
        }

    def _sift_one(
        self,
        group: _Group,
        stretch: _Stretch,
        number: int,
        following: int,  # index of the partition's next message; -1: it is not known
        piece: _Sifted,
    ) -> bool:
        """Take a message, and the holes before it; whether it is what it says."""
        partition, item = int(stretch.partitions[number]), stretch.table[:, number].tolist()
        index, end, place = item[_INDEX], item[_INDEX] + item[_COUNT], item[_PLACE]
        expected = self._expected.get(partition)
        wanted = piece.wanted
        if expected is None:
            expected = min(index, wanted)
        is_next = index == expected
        if not stretch.is_good[number]:
            if not (is_next and end > index):
                return False
            raw = stretch.data[item[_START] : item[_START] + item[_SIZE]]
            item[_SIZE], item[_TAG], item[_TIME] = 0, int(HoleReason.DAMAGED), -1
            if end > wanted:
                piece.quarantined.append(
                    _quarantined(max(index, wanted), place, "its body fails its checksum", raw)
                )
        elif not (is_next and following in {-1, end}):
            said = group.says(partition, index, item[_COUNT], place) if index >= expected else False
            was_lost = self._lost_bytes > self._lost_at.get(partition, 0)
            if not (is_next or was_lost if said is None else said):
                return False
        if index > expected:
            self._fill(group, partition, (max(expected, wanted), index), piece)
        piece.items.append(item)
        self._expected[partition], self._lost_at[partition] = end, self._lost_bytes
        return True

    @staticmethod
    def _fill(group: _Group, partition: int, gap: tuple[int, int], piece: _Sifted) -> None:
        """Holes for indexes that no message has: damaged where the index files say that one stands in the journal."""
        at, end = max(gap[0], min(group.left_of(partition), gap[1])), gap[1]
        if end - at > _HOLES_MAX:
            return
        while at < end:
            entry, first = group.entry(partition, at), at
            raw = group.raw(entry) if entry else b""
            at += 1
            while entry and at < end and group.entry(partition, at) == entry:
                at += 1
            reason = HoleReason.DAMAGED if raw else HoleReason.MISSING
            place = entry.position if entry and raw else -1
            piece.items.append((first, at - first, 0, 0, int(reason), -1, place))
            if raw:
                detail = "it is not what the index says"
                piece.quarantined.append(_quarantined(first, place, detail, raw))

    def _found(
        self, partition: int, table: Longs, data: bytes, quarantined: Sequence[Quarantined]
    ) -> list[_Found]:
        """What is wanted of a partition's messages, divided where indexes are passed over."""
        wanted = self.wanted[partition] or 0
        ends = table[_INDEX] + table[_COUNT]
        chosen = ends > wanted
        if not chosen.any():
            return []
        table, ends = table[:, chosen], ends[chosen]
        cut = max(0, wanted - int(table[_INDEX, 0]))
        table[_INDEX, 0] += cut
        table[_COUNT, 0] -= cut
        self.wanted[partition] = int(ends[-1])
        breaks = np.flatnonzero(table[_INDEX, 1:] != ends[:-1]) + 1
        return [
            _Found(partition, part, data, quarantined) for part in np.split(table, breaks, axis=1)
        ]


def _quarantined(index: int, place: int, detail: str, raw: bytes) -> Quarantined:
    return Quarantined(QueueOffset(index), PhysicalOffset(place), HoleReason.DAMAGED, detail, raw)


def _batch(
    queue: MessageQueue, found: _Found, bytes_max: int = _FAR, count_max: int = _FAR
) -> RecordBatch:
    """The batch of what was found, as much of it as may be: one message at least."""
    fits = int(np.searchsorted(np.cumsum(found.table[_SIZE]), bytes_max, side="right"))
    wanted = int(np.searchsorted(np.cumsum(found.table[_COUNT]), count_max)) + 1
    table = found.table[:, : max(1, min(fits, wanted))]
    sizes, counts, times = table[_SIZE], table[_COUNT], table[_TIME]
    is_hole = sizes == 0
    if is_hole.any() and not is_hole.all():
        last = np.maximum.accumulate(np.where(is_hole, -1, np.arange(len(sizes))))
        times = times[np.where(last < 0, np.argmin(is_hole), last)]
    view, starts, real = memoryview(found.data), table[_START], ~is_hole
    slices = map(slice, starts[real].tolist(), (starts + sizes)[real].tolist())
    base = int(table[_INDEX, 0])
    end = base + int(counts.sum())
    return RecordBatch(
        queue,
        QueueOffset(base),
        b"".join(map(view.__getitem__, slices)),
        np.repeat(np.cumsum(sizes) - sizes, counts),
        np.repeat(sizes, counts).astype(np.int32),
        np.repeat(table[_TAG], counts),
        np.repeat(times, counts),
        np.repeat(table[_PLACE], counts),
        [one for one in found.quarantined if base <= one.queue_offset < end],
    )


# -- store -------------------------------------------------------------------------------------------


class JmqStore:
    """A broker's store directory, read while the broker runs or after it has ended."""

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, clock: Clock | None = None) -> JmqStore:
        """Open a store directory: the one that has ``topics``."""
        return cls(os.fspath(directory), clock or SystemClock())

    def __init__(self, directory: str, clock: Clock) -> None:
        if not is_jmq(directory):
            raise InvalidError(
                "not a JoyQueue (JMQ 4) store: no topics/TOPIC/GROUP with a checkpoint.json or an index",
                where=directory,
                do="name the broker's store directory, which has topics/",
            )
        self._directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        self._cache, self._indexes = FileCache(_OPEN_MAX), FileCache(_INDEXES_OPEN_MAX)
        self._anomalies = AnomalyCounters()
        self._numbers = count()
        self._groups: dict[str, _Group] = {}
        self._owners: dict[MessageQueue, _Group] = {}
        self._left_out: list[LeftOut] = []
        self._groups_s = self._lefts_s = 0.0
        self._is_closed = False
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    # -- the interface ---------------------------------------------------------------------------

    @property
    def identity(self) -> StoreIdentity:
        """See ``LocalStore``. The files have no name of the cluster or the broker, nor a mark of their own."""
        return StoreIdentity(None, None, "", "jmq", is_locked(self._directory))

    def queues(self) -> Mapping[MessageQueue, QueueBounds]:
        with self._lock:
            return {queue: group.bounds[queue.queue_id] for queue, group in self._owners.items()}

    def refresh(self) -> None:
        with self._lock:
            self._groups_s = self._lefts_s = -_FAR
            self.groups()

    def read(
        self, queue: MessageQueue, start: QueueOffset, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        for _ in range(_READS_AGAIN):
            with self._lock:
                group = self._owner(queue)
                bounds = group.bounds[queue.queue_id] if group else None
                if group is None or bounds is None or start >= bounds.end:
                    return None
                walk = self._walk(group, queue.queue_id, max(start, bounds.min))
                size = bytes_max * len(group.bounds)
            found = list[_Found]()
            while not found and walk.position < group.confirmed:
                met, _ = walk.step(group, max(_STEP_BYTES_MIN, min(size, _STEP_BYTES)))
                found = [one for one in met if one.partition == queue.queue_id]
            if self.holds(group, walk):
                return self.batch(group, found[0], bytes_max, count_max) if found else None
        return None  # it changes faster than it can be read

    def read_compacted(
        self,
        queue: MessageQueue,
        start: QueueOffset,
        *,
        bytes_max: int,
        count_max: int,
    ) -> None:
        """See ``LocalStore``: no topic is compacted."""

    def follow(
        self,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> JmqFollower:
        return JmqFollower(self, starts, stop)

    def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """See ``LocalStore``. Store times need not be in order, so the messages are read one after another."""
        with self._lock:
            group = self._owner(queue)
            if group is None:
                return QueueOffset(0)
            bounds = group.bounds[queue.queue_id]
            walk = self._walk(group, queue.queue_id, bounds.min)
        while walk.position < group.confirmed:
            for found in walk.step(group, _STEP_BYTES)[0]:
                if found.partition != queue.queue_id:
                    continue
                late = (found.table[_SIZE] > 0) & (found.table[_TIME] >= timestamp_ms)
                if late.any():
                    return QueueOffset(int(found.table[_INDEX, int(np.argmax(late))]))
        return bounds.end

    def lineage(
        self,
        queue: MessageQueue,
        at: QueueOffset | None = None,  # noqa: ARG002 (transactions are elsewhere until they are committed)
    ) -> Lineage | None:
        """See ``LocalStore``: the terms of messages that were met so far."""
        with self._lock:
            group = self._owners.get(queue)
            return None if group is None else Lineage(epochs=group.epochs(queue.queue_id))

    def waiting(self) -> Waiting:
        with self._lock:
            found = [one for group in self._groups.values() if (one := group.waiting()).size_bytes]
            if not found:
                return Waiting()
            is_behind = any(one.is_behind_damage for one in found)
            first = next(one for one in found if one.is_behind_damage == is_behind)
            others = f", and {len(found) - 1} more groups" if len(found) > 1 else ""
            return Waiting(
                sum(one.records for one in found),
                sum(one.size_bytes for one in found),
                first.reason + others,
                is_behind and not is_locked(self._directory),
            )

    def report(self) -> StoreReport:
        with self._lock:
            groups, counters = list(self._groups.values()), self._anomalies.counts()
            return StoreReport(
                log_min=PhysicalOffset(min((group.row.left for group in groups), default=0)),
                log_end=PhysicalOffset(max((group.confirmed for group in groups), default=0)),
                damaged_records=counters.get(hole_counter(HoleReason.DAMAGED), 0),
                left_out=[*self._left_out, *(left for group in groups for left in group.left_out)],
                notes=self._anomalies.notes(),
                counters=counters,
            )

    def close(self) -> None:
        self._is_closed = True
        self._cache.close()
        self._indexes.close()

    # -- for the follower ------------------------------------------------------------------------

    def groups(self) -> list[_Group]:
        """The groups there are now, each looked at."""
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=self._directory)
        with self._lock:
            now_s = self._clock.monotonic_s()
            is_listed = now_s >= self._groups_s + _GROUPS_AGAIN_S
            if is_listed:
                self._groups_s = now_s
                self._list_groups()
            is_due = now_s >= self._lefts_s + _LEFTS_AGAIN_S
            self._lefts_s = now_s if is_due else self._lefts_s
            for group in self._groups.values():
                group.look(now_s)
                if is_due:
                    group.follow_partitions()
            if is_listed or is_due:
                self._own()
            return list(self._groups.values())

    def holds(self, group: _Group, walk: _Walk) -> bool:
        """Whether what a walk has read of a group is of what is there now."""
        with self._lock:
            group.look(self._clock.monotonic_s())
            return group.generation == walk.generation

    def batch(
        self, group: _Group, found: _Found, bytes_max: int = _FAR, count_max: int = _FAR
    ) -> RecordBatch:
        """The batch of what was found, its holes counted."""
        queue = MessageQueue(group.folder.topic, found.partition)
        made = _batch(queue, found, bytes_max, count_max)
        for number in np.flatnonzero(made.sizes == 0).tolist():
            reason = HoleReason(int(made.tag_codes[number]))
            self._anomalies.hole(queue, made.base_offset + number, reason)
        return made

    # -- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _walk(group: _Group, partition: int, start: int) -> _Walk:
        """A walk for one partition; what is met of the others tells whether a message is of them."""
        wanted: dict[int, int | None] = dict.fromkeys(group.bounds)
        return _Walk(group, group.place_of(partition, start), wanted | {partition: start})

    def _owner(self, queue: MessageQueue) -> _Group | None:
        """The group of a queue, looked at."""
        if self._is_closed:
            raise ClosedError("the local store has been closed", where=self._directory)
        group = self._owners.get(queue)
        if group is not None:
            group.look(self._clock.monotonic_s())
        return group if group is not None and queue.queue_id in group.bounds else None

    def _list_groups(self) -> None:
        folders, self._left_out = find_groups(self._directory)
        paths = {folder.path for folder in folders}
        for path in self._groups.keys() - paths:
            del self._groups[path]
            self._cache.drop_deleted()
            self._indexes.drop_deleted()
        for folder in folders:
            if folder.path not in self._groups:
                self._groups[folder.path] = _Group(
                    folder, self._cache, self._indexes, self._numbers
                )

    def _own(self) -> None:
        """Say whose each queue is: partitions have numbers of their own within a topic, whatever group they are in."""
        owners = dict[MessageQueue, _Group]()
        for group in self._groups.values():
            for partition in group.bounds:
                queue = MessageQueue(group.folder.topic, partition)
                if (other := owners.setdefault(queue, group)) is not group:
                    raise InvalidError(
                        f"partition {queue} is in two groups, {other.folder} and {group.folder}",
                        where=group.folder.path,
                        do="remove the folder that is not the broker's",
                    )
        self._owners = owners


# -- follower ----------------------------------------------------------------------------------------


class JmqFollower:
    """Gives what a store gets, group by group in the order of their journals, from where each queue's caller stands."""

    def __init__(
        self,
        store: JmqStore,
        starts: Mapping[MessageQueue, QueueOffset],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._stop = stop
        self._next = {queue: int(start) for queue, start in starts.items()}
        self._walks: dict[str, _Walk] = {}
        self._fallen: set[MessageQueue] = set()
        self._turn = 0
        self._is_idle = self._is_at_end = self._is_closed = False
        self._keep_up(store.groups())
        self._fallen.clear()  # the caller has just said where to go on

    @property
    def is_idle(self) -> bool:
        return self._is_idle

    @property
    def is_at_end(self) -> bool:
        return self._is_at_end

    def poll(self, window_bytes: int) -> list[RecordBatch]:
        """See ``Follower``. The groups have their turns; each gives what lies in one file at most."""
        if self._is_closed:
            raise ClosedError("the follower has been closed")
        groups = self._store.groups()
        self._keep_up(groups)
        self._turn += 1
        turn = self._turn % max(1, len(groups))
        batches, left = list[RecordBatch](), window_bytes
        for group in groups[turn:] + groups[:turn]:
            walk = self._walks[group.folder.path]
            found = list[RecordBatch]()
            while walk.position < group.confirmed and not found:
                if (batches and left <= 0) or self._stop():
                    break
                found, size = self._take(group, walk, max(left, 1))
                left -= size
                if self._walks.get(group.folder.path) is not walk:
                    break
            batches += found
        self._is_at_end = all(self._is_level(group) for group in groups)
        self._is_idle = self._is_at_end and not batches
        return batches

    def take_fallen(self) -> Collection[MessageQueue]:
        fallen, self._fallen = self._fallen, set()
        return fallen

    def seek(self, queue: MessageQueue, start: QueueOffset) -> None:
        self._next[queue] = int(start)
        for group in self._store.groups():
            if group.folder.topic == queue.topic and queue.queue_id in group.bounds:
                self._walks[group.folder.path] = self._begin(group)

    def close(self) -> None:
        """See ``Follower``. The store's files stay open."""
        self._is_closed = True

    def _is_level(self, group: _Group) -> bool:
        walk = self._walks.get(group.folder.path)
        return walk is not None and walk.position >= group.confirmed

    def _take(self, group: _Group, walk: _Walk, size: int) -> tuple[list[RecordBatch], int]:
        """The next step in a group's journal, unless that was changed meanwhile."""
        found, looked_at = walk.step(group, size)
        if not self._store.holds(group, walk):
            self._keep_up([group])
            return [], looked_at
        batches = [self._store.batch(group, one) for one in found]
        self._next.update((batch.queue, int(batch.end_offset)) for batch in batches)
        return batches, looked_at

    def _keep_up(self, groups: Sequence[_Group]) -> None:
        """Go on anew in groups that are new, or fell; what was known of their queues is to be held against them."""
        for group in groups:
            walk = self._walks.get(group.folder.path)
            if walk is None or walk.generation != group.generation:
                queues = (MessageQueue(group.folder.topic, number) for number in group.bounds)
                self._fallen.update(queue for queue in queues if queue in self._next)
            elif walk.wanted.keys() == group.bounds.keys():
                continue
            self._walks[group.folder.path] = self._begin(group)

    def _begin(self, group: _Group) -> _Walk:
        wanted: dict[int, int | None] = {}
        position = group.confirmed
        for partition, bounds in group.bounds.items():
            start = self._next.get(MessageQueue(group.folder.topic, partition), 0)
            wanted[partition] = start = max(start, bounds.min)
            position = min(position, group.place_of(partition, start))
        return _Walk(group, position, wanted)
