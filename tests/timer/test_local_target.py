"""An embedded store as the target: kept as a broker keeps timers, delivered once, also after a crash."""

from __future__ import annotations

import contextlib
import errno
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.clocks import Shifted, Stopped
from support.timer_stores import CAPTURED_MS, SMALL, delivered, pending, set_back
from support.timers import Killed, Timers, wheel_record

from tiered.clock import SystemClock
from tiered.errors import DataError, StoreUnavailableError
from tiered.format.record import decode_record
from tiered.log.timers import HOUR_MS
from tiered.store import embedded
from tiered.store.encoding import PROPERTIES_BYTES_MAX
from timer import local_target
from timer.dequeue import DueMessage
from timer.local_target import WHEEL, LocalTarget
from timer.progress import WheelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiered.store.commitlog import RecordPlaces
    from tiered.store.restored import ReadyRecords
    from timer.handover import HandOver

CLOCK = SystemClock()


def opened(folder: Path) -> LocalTarget:
    return LocalTarget.open(
        str(folder), cluster="c", broker="b", clock=CLOCK, rng=random.Random(), options=SMALL
    )


def test_a_target_is_made_where_a_file_system_has_just_been_mounted(tmp_path: Path):
    (tmp_path / "lost+found").mkdir()
    opened(tmp_path).close()
    opened(tmp_path).close()


def hand(timers: Timers, target: LocalTarget, **more: int) -> HandOver:
    run = timers.run(target, **more)
    while run.step():
        pass
    return run


