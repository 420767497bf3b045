"""What goes into an embedded store and what comes back: messages and receipts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.model import PhysicalOffset, QueueOffset


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
