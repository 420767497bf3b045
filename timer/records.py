"""What a record of a broker's timer topics says: when it is due, whether it is a delete mark, how often it was rolled. Pure.

A broker keeps a message that is due later under another topic; the real one is in its properties. Of the wheel's topic the
property ``TIMER_OUT_MS`` is the due time; of the schedule topic the consume queue's tag code is, and the property ``DELAY``
names the level. A message that is due in days is *rolled*: after a while the broker stores it again, with
``TIMER_ROLL_TIMES`` one higher; both records are one timer. A record with ``TIMER_DEL_UNIQKEY`` is a *delete mark*: it
cancels the message with that unique id (or real topic, ``+`` and unique id) that is due at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from backends.lazy_dataclass import dataclass
from tiered.format.block import parse_records
from tiered.format.properties import value_of
from tiered.format.property_columns import PropertyColumns
from tiered.format.record import RecordFault
from tiered.local.catalog import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiered.format.block import RecordBlock
    from tiered.local.interface import RecordBatch

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Name = tuple[int, bytes]

DUE_MS_MAX: Final = 2**31 * 3_600_000 - 1
"""Its hour is the number of a queue, which has 32 bits."""
SECOND_MS: Final = 1000
"""A broker's wheel looks at a second when it is over, unless ``timerPrecisionMs`` says otherwise."""
PRECISION_MS_MAX: Final = 60_000
"""No broker's wheel is taken to be coarser."""
DELAYS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, *(60 * m for m in range(1, 11)), 1200, 1800, 3600, 7200)
)
"""Of a broker's delay levels, unless it is set otherwise."""
_DUE: Final = b"TIMER_OUT_MS"
_ROLLS: Final = b"TIMER_ROLL_TIMES"
_KEY: Final = b"UNIQ_KEY"
MARK: Final = b"TIMER_DEL_UNIQKEY"
"""The property that makes a record a delete mark."""
_ASKED: Final = b"TIMER_DELIVER_MS"
_AFTER_S: Final = b"TIMER_DELAY_SEC"
_AFTER_MS: Final = b"TIMER_DELAY_MS"
_LEVEL: Final = b"DELAY"
_TOPIC: Final = b"REAL_TOPIC"
_DIGITS_MAX: Final = 16
_PRIME: Final = np.uint64(0x100000001B3)


@dataclass(frozen=True, slots=True)
class TimerRows:
    """What the records of a batch say, one element an item."""

    batch: RecordBatch  # they
    block: RecordBlock
    """Their fields; element ``i`` is that of item ``i`` (of a hole it means nothing)."""
    dues: Longs  # int64[n], due time, ms; -1: a hole, or no timer that can be understood
    rolls: Longs  # int64[n], how often it was rolled
    marks: Flags  # which are delete marks

    def __len__(self) -> int:
        """Number of items."""
        return len(self.dues)

    def name(self, at: int) -> Name:
        """Due time and unique id; of a delete mark those of the message that it cancels."""
        raw = self.properties(at)
        return int(self.dues[at]), value_of(raw, MARK) or value_of(raw, _KEY)

    def names(self, at: int) -> tuple[Name, Name]:
        """The names of a message that is not a delete mark (``names_of``)."""
        return names_of(int(self.dues[at]), self.properties(at))

    def properties(self, at: int) -> bytes:
        """As stored."""
        start = int(self.block.properties_positions[at])
        view = memoryview(self.batch.data).cast("B")
        return bytes(view[start : start + int(self.block.properties_sizes[at])])


def names_of(due: int, properties: bytes) -> tuple[Name, Name]:
    """By which a delete mark may name a message: due time, and unique id without and with the real topic."""
    key, topic = value_of(properties, _KEY), value_of(properties, _TOPIC)
    return (due, key), (due, topic + b"+" + key)


