"""Which records stay: the rule by record, the horizon of tombstones, and rounds when a map does not hold all keys.

Of ``[min, end)``, all that a pass looks at, the part behind ``dirty_from`` has not been compacted yet. A *round* fills a map
with the keys from where the last round stopped, until the end or until the map is full, and then judges every record from
the minimum up to where the map stopped. What lies behind that is kept, so a round may stop anywhere: the next one goes on.

A record stays when the map does not know a newer one of its key. A *tombstone* (an empty value) is the newest word on its
key, that it has none: older values go at once, the tombstone itself only when a reader who began before it was first
compacted has had ``tombstone_retention_ms`` to reach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from tiered.compaction.offset_map import Digests, OffsetMap

DAY_MS: Final = 86_400_000
EVERY: Final = 2**62
"""A queue offset behind all others."""

Flags = npt.NDArray[np.bool_]


class Passed(Protocol):
    """A pass that was made (``tiered.log.parts.Pass``)."""

    @property
    def end(self) -> int:
        """One past the last queue offset that it looked at."""

    @property
    def time_ms(self) -> int:
        """When, UTC."""


AnyPass = TypeVar("AnyPass", bound=Passed)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What the two systems do differently."""

    name: str  # as people write it
    keeps_keyless: bool
    """Records without a key stay; else they go, as a topic that is compacted should have none."""
    tombstone_retention_ms: int
    """How long a tombstone stays after the first pass that met it; 0: it goes at once."""


ROCKETMQ: Final = RetentionPolicy("rocketmq", keeps_keyless=False, tombstone_retention_ms=0)
KAFKA: Final = RetentionPolicy("kafka", keeps_keyless=False, tombstone_retention_ms=DAY_MS)
CAREFUL: Final = RetentionPolicy("careful", keeps_keyless=True, tombstone_retention_ms=DAY_MS)
"""For topics that nobody has said to be of one kind: nothing goes but what a newer value, or time, has replaced."""
POLICIES: Final = {policy.name: policy for policy in (CAREFUL, KAFKA, ROCKETMQ)}


@dataclass(frozen=True, slots=True)
class KeyedRecords:
    """Records of one queue in columns, in the order of their offsets."""

    offsets: npt.NDArray[np.int64]  # int64[n], queue offsets, ascending
    digests: Digests  # uint64[n, 2], of the keys; of a record without a key anything
    has_key: Flags  # bool[n]
    is_tombstone: Flags  # bool[n], the value is empty
    sizes: npt.NDArray[np.int64]  # int64[n], bytes of each
    times_ms: npt.NDArray[np.int64]  # int64[n], when each was stored, UTC

    def __len__(self) -> int:
        """Number of records."""
        return len(self.offsets)

    @property
    def memory_bytes(self) -> int:
        """Of the columns: 42 a record."""
        columns = (self.digests, self.has_key, self.is_tombstone)
        longs = (self.offsets, self.sizes, self.times_ms)
        return sum(column.nbytes for column in (*columns, *longs))

    def some(self, where: npt.NDArray[np.int64] | Flags | slice) -> KeyedRecords:
        """Those chosen."""
        return KeyedRecords(
            self.offsets[where],
            self.digests[where],
            self.has_key[where],
            self.is_tombstone[where],
            self.sizes[where],
            self.times_ms[where],
        )


class PieceCache:
    """Columns of records that were read once, and are looked at again, as far as they fit into memory.

    For one thread.
    """

    def __init__(self, bytes_max: int) -> None:
        """Of columns, at most; what does not fit is read each time."""
        self._left = bytes_max
        self._known: dict[Hashable, list[KeyedRecords]] = {}

    def pieces(
        self, key: Hashable, read: Callable[[], Iterator[KeyedRecords]]
    ) -> Iterator[KeyedRecords]:
        """The records of one file or part, read if they are not here; kept when all of them were asked for."""
        known = self._known.get(key)
        if known is not None:
            yield from known
            return
        kept: list[KeyedRecords] | None = []
        taken = 0
        for piece in read():
            if kept is not None and taken + piece.memory_bytes <= self._left:
                kept.append(piece)
                taken += piece.memory_bytes
            else:
                kept = None
            yield piece
        if kept is not None:
            self._known[key] = kept
            self._left -= taken


def tombstones_gone(passes: Iterable[Passed], policy: RetentionPolicy, now_ms: int) -> int:
    """The queue offset below which tombstones have been seen for long enough.

    Args:
        passes: All that were made, or the last of each time (``with_pass``).
        now_ms: UTC.
    """
    if not policy.tombstone_retention_ms:
        return EVERY
    horizon_ms = now_ms - policy.tombstone_retention_ms
    return max((one.end for one in passes if one.time_ms <= horizon_ms), default=0)


def with_pass(passes: Sequence[AnyPass], new: AnyPass, horizon_ms: int) -> tuple[AnyPass, ...]:
    """Passes with one more, without those that say nothing that a later one does not.

    Of those that came as far as the new one, the first stays: since then tombstones are known.

    Args:
        passes: Oldest first.
        horizon_ms: Of passes made before it only the last is kept.
    """
    old = [one for one in passes if one.time_ms <= horizon_ms]
    young = [one for one in passes if one.time_ms > horizon_ms and one.end < new.end]
    same = [one for one in passes if one.time_ms > horizon_ms and one.end == new.end]
    return (*old[-1:], *young, *same[:1], new)


def fill(known: OffsetMap, pieces: Iterable[KeyedRecords], end: int) -> int:
    """Put the keys of records into a map, until it is full.

    Args:
        pieces: Records in the order of their offsets.
        end: One past the last queue offset that they reach.

    Returns:
        Where the next round has to go on; ``end`` when all was put.
    """
    for piece in pieces:
        keyed = np.flatnonzero(piece.has_key)
        taken = known.put(piece.digests[keyed], piece.offsets[keyed])
        if taken < len(keyed):
            return int(piece.offsets[keyed[taken]])
        if len(piece):
            known.pass_by(int(piece.offsets[-1]))
    known.pass_by(end - 1)
    return end


def stays(
    records: KeyedRecords, known: OffsetMap, policy: RetentionPolicy, tombstones_to: int
) -> Flags:
    """bool[n], which records stay.

    Args:
        tombstones_to: The queue offset below which tombstones may go (``tombstones_gone``).
    """
    newest = records.offsets >= known.get(records.digests)
    gone = records.is_tombstone & (records.offsets < tombstones_to)
    kept = records.has_key & newest & ~gone
    if policy.keeps_keyless:
        kept |= ~records.has_key
    kept |= records.offsets > known.latest
    return kept
