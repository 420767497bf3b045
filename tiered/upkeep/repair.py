"""Repair: what is damaged or missing in a tier is uploaded again, from what is whole in it and from the local store.

Ordering: bytes in hand first, then the lease, the epoch, a bundle with what is repaired of a damaged one (or several, if
that is large), and a ``merge`` entry that names the new sections in the place of the old ones. A bundle of which nothing is
named any more stays as an orphan; ``gc`` removes it.

Memory: one bundle.

Retries and errors: uploads and reads are tried again by the store, entries by the journal. A part that can't be had is
left as it is, and named.

After a crash: what entries name is repaired, the rest as before; repair again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import field
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import InvalidRangeError, ObjectNotFoundError, ShortReadError
from backends.lazy_dataclass import dataclass
from tiered.dispatch.merging import MergedBundle, row_of
from tiered.errors import DataError
from tiered.format.block import bytes_at
from tiered.format.bundle import build_packed_section, build_section
from tiered.format.record import QUEUE_OFFSET_AT
from tiered.keys import parse_data_key
from tiered.local.catalog import TIMER_TOPICS
from tiered.log.bundles import Tabled, read_bundle_table
from tiered.log.divergence import fingerprint_of
from tiered.log.flat_file import encode_items
from tiered.log.history import named_objects, parts_by_bundle
from tiered.log.merge import BUNDLE_BYTES_MAX, MergeOutput, MergeRun
from tiered.log.parts import Parts
from tiered.log.reader import DAMAGED_OR_GONE, QueueReader
from tiered.log.salvage import salvage
from tiered.log.sections import read_range
from tiered.log.timers import HOUR_MS
from tiered.log.verify import require_same_id
from tiered.log.verify_objects import WHOLE
from tiered.model import QueueOffset
from tiered.upkeep.workplace import UploadingEpoch
from timer.hour_files import place_records
from timer.records import read_rows

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from backends.base import ObjectStore
    from tiered.format.bundle import Section
    from tiered.local.interface import LocalStore, RecordBatch
    from tiered.log.history import NamedPart
    from tiered.log.parts import Incarnation, Part, SectionRange, TierState
    from tiered.log.verify_objects import Damaged
    from tiered.model import MessageQueue
    from tiered.upkeep.workplace import Workplace
    from timer.records import Longs, TimerRows


Originals = Callable[["NamedPart"], "PartBytes | str"]
"""Gives a part's records and items from a local store, or says why they can't be had."""


@dataclass(slots=True)
class RepairReport:
    """What was repaired."""

    parts: int = 0  # parts that have new sections
    repaired_bytes: int = 0  # their records and items
    unrepaired: list[Unrepaired] = field(default_factory=list)  # what stays damaged, and why


@dataclass(frozen=True, slots=True)
class _Recovered:
    """A damaged part, and what it becomes."""

    named: NamedPart
    run: MergeRun
    section: Section


def _section(part: Part, found: PartBytes) -> Section:
    """As it was, packed or not."""
    packed = None
    if part.section.is_packed:
        packed = build_packed_section(found.log, found.items)
    return packed or build_section([found.log], found.items)


class Repairer:
    """One repair of one broker's tier, on one thread."""

    def __init__(
        self,
        at: Workplace,
        local: LocalStore | None,
        *,
        stop: threading.Event,
        originals: Originals | None = None,
    ) -> None:
        """Wire it.

        Args:
            local: Where bytes may be had; None: only what is whole in the tier itself.
            originals: Gives parts again from the local store; None: it has them at their queue offsets.
        """
        self._store = at.store
        self._prefix = at.prefix
        self._local = local
        self._originals = originals
        if local is not None and originals is None:
            self._originals = lambda one: _from_local(local, one.queue, one.part)
        self._epoch = UploadingEpoch(at, does="repairs", stop=stop)
        self._journal = self._epoch.journal
        self._unnamed: list[Tabled] | None = None
        self._report = RepairReport()

    def run(self, damaged: Damaged) -> RepairReport:
        """Repair what can be repaired.

        Raises:
            FencedError: A writer holds the lease, or took over.
            InvalidError: The local store is not the one that the tier belongs to.
        """
        self._journal.catch_up()
        if self._local is not None:
            require_same_id(self._journal.state, self._local)
        repairs, self._report.unrepaired = plan_repairs(self._journal.state, self._prefix, damaged)
        try:
            for _, named in groupby(repairs, lambda one: one.part.bundle):
                for some in self._recovered(named):
                    self._write(some)
            if self._epoch.is_taken:
                self._journal.write_checkpoint(force=True)
        finally:
            self._epoch.end()
        return self._report

    def _recovered(self, named: Iterator[NamedPart]) -> Iterator[list[_Recovered]]:
        """The bytes of a bundle's parts, as far as they can be had, so many as make a bundle."""
        some: list[_Recovered] = []
        size = 0
        for one in named:
            found = recover_bytes(self._store, self._prefix, self._originals, self._others, one)
            if isinstance(found, str):
                self._report.unrepaired.append(Unrepaired(name_of(one), found))
                continue
            run = MergeRun(
                *(one.queue, one.number, one.incarnation.number, one.segment),
                Parts.of([one.part]),
                one.truncated,
            )
            if some and size + run.size_bytes > BUNDLE_BYTES_MAX:
                yield some
                some, size = [], 0
            some.append(_Recovered(one, run, _section(one.part, found)))
            size += run.size_bytes
        if some:
            yield some

    def _others(self) -> Sequence[Tabled]:
        """The bundles that no entry names, as far as their tables can be read."""
        if self._unnamed is None:
            named = named_objects(self._journal.state)
            self._unnamed = []
            for info in self._store.list(self._prefix):
                key = info.key[len(self._prefix) :]
                said = parse_data_key("", key)
                if said is None or said.kind == "quarantine" or key in named:
                    continue
                found = read_bundle_table(self._store, self._prefix, info)
                self._unnamed += [found] if isinstance(found, Tabled) else []
        return self._unnamed

    def _write(self, some: list[_Recovered]) -> None:
        """Put the sections into a bundle like the damaged one, and name them."""
        uploader = self._epoch.uploader()
        self._epoch.renew()
        some.sort(key=lambda one: (one.run.queue, one.named.part.queue_offset))
        bundle = some[0].named.part.bundle
        said = parse_data_key("", bundle.key)
        own = some[0].run.queue if said and said.kind == "queue" else None
        level = max(1, bundle.level)  # so that a rebuild sees that nobody began to write here
        topic = said.topic if said else ""
        output = MergeOutput(level, tuple(one.run for one in some), topic, own)
        stored = uploader.put_merged(output, [(row_of(one.run), one.section) for one in some])
        self._journal.append([MergedBundle(output, stored).action()])
        is_named = stored.bundle.key in named_objects(self._journal.state)
        for one in some:
            if is_named:
                self._report.parts += 1
                self._report.repaired_bytes += one.run.size_bytes
            else:
                reason = "the tier has moved on meanwhile"
                self._report.unrepaired.append(Unrepaired(name_of(one.named), reason))


