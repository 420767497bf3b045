"""Reading: what was written comes back in order, byte for byte; what is damaged does not come at all."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiers
from support.journals import PREFIX
from support.merging import gather
from support.tiers import QUEUE, TIME_MS, TierBuilder, batch_of, record_of

from backends.errors import ObjectNotFoundError, UnavailableError
from backends.testing.faulty import Fault, FaultyStore, Rule
from tiered.errors import DataError, InvalidError
from tiered.format.bundle import BLOCK_BYTES
from tiered.log.flat_file import TieredCommitLog, TieredConsumeQueue
from tiered.log.reader import QueueReader, TierBatch, TierReader
from tiered.log.sections import read_range
from tiered.log.state import Gap, Incarnation, Part, Parts, Segment
from tiered.model import Boundary, LogOffset, MessageQueue, QueueOffset

if TYPE_CHECKING:
    from backends.base import ObjectStore

READS = frozenset({"get"})


def reader_of(builder: TierBuilder, store: ObjectStore | None = None) -> QueueReader:
    reader = TierReader(store or builder.store, PREFIX)
    reader.refresh()
    return reader.queue(QUEUE)


def rows(batch: TierBatch) -> dict[int, bytes]:
    """Every item's bytes by queue offset; b"" for a hole."""
    records = batch.records
    data = bytes(memoryview(records.data))
    spans = zip(records.positions.tolist(), records.sizes.tolist(), strict=True)
    return {records.base_offset + n: data[p : p + s] for n, (p, s) in enumerate(spans)}


def read_all(
    reader: QueueReader, start: int = 0, **limits: int
) -> tuple[dict[int, bytes], list[Gap]]:
    found: dict[int, bytes] = {}
    gaps: list[Gap] = []
    for chunk in reader.batches(QueueOffset(start), **limits):
        if isinstance(chunk, Gap):
            gaps.append(chunk)
        else:
            new = rows(chunk)
            assert not new.keys() & found.keys(), "nothing comes twice"
            assert not found or min(new) > max(found), "in order"
            found |= new
    return found, gaps


def expected(base: int, items: list[Any]) -> dict[int, bytes]:
    batch = batch_of(base, items)
    data = bytes(memoryview(batch.data))
    spans = zip(batch.positions.tolist(), batch.sizes.tolist(), strict=True)
    return {base + n: data[p : p + s] for n, (p, s) in enumerate(spans)}


ITEMS = st.lists(
    st.one_of(st.none(), st.binary(max_size=30), st.tuples(st.integers(1, 4), st.binary(max_size=9))),
    min_size=1, max_size=8,
)  # fmt: skip
STEPS = st.lists(
    st.one_of(ITEMS.map(lambda items: ("part", items)), ITEMS.map(lambda items: ("roll", items)), st.integers(1, 9)),
    min_size=1, max_size=6,
)  # fmt: skip


def build(
    steps: list[Any], first: int
) -> tuple[TierBuilder, dict[int, bytes], list[tuple[int, int]]]:
    builder, wanted, gaps = TierBuilder(), {}, []
    for step in steps:
        at = builder.file(QUEUE, first).append_offset
        if isinstance(step, int):
            builder.gap(step)
            gaps.append((at, at + step))
        else:
            builder.add(step[1], first=first, roll=step[0] == "roll")
            wanted |= expected(at, step[1])
    return builder, wanted, gaps


@settings(deadline=None)
@given(STEPS, st.sampled_from([0, 5]), st.integers(1, 400), st.data())
def test_i1_i3_every_message_once_in_order_byte_for_byte(
    steps: list[Any], first: int, bytes_max: int, draw: st.DataObject
):
    builder, wanted, gaps = build(steps, first)
    reader = reader_of(builder)
    found, met = read_all(reader, bytes_max=bytes_max)
    assert found == wanted
    low = reader.incarnation.min_offset
    assert [(gap.start, gap.end) for gap in met] == [gap for gap in gaps if gap[0] >= low]
    start = draw.draw(st.integers(0, reader.incarnation.commit_offset + 2))
    tail, _ = read_all(reader, start, bytes_max=bytes_max)
    assert tail == {offset: raw for offset, raw in wanted.items() if offset >= start}


def test_fields_of_a_batch_are_those_of_its_records():
    builder = TierBuilder()
    items = [None, b"a", None, (2, b"bb"), b"c"]
    builder.add(items, first=40)
    batch = reader_of(builder).read(QueueOffset(40))
    assert isinstance(batch, TierBatch)
    assert batch.records.store_timestamps_ms.tolist() == [
        TIME_MS + n for n in (41, 41, 41, 43, 43, 45)
    ]
    assert batch.records.physical_offsets.tolist() == [-1, 1041, -1, 1043, 1043, 1045]
    assert batch.records.tag_codes.tolist() == [1, 97, 1, 97, 97, 97]
    assert batch.log_offset == 0


