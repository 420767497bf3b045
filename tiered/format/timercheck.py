"""``config/timercheck``: how far a broker's timing wheel is.

4,096 bytes, of which these count; all integers are big-endian:

====== ===== ==================================================================================
offset bytes field
====== ===== ==================================================================================
0      8     read_ms: the wheel has fired all that is due below this time
8      8     flushed position of the timer log
16     8     queue_offset of ``rmq_sys_wheel_timer``: what is below it is in the wheel
24     8     the same, of the master
32     24    version of the data: state version, time, counter
====== ===== ==================================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

_CHECK: Final = struct.Struct(">qqqq")


@dataclass(frozen=True, slots=True)
class TimerCheck:
    """What ``timercheck`` says.

    Attributes:
        read_ms: All that is due below it has been delivered, unless it came into the topic later.
        queue_offset: What is below it is in the wheel (or was, and was delivered).
    """

    read_ms: int = 0
    queue_offset: int = 0


def decode_timer_check(data: bytes) -> TimerCheck:
    """What the file says; of one that is too short (or missing: empty) nothing."""
    if len(data) < _CHECK.size:
        return TimerCheck()
    read_ms, _, queue_offset, _ = _CHECK.unpack_from(data)
    return TimerCheck(max(0, read_ms), max(0, queue_offset))
