"""Damage in hourly files costs the messages of its block: the others are given, and those when they can be read, once."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support.merging import gather
from support.timers import PREFIX, Box, Killed, Timers, wheel_record

from tiered.dispatch.group_commit import Uploader
from tiered.errors import DataError
from tiered.log.reader import QueueReader, TierReader
from tiered.log.timers import HOUR_MS, hour_queue
from tiered.model import QueueOffset
from timer.dequeue import TimerReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.journal.append import JournalWriter
    from tiered.log.state import TierState
    from timer.handover import HandOver

COUNT = 1500
"""Messages of an hour: half a MB, so that its records have several blocks, and its items one."""


@pytest.fixture
def timers() -> Iterator[Timers]:
    with Timers() as made:
        yield made


@dataclass
class Builder:
    """What merging asks of who has written a tier."""

    store: object
    journal: JournalWriter[TierState]
    uploader: Uploader
    prefix: str = PREFIX

    def say(self, action: dict[str, object]) -> None:
        self.journal.append([action])


def bundles(timers: Timers) -> list[str]:
    return sorted(one.key for one in timers.store.list(f"{PREFIX}bundle/"))


def merged(timers: Timers, *, packed: bool) -> str:
    """All as one section in one bundle, which is alone in the tier then; its key."""
    journal, before = timers.journal(), bundles(timers)
    journal.take_epoch({"host": "here"})
    uploader = Uploader(
        timers.store, PREFIX, epoch=journal.epoch, writer=journal.writer, clock=timers.clock
    )  # fmt: skip
    builder = Builder(timers.store, journal, uploader)
    if packed:
        gather(builder)  # type: ignore[arg-type]
    else:
        gather(builder, compression=None)  # type: ignore[arg-type]
    for key in before:
        timers.store.delete(key)
    (made,) = bundles(timers)
    return made


def replaced(timers: Timers, key: str, change: Callable[[bytes], bytes | None]) -> bytes:
    """Change an object (None: take it away); what it was."""
    before = timers.store.get(key)
    timers.store.delete(key)
    if (after := change(before)) is not None:
        timers.store.put_if_absent(key, after)
    return before


def flipped(data: bytes, *at: int) -> bytes:
    changed = bytearray(data)
    for position in at:
        changed[position] ^= 1
    return bytes(changed)


def readable(timers: Timers, hour: int) -> set[int]:
    """Queue offsets of an hour that come out one by one."""
    tier = TierReader(timers.store, PREFIX)
    tier.refresh()
    reader: QueueReader = tier.queue(hour_queue(hour))
    found = set()
    for at in range(reader.incarnation.commit_offset):
        with contextlib.suppress(DataError):
            reader.read(QueueOffset(at), bytes_max=1, count_max=1)
            found.add(at)
    return found


def given(box: Box) -> Counter[int]:
    return Counter(one.offset for one in box.got)


def fill(timers: Timers, layout: str) -> str:
    """An hour's messages, in a random order of due times; the key of a bundle with some of them."""
    rng = random.Random(5)
    dues = [timers.now_ms + rng.randrange(HOUR_MS) for _ in range(COUNT)]
    step = COUNT if layout == "one" else COUNT // 3
    for low in range(0, COUNT, step):
        timers.put(dues[low : low + step])
    if layout in {"one", "parts"}:
        return bundles(timers)[-1]
    return merged(timers, packed=layout == "packed")


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit in the middle": lambda data: flipped(data, len(data) // 2),
    "the first bit": lambda data: flipped(data, 0),
    "bits here and there": lambda data: flipped(data, 9, len(data) // 3, len(data) * 3 // 4),
    "the table and the footer": lambda data: flipped(data, len(data) - 10, len(data) - 40),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "gone": lambda _: None,
}


