"""Reads whole objects and checks every byte: bundles, objects of the key index, quarantined records."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from zlib_ng import zlib_ng

from backends.errors import BackendError, ObjectNotFoundError
from backends.lazy_dataclass import dataclass
from tiered import keys
from tiered.errors import DataError, OtherVersionError
from tiered.format.block import check_records, inner_counts, parse_records, topics_equal
from tiered.format.bundle import SectionBlocks, read_table
from tiered.format.heads import are_whole, heads_of
from tiered.format.object import check_payload, parse_trailer
from tiered.format.record import RecordFault
from tiered.format.record_kind import RecordKind, kind_of
from tiered.journal.entry import INT_MAX, row_of
from tiered.keys import parse_index_key
from tiered.log.bundles import sections_of
from tiered.log.divergence import fingerprint_of
from tiered.log.flat_file import ITEM, ITEM_BYTES
from tiered.log.parts import check_rows
from tiered.log.ranges import Ranges, clipped, joined, without
from tiered.log.salvage import OpenSectionBytes, lost_items, open_damaged
from tiered.log.sections import split_section
from tiered.log.state import is_tail, uncovered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from backends.base import ObjectStore
    from tiered.format.block import RecordBlock
    from tiered.format.bundle import SectionPlace
    from tiered.format.object import Trailer
    from tiered.log.bundles import NamedSections
    from tiered.log.history import NamedPart
    from tiered.log.parts import Bundle, Incarnation, IndexObject, Part, Segment, TierState
    from tiered.log.salvage import Blow
    from tiered.model import MessageQueue

    Ints = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

# -- findings ------------------------------------------------------------------------------------
#
# What a verification found: problems, which need a person, and recorded things, which are explained and are no failure.
#
# ============= ===================================================================================
# kind          what is wrong
# ============= ===================================================================================
# journal       an entry or checkpoint is damaged, missing or does not follow from the one before
# lease         the lease cannot be read (harmless for data; a writer will take it)
# state         the journal's state contradicts itself
# missing       an object that an entry names is not there
# size          an object has another size than its entry says
# unreadable    the store could not give the object (or the local store a queue)
# table         a bundle's own table or footer is damaged, or a section's block table: no message is lost by it
# block         a block fails its checksum; of a bundle it is said which queue offsets that costs
# section       a section is not the one whose checksum the entry has, and its block table does not tell where
# trailer       the trailer of an index object or of a quarantined record is damaged, or is of another object
# payload       the payload of such an object is not the one whose checksum the entry has
# description   an object says something else of itself than the entry that names it
# index         items of a consume queue or of a key index are impossible (outside, overlapping, miscounted)
# record        a record is damaged (its first fault is named)
# foreign       a record of another queue or queue offset than the item that points at it
# difference    a message differs from the local store's
# version       an object is whole, and of another version of this program: no damage, and nothing repairs it
# ============= ===================================================================================

OBJECT_KINDS = frozenset(
    (
        "missing", "size", "table", "block", "section", "trailer", "payload",
        "description", "index", "record", "foreign",
    )
)  # fmt: skip
"""Problems whose ``where`` is the key of a damaged or missing data object."""
OTHER_VERSION = "version"
WHOLE = -1
PROBLEMS_LISTED_MAX = 1000
"""So many problems are listed; the rest is only counted."""
NOTES_MAX = 100


Damaged = dict[str, list[int]]
"""What a repair has to look after: whole keys of objects, and where in each the sections begin that are damaged; ``WHOLE``:
the object as such is damaged, so all of its sections are meant."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person."""

    kind: str  # one of the table above
    where: str  # key of the object, or topic/queue id
    detail: str  # what, with queue offsets or positions


