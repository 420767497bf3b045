"""Many records at once: equal to the plain specification, on good, damaged and random bytes."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import captures, scalar
from support.examples import HOST_V6, lay_out, make, records

from tiered.format import block as blocks
from tiered.format import sysflag
from tiered.format.block import (
    RecordBlock,
    Stop,
    Walk,
    check_records,
    group_by_queue,
    inner_counts,
    parse_records,
    split_records,
    topic_bytes,
    topics_equal,
    walk_records,
)
from tiered.format.properties import tag_hash
from tiered.format.property_columns import tag_hashes
from tiered.format.record import (
    RECORD_BYTES_MIN,
    RecordError,
    RecordFault,
    decode_record,
    encode_record,
)
from tiered.model import MessageQueue

SIZE_MAX = 1 << 20
COLUMNS = {
    "fault": "faults",
    "body_crc": "body_crcs",
    "queue_id": "queue_ids",
    "queue_offset": "queue_offsets",
    "physical_offset": "physical_offsets",
    "sys_flag": "sys_flags",
    "store_timestamp_ms": "store_timestamps_ms",
    "body_position": "body_positions",
    "body_size": "body_sizes",
    "topic_position": "topic_positions",
    "topic_size": "topic_sizes",
    "properties_position": "properties_positions",
    "properties_size": "properties_sizes",
    "position": "positions",
    "size": "sizes",
}
FEW_TOPICS = st.sampled_from(["", "a", "b", "orders-8", "x" * 8, "x" * 9, "y" * 127, "z" * 121])


def assert_same(block: RecordBlock, rows: list[scalar.ScalarRecord]) -> None:
    """Every column of the block equals the specification's."""
    assert set(COLUMNS) == {field.name for field in fields(scalar.ScalarRecord)}
    for name, column in COLUMNS.items():
        assert getattr(block, column).tolist() == [getattr(row, name) for row in rows], name
    assert {queue: indices.tolist() for queue, indices in group_by_queue(block)} == scalar.group(
        block.buffer, rows
    )
    hashes = [scalar.tag_code(block.buffer, row) for row in rows]
    assert tag_hashes(block).tolist() == hashes
    assert inner_counts(block).tolist() == [scalar.inner_count(block.buffer, row) for row in rows]


def assert_block_is_scalar(
    data: bytes, start: int, physical_offset: int
) -> tuple[RecordBlock, Walk]:
    """All three steps by both ways; what they found."""
    block, walk = split_records(
        data, start, len(data), physical_offset=physical_offset, size_max=SIZE_MAX
    )
    positions, sizes, end, stop = scalar.walk(data, start, len(data), size_max=SIZE_MAX)
    assert (walk.positions.tolist(), walk.sizes.tolist(), walk.end, walk.stop) == (
        positions,
        sizes,
        end,
        stop,
    )
    rows = [scalar.parse(data, *place) for place in zip(positions, sizes, strict=True)]
    for row in rows:
        scalar.check(data, row, expected_physical=physical_offset + row.position - start)
    assert_same(block, rows)
    return block, walk


@settings(deadline=None)
@given(
    st.lists(records() | records(FEW_TOPICS), max_size=8),
    st.binary(max_size=12),
    st.integers(0, 2**40),
)
def test_sound_records(rows, before, physical_offset):
    data = before + lay_out(rows, physical_offset)
    block, walk = assert_block_is_scalar(data, len(before), physical_offset)
    assert block.is_sound
    assert walk.stop is Stop.SHORT
    assert walk.end == len(data)
    assert len(block) == len(rows)
    decoded = [decode_record(data, position) for position in walk.positions.tolist()]
    assert [replace(row, physical_offset=0) for row in decoded] == [
        replace(row, physical_offset=0) for row in rows
    ]


@settings(deadline=None)
@given(st.lists(records(FEW_TOPICS), min_size=1, max_size=5), st.data())
def test_damaged_records(rows, data):
    raw = bytearray(lay_out(rows))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    assert_block_is_scalar(bytes(raw[:cut]), 0, 0)


