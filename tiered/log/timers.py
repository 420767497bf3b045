"""What a journal says of timers besides their hourly files: what was taken, what was handed over. Pure.

Timers have a journal of their own (``timer/`` below the broker's prefix), of the same machine as a tier's; its queues are
hours: topic ``TIMER_TOPIC``, queue id = the hour of due time since 1970, tag code of an item = due time, ms. Four actions
say the rest (below): what was taken, that a hand-over begins, how far it is, and what is cancelled.

What does not fit changes nothing; a ``TimerTake`` that does not is counted as refused.

A copy of all this lies beside the journal (``FactsCopy``), written before a sweep gives anything, and when something was
taken or cancelled. So where the journal is lost, who rebuilds it knows what was handed over, and what not to take again.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from itertools import chain, compress, count, pairwise
from operator import index, is_not, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from backends.errors import ObjectNotFoundError, PreconditionFailedError
from backends.lazy_dataclass import dataclass
from backends.wrapping import set_own
from tiered.errors import DataError, OtherVersionError
from tiered.journal.entry import as_object, checksum, json_text, open_text, row_of
from tiered.log.ranges import Ranges, clipped, count_of, is_in, joined
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from backends.base import ObjectStore, Version

TIMER_TOPIC: Final = "rmq_sys_timer_hours"
"""Of the hourly files. As long as the names of a broker's two topics of timers, so that a record keeps its size."""
HOUR_MS: Final = 3_600_000
FACTS: Final = "meta/facts"
"""Key of the copy, below the timers' place."""
NEVER: Final = 2**62 - 1
"""A due time that nothing has: nothing was taken."""
ALL_LEFT: Final = (1 << 31, 1 << 40)
"""Messages and bytes of a batch: any of what is left of a sweep may have been given."""

_TRIES: Final = 5

Bounds = Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TimerSource:
    """What was taken of one local queue of timers."""

    start: int  # first queue offset that there was when taking began
    first_end: int
    """One past the last at that time: behind it a rolled message is one that had been seen before."""
    ranges: tuple[tuple[int, int], ...] = ()
    """``(end, due_from)`` in order, from ``start`` on: what is due at or after ``due_from`` was taken."""

    @property
    def position(self) -> int:
        """One past the last queue offset that was looked at."""
        return self.ranges[-1][0] if self.ranges else self.start

    def due_from(self, offset: int) -> int:
        """From which due time on the message at an offset was taken."""
        if not self.ranges or offset >= self.position:
            return NEVER
        return self.ranges[bisect_right(self.ranges, offset, key=itemgetter(0))][1]

    def with_taken(self, low: int, high: int, due_from: int) -> TimerSource:
        """The same when ``[low, high)`` has been taken from ``due_from`` on as well."""
        edges = sorted({self.start, low, high, *(end for end, _ in self.ranges)})
        ranges: list[tuple[int, int]] = []
        for begin, end in pairwise(edges):
            due = self.due_from(begin)
            due = min(due, due_from) if low <= begin < high else due
            if ranges and ranges[-1][1] == due:
                ranges.pop()
            ranges.append((end, due))
        return replace(self, ranges=tuple(ranges))


@dataclass(frozen=True, slots=True)
class TimerHour:
    """One hourly file, besides its parts.

    A file is handed over in sweeps, since it may grow meanwhile: a sweep takes the items from ``done`` to ``end``, but those
    that are held back, in the order of due time and offset; ``rank`` of them are handed over (or dropped). What cannot be
    read is held back, and handed over when it can: the run that does so takes it out of ``held`` afterwards.
    """

    due_min_ms: int  # smallest due time
    due_max_ms: int  # greatest
    marks: int = 0  # delete marks among its items
    done: int = 0  # everything below this queue offset is handed over, but what is held back
    end: int = 0  # where the sweep under way ends; ``done`` when there is none
    rank: int = 0  # how many of the sweep are handed over
    cancels: tuple[int, ...] = ()  # queue offsets that are not to be handed over
    refused: tuple[int, ...] = ()  # queue offsets that the target refused for good, in order
    held: Ranges = ()  # queue offsets below ``end`` that could not be read, and are not handed over

    @property
    def sweep_items(self) -> int:
        """How many items the sweep under way takes; 0 when there is none."""
        return _swept(self.done, self.end, self.held)

    def left(self, commit_offset: int) -> int:
        """How many items are not handed over of a file that ends there, held ones too."""
        return commit_offset - self.end + self.sweep_items - self.rank + count_of(self.held)

    def after(self, row: HandedRow, commit_offset: int) -> TimerHour | None:
        """The same after a step of the hand-over; None when it does not follow."""
        # What turns out damaged in the midst of a sweep may have been counted already.
        rank_min = self.rank - count_of(joined((*self.held, *row.held))) + count_of(self.held)
        sweep_goes_on = (row.done, row.end) == (self.done, self.end) and row.rank >= rank_min
        sweep_begins = self.end == self.done == row.done < row.end
        if not (sweep_goes_on or sweep_begins) or row.end > commit_offset:
            return None
        known, items = joined((*self.held, (row.done, row.end))), row.sweep_items
        if not 0 <= row.rank <= items or joined((*known, *row.held)) != known:
            return None
        if not is_in(np.array(row.refused, np.int64), known).all():
            return None
        refused = tuple(sorted({*self.refused, *row.refused})) if row.refused else self.refused
        new = replace(self, end=row.end, rank=row.rank, refused=refused, held=row.held)
        if row.rank < items:
            return new
        held = is_in(np.array(self.cancels, np.int64), row.held)
        kept = (
            one
            for one, is_held in zip(self.cancels, held, strict=True)
            if one >= row.end or is_held
        )
        return replace(new, done=row.end, rank=0, cancels=tuple(kept))


