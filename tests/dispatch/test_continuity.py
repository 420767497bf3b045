"""What the broker truncates: nothing of it is silent, and the present history is the local one again."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.dispatching import FAST, PREFIX, dispatching, read_back, run_once
from support.synthetic import SyntheticStore

from backends.memory import MemoryStore
from tiered.dispatch import continuity
from tiered.dispatch.group_commit import Fact
from tiered.log.expiry import plan_removal
from tiered.log.reader import QueueReader, TierReader
from tiered.log.state import Gap, Incarnation
from tiered.log.verify import verify_tier
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiered.dispatch.dispatcher import TieredDispatcher

QUEUE = MessageQueue("t", 0)
OTHER = MessageQueue("t", 1)

MERGING = replace(FAST, fan_in=2)


def stored(count: int, *, text: bytes = b"old") -> SyntheticStore:
    local = SyntheticStore()
    append(local, count, text)
    for number in range(7):
        local.append("t", 1, b"other %d" % number)
    return local


def append(local: SyntheticStore, count: int, text: bytes) -> None:
    for number in range(count):
        local.append("t", 0, text * 20 + b" %d" % number)


def incarnations(store: MemoryStore) -> tuple[Incarnation, ...]:
    reader = TierReader(store, PREFIX)
    reader.refresh()
    return reader.state.queues[QUEUE]


def check(store: MemoryStore, local: SyntheticStore) -> None:
    """The tier has exactly what the local store has, and is sound."""
    for queue in local.queues():
        assert read_back(store, queue) == (local.raw(queue), [])
    report = verify_tier(store, PREFIX, deep=True, local=local)
    assert report.problems == []


def counted(dispatcher: TieredDispatcher) -> tuple[int, int]:
    return dispatcher.counters.truncated, dispatcher.counters.begun_anew


# -- between two runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("again", [1, 30, 59, 60, 61, 200])
def test_a_topic_made_anew_between_two_runs_begins_anew(again: int):
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    old = local.raw(QUEUE)
    local.delete("t", 0)
    append(local, again, b"new")
    assert counted(run_once(store, local, seed=2)) == (0, 1)
    check(store, local)
    before, now = incarnations(store)
    assert (before.number, before.commit_offset, now.number) == (0, 60, 1)
    assert "none in common" in before.ended
    reader = TierReader(store, PREFIX)
    reader.refresh()
    kept = reader.queue(QUEUE, 0).read(QueueOffset(0))
    assert kept is not None
    assert bytes(kept.records.data).startswith(old[0])
    assert counted(run_once(store, local, seed=3)) == (0, 0)


@pytest.mark.parametrize("end", [1, 13, 37, 59])
@pytest.mark.parametrize("more", [1, 40])
def test_a_tail_lost_and_written_anew_is_truncated(end: int, more: int):
    store, local = MemoryStore(), stored(40)
    run_once(store, local)
    append(local, 20, b"tail")
    run_once(store, local, seed=2)
    local.cut("t", 0, end)
    append(local, more, b"new")
    assert counted(run_once(store, local, seed=3)) == (1, 0)
    check(store, local)
    tail, now = incarnations(store)
    assert (tail.number, tail.min_offset, tail.commit_offset) == (0, end, 60)
    assert f"from queue offset {end} on" in tail.ended
    assert (now.number, now.min_offset, now.commit_offset) == (0, 0, end + more)
    assert counted(run_once(store, local, seed=4)) == (0, 0)
    append(local, 5, b"later")
    run_once(store, local, seed=5)
    check(store, local)


def test_a_cut_part_is_merged_like_others():
    store, local = MemoryStore(), stored(12)
    for seed in range(4):
        run_once(store, local, seed=seed)
        append(local, 12, b"more %d" % seed)
    local.cut("t", 0, 17)
    append(local, 9, b"new")
    with dispatching(store, local, MERGING, seed=9) as dispatcher:
        follow(dispatcher)
        dispatcher.merge_all()
    assert dispatcher.counters.truncated == 1
    first = incarnations(store)[-1].parts()[0]
    assert (first.queue_offset, first.queue_end) == (0, 17)
    # Twice, where the merging that goes on by itself was sooner than this test.
    assert first.bundle.level >= 1
    check(store, local)
    local.cut("t", 0, 21)  # and again, in a merged part
    append(local, 9, b"newer")
    assert counted(run_once(store, local, seed=10)) == (1, 0)
    check(store, local)


def test_what_was_truncated_is_still_readable():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    old = local.raw(QUEUE)
    local.cut("t", 0, 31)
    append(local, 3, b"new")
    run_once(store, local, seed=2)
    tail, _ = incarnations(store)
    found = b"".join(
        bytes(batch.records.data)
        for batch in QueueReader.of_incarnation(store, PREFIX, QUEUE, tail).batches(QueueOffset(0))
        if not isinstance(batch, Gap)
    )
    assert found == b"".join(old[offset] for offset in range(31, 60))


def test_a_second_loss_behind_and_before_the_first():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    for seed, end in enumerate((50, 20, 25), 2):
        local.cut("t", 0, end)
        append(local, 12, b"after %d" % end)
        assert counted(run_once(store, local, seed=seed)) == (1, 0)
        check(store, local)
    assert [incarnation.ended != "" for incarnation in incarnations(store)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_lagging_copy_is_waited_for():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    whole = local.raw(QUEUE)
    local.cut("t", 0, 31)
    second = run_once(store, local, seed=2)
    assert counted(second) == (0, 0)
    assert second.continuity.lagging == 1
    assert len(incarnations(store)) == 1
    assert read_back(store, QUEUE) == (whole, [])


def test_a_copy_that_expired_before_it_could_be_compared_goes_on():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    append(local, 20, b"more")
    local.expire("t", 0, 60)
    assert counted(run_once(store, local, seed=2)) == (0, 0)
    assert incarnations(store)[-1].commit_offset == 80


def test_nothing_in_common_above_the_local_minimum_begins_anew_there():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.delete("t", 0)
    append(local, 80, b"new")
    local.expire("t", 0, 45)
    assert counted(run_once(store, local, seed=2)) == (0, 1)
    assert incarnations(store)[-1].min_offset == 45
    check(store, local)


def test_a_tier_without_marks_is_read_instead(monkeypatch: pytest.MonkeyPatch):
    store, local = MemoryStore(), stored(60)
    with monkeypatch.context() as patched:
        patched.setattr("tiered.log.composite.fingerprint_of_item", lambda batch, number: 0)
        run_once(store, local)
    assert all(part.last == 0 for part in incarnations(store)[0].parts())
    assert counted(run_once(store, local, seed=2)) == (0, 0)
    local.cut("t", 0, 31)
    append(local, 29, b"new")
    assert counted(run_once(store, local, seed=3)) == (1, 0)
    check(store, local)


def test_opening_reads_nothing_of_the_tier_when_all_is_well():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    keys: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            if name.startswith("get"):
                return lambda key, *more: (keys.append(key), getattr(store, name)(key, *more))[1]
            return getattr(store, name)

    append(local, 10, b"more")
    run_once(Watched(), local, seed=2)  # type: ignore[arg-type]
    assert [key for key in keys if "/queue/" in key] == []


def test_a_lagging_copy_that_is_made_anew_begins_anew_however_short():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.cut("t", 0, 31)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)
        assert dispatcher.continuity.lagging == 1
        local.delete("t", 0)
        append(local, 10, b"new")
        follow(dispatcher)
    assert counted(dispatcher) == (0, 1)
    check(store, local)


def test_a_lagging_copy_is_held_against_the_tier_before_anything_more_is_taken():
    """A power failure while attach runs: first only the tail is gone, then other messages come."""
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.cut("t", 0, 31)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)
        assert dispatcher.continuity.lagging == 1
        append(local, 40, b"new")
        batch = local.read(QUEUE, 60, bytes_max=1 << 20, count_max=100)
        assert batch is not None
        assert not dispatcher.dispatch(batch)
        assert dispatcher.drain(20), dispatcher.fault
    assert counted(dispatcher) == (1, 0)
    check(store, local)


@pytest.mark.parametrize("more", [1, 10, 28])
def test_a_lagging_copy_that_grows_by_other_messages_is_truncated_though_it_stays_shorter(
    more: int,
):
    """Its last common message is as it was: only that it has grown tells that it may be another now."""
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.cut("t", 0, 31)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)
        assert dispatcher.continuity.lagging == 1
        append(local, more, b"new")
        follow(dispatcher)
    assert counted(dispatcher) == (1, 0)
    check(store, local)


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_damage_in_the_tier_holds_nothing_up(kind: str, is_gone: bool):
    """What cannot be divided goes as a whole, and is taken anew."""
    store, local = MemoryStore(), stored(20)
    for seed in range(3):
        run_once(store, local, seed=seed)
        append(local, 20, b"more %d" % seed)
    part = incarnations(store)[0].parts()[-1]
    place = part.log if kind == "commitlog" else part.index
    data = bytearray(store.get(PREFIX + place.key))
    store.delete(PREFIX + place.key)
    if not is_gone:
        data[:] = bytes(len(data))
        store.put_if_absent(PREFIX + place.key, [data])
    local.cut("t", 0, part.queue_offset + 5)
    append(local, 40, b"new")
    assert counted(run_once(store, local, seed=9)) == (1, 0)
    for queue in local.queues():
        found = read_back(store, queue)[0] if kind == "consumequeue" else {}
        assert found in ({}, local.raw(queue))
    assert incarnations(store)[-1].commit_offset == part.queue_offset + 45


def test_the_plug_in_way_is_held_against_the_store_too():
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.cut("t", 0, 31)
    append(local, 40, b"new")
    with dispatching(store, local, seed=2) as dispatcher:
        batch = local.read(QUEUE, 60, bytes_max=1 << 20, count_max=100)
        assert batch is not None
        assert not dispatcher.dispatch(batch)
        assert dispatcher.drain(20), dispatcher.fault
    assert counted(dispatcher) == (1, 0)
    check(store, local)


# -- while it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [3, 60, 61, 150])
def test_a_topic_made_anew_while_it_is_followed(again: int):
    store, local, done = MemoryStore(), stored(60), threading.Event()
    with dispatching(store, local, FAST) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(done.is_set,))
        thread.start()
        try:
            wait(lambda: dispatcher.lag().get(QUEUE) == 60, dispatcher)
            with local._lock:  # between two looks
                local.delete("t", 0)
                append(local, again, b"new")
            wait(lambda: dispatcher.counters.begun_anew == 1, dispatcher)
            wait(lambda: dispatcher.lag().get(QUEUE) == again, dispatcher)
            append(local, 20, b"later")
            wait(lambda: dispatcher.lag().get(QUEUE) == again + 20, dispatcher)
        finally:
            done.set()
            thread.join()
    assert counted(dispatcher) == (0, 1)
    check(store, local)


def test_a_tail_truncated_while_it_is_followed():
    store, local, done = MemoryStore(), stored(60), threading.Event()
    with dispatching(store, local, FAST) as dispatcher:
        thread = threading.Thread(target=dispatcher.follow, args=(done.is_set,))
        thread.start()
        try:
            wait(lambda: dispatcher.lag().get(QUEUE) == 60, dispatcher)
            with local._lock:
                local.cut("t", 0, 40)
                append(local, 20, b"new")  # as many as were lost: nothing fell, nothing rose
            wait(lambda: dispatcher.counters.truncated == 1, dispatcher)
            wait(lambda: dispatcher.lag().get(QUEUE) == 60, dispatcher)
        finally:
            done.set()
            thread.join()
    check(store, local)


def test_a_topic_made_anew_is_seen_though_the_tier_has_nothing_left_of_the_old_one():
    """The tier cannot tell; whoever has just tiered the last record can."""
    store, local = MemoryStore(), stored(12)
    with dispatching(store, local) as dispatcher:
        follow(dispatcher)
        steps, _ = plan_removal(dispatcher._journal.state, QUEUE.topic, objects_max=100)
        (step,) = [one for one in steps if one.queue == QUEUE]
        expired = threading.Event()
        dispatcher.say(Fact(step.action(), expired.set))
        assert expired.wait(20)
        local.delete("t", 0)
        append(local, 20, b"another")
        dispatcher.continuity.reopen([QUEUE])
        follow(dispatcher)
    assert counted(dispatcher) == (0, 1)
    assert incarnations(store)[-1].number == 1
    assert read_back(store, QUEUE) == (local.raw(QUEUE), [])


def follow(dispatcher: TieredDispatcher) -> None:
    dispatcher.follow(lambda: False, until_idle=True)
    assert dispatcher.drain(20), dispatcher.fault


def wait(true: Callable[[], bool], dispatcher: TieredDispatcher) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if true():
            return
        assert dispatcher.fault is None
        pause.wait(0.01)
    raise AssertionError("it has not come to that")


# -- what local retention took ----------------------------------------------------------------------


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_queue_that_retention_has_emptied_has_its_gap_on_record(*, is_stopped: bool):
    store, local = MemoryStore(), stored(5)
    if is_stopped:
        run_once(store, local, settings=FAST)
        append(local, 5, b"gone")
        local.expire("t", 0, 10)
        run_once(store, local, settings=FAST, seed=2)
    else:
        with dispatching(store, local, settings=FAST) as dispatcher:
            dispatcher.follow(lambda: False, until_idle=True)
            assert dispatcher.drain(20)
            append(local, 5, b"gone")
            local.expire("t", 0, 10)
            dispatcher.follow(lambda: False, until_idle=True)
            assert dispatcher.drain(20)
    messages, gaps = read_back(store, QUEUE)
    assert [*messages] == [0, 1, 2, 3, 4]
    assert [(gap.start, gap.end) for gap in gaps] == [(5, 10)]
    (incarnation,) = incarnations(store)
    assert incarnation.commit_offset == 10
    append(local, 3, b"new")
    run_once(store, local, settings=FAST, seed=3)
    assert [*read_back(store, QUEUE)[0]] == [0, 1, 2, 3, 4, 10, 11, 12]


# -- records that cannot be compared ------------------------------------------------------------


def damage(local: SyntheticStore, count: int = 1) -> None:
    for number in range(count):
        local.append("t", 0, b"damaged %d" % number, is_damaged=True)


@pytest.mark.parametrize("end", [1, 13, 59])
@pytest.mark.parametrize("holes", [1, 3])
def test_another_tail_is_seen_though_the_record_at_the_last_offset_is_damaged(end: int, holes: int):
    """The tier had a message there, which nothing could be held against: other histories were mixed in silence."""
    store, local = MemoryStore(), stored(60 + holes - 1)
    run_once(store, local)
    local.cut("t", 0, end)
    append(local, 60 - end - 1, b"new")
    damage(local, holes)
    append(local, 3, b"newer")
    run_once(store, local, seed=2)
    if end < 59:
        check(store, local)
    run_once(store, local, seed=3)
    append(local, 1, b"newest")
    run_once(store, local, seed=4)
    assert read_back(store, QUEUE)[0].keys() == local.raw(QUEUE).keys()


@pytest.mark.parametrize("end", [13, 58, 60, 61])
def test_another_tail_is_seen_where_the_tier_ends_with_damaged_records(end: int):
    store, local = MemoryStore(), stored(60)
    damage(local, 2)
    run_once(store, local)
    local.cut("t", 0, end)
    append(local, 62 - end + 4, b"new")
    assert counted(run_once(store, local, seed=2)) == (1, 0)
    check(store, local)


@pytest.mark.parametrize("end", [13, 58, 60, 61])
def test_another_tail_is_seen_behind_a_damaged_record_that_was_looked_at_before(end: int):
    store, local = MemoryStore(), stored(60)
    damage(local, 2)
    run_once(store, local)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)
        local.cut("t", 0, end)
        append(local, 62 - end + 4, b"new")
        follow(dispatcher)
    assert counted(dispatcher) == (1, 0)
    check(store, local)


@pytest.mark.parametrize("hole", [13, 58, 59])
def test_a_message_is_seen_where_a_damaged_record_was_looked_at_before(hole: int):
    """The tier has a message there, so now it can be told that the tail is another. (Seed 5981 of the simulation.)"""
    store, local = MemoryStore(), stored(60)
    damage(local, 2)
    run_once(store, local)
    local.cut("t", 0, hole)
    damage(local, 62 - hole)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)
        local.cut("t", 0, hole)
        append(local, 1, b"new")
        damage(local, 61 - hole)
        append(local, 4, b"newer")
        follow(dispatcher)
    assert counted(dispatcher) == (1, 0)
    check(store, local)


def after_the_next_plan(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Call something once, as soon as the two histories were held against each other."""
    plan, left = continuity.plan_change, [meanwhile]

    def planned(*arguments: Any, **more: Any) -> Any:
        change = plan(*arguments, **more)
        while left:
            left.pop()()
        return change

    monkeypatch.setattr(continuity, "plan_change", planned)


