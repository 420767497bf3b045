"""Reads data objects whole and checks every byte, item and record of them. One step a part; steps share nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import BackendError, ObjectNotFoundError
from tiered.errors import DataError, InvalidError
from tiered.format.block import check_records, inner_counts, parse_records, topics_equal
from tiered.format.object import Trailer, parse_trailer
from tiered.format.packed import faults_of, unpack_blocks
from tiered.format.record import RecordFault
from tiered.log.consume_queue import ITEM, ITEM_BYTES
from tiered.log.verify_report import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.format.block import RecordBlock
    from tiered.log.state import ObjectRange, Part, Segment
    from tiered.model import MessageQueue

    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

LISTED_MAX = 20
"""Of one kind of problem in one part so many are named by queue offset; one more says how many there are."""


class PartCheck:
    """The deep check of one part. Holds one commit-log and one consume-queue object in memory."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        part: Part,
        *,
        queue: MessageQueue,
        incarnation: int,
        segment: Segment,
        skip: AbstractSet[str] = frozenset(),
    ) -> None:
        """Prepare the check; objects in ``skip`` are known to be missing."""
        self._store = store
        self._prefix = prefix
        self._queue = queue
        self._incarnation = incarnation
        self._segment = segment
        self._part = part
        self._skip = skip
        self._found = Finding()

    def run(self) -> Finding:
        """Read and check both objects; an error of reading is a problem of its object."""
        part, found = self._part, self._found
        log = self._object(part.log, self._said("commitlog"))
        more = {"log_key": part.log.key, "log_crc": part.log.crc, "holes": part.holes}
        index = self._object(part.index, self._said("consumequeue") | more)
        counted = (
            part.index.size_bytes == part.count * ITEM_BYTES
        )  # else it is a problem of the state
        if index is not None and counted and _lies_in(part.index, index):
            items = np.frombuffer(index[part.index.start : part.index.end], ITEM)
            self._items(items, log if log is not None and _lies_in(part.log, log) else None)
        return found

    def _said(self, kind: str) -> dict[str, Any]:
        """What the object must say of itself."""
        part = self._part
        return {
            "kind": kind,
            "topic": self._queue.topic,
            "queue_id": self._queue.queue_id,
            "incarnation": self._incarnation,
            "segment": self._segment.base_offset,
            "log_offset": part.log_offset,
            "queue_offset": part.queue_offset,
            "count": part.count,
            "store_min_ms": part.store_min_ms,
            "store_max_ms": part.store_max_ms,
        }

    def _object(self, place: ObjectRange, said: Mapping[str, Any]) -> memoryview | None:
        """The payload, as far as it is there."""
        key, found = self._prefix + place.key, self._found
        if place.key in self._skip:
            return None
        data = read_object(self._store, self._prefix, place.key, found)
        if data is None:
            return None
        if len(data) != place.object_bytes:
            found.problem("size", key, f"{len(data)} bytes; the journal says {place.object_bytes}")
        stored, tail = data[: place.stored_bytes], bytes(data[place.stored_bytes :])
        before = len(found.problems)
        trailer = check_object(stored, tail, key, found)
        if trailer is not None:
            same = (trailer.payload_bytes, trailer.stored_bytes, trailer.payload_crc)
            wanted = (place.payload_bytes, place.stored_bytes, place.crc)
            if same != wanted or trailer.trailer_bytes != place.trailer_bytes:
                found.problem("trailer", key, "it is of another object than the journal names")
            if self._is_whole():
                self._description(key, trailer.description, said)
        is_sound = len(found.problems) == before
        payload = _payload(stored, place, trailer, is_sound=is_sound)
        if is_sound and (payload is None or zlib_ng.crc32(payload) != place.crc):
            found.problem("payload", key, "the checksum of the payload is not the journal's")
        return payload

    def _is_whole(self) -> bool:
        """Whether the part was never cut (behind its last message, if only holes went: so it is told by the index, too)."""
        places = (self._part.log, self._part.index)
        return all((place.start, place.end) == (0, place.payload_bytes) for place in places)

    def _description(self, key: str, found: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        for name, value in said.items():
            if name == "segment" and type(found.get(name)) is int and self._may_be(found[name]):
                continue
            if found.get(name) != value:
                detail = f"{name} is {found.get(name)!r}; the journal says {value!r}"
                self._found.problem("description", key, detail)

    def _may_be(self, segment: int) -> bool:
        """Whether the part may have been made for another segment than it is of.

        Where a rebuilt journal lost objects, their segment goes on as another; what joining has left as it was names the
        segment that it was made for.
        """
        joined = self._segment.merged and segment <= self._part.log_offset
        return joined or segment < self._segment.base_offset

    def _items(self, items: npt.NDArray[np.void], log: memoryview | None) -> None:
        part = self._part
        key = self._prefix + part.index.key
        offsets, sizes = items["log_offset"].astype(np.int64), items["size"].astype(np.int64)
        holes = int(np.count_nonzero(sizes == 0))
        if holes != part.holes:
            self._found.problem("index", key, f"{holes} holes; the journal says {part.holes}")
        outside = (offsets < part.log_offset) | (offsets > part.log_end - sizes) | (sizes < 0)
        outside &= sizes != 0
        self._list("index", key, np.flatnonzero(outside), "the item points outside its part")
        where = np.flatnonzero((sizes > 0) & ~outside)
        offsets, sizes = offsets[where], sizes[where]
        is_first = np.ones(len(where), np.bool_)  # items of an inner batch share their record
        is_first[1:] = (offsets[1:] != offsets[:-1]) | (sizes[1:] != sizes[:-1])
        firsts = np.flatnonzero(is_first)
        starts, ends = offsets[firsts], (offsets + sizes)[firsts]
        overlap = firsts[1:][starts[1:] < ends[:-1]]
        self._list("index", key, where[overlap], "the record overlaps the one before")
        if not len(overlap) and not outside.any():
            self._found.unreferenced_bytes += part.log.size_bytes - int((ends - starts).sum())
        if log is not None:
            self._records(log, where, offsets, sizes, is_first)

    def _records(
        self, log: memoryview, where: Ints, offsets: Ints, sizes: Ints, is_first: Flags
    ) -> None:
        """Hold each record against its items (``where``: their numbers in the part)."""
        part, firsts = self._part, np.flatnonzero(is_first)
        shift = part.log.start - part.log_offset
        block = parse_records(log, offsets[firsts] + shift, sizes[firsts].astype(np.int32))
        check_records(block, expected_physical=None, check_crc=True)
        key = self._prefix + part.log.key
        for fault in RecordFault:
            if fault is not RecordFault.OK:
                bad = np.flatnonzero(block.faults == fault)
                self._list(
                    "record", key, where[firsts[bad]], f"the record has the fault {fault.name}"
                )
        sound = block.faults == RecordFault.OK
        of_item = np.cumsum(is_first) - 1
        self._owners(block, key, where, of_item, sound)
        times = block.store_timestamps_ms
        late = sound & ((times < part.store_min_ms) | (times > part.store_max_ms))
        outside = where[firsts[np.flatnonzero(late)]]
        self._list("description", key, outside, "stored outside the times that the journal says")
        self._found.messages += int(np.count_nonzero(sound[of_item])) if len(of_item) else 0

    def _owners(
        self, block: RecordBlock, key: str, where: Ints, of_item: Ints, sound: Flags
    ) -> None:
        """Whether the records are of this queue and of their items' queue offsets."""
        mine = topics_equal(block, np.arange(len(block)), self._queue.topic)
        mine &= block.queue_ids == self._queue.queue_id
        foreign = np.flatnonzero((sound & ~mine)[of_item])
        self._list("foreign", key, where[foreign], "the record is of another queue")
        wanted = where + self._part.queue_offset
        low = block.queue_offsets[of_item]
        high = low + inner_counts(block)[of_item]
        elsewhere = (sound & mine)[of_item] & ((wanted < low) | (wanted >= high))
        what = "the record is of another queue offset"
        self._list("foreign", key, where[np.flatnonzero(elsewhere)], what)

    def _list(self, kind: str, key: str, numbers: Ints, what: str) -> None:
        for number in numbers[:LISTED_MAX].tolist():
            offset = self._part.queue_offset + number
            self._found.problem(kind, key, f"{self._queue} queue offset {offset}: {what}")
        if len(numbers) > LISTED_MAX:
            self._found.problem(kind, key, f"{len(numbers) - LISTED_MAX} more: {what}")


def _payload(
    stored: memoryview, place: ObjectRange, trailer: Trailer | None, *, is_sound: bool
) -> memoryview | None:
    """The payload; of a packed object only if all of it is sound."""
    if not place.is_packed:
        return stored
    if trailer is None or trailer.table is None or not is_sound:
        return None
    blocks = stored[trailer.trailer_bytes :]
    return unpack_blocks(blocks, 0, trailer.payload_bytes, trailer, where=place.key)


def _lies_in(place: ObjectRange, payload: memoryview) -> bool:
    return 0 <= place.start <= place.end <= len(payload)


def read_object(store: ObjectStore, prefix: str, key: str, found: Finding) -> memoryview | None:
    """An object's bytes; None when it is missing or cannot be read, which is then in ``found``."""
    try:
        data = memoryview(store.get(prefix + key))
    except ObjectNotFoundError:
        found.missing.append(key)
        return None
    except BackendError as error:
        found.problem("unreadable", prefix + key, f"{type(error).__name__}: {error}")
        return None
    found.object_count += 1
    found.object_bytes += len(data)
    return data


def check_object(stored: memoryview, tail: bytes, key: str, found: Finding) -> Trailer | None:
    """Check an object's trailer and each block of what is before it; None when the trailer is no proof."""
    try:
        trailer = parse_trailer(tail, where=key)
    except (DataError, InvalidError) as error:
        found.problem("trailer", key, error.what)
        return None
    if trailer.table is not None:
        if stored[: len(tail)] != tail:
            found.problem("trailer", key, "its copy at the beginning of the object is damaged")
        for fault in faults_of(stored[len(tail) :], trailer, where=key):
            found.problem("block", key, fault)
        return trailer
    block = trailer.block_bytes
    for number, crc in enumerate(trailer.block_crcs):
        piece = stored[number * block : (number + 1) * block]
        if zlib_ng.crc32(piece) != crc:
            start = number * block
            found.problem(
                "block", key, f"bytes [{start}, {start + len(piece)}) fail their checksum"
            )
    return trailer


def check_quarantined(store: ObjectStore, prefix: str, key: str) -> Finding:
    """Check an object that no journal entry has the size and checksum of: by what it says itself."""
    found = Finding()
    data = read_object(store, prefix, key, found)
    if data is None:
        return found
    try:
        size = parse_trailer(bytes(data), where=key).payload_bytes
    except (DataError, InvalidError) as error:
        found.problem("trailer", prefix + key, error.what)
        return found
    trailer = check_object(data[:size], bytes(data[size:]), prefix + key, found)
    if trailer and trailer.payload_bytes + trailer.trailer_bytes != len(data):
        found.problem("size", prefix + key, "it is longer or shorter than it says")
    return found
