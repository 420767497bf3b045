"""Proposes a tier's state again from what its bundles say of their sections. Pure.

``propose`` takes each section for a candidate, and chooses, incarnation by incarnation, the candidates that make a chain.
Where they overlap, the newest wins, by epoch and then by the sequence in which its writer made the bundle
(``ObjectId.age``):

* a newer writer knew the history when it began, so what an older one made and it made again was not history;
* a merged section is made after those that it replaces, and says the same (but for one that came too late, of what was
  truncated meanwhile: ``_LatePart``);
* a section made again because nobody knew what became of the first try is made after it.

What is not chosen is unused, and a bundle with nothing else an orphan. Where queue offsets go on and log offsets do not, or
both jump, bytes are lost: a ``Loss``. Where queue offsets jump and log offsets go on, a gap was recorded, or items without a
message are lost: a gap. What a merge found truncated becomes an incarnation that has ended, as it was.

``known`` is what the readable beginning of the journal says. It settles what objects can't tell: which parts an older epoch
had made in vain, what had expired or been truncated, reasons of gaps, times, and the local store's identity. And where a
incarnation began and ended: what is missing before its first object and behind its last, or all of it, is lost as well as
what is missing in between (``KnownIncarnation`` says what is not: no gap may be hidden, and none made of what was given up).

Not told by bundles, so lost where the journal does not tell it: the reason of a gap, gaps and losses before the first and
behind the last message, incarnations and queues without a message, why an incarnation ended, whether the last segment was
sealed, tails that were truncated and not written again (history again, unless they had been merged), when a segment was made
(the time at which the store got its first bundle stands for it).

The key index is given up: without the journal nobody can tell whether a tail that it covers was truncated and written
anew. The next writer, or ``tiered rebuild --index``, makes it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.errors import DataError
from tiered.format.items import ITEM_BYTES
from tiered.journal.entry import EPOCH
from tiered.keys import maker_of
from tiered.log.actions import (
    Compacted,
    Expire,
    Head,
    PartsNamed,
    SectionsMerged,
    Truncate,
    read_action,
)
from tiered.log.bundles import named_sections
from tiered.log.divergence import fingerprint_of
from tiered.log.flat_file import ITEM
from tiered.log.history import named_bundles
from tiered.log.parts import Gap, Incarnation, Part, Parts, SectionRange, Segment, TierState
from tiered.log.state import head_of, is_tail
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tiered.journal.entry import Entry
    from tiered.log.bundles import Tabled

REBUILT_STRIDE = 10**12
"""A rebuilt journal begins at the next multiple: beyond what a writer that we do not see may have used since."""
UNKNOWN_END = "unknown: the journal was rebuilt"
SKIPPED_MAX = 1000
"""So many incarnations of a queue may have left nothing; a number beyond is no incarnation but garbage."""


@dataclass(slots=True)
class RebuiltState:
    """What a rebuilt journal would say."""

    state: TierState  # the tier's state; its epoch is the highest that any object shows
    orphans: list[str] = field(default_factory=list)  # Keys of bundles that it does not name
    losses: list[Loss] = field(default_factory=list)
    """Where objects are missing; in ``state`` each is a gap."""
    notes: list[str] = field(default_factory=list)  # what a person should know, a sentence each

    def parts(self) -> Iterator[Part]:
        """All parts that it names."""
        for one in self.state.placed():
            yield from one.incarnation.parts()


def propose(
    tabled: Sequence[Tabled],
    known: TierState,
    *,
    sizes: Mapping[str, int],
    quarantined: Mapping[IncarnationKey, int],
    read: Read,
    epochs: Iterable[int] = (),
    behind: Iterable[Entry] = (),
) -> RebuiltState:
    """Make the state that the bundles allow.

    Args:
        known: What the readable beginning of the journal says; the initial state when nothing of it is readable.
        behind: Whole entries behind the readable beginning, in order.
    """
    candidates, present = Candidates(tabled), Present(tabled, sizes)
    lows = expired_behind(known, behind)
    tails, of_tails = _tails(known, present)
    made = [one.said.object_id.epoch for one in tabled]
    rebuilt = RebuiltState(replace(known, epoch=max([known.epoch, *epochs, *made])))
    queues: dict[MessageQueue, list[Incarnation]] = defaultdict(list)
    incarnations = {(one.queue, one.incarnation.number) for one in known.placed()}
    for queue, number in sorted(candidates.incarnations() | incarnations):
        key = (queue, number)
        some = [
            one._replace(truncated=True) if _section(one.part) in of_tails else one
            for one in candidates.of(key)
        ]
        named = list(known_candidates(known, key, present))
        some += named
        chain = choose(some, queue, number, known, read)
        told = KnownIncarnation.of(known_incarnation(known, queue, number), named, lows.get(key, 0))
        built = build_incarnation(chain, queue, number, told)
        rebuilt.losses += built.losses
        rebuilt.notes += built.notes
        if built.incarnation is not None and _skip(queues[queue], number):
            count = max(quarantined.get(key, 0), built.incarnation.quarantined)
            mine = tails[key]
            over = choose_tail(some, [part for tail in mine for part in tail.parts()])
            queues[queue] += [*mine, *build_tails(over, number, UNKNOWN_END)]
            queues[queue].append(replace(built.incarnation, quarantined=count))
    rebuilt.state = replace(
        rebuilt.state,
        queues={
            queue: _ended(incarnations) for queue, incarnations in queues.items() if incarnations
        },
        indexes=(),
    )
    rebuilt.orphans = sorted(sizes.keys() - named_bundles(rebuilt.state).keys())
    return rebuilt


def _section(part: Part) -> tuple[str, int]:
    return part.bundle.key, part.section.start


def _tails(
    known: TierState, present: Present
) -> tuple[dict[IncarnationKey, list[Incarnation]], set[tuple[str, int]]]:
    """What brokers truncated, and the sections that only such tails name."""
    tails: dict[IncarnationKey, list[Incarnation]] = defaultdict(list)
    mine: set[tuple[str, int]] = set()
    others: set[tuple[str, int]] = set()
    for queue, _, incarnation, is_over in known.placed():
        (mine if is_over else others).update(map(_section, incarnation.parts()))
        if is_over and all(map(present.has, incarnation.parts())):
            tails[queue, incarnation.number].append(incarnation)
    return tails, mine - others


def _skip(incarnations: list[Incarnation], number: int) -> bool:
    """Add empty incarnations where no object is left, so that numbers stay what they are; False when it is nonsense."""
    following = incarnations[-1].number + 1 if incarnations else 0
    if number - following > SKIPPED_MAX:
        return False
    zero = QueueOffset(0)
    incarnations += [Incarnation(empty, zero, zero) for empty in range(following, number)]
    return True


def _ended(incarnations: Sequence[Incarnation]) -> tuple[Incarnation, ...]:
    """All but the last have ended, and all but the last segment of each is sealed."""
    before = [
        replace(incarnation, ended=incarnation.ended or UNKNOWN_END, indexed=())
        for incarnation in incarnations[:-1]
    ]
    return (*before, replace(incarnations[-1], ended="", indexed=()))


# --------------------------------------------------------------------------------------------------
# Candidates for the parts of a rebuilt tier, and the choice among them. Pure.
# --------------------------------------------------------------------------------------------------

IncarnationKey = tuple[MessageQueue, int]
"""A queue and the number of one of its incarnations."""
Read = Callable[[SectionRange], Buffer]
"""Reads a range of a section; a ``DataError`` or ``BackendError`` when it can not be read."""


class RebuildCandidate(NamedTuple):
    """A part that a section could be, and its age."""

    rank: tuple[int, int, int, bool]
    """Epoch, the rest of ``ObjectId.age``, and whether the readable journal names it: the greater is the newer."""
    part: Part
    segment: int  # base log offset of its segment
    is_merged: bool  # it was made by a merge or a repair
    truncated: bool  # a merge found it in what the broker had truncated
    modified_ms: int  # when the store got its bundle; -1 when it does not say


# -- candidates ---------------------------------------------------------------------------------


class Candidates:
    """All sections of all bundles, in columns; those of one incarnation become objects when it is looked at."""

    def __init__(self, tabled: Sequence[Tabled]) -> None:
        """Sort sections by incarnation."""
        self._tabled = tabled
        self._parts = Parts.joined(one.named.parts for one in tabled)
        counts = [len(one.named.parts) for one in tabled]
        self._of = np.repeat(np.arange(len(tabled)), counts)
        self._segments = [segment for one in tabled for segment in one.named.segments]
        self._truncated = [is_tail for one in tabled for is_tail in one.named.truncated]
        self._rows: dict[IncarnationKey, list[int]] = {}
        row = 0
        for one in tabled:
            for incarnation in zip(one.named.queues, one.named.incarnations, strict=True):
                self._rows.setdefault(incarnation, []).append(row)
                row += 1

    def incarnations(self) -> set[IncarnationKey]:
        """Those that any section is of."""
        return set(self._rows)

    def of(self, incarnation: IncarnationKey) -> Iterator[RebuildCandidate]:
        """The sections of one incarnation."""
        for row in self._rows.get(incarnation, ()):
            one = self._tabled[self._of[row]]
            made = one.said.object_id
            yield RebuildCandidate(
                (*made.age, False),
                self._parts[row],
                self._segments[row],
                one.bundle.level > 0,
                self._truncated[row],
                one.modified_ms,
            )


class Present:
    """Whether parts that the readable journal names are there."""

    def __init__(self, tabled: Sequence[Tabled], sizes: Mapping[str, int]) -> None:
        """Take in what was listed, and what the tables say."""
        self._tabled = {one.bundle.key: one.named.parts.rows for one in tabled if not one.salvaged}
        self._sizes = sizes

    def has(self, part: Part) -> bool:
        """Whether a part's bundle is there, and says nothing else of the section.

        Where its table is damaged, what the journal says is enough to read it.
        """
        if self._sizes.get(part.bundle.key) != part.bundle.size_bytes:
            return False
        rows = self._tabled.get(part.bundle.key)
        if rows is None:
            return True
        at = int(np.searchsorted(rows["start"], part.section.start))
        same = ("start", "records_bytes", "stored_bytes", "items", "size_bytes", "crc")
        s = part.section
        mine = (s.start, s.records_bytes, s.stored_bytes, s.count, s.size_bytes, s.crc)
        return at < len(rows) and tuple(int(rows[name][at]) for name in same) == mine


def known_candidates(
    known: TierState, key: IncarnationKey, present: Present
) -> Iterator[RebuildCandidate]:
    """The parts that the readable journal names, perhaps of cut sections, if their bundles are there."""
    queue, number = key
    incarnations = known.queues.get(queue, ())
    for place, one in enumerate(incarnations):
        if one.number != number or is_tail(incarnations, place):
            continue
        for segment in one.segments:
            for part in segment.parts:
                made = maker_of(part.bundle.key)
                if made is not None and present.has(part):
                    rank = (*made.age, True)
                    is_merged = part.bundle.level > 0
                    base = segment.base_offset
                    yield RebuildCandidate(rank, part, base, is_merged, False, -1)


# -- choice -------------------------------------------------------------------------------------


def choose(
    candidates: Sequence[RebuildCandidate],
    queue: MessageQueue,
    incarnation: int,
    known: TierState,
    read: Read,
) -> list[RebuildCandidate]:
    """The newest that do not overlap, in the order of their queue offsets.

    Args:
        read: Reads items and records, where a part has to be cut or two histories told apart; asked for nothing else.
    """
    able = [one for one in candidates if _may_be_history(one, queue, incarnation, known)]
    epochs = _Epochs(able)
    late = _LatePart(candidates, read)
    chosen = _Chosen(read)
    for one in sorted(able, key=lambda found: (found.rank, found.part.bundle.key))[::-1]:
        if one.truncated or (not one.is_merged and epochs.truncate(one)):
            continue
        if not (one.is_merged and not one.rank[-1] and late.is_late(one)):
            chosen.take(one)
    return chosen.row


def choose_tail(
    candidates: Sequence[RebuildCandidate], without: Sequence[Part]
) -> list[RebuildCandidate]:
    """Of what merges found truncated the newest that do not overlap, nor any of ``without``."""
    chosen = _Chosen(None)
    for one in sorted(candidates, key=lambda found: (found.rank, found.part.bundle.key))[::-1]:
        part = one.part
        is_known = any(
            part.queue_offset < tail.queue_end and tail.queue_offset < part.queue_end
            for tail in without
        )
        if one.truncated and not is_known:
            chosen.take(one)
    return chosen.row


class _Chosen:
    """A row of parts, none overlapping another."""

    def __init__(self, read: Read | None) -> None:
        self.row: list[RebuildCandidate] = []
        self._starts: list[int] = []
        self._read = read

    def take(self, one: RebuildCandidate) -> None:
        """Take it, or what of it lies before a newer one that begins in its midst, if it fits."""
        at = bisect_right(self._starts, one.part.queue_offset)
        for fitting in self._whole_or_head(one, self.row[at : at + 1]):
            if _fits(fitting.part, self.row[at - 1 : at] if at else [], self.row[at : at + 1]):
                self._starts.insert(at, fitting.part.queue_offset)
                self.row.insert(at, fitting)
                return

    def _whole_or_head(
        self, one: RebuildCandidate, behind: Sequence[RebuildCandidate]
    ) -> Iterator[RebuildCandidate]:
        yield one
        part = one.part
        newer = behind[0].part if behind else None
        if newer is None or self._read is None:
            return
        is_cut = newer.queue_offset < part.queue_end or newer.log_offset < part.log_end
        if part.queue_offset < newer.queue_offset and is_cut:
            head = cut_head(part, newer.queue_offset, newer.log_offset, self._read)
            if head is not None:
                yield one._replace(part=head)


class _Epochs:
    """Where each epoch began to write, so that what an older one had made behind that is known to be no history."""

    def __init__(self, able: Sequence[RebuildCandidate]) -> None:
        lows: dict[int, int] = {}
        for one in able:
            if not one.is_merged:  # merging is no going on
                epoch, low = one.rank[0], one.part.queue_offset
                lows[epoch] = min(low, lows.get(epoch, low))
        self._epochs = sorted(lows)
        latest_first = [lows[epoch] for epoch in reversed(self._epochs)]
        self._lows = list(accumulate(latest_first, min))[::-1]  # of this epoch and all later ones

    def truncate(self, one: RebuildCandidate) -> bool:
        """Whether a later epoch began to write at or below its first offset."""
        at = bisect_right(self._epochs, one.rank[0])
        return at < len(self._lows) and self._lows[at] <= one.part.queue_offset


class _LatePart:
    """Merges that came too late: of parts that the broker truncated while they were gathered, so never named.

    Such a one is newer than what was written in the place of these, and would win. It is known by two histories at the
    same offsets: an older one, or one that a merge found truncated, that says what the merge says; and a newer one, older
    than the merge, that says something else.
    """

    def __init__(self, candidates: Sequence[RebuildCandidate], read: Read) -> None:
        plain = [one for one in candidates if not one.is_merged or one.truncated]
        plain.sort(key=lambda one: one.part.queue_offset)
        self._pairs = list(_overlapping(plain))
        self._read = read

    def is_late(self, merged: RebuildCandidate) -> bool:
        """Whether a merged section is not a history."""
        return any(
            self._agree(old, merged) is True and self._agree(new, merged) is False
            for one, two in self._pairs
            for old, new in (_by_age(one, two),)
            if not new.truncated and new.rank < merged.rank
        )

    def _agree(self, one: RebuildCandidate, merged: RebuildCandidate) -> bool | None:
        """Whether both say the same of the last queue offset that both have; None: that can't be told."""
        low = max(one.part.queue_offset, merged.part.queue_offset)
        at = min(one.part.queue_end, merged.part.queue_end) - 1
        if at < low:
            return None
        try:
            return _fingerprint_at(one.part, at, self._read) == _fingerprint_at(
                merged.part, at, self._read
            )
        except (DataError, BackendError):
            return None


