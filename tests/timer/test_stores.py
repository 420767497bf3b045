"""``tiered timer import`` of stores of many kinds: what each has pending is taken, once, and nothing that was delivered."""

from __future__ import annotations

import contextlib
import random
import shutil
from typing import TYPE_CHECKING

import pytest
from support.timer_stores import CAPTURED_MS, Made, bring, delivered, held
from support.timers import wheel_record

from tiered.local.catalog import SCHEDULE_TOPIC
from timer.dequeue import DueMessage
from timer.local_target import LocalTarget

if TYPE_CHECKING:
    from pathlib import Path

MINUTE_MS = 60_000


def test_what_was_delivered_and_not_noted_is_not_taken(tmp_path: Path):
    """A broker that is killed has delivered for a second more than it noted, and of delay levels for ten."""
    with Made(tmp_path) as made:
        for due in (-9_000, -2_000, -1_000, 50_000):
            made.timed(due, f"T{due}")
        for attempts, topic in ((0, "orders"), (1, "%RETRY%g"), (1, "%RETRY%h"), (2, "%RETRY%g")):
            made.level(1, "L", topic, attempts)
        made.clock.advance(2)
        made.put("orders", "T-2000", TIMER_OUT_MS=str(CAPTURED_MS - 2_000), TIMER_DEQUEUE_MS="1")
        made.put("orders", "T50000", TIMER_OUT_MS=str(CAPTURED_MS + 50_000))  # sent so by a client
        for attempts, topic in ((0, "orders"), (1, "%RETRY%h")):
            made.put(topic, "L", REAL_TOPIC=topic, DELAY="1", attempts=attempts)
        made.put("orders", "L", REAL_TOPIC="%RETRY%g", DELAY="1", attempts=2)  # not delivered there
        made.note(-5_000, 4)
    total = bring(made.folder, 0).total
    assert made.held() == ["L@1000", "L@1000", "T-1000@-1000", "T50000@50000"]
    assert (total.taken, total.delivered) == (4, 4)
    target = LocalTarget.open(
        str(made.folder), cluster="c", broker="b", clock=made.clock, rng=random.Random(1)
    )
    made.clock.advance(60)
    assert target.tick() == 4
    target.close()
    assert delivered(made.folder)["orders", 0, "T-2000"] == 1


def test_messages_that_are_not_in_the_wheel_yet_are_pending_however_old(tmp_path: Path):
    with Made(tmp_path) as made:
        for due in (-9_000, -8_000, 4_000, -7_000):
            made.timed(due, f"T{due}")
        made.note(-1_000, 2)
    assert bring(made.folder, 0).total.delivered == 2
    assert made.held() == ["T-7000@-7000", "T4000@4000"]


def test_without_a_brokers_notes_all_is_pending(tmp_path: Path):
    with Made(tmp_path) as made:
        made.timed(-9_000, "A")
        made.level(3, "B")
    assert bring(made.folder, 0).total.taken == 2


@pytest.mark.parametrize("lost", ["timercheck", "delayOffset.json"])
def test_where_a_brokers_notes_are_lost_its_topics_tell_what_it_delivered(
    lost: str, tmp_path: Path
):
    """However long ago: nobody knows when it noted something at last."""
    with Made(tmp_path) as made:
        made.timed(1_000, "A")
        made.timed(90_000_000, "B")
        made.level(1, "L")
        made.clock.advance(2)
        made.put("orders", "A", TIMER_OUT_MS=str(CAPTURED_MS + 1_000), TIMER_DEQUEUE_MS="1")
        made.put("orders", "L", REAL_TOPIC="orders", DELAY="1")
        made.clock.advance(3_600)
        made.put("orders", "other")
        made.note(3_500_000, 2, {1: 1})
        (made.folder / "config" / lost).unlink()
    assert bring(made.folder, 0).total.delivered == 2
    assert made.held() == ["B@90000000"]


