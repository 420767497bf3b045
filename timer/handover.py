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
that cannot tell gets it again. A sweep's order is made of the file alone, so both runs mean the same batch.

Two runs: each takes the next run number by an entry; an entry of an earlier run is refused by replay, and its run ends with
``FencedError``. The lease keeps polite ones apart; a run that has not been able to renew it gives nothing more away. A run
that was paused in the middle of a batch may still finish that batch when it wakes.

Never early: nothing here waits for due times. The target delivers, by its own clock.

Retries and errors: a batch whose outcome is unknown is asked about, and given again, after a pause; a message that the
target refuses for good is counted, named in the log, and stays in its file.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tiered.crashpoints import reached
from tiered.errors import FencedError, StoreUnavailableError
from tiered.log.timers import HOUR_MS, HandedRow, handed_action, hour_queue, run_action

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiered.clock import Clock
    from tiered.journal.writer import JournalWriter
    from tiered.log.parts import TierState
    from tiered.log.timers import TimerHour
    from timer.dequeue import DueItems, DueMessage, TimerReader

BATCH = 4096
"""Messages between two entries, at most."""
BATCH_BYTES = 8 * 1024 * 1024


class Target(Protocol):
    """Where timers are given to."""

    def mark(self) -> Mapping[str, Any]:
        """Which target this is, and how far it is; stands in the journal."""
        ...

    def has(self, messages: Sequence[DueMessage], mark: Mapping[str, Any]) -> Sequence[bool]:
        """Which of these messages it has got since ``mark``, as far as it can tell.

        Raises:
            StoreUnavailableError: It does not answer.
        """
        ...

    def give(self, messages: Sequence[DueMessage]) -> int:
        """Take messages, in due order; they are safe there when this returns.

        Returns:
            How many it refused for good.

        Raises:
            StoreUnavailableError: It did not take them all; which ones nobody knows.
        """
        ...


@dataclass(slots=True)
class HandCounters:
    """What was done.

    Attributes:
        handed: Messages given.
        dropped: Delete marks, and messages that were taken back.
        found: Messages that the target had already, from a batch of which nobody knew.
        refused: Messages that the target refuses for good.
        entries: Journal entries.
        retries: Batches that had to be given again.
    """

    handed: int = 0
    dropped: int = 0
    found: int = 0
    refused: int = 0
    entries: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Sweep:
    hour: int
    done: int
    end: int
    rank: int
    items: DueItems
    is_unsure: bool


