"""Unique message ids in the form that RocketMQ's clients make.

====== ===== ============================================================
offset bytes field (all as upper-case hex)
====== ===== ============================================================
0      4     address of the maker; here random
4      2     its process id; here random
6      4     hash of its class loader; here random
10     4     milliseconds since the first of the month, UTC
14     2     counter, which wraps round
====== ===== ============================================================
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import random

MAKER_BYTES: Final = 10
_MS: Final = 1000


class KeyMaker:
    """Makes ids, many at a time; distinct within a maker for 65,536 of each millisecond. For any thread."""

    def __init__(self, source: random.Random) -> None:
        """Draw the maker's part from ``source``, once."""
        self._maker = source.randbytes(MAKER_BYTES).hex().upper()
        self._count = source.randrange(1 << 16)
        self._lock = threading.Lock()
        self._at_ms = -1
        self._prefix = ""

    def take(self, count: int, now_ms: int) -> list[str]:
        """``count`` ids made at ``now_ms`` (UTC)."""
        with self._lock:
            if now_ms != self._at_ms:
                self._at_ms = now_ms
                self._prefix = f"{self._maker}{ms_of_month(now_ms) & 0xFFFF_FFFF:08X}"
            prefix, first = self._prefix, self._count
            self._count = (first + count) & 0xFFFF
        if first + count > 1 << 16:
            return [f"{prefix}{(first + number) & 0xFFFF:04X}" for number in range(count)]
        digits = np.arange(first, first + count, dtype=">u2").tobytes().hex().upper()
        return [prefix + digits[at : at + 4] for at in range(0, 4 * count, 4)]


def ms_of_month(time_ms: int) -> int:
    """Milliseconds from the first of the month to ``time_ms``, both UTC."""
    day = datetime.fromtimestamp(time_ms // _MS, UTC)
    first = day.replace(day=1, hour=0, minute=0, second=0)
    return time_ms - int(first.timestamp()) * _MS
