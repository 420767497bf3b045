"""TieredCommitLog: the bytes of one queue's messages, in order, byte for byte as in the local log (invariant I3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.log.flat_file import TieredFileSegment, TieredFlatFile

if TYPE_CHECKING:
    from backends.base import ObjectStore
    from tiered.log.state import QueueLife
    from tiered.model import LogOffset


class TieredCommitLog(TieredFlatFile):
    """The commit log of one life of a queue."""

    @classmethod
    def load(cls, life: QueueLife) -> TieredCommitLog:
        """As the journal has it."""
        segments = [
            TieredFileSegment.of(
                s.base_offset,
                s.created_ms,
                s.sealed,
                s.parts,
                s.parts.column("log_bytes") + s.parts.column("log_gone"),
                of_items=False,
            )
            for s in life.segments
        ]
        return cls(life.log_end, segments)

    def read(self, store: ObjectStore, prefix: str, start: LogOffset, end: LogOffset) -> memoryview:
        """Read committed bytes ``[start, end)``; see ``read_bytes``."""
        return self.read_bytes(store, prefix, start, end)