def _swept(done: int, end: int, held: Ranges) -> int:
    return end - done - count_of(clipped(held, done, end))


@dataclass(frozen=True, slots=True)
class HandedRow:
    """A step of the hand-over of one hour; see ``TimerHour``."""

    hour: int
    done: int
    end: int
    rank: int
    refused: tuple[int, ...] = ()
    held: Ranges = ()

    @property
    def sweep_items(self) -> int:
        """How many items the sweep takes."""
        return _swept(self.done, self.end, self.held)


@dataclass(frozen=True, slots=True)
class TimerRun:
    """The hand-over that is under way, or was the last."""

    number: int = 0  # which; 0: none has been
    holder: Mapping[str, Any] = field(default_factory=dict)  # who, for people
    target: Mapping[str, Any] = field(default_factory=dict)
    """Where to, and how far it was there, as the target tells it."""


@dataclass(frozen=True, slots=True)
class TimerFacts:
    """What a timers' journal says besides its files: what was taken of each source, how far each hour was handed over."""

    sources: Mapping[MessageQueue, TimerSource] = field(default_factory=dict)
    hours: Mapping[int, TimerHour] = field(default_factory=dict)
    run: TimerRun = field(default_factory=TimerRun)


def hour_queue(hour: int) -> MessageQueue:
    """The queue that is the file of an hour (since 1970)."""
    return MessageQueue(TIMER_TOPIC, hour)


# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimersTaken:
    """What was taken of a source in one round; see the module."""

    source: MessageQueue
    start: int
    first_end: int
    low: int
    high: int
    due_from: int


class HourTaken(NamedTuple):
    """What came into the file of an hour."""

    due_min_ms: int  # smallest due time
    due_max_ms: int  # greatest
    marks: int  # delete marks


@dataclass(frozen=True, slots=True)
class TimerTake:
    """Of these sources everything in ``[low, high)`` that is due at or after ``due_from`` is in the files now.

    From the present writer. It stands in the entry that names the parts, so that both hold or neither.
    """

    take: tuple[TimersTaken, ...]
    hours: Mapping[int, HourTaken]  # what came with it


@dataclass(frozen=True, slots=True)
class TimerRunBegins:
    """A hand-over begins, and earlier ones are over. From anybody."""

    run: int  # its number, one more than the last
    holder: Mapping[str, Any]  # who, for people


@dataclass(frozen=True, slots=True)
class TimerHanded:
    """How far the hand-over is. From anybody who has the run."""

    run: int
    handed: tuple[HandedRow, ...]
    target: Mapping[str, Any]


class HourOffset(NamedTuple):
    """An item of an hour's file."""

    hour: int
    offset: int  # queue offset


@dataclass(frozen=True, slots=True)
class TimerCancel:
    """Items that are not to be handed over. From anybody."""

    cancel: tuple[HourOffset, ...]


# -- replay ---------------------------------------------------------------------------------------


def after_take(facts: TimerFacts, said: TimerTake, bounds: Bounds) -> TimerFacts | None:
    """The facts once this was taken; None when it does not fit.

    Args:
        bounds: Queue offsets ``(min, commit)`` of an hour's file, with what the same entry says; (0, 0): there is none.
    """
    sources, hours = dict(facts.sources), dict(facts.hours)
    for one in said.take:
        known = sources.get(one.source, TimerSource(one.start, one.first_end))
        if not known.start <= one.low <= one.high:
            return None
        sources[one.source] = known.with_taken(one.low, one.high, one.due_from)
    for hour, (due_min, due_max, marks) in said.hours.items():
        begin = bounds(hour)[0]  # met for the first time, or again when all of it was handed over
        old = hours.get(hour) or TimerHour(due_min, due_max, done=begin, end=begin)
        low, high = min(old.due_min_ms, due_min), max(old.due_max_ms, due_max)
        hours[hour] = replace(old, due_min_ms=low, due_max_ms=high, marks=old.marks + marks)
    return replace(facts, sources=sources, hours=hours)


def after_run(facts: TimerFacts, said: TimerRunBegins, _bounds: Bounds) -> TimerFacts | None:
    """As ``after_take``."""
    if said.run != facts.run.number + 1:
        return None
    return replace(facts, run=TimerRun(said.run, said.holder, facts.run.target))


