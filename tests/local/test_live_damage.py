"""Damage in the store of a broker that runs: one message at most, and nothing waits for ever without a word."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from support import following
from support.broker_files import START_MS, TOPIC, FakeBroker
from support.following import flip_entry

from tiered.clock import ManualClock
from tiered.local.interface import HoleReason
from tiered.local.rocketmq import RocketMQStore
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Attach = Callable[..., RocketMQStore]
QUEUE, OTHER = MessageQueue(TOPIC, 0), MessageQueue(TOPIC, 1)
PLACE, SIZE = 96, 64
"""First bit of the fields of an entry."""


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


def take(store: RocketMQStore, clock: ManualClock) -> following.Taken:
    """Everything, both ways, after as long as anything is waited for; what they give is the same."""
    follower, taken = store.follow({}), following.Taken()
    for _ in range(4):
        following.drain(follower, taken, 2_000)
        clock.advance(10)
        store.refresh()
    following.drain(follower, taken, 2_000)
    follower.close()
    read = following.read_all(store)
    assert read.raw == taken.raw
    assert read.holes == taken.holes
    return taken


def fill(broker: FakeBroker, count: int) -> dict[MessageQueue, dict[int, bytes]]:
    """So many records, listed, of two queues in turn; by queue and offset."""
    found: dict[MessageQueue, dict[int, bytes]] = {QUEUE: {}, OTHER: {}}
    for number in range(count):
        queue = (QUEUE, OTHER)[number % 2]
        offset = broker.offsets.get(queue, 0)
        found[queue][offset] = broker.put(1, queue.queue_id)[0]
        broker.now_ms += 10
    return found


def places(broker: FakeBroker, queue: MessageQueue = QUEUE) -> list[int]:
    """Where the queue's entries say that their records lie."""
    folder = broker.store / "consumequeue" / queue.topic / str(queue.queue_id)
    data = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    return [place for place, size, _ in struct.iter_unpack(">qiq", data) if size]


# -- an entry is damaged, its record is there -------------------------------------------------------


@pytest.mark.parametrize("which", [0, 7, 30, 59], ids=["first", "early", "late", "last"])
@pytest.mark.parametrize(
    "bit",
    [*(PLACE + n for n in (0, 3, 8, 11, 12, 20, 62, 63)), *(SIZE + n for n in (0, 4, 20, 31))],
)
def test_a_damaged_entry_costs_nothing(
    broker: FakeBroker, attach: Attach, clock: ManualClock, which: int, bit: int
):
    """Its record lies between those of its neighbours; it is the last of its queue, or in a file that was never walked."""
    broker.start()
    known = fill(broker, 120)
    flip_entry(broker.store, QUEUE, which, bit)
    store = attach()
    taken = take(store, clock)
    assert dict(taken.raw) == known
    assert not taken.holes
    assert not taken.gaps


