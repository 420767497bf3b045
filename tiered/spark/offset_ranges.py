"""What a tier and the archive beside it have, cut into what is read at once by one reader.

Overview: of a tier planning goes by the journal alone: for each incarnation of a queue that the broker has not truncated,
runs of parts without a gap between them, ended at segments. An offset range knows its parts, so its reader asks the journal
only when one of their objects is gone (merged, or expired). Of an archive it goes by the log: row ranges of files.

Both as one: whatever the archive has of a history is read there, and the rest of it in the tier, by queue offsets. So
nothing is there twice while it lies in both, and nothing is missing when it has expired in the tier.

An offset range is part of one history (``tiered.log.cursor``): the broker may take an end of a queue back and put other
messages there. ``tails`` says how often that had happened when the offset range was planned; its rows are those that stood
there then, or an error: never others. Of an archive nothing counts that was truncated before or since: the tier keeps that.

Partitions go by bundle: what lies in one bundle is read by one task, which fetches it in a few requests however many queues
have a share in it (``packed``, ``FetchedStore``).
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left, bisect_right
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backends.base import ByteRange
from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from tiered.archive.archived import OffsetRanges
from tiered.archive.bodies import BodyLayout
from tiered.archive.columns import Columns
from tiered.archive.model import ArchiveQueue
from tiered.archive.plan import (
    Sight,
    Task,
    ends_dealt_with,
    filled,
    isolation_of,
    overtaken_by,
    plan_archive,
    readable_end,
)
from tiered.archive.selection import MAX, shown
from tiered.archive.tables import Chosen, TableRows, refuses_file
from tiered.errors import DataError, InvalidError
from tiered.journal.entry import as_row, row_of
from tiered.log.cursor import IncarnationView, QueueCursor, incarnation_at
from tiered.log.parts import Gap, Incarnation, Parts
from tiered.log.reader import QueueReader, TierReader
from tiered.log.sections import WHOLE_AT_ONCE_BYTES
from tiered.model import LogOffset, QueueOffset

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.model import Archived
    from tiered.archive.selection import Selection
    from tiered.log.decode import TierBatch
    from tiered.log.lineage import Isolation
    from tiered.log.parts import Part, Segment, TierState

SKIP = "skip"
FAIL = "fail"
_log = logging.getLogger(__name__)


# -- what there is -----------------------------------------------------------------------------------


_UNPACKED = 64
"""OffsetRanges of an archive that are unpacked at once."""


class Key(NamedTuple):
    """A queue of one broker."""

    cluster: str
    broker: str
    topic: str
    queue_id: int

    @classmethod
    def of(cls, queue: ArchiveQueue) -> Key:
        """Whose incarnation it is."""
        return cls(queue.cluster, queue.broker, queue.topic, queue.queue_id)


class Kept(NamedTuple):
    """Queue offsets ``[start, end)`` that an archive has, all of one of its offset ranges."""

    start: int
    end: int
    archived: Archived

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log that they were, about."""
        one = self.archived
        return one.source_bytes * (self.end - self.start) // (one.end - one.start)


