"""A topic with a rate: so much of it is copied in a second and no more, all of it at last, and no other topic waits for it.

On a virtual clock, threads and all: a loud topic has ten times its rate for some time, over a line that bears less than
that; beside it a quiet topic has a message each second.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import FAST, assert_equal, filled, read_back, run_once
from support.loaded import Load, free_locks

from backends.base import size_bytes
from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.attach.observe import collect
from tiered.attach.writer import AttachSettings
from tiered.clock import ManualClock
from tiered.dispatch.dispatcher import Compensation, TieredDispatcher
from tiered.dispatch.settings import DispatchSettings, Throttle, TopicRates
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.local.interface import RecordBatch

KIB = 1024
RATE, LINE, BODY = 32 * KIB, 128 * KIB, 16 * KIB
LOUD_S = 20
"""So long the loud topic is loud, with 320 KiB a second."""
LOUD, QUIET = [MessageQueue("loud", number) for number in range(2)], MessageQueue("quiet", 0)
LATE_S = 5
"""A quiet message is in the tier at the latest so long after it: freshness, a slice on the line, and the entry."""

locks = pytest.fixture(autouse=True)(free_locks)


class ThinLine(WrappingStore):
    """Uploads take their time, one behind the other."""

    def __init__(self, inner: ObjectStore, clock: Clock) -> None:
        super().__init__(inner)
        self._clock, self._free_s = clock, 0.0

    def put_if_absent(self, key: str, data: Any) -> None:
        now_s = self._clock.monotonic_s()
        self._free_s = max(now_s, self._free_s) + size_bytes(data) / LINE
        self._clock.wait(threading.Event(), self._free_s - now_s)
        super().put_if_absent(key, data)


class World:
    """The two topics, and what was seen of them each second.

    Attributes:
        copied: Messages of each loud queue that were durable, after each second.
        late_s: For how long the oldest message of the quiet topic had not been.
        lag_s: What the metrics said of the loud topic.
        limits: And of the topics that have a rate.
        broken: What was wrong, by the health of the writer, if anything was.
    """

    def __init__(self, rate: int, *, with_quiet: bool = True) -> None:
        settings = DispatchSettings(
            freshness_s=1.0, rate_of=lambda topic: rate if topic == "loud" else 0
        )
        self.load = Load(0, AttachSettings(dispatch=settings, drain_s=10.0), way=ThinLine)
        self.copied: list[list[int]] = []
        self.late_s: list[float] = []
        self.lag_s: list[float] = []
        self.limits: set[tuple[str, float]] = set()
        self.broken: set[str] = set()
        self.loud_s = LOUD_S
        self.quiet = [QUIET] * with_quiet
        self.each_second: Callable[[], None] = lambda: None

    def send(self) -> None:
        now_s = self.load.clock.monotonic_s()
        local = self.load.local
        topics = [*(LOUD * 10 if now_s < self.loud_s else ()), *self.quiet]
        for topic, queue in topics:
            local.append(topic, queue, b"x" * (BODY if topic == "loud" else 100))
        self.each_second()

    def look(self) -> None:
        dispatcher, now_s = self.load.attachment.dispatcher, self.load.clock.monotonic_s()
        assert dispatcher is not None
        offsets = dispatcher.lag()
        self.copied.append([offsets.get(queue, 0) for queue in LOUD])
        self.late_s.append(max(0.0, now_s - offsets.get(QUIET, 0)))  # its n-th came in second n
        for sample in collect(self.load.attachment, self.load.clock):
            if sample.name == "tiered_up" and not sample.value:
                self.broken.add("stalled")
            if sample.name == "tiered_lag_messages" and sample.labels == {"topic": "loud"}:
                self.lag_s.append(sample.value)
            if sample.name == "tiered_topic_rate_bytes":
                self.limits.add((sample.labels["topic"], sample.value))
        self.broken.add(dispatcher.stuck)

    def run(self, seconds: float) -> World:
        self.load.every(1.0, self.send)
        self.load.every(1.0, self.look, first_s=0.99)
        self.load.run(seconds)
        return self

    def check(self) -> None:
        """What a rate promises."""
        assert max(self.late_s) < LATE_S, "others were held back"
        for second, copied in enumerate(self.copied):
            slices = 2 * max(RATE / 4, BODY + KIB)
            assert sum(copied) * BODY <= RATE * (second + 2) + slices, "more than its rate"
            assert abs(copied[0] - copied[1]) <= 2, "its queues do not share"
        assert sum(self.copied[-1]) * BODY >= 0.9 * RATE * (len(self.copied) - 3), "less"
        assert self.broken <= {""}
        assert self.load.attachment.close(), "what its rate holds back is not in hand"


def test_a_loud_topic_gets_its_rate_and_others_do_not_wait():
    world = World(RATE).run(45.5)
    world.check()
    assert world.lag_s[-1] == 400 - sum(world.copied[-1]) > 300, "it is shown"
    assert world.limits == {("loud", RATE)}, "and why"


def test_without_a_rate_it_eats_the_line():
    with pytest.raises(AssertionError, match="others were held back"):
        World(0).run(20.5).check()


def test_who_waits_for_long_by_its_rate_is_well(monkeypatch: pytest.MonkeyPatch):
    seen = World(1, with_quiet=False).run(45.5)
    assert (sum(seen.copied[-1]) <= 2, seen.broken) == (True, {""})
    is_in_hand(monkeypatch)
    assert "stalled" in World(1, with_quiet=False).run(45.5).broken


def test_a_run_that_ends_by_itself_has_all_of_it_in_rounds_that_are_not_torn():
    store, local = MemoryStore(), filled()
    rates = replace(FAST, freshness_s=0.5, rate_of=lambda topic: 20_000 if topic == "t0" else 0)
    dispatcher = run_once(store, local, settings=rates)
    assert_equal(store, local)
    assert dispatcher.counters.rounds < dispatcher.counters.compensated


def test_all_of_it_is_copied_at_last_but_for_what_the_broker_expires_meanwhile():
    world = World(RATE)
    local, world.loud_s = world.load.local, 2

    def expire() -> None:
        if world.load.clock.monotonic_s() == 5:
            local.expire(*LOUD[0], 15)

    world.each_second = expire
    world.run(20.5)
    prefix = world.load.attachment.place.prefix
    messages, gaps = read_back(world.load.store, LOUD[0], prefix=prefix)
    assert [gap.end for gap in gaps] == [15]
    assert messages.keys() == {*range(gaps[0].start), *range(15, 20)}
    assert read_back(world.load.store, LOUD[1], prefix=prefix) == (local.raw(LOUD[1]), [])
    assert world.load.attachment.dispatcher.counters.gaps == 1


def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that all queues share waits for the rate."""
    offer, limits = TieredDispatcher._offer, TopicRates.rate_of

    def waiting(self: TieredDispatcher, batch: RecordBatch, grown: Any) -> bool:
        topic = batch.queue.topic
        while limits(self._rates, topic) and not self._rates.allowed_bytes(topic, 1):
            self._clock.wait(threading.Event(), 0.1)
        self._rates.count(topic, memoryview(batch.data).nbytes)
        return offer(self, batch, grown)

    monkeypatch.setattr(TieredDispatcher, "_offer", waiting)
    monkeypatch.setattr(TopicRates, "rate_of", lambda _self, _topic: 0)


def counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopicRates, "count", lambda *_: None)


def first_queue_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Compensation.begin

    def in_order(self: Compensation, submit: Any) -> None:
        self._turns.clear()
        begin(self, submit)

    monkeypatch.setattr(Compensation, "begin", in_order)


def saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause between two looks is lost to the topic."""
    monkeypatch.setattr("tiered.dispatch.settings._SAVED_S", 0.0)


def is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Compensation.is_idle
    monkeypatch.setattr(Compensation, "is_idle", lambda self, limited: idle(self, limited=True))


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        (waits, "others were held back"),
        (counts_nothing, "others were held back|more than its rate"),
        (first_queue_first, "do not share"),
        (saves_nothing, "less"),
        (is_in_hand, "is not in hand"),
    ],
)
def test_planted_defects_are_found(
    defect: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        World(RATE).run(45.5).check()


def test_a_throttle_makes_up_for_so_much_of_a_pause_and_no_more():
    clock = ManualClock()
    throttle = Throttle(100, clock, threading.Event(), saved_s=1.0)
    clock.advance(60)
    for _ in range(3):
        assert throttle.is_free
        throttle.count(50)
    assert not throttle.is_free
    clock.advance(0.5)
    assert throttle.is_free


def test_other_rates_count_at_once_and_at_the_end_nothing_more_is_allowed():
    clock = ManualClock()
    rates = TopicRates(lambda topic: 400 if topic == "a" else 0, clock, threading.Event())
    assert (rates.rate_of("a"), rates.rate_of("b")) == (400, 0)
    assert (rates.allowed_bytes("a", 1000), rates.allowed_bytes("b", 1000)) == (100, 1000)
    rates.count("a", 4000)
    assert rates.allowed_bytes("a", 1000) == 0
    rates.reconfigure(lambda _topic: 1)
    assert (rates.allowed_bytes("a", 1000), rates.allowed_bytes("b", 1000)) == (1, 1)
    rates.end()
    assert rates.allowed_bytes("a", 1000) == 0
