"""Measures reading through the fetcher, beside plain concurrent ranged GETs of the same bytes in the same minute.

Both sides go through one ``SlowStore``, with as many requests under way at once, and do nothing with the bytes but count;
the plain side does not check them either.
"""

from __future__ import annotations

import random
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from backends.base import ByteRange, get_into
from backends.lazy_dataclass import dataclass
from backends.wrapping import WrappingStore
from fetcher.limits import FetchSettings, TransferLimits
from tiered.api.open_tier import OpenTier
from tiered.api.tier import Tier
from tiered.bench.dispatch import Cost, Measured, Stopwatch, peak_rss_bytes
from tiered.errors import InvalidError
from tiered.format.properties import split_keys
from tiered.log.parts import Gap
from tiered.log.reader import end_of
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.clock import Clock
    from tiered.log.cursor import QueueCursor
    from tiered.log.decode import TierBatch
    from tiered.log.parts import Part
    from tiered.model import MessageQueue, QueueBounds


# --------------------------------------------------------------------------------------------------
# How readers behave while reading is measured.
#
# =========== =============================================================================================================
# pattern     readers
# =========== =============================================================================================================
# sequential  each group reads every queue once, a client's batch at a time, and says that it will read all of them; threads
#             share the queues, taking turns in them
# groups      each group in a thread of its own reads one queue round and round for a time, all begun at different places
# seeks       reads of one batch each at random places
# stops       one reader after another, with nothing cached, begins somewhere and stops somewhere
# keys        lookups by key: keys of messages that are there, and, every other time, one that is not
# times       lookups of the queue offset of a random time
# =========== =============================================================================================================
# --------------------------------------------------------------------------------------------------


# -- slow store ---------------------------------------------------------------------------------------
#
# A store made slow on purpose, for measuring: latency, bandwidth and stalls are added to each read of another store.


@dataclass(frozen=True, slots=True)
class Slowness:
    """What is added to each request that reads."""

    latency_ms: float = 0.0  # before it is made
    mib_per_s: float | None = None
    """Bandwidth of each request by itself: so many MiB come in a second; None: no limit."""
    stall_percent: float = 0.0  # of the requests, chosen at random, so many
    stall_ms: float = 1000.0  # are held up by so much more

    def __post_init__(self) -> None:
        slow = self.latency_ms >= 0 and self.stall_ms >= 0 and 0 <= self.stall_percent <= 100  # noqa: PLR2004
        if not slow or (self.mib_per_s is not None and self.mib_per_s <= 0):
            raise InvalidError("a latency, bandwidth or stall out of range")


class SlowStore(WrappingStore):
    """Waits as told, and counts. For any thread."""

    def __init__(
        self, inner: ObjectStore, slowness: Slowness, clock: Clock, rng: random.Random
    ) -> None:
        """Wrap a store; ``rng`` chooses the stalls."""
        super().__init__(inner)
        self.is_on = False  # whether it waits
        self.requests = 0  # reads of objects
        self.size_bytes = 0  # what they gave
        self._slowness = slowness
        self._clock = clock
        self._rng = rng
        self._lock = threading.Lock()
        self._never = threading.Event()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._before()
        data = super().get(key, byte_range)
        self._behind(len(data))
        return data

    def get_into(self, key: str, byte_range: ByteRange, target: memoryview) -> None:
        self._before()
        get_into(self._inner, key, byte_range, target)
        self._behind(len(target))

    def get_ranges(self, key: str, byte_ranges: Sequence[ByteRange]) -> list[bytes]:
        self._before()
        found = super().get_ranges(key, byte_ranges)
        self._behind(sum(map(len, found)))
        return found

    def close(self) -> None:
        """Nothing: the store below is the caller's."""

    def _before(self) -> None:
        slow = self._slowness
        with self._lock:
            self.requests += 1
            stalls = slow.stall_percent > 0 and self._rng.random() * 100 < slow.stall_percent
        self._wait((slow.latency_ms + stalls * slow.stall_ms) / 1000)

    def _behind(self, size_bytes: int) -> None:
        with self._lock:
            self.size_bytes += size_bytes
        if self._slowness.mib_per_s is not None:
            self._wait(size_bytes / (self._slowness.mib_per_s * (1 << 20)))

    def _wait(self, seconds: float) -> None:
        if self.is_on and seconds > 0:
            self._clock.wait(self._never, seconds)