def test_an_entry_that_is_damaged_while_it_is_followed(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    broker.start()
    known = fill(broker, 20)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    following.drain(follower, taken)
    raw = broker.put(1)[0]
    flip_entry(broker.store, QUEUE, 10, PLACE + 9)
    for _ in range(3):
        following.drain(follower, taken)
        clock.advance(2)
    broker.now_ms += 2000
    behind = broker.put(1, 1)[0]
    for _ in range(3):
        following.drain(follower, taken)
        clock.advance(2)
    assert taken.raw == {QUEUE: known[QUEUE] | {10: raw}, OTHER: known[OTHER] | {10: behind}}
    assert not taken.holes


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("lost", [[*range(2, 7)], [*range(31, 36)], [*range(5, 40), 50]])
def test_entries_that_were_lost_cost_nothing(
    broker: FakeBroker, attach: Attach, clock: ManualClock, lost: list[int], *, is_live: bool
):
    """Zeros in the middle of a consume queue, as a start leaves them in files that it does not look at."""
    broker.start()
    known = fill(broker, 120)
    for offset in lost:
        broker.write_entry(QUEUE, offset, 0, 0)
    if not is_live:
        broker.stop()
    taken = take(attach(), clock)
    assert dict(taken.raw) == known
    assert not taken.holes


@pytest.mark.parametrize("which", [0, 20, 59], ids=["first", "middle", "last"])
def test_where_the_record_is_damaged_as_well_there_is_a_hole(
    broker: FakeBroker, attach: Attach, clock: ManualClock, which: int
):
    broker.start()
    known = fill(broker, 119)
    at = places(broker)[which]
    broker.write_log(at + 95, b"!!!")
    flip_entry(broker.store, QUEUE, which, PLACE + 9)
    broker.now_ms += 2000
    known[OTHER][59] = broker.put(1, 1)[0]
    taken = take(attach(), clock)
    lost = known[QUEUE].pop(which)
    assert lost
    assert dict(taken.raw) == known
    if which < 59:
        assert set(taken.holes[QUEUE]) == {which}


def test_a_stale_entry_stays_a_hole_and_is_looked_for_once(
    broker: FakeBroker, attach: Attach, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    """It names another queue's record, and there is none of its own."""
    broker.start()
    fill(broker, 60)
    place = places(broker, OTHER)[12]
    size = places(broker)[1] - places(broker, OTHER)[0]
    broker.write_entry(QUEUE, 10, place, size)
    broker.write_log(places(broker)[9] + size * 2 + 20, struct.pack(">q", 77))
    store = attach()
    taken = take(store, clock)
    assert set(taken.holes[QUEUE]) <= {10}


def test_a_queue_that_began_anew_does_not_get_its_old_records_back(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """A damaged entry of the new incarnation is that of the new incarnation's record."""
    broker.start()
    fill(broker, 20)
    shutil.rmtree(broker.store / "consumequeue" / TOPIC)
    broker.offsets.clear()
    known = fill(broker, 12)
    flip_entry(broker.store, QUEUE, 3, PLACE + 9)
    flip_entry(broker.store, OTHER, 5, PLACE + 9)
    broker.now_ms += 2000
    known[QUEUE][6] = broker.put(1)[0]
    taken = take(attach(), clock)
    assert dict(taken.raw) == known
    assert not taken.holes


def test_a_record_that_is_not_listed_yet_is_not_searched_for(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """Nothing says that its entry is damaged: it waits."""
    broker.start()
    known = fill(broker, 20)
    broker.append()
    broker.append(1)
    store = attach()
    assert dict(take(store, clock).raw) == known
    assert store.waiting().records == 2


# -- the log is damaged before records that are listed ----------------------------------------------


@pytest.mark.parametrize("blow", [(1, 0, 1), (18, 0, 20), (1, 30, 2), (4, 22, 1), (30, 0, 200)])
@pytest.mark.parametrize("attaches", ["before", "after"])
def test_damage_in_front_of_what_is_listed_is_leapt_over(
    broker: FakeBroker,
    attach: Attach,
    clock: ManualClock,
    blow: tuple[int, int, int],
    attaches: str,
):
    """However many records are damaged, and however many behind them are from before the broker's start."""
    damaged, old, new = blow
    broker.start(START_MS)
    raws = broker.put(4)
    first = broker.position
    broker.put(damaged)
    last = broker.position
    raws += broker.put(old)
    broker.crash()
    broker.start(START_MS + 60_000)
    store = attach() if attaches == "before" else None
    for place in range(first + 95, last - 10, 100):
        broker.write_log(place, b"!!!!")
    if store is not None:
        store.refresh()
    raws += broker.put(new)
    taken = take(store or attach(), clock)
    assert list(taken.raw[QUEUE].values()) == raws
    assert taken.holes == {QUEUE: dict.fromkeys(range(4, 4 + damaged), HoleReason.DAMAGED)}
    assert not taken.gaps


def test_damage_that_is_looked_at_with_all_that_follows_in_its_file_is_leapt_over(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """However much is read at once: to the end of the file, behind which the log goes on."""
    broker.start(START_MS)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    known = fill(broker, 10)
    following.drain(follower, taken)
    place = broker.position
    more = fill(broker, 60)
    broker.write_log(place + 95, b"!!!!")
    for _ in range(4):
        following.drain(follower, taken)
        clock.advance(10)
    follower.close()
    del more[QUEUE][5]
    assert dict(taken.raw) == join(known, more)
    assert taken.holes == {QUEUE: {5: HoleReason.DAMAGED}}


def test_a_leap_takes_along_what_only_a_new_queue_lists(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """A record has become zeros, and behind it a queue begins that nobody had met."""
    broker.start(START_MS)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    known = fill(broker, 10)
    following.drain(follower, taken)
    place = broker.position
    new = MessageQueue(TOPIC, 7)
    lost = broker.put(1)
    known[new] = dict(enumerate(broker.put(3, new.queue_id)))
    broker.write_log(place, bytes(len(lost[0])))
    known[OTHER] |= dict(enumerate(broker.put(1, 1), 5))
    for _ in range(4):
        following.drain(follower, taken)
        clock.advance(10)
    follower.close()
    assert dict(taken.raw) == known
    assert store.waiting().records == 0


def test_a_clock_that_was_set_back_before_the_start_holds_up_nothing_once_it_is_right_again(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """What was stored meanwhile looks as if the start had given it up, until something newer stands behind it."""
    broker.start(START_MS)
    store = attach()
    follower, taken = store.follow({}), following.Taken()
    known = fill(broker, 10)
    following.drain(follower, taken)
    broker.now_ms -= 3_600_000
    known = join(known, fill(broker, 150))
    broker.now_ms += 3_600_000
    known = join(known, fill(broker, 10))
    for _ in range(4):
        following.drain(follower, taken)
        clock.advance(10)
    follower.close()
    assert dict(taken.raw) == known
    assert not taken.holes
    assert not taken.gaps


def join(
    one: dict[MessageQueue, dict[int, bytes]], other: dict[MessageQueue, dict[int, bytes]]
) -> dict[MessageQueue, dict[int, bytes]]:
    return {queue: one[queue] | other[queue] for queue in one}


def test_damage_in_front_of_what_may_have_been_given_up_is_told(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    """All that is listed behind it is from before the start, and nothing newer proves it: it waits, and is told."""
    broker.start(START_MS)
    known = fill(broker, 10)
    place = broker.position
    fill(broker, 30)
    broker.crash()
    broker.start(broker.now_ms + 60_000)
    broker.write_log(place + 95, b"!!!!")
    store = attach()
    assert dict(take(store, clock).raw) == known
    waiting = store.waiting()
    assert waiting.records == 30
    assert f"byte {place}" in waiting.reason
    assert not waiting.is_behind_damage


def test_the_broker_s_word_proves_what_is_behind_damage(
    broker: FakeBroker, attach: Attach, clock: ManualClock
):
    broker.start(START_MS)
    known = fill(broker, 10)
    place = broker.position
    more = fill(broker, 30)
    broker.crash()
    broker.start(broker.now_ms + 60_000)
    broker.write_log(place + 95, b"!!!!")
    told = [place]
    store = attach(broker_max_offset=lambda: told[0])
    assert dict(take(store, clock).raw) == known
    told[0] = broker.position
    taken = take(store, clock)
    del more[QUEUE][5]
    assert dict(taken.raw) == join(known, more)
    assert taken.holes == {QUEUE: {5: HoleReason.DAMAGED}}
    assert store.waiting().records == 0
