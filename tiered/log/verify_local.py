"""Holds the tier against a local store, message by message, bytes equal. One step a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.errors import BackendError
from tiered.errors import TieredStoreError
from tiered.local.face import HoleReason
from tiered.log.reader import READ_BYTES, QueueReader
from tiered.log.state import Gap
from tiered.log.verify_report import Finding, StoreComparison
from tiered.model import QueueBounds, QueueOffset

if TYPE_CHECKING:
    import numpy.typing as npt

    from tiered.local.face import LocalStore, RecordBatch

LISTED_MAX = 100
"""So many differences of one queue are named; one more says how many there are."""


class QueueComparison:
    """The comparison of one queue. Holds one batch of each side in memory."""

    def __init__(self, tier: QueueReader, local: LocalStore, bounds: QueueBounds) -> None:
        self._tier = tier
        self._local = local
        self._bounds = bounds
        self._count = StoreComparison(queues=1)
        self._found = Finding(comparison=self._count)
        self._differences = 0

    def run(self) -> Finding:
        """Compare what both have."""
        life, bounds, count = self._tier.life, self._bounds, self._count
        low, high = life.min_offset, life.commit_offset
        count.lag_messages = max(0, bounds.end - max(high, bounds.min))
        count.skipped_messages = max(0, min(low, bounds.end) - bounds.min)
        count.expired_messages = max(0, min(bounds.min, high) - low)
        count.ahead_messages = max(0, high - max(bounds.end, low))
        at, end = max(low, bounds.min), min(high, bounds.end)
        while at < end:
            at = self._from(at, end)
        if self._differences > LISTED_MAX:
            self._report(f"{self._differences - LISTED_MAX} more differences")
        return self._found

    def _from(self, at: QueueOffset, end: QueueOffset) -> QueueOffset:
        """Compare from ``at`` on; where to go on."""
        try:
            found = self._tier.read(at)
        except (TieredStoreError, BackendError) as error:
            self._found.problem("unreadable", str(self._tier.queue), f"from {at}: {error}")
            parts = self._tier.life.parts()
            return next((part.queue_end for part in parts if part.queue_end > at), end)
        if found is None:
            return end
        if isinstance(found, Gap):
            self._count.skipped_messages += min(found.end, end) - at
            return found.end
        try:
            self._batch(found.records, at, QueueOffset(min(found.records.end_offset, end)))
        except TieredStoreError as error:
            where = f"local {self._tier.queue}"
            self._found.problem("unreadable", where, f"from {at}: {error}")
        return found.records.end_offset

    def _batch(self, tier: RecordBatch, at: QueueOffset, end: QueueOffset) -> None:
        while at < end:
            local = self._local.read(
                tier.queue, at, bytes_max=READ_BYTES, count_max=max(1, end - at)
            )
            if local is None or local.base_offset >= end:  # expired or taken back meanwhile
                self._count.expired_messages += end - at
                return
            self._count.expired_messages += max(0, local.base_offset - at)
            at = max(at, local.base_offset)
            stop = QueueOffset(min(local.end_offset, end))
            self._compare(
                _View(tier, at - tier.base_offset, stop - tier.base_offset),
                _View(local, at - local.base_offset, stop - local.base_offset),
                at,
            )
            at = stop

    def _compare(self, tier: _View, local: _View, at: QueueOffset) -> None:
        self._count.messages += len(tier.sizes)
        self._count.record_bytes += tier.span_bytes
        if tier.same_as(local):
            return
        self._count.compacted_messages += int(np.count_nonzero(tier.compacted))
        for number in np.flatnonzero(~tier.compacted).tolist():
            what = _difference(tier.record(number), local.record(number))
            if what:
                self._differences += 1
                if self._differences <= LISTED_MAX:
                    self._report(f"queue offset {at + number}: {what}")

    def _report(self, detail: str) -> None:
        self._found.problem("difference", str(self._tier.queue), detail)


class _View:
    """Items ``[start, end)`` of a batch, as arrays."""

    def __init__(self, batch: RecordBatch, start: int, end: int) -> None:
        self.sizes = batch.sizes[start:end].astype(np.int64)
        self.compacted = (self.sizes == 0) & (batch.tag_codes[start:end] == HoleReason.COMPACTED)
        self._positions = batch.positions[start:end]
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memoryview(batch.data), np.uint8)
        real = self.sizes > 0
        starts = self._positions[real]
        self._low = int(starts.min()) if len(starts) else 0
        high = int((starts + self.sizes[real]).max()) if len(starts) else 0
        self._relative = starts - self._low
        self._span = self._bytes[self._low : high]

    @property
    def span_bytes(self) -> int:
        return len(self._span)

    def same_as(self, other: _View) -> bool:
        """All sizes, the layout and all bytes are equal: true of nearly every batch, at memory speed."""
        return (
            np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self._relative, other._relative)
            and np.array_equal(self._span, other._span)
        )

    def record(self, number: int) -> npt.NDArray[np.uint8]:
        start = int(self._positions[number])
        return self._bytes[start : start + int(self.sizes[number])]


def _difference(tier: npt.NDArray[np.uint8], local: npt.NDArray[np.uint8]) -> str:
    """What differs between two records; empty when nothing does."""
    if len(tier) != len(local):
        if not len(tier) or not len(local):
            return "a hole in the tier" if not len(tier) else "a hole in the local store"
        return f"{len(tier)} bytes in the tier, {len(local)} in the local store"
    unequal = np.flatnonzero(tier != local)
    if not len(unequal):
        return ""
    return f"{len(unequal)} bytes differ, the first at byte {int(unequal[0])} of the record"
