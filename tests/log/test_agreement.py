"""The fast way of holding records against their items says what the thorough one says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.examples import HOST_V6, make
from support.synthetic import make_record

from tiered.format.block import parse_records
from tiered.format.record import BODY_AT, encode_record
from tiered.log import agreement
from tiered.log.agreement import fields_of
from tiered.model import MessageQueue

QUEUE = MessageQueue("orders", 3)


def laid_out(raws):
    sizes = np.array([len(raw) for raw in raws], np.int32)
    return b"".join(raws), np.cumsum(sizes, dtype=np.int64) - sizes, sizes


def records(queue=QUEUE, count=5):
    return [make_record(queue, 7 + n, 1000 + n, b"b" * (10 * n), 5_000 + n) for n in range(count)]


def thorough(queue, data, positions, sizes, offsets):
    return agreement._fault(queue, parse_records(data, positions, sizes), offsets)


@pytest.mark.parametrize("topic", ["t", "ab", "orders!", "orders12", "a" * 25, "a" * 127, "żółw"])
def test_sound_records_go_the_fast_way(topic: str):
    queue = MessageQueue(topic, 3)
    data, positions, sizes = laid_out(records(queue))
    offsets = np.arange(7, 12)
    assert agreement._usual(queue, data, positions, sizes, offsets) is not None
    times, physical, fault = fields_of(queue, data, positions, sizes, offsets)
    assert (times.tolist(), physical.tolist(), fault) == (
        [5_000 + n for n in range(5)],
        [1000 + n for n in range(5)],
        "",
    )


def test_whatever_byte_is_wrong_both_ways_say_the_same():
    data, positions, sizes = laid_out(records())
    offsets, rng = np.arange(7, 12), random.Random(1)
    faulty = 0
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= rng.choice((1, 2, 8, 0x40, 0x80, 0xFF))
        wanted = thorough(QUEUE, bytes(changed), positions, sizes, offsets)
        found = agreement._usual(QUEUE, bytes(changed), positions, sizes, offsets)
        assert (found is None) or not wanted, at
        assert fields_of(QUEUE, bytes(changed), positions, sizes, offsets).fault == wanted, at
        faulty += bool(wanted)
    assert faulty > 5 * 25


@pytest.mark.parametrize(
    "queue", [MessageQueue("orders", 4), MessageQueue("order", 3), MessageQueue("Orders", 3)]
)
def test_records_of_another_queue_are_refused(queue: MessageQueue):
    data, positions, sizes = laid_out(records())
    assert "this queue" in fields_of(queue, data, positions, sizes, np.arange(7, 12)).fault


def test_items_that_point_elsewhere_are_refused():
    data, positions, sizes = laid_out(records())
    offsets = np.arange(7, 12)
    for wrong in (positions + 1, positions - 1, positions + len(data), np.roll(positions, 1)):
        assert fields_of(QUEUE, data, wrong, sizes, offsets).fault
    assert fields_of(QUEUE, data, positions, np.roll(sizes, 1), offsets).fault
    assert "queue offset" in fields_of(QUEUE, data, positions, sizes, offsets + 1).fault
    assert fields_of(QUEUE, data[:-1], positions, sizes, offsets).fault
    assert fields_of(QUEUE, data[: BODY_AT + 3], positions[:1], sizes[:1], offsets[:1]).fault


def test_unusual_records_go_the_thorough_way():
    data, positions, sizes = laid_out(
        [
            encode_record(make(queue_id=3, topic="orders", queue_offset=0)),
            encode_record(
                make(
                    queue_id=3,
                    topic="orders",
                    queue_offset=1,
                    born_host=HOST_V6,
                    sys_flag=1 << 4,
                )
            ),
        ]
    )
    offsets = np.arange(2)
    assert agreement._usual(QUEUE, data, positions, sizes, offsets) is None
    assert not fields_of(QUEUE, data, positions, sizes, offsets).fault
