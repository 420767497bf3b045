"""The deep check of one object of the key index: every byte, and what it says of itself. One step an object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zlib_ng import zlib_ng

from tiered.errors import DataError
from tiered.format.key_index import check_payload
from tiered.keys import parse_index_key
from tiered.log.indexed import uncovered
from tiered.log.ranges import Ranges, clipped, joined, without
from tiered.log.verify_objects import check_object, read_object
from tiered.log.verify_report import Finding, Problem
from tiered.log.wellformed import INT_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.base import ObjectStore
    from tiered.log.parts import IndexObject, TierState
    from tiered.model import MessageQueue


class IndexCheck:
    """The check of one object. Holds it in memory."""

    def __init__(self, store: ObjectStore, prefix: str, index: IndexObject) -> None:
        """Prepare it."""
        self._store = store
        self._prefix = prefix
        self._index = index

    def run(self) -> Finding:
        """Read and check; an error of reading is a problem of the object."""
        found, place = Finding(), self._index.place
        key = self._prefix + place.key
        data = read_object(self._store, self._prefix, place.key, found)
        if data is None:
            return found
        if len(data) != place.object_bytes:
            found.problem("size", key, f"{len(data)} bytes; the journal says {place.object_bytes}")
        payload, tail = data[: place.payload_bytes], bytes(data[place.payload_bytes :])
        trailer = check_object(payload, tail, key, found)
        if trailer is not None:
            for name, value in self._said().items():
                if trailer.description.get(name) != value:
                    what = f"{name} is not what the journal says"
                    found.problem("description", key, what)
        if not found.problems and zlib_ng.crc32(payload) != place.crc:
            found.problem("payload", key, "the checksum of the payload is not the journal's")
        if not found.problems:
            self._items(payload, key, found)
        return found

    def _said(self) -> dict[str, object]:
        index = self._index
        return {
            "kind": "index",
            "count": index.count,
            "store_min_ms": index.store_min_ms,
            "store_max_ms": index.store_max_ms,
            "covers": [cover.row() for cover in index.covers],
        }

    def _items(self, payload: memoryview, key: str, found: Finding) -> None:
        lengths = [cover.end - cover.start for cover in self._index.covers]
        try:
            check_payload(payload, self._index.count, lengths, where=key)
        except DataError as error:
            found.problem("index", key, error.what)


def check_indexes(state: TierState) -> Iterator[Problem]:
    """Every contradiction between what lives call covered and what index objects cover. Pure."""
    covered: dict[tuple[MessageQueue, int], Ranges] = {}
    for index in state.indexes:
        if parse_index_key("", index.place.key) is None:
            yield Problem("state", index.place.key, "it is no key of an index object")
        for cover in index.covers:
            mine = covered.get((cover.queue, cover.incarnation), ())
            covered[cover.queue, cover.incarnation] = joined((*mine, (cover.start, cover.end)))
    for queue, lives in state.queues.items():
        for life in lives:
            left = clipped(life.indexed, life.min_offset, INT_MAX)
            for start, end in covered.get((queue, life.incarnation), ()):
                left = without(left, start, end)
            where = f"{queue} incarnation {life.incarnation}"
            for start, end in left:
                yield Problem("state", where, f"no index object covers [{start}, {end})")
            if life.indexed and life.indexed[-1][1] > life.commit_offset:
                yield Problem("state", where, "more is indexed than committed")


def unindexed_messages(state: TierState) -> int:
    """Queue offsets of present lives that no index object covers."""
    return sum(
        end - start for lives in state.queues.values() for start, end in uncovered(lives[-1])
    )
