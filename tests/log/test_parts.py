"""Parts in columns: what goes in comes out, in checkpoints and in entries; what is none is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bundles import made_part, put_bundle, rows_of
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder, batch_of

from backends.memory import MemoryStore
from tiered.format.bundle import build_section, pack_table
from tiered.log.bundles import (
    SectionRow,
    bundle_row,
    decode_numbers,
    encode_numbers,
    named_sections,
    some_of,
    table_of,
)
from tiered.log.composite import CommitColumns
from tiered.log.parts import (
    NO_PARTS,
    PART,
    Incarnation,
    Parts,
    Segment,
    Segments,
    decode_columns,
    encode_columns,
)
from tiered.log.sections import read_part
from tiered.model import LogOffset, MessageQueue, QueueOffset

OFFSETS = st.integers(0, 2**62 - 2**33)


@st.composite
def any_part(draw: st.DrawFn) -> Any:
    count = draw(st.integers(1, 2**20))
    return made_part(
        draw(OFFSETS),
        draw(OFFSETS),
        count,
        draw(st.integers(0, 2**30)),
        key=draw(st.sampled_from(("bundle/0/a", "bundle/0/b", "topic/t/1/c"))),
        start=draw(st.integers(0, 2**40)),
        level=draw(st.integers(0, 3)),
        holes=draw(st.integers(0, count)),
        times=draw(st.sampled_from(((-1, -1), (0, 0), (5, 2**61)))),
        last=draw(st.integers(0, 2**32 - 1)),
    )


ROWS = st.lists(st.lists(any_part(), max_size=6), max_size=5)


@given(ROWS)
def test_i5_columns_of_a_checkpoint_give_the_same_parts(rows: list[list[Any]]):
    document = json.loads(json.dumps(encode_columns(Parts.of(row) for row in rows)))
    found = decode_columns(document)
    assert list(found) == [part for row in rows for part in row]
    assert found == Parts.joined(Parts.of(row) for row in rows)
    assert document["count"] == len(found)
    assert len(document["bundles"]) == len({part.bundle for part in found})


@given(st.lists(any_part(), min_size=1, max_size=8), st.data())
def test_parts_are_a_sequence(some: list[Any], draw: st.DataObject):
    parts = Parts.of(some)
    low = draw.draw(st.integers(0, len(some)))
    high = draw.draw(st.integers(low, len(some)))
    assert list(parts[low:high]) == some[low:high]
    assert [parts[number] for number in range(len(parts))] == some
    assert parts[-1] == some[-1]
    assert parts[low:high] + parts[high:] == parts[low:]
    assert parts.log_bytes == sum(part.log_bytes for part in some)
    assert (parts.queue_end, parts.log_end) == (some[-1].queue_end, some[-1].log_end)
    assert parts.column("count").tolist() == [part.count for part in some]
    assert (Parts.of(parts), hash(Parts.of(some))) == (parts, hash(parts))


def test_no_parts():
    assert decode_columns(encode_columns([])) == NO_PARTS == Parts.of([]) == Parts.joined([])
    assert list(NO_PARTS) == []


@given(ROWS, st.data())
def test_segments_in_columns_are_as_those_of_a_tuple(rows: list[list[Any]], draw: st.DataObject):
    plain = tuple(
        Segment(LogOffset(at), QueueOffset(at), at, at % 2 == 0, Parts.of(row))
        for at, row in enumerate(rows)
    )
    found = Segments.of(plain)
    assert (found, plain, hash(found), repr(found)) == (plain, found, hash(plain), repr(plain))
    low = draw.draw(st.integers(0, len(plain)))
    assert [*found[:low], *found[low:]] == [*plain]
    assert found[low:] == plain[low:]
    assert [found[at - len(plain)] for at in range(len(plain))] == [*plain]
    assert found.where(found.rows["sealed"]) == plain[::2]
    incarnation = Incarnation(0, QueueOffset(0), QueueOffset(9), segments=found[low:])
    assert incarnation.parts() == Parts.joined(Parts.of(row) for row in rows[low:])
    assert (Segments.of(found), found == [*plain]) == (found, False)


def test_a_part_takes_96_bytes():
    assert PART.itemsize == 96


# -- entries --------------------------------------------------------------------------------------

QUEUES = st.builds(MessageQueue, st.sampled_from(("a", "ä", "%RETRY%g", "")), st.integers(0, 9))


@given(st.lists(st.tuples(QUEUES, st.integers(0, 9), OFFSETS, any_part()), min_size=1, max_size=8))
def test_i5_a_row_of_an_entry_gives_the_same_parts(named: list[Any]):
    found: list[Any] = []
    for row in json.loads(json.dumps(rows_of(named))):
        some = named_sections(row)
        found += zip(some.queues, some.incarnations, some.segments, some.parts, strict=True)
    assert found == named


def test_i2_what_an_entry_names_is_what_was_uploaded():
    """Many queues, several bundles; some sections of a bundle are named by another entry than others."""
    builder = TierBuilder()
    queues = [MessageQueue("t", number) for number in range(5)]
    batches = [batch_of(0, [b"%d" % n, None, (2, b"x")], queue=q) for n, q in enumerate(queues)]
    commits = [builder.take(batch) for batch in batches]
    stored = builder.put(*commits)
    for numbers in ([0, 1, 2, 3, 4], [1, 3], [4]):
        packed = some_of(stored.table, numbers)
        some = named_sections(bundle_row(stored.bundle, packed))
        assert some.queues == [queues[number] for number in numbers]
        assert list(some.parts) == [stored.named.parts[number] for number in numbers]
        for number, part in zip(numbers, some.parts, strict=True):
            records, items = read_part(builder.store, PREFIX, part)
            assert bytes(records) == b"".join(
                bytes(memoryview(chunk)) for chunk in commits[number].data()
            )
            assert bytes(items) == CommitColumns.of([commits[number]]).items
            assert (part.count, part.holes) == (4, 1)


def test_an_entry_of_a_thousand_parts_takes_60_bytes_a_part():
    builder = TierBuilder()
    queues = [MessageQueue(f"topic-{number // 8}", number % 8) for number in range(1000)]
    commits = [
        builder.take(batch_of(0, [b"x" * (number * 37 % 200)], queue=queue))
        for number, queue in enumerate(sorted(queues))
    ]
    stored = builder.put(*commits)
    row = bundle_row(stored.bundle, stored.packed)
    assert len(json.dumps(row)) <= 60 * 1000


# -- what is none ---------------------------------------------------------------------------------


def row_with(**said: int) -> list[Any]:
    """A row of one section, of which this is said instead of the truth."""
    row = SectionRow(QUEUE, 0, 0, 0, 0, 0, 5, 6)
    store = MemoryStore()
    named = put_bundle(store, "bundle/0/k", [(row, build_section([b"x" * 100], bytes(20)))])
    table = table_of([(row, named.parts[0].section)])
    for name, value in said.items():
        table.rows[name] = value
    return bundle_row(named.bundle, pack_table(table))


def test_a_row_that_is_one():
    (part,) = named_sections(row_with()).parts
    assert (part.log_bytes, part.count, part.log.key) == (100, 1, "bundle/0/k")


@pytest.mark.parametrize(
    "said",
    [
        {"count": 0},
        {"holes": 2},
        {"start": 2**63},
        {"log_offset": 2**62},
        {"queue_offset": 2**64 - 1},
        {"segment": 2**64 - 1},
        {"store_min_ms": -2},
        {"store_max_ms": 2**62},
        {"stored_bytes": 101},
        {"topic": 1},
    ],
)
def test_a_row_that_contradicts_itself_is_refused(said: dict[str, int]):
    with pytest.raises(ValueError):
        named_sections(row_with(**said))


@pytest.mark.parametrize(
    "change",
    [
        {0: 7}, {0: ""}, {1: "9"}, {1: -2}, {1: True}, {2: 2**62}, {3: "no base 64!"}, {3: ""}, {3: 7},
        {3: base64.b64encode(b"no frame").decode()},
    ],
)  # fmt: skip
def test_a_row_of_other_types_is_refused(change: dict[int, Any]):
    row = row_with()
    for at, value in change.items():
        row[at] = value
    with pytest.raises((ValueError, TypeError)):
        named_sections(row)


def columns_with(**said: Any) -> dict[str, Any]:
    return encode_columns([Parts.of([made_part(0, 0), made_part(10, 1000)])]) | said


@pytest.mark.parametrize(
    "said",
    [
        {"count": 1},
        {"count": 3},
        {"count": -1},
        {"count": 2**40},
        {"count": True},
        {"columns": ""},
        {"columns": "!"},
        {"columns": base64.b64encode(b"no frame").decode()},
        {"bundles": []},
        {"bundles": [["k", 1]]},
        {"bundles": [["k", 1, 0], [7, 1, 0]]},
        {"bundles": [["k", 1, 0], ["k", -2, 0]]},
    ],
)
def test_columns_that_are_none_are_refused(said: dict[str, Any]):
    with pytest.raises((ValueError, TypeError, LookupError)):
        decode_columns(columns_with(**said))


@pytest.mark.parametrize(
    ("column", "value"),
    [("count", 0), ("holes", 11), ("items_at", 1), ("records_at", 1), ("log_offset", -1)],
)
def test_columns_of_parts_that_leave_their_section_are_refused(column: str, value: int):
    rows = Parts.of([made_part(0, 0), made_part(10, 1000)]).rows.copy()
    rows[column][1] = value
    bad = Parts(rows, (made_part(0, 0).bundle, made_part(10, 1000).bundle))
    with pytest.raises(ValueError):
        decode_columns(encode_columns([bad]))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_numbers_come_back(numbers: list[int]):
    assert decode_numbers(encode_numbers(numbers), len(numbers)).tolist() == numbers
    with pytest.raises(ValueError):
        decode_numbers(encode_numbers(numbers), len(numbers) + 1)


def test_a_million_parts_are_columns_and_not_objects():
    part = made_part(0, 0)
    rows = np.repeat(Parts.of([part]).rows, 1_000_000)
    rows["queue_offset"] = 10 * np.arange(len(rows))
    whole = Parts(rows, (part.bundle,) * len(rows))
    document = encode_columns([whole])
    assert decode_columns(document)[999_999].queue_offset == 9_999_990


def made_rows(number: int) -> Parts:
    return Parts.of([made_part(10 * number, 1000 * number)])


def test_parts_that_come_one_by_one_cost_by_what_comes(monkeypatch: pytest.MonkeyPatch):
    copied = 0

    class Counting(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal copied
            copied += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    monkeypatch.setattr("tiered.log.parts.list", Counting, raising=False)
    few, many = 100, 3000
    costs = []
    for count in (few, many):
        copied, parts = 0, made_rows(0)
        for number in range(1, count):
            parts = parts.followed_by(made_rows(number))
        costs.append(copied / count)
        assert parts == Parts.of([made_part(10 * n, 1000 * n) for n in range(count)])
    assert costs[1] <= 2 * costs[0], "a part behind 3,000 costs what one behind 100 does"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=30))
def test_whoever_goes_on_from_older_parts_changes_nothing_for_others(steps: list[tuple[int, int]]):
    seen: list[tuple[Parts, list[Any]]] = [(made_rows(0), list(made_rows(0)))]
    for number, (base, count) in enumerate(steps, 1):
        parts, plain = seen[base % len(seen)]
        more = Parts.of([made_part(10 * number, 1000 * n) for n in range(count)])
        seen.extend(
            [(parts.followed_by(more), [*plain, *more]), (parts[1:], plain[1:]), (more, list(more))]
        )
    for parts, plain in seen:
        assert list(parts) == plain
        assert len(parts.rows) == len(parts.bundles) == len(plain)