@dataclass(slots=True)
class Recorded:
    """What is explained and recorded, and is not a failure."""

    holes: int = 0  # queue offsets without a message, in named parts
    gaps: int = 0
    gap_messages: int = 0  # queue offsets in them
    quarantined: int = 0  # damaged records that were put aside
    refused_parts: int = 0  # actions in the journal that replay refused
    stale_entries: int = 0
    """Journal entries below the point to which it was trimmed, which no reader looks at (known after a deep run): of
    a trimming that was cut short, or landed late under a number used and deleted long ago."""
    ended_incarnations: int = 0  # earlier incarnations of queues
    truncated: int = 0  # ends of queues that the broker truncated; they are kept
    truncated_messages: int = 0  # their queue offsets
    orphans: int = 0
    """Data objects that no entry names (of the present epoch: perhaps about to be named)."""
    orphan_bytes: int = 0
    orphans_of_present_epoch: int = 0  # those of them that the present epoch's writer made
    unknown_keys: int = 0  # objects under the prefix that this program does not know
    unreferenced_bytes: int = 0
    """Bytes of commit logs that no item points at (known after a deep run)."""
    unindexed_messages: int = 0
    """Queue offsets that the key index does not cover (yet); lookups by key read them instead."""
    notes: list[str] = field(default_factory=list)
    """The first of the orphans and unknown keys, by name."""

    def note(self, text: str) -> None:
        """Add a note, unless there are many already."""
        if len(self.notes) < NOTES_MAX:
            self.notes.append(text)


@dataclass(slots=True)
class StoreComparison:
    """The tier held against a local store."""

    queues: int = 0  # queues that both have
    messages: int = 0
    """Queue offsets compared; all their bytes were equal unless a problem says otherwise."""
    record_bytes: int = 0
    lag_messages: int = 0
    """Only local, above the tier's commit offset (all of a queue that is not tiered)."""
    skipped_messages: int = 0  # only local, below the tier's minimum or in a recorded gap
    expired_messages: int = 0
    """Only in the tier, below the local minimum (all of a queue that is gone locally)."""
    ahead_messages: int = 0
    """Only in the tier, above the local end: the local store lags or has lost its tail."""
    compacted_messages: int = (
        0  # compaction took them out of the tier, or the cleaner out of the local store
    )
    waiting_records: int = 0
    """Only local: not proven committed, or behind damage, so nobody compared them."""

    def add(self, other: StoreComparison) -> None:
        """Add what another comparison found."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _add(damaged: Damaged, key: str, section: int) -> None:
    sections = damaged.setdefault(key, [])
    if section not in sections[-1:]:
        sections.append(section)


@dataclass(slots=True)
class Finding:
    """What one step found. Made by one thread, merged by the caller's."""

    problems: list[Problem] = field(default_factory=list)  # in order
    damaged: Damaged = field(default_factory=dict)  # what a repair has to look after
    missing: list[str] = field(default_factory=list)
    """Places that were not there; damage only if they are still named after another replay."""
    object_count: int = 0  # objects read
    object_bytes: int = 0
    messages: int = 0  # messages whose record was checked
    unreferenced_bytes: int = 0  # see ``Recorded``
    stale_entries: list[str] = field(default_factory=list)  # their keys; see ``Recorded``
    comparison: StoreComparison | None = None  # see ``StoreComparison``

    def problem(self, kind: str, where: str, detail: str, *, section: int = WHOLE) -> None:
        """Add a problem, of a section of a bundle or of an object as a whole."""
        self.problems.append(Problem(kind, where, detail))
        if kind in OBJECT_KINDS:
            _add(self.damaged, where, section)