# --------------------------------------------------------------------------------------------------
# What it takes to repair damaged sections: which parts lie in them, and their bytes again. Nothing is written here. A
# repaired part is a part with the same offsets, bytes, holes and times, in a new section: a merge of one
# (``tiered.log.merge``). Its bytes come from the section where that is whole (a damaged table proves nothing against
# it), else from bundles that no entry names (what was merged and is not deleted yet, orphans), else from the local
# store; and they must then be what the journal and what is left of the section say. So a local store that has other
# messages at these offsets repairs nothing.
#
# Memory: one part, from the tier and from the local store; and the tables of unnamed bundles, if they are looked at.
# --------------------------------------------------------------------------------------------------

READ_BYTES = 8 * 1024 * 1024


class Unrepaired(NamedTuple):
    """A part, or an object that is of no part, that stays damaged."""

    where: str  # topic, queue and queue offsets, or a key
    reason: str  # why


class PartBytes(NamedTuple):
    """A part's records and items, as they were."""

    log: Buffer
    items: Buffer


def plan_repairs(
    state: TierState, prefix: str, damaged: Damaged
) -> tuple[list[NamedPart], list[Unrepaired]]:
    """The damaged parts, bundle by bundle, and what is of no part. Pure."""
    by_key = {key.removeprefix(prefix): set(sections) for key, sections in damaged.items()}
    repairs: list[NamedPart] = []
    met: set[str] = set()
    for bundle, named in parts_by_bundle(state, by_key):
        met.add(bundle.key)
        sections = by_key[bundle.key]
        repairs += [one for one in named if {WHOLE, one.part.section.start} & sections]
    reason = "no part of a queue is made of it"
    return repairs, [Unrepaired(prefix + key, reason) for key in sorted(by_key.keys() - met)]


