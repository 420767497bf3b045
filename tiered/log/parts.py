"""The values of a tier's state: bundles, parts, segments, incarnations of queues; and their form in checkpoints.

All are immutable. What changes them is ``tiered.log.state``. Parts are rows of columns (``Parts``), and so are segments as
a checkpoint had them (``Segments``): a tier of a million of each takes 140 MiB and no Python object each.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import accumulate, chain, pairwise, zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import zstandard

from backends.lazy_dataclass import dataclass
from tiered.format.bundle import SectionPlace
from tiered.format.items import ITEM_BYTES
from tiered.journal.entry import INT_MAX, JsonForm, Key, as_object, as_row
from tiered.local.interface import (  # noqa: TC001 (read at run time: tiered.journal.entry)
    LeaderEpoch,
    OpenTransaction,
)
from tiered.log.ranges import Ranges  # noqa: TC001 (read at run time: tiered.journal.entry)
from tiered.log.timers import TimerFacts
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.journal.entry import Action

PARTS_MAX: Final = 16_000_000
"""That a checkpoint may name; bounds what reading a hostile one allocates."""
_PACK_LEVEL: Final = 3
_RATIO_MAX: Final = 1000
"""Queue offsets alone, which differ, keep what is honest below a tenth of it."""
_SMALL: Final = 1 << 20


class ObjectRange(NamedTuple):
    """An object of the key index, as the journal names it: its payload, and what stands behind it."""

    key: Key  # relative to the broker's prefix
    payload_bytes: int  # size of the payload
    trailer_bytes: int  # size of the trailer behind it
    crc: int  # CRC-32 of the payload

    @property
    def object_bytes(self) -> int:
        """Size of the whole object."""
        return self.payload_bytes + self.trailer_bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """An object with the sections of one or many queues (``tiered.format.bundle``)."""

    key: Key  # relative to the broker's prefix
    size_bytes: int  # of the whole object
    level: int = 0  # 0 as committed; how often its bytes were gathered


@dataclass(frozen=True, slots=True)
class SectionRange:
    """Bytes ``[start, end)`` of the records of a section, or of its items."""

    bundle: Bundle  # where the section lies
    place: SectionPlace
    start: int
    """First byte, counted from the first of the records (of the items) as they were before they were packed."""
    end: int  # one past the last
    of_items: bool = False

    @property
    def key(self) -> str:
        """Of the bundle, relative to the broker's prefix."""
        return self.bundle.key

    @property
    def size_bytes(self) -> int:
        """Size of the range."""
        return self.end - self.start

    def part_of(self, start: int, end: int) -> SectionRange:
        """Bytes ``[start, end)`` of these."""
        assert 0 <= start <= end <= self.size_bytes
        return replace(self, start=self.start + start, end=self.start + end)


@dataclass(frozen=True, slots=True)
class Part:
    """A section's place in the history of its queue; of a section that the broker truncated in part, what is left."""

    bundle: Bundle  # where the section lies
    section: SectionPlace  # its place there
    log_offset: LogOffset  # of the first record
    queue_offset: QueueOffset  # of the first item
    log_bytes: int  # bytes of records
    count: int  # items, holes included
    holes: int  # items without a message
    store_min_ms: int  # smallest store time; -1 when all items are holes
    store_max_ms: int  # greatest store time; -1 likewise
    last: int = 0  # fingerprint of the last item's record (``tiered.log.divergence``); 0: not known, or a hole
    records_at: int = 0
    """Position of its first byte in the section's records: above 0 for what lies behind a cut."""
    items_at: int = 0  # number of its first item in the section
    log_gone: int = 0
    """Bytes of records that compaction took away: the next part begins behind them."""

    @property
    def records_end(self) -> LogOffset:
        """One past the last byte of its records."""
        return LogOffset(self.log_offset + self.log_bytes)

    @property
    def log_end(self) -> LogOffset:
        """Where the next part begins."""
        return LogOffset(self.log_offset + self.log_bytes + self.log_gone)

    @property
    def queue_end(self) -> QueueOffset:
        """One past the last item."""
        return QueueOffset(self.queue_offset + self.count)

    @property
    def log(self) -> SectionRange:
        """Where its records lie."""
        return SectionRange(
            self.bundle, self.section, self.records_at, self.records_at + self.log_bytes
        )

    @property
    def index(self) -> SectionRange:
        """Where its items lie."""
        start = self.items_at * ITEM_BYTES
        end = start + self.count * ITEM_BYTES
        return SectionRange(self.bundle, self.section, start, end, of_items=True)

    @property
    def is_whole(self) -> bool:
        """It is its whole section."""
        return self.count == self.section.count and self.log_bytes == self.section.records_bytes

    @property
    def stored_bytes(self) -> int:
        """What it takes in the bundle, in proportion if it is not the whole section."""
        return self.section.size_bytes * self.count // self.section.count


