"""Handing over by a virtual clock: a year in seconds, kills at every step, two runs, clocks that jump."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timers import Box, Killed, Timers

from backends.errors import BackendError, RefusedError
from backends.local import LocalFolderStore
from backends.memory import MemoryStore
from backends.s3_settings import S3Options
from backends.testing.faulty import READS, WRITES, Fault, FaultyStore, Rule
from tiered.api.broker_place import Place
from tiered.attach.timer_run import LEASE_S, KeptLease, RunSettings, TimerDelivery, hand_over
from tiered.clock import ManualClock, SystemClock
from tiered.errors import ClosedError, DataError, FencedError, StoreUnavailableError
from tiered.format.record import decode_record
from tiered.journal.lease import Holder, Lease
from tiered.log.timers import (
    HOUR_MS,
    FactsCopy,
    TimerFacts,
    TimerHour,
    TimerRun,
    TimerSource,
    hour_queue,
    kept_facts,
)
from timer.dequeue import TimerReader
from timer.local_target import TimingWheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiered.log.parts import TierState
    from timer.handover import HandOver

YEAR_HOURS = 365 * 24


@pytest.fixture
def timers() -> Iterator[Timers]:
    with Timers() as made:
        yield made


class Calendar(ManualClock):
    """The time of day is moved by the test; what work takes is measured, so that it is paced as it is in incarnation."""

    def monotonic_s(self) -> float:
        return SystemClock().monotonic_s()


@pytest.mark.parametrize("count", [1_200, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_a_year_comes_once_in_order_and_never_early(count: int):
    with Timers(clock=Calendar(1_700_000_000_000 // HOUR_MS * HOUR_MS)) as timers:
        rng = random.Random(3)
        dues = sorted(timers.now_ms + rng.randrange(YEAR_HOURS * HOUR_MS) for _ in range(count))
        for some in (dues[::3], dues[1::3], dues[2::3]):
            timers.put(some)
        box = Box()
        delivered = timers.live(box, YEAR_HOURS, near_ms=HOUR_MS)
    assert [due for due, _ in delivered] == dues
    assert all(0 <= at - due <= 1_000 for due, at in delivered)
    assert box.max_waiting < 20 + count // 1_000


def test_the_copy_of_what_is_known_is_what_was_kept_last():
    """Hours come, change and go; it is read again, and replaced though another has replaced it."""
    rng, store = random.Random(2), MemoryStore()
    copies, hours = [FactsCopy(store, "t/"), FactsCopy(store, "t/")], dict[int, TimerHour]()
    for number in range(1, 60):
        for hour in rng.sample(range(30), rng.randrange(5)):
            hours[hour] = TimerHour(hour, number, refused=(number,))
        if rng.random() < 0.2 and hours:
            del hours[rng.choice([*hours])]
        source = TimerSource(0, number, ((number, 7),))
        facts = TimerFacts({hour_queue(3): source}, dict(hours), TimerRun(number, {"pid": 1}, {}))
        copies[number % 7 == 0].keep(facts, number)
        copies[number % 7 != 0].keep(TimerFacts(), number - 1)  # is older
        assert kept_facts(store, "t/") == (facts, number)


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
    with pytest.raises(StoreUnavailableError, match="lease"):
        run.step()
    assert box.got == []
    run.is_ours = lambda: True  # renewed: nobody had it meanwhile
    assert run.step() == 1
    assert len(box.got) == 1


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=40))
def test_a_delete_mark_cancels_what_is_due_with_it_whichever_came_first(
    rows: list[tuple[int, int, bool]],
):
    """Named by unique id, or by real topic and unique id; as a broker's wheel does (``test_live_brokers``)."""
    with Timers() as timers:
        due_ms, marks = timers.now_ms, {(due, key) for due, key, is_mark in rows if is_mark}
        left = [row[:2] for row in rows if row[:2] not in marks]
        for due, key, is_mark in rows:
            said = {"TIMER_DEL_UNIQKEY": f"orders+K{key}" if due % 2 else f"K{key}"}
            timers.put([due_ms + due], UNIQ_KEY=f"K{key}", **(said if is_mark else {}))
        box = Box()
        run = timers.hand(box)
        found = [decode_record(one.record, 0).properties["UNIQ_KEY"] for one in box.got]
        dues = [one.due_ms - due_ms for one in box.got]
        assert Counter(zip(dues, found, strict=True)) == Counter((d, f"K{k}") for d, k in left)
        assert run.counters.dropped == len(rows) - len(left)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 1), st.integers(0, 3)),
        max_size=30,
    )
)
def test_of_a_rolled_message_that_was_taken_by_several_records_one_is_given(
    rows: list[tuple[int, int, int, int]],
):
    """As by imports with days between: the broker stores it anew every other day, and loses the old record."""
    with Timers() as timers:
        due_ms, least = timers.now_ms, dict[tuple[int, int, int], int]()
        for due, key, topic, roll in rows:
            said = {"UNIQ_KEY": f"K{key}", "REAL_TOPIC": f"t{topic}", "TIMER_ROLL_TIMES": str(roll)}
            said = {name: value for name, value in said.items() if value != "0"}
            timers.put([due_ms + due], **said)
            name = due, key, topic
            least[name] = min(roll, least.get(name, roll))
        box = Box()
        timers.hand(box)
        said_ = [(one.due_ms - due_ms, decode_record(one.record, 0).properties) for one in box.got]
        found = Counter((due, said["UNIQ_KEY"], said["REAL_TOPIC"]) for due, said in said_)
        wanted = [row[:3] for row in rows if row[3] == least[row[:3]]]
        assert found == Counter((due, f"K{key}", f"t{topic}") for due, key, topic in wanted)


