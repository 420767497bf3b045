"""One partition group of JoyQueue's: its journal, what of it is confirmed, and walking it message by message.

The contract is that of ``tiered.local.jmq``, which holds the groups of a store; nothing here knows of others. A walk belongs
to one thread, or is used under the store's lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.format import jmq_message
from tiered.format.record_kind import RecordKind, epochs_of, tag_codes
from tiered.local.interface import (
    HoleReason,
    LeaderEpoch,
    LeftOut,
    Quarantined,
    RecordBatch,
    Waiting,
)
from tiered.local.jmq_files import (
    GroupFolder,
    IndexFiles,
    JmqCheckpoint,
    JmqEntry,
    Row,
    file_mark,
    find_partitions,
    read_checkpoint,
    read_row,
)
from tiered.local.mapped_file_queue import FileCache, directory_stamp
from tiered.model import MessageQueue, PhysicalOffset, QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

Longs = npt.NDArray[np.int64]
OPEN_MAX: Final = 64
_LEAVING_S: Final = 60.0
STEP_BYTES: Final = 4 << 20
_AHEAD_BYTES: Final = 64 << 10
"""Looked at behind each step, so that its last messages are held against those that follow."""
_TAIL_BYTES: Final = 64 << 10
_HOLES_MAX: Final = 4096
"""More than so many indexes without a message are a range that is passed over, not items."""
_RAW_BYTES_MAX: Final = 16 << 20
_PLACES_MAX: Final = 4096
_LOOKS_BACK: Final = 8
_INDEX_END: Final = 2**62
FAR: Final = 2**63 - 1


# -- chunks of a journal --------------------------------------------------------------------------


# Rows of a table of items: one column a message, or a hole of some indexes.
INDEX_ROW, COUNT_ROW, START_ROW, SIZE_ROW, TAG_ROW, TIME_ROW, PLACE_ROW = range(7)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Messages of one file in a row, and what lies between them."""

    data: bytes
    partitions: Longs
    table: Longs  # int64[7, n]
    is_good: npt.NDArray[np.bool_]  # sound, and can be what it says
    taken: int  # so many of them are to be taken; the others are looked at only
    start: int  # position in the journal
    end: int  # where the next chunk begins
    lost_bytes: int  # of what lies between them


def _read_chunk(row: Row, cache: FileCache, position: int, limit: int, size: int) -> _Chunk | None:
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
    return _chunk(data, block, taken, (start, end), sum(b - a for a, b in lost))


def _chunk(
    data: bytes, block: jmq_message.MessageBlock, taken: int, span: tuple[int, int], lost_bytes: int
) -> _Chunk:
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
    table[COUNT_ROW, ~can_be] = 0
    good = block.is_sound & can_be
    return _Chunk(data, partitions, table, good, min(taken, len(block)), *span, lost_bytes)


# -- groups ------------------------------------------------------------------------------------------


class _GroupMarks(NamedTuple):
    """What a look at a group's files found: it changes when there may be something new."""

    folder: tuple[int, int] | None
    last: tuple[int, int, int] | None
    checkpoint: tuple[int, int, int] | None


