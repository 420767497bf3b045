"""The state of one broker's tier, as a pure function of its journal.

All values are immutable. ``TierMachine.apply`` is the one place that knows what the actions mean; reader, writer,
recovery, verify, gc and archive use it.

Replay is strict: a part or gap that does not begin exactly at its queue's commit offset and log end, or whose entry is not
of the present epoch, is not history; it is counted in ``refused_parts`` and changes nothing. A merge of parts that
are not there any more changes nothing either, but is not counted: it may honestly come too late, when the queue has begun
anew or some of it has expired. So it is with a truncate or expire that does not fit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.errors import OtherVersionError
from tiered.journal.entry import Entry, JsonForm, as_object, json_members, json_text
from tiered.journal.replay import UnknownActionError
from tiered.keys import DATA_ROOTS, maker_of
from tiered.log.actions import (
    BeginAnew,
    Compacted,
    Epoch,
    Expire,
    GapMet,
    IncarnationPasses,
    Indexed,
    LineageGrown,
    Meta,
    PartsNamed,
    Pause,
    Quarantine,
    Seal,
    SectionsMerged,
    Truncate,
    action_of,
    read_action,
)
from tiered.log.bundles import decode_numbers, named_sections
from tiered.log.expiry import expired
from tiered.log.lineage import after_grown, moved
from tiered.log.merge import replace_run
from tiered.log.parts import (
    Bundle,
    Gap,
    Incarnation,
    Part,
    Parts,
    PausedTopic,
    Segment,
    TierState,
    decode_columns,
    encode_columns,
    incarnation_form,
    queue_action,
)
from tiered.log.ranges import clipped, joined, without
from tiered.log.timers import (
    TimerCancel,
    TimerFacts,
    TimerHanded,
    TimerRunBegins,
    TimerTake,
    after_cancel,
    after_handed,
    after_run,
    after_take,
    hour_queue,
)
from tiered.model import LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tiered.journal.entry import Action
    from tiered.log.actions import Head
    from tiered.log.bundles import NamedSections, SectionSpan
    from tiered.log.parts import IndexObject
    from tiered.log.timers import Bounds

    Incarnations = Mapping[MessageQueue, tuple[Incarnation, ...]]
    Changed = dict[MessageQueue, tuple[Incarnation, ...]]

# -- index objects -------------------------------------------------------------------------------
#
# What the journal says of index objects, and what it means for the queues. Pure.
#
# An index object covers, of each queue named, a row of queue offsets: every message there has its keys in the object.
# What is covered of an incarnation grows from its minimum without a hole (``indexed_to`` says how far): an action whose
# rows do not begin exactly there, or that names an incarnation which does not exist, changes nothing. Nor does one whose
# messages were read before an end of the queue was last truncated (``last_cut``): other messages may stand there now. So
# nothing is ever left out for good: a new epoch, or the next indexer, goes on at ``indexed_to``.
#
# Where index objects were dropped in the middle, the first hole is what has to be covered next. What covers what is counted
# by queue offsets, so expiry and merging of parts change nothing here; an object of which nothing can be read any more is
# dropped by replay itself, in the same entry in which the last of it expires.


def index_action(made: Iterable[IndexObject], drop: Sequence[str] = ()) -> Action:
    """The action that names new index objects, in the order in which they cover, and gives up others before that."""
    return action_of(Indexed(tuple(made), tuple(drop)))


def uncovered(incarnation: Incarnation) -> list[tuple[int, int]]:
    """The queue offsets ``[start, end)`` of an incarnation that no index covers, in order."""
    holes: list[tuple[int, int]] = []
    at: int = incarnation.min_offset
    for start, end in incarnation.indexed:
        if at < start:
            holes.append((at, min(start, incarnation.commit_offset)))
        at = max(at, end)
    if at < incarnation.commit_offset:
        holes.append((at, incarnation.commit_offset))
    return holes


def indexed_to(incarnation: Incarnation) -> QueueOffset:
    """Up to where an incarnation is covered without a hole."""
    holes = uncovered(incarnation)
    return QueueOffset(holes[0][0]) if holes else incarnation.commit_offset


def last_cut(incarnations: Sequence[Incarnation], number: int) -> int:
    """Number of the last entry that has taken an end of an incarnation back; 0: none has."""
    return max(
        (incarnation.cut_by for incarnation in incarnations if incarnation.number == number),
        default=0,
    )


def after_index(
    indexes: Sequence[IndexObject], queues: Incarnations, said: Indexed
) -> tuple[tuple[IndexObject, ...], Incarnations] | None:
    """What an ``index`` action makes of index objects and queues (the changed ones); None when it does not fit."""
    drop = set(said.drop)
    kept = [one for one in indexes if one.place.key not in drop]
    if len(indexes) - len(kept) != len(drop):
        return None
    changed: dict[MessageQueue, tuple[Incarnation, ...]] = {}
    for one in indexes:
        if one.place.key in drop:
            _drop(queues, changed, one)
    if not all(_name(queues, changed, one) for one in said.objects):
        return None
    return (*kept, *said.objects), changed


def _name(queues: Incarnations, changed: Changed, made: IndexObject) -> bool:
    for cover in made.covers:
        incarnations = changed.get(cover.queue) or queues.get(cover.queue, ())
        at = _place(incarnations, cover.incarnation)
        holes = uncovered(incarnations[at]) if at is not None else []
        if at is None or not holes:
            return False
        start, end = holes[0]
        if cover.start != start or not start < cover.end <= end:
            return False
        if cover.cut_by != last_cut(incarnations, cover.incarnation):
            return False
        incarnation = replace(
            incarnations[at], indexed=joined((*incarnations[at].indexed, (start, cover.end)))
        )
        changed[cover.queue] = (*incarnations[:at], incarnation, *incarnations[at + 1 :])
    return True


def _drop(queues: Incarnations, changed: Changed, gone: IndexObject) -> None:
    for cover in gone.covers:
        incarnations = changed.get(cover.queue) or queues.get(cover.queue, ())
        if incarnations:
            changed[cover.queue] = tuple(
                replace(incarnation, indexed=without(incarnation.indexed, cover.start, cover.end))
                if incarnation.number == cover.incarnation
                else incarnation
                for incarnation in incarnations
            )


def is_of_use(made: IndexObject, queues: Incarnations) -> bool:
    """Whether anything that it covers can still be read."""
    return any(
        incarnation.number == cover.incarnation
        and max(cover.start, incarnation.min_offset) < min(cover.end, incarnation.commit_offset)
        for cover in made.covers
        for incarnation in queues.get(cover.queue, ())
    )


def _place(incarnations: Sequence[Incarnation], incarnation: int) -> int | None:
    """The last incarnation of this number: those before it were truncated."""
    for at in range(len(incarnations) - 1, -1, -1):
        if incarnations[at].number == incarnation:
            return at
    return None


# -- truncation ----------------------------------------------------------------------------------
#
# What the broker truncated: a queue ends at an earlier offset; what lay behind it is kept, as an ended incarnation.
#
# The common case: a power failure took a tail that had been tiered already, and the broker wrote other messages at the
# same queue offsets. ``cut`` divides the present incarnation at ``end``: the incarnation goes on with ``[min, end)``, and
# ``[end, commit)`` becomes a *tail*, an incarnation of the same number before it, ended, with its parts still named (so
# nothing deletes them). No object is written or changed (I4): a part that straddles ``end`` is cut by reference into two
# ranges of its section.
#
# All values are immutable, all functions pure. A cut that does not fit the incarnation changes nothing: the writer plans it
# anew, since a merge may have gathered the part that it names.


def cut(
    incarnation: Incarnation, said: Truncate, entry: int
) -> tuple[Incarnation, Incarnation] | None:
    """Divide an incarnation.

    Returns:
        The tail ``[end, was)``, ended, and the incarnation ``[min, end)``; None when it does not fit.
    """
    end, was, head = said.end, said.was, said.head
    if was != incarnation.commit_offset or not incarnation.min_offset < end < was:
        return None
    kept: list[Segment] = []
    gone: list[Segment] = []
    is_head_used = head is None
    for segment in incarnation.segments:
        before = [part for part in segment.parts if part.queue_end <= end]
        behind = [part for part in segment.parts if part.queue_offset >= end]
        for part in segment.parts:
            if part.queue_offset < end < part.queue_end:
                first = None if head is None else head_of(part, end, head)
                if first is None:
                    return None
                is_head_used = True
                before, behind = [*before, first], [rest_of(part, first), *behind]
        if before:
            kept.append(replace(segment, parts=Parts.of(before)))
        if behind:
            gone.append(replace(segment, parts=Parts.of(behind), sealed=True))
    if not is_head_used:
        return None
    gaps_kept, gaps_gone = _cut_gaps(incarnation.gaps, end)
    begins = incarnation.segments[0].base_offset if incarnation.segments else incarnation.log_end
    log_end = kept[-1].parts.log_end if kept else begins
    tail = replace(
        incarnation,
        min_offset=end,
        segments=tuple(gone),
        gaps=gaps_gone,
        quarantined=0,
        ended=said.reason,
        indexed=clipped(incarnation.indexed, end, was),
        cut_at=end,
        cut_by=entry,
    )
    rest = replace(
        incarnation,
        commit_offset=end,
        log_end=log_end,
        segments=tuple(kept),
        gaps=gaps_kept,
        indexed=clipped(incarnation.indexed, 0, end),
        passes=tuple(replace(one, end=min(one.end, end)) for one in incarnation.passes),
        lineage=moved(incarnation.lineage, end),
    )
    return tail, rest


def head_of(part: Part, end: QueueOffset, head: Head) -> Part | None:
    """The items of a part before ``end``; None when the head is not of this part, or cannot be.

    Its time bounds stay those of the whole: they still bound what is left.
    """
    count = end - part.queue_offset
    fits = (
        0 < count < part.count
        and 0 <= head.holes <= min(count, part.holes)
        and part.holes - head.holes <= part.count - count
        and (head.log_offset, head.queue_offset) == (part.log_offset, part.queue_offset)
        and head.of_holes == part.holes
        and 0 <= head.log_bytes <= part.log_bytes
    )
    if not fits:
        return None
    timed = count > head.holes
    return replace(
        part,
        log_bytes=head.log_bytes,
        log_gone=0,
        count=count,
        holes=head.holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
        last=head.last,
    )


def rest_of(part: Part, head: Part) -> Part:
    """What is behind the head of a part."""
    count, holes = part.count - head.count, part.holes - head.holes
    timed = count > holes
    return replace(
        part,
        log_offset=LogOffset(head.log_end),
        queue_offset=QueueOffset(head.queue_end),
        log_bytes=part.log_bytes - head.log_bytes,
        count=count,
        holes=holes,
        store_min_ms=part.store_min_ms if timed else -1,
        store_max_ms=part.store_max_ms if timed else -1,
        records_at=part.records_at + head.log_bytes,
        items_at=part.items_at + head.count,
    )


def state_word(incarnations: Sequence[Incarnation], number: int) -> str:
    """What has become of an incarnation of a queue: ``truncated``, ``ended`` or ``present``."""
    if is_tail(incarnations, number):
        return "truncated"
    return "ended" if incarnations[number].ended else "present"


def is_tail(incarnations: Sequence[Incarnation], number: int) -> bool:
    """Whether the incarnation at ``number`` is what a broker truncated, and its incarnation went on without it."""
    return (
        number + 1 < len(incarnations)
        and incarnations[number + 1].number == incarnations[number].number
    )


def _cut_gaps(gaps: Sequence[Gap], end: QueueOffset) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
    kept = tuple(replace(gap, end=min(gap.end, end)) for gap in gaps if gap.start < end)
    gone = tuple(replace(gap, start=max(gap.start, end)) for gap in gaps if gap.end > end)
    return kept, gone


# -- the machine ------------------------------------------------------------------------------------

T = TypeVar("T")

__all__ = [
    "Bundle",
    "Gap",
    "Incarnation",
    "Part",
    "Parts",
    "Segment",
    "TierMachine",
    "TierState",
    "queue_action",
]


class TierMachine:
    """What the tier's actions (``tiered.log.actions``) mean. Stateless; see ``tiered.journal.replay.Machine``."""

    def initial(self) -> TierState:
        """An empty tier."""
        return TierState()

    @property
    def data_roots(self) -> tuple[str, ...]:
        return DATA_ROOTS

    def is_data(self, key: str) -> bool:
        return maker_of(key) is not None

    def epoch(self, state: TierState) -> int:
        """The epoch."""
        return state.epoch

    def history(self, state: TierState) -> str:
        return state.history

    def apply(self, state: TierState, entry: Entry) -> TierState:
        """One step of history; see ``tiered.journal.replay.Machine``."""
        work = _Work(state, dict(state.queues), entry)
        said = [*map(read_action, entry.actions)]
        for one in said:
            _HANDLERS[type(one)](work, one)
        if any(isinstance(one, Expire) for one in said):
            work.drop_useless_indexes()
        return replace(work.state, queues=work.queues, updated_ms=entry.time_ms)

    def dump(self, state: TierState) -> Any:  # noqa: ANN401 (JSON values)
        """For a checkpoint."""
        return {**self._dump_without_queues(state), "queues": [*_queue_rows(state)]}

    def _dump_without_queues(self, state: TierState) -> dict[str, Any]:
        parts = encode_columns(
            parts for one in state.placed() for parts in one.incarnation.tables()
        )
        document = {**_form().encode(state), "parts": parts}
        if not state.paused:
            del document["paused"]  # so that versions that know nothing of it read the checkpoint
        return document

    def dump_chunks(self, state: TierState) -> Iterator[bytes]:
        """For a checkpoint: a few queues at a time."""
        rows = {"queues": _queue_rows(state)}
        document = {**self._dump_without_queues(state), **rows}
        for number, (name, value) in enumerate(sorted(document.items())):
            yield (b"," if number else b"{") + json_text(name) + b":"
            yield from _list_chunks(value) if name in rows else (json_text(value),)
        yield b"}"

    def load(self, document: Any) -> TierState:  # noqa: ANN401 (JSON values)
        """Undo ``dump``."""
        return _state_of(sorted(dict(document).items()))

    def load_text(self, text: str) -> TierState:
        return _state_of(json_members(text, "queues"))


