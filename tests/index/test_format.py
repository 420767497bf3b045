"""The bytes of an index object: as the page says, found again, and never taken for right when they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.errors import OtherVersionError
from tiered.format.object import (
    ITEM,
    KeyFilter,
    Ties,
    bucket_bits,
    build_filter,
    check_payload,
    filter_bytes,
    order_keys,
    places_of,
)
from tiered.index.extract import hash_bytes, hash_many, key_hash, topic_seed

HASHES = st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 40).map(lambda n: n << 40)), max_size=300)  # fmt: skip


def test_hashes_never_change():
    found = {text: hash_bytes(text) for text in (b"", b"a", b"TopicTest", b"0123456789abcdef")}
    assert found == {
        b"": 0,
        b"a": 0x10F4A4CB9C5161A0,
        b"TopicTest": 0x4706EE7B3F593B0E,
        b"0123456789abcdef": 0x568A379A98CB0C19,
    }
    assert key_hash("TopicTest", "MessageKey") == 0x0FB28D24E684DD65


@given(texts=st.lists(st.binary(max_size=40), max_size=20), seed=st.integers(0, 2**64 - 1))
def test_many_hashes_are_those_of_one_at_a_time(texts: list[bytes], seed: int):
    sizes = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(sizes) - sizes
    found = hash_many(b"".join(texts) + b"x" * 8, starts, sizes, seed)
    assert found.tolist() == [hash_bytes(text, seed) for text in texts]


@given(values=HASHES, times=st.integers(1, 3))
def test_every_hash_is_found_with_its_run_newest_first(values: list[int], times: int):
    count = len(values)
    hashes = np.array(values, np.uint64)
    rng = np.random.default_rng(count)
    store_ms, offsets = rng.integers(0, times, count), rng.permutation(count)
    items = np.zeros(count, ITEM)
    items["store_ms"], items["queue_offset"], items["log_offset"] = store_ms, offsets, range(count)
    keys = order_keys((hashes >> np.uint64(32)).astype(np.uint32))
    keys.sort()
    ties, places = Ties.of(keys), places_of(keys)
    ordered_items = np.empty(count, ITEM)
    ordered_items[places] = items
    ties.order(ordered_items)
    order = ordered_items["log_offset"].astype(np.int64)
    assert sorted(order.tolist()) == list(range(count))
    ordered = hashes[order]
    assert (np.diff(ordered >> np.uint64(32)).astype(np.int64) >= 0).all()
    bits = bucket_bits(count)
    data = build_filter(ordered, bits)
    assert len(data) == filter_bytes(count, bits)
    found = KeyFilter.parse(data, count, bits, where="here")
    for value in set(values):
        start, end = found.find(value)
        run = order[start:end]
        mine = run[hashes[run] == np.uint64(value)]
        assert len(mine) == values.count(value)
        newest = sorted(mine.tolist(), key=lambda n: (store_ms[n], offsets[n]), reverse=True)
        assert mine.tolist() == newest


def test_absent_keys_are_told_from_present_ones():
    rng = np.random.default_rng(7)
    hashes = np.sort(rng.integers(0, 2**64, 50_000, np.uint64))
    bits = bucket_bits(len(hashes))
    found = KeyFilter.parse(build_filter(hashes, bits), len(hashes), bits, where="here")
    asked = rng.integers(0, 2**64, 20_000, np.uint64).tolist()
    wrong = sum(start < end for start, end in map(found.find, asked))
    assert wrong < 20_000 / 1000
    assert found.memory_bytes <= 2.6 * len(hashes)


def test_the_golden_bytes():
    items = np.zeros(2, ITEM)
    items[0] = (0x01020304, 1, 0x0A0B, 1_700_000_000_000, 300, 7)
    items[1] = (0xFFFFFFFF, 0, 2**40, 1_700_000_000_001, 4096, 0)
    payload = items.tobytes() + build_filter(
        np.array([0x1122334455667788, 0xF000000000000000], np.uint64), 1
    )
    assert payload.hex() == (
        "01020304000000010000000000000a0b0000018bcfe568000000012c00000007"
        "ffffffff0000000000000100000000000000018bcfe568010000100000000000"
        "000000000000000100000002"
        "2244e000"
    )


PAYLOAD_COUNT = 40


def payload() -> bytearray:
    rng = np.random.default_rng(3)
    hashes = np.sort(rng.integers(0, 2**64, PAYLOAD_COUNT, np.uint64))
    items = np.zeros(PAYLOAD_COUNT, ITEM)
    items["queue_offset"] = np.arange(PAYLOAD_COUNT)
    return bytearray(items.tobytes() + build_filter(hashes, bucket_bits(PAYLOAD_COUNT)))


def test_a_payload_that_is_proven_and_contradicts_itself_is_another_version_s():
    whole = payload()
    check_payload(whole, PAYLOAD_COUNT, [PAYLOAD_COUNT], where="here")
    filter_at = PAYLOAD_COUNT * ITEM.itemsize
    changes = {
        4: "names a queue",
        28: "queue offset is not covered",
        filter_at: "directory is not in order",
        filter_at + 12: "directory is not in order",
        len(whole) - 2: "fingerprints are not in order",
    }
    for at, what in changes.items():
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        with pytest.raises(OtherVersionError, match=what):
            check_payload(damaged, PAYLOAD_COUNT, [PAYLOAD_COUNT], where="here")
    with pytest.raises(OtherVersionError, match="no index of"):
        check_payload(whole[:-1], PAYLOAD_COUNT, [PAYLOAD_COUNT], where="here")
    with pytest.raises(OtherVersionError, match="names a queue"):
        check_payload(whole, PAYLOAD_COUNT, [], where="here")


@given(position=st.integers(0, len(payload()) - 1), flip=st.integers(1, 255))
@settings(max_examples=50)
def test_a_changed_filter_is_refused_or_finds_places_that_are_there(position: int, flip: int):
    data = payload()
    data[position] ^= flip
    start = PAYLOAD_COUNT * ITEM.itemsize
    try:
        found = KeyFilter.parse(
            data[start:], PAYLOAD_COUNT, bucket_bits(PAYLOAD_COUNT), where="here"
        )
    except OtherVersionError:
        return
    for value in (0, 1 << 63, topic_seed("t"), 2**64 - 1):
        low, high = found.find(value)
        assert 0 <= low <= high <= PAYLOAD_COUNT
