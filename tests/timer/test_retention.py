"""An hour's file goes when all of it is handed over and a grace has passed; by a plan, and by nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.timers import PLACE, PREFIX, Box, Killed, Timers

from backends.memory import MemoryStore
from tiered.clock import ManualClock
from tiered.errors import MovedOnError
from tiered.log.timers import HOUR_MS
from tiered.upkeep.expire import apply_steps, plan_expire_timers
from tiered.upkeep.gc import apply_gc, plan_gc
from tiered.upkeep.workplace import Workplace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.upkeep.expire import ExpirePlan
    from timer.dequeue import DueMessage

GRACE_MS = 2 * HOUR_MS


class Aged(Timers):
    """Timers in a store that dates objects by the same clock."""

    def __init__(self) -> None:
        clock = ManualClock(1_700_000_000_000 // HOUR_MS * HOUR_MS)
        super().__init__(MemoryStore(now_ms=clock.now_ms), clock)
        self.at = Workplace(self.store, self.store, PLACE, clock, random.Random(5), give_up_s=1.0)

    def plan(self) -> ExpirePlan:
        return plan_expire_timers(self.at, grace_ms=GRACE_MS, objects_max=100)

    def bundles(self) -> int:
        return sum("/bundle/" in info.key for info in self.store.list(PREFIX))


def test_only_what_is_handed_over_and_old_enough_goes():
    with Aged() as timers:
        now = timers.now_ms
        timers.put([now + n for n in range(10)])
        timers.put([now + HOUR_MS + n for n in range(10)])
        box = Box()
        run = timers.hand(box, near_ms=0, batch=4)  # the first hour
        timers.clock.advance(3600)
        run.step()  # a part of the second
        for hours, count in ((0, 0), (1.9, 0), (0.1, 1), (100, 1)):
            timers.clock.advance(3600 * hours)
            plan = timers.plan()
            assert [step.messages for step in plan.steps] == [10] * count
        assert apply_steps(timers.at, plan)["steps"] == 1
        assert apply_steps(timers.at, plan)["was_applied"]
        assert timers.plan().steps == ()
        timers.clock.advance(3600)
        gc = plan_gc(timers.store, timers.at.place, timers.clock, grace_ms=0, max_deletions=100)
        assert apply_gc(timers.at, gc)["deleted"]
        assert timers.bundles() == 1
        while run.step():
            pass
        assert timers.messages(box) == [f"{n:032X}" for n in range(20)]


class Choosy(Box):
    """Refuses each third message."""

    def give(self, messages: Sequence[DueMessage]) -> list[int]:
        refused = [one.offset for one in messages if one.offset % 3 == 1]
        super().give([one for one in messages if one.offset not in refused])
        return refused


def test_a_file_with_refused_messages_is_kept_until_they_are_given_up():
    """They are listed as long as it is there; what a kill cuts short is refused once."""
    with Aged() as timers:
        timers.put([timers.now_ms + n for n in range(10)])
        timers.put([timers.now_ms + HOUR_MS])
        box = Choosy(dies=("after", 1))
        with pytest.raises(Killed):
            timers.hand(box, batch=4)
        run = timers.hand(box, batch=4)
        assert (run.counters.refused, len(box.got)) == (2, 8)
        timers.clock.advance(4 * 3600)
        plan = timers.plan()
        assert [step.messages for step in plan.steps] == [1]
        assert plan.kept_for_refused == 1
        run.reader.refresh()
        (hour, _) = sorted(run.reader.state.timers.hours)
        assert [one.offset for one in run.reader.refused(hour)] == [1, 4, 7]
        more = plan_expire_timers(timers.at, grace_ms=0, objects_max=100, with_refused=True)
        with pytest.raises(MovedOnError):
            apply_steps(timers.at, replace(more, with_refused=False))
        assert apply_steps(timers.at, more)["steps"] == 2
        run.reader.refresh()
        assert list(run.reader.refused(hour)) == []


def test_what_comes_for_an_hour_that_is_gone_is_handed_over():
    with Aged() as timers:
        due, box = timers.now_ms, Box()
        timers.put([due + n for n in range(5)])
        timers.hand(box)
        timers.clock.advance(4 * 3600)
        plan = timers.plan()
        apply_steps(timers.at, plan)
        timers.put([due + n for n in range(3)])
        assert timers.plan().steps == ()
        timers.hand(box)
        assert timers.messages(box) == [f"{n:032X}" for n in range(8)]
        assert [step.messages for step in timers.plan().steps] == [3]


def test_a_plan_that_has_become_wrong_gives_nothing_up():
    with Aged() as timers:
        due, box = timers.now_ms, Box()
        timers.put([due + n for n in range(5)])
        timers.hand(box)
        timers.clock.advance(4 * 3600)
        plan = timers.plan()
        timers.put([due + 9])
        with pytest.raises(MovedOnError):
            apply_steps(timers.at, plan)
        timers.hand(box)
        assert len(box.got) == 6