def _form() -> JsonForm[TierState]:
    """Of a state, but for its parts, and for its queues, which may come and go one at a time."""
    return as_object(TierState, queues=JsonForm(lambda queues: queues, lambda queues: queues))


def _state_of(members: Iterable[tuple[str, Any]]) -> TierState:
    """A state of what it says, by name; queues may come one at a time: all at once, a million segments take 160 MiB."""
    found: dict[str, Any] = {"paused": []}
    parts = _Taker(Parts.of(()))
    for name, value in members:
        if name == "parts":
            parts = _Taker(decode_columns(value))
        elif name == "queues":
            found[name] = _queues_of(value, parts.take)
        else:
            found[name] = value
    parts.finish()
    return _form().decode(found)


def _queues_of(
    rows: Iterable[Any], take: Callable[[int], Parts]
) -> dict[MessageQueue, tuple[Incarnation, ...]]:
    found: dict[MessageQueue, tuple[Incarnation, ...]] = {}
    form = incarnation_form(take)
    for topic, queue_id, incarnations in rows:
        if type(topic) is not str or type(queue_id) is not int or not incarnations:
            raise ValueError(
                f"the queue {topic!r:.80}/{queue_id!r:.80} has no incarnation or no name"
            )
        found[MessageQueue(topic, queue_id)] = tuple(map(form.decode, incarnations))
    return found


