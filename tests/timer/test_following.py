"""``attach --timers``: what comes into a store's timer topics is taken, look by look, once, and what is near stays."""

from __future__ import annotations

import contextlib
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from support.clocks import Shifted
from support.timer_stores import CAPTURED_MS, PLACE, bring, held, pending
from support.timers import SOURCE, wheel_batch, wheel_record

from backends.local import LocalFolderStore
from tiered.api.broker_place import Place
from tiered.attach import observe
from tiered.attach.timer_import import ImportSettings, TimerFollower, _made_ahead
from tiered.clock import ManualClock
from tiered.errors import DataError
from tiered.format.record import decode_record
from tiered.local.catalog import TIMER_TOPICS
from tiered.local.rocketmq import RocketMQOptions, RocketMQStore
from tiered.log.timers import HOUR_MS, TimerSource
from tiered.model import QueueBounds, QueueOffset
from timer.dequeue import DueMessage, TimerReader
from timer.hour_files import Counts, Enqueue, ImportProgress
from timer.local_target import LocalTarget

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine

    from tiered.local.interface import RecordBatch

NEAR_MS = 4 * HOUR_MS


class Followed:
    """A store that grows, and who takes its timers."""

    def __init__(self, folder: Path) -> None:
        self.store, self.clock, self.count = folder / "store", ManualClock(CAPTURED_MS), 0
        self._objects = LocalFolderStore(folder / "tier")
        self.stop = threading.Event()

    def target(self) -> LocalTarget:
        """Who delivers from the store."""
        return LocalTarget.open(
            str(self.store), cluster=PLACE.cluster, broker=PLACE.broker, clock=self.clock,
            rng=random.Random(5),
        )  # fmt: skip

    def put(self, *hours: float, **properties: str) -> None:
        """Messages that are due in so many hours."""
        target = self.target()
        dues = [int(self.clock.now_ms() + hour * HOUR_MS) for hour in hours]
        made = [wheel_record(self.count + n, due, **properties) for n, due in enumerate(dues)]
        target.give([DueMessage(due, n, one) for n, (due, one) in enumerate(zip(dues, made, strict=True))])  # fmt: skip
        target.close()
        self.count += len(hours)

    def follower(self, local: RocketMQStore) -> TimerFollower:
        return TimerFollower(
            local, str(self.store), self._objects, Place(PLACE.cluster, PLACE.broker),
            ImportSettings(near_ms=NEAR_MS), freshness_s=1.0, clock=self.clock, rng=random.Random(7),
            stop=self.stop,
        )  # fmt: skip

    def look(self) -> tuple[int, int, int]:
        """Taken, left with the broker, known: of what was looked at."""
        options = RocketMQOptions(with_timers=True)
        local = RocketMQStore.open(str(self.store), clock=self.clock, options=options)
        local.refresh()
        follower = self.follower(local)
        follower.take_once()
        local.close()
        return follower.total.taken, follower.total.near, follower.total.known


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_each_look_takes_what_came_since_the_last(followed: Followed):
    followed.put(1, 5, 30, 3, 700)
    assert followed.look() == (3, 2, 0)
    assert followed.look() == (0, 0, 0)
    followed.put(6, 2)
    assert followed.look() == (1, 1, 0)
    followed.clock.advance(3_600)
    assert followed.look() == (0, 0, 0)
    assert sorted(name for _, _, name in held(followed.store)) == [
        f"{n:032X}" for n in (1, 2, 4, 5)
    ]


def test_a_message_that_is_cancelled_at_the_broker_is_cancelled_here(followed: Followed):
    """Its delete mark comes with a later look."""
    followed.put(50, 51)
    assert followed.look() == (2, 0, 0)
    followed.put(50, TIMER_DEL_UNIQKEY=f"{0:032X}")
    assert followed.look()[0] == 0
    reader = TimerReader(LocalFolderStore(followed.store.parent / "tier"), PLACE.prefix)
    reader.refresh()
    hours = sorted(reader.state.timers.hours)
    left = [decode_record(one.record, 0) for hour in hours for one in reader.pending(hour)]
    assert [one.properties["UNIQ_KEY"] for one in left] == [f"{1:032X}"]


def left_in_tier(followed: Followed) -> list[str]:
    reader = TimerReader(LocalFolderStore(followed.store.parent / "tier"), PLACE.prefix)
    reader.refresh()
    hours = sorted(reader.state.timers.hours)
    left = [decode_record(one.record, 0) for hour in hours for one in reader.pending(hour)]
    return [one.properties["UNIQ_KEY"] for one in left]


def test_a_message_is_cancelled_though_its_mark_comes_when_it_is_near(followed: Followed):
    followed.put(5, 6)
    assert followed.look() == (2, 0, 0)
    followed.clock.advance(2 * 3600)
    followed.put(3, TIMER_DEL_UNIQKEY=f"{0:032X}")
    followed.put(1, TIMER_DEL_UNIQKEY=f"{9:032X}")  # of one that had never been far
    assert followed.look() == (0, 1, 0)
    assert left_in_tier(followed) == [f"{1:032X}"]


def test_what_our_own_wheel_has_delivered_is_not_taken_from_its_store(followed: Followed):
    followed.put(-1, -2, 5)
    target = followed.target()
    assert target.tick() == 2
    target.close()
    found = bring(followed.store, 0).total
    assert (found.taken, found.delivered) == (1, 2)
    assert left_in_tier(followed) == [f"{2:032X}"]


