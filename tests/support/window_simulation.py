"""The read-ahead window under readers of all kinds: a simulation of discrete events, with nothing random but its seed.

The window, the cutting into chunks and the cache are the real ones (``fetcher.window``, ``fetcher.runs``). Around them
are a store with a latency and a line of a given width that all requests share, and readers that read, pause and leap
as their kind does. ``support.window_picture`` draws the curves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from fetcher.limits import WindowLimits  # noqa: TC001
from fetcher.runs import ByteCache, Cached, LruList
from fetcher.window import grown, halved, plan_chunks, wants_more

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 256 * KIB
CHUNK = 4 * MIB
GAP = 256 * KIB
BATCH = MIB

Step = tuple[str, float]
"""("read", bytes), ("pause", seconds) or ("leap", 0): on to another place."""


@dataclass(frozen=True)
class Line:
    """A store: each request takes ``latency_s``, and all share ``bytes_per_s``."""

    latency_s: float = 0.02
    bytes_per_s: float = 200.0 * MIB
    slots: int = 16


@dataclass(frozen=True)
class Policy:
    """What the fetcher does around its window.

    Attributes:
        begins_small: After a leap only the request that is waited for is as large as the reader's batch, and the window
            begins at its minimum; else at the batch, if that is larger.
        drops_left: What a reader has left behind unread is dropped at its leap; else it waits for its end, which
            then halves the window at the new place.
        grows_hungry: The window grows only when less than a batch is here and unread, so that it was too small; else
            with every batch in order.
    """

    begins_small: bool = True
    drops_left: bool = True
    grows_hungry: bool = False


AS_IT_IS = Policy()
"""That of ``fetcher.window``."""


@dataclass
class Chunk:
    """What one request brings."""

    reader: Reader
    start: int
    end: int


@dataclass
class Reader:
    """One reader, its window and what has been counted.

    Attributes:
        steps: What it does.
        curve: (seconds, window, unread, delivered) at every change.
    """

    name: str
    steps: Iterator[Step]
    log_bytes: int = 1 << 50
    place: int = 0
    next_place: int = -1
    arrived: int = -1
    window: int = 0
    asked: int = 0
    unread: int = 0
    delivered: int = 0
    fetched: int = 0
    requests: int = 0
    leaps: int = 0
    paused_s: float = 0.0
    pause_ends_s: float = 0.0
    ended_s: float = -1.0
    here: list[Cached[Chunk]] = field(default_factory=list)
    curve: list[tuple[float, int, int, int]] = field(default_factory=list)


class Simulation:
    """Readers, each with a log of its own, one cache and one line."""

    def __init__(
        self,
        limits: WindowLimits,
        line: Line,
        *,
        cache_bytes: int = 256 * MIB,
        unread_s: float = 180.0,
        read_s: float = 10.0,
        policy: Policy = AS_IT_IS,
    ) -> None:
        """Prepare one.

        Args:
            limits: Of every reader's window.
            line: The store.
            cache_bytes: Budget of the cache.
            unread_s: How long unread data is kept.
            read_s: How long data that was read is kept.
            policy: What is done around the window.
        """
        self.limits, self.line, self.policy = limits, line, policy
        self.now_s = 0.0
        self.readers: list[Reader] = []
        self.cache: ByteCache[Chunk] = ByteCache(
            cache_bytes, {LruList.UNREAD: unread_s, LruList.READ: read_s, LruList.INDEX: read_s}
        )
        self.held_max = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._loads: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._starved: list[Callable[[], None]] = []
        self._slots = [0.0] * line.slots
        self._line_free_s = 0.0

    def add(self, reader: Reader, at_s: float = 0.0) -> None:
        self.readers.append(reader)
        self._at(at_s, lambda: self._go_on(reader))

    def run(self, until_s: float) -> None:
        """Until nothing happens any more, or so late."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heappop(self._events)
            for entry in self.cache.expire(self.now_s):
                self._lose(entry)
            do()
            held = self.cache.held_bytes + self.cache.reserved_bytes
            self.held_max = max(self.held_max, held)

    def _at(self, moment_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (moment_s, self._count, do))

    # Readers

    def _go_on(self, reader: Reader) -> None:
        what, much = next(reader.steps, ("end", 0.0))
        match what:
            case "read":
                self._read(reader, int(much))
            case "pause":
                reader.paused_s += much
                reader.pause_ends_s = self.now_s + much
                for share in range(1, 21):  # so that the curve shows what expires meanwhile
                    self._at(self.now_s + much * share / 21, lambda: self._note(reader))
                self._at(self.now_s + much, lambda: self._go_on(reader))
            case "leap":
                reader.leaps += 1
                reader.place += 1 << 36
                self._go_on(reader)
            case _:
                reader.ended_s = self.now_s

    def _read(self, reader: Reader, size: int) -> None:
        """Read until ``size`` bytes have been delivered, by batches."""
        if reader.place >= reader.log_bytes:
            reader.ended_s = self.now_s
            return
        if reader.place not in {reader.next_place, reader.arrived}:
            reader.arrived = reader.place
            first = 0 if self.policy.begins_small else min(size, self.limits.bytes_max)
            reader.window = max(self.limits.bytes_min, first)
            reader.asked, reader.next_place = 0, -1
            if self.policy.drops_left:
                self._drop_left(reader)
        key = id(reader), reader.place // BLOCK
        entry = self.cache.get(key)
        if entry is not None:
            self._deliver(reader, entry, size)
            return
        if key not in self._loads:
            wanted = size + reader.place % BLOCK if self.policy.begins_small else 0
            self._claim(reader, max(self._window(reader), wanted))
        waiting = self._loads.get(key, self._starved)
        waiting.append(lambda: self._read(reader, size))

    def _deliver(self, reader: Reader, entry: Cached[Chunk], size: int) -> None:
        given = min(size, entry.value.end - reader.place)
        if entry.lru_list is LruList.UNREAD:
            reader.unread -= entry.size_bytes
        self.cache.use(entry, self.now_s)
        is_hungry = reader.unread <= given or not self.policy.grows_hungry
        if reader.place == reader.next_place and is_hungry:
            reader.window = grown(reader.window, given, self.limits)
        reader.place += given
        reader.next_place = reader.place
        reader.delivered += given
        window = self._window(reader)
        more = wants_more(window, reader.asked - reader.place, self.limits)
        if more and reader.asked < reader.log_bytes:
            self._claim(reader, window)
        self._note(reader)
        if size > given:
            self._read(reader, size - given)
        else:
            self._at(self.now_s, lambda: self._go_on(reader))

    def _window(self, reader: Reader) -> int:
        share = self.cache.bytes_max // (2 * len(self.readers))
        return max(min(reader.window, share), 1)

    def _note(self, reader: Reader) -> None:
        reader.curve.append((self.now_s, reader.window, reader.unread, reader.delivered))

    # Requests

    def _claim(self, reader: Reader, window: int) -> None:
        first = reader.place // BLOCK
        end = min(first * BLOCK + window, reader.log_bytes)
        last = max(first + 1, -(-end // BLOCK))
        keys = [(id(reader), block) for block in range(first, last)]
        known = [key in self._loads or self.cache.get(key) is not None for key in keys]
        sizes = [min(BLOCK, reader.log_bytes - block * BLOCK) for _, block in keys]
        reader.asked = first * BLOCK + sum(sizes)
        for found in plan_chunks(sizes, known, chunk_bytes=CHUNK, gap_bytes=GAP):
            start = (first + found.start) * BLOCK
            size = sum(sizes[found.start : found.stop])
            has_room, dropped = self.cache.reserve(size)
            for entry in dropped:
                self._lose(entry)
            if not has_room:
                reader.asked = min(reader.asked, start)
                break
            self._send(Chunk(reader, start, start + size), keys[found.start : found.stop])

    def _send(self, chunk: Chunk, keys: list[tuple[int, int]]) -> None:
        size = chunk.end - chunk.start
        chunk.reader.fetched += size
        chunk.reader.requests += 1
        begin_s = max(self.now_s, heappop(self._slots)) + self.line.latency_s
        done_s = max(begin_s, self._line_free_s) + size / self.line.bytes_per_s
        self._line_free_s = done_s
        heappush(self._slots, done_s)
        for key in keys:
            self._loads[key] = []
        self._at(done_s, lambda: self._arrive(chunk, keys))

    def _arrive(self, chunk: Chunk, keys: list[tuple[int, int]]) -> None:
        size = chunk.end - chunk.start
        self.cache.release(size)
        entry = Cached(chunk, keys, size, owner=chunk.reader)
        self.cache.put(entry, self.now_s)
        chunk.reader.here = [one for one in chunk.reader.here if one.is_here] + [entry]
        chunk.reader.unread += size
        waiting = [do for key in keys for do in self._loads.pop(key)]
        starved, self._starved = self._starved, []
        for do in waiting + starved:
            do()

    def _drop_left(self, reader: Reader) -> None:
        for entry in reader.here:
            if entry.is_here and entry.lru_list is LruList.UNREAD:
                reader.unread -= entry.size_bytes
                self.cache.drop(entry)
        reader.here.clear()

    def _lose(self, entry: Cached[Chunk]) -> None:
        reader = entry.value.reader
        reader.unread -= entry.size_bytes
        reader.window = halved(reader.window, self.limits)
        reader.asked = min(reader.asked, entry.value.start)
        self._note(reader)


def fast() -> Iterator[Step]:
    """Reads on as fast as it can."""
    while True:
        yield "read", BATCH
        yield "pause", BATCH / (1000 * MIB)


def slow() -> Iterator[Step]:
    """5 MiB/s."""
    while True:
        yield "read", BATCH
        yield "pause", BATCH / (5 * MIB)


def stalling() -> Iterator[Step]:
    """100 MiB/s for two seconds; then nothing, for longer than unread data is kept."""
    while True:
        for _ in range(200):
            yield "read", BATCH
            yield "pause", BATCH / (100 * MIB)
        yield "pause", 8.0


def bursty() -> Iterator[Step]:
    """48 MiB at once, every 3 seconds."""
    while True:
        for _ in range(48):
            yield "read", BATCH
        yield "pause", 3.0


def seeking(seed: int = 7) -> Iterator[Step]:
    """1 to 16 MiB here, then somewhere else."""
    rng = random.Random(seed)
    while True:
        for _ in range(rng.randint(1, 16)):
            yield "read", BATCH
            yield "pause", BATCH / (1000 * MIB)
        yield "leap", 0


KINDS: dict[str, Callable[[], Iterator[Step]]] = {
    kind.__name__: kind for kind in (fast, slow, stalling, bursty, seeking)
}


@dataclass(frozen=True)
class Figures:
    """What one reader got.

    Attributes:
        share: Of what the line and its own pauses allow at best, with one latency for each leap.
        over_fetch: Bytes fetched for each that was delivered.
    """

    share: float
    over_fetch: float


def figures_of(reader: Reader, line: Line, seconds: float) -> Figures:
    paused_s = reader.paused_s - max(0.0, reader.pause_ends_s - seconds)
    best_s = max(reader.delivered / line.bytes_per_s, paused_s)
    best_s += (reader.leaps + 1) * line.latency_s  # nobody can read ahead of a leap
    return Figures(best_s / seconds, reader.fetched / max(reader.delivered, 1))


def simulate(
    kind: str,
    limits: WindowLimits,
    line: Line,
    *,
    seconds: float = 30.0,
    unread_s: float = 5.0,
    policy: Policy = AS_IT_IS,
) -> Reader:
    """One reader alone; unread data expires after some seconds, which pictures need to be few."""
    simulation = Simulation(limits, line, unread_s=unread_s, read_s=5.0, policy=policy)
    reader = Reader(kind, KINDS[kind]())
    simulation.add(reader)
    simulation.run(seconds)
    return reader


def stop_at_random(
    limits: WindowLimits,
    line: Line,
    *,
    mean_bytes: float,
    policy: Policy = AS_IT_IS,
    readers: int = 200,
    seed: int = 11,
) -> float:
    """Over-fetch of readers that begin anywhere and stop after any batch, with the same chance each time."""
    rng = random.Random(seed)
    fetched = delivered = 0
    for _ in range(readers):
        batches = 1 + int(rng.expovariate(BATCH / mean_bytes))
        steps = iter([("read", float(BATCH))] * batches)
        reader = Reader("stops", steps, place=rng.randrange(64 * MIB))
        simulation = Simulation(limits, line, policy=policy)
        simulation.add(reader)
        simulation.run(1e9)
        fetched += reader.fetched
        delivered += reader.delivered
    return fetched / delivered


def to_the_end(
    limits: WindowLimits,
    line: Line,
    *,
    log_bytes: int = 512 * MIB + 12345,
    policy: Policy = AS_IT_IS,
) -> Reader:
    """A reader that goes through a whole log as fast as it can."""
    simulation = Simulation(limits, line, policy=policy)
    reader = Reader("whole", fast(), log_bytes)
    simulation.add(reader)
    simulation.run(1e9)
    return reader


def crowd(limits: WindowLimits, line: Line, *, count: int, cache_bytes: int) -> Simulation:
    """Fast readers that share a cache, one ten times slower among them, for 20 seconds."""
    simulation = Simulation(limits, line, cache_bytes=cache_bytes)
    for number in range(count):
        kind = slow if number == 0 else fast
        simulation.add(Reader(f"{kind.__name__} {number}", kind()), at_s=number * 0.01)
    simulation.run(20.0)
    return simulation
