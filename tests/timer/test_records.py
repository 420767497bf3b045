"""What is read of records by columns is what is read of them one by one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timers import SOURCE, wheel_batch, wheel_record

from tiered.format.properties import value_of
from tiered.format.record import decode_record, encode_record
from tiered.log.timers import HOUR_MS, TimerSource
from tiered.model import QueueBounds, QueueOffset
from timer.hour_files import Counts, Enqueue, Given, ImportProgress
from timer.records import DUE_MS_MAX, MARK, number_of, read_rows

if TYPE_CHECKING:
    from tiered.local.interface import RecordBatch

NAMES = (
    b"TIMER_OUT_MS",
    b"TIMER_ROLL_TIMES",
    b"TIMER_DEL_UNIQKEY",
    b"UNIQ_KEY",
    b"XTIMER_OUT_MS",
    b"K",
)
CHUNK = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from([b"\x01", b"\x02", b"\x01\x02"]),
    st.integers(0, 10**18).map(lambda n: b"%d" % n),
    st.sampled_from([b"", b"-1", b"7x", b"A"]),
)
PAIRS = st.lists(st.tuples(st.sampled_from(NAMES), CHUNK), max_size=6).map(
    lambda pairs: b"".join(b"%s\x01%s\x02" % pair for pair in pairs)
)
RAW = st.one_of(PAIRS, PAIRS.map(lambda raw: raw[:-1]), st.lists(CHUNK, max_size=9).map(b"".join))


def with_properties(number: int, raw: bytes) -> bytes:
    record = decode_record(wheel_record(number, 0), 0)
    size = record.size - len(record.properties_raw) + len(raw)
    return encode_record(replace(record, properties_raw=raw, size=size))


@settings(max_examples=200, deadline=None)
@given(st.lists(RAW, max_size=8), st.sets(st.integers(0, 7)), st.booleans())
def test_columns_are_as_the_records_one_by_one(raws: list[bytes], holes: set[int], turned: bool):
    batch = wheel_batch(0, [with_properties(n, raw) for n, raw in enumerate(raws)])
    if turned:
        batch.positions, batch.sizes, raws = batch.positions[::-1], batch.sizes[::-1], raws[::-1]
    batch.sizes = np.array(
        [0 if n in holes else size for n, size in enumerate(batch.sizes)], np.int32
    )
    rows = read_rows(batch)
    for at, raw in enumerate(raws):
        said = b"" if at in holes else raw
        due = number_of(value_of(said, b"TIMER_OUT_MS"), -1)
        assert rows.dues[at] == (due if due <= DUE_MS_MAX else -1)
        assert rows.rolls[at] == number_of(value_of(said, b"TIMER_ROLL_TIMES"), 0)
        assert rows.marks[at] == bool(value_of(said, MARK))


class Wheel:
    """A local store's wheel, read in small batches."""

    def __init__(self, records: list[bytes], batch: int) -> None:
        self.records, self.batch = records, batch

    def read(self, _queue: object, at: int, *, count_max: int, **_: object) -> RecordBatch:
        return wheel_batch(at, self.records[at : at + min(count_max, self.batch)])


def fate(
    number: int,
    rows: list[tuple[int, int, int, bool]],
    source: Enqueue,
    given: Counter[tuple[int, int]],
) -> str:
    """As docs/timers.md says it, of a store that is looked at as a whole."""
    due, key, roll, is_mark = rows[number]
    if due < source.progress.read_ms and number < source.progress.listed:
        return "delivered"
    of_message = [(r, m) for d, k, r, m in rows if (d, k) == (due, key)]
    if not is_mark and any(r < roll for r, m in of_message if not m):
        return "rolled"
    if due >= source.known.due_from(number):
        return "known"
    if not is_mark and given[due, key]:
        given[due, key] -= 1
        return "delivered"
    if is_mark:
        messages = [n for n, (d, k, _, m) in enumerate(rows) if (d, k, m) == (due, key, False)]
        if messages and not any(due >= source.known.due_from(n) for n in messages):
            return "cancelled"
        ranges = source.known.ranges
        low, was_far = 0, False
        for end, due_from in ranges:
            was_far, low = was_far or (low < number and due >= due_from), end
        return "marks" if due >= source.due_from or was_far else "near"
    if any(m for _, m in of_message):
        return "cancelled"
    return "taken" if due >= source.due_from else "near"


@pytest.mark.parametrize("seed", range(150))
def test_what_is_taken_is_what_the_page_says(seed: int):
    rng = random.Random(seed)
    rolls, marks = rng.choice((((0,), 0.0), ((0,), 0.0), ((0, 0, 1, 2), 0.2)))
    rows = [
        (HOUR_MS + rng.randrange(9), rng.randrange(4), rng.choice(rolls), rng.random() < marks)
        for _ in range(rng.randrange(30))
    ]
    records = []
    for number, (due, key, roll, is_mark) in enumerate(rows):
        said = {"UNIQ_KEY": f"K{key}", "REAL_TOPIC": "t"}
        said |= {"TIMER_ROLL_TIMES": str(roll)} if roll else {}
        said |= (
            {"TIMER_DEL_UNIQKEY": rng.choice(("", "t+")) + f"K{key}", "UNIQ_KEY": "M"}
            if is_mark
            else {}
        )
        records.append(wheel_record(number, due, **said))
    known = TimerSource(0, len(rows))
    for end in sorted(rng.sample(range(len(rows) + 1), rng.randint(0, min(3, len(rows))))):
        known = known.with_taken(known.position, end, HOUR_MS + rng.randrange(12))
    sent = Counter(
        (HOUR_MS + rng.randrange(5), rng.randrange(4)) for _ in range(rng.choice((0, 4)))
    )
    given = Given(Counter({(due, f"K{key}".encode()): n for (due, key), n in sent.items()}))
    given.until_ms = given.last_due_ms
    source = Enqueue(
        SOURCE, QueueBounds(QueueOffset(0), QueueOffset(len(rows))),
        ImportProgress(HOUR_MS + rng.randrange(4), rng.randrange(len(rows) + 1)), known,
        rng.choice((0, HOUR_MS + rng.randrange(9))), given,
    )  # fmt: skip
    total, taken = Counts(), list[int]()
    for chosen in source.choose(Wheel(records, rng.randint(1, 9))):  # type: ignore[arg-type]
        total.add(chosen.counts)
        taken += (int(chosen.rows.batch.base_offset) + chosen.indices).tolist()
    fates = [fate(number, rows, source, sent) for number in range(len(rows))]
    assert {
        name: getattr(total, name) for name in Counts.__slots__ if getattr(total, name)
    } == Counter(fates)
    assert taken == [n for n, one in enumerate(fates) if one in {"taken", "marks"}]
