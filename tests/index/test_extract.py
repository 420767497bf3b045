"""Keys taken from many records at once are those of the records one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.bundles import made_part
from support.examples import make
from support.keyed import Mail, batch_of
from support.synthetic import make_batch

from tiered.clock import ManualClock
from tiered.format.properties import KEYS, UNIQ_KEY, parse_properties, split_keys
from tiered.format.record import encode_record
from tiered.index import extract
from tiered.index.extract import (
    CHUNK_RECORDS,
    Keys,
    extract_all,
    extract_keys,
    hash_bytes,
    topic_seed,
)
from tiered.index.indexer import STALE_S, KeyFeed, StoredSection
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered.local.interface import RecordBatch
    from tiered.log.parts import Part

QUEUE = MessageQueue("t", 0)
SEED = topic_seed("t")
SCRAPS = (
    *(b"KEYS", b"UNIQ_KEY", b"TAGS", b"k", b"abcdefgh", b"\xc3\xa4"),
    *(b"\x00", b"\x01", b"\x02", b" ", b"  "),
)
CHUNKS = st.sampled_from(SCRAPS)
RAW = st.lists(CHUNKS, max_size=14).map(b"".join)


def found_in(properties: list[bytes], bodies: list[bytes]) -> set[tuple[int, int]]:
    raws = [
        encode_record(make(topic="t", queue_offset=n, properties_raw=raw, body=body))
        for n, (raw, body) in enumerate(zip(properties, bodies, strict=True))
    ]
    batch = make_batch(QUEUE, 0, raws, [5] * len(raws))
    found = set()
    for keys in extract_keys(batch, SEED):
        assert (keys.items["log_offset"] == batch.positions[keys.queue_offsets]).all()
        assert (keys.items["size"] == batch.sizes[keys.queue_offsets]).all()
        found |= set(zip(keys.hashes.tolist(), keys.queue_offsets.tolist(), strict=True))
    sized = replace(batch, properties_sizes=np.array([len(raw) for raw in properties], np.int32))
    others = [replace(sized, queue=MessageQueue("other", number)) for number in range(2)]
    if batch.count:
        first, _, last = extract_all([sized, *others], [0, 7, 9])
        assert rows_of(first) == found, "without parsing, beside others"
        assert len(rows_of(last)) == len(found)
        assert (first or last) == [] or not {h for h, _ in rows_of(last)} & {h for h, _ in found}
        assert rows_of(extract_keys(sized, SEED)) == found
    return found


def rows_of(some: Iterable[Keys]) -> set[tuple[int, int]]:
    return {
        row
        for keys in some
        for row in zip(keys.hashes.tolist(), keys.queue_offsets.tolist(), strict=True)
    }


def wanted_of(raw: bytes) -> set[int]:
    found = parse_properties(raw)
    words = (*split_keys(found.get(KEYS)), found.get(UNIQ_KEY, ""))
    return {hash_bytes(word.encode(), SEED) for word in words if word}


@given(
    rows=st.lists(st.tuples(RAW, st.one_of(RAW, st.binary(max_size=20))), min_size=1, max_size=6)
)
@example(rows=[(b"KEYS\x01a b\x02UNIQ_KEY\x01u", b"KEYS\x01x\x02")])
@example(rows=[(b"KEYS\x01a\x01b c\x02", b""), (b"UNIQ_KEY\x01", b"")])
def test_no_key_is_missed(rows: list[tuple[bytes, bytes]]):
    found = found_in([raw for raw, _ in rows], [body for _, body in rows])
    for number, (raw, _) in enumerate(rows):
        assert wanted_of(raw) <= {value for value, at in found if at == number}


WORD = st.text("abc-é9", min_size=1, max_size=12)


@given(
    mails=st.lists(
        st.builds(Mail, keys=st.lists(WORD, max_size=3).map(tuple), unique=st.one_of(st.just(""), WORD)),
        min_size=1,
        max_size=9,
    )
)  # fmt: skip
def test_of_properties_as_producers_write_them_nothing_else_is_found(mails: list[Mail]):
    found = found_in([mail.properties for mail in mails], [mail.body for mail in mails])
    assert found == {
        (hash_bytes(key.encode(), SEED), number)
        for number, mail in enumerate(mails)
        for key in mail.all_keys
    }


def test_batches_of_more_than_a_chunk():
    mails = [Mail(keys=(f"k{n}",), unique="u") for n in range(CHUNK_RECORDS + 5)]
    batch = batch_of(QUEUE, 3, mails)
    offsets = np.concatenate([keys.queue_offsets for keys in extract_keys(batch, SEED)])
    assert sorted(offsets.tolist()) == sorted([*range(3, 3 + len(mails))] * 2)


def test_an_inner_batch_that_cannot_be_unpacked_hinders_nothing():
    broken = encode_record(make(topic="t", sys_flag=0x80 | 0x40, body=b"no batch"))
    good = encode_record(make(topic="t", queue_offset=1, properties_raw=b"KEYS\x01k\x02"))
    batch = make_batch(QUEUE, 0, [broken, good], [5, 5])
    found = [keys.queue_offsets.tolist() for keys in extract_keys(batch, SEED) if len(keys)]
    assert found == [[1]]


def stored(part: Part, *batches: RecordBatch) -> StoredSection:
    return StoredSection(part.bundle.key, part.section.start, part.log_offset, batches)


def test_the_feed_gives_each_part_once_and_keeps_its_bounds():
    clock = ManualClock()
    batch = batch_of(QUEUE, 0, [Mail(keys=("k",)), None, Mail(unique="u")])
    size = int(batch.sizes.sum())
    feed = KeyFeed(clock, bytes_max=3 * size)
    a, b, c, d = (made_part(0, 100, key=key) for key in "abcd")
    feed.offer([stored(a, batch, replace(batch, base_offset=batch.end_offset))])
    assert feed.memory_bytes == 2 * size
    feed.offer([stored(b, batch)])
    feed.offer([stored(c, batch)])
    assert (feed.refused, feed.take(c)) == (1, None)
    keys = feed.take(a)
    assert keys is not None
    places = sorted(at for one in keys for at in one.items["log_offset"].tolist())
    assert places == [
        base + at for base in (100, 100 + size) for at in (0, int(batch.positions[2]))
    ]
    assert feed.take(a) is None
    clock.advance(STALE_S)
    feed.offer([stored(d, batch)])
    assert feed.take(b) is None, "nobody wanted it"
    assert feed.take(d) is not None
    assert feed.memory_bytes == 0


def sized_batch(queue: MessageQueue, properties: list[bytes], body_bytes: int) -> RecordBatch:
    raws = [
        encode_record(
            make(topic=queue.topic, queue_offset=n, properties_raw=raw, body=b"b" * body_bytes)
        )
        for n, raw in enumerate(properties)
    ]
    sizes = np.array([len(raw) for raw in properties], np.int32)
    return replace(make_batch(queue, 0, raws, [5] * len(raws)), properties_sizes=sizes)


@pytest.mark.parametrize("short_bytes", [9000, 0])
def test_large_batches_are_taken_together_by_the_ends_of_their_records(
    short_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Some hundred small calls for each were a third of what extraction cost; a record that is too short is no trouble."""
    ours = [b"KEYS\x01k%05d other\x02UNIQ_KEY\x01u%05d\x02" % (n, n) for n in range(12)]
    batches = [
        sized_batch(MessageQueue("t", 0), ours, 4000),
        sized_batch(MessageQueue("u", 1), [b"UNIQ_KEY\x01" + b"w" * 300] * 5, 9000),
        sized_batch(MessageQueue("t", 2), [b"KEYS\x01s\x02"], short_bytes),
    ]
    alone = [list(extract_keys(batch, topic_seed(batch.queue.topic))) for batch in batches]
    calls: list[int] = []
    plain = extract._plain
    monkeypatch.setattr(
        extract, "_plain", lambda records: calls.append(len(records.ends)) or plain(records)
    )
    together = extract_all(batches, [0, 0, 0])
    assert calls == [18], "once for all, not for each batch"
    for some, others in zip(together, alone, strict=True):
        assert full_rows(some) == full_rows(others)
    calls.clear()
    one = sized_batch(MessageQueue("t", 0), ours * 100, 40)
    assert len(extract_all([one, one, one], [0, 0, 0])) == 3
    assert calls == [3600], "batches of a thousand records as well"


def full_rows(some: Iterable[Keys]) -> list[tuple[object, ...]]:
    return sorted(
        row
        for keys in some
        for row in zip(
            keys.hashes.tolist(), keys.queue_offsets.tolist(), keys.items.tolist(), strict=True
        )
    )
