"""How far a tier is behind a local store, queue by queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered.local.rocketmq import RocketMQStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiered.local.face import LocalStore
    from tiered.model import MessageQueue, QueueBounds, QueueOffset

_ENTRIES = 1 << 16
_ENTRIES_MAX = 1 << 20
"""Entries of one queue that are looked at; what is behind them is taken to be as large on average."""


@dataclass(frozen=True, slots=True)
class QueueLag:
    """What one queue of the tier lacks of the local store.

    Attributes:
        local_max_offset: One past the last committed local message.
        messages: Committed locally and not in the tier.
        size_bytes: Bytes of their records (estimated beyond a million in a queue); None when the store cannot tell
            without reading them.
        seconds: Age of the oldest of them; 0 without any.
    """

    local_max_offset: QueueOffset
    messages: int
    size_bytes: int | None
    seconds: float


def measure_lag(
    local: LocalStore, commits: Mapping[MessageQueue, QueueOffset], now_ms: int
) -> dict[MessageQueue, QueueLag]:
    """The lag of every local queue. Reads one record, and the consume-queue entries, of each queue that is behind.

    Args:
        local: The local store.
        commits: Commit offset of each queue of the tier; a queue that is missing has nothing there.
        now_ms: UTC.
    """
    return {
        queue: _lag(local, queue, bounds, commits.get(queue), now_ms)
        for queue, bounds in local.queues().items()
    }


def _lag(
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