@settings(deadline=None)
@given(st.lists(records(FEW_TOPICS), min_size=1, max_size=5), st.data())
def test_any_places_and_sizes(rows, data):
    """A consume queue may point anywhere: into the middle, before the start, behind the end."""
    raw = lay_out(rows)
    good = walk_records(raw, 0, len(raw), size_max=SIZE_MAX)
    places = list(zip(good.positions.tolist(), good.sizes.tolist(), strict=True))
    anywhere = st.tuples(
        st.integers(-(2**40), 2**40) | st.integers(-10, len(raw) + 10),
        st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300),
    )
    places += data.draw(st.lists(anywhere | st.sampled_from(places), max_size=6))
    places = data.draw(st.permutations(places))
    block = parse_records(
        raw,
        np.array([place[0] for place in places], np.int64),
        np.array([place[1] for place in places], np.int32),
    )
    assert_same(block, [scalar.parse(raw, *place) for place in places])


@settings(deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_random_bytes(data, positions):
    assert_block_is_scalar(data, 0, 0)
    sizes = np.full(len(positions), RECORD_BYTES_MIN, np.int32)
    block = parse_records(data, np.array(positions, np.int64), sizes)
    assert_same(block, [scalar.parse(data, at, RECORD_BYTES_MIN) for at in positions])


@settings(deadline=None)
@given(records())
def test_block_and_decode_agree_on_a_lone_record(record):
    raw = encode_record(record)
    block, _ = split_records(
        raw, 0, len(raw), physical_offset=record.physical_offset, size_max=SIZE_MAX
    )
    assert block.is_sound
    [(queue, indices)] = group_by_queue(block)
    assert queue == MessageQueue(record.topic, record.queue_id)
    assert indices.tolist() == [0]
    assert topic_bytes(block, 0).decode("utf-8", "surrogateescape") == record.topic


@settings(deadline=None)
@given(records(), records(), st.binary(min_size=256, max_size=256))
def test_nothing_outside_the_record_is_looked_at(record, other, noise):
    """The same results whatever stands before and behind."""
    raw = encode_record(record)
    seen = []
    for before, behind in ((b"", b""), (noise, encode_record(other)), (bytes(300), noise)):
        data = before + raw + behind
        block = parse_records(data, np.array([len(before)]), np.array([len(raw)], np.int32))
        check_records(block, expected_physical=None)
        seen.append(
            (
                [
                    getattr(block, column).tolist()
                    for name, column in COLUMNS.items()
                    if "position" not in name
                ],
                tag_hashes(block).tolist(),
                blocks._hashes(
                    block, np.array([0]), blocks._topic_words(block, np.array([0]))
                ).tolist(),
            )
        )
    assert seen[0] == seen[1] == seen[2]


def test_a_record_with_a_fault_does_not_hide_the_next():
    raw = bytearray(lay_out([make(body=b"a" * 50), make(body=b"b" * 50), make(body=b"c" * 50)]))
    size = len(raw) // 3
    raw[size + 90] ^= 1
    raw[2 * size + 30] ^= 1
    block, walk = split_records(raw, 0, len(raw), physical_offset=0, size_max=SIZE_MAX)
    assert block.faults.tolist() == [
        RecordFault.OK,
        RecordFault.CRC,
        RecordFault.PHYSICAL_OFFSET,
    ]
    assert walk.end == len(raw)
    assert [indices.tolist() for _, indices in group_by_queue(block)] == [[0]]
    everything = np.ones(3, np.bool_)
    assert [indices.tolist() for _, indices in group_by_queue(block, among=everything)] == [
        [0, 1, 2]
    ]
    assert topics_equal(block, np.arange(3), "TopicTest").all()
    unread, _ = split_records(
        raw, 0, size * 2, physical_offset=0, size_max=SIZE_MAX, check_crc=False
    )
    assert unread.is_sound


@pytest.mark.parametrize(
    ("tail", "stop"),
    [
        (b"", Stop.SHORT),
        (b"\0" * 7, Stop.SHORT),
        (b"\0" * 8, Stop.EMPTY),
        ((8).to_bytes(4, "big") + bytes.fromhex("cbd43194"), Stop.BLANK),
        ((0).to_bytes(4, "big") + bytes.fromhex("daa320a7"), Stop.FAULT),
        ((200).to_bytes(4, "big") + bytes(4), Stop.FAULT),
        ((SIZE_MAX + 1).to_bytes(4, "big") + bytes.fromhex("daa320a7"), Stop.FAULT),
        ((90).to_bytes(4, "big") + bytes.fromhex("daa320ab"), Stop.FAULT),
        ((91).to_bytes(4, "big") + bytes.fromhex("daa320ab"), Stop.SHORT),
    ],
)
def test_where_a_walk_stops(tail, stop):
    raw = lay_out([make(), make(version=2)])
    walk = walk_records(raw + tail, 0, len(raw + tail), size_max=SIZE_MAX)
    assert (walk.stop, walk.end, len(walk.positions)) == (stop, len(raw), 2)
    assert walk.positions.dtype == np.int64
    assert walk.sizes.dtype == np.int32


@settings(deadline=None)
@given(st.data(), st.integers(1, 12))
def test_hints_change_nothing_in_a_walk(data, count):
    raw = lay_out([make(body=b"x" * number) for number in range(count)])
    raw += data.draw(st.sampled_from([b"", b"\0" * 9, raw[:50]]))
    true = walk_records(raw, 0, len(raw), size_max=SIZE_MAX).positions.tolist()
    start = data.draw(st.sampled_from(true))
    said = data.draw(st.sets(st.sampled_from(true)) | st.just(set(true)))
    said |= data.draw(st.sets(st.integers(0, len(raw)), max_size=3))
    hints = np.array(sorted(one for one in said if one >= start), np.int64)
    end = data.draw(st.integers(start, len(raw)))
    told = walk_records(raw, start, end, size_max=SIZE_MAX, hints=hints)
    alone = walk_records(raw, start, end, size_max=SIZE_MAX)
    assert (told.positions.tolist(), told.sizes.tolist()) == (
        alone.positions.tolist(),
        alone.sizes.tolist(),
    )
    assert (told.end, told.stop, told.sizes.dtype) == (alone.end, alone.stop, alone.sizes.dtype)


def test_a_walk_ends_at_its_end_and_takes_no_part_of_a_record():
    raw = lay_out([make(), make()])
    walk = walk_records(raw, 0, len(raw) - 1, size_max=SIZE_MAX)
    assert (walk.stop, walk.end, walk.sizes.tolist()) == (
        Stop.SHORT,
        len(raw) // 2,
        [len(raw) // 2],
    )


@settings(deadline=None)
@given(st.lists(st.tuples(FEW_TOPICS, st.integers(0, 2)), min_size=1, max_size=20), st.booleans())
def test_groups_survive_equal_hashes(queues, collide):
    rows = [make(topic=topic, queue_id=number) for topic, number in queues]
    raw = lay_out(rows)
    block, _ = split_records(raw, 0, len(raw), physical_offset=0, size_max=SIZE_MAX)
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(
                blocks, "_hashes", lambda _, chosen, words: np.zeros(len(chosen), np.uint64)
            )
        groups = group_by_queue(block)
    expected: dict[MessageQueue, list[int]] = {}
    for index, (topic, number) in enumerate(queues):
        expected.setdefault(MessageQueue(topic, number), []).append(index)
    assert [(queue, indices.tolist()) for queue, indices in groups] == list(expected.items())


@settings(deadline=None)
@given(st.lists(records(FEW_TOPICS), min_size=1, max_size=8), FEW_TOPICS, st.data())
def test_topics_equal(rows, topic, data):
    raw = lay_out(rows)
    block, _ = split_records(raw, 0, len(raw), physical_offset=0, size_max=SIZE_MAX)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1)))
    same = topics_equal(block, np.array(chosen, np.int64), topic)
    assert same.tolist() == [rows[index].topic == topic for index in chosen]


