"""A queue of which the tier has no message, and that retention empties before it is tiered, has its gap on record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.dispatching import FAST, PREFIX, dispatching, read_back, run_once
from support.synthetic import SyntheticStore
from support.waiting import until

from backends.memory import MemoryStore
from tiered.log.reader import TierReader
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from tiered.dispatch.dispatcher import TieredDispatcher
    from tiered.local.interface import RecordBatch

QUEUE = MessageQueue("t", 0)


def begun(at: int) -> tuple[MemoryStore, SyntheticStore]:
    """A tier that knows the queue, begun at ``at``, and has nothing of it."""
    store, local = MemoryStore(), SyntheticStore()
    append(local, at)
    local.expire("t", 0, at)
    run_once(store, local, settings=FAST)
    return store, local


def append(local: SyntheticStore, count: int) -> None:
    for number in range(count):
        local.append("t", 0, b"message %d" % number)


def follow(dispatcher: TieredDispatcher) -> None:
    dispatcher.follow(lambda: False, until_idle=True)
    assert dispatcher.drain(20), dispatcher.fault


def gaps(store: MemoryStore) -> list[tuple[int, int]]:
    """On record, which ``status`` counts; nothing lies before them, so readers begin behind them."""
    reader = TierReader(store, PREFIX)
    reader.refresh()
    incarnation = reader.state.incarnation(QUEUE)
    assert incarnation
    return [(gap.start, gap.end) for gap in incarnation.gaps]


def check_goes_on(store: MemoryStore, local: SyntheticStore, at: int) -> None:
    append(local, 3)
    run_once(store, local, settings=FAST, seed=9)
    assert [*read_back(store, QUEUE)[0]] == [at, at + 1, at + 2]
    assert verify_tier(store, PREFIX, deep=True, local=local).is_clean


def test_emptied_between_two_runs():
    store, local = begun(5)
    append(local, 5)
    local.expire("t", 0, 10)
    run_once(store, local, settings=FAST, seed=2)
    assert gaps(store) == [(5, 10)]
    run_once(store, local, settings=FAST, seed=3)
    assert gaps(store) == [(5, 10)]
    check_goes_on(store, local, 10)


def test_emptied_while_it_runs():
    store, local = begun(5)
    with dispatching(store, local, settings=FAST) as dispatcher:
        dispatcher.follow(lambda: False, until_idle=True)
        append(local, 5)
        local.expire("t", 0, 10)
        dispatcher.follow(lambda: False, until_idle=True)
        assert dispatcher.drain(20)
    assert gaps(store) == [(5, 10)]
    check_goes_on(store, local, 10)


@pytest.mark.parametrize("more", [0, 4])
def test_a_queue_that_was_empty_all_the_time_has_none(more: int):
    store, local = begun(5)
    append(local, more)
    run_once(store, local, settings=FAST, seed=2)
    assert gaps(store) == []
    reader = TierReader(store, PREFIX)
    reader.refresh()
    incarnation = reader.state.incarnation(QUEUE)
    assert incarnation
    assert (incarnation.min_offset, incarnation.commit_offset) == (5, 5 + more)


class Busy(SyntheticStore):
    """Gets a message whenever somebody who reads in bulk has found that there is none."""

    left = 3

    def read(
        self, queue: MessageQueue, start: int, *, bytes_max: int, count_max: int
    ) -> RecordBatch | None:
        found = super().read(queue, start, bytes_max=bytes_max, count_max=count_max)
        if found is None and count_max > 1 and self.left:
            self.left -= 1
            append(self, 1)
        return found


def test_what_comes_between_two_looks_at_an_emptied_queue_is_tiered():
    store, local = MemoryStore(), Busy()
    append(local, 5)
    local.expire("t", 0, 5)
    local.left = 0
    run_once(store, local, settings=FAST)
    append(local, 5)
    local.expire("t", 0, 10)
    local.left = 3
    run_once(store, local, settings=FAST, seed=2)
    local.left = 0
    run_once(store, local, settings=FAST, seed=3)
    assert gaps(store) == [(5, 10)]
    assert read_back(store, QUEUE) == (local.raw(QUEUE), [])
    assert min(local.raw(QUEUE)) == 10


def test_a_queue_known_to_be_empty_that_grows_and_is_emptied_again_unseen():
    """The gap is told while the same process runs, not with the next message. (Seed 6146 of the simulation.)"""
    store, local = MemoryStore(), SyntheticStore()
    append(local, 5)
    with dispatching(store, local, settings=FAST) as dispatcher:
        follow(dispatcher)
        local.expire("t", 0, 5)
        until(lambda: (follow(dispatcher), QUEUE in dispatcher.continuity._lagging)[1])
        with local._lock:
            append(local, 3)
            local.expire("t", 0, 8)
        until(lambda: (follow(dispatcher), gaps(store) == [(5, 8)])[1])
    assert verify_tier(store, PREFIX, deep=True, local=local).is_clean
