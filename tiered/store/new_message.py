"""What goes into an embedded store and what comes back.

Below: the messages' unique ids, the order of their properties, and what becomes of those that are delayed.
"""

from __future__ import annotations

import re
import threading
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError
from tiered.format import properties as names
from tiered.format.properties import java_hash
from tiered.local.catalog import SCHEDULE_TOPIC

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from tiered.model import PhysicalOffset, QueueOffset


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message to store."""

    topic: str  # up to 127 of ``%|a-zA-Z0-9_-``; up to 255 when it begins with ``%RETRY%``
    queue_id: int  # number of the queue in its topic, from 0
    body: bytes  # stored as it is; when it is compressed, ``sys_flag`` says so
    tags: str | None = None  # property ``TAGS``, or None
    keys: str | None = None  # property ``KEYS``: keys separated by blanks; or None
    properties: Mapping[str, str] = field(default_factory=dict)
    """The others. ``CLUSTER`` is set by the store; ``UNIQ_KEY`` only where it is missing."""
    flag: int = 0  # the producer's, opaque
    born_timestamp_ms: int | None = None  # the producer's clock, UTC; None: the store time
    born_host: str | None = None
    """The producer, ``ip:port`` or ``[ip]:port``; None: the store's host."""
    sys_flag: int = 0  # see ``tiered.format.sysflag``; the bits of the hosts are set by the store
    reconsume_times: int = 0  # how often it was sent back


def all_properties(message: NewMessage) -> dict[str, str]:
    """A message's properties with its tags and keys among them, none of which may be said twice, and not alike."""
    found = dict(message.properties)
    for name, value in ((names.TAGS, message.tags), (names.KEYS, message.keys)):
        if value is not None and found.setdefault(name, value) != value:
            raise InvalidError(f"property {name} says {found[name]!r}, and the message {value!r}")
    return found


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a message was put."""

    queue_offset: QueueOffset  # its number in its queue
    physical_offset: PhysicalOffset  # of its record in the log
    offset_msg_id: str  # hex of store host and physical offset; by it a broker finds the record
    msg_id: str  # its property ``UNIQ_KEY``
    size_bytes: int  # of its record


# -- unique ids ------------------------------------------------------------------------------------


class IdRun(NamedTuple):
    """Unique ids that were drawn together: ``prefix`` and four digits each, counted from ``first``."""

    prefix: str
    first: int
    length: int


MAKER_BYTES: Final = 10
_MS: Final = 1000


class KeyMaker:
    """Makes ids, many at a time, distinct within a maker for a month. For any thread.

    ====== ===== ============================================================
    offset bytes field (all as upper-case hex)
    ====== ===== ============================================================
    0      4     address of the maker; here random
    4      2     its process id; here random
    6      4     hash of its class loader; here random
    10     4     milliseconds since the first of the month, UTC
    14     2     counter, which wraps round
    ====== ===== ============================================================

    A millisecond has 65,536; when they are used up, those of the next one are taken. Their times never go back.
    """

    def __init__(self, source: random.Random) -> None:
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

    def run(self, count: int, now_ms: int) -> IdRun | None:
        """``count`` ids that differ in nothing but a counter that does not wrap; None: these would, so ``take`` them."""
        with self._lock:
            if now_ms > self._at_ms:
                self._begin(now_ms)
            first = self._count
            if count > self._left or first + count > 1 << 16:
                return None
            self._count = (first + count) & 0xFFFF
            self._left -= count
            return IdRun(self._prefix, first, count)

    def _begin(self, now_ms: int) -> None:
        self._at_ms, self._left = now_ms, 1 << 16
        self._prefix = f"{self._maker}{ms_of_month(now_ms) & 0xFFFF_FFFF:08X}"


def _ids(prefix: str, first: int, count: int) -> list[str]:
    digits = counter_digits()
    if first + count > len(digits):
        return [prefix + digits[(first + at) & 0xFFFF] for at in range(count)]
    return [prefix + four for four in digits[first : first + count]]


@lru_cache(maxsize=1)
def counter_digits() -> list[str]:
    """Every counter as text: 4 MB, and half of the time that an id takes."""
    return [f"{count:04X}" for count in range(1 << 16)]


def ms_of_month(time_ms: int) -> int:
    """Milliseconds from the first of the month to ``time_ms``, both UTC."""
    day = datetime.fromtimestamp(time_ms // _MS, UTC)
    first = day.replace(day=1, hour=0, minute=0, second=0)
    return time_ms - int(first.timestamp()) * _MS


# -- a broker's order of properties ----------------------------------------------------------------
#
# The order in which a broker writes a message's properties: that of its hash table.
#
# A broker reads the properties of a message into a table of 128 places, adds its own, and writes them down as
# the table has them. No reader may rely on it; who compares bytes, or makes records that a broker makes,
# follows it.

_PLACES: Final = 128
_INT: Final = 0xFFFF_FFFF


def broker_order(properties: Mapping[str, str]) -> dict[str, str]:
    """The same properties in a broker's order; those that fall on one place stay as they were given."""
    places = _PLACES
    while 4 * len(properties) > 3 * places:  # the table grows when it is three quarters full
        places *= 2

    def place(name: str) -> int:
        found = java_hash(name) & _INT
        return (found ^ found >> 16) & (places - 1)

    return {name: properties[name] for name in sorted(properties, key=place)}


