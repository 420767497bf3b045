"""The commit log of a store that is being written: one writer gives places, and writes.

**Contract.** ``append`` takes one lock: log order is the order in which calls got it. Places count only once the bytes
are in their files; a write that fails is taken back (the bytes are zeroed again) and changes nothing, unless even that
fails: then ``is_broken``, and nothing more is taken. Store times never go back. What was appended survives the end of
the process; ``sync`` brings it to the disk. After a sync that failed all later ones fail, and nothing more is taken: the
system may have dropped what it could not write, and the next sync would not tell. ``seal`` ends the appends.
"""

from __future__ import annotations

import errno
import os
import threading
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tiered.crashpoints import reached
from tiered.errors import ClosedError
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.local.files import NAME_DIGITS
from tiered.local.layout import LOG_DIRECTORY
from tiered.store.encoding import RecordPlaces
from tiered.store.facts import StoredHandover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.store.disk import RowWriter
    from tiered.store.encoding import Prepared, QueueKey


_Data = TypeVar("_Data")
_PIECE_BYTES_MIN: Final = 1024
"""From here on the mean piece of an append is written from where it lies: of bodies, from about 4 KiB."""


class CommitLog:
    """See the module.

    Attributes:
        end: Physical offset behind the last record.
        synced: What is below it is on the disk.
        store_ms: Store time of the last record.
        handover: What was appended, for the thread that lists it.
        is_broken: Bytes may stand behind ``end`` that were refused and could not be taken back.
    """

    def __init__(
        self,
        root: str,
        file_bytes: int,
        *,
        end: int,
        store_ms: int,
        queue_ends: Mapping[QueueKey, int],
        rows: RowWriter,
        clock: Clock,
    ) -> None:
        self.end = self.synced = end
        self.store_ms = store_ms
        self.handover = StoredHandover()
        self.is_broken = False
        self._folder = f"{root}/{LOG_DIRECTORY}"
        self._file_bytes = file_bytes
        self._queue_ends = dict(queue_ends)
        self._rows = rows
        self._clock = clock
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._is_sealed = self._has_lost = False

    def seal(self) -> None:
        """Take nothing more: whoever appends from now on gets ``ClosedError``."""
        with self._lock:
            self._is_sealed = True

    def queue_end(self, queue: QueueKey) -> int:
        """Queue offset of the next message of a queue."""
        return self._queue_ends.get(queue, 0)

    def begin_queue(self, queue: QueueKey, offset: int) -> bool:
        """Let a queue without messages begin at ``offset``; False when it has messages."""
        with self._lock:
            if queue in self._queue_ends:
                return False
            self._queue_ends[queue] = offset
            return True

    def append(self, messages: Prepared, store_host: bytes) -> RecordPlaces:
        """Put messages one behind another, none of others between them.

        Raises:
            OSError: The disk refused it: nothing was stored.
            InvalidError: A number does not fit: nothing was stored.
        """
        with self._lock:
            self._check_sound()
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            begin = self.end
            plan = _AppendPlan(messages, begin, self._file_bytes, self._queue_ends)
            heads = messages.heads(plan.queue_offsets, plan.positions, now_ms, store_host)
            self._write(plan.pieces(messages, heads), plan.end)
            self._queue_ends.update(plan.moved)
            places = RecordPlaces(plan.queue_offsets, plan.positions, plan.end, now_ms)
            if plan.end > begin:
                self.handover.give(begin, messages, places)
            self.end, self.store_ms = plan.end, now_ms
            return places

    def append_made(
        self, queue: QueueKey, takes: int, make: Callable[[int, int, int], bytes]
    ) -> RecordPlaces:
        """Put one record that is made for its place.

        Args:
            queue: Whose record it is.
            takes: Queue offsets it takes: of an inner batch, one for each message.
            make: The record for a queue offset, a physical offset and a store time; its length depends on the first only.

        Raises:
            OSError: The disk refused it: nothing was stored.
            InvalidError: ``make`` refused it: nothing was stored.
        """
        with self._lock:
            self._check_sound()
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            offset, position = self._queue_ends.get(queue, 0), self.end
            pieces = [make(offset, position, now_ms)]
            room = self._file_bytes - position % self._file_bytes - BLANK_BYTES_MIN
            if len(pieces[0]) > room:
                position += room + BLANK_BYTES_MIN
                blank = SIZE_AND_MAGIC.pack(room + BLANK_BYTES_MIN, MAGIC_BLANK) + bytes(room)
                pieces = [blank, make(offset, position, now_ms)]
            end = position + len(pieces[-1])
            self._write(pieces, end)
            self._queue_ends[queue] = offset + takes
            self.end, self.store_ms = end, now_ms
            return RecordPlaces((offset,), (position,), end, now_ms)

    def sync(self) -> int:
        """Bring to the disk what was appended before this call.

        Returns:
            What is now below ``synced``.

        Raises:
            OSError: It may not be there, nor will a later call bring it there.
        """
        with self._sync_lock:
            if self._has_lost:
                raise OSError(errno.EIO, "an earlier sync failed")
            end = self.end
            if end > self.synced:
                self._has_lost = True  # unless it ends well
                self._rows.sync()
                self._has_lost = False
                self.synced = end
            return self.synced

    def _check_sound(self) -> None:
        """Under the lock, where nobody can have failed since."""
        if self._is_sealed:
            raise ClosedError("the store has been closed", where=self._folder)
        if self.is_broken:
            raise OSError(errno.EIO, "an earlier write could not be taken back")

    def _write(self, pieces: Sequence[bytes], end: int) -> None:
        # Small pieces are joined, which costs less than having the system take each; large ones are not copied.
        if end - self.end < _PIECE_BYTES_MIN * len(pieces):
            self._write_at(self._rows.write, b"".join(pieces), end)
        else:
            self._write_at(self._rows.write_pieces, pieces, end)

    def _write_at(
        self, write: Callable[[str, int, int, _Data], None], data: _Data, end: int
    ) -> None:
        try:
            write(self._folder, self._file_bytes, self.end, data)
        except BaseException:
            self._take_back(end)
            raise
        reached("store-appended")

    def _take_back(self, end: int) -> None:
        """Zero what a failed write may have left."""
        self.is_broken = True
        at = self.end
        while at < end:
            base = at - at % self._file_bytes
            path = f"{self._folder}/{base:0{NAME_DIGITS}d}"
            if Path(path).exists():
                os.truncate(path, at - base)
                os.truncate(path, self._file_bytes)
                self._rows.mark(path)
            at = base + self._file_bytes
        self.is_broken = False