def test_a_file_that_has_lost_messages_or_is_damaged_holds_up_nothing(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
):
    for hour in range(4):
        timers.put([timers.now_ms + hour * HOUR_MS + n for n in range(10)])
    first, box, lost = timers.now_ms // HOUR_MS, Box(), {1: range(3), 3: range(10)}
    batches = TimerReader._batches

    def damaged(self: TimerReader, state: TierState, hour: int, *rest: Any) -> Any:
        if hour == first:
            raise DataError("its checksum is wrong")
        for batch in batches(self, state, hour, *rest):
            batch.sizes[list(lost.get(hour - first, ()))] = -1
            yield batch

    monkeypatch.setattr(TimerReader, "_batches", damaged)
    timers.clock.advance(4 * 3600)
    run = timers.hand(box, batch=4)
    assert timers.messages(box) == [f"{n:032X}" for n in range(13, 30)]
    assert (run.counters.missing, run.counters.damaged) == (13, 1)
    assert run.next_ms is None
    monkeypatch.undo()
    timers.hand(box, batch=4)  # it has been mended
    assert timers.messages(box)[17:] == [f"{n:032X}" for n in range(10)]


@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_a_sweep_whose_file_is_damaged_in_its_midst_is_left_alone_and_goes_on_when_it_is_mended(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """Meanwhile others are handed over, so nobody knows any more what was known of its last batch."""
    for hour in range(3):
        timers.put([timers.now_ms + hour * HOUR_MS + n for n in range(10)])
    first, box = timers.now_ms // HOUR_MS, Box(dies=(moment, 1))
    with pytest.raises(Killed):
        timers.hand(box, batch=4)
    batches = TimerReader._batches

    def damaged(self: TimerReader, state: TierState, hour: int, *rest: Any) -> Any:
        if hour == first:
            raise DataError("its checksum is wrong")
        return batches(self, state, hour, *rest)

    monkeypatch.setattr(TimerReader, "_batches", damaged)
    timers.clock.advance(3 * 3600)
    box.dies = ("within", 2)
    with pytest.raises(Killed):  # behind a sweep that is left alone another one is left behind
        timers.hand(box, batch=4)
    box.dies = None
    run = timers.hand(box, batch=4)
    assert run.counters.damaged == 1
    assert sorted(timers.messages(box)[-20:]) == [f"{n:032X}" for n in range(10, 30)]
    monkeypatch.undo()
    run = timers.hand(box, batch=4)
    assert sorted(timers.messages(box)) == [f"{n:032X}" for n in range(30)]
    assert run.next_ms is None


@pytest.mark.parametrize("lost", [range(3), range(2, 6), range(8, 10)])
@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_a_file_that_loses_messages_while_it_is_swept_loses_no_others(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, lost: range, moment: str
):
    """What the journal counts is of the file as it was: those that moved up are not taken for handed over."""
    timers.put([timers.now_ms + n for n in range(10)])
    box = Box(dies=(moment, 1))
    with pytest.raises(Killed):
        timers.hand(box, batch=4)
    batches = TimerReader._batches

    def torn(self: TimerReader, state: TierState, hour: int, *rest: Any) -> Any:
        for batch in batches(self, state, hour, *rest):
            batch.sizes[[n - int(batch.base_offset) for n in lost]] = -1
            yield batch

    monkeypatch.setattr(TimerReader, "_batches", torn)
    box.dies = ("before", 1)
    with contextlib.suppress(Killed):  # not where one batch is enough
        timers.hand(box, batch=2)
    box.dies = None
    run = timers.hand(box, batch=2)
    got = Counter(one.offset for one in box.got)
    assert set(got) >= {*range(10)} - {*lost}
    assert max(got.values()) == 1
    assert run.next_ms is None


def test_a_store_that_is_away_over_the_due_hours_makes_late_what_was_not_handed_over_and_nothing_else():
    """It answers nothing for three hours; what the target has comes in time, the rest in due order when it is back."""
    store = FaultyStore(MemoryStore(), random.Random(1))
    with Timers(store) as timers:
        begin_ms, box, delivered = timers.now_ms, Box(), list[tuple[int, int]]()
        dues = [begin_ms + 600_000 * n for n in range(36)]
        timers.put(dues)
        run, refused = timers.run(box, batch=4), 0
        while (now_ms := timers.now_ms) < begin_ms + 8 * HOUR_MS:
            store.heal()
            if HOUR_MS <= now_ms - begin_ms < 4 * HOUR_MS:
                store.add(Rule(Fault.UNAVAILABLE, READS | WRITES, times=None))
            try:
                run.refresh()
                while run.step():
                    pass
            except (BackendError, StoreUnavailableError):
                refused += 1
            fired = box.wheel.fire(timers.now_ms).dues.tolist()
            delivered += [(due, timers.now_ms - due) for due in fired]
            timers.clock.advance(60)
    assert refused > 20
    assert [due for due, _ in delivered] == dues
    assert min(late for _, late in delivered) >= 0
    late = [due for due, late in delivered if late > 400_000]  # tries take some of the time
    assert late == dues[12:24]  # two hours had been near


ZONE = "CET-1CEST,M3.5.0,M10.5.0/3"


@pytest.mark.parametrize("change", [1_774_746_000_000, 1_792_890_000_000])
def test_daylight_saving_has_no_effect(change: int, monkeypatch: pytest.MonkeyPatch):
    """In the night when an hour is left out, and in the one that has an hour twice."""
    monkeypatch.setenv("TZ", ZONE)
    time.tzset()
    try:
        before, after = (time.localtime(change / 1000 + s).tm_gmtoff for s in (-1, 1))
        assert abs(after - before) == 3_600
        with Timers(clock=ManualClock(change - 3 * HOUR_MS)) as timers:
            dues = [change - 3 * HOUR_MS + 600_000 * n for n in range(36)]
            timers.put(dues[1::2])
            timers.put(dues[::2])
            delivered = timers.live(Box(), 8, near_ms=HOUR_MS)
            hours = sorted(timers.run(Box()).journal.state.timers.hours)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [due for due, _ in delivered] == dues
    assert all(0 <= at - due <= 1_000 for due, at in delivered)
    assert [hour * HOUR_MS for hour in hours] == dues[::6]


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


def test_an_hour_that_comes_while_another_is_swept_is_handed_over_when_it_is_near(timers: Timers):
    """Its entry is read on the way, when ours finds its number taken."""
    timers.put([timers.now_ms + n for n in range(10)])
    box = Box()
    run = timers.run(box, batch=4)
    run.step()
    timers.put([timers.now_ms + HOUR_MS + 1])
    while run.step():
        pass
    timers.clock.advance(3600)
    run.refresh()
    while run.step():
        pass
    assert len(box.got) == 11


def test_a_batch_whose_entry_was_not_written_is_not_given_again(timers: Timers):
    timers.put([timers.now_ms + n for n in range(10)])
    box = Box()
    run = timers.run(box, batch=4)
    run.step()
    append = run.journal.append

    def refuse(*_: object, **__: object) -> None:
        run.journal.append = append  # type: ignore[method-assign]
        raise StoreUnavailableError("no")

    run.journal.append = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreUnavailableError):
        run.step()
    while run.step():
        pass
    assert len(box.got) == 10


