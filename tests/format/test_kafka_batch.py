"""Kafka's batches: what Kafka's own classes read in captured logs, plain examples, and damage."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from itertools import groupby
from typing import Any

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support import kafka_batches as plain

from tiered.format import kafka_batch, kafka_log
from tiered.format.kafka_batch import BatchFault, BatchStop
from tiered.format.unpacking import Codec, UnpackError, unpack
from tiered.model import MessageQueue

SIZE_MAX = 1 << 27
HEADER_NAMES = ["crc", "leader_epoch", "producer_id", "producer_epoch", "base_sequence", "count"]


def read(data: bytes, offset_min: int = 0) -> kafka_batch.BatchBlock:
    block = kafka_batch.walk_batches(data, 0, len(data), size_max=SIZE_MAX)
    kafka_batch.check_batches(block, offset_min)
    return block


def records_of(block: kafka_batch.BatchBlock, chosen: Any = None) -> kafka_batch.RecordColumns:
    sound = [n for n in range(len(block)) if not block.faults[n]] if chosen is None else chosen
    return kafka_batch.decode_records(block, sound, bytes_max=1 << 26)


@pytest.mark.parametrize("name", plain.NAMES)
def test_batches_are_kafka_s(name: str):
    said = {
        key: list(lines)
        for key, lines in groupby(
            (line for line in plain.dump(f"{name}.batches") if line["kind"] == "batch"),
            key=lambda line: (line["dir"], line["file"]),
        )
    }
    for key, data in plain.logs(name).items():
        block = read(data, int(key[1][:20]))
        markers = {marker.batch: marker for marker in kafka_batch.control_markers(block)}
        assert len(block) == len(said.get(key, []))
        for number, line in enumerate(said.get(key, [])):
            head = block.headers[number]
            assert {field: head[field] for field in HEADER_NAMES} == {
                field: line[field] for field in HEADER_NAMES
            }
            assert block.positions[number] == line["position"]
            assert block.last_offsets[number] == line["last_offset"]
            assert (block.faults[number] == BatchFault.OK) == line["valid"]
            for record in line.get("records", []):
                kind = kafka_batch.ControlType(markers[number].kind).name
                assert kind == record["control_type"]
                assert markers[number].coordinator_epoch == record["coordinator_epoch"]


@pytest.mark.parametrize("name", plain.NAMES)
def test_records_are_those_of_a_consumer(name: str):
    # What recovery gave up behind a flipped bit, and what lies below the log's start.
    lost = name in {"k04-crash-torn", "k06-retention"}
    found = []
    for (folder, file), data in plain.logs(name).items():
        topic, _, partition = folder.rpartition("-")
        block = read(data, int(file[:20]))
        found += plain.lines_of(MessageQueue(topic, int(partition)), block)
    wanted = plain.dump(name)
    assert not [line for line in wanted if line not in found]
    assert len(found) == len(wanted) or lost


def test_transactions_are_the_node_s():
    name = "k02-transactions"
    text = (plain.FOLDER / f"{name}.offsets.jsonl").read_text()
    said = {(line["topic"], line["partition"]): line for line in map(json.loads, text.splitlines())}
    index = [line for line in plain.dump(f"{name}.batches") if line["kind"] == "txnindex"]
    committed = plain.dump(f"{name}.committed")
    for folder, files in groupby(plain.logs(name).items(), key=lambda file: file[0][0]):
        topic, _, partition = folder.rpartition("-")
        line = said[topic, int(partition)]
        opened: dict[int, int] = {}
        aborted, blocks = [], []
        for key, data in files:
            blocks.append(read(data, int(key[1][:20])))
            opened, some = kafka_log.follow_transactions(opened, blocks[-1])
            aborted += some
        stable = kafka_log.last_stable_offset(opened, line["high_watermark"])
        assert stable == line["last_stable_offset"]
        entries = [e for found in index if found["dir"] == folder for e in found["entries"]]
        assert [found._asdict() for found in aborted] == entries
        offsets = []
        for block in blocks:
            given_to = kafka_log.is_given(block, aborted, stable)
            offsets += records_of(block, given_to.nonzero()[0]).offsets.tolist()
        assert offsets == [
            found["offset"]
            for found in committed
            if (found["topic"], found["partition"]) == (topic, int(partition))
        ]


# -- examples --------------------------------------------------------------------------------------

maybe = st.none() | st.binary(max_size=300)
records = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.integers(-(2**62), 2**62),
        maybe,
        maybe,
        st.lists(st.tuples(st.text(max_size=9), maybe), max_size=4).map(tuple),
    ),
    max_size=12,
)
packers = {
    0: bytes,
    1: gzip.compress,
    2: lambda data: bytes(cramjam.snappy.compress_raw(data)),
    3: lz4.frame.compress,
    4: zstandard.ZstdCompressor().compress,
}


@given(st.lists(st.tuples(records, st.sampled_from(sorted(packers))), max_size=5))
def test_what_is_written_is_read(batches: list[tuple[list[plain.Plain], int]]):
    wanted, data, base = [], b"", 0
    for some, codec in batches:
        at, placed = -1, []
        for step, *rest in some:
            at += step
            placed.append((at, *rest))
        payload = packers[codec](plain.section(placed))
        data += plain.batch(
            payload, len(placed), base_offset=base, attributes=codec, last_offset_delta=max(at, 0)
        )
        wanted += [(base + offset, *rest) for offset, *rest in placed]
        base += max(at, 0) + 1
    block = read(data)
    found = records_of(block)
    assert not block.faults.any()
    assert not found.faults
    assert wanted == [
        (offset, time, found.key(n), found.value(n), tuple(found.headers(n)))
        for n, (offset, time) in enumerate(
            zip(found.offsets.tolist(), found.timestamps_ms.tolist(), strict=True)
        )
    ]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.data())
def test_a_damaged_section_costs_its_batch_alone(payloads: list[bytes], data: st.DataObject):
    counts = [data.draw(st.integers(-1, 5)) for _ in payloads]
    sound = plain.section([(0, 1, b"k", None, (("h", None),))])
    raw = b"".join(
        plain.batch(payload, count, base_offset=10 * n, last_offset_delta=5)
        for n, (payload, count) in enumerate(zip(payloads, counts, strict=True))
    )
    raw += plain.batch(sound, 1, base_offset=10 * len(payloads))
    found = records_of(read(raw))
    assert found.key(len(found) - 1) == b"k"
    assert not set(found.batches.tolist()) & found.faults.keys()


@given(
    st.lists(st.tuples(records, st.integers(-1, 1), st.binary(max_size=2)), min_size=1, max_size=9)
)
def test_sections_looked_at_together_are_what_each_is_by_itself(
    some: list[tuple[list[plain.Plain], int, bytes]],
):
    raw, sound = b"", True
    for base, (mine, more, tail) in enumerate(some):
        payload = plain.section([(n, *rest) for n, (_, *rest) in enumerate(mine)]) + tail
        raw += plain.batch(payload, len(mine) + more, base_offset=100 * base, last_offset_delta=99)
        sound &= not more and not tail
    found = []
    for together_min in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kafka_batch, "_TOGETHER_MIN", together_min)
            columns = records_of(read(raw))
        found.append(
            (
                columns.faults,
                columns.data,
                *(
                    getattr(columns, name).tolist()
                    for name in ("batches", "offsets", "key_starts", "value_sizes", "header_starts")
                ),
            )
        )
    assert found[0] == found[1]
    assert not found[0][0] if sound else True


@given(records, st.integers(0, 10**6), st.integers(0, 255))
def test_columns_are_what_a_plain_reader_finds(some: list[plain.Plain], place: int, byte: int):
    placed = [(n, *rest) for n, (_, *rest) in enumerate(some)]
    payload = bytearray(plain.section(placed))
    if payload:
        payload[place % len(payload)] = byte
    found = records_of(read(plain.batch(bytes(payload), len(placed), last_offset_delta=99)))
    try:
        wanted = plain.plain_records(bytes(payload), len(placed))
        offsets = [record[0] for record in wanted]
    except (ValueError, IndexError):
        assert found.faults
        return
    if offsets != sorted({offset for offset in offsets if 0 <= offset <= 99}):
        assert found.faults
        return
    assert not found.faults
    assert wanted == [
        (offset, time, found.key(n), found.value(n), tuple(found.headers(n)))
        for n, (offset, time) in enumerate(
            zip(found.offsets.tolist(), found.timestamps_ms.tolist(), strict=True)
        )
    ]


def test_a_size_that_goes_on_behind_its_last_byte_is_malformed():
    one = plain.section([(0, 0, b"k", b"v", ())])
    size = one[0]  # one byte says it; five may, but the fifth must be the last
    for last, is_sound in ((0x00, True), (0x80, False)):
        payload = bytes([size | 0x80, 0x80, 0x80, 0x80, last]) + one[1:]
        found = records_of(read(plain.batch(payload, 1)))
        assert bool(found.faults) is not is_sound


def test_offsets_that_nothing_covers_are_certain_or_damage():
    """A flipped base offset: what joins its neighbours without a gap stands, and where nothing tells, nothing does."""
    one = plain.section([(0, 0, b"k", b"v", ())])

    def faults(*rows: int) -> list[int]:
        raw = [plain.batch(one, 1, base_offset=row, last_offset_delta=9) for row in rows]
        block = read(b"".join(raw))
        return [n for n, fault in enumerate(block.faults.tolist()) if fault]

    assert not faults(0, 10, 20, 30)
    assert faults(0, 15, 20, 30) == [1]
    assert faults(0, 10, 15, 30) == [2]
    assert faults(5, 10, 20, 30) == [0]
    assert faults(0, 1 << 40, 20, 30) == [1]
    assert faults(0, 110, 105, 200) == [1, 2]


def test_a_last_batch_that_nothing_confirms_is_left_undecided():
    one = plain.section([(0, 0, b"k", b"v", ())])
    first, joined, apart = (
        plain.batch(one, 1, base_offset=row, last_offset_delta=9) for row in (0, 10, 15)
    )
    size = len(first)
    for raw, is_whole, wanted in (
        (first + joined, False, ([0, 10], 2 * size, False)),
        (first + apart, False, ([0], size, False)),
        (first + apart, True, ([0, 15], 2 * size, True)),
    ):
        found = kafka_batch.sound_batches(raw, 0, 100, is_whole=is_whole)
        assert (found.block.base_offsets.tolist(), found.end, found.is_all) == wanted
    found = kafka_batch.sound_batches(first + apart, 0, 20, is_whole=True)
    assert (found.block.base_offsets.tolist(), found.end) == ([0], 2 * size)
    found = kafka_batch.sound_batches(first + joined, 0, 10, is_whole=False)
    assert (found.block.base_offsets.tolist(), found.end, found.is_all) == ([0], size, True)


def test_places_that_cannot_be_are_faults():
    one = plain.section([(0, 0, b"k", b"v", ())])
    rows = [0, 1, 90, 3, 4, 2, 5]
    block = read(b"".join(plain.batch(one, 1, base_offset=offset) for offset in rows))
    assert [int(f) for f in block.faults] == [0, 0, 4, 0, 0, 4, 0]


def test_legacy_is_told_from_damage():
    raw = bytearray(plain.batch(plain.section([(0, 0, b"k", b"v", ())]), 1))
    raw[16] = 1
    assert read(bytes(raw)).faults.tolist() == [BatchFault.MAGIC]
    raw[12:16] = zlib.crc32(raw[16:]).to_bytes(4, "big")
    assert read(bytes(raw)).faults.tolist() == [BatchFault.LEGACY]


def test_behind_damage_the_next_batch_is_found():
    one = plain.batch(plain.section([(0, 0, b"k", b"v", ())]), 1, base_offset=5)
    data = b"\x7f" * 100 + one
    assert read(data).stop is BatchStop.FAULT
    place = {"size_max": SIZE_MAX, "offset_min": 0, "offset_end": 9}
    assert kafka_batch.find_batch(data, 0, len(data), **place) == 100
    assert kafka_batch.find_batch(data, 0, len(data) - 1, **place) is None
    assert read(bytes(80)).stop is BatchStop.EMPTY
    assert read(one[:-1]).stop is BatchStop.SHORT


@pytest.mark.parametrize("codec", list(Codec))
def test_nothing_is_unpacked_beyond_a_bound(codec: Codec):
    pack = {
        Codec.GZIP: packers[1],
        Codec.ZLIB: zlib.compress,
        Codec.SNAPPY: packers[2],
        Codec.SNAPPY_FRAMED: lambda data: bytes(cramjam.snappy.compress(data)),
        Codec.LZ4: packers[3],
        Codec.ZSTD: packers[4],
    }[codec]
    data = b"ab" * 50_000
    packed = pack(data)
    assert unpack(codec, memoryview(packed), len(data)) == data
    for count in (1 << 20, (1 << 20) + 1, 3 << 20):
        long = bytes(range(256)) * (count // 256) + b"a" * (count % 256)
        assert unpack(codec, pack(long), count) == long
        assert unpack(codec, pack(long), 1 << 23) == long
        with pytest.raises(UnpackError):
            unpack(codec, pack(long), count - 1)
    for wrong, limit in ((packed, len(data) - 1), (packed[:-3], len(data))):
        with pytest.raises(UnpackError):
            unpack(codec, wrong, limit)


@given(st.sampled_from(list(Codec)), st.binary(max_size=60))
def test_any_bytes_are_unpacked_or_refused(codec: Codec, data: bytes):
    with contextlib.suppress(UnpackError):
        assert len(unpack(codec, data, 1000)) <= 1000


def test_streams_of_xerial_follow_one_another():
    blocks = [packers[2](b"one"), packers[2](b"two")]
    head = b"\x82SNAPPY\0" + bytes(8)
    framed = [head + len(block).to_bytes(4, "big") + block for block in blocks]
    assert unpack(Codec.SNAPPY, b"".join(framed), 6) == b"onetwo"
