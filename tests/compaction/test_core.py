"""The core against a replay into a dict, and against what Kafka's real cleaner did."""

from __future__ import annotations

import gzip
import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import make
from support.synthetic import make_batch

from tiered.compaction.newest import (
    EMPTY,
    HOLDS,
    KEY_BYTES,
    KEYED,
    ROW,
    Newest,
    digest_many,
    in_rounds,
    in_several,
    is_among,
    keyed_records,
    keys_that_fit,
)
from tiered.compaction.passes import (
    CAREFUL,
    EVERY,
    KAFKA,
    POLICIES,
    Due,
    LogFile,
    PassSettings,
    RetentionPolicy,
    plan_pass,
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


def digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def columns(rows: list[Row], queue: int = 0) -> np.ndarray:
    found = np.zeros(len(rows), ROW)
    for name, at in (("high", 0), ("low", 1)):
        found[name] = digests_of([(key or "").encode() for _, key, _ in rows])[:, at]
    found["offset"] = [offset for offset, _, _ in rows]
    found["flags"] = [KEYED * (key is not None) + EMPTY * empty for _, key, empty in rows]
    found["queue"], found["size"] = queue, 100
    return found


@given(texts=st.lists(st.binary(max_size=200), max_size=40))
def test_digests_are_those_of_blake2(texts: list[bytes]):
    assert [row.tobytes() for row in digests_of(texts)] == [digest_of(text) for text in texts]


# -- the newest of each key -----------------------------------------------------------------------

SENT = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 2)), max_size=80)
"""Key, store time and queue of each message."""


def sent_rows(sent: list[tuple[int, int, int]]) -> np.ndarray:
    rows = np.zeros(len(sent), ROW)
    digests = digests_of([b"%d" % key for key, _, _ in sent])
    rows["high"], rows["low"] = digests[:, 0], digests[:, 1]
    rows["time_ms"] = [time_ms for _, time_ms, _ in sent]
    rows["queue"] = [queue for _, _, queue in sent]
    rows["offset"] = np.arange(len(sent))
    return rows


@given(sent=SENT, is_across=st.booleans(), keys_max=st.integers(1, 40), chunks=st.integers(1, 9))
def test_rounds_have_the_newest_of_each_key_once_whatever_fits_and_in_whatever_order_it_comes(
    sent: list[tuple[int, int, int]], is_across: bool, keys_max: int, chunks: int
):
    rows = sent_rows(sent)
    model: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for offset, (key, time_ms, queue) in enumerate(sent):
        mine = (key,) if is_across else (key, queue)
        place = time_ms if is_across else 0, offset, queue
        model[mine] = max(place, model.get(mine, place))

    def look(newest: Newest) -> None:
        for chunk in range(chunks)[::-1]:
            newest.put(rows[chunk::chunks])

    found = []
    for newest in in_rounds(keys_max, look, is_across=is_across):
        mine = newest.rows()
        assert len(np.unique(mine["high"])) <= keys_max
        found += [
            (int(row["time_ms"]) if is_across else 0, int(row["offset"]), int(row["queue"]))
            for row in mine
        ]
    assert sorted(found) == sorted(model.values())


def test_memory_says_how_many_keys_a_round_takes():
    assert keys_that_fit(100 * KEY_BYTES) == 100
    rows = sent_rows([(key, 0, 0) for key in range(1000)])
    rounds = [len(newest.rows()) for newest in in_rounds(100, lambda newest: newest.put(rows))]
    assert (max(rounds), sum(rounds)) == (100, 1000)
    with pytest.raises(InvalidError, match="no room"):
        keys_that_fit(10)


def test_memory_is_not_exceeded_whatever_comes():
    rng, keys_max = np.random.default_rng(1), 100_000
    tracemalloc.start()
    newest = Newest(keys_max)
    for first in range(0, 3 * keys_max, 8192):
        rows = np.zeros(8192, ROW)
        rows["high"] = rng.integers(0, 2**63, 8192)
        rows["offset"] = np.arange(first, first + 8192)
        newest.put(rows)
    assert len(newest.rows()) == keys_max
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= KEY_BYTES * keys_max + (2 << 20)  # and the rows that are put


def test_a_key_is_held_by_any_of_its_rows():
    rows = sent_rows([(1, 5, 0), (1, 9, 1), (2, 1, 0)])
    rows["flags"] = [HOLDS, 0, 0]
    newest = Newest(9, is_across=True)
    for row in (rows[:1], rows[1:]):  # also when it was taken in before
        newest.put(row)
        newest.rows()
    assert sorted(newest.rows()[["offset", "flags"]].tolist()) == [(1, HOLDS), (2, 0)]


def test_of_samples_only_what_all_of_them_could_have_is_held_against_each_other():
    samples = [np.array(some, np.uint64) for some in ([1, 2, 9], [2, 3], [])]
    assert in_several(samples, 4) == (1, 4)
    assert in_several([np.array([1, 2], np.uint64), samples[1]], 2) == (1, 2)
    assert in_several([], 3) == (0, 0)


# -- the rule -------------------------------------------------------------------------------------


def compacted(rows: list[Row], keys_max: int, policy: RetentionPolicy, gone: int) -> list[Row]:
    """All rounds of one pass over a log."""
    every = columns(rows)
    keyed = every["flags"] & KEYED > 0
    kept = [every["offset"][~keyed]] if policy.keeps_keyless else []
    for newest in in_rounds(keys_max, lambda newest: newest.put(every[keyed])):
        mine = newest.rows()
        dead = (mine["flags"] & EMPTY > 0) & (mine["offset"] < gone)
        kept.append(mine["offset"][~dead])
    left = is_among(np.sort(np.concatenate(kept)), every["offset"])
    return [row for row, stays in zip(rows, left, strict=True) if stays]


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
    assert compacted(rows, memory_keys, policy, gone) == wanted


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
    found = compacted(rows, memory_keys, KAFKA, first)
    assert found == below(log["after2"], second)


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
        (
            int(row["offset"]),
            row[["high", "low"]].tobytes()[:16] if row["flags"] & KEYED else None,
            bool(row["flags"] & EMPTY),
        )
        for part in keyed_records(batch)
        for row in part
    ]
    wanted = []
    for number, (raw, body) in enumerate(rows):
        key = parse_properties(raw).get("KEYS")
        digest = None if key is None else digest_of(key.encode())
        wanted.append((7 + number + (number > 0), digest, body == b""))
    assert found == wanted


def test_damaged_records_and_inner_batches_are_refused():
    good = encode_record(make(topic="t", queue_offset=0))
    with pytest.raises(DataError, match="damaged"):
        list(keyed_records(make_batch(QUEUE, 0, [b"\x00" * len(good)], [5])))
    inner = encode_record(make(topic="t", queue_offset=0, sys_flag=INNER_BATCH))
    with pytest.raises(InvalidError, match="inner batches"):
        list(keyed_records(make_batch(QUEUE, 0, [inner], [5])))


def test_policies_are_what_people_name():
    assert sorted(POLICIES) == ["careful", "kafka", "rocketmq"]
    assert POLICIES["careful"] is CAREFUL