def test_long_topics_in_a_large_block_cost_their_own_bytes():
    import tracemalloc

    rows = [make(body=b"", topic="t", queue_id=n % 3) for n in range(20_000)]
    rows[7] = make(version=2, topic="L" * 20_000)
    raw = lay_out(rows)
    block, _ = split_records(raw, 0, len(raw), physical_offset=0, size_max=SIZE_MAX)
    tracemalloc.start()
    groups = group_by_queue(block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(groups) == 4
    assert peak < 20 * 8 * len(rows)


def test_an_empty_block():
    block, walk = split_records(b"", 0, 0, physical_offset=0, size_max=SIZE_MAX)
    assert (len(block), walk.stop, group_by_queue(block)) == (0, Stop.SHORT, [])
    assert tag_hashes(block).tolist() == inner_counts(block).tolist() == []
    assert topics_equal(block, np.array([], np.int64), "t").tolist() == []


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, "u1")]
)
def test_any_buffer(kind):
    raw = lay_out([make(), make(sys_flag=sysflag.STORE_HOST_V6, store_host=HOST_V6)])
    block, _ = split_records(kind(raw), 0, len(raw), physical_offset=0, size_max=SIZE_MAX)
    assert block.is_sound
    assert len(group_by_queue(block)[0][1]) == 2