# -- delay levels ----------------------------------------------------------------------------------
#
# Delay levels: a message that is to be delivered later is stored in the schedule topic, as a broker stores it.
#
# **Contract.** ``delayed`` is pure: it says what to append. The store lists the schedule topic as a broker
# does, with the time of delivery as tag code, so that a broker that starts on the directory delivers what is
# due. This store delivers nothing itself. ``append`` never looks at the property ``DELAY``: a delivered message
# still bears it.

DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""A broker's own ``messageDelayLevel``."""
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL: Final = re.compile(r"([0-9]+)([smhd])")


def parse_levels(text: str) -> tuple[int, ...]:
    """Milliseconds of each level of ``messageDelayLevel``: numbers with one of s, m, h, d, divided by blanks."""
    words = text.split()
    found = [level for level in map(_LEVEL.fullmatch, words) if level]
    if not words or len(found) < len(words):
        raise InvalidError(f"delay levels {text!r}", do='give them as "1s 5s 1m 2h"')
    return tuple(int(level[1]) * _UNITS_MS[level[2]] for level in found)


def delayed(message: NewMessage, level: int, *, levels: str = DELAY_LEVELS) -> NewMessage:
    """What is stored of a message for another topic and queue that is to be delivered after a delay.

    Above the highest of the broker's ``levels`` the highest is taken, as by a broker; below 1, and for a message that is a
    delayed one already: InvalidError.
    """
    highest = len(parse_levels(levels))
    if level < 1:
        raise InvalidError(f"delay level {level}: the first is 1")
    if message.topic == SCHEDULE_TOPIC:
        raise InvalidError("the message is a delayed one already")
    level = min(level, highest)
    found = {
        **message.properties,
        names.DELAY: str(level),
        names.REAL_TOPIC: message.topic,
        names.REAL_QUEUE_ID: str(message.queue_id),
    }
    return replace(
        message, topic=SCHEDULE_TOPIC, queue_id=level - 1, properties=broker_order(found)
    )


def delivery_ms(
    properties: Mapping[str, str], store_ms: int, delays_ms: tuple[int, ...]
) -> int | None:
    """When a record of the schedule topic is to be delivered, UTC; None: it names no level."""
    text = properties.get(names.DELAY, "")
    level = int(text) if text.isascii() and text.isdigit() else 0
    if level <= 0:
        return None
    return store_ms + delays_ms[min(level, len(delays_ms)) - 1]