@dataclass(frozen=True, slots=True)
class Incarnations:
    """One queue: its incarnations in a tier, and what an archive has of them."""

    key: Key
    incarnations: dict[int, list[Incarnation]]
    """By incarnation; the last of each is the one that counts, those before were truncated. Of an incarnation that
    the archive alone knows an empty one."""
    archive: ArchiveState | None = None  # its log; None: there is none
    isolation: Isolation | None = None  # with which it is read; None: it is not Kafka's

    def end_of(self, incarnation: Incarnation) -> int:
        """One past the last offset of one of its incarnations that is read."""
        return readable_end(self.isolation, incarnation)

    def archived_queue(self, number: int) -> ArchiveQueue:
        """One incarnation, as the archive names it."""
        return ArchiveQueue(*self.key, number)

    def kept_end(self, number: int, tails: int) -> int:
        """One past the last queue offset at which an archive's row is of a history of an incarnation.

        The archive stands on a history, too. What lies before every cut that is between both histories, or came since, is
        the same in both.
        """
        assert self.archive is not None
        incarnations, queue = self.incarnations[number], self.archived_queue(number)
        dealt = ends_dealt_with(self.archive, queue, incarnations)
        return min((one.cut_at for one in incarnations[min(dealt, tails) : -1]), default=MAX)

    def kept(
        self, number: int, start: int = 0, end: int = MAX, tails: int | None = None
    ) -> list[Kept]:
        """What the archive has of offsets ``[start, end)`` of an incarnation, in order.

        Args:
            end: One past the last.
            tails: Of the history; None: the present one.
        """
        if self.archive is None:
            return []
        tails = len(self.incarnations[number]) - 1 if tails is None else tails
        end = min(end, self.kept_end(number, tails))
        if start >= end:
            return []
        found = self.archive.overlapping(self.archived_queue(number), start, end)
        return [Kept(max(one.start, start), min(one.end, end), one) for one in found]

    def kept_in_turn(self, number: int, start: int = 0, end: int = MAX) -> Iterator[Kept]:
        """The same of the present history, one after another: of what nobody asks for nothing is unpacked."""
        if self.archive is None or start >= end:
            return
        end = min(end, self.kept_end(number, len(self.incarnations[number]) - 1))
        queue = self.archived_queue(number)
        low, high, *_ = self.archive.queues.columns(queue)
        first, behind = int(np.searchsorted(high, start, "right")), int(np.searchsorted(low, end))
        for at in range(first, behind, _UNPACKED):
            last = min(at + _UNPACKED, behind) - 1
            for one in self.archive.overlapping(queue, int(low[at]), int(high[last])):
                yield Kept(max(one.start, start), min(one.end, end), one)


def queues_of(
    states: Mapping[Place, TierState],
    archive: ArchiveState | None = None,
    isolation: Isolation | None = None,
) -> Iterator[Incarnations]:
    """Every queue of a tier, and of the archive beside it, in order.

    Args:
        isolation: What is wished of Kafka's; None: as the archive has it, else what was committed.

    Raises:
        InvalidError: The archive has another isolation than is wished.
    """
    found: dict[Key, dict[int, list[Incarnation]]] = {}
    levels: dict[tuple[str, str], Isolation | None] = {}
    for place, state in sorted(states.items()):
        levels[place.cluster, place.broker] = isolation_of(state, place, archive, isolation)
        for queue, incarnations in sorted(state.queues.items()):
            key = Key(place.cluster, place.broker, queue.topic, queue.queue_id)
            found[key] = by_number(incarnations)
    known = archive.queues if archive else OffsetRanges()
    for archived_queue in known:
        mine = found.setdefault(Key.of(archived_queue), {})
        if archived_queue.incarnation not in mine:
            end = QueueOffset(int(known.columns(archived_queue)[1].max()))
            # Log offsets are not known: 1 says that there was something before.
            number, begun = archived_queue.incarnation, LogOffset(1)
            mine[number] = [Incarnation(number, end, end, begun, ended="archived")]
    for key, incarnations_of in sorted(found.items()):
        if incarnations_of:
            of_broker = key.cluster, key.broker
            level = archive.isolation(*of_broker) if archive else None
            yield Incarnations(key, incarnations_of, archive, levels.get(of_broker, level))


def by_number(incarnations: Sequence[Incarnation]) -> dict[int, list[Incarnation]]:
    """Incarnations of a queue by incarnation; the last of each is the one that counts, those before were truncated."""
    found: dict[int, list[Incarnation]] = {}
    for incarnation in incarnations:
        found.setdefault(incarnation.number, []).append(incarnation)
    return found


def is_ahead(archive: ArchiveState, states: Mapping[Place, TierState]) -> bool:
    """Whether an archive has dealt with ends truncated that states of its tier do not know of: they are older."""
    queues = {one.key: one for one in queues_of(states)} if archive.tails else {}
    for archived_queue, marks in archive.tails.items():
        queue = queues.get(Key.of(archived_queue))
        tails = queue.incarnations.get(archived_queue.incarnation, [])[:-1] if queue else []
        dealt = sum(not overtaken_by(archive, archived_queue, tail) for tail in tails)
        if queue and len(marks) > dealt:
            return True
    return False


def rest_of(kept: Iterable[Kept], low: int, high: int) -> Iterator[tuple[int, int]]:
    """What is left of offsets ``[low, high)`` beside those that an archive has."""
    at = low
    for one in kept:
        if at < min(one.start, high):
            yield at, min(one.start, high)
        at = max(at, one.end)
    if at < high:
        yield at, high


