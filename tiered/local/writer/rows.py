"""The commit log and consume queues of a store that is being written.

**Contract.** Every record goes to the log first, then to its consume queue, both in log order: what a consume queue
lists is there, and nothing in front of it is missing. Places are given in memory, before anything is written; so after
an ``OSError`` what is in memory and on the disk may differ, and only ``close`` may be called. For one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES, fillers
from tiered.format.ids import offset_msg_id
from tiered.format.record import BLANK_BYTES_MIN, MAGIC_BLANK, SIZE_AND_MAGIC
from tiered.local.layout import LOG_DIRECTORY, QUEUE_DIRECTORY
from tiered.local.writer.files import RowFiles
from tiered.local.writer.messages import Appended, StoreSettings
from tiered.local.writer.records import Draft, encode
from tiered.local.writer.startup import QueueEnd, StoreEnd
from tiered.model import MessageQueue, PhysicalOffset, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ITEM: Final = Struct(">qiq")
"""An item of a consume queue, see ``tiered.format.consume_queue``."""
_WRITE_BYTES: Final = 1 << 20
"""How much of a batch is put into the log at once, before its items are listed."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A record that is about to be written."""

    queue: MessageQueue
    end: QueueEnd
    queue_offset: int
    physical_offset: int
    size: int
    tag_code: int


class StoreRows:
    """The rows of one store.

    Attributes:
        log_end: Physical offset of the next record (unless it goes into the next file).
    """

    def __init__(self, root: str, end: StoreEnd, settings: StoreSettings) -> None:
        """Go on behind ``end`` with files of the settings' sizes."""
        self.log_end = end.log_end
        self._root = root
        self._settings = settings
        self._queues = dict(end.queues)
        self._files = RowFiles()

    def queue_end(self, queue: MessageQueue) -> int:
        """Queue offset of the next message of a queue."""
        end = self._queues.get(queue)
        return 0 if end is None else end.next_offset

    def begin_queue(self, queue: MessageQueue, offset: int) -> None:
        """Let a new queue begin at ``offset``.

        Raises:
            InvalidError: It is not new, or ``offset`` is negative.
        """
        if offset < 0 or queue.queue_id < 0 or queue in self._queues:
            raise InvalidError(f"queue {queue} cannot begin at {offset}")
        self._queues[queue] = self._new_queue(offset)

    def sync(self) -> None:
        """Bring everything to the disk.

        Raises:
            OSError: Some of it is not there.
        """
        self._files.sync()

    def close(self) -> None:
        """Close the files, without ``sync``."""
        self._files.close()

    def append(self, drafts: Sequence[Draft], now_ms: int) -> Iterator[Appended]:
        """Give every record its place, and write them in pieces: the log, then what lists it.

        Take all of what it yields: the last piece is written behind the last message.

        Raises:
            OSError: Some of it may be written; these rows must not be written to any more.
        """
        pending = bytearray()
        placed: list[_Placed] = []
        host = self._settings.store_host
        for found in drafts:
            self._roll(found.size, pending)
            position = self.log_end + len(pending)
            queue = MessageQueue(found.message.topic, found.message.queue_id)
            end = self._queues.setdefault(queue, self._new_queue(0))
            offset = end.next_offset
            end.next_offset += 1
            pending += encode(
                found,
                queue_offset=offset,
                physical_offset=position,
                store_ms=now_ms,
                store_host=host,
            )
            placed.append(_Placed(queue, end, offset, position, found.size, found.tag_code))
            if len(pending) >= _WRITE_BYTES:
                self._write(pending, placed)
            yield Appended(
                QueueOffset(offset),
                PhysicalOffset(position),
                offset_msg_id(host, position),
                found.msg_id,
                found.size,
            )
        self._write(pending, placed)

    def _new_queue(self, offset: int) -> QueueEnd:
        return QueueEnd(offset, self._settings.consumequeue_file_bytes, is_new=True)

    def _roll(self, size: int, pending: bytearray) -> None:
        """Fill the file up with a blank when the record and a blank's head do not fit any more."""
        file_bytes = self._settings.commitlog_file_bytes
        rest = file_bytes - (self.log_end + len(pending)) % file_bytes
        if size + BLANK_BYTES_MIN > rest:
            pending += SIZE_AND_MAGIC.pack(rest, MAGIC_BLANK)
            pending += bytes(rest - BLANK_BYTES_MIN)

    def _write(self, pending: bytearray, placed: list[_Placed]) -> None:
        file_bytes = self._settings.commitlog_file_bytes
        self._files.write(f"{self._root}/{LOG_DIRECTORY}", file_bytes, self.log_end, pending)
        self.log_end += len(pending)
        pending.clear()
        first = 0
        for index, one in enumerate(placed):
            if index + 1 == len(placed) or placed[index + 1].queue != one.queue:
                self._list(placed[first : index + 1])
                first = index + 1
        placed.clear()

    def _list(self, run: Sequence[_Placed]) -> None:
        """Write the items of records of one queue that follow one another in the log."""
        first, file_bytes = run[0], run[0].end.file_bytes
        folder = f"{self._root}/{QUEUE_DIRECTORY}/{first.queue.topic}/{first.queue.queue_id}"
        items = b"".join(_ITEM.pack(one.physical_offset, one.size, one.tag_code) for one in run)
        start = first.queue_offset * ITEM_BYTES
        if first.end.is_new:
            first.end.is_new = False
            lead = start % file_bytes
            start, items = start - lead, fillers(lead // ITEM_BYTES) + items
        self._files.write(folder, file_bytes, start, items)