# -- patterns --------------------------------------------------------------------------------


T = TypeVar("T")
BATCH_BYTES = 1 << 20
SAMPLE_EVERY = 64
"""Reads of a thread between two looks at the fetcher's memory."""


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """What readers do."""

    pattern: str = "sequential"  # see the module
    groups: int = 1  # readers (``sequential``, ``groups``)
    queues: int | None = None  # only the first so many; None: all
    threads: int = 1  # that read (``sequential``, ``seeks``)
    count: int = 32  # messages that a client wants at once
    reads: int = 200  # how many (``seeks``, ``stops``, ``keys``, ``times``)
    seconds: float = 5.0  # how long (``groups``)
    seed: int = 1  # of what is random

    @property
    def is_whole(self) -> bool:
        """Queues are read as a whole, rather than here and there."""
        return self.pattern in {"sequential", "groups"}


@dataclass
class PatternRun:
    """One measurement under way. Threads add to it by ``add``."""

    open_tier: Callable[[], OpenTier]  # gives a tier with nothing cached
    slow: SlowStore  # the store below all of them
    queues: list[MessageQueue]  # to read
    load: ReadLoad  # what to do
    clock: Clock  # time
    messages: int = 0  # delivered
    size_bytes: int = 0  # of their records
    seconds: array[float] = field(default_factory=lambda: array("d"))  # how long each read took
    group_bytes: list[int] = field(default_factory=list)  # what each group was given (``groups``)
    lookups: dict[str, list[int]] = field(default_factory=dict)
    """Requests of each lookup, by what it was: hit, miss or time (``keys``, ``times``)."""
    requests: int = 0  # made for data while reading
    fetched_bytes: int = 0  # what they gave, and what was under way when a reader stopped
    hedges: int = 0  # second requests
    hedge_wins: int = 0  # of these, so many were first
    cache_bytes_max: int = 0  # most memory that a fetcher counted, sampled
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _before: tuple[int, int] = (0, 0)
    _tier: OpenTier | None = None

    @property
    def tier(self) -> OpenTier:
        """The tier under measurement."""
        if self._tier is None:
            self._tier = self.open_tier()
            self._before = (self.slow.requests, self.slow.size_bytes)
        return self._tier

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        """Of a queue."""
        return self.tier.bounds(queue.topic, queue.queue_id)

    def add(self, seen: Seen) -> None:
        """What a thread has seen."""
        with self._lock:
            self.messages += seen.messages
            self.size_bytes += seen.size_bytes
            self.seconds.extend(seen.seconds)
            self.cache_bytes_max = max(self.cache_bytes_max, seen.cache_bytes_max)

    def close(self) -> None:
        """Take the counters, and forget the tier with what it has cached."""
        tier, self._tier = self._tier, None
        if tier is None:
            return
        stats = tier.fetcher.transfers.stats
        self.hedges += stats.hedges
        self.hedge_wins += stats.hedge_wins
        self.fetched_bytes += self.slow.size_bytes - self._before[1] + stats.running_bytes
        self.requests += self.slow.requests - self._before[0]
        tier.close()


