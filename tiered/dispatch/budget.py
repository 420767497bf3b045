"""The bound on the memory of dispatch (invariant I8).

Memory of a dispatcher = ``buffer_bytes_max`` (records in buffers and in uploads, and 40 bytes an item until its entry is
written) + one window of the local log, twice (as read, and as batches) + one record beyond the limit, since a record is
taken however large it is + one copy of each bundle that a store must have in one piece (``uploads_max`` times
``bundle_bytes``).

Beside that, while bundles are merged: what is read for one bundle of at most ``merged_bytes_max`` (64 MiB, no more than
``buffer_bytes_max``), what of it is compressed, and once more the bundle for a store that must have it in one piece.
"""

from __future__ import annotations

import threading


class MemoryBudget:
    """Counts bytes held; never blocks. From any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._lock = threading.Lock()
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.peak_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Take so much."""
        with self._lock:
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, size_bytes: int) -> None:
        """Give so much back."""
        with self._lock:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more would stay within the limit. An empty budget has room for anything (I9)."""
        with self._lock:
            return self.used_bytes == 0 or self.used_bytes + size_bytes <= self.bytes_max

    @property
    def under_pressure(self) -> bool:
        """Over three quarters of the limit is used: buffers should be committed early."""
        return 4 * self.used_bytes >= 3 * self.bytes_max