PART: Final = np.dtype(
    [
        ("start", "<i8"),  # of the section in the bundle
        ("records_bytes", "<u4"),  # of the section, as the next four
        ("stored_bytes", "<u4"),
        ("items", "<u4"),
        ("size_bytes", "<u4"),
        ("crc", "<u4"),
        ("log_offset", "<i8"),
        ("queue_offset", "<i8"),
        ("log_bytes", "<u4"),
        ("count", "<u4"),
        ("holes", "<u4"),
        ("store_min_ms", "<i8"),
        ("store_max_ms", "<i8"),
        ("last", "<u4"),
        ("records_at", "<u4"),
        ("items_at", "<u4"),
        ("gone", "<u4"),  # of the section: items not stored
        ("log_gone", "<i8"),
    ]
)
"""One row a part, 96 bytes; its bundle stands beside it."""
SPARSE_BYTES: Final = 12
"""The last columns: 0 where compaction never was."""
_SPARSE: Final = ("gone", "log_gone")
_QUEUE_OFFSET_AT, _COUNT_AT = map((PART.names or ()).index, ("queue_offset", "count"))
_KINDS: Final = {name: PART[name] for name in PART.names or ()}
_OF: Final = "bundle"
"""The column that says which bundle a part lies in."""
_NUMBER: Final = np.dtype("<u4")
_SECTION_FIELDS = 6


def _row(part: Part) -> tuple[int, ...]:
    s = part.section
    return (
        *(s.start, s.records_bytes, s.stored_bytes, s.count, s.size_bytes, s.crc),
        *(part.log_offset, part.queue_offset, part.log_bytes, part.count, part.holes),
        *(part.store_min_ms, part.store_max_ms, part.last, part.records_at, part.items_at),
        *(s.gone, part.log_gone),
    )


def _part(bundle: Bundle, row: tuple[Any, ...]) -> Part:
    place = SectionPlace(*row[:_SECTION_FIELDS], *row[-2:-1])
    return Part(bundle, place, *row[_SECTION_FIELDS:-2], *row[-1:])