def name_of(one: NamedPart) -> str:
    """A part, for people."""
    return f"{one.queue} queue offsets [{one.part.queue_offset}, {one.part.queue_end})"


def recover_bytes(
    store: ObjectStore,
    prefix: str,
    originals: Originals | None,
    unnamed: Callable[[], Sequence[Tabled]],
    one: NamedPart,
) -> PartBytes | str:
    """A part's records and items, from where they are whole; or why they can't be had.

    Args:
        unnamed: Gives the bundles that no entry names; asked only if they are needed.
    """
    part = one.part
    log, items = (_from_tier(store, prefix, want) for want in (part.log, part.index))
    if log is not None and items is not None:
        return PartBytes(log, items)
    found = _from_unnamed(store, prefix, unnamed(), one)
    if found is not None and _is_same(found, part, log, items):
        return found
    if one.incarnation.ended:
        return "it is of an incarnation that has ended, and nothing in the tier has it any more"
    if originals is None:
        return "no local store is given"
    theirs = originals(one)
    if isinstance(theirs, str):
        return theirs
    if _is_same(theirs, part, log, items):
        return theirs
    return "the local store has other bytes there, or nothing proves that it has not"


def _from_tier(store: ObjectStore, prefix: str, want: SectionRange) -> Buffer | None:
    try:
        return read_range(store, prefix, want)
    except (DataError, ObjectNotFoundError, InvalidRangeError, ShortReadError):
        return None


def _from_unnamed(
    store: ObjectStore, prefix: str, unnamed: Sequence[Tabled], one: NamedPart
) -> PartBytes | None:
    """The part from sections of the same incarnation that lie one behind the other, as a merge would join them."""
    log: list[Buffer] = []
    items: list[Buffer] = []
    at, end, log_at = one.part.queue_offset, one.part.queue_end, one.part.log_offset
    some = list(_sections_of(unnamed, one))
    while at < end:
        found = next(_going_on(store, prefix, some, (at, log_at), (end, one.part.log_end)), None)
        if found is None:
            return None
        part, both = found
        log.append(both.log)
        items.append(both.items)
        at, log_at = part.queue_end, part.log_end
    return PartBytes(b"".join(log), b"".join(items))


def _sections_of(unnamed: Sequence[Tabled], one: NamedPart) -> Iterator[Part]:
    for tabled in unnamed:
        incarnations = zip(tabled.named.queues, tabled.named.incarnations, strict=True)
        for number, incarnation in enumerate(incarnations):
            if incarnation == (one.queue, one.incarnation.number):
                yield tabled.named.parts[number]


def _going_on(
    store: ObjectStore,
    prefix: str,
    some: Sequence[Part],
    at: tuple[int, int],
    end: tuple[int, int],
) -> Iterator[tuple[Part, PartBytes]]:
    """Sections that begin at a queue offset and log offset and do not reach behind others, if they are whole."""
    for part in some:
        begins, ends = (part.queue_offset, part.log_offset), (part.queue_end, part.log_end)
        if begins != at or ends[0] > end[0] or ends[1] > end[1]:
            continue
        log, items = (_from_tier(store, prefix, want) for want in (part.log, part.index))
        if log is not None and items is not None:
            yield part, PartBytes(log, items)


def _from_local(local: LocalStore, queue: MessageQueue, part: Part) -> PartBytes | str:
    bounds = local.queues().get(queue)
    if bounds is None:
        return "the local store has no such queue any more"
    if part.queue_offset < bounds.min:
        return f"the local store begins at queue offset {bounds.min}"
    if part.queue_end > bounds.end:
        return f"the local store ends at queue offset {bounds.end}"
    batches = list(_batches(local, queue, part))
    if not batches or batches[-1].end_offset < part.queue_end:
        return "the local store cannot read all of it"
    count = part.count
    sizes = np.concatenate([batch.sizes for batch in batches])[:count]
    starts = np.cumsum([0, *(memoryview(batch.data).nbytes for batch in batches)])
    positions = np.concatenate(
        [batch.positions + start for batch, start in zip(batches, starts, strict=False)]
    )[:count]
    data = b"".join([batch.data for batch in batches])
    end = int(
        (positions + sizes).max(initial=0)
    )  # behind it are items that the last read took along
    tags = np.concatenate([batch.tag_codes for batch in batches])[:count]
    return PartBytes(memoryview(data)[:end], encode_items(part.log_offset + positions, sizes, tags))


