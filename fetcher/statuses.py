"""Where a read goes, what it has found, and how it ends: all that a message store decides. Pure.

Sides
    The broker's store is the authority on what a queue's messages are. Their histories may have parted: a topic was deleted
    and created again, or the broker lost its end and has grown since. The last message that both should have tells
    (``is_one``): where the broker's store ends below what the tier has, they are one only if it is the same; else unless it
    is another. Where they are not, the tier serves only what lies below the local minimum, until the journal says what
    became of it.

Statuses
    RocketMQ's, and one of our own; docs/reading.md has the table. What RocketMQ's tiered store gets wrong is not done here:
    a read that failed is never told as "no message matched", and what is skipped over is always named.
"""

from __future__ import annotations

from dataclasses import field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.lazy_dataclass import dataclass
from tiered.errors import DataError, InvalidError
from tiered.local.interface import HoleReason
from tiered.log.parts import Gap
from tiered.model import QueueBounds, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from fetcher.filters.batch import Filter
    from tiered.format.record import Record
    from tiered.local.interface import RecordBatch
    from tiered.model import MessageQueue


# -- policies


class Policy(IntEnum):
    """When the tier is read; numbers as RocketMQ's ``tieredStorageLevel``."""

    DISABLE = 0
    """Never."""
    NOT_IN_DISK = 1
    """What the broker has no more."""
    NOT_IN_MEM = 2
    """That, and what the broker would have to read from its disk."""
    FORCE = 3
    """All that the tier has. What is not there yet comes from the broker."""


class Side(Enum):
    """Where a message is read."""

    LOCAL = "local"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class Both:
    """A queue on both sides, as far as a policy looks at them."""

    local: QueueBounds | None
    """Bounds in the broker's store; None: it has no such queue, or there is no store."""
    tier: QueueBounds | None  # bounds in the tier that may be used; None: there is none

    @classmethod
    def of(
        cls,
        policy: Policy,
        local: QueueBounds | None,
        tier: QueueBounds | None,
        *,
        is_one: bool,
    ) -> Both:
        """Leave out what is not to be used of the tier."""
        if policy is Policy.DISABLE or tier is None:
            return cls(local, None)
        if local is not None and not is_one:
            tier = QueueBounds(tier.min, max(tier.min, min(tier.end, local.min)))
        return cls(local, tier)

    @property
    def bounds(self) -> QueueBounds | None:
        """Of the queue over both sides; None: neither has it."""
        known = [side for side in (self.local, self.tier) if side is not None]
        if not known:
            return None
        end = max(side.end for side in known)
        starts = [side.min for side in known if side.min < side.end]
        return QueueBounds(min(starts, default=end), end)

    def has(self, side: Side, offset: int) -> bool:
        """Whether a side has a queue offset."""
        bounds = self.local if side is Side.LOCAL else self.tier
        return bounds is not None and bounds.min <= offset < bounds.end

    def next_known(self, offset: int) -> QueueOffset:
        """The first queue offset above one that no side has, which a side has; else the end."""
        known = [side for side in (self.local, self.tier) if side is not None]
        above = [side.min for side in known if offset < side.min < side.end]
        return min(above, default=max(side.end for side in known))


def is_shorter(local: QueueBounds | None, tier: QueueBounds | None) -> bool:
    """Whether the tier has more than the broker: either has to be looked at anew, or their histories part."""
    return local is not None and tier is not None and local.end < tier.end


def plan_sides(
    policy: Policy, both: Both, offset: int, is_in_memory: Callable[[], bool]
) -> tuple[Side, ...]:
    """Sides to try for a queue offset, in order; ``is_in_memory`` is asked only if that decides."""
    sides = tuple(side for side in Side if both.has(side, offset))
    if len(sides) < len(Side):
        return sides
    prefers_tier = policy is Policy.FORCE or (policy is Policy.NOT_IN_MEM and not is_in_memory())
    return (Side.TIER, Side.LOCAL) if prefers_tier else (Side.LOCAL, Side.TIER)


# -- statuses


