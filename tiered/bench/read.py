"""Measures reading through the fetcher, beside plain concurrent ranged GETs of the same bytes in the same minute.

Both sides go through one ``SlowStore``, with as many requests under way at once, and do nothing with the bytes but count;
the plain side does not check them either. How the readers behave is in ``tiered.bench.patterns``.
"""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import TYPE_CHECKING, Any

from backends.base import ByteRange
from backends.lazy_dataclass import dataclass
from fetcher.limits import FetchSettings, TransferLimits
from tiered.api.open_tier import OpenTier
from tiered.bench.dispatch import Cost, Measured, Stopwatch, peak_rss_bytes
from tiered.bench.patterns import PATTERNS, PatternRun, ReadLoad, Slowness, SlowStore, percentile
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiered.clock import Clock
    from tiered.log.parts import Part
    from tiered.model import MessageQueue

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
