"""Finding a queue offset by store time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tiered.local.fetch import Bounds, fetch

if TYPE_CHECKING:
    from tiered.local.catalog import QueueState
    from tiered.local.files import FileRow

_LOOKED_AT: Final = 32


def first_at_or_after(log: FileRow, state: QueueState, bounds: Bounds, timestamp_ms: int) -> int:
    """First queue offset whose store time is at or after ``timestamp_ms``, by bisection; the end when there is none.

    Holes have no time: they go with the message behind them.
    """
    low, high = min(state.min, state.end), state.end
    while low < high:
        middle = (low + high) // 2
        at, time_ms = _next_time(log, state, bounds, middle, high)
        if at is None or time_ms >= timestamp_ms:
            high = middle
        else:
            low = at + 1
    return low


def _next_time(
    log: FileRow, state: QueueState, bounds: Bounds, start: int, end: int
) -> tuple[int | None, int]:
    """The first message of ``[start, end)`` and its store time; None without one."""
    count = 1
    while start < end:
        entries = state.index.entries(start, min(end, start + count))
        found = fetch(log, state.queue, entries, bounds, is_batch=state.index.is_batch)
        good = np.flatnonzero(found.verdicts == 0)
        if len(good):
            at = int(good[0])
            return start + at, int(found.block.store_timestamps_ms[found.record_of[at]])
        start, count = start + len(entries), _LOOKED_AT
    return None, 0
