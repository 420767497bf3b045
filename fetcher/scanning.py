"""What one read has found so far: which messages are taken, what was skipped, and when it is enough. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from fetcher.statuses import Piece
from tiered.errors import InvalidError
from tiered.local.face import HoleReason
from tiered.log.parts import Gap
from tiered.model import QueueOffset

if TYPE_CHECKING:
    import numpy.typing as npt

    from fetcher.filters.face import Filter
    from fetcher.policies import Side
    from tiered.local.face import RecordBatch

SCAN_STEP_BYTES: Final = 1 << 20
"""How much is read at once where a filter decides."""


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """When a read is enough.

    Attributes:
        count_max: Messages.
        bytes_max: Bytes of their records; the first is taken however large it is.
        scan_items_max: Items looked at, wanted or not.
        scan_bytes_max: Bytes looked at, about.
    """

    count_max: int = 32
    bytes_max: int = 256 * 1024
    scan_items_max: int = 16_000
    scan_bytes_max: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        if min(self.count_max, self.bytes_max, self.scan_items_max, self.scan_bytes_max) <= 0:
            raise InvalidError("a read needs limits above 0")


class Scan:
    """One read. Not for several threads at once.

    Attributes:
        at: Where to go on: behind the last message taken when it is enough, else behind the last looked at.
        pieces: What was taken.
        missing: What was skipped since there is no message.
        size_bytes: Of the records taken.
        is_full: A limit on what is taken was reached.
    """

    def __init__(self, start: QueueOffset, limits: ScanLimits, wanted: Filter | None) -> None:
        """Begin with nothing."""
        self.at = start
        self.pieces: list[Piece] = []
        self.missing: list[Gap] = []
        self.size_bytes = 0
        self.is_full = False
        self._limits = limits
        self._wanted = wanted
        self._count = 0
        self._items_left = limits.scan_items_max
        self._bytes_left = limits.scan_bytes_max

    @property
    def is_over(self) -> bool:
        """Something was taken, or enough was looked at."""
        return bool(self.pieces) or self.is_full or min(self._items_left, self._bytes_left) <= 0

    def next_read(self) -> tuple[int, int]:
        """Bytes and items to ask for next, at most."""
        if self._wanted is None:
            return self._limits.bytes_max, self._limits.count_max
        return min(SCAN_STEP_BYTES, self._bytes_left), self._items_left

    def skip(self, end: int, reason: str) -> None:
        """There is nothing up to ``end``."""
        self.missing.append(Gap(self.at, QueueOffset(end), reason))
        self.at = QueueOffset(end)
        self._items_left -= 1

    def take(self, batch: RecordBatch, side: Side) -> None:
        """Look at a batch that begins at ``at``.

        Raises:
            DataError: A record that the filter has to look into is damaged.
        """
        assert batch.base_offset == self.at
        wanted = self._wanted
        items = np.flatnonzero(batch.sizes > 0) if wanted is None else wanted.select(batch)
        count = self._fitting(batch, items)
        self.is_full = count < len(items) or self._count + count >= self._limits.count_max
        end = batch.count
        if self.is_full:
            end = int(items[count - 1]) + 1 if count else int(items[0])
        if count:
            self.pieces.append(Piece(batch, items[:count], side))
            self._count += count
        self._note_holes(batch, end)
        self._items_left -= end
        self._bytes_left -= memoryview(batch.data).nbytes
        self.at = QueueOffset(batch.base_offset + end)

    def _fitting(self, batch: RecordBatch, items: npt.NDArray[np.int64]) -> int:
        """How many items fit; at least one if nothing was taken yet."""
        sizes, positions = batch.sizes[items].astype(np.int64), batch.positions[items]
        sizes[1:][positions[1:] == positions[:-1]] = 0  # of an inner batch, once
        totals = self.size_bytes + np.cumsum(sizes)
        count = int(np.searchsorted(totals, self._limits.bytes_max, side="right"))
        if not self._count and len(items):
            count = max(count, 1)
        count = min(count, self._limits.count_max - self._count)
        if count:
            self.size_bytes = int(totals[count - 1])
        return count

    def _note_holes(self, batch: RecordBatch, end: int) -> None:
        for hole in np.flatnonzero(batch.sizes[:end] <= 0).tolist():
            at = QueueOffset(batch.base_offset + hole)
            reason = _reason(int(batch.tag_codes[hole]))
            last = self.missing[-1] if self.missing else None
            if last is not None and (last.end, last.reason) == (at, reason):
                self.missing[-1] = Gap(last.start, QueueOffset(at + 1), reason)
            else:
                self.missing.append(Gap(at, QueueOffset(at + 1), reason))


def _reason(code: int) -> str:
    known = {int(reason) for reason in HoleReason}
    return f"hole: {HoleReason(code).name.lower()}" if code in known else "hole"