class _AppendPlan:
    """Gives places, in memory.

    Attributes:
        end: Physical offset behind the last record.
        queue_offsets, positions: Of each record.
        moved: Where the queues go on.
        blanks: Where a file is filled up: the number of the record before which that is, and what is left of the file.
    """

    def __init__(
        self,
        messages: Prepared,
        position: int,
        file_bytes: int,
        ends: Mapping[QueueKey, int],
    ) -> None:
        self.blanks: list[tuple[int, int]] = []
        self.positions, self.end = self._positions(messages.sizes, position, file_bytes)
        self.moved, self.queue_offsets = _queue_offsets(messages.queues, messages.distinct, ends)

    def _positions(
        self, sizes: Sequence[int], position: int, file_bytes: int
    ) -> tuple[list[int], int]:
        found = list(accumulate(sizes, initial=position))
        end = found.pop()
        if end - position + BLANK_BYTES_MIN <= file_bytes - position % file_bytes:
            return found, end
        found.clear()
        for number, size in enumerate(sizes):
            rest = file_bytes - position % file_bytes
            if size + BLANK_BYTES_MIN > rest:
                self.blanks.append((number, rest))
                position += rest
            found.append(position)
            position += size
        return found, position

    def pieces(self, messages: Prepared, heads: Sequence[bytes]) -> list[bytes]:
        """The bytes from the log's end on; none goes over the end of a file."""
        columns = (heads, messages.fields.bodies, messages.leads, messages.properties)
        pieces = list(chain.from_iterable(zip(*columns, strict=True)))
        for number, rest in reversed(self.blanks):
            pieces[4 * number : 4 * number] = (
                SIZE_AND_MAGIC.pack(rest, MAGIC_BLANK),
                bytes(rest - BLANK_BYTES_MIN),
            )
        return pieces


def _queue_offsets(
    queues: Sequence[QueueKey], distinct: Iterable[QueueKey], ends: Mapping[QueueKey, int]
) -> tuple[dict[QueueKey, int], Sequence[int]]:
    """Where the queues go on, and each record's place in its own."""
    moved = {queue: ends.get(queue, 0) for queue in distinct}
    if len(moved) == 1:
        ((queue, first),) = moved.items()
        return {queue: first + len(queues)}, range(first, first + len(queues))
    offsets: list[int] = []
    for queue in queues:
        offset = moved[queue]
        offsets.append(offset)
        moved[queue] = offset + 1
    return moved, offsets