def _overlapping(
    row: Sequence[RebuildCandidate],
) -> Iterator[tuple[RebuildCandidate, RebuildCandidate]]:
    """Pairs of different parts that overlap; the row is in the order of where they begin."""
    open_ones: list[RebuildCandidate] = []
    for one in row:
        open_ones = [o for o in open_ones if o.part.queue_end > one.part.queue_offset]
        for other in open_ones:
            if other.part != one.part:
                yield other, one
        open_ones.append(one)


def _by_age(
    one: RebuildCandidate, two: RebuildCandidate
) -> tuple[RebuildCandidate, RebuildCandidate]:
    """The older history first: what was truncated, else by rank."""
    if one.truncated != two.truncated:
        return (one, two) if one.truncated else (two, one)
    return (one, two) if one.rank < two.rank else (two, one)


def _fingerprint_at(part: Part, at: int, read: Read) -> tuple[int, int, int]:
    """Where the record of a queue offset lies, how large it is, and its fingerprint."""
    begin = (at - part.queue_offset) * ITEM_BYTES
    item = np.frombuffer(memoryview(read(part.index.part_of(begin, begin + ITEM_BYTES))), ITEM)[0]
    start, size = int(item["log_offset"]), int(item["size"])
    low = start - part.log_offset
    if size <= 0 or not 0 <= low <= low + size <= part.log_bytes:
        return start, size, 0
    record = read(part.log.part_of(low, low + size))
    return start, size, fingerprint_of(record, int(item["tag_code"]))