class GetStatus(Enum):
    """RocketMQ's ``GetMessageStatus`` by name, and ``TRY_AGAIN``."""

    FOUND = "FOUND"
    """There are messages."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """What was looked at had no wanted message; there is more."""
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    """It expired while it was read."""
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    """It should be there, and its bytes are damaged."""
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    """Above the end."""
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    """At the end: the next message will be this one."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """Below the minimum."""
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    """There is no such queue."""
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    """The queue never had a message."""
    TRY_AGAIN = "TRY_AGAIN"
    """It is there and cannot be read now; nothing has moved. Not RocketMQ's."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Messages that were found next to each other."""

    records: RecordBatch
    items: npt.NDArray[np.int64]  # int64[n], numbers of its items that are wanted, ascending
    side: Side  # where it was read

    def messages(self) -> Iterator[tuple[QueueOffset, memoryview]]:
        """Queue offset and raw record of each; messages of an inner batch share one."""
        records, view = self.records, memoryview(self.records.data).cast("B")
        for item in self.items.tolist():
            begin = int(records.positions[item])
            raw = view[begin : begin + int(records.sizes[item])]
            yield QueueOffset(records.base_offset + item), raw


@dataclass(frozen=True, slots=True, eq=False)
class GetResult:
    """Outcome of one read."""

    status: GetStatus  # how it ended
    next_begin: QueueOffset  # where to read on
    min_offset: QueueOffset  # of the queue, over both sides; -1 without a queue
    max_offset: QueueOffset  # one past its last message, likewise
    chunks: tuple[Taken, ...] = ()  # what was found
    missing: tuple[Gap, ...] = ()
    """Queue offsets below ``next_begin`` that were skipped since they hold no message, and why."""
    size_bytes: int = 0  # of the records found, each counted once
    error: Exception | None = None
    """Why it could not be read, for ``TRY_AGAIN`` and ``OFFSET_FOUND_NULL``."""

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(len(chunk.items) for chunk in self.chunks)

    def messages(self) -> Iterator[tuple[QueueOffset, memoryview]]:
        """Queue offset and raw record of each message."""
        for chunk in self.chunks:
            yield from chunk.messages()


def judge_offset(
    start: QueueOffset, bounds: QueueBounds | None
) -> tuple[GetStatus, QueueOffset] | None:
    """Status of an offset before anything is read, and where to go on; None: it is inside."""
    if bounds is None:
        return GetStatus.NO_MATCHED_LOGIC_QUEUE, start
    if bounds.end <= 0:
        return GetStatus.NO_MESSAGE_IN_QUEUE, start
    if start < bounds.min:
        return GetStatus.OFFSET_TOO_SMALL, bounds.min
    if start == bounds.end:
        return GetStatus.OFFSET_OVERFLOW_ONE, bounds.end
    if start > bounds.end:
        return GetStatus.OFFSET_OVERFLOW_BADLY, bounds.end
    return None


# -- scanning

SCAN_STEP_BYTES: Final = 1 << 20
"""How much is read at once where a filter decides."""


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """When a read is enough."""

    count_max: int = 32  # messages
    bytes_max: int = 256 * 1024  # bytes of their records; the first is taken however large it is
    scan_items_max: int = 16_000  # messages looked at, wanted or not; and the items of one step
    scan_bytes_max: int = 16 * 1024 * 1024  # bytes looked at, about
    scan_holes_max: int = 500_000
    """Holes passed over, about: what was compacted may be most of a queue, and is columns only."""

    def __post_init__(self) -> None:
        scans = (self.scan_items_max, self.scan_bytes_max, self.scan_holes_max)
        if min(self.count_max, self.bytes_max, *scans) <= 0:
            raise InvalidError("a read needs limits above 0")


def beginning_of(batch: RecordBatch, count: int) -> RecordBatch:
    """The first items of a batch (> 0)."""
    sizes = batch.properties_sizes
    return replace(
        batch,
        positions=batch.positions[:count],
        sizes=batch.sizes[:count],
        tag_codes=batch.tag_codes[:count],
        store_timestamps_ms=batch.store_timestamps_ms[:count],
        physical_offsets=batch.physical_offsets[:count],
        quarantined=(),
        properties_sizes=None if sizes is None else sizes[:count],
    )


