"""The core against MD5 itself, against a replay into a dict, and against what Kafka's real cleaner did."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import make
from support.synthetic import make_batch

from tiered.compaction.keyed import keyed_records
from tiered.compaction.offset_map import ABSENT, ENTRY_BYTES, OffsetMap, digest_many
from tiered.compaction.passes import Due, LogFile, PassSettings, plan_pass
from tiered.compaction.retention import (
    CAREFUL,
    EVERY,
    KAFKA,
    POLICIES,
    KeyedRecords,
    RetentionPolicy,
    fill,
    stays,
    tombstones_gone,
    with_pass,
)
from tiered.errors import DataError, InvalidError
from tiered.format.properties import parse_properties
from tiered.format.record import encode_record
from tiered.format.sysflag import INNER_BATCH
from tiered.log.parts import Pass
from tiered.model import MessageQueue

QUEUE = MessageQueue("t", 0)
KAFKA_LOG = Path(__file__).parents[1] / "data" / "kafka" / "k03-compacted.json.gz"
Row = tuple[int, str | None, bool]
"""Queue offset, key, whether it is a tombstone."""


def digests_of(texts: list[bytes]) -> np.ndarray:
    sizes = np.array([len(text) for text in texts], np.int64)
    return digest_many(b"".join(texts), np.cumsum(sizes) - sizes, sizes)


def columns(rows: list[Row]) -> KeyedRecords:
    return KeyedRecords(
        np.array([offset for offset, _, _ in rows], np.int64),
        digests_of([(key or "").encode() for _, key, _ in rows]),
        np.array([key is not None for _, key, _ in rows], np.bool_),
        np.array([empty for _, _, empty in rows], np.bool_),
        np.full(len(rows), 100, np.int64),
        np.array([offset for offset, _, _ in rows], np.int64),
    )


@given(texts=st.lists(st.binary(max_size=200), max_size=40))
def test_digests_are_those_of_md5(texts: list[bytes]):
    found = digests_of(texts)
    assert [row.tobytes() for row in found] == [hashlib.md5(text).digest() for text in texts]


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 1000])
def test_digests_at_the_ends_of_blocks_and_buffers(size: int):
    text = bytes(range(256)) * 4
    found = digest_many(text, np.array([0, len(text) - size]), np.array([size, size]))
    wanted = [text[:size], text[len(text) - size :]]
    assert [row.tobytes() for row in found] == [hashlib.md5(one).digest() for one in wanted]


# -- the map --------------------------------------------------------------------------------------


@given(
    batches=st.lists(st.lists(st.integers(0, 30), max_size=25), max_size=8),
    slots=st.integers(2, 60),
)
def test_the_map_is_a_dict_until_it_is_full(batches: list[list[int]], slots: int):
    known, model, offset = OffsetMap(slots * ENTRY_BYTES), {}, 0
    for keys in batches:
        digests = digests_of([b"%d" % key for key in keys])
        offsets = np.arange(offset, offset + len(keys), dtype=np.int64)
        taken = known.put(digests, offsets)
        for key, at in zip(keys[:taken], offsets.tolist(), strict=False):
            model[key] = at
        assert known.keys == len(model) <= known.capacity
        if taken < len(keys):  # the next key is new, and there is no room for it
            assert keys[taken] not in model
            assert len(model) == known.capacity
            break
        offset += len(keys)
    asked = list(range(31))
    wanted = [model.get(key, ABSENT) for key in asked]
    assert known.get(digests_of([b"%d" % key for key in asked])).tolist() == wanted


def test_a_map_takes_what_it_was_told_and_no_more():
    known = OffsetMap(1_000_000)
    assert known.memory_bytes <= 1_000_000
    offsets = np.arange(100_000)
    keys = digests_of([b"key-%d" % n for n in range(100_000)])
    taken = known.put(keys, offsets)
    assert taken == known.keys == known.capacity == int(1_000_000 // ENTRY_BYTES * 0.9)
    assert known.memory_bytes / known.keys <= 32
    assert known.put(keys[:taken], offsets + 100_000) == taken  # known keys need no room
    with pytest.raises(InvalidError, match="no room"):
        OffsetMap(10)


def test_probing_is_that_of_both_systems():
    """Slots are found as Kafka's SkimpyOffsetMap and RocketMQ's OffsetMap find them."""
    known = OffsetMap(7 * ENTRY_BYTES)
    digest = digests_of([b"some key"])
    octets = digest.tobytes()

    def slot(step: int) -> int:
        window = int.from_bytes(octets[min(step, 12) : min(step, 12) + 4], "big", signed=True)
        return abs(window + max(0, step - 12)) % 7

    assert [int(known._slots(digest, step)[0]) for step in range(20)] == [
        slot(step) for step in range(20)
    ]


# -- the rule -------------------------------------------------------------------------------------


def compacted(rows: list[Row], memory_keys: int, policy: RetentionPolicy, gone: int) -> list[Row]:
    """All rounds of one pass over a log."""
    kept = columns(rows)
    end = rows[-1][0] + 1
    at = rows[0][0]
    while at < end:
        known = OffsetMap(-(-memory_keys * 10 // 9) * ENTRY_BYTES + ENTRY_BYTES)
        source = columns([row for row in rows if row[0] >= at])
        following = fill(known, [source], end)
        assert following > at
        at = following
        kept = kept.some(stays(kept, known, policy, gone))
    left = set(kept.offsets.tolist())
    return [row for row in rows if row[0] in left]


ROWS = st.lists(
    st.tuples(st.integers(1, 3), st.one_of(st.none(), st.sampled_from("abcdefgh")), st.booleans()),
    min_size=1,
    max_size=60,
).map(
    lambda steps: [
        (sum(step for step, _, _ in steps[: n + 1]), key, empty)
        for n, (_, key, empty) in enumerate(steps)
    ]
)


@given(
    rows=ROWS,
    memory_keys=st.integers(1, 10),
    policy=st.sampled_from(list(POLICIES.values())),
    gone=st.sampled_from([0, 30, EVERY]),
)
def test_all_rounds_leave_what_a_replay_into_a_dict_leaves(
    rows: list[Row], memory_keys: int, policy: RetentionPolicy, gone: int
):
    newest = {key: offset for offset, key, _ in rows if key is not None}
    wanted = [
        (offset, key, empty)
        for offset, key, empty in rows
        if (policy.keeps_keyless if key is None else newest[key] == offset)
        and not (key is not None and empty and offset < gone)
    ]
    found = compacted(rows, memory_keys, policy, gone)
    last = rows[-1][
        0
    ]  # a record without a key behind the last key is not judged: the map ends there
    assert found == wanted or [row for row in found if row[0] != last] == wanted


@given(rows=ROWS, memory_keys=st.integers(1, 4), at=st.integers(0, 59))
def test_a_reader_from_the_start_has_the_final_state_wherever_rounds_stop(
    rows: list[Row], memory_keys: int, at: int
):
    """K5, with the map too small, and only the first round made."""
    known = OffsetMap(-(-memory_keys * 10 // 9) * ENTRY_BYTES + ENTRY_BYTES)
    source = columns(rows)
    fill(known, [source.some(source.offsets >= at)], rows[-1][0] + 1)
    kept = set(source.offsets[stays(source, known, KAFKA, 0)].tolist())

    def replay(log: list[Row]) -> dict[str | None, int]:
        return {key: offset for offset, key, _ in log if key is not None}

    assert replay([row for row in rows if row[0] in kept]) == replay(rows)


def test_tombstones_wait_until_a_reader_has_had_the_time_to_meet_them():
    passes = (Pass(100, 1_000), Pass(200, 5_000))
    policy = RetentionPolicy("x", keeps_keyless=False, tombstone_retention_ms=3_000)
    assert tombstones_gone(passes, policy, 3_999) == 0
    assert tombstones_gone(passes, policy, 4_000) == 100
    assert tombstones_gone(passes, policy, 8_000) == 200
    assert tombstones_gone(passes, POLICIES["rocketmq"], 0) == EVERY
    more = with_pass(passes, Pass(300, 9_000), horizon_ms=5_000)
    assert more == (Pass(200, 5_000), Pass(300, 9_000))


# -- Kafka's cleaner ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("memory_keys", [20, 10_000])
def test_what_stays_is_what_kafka_left(number: int, memory_keys: int):
    log = json.loads(gzip.decompress(KAFKA_LOG.read_bytes()))[number]
    first, second = log["cleaned_to"]

    def below(rows: list, end: int) -> list[Row]:
        return [(at, key, empty) for at, key, empty, aborted in rows if at < end and not aborted]

    found = compacted(below(log["before"], first), memory_keys, KAFKA, 0)
    assert found == below(log["after"], first)
    # The second round: what was written since is in it as far as it survived; tombstones of the first round may go.
    since = [row for row in below(log["after2"], second) if row[0] >= first]
    rows = below(log["after"], first) + since
    assert any(empty for at, _, empty in rows if at < first)
    known = OffsetMap(1 << 20)
    fill(known, [columns(since)], second)
    records = columns(rows)
    kept = records.offsets[stays(records, known, KAFKA, first)].tolist()
    assert kept == [at for at, _, _ in below(log["after2"], second)]


# -- files ----------------------------------------------------------------------------------------


def files(*sizes: int, times: tuple[int, ...] = ()) -> list[LogFile]:
    stamps = times or tuple(range(len(sizes)))
    made = [
        LogFile(10 * n, 10 * n + 10, size, time_ms, time_ms)
        for n, (size, time_ms) in enumerate(zip(sizes, stamps, strict=True))
    ]
    return [*made, LogFile(10 * len(sizes), 10 * len(sizes) + 5, 7, 99, 99, is_active=True)]


def test_a_pass_is_due_by_ratio_or_by_lag_and_never_touches_the_active_file():
    now = 1_000_000
    plan = plan_pass(files(100, 50, 49), 10, PassSettings(dirty_ratio=0.5), now)
    assert (plan.due, plan.is_due, plan.start, plan.dirty_from, plan.end) == (
        *(Due.NOT_YET, False, 0, 10, 30),
    )
    assert plan_pass(files(100, 50, 51), 10, PassSettings(dirty_ratio=0.5), now).due is Due.RATIO
    waited = PassSettings(dirty_ratio=0.5, lag_ms_max=now - 1)
    assert plan_pass(files(100, 50, 49), 10, waited, now).due is Due.LAG
    assert plan_pass(files(100, 50), 20, PassSettings(dirty_ratio=0), now).due is Due.NOTHING
    two = PassSettings(dirty_ratio=0, files_min=2)
    assert plan_pass(files(100, 50), 10, two, now).due is Due.NOTHING
    assert plan_pass(files(), 0, PassSettings(), now).due is Due.NOTHING


def test_what_is_too_young_hides_what_lies_behind_it():
    young = PassSettings(dirty_ratio=0, lag_ms_min=100)
    plan = plan_pass(files(1, 1, 1, times=(0, 950, 10)), 0, young, 1_000)
    assert (plan.start, plan.end, plan.dirty_bytes) == (0, 10, 1)


# -- keys of records ------------------------------------------------------------------------------

SCRAPS = st.sampled_from(
    (
        b"KEYS",
        b"UNIQ_KEY",
        b"TAGS",
        b"\x02KEYS\x01",
        b"\xc3\xa4",
        b"\x00",
        b"\x01",
        b"\x02",
        b" ",
        b"k",
    )
)
RAW = st.lists(SCRAPS, max_size=14).map(b"".join)


@given(rows=st.lists(st.tuples(RAW, st.sampled_from([b"", b"body", b"\x02KEYS\x01"])), max_size=8))
def test_keys_are_those_of_the_properties(rows: list[tuple[bytes, bytes]]):
    raws = [
        encode_record(make(topic="t", queue_offset=n, properties_raw=raw, body=body))
        for n, (raw, body) in enumerate(rows)
    ]
    raws.insert(1, b"")  # a hole
    batch = make_batch(QUEUE, 7, raws, [5] * len(raws))
    found = [
        (offset, digest.tobytes() if has else None, empty)
        for part in keyed_records(batch)
        for offset, digest, has, empty in zip(
            part.offsets.tolist(), part.digests, part.has_key, part.is_tombstone, strict=True
        )
    ]
    wanted = []
    for number, (raw, body) in enumerate(rows):
        key = parse_properties(raw).get("KEYS")
        digest = None if key is None else hashlib.md5(key.encode()).digest()
        wanted.append((7 + number + (number > 0), digest, body == b""))
    assert found == wanted


def test_damaged_records_and_inner_batches_are_refused():
    good = encode_record(make(topic="t", queue_offset=0))
    with pytest.raises(DataError, match="damaged"):
        list(keyed_records(make_batch(QUEUE, 0, [b"\x00" * len(good)], [5])))
    inner = encode_record(make(topic="t", queue_offset=0, sys_flag=INNER_BATCH))
    with pytest.raises(InvalidError, match="inner batches"):
        list(keyed_records(make_batch(QUEUE, 0, [inner], [5])))


@pytest.mark.parametrize("offsets", [[3, 3], [5, 4], [1, 2]])
def test_offsets_that_do_not_ascend_are_damage(offsets: list[int]):
    """By them it is told which message of a key is the newest."""
    known = OffsetMap(1 << 10)
    known.pass_by(2)
    with pytest.raises(DataError, match="do not ascend"):
        known.put(np.arange(4, dtype=np.uint64).reshape(2, 2), np.array(offsets))


def test_policies_are_what_people_name():
    assert sorted(POLICIES) == ["careful", "kafka", "rocketmq"]
    assert POLICIES["careful"] is CAREFUL