def cut_head(part: Part, end: QueueOffset, log_end: LogOffset, read: Read) -> Part | None:
    """A part's items before ``end``, by reference, as far as their records end at ``log_end``; None when none does there.

    Records before ``end`` that lie behind ``log_end`` were truncated, and a gap was recorded in their place.
    """
    count = min(end, part.queue_end) - part.queue_offset
    try:
        found = np.frombuffer(memoryview(read(part.index.part_of(0, count * ITEM_BYTES))), ITEM)
    except (DataError, BackendError):
        return None
    real = found["size"] > 0
    ends = np.where(real, found["log_offset"] + found["size"], part.log_offset)
    if (ends > log_end).any():
        count = int((ends > log_end).argmax())
    if int(ends[:count].max(initial=part.log_offset)) != log_end:
        return None
    holes = count - int(np.count_nonzero(real[:count]))
    log_bytes = log_end - part.log_offset
    head = Head(part.queue_offset, part.log_offset, log_bytes, holes, 0, part.holes)
    return head_of(part, QueueOffset(part.queue_offset + count), head)


def _fits(
    part: Part, before: Sequence[RebuildCandidate], behind: Sequence[RebuildCandidate]
) -> bool:
    """Whether it overlaps neither neighbour, in queue offsets and in log offsets, and meets them in both or in none."""
    row = [one.part for one in before] + [part] + [one.part for one in behind]
    return all(
        one.queue_end <= two.queue_offset
        and one.log_end <= two.log_offset
        and (one.queue_end < two.queue_offset or one.log_end == two.log_offset)
        for one, two in pairwise(row)
    )