@dataclass(slots=True)
class VerifyReport:
    """The whole result."""

    problems: list[Problem] = field(default_factory=list)  # the first ``PROBLEMS_LISTED_MAX``
    problem_counts: Counter[str] = field(default_factory=Counter)  # all of them, by kind
    damaged: Damaged = field(default_factory=dict)
    """What a repair has to look after: all of it, however few are listed."""
    recorded: Recorded = field(default_factory=Recorded)  # what is not a failure
    queues: int = 0  # queues in the tier
    parts: int = 0  # parts that entries name
    named_objects: int = 0  # objects that entries name
    named_bytes: int = 0
    messages: int = 0  # messages that the tier claims to have, holes left out
    checked_objects: int = 0  # objects read whole (deep)
    checked_bytes: int = 0
    checked_messages: int = 0  # messages whose record was checked in every byte (deep)
    comparison: StoreComparison | None = None  # with a local store, if there was one
    journal_number: int = 0  # the last entry seen

    @property
    def is_clean(self) -> bool:
        """There is no problem."""
        return not self.problem_counts

    @property
    def is_of_another_version(self) -> bool:
        """Whether anything is of another version of this program."""
        return self.problem_counts[OTHER_VERSION] > 0

    @property
    def is_whole(self) -> bool:
        """Whether that is all that is wrong."""
        return set(+self.problem_counts) == {OTHER_VERSION}

    def add(self, problem: Problem) -> None:
        """Count a problem of the journal or of an object as a whole, and list it unless many are listed already."""
        if problem.kind in OBJECT_KINDS:
            _add(self.damaged, problem.where, WHOLE)
        self._count(problem)

    def _count(self, problem: Problem) -> None:
        self.problem_counts[problem.kind] += 1
        if len(self.problems) < PROBLEMS_LISTED_MAX:
            self.problems.append(problem)

    def merge(self, finding: Finding) -> None:
        """Take over what a step found."""
        for problem in finding.problems:
            self._count(problem)
        for key, sections in finding.damaged.items():
            for section in sections:
                _add(self.damaged, key, section)
        self.checked_objects += finding.object_count
        self.checked_bytes += finding.object_bytes
        self.checked_messages += finding.messages
        self.recorded.unreferenced_bytes += finding.unreferenced_bytes
        self.recorded.stale_entries += len(finding.stale_entries)
        for key in finding.stale_entries:
            self.recorded.note(
                f"{key}: an entry before the beginning of the journal, which nobody reads"
            )
        if finding.comparison:
            self.comparison = self.comparison or StoreComparison()
            self.comparison.add(finding.comparison)


# --------------------------------------------------------------------------------------------------
# Whether the journal's state is consistent in itself. Pure.
# --------------------------------------------------------------------------------------------------


def check_state(state: TierState) -> Iterator[Problem]:
    """Every contradiction in a state: parts, segments, offsets, incarnations."""
    for queue, incarnations in state.queues.items():
        for number, incarnation in enumerate(incarnations):
            where = f"{queue} incarnation {incarnation.number}"
            details = [*_check_incarnation(incarnation), *_check_parts(queue, incarnation)]
            expected = number - sum(is_tail(incarnations, before) for before in range(number))
            if incarnation.number != expected:
                details.append(f"it is the incarnation number {expected} of its queue")
            if is_tail(incarnations, number) != (0 <= incarnation.cut_at <= incarnation.min_offset):
                details.append(
                    f"it was cut off at {incarnation.cut_at}, and its minimum is {incarnation.min_offset}"
                )
            if bool(incarnation.ended) != (number < len(incarnations) - 1):
                details.append("only the last incarnation of a queue may go on")
            yield from (Problem("state", where, detail) for detail in details)


def _check_incarnation(incarnation: Incarnation) -> Iterator[str]:
    if not incarnation.min_offset <= incarnation.commit_offset:
        yield f"minimum {incarnation.min_offset} is above the commit offset {incarnation.commit_offset}"
    for segment in incarnation.segments[:-1]:
        if not segment.sealed:
            yield f"segment {segment.base_offset} is not the last, and is not sealed"
    for number, segment in enumerate(incarnation.segments):
        yield from _check_segment(segment, may_be_cut=bool(incarnation.ended) and number == 0)
    yield from _check_order(incarnation)


def _check_segment(segment: Segment, *, may_be_cut: bool) -> Iterator[str]:
    """A segment that the broker truncated in part keeps its name, and may begin later (``tiered.log.state``)."""
    if not segment.parts:
        yield f"segment {segment.base_offset} has no part"
        return
    first, base = segment.parts[0], (segment.base_offset, segment.base_queue_offset)
    place = first.log_offset, first.queue_offset
    if place != base and not (may_be_cut and place[0] >= base[0] and place[1] > base[1]):
        yield f"segment {segment.base_offset} does not begin with its first part"
    for one, two in pairwise(segment.parts):
        if one.queue_end != two.queue_offset:
            yield f"between queue offsets {one.queue_end} and {two.queue_offset} of one segment"


