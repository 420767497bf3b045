"""A bad hour leaves many short segments; sealing joins them, and no message changes."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from support.dispatching import (
    FAST,
    PREFIX,
    Flaky,
    assert_equal,
    dispatching,
    filled,
    run_once,
)

from backends.errors import UnavailableError
from backends.memory import MemoryStore
from tiered.journal.reader import JournalReader
from tiered.log.seal import groups, plan_merge, plan_seals
from tiered.log.state import TierMachine, TierState
from tiered.log.verify import verify_tier
from tiered.plugin.rebuild import plan_rebuild

if TYPE_CHECKING:
    from support.synthetic import SyntheticStore

    from backends.base import ObjectStore
    from tiered.log.parts import QueueLife, Segment

JOINING = replace(FAST, part_bytes=700, window_bytes=700, segment_bytes_max=16_000, uploads_max=2)
POLICY = JOINING.seal_policy


def state_of(store: ObjectStore) -> TierState:
    reader = JournalReader(store, PREFIX, TierMachine())
    reader.catch_up()
    return reader.state


def after_a_bad_hour(seed: int) -> tuple[MemoryStore, SyntheticStore]:
    """A tier of which every third upload of each queue has failed, and nothing is merged.

    Each queue counts its own tries: with one sequence for all, how bad the hour is for a queue
    would hang on the order of the threads.
    """
    store, local = MemoryStore(), filled(topics=1, queues=3, each=150)
    lock, tries = threading.Lock(), Counter[str]()

    def decide(key: str) -> Exception | None:
        queue, log, _ = key.partition("/commitlog/")
        with lock:
            tries[queue] += bool(log)
            fails = log and (tries[queue] + seed) % 3 == 0
        return UnavailableError("no") if fails else None

    unsealed = replace(JOINING, small_part_bytes=0)
    run_once(Flaky(store, decide), local, settings=unsealed, seed=seed)
    return store, local


def lives(state: TierState) -> list[QueueLife]:
    return [life for queue in sorted(state.queues) for life in state.queues[queue]]


def short_neighbours(segments: tuple[Segment, ...]) -> int:
    """Pairs that are one segment's worth, and of which something is to be merged."""
    return sum(
        one.size_bytes + two.size_bytes <= JOINING.segment_bytes_max
        and len(plan_merge([*one.parts, *two.parts], POLICY)) < len(one.parts + two.parts)
        for one, two in pairwise(segments)
    )


def assert_sound(store: ObjectStore, local: SyntheticStore) -> None:
    assert_equal(store, local)
    report = verify_tier(store, PREFIX, deep=True, local=local)
    assert (report.problems, report.checked_messages) == ([], 450)


@pytest.mark.parametrize("seed", range(3))
def test_short_segments_are_joined_by_the_next_writer(seed: int):
    store, local = after_a_bad_hour(seed)
    before = [len(life.segments) for life in lives(state_of(store))]
    assert min(before) >= 8, "the bad hour was too good"
    with dispatching(store, local, JOINING, seed=seed + 100) as dispatcher:
        while plan_seals(state_of(store), POLICY, with_open=True):  # what is under way is left out
            dispatcher.seal_all()
            assert dispatcher.fault is None
    state = state_of(store)
    assert plan_seals(state, POLICY, with_open=True) == []
    for life, count in zip(lives(state), before, strict=True):
        assert short_neighbours(life.segments) == 0
        assert len(life.segments) < count / 2
    assert_sound(store, local)


def test_what_rolls_while_messages_are_followed_is_joined_once_it_is_clear_what_belongs_together():
    store, local = after_a_bad_hour(7)
    rolled = lives(state_of(store))
    with dispatching(store, local, JOINING, seed=9) as dispatcher:
        closed = sum(len(groups(life.segments, POLICY)) - 1 for life in rolled)
        assert closed >= 1
        threading.Event().wait(0.1)
        while plan_seals(state_of(store), POLICY):
            assert dispatcher.fault is None
            threading.Event().wait(0.02)
        assert dispatcher.counters.sealed_segments >= closed
    for life in lives(state_of(store)):
        *closed_rows, _ = groups(life.segments, POLICY)  # the last may still grow
        assert short_neighbours(tuple(s for row in closed_rows for s in row)) == 0
    assert_sound(store, local)


@pytest.mark.parametrize("seed", range(3))
def test_a_rebuilt_journal_tells_the_joined_segments(seed: int):
    store, local = after_a_bad_hour(seed)
    with dispatching(store, local, JOINING, seed=seed + 100) as dispatcher:
        dispatcher.seal_all()
    expected = state_of(store)
    for info in list(store.list(PREFIX + "journal/")):
        store.delete(info.key)
    with ThreadPoolExecutor(2) as pool:
        found = plan_rebuild(store, PREFIX, pool).proposal.state
    assert told(found) == told(expected)


def told(state: TierState) -> list[list[tuple[int, int, bool, tuple[str, ...]]]]:
    return [
        [
            (s.base_offset, s.base_queue_offset, s.merged, tuple(p.log.key for p in s.parts))
            for s in life.segments
        ]
        for life in lives(state)
    ]
