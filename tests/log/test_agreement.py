"""The fast way of holding records against their items says what the thorough one says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.examples import HOST_V6, make
from support.synthetic import make_record

from tiered.format.block import parse_records
from tiered.format.record import BODY_AT, encode_record
from tiered.log import decode
from tiered.log.decode import fields_of, usual_fields
from tiered.model import MessageQueue

QUEUE = MessageQueue("orders", 3)


def laid_out(raws):
    sizes = np.array([len(raw) for raw in raws], np.int32)
    return b"".join(raws), np.cumsum(sizes, dtype=np.int64) - sizes, sizes


def records(queue=QUEUE, count=5):
    return [make_record(queue, 7 + n, 1000 + n, b"b" * (10 * n), 5_000 + n) for n in range(count)]


def thorough(queue, data, positions, sizes, offsets):
    return decode._fault(queue, parse_records(data, positions, sizes), offsets)


def usual(queue, data, positions, sizes, offsets):
    ids = np.int64(queue.queue_id)
    counts = np.array([len(sizes)])
    return usual_fields([queue.topic], counts, ids, data, positions, sizes, offsets)


@pytest.mark.parametrize("topic", ["t", "ab", "orders!", "orders12", "a" * 25, "a" * 127, "żółw"])
def test_sound_records_go_the_fast_way(topic: str):
    queue = MessageQueue(topic, 3)
    data, positions, sizes = laid_out(records(queue))
    offsets = np.arange(7, 12)
    assert usual(queue, data, positions, sizes, offsets) is not None
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
        found = usual(QUEUE, bytes(changed), positions, sizes, offsets)
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
    assert usual(QUEUE, data, positions, sizes, offsets) is None
    assert not fields_of(QUEUE, data, positions, sizes, offsets).fault


def test_records_of_several_queues_are_held_against_their_own():
    queues = [
        MessageQueue("a", 1),
        MessageQueue("bcd", 2),
        MessageQueue("a", 3),
        MessageQueue("z", 4),
    ]
    data, positions, sizes = laid_out([raw for queue in queues for raw in records(queue)])
    ids, offsets = np.repeat([1, 2, 3, 4], 5), np.tile(np.arange(7, 12), 4)
    counts, rest = np.full(4, 5), (data, positions, sizes, offsets)
    assert usual_fields(["a", "bcd", "a", "z"], counts, ids, *rest) is not None
    for others in (
        ["a", "bce", "a", "z"],
        ["bcd", "a", "a", "z"],
        ["a", "bcd", "z", "a"],
        ["a", "bcd", "a", "zz"],
    ):
        assert usual_fields(others, counts, ids, *rest) is None
    assert usual_fields(["a", "bcd", "a", "z"], np.array([4, 5, 6, 5]), ids, *rest) is None
    assert usual_fields(["a", "bcd", "a", "z"], counts, np.roll(ids, 1), *rest) is None
    for at in range(
        0, len(data), 7
    ):  # a byte that the thorough way finds, this one never lets pass
        changed = bytearray(data)
        changed[at] ^= 0x41
        found = usual_fields(["a", "bcd", "a", "z"], counts, ids, bytes(changed), *rest[1:])
        wrong = any(
            thorough(
                queue, bytes(changed), positions[n : n + 5], sizes[n : n + 5], offsets[n : n + 5]
            )
            for n, queue in zip((0, 5, 10, 15), queues, strict=True)
        )
        assert found is None or not wrong, at


def test_thousands_of_topics_are_held_against_theirs_in_as_many_steps_as_their_names_have_lengths(
    monkeypatch: pytest.MonkeyPatch,
):
    """Each topic had its own look at all records: 30 times the work where each of 8,000 topics had a section."""
    topics = [f"{'long-' * (number % 2)}topic-{number:04d}" for number in range(2000)]
    queues = [MessageQueue(topic, 0) for topic in topics]
    data, positions, sizes = laid_out([raw for queue in queues for raw in records(queue, 1)])
    looks: list[int] = []
    are_tails = decode._are_tails
    monkeypatch.setattr(decode, "_are_tails", lambda *some: looks.append(1) or are_tails(*some))
    ones, zeros = np.ones(2000, np.int64), np.zeros(2000, np.int64)
    assert usual_fields(topics, ones, zeros, data, positions, sizes, zeros + 7) is not None
    assert len(looks) == 2
    topics[999], topics[1001] = topics[1001], topics[999]
    assert usual_fields(topics, ones, zeros, data, positions, sizes, zeros + 7) is None