def _batches(local: LocalStore, queue: MessageQueue, part: Part) -> Iterator[RecordBatch]:
    at = part.queue_offset
    while at < part.queue_end:
        count = max(1, part.queue_end - at)
        batch = local.read(queue, at, bytes_max=READ_BYTES, count_max=count)
        if batch is None or batch.base_offset != at or batch.count == 0:
            return
        yield batch
        at = batch.end_offset


def _is_same(found: PartBytes, part: Part, log: Buffer | None, items: Buffer | None) -> bool:
    """Whether these are the bytes that were tiered, as far as the journal and what is left of the section know."""
    records, index = memoryview(found.log).cast("B"), memoryview(found.items).cast("B")
    if (len(records), len(index)) != (part.log_bytes, part.index.size_bytes):
        return False
    place = part.section
    if part.is_whole and not place.is_packed:
        return zlib_ng.crc32(index, zlib_ng.crc32(records)) == place.crc
    if (log is not None and log != records) or (items is not None and items != index):
        return False
    if part.last:
        tag_code = int.from_bytes(index[-8:], "big", signed=True)
        return fingerprint_of(_last_record(records, index, part), tag_code) == part.last
    # It ends with a hole, and items alone prove no record: other messages may be as long.
    is_packed_alike = part.is_whole and _section(part, found).place.crc == place.crc
    return log is not None or is_packed_alike


def _last_record(log: memoryview, items: memoryview, part: Part) -> memoryview:
    start = int.from_bytes(items[-20:-12], "big", signed=True) - part.log_offset
    size = int.from_bytes(items[-12:-8], "big", signed=True)
    return log[max(0, start) : max(0, start) + max(0, size)]


# --------------------------------------------------------------------------------------------------
# Records of timers again from the broker's store, as they stand in an hour's file: for ``verify --timers --repair``.
#
# Nothing says which record of the broker's an item of the file was, but what is left of the file: sound records have
# the broker's physical offset still, and sound items their due time. Of the same hour the file has them in the
# broker's order, as far as one import took them. So what is lost between two sound ones is looked for between these
# two in the broker's log. That is a guess; the checksum that the journal has of the section is what proves it.
#
# Memory: five numbers for each record of the timer topics that is due in a damaged hour, and one part.
# --------------------------------------------------------------------------------------------------


_READ_BYTES: Final = 8 << 20
_READ_COUNT: Final = 1 << 16
_GONE: Final = "the local store has not all of these timers any more"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A record of the broker's that is due in an hour."""

    physical: int
    due: int
    source: MessageQueue
    offset: int


@dataclass(frozen=True, slots=True)
class _Item:
    """What is known of an item of the file: the physical offset of its record, and its due time; -1: not known."""

    physical: int = -1
    due: int = -1