def test_reading_stops_at_bytes_and_counts_but_takes_one_record():
    builder = TierBuilder()
    builder.add([b"x" * 100, b"y" * 100, b"z" * 100])
    reader = reader_of(builder)
    size = len(record_of(QUEUE, 0, b"x" * 100))
    counts = [
        reader.read(QueueOffset(0), bytes_max=limit).records.count  # type: ignore[union-attr]
        for limit in (1, size - 1, size, size + 1, 2 * size, 3 * size)
    ]
    assert counts == [1, 1, 1, 1, 2, 3]
    assert reader.read(QueueOffset(0), count_max=2).records.count == 2  # type: ignore[union-attr]


def test_an_inner_batch_is_not_divided_by_bytes_and_can_be_begun_in_the_middle():
    builder = TierBuilder()
    builder.add([b"a", (4, b"b" * 500), b"c"])
    reader = reader_of(builder)
    batch = reader.read(QueueOffset(1), bytes_max=1)
    assert isinstance(batch, TierBatch)
    assert (batch.records.base_offset, batch.records.count) == (1, 4)
    middle = reader.read(QueueOffset(3), bytes_max=1)
    assert isinstance(middle, TierBatch)
    assert (middle.records.base_offset, middle.records.count) == (3, 2)
    assert rows(middle)[3] == rows(batch)[1]


def test_a_queue_that_is_not_there_is_an_error_and_the_end_is_none():
    builder = TierBuilder()
    builder.add([b"a"])
    reader = TierReader(builder.store, PREFIX)
    assert reader.refresh()
    assert not reader.refresh()
    with pytest.raises(InvalidError, match="no queue other/0"):
        reader.queue(MessageQueue("other", 0))
    with pytest.raises(InvalidError):
        reader.queue(QUEUE, 1)
    assert reader.queue(QUEUE, 0).read(QueueOffset(1)) is None
    assert reader.queue(QUEUE).read(QueueOffset(99)) is None


def test_below_the_minimum_reading_begins_at_the_minimum():
    builder = TierBuilder()
    builder.add([b"a", b"b", b"c"], first=10)
    incarnation = replace(reader_of(builder).incarnation, min_offset=QueueOffset(11))
    reader = QueueReader.of_incarnation(builder.store, PREFIX, QUEUE, incarnation)
    assert list(read_all(reader, 0)[0]) == [11, 12]
    assert reader.offset_by_time(0) == 11


def test_i5_a_state_with_neither_part_nor_gap_is_damage_not_the_end():
    builder = TierBuilder()
    builder.add([b"a"])
    incarnation = replace(reader_of(builder).incarnation, commit_offset=QueueOffset(5))
    reader = QueueReader.of_incarnation(builder.store, PREFIX, QUEUE, incarnation)
    with pytest.raises(DataError, match="neither a part nor a gap"):
        reader.read(QueueOffset(2))


@settings(deadline=None)
@given(STEPS, st.integers(-3, 80))
def test_offset_by_time_is_the_first_message_then_or_later_or_the_last_then_or_earlier(
    steps: list[Any], time: int
):
    builder, wanted, _ = build(steps, 0)
    batch_times = {o: TIME_MS + o for o, raw in wanted.items() if raw}
    reader = reader_of(builder)
    for chunk in reader.batches(QueueOffset(0)):  # inner messages bear the time of their batch
        if isinstance(chunk, TierBatch):
            for n, stored in enumerate(chunk.records.store_timestamps_ms.tolist()):
                if chunk.records.sizes[n]:
                    batch_times[chunk.records.base_offset + n] = stored
    asked = TIME_MS + time
    late = [o for o, stored in batch_times.items() if stored >= asked]
    early = [o for o, stored in batch_times.items() if stored <= asked]
    assert reader.offset_by_time(asked) == min(late, default=reader.incarnation.commit_offset)
    found = reader.offset_by_time(asked, Boundary.UPPER)
    assert found == max(early, default=reader.incarnation.min_offset)


# -- flat files over the same parts -------------------------------------------------------------


