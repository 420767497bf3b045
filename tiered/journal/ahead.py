"""Reads a journal's entries ahead, several at once, and keeps their bytes for the next look in the same process.

How to use it::

    journal = JournalBytes(executor)
    with journal.reading(store, listed) as ahead:   # an object store that only reads entries differently
        JournalReader(ahead, prefix, machine)

Ordering: entries are asked for in the order of their numbers. Whoever asks for one has the next ``AHEAD`` fetched by the
executor; what is not asked for is dropped at the end. An entry is the same object as long as key, size and time of writing
are, as listed: then its bytes are taken from memory, and no request is made.

Memory: ``AHEAD`` entries of ``ENTRY_BYTES_MAX``, and ``KEPT_BYTES_MAX``. Larger ones are read when they are asked for.

Retries and errors: those of the store, raised where the entry is asked for. Threads: one asks; the executor's threads read.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backends.wrapping import WrappingStore
from tiered.keys import JOURNAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor, Future

    from backends.base import ByteRange, ObjectInfo, ObjectStore

AHEAD = 32
ENTRY_BYTES_MAX = 1 << 20
KEPT_BYTES_MAX = 64 << 20
_CHECKPOINT = ".checkpoint"


class JournalBytes:
    """Bytes of entries that were read, of one journal."""

    def __init__(self, executor: Executor, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._executor = executor
        self._room = kept_bytes_max
        self._kept: dict[ObjectInfo, bytes] = {}

    @contextmanager
    def reading(self, store: ObjectStore, listed: Sequence[ObjectInfo]) -> Iterator[ObjectStore]:
        """The store, with entries read ahead."""
        ahead = _ReadAhead(store, self, listed)
        try:
            yield ahead
        finally:
            ahead.drop()

    def find(self, info: ObjectInfo) -> bytes | None:
        """What was kept of an object that is listed so."""
        return self._kept.get(info)

    def keep(self, info: ObjectInfo, data: bytes) -> None:
        """Keep bytes, if there is room and the store tells when an object was written."""
        if info.modified_ms >= 0 and len(data) <= self._room and info not in self._kept:
            self._kept[info] = data
            self._room -= len(data)

    def submit(self, store: ObjectStore, info: ObjectInfo) -> Future[bytes]:
        """Read an object."""
        return self._executor.submit(store.get, info.key)


class _ReadAhead(WrappingStore):
    def __init__(
        self, inner: ObjectStore, journal: JournalBytes, listed: Sequence[ObjectInfo]
    ) -> None:
        super().__init__(inner)
        self._journal = journal
        small = (info for info in listed if info.size_bytes <= ENTRY_BYTES_MAX)
        entries = (i for i in small if JOURNAL in i.key and not i.key.endswith(_CHECKPOINT))
        self._infos = sorted(entries, key=lambda info: info.key)
        self._keys = [info.key for info in self._infos]
        self._flying: dict[str, Future[bytes]] = {}
        self._next = 0

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """An object of the store; of an entry perhaps what was read ahead."""
        at = bisect_left(self._keys, key)
        if byte_range is not None or at == len(self._keys) or self._keys[at] != key:
            return self._inner.get(key, byte_range)
        info = self._infos[at]
        kept = self._journal.find(info)
        if kept is not None:
            return kept
        self._read_up_to(at)
        flying = self._flying.pop(key, None)
        data = flying.result() if flying else self._inner.get(key)
        self._journal.keep(info, data)
        return data

    def drop(self) -> None:
        """Nothing more will be asked for; returns when nothing is under way."""
        for future in self._flying.values():
            if not future.cancel():
                future.exception()
        self._flying.clear()

    def _read_up_to(self, at: int) -> None:
        """Have the entry at ``at`` and those behind it under way."""
        self._next = max(self._next, at)
        while self._next < min(at + AHEAD, len(self._infos)):
            info = self._infos[self._next]
            if self._journal.find(info) is None:
                self._flying[info.key] = self._journal.submit(self._inner, info)
            self._next += 1