@pytest.mark.parametrize(
    "layout",
    ["parts", "packed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("one", "merged"))],
)
@pytest.mark.parametrize("change", CHANGES)
def test_damage_holds_back_its_own_messages_until_they_can_be_read(
    timers: Timers, layout: str, change: str
):
    key, hour, box = fill(timers, layout), timers.now_ms // HOUR_MS, Box()
    before = replaced(timers, key, CHANGES[change])
    sound = readable(timers, hour)
    reader = TimerReader(timers.store, PREFIX)
    reader.refresh()
    listed = []
    with contextlib.suppress(DataError):
        for message in reader.pending(hour):
            listed.append(message.offset)
    assert sorted(listed) == sorted(sound)
    run = timers.hand(box)
    assert given(box) == dict.fromkeys(sound, 1)
    assert run.counters.held == COUNT - len(sound)
    assert run.counters.damaged == (len(sound) < COUNT)
    assert box.got == sorted(box.got, key=lambda one: (one.due_ms, one.offset))
    run = timers.hand(box)  # still damaged: told again, and nothing is given again
    assert run.counters.held == COUNT - len(sound)
    assert len(box.got) == len(sound)
    with contextlib.suppress(KeyError):
        timers.store.delete(key)
    timers.store.put_if_absent(key, before)
    run = timers.hand(box)
    assert given(box) == dict.fromkeys(range(COUNT), 1)
    assert (run.counters.held, run.counters.damaged, run.counters.missing) == (0, 0, 0)
    late = box.got[len(sound) :]
    assert late == sorted(late, key=lambda one: (one.due_ms, one.offset))
    assert not reader_state(timers).timers.hours[hour].held


@pytest.mark.parametrize("layout", ["one", "parts", "merged", "packed"])
@pytest.mark.parametrize(
    "change", ["a bit in the middle", "the first bit", "bits here and there", "gone"]
)
def test_what_is_damaged_says_where_reading_can_go_on(timers: Timers, layout: str, change: str):
    """Behind the damage, at the first that can be read: so a consumer goes on with one step, and skips nothing else."""
    key, hour = fill(timers, layout), timers.now_ms // HOUR_MS
    replaced(timers, key, CHANGES[change])
    sound = readable(timers, hour)
    tier = TierReader(timers.store, PREFIX)
    tier.refresh()
    reader = tier.queue(hour_queue(hour))
    for at in sorted({0, *(one + 1 for one in sound)} - sound - {COUNT}):
        behind = min((one for one in sound if one > at), default=None)
        assert reader.after_damage(QueueOffset(at)) == behind
        with pytest.raises(DataError) as told:
            reader.read_warily(QueueOffset(at), bytes_max=1 << 20, count_max=COUNT)
        assert behind is None or f"read on from queue offset {behind} of " in told.value.do


def reader_state(timers: Timers) -> TierState:
    reader = TimerReader(timers.store, PREFIX)
    reader.refresh()
    return reader.state


def items_at(timers: Timers) -> int:
    """Where the items of the last part lie in its bundle."""
    part = list(reader_state(timers).incarnation(hour_queue(timers.now_ms // HOUR_MS)).parts())[-1]  # type: ignore[union-attr]
    return int(part.section.start + part.section.items_at)


def test_a_damaged_block_of_items_costs_its_items(timers: Timers):
    """3,276 items have a block: of 4,000 those of the other are given."""
    timers.put([timers.now_ms + n for n in range(4_000)])
    (key,), box = bundles(timers), Box()
    before = replaced(timers, key, lambda data: flipped(data, items_at(timers) + 30))
    run = timers.hand(box)
    assert given(box) == dict.fromkeys(range(3_277, 4_000), 1)
    assert run.counters.held == 3_277
    replaced(timers, key, lambda _: before)
    timers.hand(box)
    assert given(box) == dict.fromkeys(range(4_000), 1)


def test_a_damaged_block_table_costs_nothing(timers: Timers):
    key, box = fill(timers, "one"), Box()
    table_at = items_at(timers) + 20 * COUNT
    replaced(timers, key, lambda data: flipped(data, table_at))
    assert timers.hand(box).counters.held == 0
    assert given(box) == dict.fromkeys(range(COUNT), 1)


@pytest.mark.parametrize("seed", range(12))
def test_damage_that_comes_and_goes_beside_kills_gives_each_once(timers: Timers, seed: int):
    """Blocks break and are mended between runs that are killed at any moment; messages come meanwhile."""
    rng, box = random.Random(seed), Box()
    whole: dict[str, bytes] = {}
    count = 0
    for _ in range(10):
        if rng.random() < 0.6:
            more = rng.randrange(1, 400)
            timers.put([timers.now_ms + rng.randrange(3) * 1000 for _ in range(more)])
            count += more
        for key in bundles(timers):
            if key in whole and rng.random() < 0.4:
                replaced(timers, key, lambda _, key=key: whole.pop(key))  # type: ignore[misc]
            elif key not in whole and rng.random() < 0.4:
                at = rng.randrange(timers.store.head(key).size_bytes)
                whole[key] = replaced(timers, key, lambda data, at=at: flipped(data, at))  # type: ignore[misc]
        box.dies = rng.choice([None, ("before", 0), ("within", 1), ("after", 0), ("after", 2)])
        with contextlib.suppress(Killed):
            timers.hand(box, batch=rng.choice([7, 50, 300]))
        assert max(given(box).values(), default=1) == 1
        box.dies = None
    for key, data in whole.items():
        replaced(timers, key, lambda _, data=data: data)  # type: ignore[misc]
    run = timers.hand(box)
    assert given(box) == dict.fromkeys(range(count), 1)
    assert run.counters.missing == 0
    assert run.next_ms is None


def test_what_was_given_before_its_block_broke_is_not_given_again(timers: Timers):
    """A sweep is killed behind its third batch, then one of what it gave breaks; nobody knows which it counted."""
    key, box = fill(timers, "one"), Box(dies=("after", 3))
    with pytest.raises(Killed):
        timers.hand(box)
    box.dies = None
    first = set(given(box))
    before = replaced(timers, key, lambda data: flipped(data, len(data) // 2))
    run = timers.hand(box)
    assert run.counters.held > 0
    assert first & held_of(run)
    assert max(given(box).values()) == 1
    replaced(timers, key, lambda _: before)
    run = timers.hand(box)
    assert given(box) == dict.fromkeys(range(COUNT), 1)
    assert run.counters.found > 0


def held_of(run: HandOver) -> set[int]:
    hours = run.journal.state.timers.hours
    return {at for one in hours.values() for low, high in one.held for at in range(low, high)}


def test_two_messages_of_one_id_and_due_time_are_two(timers: Timers):
    """One is given, the other lies in a damaged block: a target that has one of that name need not have both."""
    due = timers.now_ms + 5_000
    timers.put([due, *(timers.now_ms + n for n in range(600)), due], UNIQ_KEY="SAME")
    (key,), box = bundles(timers), Box()
    before = replaced(timers, key, lambda data: flipped(data, 9))
    run = timers.hand(box)
    assert 0 < run.counters.held < 600
    replaced(timers, key, lambda _: before)
    timers.hand(box)
    assert given(box) == dict.fromkeys(range(602), 1)


def marked(timers: Timers, count: int) -> tuple[str, list[int]]:
    """Messages, two of each due time; the last of them is a delete mark of the tenth. Key of their bundle."""
    dues = [timers.now_ms + n % (count // 2) * 1000 for n in range(count)]
    records = [wheel_record(n, due) for n, due in enumerate(dues)]
    records.append(wheel_record(count, dues[10], TIMER_DEL_UNIQKEY=f"{10:032X}"))
    timers.put_records(records)
    (key,) = bundles(timers)
    return key, dues


def test_what_a_lost_delete_mark_may_name_waits_for_it(timers: Timers):
    key, dues = marked(timers, COUNT)
    box, at = Box(), items_at(timers) - 20
    before = replaced(timers, key, lambda data: flipped(data, at))  # the block of the mark
    timers.hand(box)
    assert all(one.due_ms != dues[10] for one in box.got)
    assert len(box.got) > COUNT // 2
    replaced(timers, key, lambda _: before)
    timers.hand(box)
    assert given(box) == dict.fromkeys({*range(COUNT)} - {10}, 1)


def test_what_a_delete_mark_named_while_it_was_damaged_is_not_given_when_it_is_mended(
    timers: Timers,
):
    key, _ = marked(timers, COUNT)
    before = replaced(timers, key, lambda data: flipped(data, 400))  # the block of the tenth
    box = Box()
    assert timers.hand(box).counters.held > 10
    replaced(timers, key, lambda _: before)
    timers.hand(box)
    assert given(box) == dict.fromkeys({*range(COUNT)} - {10}, 1)


def test_a_rolled_message_whose_other_record_was_given_is_not_given_when_it_is_mended(
    timers: Timers,
):
    due = timers.now_ms + 1000
    records = [wheel_record(n, due + n) for n in range(600)]
    records.append(wheel_record(600, due + 3, UNIQ_KEY=f"{3:032X}", TIMER_ROLL_TIMES="1"))
    records[3] = wheel_record(3, due + 3, TIMER_ROLL_TIMES="0")
    timers.put_records(records)
    (key,), box = bundles(timers), Box()
    before = replaced(timers, key, lambda data: flipped(data, 9))
    timers.hand(box)
    assert 600 in given(box)
    replaced(timers, key, lambda _: before)
    timers.hand(box)
    assert given(box) == dict.fromkeys({*range(601)} - {3}, 1)


def test_other_hours_of_one_bundle_go_on(timers: Timers):
    timers.put([timers.now_ms + n * HOUR_MS // 300 for n in range(900)])
    (key,), box = bundles(timers), Box()
    replaced(timers, key, lambda data: flipped(data, 70_000))
    timers.clock.advance(4 * 3600)
    run = timers.hand(box)
    assert len(box.got) == 900 - run.counters.held
    assert 0 < run.counters.held <= 300
    assert run.counters.damaged == 1