def _check_order(incarnation: Incarnation) -> Iterator[str]:
    """Parts and gaps must fill the queue, parts the commit log, without hole or overlap."""
    spans = [(part.queue_offset, part.queue_end) for part in incarnation.parts()]
    spans += [(gap.start, gap.end) for gap in incarnation.gaps]
    for (_, one_end), (two_start, _) in pairwise(sorted(spans)):
        if one_end != two_start:
            yield f"queue offsets go from {one_end} to {two_start}"
    for one, two in pairwise(incarnation.parts()):
        is_gap = (
            one.queue_end != two.queue_offset
        )  # where a rebuilt journal lost bytes, offsets jump
        if one.log_end > two.log_offset or (one.log_end < two.log_offset and not is_gap):
            yield f"log offsets go from {one.log_end} to {two.log_offset}"
    if spans and max(spans)[1] != incarnation.commit_offset:
        yield f"the commit offset is {incarnation.commit_offset}, the last part or gap ends at {max(spans)[1]}"
    last = next(reversed(incarnation.parts()), None)
    is_gap = last is not None and last.queue_end < incarnation.commit_offset  # the same at its end
    if (
        last
        and last.log_end != incarnation.log_end
        and not (is_gap and last.log_end < incarnation.log_end)
    ):
        yield f"the log end is {incarnation.log_end}, the last part ends at {last.log_end}"


def _check_parts(queue: MessageQueue, incarnation: Incarnation) -> Iterator[str]:
    try:
        check_rows(incarnation.parts().rows)
    except ValueError as error:
        yield str(error)
    bundles = {bundle.key: bundle for bundle in incarnation.parts().bundles}
    for bundle in bundles.values():
        yield from _check_key(bundle, queue, incarnation)
    for part in incarnation.parts():
        name = f"the part at queue offset {part.queue_offset}"
        place, bundle = part.section, part.bundle
        try:
            place.check(where=bundle.key)
        except DataError as error:
            yield f"{name}: {error.what}"
        if place.start + place.size_bytes > bundle.size_bytes:
            yield f"{name} lies behind the end of its bundle"


def _check_key(bundle: Bundle, queue: MessageQueue, incarnation: Incarnation) -> Iterator[str]:
    said = keys.parse_data_key("", bundle.key)
    if said is None or said.kind == "quarantine":
        yield f"{bundle.key!r} is not a key of a bundle"
    elif (
        (said.level >= 0 and said.level != bundle.level)
        or (said.kind == "topic" and said.topic != queue.topic)
        or (said.kind == "queue" and (said.queue, said.incarnation) != (queue, incarnation.number))
    ):
        yield f"the bundle {bundle.key!r} is named for others, level {bundle.level}"


# -- checks -----------------------------------------------------------------------------------------


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
    """Check an object's trailer and each block of what is before it; None when the trailer is not a proof."""
    try:
        trailer = parse_trailer(tail, where=key)
    except (DataError, OtherVersionError) as error:
        found.problem(_kind_of(error, "trailer"), key, error.what)
        return None
    block = trailer.block_bytes
    for number, crc in enumerate(trailer.block_crcs):
        chunk = stored[number * block : (number + 1) * block]
        if zlib_ng.crc32(chunk) != crc:
            start = number * block
            found.problem(
                "block", key, f"bytes [{start}, {start + len(chunk)}) fail their checksum"
            )
    return trailer


def _kind_of(error: DataError | OtherVersionError, damage: str) -> str:
    return OTHER_VERSION if isinstance(error, OtherVersionError) else damage


