"""Iterators stay on the history of a queue on which they began, whatever is truncated or made anew meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.opened import ORDERS, Made

from tiered.api.aio import AsyncTier
from tiered.errors import ExpiredError
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.api.tier import Tier

OLD = [b"old %d" % n for n in range(6)]
NEW = [b"new %d" % n for n in range(6)]
OTHER = MessageQueue("orders", 1)


def made(*, roll: bool = False) -> Made:
    """A part for each message of ``OLD``."""
    tier = Made()
    for body in OLD:
        tier.builder.add([body], queue=ORDERS, roll=roll)
    return tier


def part_ways(tier: Made) -> None:
    """The broker truncates what it had from offset 2 on, and other messages come."""
    tier.truncate(2)
    for body in NEW[2:]:
        tier.add(body)


def by_read(tier: Tier) -> Iterator[bytes]:
    return (message.body for message in tier.read("orders", 0))


def by_read_with_a_stop(tier: Tier) -> Iterator[bytes]:
    return (message.body for message in tier.read("orders", 0, 0, 6))


def by_incarnation(tier: Tier) -> Iterator[bytes]:
    return (message.body for message in tier.read("orders", 0, incarnation=0))


def by_topic(tier: Tier) -> Iterator[bytes]:
    return (message.body for message in tier.read_topic("orders"))


def by_arrow(tier: Tier) -> Iterator[bytes]:
    batches = tier.read_arrow("orders", 0, columns=["body"], batch_bytes=1)
    return (body for batch in batches for body in batch.column("body").to_pylist())


def by_topic_arrow(tier: Tier) -> Iterator[bytes]:
    batches = tier.read_topic_arrow("orders", columns=["body"], batch_bytes=1)
    return (body for batch in batches for body in batch.column("body").to_pylist())


def by_queue_reader(tier: Tier) -> Iterator[bytes]:
    from tiered.log.messages import items

    reader = tier._opened.reader.queue(ORDERS)
    batches = reader.batches(reader.incarnation.min_offset, bytes_max=1)
    return (item.record.body for batch in batches for item in items(batch.records))  # type: ignore[union-attr]


DOORS: list[Callable[[Tier], Iterator[bytes]]] = [
    by_read, by_read_with_a_stop, by_incarnation, by_topic, by_arrow, by_topic_arrow, by_queue_reader,
]  # fmt: skip


def by_any_door(test: Any) -> Any:
    return pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)(test)


@by_any_door
def test_what_is_truncated_while_it_is_read_is_given_to_the_end(
    door: Callable[[Tier], Iterator[bytes]],
):
    tier = made()
    with tier.open() as opened:
        reading = door(opened)
        found = [next(reading)]
        part_ways(tier)
        opened.refresh()
        found += reading
        assert found == OLD
        assert list(by_read(opened)) == [*OLD[:2], *NEW[2:]]


@by_any_door
def test_so_it_is_when_the_objects_were_merged_and_deleted_meanwhile(
    door: Callable[[Tier], Iterator[bytes]],
):
    tier = made()
    with tier.open() as opened:
        reading = door(opened)
        found = [next(reading)]
        part_ways(tier)
        tier.merge()  # merges what was kept with what came in place of the rest
        opened.refresh()
        found += reading
        assert found == OLD


@by_any_door
def test_a_queue_that_is_cut_twice_is_given_as_it_was(door: Callable[[Tier], Iterator[bytes]]):
    tier = made()
    with tier.open() as opened:
        reading = door(opened)
        found = [next(reading)]
        tier.truncate(4)
        tier.add(NEW[4])
        tier.truncate(1)
        tier.add(b"newer 1")
        tier.add(b"newer 2")
        tier.merge()
        opened.refresh()
        found += reading
        assert found == OLD


@by_any_door
def test_a_new_incarnation_does_not_come_in_the_middle_of_the_old_one(
    door: Callable[[Tier], Iterator[bytes]],
):
    tier = made()
    with tier.open() as opened:
        reading = door(opened)
        found = [next(reading)]
        tier.merge()
        tier.begin_again()
        for body in NEW:
            tier.add(body)
        opened.refresh()
        found += reading
        assert found == OLD


@by_any_door
def test_what_was_truncated_and_has_expired_says_where_to_go_on(
    door: Callable[[Tier], Iterator[bytes]],
):
    tier = made(roll=True)
    with tier.open() as opened:
        reading = door(opened)
        found: list[bytes] = []
        part_ways(tier)
        tier.expire(2, 6, incarnation=0)
        opened.refresh()
        with pytest.raises(ExpiredError) as told:
            found += reading
        assert found == OLD[: len(found)]
        assert told.value.next_offset == 2
        rest = [m.body for m in opened.read("orders", 0, told.value.next_offset)]
        assert rest == NEW[2:], "nothing of the new history is missed"


def test_a_part_of_what_was_truncated_that_has_expired_is_not_passed_over():
    tier = made(roll=True)
    with tier.open() as opened:
        reading = opened.read("orders", 0)
        part_ways(tier)
        tier.expire(2, 4, incarnation=0)
        opened.refresh()
        found: list[bytes] = []
        with pytest.raises(ExpiredError) as told:
            found.extend(message.body for message in reading)
        assert found == OLD[:2]
        assert told.value.next_offset == 2


def test_queues_whose_turn_comes_later_are_those_of_the_beginning():
    tier = made()
    for body in OLD:
        tier.add(body, queue=OTHER)
    with tier.open() as opened:
        reading = opened.read_topic("orders", queues_at_once=1)
        found = [next(reading).body]
        tier.truncate(2, queue=OTHER)
        for body in NEW[2:]:
            tier.add(body, queue=OTHER)
        tier.add(b"later", queue=MessageQueue("orders", 2))
        opened.refresh()
        found += [message.body for message in reading]
        assert found == [*OLD, *OLD]


def test_what_expires_while_it_is_read_is_never_passed_over_in_silence():
    tier = made(roll=True)
    with tier.open() as opened:
        reading = opened.read("orders", 0)
        assert next(opened.read("orders", 0, 5)).body == OLD[5]  # nothing of the rest is cached
        tier.expire(0, 4)
        opened.refresh()
        found: list[int] = []
        with pytest.raises(ExpiredError) as told:
            found.extend(message.queue_offset for message in reading)
        assert (found, told.value.next_offset) == ([], 4)


def test_asyncio_has_the_same_iterators():
    tier = made()

    async def main() -> None:
        async with AsyncTier(tier.open()) as opened:
            one, all_ = opened.read("orders", 0), opened.read_topic("orders")
            found = [[(await anext(one)).body], [(await anext(all_)).body]]
            part_ways(tier)
            await opened.refresh()
            found[0] += [message.body async for message in one]
            found[1] += [message.body async for message in all_]
            assert found == [OLD, OLD]

    asyncio.run(main())


# Following: into what came in place, with nothing of it missed


def follow(opened: Tier, until: bytes, *, then: Callable[[list[bytes]], None]) -> list[bytes]:
    """What a follower is given until a message comes; ``then`` is called with it after each."""
    stop, found = threading.Event(), []
    for message in opened.follow("orders", 0, 0, stop=stop, pause_s_max=0.01):
        found.append(message.body)
        then(found)
        if message.body == until:
            stop.set()
    return found


def test_a_follower_misses_nothing_of_what_came_in_place_of_what_has_expired():
    tier = made(roll=True)
    with tier.open() as opened:

        def then(found: list[bytes]) -> None:
            if len(found) == len(OLD):
                part_ways(tier)
                tier.expire(2, 6, incarnation=0)

        found = follow(opened, NEW[-1], then=then)
    assert found == [*OLD, *NEW[2:]]


def test_a_follower_is_given_the_rest_of_an_incarnation_that_is_over_before_the_new_one():
    tier = made()
    with tier.open() as opened:

        def then(found: list[bytes]) -> None:
            if len(found) == len(OLD):
                tier.add(b"last of the old")
                tier.begin_again()
                tier.add(b"first of the new")
                tier.begin_again()
                tier.add(b"first of the newest")

        found = follow(opened, b"first of the newest", then=then)
    assert found == [*OLD, b"last of the old", b"first of the new", b"first of the newest"]


def test_a_follower_amid_a_history_ends_it_and_then_goes_back_to_where_it_was_cut():
    tier = made()
    with tier.open() as opened:

        def then(found: list[bytes]) -> None:
            if found == OLD[:1]:
                part_ways(tier)
                tier.merge()
                opened.refresh()

        found = follow(opened, NEW[-1], then=then)
    assert found == [*OLD, *NEW[2:]]


def test_a_follower_is_told_of_what_has_expired_before_it_came():
    tier = made(roll=True)
    with tier.open() as opened:

        def then(found: list[bytes]) -> None:
            if len(found) == len(OLD):
                for body in NEW:
                    tier.builder.add([body], queue=ORDERS, roll=True)
                tier.expire(0, 9)

        with pytest.raises(ExpiredError) as told:
            follow(opened, NEW[-1], then=then)
        assert told.value.next_offset == 9


def test_a_follower_of_a_queue_that_begins_with_a_gap_is_not_told_that_anything_expired():
    tier = made()
    tier.begin_again()
    with tier.open() as opened:
        stop = threading.Event()
        following = opened.follow("orders", 0, stop=stop, pause_s_max=0.01)
        tier.builder.gap(50, queue=ORDERS)
        tier.add(b"behind")
        assert next(following).body == b"behind"
        stop.set()
