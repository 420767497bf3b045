"""What a record of a broker's timer topics says: when it is due, whether it is a delete mark, how often it was rolled. Pure.

A broker keeps a message that is due later under another topic; the real one is in its properties. Of the wheel's topic the
property ``TIMER_OUT_MS`` is the due time; of the schedule topic the consume queue's tag code is, and the property ``DELAY``
names the level. A message that is due in days is *rolled*: after a while the broker stores it again, with
``TIMER_ROLL_TIMES`` one higher; both records are one timer. A record with ``TIMER_DEL_UNIQKEY`` is a *delete mark*: it
takes back the message with that unique id (or real topic, ``+`` and unique id) that is due at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import parse_records
from tiered.format.record import RecordFault
from tiered.local.catalog import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.face import RecordBatch

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DUE_MS_MAX: Final = 2**31 * 3_600_000 - 1
"""Its hour is the number of a queue, which has 32 bits."""
DELAYS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, *(60 * m for m in range(1, 11)), 1200, 1800, 3600, 7200)
)
"""Of a broker's delay levels, unless it is set otherwise."""
_DUE: Final = b"TIMER_OUT_MS\x01"
_ROLLS: Final = b"TIMER_ROLL_TIMES\x01"
_KEY: Final = b"UNIQ_KEY\x01"
MARK: Final = b"TIMER_DEL_UNIQKEY\x01"
"""The property that makes a record a delete mark."""
_LEVEL: Final = b"DELAY\x01"
_TOPIC: Final = b"REAL_TOPIC\x01"
_DIGITS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class TimerRows:
    """What the records of a batch say, one element an item.

    Attributes:
        batch: They.
        block: Their fields; element ``i`` is that of item ``i`` (of a hole it means nothing).
        dues: int64[n], due time, ms; -1: a hole, or no timer that can be understood.
        rolls: int64[n], how often it was rolled.
        keys: Unique id; of a delete mark that of the message that it takes back.
        marks: Which are delete marks.
    """

    batch: RecordBatch
    block: RecordBlock
    dues: Longs
    rolls: Longs
    keys: list[bytes]
    marks: Flags

    def __len__(self) -> int:
        """Number of items."""
        return len(self.dues)

    def names(self, at: int) -> tuple[tuple[int, bytes], ...]:
        """The names of a message that is no delete mark (``names_of``)."""
        return names_of(int(self.dues[at]), self.properties(at))

    def properties(self, at: int) -> bytes:
        """As stored."""
        start = int(self.block.properties_positions[at])
        view = memoryview(self.batch.data).cast("B")
        return bytes(view[start : start + int(self.block.properties_sizes[at])])


def names_of(due: int, properties: bytes) -> tuple[tuple[int, bytes], ...]:
    """By which a delete mark may name a message: due time, and unique id without and with the real topic."""
    key, topic = value_of(properties, _KEY), value_of(properties, _TOPIC)
    return (due, key), (due, topic + b"+" + key)


def value_of(properties: bytes, name: bytes) -> bytes:
    """The value of a property, given its name with 0x01 behind; empty: there is none. Of several the last counts."""
    at = properties.rfind(name)
    while at > 0 and properties[at - 1] != 2:  # noqa: PLR2004 (ends the pair before)
        at = properties.rfind(name, 0, at)
    return properties[at + len(name) :].partition(b"\x02")[0] if at >= 0 else b""


def raw_properties(block: RecordBlock) -> list[bytes]:
    """The properties of each record, as stored; empty of a damaged one."""
    view = memoryview(block.buffer).cast("B")
    starts = block.properties_positions
    ends = (starts + block.properties_sizes).tolist()
    return [bytes(view[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]


def changed_properties(raw: bytes, drop: Sequence[bytes], said: Mapping[bytes, bytes]) -> bytes:
    """Properties without some, and with others said anew; the rest, and the order, stay.

    Args:
        raw: As stored.
        drop: Names, each with 0x01 behind.
        said: Values by name, likewise.
    """
    if raw.endswith(b"\x02") and not any(name in raw for name in drop):
        more = b""
        for name, value in said.items():
            pair, count = name + value + b"\x02", raw.count(name)
            if not count:
                more += pair
            elif count > 1 or not (raw.startswith(pair) or b"\x02" + pair in raw):
                break
        else:
            return raw + more
    found: dict[bytes, bytes] = {}
    for pair in raw.split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if name and value:
            found[name + b"\x01"] = value
    for name in drop:
        found.pop(name, None)
    found.update(said)
    return b"".join(name + value + b"\x02" for name, value in found.items())


def number_of(text: bytes, otherwise: int) -> int:
    """A number of decimal digits."""
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else otherwise


def read_rows(batch: RecordBatch, known: Longs | None = None) -> TimerRows:
    """What the records of a batch say. A loop over the records, a few us each.

    Args:
        batch: Of a timer topic, or of an hourly file.
        known: int64[n], their due times, where they are known (as of an hourly file).
    """
    sizes = np.maximum(batch.sizes, 0)
    block = parse_records(batch.data, batch.positions, sizes)
    sound = ((block.faults == RecordFault.OK) & (batch.sizes > 0)).tolist()
    if known is not None:
        due_of = _known(known.tolist())
    else:
        due_of = _due_scheduled(batch) if batch.queue.topic == SCHEDULE_TOPIC else _due_in_wheel
    dues, rolls, keys, marks = [], [], [], []
    for at, (one, is_sound) in enumerate(zip(raw_properties(block), sound, strict=True)):
        raw = one if is_sound else b""
        mark = value_of(raw, MARK)
        due = due_of(at, raw)
        dues.append(due if 0 <= due <= DUE_MS_MAX else -1)
        rolls.append(number_of(value_of(raw, _ROLLS), 0))
        keys.append(mark or value_of(raw, _KEY))
        marks.append(bool(mark))
    as_longs = np.array(dues, np.int64), np.array(rolls, np.int64)
    return TimerRows(batch, block, *as_longs, keys, np.array(marks, np.bool_))


def _known(dues: list[int]) -> Callable[[int, bytes], int]:
    return lambda at, _raw: dues[at]


def _due_in_wheel(_at: int, raw: bytes) -> int:
    return number_of(value_of(raw, _DUE), -1)


def _due_scheduled(batch: RecordBatch) -> Callable[[int, bytes], int]:
    """The tag code is the time; one that was made anew from the record is not, and the level tells."""
    codes, times = batch.tag_codes.tolist(), batch.store_timestamps_ms.tolist()

    def due_of(at: int, raw: bytes) -> int:
        level = number_of(value_of(raw, _LEVEL), 0)
        if not level:
            return -1
        if codes[at] >= times[at]:
            return int(codes[at])
        return int(times[at]) + DELAYS_MS[min(level, len(DELAYS_MS)) - 1]

    return due_of
