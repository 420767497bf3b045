"""What a verification found: problems, which need a person, and recorded things, which are explained and are no failure.

============= ===================================================================================
kind          what is wrong
============= ===================================================================================
journal       an entry or checkpoint is damaged, missing or does not follow from the one before
lease         the lease cannot be read (harmless for data; a writer will take it)
state         the journal's state contradicts itself
missing       an object that an entry names is not there
size          an object has another size than its entry says
unreadable    the store could not give the object (or the local store a queue)
table         a bundle's own table or footer is damaged, or a section's block table: no message is lost by it
block         a block fails its checksum; of a bundle it is said which queue offsets that costs
section       a section is not the one whose checksum the entry has, and its block table does not tell where
trailer       the trailer of an index object or of a quarantined record is damaged, or is of another object
payload       the payload of such an object is not the one whose checksum the entry has
description   an object says something else of itself than the entry that names it
index         items of a consume queue or of a key index are impossible (outside, overlapping, miscounted)
record        a record is damaged (its first fault is named)
foreign       a record of another queue or queue offset than the item that points at it
difference    a message differs from the local store's
version       an object is whole, and of another version of this program: no damage, and nothing repairs it
============= ===================================================================================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered import keys
from tiered.errors import DataError
from tiered.log.parts import check_rows
from tiered.log.state import is_tail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.log.parts import Bundle, Incarnation, Segment, TierState
    from tiered.model import MessageQueue

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