class _Rows:
    """Rows that grow at their end, with room to spare: what ``Parts`` look at. What was written is never changed."""

    __slots__ = ("_room", "bundles", "rows")

    def __init__(self, rows: npt.NDArray[np.void], bundles: list[Bundle]) -> None:
        self.rows = rows
        self.bundles = bundles
        self._room = bytearray()  # what `rows` looks at, as soon as some have come

    def append(self, at: int, data: bytes, bundles: Sequence[Bundle]) -> bool:
        """Add rows behind row ``at``; False when others have come there: then somebody else went on from there."""
        # One lock for the rows of all queues: it is held for a copy, and there are as many rows as segments.
        with _GROWING:
            if at != len(self.bundles):
                return False
            end = at + len(bundles)
            if end > len(self.rows):
                # Into a new array: readers of the old one keep it as it was.
                room = bytearray(max(end, at + at // 2 + _SPARE) * PART.itemsize)
                room[: at * PART.itemsize] = self.rows[:at].tobytes()
                self._room, self.rows = room, np.frombuffer(room, PART)
            self._room[at * PART.itemsize : end * PART.itemsize] = data
            # Last, since the number of bundles says how many rows there are.
            self.bundles.extend(bundles)
        return True


_GROWING: Final = threading.Lock()
# A fork waits until nobody has it: what a child opens for itself needs it, too, and its holder would not be there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_GROWING.acquire,
        after_in_parent=_GROWING.release,
        after_in_child=_GROWING.release,
    )
_SPARE: Final = 4


class Parts(Sequence[Part]):
    """Parts in columns, in order; immutable. A ``Part`` is made of a row when somebody looks at it.

    Several may look at the same rows: slices do, and what ``joined`` makes of parts and of some that come behind them, as
    when a segment takes one part after another. That costs by what comes, not by what is there.
    """

    __slots__ = ("_end", "_shared", "_start")

    def __init__(
        self,
        rows: npt.NDArray[np.void] | _Rows,
        bundles: Iterable[Bundle] = (),
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Look at rows that nobody writes to."""
        self._shared = rows if isinstance(rows, _Rows) else _Rows(rows, list(bundles))
        self._start = start
        self._end = len(self._shared.bundles) if end is None else end

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """``PART``, one a part; not to be written to."""
        return self._shared.rows[self._start : self._end]

    @property
    def bundles(self) -> Sequence[Bundle]:
        """Of each part."""
        return self._shared.bundles[self._start : self._end]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Parts:
        """In columns."""
        if isinstance(parts, Parts):
            return parts
        known = list(parts)
        rows = np.array([_row(part) for part in known], PART)
        return cls(rows, (part.bundle for part in known))

    @classmethod
    def joined(cls, several: Iterable[Parts]) -> Parts:
        """One row behind the other."""
        known = [parts for parts in several if len(parts)]
        if len(known) == 1:
            return known[0]
        if not known:
            return NO_PARTS
        if len(known) == 2:  # noqa: PLR2004 (parts, and what comes behind them)
            return known[0].followed_by(known[1])
        # As bytes: of structured rows NumPy would hold every field against every other first.
        data = np.concatenate([parts.rows.view(np.uint8) for parts in known])
        return cls(data.view(PART), chain.from_iterable(parts.bundles for parts in known))

    def followed_by(self, more: Parts) -> Parts:
        """These and those behind them. Costs by how many more they are, mostly."""
        if not len(self):
            return more
        data, bundles = more.rows.tobytes(), more.bundles
        if self._shared.append(self._end, data, bundles):
            return Parts(self._shared, (), self._start, self._end + len(bundles))
        own = _Rows(self.rows, list(self.bundles))
        own.append(len(self), data, bundles)
        return Parts(own)

    def __len__(self) -> int:
        return self._end - self._start

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> Parts: ...
    def __getitem__(self, index: int | slice) -> Part | Parts:
        if not isinstance(index, slice):
            at = range(self._start, self._end)[index]
            return _part(self._shared.bundles[at], self._shared.rows[at].item())
        start, end, step = index.indices(len(self))
        if step != 1:
            return Parts(self.rows[index], self.bundles[index])
        return Parts(self._shared, (), self._start + start, self._start + max(start, end))

    def __iter__(self) -> Iterator[Part]:
        for bundle, row in zip(self.bundles, self.rows.tolist(), strict=True):
            yield _part(bundle, row)

    def __add__(self, other: Iterable[Part]) -> Parts:
        return Parts.joined((self, Parts.of(other)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parts):
            return NotImplemented
        return self.bundles == other.bundles and self.rows.tobytes() == other.rows.tobytes()

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())

    def __reduce__(self) -> tuple[object, ...]:
        """For another process: these alone, and not the rows that others look at, too."""
        return Parts, (self.rows.copy(), list(self.bundles))

    def __repr__(self) -> str:
        return f"Parts({list(self)!r})"

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """int64[n], one column of ``PART``."""
        return self.rows[name].astype(np.int64)

    def stored_bytes(self) -> npt.NDArray[np.int64]:
        """int64[n], ``Part.stored_bytes`` of each."""
        return self.column("size_bytes") * self.column("count") // self.column("items")

    @property
    def log_bytes(self) -> int:
        """Bytes of their records."""
        return int(self.rows["log_bytes"].sum(dtype=np.int64))

    @property
    def log_gone(self) -> int:
        """Bytes of records that compaction took away."""
        return int(self.rows["log_gone"].sum(dtype=np.int64))

    @property
    def gone(self) -> int:
        """Messages that compaction took away, of those whose items are not stored; for whole sections."""
        return int(self.rows["gone"].sum(dtype=np.int64))

    @property
    def messages(self) -> int:
        """Items that are no holes."""
        return int(self.rows["count"].sum(dtype=np.int64)) - self.holes

    @property
    def holes(self) -> int:
        """Items without a message."""
        return int(self.rows["holes"].sum(dtype=np.int64))

    @property
    def store_times(self) -> tuple[int, int] | None:
        """Smallest and greatest store time, UTC ms; None when all items are holes."""
        timed = self.rows["store_min_ms"] >= 0
        if not timed.any():
            return None
        rows = self.rows[timed]
        return int(rows["store_min_ms"].min()), int(rows["store_max_ms"].max())

    @property
    def log_end(self) -> LogOffset:
        """Where the part behind the last begins."""
        last = self.rows[-1]
        return LogOffset(int(last["log_offset"]) + int(last["log_bytes"]) + int(last["log_gone"]))

    @property
    def queue_end(self) -> QueueOffset:
        """One past the last item of the last."""
        # One row, since NumPy would make an array of a column first.
        row = self._shared.rows[self._end - 1].item()
        return QueueOffset(row[_QUEUE_OFFSET_AT] + row[_COUNT_AT])


NO_PARTS: Final = Parts(np.empty(0, PART), ())


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of parts with one base; only the last of a queue is not sealed."""

    base_offset: LogOffset  # log offset of its first byte
    base_queue_offset: QueueOffset  # queue offset of its first item
    created_ms: int  # when its first part was committed, by the writer's clock
    sealed: bool = False  # no part will be added
    parts: Parts = NO_PARTS  # in order, without a hole in log offsets

    @property
    def size_bytes(self) -> int:
        """Bytes of its commit log."""
        return self.parts.log_bytes


SEGMENT: Final = np.dtype(
    [
        ("base_offset", "<i8"),
        ("base_queue_offset", "<i8"),
        ("created_ms", "<i8"),
        ("sealed", "?"),
        ("first", "<u4"),  # of its parts
        ("behind", "<u4"),  # one past the last of them
    ]
)
_SEGMENT_VALUES: Final = 5
"""In a checkpoint."""


class Segments(Sequence[Segment]):
    """Segments of an incarnation in columns, in order; immutable. A ``Segment`` is made of a row when somebody looks at it.

    Equal to a tuple of the same, which is what an incarnation has as soon as one of them changes.
    """

    __slots__ = ("parts", "rows")

    def __init__(self, rows: npt.NDArray[np.void], parts: Parts) -> None:
        self.rows = rows  # ``SEGMENT``, one a segment; not to be written to
        # That the rows count; of other segments, too, where these are some of them.
        self.parts = parts

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Segments:
        """In columns."""
        if isinstance(segments, Segments):
            return segments
        columns = _columns_of(_segment_rows(segments))
        return cls.joined(columns, Parts.joined(s.parts for s in segments))

    @classmethod
    def joined(cls, columns: Sequence[list[Any]], parts: Parts) -> Segments:
        """Of the first columns of ``SEGMENT``, and how many of the parts each has."""
        *known, counts = columns
        ends = list(accumulate(counts))
        rows = zip(*known, [0, *ends[:-1]] if ends else [], ends, strict=True)
        return cls(np.array(list(rows), SEGMENT), parts)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Segments:
        """Some of them: bool[n]."""
        return Segments(self.rows[chosen], self.parts)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> Segments: ...
    def __getitem__(self, index: int | slice) -> Segment | Segments:
        if isinstance(index, slice):
            return Segments(self.rows[index], self.parts)
        return self._segment(self.rows[index].item())

    def __iter__(self) -> Iterator[Segment]:
        return map(self._segment, self.rows.tolist())

    def _segment(self, row: tuple[Any, ...]) -> Segment:
        base, queue, created_ms, sealed, first, behind = row
        return Segment(base, queue, created_ms, sealed, self.parts[first:behind])

    def __eq__(self, other: object) -> bool:
        return (
            tuple(self) == tuple(other) if isinstance(other, Segments | tuple) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class Gap:
    """Queue offsets ``[start, end)`` that never came into the tier, and why."""

    start: QueueOffset
    end: QueueOffset
    reason: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of compaction that was made over a log."""

    end: int  # one past the last queue offset that it looked at: all below was compacted
    time_ms: int  # when


def _are_in_order(passes: tuple[Pass, ...]) -> None:
    if any(one.end > two.end or one.time_ms > two.time_ms for one, two in pairwise(passes)):
        raise ValueError("passes of compaction are not in order")


Passes = Annotated[tuple[Pass, ...], _are_in_order]


@dataclass(frozen=True, slots=True)
class AbortedRange:
    """A transaction that was aborted: what its producer wrote in these queue offsets is nothing for readers."""

    producer: int  # producer id
    first: int  # queue offset of its first record
    last: int  # of its end, which is a record of the node's own


@dataclass(frozen=True, slots=True)
class LineageFacts:
    """Where an incarnation's records come from, of stores that tell: Kafka, JoyQueue (``tiered.log.lineage``)."""

    topic_id: str = ""
    epochs: tuple[LeaderEpoch, ...] = ()  # of the leaders, ascending in both
    opened: tuple[OpenTransaction, ...] = ()
    """Transactions that have no end below the commit offset."""
    is_sure: bool = True
    """Whether ``opened`` is all of them: not so where the end of the queue was moved since, until the next part."""
    aborted: tuple[AbortedRange, ...] = ()  # ascending by their ends


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of a queue, from its offset 0."""

    number: int  # of this incarnation among those of its queue, from 0
    min_offset: QueueOffset  # first queue offset that can be read
    commit_offset: QueueOffset  # one past the last
    log_end: LogOffset = LogOffset(0)
    """Log offset at which the next part begins."""
    segments: Sequence[Segment] = ()  # in order
    gaps: tuple[Gap, ...] = ()  # recorded gaps, in order
    quarantined: int = 0  # records put into quarantine
    ended: str = ""  # why this incarnation is over; empty while it lasts
    indexed: Ranges = ()  # queue offsets whose keys are in index objects (``tiered.log.state``)
    cut_at: int = -1
    """Of what the broker truncated: where it was cut off, whatever of it has expired since; else -1."""
    cut_by: int = 0
    """Likewise: number of the journal entry that cut it off, by which it is known again whatever is merged,
    compacted or given up of it; else 0, as where bundles alone tell of it (``tiered.log.rebuilt_state``)."""
    passes: Passes = ()
    """Of compaction, as many as still matter; the last says how far it is compacted."""
    lineage: LineageFacts | None = None
    """Of its records, where their store tells; None: it does not, or nothing has come."""

    def tables(self) -> Iterator[Parts]:
        """All parts, in order, in the rows in which they are held: of a segment, or of many."""
        mine = self.segments
        if not isinstance(mine, Segments):
            yield from (segment.parts for segment in mine)
        elif mine:
            yield mine.parts[mine.rows["first"][0] : mine.rows["behind"][-1]]

    def parts(self) -> Parts:
        """All parts, in order."""
        return Parts.joined(self.tables())

    def grown(
        self, segments: Sequence[Segment], end: QueueOffset, log_end: LogOffset
    ) -> Incarnation:
        """With a part behind the others; there are so many that ``dataclasses.replace`` is felt."""
        return Incarnation(
            self.number,
            self.min_offset,
            end,
            log_end,
            segments,
            self.gaps,
            self.quarantined,
            self.ended,
            self.indexed,
            self.cut_at,
            self.cut_by,
            self.passes,
            self.lineage,
        )


class Placed(NamedTuple):
    """An incarnation, and where a state has it."""

    queue: MessageQueue
    position: int  # among the queue's incarnations
    incarnation: Incarnation
    truncated: bool  # it is what the broker truncated, and the next one went on without it


@dataclass(frozen=True, slots=True)
class Cover:
    """Queue offsets ``[start, end)`` of one incarnation of a queue."""

    queue: MessageQueue
    incarnation: int  # which incarnation
    start: int  # first queue offset
    end: int  # one past the last
    cut_by: int = 0
    """Number of the last entry that had taken an end of this incarnation back when its messages were read; 0: none
    had. Where another has come since, other messages may stand there now."""


@dataclass(frozen=True, slots=True)
class IndexObject:
    """One index object, as the journal names it."""

    place: ObjectRange  # its whole payload
    count: int  # items
    filter_at: int  # where in the payload the filter begins
    store_min_ms: int  # smallest store time among its items; -1 without items
    store_max_ms: int  # greatest store time; -1 likewise
    covers: tuple[Cover, ...]  # what it covers; the items' queue numbers count these


@dataclass(frozen=True, slots=True)
class PausedTopic:
    """A topic of which the writer takes nothing."""

    topic: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class TierState:
    """Everything that a broker's journal says."""

    epoch: int = 0  # of the present writer
    history: str = ""
    """Which history this is: the id of the writer whose epoch was the first, and when it began. Positions that are
    kept elsewhere mean nothing in another, such as that of a tier that was wiped and begun anew."""
    writer: str = ""  # id of the present writer
    holder: Mapping[str, Any] = field(default_factory=dict)  # who it was, for people
    store: Mapping[str, Any] = field(default_factory=dict)
    """Identity of the local store that the tier belongs to (``cluster broker store_id kind``); empty before the
    first epoch."""
    queues: Mapping[MessageQueue, tuple[Incarnation, ...]] = field(default_factory=dict)
    """Incarnations of each queue, oldest first; never empty."""
    refused_parts: int = 0  # parts, gaps and incarnations that replay refused
    updated_ms: int = 0  # time of the last entry
    indexes: tuple[IndexObject, ...] = ()
    """The key index's objects, in the order in which they were named."""
    timers: TimerFacts = field(default_factory=TimerFacts)
    """Of a journal of timers (``tiered.log.timers``)."""
    paused: tuple[PausedTopic, ...] = ()  # in the order in which they were paused

    @property
    def paused_topics(self) -> frozenset[str]:
        """Their names."""
        return frozenset(one.topic for one in self.paused)

    def incarnation(self, queue: MessageQueue) -> Incarnation | None:
        """The present incarnation of a queue."""
        incarnations = self.queues.get(queue)
        return incarnations[-1] if incarnations else None

    def placed(self) -> Iterator[Placed]:
        """Every incarnation of every queue, in order."""
        for queue, incarnations in self.queues.items():
            for position, (one, behind) in enumerate(zip_longest(incarnations, incarnations[1:])):
                truncated = behind is not None and behind.number == one.number
                yield Placed(queue, position, one, truncated)


def queue_action(do: str, queue: MessageQueue, incarnation: int, **fields: Any) -> Action:  # noqa: ANN401 (JSON values)
    """An action of one queue."""
    return {
        "do": do,
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "incarnation": incarnation,
        **fields,
    }


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """Many parts, as they stand in a checkpoint."""

    bundles: tuple[Bundle, ...]
    count: int
    columns: Mapping[str, Any]  # packed, in base64


def encode_columns(parts: Iterable[Parts]) -> Any:  # noqa: ANN401 (JSON values)
    """Many rows of parts as JSON: their bundles once, and each column packed by itself.

    So a reader holds the rows and one column more, however many parts there are.
    """
    number: dict[Bundle, int] = {}
    several = list(parts)
    of: list[int] = []
    for some in several:
        of += [number.setdefault(bundle, len(number)) for bundle in some.bundles]
    # Joined as bytes: `np.concatenate` holds the fields of each array against those of the others.
    rows = np.frombuffer(b"".join(some.rows.tobytes() for some in several), PART)
    is_sparse = any(rows[name].any() for name in _SPARSE)
    columns = {
        name: _packed(rows[name].tobytes())
        for name in PART.names or ()
        if is_sparse or name not in _SPARSE
    }
    columns[_OF] = _packed(np.array(of, "<u4").tobytes())
    return as_object(StoredColumns).encode(StoredColumns(tuple(number), len(of), columns))


def decode_columns(document: Any) -> Parts:  # noqa: ANN401 (JSON values)
    """Undo ``encode_columns``: all rows, one behind the other."""
    said = as_object(StoredColumns).decode(document)
    count, columns = said.count, said.columns
    if not 0 <= count <= PARTS_MAX:
        raise ValueError(f"a state names {count} parts")
    # All are looked at before anything is allocated by what one of them says.
    packed = {name: base64.b64decode(columns[name], validate=True) for name in columns}
    kinds = {name: kind for name, kind in _KINDS.items() if name in packed or name not in _SPARSE}
    _require_sizes(packed, kinds, count)
    rows = np.zeros(count, PART)
    for name, kind in kinds.items():
        rows[name] = _unpacked(packed.pop(name), kind, count)
    check_rows(rows)
    numbers = _unpacked(packed[_OF], _NUMBER, count).tolist()
    return Parts(rows, map(said.bundles.__getitem__, numbers))


def check_rows(rows: npt.NDArray[np.void]) -> None:
    """Refuse (``ValueError``) times and offsets out of bounds, and parts that are empty or leave their section."""
    for name in ("start", "log_offset", "queue_offset", "log_gone"):
        if len(rows) and not 0 <= rows[name].min() <= rows[name].max() < INT_MAX:
            raise ValueError(f"{name} of a part is out of range")
    for name in ("store_min_ms", "store_max_ms"):
        if len(rows) and not -1 <= rows[name].min() <= rows[name].max() < INT_MAX:
            raise ValueError(f"{name} of a part is out of range")
    fits = (
        (rows["count"] > 0)
        & (rows["holes"] <= rows["count"])
        & (rows["items_at"] + rows["count"].astype(np.int64) <= rows["items"])
        & (rows["records_at"] + rows["log_bytes"].astype(np.int64) <= rows["records_bytes"])
        & (rows["stored_bytes"] <= rows["records_bytes"])
        & ((rows["gone"] == 0) | (rows["gone"] < rows["items"]))
    )
    if not fits.all():
        raise ValueError("a part is not within its section")


def _packed(data: bytes) -> str:
    packed = zstandard.ZstdCompressor(level=_PACK_LEVEL).compress(data)
    return base64.b64encode(packed).decode("ascii")


def _require_sizes(
    packed: Mapping[str, bytes], kinds: Mapping[str, np.dtype[Any]], count: int
) -> None:
    for name, kind in (*kinds.items(), (_OF, _NUMBER)):
        try:
            claimed = zstandard.frame_content_size(packed[name])
        except zstandard.ZstdError as error:
            raise ValueError(f"a column of parts cannot be unpacked: {error}") from error
        if claimed != kind.itemsize * count:
            raise ValueError("a column of parts is not as large as it says")
    stored = sum(map(len, packed.values()))
    if (PART.itemsize + _NUMBER.itemsize) * count > _RATIO_MAX * stored + _SMALL:
        raise ValueError(f"{stored} bytes claim to be {count} parts")


def _unpacked(packed: bytes, kind: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    try:
        size = kind.itemsize * count
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"a column of parts cannot be unpacked: {error}") from error
    return np.frombuffer(data, kind, count)


def incarnation_form(take: Callable[[int], Parts]) -> JsonForm[Incarnation]:
    """Of an incarnation as a row, with how many parts each segment has; the parts stand by themselves, in this order."""
    return as_row(Incarnation, segments=JsonForm(_segment_rows, partial(_segments_of, take)))


def _segment_rows(segments: Sequence[Segment]) -> list[list[Any]]:
    if isinstance(segments, Segments):
        return [[*known, behind - at] for *known, at, behind in segments.rows.tolist()]
    return [
        [s.base_offset, s.base_queue_offset, s.created_ms, s.sealed, len(s.parts)] for s in segments
    ]


def _columns_of(rows: list[list[Any]]) -> list[list[Any]]:
    values = list(chain.from_iterable(rows))
    return [values[at::_SEGMENT_VALUES] for at in range(_SEGMENT_VALUES)]


def _segments_of(take: Callable[[int], Parts], rows: list[list[Any]]) -> Sequence[Segment]:
    """Undo ``_segment_rows``."""
    if not rows:
        return ()
    if {*map(len, rows)} != {_SEGMENT_VALUES}:
        raise ValueError("a segment has other values")
    base, queue, created, sealed, counts = _columns_of(rows)
    numbers = {*base, *queue, *created, *counts}
    if {*map(type, numbers)} != {int} or not -1 <= min(numbers) <= max(numbers) < INT_MAX:
        raise ValueError("a segment has other values")
    if min(counts) <= 0:
        raise ValueError("a segment has no parts")
    columns = base, queue, created, list(map(bool, sealed)), counts
    return Segments.joined(columns, take(sum(counts)))