def after_handed(facts: TimerFacts, said: TimerHanded, bounds: Bounds) -> TimerFacts | None:
    """As ``after_take``."""
    if said.run != facts.run.number:
        return None
    hours = dict(facts.hours)
    for step in said.handed:
        old = hours.get(step.hour)
        new = old.after(step, bounds(step.hour)[1]) if old else None
        if new is None:
            return None
        hours[step.hour] = new
    return replace(facts, hours=hours, run=replace(facts.run, target=said.target))


def after_cancel(facts: TimerFacts, said: TimerCancel, bounds: Bounds) -> TimerFacts | None:
    """As ``after_take``."""
    hours = dict(facts.hours)
    for hour, offset in said.cancel:
        old, high = hours.get(hour), bounds(hour)[1]
        if old is None or not old.end <= offset < high:
            return None  # handed over, or about to be
        hours[hour] = replace(old, cancels=tuple(sorted({*old.cancels, offset})))
    return replace(facts, hours=hours)


# -- the copy -------------------------------------------------------------------------------------


class FactsCopy:
    """Writes the copy, again and again; for one thread.

    An hour that has not changed since the last time is not made JSON again, and the copy is not read before it is replaced,
    unless another has replaced it meanwhile: so a year of hours costs a sweep no more than its bytes.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._key = store, prefix + FACTS
        self._version: Version | None = None
        self._known: list[TimerHour] = []
        self._texts: list[bytes] = []

    def keep(self, facts: TimerFacts, number: int) -> None:
        """Write it, as of the journal's entry ``number``, unless there is a newer one; another version's stays."""
        text = self._text(facts, number)
        for _ in range(_TRIES):
            if self._version is None:
                present, self._version = _kept(self._store, self._key)
                if present is not None and present[1] > number:
                    self._version = None
                    return  # another has gone on meanwhile
            version, self._version = self._version, None
            with contextlib.suppress(PreconditionFailedError):
                self._version = set_own(self._store, self._key, text, version)
                return

    def _text(self, facts: TimerFacts, number: int) -> bytes:
        """As ``seal_text`` makes it of ``_Kept``."""
        hours, known = list(facts.hours.values()), self._known
        changed = compress(count(), map(is_not, hours, known))
        self._texts += [b""] * (len(hours) - len(known))
        names = list(facts.hours)
        for at in chain(changed, range(len(known), len(hours))):
            self._texts[at] = json_text([names[at], row_of(hours[at])])
        self._known = hours
        rest = as_object(TimerFacts).encode(replace(facts, hours={}))
        line = b'{"format":1,"hours":[%s],"number":%d,"run":%s,"sources":%s}' % (
            b",".join(self._texts[: len(hours)]),
            *(number, json_text(rest["run"]), json_text(rest["sources"])),
        )
        return b"%s\n%08x\n" % (line, checksum(line))


def kept_facts(store: ObjectStore, prefix: str) -> tuple[TimerFacts, int] | None:
    """What the copy says, and of which journal entry; None: there is none, or it is damaged."""
    return _kept(store, prefix + FACTS)[0]


def _kept(store: ObjectStore, key: str) -> tuple[tuple[TimerFacts, int] | None, Version | None]:
    try:
        data, version = store.get_versioned(key)
    except ObjectNotFoundError:
        return None, None
    try:
        document = open_text(data, where=key)
    except DataError:
        return None, version
    try:
        del document["format"]
        number = index(document.pop("number"))
        return (as_object(TimerFacts).decode(document), number), version
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OtherVersionError(
            f"timers' facts have another form: {error!r:.200}", where=key
        ) from error


def mended_facts(
    facts: TimerFacts, files: Mapping[int, tuple[int, int]]
) -> tuple[TimerFacts, list[str]]:
    """What is known of timers, made to fit the files that there are; and what to tell people.

    Args:
        files: Queue offsets ``(min, commit)`` of each hour's file.
    """
    hours, notes = {}, []
    for hour, (low, high) in sorted(files.items()):
        begin_ms, old = hour * HOUR_MS, facts.hours.get(hour)
        if old is None:
            if low == high:
                continue
            old = TimerHour(begin_ms, begin_ms, done=low, end=low)
            notes.append(f"hour {hour}: nobody knows what was handed over; all of it will be")
        done, end = (min(max(one, low), high) for one in (old.done, old.end))
        rank = old.rank if (done, end) == (old.done, old.end) else 0
        cancels, refused = (
            tuple(offset for offset in some if offset < high) for some in (old.cancels, old.refused)
        )
        hours[hour] = TimerHour(  # what came since may be due at any time within, and be marks
            *(begin_ms, begin_ms + HOUR_MS - 1, max(1, old.marks), done, end, rank),
            *(cancels, refused, clipped(old.held, low, end)),
        )
    # Of the sweep under way more than one batch may have been given since: the next run asks for all that is left of it.
    target = {**facts.run.target, "batch": [*ALL_LEFT]} if facts.run.target else {}
    return replace(facts, hours=hours, run=replace(facts.run, target=target)), notes
