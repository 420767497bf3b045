"""Makes the objects of a group commit and puts them into the store. No state but the count of objects begun.

Retries and errors: nothing is retried here. A failed or unknown outcome is answered by another object under another key,
never by asking what became of the first (invariants I4, I7).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from tiered import keys
from tiered.format.part import SealedObject, build_object
from tiered.log.composite import ITEM_MEMORY_BYTES
from tiered.log.state import ObjectRange, Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.local.face import Quarantined
    from tiered.log.composite import GroupCommit


@dataclass(frozen=True, slots=True)
class StoredLog:
    """A group commit whose commit-log object is durable: a dispatch request. The records' bytes are let go.

    Attributes:
        commit: Without its batches.
        log: Where the records lie.
        items: Payload of the consume-queue object.
        holes: Items without a message.
        store_min_ms: Smallest store time; -1 when there is none.
        store_max_ms: Greatest store time; -1 likewise.
        quarantined: The damaged records.
    """

    commit: GroupCommit
    log: ObjectRange
    items: bytes
    holes: int
    store_min_ms: int
    store_max_ms: int
    quarantined: tuple[Quarantined, ...]

    @property
    def memory_bytes(self) -> int:
        """What it is counted for until its entry is durable."""
        return self.commit.count * ITEM_MEMORY_BYTES


class Uploader:
    """Puts objects under keys that no other try has. From any thread."""

    def __init__(self, store: ObjectStore, prefix: str, *, generation: int, writer: str) -> None:
        self._store = store
        self._prefix = prefix
        self._generation = generation
        self._writer = writer
        self._sequence = itertools.count()

    def put_log(self, commit: GroupCommit) -> StoredLog:
        """Upload the records.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        low, high = commit.times()
        description = {
            **_identity(commit, "commitlog"),
            "log_offset": commit.log_offset,
            "queue_offset": commit.queue_offset,
            "count": commit.count,
            "store_min_ms": low,
            "store_max_ms": high,
        }
        key = keys.commit_log_key(
            "", commit.queue, commit.incarnation, commit.log_offset, self._next_id()
        )
        log = self._put(key, commit.data(), description)
        rest = replace(commit, batches=())
        items, holes = commit.items(), commit.holes()
        return StoredLog(rest, log, items, holes, low, high, tuple(commit.quarantined))

    def put_index(self, stored: StoredLog) -> Part:
        """Upload the items of records that are durable.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        commit = stored.commit
        description = {
            **_identity(commit, "consumequeue"),
            "log_offset": commit.log_offset,
            "log_key": stored.log.key,
            "log_crc": stored.log.crc,
            "queue_offset": commit.queue_offset,
            "count": commit.count,
            "holes": stored.holes,
            "store_min_ms": stored.store_min_ms,
            "store_max_ms": stored.store_max_ms,
        }
        key = keys.consume_queue_key(
            "", commit.queue, commit.incarnation, commit.queue_offset, self._next_id()
        )
        index = self._put(key, [stored.items], description)
        return Part(
            stored.log,
            index,
            commit.log_offset,
            commit.queue_offset,
            commit.count,
            stored.holes,
            stored.store_min_ms,
            stored.store_max_ms,
        )

    def put_quarantine(self, stored: StoredLog) -> int:
        """Upload the raw bytes and the reason of each damaged record; how many there were.

        Raises:
            BackendError: Not all are stored.
        """
        commit = stored.commit
        for record in stored.quarantined:
            key = keys.quarantine_key(
                "", commit.queue, commit.incarnation, record.queue_offset, self._next_id()
            )
            description = {
                **_identity(commit, "quarantine"),
                "queue_offset": record.queue_offset,
                "physical_offset": record.physical_offset,
                "reason": record.reason.name,
                "detail": record.detail,
            }
            self._put(key, [record.raw], description)
        return len(stored.quarantined)

    def put_merged(
        self, key: str, buffers: Sequence[Buffer], description: Mapping[str, Any]
    ) -> ObjectRange:
        """Upload an object made of parts.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        return self._put(key, buffers, description)

    def next_id(self) -> keys.ObjectId:
        """Id of an object that is about to be begun."""
        return self._next_id()

    def _put(
        self, key: str, buffers: Sequence[Buffer], description: Mapping[str, Any]
    ) -> ObjectRange:
        made: SealedObject = build_object(buffers, description)
        self._store.put_if_absent(self._prefix + key, made.buffers)
        size = made.payload_bytes
        return ObjectRange(key, 0, size, size, made.trailer_bytes, made.payload_crc)

    def _next_id(self) -> keys.ObjectId:
        return keys.ObjectId(self._generation, self._writer, next(self._sequence))


def _identity(commit: GroupCommit, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "topic": commit.queue.topic,
        "queue_id": commit.queue.queue_id,
        "incarnation": commit.incarnation,
        "segment": commit.segment,
    }
