"""Finds what is not covered yet, reads it and gives it to a builder: a bounded step at a time.

What to do next is read from the journal's state in each step, never remembered: so a crash, another writer, a topic that
began anew or a tail that was taken back needs no care here. When what was collected does not fit the state any more it is
thrown away, and begun again.

Keys come from a ``KeyFeed``, if a writer has filled it, else from the records in the tier; which one makes no difference to
the result. The broker's own store is not asked: its consume queues scatter a queue over the whole log, and reading it one
record at a time costs four times what reading the tier does. A life that cannot be read, because it is damaged, is left
alone until this indexer ends; it is counted.

Threads: one.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.errors import BackendError, ObjectNotFoundError
from tiered.errors import DataError
from tiered.index.extract import Keys, extract_all, shifted
from tiered.log.indexed import uncovered
from tiered.log.parts import NO_PARTS
from tiered.log.state import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.index.builder import IndexBuilder
    from tiered.local.face import RecordBatch
    from tiered.log.state import Part, QueueLife, TierState
    from tiered.model import MessageQueue


# -- feed --------------------------------------------------------------------------------------------
#
# Keys taken while records are in memory anyway, on their way into the tier, so that nobody has to read them again.
#
# ``offer`` is called by upload threads when records are durable; ``take`` by the indexer when the journal names them. It
# is a
# cache: what is not there (from before the start, or for want of room) is read from the tier.
#
# Bounds (I8): ``bytes_max`` of memory. When it is full new keys are refused, since the indexer wants the oldest first; but
# what has waited for ``STALE_S`` goes: nobody wants it any more (an entry that did not come, parts that were merged).
#
# Threads: any.

_LOG = logging.getLogger("tiered.index")
FEED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Default limit: 1.8 million keys."""
STALE_S: Final = 600.0
_ENTRY_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class _HeldKeys:
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
        self._held: OrderedDict[tuple[str, int], _HeldKeys] = OrderedDict()
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
            self._held[section.bundle, section.start] = _HeldKeys(tuple(found), size, now_s)
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


# -- indexer -----------------------------------------------------------------------------------------


READ_BYTES: Final = 8 * 1024 * 1024
_COUNT_MAX: Final = 1 << 20
_ITEMS_MAX: Final = 1 << 62


class _Reading:
    """A life that is being read. Kept from step to step, since a long life has many parts."""

    def __init__(
        self, store: ObjectStore, prefix: str, queue: MessageQueue, life: QueueLife
    ) -> None:
        from tiered.log.reader import QueueReader  # noqa: PLC0415 (start-up loads only what is needed)

        self.life = life
        self.reader = QueueReader.of_life(store, prefix, queue, life)


