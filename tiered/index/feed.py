"""Keys taken while records are in memory anyway, on their way into the tier, so that nobody has to read them again.

``offer`` is called by upload threads when records are durable; ``take`` by the indexer when the journal names them. It is a
cache: what is not there (from before the start, or for want of room) is read from the tier.

Bounds (I8): ``bytes_max`` of memory. When it is full new keys are refused, since the indexer wants the oldest first; but
what has waited for ``STALE_S`` goes: nobody wants it any more (an entry that did not come, parts that were merged).

Threads: any.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tiered.errors import DataError
from tiered.index.extract import Keys, extract_all, shifted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.clock import Clock
    from tiered.local.face import RecordBatch
    from tiered.log.parts import Part

_LOG = logging.getLogger("tiered.index")
FEED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit: 1.8 million keys."""
STALE_S: Final = 600.0
_ENTRY_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class _Held:
    keys: tuple[Keys, ...]
    memory_bytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class StoredSection:
    """A section that was just stored, while its records are in memory.

    Attributes:
        bundle: Key of its bundle.
        start: Its position there.
        log_offset: Of its first record.
        batches: Its records.
    """

    bundle: str
    start: int
    log_offset: int
    batches: Sequence[RecordBatch]


class KeyFeed:
    """Holds the keys of parts, by bundle and position of their section.

    Attributes:
        refused: Parts for whose keys there was no room.
    """

    def __init__(self, clock: Clock, bytes_max: int = FEED_BYTES_MAX) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()
        self.refused = 0

    @property
    def memory_bytes(self) -> int:
        """What is held."""
        return self._bytes

    def offer(self, sections: Sequence[StoredSection]) -> None:
        """Take the keys of sections; never raises, since they are durable."""
        now_s = self._clock.monotonic_s()
        if not self._has_room(now_s):
            self.refused += len(sections)
            return
        batches = [batch for section in sections for batch in section.batches]
        try:
            of_batches = iter(extract_all(batches))
        except DataError as error:
            _LOG.warning("keys of %s are taken later: %s", sections[0].bundle, error)
            return
        for section in sections:
            at, found = section.log_offset, list[Keys]()
            for batch, some in zip(section.batches, of_batches, strict=False):
                found += [shifted(keys, at) for keys in some]
                at += memoryview(batch.data).nbytes
            self._hold(section, found, now_s)

    def _hold(self, section: StoredSection, found: Sequence[Keys], now_s: float) -> None:
        size = sum(keys.memory_bytes for keys in found) + _ENTRY_BYTES
        with self._lock:
            if self._bytes >= self._bytes_max:
                self.refused += 1
                return
            self._held[section.bundle, section.start] = _Held(tuple(found), size, now_s)
            self._bytes += size

    def take(self, part: Part) -> tuple[Keys, ...] | None:
        """The keys of a part, positions being log offsets; None: not held. They are not held any more."""
        with self._lock:
            held = self._held.pop((part.bundle.key, part.section.start), None)
            if held is None:
                return None
            self._bytes -= held.memory_bytes
        return held.keys

    def _has_room(self, now_s: float) -> bool:
        with self._lock:
            while self._held:
                key, oldest = next(iter(self._held.items()))
                if now_s - oldest.since_s < STALE_S:
                    break
                del self._held[key]
                self._bytes -= oldest.memory_bytes
            return self._bytes < self._bytes_max
