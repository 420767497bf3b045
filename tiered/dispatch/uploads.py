"""Makes the objects of a group commit and puts them into the store. No state but the count of objects begun.

Retries and errors: nothing is retried here. A failed or unknown outcome is answered by another object under another key,
never by asking what became of the first (invariants I4, I7).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from backends.batch import objects_per_put, put_many_if_absent
from backends.errors import BackendError
from tiered import keys
from tiered.crashpoints import reached
from tiered.format.part import SealedObject, build_object
from tiered.log.composite import ITEM_MEMORY_BYTES
from tiered.log.state import ObjectRange, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import ObjectStore
    from tiered.local.face import Quarantined
    from tiered.log.composite import GroupCommit
    from tiered.model import LogOffset, MessageQueue, QueueOffset


@dataclass(frozen=True, slots=True)
class StoredLog:
    """A group commit whose commit-log object is durable: a dispatch request. The records' bytes are let go.

    Attributes:
        commit: Without its batches.
        log: Where the records lie.
        items: Payload of the consume-queue object.
        holes: Items without a message.
        missing: Those of them where the local store should have a record, and has none.
        store_min_ms: Smallest store time; -1 when there is none.
        store_max_ms: Greatest store time; -1 likewise.
        quarantined: The damaged records.
    """

    commit: GroupCommit
    log: ObjectRange
    items: bytes
    holes: int
    missing: int
    store_min_ms: int
    store_max_ms: int
    quarantined: tuple[Quarantined, ...]

    @property
    def memory_bytes(self) -> int:
        """What it is counted for until its entry is durable."""
        return self.commit.count * ITEM_MEMORY_BYTES


@dataclass(frozen=True, slots=True)
class _NewObject:
    key: str
    made: SealedObject

    @property
    def place(self) -> ObjectRange:
        """Where its payload will be."""
        made = self.made
        size, crc = made.payload_bytes, made.payload_crc
        return ObjectRange(self.key, 0, size, size, made.trailer_bytes, crc, made.packed_bytes)


class Uploader:
    """Puts objects under keys that no other try has. From any thread.

    Attributes:
        on_stored: Told of each commit whose records have just become durable, while it still has them; must not raise.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        *,
        generation: int,
        writer: str,
        escapes_case: bool = False,
    ) -> None:
        """Begin at sequence 0.

        Args:
            store: Where the objects go.
            prefix: Of the broker.
            generation: Our reign.
            writer: Our id.
            escapes_case: The store takes names for one that differ only in case (``tiered.keys``).
        """
        self._store = store
        self._escapes_case = escapes_case
        self._objects_per_put = objects_per_put(store)
        self._prefix = prefix
        self._generation = generation
        self._writer = writer
        self._sequence = itertools.count()
        self.on_stored: Callable[[GroupCommit, StoredLog], None] = lambda _commit, _stored: None

    @property
    def objects_per_put(self) -> int:
        """How many small objects the store best takes at once; 1 when it gains nothing by that."""
        return self._objects_per_put

    def put_logs(self, commits: Sequence[GroupCommit]) -> list[StoredLog | BackendError]:
        """Upload the records of commits of different queues.

        Returns:
            For each commit, in order, what is durable now, or why it is not stored, or that nobody knows.
        """
        times = [commit.times() for commit in commits]
        reached("log-begun")
        places = self._put_all([self._new_log(*one) for one in zip(commits, times, strict=True)])
        reached("log-stored")
        return [
            place if isinstance(place, BackendError) else self._note(commit, place, *bounds)
            for commit, place, bounds in zip(commits, places, times, strict=True)
        ]

    def put_indexes(self, stored: Sequence[StoredLog]) -> list[Part | BackendError]:
        """Upload the items of records that are durable; results as of ``put_logs``."""
        places = self._put_all([self._new_index(one) for one in stored])
        reached("index-stored")
        return [
            place if isinstance(place, BackendError) else _part(one, place)
            for one, place in zip(stored, places, strict=True)
        ]

    def put_quarantine(self, stored: StoredLog) -> int:
        """Upload the raw bytes and the reason of each damaged record; how many there were.

        Raises:
            BackendError: Not all are stored.
        """
        commit = stored.commit
        for record in stored.quarantined:
            key = keys.quarantine_key(
                "",
                commit.queue,
                commit.incarnation,
                record.queue_offset,
                self._next_id(),
                escapes_case=self._escapes_case,
            )
            description = {
                **_identity(commit, "quarantine"),
                "queue_offset": record.queue_offset,
                "physical_offset": record.physical_offset,
                "reason": record.reason.name,
                "detail": record.detail,
            }
            self._put(key, [record.raw], description)
            reached("quarantine-stored")
        return len(stored.quarantined)

    def put_merged(
        self, key: str, buffers: Sequence[Buffer], description: Mapping[str, Any]
    ) -> ObjectRange:
        """Upload an object made of parts.

        Raises:
            BackendError: Not stored, or nobody knows.
        """
        return self._put(key, buffers, description)

    def put_made(self, key: str, made: SealedObject) -> ObjectRange:
        """Upload an object that is made already; errors as of ``put_merged``."""
        new = _NewObject(key, made)
        self._store.put_if_absent(self._prefix + key, made.buffers)
        return new.place

    def next_id(self) -> keys.ObjectId:
        """Id of an object that is about to be begun."""
        return self._next_id()

    def next_log_key(self, queue: MessageQueue, incarnation: int, log_offset: LogOffset) -> str:
        """Key of a commit-log object that is about to be begun."""
        return keys.commit_log_key(
            "", queue, incarnation, log_offset, self._next_id(), escapes_case=self._escapes_case
        )

    def next_index_key(
        self, queue: MessageQueue, incarnation: int, queue_offset: QueueOffset
    ) -> str:
        """Key of a consume-queue object that is about to be begun."""
        return keys.consume_queue_key(
            "", queue, incarnation, queue_offset, self._next_id(), escapes_case=self._escapes_case
        )

    def _note(self, commit: GroupCommit, log: ObjectRange, low: int, high: int) -> StoredLog:
        stored = _stored(commit, log, low, high)
        self.on_stored(commit, stored)
        return stored

    def _new_log(self, commit: GroupCommit, times: tuple[int, int]) -> _NewObject:
        low, high = times
        description = {
            **_identity(commit, "commitlog"),
            "log_offset": commit.log_offset,
            "queue_offset": commit.queue_offset,
            "count": commit.count,
            "store_min_ms": low,
            "store_max_ms": high,
        }
        key = self.next_log_key(commit.queue, commit.incarnation, commit.log_offset)
        return _NewObject(key, build_object(commit.data(), description))

    def _new_index(self, stored: StoredLog) -> _NewObject:
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
        key = self.next_index_key(commit.queue, commit.incarnation, commit.queue_offset)
        return _NewObject(key, build_object([stored.items], description))

    def _put_all(self, objects: Sequence[_NewObject]) -> list[ObjectRange | BackendError]:
        wanted = [(self._prefix + new.key, new.made.buffers) for new in objects]
        errors = put_many_if_absent(self._store, wanted)
        return [error or new.place for new, error in zip(objects, errors, strict=True)]

    def _put(
        self, key: str, buffers: Sequence[Buffer], description: Mapping[str, Any]
    ) -> ObjectRange:
        return self.put_made(key, build_object(buffers, description))

    def _next_id(self) -> keys.ObjectId:
        return keys.ObjectId(self._generation, self._writer, next(self._sequence))


def _stored(commit: GroupCommit, log: ObjectRange, low: int, high: int) -> StoredLog:
    rest = replace(commit, batches=())
    items, holes, missing = commit.items(), commit.holes(), commit.missing()
    return StoredLog(rest, log, items, holes, missing, low, high, tuple(commit.quarantined))


def _part(stored: StoredLog, index: ObjectRange) -> Part:
    commit = stored.commit
    return Part(
        stored.log,
        index,
        commit.log_offset,
        commit.queue_offset,
        commit.count,
        stored.holes,
        stored.store_min_ms,
        stored.store_max_ms,
        commit.last,
    )


def _identity(commit: GroupCommit, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "topic": commit.queue.topic,
        "queue_id": commit.queue.queue_id,
        "incarnation": commit.incarnation,
        "segment": commit.segment,
    }
