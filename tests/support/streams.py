"""Streams of a tier: a tier to which everything happens, readers of it, and what Spark does with them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from support.archive_jobs import job_context
from support.journals import PREFIX
from support.tiers import QUEUE, TierBuilder

from backends.memory import MemoryStore
from backends.registry import open_store
from backends.s3_settings import S3Options
from tiered.api import broker_place
from tiered.archive.columns import schema
from tiered.archive.job import run_job
from tiered.archive.selection import Selection
from tiered.log.state import queue_action
from tiered.model import MessageQueue
from tiered.spark import options as tier_states
from tiered.spark.source import TierStreamReader
from tiered.upkeep.engine import local_engine

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from backends.base import ObjectStore


OTHER = MessageQueue("other", 0)


class Broker(TierBuilder):
    """A tier to which everything happens that can happen to one."""

    def expire(self, before: int, queue: MessageQueue = QUEUE, incarnation: int = -1) -> None:
        incarnations = self.journal.state.queues[queue]
        number = incarnation % len(incarnations)
        fields = {"position": number, "min_from": incarnations[number].min_offset, "min_to": before}
        self.say(queue_action("expire", queue, incarnations[number].number, **fields))


ORDERS = [MessageQueue("orders", number) for number in (0, 1)]


Row = tuple[int, int, bytes]


class Shop:
    """A tier in a folder, and its archive beside it."""

    def __init__(self, folder: Path, cluster: str = "c") -> None:
        self.url, self.archive = f"file://{folder}/tier", f"file://{folder}/parquet"
        self.stores = [open_store(url, S3Options()) for url in (self.url, self.archive)]
        self.tier = Broker(self.stores[0])
        self.truth: dict[tuple[int, int], bytes] = {}
        self.at = replace(job_context(*self.stores), place=broker_place.Place(cluster, "b"))

    def add(self, *bodies: bytes) -> None:
        """To each queue, as a segment of its own."""
        for queue in ORDERS:
            incarnation = self.tier.journal.state.incarnation(queue)
            first = int(incarnation.commit_offset) if incarnation else 0
            self.tier.add(bodies, queue=queue, roll=incarnation is not None)
            self.truth |= {(queue.queue_id, first + n): body for n, body in enumerate(bodies)}

    def run(self) -> None:
        """Archive what is sealed; queues share files."""
        run_job(self.at, local_engine(self.at.context, 1), small_bytes=1 << 20)

    def truncate(self, queue_id: int, end: int) -> None:
        self.tier.truncate(end, queue=ORDERS[queue_id])
        self.truth = {m: b for m, b in self.truth.items() if m[0] != queue_id or m[1] < end}

    def wanted(self) -> list[Row]:
        return sorted((*mark, body) for mark, body in self.truth.items())


EVERY = Selection()


class Place:
    """A tier in a folder, which grows, and readers of it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}/tier"
        self.store = open_store(self.url, S3Options())
        self.tier = Broker(self.store)
        self.archive = MemoryStore("archive")
        self.more: dict[str, str] = {}

    def in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin anew in memory, for tests of many steps; an archive is there, too."""
        self.tier = Broker(MemoryStore())

        def opened(options: Mapping[str, str]) -> ObjectStore:
            return self.archive if options["path"] == "archive" else self.tier.store

        monkeypatch.setattr(tier_states, "open_place", opened)

    def reader(self, wanted: Selection = EVERY, **options: str) -> TierStreamReader:
        named = {name.replace("_", "-"): text for name, text in options.items()}
        chosen = {"path": self.url, "cluster": "c", "broker": "b", **self.more, **named}
        return TierStreamReader(chosen, schema(), wanted)

    @contextmanager
    def stream(self, wanted: Selection = EVERY, **options: str) -> Iterator[TierStreamReader]:
        """A reader, as a query's process has it from its start to its end, or its death."""
        reader = self.reader(wanted, **options)
        try:
            yield reader
        finally:
            reader.stop()


class Spark:
    """What Spark does with a stream: ends of batches and which are done outlive it, all else dies with a process.

    Attributes:
        offsets: Ends of batches, in the checkpoint.
        done: How many batches are.
        sink: Rows by batch; a batch that is done again takes the place of what it had written.
        is_compacted: Rows may go between two looks.
        is_untold: A process died that had left something out, and no plan of its own had come after.
    """

    def __init__(
        self, place: Place, rng: random.Random, events: Callable[[], None], rule: str = "skip"
    ) -> None:
        self.place, self.rng, self.events, self.rule = place, rng, events, rule
        self.offsets: list[Any] = []
        self.done = 0
        self.sink: dict[int, list[tuple[Any, ...]]] = {}
        self.is_untold = self.is_compacted = False

    def dies(self, chance: float) -> bool:
        return self.rng.random() < chance

    def run(self, crash: float) -> None:
        """From a start to a death, or until nothing is left to do."""
        with self.place.stream(on_gap=self.rule) as reader:
            if self.rng.random() < 0.5:
                reader.prepareForTriggerAvailableNow()
            start = json.loads(json.dumps(reader.initialOffset()))
            while True:
                if self.done == len(self.offsets):
                    before = self.offsets[-1] if self.offsets else start
                    limit = ReadMaxRows(self.rng.randrange(1, 9))
                    end = json.loads(json.dumps(reader.latestOffset(before, limit)))
                    if self.offsets and end == before:
                        return
                    if self.dies(crash):
                        self.is_untold |= has_left_out(reader)
                        return
                    self.offsets.append(end)
                self.events()
                if self.dies(crash) or not self.batch(reader, crash):
                    return
                self.events()

    def batch(self, reader: TierStreamReader, crash: float) -> bool:
        before = self.offsets[-2] if len(self.offsets) > 1 else {}
        rows = rows_of(reader, before, self.offsets[-1])
        self.events()
        again = rows_of(reader, before, self.offsets[-1])
        assert again == rows or self.is_compacted, "asked again"
        if self.dies(crash):
            return False
        self.sink[len(self.offsets)] = rows
        if self.dies(crash):
            return False
        self.done += 1
        if self.dies(crash):
            self.is_untold |= has_left_out(reader)
            return False
        return True


def has_left_out(reader: TierStreamReader) -> bool:
    """Whether the batch that a process began last had less than was planned."""
    return reader._planned is not None and bool(reader._planned.short)


def rows_of(reader: TierStreamReader, start: Any, end: Any) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for partition in reader.partitions(start, end)
        for rows in reader.read(partition)
        for row in rows.select(["topic", "incarnation", "queue_offset"]).to_pylist()
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(broker_place, "broker_prefix", lambda _cluster, _broker: PREFIX)
    made = Place(tmp_path)
    yield made
    made.store.close()