def test_a_long_offset_range_that_may_have_been_given_is_asked_for_in_chunks(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
):
    """As after a rebuild: all that is left of a sweep."""
    monkeypatch.setattr("timer.handover._ASKED_MAX", 4)
    timers.put([timers.now_ms + n // 3 for n in range(30)])
    box = Box(dies=("within", 0))
    with pytest.raises(Killed):
        timers.hand(box, batch=1_000)
    assert len(box.got) == 15
    box.dies = ("within", 1)
    with pytest.raises(Killed):
        timers.hand(box, batch=1_000)
    run, sizes = timers.run(box, batch=1_000), []
    while size := run.step():
        sizes.append(size)
    assert timers.messages(box) == [f"{n:032X}" for n in range(30)]
    assert max(sizes) <= 6
    assert run.journal.state.timers.run.target["batch"][0] == 1_000


class Delivering(Box):
    """A target with a wheel of its own."""

    def __init__(self, clock: ManualClock, stop: threading.Event) -> None:
        super().__init__()
        self.clock, self.stop, self.late_ms, self.most = clock, stop, list[int](), 60
        self.refused = self.missing = self.waiting = 0

    @property
    def next_ms(self) -> int | None:
        return self.wheel.next_ms

    def tick(self) -> int:
        now_ms = self.clock.now_ms()
        dues = self.wheel.fire(now_ms).dues.tolist()
        self.late_ms += [now_ms - due for due in dues]
        if len(self.late_ms) == self.most:
            self.stop.set()
        return len(dues)

    def close(self) -> None:
        pass


class Ours(KeptLease):
    def __init__(self) -> None:
        pass

    def require(self) -> None:
        pass


def delivery(
    timers: Timers, target: Delivering, run: HandOver, run_settings: RunSettings, clock: Any = None
) -> TimerDelivery:
    return TimerDelivery(
        target, run, Ours(), Place("c", "b"), run_settings, clock=clock or timers.clock,
        stop=timers.stop, abandon=threading.Event(),
    )  # fmt: skip


def test_a_rate_holds_up_the_handing_over_and_nothing_that_is_due(timers: Timers):
    begin_ms = timers.now_ms
    timers.put([begin_ms + 1_000 * n for n in range(60)])
    target = Delivering(timers.clock, timers.stop)
    run = timers.run(target, batch=20)
    delivery(timers, target, run, RunSettings(rate=1)).work()
    assert len(target.late_ms) == 60
    assert max(target.late_ms) <= 1_000
    assert 59 <= (timers.now_ms - begin_ms) / 1000 <= 61


def test_a_run_whose_journal_cannot_be_written_says_why(timers: Timers):
    timers.put([timers.now_ms])
    target = Delivering(timers.clock, timers.stop)
    run = timers.run(target)
    answers = iter([StoreUnavailableError("it may not be written"), ClosedError("it has ended")])

    def refuse(*_: object, **__: object) -> None:
        raise next(answers)

    run.journal.append = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreUnavailableError, match="it may not be written"):
        delivery(timers, target, run, RunSettings()).work()


def test_a_tier_that_does_not_answer_holds_up_nothing_that_the_target_has(timers: Timers):
    """The step hangs until all that the target has was delivered, and is told; then it goes on."""
    timers.put([timers.now_ms + n for n in range(20)])
    target = Delivering(timers.clock, timers.stop)
    run, seen = timers.run(target, batch=10), list[int]()
    assert run.step() == 10
    hung, append = threading.Event(), run.journal.append

    def hang(*some: Any, **more: Any) -> Any:
        if not hung.is_set():
            while len(target.late_ms) < 10:
                timers.clock.wait(hung, 0.001)
            timers.clock.advance(20)
            while not work.trouble:
                hung.wait(0.01)
            seen.append(len(target.late_ms))
            hung.set()
        return append(*some, **more)

    run.journal.append = hang  # type: ignore[method-assign]
    target.most = 20
    work = delivery(timers, target, run, RunSettings())
    work.work()
    assert seen[0] >= 10
    assert len(target.late_ms) == len(target.got) == 20
    assert not work.trouble


def test_a_run_that_is_told_to_stop_while_the_tier_hangs_ends(timers: Timers):
    timers.put([timers.now_ms])
    target = Delivering(timers.clock, timers.stop)
    run, abandon = timers.run(target), threading.Event()

    def hang(*_: object, **_more: object) -> None:
        timers.stop.set()
        while not abandon.wait(0.01):
            timers.clock.advance(1)
        raise StoreUnavailableError("given up")

    run.journal.append = hang  # type: ignore[method-assign,assignment]
    TimerDelivery(
        target, run, Ours(), Place("c", "b"), RunSettings(), clock=timers.clock, stop=timers.stop,
        abandon=abandon,
    ).work()  # fmt: skip
    assert target.got == []


def test_a_lease_whose_taking_took_long_is_ours_no_longer_than_it_says(
    monkeypatch: pytest.MonkeyPatch,
):
    clock, store = ManualClock(), MemoryStore()
    lease = Lease(
        store, "t/", writer="0badcafe", holder=Holder.present(), seconds=LEASE_S, clock=clock
    )
    swap, slow_s = store.compare_and_set, [LEASE_S - 1]

    def slow(*some: Any) -> Any:
        clock.advance(slow_s[0])
        return swap(*some)

    monkeypatch.setattr(store, "compare_and_set", slow)
    assert lease.try_acquire() is None
    ours = KeptLease(lease, clock)
    assert ours.is_ours()
    clock.advance(2)
    assert not ours.is_ours()
    slow_s[0] = 0
    lease.renew()
    assert ours.is_ours()


def test_a_run_keeps_its_lease_while_the_target_is_opened(tmp_path: Path):
    with Timers(LocalFolderStore(tmp_path / Place("c", "b").prefix)) as timers:
        timers.put([timers.now_ms])

    def opening(*_: object) -> Delivering:
        assert any(one.name == "tiered-lease" for one in threading.enumerate())
        raise Killed

    with pytest.raises(Killed):
        hand_over(
            f"file://{tmp_path}", opening, RunSettings(), options=S3Options(), clock=SystemClock()
        )
    assert all(one.name != "tiered-lease" for one in threading.enumerate())


@pytest.mark.parametrize("refused", ["get_ranges", "put_if_absent", "list"])
def test_a_run_waits_out_a_refusal_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
):
    """A key that has expired, say, ends only who runs once: what waits in the target is delivered by this run."""
    with Timers(LocalFolderStore(tmp_path / Place("c", "b").prefix), SystemClock()) as timers:
        timers.put([timers.now_ms] * 3)
    allowed, tries = getattr(LocalFolderStore, refused), [0]

    @contextlib.contextmanager
    def begun(*_: object) -> Iterator[None]:
        monkeypatch.setattr(LocalFolderStore, refused, refuse)
        yield

    def refuse(self: Any, key: str, *some: Any, **more: Any) -> Any:
        if "meta/" in key:  # its lease is renewed in any case
            return allowed(self, key, *some, **more)
        tries[0] += 1
        if tries[0] == 3:
            monkeypatch.setattr(LocalFolderStore, refused, allowed)
        raise RefusedError("the key has expired")

    def ran(*, once: bool) -> Delivering:
        tries[0], stop = 0, threading.Event()
        target = Delivering(SystemClock(), stop)
        target.most = 3
        hand_over(
            f"file://{tmp_path}", lambda *_: target, RunSettings(once=once), options=S3Options(),
            clock=SystemClock(), stop=stop, beside=begun,
        )  # fmt: skip
        return target

    with pytest.raises(StoreUnavailableError, match="expired"):
        ran(once=True)
    monkeypatch.setattr(LocalFolderStore, refused, allowed)
    target = ran(once=False)
    assert tries[0] == 3
    assert len(target.got) == 3


def test_the_wheel_fires_in_order_and_not_early():
    wheel, rng = TimingWheel(), random.Random(1)
    entries = [(rng.randrange(100_000), n % 2, n) for n in range(2_000)]
    for low in range(0, 2_000, 100):
        for source in (0, 1):
            some = [one for one in entries[low : low + 100] if one[1] == source]
            dues, _, offsets = np.array(some).T
            wheel.add(dues, source, offsets)
    fired: list[Any] = []
    for now in [*range(0, 100_001, 137), 100_001]:
        ready = wheel.fire(now)
        assert (ready.dues <= now).all()
        columns = (ready.dues.tolist(), ready.sources.tolist(), ready.offsets.tolist())
        fired += zip(*columns, strict=True)
    assert fired == sorted(entries)
    assert (len(wheel), wheel.next_ms) == (0, None)
