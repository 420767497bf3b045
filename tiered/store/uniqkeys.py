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
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

MAKER_BYTES: Final = 10
_MS: Final = 1000


class KeyMaker:
    """Makes ids, many at a time, distinct within a maker for a month. For any thread.

    A millisecond has 65,536; when they are used up, those of the next one are taken. Their times never go back.
    """

    def __init__(self, source: random.Random) -> None:
        """Draw the maker's part from ``source``, once."""
        self._maker = source.randbytes(MAKER_BYTES).hex().upper()
        self._count = source.randrange(1 << 16)
        self._lock = threading.Lock()
        self._at_ms = -1
        self._left = 0
        self._prefix = ""

    def take(self, count: int, now_ms: int) -> list[str]:
        """``count`` ids made at ``now_ms`` (UTC)."""
        with self._lock:
            if now_ms > self._at_ms:
                self._begin(now_ms)
            found: list[str] = []
            while count > self._left:
                count -= self._left
                found += _ids(self._prefix, self._count, self._left)
                self._begin(self._at_ms + 1)
            prefix, first = self._prefix, self._count
            self._count = (first + count) & 0xFFFF
            self._left -= count
        return found + _ids(prefix, first, count)

    def _begin(self, now_ms: int) -> None:
        self._at_ms, self._left = now_ms, 1 << 16
        self._prefix = f"{self._maker}{ms_of_month(now_ms) & 0xFFFF_FFFF:08X}"


def _ids(prefix: str, first: int, count: int) -> list[str]:
    digits = _digits()
    if first + count > len(digits):
        return [prefix + digits[(first + at) & 0xFFFF] for at in range(count)]
    return [prefix + four for four in digits[first : first + count]]


@lru_cache(maxsize=1)
def _digits() -> list[str]:
    """Every counter as text: 4 MB, and half of the time that an id takes."""
    return [f"{count:04X}" for count in range(1 << 16)]


def ms_of_month(time_ms: int) -> int:
    """Milliseconds from the first of the month to ``time_ms``, both UTC."""
    day = datetime.fromtimestamp(time_ms // _MS, UTC)
    first = day.replace(day=1, hour=0, minute=0, second=0)
    return time_ms - int(first.timestamp()) * _MS
