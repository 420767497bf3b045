"""Two files that say how far a broker is: ``checkpoint`` and, at the end, ``config/timercheck``.

``checkpoint``: 4,096 bytes, six big-endian longs, the rest zero.

====== ==============================================================================
offset field
====== ==============================================================================
0      physical_timestamp_ms: store time of the last record of the log that was flushed
8      logics_timestamp_ms: the same for consume queues (0 in short runs)
16     index_timestamp_ms: the same for the index
24     master_flushed_offset
32     confirm_offset: kept up only by controller brokers; stale elsewhere
40     logics_physical_offset: how far the consume queues were flushed (5.5; else 0)
48     the embedded store's own: how far consume queues and index are on the disk
56     CRC-32 of the 56 bytes before it; a broker that has changed one leaves it wrong
====== ==============================================================================

A broker that starts after a crash throws away the index file that was being written, and lists again from the log file
that holds ``logics_physical_offset``: that file's keys would be lost. So the embedded store lets that offset stay where
its newest index file begins, and keeps its own beside it.
"""

from __future__ import annotations

from dataclasses import astuple
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from typing_extensions import Buffer


CHECKPOINT_BYTES: Final = 4096
_LONGS: Final = Struct(">6q")
_LONG: Final = Struct(">q")


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


def encode_checkpoint(checkpoint: Checkpoint, listed_offset: int | None = None) -> bytes:
    """The whole file, ``CHECKPOINT_BYTES`` long; with the embedded store's own offset where it is given."""
    data = _LONGS.pack(*astuple(checkpoint))
    if listed_offset is not None:
        data += _LONG.pack(listed_offset)
        data += _LONG.pack(crc32(data))
    return data.ljust(CHECKPOINT_BYTES, b"\0")


def listed_offset(data: Buffer) -> int | None:
    """The embedded store's own offset; None where there is none, or a broker has written the file since."""
    head = bytes(memoryview(data)[: _LONGS.size + 2 * _LONG.size])
    if len(head) < _LONGS.size + 2 * _LONG.size:
        return None
    own, check = (
        _LONG.unpack_from(head, _LONGS.size)[0],
        _LONG.unpack_from(head, _LONGS.size + 8)[0],
    )
    return own if check == crc32(head[: _LONGS.size + _LONG.size]) else None


# -- timercheck ---------------------------------------------------------------------------------------
#
# ``config/timercheck``: how far a broker's timing wheel is.
#
# 4,096 bytes, of which these count; all integers are big-endian:
#
# ====== ===== ==================================================================================
# offset bytes field
# ====== ===== ==================================================================================
# 0      8     read_ms: the wheel has fired all that is due below this time
# 8      8     flushed position of the timer log
# 16     8     queue_offset of ``rmq_sys_wheel_timer``: what is below it is in the wheel
# 24     8     the same, of the master
# 32     24    version of the data: state version, time, counter
# ====== ===== ==================================================================================

_CHECK: Final = Struct(">qqqq")


@dataclass(frozen=True, slots=True)
class TimerCheck:
    """What ``timercheck`` says."""

    read_ms: int = 0
    """All that is due below it has been delivered, unless it came into the topic later."""
    queue_offset: int = 0  # what is below it is in the wheel (or was, and was delivered)


def decode_timer_check(data: bytes) -> TimerCheck:
    """What the file says; of one that is too short (or missing: empty) nothing."""
    if len(data) < _CHECK.size:
        return TimerCheck()
    read_ms, _, queue_offset, _ = _CHECK.unpack_from(data)
    return TimerCheck(max(0, read_ms), max(0, queue_offset))