def check_quarantined(store: ObjectStore, prefix: str, key: str) -> Finding:
    """Check an object that no journal entry has the size and checksum of: by what it says itself."""
    found = Finding()
    data = read_object(store, prefix, key, found)
    if data is None:
        return found
    try:
        size = parse_trailer(bytes(data), where=key).payload_bytes
    except (DataError, OtherVersionError) as error:
        found.problem(_kind_of(error, "trailer"), prefix + key, error.what)
        return found
    trailer = check_object(data[:size], bytes(data[size:]), prefix + key, found)
    if trailer and trailer.payload_bytes + trailer.trailer_bytes != len(data):
        found.problem("size", prefix + key, "it is longer or shorter than it says")
    return found


# --------------------------------------------------------------------------------------------------
# Reads a bundle whole and checks every byte, item and record of what is named of it. A step a bundle; they share
# nothing. What damage costs is said by queue offset: of a section that fails its checksum the block table tells which
# blocks are damaged, and the items which records lie in these. The other sections of the bundle, and the other blocks,
# are checked on.
# --------------------------------------------------------------------------------------------------

LISTED_MAX = 20
"""Of one kind of problem in one part so many are named by queue offset; one more says how many there are."""


@dataclass(frozen=True, slots=True)
class BundleCheck:
    """The deep check of one bundle. Holds it in memory, and one section unpacked."""

    store: ObjectStore  # where it lies
    prefix: str  # of the broker
    bundle: Bundle
    named: Sequence[NamedPart]  # the parts that lie in it, as they lie

    def run(self) -> Finding:
        """Read and check; an error of reading is a problem of the bundle."""
        found = Finding()
        data = read_object(self.store, self.prefix, self.bundle.key, found)
        if data is not None:
            check_bundle(data, self.prefix + self.bundle.key, self.bundle, self.named, found)
        return found


def check_bundle(
    data: memoryview, key: str, bundle: Bundle, named: Sequence[NamedPart], found: Finding
) -> None:
    """Check a bundle's bytes."""
    if len(data) != bundle.size_bytes:
        found.problem("size", key, f"{len(data)} bytes; the journal says {bundle.size_bytes}")
    _check_table(data, key, bundle, named, found)
    for _, some in groupby(named, lambda one: one.part.section):
        _check_section(data, key, list(some), found)


# -- what the bundle says of itself ---------------------------------------------------------------


def _check_table(
    data: memoryview, key: str, bundle: Bundle, named: Sequence[NamedPart], found: Finding
) -> None:
    try:
        table = read_table(data, len(data), where=key)
        said = sections_of(bundle, table)
    except OtherVersionError as error:
        found.problem(OTHER_VERSION, key, error.what)
        return
    except (DataError, ValueError) as error:
        what = error.what if isinstance(error, DataError) else str(error)
        more = "no message is lost by that, but a lost journal could not be rebuilt from it"
        found.problem("table", key, f"{what}; {more}")
        return
    if table.level != bundle.level:
        found.problem(
            "description", key, f"level is {table.level}; the journal says {bundle.level}"
        )
    number_of = {start: number for number, start in enumerate(table.rows["start"].tolist())}
    for one in named:
        number = number_of.get(one.part.section.start)
        start = one.part.section.start
        if number is None:
            found.problem("description", key, f"no section begins at {start}", section=start)
            continue
        is_tail = bool(table.rows["truncated"][number])
        for what in _differences(one, said, number, is_tail=is_tail):
            found.problem("description", key, f"{_name(one)}: {what}", section=start)


def _differences(
    one: NamedPart, said: NamedSections, number: int, *, is_tail: bool
) -> Iterable[str]:
    """Where the row of a section and what the journal says of it contradict each other."""
    theirs, mine = said.parts[number], one.part
    pairs = [
        ("topic and queue", str(said.queues[number]), str(one.queue)),
        ("incarnation", said.incarnations[number], one.incarnation.number),
        ("the section", theirs.section, mine.section),
    ]
    if mine.is_whole:  # else it was cut: the row is of all
        names = (
            "log_offset", "queue_offset", "count", "holes", "store_min_ms", "store_max_ms", "last",
        )  # fmt: skip
        pairs += [(name, getattr(theirs, name), getattr(mine, name)) for name in names]
    for name, there, here in pairs:
        if there != here:
            yield f"{name} is {there}; the journal says {here}"
    segment = said.segments[number]
    if segment != one.segment and not _may_be(segment, one):
        yield f"segment is {segment}; the journal says {one.segment}"
    if is_tail and not one.truncated:
        yield "it was merged from what the broker truncated; the journal has it as history"