def _may_be_history(
    one: RebuildCandidate, queue: MessageQueue, number: int, known: TierState
) -> bool:
    """Whether the readable journal leaves it open that a later entry named this."""
    epoch, *_, is_named = one.rank
    incarnations = known.queues.get(queue, ())
    incarnation = known_incarnation(known, queue, number)
    if is_named:
        return True
    if incarnation is None:  # it had not begun, or was deleted, when the readable journal ends
        later = not incarnations or number > incarnations[-1].number
        return later and epoch >= known.epoch
    if one.part.queue_end <= incarnation.min_offset:
        return False  # expired
    if one.part.queue_end <= incarnation.commit_offset:
        return True  # merged since, or what had been merged
    return epoch >= known.epoch and not incarnation.ended


def known_incarnation(known: TierState, queue: MessageQueue, number: int) -> Incarnation | None:
    """An incarnation that the readable journal knows; of those with this number the one that went on."""
    incarnations = known.queues.get(queue, ())
    return next(
        (incarnation for incarnation in incarnations[::-1] if incarnation.number == number), None
    )


# --------------------------------------------------------------------------------------------------
# One incarnation of a queue, made of a chain of parts, and what the broker truncated of it. Pure.
# --------------------------------------------------------------------------------------------------

UNKNOWN_GAP = "unknown: the journal was rebuilt"
LOST_GAP = "lost: the journal was rebuilt without these"
EXPIRED_GAP = "expired: the journal was rebuilt without these"