class Source:
    """A local store's wheel, from a queue offset on."""

    def __init__(self, base: int, *records: bytes) -> None:
        self._base, self._records = base, records

    @property
    def bounds(self) -> QueueBounds:
        return QueueBounds(QueueOffset(self._base), QueueOffset(self._base + len(self._records)))

    def read(self, _queue: object, at: int, **_limits: int) -> RecordBatch:
        return wheel_batch(at, self._records[at - self._base :])

    def chosen(self, known: TimerSource, due_from: int = 0) -> tuple[list[int], Counts]:
        source = Enqueue(SOURCE, self.bounds, ImportProgress(), known, due_from)
        (one,) = source.choose(self)  # type: ignore[arg-type]
        return (self._base + one.indices).tolist(), one.counts


@pytest.mark.parametrize("low", [0, 1])
def test_a_mark_is_taken_though_it_comes_together_with_a_rolled_record_of_its_message(low: int):
    """The message is in the tier by its first record, which is looked at once more, or not."""
    due = 5 * HOUR_MS
    first, rolled = (wheel_record(n, due, UNIQ_KEY="A", TIMER_ROLL_TIMES=f"{n}") for n in (0, 1))
    mark = wheel_record(2, due, UNIQ_KEY="M", TIMER_DEL_UNIQKEY="A")
    known = TimerSource(0, 1, ((1, 0),))
    taken, counts = Source(low, *(first, rolled, mark)[low:]).chosen(known)
    assert (taken, counts.marks, counts.taken) == ([2], 1, 0)


def test_what_follows_is_read_while_a_round_is_stored():
    """And no more than that."""
    read, third = list[int](), threading.Event()

    def batches() -> Iterator[int]:
        for number in range(1, 8):
            read.append(number)
            if number == 3:
                third.set()
            yield number

    some = _made_ahead(batches())
    assert next(some) == 1
    assert third.wait(60)
    assert len(read) == 3
    assert [*some] == [2, 3, 4, 5, 6, 7]


def test_a_store_that_cannot_be_read_ends_what_is_read_ahead():
    def batches() -> Iterator[int]:
        yield 1
        raise DataError("a record is damaged")

    some = _made_ahead(batches())
    assert next(some) == 1
    with pytest.raises(DataError):
        next(some)


def test_how_old_the_oldest_is_that_is_not_in_the_tier(followed: Followed):
    followed.put(1, 5, 30)
    now_ms = followed.clock.now_ms()
    with contextlib.closing(
        RocketMQStore.open(
            str(followed.store), clock=followed.clock, options=RocketMQOptions(with_timers=True)
        )
    ) as local:
        local.refresh()
        follower = followed.follower(local)
        followed.clock.advance(50)
        attached = SimpleNamespace(timers=follower, local=local)

        def measured() -> list[float]:
            return [one.value for one in observe._timers(attached, followed.clock)]  # type: ignore[arg-type]

        oldest_s, waiting, taken, is_up = measured()
        assert (waiting, taken, is_up) == (3, 0, True)
        assert oldest_s == pytest.approx(50, abs=1.5), now_ms
        follower.take_once()
        assert measured() == [0.0, 0, 2, True]


def test_attach_once_takes_what_import_takes(tiered: CommandLine, store: Path):
    url = f"file://{store.parent}/tier"
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS - clock.now_ms()
    due_from = (CAPTURED_MS + 24 * HOUR_MS) // HOUR_MS * HOUR_MS
    ran = tiered("attach", store, "--to", url, "--once", "--timers", "--near", "24h", "--json")
    timers = ran.document["timers"]
    late = sum(pending(due_from).values())
    assert (ran.code, timers["taken"], timers["near"]) == (0, late, 226 - late)
    assert held(store) == pending(due_from)
    assert not any("wheel" in left["name"] for left in ran.document["left_out"])
    tiered_topics = {queue["topic"] for queue in tiered("ls", url, "--json").document["queues"]}
    assert not tiered_topics & TIMER_TOPICS
    again = tiered("attach", store, "--to", url, "--once", "--timers", "--near", "24h", "--json")
    assert again.document["timers"]["taken"] == again.document["timers"]["near"] == 0
    rest = tiered("timer", "import", store, "--to", url, "--near", "0s", "--json").document
    assert (rest["taken"], rest["known"]) == (226 - late, late)
    assert held(store) == pending()


def test_a_decommissioned_brokers_timers_are_no_obstacle_when_they_are_taken(
    tiered: CommandLine, store: Path
):
    """Nor is what an earlier look had left with the broker."""
    url = f"file://{store.parent}/tier"
    clock = tiered.clock = Shifted()
    clock.shift_ms = CAPTURED_MS - clock.now_ms()
    words = ("attach", store, "--to", url, "--decommission", "--json", "--timers", "--near")
    first = tiered(*words, "24h")
    assert first.code == 1
    what = {one["what"] for one in first.document["decommission"]["pending"]}
    assert {"delayed messages", "timed messages"} & what
    ran = tiered(*words, "0s")
    assert (ran.code, ran.document["decommission"]["is_decommissioned"]) == (0, True), ran.error
    assert any("timer run" in note for note in ran.document["decommission"]["notes"])
    assert held(store) == pending()


def test_near_goes_with_timers(tiered: CommandLine, store: Path):
    ran = tiered("attach", store, "--to", f"file://{store.parent}/tier", "--once", "--near", "1h")
    assert (ran.code, "--near goes with --timers" in ran.error) == (2, True)