def _may_be(segment: int, one: NamedPart) -> bool:
    """Whether a section may have been made for another segment than it is of.

    A merge makes one of several segments, of which the others' sections keep what they said; where a rebuilt journal has
    lost the beginning of a segment, it begins later.
    """
    return segment <= one.part.log_offset


# -- one section ----------------------------------------------------------------------------------


def _check_section(data: memoryview, key: str, named: Sequence[NamedPart], found: Finding) -> None:
    """Check a section and the parts of it: several, where the broker truncated some of it."""
    place = named[0].part.section
    view = data[place.start : place.start + place.size_bytes]
    try:
        place.check(where=key)
    except DataError as error:
        for one in named:
            found.problem("section", key, f"{_name(one)}: {error.what}", section=place.start)
        return
    try:
        opened = OpenSectionBytes(*split_section(view, place, where=key))
        _check_block_table(view, place, key, found)
    except DataError as error:
        sound = _open_damaged(view, key, named, found, error.what)
        if sound is None:
            return
        opened = sound
    for one in named:
        _PartCheck(one, opened, key, found).run()


def _check_block_table(view: memoryview, place: SectionPlace, key: str, found: Finding) -> None:
    try:
        SectionBlocks.parse(view[place.table_at :], place, where=key)
    except DataError as error:
        found.problem(
            "table",
            key,
            f"the section at {place.start}: {error.what}; it has to be read whole",
            section=place.start,
        )


def _open_damaged(
    view: memoryview, key: str, named: Sequence[NamedPart], found: Finding, why: str
) -> OpenSectionBytes | None:
    """Say which queue offsets the damaged blocks of a section cost; what is left of it."""
    place = named[0].part.section
    try:
        opened = open_damaged(view, place, where=key)
    except DataError:
        for one in named:
            what = f"all of it can't be proven: {why}, and so does its block table"
            found.problem("section", key, f"{_name(one)}: {what}", section=place.start)
        return None
    for bad in opened.blows:
        low, high = place.start + bad.start, place.start + bad.end
        for one in named:
            what = f"{_cost(one, opened, bad)}: bytes [{low}, {high}) fail their checksum"
            found.problem("block", key, what, section=place.start)
    return opened


def _cost(one: NamedPart, opened: OpenSectionBytes, blow: Blow) -> str:
    """Which queue offsets of a part cannot be read for a damaged block."""
    part = one.part
    lost = np.flatnonzero(lost_items(part, opened.items, [blow]))
    if not len(lost):
        return f"{one.queue}: no message"
    low, high = part.queue_offset + int(lost[0]), part.queue_offset + int(lost[-1]) + 1
    return f"{one.queue} queue offsets [{low}, {high})"


def _name(one: NamedPart) -> str:
    return f"{one.queue} queue offsets [{one.part.queue_offset}, {one.part.queue_end})"


# -- items and records ----------------------------------------------------------------------------