class Scan:
    """One read. Not for several threads at once."""

    def __init__(self, start: QueueOffset, limits: ScanLimits, wanted: Filter | None) -> None:
        # Where to go on: behind the last message taken when it is enough, else behind the last looked at.
        self.at = start
        self.chunks: list[Taken] = []  # what was taken
        self.missing: list[Gap] = []  # what was skipped since there is no message
        self.size_bytes = 0  # of the records taken
        self.is_full = False  # a limit on what is taken was reached
        self.met_holes = False  # the last batch had some: many more may follow (a compacted range)
        self._limits = limits
        self._wanted = wanted
        self._count = 0
        self._items_left = limits.scan_items_max
        self._bytes_left = limits.scan_bytes_max
        self._holes_left = limits.scan_holes_max

    @property
    def is_over(self) -> bool:
        """Something was taken, or enough was looked at."""
        return bool(self.chunks) or self.is_spent

    @property
    def is_spent(self) -> bool:
        """A limit was reached."""
        return self.is_full or min(self._items_left, self._bytes_left, self._holes_left) <= 0

    def next_read(self) -> tuple[int, int]:
        """Bytes and items to ask for next, at most.

        Behind holes as many items as may be: more of them cost next to nothing, and no more messages are taken than wanted.
        """
        if self._wanted is None:
            count = self._items_left if self.met_holes else self._limits.count_max
            return self._limits.bytes_max, max(count, self._limits.count_max)
        return min(SCAN_STEP_BYTES, self._bytes_left), self._items_left

    def skip(self, end: int, reason: str) -> None:
        """There is nothing up to ``end``."""
        self.missing.append(Gap(self.at, QueueOffset(end), reason))
        self.at = QueueOffset(end)
        self._items_left -= 1

    def take(self, batch: RecordBatch, side: Side) -> None:
        """Look at a batch that begins at ``at``.

        DataError: its first record is damaged, and the filter has to look into it.
        """
        assert batch.base_offset == self.at
        if not self._take_whole(batch, side):
            self._take_some(batch, side)

    def _take_whole(self, batch: RecordBatch, side: Side) -> bool:
        """Take all of it as it is; whether it is all wanted, fits, and has records one behind the other and no holes.

        So it nearly always is without a filter. Arrays are this short that their bytes are compared sooner than they are.
        """
        limits, count = self._limits, batch.count
        if self._wanted is not None or not 0 < count <= limits.count_max - self._count:
            return False
        positions, ends = batch.positions, batch.positions + batch.sizes
        size_bytes = int(ends[-1]) - int(positions[0])
        has_room = self.size_bytes + size_bytes <= limits.bytes_max
        if not has_room and (self._count or count > 1):
            return False
        if ends[:-1].tobytes() != positions[1:].tobytes() or int(batch.sizes.min()) <= 0:
            return False
        self.chunks.append(Taken(batch, _numbers(count), side))
        self.size_bytes += size_bytes
        self._pass(batch, count, count, holes=0)
        return True

    def _pass(self, batch: RecordBatch, end: int, count: int, *, holes: int) -> None:
        """So many items were looked at, and so many taken; holes as one, as a gap is."""
        self._count += count
        self.is_full = self._count >= self._limits.count_max or end < batch.count
        self._items_left -= end - holes + bool(holes)
        self._holes_left -= holes
        self.met_holes = holes > 0
        self._bytes_left -= memoryview(batch.data).nbytes
        self.at = QueueOffset(batch.base_offset + end)

    def _take_some(self, batch: RecordBatch, side: Side) -> None:
        batch, items = self._select(batch)
        count = self._fitting(batch, items)
        end = batch.count
        if count < len(items) or self._count + count >= self._limits.count_max:
            end = int(items[count - 1]) + 1 if count else int(items[0])
        if count:
            self.chunks.append(Taken(batch, items[:count], side))
        self._pass(batch, end, count, holes=self._note_holes(batch, end))

    def _select(self, batch: RecordBatch) -> tuple[RecordBatch, npt.NDArray[np.int64]]:
        """What is wanted of a batch; where something of it is damaged, of a beginning of it that is sound."""
        if self._wanted is None:
            return batch, np.flatnonzero(batch.sizes > 0)
        while True:
            try:
                return batch, self._wanted.select(batch)
            except DataError:
                if batch.count <= 1:
                    raise
            # Only `at` is called damaged, so what lies before the damage is taken first; one by one would be many looks.
            batch = beginning_of(batch, batch.count // 2)

    def _fitting(self, batch: RecordBatch, items: npt.NDArray[np.int64]) -> int:
        """How many items fit; at least one if nothing was taken yet."""
        sizes, positions = batch.sizes[items].astype(np.int64), batch.positions[items]
        sizes[1:][positions[1:] == positions[:-1]] = 0  # of an inner batch, once
        totals = self.size_bytes + np.cumsum(sizes)
        count = int(np.searchsorted(totals, self._limits.bytes_max, side="right"))
        if not self._count and len(items):
            count = max(count, 1)
        count = min(count, self._limits.count_max - self._count)
        if count:
            self.size_bytes = int(totals[count - 1])
        return count

    def _note_holes(self, batch: RecordBatch, end: int) -> int:
        """Name the holes among the first items, neighbours of one reason together; how many they are."""
        holes = np.flatnonzero(batch.sizes[:end] <= 0)
        if not len(holes):
            return 0
        codes = batch.tag_codes[holes]
        is_first = np.append(True, (holes[1:] != holes[:-1] + 1) | (codes[1:] != codes[:-1]))
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(holes)) - 1
        starts, ends = holes[firsts], holes[lasts] + 1
        for start, stop, code in zip(
            starts.tolist(), ends.tolist(), codes[firsts].tolist(), strict=True
        ):
            self._note(batch.base_offset + start, batch.base_offset + stop, _reason(code))
        return len(holes)

    def _note(self, start: int, end: int, reason: str) -> None:
        last = self.missing[-1] if self.missing else None
        if last is not None and (last.end, last.reason) == (start, reason):
            self.missing.pop()
            start = last.start
        self.missing.append(Gap(QueueOffset(start), QueueOffset(end), reason))


