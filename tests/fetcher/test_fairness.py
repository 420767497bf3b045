"""Streams take turns by bytes, and no stream has to be counted through for that."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.work import calls

from fetcher.requests import FairQueue

SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4)


def take_next(queue: FairQueue[tuple[int, int]], cost: int) -> int:
    item = queue.head()
    assert item is not None
    queue.take(item[0], item)
    queue.push(item[0], (item[0], item[1] + 1), cost)
    return item[0]


@given(st.lists(SIZES, min_size=2, max_size=6), st.integers(1, 300))
def test_streams_that_always_wait_get_the_same_bytes(streams: list[list[int]], turns: int):
    """At every moment, two of them differ by at most the largest item of each."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    given_bytes: Counter[int] = Counter()
    heads = dict.fromkeys(range(len(streams)), 0)
    for stream, sizes in enumerate(streams):
        queue.push(stream, (stream, 0), sizes[0])
    for _ in range(turns):
        item = queue.head()
        assert item is not None
        stream, number = item
        sizes = streams[stream]
        queue.take(stream, item)
        given_bytes[stream] += sizes[number % len(sizes)]
        queue.push(stream, (stream, number + 1), sizes[(number + 1) % len(sizes)])
        heads[stream] = number + 1
        for one in heads:
            for other in heads:
                apart = given_bytes[one] - given_bytes[other]
                assert apart <= max(streams[one]) + max(streams[other])


def test_a_stream_that_comes_late_is_not_paid_back_and_does_not_wait():
    queue: FairQueue[tuple[int, int]] = FairQueue()
    queue.push(1, (1, 0), 100)
    for _ in range(50):
        take_next(queue, 100)
    queue.push(2, (2, 0), 100)
    served = [take_next(queue, 100) for _ in range(20)]
    assert 2 in served[:2]
    assert 9 <= served.count(1) <= 11


def test_who_comes_back_at_once_does_not_jump_the_queue():
    """A stream of one item at a time takes turns like the others."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(40):
        queue.push("full", ("full", number), 10)
    queue.push("one", ("one", 0), 10)
    served = []
    for number in range(1, 31):
        item = queue.head()
        assert item is not None
        queue.take(item[0], item)
        served.append(item[0])
        if item[0] == "one":
            queue.push("one", ("one", number), 10)
    assert 14 <= served.count("one") <= 16


def test_within_a_stream_first_come_first_served():
    queue: FairQueue[int] = FairQueue()
    for number in range(5):
        queue.push("s", number, 1)
    queue.remove("s", 2)
    queue.take("s", 4)
    order = []
    while (item := queue.head()) is not None:
        queue.take("s", item)
        order.append(item)
    assert order == [0, 1, 3]
    assert len(queue) == 0


def test_what_another_pays_for_is_charged():
    """An item taken out of turn counts for its stream."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for stream in (1, 2):
        for number in range(10):
            queue.push(stream, (stream, number), 10)
    for number in range(5):
        queue.take(2, (2, number))
    served = []
    for _ in range(5):
        item = queue.head()
        assert item is not None
        queue.take(item[0], item)
        served.append(item[0])
    assert served.count(1) == 5


@given(st.data())
def test_everything_comes_out_once(data: st.DataObject):
    queue: FairQueue[int] = FairQueue()
    streams: dict[int, int] = {}
    gone: list[int] = []
    for number in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["push", "push", "take", "remove"])):
            case "push":
                streams[number] = data.draw(st.integers(0, 4))
                queue.push(streams[number], number, data.draw(st.integers(1, 9)))
            case "take" if (item := queue.head()) is not None:
                queue.take(streams[item], item)
                gone.append(item)
            case "remove" if waiting := sorted(streams.keys() - set(gone)):
                item = data.draw(st.sampled_from(waiting))
                queue.remove(streams[item], item)
                gone.append(item)
            case _:
                pass
        assert len(queue) == len(streams) - len(gone)
    while (item := queue.head()) is not None:
        queue.take(streams[item], item)
        gone.append(item)
    assert sorted(gone) == sorted(streams)
    assert queue.streams == 0


def test_thousands_of_streams_cost_no_more_than_a_few():
    """Ten thousand streams: at most twice the calls a decision that ten take (a scan: a thousand times)."""

    def spent(streams: int) -> int:
        queue: FairQueue[tuple[int, int]] = FairQueue()
        rng = random.Random(1)
        for stream in range(streams):
            queue.push(stream, (stream, 0), rng.randrange(1, 1 << 23))

        def decide() -> None:
            for _ in range(5000):
                take_next(queue, rng.randrange(1, 1 << 23))

        return calls(decide)

    assert spent(10_000) < 2 * spent(10)