# -- what is read ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeHistory:
    """One incarnation of a queue as it stood."""

    prefix: str  # of the broker
    queue: ArchiveQueue  # the incarnation
    tails: int  # how many of its ends had been truncated
    isolation: Isolation | None = None  # with which it is read


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Queue offsets of one incarnation that are read one after another."""

    prefix: str  # of the broker
    task: Task
    """Queue, offsets and parts; ``tails``: ends of the queue's incarnation that had been truncated."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the commit log, at most."""
        return self.task.size_bytes


@dataclass(slots=True)
class ReadPlan:
    """What a selection reads of a tier, and of the archive beside it."""

    offset_ranges: list[OffsetRange]  # in order of broker, queue and offset
    parts_left: dict[str, int]  # parts that are left out, by what
    missing: int = 0  # offsets that never came into the tier, among those wanted
    files: dict[str, Chosen] = field(default_factory=dict)
    """Of the archive, by key. Where only a part of a row range counts, its number of rows is 0."""
    is_kafka: bool = False  # some of it may be Kafka's
    cuts: dict[ArchiveQueue, int] = field(default_factory=dict)
    """Queues of which the archive has rows that do not count, and from which queue offset on."""

    def add_files(self, queue: ArchiveQueue, kept: Iterable[Kept], wanted: Selection) -> None:
        """Read what an archive has, as far as it may be wanted."""
        for start, end, archived in kept:
            for file in archived.files:
                low, high = max(file.low, start), min(file.high, end)
                if low >= high or refuses_file(wanted, file):
                    continue
                rows = file.rows if (low, high) == (file.low, file.high) else 0
                one = self.files.setdefault(file.key, Chosen(file.key, file.size_bytes, []))
                one.row_ranges.append(TableRows(queue, low, high, rows))


def plan_tier(
    states: Mapping[Place, TierState],
    wanted: Selection,
    archive: ArchiveState | None = None,
    takes: Callable[[Key], bool] = lambda _key: True,
    *,
    isolation: Isolation | None = None,
) -> ReadPlan:
    """Everything that is wanted and there now.

    Raises:
        InvalidError: A topic is asked for that the tier has not; or the archive is of another tier, or isolation.
    """
    plan = ReadPlan([], {})
    queues = list(queues_of(states, archive, isolation))
    plan.is_kafka = any(queue.isolation for queue in queues)
    require_topics(queues, wanted)
    require_own(states, archive, wanted, takes)
    prefixes = prefixes_of(states)
    for queue in queues:
        for number in sorted(queue.incarnations) if takes(queue.key) else ():
            _plan_incarnation(plan, prefixes.get(queue.key[:2], ""), queue, number, wanted)
    return plan


def require_topics(queues: Iterable[Incarnations], wanted: Selection) -> None:
    """See that the topics asked for are there."""
    known = {shown(queue.key.topic) for queue in queues}
    wanted.require_topics(known, "tier", "`tiered ls URL` lists the topics")


def require_own(
    states: Mapping[Place, TierState],
    archive: ArchiveState | None,
    wanted: Selection,
    takes: Callable[[Key], bool],
) -> None:
    """See that an archive is of this tier, so far as store times tell: else its rows would stand for other messages.

    Raises:
        InvalidError: It has other messages at the same offsets, as of a tier that was wiped and begun anew.
    """
    if archive is None:
        return
    for place, state in sorted(states.items()):
        plan = plan_archive(
            state, place, archive, takes=lambda topic: wanted.takes("topic", shown(topic))
        )
        for queue, start in plan.strange:
            if takes(Key.of(queue)):
                raise InvalidError(
                    f"the archive has other messages of {queue} from offset {start} on than the tier",
                    do="give each tier an archive of its own: this one is most likely of one whose broker has the same name",
                )


def prefixes_of(states: Iterable[Place]) -> dict[tuple[str, str], str]:
    """Of each broker, by cluster and name."""
    return {(place.cluster, place.broker): place.prefix for place in states}


