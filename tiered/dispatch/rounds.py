"""The build thread: turns durable records into index objects and rounds of commits into journal entries.

Overview: finished uploads arrive in the *write map*. When the *read map* is drained the two are swapped (double buffer):
the index objects of everything in it are uploaded, and one journal entry names the parts of all queues.

Ordering: data, then index, then the entry (I2). Parts of one queue keep their order; a part whose index could not be
uploaded goes back, and those behind it wait for it. One entry is in flight at a time.

Retries and errors: a failed index upload is tried again under a new key in a later round. An entry is never re-cut while
its outcome is unknown (``tiered.journal.writer``). ``FencedError`` ends the thread through ``on_fatal``.

After a crash: objects that no entry names are orphans; nothing else is left.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from backends.errors import BackendError
from tiered.crashpoints import reached
from tiered.errors import InternalError
from tiered.log.state import Part, TierState, part_json, queue_action

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from tiered.clock import Clock
    from tiered.dispatch.uploads import StoredLog, Uploader
    from tiered.journal.entry import Action
    from tiered.journal.writer import JournalWriter
    from tiered.model import MessageQueue


_PAUSE_S_MAX = 30.0
"""Between two tries of index uploads while none succeeds."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something else than a part that the next entry shall say.

    Attributes:
        action: The action.
        done: Called when the entry is durable.
    """

    action: Action
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Built:
    stored: StoredLog
    part: Part
    quarantined: int


class RoundBuilder:
    """Owner of the maps and of the journal's writing end."""

    def __init__(
        self,
        journal: JournalWriter[TierState],
        uploader: Uploader,
        executor: Executor,
        clock: Clock,
        *,
        committed: Callable[[StoredLog, Part, int], None],
        index_failed: Callable[[StoredLog, BackendError], None],
    ) -> None:
        """Wire the builder.

        Args:
            journal: Ours alone from now on.
            uploader: Makes index objects.
            executor: Runs the uploads.
            clock: For pauses.
            committed: Told of each part when its entry is durable, with its number of quarantined records.
            index_failed: Told of each failed index upload.
        """
        self._journal = journal
        self._uploader = uploader
        self._executor = executor
        self._clock = clock
        self._committed = committed
        self._index_failed = index_failed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._write_map: dict[MessageQueue, list[StoredLog]] = {}
        self._facts: list[Fact] = []
        self._busy = False
        self.rounds = 0

    def submit(self, stored: StoredLog) -> None:
        """Put a dispatch request into the write map. From any thread."""
        with self._lock:
            self._write_map.setdefault(stored.commit.queue, []).append(stored)
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
        failures = 0
        while not stop.is_set():
            self._clock.wait(self._wake, 0.25)
            self._wake.clear()
            stuck = self.run_round() == 0 and not self.is_idle
            failures = failures + 1 if stuck else 0
            if stuck:  # all index uploads failed: fewer and fewer tries, so that an outage makes few orphans
                self._clock.wait(stop, min(_PAUSE_S_MAX, 0.2 * 2.0 ** min(failures, 30)))
        self.run_round()

    def wake(self) -> None:
        """Have the thread look at ``stop``."""
        self._wake.set()

    def run_round(self) -> int:
        """Swap the maps and commit what is in them; how many actions became durable."""
        with self._lock:
            read_map, self._write_map = self._write_map, {}
            facts, self._facts = self._facts, []
            self._busy = bool(read_map or facts)
        try:
            built = self._build(read_map)
            actions = [fact.action for fact in facts]  # a queue is made known before its parts
            actions += [action for one in built for action in _actions(one)]
            if actions:
                self._append(actions)
                reached("entry-known")
            for fact in facts:
                fact.done()
            for one in built:
                self._committed(one.stored, one.part, one.quarantined)
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

    def _build(self, read_map: dict[MessageQueue, list[StoredLog]]) -> list[_Built]:
        """Upload the index objects; what fails goes back into the write map, in front."""
        every = [stored for row in read_map.values() for stored in row]
        size = self._uploader.objects_per_put
        futures = [
            self._executor.submit(self._build_some, every[begin : begin + size])
            for begin in range(0, len(every), size)
        ]
        results = iter([result for future in futures for result in future.result()])
        return [
            built
            for row in read_map.values()
            for built in self._gather(row, [*islice(results, len(row))])
        ]

    def _gather(
        self, row: Sequence[StoredLog], results: Sequence[_Built | BackendError]
    ) -> list[_Built]:
        """What of one queue can be named now: all before the first failure."""
        built: list[_Built] = []
        for index, (stored, result) in enumerate(zip(row, results, strict=True)):
            if isinstance(result, BackendError):
                self._index_failed(stored, result)
                with self._lock:  # the objects of those behind it, if any, are orphans
                    rest = self._write_map.get(stored.commit.queue, [])
                    self._write_map[stored.commit.queue] = [*row[index:], *rest]
                break
            built.append(result)
        return built

    def _build_some(self, some: Sequence[StoredLog]) -> list[_Built | BackendError]:
        parts = self._uploader.put_indexes(some)
        return [self._built(*one) for one in zip(some, parts, strict=True)]

    def _built(self, stored: StoredLog, part: Part | BackendError) -> _Built | BackendError:
        if isinstance(part, BackendError):
            return part
        try:
            return _Built(stored, part, self._uploader.put_quarantine(stored))
        except BackendError as error:
            return error


def _actions(built: _Built) -> list[Action]:
    commit = built.stored.commit
    actions = [
        queue_action(
            "part",
            commit.queue,
            commit.incarnation,
            segment=commit.segment,
            part=part_json(built.part),
        )
    ]
    if built.quarantined:
        count = {"count": built.quarantined}
        actions.append(queue_action("quarantine", commit.queue, commit.incarnation, **count))
    return actions