class _PartCheck:
    """Holds the items and records of one part against the journal and against each other."""

    def __init__(self, one: NamedPart, opened: OpenSectionBytes, key: str, found: Finding) -> None:
        self._queue = one.queue
        self._part: Part = one.part
        self._opened = opened
        self._key = key
        self._found = found

    def run(self) -> None:
        part = self._part
        begin = part.items_at * ITEM_BYTES
        items = np.frombuffer(self._opened.items[begin : begin + part.count * ITEM_BYTES], ITEM)
        offsets, sizes = items["log_offset"].astype(np.int64), items["size"].astype(np.int64)
        known = np.ones(part.count, np.bool_)
        for low, high in self._opened.items_lost:
            known[max(0, low - part.items_at) : max(0, high - part.items_at)] = False
        holes = int(np.count_nonzero(sizes == 0))
        if known.all() and holes != part.holes:
            self._problem("index", f"{holes} holes; the journal says {part.holes}")
        outside = (offsets < part.log_offset) | (offsets > part.records_end - sizes) | (sizes < 0)
        outside &= (sizes != 0) & known
        self._list("index", np.flatnonzero(outside), "the item points outside its part")
        where = np.flatnonzero((sizes > 0) & ~outside & known)
        offsets, sizes = offsets[where], sizes[where]
        is_first = np.ones(len(where), np.bool_)  # items of an inner batch share their record
        is_first[1:] = (offsets[1:] != offsets[:-1]) | (sizes[1:] != sizes[:-1])
        firsts = np.flatnonzero(is_first)
        starts, ends = offsets[firsts], (offsets + sizes)[firsts]
        overlap = firsts[1:][starts[1:] < ends[:-1]]
        self._list("index", where[overlap], "the record overlaps the one before")
        if not len(overlap) and not outside.any() and known.all():
            self._found.unreferenced_bytes += part.log_bytes - int((ends - starts).sum())
        codes = items["tag_code"].astype(np.int64)[where]
        self._records(where, offsets, sizes, is_first, codes)

    def _records(
        self, where: Ints, offsets: Ints, sizes: Ints, is_first: Flags, codes: Ints
    ) -> None:
        """Hold each record against its items (``where``: their numbers in the part)."""
        part = self._part
        log = self._opened.records[part.records_at : part.records_at + part.log_bytes]
        starts = offsets - part.log_offset
        kept = np.ones(len(where), np.bool_)
        for low, high in self._opened.zeroed:
            at = starts + part.records_at
            kept &= (at >= high) | (at + sizes <= low)
        where, starts, sizes, is_first = where[kept], starts[kept], sizes[kept], is_first[kept]
        codes, firsts, of_item = codes[kept], np.flatnonzero(is_first), np.cumsum(is_first) - 1
        kind = kind_of(int(codes[0])) if len(codes) else RecordKind.ROCKETMQ
        if kind is RecordKind.ROCKETMQ:
            block = parse_records(log, starts[firsts], sizes[firsts].astype(np.int32))
            sound, times = self._sound(block, where[firsts]), block.store_timestamps_ms
            self._owners(block, where, of_item, sound)
        else:
            sound, times = self._heads(kind, log, starts[firsts], sizes[firsts], where, of_item)
        late = sound & ((times < part.store_min_ms) | (times > part.store_max_ms))
        outside = where[firsts[np.flatnonzero(late)]]
        self._list("description", outside, "stored outside the times that the journal says")
        self._found.messages += int(np.count_nonzero(sound[of_item])) if len(of_item) else 0
        self._last(log, where, starts, sizes, codes)

    def _sound(self, block: RecordBlock, items: Ints) -> Flags:
        """Which records pass their checks; ``items``: the first of each."""
        check_records(block, expected_physical=None, check_crc=True)
        for fault in RecordFault:
            if fault is not RecordFault.OK:
                bad = items[np.flatnonzero(block.faults == fault)]
                self._list("record", bad, f"the record has the fault {fault.name}")
        sound: Flags = block.faults == RecordFault.OK
        return sound

    def _heads(  # noqa: PLR0917 (columns of one thing)
        self,
        kind: RecordKind,
        log: memoryview,
        starts: Ints,
        sizes: Ints,
        where: Ints,
        of_item: Ints,
    ) -> tuple[Flags, Ints]:
        """Which records of Kafka or JoyQueue are whole and of their items; and their times."""
        heads = heads_of(kind, log, starts, sizes)
        sound = heads.is_sound.copy()
        sound[sound] = are_whole(kind, log, starts[sound], sizes[sound])
        self._list("record", where[np.flatnonzero(~sound[of_item])], "the record is damaged")
        if heads.partitions is not None:
            mine = heads.partitions == self._queue.queue_id
            foreign = np.flatnonzero((sound & ~mine)[of_item])
            self._list("foreign", where[foreign], "the record is of another queue")
        wanted = where + self._part.queue_offset
        fits = (heads.lows[of_item] <= wanted) & (wanted < heads.highs[of_item])
        elsewhere = np.flatnonzero(sound[of_item] & ~fits)
        self._list("foreign", where[elsewhere], "the record is of another queue offset")
        return sound, heads.times_ms

    def _last(self, log: memoryview, where: Ints, starts: Ints, sizes: Ints, codes: Ints) -> None:
        """By its fingerprint the last record is known again when the local store is looked at."""
        part = self._part
        if not part.last or not len(where) or int(where[-1]) != part.count - 1:
            return
        start = int(starts[-1])
        record = log[start : start + int(sizes[-1])]
        if fingerprint_of(record, int(codes[-1])) != part.last:
            self._problem(
                "record", "the last record is not the one whose fingerprint the journal has"
            )

    def _owners(self, block: RecordBlock, where: Ints, of_item: Ints, sound: Flags) -> None:
        """Whether the records are of this queue and of their items' queue offsets."""
        mine = topics_equal(block, np.arange(len(block)), self._queue.topic)
        mine &= block.queue_ids == self._queue.queue_id
        foreign = np.flatnonzero((sound & ~mine)[of_item])
        self._list("foreign", where[foreign], "the record is of another queue")
        wanted = where + self._part.queue_offset
        low = block.queue_offsets[of_item]
        high = low + inner_counts(block)[of_item]
        elsewhere = (sound & mine)[of_item] & ((wanted < low) | (wanted >= high))
        what = "the record is of another queue offset"
        self._list("foreign", where[np.flatnonzero(elsewhere)], what)

    def _list(self, kind: str, numbers: Ints, what: str) -> None:
        for number in numbers[:LISTED_MAX].tolist():
            offset = self._part.queue_offset + number
            self._problem(kind, f"queue offset {offset}: {what}")
        if len(numbers) > LISTED_MAX:
            self._problem(kind, f"{len(numbers) - LISTED_MAX} more: {what}")

    def _problem(self, kind: str, what: str) -> None:
        section = self._part.section.start
        self._found.problem(kind, self._key, f"{self._queue} {what}", section=section)


