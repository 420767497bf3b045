"""The file ``checkpoint``: 4,096 bytes, six big-endian longs, the rest zero.

====== ==============================================================================
offset field
====== ==============================================================================
0      physical_timestamp_ms: store time of the last record of the log that was flushed
8      logics_timestamp_ms: the same for consume queues (0 in short runs)
16     index_timestamp_ms: the same for the index
24     master_flushed_offset
32     confirm_offset: kept up only by controller brokers; stale elsewhere
40     logics_physical_offset: how far the consume queues were flushed (5.5; else 0)
====== ==============================================================================
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from struct import Struct
from typing import Final

from typing_extensions import Buffer

CHECKPOINT_BYTES: Final = 4096
_LONGS: Final = Struct(">6q")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a broker last wrote down of its progress. Times are UTC ms, offsets physical."""

    physical_timestamp_ms: int = 0
    logics_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_offset: int = 0
    logics_physical_offset: int = 0


def decode_checkpoint(data: Buffer) -> Checkpoint:
    """Read a checkpoint. A short file (cut by a crash) is read as if zeros followed."""
    head = bytes(memoryview(data)[: _LONGS.size])
    return Checkpoint(*_LONGS.unpack(head.ljust(_LONGS.size, b"\0")))


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The whole file, ``CHECKPOINT_BYTES`` long."""
    return _LONGS.pack(*astuple(checkpoint)).ljust(CHECKPOINT_BYTES, b"\0")
