"""Readers in threads over a failing store while the queue grows, is merged, expires and is truncated: only the truth.

Every record's body says its queue offset and, since what was truncated is written anew, the version of it. A reader may
see a version as long as the journal that it has seen says so; which it is at an offset is known for each state.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.fetching import fetcher_of, rows, view_of
from support.merging import delete_unnamed, merge, named_bundles
from support.tiers import QUEUE, TierBuilder, record_of

from backends.errors import BackendError, ShortReadError, UnavailableError
from backends.wrapping import WrappingStore
from fetcher.limits import TransferLimits, WindowLimits
from fetcher.transfers import Ticker
from tiered.clock import SystemClock
from tiered.errors import ExpiredError, StoreUnavailableError
from tiered.log.expiry import segment_end
from tiered.log.merge import MergePolicy
from tiered.log.parts import Gap, queue_action
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from backends.base import ByteRange, ObjectStore
    from fetcher.fetcher import TieredMessageFetcher
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Incarnation

KIB = 1024
CACHE = 1 << 20


class Unlucky(WrappingStore):
    """Reads are late, refused, cut, lost or wrong by a bit, now and then. Wrong once: the same read again is right."""

    def __init__(self, inner: ObjectStore, seed: int) -> None:
        super().__init__(inner)
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self.is_calm = False

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        with self._lock:
            luck = 1.0 if self.is_calm else self._rng.random()
            spot = self._rng.random()
        data = super().get(key, byte_range)
        if "/journal/" in key:
            return data
        if luck < 0.02:
            time.sleep(0.05)
        elif luck < 0.06:
            raise UnavailableError("refused")
        elif luck < 0.08:
            raise ShortReadError("cut")
        elif luck < 0.09:
            return data[: int(len(data) * spot)]
        elif luck < 0.10:
            wrong = bytearray(data)
            wrong[int(len(data) * spot)] ^= 1
            return bytes(wrong)
        return data


class World:
    """The queue, and what it says at each offset."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.builder = TierBuilder()
        self.store = self.builder.store
        self.truth: dict[int, set[bytes]] = {}
        """All that has ever been at an offset; added before a reader can see it."""
        self.now: dict[int, bytes] = {}
        self.version = 0

    @property
    def incarnation(self) -> Incarnation:
        incarnation = self.builder.journal.state.incarnation(QUEUE)
        assert incarnation is not None
        return incarnation

    def grow(self) -> None:
        sizes = [0, 10, 300, 3000, 20_000, 90_000]
        count = self.rng.choice([1, 3, 20, 60])
        size = self.rng.choice(sizes)
        file = self.builder.file()
        items: list[bytes | None] = []
        for at in range(file.append_offset, file.append_offset + count):
            is_hole = self.rng.random() < 0.05
            body = b"%d/%d " % (at, self.version) + bytes(self.rng.randrange(size + 1))
            items.append(None if is_hole else body)
            row = b"" if is_hole else record_of(QUEUE, at, body, time_ms=1_700_000_000_000 + at)
            self.truth.setdefault(at, set()).add(row)
            self.now[at] = row
        self.builder.add(items, roll=self.rng.random() < 0.2)

    def gap(self) -> None:
        self.builder.gap(self.rng.randrange(1, 9))

    def merge(self) -> None:
        before = named_bundles(self.builder)
        merge(self.builder, MergePolicy(fan_in=4, bundle_bytes_max=4 << 20, own_bytes=1 << 20))
        delete_unnamed(self.builder, before)

    def expire(self) -> None:
        incarnations = self.builder.journal.state.queues[QUEUE]
        incarnation, before = self.incarnation, named_bundles(self.builder)
        if len(incarnation.segments) < 4:
            return
        low = segment_end(incarnation.segments[0])
        if low != incarnation.segments[1].base_queue_offset:
            return
        fields = {
            "min_from": incarnation.min_offset,
            "min_to": low,
            "position": len(incarnations) - 1,
        }
        self.builder.say(queue_action("expire", QUEUE, 0, **fields))
        delete_unnamed(self.builder, before)

    def truncate(self) -> None:
        """Cut the last part in two, and go on with other messages."""
        incarnation = self.incarnation
        part = incarnation.parts()[-1]
        if part.count < 2 or part.holes or part.queue_end != incarnation.commit_offset:
            return
        keep = self.rng.randrange(1, part.count)
        if part.queue_offset + keep <= incarnation.min_offset:
            return
        self.builder.truncate(part.queue_offset + keep)
        self.version += 1


