"""What a running attachment measures, as samples of ``tiered.metrics``: lag, counters, memory; and whether it is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.local.catalog import TIMER_TOPICS
from tiered.local.rocketmq import RocketMQStore
from tiered.metrics import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from backends.wrapping import MeteredStore
    from tiered.attach.writer import Attachment
    from tiered.clock import Clock
    from tiered.dispatch.dispatcher import TieredDispatcher
    from tiered.local.interface import LocalStore
    from tiered.model import MessageQueue, QueueBounds, QueueOffset


def collect(attachment: Attachment, clock: Clock) -> list[Sample]:
    """All samples, as of now. From any thread; reads a record of each queue that is behind."""
    dispatcher = attachment.dispatcher
    if dispatcher is None:
        return [Sample("tiered_up", 0)]
    return [
        Sample("tiered_up", is_well(attachment) == ""),
        *_lag(attachment, dispatcher, clock),
        *_counters(dispatcher),
        *_index(attachment),
        *_timers(attachment, clock),
        *request_samples(attachment.meter),
        Sample("tiered_epoch", attachment.epoch),
        Sample("tiered_buffer_bytes", dispatcher.budget.used_bytes),
        Sample("tiered_buffer_bytes_max", dispatcher.budget.bytes_max),
        Sample("tiered_silent_seconds", dispatcher.seconds_without_success()),
        *(
            Sample("tiered_store_trouble_seconds", seconds, {"reason": reason})
            for reason, seconds in attachment.patient.seconds_waiting().items()
        ),
    ]


def is_well(attachment: Attachment) -> str:
    """What is wrong, in one clause; empty when nothing is."""
    if attachment.fault is not None:
        return str(attachment.fault)
    dispatcher = attachment.dispatcher
    if dispatcher is None or not dispatcher.is_stalled:
        return attachment.index.defect if attachment.index is not None else ""
    troubles = {one.reason: one.told for one in attachment.patient.troubles()}  # one of each
    why = f" ({'; '.join(sorted(troubles.values()))})" if troubles else ""
    return f"nothing could be committed for {dispatcher.seconds_without_commit():.0f} s{why}"


class WatchedWriter:
    """An attachment as ``tiered.cli.serve`` shows it."""

    def __init__(self, attachment: Attachment, clock: Clock) -> None:
        self._attachment, self._clock = attachment, clock

    def samples(self) -> list[Sample]:
        """What it measures, as of now."""
        return collect(self._attachment, self._clock)

    def fault(self) -> str:
        """What is wrong, in one clause; empty when nothing is."""
        return is_well(self._attachment)

    def unready(self) -> str:
        """Why it does not do its work any more, in one clause. A store that does not answer is no reason."""
        return "it ends" if self._attachment.is_stopping else ""

    def stuck(self) -> str:
        """Why only a new start can help, in one clause; empty while it goes on, or waits for something that has a name."""
        attachment = self._attachment
        if attachment.fault is not None:
            return str(attachment.fault)
        if attachment.dispatcher is None or attachment.patient.troubles():
            return ""
        return attachment.dispatcher.stuck


def _lag(attachment: Attachment, dispatcher: TieredDispatcher, clock: Clock) -> Iterator[Sample]:
    commits = dispatcher.lag()
    topics: dict[str, list[float]] = {}
    for queue, lag in measure_lag(attachment.local, commits, clock.now_ms()).items():
        if queue in commits or attachment.selects(queue.topic):
            row = topics.setdefault(queue.topic, [0, 0, 0])
            row[0] += lag.messages
            row[1] += lag.size_bytes or 0
            row[2] = max(row[2], lag.seconds)
    for topic, row in topics.items():
        for unit, value in zip(("messages", "bytes", "seconds"), row, strict=True):
            yield Sample(f"tiered_lag_{unit}", value, {"topic": topic})
        if rate := dispatcher.rate_of(topic):
            yield Sample("tiered_topic_rate_bytes", rate, {"topic": topic})
    waiting = attachment.local.waiting()
    yield Sample("tiered_waiting_records", waiting.records)
    yield Sample("tiered_waiting_bytes", waiting.size_bytes)


def _counters(dispatcher: TieredDispatcher) -> Iterator[Sample]:
    counters = dispatcher.counters
    yield Sample("tiered_committed_messages_total", counters.messages)
    yield Sample("tiered_committed_bytes_total", counters.record_bytes)
    yield Sample("tiered_parts_total", counters.parts)
    yield Sample("tiered_bundles_total", counters.bundles)
    yield Sample("tiered_rounds_total", counters.rounds)
    yield Sample("tiered_unmirrored_checkpoints_total", counters.unmirrored)
    yield Sample("tiered_upload_failures_total", counters.uploads_failed)
    yield Sample("tiered_file_switches_total", counters.switches)
    yield Sample("tiered_lock_misses_total", counters.lock_misses)
    yield Sample("tiered_compensated_total", counters.compensated)
    yield Sample("tiered_sealed_segments_total", counters.sealed_segments)
    yield Sample("tiered_merged_bundles_total", counters.merged_bundles)
    yield Sample("tiered_merged_parts_total", counters.merged_parts)
    yield Sample("tiered_merged_bytes_total", counters.merged_bytes)
    yield Sample("tiered_merged_stored_bytes_total", counters.merged_stored_bytes)
    yield Sample("tiered_merge_retries_total", counters.merges_failed)
    yield Sample("tiered_unmergeable_bundles_total", counters.unmergeable_bundles)
    yield Sample("tiered_gaps_total", counters.gaps)
    yield Sample("tiered_truncated_total", counters.truncated)
    yield Sample("tiered_begun_anew_total", counters.begun_anew)
    yield Sample("tiered_ahead_queues", dispatcher.continuity.lagging)
    yield Sample("tiered_quarantined_records_total", counters.quarantined)
    yield Sample("tiered_missing_messages_total", counters.missing)


def _index(attachment: Attachment) -> Iterator[Sample]:
    index = attachment.index
    if index is not None:
        yield Sample("tiered_index_objects_total", index.objects)
        yield Sample("tiered_index_keys_total", index.items)
        yield Sample("tiered_index_bytes_total", index.size_bytes)
        yield Sample("tiered_index_waiting_messages", index.waits)
        yield Sample("tiered_index_failures_total", index.failures)


def request_samples(meter: MeteredStore) -> Iterator[Sample]:
    """What was asked of the object store."""
    snapshot = meter.snapshot()
    for kind, count in sorted(snapshot.kinds.items()):
        yield Sample("tiered_requests_total", count.requests, {"kind": kind})
        for error, errors in sorted(count.errors.items()):
            yield Sample("tiered_request_errors_total", errors, {"kind": kind, "error": error})
    yield Sample("tiered_request_retries_total", snapshot.retries)
    yield Sample("tiered_transfer_bytes_total", snapshot.bytes_up, {"direction": "up"})
    yield Sample("tiered_transfer_bytes_total", snapshot.bytes_down, {"direction": "down"})
    yield Sample("tiered_request_dollars_total", snapshot.dollars)


# -- how far the tier is behind the local store, queue by queue ------------------------------------


_ENTRIES = 1 << 16
_ENTRIES_MAX = 1 << 20
"""Entries of one queue that are looked at; what is behind them is taken to be as large on average."""


@dataclass(frozen=True, slots=True)
class QueueLag:
    """What one queue of the tier lacks of the local store."""

    local_max_offset: QueueOffset  # one past the last committed local message
    messages: int  # committed locally and not in the tier
    size_bytes: int | None
    """Bytes of their records (estimated beyond a million in a queue); None when the store cannot tell without
    reading them."""
    seconds: float  # age of the oldest of them; 0 without any


def _timers(attachment: Attachment, clock: Clock) -> Iterator[Sample]:
    """Of ``attach --timers``: what waits in the sources, be it to be taken or to be left with the broker."""
    if attachment.timers is None:
        return
    local, positions, now_ms = attachment.local, attachment.timers.positions, clock.now_ms()
    lags = [
        _lag_of(local, queue, bounds, positions.get(queue), now_ms)
        for queue, bounds in local.queues().items()
        if queue.topic in TIMER_TOPICS
    ]
    yield Sample("tiered_timers_oldest_seconds", max((lag.seconds for lag in lags), default=0.0))
    yield Sample("tiered_timers_waiting_records", sum(lag.messages for lag in lags))
    yield Sample("tiered_timers_taken_total", attachment.timers.total.taken)
    yield Sample("tiered_timers_up", not attachment.timers.error)


def measure_lag(
    local: LocalStore, commits: Mapping[MessageQueue, QueueOffset], now_ms: int
) -> dict[MessageQueue, QueueLag]:
    """The lag of every local queue. Reads one record, and the consume-queue entries, of each queue that is behind.

    Args:
        commits: Commit offset of each queue of the tier; a queue that is missing has nothing there.
    """
    return {
        queue: _lag_of(local, queue, bounds, commits.get(queue), now_ms)
        for queue, bounds in local.queues().items()
    }


def _lag_of(
    local: LocalStore,
    queue: MessageQueue,
    bounds: QueueBounds,
    commit: QueueOffset | None,
    now_ms: int,
) -> QueueLag:
    start = bounds.min if commit is None else max(bounds.min, commit)
    if start >= bounds.end:
        return QueueLag(bounds.end, 0, 0, 0.0)
    size = None
    if isinstance(local, RocketMQStore):
        size = _size(local, queue, start, bounds.end)
    batch = local.read(queue, start, bytes_max=1, count_max=1)
    stored_ms = int(batch.store_timestamps_ms[0]) if batch is not None else -1
    seconds = max(0.0, (now_ms - stored_ms) / 1000) if stored_ms >= 0 else 0.0
    return QueueLag(bounds.end, bounds.end - start, size, seconds)


def _size(local: RocketMQStore, queue: MessageQueue, start: int, end: int) -> int | None:
    """Bytes of the records that the consume queue lists; those of an inner batch count once."""
    state = local.current_view().catalog.states.get(queue)
    if state is None:
        return None
    total, last, looked_at = 0, -1, min(end, start + _ENTRIES_MAX)
    for at in range(start, looked_at, _ENTRIES):
        entries = state.index.entries(at, min(at + _ENTRIES, looked_at))
        for_real = entries.is_written
        places, sizes = entries.physical_offsets[for_real], entries.sizes[for_real]
        if len(places):
            first_of_its_record = places != [last, *places[:-1].tolist()]
            total += int(sizes[first_of_its_record].sum())
            last = int(places[-1])
    return total * (end - start) // (looked_at - start)
