"""What of a running broker's store is proven, between any two of its writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from support import following
from support.broker_files import LOG_FILE_BYTES, START_MS, TOPIC, FakeBroker
from support.following import flip_entry

from tiered.clock import ManualClock
from tiered.format.properties import tag_hash
from tiered.local.interface import HoleReason
from tiered.local.rocketmq import RocketMQStore
from tiered.local.views import LiveView
from tiered.model import MessageQueue, QueueOffset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Attach = Callable[..., RocketMQStore]
QUEUE = MessageQueue(TOPIC, 0)
OTHER = MessageQueue(TOPIC, 1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    made = FakeBroker(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def attach(broker: FakeBroker, clock: ManualClock) -> Iterator[Attach]:
    """Opens the store; closed after the test."""
    opened = []

    def open_it(**options: object) -> RocketMQStore:
        opened.append(following.open_store(broker.store, clock, **options))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def offsets(store: RocketMQStore, queue: MessageQueue = QUEUE) -> list[int]:
    """Queue offsets that a new follower and a read give; they must agree, holes left out."""
    followed, read = following.follow_all(store, 2000), following.read_all(store)
    assert followed.raw == read.raw
    return sorted(followed.raw.get(queue, {}))


def test_a_record_waits_until_its_queue_lists_it(broker: FakeBroker, attach: Attach):
    broker.start()
    broker.put(3)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    raw = broker.append()
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2]
    assert store.waiting().records == 1
    assert store.waiting().size_bytes == len(raw)
    assert "not listed" in store.waiting().reason
    broker.dispatch()
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2, 3]
    assert taken.raw[QUEUE][3] == raw
    assert store.waiting().records == 0


def test_queues_are_listed_one_after_another(broker: FakeBroker, attach: Attach):
    """Listed up to a record in the middle: that far and no further, in both queues."""
    broker.start()
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    for number in range(40):
        broker.append(number % 2)
    for listed in range(40):
        assert taken.count() == listed
        broker.dispatch(1)
        following.drain(follower, taken, 5_000)
    assert taken.offsets(QUEUE) == taken.offsets(OTHER) == list(range(20))


def test_a_torn_record_is_not_written_yet(broker: FakeBroker, attach: Attach):
    broker.start()
    broker.put(2)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    whole = broker.record()
    at = broker.position
    for size in (4, 8, 60, len(whole) - 30):
        broker.write_log(at, whole[:size])
        following.drain(follower, taken)
        assert taken.offsets(QUEUE) == [0, 1]
    broker.put(1)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2]
    assert not taken.holes


def test_files_roll(broker: FakeBroker, attach: Attach, clock: ManualClock):
    """The next log file may be there already, full of zeros, or come late."""
    broker.start()
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    for number in range(150):
        if number % 2:
            broker.allocate(broker.position + LOG_FILE_BYTES)
        broker.put(1, number % 3, body=bytes([number]) * (number * 3))
        if number % 7 == 0:
            following.drain(follower, taken, 3_000)
    following.drain(follower, taken)
    assert taken.count() == 150
    assert len(list((broker.store / "commitlog").iterdir())) > 5
    assert offsets(attach()) == list(range(50))


@pytest.mark.parametrize("left", [1, 2, 8])
@pytest.mark.parametrize("is_old", [False, True])
def test_given_up_records_wait(
    broker: FakeBroker, attach: Attach, clock: ManualClock, is_old: bool, left: int
):
    """A start cut the log in memory; old sound records, or a single one, stand behind the new ones."""
    broker.is_old = is_old
    broker.start(START_MS)
    if is_old:
        os.utime(broker.store / "abort", ns=(START_MS * 1_000_000,) * 2)
    broker.put(5)
    end = broker.position
    broker.put(2 + left)
    broker.crash()
    broker.write_log(
        end + 95, b"!!!"
    )  # the start fails at record 5, whose body no longer fits its CRC
    broker.position, broker.offsets[QUEUE] = end, 5
    broker.start(START_MS + 60_000)
    early = attach()
    assert offsets(early) == [0, 1, 2, 3, 4]
    assert early.waiting().records == 2 + left  # or has it been damaged since? the broker may tell
    assert "has cut the log" in early.waiting().reason
    asked = attach(broker_max_offset=lambda: end)
    clock.advance(10)
    asked.refresh()
    assert asked.waiting().records == 0
    follower, taken = early.follow({}), following.Taken()
    following.drain(follower, taken)
    new = broker.put(2)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == list(range(7))
    assert [taken.raw[QUEUE][5], taken.raw[QUEUE][6]] == new
    late = attach()
    assert offsets(late) == list(range(7))
    assert late.waiting().records == left
    assert "given up" in late.waiting().reason
    assert following.bounds_of(late)[QUEUE] == (0, 7)
    broker.crash()  # the next start takes them in again
    late.refresh()
    assert offsets(late) == list(range(7 + left))
    early.refresh()
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == list(range(7 + left))


def test_stale_entries_of_an_idle_queue_wait(broker: FakeBroker, attach: Attach):
    """The log has long gone on; the entries that a start gave up still stand in a queue without new messages."""
    broker.start(START_MS)
    broker.put(3, 1)
    end = broker.position
    broker.put(4, 1)
    broker.crash()
    broker.position, broker.offsets[OTHER] = end, 3
    broker.start(START_MS + 60_000)
    broker.put(200, 0, body=b"y" * 90)
    store = attach()
    assert following.bounds_of(store)[OTHER] == (0, 3)
    assert offsets(store, OTHER) == [0, 1, 2]
    assert offsets(store) == list(range(200))


def test_replicas_may_truncate(broker: FakeBroker, attach: Attach):
    """Where a controller rules, records from before the start count when a later one stands behind them."""
    (broker.store / "epochFileCheckpoint").write_text("1\n0\n1-0\n")
    broker.start(START_MS)
    broker.put(6)
    broker.crash()
    broker.start(START_MS + 60_000)
    store = attach()
    assert offsets(store) == []
    assert store.waiting().records == 6
    assert "replicas" in store.waiting().reason
    broker.put(1)
    store.refresh()
    assert offsets(store) == list(range(7))


def test_a_clock_that_was_set_back_before_a_start_stalls_nothing(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """Stored in the future, then with the right clock, then the broker started again: all of it is in its log."""
    broker.start(START_MS)
    broker.now_ms = START_MS + 3_600_000
    broker.put(4)
    broker.now_ms = START_MS + 1_000
    broker.put(3)
    broker.crash()
    broker.start(START_MS + 60_000)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    for _ in range(4):
        clock.advance(2)
        store.refresh()
        following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2, 3]
    assert store.waiting().records == 3
    assert "the clock was set back" in store.waiting().reason
    broker.put(1)
    for _ in range(4):
        clock.advance(2)
        store.refresh()
        following.drain(follower, taken)
    assert taken.offsets(QUEUE) == list(range(8))
    assert store.waiting().records == 0


@pytest.mark.parametrize("is_replicated", [False, True])
def test_a_clock_that_was_set_back_after_a_start_stalls_nothing(
    broker: FakeBroker, attach: Attach, clock: ManualClock, is_replicated: bool
):
    """``abort`` is from the future of all that is stored from then on; records come one by one, and many at once."""
    if is_replicated:
        (broker.store / "epochFileCheckpoint").write_text("1\n0\n1-0\n")
    broker.start(START_MS + 3_600_000)
    if not is_replicated:
        broker.put(1)
    broker.now_ms = START_MS
    broker.put(3)
    store = attach()
    follower, taken = store.follow({}), following.Taken()

    def look() -> None:
        for _ in range(4):
            clock.advance(2)
            store.refresh()
            following.drain(follower, taken)

    look()
    for count in (1, 1, 700, 1):
        broker.put(count)
        look()
        assert taken.offsets(QUEUE) == list(range(broker.offsets[QUEUE]))
    assert len(list((broker.store / "commitlog").iterdir())) > 2


def test_what_a_start_gave_up_is_not_taken_for_a_clock_that_was_set_back(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """The broker writes over it, record by record; nothing of what stands behind is taken before."""
    broker.start(START_MS)
    broker.put(2)
    end = broker.position
    given_up = broker.put(20)
    broker.crash()
    broker.write_log(end + 95, b"!!!")
    broker.position, broker.offsets[QUEUE] = end, 2
    broker.start(START_MS + 60_000)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    new = []
    for _ in range(25):
        new += broker.put(1)
        for _ in range(3):
            clock.advance(2)
            store.refresh()
            following.drain(follower, taken)
        assert taken.offsets(QUEUE) == list(range(2 + len(new)))
        assert [taken.raw[QUEUE][2 + at] for at in range(len(new))] == new
    assert not set(given_up) & set(taken.raw[QUEUE].values())


def test_the_broker_can_be_asked(broker: FakeBroker, attach: Attach):
    (broker.store / "epochFileCheckpoint").write_text("1\n0\n1-0\n")
    broker.start(START_MS)
    sizes = [len(raw) for raw in broker.put(6)]
    broker.crash()
    broker.start(START_MS + 60_000)
    told = [sum(sizes[:2])]
    store = attach(broker_max_offset=lambda: told[0])
    assert offsets(store) == [0, 1]
    told[0] = sum(sizes[:5]) + 1
    store.refresh()
    assert offsets(store) == [0, 1, 2, 3, 4]


def test_damage_at_the_frontier_is_leapt_over_once_proven(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """A record that fails stops the walk, until one stored after the start is listed behind it."""
    broker.start()
    broker.put(2)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    bad = broker.position
    raw = broker.append()
    broker.write_log(bad + 95, b"!!!")
    broker.append(1)
    broker.dispatch(1)
    for _ in range(3):
        clock.advance(60)
        following.drain(follower, taken)
        assert taken.offsets(QUEUE) == [0, 1]
    broker.dispatch()
    clock.advance(60)
    store.refresh()
    following.drain(follower, taken)
    assert taken.holes[QUEUE] == {2: HoleReason.DAMAGED}
    assert taken.quarantined[QUEUE, 2][:90] == raw[:90]
    assert taken.offsets(OTHER) == [0]
    broker.put(2)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2, 3, 4]
    assert store.report().damaged_records == 1


@pytest.mark.parametrize("which", [0, 3, 5])
def test_a_flipped_tag_code_beside_a_broker_is_that_of_the_record(
    broker: FakeBroker, attach: Attach, which: int
):
    """Counted, unless it may be one that is being written."""
    broker.start()
    broker.put(6)
    flip_entry(broker.store, QUEUE, which, 3)
    store = attach()
    for taken in (following.follow_all(store, 500), following.read_all(store)):
        codes = [taken.messages[QUEUE][offset].tag_code for offset in range(6)]
        assert codes == [tag_hash("a")] * 6
        assert store.report().wrong_tag_codes == 1


def test_a_record_that_was_dropped_is_passed_over(broker: FakeBroker, attach: Attach):
    """Never listed although later ones are, in the same queue and in another."""
    broker.start()
    broker.put(2)
    dropped = broker.append(1)
    assert dropped
    broker.undispatched.clear()
    broker.offsets[OTHER] = 0
    broker.put(3)
    assert offsets(attach()) == [0, 1]  # the broker may be about to list it
    broker.now_ms += 1000
    broker.put(1)
    store = attach()
    assert offsets(store) == list(range(6))
    assert offsets(store, OTHER) == []
    assert store.report().counters["dropped_records"] > 0


@pytest.mark.parametrize("is_old", [False, True])
def test_a_broker_that_starts_anew_is_noticed(
    broker: FakeBroker, attach: Attach, clock: ManualClock, is_old: bool
):
    """Crash and restart between two polls: the follower goes on, nothing comes twice."""
    broker.is_old = is_old
    broker.start(START_MS)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    broker.put(5)
    following.drain(follower, taken)
    for incarnation in range(1, 4):
        broker.append()
        broker.crash()
        if incarnation != 2:
            clock.advance(1)
            following.drain(follower, taken)  # seen dead in between, or not
        broker.dispatch()
        broker.start(START_MS + incarnation * 60_000)
        broker.put(2)
        clock.advance(1)
        following.drain(follower, taken)
    assert store.identity.is_live
    assert taken.offsets(QUEUE) == list(range(5 + 3 * 3))
    assert not taken.gaps


def test_a_log_that_was_cut_is_followed_from_its_new_end(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """A power failure took the end of the log; what comes at taken offsets is not handed out again."""
    broker.start(START_MS)
    broker.put(10)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    broker.crash()
    cut = broker.position * 6 // 10
    size = broker.position // 10
    cut = cut // size * size
    broker.write_log(cut, bytes(broker.position - cut))
    for offset in range(6, 10):
        broker.write_entry(QUEUE, offset, 0, 0)
    broker.position, broker.offsets[QUEUE] = cut, 6
    broker.start(START_MS + 60_000)
    store.refresh()
    following.drain(follower, taken)
    assert following.bounds_of(store)[QUEUE] == (0, 6)
    broker.put(6)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == list(range(12))
    assert not taken.gaps


@pytest.mark.parametrize("is_seen_dead", [False, True])
def test_what_the_log_has_lost_is_no_hole_though_it_is_listed(
    broker: FakeBroker, attach: Attach, clock: ManualClock, is_seen_dead: bool
):
    """While nobody has noticed yet that the broker is gone, or that its log was changed since; and when it comes back."""
    broker.start(START_MS)
    sizes = [len(raw) for raw in broker.put(10)]
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    broker.crash()
    if is_seen_dead:
        clock.advance(1)
        following.drain(follower, taken)
    broker.lose(sum(sizes[:6]))
    follower.seek(QUEUE, QueueOffset(4))
    taken = following.Taken()
    following.drain(follower, taken)
    for offset in range(6, 10):
        assert store.read(QUEUE, QueueOffset(offset), bytes_max=1, count_max=1) is None
    broker.offsets[QUEUE] = 6
    for starts in (broker.take_lock, lambda: broker.start(START_MS + 60_000)):
        starts()
        clock.advance(1)
        following.drain(follower, taken)
    assert (taken.offsets(QUEUE), taken.holes) == ([4, 5], {})
    broker.put(2)
    following.drain(follower, taken)
    assert (taken.offsets(QUEUE), taken.holes) == ([4, 5, 6, 7], {})
    assert store.report().damaged_records == 0


@pytest.mark.parametrize("is_polled", [False, True])
def test_a_broker_that_starts_proves_nothing_of_what_it_may_give_up(
    broker: FakeBroker, attach: Attach, clock: ManualClock, is_polled: bool
):
    """It holds the lock, and ``abort`` is of the run before: sound records behind damage are of that run, too."""
    broker.start(START_MS)
    sizes = [len(raw) for raw in broker.put(6)]
    broker.write_log(sum(sizes[:2]) + 95, b"!!!")
    broker.crash()
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    broker.take_lock()
    for _ in range(5 if is_polled else 0):
        clock.advance(2)
        following.drain(follower, taken)
        store.refresh()
        assert taken.offsets(QUEUE) == [0, 1]
    broker.position, broker.offsets[QUEUE] = sum(sizes[:2]), 2
    broker.start(START_MS + 60_000)
    broker.put(1, body=b"other" * 20)
    clock.advance(1)
    following.drain(follower, taken)
    assert (taken.offsets(QUEUE), taken.holes) == ([0, 1, 2], {})


def test_a_broker_whose_start_takes_for_ever_has_started(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """Somebody has touched its lock."""
    broker.start()
    broker.put(2)
    os.utime(broker.store / "lock", ns=(2**62, 2**62))
    store = attach()
    assert offsets(store) == []
    clock.advance(70)
    store.refresh()
    assert offsets(store) == [0, 1]


def test_what_comes_while_the_frontier_is_looked_at_is_no_damage(
    broker: FakeBroker, attach: Attach, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    broker.start()
    broker.put(2)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    look = LiveView._first_proven

    def come_first(view: LiveView, told: int) -> int:
        broker.put(3)
        return look(view, told)

    monkeypatch.setattr(LiveView, "_first_proven", come_first)
    clock.advance(60)
    assert follower.poll(1 << 20) == []
    monkeypatch.setattr(LiveView, "_first_proven", look)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2, 3, 4]
    assert store.report().counters.get("damaged_places", 0) == 0


def test_the_first_file_comes_late(broker: FakeBroker, attach: Attach, clock: ManualClock):
    broker.start()
    (broker.store / "commitlog").rmdir()
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    assert store.queues() == {}
    (broker.store / "commitlog").mkdir()
    broker.put(4)
    clock.advance(1)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == [0, 1, 2, 3]


def test_a_topic_is_deleted_and_made_again(broker: FakeBroker, attach: Attach, clock: ManualClock):
    """Its queue begins at 0 again; an open descriptor of the old file is not read on."""
    import shutil

    broker.start()
    broker.put(5)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    shutil.rmtree(broker.store / "consumequeue" / TOPIC)
    broker.offsets.clear()
    broker.put(8)
    clock.advance(1)
    store.refresh()
    batch = store.read(QUEUE, QueueOffset(5), bytes_max=1 << 20, count_max=10)
    assert batch is not None
    assert (batch.base_offset, batch.end_offset) == (5, 8)
    following.drain(follower, taken)
    assert taken.offsets(QUEUE) == list(range(8))


def test_records_of_a_deleted_topic_do_not_hold_up_those_behind_them(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """However many there are; but only what was stored later shows that they will never be listed."""
    import shutil

    broker.start()
    broker.put(1)
    store = attach()
    store.refresh()
    broker.now_ms += 100
    broker.put(150)  # several files
    shutil.rmtree(broker.store / "consumequeue" / TOPIC)
    clock.advance(10)
    store.refresh()
    assert store.waiting().records == 150
    broker.now_ms -= 5
    broker.put(1, 1)
    clock.advance(2)
    store.refresh()
    assert following.bounds_of(store)[MessageQueue(TOPIC, 1)] == (0, 0)
    broker.now_ms += 2000
    broker.put(1, 1)
    clock.advance(2)
    store.refresh()
    assert store.waiting().records == 0
    assert following.bounds_of(store)[MessageQueue(TOPIC, 1)] == (0, 2)


@pytest.mark.parametrize("again", [3, 5, 8])
def test_a_follower_says_that_offsets_fell_however_far_they_have_risen_since(
    broker: FakeBroker, attach: Attach, clock: ManualClock, again: int
):
    import shutil

    broker.start()
    broker.put(5)
    broker.put(5, 1)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    assert not follower.take_fallen()
    shutil.rmtree(broker.store / "consumequeue" / TOPIC / "0")
    broker.offsets[QUEUE] = 0
    broker.put(again)
    broker.put(again, 1)
    clock.advance(1)
    for _ in range(4):
        follower.poll(1 << 20)
    assert set(follower.take_fallen()) == {QUEUE}
    assert not follower.take_fallen()
    follower.seek(QUEUE, QueueOffset(0))
    anew = following.Taken()
    following.drain(follower, anew)
    assert anew.offsets(QUEUE) == list(range(again))


def test_a_new_follower_takes_what_lies_before_its_start_for_no_fall(
    broker: FakeBroker, attach: Attach
):
    broker.start()
    broker.put(5)
    broker.put(5, 1)
    broker.put(2)
    follower = attach().follow({QUEUE: QueueOffset(6)})
    following.drain(follower, following.Taken())
    assert not follower.take_fallen()


def test_a_deleted_topic_is_gone(broker: FakeBroker, attach: Attach, clock: ManualClock):
    """No holes are made of it, also when the deletion falls between a look at its bounds and the reading."""
    import shutil

    broker.start()
    broker.put(5)
    broker.put(5, 1)
    store = attach()
    store.refresh()
    assert following.bounds_of(store)[QUEUE] == (0, 5)
    shutil.rmtree(broker.store / "consumequeue" / TOPIC / "0")
    batch = store.read(QUEUE, QueueOffset(2), bytes_max=1 << 20, count_max=10)
    assert batch is None or batch.sizes.all()  # an open descriptor may still give the messages
    clock.advance(10)
    store.refresh()
    assert QUEUE not in store.queues()
    broker.offsets[QUEUE] = 0
    broker.put(2)
    clock.advance(1)
    store.refresh()
    assert following.bounds_of(store)[QUEUE] == (0, 2)
    assert store.read(QUEUE, QueueOffset(3), bytes_max=1 << 20, count_max=10) is None


def test_expiry(broker: FakeBroker, attach: Attach, clock: ManualClock):
    broker.start()
    broker.put(300)
    broker.put(20, 1)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    for batch in follower.poll(500):
        taken.add(batch)
    for file in sorted((broker.store / "commitlog").iterdir())[:5]:
        file.unlink()
    clock.advance(1)
    following.drain(follower, taken)
    low, end = following.bounds_of(store)[QUEUE]
    assert 0 < low < end == 300
    assert taken.gaps == [(QUEUE, taken.gaps[0][1], low)]
    assert [offset for offset in taken.offsets(QUEUE) if offset >= low] == list(range(low, end))
    assert not taken.holes
    assert taken.offsets(OTHER) == list(range(20))
    batch = store.read(QUEUE, QueueOffset(0), bytes_max=1000, count_max=10)
    assert batch is not None
    assert batch.base_offset == low


def test_everything_expires(broker: FakeBroker, attach: Attach, clock: ManualClock):
    """The last file of a queue stays, and with it the number of the next message."""
    broker.start()
    broker.put(30, 1)
    broker.put(100)
    store = attach()
    for file in sorted((broker.store / "commitlog").iterdir())[:-1]:
        file.unlink()
    clock.advance(1)
    store.refresh()
    assert following.bounds_of(store)[OTHER] == (30, 30)
    assert following.bounds_of(attach())[OTHER] == (30, 30)


def test_idle_polls_read_next_to_nothing(
    broker: FakeBroker, attach: Attach, monkeypatch: pytest.MonkeyPatch
):
    """One look at the mark, one read of the next record's head."""
    broker.start()
    broker.put(5)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    calls = []
    for name in ("stat", "pread", "preadv", "open", "listdir"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda *a, _real=real, _name=name, **k: (calls.append(_name), _real(*a, **k))[1],
        )
    for _ in range(10):
        assert follower.poll(1 << 20) == []
    assert len(calls) <= 20
    assert set(calls) == {"stat", "preadv"}


def test_a_starting_or_stopping_broker(broker: FakeBroker, attach: Attach):
    """Locked without ``abort``: what is listed is there."""
    broker.start()
    broker.put(5)
    (broker.store / "abort").unlink()
    store = attach()
    assert store.identity.is_live
    assert offsets(store) == list(range(5))
