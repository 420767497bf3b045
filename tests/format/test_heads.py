"""Heads of Kafka's batches: what is wrong with one is seen, and the cleaner changes nothing that counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kafka_batches import batch, section
from support.kafka_items import data, items_of, marker

from tiered.errors import DataError
from tiered.format.heads import (
    are_whole,
    fingerprint_of_head,
    first_since,
    heads_of,
    is_same_batch,
)
from tiered.format.record_kind import (
    Mark,
    RecordKind,
    epochs_of,
    has_mark,
    kind_of,
    kind_of_items,
    tag_codes,
)

KAFKA = RecordKind.KAFKA
GOLDEN = bytes.fromhex(
    # base offset, length, leader epoch, magic
    "0000000000000007 00000044 00000003 02"
    # checksum, attributes, last offset delta
    "12db1624 0010 00000001"
    # base timestamp, max timestamp
    "000000000000000a 000000000000000c"
    # producer, its epoch, sequence, records
    "0000000000000064 0001 00000005 00000002"
    # size, attributes, time, offset, no key, value, no headers; twice
    "10 00 00 00 01 04 6869 00"
    "12 00 04 02 02 6b 04 796f 00"
)
"""Kafka's own layout, written down by hand: offsets 7 and 8, of a transaction of producer 100."""


def at(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(1, np.int64), np.array([len(raw)], np.int64)


def is_sound(raw: bytes) -> bool:
    heads = heads_of(KAFKA, raw, *at(raw))
    return bool(heads.is_sound[0]) and bool(are_whole(KAFKA, raw, *at(raw))[0])


def test_a_batch_as_literals():
    made = batch(
        section([(0, 0, None, b"hi", ()), (1, 2, b"k", b"yo", ())]),
        2,
        base_offset=7,
        leader_epoch=3,
        attributes=16,
        base_timestamp=10,
        max_timestamp=12,
        producer_id=100,
        producer_epoch=1,
        base_sequence=5,
    )
    assert made.hex() == GOLDEN.hex()
    heads = heads_of(KAFKA, GOLDEN, *at(GOLDEN))
    assert (heads.lows[0], heads.highs[0], heads.times_ms[0]) == (7, 9, 12)
    assert is_sound(GOLDEN)
    assert fingerprint_of_head(KAFKA, GOLDEN) == 0x82D1F9F3


@pytest.mark.parametrize("number", range(61))
def test_a_flip_of_any_byte_of_a_head_is_seen(number: int):
    """By the checks, or, of what stands before the checksum, by the offsets that the item gives, or the fingerprint."""
    for bit in range(8):
        flipped = bytearray(GOLDEN)
        flipped[number] ^= 1 << bit
        heads = heads_of(KAFKA, flipped, *at(GOLDEN))
        fits = (heads.lows[0], heads.highs[0]) == (7, 9)
        is_known = fingerprint_of_head(KAFKA, flipped) == fingerprint_of_head(KAFKA, GOLDEN)
        assert not (is_sound(bytes(flipped)) and fits and is_known)


def test_bytes_that_are_no_batch_are_not_sound():
    for raw in (b"", GOLDEN[:60], bytes(61), GOLDEN[:-1], GOLDEN + b"\0"):
        assert not heads_of(KAFKA, raw, *at(raw)).is_sound[0]
    beyond = heads_of(KAFKA, GOLDEN, np.array([1, -1]), np.array([len(GOLDEN)] * 2))
    assert not beyond.is_sound.any()


@given(st.sets(st.integers(0, 5)), st.booleans())
def test_fingerprints_stand_the_cleaner(kept: set[int], has_horizon: bool):
    fields = {"base_offset": 40, "leader_epoch": 2, "producer_id": 9, "base_sequence": 3}
    had = batch(section([(n, 0, b"k", b"%d" % n, ()) for n in range(6)]), 6, **fields)
    left = [(n, 0, b"k", b"%d" % n, ()) for n in sorted(kept)]
    more = {"attributes": 64, "base_timestamp": 10**12} if has_horizon else {}
    cleaned = batch(section(left), len(left), **fields, last_offset_delta=5, **more)
    assert fingerprint_of_head(KAFKA, had) == fingerprint_of_head(KAFKA, cleaned)
    assert is_same_batch(KAFKA, had, cleaned)
    other = batch(section(left), len(left), **{**fields, "leader_epoch": 3}, last_offset_delta=5)
    assert fingerprint_of_head(KAFKA, had) != fingerprint_of_head(KAFKA, other)
    assert not is_same_batch(KAFKA, had, other)


def test_a_batch_with_a_wrong_bit_is_not_taken_for_a_cleaned_one():
    flipped = bytearray(GOLDEN)
    flipped[-2] ^= 1
    assert not is_same_batch(KAFKA, GOLDEN, bytes(flipped))
    assert not is_same_batch(KAFKA, GOLDEN, b"")
    assert not is_same_batch(RecordKind.ROCKETMQ, GOLDEN, GOLDEN)


def test_the_first_record_since_a_time_is_looked_for_in_the_batch():
    size = len(GOLDEN)
    assert [first_since(KAFKA, GOLDEN, 0, size, ms, 0) for ms in (9, 10, 11, 12, 13)] == [
        *(7, 7, 8, 8),
        None,
    ]
    assert first_since(KAFKA, GOLDEN, 0, size, 0, 8) == 8
    with pytest.raises(DataError, match="damaged"):
        first_since(KAFKA, GOLDEN[:-4] + b"\xff" * 4, 0, size, 0, 0)


# -- what items say of their records ------------------------------------------------------------


@given(st.integers(-1, 2**31 - 1), st.sampled_from([0, 1, 2, 3]))
def test_an_item_says_whose_record_it_is(epoch: int, flags: int):
    for kind in (RecordKind.KAFKA, RecordKind.JMQ):
        codes = tag_codes(kind, np.array([epoch]), flags)
        assert kind_of(int(codes[0])) is kind
        assert epochs_of(codes).tolist() == [epoch]
        for mark in Mark:
            assert has_mark(codes, mark).tolist() == [bool(flags & mark)]


@given(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2**53) | st.integers(-(2**63), -1))
def test_no_tag_code_of_rocketmq_is_taken_for_another_stores(code: int):
    assert kind_of(code) is RecordKind.ROCKETMQ


def test_neighbours_are_what_the_first_record_is():
    batch_ = items_of([data(3, 2), marker(9, 5, aborts=True)])
    assert batch_.kind is KAFKA
    holes = slice(2, 6)
    none = kind_of_items(batch_.sizes[holes], batch_.tag_codes[holes])
    assert none is RecordKind.ROCKETMQ
    assert kind_of_items(batch_.sizes[2:], batch_.tag_codes[2:]) is KAFKA
    assert kind_of_items(batch_.sizes[:0], batch_.tag_codes[:0]) is RecordKind.ROCKETMQ