def _plan_incarnation(
    plan: ReadPlan, prefix: str, queue: Incarnations, number: int, wanted: Selection
) -> None:
    incarnations, archived_queue = queue.incarnations[number], queue.archived_queue(number)
    incarnation = incarnations[-1]
    refused = wanted.refuses(archived_queue)
    if refused:
        _leave(plan, refused, sum(map(len, incarnation.tables())))
        return
    kept = queue.kept(number)
    plan.add_files(archived_queue, kept, wanted)
    end = MAX if queue.archive is None else queue.kept_end(number, len(incarnations) - 1)
    if queue.archive is not None and queue.archive.overlapping(archived_queue, end, MAX):
        plan.cuts[archived_queue] = end
    history = RangeHistory(prefix, archived_queue, len(incarnations) - 1, queue.isolation)
    for low, high in rest_of(
        kept, *bounds(wanted, incarnation.min_offset, queue.end_of(incarnation))
    ):
        for gap in incarnation.gaps:
            plan.missing += max(0, min(gap.end, high) - max(gap.start, low))
        plan.offset_ranges += cut(history, incarnation, (low, high), wanted, None if kept else plan)


def bounds(wanted: Selection, low: int, high: int) -> tuple[int, int]:
    """Those of the offsets ``[low, high)`` that are wanted."""
    least, most = wanted.bounds.get("queue_offset", (low, high))
    return max(low, least), min(high, most + 1)


def cut(
    history: RangeHistory,
    incarnation: Incarnation,
    span: tuple[int, int],
    wanted: Selection,
    plan: ReadPlan | None = None,
) -> Iterator[OffsetRange]:
    """Offsets ``[low, high)`` of an incarnation as offset ranges, one or more for each segment; gaps are in none."""
    low, high = span
    near = _near(incarnation, low, high)
    if plan is not None:
        count = sum(map(len, incarnation.tables())) - sum(len(segment.parts) for segment in near)
        _leave(plan, "queue_offset", count)
    for segment in near:
        begin = 0
        for at, part in enumerate(segment.parts):
            reason = _refuses(part, low, high, wanted)
            if reason and plan is not None:
                _leave(plan, reason, 1)
            if reason:
                yield from _offset_range(history, incarnation, segment.parts[begin:at], span)
                begin = at + 1
        yield from _offset_range(history, incarnation, segment.parts[begin:], span)


def _near(incarnation: Incarnation, low: int, high: int) -> Sequence[Segment]:
    """Segments that may have any of the offsets ``[low, high)``. Looks at few others: an incarnation has many such spans."""
    first = bisect_right(incarnation.segments, low, key=lambda one: one.base_queue_offset)
    behind = bisect_left(incarnation.segments, high, key=lambda one: one.base_queue_offset)
    return incarnation.segments[max(first - 1, 0) : behind]


def _refuses(part: Part, low: int, high: int, wanted: Selection) -> str:
    if part.queue_end <= low or part.queue_offset >= high:
        return "queue_offset"
    if part.holes == part.count:
        return "holes"
    times = part.store_min_ms * 1000, part.store_max_ms * 1000 + 999
    return "" if wanted.meets("store_ts", *times) else "store_ts"


def _offset_range(
    history: RangeHistory, incarnation: Incarnation, run: Parts, span: tuple[int, int]
) -> Iterator[OffsetRange]:
    if len(run):
        start, end = max(run[0].queue_offset, span[0]), min(run.queue_end, span[1])
        sight = Sight.of(history.isolation, incarnation, start, end)
        layout = BodyLayout(is_kafka=history.isolation is not None)
        task = Task(history.queue, start, end, run, history.tails, layout, sight=sight)
        yield OffsetRange(history.prefix, task)


def _leave(plan: ReadPlan, reason: str, count: int) -> None:
    if count:
        plan.parts_left[reason] = plan.parts_left.get(reason, 0) + count


# -- offsets of a history ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OffsetRun:
    """Offsets ``[start, end)`` of one incarnation that lie ahead, in one part, in an archive, or nowhere."""

    incarnation: int
    start: int
    end: int
    size_bytes: int
    is_there: bool

    @property
    def count(self) -> int:
        """How many."""
        return self.end - self.start


