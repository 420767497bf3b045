"""Gives timers back ahead of time: hour by hour, in due order, each once as far as the target can tell.

Overview: an hour's file is *swept* when the near window reaches the hour: what it holds by then is sorted by due time and
offset, and given to the target batch by batch; behind each batch an entry says how far the sweep is. What comes into the
file meanwhile is the next sweep. Hours that are late (nobody ran) come first, in order.

::

    waiting --(near window reaches the hour)--> sweep declared --batch, entry--> ... --> handed over --(grace)--> deleted
       |                                             ^
       +-- cancelled (until the sweep is declared)   +-- a later run goes on at the last entry

Exactly once: an entry is behind the batch that it speaks of, so a run that ends between them leaves one batch of which
nobody knows whether the target has it. The next run asks the target which of that batch it has (``Target.has``); a target
that cannot tell gets it again. A sweep's order is made of the file alone, and each entry says how large the batch behind it
is, so both runs mean the same one: a target may take it in any order, and nothing behind it is asked for. Where the file has
lost messages since, nobody knows which those were that the entry counts: the target is asked for all that may be left.

Two runs: each takes the next run number by an entry; an entry of an earlier run is refused by replay, and its run ends with
``FencedError``. The lease keeps polite ones apart; a run that has not been able to renew it gives nothing more away until it
is renewed, which shows that nobody had it meanwhile. A run that was paused in the middle of a batch may still finish that
batch when it wakes.

Never early: nothing here waits for due times. The target delivers, by its own clock.

Retries and errors: a batch whose outcome is unknown is asked about, and given again, after a pause; a message that the
target refuses for good is named in the log and in the journal, and stays in its file, which is kept for it. What a file has
lost for good (a gap) holds up nothing.

Damage: a damaged block holds back its own messages (``TimerHour.held``), and nothing else. All others of its hour are handed
over. What is held is looked at again by each run, and when the file's parts change (a repair): what can be read then is
handed over, once, since the target is asked for each of it first, in whichever run or sweep it may have been given. Where
damage turns up in the middle of a sweep that an earlier run began, nobody knows how much of what that run gave was of the
damaged messages: the target is asked for all that is left. All of it is counted and told. Only where the journal
contradicts itself an hour is left alone whole.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.lazy_dataclass import dataclass
from backends.wrapping import Prices
from tiered.crashpoints import reached
from tiered.errors import DataError, FencedError, StoreUnavailableError
from tiered.journal.append import CHECKPOINT_ENTRIES
from tiered.log.actions import action_of
from tiered.log.ranges import Ranges, clipped, count_of, is_in, joined, ranges_at, without
from tiered.log.timers import (
    ALL_LEFT,
    HOUR_MS,
    FactsCopy,
    HandedRow,
    TimerHanded,
    TimerRunBegins,
    hour_queue,
)
from timer.dequeue import first_left

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.journal.append import JournalWriter
    from tiered.log.parts import Incarnation, TierState
    from tiered.log.timers import TimerHour
    from timer.dequeue import DueBlock, DueItems, DueMessage, HourRow, TimerReader
    from timer.records import Longs

_LOG = logging.getLogger("tiered.timer")
BATCH = 4096
"""Messages between two entries, at most."""
BATCH_BYTES = 8 * 1024 * 1024
_ASKED_MAX = 1 << 16
_ASKED_BYTES_MAX = 64 * 1024 * 1024
"""Where all that is left of a sweep may have been given (after a rebuild), so much is held and asked for in one go."""


def require_ours(is_ours: Callable[[], bool]) -> None:
    """Give nothing away while another run may have begun.

    Raises:
        StoreUnavailableError: It may. The lease's keeper finds out; as soon as it is renewed, calling again goes on.
    """
    if not is_ours():
        raise StoreUnavailableError(
            "our lease could not be renewed in time: another run may have begun",
            do="it is tried again when the tier answers",
        )


class Target(Protocol):
    """Where timers are given to."""

    def mark(self) -> Mapping[str, Any]:
        """Which target this is, and how far it is; stands in the journal.

        Of a target that is several servers ``parties`` are their names: none gets anything before an entry names it.
        """
        ...

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> Sequence[bool]:
        """Which of these messages it has got since ``mark``, as far as it can tell."""
        ...

    def give(self, messages: Sequence[DueMessage]) -> Sequence[int]:
        """Take messages, in due order; they are safe there when this returns.

        Returns:
            Queue offsets, in the hour's file, of those that it refused for good.

        Raises:
            StoreUnavailableError: It did not take them all; which ones nobody knows.
        """
        ...


@dataclass(slots=True)
class HandCounters:
    """What was done."""

    handed: int = 0  # messages given
    dropped: int = 0  # delete marks, and messages that were cancelled
    found: int = 0  # messages that the target had already, from a batch with an unknown outcome
    refused: int = 0  # messages that the target refuses for good
    missing: int = 0  # messages that their file has lost
    held: int = 0  # messages that cannot be read for damage, and are held back until they can
    damaged: int = 0  # hours whose file has damage
    entries: int = 0  # journal entries
    retries: int = 0  # batches that had to be given again


@dataclass(slots=True)
class _Sweep:
    hour: int
    done: int
    end: int
    rank: int
    items: DueItems
    unsure: (
        tuple[int, int] | None
    )  # messages and bytes, at most, of a batch that may have been given
    noted: int = 0  # what the journal says of ``rank``: it never goes back
    held: Ranges = ()

    @property
    def count(self) -> int:
        """How many items it should have."""
        return HandedRow(self.hour, self.done, self.end, 0, held=self.held).sweep_items

    def row(self, high: int, refused: tuple[int, ...] = ()) -> HandedRow:
        """What is noted when the items below ``high`` are handed over: behind the last, all that the file should have."""
        rank = self.count if high >= len(self.items) else max(self.noted, high)
        return HandedRow(self.hour, self.done, self.end, rank, refused, self.held)

    @property
    def is_unsure_beyond(self) -> bool:
        """More than a batch may have been given."""
        return self.unsure is not None and self.unsure[0] > _ASKED_MAX


@dataclass(slots=True)
class _Freeing:
    """What was held back of an hour, and can be read now."""

    hour: int
    items: DueItems  # all of its file
    places: Longs  # those of them that are held, in due order
    at: int = 0  # so many of these are done with

    def batch(self) -> Longs:
        """The next; what is due at one time is asked for together, since it may be told apart by number only."""
        left = self.places[self.at : self.at + _ASKED_MAX]
        fits = int(self.items.sizes[left].cumsum().searchsorted(_ASKED_BYTES_MAX, side="right"))
        last = self.items.dues[left[max(1, fits) - 1]]
        dues = self.items.dues[self.places]
        return self.places[self.at : int(dues.searchsorted(last, side="right"))]


@dataclass(slots=True)
class HandOver:
    """See the module. For one thread."""

    reader: TimerReader  # reads the files
    journal: JournalWriter[TierState]  # of the timers; takes no epoch
    target: Target  # where they go
    near_ms: int  # an hour is swept so long before it begins
    clock: Clock  # time
    is_ours: Callable[[], bool] = lambda: True
    """Whether our lease is valid still, by a clock that never goes back."""
    batch: int = BATCH  # messages between two entries, at most
    counters: HandCounters = field(default_factory=HandCounters)
    run: int = 0
    _hours: deque[int] = field(default_factory=deque)
    _looked: int = 0  # the journal's entry when ``_hours`` was made
    _sweep: _Sweep | None = None
    _freeing: _Freeing | None = None
    _again: deque[int] = field(default_factory=deque)  # hours of which something is held
    _tried: dict[int, Incarnation] = field(default_factory=dict)  # and their files, when last read
    _told: dict[int, Ranges] = field(default_factory=dict)  # held of an hour, as counted
    _copy: FactsCopy | None = None
    _damaged: dict[int, int] = field(default_factory=dict)  # hours, and where their file ended
    _since: Mapping[str, Any] = field(
        default_factory=dict
    )  # the target's mark before what is unsure

    def begin(self, holder: Mapping[str, Any]) -> None:
        """Begin a run: earlier ones are over."""
        self.journal.catch_up()
        while True:
            self.run = self.journal.state.timers.run.number + 1
            self.journal.append([action_of(TimerRunBegins(self.run, holder))])
            if self.journal.state.timers.run.number == self.run:
                self._look()
                return

    def refresh(self) -> None:
        """Look at the journal."""
        self.journal.catch_up()
        self._check(self.journal.state)
        if self.journal.number != self._looked:
            self._look()

    def step(self) -> int:
        """Give one batch; how many items of a sweep that was, 0 when nothing is to be given now.

        Raises:
            FencedError: Another run has begun.
            StoreUnavailableError: The tier, or the target, does not answer, or our lease may be another's; calling again
                goes on.
        """
        if self._sweep is None and (freed := self._free()):
            return freed
        sweep = self._sweep = self._sweep or self._next_sweep()
        if sweep is None:
            return 0
        high = self._high(sweep)
        messages = sweep.items.messages(sweep.rank, high)
        dropped = high - sweep.rank - len(messages)
        unknown = self._not_there(sweep, messages)
        if unknown:
            sweep.unsure = sweep.unsure or (
                self.batch,
                BATCH_BYTES,
            )  # until the entry says otherwise
        refused = self._give(sweep.row(sweep.rank), unknown) if unknown else ()
        is_unsure = sweep.is_unsure_beyond and high < len(sweep.items)  # what follows as well
        since = self._since if is_unsure else self._marked(sweep.hour)
        self._say(sweep.row(high, refused), since)
        self._count(messages, unknown, refused, dropped)
        stepped, sweep.rank = max(1, high - sweep.rank), high
        sweep.unsure = sweep.unsure if is_unsure else None
        if high >= len(sweep.items):
            self._tell_missing(sweep)
            self.close()
        return stepped

    def _count(
        self,
        messages: Sequence[DueMessage],
        given: Sequence[DueMessage],
        refused: Sequence[int],
        dropped: int,
    ) -> None:
        reached("timers-handed")
        self.counters.dropped += dropped
        self.counters.found += len(messages) - len(given)
        self.counters.refused += len(refused)
        self.counters.handed += len(given) - len(refused)

    def _not_there(self, sweep: _Sweep, messages: Sequence[DueMessage]) -> Sequence[DueMessage]:
        """What of a batch is to be given: all of it, unless an earlier try may have given some."""
        if sweep.unsure is None or not messages:
            return messages
        has = self.target.has(messages, self._since)
        return [one for one, known in zip(messages, has, strict=True) if not known]

    def _tell_missing(self, sweep: _Sweep) -> None:
        missing = sweep.count - len(sweep.items)
        if missing:
            self.counters.missing += missing
            _LOG.error(
                "the file of hour %d has lost %d of %d messages; the others are handed over",
                *(sweep.hour, missing, sweep.end - sweep.done),
            )

    def _tell_held(self, hour: int, items: DueItems) -> None:
        """Count what is lost of what was read, and name the damage."""
        known = self._told.get(hour, ())
        told = self._told[hour] = joined((*known, *items.lost))
        fresh = count_of(told) - count_of(known)
        if not fresh:
            return
        self.counters.damaged += not known and hour not in self._damaged
        self.counters.held += fresh
        more = f" and {len(items.errors) - 1} parts more" if len(items.errors) > 1 else ""
        _LOG.error(
            "%d messages of hour %d are held back until their blocks, which are damaged, can be read"
            " (`tiered verify URL --timers --deep --repair`); the others are handed over: %s%s",
            *(fresh, hour, items.errors[0] if items.errors else "", more),
        )

    # -- what was held back ---------------------------------------------------------------------

    def _free(self) -> int:
        """Hand over some of what was held back, as far as it can be read now; of how many items that disposes."""
        freeing = self._freeing = self._freeing or self._next_freeing()
        if freeing is None:
            return 0
        items, some = freeing.items, freeing.batch()
        facts = self._facts(freeing.hour)[0]
        messages = items.some(some[~items.dropped[some]])
        unknown = self._not_given(freeing, facts, some, messages)
        held = facts.held
        row = HandedRow(freeing.hour, facts.done, facts.end, facts.rank, held=held)
        refused = self._give(row, unknown) if unknown else ()
        for low, high in ranges_at(np.sort(items.offsets[some])):
            held = without(held, low, high)
        self._say(replace(row, refused=refused, held=held), self._marked(freeing.hour))
        self._count(messages, unknown, refused, len(some) - len(messages))
        freeing.at += len(some)
        if freeing.at >= len(freeing.places):
            self._close_freeing()
        return len(some)

    def _not_given(
        self, freeing: _Freeing, facts: TimerHour, some: Longs, messages: DueBlock
    ) -> Sequence[DueMessage]:
        """What the target has not got of these, in whatever sweep that may have been.

        It is asked for what the file has else of these due times as well, and first: where two have one id and due time, it
        is known that the others were given.
        """
        if not len(messages):
            return messages
        items = freeing.items
        given = np.isin(items.dues, items.dues[some]) & ~items.dropped
        given &= ~is_in(items.offsets, facts.held) & ~np.isin(items.offsets, facts.refused)
        others = items.some(np.flatnonzero(given))
        has = self.target.has([*others, *messages], self._of_no_moment())[len(others) :]
        return [one for one, known in zip(messages, has, strict=True) if not known]

    def _next_freeing(self) -> _Freeing | None:
        """The next hour of which something that was held can be read; none while a sweep was left behind in its midst."""
        while self._again and not self._is_amid():
            hour = self._again[0]
            facts, incarnation = (
                self._facts(hour)[0],
                self.journal.state.incarnation(hour_queue(hour)),
            )
            if not facts.held or incarnation is None or self._tried.get(hour) is incarnation:
                self._again.popleft()
                continue
            items, is_held = self.reader.load_held(hour, self.journal.state)
            lost = tuple(
                pair for low, high in facts.held for pair in clipped(items.lost, low, high)
            )
            if is_held.any():
                self._since = self.journal.state.timers.run.target
                return _Freeing(hour, items, np.flatnonzero(is_held))
            items.close()
            self._tried[hour] = incarnation
            items.lost = lost
            self._tell_held(hour, items)
            if lost != facts.held:
                self._say_gone(hour, facts, lost)
        return None

    def _say_gone(self, hour: int, facts: TimerHour, lost: Ranges) -> None:
        """What was held is not in the file any more: it was given up, or rebuilt without."""
        count = count_of(facts.held) - count_of(lost)
        self.counters.missing += count
        _LOG.error("the file of hour %d has lost %d messages that were held back", hour, count)
        row = HandedRow(hour, facts.done, facts.end, facts.rank, held=lost)
        self._say(row, self._marked(hour))

    def _is_amid(self) -> bool:
        hour = self._first()
        return hour is not None and self._facts(hour)[0].sweep_items > 0

    def _of_no_moment(self) -> dict[str, Any]:
        """A mark that says who may have something, and not since when: of all that they have."""
        parties = {"parties": of} if (of := self._since.get("parties")) else {}
        return {**parties, "batch": [*ALL_LEFT]}

    def _close_freeing(self) -> None:
        if self._freeing is not None:
            self._freeing.items.close()
        self._freeing = None

    # -- giving ---------------------------------------------------------------------------------

    def _give(self, row: HandedRow, messages: Sequence[DueMessage]) -> tuple[int, ...]:
        """Give messages; ``row`` is how far it is before that."""
        require_ours(self.is_ours)
        self._note_parties(row)
        reached("timers-giving")
        try:
            refused = tuple(self.target.give(messages))
        except StoreUnavailableError:
            self.counters.retries += 1
            raise
        reached("timers-given")
        return refused

    def _note_parties(self, row: HandedRow) -> None:
        """Have it noted who may get something of this batch, so that the next run knows whom to ask."""
        known, now = set(self._since.get("parties", ())), set(self.target.mark().get("parties", ()))
        if not now <= known:
            since = {**self._since, "parties": sorted(known | now)}
            self._say(row, since)

    def _high(self, sweep: _Sweep) -> int:
        """Where the next batch ends; one that may have been given ends where it did then."""
        count_max, bytes_max = sweep.unsure or (self.batch, BATCH_BYTES)
        if sweep.is_unsure_beyond:
            count_max, bytes_max = _ASKED_MAX, _ASKED_BYTES_MAX
        most = min(sweep.rank + count_max, len(sweep.items))
        if most <= sweep.rank:
            return sweep.rank  # nothing is left of what the file has
        sizes = sweep.items.sizes[sweep.rank : most].cumsum()
        fits = int(sizes.searchsorted(bytes_max, side="right"))
        high = min(most, sweep.rank + max(1, fits))
        if sweep.is_unsure_beyond:  # what is told apart by number only has to be asked for together
            dues = sweep.items.dues
            high = int(dues.searchsorted(dues[high - 1], side="right"))
        return high

    def _marked(self, hour: int) -> Mapping[str, Any]:
        mark = {**self.target.mark(), "batch": [self.batch, BATCH_BYTES], "hour": hour}
        facts = self.journal.state.timers.hours
        others = [facts[one] for one in self._damaged if one != hour and one in facts]
        if any(one.done < one.end for one in others) or any(one.held for one in facts.values()):
            # Who may have something of what was left alone, or held back, is asked when it goes on.
            mark["parties"] = sorted({*mark.get("parties", ()), *self._since.get("parties", ())})
        return mark

    def _say(self, row: HandedRow, since: Mapping[str, Any]) -> None:
        """Append an entry. Only then ``since`` holds: until then what is unsure lies behind the mark before."""
        self.journal.append([action_of(TimerHanded(self.run, (row,), since))], check=self._check)
        self._since = since
        self.counters.entries += 1
        self.journal.write_checkpoint()

    def _check(self, state: TierState) -> None:
        if state.timers.run.number != self.run:
            holder = state.timers.run.holder
            raise FencedError(
                f"another run hands these timers over: process {holder.get('pid')} on {holder.get('host')}",
                do="stop one of the two",
            )

    def _next_sweep(self) -> _Sweep | None:
        """The sweep that was left behind, if any, else the earliest hour that is to be swept; declared."""
        while (hour := self._first()) is not None:
            facts, commit = self._facts(hour)
            if facts.done < facts.end:
                self._since = self.journal.state.timers.run.target
                left = self._loaded(hour, facts.done, facts.end)
                if left is None:
                    continue
                if self._since.get("hour") != hour or first_left(facts, left) < facts.rank:
                    self._since = self._of_no_moment()
                count_max, bytes_max = self._since.get("batch") or (BATCH, BATCH_BYTES)
                return self._open(hour, left, (int(count_max), int(bytes_max)))
            if hour * HOUR_MS - self.near_ms > self.clock.now_ms():
                return None
            items_or_none = self._loaded(hour, facts.end, commit)
            if items_or_none is not None:
                self._declare(hour, facts.end, commit, items_or_none)
                if self._facts(hour)[0].sweep_items:  # else all of it is held
                    return self._open(hour, items_or_none, None)
                items_or_none.close()
        return None

    def _loaded(self, hour: int, low: int, high: int) -> DueItems | None:
        """What a sweep takes; None: it is damaged, and the hour is left alone until its file grows."""
        try:
            items = self.reader.load(hour, low, high, self.journal.state)
        except DataError as error:  # of no block: what the journal says of it makes no sense
            self.counters.damaged += hour not in self._damaged
            self._damaged[hour] = self._facts(hour)[1]
            self._hours.popleft()
            _LOG.error("hour %d is not handed over, its file is damaged: %s", hour, error)
            return None
        if items.lost:
            self._tell_held(hour, items)
            incarnation = self.journal.state.incarnation(hour_queue(hour))
            if incarnation is not None and not self._facts(hour)[0].held:
                self._tried[hour] = incarnation
        return items

    def _declare(self, hour: int, low: int, high: int, items: DueItems) -> None:
        try:
            held = joined((*self._facts(hour)[0].held, *items.lost))
            self._say(HandedRow(hour, low, high, 0, held=held), self._marked(hour))
        except BaseException:
            items.close()
            raise

    def _first(self) -> int | None:
        """The hour that is next; None: nothing is left."""
        hours = self._hours
        while hours:
            facts, commit = self._facts(hours[0])
            if facts.done < commit:
                return hours[0]
            hours.popleft()
        return None

    def _facts(self, hour: int) -> tuple[TimerHour, int]:
        """What the journal says of an hour, and where its file ends."""
        state = self.journal.state
        incarnation = state.incarnation(hour_queue(hour))
        return state.timers.hours[hour], incarnation.commit_offset if incarnation else 0

    def _look(self) -> None:
        """Find the hours that have something to hand over: a sweep that was left behind first, then by time."""
        self._looked, facts = self.journal.number, self.journal.state.timers.hours
        found = [
            hour
            for hour in facts
            if facts[hour].done < self._facts(hour)[1] != self._damaged.get(hour)
        ]
        self._hours = deque(sorted(found, key=lambda h: (facts[h].done == facts[h].end, h)))
        self._again = deque(sorted(hour for hour in facts if facts[hour].held))

    def _open(self, hour: int, items: DueItems, unsure: tuple[int, int] | None) -> _Sweep:
        """A sweep that is declared: what is cancelled from now on comes too late, and the copy of what is known is there."""
        facts, tier = self.journal.state.timers.hours[hour], self.reader.tier
        items.drop(facts.cancels)
        self._copy = self._copy or FactsCopy(tier.store, tier.prefix)
        try:
            self._copy.keep(self.journal.state.timers, self.journal.number)
        except BaseException:
            items.close()
            raise
        rank = first_left(facts, items)
        held = joined((*facts.held, *items.lost))
        noted = max(0, facts.rank - count_of(held) + count_of(facts.held))
        return _Sweep(hour, facts.done, facts.end, rank, items, unsure, noted, held)

    @property
    def next_ms(self) -> int | None:
        """When the next hour is to be swept; None: nothing is left."""
        hour = self._first()
        return None if hour is None else hour * HOUR_MS - self.near_ms

    def close(self) -> None:
        """Let the sweep under way go; a later step goes on with it."""
        self._close_freeing()
        if self._sweep is not None:
            self._sweep.items.close()
        self._sweep = None


def expected_requests(hours: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """What handing over takes, as the tier's store bills it: requests that write or list, and requests that read.

    Args:
        hours: Of each hour with pending messages their number, their bytes, and in how many parts they lie.
    """
    writes = reads = entries = 0
    for messages, size_bytes, parts in hours:
        batches = max(-(-messages // BATCH), -(-size_bytes // BATCH_BYTES))
        entries += 1 + batches  # the sweep is declared, and each batch noted
        writes += 1  # the copy of what is known
        reads += parts
    reads += bool(writes)  # the copy that was there
    return writes + 2 * entries + 2 * entries // CHECKPOINT_ENTRIES, reads


def cost_document(hours: Sequence[HourRow]) -> dict[str, Any]:
    """What handing over these hours comes to, by the list prices of S3; a run that waits costs more (docs/timers.md)."""
    writes, reads = expected_requests((row.messages, row.size_bytes, row.parts) for row in hours)
    prices, count = Prices(), sum(row.messages for row in hours)
    dollars = (writes * prices.write_per_1000 + reads * prices.read_per_1000) / 1000
    return {
        "writes": writes,
        "reads": reads,
        "dollars": dollars,
        "dollars_per_million": dollars / count * 1e6 if count else 0.0,
    }
