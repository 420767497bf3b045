"""The asyncio face: the same answers, a loop that goes on meanwhile, and cancelling that lets go at once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from support.opened import Made

from backends.wrapping import WrappingStore
from tiered import open_async
from tiered.api import reading as reading_module
from tiered.api.aio import THREADS, AsyncTier
from tiered.api.message import Message
from tiered.api.open_tier import OpenTier
from tiered.api.reading import QueueFollower
from tiered.api.tier import Tier
from tiered.clock import SystemClock
from tiered.errors import ClosedError, InvalidError
from tiered.log.decode import TierBatch
from tiered.model import MessageQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import ByteRange


def made(count: int) -> Made:
    tier = Made()
    tier.add(*(b"body %d" % n for n in range(count)))
    return tier


class Held(WrappingStore):
    """Reads of records wait until they are let go."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.go, self.asked, self.is_on = threading.Event(), threading.Event(), False
        self.waited_in_vain = False

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        if self.is_on:
            self.asked.set()
            self.waited_in_vain |= not self.go.wait(30)
        return super().get(key, byte_range)


def held(tier: Made) -> tuple[AsyncTier, Held]:
    opened = tier.open()
    store = Held(opened._opened.store)
    slow = Tier(OpenTier(store, opened._opened.meter, opened._opened.place, clock=SystemClock()))
    slow.refresh()
    store.is_on = True
    return AsyncTier(slow), store


def test_the_same_answers():
    async def main() -> None:
        tier = made(20)
        async with await open_async(tier.url) as opened:
            assert opened.topics() == ["orders"]
            assert opened.bounds("orders", 0).end == 20
            assert len(opened.queues()) == 1
            found = [m.queue_offset async for m in opened.read("orders", 0, 3, 9, tags="a")]
            assert found == list(range(3, 9))
            rows = [b.num_rows async for b in opened.read_arrow("orders", 0, columns=["body"])]
            assert sum(rows) == 20
            assert len([m async for m in opened.read_topic("orders", sql="TAGS = 'a'")]) == 20
            rows = [b.num_rows async for b in opened.read_topic_arrow("orders", columns=["keys"])]
            assert sum(rows) == 20
            counts = [b.records.count async for b in opened.read_records("orders", 0)]
            assert sum(counts) == 20
            assert await opened.offset_for_time("orders", 0, 0) == 0
            assert len(await opened.query("orders", "nothing")) == 0
            assert not await opened.refresh()
            with pytest.raises(InvalidError):
                await anext(opened.read("orders", 9))

    asyncio.run(main())


def test_many_readers_at_once():
    async def main() -> None:
        tier = made(50)
        async with await open_async(tier.url) as opened:

            async def count() -> int:
                return len([m async for m in opened.read("orders", 0)])

            assert await asyncio.gather(*(count() for _ in range(40))) == [50] * 40

    asyncio.run(main())


def test_the_loop_goes_on_while_a_read_waits():
    async def main() -> None:
        opened, store = held(made(5))
        reading = asyncio.create_task(anext(opened.read("orders", 0)))
        await asyncio.to_thread(store.asked.wait, 10)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done()
        store.go.set()
        assert (await reading).queue_offset == 0
        await opened.close()

    asyncio.run(main())


