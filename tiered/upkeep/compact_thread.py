"""Key compaction beside a writer: a thread that compacts by itself, now and then.

An error ends a round and not the thread: what was planned is planned again. It stops between two parts; what it had
uploaded then and not named is an orphan.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Self

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.compaction.newest import keys_that_fit
from tiered.errors import TieredStoreError
from tiered.metrics import Sample
from tiered.upkeep.compact import Compactor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiered.upkeep.compact import CompactSettings
    from tiered.upkeep.workplace import Workplace

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class CompactionCounters:
    """Of rounds; totals, and the last one's."""

    passes: int = 0
    failures: int = 0
    seconds: float = 0.0
    gone_messages: int = 0
    rewritten_bytes: int = 0
    keys: int = 0
    map_use: float = 0.0
    dirty_ratio: float = 0.0
    last_ms: int = 0

    def samples(self) -> Iterator[Sample]:
        """For Prometheus."""
        yield Sample("tiered_compaction_passes_total", self.passes)
        yield Sample("tiered_compaction_failures_total", self.failures)
        yield Sample("tiered_compaction_seconds_total", self.seconds)
        yield Sample("tiered_compaction_gone_messages_total", self.gone_messages)
        yield Sample("tiered_compaction_rewritten_bytes_total", self.rewritten_bytes)
        yield Sample("tiered_compaction_keys", self.keys)
        yield Sample("tiered_compaction_map_use_ratio", self.map_use)
        yield Sample("tiered_compaction_dirty_ratio", self.dirty_ratio)
        yield Sample("tiered_compaction_last_timestamp_seconds", self.last_ms / 1000)


class Stopping(Exception):  # noqa: N818 (no error)
    """A round is left because the process ends."""


class CompactionThread:
    """Compacts topics of a tier while somebody writes it."""

    def __init__(
        self,
        at: Workplace,
        settings: CompactSettings,
        topics: Callable[[], Iterable[str]],
        interval_s: float,
    ) -> None:
        """Wire it; ``start`` begins.

        Args:
            topics: Those that are to be compacted now; of these, what the tier has is looked at.
        """
        self.counters = CompactionCounters()  # what was done; read by any thread
        self._at = at
        self._settings = settings
        self._topics = topics
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compact")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def round(self) -> None:
        """One round, at once."""
        began_s = self._at.clock.monotonic_s()
        try:
            self._round()
            self.counters.last_ms = self._at.clock.now_ms()
        finally:
            self.counters.seconds += self._at.clock.monotonic_s() - began_s

    def _round(self) -> None:
        there = {queue.topic for queue in self._at.reader().state.queues}
        topics = sorted(there & set(self._topics()))
        counters, errors = self.counters, []
        counters.keys, counters.map_use, counters.dirty_ratio = 0, 0.0, 0.0
        for topic in topics:  # one by one: one that cannot be compacted keeps no other from it
            try:
                self._topic(topic)
            except Stopping:
                raise
            except Exception as error:  # noqa: BLE001 (of any kind: it keeps no other topic from it)
                _LOG.warning("topic %s is not compacted: %s", topic, error, exc_info=_trace(error))
                errors.append(error)
        if errors:
            raise errors[0]

    def _topic(self, topic: str) -> None:
        compactor = Compactor(self._at, self._settings, tell=lambda *_: self._go_on())
        plan = compactor.plan([topic])
        counters = self.counters
        most = max((step.keys for step in plan.steps), default=0)
        use = most / keys_that_fit(self._settings.memory_bytes)
        ratio = max((row.dirty_ratio for row in plan.left), default=0.0)
        counters.keys += plan.keys
        counters.map_use = max(counters.map_use, use)
        counters.dirty_ratio = max(counters.dirty_ratio, ratio)
        for bad in plan.damaged:
            _LOG.warning(
                "%s [%d, %d) is damaged; from %d on nothing is compacted: %s",
                *(bad.queue, bad.start, bad.end, bad.segment, bad.why),
            )
        for row in plan.spread:
            _LOG.warning(
                "%s: %d of %d keys went to several queues", row.topic, row.keys, row.of_keys
            )
        if plan.steps:
            counters.passes += compactor.apply(plan)["steps"]
            counters.gone_messages += plan.gone_messages
            counters.rewritten_bytes += plan.rewritten_bytes

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopping

    def _run(self) -> None:
        while not self._at.clock.wait(self._stop, self._interval_s):
            try:
                self.round()
            except Stopping:
                return
            except Exception as error:  # noqa: BLE001 (counted; a thread that has died would be silent)
                self.counters.failures += 1
                _LOG.warning("compaction is tried again later: %s", error, exc_info=_trace(error))


def _trace(error: Exception) -> bool:
    """Whether the log needs to know where it came from: what is none of ours is a defect."""
    return not isinstance(error, TieredStoreError | BackendError)