@settings(deadline=None)
@given(STEPS, st.data())
def test_commit_log_and_consume_queue_read_across_parts_and_segments(
    steps: list[Any], draw: st.DataObject
):
    builder, _, _ = build(steps, 0)
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    log, index = TieredCommitLog.load(incarnation), TieredConsumeQueue.load(incarnation)
    whole = b"".join(
        bytes(read_range(builder.store, PREFIX, part.log)) for part in incarnation.parts()
    )
    assert log.commit_offset == incarnation.log_end == len(whole)
    if whole:
        start = draw.draw(st.integers(0, len(whole) - 1))
        end = draw.draw(st.integers(start + 1, len(whole)))
        found = log.read(builder.store, PREFIX, LogOffset(start), LogOffset(end))
        assert bytes(found) == whole[start:end]
    for segment in incarnation.segments:
        first, last = segment.base_queue_offset, segment.parts[-1].queue_end
        items = index.read(builder.store, PREFIX, first, last)
        assert len(items) == last - first
        real = items[items["size"] > 0]
        assert np.all(real["log_offset"] + real["size"] <= incarnation.log_end)


# -- damage -------------------------------------------------------------------------------------


def damaged(builder: TierBuilder, position: int, bit: int = 0) -> None:
    """Flip one bit of the first bundle."""
    store = builder.store
    key = next(info.key for info in store.list(PREFIX + "bundle/"))
    data = bytearray(store.get(key))
    data[position] ^= 1 << bit
    store.delete(key)
    store.put_if_absent(key, bytes(data))


@settings(deadline=None, max_examples=200)
@given(st.booleans(), st.data())
def test_i3_one_flipped_bit_gives_an_error_or_the_true_bytes(packed: bool, draw: st.DataObject):
    builder = TierBuilder()
    items = [b"hello", None, (3, b"inner"), b"world" * 20]
    builder.add(items)
    if packed:
        gather(builder)
        builder.store.delete(next(i.key for i in builder.store.list(PREFIX + "bundle/0/")))
    size = next(i.size_bytes for i in builder.store.list(PREFIX + "bundle/"))
    damaged(builder, draw.draw(st.integers(0, size - 1)), draw.draw(st.integers(0, 7)))
    reader = reader_of(builder)
    try:
        found, _ = read_all(reader)
    except DataError as error:
        named = "bundle/" in error.where
    else:
        named = found == expected(0, items)
    assert named


def test_a_damaged_block_costs_only_what_lies_in_it():
    builder = TierBuilder()
    items = [bytes([65 + n]) * BLOCK_BYTES for n in range(8)]
    builder.add(items)
    damaged(builder, 4 * BLOCK_BYTES + 5000)
    reader = reader_of(builder)
    for offset in range(8):
        if offset in {3, 4}:  # records are a little larger than blocks: block 4 holds parts of both
            with pytest.raises(DataError, match=r"bytes \[262144, 327680\) fail"):
                reader.read(QueueOffset(offset), count_max=1)
        else:
            batch = reader.read(QueueOffset(offset), count_max=1)
            assert isinstance(batch, TierBatch)
            assert rows(batch)[offset] == expected(offset, [items[offset]])[offset]
    with pytest.raises(DataError):
        reader.read(QueueOffset(0))


def test_damage_of_one_queue_costs_nothing_of_another_in_the_same_bundle():
    builder = TierBuilder()
    first, second = MessageQueue("a", 0), MessageQueue("b", 0)
    builder.add_round(batch_of(0, [b"a"], queue=first), batch_of(0, [b"b"], queue=second))
    damaged(builder, 10)
    tier = TierReader(builder.store, PREFIX)
    tier.refresh()
    with pytest.raises(DataError):
        tier.queue(first).read(QueueOffset(0))
    assert isinstance(tier.queue(second).read(QueueOffset(0)), TierBatch)


@pytest.mark.parametrize("what", ["block table", "table", "footer"])
def test_damage_behind_the_items_costs_no_message(what: str):
    builder = TierBuilder()
    items = [bytes([65 + n]) * BLOCK_BYTES for n in range(8)]
    part = builder.add(items)
    size = part.section.size_bytes
    damaged(builder, {"block table": size - 3, "table": size + 3, "footer": -5}[what])
    reader = reader_of(builder)
    batch = reader.read(QueueOffset(5), count_max=1)
    assert isinstance(batch, TierBatch)
    assert rows(batch)[5] == expected(5, [items[5]])[5]
    assert read_all(reader)[0] == expected(0, items)


@pytest.mark.parametrize("cut", [0, 10, 1 << 16, 3 << 16])
def test_a_truncated_bundle_is_damage_and_not_an_outage(cut: int):
    builder = TierBuilder()
    part = builder.add([b"x" * BLOCK_BYTES] * 8)
    data = builder.store.get(PREFIX + part.bundle.key)
    builder.store.delete(PREFIX + part.bundle.key)
    builder.store.put_if_absent(PREFIX + part.bundle.key, data[:cut])
    with pytest.raises(DataError):
        reader_of(builder).read(QueueOffset(0))
    with pytest.raises(DataError):
        reader_of(builder).read(QueueOffset(7), count_max=1)


