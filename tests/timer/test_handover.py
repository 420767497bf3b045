"""Handing over by a virtual clock: a year in seconds, kills at every step, two runs, clocks that jump."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timers import Box, Killed, Timers

from tiered.errors import FencedError, StoreUnavailableError
from tiered.log.timers import HOUR_MS
from timer.wheel import TimingWheel

if TYPE_CHECKING:
    from collections.abc import Iterator

YEAR_HOURS = 365 * 24


@pytest.fixture
def timers() -> Iterator[Timers]:
    with Timers() as made:
        yield made


def test_a_year_comes_once_in_order_and_never_early(timers: Timers):
    rng = random.Random(3)
    dues = sorted(timers.now_ms + rng.randrange(YEAR_HOURS * HOUR_MS) for _ in range(1_200))
    for some in (dues[::3], dues[1::3], dues[2::3]):
        timers.put(some)
    box = Box()
    delivered = timers.live(box, YEAR_HOURS, near_ms=HOUR_MS)
    assert [due for due, _ in delivered] == dues
    assert all(0 <= at - due <= 1_000 for due, at in delivered)
    assert box.max_waiting < 20


def test_late_hours_come_in_due_order(timers: Timers):
    dues = [timers.now_ms + hour * HOUR_MS + 17 for hour in (9, 2, 5, 2, 7)]
    timers.put(dues)
    timers.clock.advance(10 * 3600)
    box = Box()
    timers.hand(box)
    assert [one.due_ms for one in box.got] == sorted(dues)


@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("at", range(5))
def test_killed_at_each_step(moment: str, at: int, timers: Timers):
    dues = [timers.now_ms + n * 60_000 for n in range(25)]
    timers.put(dues)
    box = Box(dies=(moment, at))
    for _ in range(3):
        try:
            timers.hand(box, batch=5)
        except Killed:
            box.dies = None
    assert [one.due_ms for one in box.got] == dues


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_kills_and_outages_by_seed(data: st.DataObject):
    with Timers() as timers:
        kills_and_outages(timers, data)


def kills_and_outages(timers: Timers, data: st.DataObject) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    dues: list[int] = []
    box = Box()
    for _ in range(6):
        more = [timers.now_ms + rng.randrange(6 * HOUR_MS) for _ in range(rng.randrange(12))]
        timers.put(more)
        dues += more
        box.dies = rng.choice([None, ("before", 0), ("within", 1), ("after", 1), ("within", 0)])
        with contextlib.suppress(Killed):
            timers.hand(box, batch=rng.randint(1, 5), near_ms=rng.choice([0, HOUR_MS]))
        timers.clock.advance(rng.randrange(5_400))
        timers.clock.jump(rng.choice([0, 0, -600, 600]))
    box.dies = None
    timers.clock.advance(12 * 3600)
    timers.hand(box)
    assert Counter(one.due_ms for one in box.got) == Counter(dues)


def test_of_two_runs_the_earlier_is_fenced(timers: Timers):
    timers.put([timers.now_ms + n * 1_000 for n in range(20)])
    box = Box()
    first = timers.run(box, batch=5)
    assert first.step() == 5
    second = timers.run(box, batch=5)
    assert second.step() == 5
    with pytest.raises(FencedError, match="another run"):
        first.refresh()
    while second.step():
        pass
    assert len(box.got) == 20
    assert len({one.offset for one in box.got}) == 20


def test_a_run_whose_lease_is_gone_gives_nothing(timers: Timers):
    timers.put([timers.now_ms])
    box = Box()
    run = timers.run(box)
    run.is_ours = lambda: False
    with pytest.raises(FencedError, match="lease"):
        run.step()
    assert box.got == []


def test_what_comes_while_its_hour_is_swept_is_handed_over_too(timers: Timers):
    now = timers.now_ms
    timers.put([now + n for n in range(10)])
    box = Box()
    run = timers.run(box, batch=4)
    run.step()
    timers.put([now + 5, now + 1])
    run.refresh()
    while run.step() or run.step():
        run.refresh()
    assert sorted(one.due_ms - now for one in box.got) == sorted([*range(10), 1, 5])


def test_a_target_that_does_not_answer_gets_nothing_twice(timers: Timers):
    timers.put([timers.now_ms + n for n in range(12)])
    box = Box(fails=[3, 0])
    run = timers.run(box, batch=5)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            run.step()
    while run.step():
        pass
    assert [one.offset for one in box.got] == list(range(12))
    assert run.counters.found == 3


def test_the_wheel_fires_in_order_and_not_early():
    wheel, rng = TimingWheel(), random.Random(1)
    entries = [(rng.randrange(100_000), 0, n) for n in range(2_000)]
    for entry in entries:
        wheel.add(*entry)
    fired: list[Any] = []
    for now in range(0, 100_001, 137):
        some = wheel.fire(now)
        assert all(one.due_ms <= now for one in some)
        fired += some
    fired += wheel.fire(100_001)
    assert fired == sorted(entries)
    assert (len(wheel), wheel.next_ms) == (0, None)