def runs_of_incarnation(
    incarnation: Incarnation, start: int, end: int, kept: Iterable[Kept] = ()
) -> Iterator[OffsetRun]:
    """Offsets ``[start, end)`` of one incarnation: what an archive has of them, parts of the rest, and what is nowhere."""
    low = start
    for one in kept:
        yield from _runs_of_parts(incarnation, low, one.start)
        yield OffsetRun(incarnation.number, one.start, one.end, one.size_bytes, True)
        low = one.end
    yield from _runs_of_parts(incarnation, low, end)


def _runs_of_parts(incarnation: Incarnation, start: int, end: int) -> Iterator[OffsetRun]:
    at = start
    near = _near(incarnation, start, end) if start < end else ()
    for part in chain.from_iterable(segment.parts for segment in near):
        low, high = max(part.queue_offset, incarnation.min_offset, at), min(part.queue_end, end)
        if low >= high:
            continue
        if low > at:
            yield OffsetRun(incarnation.number, at, low, 0, False)
        size = part.log_bytes * (high - low) // part.count
        yield OffsetRun(incarnation.number, low, high, size, True)
        at = high
    if at < end:
        yield OffsetRun(incarnation.number, at, end, 0, False)


def take_history(
    plan: ReadPlan,
    prefix: str,
    queue: Incarnations,
    history: tuple[int, int],
    *,
    span: tuple[int, int],
    wanted: Selection,
) -> int:
    """Read offsets of a history: what the archive has of it there, the rest in the tier.

    Args:
        history: Incarnation, and how many of its ends had been truncated.
        span: The offsets ``[start, end)``.
        wanted: What is not wanted is left out.

    Returns:
        How many offsets are nowhere.
    """
    number, tails = history
    incarnations, archived_queue = queue.incarnations[number], queue.archived_queue(number)
    kept = queue.kept(number, *span, tails)
    plan.add_files(archived_queue, kept, wanted)
    missing, history_of = 0, RangeHistory(prefix, archived_queue, tails, queue.isolation)
    for start, stop in rest_of(kept, *span):
        for incarnation, low, high in _owned(incarnations, tails, start, stop):
            some = (max(low, incarnation.min_offset), high)
            plan.offset_ranges += cut(history_of, incarnation, some, wanted)
            runs = runs_of_incarnation(incarnation, low, high)
            missing += sum(run.count for run in runs if not run.is_there)
    return missing


def _owned(
    incarnations: list[Incarnation], tails: int, begin: int, end: int
) -> Iterator[tuple[Incarnation, int, int]]:
    """Offsets ``[begin, end)`` by the incarnation in which they lay, as so many ends had been truncated."""
    at = begin
    while at < end:
        incarnation, _, high = incarnation_at(incarnations, tails, at)
        stop = min(end, high) if high > at else end
        yield incarnation, at, stop
        at = stop


# -- what a frame has fixed --------------------------------------------------------------------------


def pins_of(offset_ranges: Iterable[OffsetRange]) -> str:
    """Which offsets of which histories offset ranges have, as JSON; ``plan_pinned`` plans the same again."""
    found: dict[tuple[ArchiveQueue, int], list[list[int]]] = {}
    for task in (one.task for one in offset_ranges):
        rows = found.setdefault((task.queue, task.tails), [])
        if rows and rows[-1][1] == task.start:
            rows[-1][1] = task.end
        else:
            rows.append([task.start, task.end])
    return json.dumps([[row_of(queue), tails, rows] for (queue, tails), rows in found.items()])


def plan_pinned(
    states: Mapping[Place, TierState],
    wanted: Selection,
    archive: ArchiveState | None,
    pins: str,
    isolation: Isolation | None = None,
) -> ReadPlan:
    """The very messages that were planned before, wherever they lie now."""
    plan, prefixes = ReadPlan([], {}), prefixes_of(states)
    queues = {queue.key: queue for queue in queues_of(states, archive, isolation)}
    for row, tails, spans in json.loads(pins):
        archived_queue = as_row(ArchiveQueue).decode(row)
        key = Key.of(archived_queue)
        queue = queues.get(key)
        incarnations = queue.incarnations.get(archived_queue.incarnation, []) if queue else []
        missing = sum(end - start for start, end in spans)
        if queue and len(incarnations) > tails:
            prefix, history = prefixes.get(key[:2], ""), (archived_queue.incarnation, tails)
            missing = sum(
                take_history(plan, prefix, queue, history, span=(start, end), wanted=wanted)
                for start, end in spans
            )
        if missing:
            raise DataError(
                f"{missing} messages of {archived_queue} that this frame reads have expired since it was made",
                do="make the frame again",
            )
    return plan