@dataclass(slots=True)
class HandOver:
    """See the module. For one thread.

    Attributes:
        reader: Reads the files.
        journal: Of the timers; takes no reign.
        target: Where they go.
        near_ms: An hour is swept so long before it begins.
        clock: Time.
        is_ours: Whether our lease is valid still, by a clock that never goes back.
        batch: Messages between two entries, at most.
    """

    reader: TimerReader
    journal: JournalWriter[TierState]
    target: Target
    near_ms: int
    clock: Clock
    is_ours: Callable[[], bool] = lambda: True
    batch: int = BATCH
    counters: HandCounters = field(default_factory=HandCounters)
    run: int = 0
    _hours: deque[int] = field(default_factory=deque)
    _sweep: _Sweep | None = None
    _since: Mapping[str, Any] = field(
        default_factory=dict
    )  # the target's mark before what is unsure

    def begin(self, holder: Mapping[str, Any]) -> None:
        """Begin a run: earlier ones are over.

        Raises:
            StoreUnavailableError: The tier does not answer.
        """
        self.journal.catch_up()
        while True:
            self.run = self.journal.state.timers.run.number + 1
            self.journal.append([run_action(self.run, holder)])
            if self.journal.state.timers.run.number == self.run:
                self._look()
                return

    def refresh(self) -> None:
        """Look at the journal.

        Raises:
            FencedError: Another run has begun.
            BackendError: It could not be read.
        """
        before = self.journal.number
        self.journal.catch_up()
        self._check(self.journal.state)
        if self.journal.number != before:
            self._look()

    def step(self) -> int:
        """Give one batch; how many items of a sweep that was, 0 when nothing is to be given now.

        Raises:
            FencedError: Another run has begun, or our lease may be another's.
            DataError: A file is damaged.
            StoreUnavailableError: The tier, or the target, does not answer; calling again goes on.
            BackendError: Likewise.
        """
        sweep = self._sweep = self._sweep or self._next_sweep()
        if sweep is None:
            return 0
        high = self._high(sweep)
        messages = sweep.items.messages(sweep.rank, high)
        dropped = high - sweep.rank - len(messages)
        unknown = self._not_there(sweep, messages)
        is_behind = sweep.is_unsure and not unknown
        if unknown:
            self._give(sweep, unknown)
        self._since = self._since if is_behind else self.target.mark()
        self._say(HandedRow(sweep.hour, sweep.done, sweep.end, high))
        reached("timers-handed")
        self.counters.dropped += dropped
        self.counters.found += len(messages) - len(unknown)
        stepped, sweep.rank, sweep.is_unsure = high - sweep.rank, high, is_behind
        if high == len(sweep.items):
            self.close()
        return stepped

    def _not_there(self, sweep: _Sweep, messages: list[DueMessage]) -> list[DueMessage]:
        """What of a batch is to be given: all of it, unless an earlier try may have given some."""
        if not sweep.is_unsure or not messages:
            return messages
        has = self.target.has(messages, self._since)
        return [one for one, known in zip(messages, has, strict=True) if not known]

    def _give(self, sweep: _Sweep, messages: Sequence[DueMessage]) -> None:
        sweep.is_unsure = True  # until the entry says otherwise
        if not self.is_ours():
            raise FencedError(
                "our lease could not be renewed in time: another run may have begun",
                do="run it again",
            )
        reached("timers-giving")
        try:
            refused = self.target.give(messages)
        except StoreUnavailableError:
            self.counters.retries += 1
            raise
        self.counters.refused += refused
        self.counters.handed += len(messages) - refused
        reached("timers-given")

    def _high(self, sweep: _Sweep) -> int:
        """Where the next batch ends: the same for every run that begins at the same rank."""
        most = min(sweep.rank + self.batch, len(sweep.items))
        sizes = sweep.items.sizes[sweep.rank : most].cumsum()
        fits = int(sizes.searchsorted(BATCH_BYTES, side="right"))
        return min(most, sweep.rank + max(1, fits))

    def _say(self, row: HandedRow) -> None:
        action = handed_action(self.run, [row], self._since)
        self.journal.append([action], check=self._check)
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
                return self._open(hour, is_unsure=True)
            if hour * HOUR_MS - self.near_ms > self.clock.now_ms():
                return None
            self._since = self.target.mark()
            self._say(HandedRow(hour, facts.end, commit, 0))
            return self._open(hour, is_unsure=False)
        return None

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
        life = state.life(hour_queue(hour))
        return state.timers.hours[hour], life.commit_offset if life else 0

    def _look(self) -> None:
        """Find the hours that have something to hand over: a sweep that was left behind first, then by time."""
        facts = self.journal.state.timers.hours
        found = [hour for hour in facts if facts[hour].done < self._facts(hour)[1]]
        self._hours = deque(sorted(found, key=lambda h: (facts[h].done == facts[h].end, h)))

    def _open(self, hour: int, *, is_unsure: bool) -> _Sweep:
        state = self.journal.state
        facts = state.timers.hours[hour]
        items = self.reader.load(hour, facts.done, facts.end, state)
        if len(items) != facts.end - facts.done:
            items.close()
            raise StoreUnavailableError(
                f"the file of hour {hour} has {len(items)} of {facts.end - facts.done} messages",
                do="run `tiered verify --timers` to see what is missing",
            )
        return _Sweep(hour, facts.done, facts.end, facts.rank, items, is_unsure)

    @property
    def next_ms(self) -> int | None:
        """When the next hour is to be swept; None: nothing is left."""
        hour = self._first()
        return None if hour is None else hour * HOUR_MS - self.near_ms

    def close(self) -> None:
        """Let the sweep under way go; a later step goes on with it."""
        if self._sweep is not None:
            self._sweep.items.close()
        self._sweep = None