class _Taker:
    """Gives parts to segments in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._at = 0

    def take(self, count: int) -> Parts:
        start, self._at = self._at, self._at + count
        if self._at > len(self._parts):
            raise ValueError("segments have more parts than there are")
        return self._parts[start : self._at]

    def finish(self) -> None:
        if self._at != len(self._parts):
            raise ValueError("there are more parts than segments have")


def require_known(entry: Entry, where: str) -> None:
    """Refuse an entry that says what this version does not understand, when it cannot be replayed."""
    try:
        for one in map(read_action, entry.actions):
            list(map(named_sections, getattr(one, "bundles", ())))
    except (UnknownActionError, LookupError, TypeError, ValueError) as error:
        raise OtherVersionError(
            f"journal entry {entry.number} has another form: {error}", where=where
        ) from error


@dataclass(slots=True)
class _Work:
    """A state under construction, private to one ``apply``."""

    state: TierState
    queues: dict[MessageQueue, tuple[Incarnation, ...]]
    entry: Entry

    @property
    def is_present(self) -> bool:
        """The entry was written in the present epoch."""
        return self.entry.epoch == self.state.epoch > 0

    @property
    def may_mend(self) -> bool:
        """The entry is of the present writer, or of a guest."""
        return self.is_present or self.entry.epoch == 0

    def refuse(self) -> None:
        self.state = replace(self.state, refused_parts=self.state.refused_parts + 1)

    def drop_useless_indexes(self) -> None:
        kept = tuple(one for one in self.state.indexes if is_of_use(one, self.queues))
        self.state = replace(self.state, indexes=kept)

    def present(self, queue: MessageQueue, number: int) -> Incarnation | None:
        """The present incarnation of a queue, if it is this one."""
        incarnations = self.queues.get(queue)
        incarnation = incarnations[-1] if incarnations else None
        return incarnation if incarnation and incarnation.number == number else None

    def put(self, queue: MessageQueue, incarnation: Incarnation) -> None:
        incarnations = self.queues.get(queue, ())
        self.queues[queue] = (*incarnations[:-1], incarnation)


def _epoch(work: _Work, said: Epoch) -> None:
    if said.epoch > work.state.epoch:
        work.state = replace(
            work.state,
            epoch=said.epoch,
            history=work.state.history or f"{work.entry.writer}-{work.entry.time_ms}",
            writer=work.entry.writer,
            holder=said.holder,
        )


def _meta(work: _Work, said: Meta) -> None:
    if work.is_present:
        work.state = replace(work.state, store=said.store)


def _parts(work: _Work, said: PartsNamed) -> None:
    for row in said.bundles:
        named = named_sections(row)
        for number, place in enumerate(named.places()):
            _part(work, named, number, place)


def _part(work: _Work, named: NamedSections, number: int, place: SectionSpan) -> None:
    """Take one part."""
    queue, which = named.queues[number], named.incarnations[number]
    incarnation = work.present(queue, which) or _first_incarnation(
        work, queue, which, place.queue_offset
    )
    fits = incarnation is not None and place.goes_on(incarnation.commit_offset, incarnation.log_end)
    part = named.parts[number : number + 1]
    segments = _placed(work, place, part, incarnation) if incarnation and fits else None
    if incarnation is None or segments is None or not work.is_present:
        work.refuse()
        return
    work.put(queue, incarnation.grown(segments, place.queue_end, place.log_end))


def _placed(
    work: _Work, place: SectionSpan, part: Parts, incarnation: Incarnation
) -> tuple[Segment, ...] | None:
    """The segments with the part in its place; None when it names a segment where it cannot lie."""
    last = incarnation.segments[-1] if incarnation.segments else None
    continues = last and not last.sealed and last.parts.queue_end == place.queue_offset
    if last and continues and last.base_offset == place.segment:
        grown = Segment(
            last.base_offset,
            last.base_queue_offset,
            last.created_ms,
            parts=last.parts.followed_by(part),
        )
        return (*incarnation.segments[:-1], grown)
    # Behind a gap only a new segment may come. (Of two segments with one base the first has nothing but holes.)
    if place.segment != place.log_offset:
        return None
    rolled = (*incarnation.segments[:-1], replace(last, sealed=True)) if last else ()
    fresh = Segment(place.segment, place.queue_offset, work.entry.time_ms, parts=part)
    return (*rolled, fresh)


def _first_incarnation(
    work: _Work, queue: MessageQueue, incarnation: int, start: QueueOffset
) -> Incarnation | None:
    """A queue that the journal has never met begins where its first part (or gap) begins."""
    if queue in work.queues or incarnation != 0:
        return None
    return Incarnation(0, start, start)


def _compacted(work: _Work, said: Compacted) -> None:
    before = dict(work.queues)
    if not _replace_all(work, said) or not _note_passes(work, said.passes):
        work.queues = before


def _note_passes(work: _Work, passes: Iterable[IncarnationPasses]) -> bool:
    for one in passes:
        at, incarnations = one.position, work.queues.get(one.queue, ())
        if not 0 <= at < len(incarnations):
            return False
        if one.passes and one.passes[-1].end > incarnations[at].commit_offset:
            return False
        incarnation = replace(incarnations[at], passes=one.passes)
        work.queues[one.queue] = (*incarnations[:at], incarnation, *incarnations[at + 1 :])
    return True


def _replace_all(work: _Work, said: SectionsMerged | Compacted) -> bool:
    """Put each part in the place of its run; whether all of them fit."""
    compacts = isinstance(said, Compacted)
    bundles = list(map(named_sections, said.bundles))
    count = sum(len(named.parts) for named in bundles)
    incarnations, runs = (
        decode_numbers(text, count).tolist() for text in (said.positions, said.runs)
    )
    at, all_fit = 0, True
    for named in bundles:
        for number, part in enumerate(named.parts):
            place = incarnations[at], runs[at]
            all_fit &= _merge_one(work, named, number, part, place, compacts=compacts)
            at += 1
    return all_fit


def _merge_one(
    work: _Work,
    named: NamedSections,
    number: int,
    part: Part,
    place: tuple[int, int],
    *,
    compacts: bool,
) -> bool:
    at, was = place
    queue, segment = named.queues[number], named.segments[number]
    incarnations = work.queues.get(queue, ())
    incarnation = named.incarnations[number]
    if at >= len(incarnations) or incarnations[at].number != incarnation or not work.may_mend:
        return False
    if is_tail(incarnations, at) != named.truncated[number]:
        return False  # truncated since: its section, from which a lost journal is rebuilt, does not say so
    made = replace_run(
        incarnations[at], part, segment, was, with_open=work.is_present, compacts=compacts
    )
    if made is not None:
        work.queues[queue] = (*incarnations[:at], made, *incarnations[at + 1 :])
    return made is not None


def _seal(work: _Work, said: Seal) -> None:
    incarnation = work.present(said.queue, said.incarnation)
    last = incarnation.segments[-1] if incarnation and incarnation.segments else None
    if incarnation and last and last.base_offset == said.segment and work.is_present:
        segments = (*incarnation.segments[:-1], replace(last, sealed=True))
        work.put(said.queue, replace(incarnation, segments=segments))


def _gap(work: _Work, said: GapMet) -> None:
    gap = Gap(said.start, said.end, said.reason)
    incarnation = work.present(said.queue, said.incarnation) or _first_incarnation(
        work, said.queue, said.incarnation, gap.start
    )
    fits = (
        incarnation is not None and gap.start == incarnation.commit_offset and gap.end > gap.start
    )
    if incarnation is None or not fits or not work.is_present:
        work.refuse()
        return
    fresh = (
        not incarnation.segments
    )  # nothing to read before the gap, so the queue begins behind it
    work.put(
        said.queue,
        replace(
            incarnation,
            gaps=(*incarnation.gaps, gap),
            commit_offset=gap.end,
            min_offset=gap.end if fresh else incarnation.min_offset,
            lineage=moved(incarnation.lineage, gap.end),
        ),
    )


def _lineage(work: _Work, said: LineageGrown) -> None:
    incarnation = work.present(said.queue, said.incarnation)
    if incarnation is None or not work.is_present:
        work.refuse()
        return
    work.put(said.queue, after_grown(incarnation, said))


def _truncate(work: _Work, said: Truncate) -> None:
    incarnation = work.present(said.queue, said.incarnation)
    if incarnation is None or not work.is_present:
        work.refuse()
    elif divided := cut(incarnation, said, work.entry.number):
        work.queues[said.queue] = (*work.queues[said.queue][:-1], *divided)


def _expire(work: _Work, said: Expire) -> None:
    incarnations, at = work.queues.get(said.queue, ()), said.position
    if not 0 <= at < len(incarnations) or incarnations[at].number != said.incarnation:
        return
    left = expired(incarnations[at], said, with_open=work.is_present)
    if left and work.may_mend:
        work.queues[said.queue] = (*incarnations[:at], left, *incarnations[at + 1 :])


def _index(work: _Work, said: Indexed) -> None:
    if work.may_mend and (changed := after_index(work.state.indexes, work.queues, said)):
        work.state = replace(work.state, indexes=changed[0])
        work.queues.update(changed[1])


def _pause(work: _Work, said: Pause) -> None:
    if work.may_mend:
        others = tuple(one for one in work.state.paused if one.topic != said.topic)
        is_known = len(others) < len(work.state.paused)
        if said.is_paused and not is_known:
            work.state = replace(
                work.state, paused=(*others, PausedTopic(said.topic, work.entry.time_ms))
            )
        elif not said.is_paused:
            work.state = replace(work.state, paused=others)


def _timer(
    after: Callable[[TimerFacts, T, Bounds], TimerFacts | None], work: _Work, said: T
) -> None:
    def bounds(hour: int) -> tuple[int, int]:
        incarnations = work.queues.get(hour_queue(hour))
        return (
            (incarnations[-1].min_offset, incarnations[-1].commit_offset)
            if incarnations
            else (0, 0)
        )

    is_take = isinstance(said, TimerTake)
    changed = after(work.state.timers, said, bounds) if work.is_present or not is_take else None
    if changed is not None:
        work.state = replace(work.state, timers=changed)
    elif is_take:
        work.refuse()


def _quarantine(work: _Work, said: Quarantine) -> None:
    incarnation = work.present(said.queue, said.incarnation)
    if incarnation and work.is_present:
        work.put(said.queue, replace(incarnation, quarantined=incarnation.quarantined + said.count))


def _begin_anew(work: _Work, said: BeginAnew) -> None:
    incarnations = work.queues.get(said.queue, ())
    number = incarnations[-1].number + 1 if incarnations else 0
    if incarnations and said.incarnation == 0:
        return  # it was to say where the queue begins, and a part was faster
    if said.incarnation != number or not work.is_present:
        work.refuse()
        return
    ended = (
        (*incarnations[:-1], replace(incarnations[-1], ended=said.reason)) if incarnations else ()
    )
    work.queues[said.queue] = (*ended, Incarnation(number, said.start, said.start))


_HANDLERS: dict[type[Any], Callable[[_Work, Any], object]] = {
    Epoch: _epoch,
    Meta: _meta,
    PartsNamed: _parts,
    SectionsMerged: _replace_all,
    Compacted: _compacted,
    Seal: _seal,
    GapMet: _gap,
    Truncate: _truncate,
    Expire: _expire,
    Quarantine: _quarantine,
    BeginAnew: _begin_anew,
    Indexed: _index,
    Pause: _pause,
    LineageGrown: _lineage,
    TimerTake: partial(_timer, after_take),
    TimerRunBegins: partial(_timer, after_run),
    TimerHanded: partial(_timer, after_handed),
    TimerCancel: partial(_timer, after_cancel),
}


def _queue_rows(state: TierState) -> Iterator[list[Any]]:
    form = incarnation_form(lambda _count: Parts.of(()))
    for queue, incarnations in state.queues.items():
        yield [*queue, [*map(form.encode, incarnations)]]


_VALUES_A_CHUNK = 16
"""One at a time costs half as much again; many would be much text at once where queues have many segments."""


def _list_chunks(values: Iterable[Any]) -> Iterator[bytes]:
    """A list as JSON text, a few values a chunk."""
    left = iter(values)
    yield b"["
    for number, some in enumerate(iter(lambda: list(islice(left, _VALUES_A_CHUNK)), [])):
        yield (b"," if number else b"") + json_text(some)[1:-1]
    yield b"]"