@dataclass
class Seen:
    """What one thread has seen; see ``PatternRun``."""

    messages: int = 0
    size_bytes: int = 0
    seconds: array[float] = field(default_factory=lambda: array("d"))
    cache_bytes_max: int = 0

    def read(  # noqa: PLR0917 (as short as can be, in tight loops)
        self,
        run: PatternRun,
        group: str,
        cursor: QueueCursor,
        at: QueueOffset,
        count: int,
        until: QueueOffset | None = None,
    ) -> TierBatch | Gap | None:
        """One read of a client, which may say up to where it will read."""
        tier, clock = run.tier, run.clock
        begin_s = clock.monotonic_s()
        found = tier.fetch(group, cursor, at, bytes_max=BATCH_BYTES, count_max=count, until=until)
        self.seconds.append(clock.monotonic_s() - begin_s)
        if found is not None and not isinstance(found, Gap):
            self.messages += found.records.count
            self.size_bytes += memoryview(found.records.data).nbytes
        if len(self.seconds) % SAMPLE_EVERY == 1:
            stats = tier.fetcher.stats()
            self.cache_bytes_max = max(
                self.cache_bytes_max, stats.cached_bytes + stats.reserved_bytes
            )
        return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that so many of ascending values do not exceed; 0 without any."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def _sequential(run: PatternRun) -> None:
    load = run.load

    def work(group: str, queues: list[MessageQueue]) -> None:
        seen, cursors = Seen(), [run.tier.reader.cursor(queue) for queue in queues]
        at = {cursor: cursor.low for cursor in cursors}
        while at:
            for cursor in list(at):
                found = seen.read(run, group, cursor, at[cursor], load.count, cursor.end)
                if found is None:
                    del at[cursor]
                else:
                    at[cursor] = end_of(found)
        run.add(seen)

    for number in range(load.groups):
        cursors = [run.tier.reader.cursor(queue) for queue in run.queues]
        whole = [(cursor, cursor.low, cursor.end) for cursor in cursors]
        run.tier.expect(f"g{number}", whole)
    shares = [run.queues[n :: load.threads] for n in range(load.threads)]
    jobs = [(f"g{g}", share) for g in range(load.groups) for share in shares if share]
    _all(work, jobs)