class JmqGroup:
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
        self.checkpoint: JmqCheckpoint | None = None
        self.confirmed = 0  # position at which the last confirmed message ends
        self.committed = 0  # up to where the checkpoint would have it, as far as there are files
        self.bounds: dict[int, QueueBounds] = {}
        self.left_out: list[LeftOut] = []
        self._indexes: dict[int, IndexFiles] = {}
        self._tail: tuple[int, bytes] | None = (
            None  # the last confirmed message: position and header
        )
        self._seen: _GroupMarks | None = None
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
        seen = _GroupMarks(
            directory_stamp(path), file_mark(self.row.last_path), file_mark(self.folder.checkpoint)
        )
        if seen == self._seen:
            return
        checkpoint = read_checkpoint(self.folder) or self.checkpoint
        row = read_row(path)
        has_fallen = self._has_fallen(row, checkpoint)
        last = seen.last if row.last_path == self.row.last_path else file_mark(row.last_path)
        self._seen = _GroupMarks(seen.folder, last, seen.checkpoint)
        if has_fallen:
            self._forget()
        self._follow(row, now_s)
        is_new = checkpoint != self.checkpoint
        self.checkpoint = checkpoint
        committed = max(row.left, min(checkpoint.committed if checkpoint else 0, row.right))
        if has_fallen or is_new or committed != self.committed:
            self._confirm(committed, is_anew=has_fallen)

    def _has_fallen(self, row: Row, checkpoint: JmqCheckpoint | None) -> bool:
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
        for file in row.files[-OPEN_MAX:]:
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
            walk = JmqWalk(self, self.row.left, dict(lefts))
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
        walk = JmqWalk(self, start, {number: ends.get(number) for number in self._indexes})
        walk.go(self)
        nexts = self.checkpoint.nexts if self.checkpoint else {}
        return {
            number: nexts.get(number, 0) if end is None else end
            for number, end in walk.wanted.items()
        }

    # -- where messages stand --------------------------------------------------------------------

    def entry(self, partition: int, number: int) -> JmqEntry | None:
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

    def _holds(self, partition: int, number: int, entry: JmqEntry | None) -> bool:
        """Whether the message that an index names is there, and says that it is this one; its body may be damaged."""
        raw = self.raw(entry) if entry else b""
        block = jmq_message.walk_messages(raw, 0, len(raw), size_max=len(raw))
        if not len(block) or block.end != len(raw) or not block.is_whole[0]:
            return False
        head = block.headers[0]
        first = int(head["index"])
        is_within = first <= number < first + int(block.counts()[0])
        return is_within and int(head["partition"]) == partition

    def raw(self, entry: JmqEntry) -> bytes:
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
        found = bisect_right(places, (number, FAR)) - 1
        return places[found][1] if found >= 0 else self.row.left

    def note(self, partition: int, table: Longs) -> None:
        """Remember of messages that were met: the terms, and where the first of them stands."""
        real = table[:, table[SIZE_ROW] > 0]
        if not real.shape[1]:
            return
        epochs = self._epochs.setdefault(partition, {})
        terms: npt.NDArray[np.int64] = epochs_of(real[TAG_ROW])
        for n in np.flatnonzero(np.diff(terms, prepend=-2)).tolist():
            term, first = int(terms[n]), int(real[INDEX_ROW, n])
            epochs[term] = min(first, epochs.get(term, first))
        places = self._places.setdefault(partition, [])
        place = int(real[INDEX_ROW, 0]), int(real[PLACE_ROW, 0])
        if bisect_left(places, place) == bisect_right(places, place):
            insort(places, place)
        if len(places) > _PLACES_MAX:
            del places[1::2]

    def epochs(self, partition: int) -> tuple[LeaderEpoch, ...]:
        """The terms of what is served, as far as they were met; those that begin where a higher one has begun left out."""
        found, low, least = list[LeaderEpoch](), FAR, self.bounds[partition].min
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
        return FAR if entry is None else entry.end

    return bisect_right(numbers, limit, key=end_of)


def _bounds(left: int, end: int) -> QueueBounds:
    return QueueBounds(QueueOffset(left), QueueOffset(max(left, end)))


# -- walks -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class JmqFound:
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


