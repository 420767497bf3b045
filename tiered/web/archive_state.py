"""What is archived of a broker, as the archive's log says: its state is kept, and caught up on demand.

Threads: any; one at a time catches up. Nothing is written.
"""

from __future__ import annotations

import random
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass
from tiered.archive.job import plan_document, plan_job
from tiered.archive.model import ArchiveQueue, whole_files
from tiered.archive.tables import follow_log, read_archive
from tiered.archive.task import JobContext

if TYPE_CHECKING:
    from tiered.api.broker_place import Place
    from tiered.api.stores import OpenStore
    from tiered.archive.machine import ArchiveState
    from tiered.clock import Clock
    from tiered.journal.replay import JournalReader
    from tiered.model import MessageQueue
    from tiered.upkeep.status import Document
    from tiered.web.watch import BrokerView

FRESH_S = 5.0
"""Between two looks at the log: a listing each."""
_EVERY = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ArchiveSummary:
    """What a page shows of an archive and a broker."""

    plan: Document  # as ``tiered archive --dry-run --json``
    topics: list[dict[str, Any]]  # what is archived of each
    jobs: list[dict[str, Any]]  # the last runs, newest first
    updated_ms: int  # of the last entry of the log


class ArchiveWatch:
    """Keeps the state of an archive's log."""

    def __init__(self, opened: OpenStore, clock: Clock) -> None:
        self.url = opened.store.url
        self._opened = opened
        self._clock = clock
        self._lock = threading.Lock()
        self._log: JournalReader[ArchiveState] | None = None
        self._looked_s = float("-inf")
        self._summaries: dict[Place, tuple[ArchiveState, int, ArchiveSummary]] = {}

    def state(self) -> ArchiveState:
        """What the log says, ``FRESH_S`` old at most."""
        with self._lock:
            if self._log is None:
                self._log = follow_log(self._opened.store)
            if self._clock.monotonic_s() - self._looked_s >= FRESH_S:
                read_archive(self._opened.store, self._log)
                self._looked_s = self._clock.monotonic_s()
            return self._log.state

    def ranges(self, place: Place, queue: MessageQueue, incarnation: int) -> list[tuple[int, int]]:
        """Queue offsets of an incarnation that are archived, in order."""
        wanted = ArchiveQueue(place.cluster, place.broker, *queue, incarnation)
        starts, ends = self.state().queues.columns(wanted)[:2]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def summary(self, view: BrokerView) -> ArchiveSummary:
        """What is archived of a broker, and what a run would do; kept until one of the two logs goes on."""
        state, number = self.state(), view.facts.journal_number
        known = self._summaries.get(view.place)
        if known is None or known[0] is not state or known[1] != number:
            known = self._summaries[view.place] = state, number, self._summary(state, view)
        return known[2]

    def _summary(self, state: ArchiveState, view: BrokerView) -> ArchiveSummary:
        opened = self._opened
        rng = random.SystemRandom()
        at = JobContext(view.reader.store, view.place, opened.store, opened.meter, self._clock, rng)
        return ArchiveSummary(
            plan_document(at, plan_job(at, state, view.reader)),
            self._topics(state, view.place),
            [asdict(job) for job in reversed(state.jobs)],
            state.updated_ms,
        )

    def _topics(self, state: ArchiveState, place: Place) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for queue, one in state.queues.each(lambda queue: _is_of(queue, place)):
            row = found.setdefault(
                queue.topic,
                {"topic": queue.topic, "offset_ranges": 0, "rows": 0, "holes": 0, "bad": 0},
            )
            row["offset_ranges"] += 1
            row["rows"] += one.rows
            row["holes"] += one.holes
            row["bad"] += one.bad
        return [found[topic] for topic in sorted(found)]

    def files(self, place: Place, topic: str) -> list[dict[str, Any]]:
        """The files of a topic, as the log names them, in order of queue and offset."""
        named = self.state().queues.each(
            lambda queue: _is_of(queue, place) and queue.topic == topic
        )
        return [asdict(file) for file in whole_files([f for _, one in named for f in one.files])]


def _is_of(queue: ArchiveQueue, place: Place) -> bool:
    return (queue.cluster, queue.broker) == (place.cluster, place.broker)