def test_what_comes_while_a_damaged_end_is_decided_on_is_not_taken_for_what_was_compared(
    monkeypatch: pytest.MonkeyPatch,
):
    """The topic was made anew just then, with a message where the tier ends with a hole. (Seed 296 of the simulation.)"""
    store, local = MemoryStore(), stored(60)
    damage(local)
    run_once(store, local)

    def make_anew() -> None:
        local.delete("t", 0)
        append(local, 70, b"new")

    with dispatching(store, local, seed=2) as dispatcher:
        after_the_next_plan(monkeypatch, make_anew)
        follow(dispatcher)
        follow(dispatcher)
    check(store, local)
    assert counted(dispatcher) == (0, 1)


@pytest.mark.parametrize("how", ["another tail", "an offset fell"])
def test_a_queue_that_changes_while_it_is_decided_on_is_decided_on_again(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    """Before more of it is taken: then the records at its end would be the same again. (Seed 218127 of the simulation.)"""
    store, local, queue = MemoryStore(), stored(60), MessageQueue("t", 0)
    damage(local)
    run_once(store, local)
    with dispatching(store, local, seed=2) as dispatcher:
        follow(dispatcher)

        def changed() -> None:
            if how == "another tail":
                local.cut("t", 0, 50)
                append(local, 11, b"new")
            else:
                dispatcher.continuity.reopen([queue])

        file = dispatcher.file(queue)
        dispatcher.continuity.suspect(queue)
        after_the_next_plan(monkeypatch, changed)
        assert not dispatcher.continuity.resolve(file)
        assert not dispatcher.continuity.may_take(file)
        assert dispatcher.continuity.resolve(file) == (how == "an offset fell")
        follow(dispatcher)
    check(store, local)
    assert counted(dispatcher) == (how == "another tail", 0)


@pytest.mark.parametrize("meanwhile", ["taken", "reopened", "suspected"])
def test_a_queue_that_moves_while_it_is_looked_at_is_not_taken_for_what_was_seen(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
):
    """Compensation had taken more, and found it odd; dispatch went on behind it. (Seed 307214 of the simulation.)"""
    store, local, queue = MemoryStore(), stored(60), MessageQueue("t", 0)
    with dispatching(store, local) as dispatcher:
        follow(dispatcher)
        file, watch = dispatcher.file(queue), dispatcher.continuity
        look, left = watch.look, [meanwhile]

        def slow_look(*arguments: Any) -> Any:
            found = look(*arguments)
            for how in [left.pop()] if left else []:
                if how == "taken":
                    append(local, 1, b"more")
                    batch = local.read(queue, file.append_offset, bytes_max=4096, count_max=9)
                    dispatcher._take_compensated(file, batch, watch.reopened(queue))
                elif how == "reopened":
                    watch.reopen([queue])
                else:
                    watch.suspect(queue)
            return found

        watch.reopen([queue])
        monkeypatch.setattr(watch, "look", slow_look)
        assert not watch.may_take(file)
        assert watch.may_take(file) == (meanwhile != "suspected")


def test_what_was_read_before_an_offset_fell_is_not_taken_behind_it():
    """The dispatch thread may have looked at the queue meanwhile, and would go on behind it. (Seed 307214.)"""
    store, local, queue = MemoryStore(), stored(60), MessageQueue("t", 0)
    with dispatching(store, local) as dispatcher:
        follow(dispatcher)
        file, watch = dispatcher.file(queue), dispatcher.continuity
        append(local, 5, b"lost")
        batch, reopened = (
            local.read(queue, file.append_offset, bytes_max=4096, count_max=9),
            watch.reopened(queue),
        )
        local.cut("t", 0, 60)
        watch.reopen([queue])
        dispatcher._take_compensated(file, batch, reopened)
        assert file.append_offset == 60


def test_what_comes_while_a_lagging_copy_is_decided_on_is_not_taken_for_what_was_compared(
    monkeypatch: pytest.MonkeyPatch,
):
    store, local = MemoryStore(), stored(60)
    run_once(store, local)
    local.cut("t", 0, 40)

    def lose_more() -> None:
        local.cut("t", 0, 30)
        append(local, 10, b"new")

    with dispatching(store, local, seed=2) as dispatcher:
        after_the_next_plan(monkeypatch, lose_more)
        follow(dispatcher)
        follow(dispatcher)
    assert counted(dispatcher) == (1, 0)
    check(store, local)


@pytest.mark.parametrize("more", [0, 5])
def test_damaged_records_at_the_end_are_no_other_history(more: int):
    store, local = MemoryStore(), stored(60)
    damage(local, 2)
    run_once(store, local)
    append(local, more, b"more")
    assert counted(run_once(store, local, seed=2)) == (0, 0)
    check(store, local)


def test_a_copy_that_lags_and_can_read_what_was_damaged_waits():
    store, local = MemoryStore(), stored(30)
    damage(local)
    append(local, 10, b"behind")
    run_once(store, local)
    copy = stored(30)
    append(copy, 1, b"sound")
    assert counted(run_once(store, copy, seed=2)) == (0, 0)
    assert incarnations(store)[-1].commit_offset == 41


# -- beside merging -----------------------------------------------------------------------------


def test_what_was_merged_while_it_was_open_is_not_truncated_by_the_next_writer():
    """A merged part bears the fingerprint of its last record."""
    store, local = MemoryStore(), stored(12)
    for seed in range(3):
        run_once(store, local, seed=seed)
        append(local, 12, b"more %d" % seed)
    with dispatching(store, local, MERGING, seed=8) as dispatcher:
        follow(dispatcher)
        dispatcher.merge_all()
    assert incarnations(store)[-1].parts()[0].count > 12
    assert counted(run_once(store, local, seed=9)) == (0, 0)
    check(store, local)


def test_a_truncate_that_comes_behind_a_merge_is_planned_anew_and_counted_once():
    store, local = MemoryStore(), stored(12)
    for seed in range(3):
        run_once(store, local, seed=seed)
        append(local, 12, b"more %d" % seed)
    run_once(store, local, seed=8)
    local.cut("t", 0, 17)
    append(local, 9, b"new")
    with dispatching(store, local, seed=9) as dispatcher:
        say, said = dispatcher.continuity._say, []

        def merge_first(fact: Fact) -> None:
            if not said:
                dispatcher._merging._policy = MERGING.merge_policy
                dispatcher.merge_all()
            said.append(fact.action["do"])
            say(fact)

        dispatcher.continuity._say = merge_first
        follow(dispatcher)
    assert said == ["truncate", "truncate"]
    assert counted(dispatcher) == (1, 0)
    assert [incarnation.ended != "" for incarnation in incarnations(store)] == [True, False]
    check(store, local)