@dataclass(frozen=True, slots=True)
class Loss:
    """Queue offsets ``[start, end)`` whose objects are not there, and bytes of the queue's commit log."""

    queue: MessageQueue
    incarnation: int
    start: QueueOffset
    end: QueueOffset
    log_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.queue} incarnation {self.incarnation} queue offsets [{self.start}, {self.end})"
        )


@dataclass(slots=True)
class BuiltIncarnation:
    """An incarnation, and what is to be said of it."""

    incarnation: Incarnation | None = None  # none when there is nothing of it
    losses: list[Loss] = field(default_factory=list)
    """Where objects are missing: each is a gap of the incarnation."""
    notes: list[str] = field(default_factory=list)  # what a person should know


@dataclass(frozen=True, slots=True)
class KnownIncarnation:
    """What the journal, as far as it can be read, says of an incarnation."""

    incarnation: Incarnation
    """As its readable beginning has it. A recorded gap is not a loss."""
    low: QueueOffset
    """What is before this has expired: so says that beginning, or a whole entry behind it. Its objects may be gone."""
    there_end: QueueOffset
    """One past the last item that it names and whose object is there. If that was not chosen, something was written
    in its place: the broker has truncated what is behind it, and that is not lost."""

    @classmethod
    def of(
        cls, incarnation: Incarnation | None, named: Sequence[RebuildCandidate], low: int
    ) -> KnownIncarnation | None:
        """From the incarnation, the parts of it that are there, and where it began at last by what whole entries say."""
        if incarnation is None:
            return None
        there_end = max((one.part.queue_end for one in named), default=QueueOffset(0))
        return cls(incarnation, QueueOffset(max(incarnation.min_offset, low)), there_end)

    @property
    def begins(self) -> _Border:
        """Where it begins at last."""
        behind = (part.log_offset for part in self.incarnation.parts() if part.queue_end > self.low)
        return _Border(self.low, next(behind, self.incarnation.log_end))


def expired_behind(known: TierState, behind: Iterable[Entry]) -> dict[IncarnationKey, int]:
    """Where incarnations begin by what whole entries behind the readable beginning say of expiry, as replay would take it.

    Only such an incarnation is looked at as the readable beginning has it, at its very place: of what was truncated
    meanwhile nobody can tell. So of what is gone too little may be known to have expired, and not too much.
    """
    lows: dict[IncarnationKey, int] = {}
    for entry in behind:
        if 0 < entry.epoch < known.epoch:
            continue  # of a fenced writer
        for action in entry.actions:
            try:
                _take_expiry(known, action, lows)
            except (LookupError, TypeError, ValueError):
                continue  # nobody of ours wrote it, and it expires nothing
    return lows


class ToldEnd(NamedTuple):
    """Where an incarnation ends by what a whole entry behind the readable beginning says."""

    end: int  # one past its last queue offset
    number: int  # of the entry
    bundle: str  # key of the bundle that it names for it