# -- partitions --------------------------------------------------------------------------------------

_GAP_BYTES = 256 << 10
_FETCHERS = 4


def packed(offset_ranges: Sequence[OffsetRange], bytes_max: int) -> list[tuple[OffsetRange, ...]]:
    """OffsetRanges in groups of so many bytes, so that all that lies in one bundle is in one group.

    A group has the shares of whole bundles, of one at least, in order of queue and offset. An offset range that lies in
    several bundles comes apart, and what is left of it side by side is one again.
    """
    bundles: dict[tuple[str, str], list[tuple[int, OffsetRange]]] = defaultdict(list)
    for number, one in enumerate(offset_ranges):
        for key, some in _by_bundle(one):
            bundles[one.prefix, key].append((number, some))
    groups = filled(bundles.values(), lambda some: sum(o.size_bytes for _, o in some), bytes_max)
    return [tuple(_joined(chain.from_iterable(group))) for group in groups]


def _by_bundle(one: OffsetRange) -> Iterator[tuple[str, OffsetRange]]:
    task = one.task
    keys = [bundle.key for bundle in task.parts.bundles]
    borders = [at for at in range(1, len(keys)) if keys[at] != keys[at - 1]]
    if not borders:
        yield keys[0], one
        return
    starts = task.parts.column("queue_offset")
    for first, behind in pairwise([0, *borders, len(keys)]):
        start = max(task.start, int(starts[first]))
        end = min(task.end, int(starts[behind])) if behind < len(keys) else task.end
        yield (
            keys[first],
            replace(one, task=replace(task, start=start, end=end, parts=task.parts[first:behind])),
        )


def _joined(group: Iterable[tuple[int, OffsetRange]]) -> Iterator[OffsetRange]:
    """In order; neighbours of one offset range are one."""
    rows = sorted(group, key=lambda row: (row[0], row[1].task.start))
    runs: list[list[OffsetRange]] = []
    last = -1
    for number, one in rows:
        if number == last and runs[-1][-1].task.end == one.task.start:
            runs[-1].append(one)
        else:
            runs.append([one])
        last = number
    for run in runs:
        if len(run) == 1:
            yield run[0]
            continue
        first, parts = run[0].task, [one.task.parts for one in run]
        data = np.concatenate([some.rows.view(np.uint8) for some in parts]).view(
            parts[0].rows.dtype
        )
        own = Parts(data, [bundle for some in parts for bundle in some.bundles])
        yield replace(run[0], task=replace(first, end=run[-1].task.end, parts=own))


class FetchedStore(WrappingStore):
    """A tier's store for one task, which fetches the small sections that it needs, neighbours of a bundle with one request.

    What is asked for a second time (since it failed its check), is gone, or was not fetched, comes from the store itself.

    Memory: the small sections, about what a partition has.
    """

    def __init__(self, inner: ObjectStore, offset_ranges: Iterable[OffsetRange]) -> None:
        """Fetch."""
        super().__init__(inner)
        self._held: dict[str, list[tuple[ByteRange, bytes]]] = {}
        self._given: set[tuple[str, int]] = set()
        wants = _ranges(offset_ranges)
        with ThreadPoolExecutor(_FETCHERS, "tiered-fetch") as pool:
            for key, held in pool.map(self._fetch, wants):
                if held is not None:
                    self._held.setdefault(key, []).append(held)

    def _fetch(self, want: tuple[str, ByteRange]) -> tuple[str, tuple[ByteRange, bytes] | None]:
        key, place = want
        try:
            return key, (place, self._inner.get(key, place))
        except (ObjectNotFoundError, InvalidRangeError, ShortReadError):
            return key, None  # who reads it finds out what became of it

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        found = [self._of(key, wanted) for wanted in byte_ranges]
        if None in found:
            return self._inner.get_ranges(key, byte_ranges)
        return [data for data in found if data is not None]

    def _of(self, key: str, wanted: ByteRange) -> bytes | None:
        if (key, wanted.start) in self._given:
            return None
        for place, data in self._held.get(key, ()):
            if place.start <= wanted.start and wanted.end <= place.end:
                self._given.add((key, wanted.start))
                return data[wanted.start - place.start : wanted.end - place.start]
        return None