class JmqWalk:
    """A way along a journal, up to what is confirmed. For one thread."""

    def __init__(self, group: JmqGroup, position: int, wanted: dict[int, int | None]) -> None:
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

    def go(self, group: JmqGroup) -> None:
        """Walk to the end, for what it tells of the partitions."""
        while self.position < group.confirmed:
            self.step(group, STEP_BYTES)

    def step(self, group: JmqGroup, size: int) -> tuple[list[JmqFound], int]:
        """The next bytes of the journal, about so many, and how many they were."""
        chunk = _read_chunk(group.readable, group.cache, self.position, group.confirmed, size)
        if chunk is None:
            self.position = group.confirmed
            return [], 0
        self._lost_bytes += chunk.start - self.position + chunk.lost_bytes
        self._begin(chunk)
        sifted = self._take_even(chunk)
        if sifted is None:
            sifted = self._sift(group, chunk)
        found = list[JmqFound]()
        for partition, (table, quarantined) in sifted.items():
            group.note(partition, table)
            found += self._found(partition, table, chunk.data, quarantined)
        self.position = chunk.end
        return found, chunk.end - chunk.start

    def _begin(self, chunk: _Chunk) -> None:
        """Let partitions begin whose first message is not known."""
        for partition in [number for number, first in self.wanted.items() if first is None]:
            mine = np.flatnonzero((chunk.partitions == partition) & chunk.is_good)
            if len(mine):
                first = int(chunk.table[INDEX_ROW, mine[0]])
                self.wanted[partition] = self.firsts[partition] = first

    def _take_even(self, chunk: _Chunk) -> dict[int, tuple[Longs, Sequence[Quarantined]]] | None:
        """All messages, by partition, where each goes on where the one before ended; None: one does not."""
        if chunk.lost_bytes or not chunk.is_good.all():
            return None
        order = np.argsort(chunk.partitions, kind="stable")
        partitions, table = chunk.partitions[order], chunk.table[:, order]
        ends = table[INDEX_ROW] + table[COUNT_ROW]
        begins = np.flatnonzero(np.diff(partitions, prepend=-1))
        goes_on = np.append(False, table[INDEX_ROW, 1:] == ends[:-1])
        found = dict[int, tuple[Longs, Sequence[Quarantined]]]()
        for at, until in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
            partition, first = int(partitions[at]), int(table[INDEX_ROW, at])
            wanted = self.wanted.get(partition)
            if wanted is None:
                continue
            expected = self._expected.get(partition)
            is_right = first <= wanted if expected is None else first == expected
            if not is_right or not goes_on[at + 1 : until].all():
                return None
            taken = at + int(np.searchsorted(order[at:until], chunk.taken))
            if taken > at:
                found[partition] = table[:, at:taken], ()
        for partition, (mine, _) in found.items():
            self._expected[partition] = int(mine[INDEX_ROW, -1] + mine[COUNT_ROW, -1])
            self._lost_at[partition] = self._lost_bytes
        return found

    def _sift(
        self, group: JmqGroup, chunk: _Chunk
    ) -> dict[int, tuple[Longs, Sequence[Quarantined]]]:
        """The same one by one, where something is damaged."""
        nexts, following = dict[int, int](), list[int]()
        for number in reversed(range(len(chunk.partitions))):
            partition = int(chunk.partitions[number])
            following.append(nexts.get(partition, -1))
            if chunk.is_good[number]:
                nexts[partition] = int(chunk.table[INDEX_ROW, number])
        following.reverse()
        sifted = dict[int, _Sifted]()
        for number in range(chunk.taken):
            partition = int(chunk.partitions[number])
            wanted = self.wanted.get(partition)
            if wanted is not None:
                piece = sifted.setdefault(partition, _Sifted(wanted, [], []))
                if self._sift_one(group, chunk, number, following[number], piece):
                    continue
            elif partition in group.bounds:
                continue
            self._lost_bytes += int(chunk.table[SIZE_ROW, number])
        return {
            partition: (np.array(piece.items, np.int64).T, piece.quarantined)
            for partition, piece in sifted.items()
            if piece.items
        }

    def _sift_one(
        self,
        group: JmqGroup,
        chunk: _Chunk,
        number: int,
        following: int,  # index of the partition's next message; -1: it is not known
        piece: _Sifted,
    ) -> bool:
        """Take a message, and the holes before it; whether it is what it says."""
        partition, item = int(chunk.partitions[number]), chunk.table[:, number].tolist()
        index, end, place = item[INDEX_ROW], item[INDEX_ROW] + item[COUNT_ROW], item[PLACE_ROW]
        expected = self._expected.get(partition)
        wanted = piece.wanted
        if expected is None:
            expected = min(index, wanted)
        is_next = index == expected
        if not chunk.is_good[number]:
            if not (is_next and end > index):
                return False
            raw = chunk.data[item[START_ROW] : item[START_ROW] + item[SIZE_ROW]]
            item[SIZE_ROW], item[TAG_ROW], item[TIME_ROW] = 0, int(HoleReason.DAMAGED), -1
            if end > wanted:
                piece.quarantined.append(
                    _quarantined(max(index, wanted), place, "its body fails its checksum", raw)
                )
        elif not (is_next and following in {-1, end}):
            said = (
                group.says(partition, index, item[COUNT_ROW], place) if index >= expected else False
            )
            was_lost = self._lost_bytes > self._lost_at.get(partition, 0)
            if not (is_next or was_lost if said is None else said):
                return False
        if index > expected:
            self._fill(group, partition, (max(expected, wanted), index), piece)
        piece.items.append(item)
        self._expected[partition], self._lost_at[partition] = end, self._lost_bytes
        return True

    @staticmethod
    def _fill(group: JmqGroup, partition: int, gap: tuple[int, int], piece: _Sifted) -> None:
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
    ) -> list[JmqFound]:
        """What is wanted of a partition's messages, divided where indexes are passed over."""
        wanted = self.wanted[partition] or 0
        ends = table[INDEX_ROW] + table[COUNT_ROW]
        chosen = ends > wanted
        if not chosen.any():
            return []
        table, ends = table[:, chosen], ends[chosen]
        cut = max(0, wanted - int(table[INDEX_ROW, 0]))
        table[INDEX_ROW, 0] += cut
        table[COUNT_ROW, 0] -= cut
        self.wanted[partition] = int(ends[-1])
        breaks = np.flatnonzero(table[INDEX_ROW, 1:] != ends[:-1]) + 1
        return [
            JmqFound(partition, part, data, quarantined) for part in np.split(table, breaks, axis=1)
        ]