def ends_behind(known: TierState, behind: Iterable[Entry]) -> dict[IncarnationKey, ToldEnd]:
    """Where incarnations end by what whole entries behind the readable beginning name and truncate."""
    ends: dict[IncarnationKey, ToldEnd] = {}
    epoch = known.epoch
    for entry in behind:
        epochs = [one.get("epoch") for one in entry.actions if one["do"] == EPOCH]
        epoch = max([epoch, *(one for one in epochs if type(one) is int)])
        if not 0 < entry.epoch < epoch:  # else of a fenced writer
            for action in entry.actions:
                with suppress(LookupError, TypeError, ValueError):  # nobody of ours wrote it
                    _take_ends(entry, action, ends)
    return ends


def _take_ends(
    entry: Entry, action: Mapping[str, Any], ends: dict[IncarnationKey, ToldEnd]
) -> None:
    said = read_action(action)
    if isinstance(said, Truncate) and (key := (said.queue, said.incarnation)) in ends:
        ends[key] = ends[key]._replace(end=min(ends[key].end, said.end))
    if not isinstance(said, PartsNamed | SectionsMerged | Compacted):
        return
    for named in map(named_sections, said.bundles):
        rows = zip(named.queues, named.incarnations, named.places(), strict=True)
        for number, (queue, incarnation, place) in enumerate(rows):
            old = ends.get((queue, incarnation))
            if not named.truncated[number] and (old is None or old.end < place.queue_end):
                told = ToldEnd(int(place.queue_end), entry.number, named.bundle.key)
                ends[queue, incarnation] = told


def not_found(
    state: TierState, ends: Mapping[IncarnationKey, ToldEnd], lows: Mapping[IncarnationKey, int]
) -> Iterator[tuple[str, str]]:
    """Bundles of which entries tell, with messages that a proposed state does not have; and what is told."""
    for (queue, number), told in sorted(ends.items()):
        incarnation = known_incarnation(state, queue, number)
        found = incarnation.commit_offset if incarnation else 0
        if max(found, lows.get((queue, number), 0)) < told.end:
            what = f"journal entry {told.number} tells of messages of {queue} up to queue offset {told.end}"
            yield told.bundle, f"{what}, and none from {found} on were found"


def _take_expiry(
    known: TierState, action: Mapping[str, Any], lows: dict[IncarnationKey, int]
) -> None:
    said = read_action(action)
    if not isinstance(said, Expire):
        return
    incarnations = known.queues.get(said.queue, ())
    if (
        not 0 <= said.position < len(incarnations)
        or incarnations[said.position].number != said.incarnation
    ):
        return
    key = (said.queue, said.incarnation)
    low = lows.get(key, incarnations[said.position].min_offset)
    if not is_tail(incarnations, said.position) and said.min_from == low < said.min_to:
        lows[key] = said.min_to


class _Border(NamedTuple):
    """A border between two items, and where it lies in the log."""

    queue_offset: QueueOffset
    log_offset: LogOffset


class _OffsetRange(NamedTuple):
    """Between two places, where nothing is there."""

    start: _Border
    end: _Border
    has_expired: bool = False

    @property
    def is_lost(self) -> bool:
        """There were bytes, and nobody gave them up."""
        return self.start.log_offset != self.end.log_offset and not self.has_expired

    @property
    def reason(self) -> str:
        """Of a gap."""
        if self.has_expired:
            return EXPIRED_GAP
        return LOST_GAP if self.is_lost else UNKNOWN_GAP

    def divided(self, known: KnownIncarnation | None) -> tuple[_OffsetRange, ...]:
        """At the known beginning: objects of before it may be there again, and others of before it not."""
        if known is None or known.low <= self.start.queue_offset:
            return (self,)
        if self.end.queue_offset <= known.low:
            return (self._replace(has_expired=True),)
        low = known.begins.log_offset
        border = _Border(known.low, min(max(low, self.start.log_offset), self.end.log_offset))
        return _OffsetRange(self.start, border, has_expired=True), _OffsetRange(border, self.end)

    def recorded(self, known: KnownIncarnation | None) -> list[Gap]:
        """The gaps within that the journal tells."""
        start, end = self.start.queue_offset, self.end.queue_offset
        gaps = () if known is None else known.incarnation.gaps
        return [gap for gap in gaps if start <= gap.start and gap.end <= end]

    def unrecorded(self, known: KnownIncarnation | None) -> list[_OffsetRange]:
        """What is left between these."""
        left, at = [], self.start.queue_offset
        for gap in self.recorded(known):
            if at < gap.start:
                left.append((at, gap.start))
            at = gap.end
        if at < self.end.queue_offset:
            left.append((at, self.end.queue_offset))
        return [self._within(start, end, known) for start, end in left]

    def _within(
        self, start: QueueOffset, end: QueueOffset, known: KnownIncarnation | None
    ) -> _OffsetRange:
        """From one recorded gap, or the start, to the next, or the end."""
        if known is None or (start, end) == (self.start.queue_offset, self.end.queue_offset):
            return self
        parts = known.incarnation.parts()
        starts = parts.column("queue_offset")
        first, behind = (int(np.searchsorted(starts, offset)) for offset in (start, end))
        log_start = parts[first].log_offset if first < len(parts) else known.incarnation.log_end
        log_end = parts[behind - 1].log_end if behind else log_start
        return _OffsetRange(
            self.start if start == self.start.queue_offset else _Border(start, log_start),
            self.end if end == self.end.queue_offset else _Border(end, log_end),
            self.has_expired,
        )


