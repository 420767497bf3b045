"""The build thread: turns rounds of durable sections into journal entries.

Overview: finished uploads arrive in the *write map*. When the *read map* is drained the two are swapped (double buffer),
and one journal entry names the parts of all queues, and what else there is to say (``Fact``).

Ordering: data and index are durable in one step, then the entry names them (I2). Parts of one queue keep their order: they
come in it, and bundles are named in the order in which their sections came. One entry is in flight at a time.

Retries and errors: an entry is never re-cut while its outcome is unknown (``tiered.journal.writer``). ``FencedError`` ends
the thread through the dispatcher.

After a crash: sections that no entry names are orphans; nothing else is left.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.crashpoints import reached
from tiered.errors import InternalError
from tiered.log.bundles import bundle_row, some_of
from tiered.log.state import TierState, queue_action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiered.clock import Clock
    from tiered.dispatch.group_commit import Durable
    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.model import MessageQueue


@dataclass(frozen=True, slots=True)
class Fact:
    """Something else than a part that the next entry shall say.

    Attributes:
        action: The action.
        done: Called when the entry is durable.
    """

    action: Action
    done: Callable[[], None]


class RoundBuilder:
    """Owner of the maps and of the journal's writing end."""

    def __init__(
        self,
        journal: JournalWriter[TierState],
        clock: Clock,
        *,
        committed: Callable[[Sequence[Durable]], None],
    ) -> None:
        """Wire the builder.

        Args:
            journal: Ours alone from now on.
            clock: For pauses.
            committed: Told of what an entry has named, when it is durable.
        """
        self._journal = journal
        self._clock = clock
        self._committed = committed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._write_map: list[Durable] = []
        self._facts: list[Fact] = []
        self._busy = False
        self.rounds = 0

    def submit(self, some: Sequence[Durable]) -> None:
        """Put dispatch requests into the write map. From any thread."""
        with self._lock:
            self._write_map += some
        self._wake.set()

    def state_fact(self, fact: Fact) -> None:
        """Have the next entry say something else. From any thread."""
        with self._lock:
            self._facts.append(fact)
        self._wake.set()

    @property
    def is_idle(self) -> bool:
        """Nothing waits and no round is under way."""
        with self._lock:
            return not (self._write_map or self._facts or self._busy)

    def run(self, stop: threading.Event) -> None:
        """Body of the build thread: rounds until ``stop`` is set, and then a last one.

        Raises:
            FencedError: Another writer has taken over.
            StoreUnavailableError: Told to stop while the store did not answer.
        """
        while not stop.is_set():
            self._clock.wait(self._wake, 0.25)
            self._wake.clear()
            self.run_round()
        self.run_round()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def run_round(self) -> int:
        """Swap the maps and commit what is in them; how many actions became durable."""
        with self._lock:
            read_map, self._write_map = self._write_map, []
            facts, self._facts = self._facts, []
            self._busy = bool(read_map or facts)
        try:
            actions = [fact.action for fact in facts]  # a queue is made known before its parts
            actions += _actions(read_map)
            if actions:
                self._append(actions)
                reached("entry-known")
            for fact in facts:
                fact.done()
            self._committed(read_map)
        finally:
            with self._lock:
                self._busy = False
        if actions:
            reached("entry-counted")
        self._journal.write_checkpoint()
        return len(actions)

    def _append(self, actions: Sequence[Action]) -> None:
        refused = self._journal.state.refused_parts
        self._journal.append(actions)
        self.rounds += 1
        if self._journal.state.refused_parts != refused:
            raise InternalError(
                f"replay refuses a part of our own journal entry {self._journal.number}",
                do="stop attaching and report this defect",
            )


def plan_groups(durable: Sequence[Durable]) -> list[list[Durable]]:
    """Divide what is durable into groups of one bundle each, as few as the order of every queue allows."""
    groups: list[list[Durable]] = []
    of_bundle: dict[int, int] = {}
    of_queue: dict[MessageQueue, int] = {}
    for one in durable:
        bundle, queue = id(one.stored), one.commit.queue
        at = of_bundle.get(bundle, -1)
        if at < of_queue.get(queue, 0):  # this queue has something behind that group already
            at = of_bundle[bundle] = len(groups)
            groups.append([])
        groups[at].append(one)
        of_queue[queue] = at
    return groups


def _actions(durable: Sequence[Durable]) -> Iterator[Action]:
    """One ``part`` for all bundles; and what went into quarantine."""
    rows = []
    for group in plan_groups(durable):
        stored, numbers = group[0].stored, [one.number for one in group]
        is_whole = numbers == list(range(len(stored.table)))
        packed = stored.packed if is_whole else some_of(stored.table, numbers)
        rows.append(bundle_row(stored.bundle, packed))
    if rows:
        yield {"do": "part", "bundles": rows}
    for one in durable:
        if one.quarantined:
            count = {"count": one.quarantined}
            yield queue_action("quarantine", one.commit.queue, one.commit.incarnation, **count)