@pytest.fixture
def near() -> Iterator[Timers]:
    """Fifty timers that are due within a second or two, all in one hour, and one that is due later."""
    with Timers(clock=CLOCK) as timers:
        now = CLOCK.now_ms()
        begin = max(now, now // HOUR_MS * HOUR_MS + 1_000) - 1_000
        begin -= max(0, begin % HOUR_MS + 2_000 - HOUR_MS)
        timers.put([begin + 40 * n for n in range(50)])
        timers.put([now + HOUR_MS * 30])
        yield timers


def test_due_messages_come_once_and_in_time(near: Timers, tmp_path: Path):
    target = opened(tmp_path / "store")
    try:
        run = hand(near, target)
        assert run.counters.handed == 50
        while target.delivered < 50:
            target.tick()
    finally:
        target.close()
    assert delivered(tmp_path / "store") == {("orders", 2, f"{n:032X}"): 1 for n in range(50)}


def test_a_run_that_ended_before_its_entry_gives_nothing_twice(near: Timers, tmp_path: Path):
    target = opened(tmp_path / "store")
    run = near.run(target, batch=7)
    for _ in range(3):
        run.step()
    run.journal.append = die  # type: ignore[method-assign,assignment]
    with pytest.raises(Killed):
        run.step()
    run.close()
    target.close()
    target = opened(tmp_path / "store")
    assert len(target.wheel) + target.delivered == 28
    run = hand(near, target, batch=5)
    assert (run.counters.found, len(target.wheel)) == (7, 50)
    while target.delivered < 50:
        target.tick()
    target.close()
    assert set(delivered(tmp_path / "store").values()) == {1}


def test_what_was_delivered_and_not_noted_is_known_after_a_crash(near: Timers, tmp_path: Path):
    folder = tmp_path / "store"
    target = opened(folder)
    hand(near, target)
    target._save = lambda: None  # type: ignore[method-assign]
    while target.delivered < 20:
        target.tick()
    target.close()
    for _ in range(2):
        target = opened(folder)
        target.tick()
        target.close()
    target = opened(folder)
    while len(target.wheel):
        target.tick()
    target.close()
    assert set(delivered(folder).values()) == {1}
    assert len(delivered(folder)) == 50


def test_nothing_is_delivered_before_the_second_that_was_noted_is_over(tmp_path: Path):
    """A broker notes the second before the time that was asked for."""
    clock = Stopped()
    timers = Timers(clock=clock)
    due_ms = clock.now_ms() // 1000 * 1000 + 60_000
    timers.put([due_ms])
    with contextlib.closing(
        LocalTarget.open(
            str(tmp_path), cluster="c", broker="b", clock=clock, rng=random.Random(), options=SMALL
        )
    ) as target:
        hand(timers, target)
        assert target.next_ms == due_ms + 1000
        clock.time_ms = due_ms  # the second has begun
        assert target.tick() == 0
        clock.time_ms += 999
        assert target.tick() == 0
        clock.time_ms += 1
        assert target.tick() == 1


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_coarser_wheel_noted_is_not_early(is_killed: bool, tmp_path: Path):
    """Of one of 5 s: it noted the last multiple before the time that was asked for. Also when a run is killed meanwhile."""
    clock = Stopped()
    timers = Timers(clock=clock)
    due_ms = clock.now_ms() // 10_000 * 10_000 + 60_000
    timers.put([due_ms], TIMER_DELIVER_MS=str(due_ms + 4_600))
    timers.put([due_ms, due_ms + 1_000])

    def moved(target: LocalTarget) -> int:
        late_ms = clock.time_ms - due_ms
        counts = target.tick(), len(target.wheel)
        assert (
            counts
            == {900: (0, 3), 1_000: (1, 2), 3_000: (1, 1), 4_500: (0, 1), 4_600: (1, 0)}[late_ms]
        )
        return counts[1]

    target = opened_at(tmp_path, clock)
    if is_killed:
        give = target.give
        target.give = lambda some: die(give(some))  # type: ignore[method-assign]
        with pytest.raises(Killed):
            hand(timers, target)
        target.give = give  # type: ignore[method-assign]
    assert hand(timers, target).counters.found == 3 * is_killed
    for late_ms in (900, 1_000, 3_000, 4_500, 4_600):
        clock.time_ms = due_ms + late_ms
        left = moved(target)
        target.close()
        target = opened_at(tmp_path, clock)
        assert len(target.wheel) == left
    target.close()
    assert set(delivered(tmp_path).values()) == {1}


def opened_at(folder: Path, clock: SystemClock) -> LocalTarget:
    return LocalTarget.open(
        str(folder), cluster="c", broker="b", clock=clock, rng=random.Random(), options=SMALL
    )


def test_a_clock_that_is_set_back_loses_and_doubles_nothing(tmp_path: Path):
    clock = Shifted()
    timers = Timers(clock=clock)
    now = clock.now_ms()
    timers.put([now - 6_000 + 100 * n for n in range(50)])
    folder = tmp_path / "store"
    target = LocalTarget.open(
        str(folder), cluster="c", broker="b", clock=clock, rng=random.Random(), options=SMALL
    )
    hand(timers, target)
    target.tick()
    clock.shift_ms = -60_000
    timers.put([now - 30_000 + n for n in range(10)])
    hand(timers, target)
    target.tick()
    target.close()
    target = LocalTarget.open(
        str(folder), cluster="c", broker="b", clock=clock, rng=random.Random(), options=SMALL
    )
    clock.shift_ms = 0
    target.tick()
    target.close()
    assert (len(delivered(folder)), set(delivered(folder).values())) == (60, {1})


@pytest.mark.parametrize("left", [0, 1])
def test_a_disk_that_is_full_while_messages_are_delivered_loses_and_doubles_none(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They were due before what was noted as delivered; and one batch of them, or none, goes through before."""
    monkeypatch.setattr("timer.local_target._BATCH", 10)
    clock, folder = Shifted(), tmp_path / "store"
    timers = Timers(clock=clock)
    timers.put([clock.now_ms() - 6_000])
    with contextlib.closing(opened(folder)) as target:
        hand(timers, target)
        assert target.tick() == 1
    timers.put([clock.now_ms() - 30_000 + n for n in range(20)])
    with contextlib.closing(opened(folder)) as target:
        hand(timers, target)
        append, calls = target.store.append_records, iter(range(left))

        def full(records: ReadyRecords) -> RecordPlaces:
            if next(calls, None) is None:
                raise StoreUnavailableError("no space left on device")
            return append(records)

        target.store.append_records = full  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            target.tick()
    with contextlib.closing(opened(folder)) as target:
        target.tick()
    assert (len(delivered(folder)), set(delivered(folder).values())) == (21, {1})


@pytest.mark.parametrize(
    "said",
    [
        {"REAL_TOPIC": "no such name!"},
        {"REAL_TOPIC": "t" * 128},
        {"REAL_QID": "65536"},
    ],
)
def test_what_could_not_be_delivered_is_refused_while_its_file_is_there(
    said: dict[str, str], tmp_path: Path
):
    with Timers(clock=CLOCK) as timers, contextlib.closing(opened(tmp_path)) as target:
        now = CLOCK.now_ms()
        timers.put([now - 2_000])
        timers.put([now - 2_000], **said)
        run = hand(timers, target)
        assert (run.counters.handed, run.counters.refused, len(target.wheel)) == (1, 1, 1)
        while len(target.wheel):
            target.tick()
        assert (target.delivered, target.refused) == (1, 0)
        run.reader.refresh()
        (hour,) = run.reader.state.timers.hours
        assert [one.offset for one in run.reader.refused(hour)] == [1]
    assert sum(delivered(tmp_path).values()) == 1


def test_what_the_store_has_lost_when_it_is_due_is_counted(tmp_path: Path):
    with Timers(clock=CLOCK) as timers, contextlib.closing(opened(tmp_path)) as target:
        now = CLOCK.now_ms()
        timers.put([now - 2_000] * 3)
        assert hand(timers, target).counters.handed == 3
        target.store.wait_listed()
        log = next((tmp_path / "commitlog").iterdir())
        with log.open("r+b") as file:
            record = bytes(target.store.reader.block(WHEEL, 1, 2).buffer)
            file.seek(log.read_bytes().index(record[:60]) + 95)
            file.write(b"!!")
        while len(target.wheel):
            target.tick()
        assert (target.delivered, target.refused, target.missing) == (2, 0, 1)


def test_a_store_with_damage_before_what_waits_in_it_is_refused(tmp_path: Path):
    """It would go on without what lies behind, and lose whatever it is given each time it is opened."""
    due_ms = CLOCK.now_ms() + HOUR_MS
    records = [wheel_record(n, due_ms) for n in range(3)]
    with contextlib.closing(opened(tmp_path)) as target:
        target.give([DueMessage(due_ms, n, one) for n, one in enumerate(records)])
    with contextlib.closing(opened(tmp_path)) as target:
        assert len(target.wheel) == 3
    log = next((tmp_path / "commitlog").iterdir())
    sound = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(sound.index(b"xxx", len(records[0]) + 100))
        file.write(b"!!")
    told = "2 records, timers perhaps among them, lie at and behind"
    with pytest.raises(DataError, match=told), contextlib.closing(opened(tmp_path)):
        pass
    log.write_bytes(sound)
    with contextlib.closing(opened(tmp_path)) as target:
        assert len(target.wheel) == 3


@pytest.mark.parametrize("room", [0, 1, 2, 30, 31])
def test_properties_without_room_for_more_are_delivered_and_known_after_a_crash(
    room: int, tmp_path: Path
):
    """When a message came is told by 31 bytes; as many are not always left."""
    with Timers(clock=CLOCK) as timers:
        now = CLOCK.now_ms()
        used = len(decode_record(wheel_record(0, now, KEYS="k"), 0).properties_raw)
        timers.put([now - 2_000], KEYS="k" * (PROPERTIES_BYTES_MAX - used - room + 1))
        target = opened(tmp_path)
        assert hand(timers, target).counters.refused == 0
        target._save = lambda: None  # type: ignore[method-assign]
        while len(target.wheel):
            target.tick()
        target.close()
        assert (target.delivered, target.refused) == (1, 0)
        with contextlib.closing(opened(tmp_path)) as target:
            assert len(target.wheel) == 0
    assert delivered(tmp_path) == {("orders", 2, f"{0:032X}"): 1}


@pytest.mark.parametrize("back_ms", [None, 40_000])
def test_a_brokers_own_pending_timers_are_delivered_as_well(store: Path, back_ms: int | None):
    """s02 is of the past by now or soon: what is due is delivered, and nothing of what the broker had delivered.

    Nor when the broker was killed, and had noted less.
    """
    if back_ms is not None:
        set_back(store, back_ms)
    before = delivered(store)
    clock = Shifted()
    clock.shift_ms = CAPTURED_MS + 4 * 24 * HOUR_MS - clock.now_ms()
    target = LocalTarget.open(
        str(store), cluster="cluster-a", broker="broker-a", clock=clock, rng=random.Random()
    )
    while len(target.wheel):
        target.tick()
    target.close()
    came = delivered(store) - before
    assert Counter({(t, k): n for (t, _, k), n in came.items()}) == Counter(
        (topic, key) for _, topic, key in pending().elements()
    )


def die(*_: object, **_more: object) -> None:
    raise Killed


@pytest.mark.parametrize("what", ["log", "lists", "notes"])
def test_timers_wait_for_room_on_the_disk_and_go_on(
    near: Timers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """None is lost, given twice or called missing; nothing ends."""
    monkeypatch.setattr(local_target, "_ROOM_S", 0.01)
    monkeypatch.setattr(local_target, "SAVE_S", 0.0)
    monkeypatch.setattr(embedded, "_ROOM_S", 0.01)
    target = opened(tmp_path / "store")
    refusals = 0

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal refusals
            if refusals < 60 and refusals % 4 < 3:
                refusals += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            refusals += refusals < 60
            return real(*args, **more)

        return call

    if what == "log":
        monkeypatch.setattr(target.store._log, "_write", failing(target.store._log._write))
    elif what == "lists":
        index = target.store._parts.index
        monkeypatch.setattr(index, "put", failing(index.put))
    else:
        monkeypatch.setattr(WheelState, "write", failing(WheelState.write))
    try:
        assert hand(near, target, batch=7).counters.handed == 50
        while target.delivered < 50:
            target.tick()
        assert (target.missing, target.refused) == (0, 0)
        assert refusals
    finally:
        target.close()
    assert delivered(tmp_path / "store") == {("orders", 2, f"{n:032X}"): 1 for n in range(50)}


def test_waiting_for_room_ends_when_we_are_told_to_stop(
    near: Timers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = opened(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(target.store._log, "_write", refuse)
        target.stopping.set()
        with pytest.raises(StoreUnavailableError, match="No space left"):
            hand(near, target)
    target.close()
    target = opened(tmp_path / "store")
    assert len(target.wheel) == 0
    target.close()