def test_what_lies_in_a_queue_that_no_wheel_reads_is_not_taken_for_delivered(tmp_path: Path):
    with Made(tmp_path) as made:
        made.timed(-9_000, "A")
        made.timed(-9_000, "B", queue_id=1)
        made.note(0, 1)
    assert bring(made.folder, 0).total.taken == 1
    assert made.held() == ["B@-9000"]


@pytest.mark.parametrize("lost", [1, 2])
def test_delay_levels_are_those_of_the_broker(lost: int, tmp_path: Path):
    """Where a queue has lost the times at its end, its other messages tell how long its level is."""
    with Made(tmp_path, "7m 3d") as made:
        for level in (1, 2, 2, 2):
            made.level(level, f"L{level}")
    (file,) = (made.folder / "consumequeue" / SCHEDULE_TOPIC / "1").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: 20 * (3 - lost)].ljust(len(data), b"\0"))
    assert bring(made.folder, 0).total.taken == 4
    held_ = {due - CAPTURED_MS for due, _, _ in held(made.folder)}
    assert held_ == {7 * MINUTE_MS, 3 * 24 * 60 * MINUTE_MS}


@pytest.mark.parametrize("first", ["there", "gone", "taken"])
def test_a_rolled_message_is_one(first: str, tmp_path: Path):
    """However many records of it there are, and when its first is gone; and its delete mark finds it."""
    with Made(tmp_path) as made:
        roll = [{"TIMER_ROLL_TIMES": str(n)} if n else {} for n in range(3)]
        for times in roll[first == "gone" :]:
            made.timed(9_000_000, "A", **times)
        made.timed(8_000_000, "M", TIMER_DEL_UNIQKEY="B")
        for times in roll[1:]:
            made.timed(8_000_000, "B", **times)
        made.note(0, 5)
        if first == "taken":
            made.flush()
            bring(made.folder, 0)
            made.timed(9_000_000, "A", TIMER_ROLL_TIMES="3")
    total = bring(made.folder, 0).total
    assert made.held() == ["A@9000000"]
    assert (total.cancelled, total.taken) == ((0, 0) if first == "taken" else (2, 1))


@pytest.mark.parametrize("prefix", ["", "orders+"])
def test_a_mark_that_a_broker_left_cancels_what_is_handed_over(prefix: str, tmp_path: Path):
    due = CAPTURED_MS + 5_000
    with Made(tmp_path) as made:
        made.timed(5_000, "M", TIMER_DEL_UNIQKEY=f"{prefix}{0:032X}")
    with contextlib.closing(
        LocalTarget.open(
            str(made.folder), cluster="c", broker="b", clock=made.clock, rng=random.Random(1)
        )
    ) as target:
        target.give([DueMessage(due, n, wheel_record(n, due)) for n in range(2)])
        made.clock.advance(6)
        assert target.tick() == 1
    assert delivered(made.folder) == {("orders", 2, f"{1:032X}"): 1}


def test_a_log_whose_end_is_torn_gives_what_is_whole(tmp_path: Path):
    with Made(tmp_path) as made:
        for n in range(9):
            made.timed(1_000_000 + n, f"T{n}")
        end = made.writer.log_end
    (made.folder / "abort").touch()
    log = next((made.folder / "commitlog").iterdir())
    with log.open("r+b") as file:
        file.seek(end - 30)
        file.write(bytes(30))
    assert bring(made.folder, 0).total.taken == 8


def test_a_store_that_goes_on_is_taken_bit_by_bit(tmp_path: Path):
    with Made(tmp_path) as made:
        for n in range(30):
            made.timed(10 * MINUTE_MS * n, f"T{n}")
            made.flush()
            now_ms = CAPTURED_MS + n * MINUTE_MS
            bring(made.folder, 60 * MINUTE_MS, now_ms=now_ms)
        assert len(made.held()) == 30 - 7
        copy = tmp_path / "copy" / "store"
        shutil.copytree(made.folder, copy)
    assert bring(made.folder, 0).total.taken == 7
    assert len(made.held()) == 30
    assert bring(copy, 0).total.taken == 30
