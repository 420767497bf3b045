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

import itertools
from datetime import UTC, datetime
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

MAKER_BYTES: Final = 10
_TIME_AND_COUNT: Final = Struct(">IH")
_MS: Final = 1000


class UniqueKeys:
    """Makes ids, distinct within a maker for 65,536 of each millisecond. For any thread."""

    def __init__(self, source: random.Random) -> None:
        """Draw the maker's part from ``source``, once."""
        self._maker = source.randbytes(MAKER_BYTES)
        self._count = itertools.count(source.randrange(1 << 16))

    def __call__(self, time_ms: int) -> str:
        """An id made at ``time_ms``, UTC."""
        since = ms_of_month(time_ms) & 0xFFFF_FFFF
        count = next(self._count) & 0xFFFF
        return (self._maker + _TIME_AND_COUNT.pack(since, count)).hex().upper()


def ms_of_month(time_ms: int) -> int:
    """Milliseconds from the first of the month to ``time_ms``, both UTC."""
    day = datetime.fromtimestamp(time_ms // _MS, UTC)
    first = day.replace(day=1, hour=0, minute=0, second=0)
    return time_ms - int(first.timestamp()) * _MS