def test_another_object_under_the_right_key_is_damage():
    builder = TierBuilder()
    one, two = builder.add([b"one"]), builder.add([b"two"])
    builder.store.delete(PREFIX + one.bundle.key)
    builder.store.put_if_absent(PREFIX + one.bundle.key, builder.store.get(PREFIX + two.bundle.key))
    with pytest.raises(DataError, match="checksum"):
        reader_of(builder).read(QueueOffset(0))


def test_an_object_that_is_gone_is_not_called_damage_without_a_look_at_the_journal():
    builder = TierBuilder()
    part = builder.add([b"one"])
    builder.store.delete(PREFIX + part.bundle.key)
    incarnation = builder.journal.state.incarnation(QUEUE)
    assert incarnation
    with pytest.raises(ObjectNotFoundError):
        QueueReader.of_incarnation(builder.store, PREFIX, QUEUE, incarnation).read(QueueOffset(0))
    with pytest.raises(DataError, match="is gone"):
        reader_of(builder).read(QueueOffset(0))


def test_an_outage_is_an_outage():
    builder = TierBuilder()
    builder.add([b"one"])
    store = FaultyStore(builder.store, random.Random(1))
    reader = reader_of(builder, store)
    store.add(Rule(Fault.UNAVAILABLE, READS))
    with pytest.raises(UnavailableError):
        reader.read(QueueOffset(0))
    assert isinstance(reader.read(QueueOffset(0)), TierBatch)


@pytest.mark.parametrize("operation", ["flip", "foreign", "outside", "below", "negative", "offset"])
def test_an_index_that_points_wrong_is_damage_also_with_a_right_checksum(operation: str):
    """What only a defect of ours could write."""
    builder = TierBuilder()
    file = builder.file()
    batch = batch_of(0, [b"a", b"b"])
    if operation == "foreign":
        batch = batch_of(0, [b"a", b"b"], queue=MessageQueue(QUEUE.topic, 4))
    if operation == "offset":
        batch = replace(batch_of(7, [b"a", b"b"]), base_offset=QueueOffset(0))
    changes = {
        "flip": {"positions": batch.positions + 1},
        "outside": {"positions": batch.positions + 10**6},
        "below": {"positions": batch.positions - 10**6},
        "negative": {"sizes": -batch.sizes},
    }.get(operation, {})
    file.append(replace(batch, queue=QUEUE, **changes), 0.0)
    commit = file.take(0)
    assert commit is not None
    reader = reader_of_part(builder, builder.put(commit).named.parts[0])
    with pytest.raises(DataError):
        reader.read(QueueOffset(0))


def reader_of_part(builder: TierBuilder, part: Part) -> QueueReader:
    segment = Segment(LogOffset(0), QueueOffset(0), 0, parts=Parts.of([part]))
    incarnation = Incarnation(0, QueueOffset(0), part.queue_end, part.log_end, (segment,))
    return QueueReader.of_incarnation(builder.store, PREFIX, QUEUE, incarnation)


@pytest.mark.parametrize("topic", ["topic-ö", "Topic-ä", "topic", "topic-ä-"])
@pytest.mark.parametrize("damaged", [0, 3, 6])
def test_a_record_of_another_topic_is_damage(
    monkeypatch: pytest.MonkeyPatch, topic: str, damaged: int
):
    """Queue id and queue offset are right: only the topic tells that it is somebody else's."""

    def one_of_another_topic(queue: MessageQueue, offset: int, body: bytes, **more: int) -> bytes:
        whose = MessageQueue(topic, queue.queue_id) if offset == damaged else queue
        return record_of(whose, offset, body, **more)

    monkeypatch.setattr(tiers, "record_of", one_of_another_topic)
    builder = TierBuilder()
    builder.add([b"a", b"b", None, b"d", (2, b"ef"), b"g"])
    reader = reader_of(builder)
    with pytest.raises(DataError, match="not a record of this queue"):
        reader.read(QueueOffset(0))
    if damaged < 6:
        assert isinstance(reader.read(QueueOffset(damaged + 1)), TierBatch)


def test_a_reader_that_is_open_goes_on_in_no_other_history():
    """The tier was wiped and begun anew, and a checkpoint there is beyond what the reader knew."""
    builder = TierBuilder()
    builder.add([b"a", b"b"])
    reader = TierReader(builder.store, PREFIX)
    reader.refresh()
    for info in [*builder.store.list("")]:
        builder.store.delete(info.key)
    other = TierBuilder(builder.store, writer="00000bad")
    for _ in range(5):
        other.add([b"c", b"d"])
    other.journal.require_checkpoint()
    for _ in range(2):
        with pytest.raises(DataError, match="begun anew"):
            reader.refresh()
