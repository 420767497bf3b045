"""What goes into an embedded store and what comes back: messages, receipts and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tiered.errors import InvalidError
from tiered.format.consume_queue import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.model import PhysicalOffset, QueueOffset

RECORD_ROOM_BYTES: Final = 64 << 10
"""How much longer than the largest body a record may be, as with a broker."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store is laid out. Of a store that exists, its files' own sizes win.

    The default log files are small, which suits tests and tools: files are sparse, but many programs copy them whole.
    A broker opens the store only when its ``mappedFileSizeCommitLog`` is the same; a broker's own default is 1 GiB.

    Attributes:
        commitlog_file_bytes: Size of each file of the commit log.
        consumequeue_file_items: Items of each file of a consume queue; the broker's default.
        store_host: The broker's address in every record, ``ip:port`` or ``[ip]:port``.
        message_bytes_max: Largest body; a record may have 64 KiB more.
        topic_queues: Queues of a topic that is made because a message names it (more when its queue id asks for more).
    """

    commitlog_file_bytes: int = 16 << 20
    consumequeue_file_items: int = 300_000
    store_host: str = "127.0.0.1:10911"
    message_bytes_max: int = 4 << 20
    topic_queues: int = 4

    def __post_init__(self) -> None:
        """Refuse what no store can have.

        Raises:
            InvalidError: A size is not positive.
        """
        for name in (
            "commitlog_file_bytes",
            "consumequeue_file_items",
            "message_bytes_max",
            "topic_queues",
        ):
            if getattr(self, name) <= 0:
                raise InvalidError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def consumequeue_file_bytes(self) -> int:
        """Size of each file of a consume queue."""
        return self.consumequeue_file_items * ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Message:
    """A message to store.

    Attributes:
        topic: Up to 127 of ``%|a-zA-Z0-9_-``; up to 255 when it begins with ``%RETRY%``.
        queue_id: Number of the queue in its topic, from 0.
        body: Stored as it is; when it is compressed, ``sys_flag`` says so.
        tags: Property ``TAGS``, or None.
        keys: Property ``KEYS``: keys separated by blanks; or None.
        properties: The others. ``CLUSTER`` is set by the store; ``UNIQ_KEY`` only where it is missing.
        flag: The producer's, opaque.
        born_timestamp_ms: The producer's clock, UTC; None: the store time.
        born_host: The producer, ``ip:port`` or ``[ip]:port``; None: the store's host.
        sys_flag: See ``tiered.format.sysflag``; the bits of the hosts are set by the store.
        reconsume_times: How often it was sent back.
    """

    topic: str
    queue_id: int
    body: bytes
    tags: str | None = None
    keys: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    born_timestamp_ms: int | None = None
    born_host: str | None = None
    sys_flag: int = 0
    reconsume_times: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a message was put.

    Attributes:
        queue_offset: Its number in its queue.
        physical_offset: Of its record in the log.
        offset_msg_id: Hex of store host and physical offset; by it a broker finds the record.
        msg_id: Its property ``UNIQ_KEY``.
        size_bytes: Of its record.
    """

    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    offset_msg_id: str
    msg_id: str
    size_bytes: int