def _quarantined(index: int, place: int, detail: str, raw: bytes) -> Quarantined:
    return Quarantined(QueueOffset(index), PhysicalOffset(place), HoleReason.DAMAGED, detail, raw)


def batch_of(
    queue: MessageQueue, found: JmqFound, bytes_max: int = FAR, count_max: int = FAR
) -> RecordBatch:
    """The batch of what was found, as much of it as may be: one message at least."""
    fits = int(np.searchsorted(np.cumsum(found.table[SIZE_ROW]), bytes_max, side="right"))
    wanted = int(np.searchsorted(np.cumsum(found.table[COUNT_ROW]), count_max)) + 1
    table = found.table[:, : max(1, min(fits, wanted))]
    sizes, counts, times = table[SIZE_ROW], table[COUNT_ROW], table[TIME_ROW]
    is_hole = sizes == 0
    if is_hole.any() and not is_hole.all():
        last = np.maximum.accumulate(np.where(is_hole, -1, np.arange(len(sizes))))
        times = times[np.where(last < 0, np.argmin(is_hole), last)]
    view, starts, real = memoryview(found.data), table[START_ROW], ~is_hole
    slices = map(slice, starts[real].tolist(), (starts + sizes)[real].tolist())
    base = int(table[INDEX_ROW, 0])
    end = base + int(counts.sum())
    return RecordBatch(
        queue,
        QueueOffset(base),
        b"".join(map(view.__getitem__, slices)),
        np.repeat(np.cumsum(sizes) - sizes, counts),
        np.repeat(sizes, counts).astype(np.int32),
        np.repeat(table[TAG_ROW], counts),
        np.repeat(times, counts),
        np.repeat(table[PLACE_ROW], counts),
        [one for one in found.quarantined if base <= one.queue_offset < end],
    )