def _ranges(offset_ranges: Iterable[OffsetRange]) -> list[tuple[str, ByteRange]]:
    """Ranges of bundles with several small sections each, which lie near one another."""
    sections: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for one in offset_ranges:
        rows = one.task.parts.rows
        places = zip(rows["start"].tolist(), rows["size_bytes"].tolist(), strict=True)
        for bundle, (start, size) in zip(one.task.parts.bundles, places, strict=True):
            if size <= WHOLE_AT_ONCE_BYTES:
                sections[one.prefix + bundle.key].add((start, start + size))
    found: list[tuple[str, ByteRange]] = []
    for key, spans in sections.items():
        runs: list[list[int]] = []
        for start, end in sorted(spans):
            if runs and start - runs[-1][1] <= _GAP_BYTES:
                runs[-1][1:] = [max(runs[-1][1], end), runs[-1][2] + 1]
            else:
                runs.append([start, end, 1])
        found += [(key, ByteRange(low, high)) for low, high, count in runs if count > 1]
    return found


def read_range(
    store: ObjectStore,
    offset_range: OffsetRange,
    wanted: Selection,
    *,
    names: Collection[str] | None = None,
    on_bad: str = FAIL,
) -> Iterator[pa.RecordBatch]:
    """Rows of an offset range, those wanted, in order of offset.

    Args:
        store: The tier's, with retries.
        names: Columns that are needed; None: all. Others may come with them.
        on_bad: What to do about a record that cannot be unpacked: ``fail``, or ``skip`` it.

    Raises:
        ExpiredError: Some of it has expired since the offset range was planned.
    """
    task = offset_range.task
    journal = TierReader(store, offset_range.prefix)
    view = IncarnationView.of(task.queue.message_queue, task.incarnation)
    seen = task.sight.isolation
    cursor = QueueCursor(
        task.queue.message_queue, view, tails=task.tails, journal=journal, isolation=seen
    )
    reader = QueueReader(store, offset_range.prefix, cursor)
    needed = None if names is None else {*names, *wanted.columns}
    columns, at = Columns(task.queue, task.layout, needed), QueueOffset(task.start)
    while at < task.end:
        batch = _read(reader, task, at)
        if batch is None or isinstance(batch, Gap) or batch.base_offset != at:
            raise DataError(
                f"{task.queue} cannot be read at offset {at}", where=offset_range.prefix
            )
        rows, aside = columns.make(batch)
        bad = [one for one in aside if one.record is not None]
        if bad and on_bad != SKIP:
            raise DataError(
                f"{task.queue}: the message with offset {bad[0].queue_offset} cannot be unpacked: {bad[0].reason}",
                where=offset_range.prefix,
                do='.option("on-bad", "skip") leaves such messages out',
            )
        if bad:
            _log.warning(
                "%s: %s messages cannot be unpacked and are left out, the first at offset %s",
                *(task.queue, len(bad), bad[0].queue_offset),
            )
        yield from (wanted.rows_of(some) for some in rows)
        at = batch.end_offset


def _read(reader: QueueReader, task: Task, at: QueueOffset) -> TierBatch | Gap | None:
    """What comes next of an offset range; of damage all of the range is named, so that a query can be put to the rest."""
    try:
        return reader.read(at, count_max=task.end - at)
    except DataError as error:
        lost = reader.find_lost(at, QueueOffset(task.end))
        if not lost:
            raise
        places = ", ".join(f"[{start}, {end})" for start, end, _ in lost[:_SHOWN])
        more = f" and {len(lost) - _SHOWN} offset ranges more" if len(lost) > _SHOWN else ""
        raise DataError(
            f"messages {places}{more} of {task.queue} are damaged: {error.what}",
            where=error.where,
            do="`tiered verify URL --deep --store STORE --repair` mends what it can; until then a condition on queue_offset"
            " reads what lies before or behind them",
        ) from error


_SHOWN = 64
"""Damaged offset ranges that an error names."""