def build_incarnation(
    chain: Sequence[RebuildCandidate],
    queue: MessageQueue,
    number: int,
    known: KnownIncarnation | None,
) -> BuiltIncarnation:
    """Make an incarnation of its parts, in order, none overlapping another."""
    built = BuiltIncarnation()
    name = f"{queue} incarnation {number}"
    if not chain and (known is None or not known.incarnation.parts()):
        if known is None:
            built.notes.append(f"{name}: no part of it is left, so it is left out")
        else:
            built.incarnation = known.incarnation  # it never had a message, or all have expired
        return built
    first, last = _known_begin(chain, known), _known_end(chain, known)
    offset_ranges = [
        one for all_of in _offset_ranges(chain, first, last) for one in all_of.divided(known)
    ]
    built.losses = [
        Loss(queue, number, start, end, log_end - log_start)
        for offset_range in offset_ranges
        if offset_range.is_lost
        for (start, log_start), (end, log_end), _ in offset_range.unrecorded(known)
    ]
    goes_on = last or _Border(chain[-1].part.queue_end, chain[-1].part.log_end)
    incarnation = Incarnation(
        number,
        chain[0].part.queue_offset if chain else goes_on.queue_offset,
        goes_on.queue_offset,
        goes_on.log_offset,
        _segments(chain, known.incarnation if known else None),
        (*_gaps_before(chain, first, known), *_gaps_of(offset_ranges, known)),
    )
    if known is not None:
        incarnation = replace(
            incarnation, quarantined=known.incarnation.quarantined, ended=known.incarnation.ended
        )
    built.incarnation = incarnation
    built.notes = [
        f"{name}: {note}" for note in _notes(incarnation, known, is_begin_known=bool(first))
    ]
    return built


def _known_begin(
    chain: Sequence[RebuildCandidate], known: KnownIncarnation | None
) -> _Border | None:
    """Where the journal has the incarnation begin; None when it does not say, or objects of before are there."""
    if known is None:
        return None
    place = known.begins
    if not chain:
        return place
    first = chain[0].part
    is_before = place.queue_offset <= first.queue_offset and place.log_offset <= first.log_offset
    return place if is_before else None


def _known_end(chain: Sequence[RebuildCandidate], known: KnownIncarnation | None) -> _Border | None:
    """Where the journal has the incarnation end; None when it does not say, more is there, or it was truncated since."""
    if known is None:
        return None
    incarnation, last = known.incarnation, chain[-1].part if chain else None
    is_behind = last is None or (
        last.queue_end < incarnation.commit_offset and last.log_end <= incarnation.log_end
    )
    if not is_behind or _went_back(chain, known):
        return None
    return _Border(incarnation.commit_offset, incarnation.log_end)


_NO_AGE = (0, 0, 0, False)


def _went_back(chain: Sequence[RebuildCandidate], known: KnownIncarnation) -> bool:
    """Whether the chain tells that the broker truncated the end that the journal has.

    Either what the journal names is there, and other parts were chosen. Or a part was made before that end by somebody who
    knew more than the journal tells: it is newer than all that this names from there on. (A first try that was made in
    vain is older than the second.)
    """
    if chain and known.there_end > chain[-1].part.queue_end:
        return True
    unnamed = [
        one
        for one in chain
        if not one.rank[-1]
        and not one.is_merged
        and one.part.queue_offset < known.incarnation.commit_offset
    ]
    if not unnamed:
        return False
    parts = known.incarnation.parts()
    ends = parts.column("queue_offset") + parts.column("count")
    made = [maker_of(bundle.key) for bundle in parts.bundles]
    ages = [(*one.age, False) if one else _NO_AGE for one in made]
    newest = [*list(accumulate(ages[::-1], max))[::-1], _NO_AGE]
    return any(
        one.rank > newest[int(np.searchsorted(ends, one.part.queue_offset, "right"))]
        for one in unnamed
    )


