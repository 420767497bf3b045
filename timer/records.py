"""What a record of a broker's timer topics says: when it is due, whether it is a delete mark, how often it was rolled. Pure.

A broker keeps a message that is due later under another topic; the real one is in its properties. Of the wheel's topic the
property ``TIMER_OUT_MS`` is the due time; of the schedule topic the consume queue's tag code is, and the property ``DELAY``
names the level. A message that is due in days is *rolled*: after a while the broker stores it again, with
``TIMER_ROLL_TIMES`` one higher; both records are one timer. A record with ``TIMER_DEL_UNIQKEY`` is a *delete mark*: it
cancels the message with that unique id (or real topic, ``+`` and unique id) that is due at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiered.format.block import bytes_at, parse_records
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
_DUE: Final = b"TIMER_OUT_MS\x01"
_ROLLS: Final = b"TIMER_ROLL_TIMES\x01"
_KEY: Final = b"UNIQ_KEY\x01"
MARK: Final = b"TIMER_DEL_UNIQKEY\x01"
"""The property that makes a record a delete mark."""
_ASKED: Final = b"TIMER_DELIVER_MS\x01"
_AFTER_S: Final = b"TIMER_DELAY_SEC\x01"
_AFTER_MS: Final = b"TIMER_DELAY_MS\x01"
_LEVEL: Final = b"DELAY\x01"
_TOPIC: Final = b"REAL_TOPIC\x01"
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
        drop: Names, each with 0x01 behind.
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
    """What the records of a batch say.

    Args:
        batch: Of a timer topic, or of an hourly file.
        known: int64[n], their due times, where they are known (as of an hourly file).
    """
    sizes = np.maximum(batch.sizes, 0)
    block = parse_records(batch.data, batch.positions, sizes)
    said = PropertyColumns(block, (block.faults == RecordFault.OK) & (batch.sizes > 0))
    if known is not None:
        dues = np.where(said.sound, known, -1)
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
    said = PropertyColumns(block, np.ones(len(block), np.bool_))
    hashes = said.hashes(_TOPIC) * _PRIME ^ said.hashes(_KEY)
    is_message = said.has(_KEY) & ~said.has(MARK)
    return hashes, np.where(is_message, said.numbers(_ROLLS, 0), -1)


def asked_times(block: RecordBlock, dues: Longs) -> Longs:
    """When messages of a wheel are to be delivered at the earliest: int64[n], ms, what is due being noted as ``dues``.

    A broker's wheel notes the last whole second before the time that was asked for; a coarser one (``timerPrecisionMs``) an
    earlier moment. Then the message tells: by its own time, or by how long after its being stored.

    Args:
        dues: int64[n], as noted.
    """
    said = PropertyColumns(block, np.ones(len(block), np.bool_))
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


class PropertyColumns:
    """Values of properties of many records at once, found as ``value_of`` finds them."""

    def __init__(self, block: RecordBlock, sound: Flags) -> None:
        self.sound = sound  # which records are looked at; the others have none
        self._data = block.buffer
        self._view = bytes_at(block.buffer, np.uint8)
        self._rows = np.flatnonzero(sound)
        starts = block.properties_positions[self._rows]
        if len(starts) > 1 and (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts)
            self._rows, starts = self._rows[order], starts[order]
        self._starts, self._sizes = starts, block.properties_sizes[self._rows]
        self._found: dict[bytes, tuple[Longs, Longs]] = {}

    def has(self, name: bytes) -> Flags:
        """Which have a value that is not empty."""
        starts, ends = self._values(name)
        return ends > starts

    def hashes(self, name: bytes) -> npt.NDArray[np.uint64]:
        """Of the values; equal ones have equal hashes, and hardly any others."""
        starts, ends = self._values(name)
        sizes, found = ends - starts, np.zeros(len(starts), np.uint64)
        for at in range(int(sizes.max(initial=0))):
            rows = np.flatnonzero(sizes > at)
            found[rows] = found[rows] * _PRIME + self._view[starts[rows] + at] + np.uint64(1)
        return found

    def numbers(self, name: bytes, otherwise: int) -> Longs:
        """The values as ``number_of`` reads them."""
        starts, ends = self._values(name)
        sizes = ends - starts
        is_number = (sizes > 0) & (sizes <= _DIGITS_MAX)
        values = np.zeros(len(starts), np.int64)
        for at in range(int(sizes[is_number].max(initial=0))):
            rows = np.flatnonzero(is_number & (sizes > at))
            digits = self._view[starts[rows] + at] - np.uint8(48)
            is_number[rows] &= digits <= 9  # noqa: PLR2004
            values[rows] = values[rows] * 10 + digits
        values[~is_number] = otherwise
        return values

    @cached_property
    def _names(self) -> Longs:
        return np.flatnonzero(self._view == 1)  # each name ends with it

    @cached_property
    def _ends(self) -> Longs:
        return np.flatnonzero(self._view == 2)  # noqa: PLR2004 (ends a pair)

    def _values(self, name: bytes) -> tuple[Longs, Longs]:
        """Where the value of each record begins and ends; both 0 where it has none."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: bytes) -> tuple[Longs, Longs]:
        starts, ends = np.zeros((2, len(self.sound)), np.int64)
        if name not in bytes(self._data):
            return starts, ends
        size = len(name)
        at = self._names[self._names >= size - 1] - (size - 1)
        for byte, offset in (
            (name[0], 0),
            (name[size // 2], size // 2),
        ):  # few are left for the comparison
            at = at[self._view[at + offset] == byte]
        at = at[bytes_at(self._data, f"S{size}")[at] == name]
        row = np.searchsorted(self._starts, at, side="right") - 1
        own = row >= 0
        at, row = at[own], row[own]
        own = at < self._starts[row] + self._sizes[row]
        own &= (at == self._starts[row]) | (self._view[at - 1] == 2)  # noqa: PLR2004
        at, row = at[own], row[own]
        begin, limit = at + size, self._starts[row] + self._sizes[row]
        separator = np.searchsorted(self._ends, begin)
        end = np.append(self._ends, len(self._view))[separator]
        rows = self._rows[row]
        starts[rows], ends[rows] = begin, np.minimum(end, limit)  # of several the last counts
        return starts, ends