@pytest.mark.parametrize("name", captures.NAMES)
def test_captured_logs(name):
    """Every record of every captured log, by both ways; each is re-encoded to the same bytes."""
    for base, data in captures.log_files(name).items():
        block, walk = assert_block_is_scalar(data, 0, base)
        for index, position in enumerate(walk.positions.tolist()):
            if block.faults[index] == RecordFault.OK:
                record = decode_record(data, position, physical_offset=base + position)
                assert encode_record(record) == data[position : position + record.size]
            else:
                with pytest.raises(RecordError) as caught:
                    decode_record(data, position, physical_offset=base + position)
                assert caught.value.fault == block.faults[index]


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(150, id="short"), pytest.param(20_000, id="long", marks=pytest.mark.slow)],
)
def test_fuzz_real_records(rounds):
    """Random damage to real records: cut, flipped, copied, zeroed."""
    rng = random.Random(20260101)
    logs = [
        data
        for name in ("s09-big-offsets", "s11-lmq-batchcq", "s04-batch-compress")
        for data in captures.log_files(name).values()
    ]
    for _ in range(rounds):
        data = rng.choice(logs)
        starts = walk_records(data, 0, len(data), size_max=SIZE_MAX).positions
        first = int(rng.choice(starts))
        chunk = bytearray(data[first : first + rng.randrange(100, 8000)])
        for _ in range(rng.randrange(6)):
            at, length = rng.randrange(len(chunk)), rng.randrange(1, 12)
            other = rng.randrange(len(chunk))
            chunk[at : at + length] = rng.choice(
                [bytes(length), rng.randbytes(length), chunk[other : other + length], b""]
            )
        assert_block_is_scalar(bytes(chunk), 0, first)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=30))
def test_distinct_is_what_numpy_says(values: list[int]):
    some = np.array(values, np.int64)
    assert blocks.distinct(some).tolist() == np.unique(some).tolist()


def test_a_tag_that_is_no_utf_8_is_hashed_as_java_reads_it():
    data = lay_out([make(properties_raw=b"TAGS\x01a\xed\xa9\xa9b\x02")])
    block, _ = assert_block_is_scalar(data, 0, 0)
    assert tag_hashes(block).tolist() == [tag_hash("a\ufffdb")]