def _groups(run: PatternRun) -> None:
    load = run.load
    end_s = run.clock.monotonic_s() + load.seconds
    turns = -(-load.groups // len(run.queues))

    def work(number: int) -> None:
        seen, queue = Seen(), run.queues[number % len(run.queues)]
        cursor = run.tier.reader.cursor(queue)
        low, high = cursor.low, cursor.end
        at = QueueOffset(low + (high - low) * (number // len(run.queues)) // turns)
        while run.clock.monotonic_s() < end_s:
            found = seen.read(run, f"g{number}", cursor, at, load.count)
            at = low if found is None else end_of(found)
        run.add(seen)
        run.group_bytes.append(seen.size_bytes)

    _all(work, [(number,) for number in range(load.groups)])


def _all(work: Callable[..., None], jobs: Sequence[tuple[object, ...]]) -> None:
    """Every job in a thread of its own."""
    with ThreadPoolExecutor(len(jobs), "tiered-bench") as pool:
        for done in [pool.submit(work, *job) for job in jobs]:
            done.result()


def _places(run: PatternRun, seed: int) -> Iterator[tuple[MessageQueue, QueueOffset, QueueOffset]]:
    """Places at random, and the end of their queue."""
    rng = random.Random(seed)  # noqa: S311 (a workload)
    while True:
        queue = rng.choice(run.queues)
        bounds = run.bounds(queue)
        yield queue, QueueOffset(rng.randrange(bounds.min, bounds.end)), bounds.end


def _seeks(run: PatternRun) -> None:
    load = run.load

    def work(number: int) -> None:
        seen, places = Seen(), _places(run, load.seed + number)
        for _ in range(load.reads // load.threads):
            queue, at, _ = next(places)
            seen.read(run, f"g{number}", run.tier.reader.cursor(queue), at, load.count)
        run.add(seen)

    _all(work, [(number,) for number in range(load.threads)])


def _stops(run: PatternRun) -> None:
    load, rng = run.load, random.Random(run.load.seed)  # noqa: S311
    places = _places(run, load.seed)
    for _ in range(load.reads):
        queue, at, end = next(places)
        stop, seen, cursor = rng.randint(at + 1, end), Seen(), run.tier.reader.cursor(queue)
        while at < stop:
            found = seen.read(run, "g", cursor, at, min(load.count, stop - at))
            if found is None:
                break
            at = end_of(found)
        run.add(seen)
        run.close()


def _lookup(run: PatternRun, seen: Seen, kind: str, work: Callable[[], T]) -> T:
    """Do it, and note its time and requests; nobody else may be reading."""
    begin_s, requests = run.clock.monotonic_s(), run.slow.requests
    found = work()
    seen.seconds.append(run.clock.monotonic_s() - begin_s)
    run.lookups.setdefault(kind, []).append(run.slow.requests - requests)
    return found


def _keys(run: PatternRun) -> None:
    """Half of the lookups miss. Filters are in memory already."""
    keys, seen = list(_some_keys(run)), Seen()
    run.close()
    tier = Tier(run.tier)
    tier.query(keys[0][0], "a key that no message has", count=1)
    for number in range(run.load.reads):
        topic, key = keys[number // 2 % len(keys)]
        kind, wanted = ("hit", key) if number % 2 == 0 else ("miss", f"{key} is not there")
        found = _lookup(run, seen, kind, partial(tier.query, topic, wanted, count=1))
        seen.messages += len(found)
        seen.size_bytes += sum(message.size for message in found)
    run.add(seen)


def _some_keys(run: PatternRun) -> Iterator[tuple[str, str]]:
    places = _places(run, run.load.seed)
    for _ in range(max(run.load.reads // 2, 1)):
        queue, at, _ = next(places)
        for message in Tier(run.tier).read(queue.topic, queue.queue_id, at, at + 1):
            for key in split_keys(message.keys)[:1] or [message.msg_id]:
                yield queue.topic, key


def _times(run: PatternRun) -> None:
    rng, seen, tier = random.Random(run.load.seed), Seen(), run.tier  # noqa: S311
    for _ in range(run.load.reads):
        queue = rng.choice(run.queues)
        incarnation = tier.state.incarnation(queue)
        assert incarnation is not None
        parts = [part for part in incarnation.parts() if part.store_max_ms >= 0]
        low, high = parts[0].store_min_ms, max(part.store_max_ms for part in parts)
        work = partial(Tier(tier).offset_for_time, *queue, rng.randint(low, high))
        _lookup(run, seen, "time", work)
    run.add(seen)


PATTERNS: dict[str, Callable[[PatternRun], None]] = {
    "sequential": _sequential,
    "groups": _groups,
    "seeks": _seeks,
    "stops": _stops,
    "keys": _keys,
    "times": _times,
}


# -- the measurement ---------------------------------------------------------------------------------


MIB = 1 << 20
GET_BYTES = 4 * MIB
"""Of each plain GET; as large as the fetcher's own."""
SINGLE_BYTES = 256 * 1024
"""Of a plain GET beside reads at random places."""


@dataclass(frozen=True, slots=True)
class ReadBench:
    """What is measured."""

    load: ReadLoad = field(default_factory=ReadLoad)  # what readers do
    slowness: Slowness = field(default_factory=Slowness)  # of the store
    memory_bytes: int = 256 * MIB  # of the fetcher
    requests: int = 16  # under way at once, on both sides


def bench_read(
    tier: OpenTier, queues: list[MessageQueue], bench: ReadBench, clock: Clock
) -> Measured:
    """Read as told, and fetch the same objects plainly, first."""
    load = bench.load
    if load.pattern not in PATTERNS:
        raise InvalidError(
            f"no pattern {load.pattern!r}", do=f"choose from {', '.join(sorted(PATTERNS))}"
        )
    queues = [queue for queue in queues if _holds_any(tier, queue)][: load.queues]
    if not queues:
        raise InvalidError("there is nothing to read", where=tier.store.url)
    rng = random.Random(load.seed)  # noqa: S311 (a workload)
    plain_slowness = Slowness(bench.slowness.latency_ms, bench.slowness.mib_per_s)
    plain = SlowStore(tier.store, plain_slowness, clock, rng)
    plain_bytes, copied = _plain(tier, plain, queues, bench, clock)
    slow = SlowStore(tier.store, bench.slowness, clock, random.Random(load.seed))  # noqa: S311
    run = PatternRun(lambda: _open(tier, slow, bench, clock), slow, queues, load, clock)
    assert run.tier is not None  # opened
    watch = Stopwatch(clock)
    PATTERNS[load.pattern](run)
    cost = watch.read()
    run.close()
    scale = run.size_bytes / max(plain_bytes, 1)
    same = Cost(copied.seconds * scale, copied.cpu_seconds * scale)
    more = _more(run, bench)
    return Measured(
        "read", run.messages, run.size_bytes, cost, run.requests, same, peak_rss_bytes(), more
    )


def _holds_any(tier: OpenTier, queue: MessageQueue) -> bool:
    bounds = tier.bounds(queue.topic, queue.queue_id)
    return bounds.end > bounds.min


def _open(tier: OpenTier, slow: SlowStore, bench: ReadBench, clock: Clock) -> OpenTier:
    """A tier with nothing cached, over the slow store; the journal is replayed at full speed."""
    transfers = TransferLimits(requests_in_flight_max=bench.requests)
    settings = FetchSettings.of_memory(bench.memory_bytes, transfers)
    slow.is_on = False
    fresh = OpenTier(slow, tier.meter, tier.place, clock=clock, settings=settings)
    fresh.refresh()
    slow.is_on = True
    return fresh


def _plain(
    tier: OpenTier, slow: SlowStore, queues: list[MessageQueue], bench: ReadBench, clock: Clock
) -> tuple[int, Cost]:
    """Ranged GETs and nothing else: how many bytes of records and items, and what they took; of packed ones less is read."""
    jobs = list(_ranges(tier, queues))
    at_once = bench.requests
    if not bench.load.is_whole:
        rng = random.Random(bench.load.seed)  # noqa: S311
        jobs = [
            (key, ByteRange(r.start, min(r.end, r.start + SINGLE_BYTES)))
            for key, r in rng.choices(jobs, k=min(len(jobs), bench.load.reads))
        ]
        at_once = max(bench.load.threads, 1)
    slow.is_on = True
    with ThreadPoolExecutor(at_once) as pool:
        watch = Stopwatch(clock)
        size_bytes = sum(pool.map(lambda job: len(slow.get(*job)), jobs))
        cost = watch.read()
    parts = list(_parts(tier, queues))
    stored_bytes = sum(part.stored_bytes for part in parts)
    plain_bytes = sum(part.log_bytes + part.index.size_bytes for part in parts)
    return size_bytes * plain_bytes // max(stored_bytes, 1), cost


def _ranges(tier: OpenTier, queues: list[MessageQueue]) -> Iterable[tuple[str, ByteRange]]:
    """The sections of the queues' present incarnations, neighbours together, in chunks."""
    sections = {
        (part.bundle.key, part.section.start, part.section.start + part.section.size_bytes)
        for part in _parts(tier, queues)
    }
    united: list[tuple[str, int, int]] = []
    for key, start, end in sorted(sections):
        is_next = united and united[-1][::2] == (key, start)
        united.append((key, united.pop()[1] if is_next else start, end))
    for key, start, end in united:
        for low in range(start, end, GET_BYTES):
            yield tier.place.prefix + key, ByteRange(low, min(low + GET_BYTES, end))


def _parts(tier: OpenTier, queues: list[MessageQueue]) -> Iterable[Part]:
    for queue in queues:
        incarnation = tier.state.incarnation(queue)
        assert incarnation is not None
        yield from incarnation.parts()


def _more(run: PatternRun, bench: ReadBench) -> dict[str, Any]:
    load, slow = bench.load, bench.slowness
    times = array("d", sorted(run.seconds))
    rates = run.group_bytes
    return {
        **{name: getattr(load, name) for name in ("pattern", "groups", "threads")},
        **{name: getattr(slow, name) for name in ("latency_ms", "stall_percent", "stall_ms")},
        "queues": len(run.queues),
        "batch": load.count,
        "connection_mib_per_second": slow.mib_per_s,
        "memory_bytes": bench.memory_bytes,
        "requests_at_once": bench.requests,
        "reads": len(times),
        "read_p50_ms": round(percentile(times, 0.5) * 1000, 3),
        "read_p99_ms": round(percentile(times, 0.99) * 1000, 3),
        "read_max_ms": round(percentile(times, 1.0) * 1000, 3),
        "fetched_bytes": run.fetched_bytes,
        "overfetch": round(run.fetched_bytes / max(run.size_bytes, 1), 4),
        "hedges": run.hedges,
        "hedge_wins": run.hedge_wins,
        "requests_per_read": round(run.requests / max(len(times), 1), 3),
        "lookup_requests": {
            kind: {"mean": round(sum(counts) / len(counts), 3), "max": max(counts)}
            for kind, counts in run.lookups.items()
        },
        "cache_bytes_max": run.cache_bytes_max,
        "slowest_group_ratio": round(min(rates) * len(rates) / max(sum(rates), 1), 3)
        if rates
        else None,
    }