def _reason(code: int) -> str:
    known = {int(reason) for reason in HoleReason}
    return f"hole: {HoleReason(code).name.lower()}" if code in known else "hole"


COMPACTED: Final = _reason(HoleReason.COMPACTED)
"""Of a ``Gap``: nothing was lost there, newer messages have taken the place of what it had."""

_NUMBERS = np.arange(4096)
_NUMBERS.flags.writeable = False


def _numbers(count: int) -> npt.NDArray[np.int64]:
    """0, 1, and so on. NumPy gives the interpreter's lock away to count even to 32, and may wait long to get it back."""
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count)


# -- keys

TIME_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuery:
    """What is looked for."""

    topic: str  # of the messages
    key: str  # one of a message's keys, or its unique id
    from_ms: int = 0  # stored at this time or later, UTC
    until_ms: int = TIME_MAX  # stored before this time
    count: int = 64  # so many, the newest (> 0, else ``InvalidError``)

    def __post_init__(self) -> None:
        if self.count <= 0:
            raise InvalidError(f"a lookup for {self.count} messages", do="ask for 1 or more")


@dataclass(frozen=True, slots=True)
class KeyHit:
    """A message that has the key."""

    queue: MessageQueue  # where it is
    queue_offset: QueueOffset  # likewise
    store_ms: int  # store time, UTC
    message: Record = field(repr=False)  # the message; an inner message as it is by itself


@dataclass(frozen=True, slots=True)
class KeyAnswer:
    """What was found."""

    hits: tuple[KeyHit, ...] = ()  # newest first, no message twice
    is_complete: bool = True  # nothing that was asked for can be missing
    errors: tuple[Exception, ...] = ()  # why something may be


class KeyLookup(Protocol):
    """Looks for messages on one side."""

    def __call__(
        self, wanted: KeyQuery, deadline_s: float, tier_end: Callable[[MessageQueue], int], /
    ) -> KeyAnswer:
        """Look; up to ``tier_end`` of a queue the tier is asked, and the local side need look no further down."""
        ...


def merge_answers(answers: Sequence[KeyAnswer], count: int) -> KeyAnswer:
    """One answer of several; the first wins where two have the same message."""
    found = {
        (hit.queue, hit.queue_offset): hit for answer in reversed(answers) for hit in answer.hits
    }
    hits = sorted(
        found.values(), key=lambda hit: (hit.store_ms, hit.queue_offset, hit.queue), reverse=True
    )
    return KeyAnswer(
        tuple(hits[:count]),
        all(answer.is_complete for answer in answers),
        tuple(error for answer in answers for error in answer.errors),
    )
