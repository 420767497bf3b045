"""Reading the commit log in its own order, a chunk at a time, into one buffer that is used again."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format.block import RecordBlock, Stop, split_records
from tiered.format.items import is_filler
from tiered.format.record import SIZE_AND_MAGIC, RecordFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.format.broker_checkpoint import Checkpoint
    from tiered.format.items import Items
    from tiered.local.consumequeues import Flags, Longs, QueueIndex
    from tiered.local.mapped_file_queue import MappedFileQueue

# -- the consume queues as an index --------------------------------------------------------------
#
# The consume queues as an index of the log: where its records begin, read ahead for many queues at once.
#
# Entries of all queues, merged by the places that they name, tile a sound log. They are hints: ``walk_records`` checks
# them against the sizes and magics in the log, so stale or missing entries cost a walk record by record, and nothing
# else. A queue that cannot be read has no hints; reading its messages reports the error.

_SPAN_BYTES: Final = 64 << 20
"""Of the log that is looked ahead at once: a read of each queue is paid once for so much."""
_QUEUES_MAX: Final = 1024
"""Queues that are read ahead; with more, their reads cost more than walking the log."""
_UNITS_MIN: Final = 256
_NONE: Final = np.zeros((2, 0), np.int64)


class LogIndex:
    """Where records begin, as far as consume queues say. For one thread at a time."""

    def __init__(
        self, queues: Callable[[], Iterable[tuple[QueueIndex, int | None]]], small: Longs = _NONE
    ) -> None:
        """Ask later.

        Args:
            queues: Each queue of interest, with a unit before which none is of interest; None: not known. Asked for
                each span of the log.
            small: int64[2, n], the places that other queues list, rising, and the sizes beside them.
        """
        self._queues = queues
        self._small = small
        self._start = self._end = 0  # of the log, that ``_listed`` is about
        self._listed = _NONE  # int64[2, n], as of ``small``
        self._cursors: dict[QueueIndex, tuple[int, int]] = {}
        """The first unit of each queue that names a place at or behind ``_end``, and how many to read at once."""

    def places(self, start: int, end: int, limit: int) -> Longs:
        """Places of records in ``[start, end)``, rising.

        Args:
            limit: What lies below it is listed by now.
        """
        places: Longs = self._between(start, end, limit)[0]
        return places

    def tiled_end(self, start: int, end: int) -> int:
        """Up to where records lie one behind the other from ``start`` on, each listed once; at most ``end``."""
        at = start
        while at < end:
            places, sizes = self._between(at, min(end, at + _SPAN_BYTES), end)
            ends = places + sizes
            leads_on = np.concatenate((places[:1] == at, places[1:] == ends[:-1]))
            count = len(places) if leads_on.all() else int(np.argmin(leads_on))
            if not count:
                break
            at = int(ends[count - 1])
            if count < len(places):
                break
        return at

    def _between(self, start: int, end: int, limit: int) -> Longs:
        if not self._start <= start <= self._end:
            self._start = self._end = start
            self._listed, self._cursors = _NONE, {}
        if end > self._end:
            self._read_ahead(start, min(max(end, start + _SPAN_BYTES), limit))
        low, high = np.searchsorted(self._listed[0], (start, end)).tolist()
        return self._listed[:, low:high]

    def _read_ahead(self, start: int, end: int) -> None:
        low, high = np.searchsorted(self._small[0], (self._end, end)).tolist()
        found = [self._small[:, low:high]]
        queues = list(self._queues())
        for index, first in queues if len(queues) <= _QUEUES_MAX else ():
            with suppress(InvalidError):  # hints only: reading its messages reports it
                found += self._read(index, first, end)
        kept = self._listed[:, np.searchsorted(self._listed[0], start) :]
        more = np.concatenate(found, axis=1)
        self._listed = np.concatenate((kept, more[:, np.argsort(more[0], kind="stable")]), axis=1)
        self._start, self._end = start, end

    def _read(self, index: QueueIndex, first: int | None, end: int) -> Iterable[Longs]:
        """What a queue lists from where it was read to, up to ``end`` of the log."""
        unit, count = self._cursors.get(index, (first, _UNITS_MIN))
        if unit is None:
            unit = self._first_unit(index)
        begun = unit
        while True:
            units = index.units(unit, unit + count)
            places = units["physical_offset"].astype(np.int64)
            good = _are_good(index, units)
            is_behind = good & (places >= end)
            # What is not written yet is read again the next time.
            written = np.flatnonzero(good)
            size = int(written[-1]) + 1 if len(written) else 0
            if is_behind.any():
                size = int(np.argmax(is_behind))
            unit += size
            chosen = np.flatnonzero(good[:size] & (places[:size] >= self._end))
            yield np.stack((places[chosen], units["size"][chosen].astype(np.int64)))
            if size < count:
                break
            count *= 2
        self._cursors[index] = unit, max(_UNITS_MIN, (unit - begun) * 5 // 4)

    def _first_unit(self, index: QueueIndex) -> int:
        """Before it a queue lists nothing at or behind ``_end``: most walks begin where the log does, as queues do."""
        start = self._end
        low, high = index.unit_span()
        first = index.units(low, min(high, low + 1))
        if len(first) and _are_good(index, first).all() and first["physical_offset"][0] >= start:
            return low
        return index.split(low, high, lambda units: units["physical_offset"] < start)


def _are_good(index: QueueIndex, units: Items) -> Flags:
    good = index.is_valid(units)
    return good if index.is_batch else good & ~is_filler(units)


# -- chunks ------------------------------------------------------------------------------------------


_HEAD: Final = Struct(">i")
RECORD_BYTES_MAX: Final = 128 << 20
"""No record is longer (brokers allow 4 MiB by default); what claims to be is damage."""
CHUNK_BYTES: Final = 8 << 20
"""What is looked at in one go."""
FAR: Final = 2**63 - 1
"""Beyond every place of a log."""
_VIEW_BYTES_MIN: Final = 1 << 16
_COMPARED_BYTES: Final = 1 << 18


class Next(Enum):
    """What stands behind the records of a chunk."""

    MORE = "more"
    """The chunk was cut here; the log goes on."""
    FILE = "file"
    """The rest of the file is blank, or full to the last byte; go on with the next file."""
    NOTHING = "nothing"
    """Zeros: nothing has been written here, or it was lost."""
    BROKEN = "broken"
    """Bytes that are no record."""
    LIMIT = "limit"
    """The limit that was given."""


@dataclass(slots=True)
class Chunk:
    """Records read from the log. Valid until the next chunk is read into the same buffer."""

    start: int  # local physical offset of the first byte
    end: int  # local physical offset of one past the last record
    block: RecordBlock  # the records; their positions are relative to ``start``
    follows: Next  # what stands at ``end``
    next_file: int | None  # where the next file begins, if ``follows`` is ``FILE`` and there is one


class LogChunks:
    """Reads chunks of one log. For one thread at a time."""

    def __init__(self, log: MappedFileQueue, index: LogIndex | None = None) -> None:
        """Begin with nothing read.

        Args:
            index: Says where records may begin, which spares following them one by one.
        """
        self._log = log
        self._index = index
        self._buffer = memoryview(b"")

    def read(
        self,
        position: int,
        limit: int,
        bytes_max: int,
        *,
        check_crc: bool = True,
        check_place: bool = True,
    ) -> Chunk:
        """Read the records from ``position`` on, where one begins, from one file; nothing at or beyond ``limit``.

        ``bytes_max`` to look at; more when the first record is larger. ``check_place``: compare each record's own physical
        offset with its place.
        """
        base = self._log.base_of(position)
        if base is None:
            return self._nothing(position)
        stop_at = min(limit, base + self._log.file_bytes)
        chunk = self._read(position, stop_at, bytes_max, check_crc, check_place)
        if not len(chunk.block) and chunk.follows is Next.MORE:
            # The first record is longer than what was looked at; or it claims to be.
            size = _HEAD.unpack(self._log.read(position, 4).ljust(4, b"\0"))[0]
            if bytes_max < size <= stop_at - position:
                chunk = self._read(position, stop_at, size, check_crc, check_place)
            if not len(chunk.block) and chunk.follows is Next.MORE:
                chunk.follows = Next.BROKEN
        if chunk.follows is Next.FILE:
            chunk.next_file = self._log.next_base(base)
        return chunk

    def is_complete(self, position: int) -> bool:
        """Whether the file of ``position`` is written to its end: a record stands in the next one."""
        base = self._log.base_of(position)
        following = self._log.next_base(base) if base is not None else None
        head = b"" if following is None else self._log.read(following, SIZE_AND_MAGIC.size)
        return len(head) == SIZE_AND_MAGIC.size and SIZE_AND_MAGIC.unpack(head)[1] != 0

    def count_unchanged(self, chunk: Chunk, count: int) -> int:
        """How many of the chunk's first ``count`` records have the same bytes when they are read again."""
        block = chunk.block
        ends = block.positions[:count] + block.sizes[:count]
        end = int(ends[-1]) if count else 0
        before = np.frombuffer(memoryview(block.buffer), np.uint8, end)
        for start in range(0, end, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, end - start)
            now = np.frombuffer(self._log.read(chunk.start + start, size), np.uint8)
            same = before[start : start + len(now)] == now
            if len(now) < size or not same.all():
                first = start + (len(now) if same.all() else int(np.argmin(same)))
                return int(np.searchsorted(ends, first, side="right"))
        return count

    def _read(
        self, position: int, stop_at: int, bytes_max: int, check_crc: bool, check_place: bool
    ) -> Chunk:
        wanted = max(0, min(bytes_max, stop_at - position))
        view = self._view(wanted)
        count = self._log.read_into(position, view)
        hints = None
        if self._index is not None:
            hints = self._index.places(position, position + count, stop_at) - position
        block, walk = split_records(
            view[:count],
            0,
            count,
            physical_offset=position if check_place else None,
            size_max=min(RECORD_BYTES_MAX, self._log.file_bytes),
            check_crc=check_crc,
            hints=hints,
        )
        if self._log.has_lost:  # no checksum covers all of a record
            block.faults[self._log.lost(walk.positions + position, walk.sizes)] = RecordFault.CRC
        end = position + walk.end
        return Chunk(
            position, end, block, self._follows(walk.stop, end, stop_at, count < wanted), None
        )

    def _follows(self, stop: Stop, end: int, stop_at: int, is_short: bool) -> Next:
        if end >= stop_at:
            is_full = self._log.file_bytes and not self._log.within(end)
            return Next.FILE if is_full else Next.LIMIT
        if stop is Stop.BLANK:
            return Next.FILE
        if stop is Stop.EMPTY:
            return Next.NOTHING
        if stop is Stop.FAULT:
            return Next.BROKEN
        return Next.NOTHING if is_short else Next.MORE

    def _view(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            # A new one: arrays may still look into the old one.
            self._buffer = memoryview(np.empty(max(size, _VIEW_BYTES_MIN), np.uint8).data)
        return self._buffer[:size]

    def _nothing(self, position: int) -> Chunk:
        chunk = self._read(position, position, 0, check_crc=False, check_place=False)
        chunk.follows = Next.NOTHING
        return chunk


# -- lookahead ---------------------------------------------------------------------------------------
#
# Looking ahead in a running broker's log, beyond the frontier, for a record that proves something of those before it.

_AGAIN_S: Final = 1.0
_WATCHED_BYTES: Final = 64
_BLANK_BYTES: Final = 1 << 20


def find_new(log: MappedFileQueue, position: int, started_ms: int) -> int:
    """Where the first record stored at or after ``started_ms`` begins, from ``position`` on; -1 when there is none yet."""
    for chunk, count in walk_sound(log, position):
        new = np.flatnonzero(chunk.block.store_timestamps_ms[:count] >= started_ms)
        if len(new):
            return chunk.start + int(chunk.block.positions[new[0]])
    return -1


def walk_sound(
    log: MappedFileQueue, position: int, *, check_crc: bool = False
) -> Iterator[tuple[Chunk, int]]:
    """Chunks from ``position`` on, each with its number of sound records, up to the first that is not sound."""
    chunks = LogChunks(log)
    at: int | None = position
    while at is not None:
        chunk = chunks.read(at, FAR, CHUNK_BYTES, check_crc=check_crc)
        count = count_sound(chunk)
        yield chunk, count
        at = following(chunk) if count == len(chunk.block) else None


def chain_end(log: MappedFileQueue, position: int) -> int:
    """Where the row of sound records ends that begins at ``position``; in the next file where one is full."""
    end = position
    for chunk, count in walk_sound(log, position):
        whole = chunk.block.positions[:count] + chunk.block.sizes[:count]
        end = chunk.start + int(whole[-1]) if count else chunk.start
        if count == len(chunk.block) and chunk.follows is Next.FILE:
            base = log.base_of(chunk.start)
            end = chunk.next_file or (chunk.end if base is None else base + log.file_bytes)
    return end


class Growth:
    """What of a running broker's log is proven without a clock, by its growing.

    A broker writes its log from one place on, and nothing behind that place changes before it comes there. So once the bytes
    at a place have changed, all that lies before it is the broker's log, whatever times its records bear. Under the
    store's lock.
    """

    def __init__(self, log: MappedFileQueue, clock: Clock) -> None:
        self.settled = 0  # what begins below it is the broker's log
        self._log = log
        self._clock = clock
        self._place = self._blank_to = -1
        self._before = b""
        self._looked_s = -_AGAIN_S

    def watch(self, position: int) -> None:
        """Look at the end of the records that begin at ``position``: whether it has changed; at most every second."""
        now_s = self._clock.monotonic_s()
        if now_s < self._looked_s + _AGAIN_S:
            return
        self._looked_s = now_s
        if self._place < position:
            self._mark(chain_end(self._log, position))
            return
        self._log.rescan()
        found = self._log.read(self._place, len(self._before) or _WATCHED_BYTES)
        if not any(found) or found == self._before:
            return  # (a file that has come is zeros at first)
        end = chain_end(self._log, self._place)
        # Of what stands there now, what stands where nothing was is new; of other bytes the first record is, at least.
        self.settled = max(self._place + 1, min(end, self._blank_to))
        self._mark(end)

    def _mark(self, place: int) -> None:
        self._place, self._before = place, self._log.read(place, _WATCHED_BYTES)
        self._blank_to = self._blank_end(place)

    def _blank_end(self, place: int) -> int:
        """Up to where nothing has been written yet from ``place`` on, as far as a look shows."""
        base = self._log.base_of(place)
        if base is not None:
            end = base + self._log.file_bytes
            data = self._log.read(place, min(_BLANK_BYTES, end - place))
            blank = place + len(data) - len(data.lstrip(b"\0"))
            if len(data) > blank - place or (
                self._log.next_data(blank) is not None and blank < end
            ):
                return blank
        # To the end of its file: a broker's start has deleted later ones, so any that has something is of this broker.
        later = (self._log.read(one, _WATCHED_BYTES) for one in self._log.bases if one > place)
        return place if any(map(any, later)) else FAR


def following(chunk: Chunk) -> int | None:
    """Where the log goes on behind a chunk; None at its end."""
    if chunk.follows is Next.MORE:
        return chunk.end
    return chunk.next_file if chunk.follows is Next.FILE else None


# -- recovery ----------------------------------------------------------------------------------------
#
# Where the log of a stopped store ends: what a broker of version 5.5.0 would decide at its next start.
#
# =========================== ==========================================================================
# question                    answer
# =========================== ==========================================================================
# which file to begin with    going back from the last file, the first that qualifies; at most ten files
#                             are looked at, and the tenth is taken as it is
# a file qualifies            its first record is sound and has a store time, and
# - after a clean stop        it lies not beyond the end of what any consume queue lists
# - after a crash             it lies not beyond the checkpoint's logics physical offset, or, when that
#                             is 0, was not stored after the checkpoint's logics time
# where the log ends          at the first record, from there, that fails: magic, size, lengths or CRC
#                             (its own physical offset is not compared); a blank leads to the next file
# =========================== ==========================================================================
#
# The plan is pure; ``find_log_end`` reads. Damage before the file that recovery begins with is not seen by a broker's
# start, and not by this module: readers meet it as holes.

FILES_LOOKED_AT_MAX: Final = 10
"""``commitLogRecoverMaxNum`` by default."""
_HEAD_BYTES: Final = 1 << 16
_ZEROS: Final = bytes(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class FileHead:
    """The first record of a log file, as recovery looks at it."""

    base: int  # where the file begins
    is_sound: bool  # there is a record and it passes recovery's checks
    physical_offset: int = 0  # what the record says
    store_timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """What recovery decides."""

    start: int  # where the file begins with which recovery begins
    end: int  # one past the last record
    torn_bytes: int
    """Bytes behind the end, in its file and the next ones, up to the last that is not zero."""


def plan_start(
    heads: Sequence[FileHead], *, is_clean: bool, checkpoint: Checkpoint, listed_end: int
) -> int:
    """Where the file begins with which recovery begins.

    ``heads``: of the last files, newest first, as many as there are up to ``FILES_LOOKED_AT_MAX``; at least one.
    ``is_clean``: there is no ``abort`` file. ``listed_end``: end of the last record that any consume queue lists; -1 when
    there is none.
    """
    for head in heads:
        if (
            head.is_sound
            and head.store_timestamp_ms
            and _qualifies(head, is_clean, checkpoint, listed_end)
        ):
            return head.base
    return heads[-1].base


def _qualifies(head: FileHead, is_clean: bool, checkpoint: Checkpoint, listed_end: int) -> bool:
    if is_clean:
        return head.physical_offset <= listed_end
    if checkpoint.logics_physical_offset > 0:
        return head.physical_offset <= checkpoint.logics_physical_offset
    return head.store_timestamp_ms <= checkpoint.logics_timestamp_ms


def read_heads(log: MappedFileQueue, chunks: LogChunks) -> list[FileHead]:
    """The first records of the last files, newest first."""
    return [read_head(chunks, base) for base in log.bases[: -FILES_LOOKED_AT_MAX - 1 : -1]]


def read_head(chunks: LogChunks, base: int) -> FileHead:
    """The first record of one file."""
    chunk = chunks.read(base, base + _HEAD_BYTES, _HEAD_BYTES, check_crc=False, check_place=False)
    if not len(chunk.block):
        chunk = chunks.read(base, FAR, _HEAD_BYTES, check_crc=False, check_place=False)
    if not len(chunk.block):
        return FileHead(base, is_sound=False)
    size = int(chunk.block.sizes[0])
    block = chunks.read(base, base + size, size, check_place=False).block
    if not len(block) or block.faults[0] != RecordFault.OK:
        return FileHead(base, is_sound=False)
    return FileHead(base, True, int(block.physical_offsets[0]), int(block.store_timestamps_ms[0]))


def find_log_end(
    log: MappedFileQueue, chunks: LogChunks, start: int, visit: Callable[[Chunk, int], None]
) -> LogEnd:
    """Walk from ``start`` to where recovery stops; ``visit``: given each chunk and how many of its first records count."""
    position = start
    while True:
        chunk = chunks.read(position, FAR, CHUNK_BYTES, check_place=False)
        sound = count_sound(chunk)
        visit(chunk, sound)
        if sound < len(chunk.block):
            position = chunk.start + int(chunk.block.positions[sound])
            break
        position = chunk.end
        if chunk.follows is Next.FILE and chunk.next_file is not None and _leads_on(log, position):
            position = chunk.next_file
        elif chunk.follows is not Next.MORE:
            break
    return LogEnd(start, position, _torn_bytes(log, position))


def count_sound(chunk: Chunk) -> int:
    """How many records, from the first, have no fault."""
    faulty = chunk.block.faults != RecordFault.OK
    return int(faulty.argmax()) if faulty.any() else len(chunk.block)


def _leads_on(log: MappedFileQueue, position: int) -> bool:
    """Whether recovery goes on to the next file: only from a blank that does not claim more than the file has."""
    within = log.within(position)
    if not within:
        return False  # a file without a blank: recovery stops at its last byte
    head = log.read(position, 4)
    return int.from_bytes(head, "big", signed=True) <= log.file_bytes - within


def _torn_bytes(log: MappedFileQueue, end: int) -> int:
    """How far behind the end there are bytes that are not zero."""
    last = end
    base = log.base_of(end)
    while base is not None:
        at: int | None = max(base, end)
        while at is not None and (at := log.next_data(at)) is not None:
            data = log.read(at, CHUNK_BYTES)
            if not data:
                break
            if data != _ZEROS[: len(data)]:  # a comparison runs at memory speed, stripping does not
                last = at + len(data.rstrip(b"\0"))
            at += len(data)
            if at >= base + log.file_bytes:
                break
        base = log.next_base(base)
    return last - end