class Reader(threading.Thread):
    """One group: reads on, now and then elsewhere, and holds what it gets against the truth."""

    def __init__(
        self, number: int, world: World, fetcher: TieredMessageFetcher, stop: threading.Event
    ) -> None:
        super().__init__(name=f"stress-{number}")
        self.rng = random.Random(number)
        self.group = f"g{number // 2}"  # two threads share a stream
        self.world, self.fetcher, self.stop = world, fetcher, stop
        self.reads = self.items = self.failed = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            at = 0
            while not self.stop.is_set():
                at = self.step(at)
        except Exception as error:  # noqa: BLE001 (raised by the test's own thread)
            self.error = error

    def step(self, at: int) -> int:
        rng = self.rng
        if rng.random() < 0.03:
            at = rng.randrange(max(1, self.world.incarnation.commit_offset + 3))
        count, size = rng.choice([1, 7, 100]), rng.choice([1, 20_000, 1 << 20])
        self.reads += 1
        try:
            found = self.fetcher.read(
                self.group, QUEUE, QueueOffset(at), bytes_max=size, count_max=count,
                timeout_s=rng.choice([0.02, 5.0, 5.0]),
            )  # fmt: skip
        except ExpiredError as error:
            return error.next_offset
        except (StoreUnavailableError, BackendError):
            self.failed += 1
            return at
        if found is None:
            self.fetcher.refresh()
            time.sleep(0.001)
            return rng.randrange(at + 1)
        if isinstance(found, Gap):
            assert found.start <= at < found.end
            return found.end
        self.check(at, found, count)
        return found.end_offset

    def check(self, at: int, batch: TierBatch, count_max: int) -> None:
        got = rows(batch)
        assert batch.base_offset >= at
        assert 1 <= len(got) <= count_max
        for offset, row in got.items():
            assert row in self.world.truth[offset], (offset, row[:100])
        self.items += len(got)
        stats = self.fetcher.stats()
        assert stats.cached_bytes + stats.reserved_bytes <= CACHE


def stress(seed: int, seconds: float) -> None:
    before = set(threading.enumerate())
    world = World(seed)
    for _ in range(10):
        world.grow()
    store = Unlucky(world.store, seed)
    stop = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        fetcher = fetcher_of(
            store, executor=pool, clock=SystemClock(), cache_bytes=CACHE, block_bytes=64 * KIB,
            chunk_bytes=128 * KIB, unread_seconds=0.3, read_seconds=0.1,
            window=WindowLimits(bytes_min=64 * KIB, bytes_max=512 * KIB),
            transfers=TransferLimits(requests_in_flight_max=6, pending_max=64),
        )  # fmt: skip
        readers = [Reader(number, world, fetcher, stop) for number in range(6)]
        with Ticker(fetcher, SystemClock()):
            for reader in readers:
                reader.start()
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s and not any(reader.error for reader in readers):
                work = world.rng.choice(
                    [
                        *[world.grow] * 6,
                        world.gap,
                        world.merge,
                        world.merge,
                        world.expire,
                        world.truncate,
                    ]
                )
                work()
                if world.rng.random() < 0.5:
                    fetcher.refresh()
                time.sleep(world.rng.uniform(0, 0.04))
            stop.set()
            for reader in readers:
                reader.join(20)
                assert not reader.is_alive(), "it waits for ever"
        settled(fetcher, store, world)
        fetcher.close()
    for reader in readers:
        if reader.error is not None:
            raise reader.error
    assert all(reader.items > 20 for reader in readers), [(r.reads, r.items) for r in readers]
    gc.collect()
    assert set(threading.enumerate()) <= before


def is_busy(fetcher: TieredMessageFetcher) -> bool:
    """A request waits or runs; a hedge may outlast what it was for."""
    stats = fetcher.transfers.stats
    return stats.pending + stats.running > 0


def settled(fetcher: TieredMessageFetcher, store: Unlucky, world: World) -> None:
    """When nothing more is asked for, nothing is left on its way; and what is there can be read from end to end."""
    store.is_calm = True
    until_s = time.monotonic() + 5
    while (fetcher._stock._fetches or is_busy(fetcher)) and time.monotonic() < until_s:
        fetcher.tick()
        time.sleep(0.01)
    assert not fetcher._stock._fetches
    assert not fetcher._stock._waiting
    assert fetcher.stats().reserved_bytes == 0
    assert not is_busy(fetcher)
    fetcher.refresh()
    at, end = 0, view_of(fetcher).incarnation.commit_offset
    while (found := fetcher.read("last", QUEUE, QueueOffset(at), timeout_s=10)) is not None:
        if isinstance(found, Gap):
            at = found.end
            continue
        assert all(world.now[offset] == row for offset, row in rows(found).items())
        at = found.end_offset
    assert at == end


@pytest.mark.parametrize("seed", [1])
def test_i1_i3_i8_readers_get_the_truth_whatever_happens(seed: int):
    stress(seed, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_i1_i3_i8_for_longer(seed: int):
    stress(seed, 20.0)