def test_cancelling_lets_go_at_once():
    async def main() -> None:
        opened, store = held(made(5))
        reading = asyncio.create_task(anext(opened.read("orders", 0)))
        await asyncio.to_thread(store.asked.wait, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not store.waited_in_vain
        store.go.set()
        assert len([m async for m in opened.read("orders", 0)]) == 5
        await opened.close()
        with pytest.raises(ClosedError):
            await anext(opened.read("orders", 0))

    asyncio.run(main())


def test_follow_gives_what_is_new_and_ends_with_its_task():
    async def main() -> list[bytes]:
        tier, found = made(2), []
        async with await open_async(tier.url) as opened:

            async def follow() -> None:
                async for message in opened.follow("orders", 0, 1, pause_s_max=0.01):
                    found.append(message.body)
                    if len(found) == 1:
                        await asyncio.to_thread(tier.add, b"new")
                    else:
                        done.set()

            done = asyncio.Event()
            following = asyncio.create_task(follow())
            await asyncio.wait_for(done.wait(), 30)
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
        return found

    assert asyncio.run(main()) == [b"body 1", b"new"]


FOLLOWERS = 100
"""More than there are threads."""


class Followers:
    """So many of one queue, which wait at its end."""

    def __init__(self, opened: AsyncTier) -> None:
        self.found: list[bytes] = []
        self.more = asyncio.Condition()
        self.tasks = [asyncio.create_task(self._follow(opened)) for _ in range(FOLLOWERS)]

    async def _follow(self, opened: AsyncTier) -> None:
        async for message in opened.follow("orders", 0, 1, pause_s_max=60):
            async with self.more:
                self.found.append(message.body)
                self.more.notify_all()

    async def have(self, count: int) -> None:
        async with self.more:
            await asyncio.wait_for(self.more.wait_for(lambda: len(self.found) >= count), 60)

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert {type(error) for error in ended} == {asyncio.CancelledError}


def test_followers_that_wait_cost_no_thread():
    async def main() -> None:
        tier = made(2)
        async with await open_async(tier.url) as opened:
            followers = Followers(opened)
            await followers.have(FOLLOWERS)
            calls = asyncio.gather(
                opened.offset_for_time("orders", 0, 0),
                anext(opened.read("orders", 0)),
                opened.query("orders", "nothing"),
            )
            assert (await asyncio.wait_for(calls, 60))[0] == 0
            tier.add(b"new")
            assert await opened.refresh()
            await followers.have(2 * FOLLOWERS)  # their pauses would be up to a minute
            await followers.cancel()
        assert followers.found == [b"body 1"] * FOLLOWERS + [b"new"] * FOLLOWERS

    asyncio.run(asyncio.wait_for(main(), 120))


def test_one_listing_serves_all_that_wait():
    class Counting(WrappingStore):
        lists = 0

        def list(self, prefix: str, *, start_after: str = "") -> Any:
            self.lists += 1
            return super().list(prefix, start_after=start_after)

    async def main() -> None:
        tier = made(2).open()
        store = Counting(tier._opened.store)
        slow = Tier(OpenTier(store, tier._opened.meter, tier._opened.place, clock=SystemClock()))
        slow.refresh()
        async with AsyncTier(slow) as opened:
            before = store.lists
            followers = Followers(opened)
            await followers.have(FOLLOWERS)
            await followers.cancel()
            assert store.lists - before < FOLLOWERS / 2

    asyncio.run(asyncio.wait_for(main(), 120))


def test_news_that_come_while_a_follower_ends_its_step_wake_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tiered.api.aio.FOLLOW_S_MIN", 30.0)
    tier, is_first = made(2), [True]

    async def main() -> None:
        loop, real = asyncio.get_running_loop(), QueueFollower.step
        async with AsyncTier(tier.open()) as opened:

            def step(follower: QueueFollower) -> TierBatch | None:
                found = real(follower)
                if found is None and is_first:  # it has seen nothing, and has not said so yet
                    is_first.clear()
                    tier.add(b"new")
                    asyncio.run_coroutine_threadsafe(opened.refresh(), loop).result(10)
                return found

            monkeypatch.setattr(QueueFollower, "step", step)
            messages = opened.follow("orders", 0, 0, pause_s_max=60)
            found = [(await asyncio.wait_for(anext(messages), 5)).body for _ in range(3)]
            assert found == [b"body 0", b"body 1", b"new"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_ends_followers_that_wait():
    async def main() -> None:
        async with await open_async(made(2).url) as opened:
            followers = Followers(opened)
            await followers.have(FOLLOWERS)
        every = asyncio.gather(*followers.tasks, return_exceptions=True)
        ended = await asyncio.wait_for(every, 60)
        assert {type(error) for error in ended} == {ClosedError}

    asyncio.run(asyncio.wait_for(main(), 120))


ITERATORS: dict[str, Callable[[AsyncTier], Any]] = {
    "read": lambda tier: tier.read("orders", 0),
    "read_topic": lambda tier: tier.read_topic("orders"),
    "read_arrow": lambda tier: tier.read_arrow("orders", 0, columns=["queue_offset"]),
    "read_topic_arrow": lambda tier: tier.read_topic_arrow("orders", columns=["queue_offset"]),
    "read_records": lambda tier: tier.read_records("orders", 0),
    "follow": lambda tier: tier.follow("orders", 0, 0, pause_s_max=0.01),
}
COUNT = 30


def offsets_of(found: Any) -> list[int]:
    """Queue offsets of what an iterator of any kind gave at once."""
    if isinstance(found, Message):
        return [found.queue_offset]
    if isinstance(found, TierBatch):
        return list(range(found.records.base_offset, found.records.end_offset))
    return [int(offset) for offset in found.column("queue_offset").to_pylist()]


@pytest.mark.parametrize("kind", ITERATORS)
def test_what_a_cancelled_anext_asked_for_comes_with_the_next(kind: str):
    async def main() -> None:
        opened, store = held(made(COUNT))
        iterator = ITERATORS[kind](opened)
        for _ in range(3):
            waiting = asyncio.create_task(anext(iterator))
            await asyncio.to_thread(store.asked.wait, 30)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        store.go.set()
        found: list[int] = []
        while len(found) < COUNT:
            found += offsets_of(await anext(iterator))
        assert found == list(range(COUNT))
        await iterator.aclose()
        await opened.close()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("kind", ITERATORS)
def test_whenever_anext_is_cancelled_nothing_is_lost_or_comes_twice(kind: str):
    async def main() -> None:
        tier = Made()
        for number in range(COUNT):
            tier.add(b"body %d" % number)
        async with await open_async(tier.url) as opened:
            iterator, found = ITERATORS[kind](opened), list[int]()
            for turns in itertools.count():
                waiting = asyncio.create_task(anext(iterator))
                for _ in range(turns % 7):
                    await asyncio.sleep(0)
                if turns % 11:
                    waiting.cancel()
                with suppress(asyncio.CancelledError):
                    found += offsets_of(await waiting)
                if len(found) == COUNT:
                    break
            assert found == list(range(COUNT))
            await iterator.aclose()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_follower_whose_anext_is_given_up_goes_on():
    async def main() -> None:
        tier = made(1)
        async with await open_async(tier.url) as opened:
            following = opened.follow("orders", 0, 1, pause_s_max=0.01)
            for number in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(following), 0.05)
                tier.add(b"new %d" % number)
                assert (await asyncio.wait_for(anext(following), 60)).body == b"new %d" % number
            await following.aclose()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("kind", ITERATORS)
def test_a_closed_iterator_is_over_whatever_was_under_way(kind: str):
    async def main() -> None:
        opened, store = held(made(COUNT))
        iterator = ITERATORS[kind](opened)
        waiting = asyncio.create_task(anext(iterator))
        await asyncio.to_thread(store.asked.wait, 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await iterator.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
        await iterator.aclose()
        store.go.set()
        await opened.close()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("how", ["closed", "dropped", "dropped in a cycle", "dropped amid a step"])
def test_to_leave_what_reads_ahead_does_not_hold_the_loop(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    waited: queue.Queue[threading.Thread] = queue.Queue()

    def wait(*arguments: Any) -> Any:
        waited.put(threading.current_thread())
        return wait_for_futures(*arguments)

    monkeypatch.setattr(reading_module, "wait", wait)
    source = Made()
    for number in range(6):
        source.add(*(b"x" * 1000 for _ in range(20)), queue=MessageQueue("orders", number))
    opened = source.open()
    part = opened._opened.state.queues[MessageQueue("orders", 0)][-1].parts()[0]
    first = opened._opened.place.prefix + part.bundle.key

    class HeldButOne(Held):
        """Only the first queue's bundle is not held."""

        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            if key == first:
                return self.inner.get(key, byte_range)
            return super().get(key, byte_range)

        def get_ranges(self, key: str, byte_ranges: Any) -> Any:
            return [self.get(key, one) for one in byte_ranges]

    store = HeldButOne(opened._opened.store)
    slow = Tier(OpenTier(store, opened._opened.meter, opened._opened.place, clock=SystemClock()))
    slow.refresh()
    store.is_on = True

    async def main() -> None:
        async with AsyncTier(slow) as tier:
            reading: Any = tier.read_topic_arrow("orders", batch_bytes=1000, queues_at_once=4)
            await anext(reading)
            if how == "dropped amid a step":
                step = asyncio.create_task(anext(reading))
                await asyncio.to_thread(store.asked.wait, 30)
                step.cancel()
                with suppress(asyncio.CancelledError):
                    await step
                del step
            else:  # each thread begins something else, and so has nothing of the last step any more
                met = threading.Barrier(THREADS)
                loop = asyncio.get_running_loop()
                waits = [loop.run_in_executor(tier._pool, met.wait, 60) for _ in range(THREADS)]
                await asyncio.gather(*waits)
            if how == "closed":
                await reading.aclose()
            if how == "dropped in a cycle":
                reading.itself = reading
            del reading
            gc.collect()
            if how == "dropped amid a step":
                store.go.set()
            left = await asyncio.to_thread(waited.get, timeout=60)
            assert left is not threading.main_thread()
            store.go.set()

    asyncio.run(asyncio.wait_for(main(), 120))
