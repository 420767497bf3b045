"""Archive jobs on small tiers in memory, and stores that damage or count what a job reads."""

from __future__ import annotations

import contextlib
import io
import random
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from support.tiers import PLACE, QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.wrapping import WrappingStore
from tiered.archive.audit import verify_archive
from tiered.archive.job import JobContext, run_job
from tiered.archive.lookup import build
from tiered.archive.tables import read_archive
from tiered.clock import ManualClock
from tiered.model import MessageQueue
from tiered.upkeep.engine import first_failure, local_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from backends.base import ObjectStore
    from tiered.archive.audit import Report
    from tiered.archive.job import Result
    from tiered.archive.lookup import Built
    from tiered.upkeep.engine import Engine


def job_context(tier: ObjectStore, archive: ObjectStore | None = None, seed: int = 0) -> JobContext:
    store = MemoryStore("archive") if archive is None else archive
    return JobContext(tier, PLACE, store, store, ManualClock(), random.Random(seed))


def archive(at: JobContext, jobs: int = 1) -> Result:
    return run_job(at, local_engine(at.context, jobs))


def check(at: JobContext) -> Report:
    report = verify_archive(at, local_engine(at.context, 1))
    assert report.findings == []
    return report


def alone(archive: ObjectStore) -> Engine:
    """What does work that needs no tier, in one thread."""
    return local_engine(job_context(MemoryStore("tier"), archive).context, 1)


def as_engine(outcomes: Callable[[Any, Any], Iterable[Any]]) -> Engine:
    """An engine of what gives what some work came to."""

    @contextlib.contextmanager
    def engine(do: Any, works: Any) -> Iterator[Iterator[Any]]:
        yield iter(outcomes(do, works))

    return engine


def all_outcomes(at: JobContext, do: Any, works: Iterable[Any]) -> list[Any]:
    """What some work came to in one thread."""
    with local_engine(at.context, 1)(do, works) as outcomes:
        return list(outcomes)


def index(archive: ObjectStore) -> Built:
    """Make the index of keys cover all that is there."""
    built = build(archive, read_archive(archive), alone(archive))
    error = first_failure(built.failed)
    if error is not None:
        raise error
    return built


def keys(at: JobContext, prefix: str = "data/") -> list[str]:
    return [info.key for info in at.archive.list(prefix)]


def rows(at: JobContext, prefix: str = "data/") -> list[dict[str, Any]]:
    """Of all files that lie there, in order of key."""
    found = []
    for key in keys(at, prefix):
        found += pq.read_table(io.BytesIO(at.archive.get(key))).to_pylist()
    return found


def is_shared(key: str) -> bool:
    """Whether several row ranges lie in a file, by its key."""
    return key.rpartition("/")[2].count("-") == 1


def bodies(at: JobContext) -> dict[int, bytes]:
    return {row["queue_offset"]: row["body"] for row in rows(at)}


def with_other_messages_behind(tier: TierBuilder, *bodies: bytes) -> TierBuilder:
    """The broker truncates all but the first two messages; a new writer tiers others, each in a segment.

    Args:
        tier: Has more than two, of one queue.
        bodies: What comes in place of what was truncated.
    """
    tier.truncate(2)
    again = TierBuilder(tier.store, writer="0badbeef")
    for body in bodies:
        again.add([body], roll=True)
    return again


MIDNIGHT = 6_400_000
"""The queue offset whose message is stored at midnight, by ``batch_of``."""


def sealed_tier(*parts: Sequence[Any], queue: MessageQueue = QUEUE, first: int = 0) -> TierBuilder:
    """A tier whose one queue has a sealed segment of each part, and an open one."""
    tier = TierBuilder()
    for items in (*parts, [b"open"]):
        tier.add(items, queue=queue, first=first, roll=True)
    return tier


class Damaged(WrappingStore):
    """One object has a flipped bit."""

    def __init__(self, inner: MemoryStore, key: str) -> None:
        super().__init__(inner)
        self._key = key

    def get(self, key, byte_range=None):
        data = self._inner.get(key, byte_range)
        return bytes([data[0] ^ 1]) + data[1:] if key.endswith(self._key) else data

    def get_ranges(self, key, byte_ranges):
        return [self.get(key, one) for one in byte_ranges]


def small(*topics: str) -> JobContext:
    """Topics of two segments with a message each."""
    tier = TierBuilder()
    for topic in topics:
        for number in range(3):
            tier.add([f"{topic} {number}".encode()], queue=MessageQueue(topic, 0), roll=True)
    at = job_context(tier.store)
    archive(at)
    return at


class Counting(WrappingStore):
    """Counts requests of files."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.requests = 0
        self.size_bytes = 0

    def get(self, key, byte_range=None):
        data = self._inner.get(key, byte_range)
        if key.startswith("data/"):
            self.requests += 1
            self.size_bytes += len(data)
        return data

    def get_ranges(self, key, byte_ranges):
        found = self._inner.get_ranges(key, byte_ranges)
        self.requests += 1
        self.size_bytes += sum(map(len, found))
        return found
