"""TieredCommitLog: the bytes of one queue's messages, in order, byte for byte as in the local log (invariant I3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.log.flat_file import TieredFlatFile, load_segment
from tiered.log.objects import read_range

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import QueueLife
    from tiered.model import LogOffset


class TieredCommitLog(TieredFlatFile):
    """The commit log of one life of a queue."""

    @classmethod
    def load(cls, life: QueueLife) -> TieredCommitLog:
        """As the journal has it."""
        log = cls(life.segments[0].base_offset if life.segments else life.log_end)
        log.segments = [
            load_segment(s.base_offset, s.created_ms, s.sealed, [part.log for part in s.parts])
            for s in life.segments
        ]
        return log

    def read(self, store: ObjectStore, prefix: str, start: LogOffset, end: LogOffset) -> memoryview:
        """Read committed bytes ``[start, end)``, checked.

        Raises:
            DataError: An object is damaged.
            BackendError: An object could not be read.
        """
        pieces = [
            read_range(store, prefix, extent.place, extent.start, extent.end)
            for extent in self.extents(start, end)
        ]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