# --------------------------------------------------------------------------------------------------
# The deep check of one object of the key index: every byte, and what it says of itself. One step an object.
# --------------------------------------------------------------------------------------------------


class IndexCheck:
    """The check of one object. Holds it in memory."""

    def __init__(self, store: ObjectStore, prefix: str, index: IndexObject) -> None:
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
            "covers": [row_of(cover) for cover in index.covers],
        }

    def _items(self, payload: memoryview, key: str, found: Finding) -> None:
        lengths = [cover.end - cover.start for cover in self._index.covers]
        try:
            check_payload(payload, self._index.count, lengths, where=key)
        except OtherVersionError as error:
            found.problem(OTHER_VERSION, key, error.what)


def check_indexes(state: TierState) -> Iterator[Problem]:
    """Every contradiction between what incarnations call covered and what index objects cover. Pure."""
    covered: dict[tuple[MessageQueue, int], Ranges] = {}
    for index in state.indexes:
        if parse_index_key("", index.place.key) is None:
            yield Problem("state", index.place.key, "it is not a key of an index object")
        for cover in index.covers:
            mine = covered.get((cover.queue, cover.incarnation), ())
            covered[cover.queue, cover.incarnation] = joined((*mine, (cover.start, cover.end)))
    for queue, _, incarnation, _ in state.placed():
        left = clipped(incarnation.indexed, incarnation.min_offset, INT_MAX)
        for start, end in covered.get((queue, incarnation.number), ()):
            left = without(left, start, end)
        where = f"{queue} incarnation {incarnation.number}"
        for start, end in left:
            yield Problem("state", where, f"no index object covers [{start}, {end})")
        if incarnation.indexed and incarnation.indexed[-1][1] > incarnation.commit_offset:
            yield Problem("state", where, "more is indexed than committed")


def unindexed_messages(state: TierState) -> int:
    """Queue offsets of present incarnations that no index object covers."""
    return sum(
        end - start
        for incarnations in state.queues.values()
        for start, end in uncovered(incarnations[-1])
    )