def _offset_ranges(
    chain: Sequence[RebuildCandidate], begin: _Border | None, end: _Border | None
) -> Iterator[_OffsetRange]:
    """Where nothing is: between neighbours, and between the ends of the chain and those that are known."""
    starts = [_Border(one.part.queue_end, one.part.log_end) for one in chain]
    ends = [_Border(one.part.queue_offset, one.part.log_offset) for one in chain]
    starts, ends = ([begin, *starts], ends) if begin else (starts, ends[1:])
    starts, ends = (starts, [*ends, end]) if end else (starts[:-1], ends)
    for start, behind in zip(starts, ends, strict=True):
        if start.queue_offset < behind.queue_offset:
            yield _OffsetRange(start, behind)


def _notes(
    incarnation: Incarnation, known: KnownIncarnation | None, *, is_begin_known: bool
) -> list[str]:
    notes = []
    before = incarnation.segments[0].parts[0].log_offset if incarnation.segments else 0
    is_loss = is_begin_known and known is not None and known.low == known.incarnation.min_offset
    if (
        before
        and not is_loss
        and (known is None or known.incarnation.min_offset < incarnation.min_offset)
    ):
        notes.append(
            f"it begins at queue offset {incarnation.min_offset};"
            f" {before} bytes of records before it have expired or are lost"
        )
    if known is not None and known.incarnation.commit_offset > incarnation.commit_offset:
        notes.append(
            f"queue offsets [{incarnation.commit_offset}, {known.incarnation.commit_offset}) are not its end any more:"
            " something was written in their place; the next writer goes on before them"
        )
    return notes


def _gaps_before(
    chain: Sequence[RebuildCandidate], begin: _Border | None, known: KnownIncarnation | None
) -> list[Gap]:
    """Those before the incarnation's minimum, which only a journal tells, if it begins where that says."""
    start = begin.queue_offset if begin else chain[0].part.queue_offset
    if known is None or start != known.incarnation.min_offset:
        return []
    return [gap for gap in known.incarnation.gaps if gap.end <= start]


def _gaps_of(
    offset_ranges: Iterable[_OffsetRange], known: KnownIncarnation | None
) -> Iterator[Gap]:
    for offset_range in offset_ranges:
        left = offset_range.unrecorded(known)
        gaps = [
            Gap(one.start.queue_offset, one.end.queue_offset, offset_range.reason) for one in left
        ]
        yield from sorted([*gaps, *offset_range.recorded(known)], key=lambda gap: gap.start)


def build_tails(
    chain: Sequence[RebuildCandidate], incarnation: int, reason: str
) -> list[Incarnation]:
    """Incarnations that are over, of what merges found truncated: one of each run without a hole."""
    rows: list[list[RebuildCandidate]] = []
    for one in chain:
        if rows and _continues(rows[-1][-1].part, one.part):
            rows[-1].append(one)
        else:
            rows.append([one])
    return [_tail(row, incarnation, reason) for row in rows]


def _tail(row: Sequence[RebuildCandidate], incarnation: int, reason: str) -> Incarnation:
    first, last = row[0].part, row[-1].part
    return Incarnation(
        incarnation,
        first.queue_offset,
        QueueOffset(last.queue_end),
        last.log_end,
        tuple(replace(segment, sealed=True) for segment in _segments(row, None)),
        ended=reason,
        cut_at=first.queue_offset,
    )


def _segments(chain: Sequence[RebuildCandidate], known: Incarnation | None) -> tuple[Segment, ...]:
    """Where a part does not begin its segment, it is of the segment of the part before it.

    So says where its segment begins: before itself. It need not be where that part's segment begins, since a merge may have
    made one segment of two, and leaves what it does not gather as it was.
    """
    rows: list[list[RebuildCandidate]] = []
    for one in chain:
        last = rows[-1][-1] if rows else None
        is_same = last is not None and _continues(last.part, one.part)
        if is_same and last and (one.segment != one.part.log_offset or one.segment == last.segment):
            rows[-1].append(one)
        else:
            rows.append([one])
    return tuple(_segment(row, known, is_last=row is rows[-1]) for row in rows)


def _continues(one: Part, two: Part) -> bool:
    return (one.queue_end, one.log_end) == (two.queue_offset, two.log_offset)


def _segment(
    row: Sequence[RebuildCandidate], known: Incarnation | None, *, is_last: bool
) -> Segment:
    first = row[0].part
    base = (first.log_offset, first.queue_offset)
    same = next(
        (
            s
            for s in (known.segments if known else ())
            if (s.base_offset, s.base_queue_offset) == base
        ),
        None,
    )
    created_ms = row[0].modified_ms if row[0].modified_ms >= 0 else first.store_max_ms
    return Segment(
        LogOffset(first.log_offset),
        QueueOffset(first.queue_offset),
        same.created_ms if same else max(0, created_ms),
        sealed=not is_last or bool(same and same.sealed),
        parts=Parts.of(one.part for one in row),
    )