def raw_properties(block: RecordBlock) -> list[bytes]:
    """The properties of each record, as stored; empty of a damaged one."""
    view = memoryview(block.buffer).cast("B")
    starts = block.properties_positions
    ends = (starts + block.properties_sizes).tolist()
    return [bytes(view[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)]


def changed_properties(raw: bytes, drop: Sequence[bytes], said: Mapping[bytes, bytes]) -> bytes:
    """Properties without some, and with others said anew; the rest, and the order, stay."""
    if raw.endswith(b"\x02") and not any(name + b"\x01" in raw for name in drop):
        more = b""
        for name, value in said.items():
            pair, count = name + b"\x01" + value + b"\x02", raw.count(name + b"\x01")
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
            found[name] = value
    for name in drop:
        found.pop(name, None)
    found.update(said)
    return b"".join(name + b"\x01" + value + b"\x02" for name, value in found.items())


def number_of(text: bytes, otherwise: int) -> int:
    """A number of decimal digits."""
    return int(text) if text.isdigit() and len(text) <= _DIGITS_MAX else otherwise


def read_rows(batch: RecordBatch, known: Longs | None = None) -> TimerRows:
    """What the records of a batch say.

    Args:
        batch: Of a timer topic, or of an hourly file.
        known: int64[n], their due times, where they are known (as of an hourly file).
    """
    sizes = np.maximum(batch.sizes, 0)
    block = parse_records(batch.data, batch.positions, sizes)
    said = PropertyColumns.of(block)  # of holes, and of damaged ones, there are none
    if known is not None:
        dues = np.where((block.faults == RecordFault.OK) & (batch.sizes > 0), known, -1)
    elif batch.queue.topic == SCHEDULE_TOPIC:
        dues = _due_scheduled(batch, said.numbers(_LEVEL, 0))
    else:
        dues = said.numbers(_DUE, -1)
    dues[(dues < 0) | (dues > DUE_MS_MAX)] = -1
    return TimerRows(batch, block, dues, said.numbers(_ROLLS, 0), said.has(MARK))


def may_have_others(batch: RecordBatch) -> bool:
    """Whether any of its records may be of a rolled message, or a delete mark. Much cheaper than reading them."""
    return MARK in bytes(batch.data) or may_be_rolled(batch)


def may_be_rolled(batch: RecordBatch) -> bool:
    """Whether any of its records may be of a rolled message."""
    return _ROLLS in bytes(batch.data)


def rolled_columns(block: RecordBlock) -> tuple[npt.NDArray[np.uint64], Longs]:
    """Of messages a hash of real topic and unique id, and how often they were rolled; -1: a mark, or without an id."""
    said = PropertyColumns.of(block)
    hashes = _hashes(said, _TOPIC) * _PRIME ^ _hashes(said, _KEY)
    is_message = said.has(_KEY) & ~said.has(MARK)
    return hashes, np.where(is_message, said.numbers(_ROLLS, 0), -1)


def _hashes(said: PropertyColumns, name: bytes) -> npt.NDArray[np.uint64]:
    """Of the values; equal ones have equal hashes, and hardly any others."""
    starts, sizes = said.find(name)
    found = np.zeros(len(starts), np.uint64)
    for at in range(int(sizes.max(initial=0))):
        rows = np.flatnonzero(sizes > at)
        found[rows] = found[rows] * _PRIME + said.text[starts[rows] + at] + np.uint64(1)
    return found


def asked_times(block: RecordBlock, dues: Longs) -> Longs:
    """When messages of a wheel are to be delivered at the earliest: int64[n], ms, what is due being noted as ``dues``.

    A broker's wheel notes the last whole second before the time that was asked for; a coarser one (``timerPrecisionMs``) an
    earlier moment. Then the message tells: by its own time, or by how long after its being stored.
    """
    said = PropertyColumns.of(block)
    asked, low = said.numbers(_ASKED, -1), dues + SECOND_MS
    for name, unit_ms in (
        (_AFTER_MS, 1),
        (_AFTER_S, SECOND_MS),
    ):  # each goes before those in front of it
        after = np.minimum(said.numbers(name, -1), DUE_MS_MAX // unit_ms)
        is_said = said.has(name)
        asked = np.where(is_said, block.store_timestamps_ms + after * unit_ms, asked)
        low = np.where(is_said, dues + 2 * SECOND_MS, low)  # it was stored a moment later
    is_known = (asked > low) & (asked <= dues + PRECISION_MS_MAX)
    if is_known.any():
        is_known &= said.has(_DUE)
    return np.where(is_known, asked, dues + SECOND_MS)


def _due_scheduled(batch: RecordBatch, levels: Longs) -> Longs:
    """The tag code is the time; one that was made anew from the record is not, and its neighbours, or the level, tell.

    A level is a queue, so all that lies in it is delayed by the same: by what its broker's table says.
    """
    codes, times = batch.tag_codes.astype(np.int64), batch.store_timestamps_ms
    is_time = (codes >= times) & (levels > 0)
    usual = (codes - times)[is_time][-1:]
    by_level = np.array(DELAYS_MS, np.int64)[np.clip(levels, 1, len(DELAYS_MS)) - 1]
    found = np.where(is_time, codes, times + (usual if len(usual) else by_level))
    return np.where(levels > 0, found, -1)