class Indexer:
    """Gives a builder what no index covers yet.

    Attributes:
        builder: Collects it.
        damaged: Lives that cannot be read, and why.
    """

    def __init__(
        self, builder: IndexBuilder, store: ObjectStore, prefix: str, feed: KeyFeed | None = None
    ) -> None:
        """Wire it.

        Args:
            builder: Empty.
            store: The tier's.
            prefix: Of the broker.
            feed: Where to look first.
        """
        self.builder = builder
        self.damaged: dict[tuple[MessageQueue, int], DataError] = {}
        self._store = store
        self._prefix = prefix
        self._feed = feed
        self._reading: _Reading | None = None
        self._gone: dict[tuple[MessageQueue, int], QueueLife] = {}

    def step(
        self, state: TierState, *, bytes_max: int = READ_BYTES, items_max: int = _ITEMS_MAX
    ) -> int:
        """Take the next records, of any queues.

        Args:
            state: What the journal says now.
            bytes_max: Stop at so many bytes of records.
            items_max: And when so many items are collected.

        Returns:
            How many bytes were read; 0 when all is covered or collected.

        Raises:
            BackendError: The tier did not answer; call again.
            OSError: The work file can't be written: what was collected is gone, call again.
        """
        if not self._fits(state):
            self.builder.reset()
        taken = 0
        for queue, life, start, end in self._wanted(state):
            at = start
            while at < end and taken < bytes_max and self.builder.count < items_max:
                before = at
                at, size = self._take(queue, life, at, end)
                taken += size
                if at == before:
                    break
            if taken >= bytes_max or self.builder.count >= items_max:
                break
        return taken

    def waits(self, state: TierState) -> int:
        """How many messages (and holes) are neither covered nor collected."""
        return sum(end - start for _, _, start, end in self._wanted(state))

    def _fits(self, state: TierState) -> bool:
        """Whether what was collected can still be named."""
        for queue, incarnation in self.builder.lives():
            start, end = self.builder.covered(queue, incarnation) or (0, 0)
            life = _last(state, queue, incarnation)
            holes = uncovered(life) if life else []
            if not holes or holes[0][0] != start or end > holes[0][1]:
                return False
        return True

    def _wanted(self, state: TierState) -> Iterator[tuple[MessageQueue, QueueLife, int, int]]:
        for queue, lives in state.queues.items():
            for incarnation in sorted({life.incarnation for life in lives}):
                life = _last(state, queue, incarnation)
                holes = uncovered(life) if life else []
                if not life or not holes or self._is_left(queue, life):
                    continue
                collected = self.builder.covered(queue, incarnation)
                start, end = holes[0]
                if collected:
                    end = min(end, collected[1] + self.builder.room(queue, incarnation))
                    start = collected[1]
                if start < end:
                    yield queue, life, start, end

    def _is_left(self, queue: MessageQueue, life: QueueLife) -> bool:
        key = queue, life.incarnation
        return key in self.damaged or self._gone.get(key) is life

    def _take(self, queue: MessageQueue, life: QueueLife, at: int, end: int) -> tuple[int, int]:
        """Take one piece; where it ends, and how many bytes it had. The same place: it cannot be read now."""
        part = _part_at(life, at)
        try:
            if self._feed and part and part.queue_end <= end:
                found = self._feed.take(part)
                if found is not None:
                    self.builder.add(queue, life.incarnation, at, part.queue_end, found)
                    return part.queue_end, part.log_bytes or 1
            if self._reading is None or self._reading.life is not life:
                self._reading = _Reading(self._store, self._prefix, queue, life)
            return self._read(self._reading, queue, at, end)
        except BackendError:
            raise  # nothing was added
        except BaseException:
            self.builder.reset()  # nobody knows how far it got
            raise

    def _read(self, reading: _Reading, queue: MessageQueue, at: int, end: int) -> tuple[int, int]:
        number, found = reading.life.incarnation, None
        try:
            count = min(end - at, _COUNT_MAX)
            found = reading.reader.read(QueueOffset(at), bytes_max=READ_BYTES, count_max=count)
        except (
            ObjectNotFoundError
        ) as error:  # merged or expired, and the journal is about to say so
            _LOG.info("%s: not there at queue offset %d: %s", queue, at, error)
            self._gone[queue, number] = reading.life
        except DataError as error:
            self.damaged[queue, number] = error
            _LOG.warning("%s: keys from queue offset %d on are not indexed: %s", queue, at, error)
        if found is None:
            return at, 0
        if isinstance(found, Gap):
            self.builder.add_nothing(queue, number, at, min(found.end, end))
            return min(found.end, end), 0
        self.builder.add_batch(queue, number, found.records, found.log_offset)
        return found.records.end_offset, memoryview(found.records.data).nbytes or 1


def _part_at(life: QueueLife, offset: int) -> Part | None:
    """The part that begins there; found without looking at every part of a long life."""
    number = bisect_right(life.segments, offset, key=lambda segment: segment.base_queue_offset) - 1
    parts = life.segments[number].parts if number >= 0 else NO_PARTS
    at = int(np.searchsorted(parts.rows["queue_offset"], offset))
    found = parts[at] if at < len(parts) else None
    return found if found is not None and found.queue_offset == offset else None


def _last(state: TierState, queue: MessageQueue, incarnation: int) -> QueueLife | None:
    """The last life of an incarnation: those before it were taken back."""
    lives = state.queues.get(queue, ())
    return next((life for life in reversed(lives) if life.incarnation == incarnation), None)
