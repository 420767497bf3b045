"""The commit log of a store that is being written: one writer gives places, and writes.

**Contract.** ``append`` takes one lock: log order is the order in which calls got it. Places count only once the bytes
are in their files; a write that fails is taken back (the bytes are zeroed again) and changes nothing, unless even that
fails: then ``is_broken``, and nothing more is taken. Store times never go back. What was appended survives the end of
the process; ``sync`` brings it to the disk.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.local.files import NAME_DIGITS
from tiered.local.layout import LOG_DIRECTORY
from tiered.store.encoding import Prepared, pack_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.clock import Clock
    from tiered.store.rows import RowWriter

QueueKey = tuple[str, int]
_WRITE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Where the messages of one append were put.

    Attributes:
        queue_offsets: Of each.
        positions: Physical offset of each.
        end: Physical offset behind the last.
        store_ms: Their store time, UTC.
    """

    queue_offsets: Sequence[int]
    positions: Sequence[int]
    end: int
    store_ms: int


class CommitLog:
    """See the module.

    Attributes:
        end: Physical offset behind the last record.
        synced: What is below it is on the disk.
        store_ms: Store time of the last record.
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
        self.is_broken = False
        self._folder = f"{root}/{LOG_DIRECTORY}"
        self._file_bytes = file_bytes
        self._queue_ends = dict(queue_ends)
        self._rows = rows
        self._clock = clock
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()

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

    def append(self, messages: Sequence[Prepared], store_host: bytes) -> Places:
        """Put messages one behind another, none of others between them.

        Raises:
            OSError: The disk refused it: nothing was stored.
            InvalidError: A number does not fit: nothing was stored.
        """
        with self._lock:
            now_ms = max(int(self._clock.now_ms()), self.store_ms)
            plan = _Plan(self.end, self._file_bytes, self._queue_ends)
            pieces, places = plan.place(messages, now_ms, store_host)
            self._write(pieces, plan.position)
            self._queue_ends.update(plan.moved)
            self.end, self.store_ms = plan.position, now_ms
            return places

    def sync(self) -> int:
        """Bring to the disk what was appended before this call.

        Returns:
            What is now below ``synced``.

        Raises:
            OSError: It may not be there.
        """
        with self._sync_lock:
            end = self.end
            if end > self.synced:
                self._rows.sync()
                self.synced = end
            return self.synced

    def _write(self, pieces: list[bytes], end: int) -> None:
        data = b"".join(pieces)
        try:
            self._rows.write(self._folder, self._file_bytes, self.end, data)
        except OSError:
            self._take_back(end)
            raise

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
            at = base + self._file_bytes
        self.is_broken = False


class _Plan:
    """Gives places, in memory."""

    def __init__(self, position: int, file_bytes: int, ends: Mapping[QueueKey, int]) -> None:
        self.position = position
        self.moved: dict[QueueKey, int] = {}
        self._file_bytes = file_bytes
        self._ends = ends

    def place(
        self, messages: Sequence[Prepared], now_ms: int, store_host: bytes
    ) -> tuple[list[bytes], Places]:
        """The bytes from the log's end on, and where each message is in them."""
        pieces: list[bytes] = []
        offsets: list[int] = []
        positions: list[int] = []
        position, file_bytes, moved = self.position, self._file_bytes, self.moved
        room = file_bytes - position % file_bytes - BLANK_BYTES_MIN
        for found in messages:
            queue, size = found.queue, found.size
            if size > room:
                rest = room + BLANK_BYTES_MIN
                pieces += (SIZE_AND_MAGIC.pack(rest, MAGIC_BLANK), bytes(room))
                position += rest
                room = file_bytes - BLANK_BYTES_MIN
            offset = moved.get(queue)
            if offset is None:
                offset = self._ends.get(queue, 0)
            moved[queue] = offset + 1
            head = pack_head(found, offset, position, now_ms, store_host)
            pieces += (head, found.message.body, found.tail)
            offsets.append(offset)
            positions.append(position)
            position += size
            room -= size
        self.position = position
        return pieces, Places(offsets, positions, position, now_ms)