class TimerOriginals:
    """Finds the records of damaged parts in a broker's store. For one thread."""

    def __init__(self, store: ObjectStore, prefix: str, local: LocalStore) -> None:
        """Read nothing yet.

        Args:
            local: The broker's store, opened with its timers.
        """
        self._store, self._prefix, self._local = store, prefix, local
        self._hours: dict[int, list[_Candidate]] = {}

    def part(self, one: NamedPart) -> PartBytes | str:
        """A part's records and items; or why they can't be had."""
        hour = one.queue.queue_id
        if hour not in self._hours:
            self._hours[hour] = sorted(self._candidates(hour), key=lambda found: found.physical)
        known = list(self._known(one.queue, one.part))
        others = self._others(one.queue, one.incarnation, one.part)
        chosen = _matched(self._hours[hour], known, others)
        return _GONE if chosen is None else self._bytes(one, chosen)

    def _candidates(self, hour: int) -> Iterator[_Candidate]:
        for queue, bounds in sorted(self._local.queues().items()):
            at = bounds.min
            while queue.topic in TIMER_TOPICS and at < bounds.end:
                rows = self._rows(queue, at, _READ_COUNT)
                if rows is None:
                    break
                batch = rows.batch
                for number in np.flatnonzero(rows.dues // HOUR_MS == hour).tolist():
                    yield _Candidate(
                        int(batch.physical_offsets[number]),
                        int(rows.dues[number]),
                        queue,
                        int(batch.base_offset) + number,
                    )
                at = batch.end_offset

    def _rows(self, queue: MessageQueue, at: int, count: int) -> TimerRows | None:
        batch = self._local.read(queue, QueueOffset(at), bytes_max=_READ_BYTES, count_max=count)
        return None if batch is None or not batch.count else read_rows(batch)

    def _known(self, queue: MessageQueue, part: Part) -> Iterator[_Item]:
        """What is left of a part, item by item."""
        try:
            found = salvage(
                self._store, self._prefix, queue, part, start=part.queue_offset, end=part.queue_end
            )
        except ObjectNotFoundError:
            found = None
        if found is None or found.batch is None:
            yield from (_Item() for _ in range(part.count))
            return
        records, lost = found.batch.records, set[int]()
        for low, high in found.lost:
            lost.update(range(low, high))
        tags = iter(found.lost_tags.tolist() if found.lost_tags is not None else ())
        for number in range(part.count):
            if part.queue_offset + number in lost:
                yield _Item(due=next(tags, -1))
            else:
                physical, due = records.physical_offsets[number], records.tag_codes[number]
                yield _Item(int(physical), int(due))

    def _others(self, queue: MessageQueue, incarnation: Incarnation, part: Part) -> set[int]:
        """Physical offsets of what is sound of the file's other parts."""
        reader = QueueReader.of_incarnation(self._store, self._prefix, queue, incarnation)
        found: set[int] = set()
        for ends in (
            (incarnation.min_offset, part.queue_offset),
            (part.queue_end, incarnation.commit_offset),
        ):
            sound = reader.past_damage(*ends, lambda _: None, damage=DAMAGED_OR_GONE)
            for batch in sound:
                found.update(batch.records.physical_offsets.tolist())
        return found

    def _bytes(self, one: NamedPart, chosen: list[_Candidate]) -> PartBytes | str:
        """The records of a part as they stand in its file."""
        records: dict[tuple[MessageQueue, int], bytes] = {}
        dues: Longs = np.array([found.due for found in chosen], np.int64)
        for queue in {found.source for found in chosen}:
            wanted = sorted(found.offset for found in chosen if found.source == queue)
            for offset, record in self._placed(queue, wanted, one.queue.queue_id):
                records[queue, offset] = record
        chunks = [records.get((found.source, found.offset), b"") for found in chosen]
        if not all(chunks):
            return _GONE
        sizes = np.array([len(chunk) for chunk in chunks], np.int32)
        starts = np.cumsum(sizes, dtype=np.int64) - sizes
        log = bytearray(b"".join(chunks))
        numbers = one.part.queue_offset + np.arange(len(chunks))
        bytes_at(log, ">i8")[starts + QUEUE_OFFSET_AT] = numbers
        return PartBytes(log, encode_items(one.part.log_offset + starts, sizes, dues))

    def _placed(
        self, queue: MessageQueue, wanted: list[int], hour: int
    ) -> Iterator[tuple[int, bytes]]:
        """Records of one queue of the broker's as they stand in an hour's file, but for their queue offsets."""
        left = wanted
        while left:
            rows = self._rows(queue, left[0], _READ_COUNT)
            if rows is None:
                return
            base, end = int(rows.batch.base_offset), int(rows.batch.end_offset)
            some = [offset for offset in left if base <= offset < end]
            if not some:
                return
            left = left[len(some) :]
            made = place_records(rows, np.array(some) - base, hour, QueueOffset(0))
            ends = made.positions + made.sizes
            pairs = zip(made.positions.tolist(), ends.tolist(), strict=True)
            for offset, (low, high) in zip(some, pairs, strict=True):
                yield offset, bytes(memoryview(made.data)[low:high])


def _matched(
    candidates: list[_Candidate], known: list[_Item], others: set[int]
) -> list[_Candidate] | None:
    """For each item of a part its record; None: one has none. Pure.

    A sound one is its own; a lost one the next behind the one before, in the broker's order, that is due when the item says,
    if it says so, and that is not another's.
    """
    by_physical = {found.physical: found for found in candidates}
    taken = others | {item.physical for item in known}
    chosen: list[_Candidate] = []
    for item in known:
        if item.physical >= 0:
            own = by_physical.get(item.physical)
        else:
            after = chosen[-1].physical if chosen else -1
            own = _next(candidates, item, after, taken) or _next(candidates, item, -1, taken)
        if own is None:
            return None
        taken.add(own.physical)
        chosen.append(own)
    return chosen


def _next(
    candidates: list[_Candidate], item: _Item, after: int, taken: set[int]
) -> _Candidate | None:
    low = bisect_right(candidates, after, key=lambda found: found.physical)
    for at in range(low, len(candidates)):
        found = candidates[at]
        if found.physical not in taken and item.due in {-1, found.due}:
            return found
    return None
